"""Sends plans: open loops on time whatever the server does, closed loops one after the other.

An open loop's arrivals are due at times fixed beforehand. Each is a task of its own, started when
it is due; no number of waiting requests delays the next. If the client itself is late, latency
still counts from the intended moment, and the result says by how much.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import count, cycle
from typing import Any

import numpy as np

from lightserve.loadtest.client import Now, Outgoing, StreamClient
from lightserve.loadtest.options import BE, CLASSES, RT
from lightserve.loadtest.result import Record
from lightserve.loadtest.workload import Plan, PromptMaker, ends_by_itself

_SPIN_S = 0.0015
"""Timers of an event loop are exact to 1 ms and late: the rest is waited for by looking."""
_SPIN_GAP_S = 0.025
"""Arrivals closer together than this are not, so that it never takes over 6 % of a core."""


@dataclass
class Progress:
    """Counts of a class for its progress bar, live."""

    num_sent: int = 0
    num_done: int = 0
    num_failed: int = 0


@dataclass(frozen=True)
class RunSettings:
    """How a run ends, and names its requests."""

    drain_s: float
    """How long requests in flight may take once arrivals have ended."""
    run_id: str


@dataclass
class RunOutcome:
    """Everything that happened."""

    records: list[Record]
    arrivals_end_s: float
    """When the last arrival was due or, in closed loops, arrivals were stopped."""
    end_s: float
    cpu_s: float
    """User and system time of this process while it ran."""
    was_interrupted: bool


@dataclass
class Runner:
    """One run of several plans at once."""

    client: StreamClient
    prompts: PromptMaker
    settings: RunSettings
    now: Now
    progress: dict[str, Progress] = field(default_factory=lambda: {c: Progress() for c in CLASSES})
    on_progress: Callable[[str], None] = lambda _: None
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set it to end the run early."""

    def __post_init__(self) -> None:
        self._records: list[Record] = []
        self._numbers = count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._faults: list[BaseException] = []
        self._arrivals_end = asyncio.Event()

    async def run(self, plans: Sequence[Plan], *, ends_with_last: bool = False) -> RunOutcome:
        """Send everything.

        Closed loops without an end of their own end with the other plans; with `ends_with_last`
        all plans end with the last one.
        """
        gc.collect()
        gc.freeze()  # what is there already is not looked through again while times are taken
        cpu_before = _cpu_s()
        bounded = [plan.offsets_s is not None or ends_by_itself(plan.traffic) for plan in plans]
        if ends_with_last:
            bounded[:-1] = [False] * (len(plans) - 1)
        loops = [self._start(self._arrive(source, plan)) for source, plan in enumerate(plans)]
        stopper = asyncio.ensure_future(self.stop.wait())
        ending = asyncio.gather(*(loop for loop, ends in zip(loops, bounded, strict=True) if ends))
        await asyncio.wait((stopper, ending), return_when=asyncio.FIRST_COMPLETED)
        was_interrupted = self.stop.is_set()
        self._arrivals_end.set()
        arrivals_end_s = self.now()
        await self._drain()
        stopper.cancel()
        await asyncio.gather(stopper, ending, return_exceptions=True)
        gc.unfreeze()
        if self._faults:
            raise self._faults[0]
        return RunOutcome(
            records=self._records,
            arrivals_end_s=arrivals_end_s,
            end_s=self.now(),
            cpu_s=_cpu_s() - cpu_before,
            was_interrupted=was_interrupted or self.stop.is_set(),
        )

    async def _drain(self) -> None:
        """Wait for what is in flight, at most `drain_s`; what is left then is unfinished."""
        deadline_s = self.now() + self.settings.drain_s
        while self._tasks and not self.stop.is_set() and self.now() < deadline_s:
            await asyncio.wait(self._tasks, timeout=min(deadline_s - self.now(), 0.2))
        pending = list(self._tasks)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    async def _arrive(self, source: int, plan: Plan) -> None:
        if plan.offsets_s is None:
            await self._closed_loop(source, plan)
            return
        gaps_s = np.diff(plan.offsets_s, prepend=0.0)
        for row, (offset_s, gap_s) in enumerate(zip(plan.offsets_s, gaps_s, strict=True)):
            # Built before it is due, so that when it is, nothing is left but to send it.
            record = self._record(source, plan, row, float(offset_s))
            outgoing = await self._outgoing(record, plan, row)
            await self._wait_until(float(offset_s), is_exact=gap_s >= _SPIN_GAP_S)
            if self._arrivals_end.is_set():
                return
            self._begin(record)
            self._start(self._one(record, outgoing))

    async def _closed_loop(self, source: int, plan: Plan) -> None:
        """`concurrency` clients, each of which sends when its last answer has come.

        After a refusal it waits as long as the server says before it sends the next.
        """
        traffic = plan.traffic
        assert traffic.concurrency is not None, "checked by the cli"
        rows = iter(range(len(plan))) if traffic.num_requests else cycle(range(len(plan)))

        async def one_client() -> None:
            pause_s = 0.0
            for row in rows:
                if pause_s:
                    await self._wait_until(self.now() + pause_s, is_exact=False)
                if self._arrivals_end.is_set() or self.now() >= (traffic.duration_s or 1e18):
                    return
                record = self._record(source, plan, row, 0.0)
                outgoing = await self._outgoing(record, plan, row)
                record.intended_s = self.now()
                self._begin(record)
                await self._one(record, outgoing)
                pause_s = max(traffic.think_s, record.retry_after_s)

        clients = [self._start(one_client()) for _ in range(traffic.concurrency)]
        await asyncio.wait(clients, timeout=traffic.duration_s)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._faults.append(fault)  # of this program, not of a request
            self.stop.set()

    async def _outgoing(self, record: Record, plan: Plan, row: int) -> Outgoing:
        """Build a request; its pictures are drawn in threads: streams are read meanwhile."""
        text = self.prompts.text(plan.segments[row])
        targets = record.targets or plan.traffic.targets_of(record.request_class)
        count, width, height = plan.images
        draw = partial(asyncio.to_thread, self.prompts.picture, width, height)
        urls = [await draw() for _ in range(count)]
        return self.client.outgoing(record, text, targets, urls)

    def _begin(self, record: Record) -> None:
        """From here on it is an arrival, which counts whatever becomes of it."""
        record.index = len(self._records)
        self._records.append(record)
        self.progress[record.request_class].num_sent += 1

    async def _one(self, record: Record, outgoing: Outgoing) -> None:
        try:
            await self.client.send(record, outgoing, self.now)
        finally:
            progress = self.progress[record.request_class]
            progress.num_done += 1
            progress.num_failed += record.error is not None
            self.on_progress(record.request_class)

    def _record(self, source: int, plan: Plan, row: int, intended_s: float) -> Record:
        return Record(
            index=-1,
            request_class=BE if plan.is_be[row] else RT,
            intended_s=intended_s,
            wanted_prompt_tokens=sum(segment.num_tokens for segment in plan.segments[row]),
            wanted_output_tokens=int(plan.output_tokens[row]),
            num_images=plan.images.num,
            source=source,
            priority=None if plan.priorities is None else int(plan.priorities[row]),
            targets=None if plan.targets is None else plan.targets[row],
            request_id=f"{self.settings.run_id}-{source}-{next(self._numbers)}",
        )

    async def _wait_until(self, moment_s: float, *, is_exact: bool) -> None:
        """Wait for a moment of the run, at most until arrivals end; streams are read meanwhile."""
        margin_s = _SPIN_S if is_exact else 0.0
        delay_s = moment_s - margin_s - self.now()
        if delay_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._arrivals_end.wait()
        await asyncio.sleep(0)
        while is_exact and self.now() < moment_s and not self._arrivals_end.is_set():
            await asyncio.sleep(0)


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system


def raise_file_limit() -> None:
    """Allow as many sockets as the system lets this process have."""
    import resource  # noqa: PLC0415 - not on every system

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def wall_clock() -> str:
    """Return the time of day, as it goes into a result: UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
