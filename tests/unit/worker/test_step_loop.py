"""The worker's loop: when it launches, finishes, sends and copies; with a scripted device."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest
import torch
from support.memory_channel import MemoryHub, bind_hub

from lightserve.errors import DeviceError, LightserveError
from lightserve.messages.router_worker import (
    OutputKind,
    PlanRow,
    RouterToWorker,
    StepPlan,
    StepResult,
    WorkerToRouter,
)
from lightserve.types import RowId, StepId
from lightserve.worker.device import Mark
from lightserve.worker.step_loop import SPIN_S, StepLoop, serve
from lightserve.worker.step_results import Drawn, Pending, StepMarks
from lightserve.worker.threads import Cores, CpuTimes, Threads

TIMEOUT_S = 20.0
"""For what happens at once unless something is broken."""


class ScriptedMark:
    """Past when the test says so."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self._error: RuntimeError | None = None
        self.num_asked = 0
        self.watchers: SimpleQueue[threading.Thread] = SimpleQueue()

    def is_past(self) -> bool:
        self.num_asked += 1
        return self._passed.is_set()

    def wait(self) -> None:
        self.watchers.put(threading.current_thread())
        assert self._passed.wait(TIMEOUT_S)
        if self._error is not None:
            raise self._error

    def seconds_since(self, earlier: Mark) -> float:
        del earlier
        return 1.0

    def end(self, error: RuntimeError | None = None) -> None:
        self._error = error
        self._passed.set()


class NoCopies:
    """Nothing was waited for."""

    def seconds(self) -> float:
        return 0.0


@dataclass
class ScriptedRunner:
    """Notes what the loop asks for; steps end when the test says so, or when launched."""

    ends_at_once: bool = False
    exec_s: float = 1000.0
    """What every step is said to have taken."""
    constrained: frozenset[RowId] = frozenset()
    """Rows that every step samples under a constraint."""
    marks: dict[int, ScriptedMark] = field(default_factory=dict)
    _calls: list[str] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def launch(
        self, plan: StepPlan, *, before_sampling: Callable[[], None] | None = None
    ) -> Pending:
        mark = ScriptedMark()
        if self.ends_at_once:
            mark.end()
        self.marks[plan.step_id] = mark
        self._note(f"launch {plan.step_id}")
        if before_sampling is not None:
            before_sampling()
            self._note(f"sample {plan.step_id}")
        return Pending(
            plan=plan,
            num_rows=len(plan.rows),
            drawn=Drawn([], torch.empty(0, dtype=torch.int64)),
            prompts={},
            constrained_rows=self.constrained,
            marks=StepMarks(mark, mark, mark),
            copies=NoCopies(),
            launch_s=0.0,
        )

    def finish(self, pending: Pending) -> StepResult:
        pending.marks.end.wait()
        self._note(f"finish {pending.plan.step_id}")
        return StepResult(pending.plan.step_id, 0, b"", exec_s=self.exec_s, idle_s=0.0)

    def copy_ahead(self, plan: StepPlan) -> None:
        self._note(f"copy {plan.step_id}")

    def _note(self, call: str) -> None:
        with self._changed:
            self._calls.append(call)
            self._changed.notify_all()

    def calls(self, number: int) -> list[str]:
        """Return the first calls, once there are so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._calls) >= number, TIMEOUT_S), (
                self._calls
            )
            return list(self._calls)


def plan(number: int, *rows: int) -> StepPlan:
    return StepPlan(
        step_id=StepId(number),
        sequences=[],
        slot_ranges=[],
        rows=[PlanRow(RowId(row), 5, 1, OutputKind.SAMPLE) for row in rows or (0,)],
    )


@dataclass
class Loop:
    """The loop in a thread of its own, and the router's end of its link."""

    hub: MemoryHub[RouterToWorker, WorkerToRouter]
    runner: ScriptedRunner
    thread: threading.Thread
    errors: list[BaseException]

    def send(self, *plans: StepPlan) -> None:
        for one in plans:
            self.hub.send("worker", one)

    def result(self) -> int:
        """Return the next result's step."""
        received = self.hub.receive(TIMEOUT_S)
        assert received is not None and isinstance(received[1], StepResult)
        return received[1].step_id

    def has_result(self) -> bool:
        return self.hub.receive(0.05) is not None

    def error(self) -> BaseException:
        """Return what ended the loop."""
        self.thread.join(TIMEOUT_S)
        return self.errors[0]


@contextmanager
def running(
    runner: ScriptedRunner, *, is_first_rank: bool = True, threads: Threads | None = None
) -> Iterator[Loop]:
    hub = bind_hub(send_type=RouterToWorker, recv_type=WorkerToRouter)
    link = hub.connect_link("worker")
    errors: list[BaseException] = []

    def run() -> None:
        try:
            serve(runner, link, is_first_rank=is_first_rank, threads=threads)
        except (LightserveError, RuntimeError) as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    loop = Loop(hub, runner, thread, errors)
    yield loop
    runner.ends_at_once = True
    for mark in list(runner.marks.values()):
        mark.end()
    loop.send(plan(10_000), plan(20_000))  # the second one at least is out of order
    assert loop.error() is not None
    link.close()
    hub.close()


