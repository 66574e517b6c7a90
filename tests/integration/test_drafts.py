"""Drafts change no token: on the CPU, on a device that is late, with graphs, when memory moves."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.drafted import Scripted
from support.graph_recorders import TapeRecorder
from support.grids import choose, more_when_long
from support.late_queue import LateQueue
from support.lossless import Catalogue, Tally, make_runner, make_schedule
from support.recorded_plans import RecordedStep, record_steps
from support.recorded_plans import make_runner as make_small_runner
from support.tensor_kernels import TensorKernels
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch, MostTokens
from lightserve.messages.common import unpack_int32
from lightserve.messages.router_worker import StepPlan, StepResult, row_results
from lightserve.router.kv.cache import Preemption
from lightserve.worker.drafts import Drafted, Drafts, NGrams, Proposer
from lightserve.worker.graphs import DecodeGraphs
from lightserve.worker.mixed_graphs import MixedGraphs
from lightserve.worker.model_runner import ModelRunner
from lightserve.worker.step_results import Pending


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Catalogue:
    return Catalogue(make_runner(tmp_path_factory.mktemp("model")))


class SingleTokens(NGrams):
    """Proposes wherever a token has been before."""

    SHORTEST = 1


class Counted:
    """Counts the drafts of a runner's steps."""

    def __init__(self, runner: ModelRunner) -> None:
        self.counts: Counter[str] = Counter()
        self._execute = runner.execute
        runner.execute = self.execute  # type: ignore[method-assign]

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._execute(plan)
        if result.num_drafted:
            decodes = len(plan.decodes.rows) // 4
            own = unpack_int32(result.token_ids).reshape(-1, result.tokens_per_row)[:decodes]
            self.counts["verified"] += result.num_verified
            self.counts["drafted"] += int(unpack_int32(result.num_drafted).sum())
            self.counts["accepted"] += int((own >= 0).sum(axis=1).clip(1).sum()) - decodes
        return result


@more_when_long
@pytest.mark.parametrize("acceptance", [None, 0.7, 0.0])
def test_no_schedule_changes_a_token(catalogue: Catalogue, acceptance: float | None) -> None:
    """Batch invariant, with pauses, replays, aborts, copies; every answer as without drafts.

    `acceptance` None: what n-grams propose, else what the answers will be, so many tokens of them.
    """
    runner, total = catalogue._runner, Tally()
    execute, drafts = runner.execute, runner._table._drafts
    counted, drafts._proposer = Counted(runner), SingleTokens()
    if acceptance is not None:
        catalogue.script_drafts(acceptance)
    try:
        for number in range(choose(6, 60)):
            schedule = replace(make_schedule(number), max_drafts=(8, 3, 1)[number % 3])
            total.add(catalogue.run(schedule))
    finally:
        runner.execute, drafts._proposer = execute, NGrams()  # type: ignore[method-assign]
    assert (total.num_different, total.seen.num_variants) == (0, 0)
    assert total.num_pauses > choose(5, 20) and total.lost_tokens > choose(5, 20)
    counts = counted.counts
    assert counts["verified"] == counts["drafted"] > choose(50, 500)
    if acceptance == 0.7:
        assert 0.3 < counts["accepted"] / counts["drafted"] < 0.7
    elif acceptance == 0.0:
        assert counts["accepted"] == 0


class FromTensors(TensorKernels):
    """As a GPU's: where rows are is in tensors alone, whatever the host believes."""

    def attention(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: AttentionBatch, **options: Any
    ) -> Tensor:
        batch = replace(batch, most=batch.most or MostTokens(len(q), len(q)))
        return super().attention(q, k_pool, v_pool, batch, **options)


def accept_all(self: Drafts, drafted: Drafted, firsts: Tensor, token_ids: Tensor) -> Tensor:
    del firsts, token_ids
    self._lengths.index_copy_(0, drafted.rows, drafted.lengths + 1 + drafted.counts)
    return drafted.counts


