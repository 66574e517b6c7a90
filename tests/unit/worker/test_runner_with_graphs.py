"""A real runner with and without graphs: the same tokens, whatever is in the steps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.graph_recorders import TapeRecorder
from support.grids import long_but
from support.random_model import layout_of, random_model, tiny_config
from support.random_plans import PlanMaker
from support.tensor_kernels import TensorKernels
from torch import Tensor

from lightserve.messages.router_worker import (
    OutputKind,
    StepPlan,
    StepResult,
    plan_rows,
    row_results,
)
from lightserve.models.parallel import SingleRank
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


class CountingGraphs(DecodeGraphs):
    sizes_run: list[int]

    def logits(self, rows: Tensor, positions: Tensor) -> Tensor | None:
        self.sizes_run.append(len(rows))
        return super().logits(rows, positions)


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


def plans(seed: int) -> list[StepPlan]:
    maker = PlanMaker(
        seed, max_seqs=MAX_SEQS, num_slots=NUM_SLOTS, max_len=MAX_LEN, vocab_size=CONFIG.vocab_size
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
    ("seed", "has_mixed"),
    long_but(itertools.product(range(12), [True, False]), [(0, True), (1, True), (2, False)]),
)
def test_the_same_tokens(seed: int, has_mixed: bool) -> None:
    steps = plans(seed)
    eager, *_ = make_runner()
    expected = run(eager, steps)
    runner, model, pool = make_runner()
    recorder = TapeRecorder()
    graphs = CountingGraphs(
        model, pool, runner.tables, sizes=SIZES, recorder=recorder, has_logits=True
    )
    graphs.sizes_run = []
    graphs.capture()
    mixed = MixedGraphs(model, pool, runner.tables, sizes=(16, 32), recorder=recorder)
    mixed.capture()
    runner.use_graphs(graphs, mixed if has_mixed else None)
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
    rows = [plan_rows(plan) for plan in steps]
    decodes = [len(one) for one in rows if all(_is_plain(row) for row in one)]
    assert graphs.sizes_run == [count for count in decodes if count <= SIZES[-1]]
    assert len(graphs.sizes_run) > NUM_STEPS // 5 and num_tokens > 2 * NUM_STEPS
    assert len(set(graphs.sizes_run)) >= 5


def _is_plain(row: Any) -> bool:
    return row.num_tokens == 1 and bool(row.output & OutputKind.SAMPLE)
