"""The router process of `bench.router.process`: the real loop and core note their CPU time.

What is noted depends on the mode: `whole` takes one reading per step, so that the step is as it
is on a server; `parts` adds readings around the planner, admission and each call of the KV
book-keeping. A reading takes about as long as the shortest of these calls, which is taken off.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import msgspec

from lightserve.channels import ZmqHub, ZmqLink, bind_hub, connect_link
from lightserve.messages.frontend_router import FrontendMessage, RouterMessage
from lightserve.messages.router_worker import RouterToWorker, StepPlan, WorkerToRouter
from lightserve.messages.supervision import ChildMessage, ChildSpec, SupervisorMessage
from lightserve.router import scheduler as core_module
from lightserve.router.admission.base import AdmissionRound, AdmissionRule, PoolView
from lightserve.router.config import SchedulerConfig, make_scheduler_config
from lightserve.router.kv.cache import KVStore
from lightserve.router.process import Collector, RouterProcess
from lightserve.router.request import Request, RequestState
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep, WaitUntil

MAX_MODEL_LEN = 32_768
KV_METHODS = (
    "look_up", "start", "load", "learn_prompt", "expect", "forget", "cost", "acquire", "release",
    "takeable", "gain", "take", "num_freed_by", "freed_by", "take_copies",
)  # fmt: skip
"""What the core and its parts call in a step, besides counters that are read."""


class Mode(StrEnum):
    """What is timed."""

    WHOLE = "whole"
    PARTS = "parts"


class StepFigures(msgspec.Struct):
    """One step; CPU time of the loop's thread."""

    cpu_s: float
    """All of it since the step before was committed."""
    by_part: dict[str, float]
    """Of that, by part; empty in mode `whole`."""
    num_rows: int
    num_live: int
    num_queued: int
    num_tree_tokens: int
    num_started: int


class Clock:
    """CPU seconds of this thread by part; what a part calls of another counts for the other."""

    def __init__(self) -> None:
        self.by_part: dict[str, float] = {}
        self._stack: list[str] = []
        self._since_s = 0.0
        self._reading_s = 0.0
        nothing = self.timed("nothing")(_nothing)
        for _ in range(20_000):
            nothing()
        self._reading_s = self.take()["nothing"] / 20_000

    def timed(self, part: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator for functions whose time is this part's."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def measured(*args: Any, **kwargs: Any) -> Any:
                if self._stack and self._stack[-1] == part:
                    return function(*args, **kwargs)
                self._switch(entered=part)
                try:
                    return function(*args, **kwargs)
                finally:
                    self._switch(entered=None)

            return measured

        return decorate

    def _switch(self, *, entered: str | None) -> None:
        now_s = time.thread_time()
        if self._stack:
            part = self._stack[-1]
            spent_s = now_s - self._since_s - self._reading_s
            self.by_part[part] = self.by_part.get(part, 0.0) + spent_s
        if entered is None:
            self._stack.pop()
        else:
            self._stack.append(entered)
        self._since_s = time.thread_time()

    def take(self) -> dict[str, float]:
        """Return the seconds by part, and start anew."""
        taken, self.by_part = self.by_part, {}
        return taken


def _nothing() -> None:
    pass


class TimedRule:
    """An admission rule whose rounds are timed."""

    def __init__(self, rule: AdmissionRule, clock: Clock) -> None:
        self._begin = clock.timed("admission")(rule.begin)
        self._clock = clock

    def begin(self, live: Collection[Request], pool: PoolView) -> AdmissionRound:
        """Start a round."""
        inner: AdmissionRound = self._begin(live, pool)
        return _TimedRound(inner, self._clock)


class _TimedRound:
    """See `TimedRule`."""

    def __init__(self, inner: AdmissionRound, clock: Clock) -> None:
        self.admit = clock.timed("admission")(inner.admit)
        self._inner = inner

    @property
    def forecast_peak(self) -> int | None:
        """See `AdmissionRound.forecast_peak`."""
        return self._inner.forecast_peak


class Enough(Exception):
    """As many steps as were asked for are there."""


class MeasuredCore(Scheduler):
    """The real core; it decides as one that does not measure itself."""

    def __init__(self, config: SchedulerConfig, clock: Clock | None, num_steps: int) -> None:
        super().__init__(config)
        self.steps: list[StepFigures] = []
        self._num_steps = num_steps
        self._clock = clock
        self._since_s = time.thread_time()

    def commit(self, planned: PlannedStep, now_s: float) -> StepPlan:
        """See `Scheduler.commit`, at whose beginning one step's time ends. Raises Enough."""
        cpu_s = time.thread_time() - self._since_s
        assert self._kv is not None and self._kv.tree is not None
        figures = StepFigures(
            cpu_s=cpu_s,
            by_part={} if self._clock is None else self._clock.take(),
            num_rows=len(planned.scheduled),
            num_live=len(self._rows),
            num_queued=len(self._waiting),
            num_tree_tokens=self._kv.tree.num_resident,
            num_started=sum(r.state is RequestState.WAITING for r, _ in planned.scheduled),
        )
        self.steps.append(figures)
        if len(self.steps) == self._num_steps:
            raise Enough
        self._since_s = time.thread_time()
        return super().commit(planned, now_s)


class PartsCore(MeasuredCore):
    """One whose planning is a part of its own."""

    def __init__(self, config: SchedulerConfig, clock: Clock, num_steps: int) -> None:
        super().__init__(config, clock, num_steps)
        self._plan = clock.timed("planner")(super().plan)

    def plan(self, now_s: float) -> PlannedStep | WaitUntil:
        """See `Scheduler.plan`."""
        step: PlannedStep | WaitUntil = self._plan(now_s)
        return step


def run_router(spec: ChildSpec, mode: Mode, num_steps: int, results: Connection) -> None:
    """Be the router for so many steps, as `process.run` is; send their figures."""
    core = _core(spec, mode, num_steps)
    frontends: ZmqHub[RouterMessage, FrontendMessage] = bind_hub(
        spec.frontends_address, send_type=RouterMessage, recv_type=FrontendMessage
    )
    workers: ZmqHub[RouterToWorker, WorkerToRouter] = bind_hub(
        spec.workers_address, send_type=RouterToWorker, recv_type=WorkerToRouter
    )
    control: ZmqLink[ChildMessage, SupervisorMessage] = connect_link(
        spec.control_address, name="router", send_type=ChildMessage, recv_type=SupervisorMessage
    )
    with suppress(Enough):
        RouterProcess(spec, core, frontends, workers, control, collector=Collector()).serve()
    results.send_bytes(msgspec.msgpack.encode(core.steps))
    for end in (frontends, workers, control):
        end.close()


def _core(spec: ChildSpec, mode: Mode, num_steps: int) -> MeasuredCore:
    config = make_scheduler_config(spec.config, max_model_len=MAX_MODEL_LEN)
    if mode is Mode.WHOLE:
        return MeasuredCore(config, None, num_steps)
    clock = Clock()
    timed = {name: clock.timed("kv")(getattr(KVStore, name)) for name in KV_METHODS}
    store = type("TimedStore", (KVStore,), timed)
    patch.object(core_module, "KVStore", store).start()  # this process ends with the run
    admission = TimedRule(config.admission, clock)
    return PartsCore(replace(config, admission=admission), clock, num_steps)