def test_teeth(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that accepts a draft which is wrong is noticed."""
    monkeypatch.setattr(Drafts, "accept", accept_all)
    catalogue.script_drafts(0.5)
    total = Tally()
    for number in range(4):
        total.add(catalogue.run(replace(make_schedule(number), max_drafts=3), checks=False))
    assert total.num_different > 5


def sequences_of(steps: list[RecordedStep]) -> dict[tuple[int, ...], list[int]]:
    """Return the longest of what rows held, by their prompts."""
    found: dict[tuple[int, ...], list[int]] = {}
    at: dict[int, tuple[tuple[int, ...], list[int]]] = {}
    for step in steps:
        for sequence in step.plan.sequences:
            tokens = unpack_int32(sequence.segments[0].token_ids).tolist()
            prompt = tuple(tokens[: sequence.num_prompt_tokens])
            at[sequence.row] = prompt, tokens[sequence.num_prompt_tokens :]
        for result in row_results(step.plan, step.result):
            prompt, output = at[result.row]
            output += result.token_ids
            found[prompt] = max(found.get(prompt, []), output, key=len)
    return found


def with_drafts(proposer: Proposer, seed: int) -> list[RecordedStep]:
    runner = make_small_runner(kernels=TensorKernels())
    runner._table._drafts._proposer = proposer
    return record_steps(runner, seed, preemption=Preemption.CHECKPOINT, max_drafts=8)


def overlapped(runner: ModelRunner, steps: list[RecordedStep]) -> list[StepResult]:
    """Run plans, each launched before the one ahead of it is finished."""
    launched: deque[Pending] = deque()
    found = []
    for step in steps:
        launched.append(runner.launch(step.plan))
        runner.copy_ahead(step.plan)
        if len(launched) > 1:
            found.append(runner.finish(launched.popleft()))
    return [*found, runner.finish(launched.popleft())]


@more_when_long
@pytest.mark.parametrize("seed", range(choose(2, 8)))
@pytest.mark.parametrize("has_graphs", [False, True])
def test_a_device_that_is_late_says_the_same(seed: int, has_graphs: bool) -> None:
    """Where rows are is read on the device: plans say the furthest that they can be at."""
    plain = record_steps(
        make_small_runner(kernels=TensorKernels()), seed, preemption=Preemption.CHECKPOINT
    )
    answers = sequences_of(plain)
    steps = with_drafts(Scripted(answers, 0.6), seed)
    assert sequences_of(steps) == answers
    runner = make_small_runner(LateQueue(), FromTensors())
    runner._table._drafts._proposer = Scripted(answers, 0.6)
    if has_graphs:
        tables = runner.tables
        decodes = DecodeGraphs(
            runner._model,
            runner.pool,
            tables,
            sizes=(1, 2, 4, 6),
            recorder=TapeRecorder(),
            has_logits=True,
        )
        mixed = MixedGraphs(
            runner._model, runner.pool, tables, sizes=(16, 32, 64), recorder=TapeRecorder()
        )
        with torch.inference_mode():
            decodes.capture()
            mixed.capture()
        runner.use_graphs(decodes, mixed)
    found = overlapped(runner, steps)
    num_several = 0
    for step, result in zip(steps, found, strict=True):
        own, wanted = (row_results(step.plan, r) for r in (result, step.result))
        assert [row.token_ids for row in own] == [row.token_ids for row in wanted]
        assert result.num_drafted == step.result.num_drafted
        assert result.num_verified >= step.result.num_verified
        num_several += sum(len(row.token_ids) > 1 for row in own)
    assert num_several > 20


def test_n_grams() -> None:
    known = torch.tensor(
        [
            [1, 2, 3, 4, 9, 1, 2, 3, 0, 0],  # 4 followed the last three
            [5, 6, 5, 6, 5, 6, 0, 0, 0, 0],  # goes on in a circle
            [1, 2, 3, 4, 5, 6, 7, 8, 9, 4],  # one token is too few
            [3, 4, 7, 9, 3, 4, 8, 3, 4, 0],  # of two places the latest
            [7, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        ],
        dtype=torch.int32,
    )
    lengths = torch.tensor([8, 6, 10, 9, 1])
    guesses, counts = NGrams().propose(known, lengths, 4)
    assert counts.tolist() == [4, 4, 0, 4, 0]
    assert guesses[0].tolist() == [4, 9, 1, 2]
    assert guesses[1].tolist() == [5, 6, 5, 6]
    assert guesses[3].tolist() == [8, 3, 4, 8]
