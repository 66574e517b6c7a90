"""How long a step took: by marks in the device's work, however late the host looks at them."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from support.late_queue import LateMark, LateQueue
from support.recorded_plans import make_runner

from lightserve.messages.common import TokenSegment, pack_int32
from lightserve.messages.router_worker import (
    AddSequence,
    OutputKind,
    PlanRow,
    SlotRange,
    StepPlan,
    StepResult,
)
from lightserve.types import RowId, SamplingParams, StepId
from lightserve.worker.device import CudaMark, Mark
from lightserve.worker.profiling import StepTimer


class TimedMark(LateMark):
    def __init__(self, arriving: Any, at_s: float) -> None:
        super().__init__(arriving)
        self.at_s = at_s

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, TimedMark)
        return self.at_s - earlier.at_s


class TimedQueue(LateQueue):
    """A device that reaches its marks at given times."""

    def __init__(self, times_s: list[float]) -> None:
        super().__init__()
        self._times_s = iter(times_s)
        self.marks: list[TimedMark] = []

    def mark(self) -> Mark:
        self.marks.append(TimedMark(self._arriving, next(self._times_s)))
        return self.marks[-1]


def plan(number: int, start: int, num_tokens: int) -> StepPlan:
    tokens = [TokenSegment(token_ids=pack_int32([7, 8, 9]))]
    return StepPlan(
        step_id=StepId(number),
        sequences=[] if start else [AddSequence(RowId(0), tokens, SamplingParams(), 3, [])],
        slot_ranges=[SlotRange(RowId(0), start, pack_int32(range(start, start + num_tokens)))],
        rows=[PlanRow(RowId(0), start, num_tokens, OutputKind.SAMPLE)],
    )


def test_execution_and_idle_time() -> None:
    """The second step was launched while the first one ran, the third one late."""
    queue = TimedQueue([0.0, 1.0, 3.0, 3.0, 4.5, 6.0, 7.0])
    runner = make_runner(queue)
    first, second = runner.launch(plan(0, 0, 3)), runner.launch(plan(1, 3, 1))
    results = [runner.finish(first), runner.finish(second)]
    results.append(runner.execute(plan(2, 4, 1)))
    assert [result.exec_s for result in results] == [2.0, 1.5, 1.0]
    assert [result.idle_s for result in results] == [1.0, 0.0, 1.5]
    assert [result.copy_s for result in results] == [0.0, 0.0, 0.0]
    assert [result.launch_s for result in results] == [0.0, 0.0, 0.0]  # as it is the CPU


class ScriptedEvent:
    """What torch tells of an event."""

    made: ClassVar[list[dict[str, bool]]] = []

    def __init__(self, **options: bool) -> None:
        self.made.append(options)
        self.at_ms = 250.0 * len(self.made)

    def record(self) -> None:
        self.is_recorded = True

    def query(self) -> bool:
        return self.is_recorded

    def elapsed_time(self, later: ScriptedEvent) -> float:
        return later.at_ms - self.at_ms


def test_marks_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", ScriptedEvent)
    first, second = CudaMark(), CudaMark()
    assert second.is_past()
    assert second.seconds_since(first) == 0.25
    # Who waits sleeps, and times can be read.
    assert ScriptedEvent.made == [{"enable_timing": True, "blocking": True}] * 2


class GpuRunner:
    """Notes in which order steps are launched and finished; each takes a second more."""

    device = torch.device("meta")

    def __init__(self) -> None:
        self.calls: list[str] = []

    def launch(self, plan: StepPlan) -> int:
        del plan
        self.calls.append("launch")
        return len(self.calls)

    def finish(self, pending: int) -> StepResult:
        self.calls.append("finish")
        return StepResult(StepId(0), 0, b"", exec_s=float(pending), idle_s=0.0)


def test_a_profile_times_steps_that_follow_others() -> None:
    runner = GpuRunner()
    assert StepTimer(runner).run([(5, 3)]) == 2.0  # type: ignore[arg-type]
    assert runner.calls == ["launch", "launch", "finish", "finish"]