def test_threads_are_adapted_between_steps() -> None:
    readings = [CpuTimes(at, 4.0 * at, 0.0, 3.2 * at, 0.8 * at) for at in (0.0, 1.0, 2.0)]
    used: SimpleQueue[int] = SimpleQueue()
    threads = Threads(
        4, Cores(4, 4, 1), is_logged=False, read=lambda: readings.pop(0), use=used.put, window_s=0.0
    )
    with running(ScriptedRunner(ends_at_once=True), threads=threads) as loop:
        for number in (1, 2):
            loop.send(plan(number))
            assert loop.result() == number
        assert used.empty()
        loop.send(plan(3))
        assert loop.result() == 3
        assert used.get(timeout=TIMEOUT_S) == 3


def test_a_plan_is_launched_behind_the_step_that_runs() -> None:
    with running(ScriptedRunner()) as loop:
        loop.send(plan(1))
        assert loop.runner.calls(1) == ["launch 1"]
        loop.send(plan(2))
        assert loop.runner.calls(3) == ["launch 1", "copy 1", "launch 2"]
        assert not loop.has_result()
        assert loop.runner.marks[1].num_asked <= 3  # it was waited for, not polled
        loop.runner.marks[1].end()
        assert loop.result() == 1
        loop.send(plan(3))
        assert loop.runner.calls(6)[3:] == ["finish 1", "copy 2", "launch 3"]
        loop.runner.marks[2].end()
        loop.runner.marks[3].end()
        assert [loop.result(), loop.result()] == [2, 3]
        assert loop.runner.calls(9)[6:] == ["finish 2", "finish 3", "copy 3"]


def test_a_result_does_not_wait_for_a_plan() -> None:
    with running(ScriptedRunner()) as loop:
        for number in (1, 2):
            loop.send(plan(number))
            loop.runner.calls(3 * number - 2)
            assert not loop.has_result()
            assert loop.runner.marks[number].num_asked <= 2
            loop.runner.marks[number].end()
            assert loop.result() == number
        assert loop.runner.calls(6) == [
            f"{call} {number}" for number in (1, 2) for call in ("launch", "finish", "copy")
        ]


def test_never_more_than_one_step_ahead() -> None:
    """Three plans wait: the third is launched when the first step is over."""
    with running(ScriptedRunner()) as loop:
        loop.send(plan(1), plan(2), plan(3))
        loop.runner.calls(3)
        assert not loop.has_result()
        assert loop.runner.calls(3)[-1] == "launch 2"
        loop.runner.marks[1].end()
        assert loop.result() == 1
        assert loop.runner.calls(6)[3:] == ["finish 1", "copy 2", "launch 3"]


def test_what_is_over_when_launched_is_finished_before_the_next_plan() -> None:
    """As on the CPU, however many plans wait."""
    with running(ScriptedRunner(ends_at_once=True)) as loop:
        loop.send(plan(1), plan(2))
        assert [loop.result(), loop.result()] == [1, 2]
        assert loop.runner.calls(6) == [
            f"{call} {number}" for number in (1, 2) for call in ("launch", "finish", "copy")
        ]


def test_a_constrained_row_needs_its_token_before_the_next_is_drawn() -> None:
    """Its next forward pass has been launched by then."""
    with running(ScriptedRunner(constrained=frozenset({RowId(3)}))) as loop:
        loop.send(plan(1, 3, 4))
        loop.runner.calls(1)
        loop.send(plan(2, 3))
        assert loop.runner.calls(3) == ["launch 1", "copy 1", "launch 2"]
        assert not loop.has_result()
        loop.runner.marks[1].end()
        assert loop.result() == 1
        assert loop.runner.calls(5)[3:] == ["finish 1", "sample 2"]
        loop.runner.marks[2].end()
        assert loop.result() == 2


def test_a_constrained_row_that_rests_is_not_waited_for() -> None:
    with running(ScriptedRunner(constrained=frozenset({RowId(3)}))) as loop:
        loop.send(plan(1, 3, 4))
        loop.runner.calls(1)
        loop.send(plan(2, 4), plan(3, 4))
        loop.runner.calls(3)
        loop.runner.marks[1].end()
        assert loop.result() == 1
        assert loop.runner.calls(6) == [
            "launch 1", "copy 1", "launch 2", "finish 1", "copy 2", "launch 3",
        ]  # fmt: skip


