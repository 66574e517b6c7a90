"""The real core, with a look at what its calls cost and how full the pool is."""

from __future__ import annotations

import time

from lightserve.messages.router_worker import StepPlan, StepResult
from lightserve.router.core import RouterCore
from lightserve.router.core_config import CoreConfig
from lightserve.router.events import CoreEvent, Outgoing, PlannedStep, WaitUntil
from lightserve.types import RequestClass

MEASURED_EVERY = 8
"""CPU time is asked for in every so many-th step: it is a system call, and may be a slow one."""


class TimedCore(RouterCore):
    """A RouterCore that measures itself; it decides as one that does not."""

    def __init__(self, config: CoreConfig) -> None:
        super().__init__(config)
        self.step_cpu_s: list[float] = []
        """Of every `MEASURED_EVERY`-th step: CPU time of all calls since the step before was sent,
        up to its own `commit`."""
        self.used_slots = 0
        """Sum over steps of slots that requests held."""
        self.num_rt_evictions_beside_be = 0
        """Times that a real-time request lost KV while best-effort ones kept some of their own."""
        self._cpu_s = 0.0
        self._num_steps = 0
        self._is_measured = True
        """Whether the next step is."""

    def _clock(self) -> float:
        return time.process_time() if self._is_measured else 0.0

    def on_message(self, event: CoreEvent, now_s: float) -> list[Outgoing]:
        """See `RouterCore.on_message`."""
        start_s = self._clock()
        news = super().on_message(event, now_s)
        self._cpu_s += self._clock() - start_s
        return news

    def plan(self, now_s: float) -> PlannedStep | WaitUntil:
        """See `RouterCore.plan`."""
        start_s = self._clock()
        step = super().plan(now_s)
        self._cpu_s += self._clock() - start_s
        return step

    def commit(self, planned: PlannedStep, now_s: float) -> StepPlan:
        """See `RouterCore.commit`."""
        start_s = self._clock()
        plan = super().commit(planned, now_s)
        if self._is_measured:
            self.step_cpu_s.append(self._cpu_s + self._clock() - start_s)
        self._cpu_s = 0.0
        self._num_steps += 1
        self._is_measured = self._num_steps % MEASURED_EVERY == 0
        self.used_slots += self.num_used_slots
        self.num_rt_evictions_beside_be += self._rt_evictions_beside_be(planned)
        return plan

    def on_result(self, result: StepResult, now_s: float) -> list[Outgoing]:
        """See `RouterCore.on_result`."""
        start_s = self._clock()
        news = super().on_result(result, now_s)
        self._cpu_s += self._clock() - start_s
        return news

    def _rt_evictions_beside_be(self, planned: PlannedStep) -> int:
        """Return how many real-time requests a step that has just left took KV from, if slots
        would be free now without the best-effort ones; what others read as well would not."""
        losers = [*(take.request for take in planned.takes), *planned.drops]
        num_losers = sum(request.request_class is RequestClass.RT for request in losers)
        if num_losers == 0:
            return 0
        assert self._kv is not None, "it has just planned"
        running = (r for r in self._rows if r.request_class is RequestClass.BE)
        best_effort = [*running, *self._waiting.paused(RequestClass.BE)]
        return num_losers if self._kv.num_freed_by(best_effort) else 0
