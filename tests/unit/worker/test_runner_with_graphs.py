"""A real runner with and without graphs: the same tokens, whatever is in the steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.graph_recorders import TapeRecorder
from support.grids import long_but
from support.random_model import layout_of, random_model, tiny_config
from support.random_plans import PlanMaker
from support.tensor_kernels import TensorKernels
from torch import Tensor

from lightserve.cost.model import StepShape
from lightserve.messages.common import GraphSizes
from lightserve.messages.router_worker import (
    OutputKind,
    StepPlan,
    StepResult,
    plan_rows,
    row_results,
)
from lightserve.models.base import SingleRank
from lightserve.worker.device import HostQueue
from lightserve.worker.graphs import DecodeGraphs, ladder
from lightserve.worker.host_pool import DirectHostPool
from lightserve.worker.memory import KVPool
from lightserve.worker.mixed_graphs import MixedGraphs
from lightserve.worker.model_runner import ModelRunner

MAX_SEQS, MAX_LEN, NUM_STEPS = 12, 40, 100
NUM_SLOTS = MAX_SEQS * MAX_LEN
SIZES = ladder(10)
CONFIG = tiny_config(num_layers=2, sliding_windows=(None, 9), hidden_size=32, intermediate_size=48)


class ExactKernels(TensorKernels):
    """Products that do not depend on the number of rows: rounded once, from float64."""

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        return (
            super()
            .linear(x.double(), weight.double(), None if bias is None else bias.double())
            .to(dtype or x.dtype)
        )


def make_runner() -> tuple[ModelRunner, Any, KVPool]:
    model = random_model(ExactKernels(), CONFIG, context_len=MAX_LEN)
    pool = KVPool(layout_of(CONFIG), NUM_SLOTS, torch.device("cpu"))
    for tensor in pool.tensors:  # what was never written poisons its reader
        tensor[:, :, :, :NUM_SLOTS] = torch.nan
    runner = ModelRunner(
        model,
        pool,
        SingleRank(),
        host_pool=DirectHostPool(0, pool),
        queue=HostQueue(),
        max_num_seqs=MAX_SEQS,
    )
    return runner, model, pool


def plans(seed: int, **changes: int) -> list[StepPlan]:
    maker = PlanMaker(
        seed,
        max_seqs=MAX_SEQS,
        num_slots=NUM_SLOTS,
        max_len=MAX_LEN,
        vocab_size=CONFIG.vocab_size,
        **changes,
    )
    return list(maker.plans(NUM_STEPS))


def run(runner: ModelRunner, steps: list[StepPlan]) -> list[StepResult]:
    """One plan ahead, as the worker's loop does."""
    results, pending = [], None
    for plan in steps:
        following = runner.launch(plan)
        if pending is not None:
            results.append(runner.finish(pending))
        pending = following
    assert pending is not None
    return [*results, runner.finish(pending)]


@pytest.mark.parametrize(
    ("seed", "has_mixed", "max_chunk"),
    long_but(
        itertools.product(range(12), [True, False], [19, 1]),
        [(0, True, 19), (1, True, 1), (2, False, 19)],
    ),
)
def test_the_same_tokens(seed: int, has_mixed: bool, max_chunk: int) -> None:
    """And each step runs as the graph of the size that the router takes it for."""
    steps = plans(seed, max_chunk=max_chunk)
    eager, *_ = make_runner()
    expected = run(eager, steps)
    runner, model, pool = make_runner()
    recorder = TapeRecorder()
    graphs = DecodeGraphs(
        model, pool, runner.tables, sizes=SIZES, recorder=recorder, has_logits=True
    )
    graphs.capture()
    mixed = MixedGraphs(model, pool, runner.tables, sizes=(16, 32), recorder=recorder)
    mixed.capture()
    runner.use_graphs(graphs, mixed if has_mixed else None)
    replayed: list[int] = []
    for recording in (graphs, mixed):
        for size, replay in recording._replays.items():
            recording._replays[size] = _noting(replayed, size, replay)
    found = run(runner, steps)
    num_tokens = 0
    for plan, *results in zip(steps, expected, found, strict=True):
        one, other = (row_results(plan, result) for result in results)
        assert [(row.row, row.token_ids, row.error) for row in one] == [
            (row.row, row.token_ids, row.error) for row in other
        ]
        assert not any(row.error for row in one)
        num_tokens += sum(len(row.token_ids) for row in one)
        for left, right in zip(one, other, strict=True):
            for wanted, got in zip(left.logprobs, right.logprobs, strict=True):
                assert (got.top_token_ids, got.logprob) == (
                    wanted.top_token_ids,
                    pytest.approx(wanted.logprob, abs=1e-5),
                )
    assert num_tokens > 2 * NUM_STEPS
    num_others = _assert_charged(steps, runner.graph_sizes, replayed)
    # With prompts by one token: rows that do not draw the next one are among the decodes.
    assert num_others > NUM_STEPS // 5 or max_chunk > 1


def _noting(noted: list[int], size: int, replay: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        noted.append(size)
        replay()

    return run


def _assert_charged(steps: list[StepPlan], sizes: GraphSizes, replayed: list[int]) -> int:
    """Return how many steps have rows of one token that do not all draw the next one."""
    charged, num_others = [], 0
    for plan in steps:
        shape, rows = StepShape(), plan_rows(plan)
        for row in rows:
            shape = shape.plus(row.start_position, row.num_tokens)
        samples = all(bool(row.output & OutputKind.SAMPLE) for row in rows)
        num_others += shape.num_chunks == 0 and not samples
        size = sizes.padded(shape.num_new, has_chunks=shape.num_chunks > 0)
        ladder_of = sizes.mixed if shape.num_chunks else sizes.decodes + sizes.mixed
        if size in ladder_of:
            charged.append(size)
        else:
            assert size == shape.num_new > max(ladder_of, default=0)
    assert replayed == charged and len(set(charged) & set(SIZES)) >= 3
    return num_others