class Clock:
    """Goes on by what is waited for, and by 50 microseconds whenever a mark is asked."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.waits: list[float | None] = []
        """Of the watch."""
        self.num_asked = 0

    def __call__(self) -> float:
        return self.now_s

    def wait(self, mark: TimedMark, link: object, timeout_s: float | None) -> None:
        self.waits.append(timeout_s)
        self.now_s = min(mark.end_s, math.inf if timeout_s is None else self.now_s + timeout_s)

    def close(self) -> None:
        pass


class TimedMark(ScriptedMark):
    """Past at a time."""

    def __init__(self, clock: Clock, end_s: float) -> None:
        super().__init__()
        self.end()
        self._clock, self.end_s = clock, end_s

    def is_past(self) -> bool:
        self._clock.num_asked += 1
        self._clock.now_s += 50e-6
        return self._clock.now_s >= self.end_s


class TimedLoop:
    """A loop whose steps take as long as they are told, and plans come only when none runs."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.runner = ScriptedRunner(exec_s=0.010)
        self.steps = StepLoop(self.runner, self, is_first_rank=True, clock=self.clock)  # type: ignore[arg-type]
        self.steps.close()
        self.steps._watch = self.clock  # type: ignore[assignment]
        self._number = 0

    def receive(self, timeout_s: float | None) -> StepPlan | None:
        return None if timeout_s == 0.0 else plan(self._number)

    def send(self, result: StepResult) -> None:
        assert result.step_id == self._number

    def run(self, took_s: float, one: StepPlan) -> list[float | None]:
        """Run a step and return how long it was slept for."""
        self._number += 1
        self.steps.launch(msgspec.structs.replace(one, step_id=StepId(self._number)))
        self.steps._running[0] = dataclasses.replace(
            self.steps._running[0],
            marks=StepMarks(*[TimedMark(self.clock, self.clock.now_s + took_s)] * 3),
        )
        self.clock.waits, self.clock.num_asked = [], 0
        while self.steps._running:
            self.steps._expected = None
            self.steps.next_plan()
        return self.clock.waits


def test_shortly_before_its_end_a_step_is_asked_for() -> None:
    """And not slept for: decodes take as long as the last ones of their number."""
    loop, decodes = TimedLoop(), plan(0, 1, 2, 3)
    assert loop.run(0.010, decodes) == [None], "what it takes is not known yet"
    (slept_s,) = loop.run(0.010, decodes)
    assert slept_s == pytest.approx(0.010 - SPIN_S, abs=60e-6)
    assert 3 <= loop.clock.num_asked <= 7
    (_, rest_s) = loop.run(0.020, decodes)
    assert rest_s is None and loop.clock.num_asked <= 12, "no longer than it may take"
    assert len(loop.run(0.005, decodes)) == 1 and loop.clock.num_asked <= 2, "it ended early"
    assert loop.run(0.010, plan(0, 1, 2)) == [None], "another number of decodes"
    chunk = StepPlan(StepId(0), [], [], [PlanRow(RowId(0), 0, 7, OutputKind.SAMPLE)])
    for _ in range(2):
        assert loop.run(0.010, chunk) == [None], "chunks are too different from each other"


def test_other_ranks_do_not_answer() -> None:
    with running(ScriptedRunner(ends_at_once=True), is_first_rank=False) as loop:
        loop.send(plan(1), plan(2))
        loop.runner.calls(6)
        assert not loop.has_result()


def test_a_plan_that_is_missing_ends_the_loop() -> None:
    with running(ScriptedRunner()) as loop:
        loop.send(plan(1), plan(3))
        assert str(loop.error()) == "plan 3 where 2 was due"


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_step_that_fails_on_its_device_ends_the_loop(is_ahead: bool) -> None:
    """Whether the loop was waiting for it alone, or for a plan as well."""
    with running(ScriptedRunner()) as loop:
        loop.send(plan(1))
        loop.runner.calls(1)
        if is_ahead:
            loop.send(plan(2))
            loop.runner.calls(3)
        loop.runner.marks[1].end(
            RuntimeError("CUDA error: an illegal memory access\nCompile with all kinds of options")
        )
        error = loop.error()
        assert isinstance(error, DeviceError)
        assert str(error) == "in step 1 the GPU failed: CUDA error: an illegal memory access"
        assert not loop.has_result()


def test_an_error_of_the_host_is_left_as_it_is() -> None:
    with running(ScriptedRunner()) as loop:
        loop.send(plan(1))
        loop.runner.calls(1)
        loop.runner.marks[1].end(RuntimeError("shapes do not match"))
        assert type(loop.error()) is RuntimeError


def test_what_watches_the_steps_ends_with_the_loop() -> None:
    """Its thread and its descriptor; a step that fails takes neither along."""
    before = num_eventfds_when_idle()
    for fails in (False, True):
        with running(ScriptedRunner()) as loop:
            loop.send(plan(1))
            loop.runner.calls(1)
            watcher = loop.runner.marks[1].watchers.get(timeout=TIMEOUT_S)
            assert watcher is not loop.thread
            loop.runner.marks[1].end(RuntimeError("CUDA error: 7") if fails else None)
    assert num_eventfds_when_idle() == before


def num_eventfds_when_idle() -> int:
    """Return how many this process has open when all that watched for a loop have ended."""
    gc.collect()  # other tests' own, now and not between two counts
    for thread in threading.enumerate():
        if thread.name.startswith("marks"):
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
    names = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            names.append(str(fd.readlink()))
    return names.count("anon_inode:[eventfd]")
