"""The worker's loop: plans in, results out, at most one step launched ahead of the one that runs.

    plans    1    2      3                                       a plan is launched as it comes,
    host     launch 1 ─► launch 2 ─► finish 1 ─► launch 3 ─► …   the moment it may be
    device        └─ step 1 ─────────┘└─ step 2 ──────…
    results                             1

Results leave in order and at once: nothing waits for a plan while a step is done, and nothing
polls. Only tokens of rows with a constraint are needed on the host before the next ones can be
drawn: their step is finished when the forward pass behind it has been launched. On the CPU a step
is over when it has been launched, so each is finished before the next plan is looked at.

To be woken takes longer than to ask. So the loop sleeps until shortly before a step's predicted end
and then asks until it is there: decodes take as long as the last ones of their number did. The loop
sleeps through steps that take longer than that, and steps that cannot be predicted.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn, Protocol

from lightserve.channels import Link, Waitable, wait_readable
from lightserve.errors import DeviceError, ProtocolError
from lightserve.messages.router_worker import RouterToWorker, StepPlan, StepResult, WorkerToRouter
from lightserve.types import StepId
from lightserve.worker.device import Mark
from lightserve.worker.step_results import Pending
from lightserve.worker.threads import Threads

SPIN_S = 200e-6
"""Time before the predicted end of a step from which the loop asks, and after it until which it
asks: several times as long as being woken takes, and a few hundredths of a step of decodes."""

WorkerLink = Link[WorkerToRouter, RouterToWorker]


class Runner(Protocol):
    """Runs the steps; see `ModelRunner`."""

    def launch(
        self, plan: StepPlan, *, before_sampling: Callable[[], None] | None = None
    ) -> Pending:
        """Start a plan."""

    def finish(self, pending: Pending) -> StepResult:
        """Wait for a step."""

    def copy_ahead(self, plan: StepPlan) -> None:
        """Make copies that nothing in the step waits for, before the next one is launched."""


def serve(
    runner: Runner, link: WorkerLink, *, is_first_rank: bool, threads: Threads | None = None
) -> NoReturn:
    """Execute plans in order, for ever; the first rank alone answers.

    `threads` are adapted to the machine's load between steps; None: there is nothing to adapt.

    Raises:
        ProtocolError: a plan was lost or repeated.
        DeviceError: a step failed on its GPU, perhaps for want of memory.
    """
    with contextlib.closing(StepLoop(runner, link, is_first_rank=is_first_rank)) as steps:
        while True:
            begun_s = time.monotonic()
            plan = steps.next_plan()
            if threads is not None:
                threads.adapt(now_s := time.monotonic(), now_s - begun_s)
            steps.launch(plan)


class StepLoop:
    """Steps that were launched and not yet finished: none, one, or that and the one behind it."""

    def __init__(
        self,
        runner: Runner,
        link: WorkerLink,
        *,
        is_first_rank: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._link = link
        self._is_first_rank = is_first_rank
        self._running: deque[Pending] = deque()
        self._uncopied: StepPlan | None = None
        """The plan that was launched last, until its copies that are not waited for are made."""
        self._expected: StepId | None = None
        self._watch = _MarkWatch()
        self._ends = _Ends(clock)

    def close(self) -> None:
        """Stop watching steps; running ones go on."""
        self._watch.close()

    def next_plan(self) -> StepPlan:
        """Return the next plan once it may be launched; results leave meanwhile."""
        while self._running:
            running = self._running[0]
            # With a step behind it no plan can come: the router sends one ahead, not two.
            link = None if len(self._running) > 1 else self._link
            if self._is_done(running):
                self._finish()
            elif link is not None and (plan := self._receive(0.0)) is not None:
                return plan
            else:
                self._wait(running, link)
        plan = self._receive(None)
        assert plan is not None
        return plan

    def _wait(self, step: Pending, link: WorkerLink | None) -> None:
        """Wait for a step, and for a plan where one may come; perhaps for a moment only."""
        rest_s = self._ends.rest_s(step.plan)
        if abs(rest_s) <= SPIN_S:
            time.sleep(0)  # other threads of this process have work meanwhile
        else:
            timeout_s = rest_s - SPIN_S if 0.0 < rest_s < math.inf else None
            self._watch.wait(step.marks.end, link, timeout_s)

    def _is_done(self, step: Pending) -> bool:
        with _naming(step.plan.step_id):
            return step.is_done()

    def launch(self, plan: StepPlan) -> None:
        """Start a plan behind the running step."""
        with _naming(plan.step_id):
            self._copy_ahead()
            must_wait = bool(self._running) and self._running[0].must_precede(plan)
            before = self._finish if must_wait else None
            pending = self._runner.launch(plan, before_sampling=before)
        if not self._running:
            self._ends.begin()
        self._running.append(pending)
        self._uncopied = plan

    def _finish(self) -> None:
        """Wait for the oldest step and send its result."""
        step = self._running.popleft()
        with _naming(step.plan.step_id):
            result = self._runner.finish(step)
        self._ends.begin()
        self._ends.note(step.plan, result.exec_s)
        if self._is_first_rank:
            self._link.send(result)
        if not self._running:
            self._copy_ahead()

    def _copy_ahead(self) -> None:
        if self._uncopied is not None:
            self._runner.copy_ahead(self._uncopied)
            self._uncopied = None

    def _receive(self, timeout_s: float | None) -> StepPlan | None:
        plan = self._link.receive(timeout_s)
        if plan is not None:
            if self._expected is not None and plan.step_id != self._expected:
                raise ProtocolError(f"plan {plan.step_id} where {self._expected} was due")
            self._expected = StepId(plan.step_id + 1)
        return plan


@contextlib.contextmanager
def _naming(step_id: StepId) -> Iterator[None]:
    """Say in one line which step was put to the GPU, or waited for, when it failed.

    A failure there shows later, so that the step may also be an earlier one. CUDA's errors have no
    type of their own, and much advice behind their first line.
    """
    try:
        yield
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        if "CUDA" not in first_line:
            raise
        raise DeviceError(f"in step {step_id} the GPU failed: {first_line}") from error


class _Ends:
    """When the oldest step that runs will probably end."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_s = 0.0
        self._exec_s: dict[tuple[int, int], float] = {}
        """Seconds of the last step of so many decodes and tokens, and of nothing else."""

    def begin(self) -> None:
        """Note that a step begins now: it was launched alone, or the one before it is over."""
        self._began_s = self._clock()

    def note(self, plan: StepPlan, exec_s: float) -> None:
        """Note how long a step took on its device."""
        if (numbers := _decodes_and_tokens(plan)) is not None:
            self._exec_s[numbers] = exec_s

    def rest_s(self, plan: StepPlan) -> float:
        """Return how long the step will go on; negative: longer than predicted; inf: unknown."""
        numbers = _decodes_and_tokens(plan)
        exec_s = math.inf if numbers is None else self._exec_s.get(numbers, math.inf)
        return self._began_s + exec_s - self._clock()


