"""A step launched before the one ahead of it is finished gives what it gives after it."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator

import pytest
import torch
from support.graph_recorders import TapeRecorder
from support.late_queue import LateQueue
from support.recorded_plans import RecordedStep, make_runner, record_steps
from support.tensor_kernels import TensorKernels

from lightserve.messages.common import pack_int32
from lightserve.messages.router_worker import (
    OutputKind,
    RowResult,
    StepResult,
    plan_rows,
    row_results,
)
from lightserve.router.kv.cache import Preemption
from lightserve.worker.graphs import DecodeGraphs
from lightserve.worker.model_runner import ModelRunner, Pending

SCHEDULES = [(0, Preemption.CHECKPOINT), (1, Preemption.SWAP), (2, Preemption.RECOMPUTE)]

NUM_WITH_GRAPHS = 60


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def recorded(seed: int, preemption: Preemption) -> list[RecordedStep]:
    return record_steps(make_runner(), seed, preemption=preemption)


def run_overlapped(runner: ModelRunner, steps: list[RecordedStep]) -> list[list[RowResult]]:
    """Run the plans, each launched before the one ahead of it is finished."""
    launched: deque[Pending] = deque()
    found = []

    def finish() -> None:
        step = launched.popleft()
        found.append(row_results(step.plan, runner.finish(step)))

    for step in steps:
        must_wait = bool(launched) and launched[0].must_precede(step.plan)
        launched.append(runner.launch(step.plan, before_sampling=finish if must_wait else None))
        runner.copy_ahead(step.plan)
        if len(launched) > 1:
            finish()
    finish()
    return found


def expected(steps: list[RecordedStep]) -> list[list[RowResult]]:
    return [row_results(step.plan, step.result) for step in steps]


def has_everything(steps: list[RecordedStep]) -> bool:
    """Whether the plans show what there is: chunks beside decodes, copies, all outputs."""
    rows = [row for step in steps for row in plan_rows(step.plan)]
    lengths = [{row.num_tokens > 1 for row in plan_rows(step.plan)} for step in steps]
    results = [row for rows in expected(steps) for row in rows]
    return (
        {frozenset({False}), frozenset({False, True})} <= {frozenset(kinds) for kinds in lengths}
        and any(row.output & OutputKind.PROMPT_LOGPROBS for row in rows)
        and any(row.logprobs for row in results)
        and any(row.prompt_logprobs for row in results)
    )


@pytest.mark.parametrize(("seed", "preemption"), SCHEDULES)
def test_the_same_results(seed: int, preemption: Preemption) -> None:
    steps = recorded(seed, preemption)
    assert has_everything(steps)
    copied = sum(len(step.plan.saves.slots) + len(step.plan.loads.slots) for step in steps)
    assert bool(copied) == (preemption is not Preemption.RECOMPUTE)
    again = run_overlapped(make_runner(LateQueue()), steps)
    assert again == expected(steps)


def test_the_same_results_under_constraints(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step ahead that did not wait for the tokens before would have been noticed."""
    steps = record_steps(make_runner(is_constrained=True), 1, preemption=Preemption.CHECKPOINT)
    again = run_overlapped(make_runner(LateQueue(), is_constrained=True), steps)
    assert again == expected(steps)
    monkeypatch.setattr(Pending, "must_precede", lambda *_: False)
    with pytest.raises(AssertionError, match="is not known yet"):
        run_overlapped(make_runner(LateQueue(), is_constrained=True), steps)


def test_the_same_results_with_graphs() -> None:
    """Decodes as recorded passes, whose logits the next launch overwrites."""

    plans = [step.plan for step in recorded(*SCHEDULES[0])][:NUM_WITH_GRAPHS]
    plain = make_runner(kernels=TensorKernels())
    steps = []
    for plan in plans:
        steps.append(RecordedStep(plan, plain.execute(plan)))
        plain.copy_ahead(plan)
    runner = make_runner(LateQueue(), TensorKernels())
    recorder = TapeRecorder()
    graphs = DecodeGraphs(
        runner._model,
        runner._pool,
        runner.tables,
        sizes=(1, 2, 4, 6),
        recorder=recorder,
        has_logits=True,
    )
    with torch.inference_mode():
        graphs.capture(lambda _: None)
    runner.use_graphs(graphs)
    again = run_overlapped(runner, steps)
    assert recorder.num_recorded == 4
    assert any(len(plan.decodes.rows) > 4 and not plan.rows for plan in plans)
    tokens = [[row.token_ids for row in rows] for rows in again]
    assert tokens == [[row.token_ids for row in rows] for rows in expected(steps)]


def spoil_order(runner: ModelRunner, steps: list[RecordedStep]) -> list[list[RowResult]]:
    """Take a step's results before it was waited for."""
    found = []
    for step in steps:
        pending = runner.launch(step.plan)
        runner.copy_ahead(step.plan)
        token_ids, others = pending.row_results()
        early = StepResult(
            step.plan.step_id, 0, pack_int32(token_ids), exec_s=0.0, idle_s=0.0, rows=others
        )
        found.append(row_results(step.plan, early))
    return found


def spoil_tokens(runner: ModelRunner, steps: list[RecordedStep]) -> list[list[RowResult]]:
    """Lose what a step has sampled before the next one is launched."""
    append, runner._table.append = runner._table.append, lambda *_: None  # type: ignore[method-assign]
    try:
        return run_overlapped(runner, steps)
    finally:
        runner._table.append = append  # type: ignore[method-assign]


@pytest.mark.parametrize("spoil", [spoil_order, spoil_tokens])
def test_teeth(
    spoil: Callable[[ModelRunner, list[RecordedStep]], list[list[RowResult]]],
) -> None:
    steps = recorded(*SCHEDULES[0])
    assert spoil(make_runner(LateQueue()), steps) != expected(steps)
