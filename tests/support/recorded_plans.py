"""Plans that the real router core makes for a real model runner, to be run again in other ways.

Requests come and go, share prefixes, are paused and resumed; some want every sampling option,
some the log-probabilities of their prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from lightserve.kernels.cpu.default import TorchKernels
from lightserve.kernels.interface import Kernels
from lightserve.messages.common import RegexConstraint, TokenSegment, pack_int32, unpack_int32
from lightserve.messages.frontend_router import Submit
from lightserve.messages.router_worker import AddSequence, StepPlan, StepResult
from lightserve.models.base import SingleRank
from lightserve.router.events import FromFrontend, WorkersReady
from lightserve.router.kv.cache import KVOptions, Preemption
from lightserve.sim.simulation import Simulation, TimedEvent
from lightserve.types import FrontendId, RequestClass, RequestId, RowId, SamplingParams
from lightserve.worker.constraints import StepMasks
from lightserve.worker.device import DeviceQueue, HostQueue
from lightserve.worker.drafts import Lookup
from lightserve.worker.host_pool import DirectHostPool
from lightserve.worker.memory import KVPool
from lightserve.worker.model_runner import ModelRunner
from support.lossless import MAX_LEN, MAX_SEQS, NUM_SLOTS, STATES, Schedule, make_core
from support.random_model import RECURRENT, layout_of, random_model, tiny_config

NUM_REQUESTS = 12
POOL_SLOTS = 130
"""Too few for all of them."""
BUDGET = 40
"""Tokens of a step."""

_OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5, "num_logprobs": 3},
    {"repetition_penalty": 1.6, "num_prompt_logprobs": 2},
    {"min_p": 0.2, "logit_bias": ((20, 4.0), (21, -100.0)), "num_logprobs": 0},
    {"top_k": 20, "top_p": 0.9},
    {"allowed_token_ids": tuple(range(1, 100)), "min_tokens": 6, "num_prompt_logprobs": 0},
]


class RecordedStep(NamedTuple):
    plan: StepPlan
    result: StepResult


class ThirdsOnly:
    """Constraints of which every token depends on the one before: (it + 1) modulo 3.

    What a runner calls; an AssertionError if it asks too early.
    """

    def __init__(self, vocab_size: int) -> None:
        self._ids = np.arange(vocab_size)
        self._last: dict[RowId, int] = {}
        self._drawing: set[RowId] = set()

    def update(self, left_rows: Sequence[RowId], sequences: Sequence[AddSequence]) -> None:
        for row in (*left_rows, *(sequence.row for sequence in sequences)):
            self._last.pop(row, None)
            self._drawing.discard(row)
        for sequence in sequences:
            if sequence.constraint is not None:
                self._last[sequence.row] = int(unpack_int32(sequence.segments[-1].token_ids)[-1])

    def among(self, rows: Sequence[RowId], *_: object) -> frozenset[RowId]:
        return frozenset(row for row in rows if row in self._last)

    def begin(self, rows: Sequence[RowId], *_: object) -> Callable[[], StepMasks] | None:
        indices = [index for index, row in enumerate(rows) if row in self._last]
        if not indices:
            return None
        asked = [rows[index] for index in indices]
        assert self._drawing.isdisjoint(asked), "the token before is not known yet"
        self._drawing.update(asked)
        allowed = np.stack([self._ids % 3 == (self._last[row] + 1) % 3 for row in asked])
        padded = np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32)))
        bits = np.packbits(padded, axis=1, bitorder="little")
        return lambda: StepMasks(indices, bits, torch.from_numpy(allowed), frozenset(), frozenset())

    def advance(
        self,
        rows: Sequence[RowId],
        token_ids: Sequence[int],
        unready: frozenset[int],
        among: frozenset[RowId],
    ) -> None:
        assert not unready
        for row, token_id in zip(rows, token_ids, strict=True):
            if row in self._last:
                self._last[row] = token_id
                self._drawing.discard(row)


def make_runner(
    queue: DeviceQueue | None = None,
    kernels: Kernels | None = None,
    *,
    keeps_answers: bool = False,
    is_constrained: bool = False,
    kind: str | None = None,
) -> ModelRunner:
    """Return a runner of a small random model on the CPU; all have the same weights.

    `kind`: of its first layer, see `RECURRENT`; None: attention.
    """
    recurrent = None if kind is None else RECURRENT[kind]
    config, queue = tiny_config(recurrent=recurrent), queue or HostQueue()
    pool = KVPool(layout_of(config), NUM_SLOTS, HostQueue.device)
    return ModelRunner(
        random_model(kernels or TorchKernels(), config, context_len=MAX_LEN),
        pool,
        SingleRank(),
        host_pool=DirectHostPool(NUM_SLOTS, pool),
        queue=queue,
        max_num_seqs=MAX_SEQS,
        constraints=ThirdsOnly(config.vocab_size) if is_constrained else None,  # type: ignore[arg-type]
        proposer=Lookup(MAX_SEQS + 1, queue, keeps_answers=keeps_answers),
        max_drafted_tokens=BUDGET,
    )


class _Recorder:
    """The simulation's worker: runs each plan to its end before the next."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.steps: list[RecordedStep] = []

    def execute(self, plan: StepPlan, *, exec_s: float, idle_s: float) -> StepResult:
        result = self._runner.execute(plan)
        self._runner.copy_ahead(plan)
        # Virtual times, or the plans would be others in every run.
        result = msgspec.structs.replace(result, exec_s=exec_s, idle_s=idle_s, copy_s=0.0)
        self.steps.append(RecordedStep(plan, result))
        return result