def _decodes_and_tokens(plan: StepPlan) -> tuple[int, int] | None:
    """Return how many rows and tokens a step has if it has no chunk and waits for no copy."""
    if plan.saves.slots or plan.loads.slots or any(row.num_tokens > 1 for row in plan.rows):
        return None
    num_others = len(plan.rows)
    return len(plan.decodes.rows) // 4 + num_others, len(plan.decodes.slots) // 4 + num_others


class _MarkWatch:
    """Waits for a mark and for a link at once: a thread waits for the mark and then tells."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="marks")
        self._told_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watched: Mark | None = None

    def wait(self, mark: Mark, link: Waitable | None, timeout_s: float | None) -> None:
        """Return when the mark is past, has failed, the link can be read or the time is over; or
        for no reason.
        """
        if mark is not self._watched:
            self._watched = mark
            self._thread.submit(self._tell, mark)
        sources: list[Waitable | int] = [self._told_fd]
        if link is not None:
            sources.append(link)
        if self._told_fd in wait_readable(sources, timeout_s):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._told_fd)

    def close(self) -> None:
        """End the thread when it has seen the mark that it waits for.

        It takes along the descriptor, to which it may yet write.
        """
        self._thread.submit(os.close, self._told_fd)
        self._thread.shutdown(wait=False)

    def _tell(self, mark: Mark) -> None:
        try:
            mark.wait()  # what it raises the loop gets as well, from `finish`
        finally:
            os.eventfd_write(self._told_fd, 1)
