"""Plans as the router would send them, executed by the worker's own loop.

A decode never needs its input token from the router, so all plans of a measurement are made
beforehand and the loop finds the next one waiting whenever it looks: what is measured is the
worker, in a steady state, with one plan ahead.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from msgspec.structs import replace

from bench.gpu.attention import Order, slot_table
from lightserve.messages.common import TokenSegment, pack_int32
from lightserve.messages.router_worker import (
    AddSequence,
    OutputKind,
    PlanRow,
    RouterToWorker,
    SlotRange,
    StepPlan,
    StepResult,
    WorkerToRouter,
    pack_decodes,
    row_results,
)
from lightserve.types import RowId, SamplingParams, StepId
from lightserve.worker.model_runner import ModelRunner
from lightserve.worker.step_loop import serve

GREEDY = SamplingParams(temperature=0.0)
WARM_STEPS = 5
"""At the beginning of a run that do not count."""


class _OutOfPlans(Exception):
    pass


class ScriptedLink:
    """The worker's end of a link whose plans are all there already."""

    def __init__(self, plans: Sequence[StepPlan]) -> None:
        self.results: list[StepResult] = []
        self.sent_s: list[float] = []
        """When each result left."""
        self.num_rejected = 0
        self._plans = deque(plans)
        self._quiet_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def send(self, message: WorkerToRouter) -> None:
        """Take a result."""
        self.sent_s.append(time.perf_counter())
        assert isinstance(message, StepResult)
        self.results.append(message)

    def receive(self, timeout_s: float | None = 0.0) -> RouterToWorker | None:
        """Return the next plan; when there is none, end the loop as soon as it would block."""
        if self._plans:
            return self._plans.popleft()
        if timeout_s is None:
            raise _OutOfPlans
        return None

    def close(self) -> None:
        """Close what `fileno` returns."""
        os.close(self._quiet_fd)

    def fileno(self) -> int:
        """Return a descriptor that is never readable."""
        return self._quiet_fd

    def is_readable(self) -> bool:
        """Whether a plan is there."""
        return bool(self._plans)


@dataclass(frozen=True)
class Run:
    """What a run of plans gave."""

    plans: Sequence[StepPlan]
    results: list[StepResult]
    gaps_s: list[float]
    """Between successive results, those of the first steps left out."""
    whole_s: float
    """From the first plan to the last result."""

    @property
    def median_s(self) -> float:
        """Of a step."""
        return statistics.median(self.gaps_s)

    @property
    def token_ids(self) -> dict[RowId, list[int]]:
        """Return the tokens of each row, in order."""
        found: dict[RowId, list[int]] = {}
        for plan, result in zip(self.plans, self.results, strict=True):
            for row in row_results(plan, result):
                assert row.error is None, row
                found.setdefault(row.row, []).extend(row.token_ids)
        return found


def run_plans(runner: ModelRunner, plans: Sequence[StepPlan]) -> Run:
    """Have the worker's loop execute plans, one after the other."""
    numbered = [replace(plan, step_id=StepId(number)) for number, plan in enumerate(plans)]
    link = ScriptedLink(numbered)
    gc.disable()  # the worker freezes what is there before it serves: it has no long collections
    start_s = time.perf_counter()
    try:
        serve(runner, link, is_first_rank=True)
    except _OutOfPlans:
        pass
    finally:
        gc.enable()
        link.close()
    assert len(link.results) == len(plans), (len(link.results), len(plans))
    gaps_s = [after - before for before, after in pairwise(link.sent_s)]
    skipped = max(0, min(WARM_STEPS, len(gaps_s) - 1))
    return Run(numbered, link.results, gaps_s[skipped:], link.sent_s[-1] - start_s)


class Sequences:
    """Rows 0 … of random prompts, with slots in the order in which the allocator gives them."""

    def __init__(
        self,
        num_rows: int,
        length: int,
        *,
        vocab_size: int,
        sampling: SamplingParams = GREEDY,
        first_row: int = 0,
        first_slot: int = 0,
        seed: int = 0,
    ) -> None:
        """`length`: positions of each row, prompt and output; slots first_slot … are taken."""
        rng = np.random.default_rng(seed)
        self.num_rows, self.length, self._first_row = num_rows, length, first_row
        self.slots = slot_table(Order.BLOCKS, num_rows, length, seed=seed).numpy() + first_slot
        self._tokens = rng.integers(0, vocab_size, (num_rows, length), dtype=np.int32)
        self._sampling = sampling

    def prefills(self, context: int, *, budget: int) -> list[StepPlan]:
        """Return plans of at most `budget` tokens that compute the first `context` of each row.

        The chunk that ends there gives a token.
        """
        plans: list[StepPlan] = []
        pieces: list[tuple[int, int, int]] = []
        left = budget
        for row in range(self.num_rows):
            start = 0
            while start < context:
                count = min(left, context - start)
                pieces.append((row, start, count))
                start, left = start + count, left - count
                if left == 0:
                    plans.append(self.plan(pieces, context))
                    pieces, left = [], budget
        return [*plans, self.plan(pieces, context)] if pieces else plans

    def decodes(
        self, context: int, num_steps: int, *, num_rows: int | None = None
    ) -> list[StepPlan]:
        """Return successive decodes of the first `num_rows` rows from `context` tokens on."""
        rows = range(num_rows or self.num_rows)
        return [
            self.plan([(row, context + step, 1) for row in rows], 0) for step in range(num_steps)
        ]

    def plan(
        self,
        pieces: Iterable[tuple[int, int, int]],
        context: int,
    ) -> StepPlan:
        """Return a plan of (row, start, number of tokens); `context`: where prompts end."""
        pieces = list(pieces)
        decodes = [piece for piece in pieces if piece[1] and piece[2] == 1 and piece[1] >= context]
        own = [self.slots[row, start] for row, start, _ in decodes]
        others = [piece for piece in pieces if piece not in decodes]
        return StepPlan(
            step_id=StepId(0),
            sequences=[self._sequence(row, context) for row, start, _ in pieces if start == 0],
            slot_ranges=[
                SlotRange(self._id(row), start, pack_int32(self.slots[row, start : start + count]))
                for row, start, count in others
            ],
            decodes=pack_decodes(
                [self._id(row) for row, _, _ in decodes], [start for _, start, _ in decodes], own
            ),
            rows=[
                PlanRow(
                    self._id(row),
                    start,
                    count,
                    OutputKind.SAMPLE if start + count >= context else OutputKind.NONE,
                )
                for row, start, count in others
            ],
        )

    def move(self, row: int, slots: Sequence[int]) -> SlotRange:
        """Give the first positions of a row other slots."""
        self.slots[row, : len(slots)] = slots
        return SlotRange(self._id(row), 0, pack_int32(slots))

    def _sequence(self, row: int, context: int) -> AddSequence:
        tokens = TokenSegment(token_ids=pack_int32(self._tokens[row, :context]))
        return AddSequence(self._id(row), [tokens], self._sampling, context, [])

    def _id(self, row: int) -> RowId:
        return RowId(self._first_row + row)