def record_steps(
    runner: ModelRunner, seed: int, *, preemption: Preemption, max_drafts: int = 0
) -> list[RecordedStep]:
    """Return what a schedule's steps were, one after the other.

    Where the runner enforces constraints, every second request has one. With `max_drafts` most
    decodes have some.
    """
    rng = random.Random(seed)
    schedule = Schedule(
        requests=list(range(NUM_REQUESTS)),
        times_s=sorted(rng.choice((0.0, 0.3)) + 0.2 * rng.random() for _ in range(NUM_REQUESTS)),
        classes=[rng.choice(tuple(RequestClass)) for _ in range(NUM_REQUESTS)],
        abort_times_s=[],
        policy="priority",
        budget=BUDGET,
        num_slots=POOL_SLOTS,
        num_host_slots=NUM_SLOTS,
        copied_token_s=0.0,
        kv=KVOptions(block_size=4, preemption=preemption),
        max_drafts=max_drafts,
    )
    recorder = _Recorder(runner)
    simulation = Simulation(
        make_core(schedule),
        recorder,
        lambda plan: 0.01,
        WorkersReady(
            schedule.num_slots + STATES * runner.pool.num_state_slots,
            num_state_slots=runner.pool.num_state_slots,
            num_host_slots=schedule.num_host_slots,
        ),
    )
    simulation.run(
        [
            TimedEvent(
                time_s,
                FromFrontend(
                    FrontendId(0),
                    _request(
                        number,
                        of_class,
                        rng,
                        is_constrained=runner.has_constraints and number % 2 > 0,
                    ),
                ),
            )
            for number, time_s, of_class in zip(
                schedule.requests, schedule.times_s, schedule.classes, strict=True
            )
        ]
    )
    assert len(simulation.outcomes) == NUM_REQUESTS
    return recorder.steps


def _request(
    number: int, request_class: RequestClass, rng: random.Random, *, is_constrained: bool
) -> Submit:
    shared = list(range(5, 5 + rng.choice((0, 20))))
    prompt = [*shared, *(rng.randrange(5, 200) for _ in range(rng.choice((1, 6, 30))))]
    options = {"temperature": 1.0, **_OPTIONS[number % len(_OPTIONS)]}
    return Submit(
        request_id=RequestId(number),
        prompt=[TokenSegment(token_ids=pack_int32(prompt))],
        max_tokens=rng.randrange(4, 40),
        eos_token_ids=[2],
        sampling=SamplingParams(seed=number, **options),
        request_class=request_class,
        age_s=0.0,
        constraint=RegexConstraint(pattern="in thirds") if is_constrained else None,
    )
