"""Discrete-event simulation: the real Scheduler under a virtual clock.

Events are popped in time order, set the clock, and are handed to the core's four calls; the
worker is `SimulatedWorker` with a step-time formula. Deterministic: no randomness of its own.
"""

from __future__ import annotations

import csv
import heapq
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

import numpy as np

from lightserve.decisions.records import CoreCalls
from lightserve.errors import ConfigError
from lightserve.messages.common import TokenLogprob, unpack_int32, unpack_int64
from lightserve.messages.frontend_router import Abort, ErrorCode, RequestDelta, Submit, TokenDelta
from lightserve.messages.router_worker import StepPlan, StepResult
from lightserve.router.config import SchedulerConfig
from lightserve.router.events import FromFrontend, Outgoing, SchedulerEvent, WorkersReady
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep, WaitUntil
from lightserve.types import FinishReason, FrontendId, RequestClass, RequestKey

# The real core, with a look at what its calls cost and how full the pool is.

MEASURED_EVERY = 8
"""CPU time is asked for in every so many-th step: it is a system call, and may be a slow one."""


class TimedCore(Scheduler):
    """A Scheduler that measures itself; it decides as one that does not."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.step_cpu_s: list[float] = []
        """CPU time of every `MEASURED_EVERY`-th step: all calls since the step before was sent,
        up to its own `commit`."""
        self.step_rows: list[int] = []
        """Rows of each of those."""
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

    def on_message(self, event: SchedulerEvent, now_s: float) -> list[Outgoing]:
        """See `Scheduler.on_message`."""
        start_s = self._clock()
        news = super().on_message(event, now_s)
        self._cpu_s += self._clock() - start_s
        return news

    def plan(self, now_s: float) -> PlannedStep | WaitUntil:
        """See `Scheduler.plan`."""
        start_s = self._clock()
        step = super().plan(now_s)
        self._cpu_s += self._clock() - start_s
        return step

    def commit(self, planned: PlannedStep, now_s: float) -> StepPlan:
        """See `Scheduler.commit`."""
        start_s = self._clock()
        plan = super().commit(planned, now_s)
        if self._is_measured:
            self.step_cpu_s.append(self._cpu_s + self._clock() - start_s)
            self.step_rows.append(len(planned.decodes) + len(planned.chunks))
        self._cpu_s = 0.0
        self._num_steps += 1
        self._is_measured = self._num_steps % MEASURED_EVERY == 0
        self.used_slots += self.num_used_slots
        self.num_rt_evictions_beside_be += self._rt_evictions_beside_be(planned)
        return plan

    def on_result(self, result: StepResult, now_s: float) -> list[Outgoing]:
        """See `Scheduler.on_result`."""
        start_s = self._clock()
        news = super().on_result(result, now_s)
        self._cpu_s += self._clock() - start_s
        return news

    def _rt_evictions_beside_be(self, planned: PlannedStep) -> int:
        """Return how many real-time requests a step that has just left took KV from, if slots
        would be free now without the best-effort ones; what others read as well would not."""
        losers = [*(take.request for take in planned.checkpointed), *planned.preempted]
        num_losers = sum(request.request_class is RequestClass.RT for request in losers)
        if num_losers == 0:
            return 0
        assert self._kv is not None, "it has just planned"
        running = (r for r in self._rows if r.request_class is RequestClass.BE)
        best_effort = [*running, *self._waiting.paused(RequestClass.BE)]
        return num_losers if self._kv.num_freed_by(best_effort) else 0


StepTime = Callable[[StepPlan], float]
"""Seconds that a plan takes to execute."""

ROUTER_STEP_S = 0.5e-3
ROUTER_DECODE_S = 1.6e-6
ROUTER_PROMPT_S = 0.4e-3
"""Seconds of a router's core for a step, for each decode and each chunk of a prompt in it: a
robust fit to the CPU times of steps of the real-time and best-effort mix of docs/results/hybrid.md
at 16 to 28 real-time requests/s, with 20,000 to 200,000 slots."""


def router_seconds(step: PlannedStep) -> float:
    """Return what a router takes for a step, messages about it included, on a core of 2026."""
    return ROUTER_STEP_S + ROUTER_DECODE_S * len(step.decodes) + ROUTER_PROMPT_S * len(step.chunks)


RouterTime = Callable[[PlannedStep], float]
"""Seconds that a router takes for a step."""


class RouterTimes:
    """Measured times of a router for steps by their number of rows, with straight lines between."""

    def __init__(self, rows: Sequence[float], seconds: Sequence[float]) -> None:
        """`rows` ascend; below the first and above the last its own time counts."""
        self._rows, self._seconds = rows, seconds

    def __call__(self, step: PlannedStep) -> float:
        """Return the seconds for a step."""
        return float(np.interp(len(step.decodes) + len(step.chunks), self._rows, self._seconds))

    @classmethod
    def read(cls, path: Path, *, flag: str = "--router-times") -> Self:
        """Read a CSV with the columns `rows` and `ms`. Raises ConfigError: it is none."""
        try:
            with path.open(newline="") as file:
                table = [(float(line["rows"]), float(line["ms"])) for line in csv.DictReader(file)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{flag} {str(path)!r} is no CSV with numbers in columns rows and ms: {error}"
            ) from error
        rows = [row for row, _ in table]
        if not table or rows != sorted(set(rows)) or not all(0 <= ms < 1e6 for _, ms in table):
            raise ConfigError(f"{flag} {str(path)!r}: rows must ascend, ms be 0 to a million")
        return cls(rows, [ms / 1e3 for _, ms in table])


@dataclass(frozen=True)
class _Finished:
    """The worker has finished a step."""

    result: StepResult


class Worker(Protocol):
    """Executes plans at once; the simulation decides when the result arrives."""

    def execute(self, plan: StepPlan, *, exec_s: float, idle_s: float) -> StepResult:
        """Run one plan and return its result with these times."""


@dataclass(frozen=True)
class TimedEvent:
    """Something that happens to the router at a given time."""

    time_s: float
    event: SchedulerEvent


Frontend = Callable[[FrontendId, RequestDelta, float], list[TimedEvent]]
"""Answers news of a request, received at the given time."""


@dataclass(slots=True)
class Outcome:
    """A request as its frontend saw it."""

    arrival_s: float
    token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: ErrorCode | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    def note(self, delta: RequestDelta, now_s: float) -> None:
        """Take in news."""
        self.token_ids += delta.token_ids
        self.token_times_s += [now_s] * len(delta.token_ids)
        self.finish_reason = delta.finish_reason
        self.error = delta.error
        self.num_cached_tokens += delta.num_cached_tokens
        if delta.logprobs:
            self.logprobs += delta.logprobs
        if delta.prompt_logprobs:
            self.prompt_logprobs += delta.prompt_logprobs


class Simulation:
    """Drives one core and one worker; `outcomes` fills up as it runs."""

    def __init__(
        self,
        core: CoreCalls,
        worker: Worker,
        step_time: StepTime,
        ready: WorkersReady,
        *,
        frontend: Frontend | None = None,
        hears_tokens: bool = True,
        router_time_factor: float = 0.0,
        router_time: RouterTime = router_seconds,
    ) -> None:
        """Start with workers that are ready.

        Without `hears_tokens` the frontend is not told of single tokens, which are most of all
        news. So many times `router_time` the router is busy with each plan, which leaves at the
        end of that time; what comes meanwhile is heard then.
        """
        self.core = core
        self._frontend = frontend
        self._hears_tokens = hears_tokens
        self._router_time_factor = router_time_factor
        self._router_time = router_time
        self._router_free_s = 0.0
        """When the router has sent the plan that it is busy with."""
        self.outcomes: dict[RequestKey, Outcome] = {}
        self._outcomes_of: defaultdict[FrontendId, dict[int, Outcome]] = defaultdict(dict)
        """Outcomes by frontend and id."""
        self.now_s = 0.0
        self._worker = worker
        self._step_time = step_time
        self._heap: list[tuple[float, int, _Event]] = []
        self._order = itertools.count()
        self._sent: deque[StepPlan] = deque()
        self._is_busy = False
        self._free_since_s = 0.0
        self._wake_s = -1.0
        """When the core last wished to be asked: once is enough."""
        core.on_message(ready, 0.0)

    def run(self, events: Sequence[TimedEvent], *, until_s: float = float("inf")) -> None:
        """Play the events and everything that follows from them, up to `until_s`."""
        for timed in events:
            self._push(timed.time_s, timed.event)
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, _, event = heapq.heappop(self._heap)
            if isinstance(event, StepPlan):  # reaches the worker
                self._sent.append(event)
                self._start_next()
                event = None
            elif isinstance(event, _Finished):
                self._is_busy = False
                self._free_since_s = self.now_s
                self._start_next()
                event = event.result
            elif isinstance(event, FromFrontend):
                self._note_arrival(event)
            if self.now_s < self._router_free_s:
                self._push(self._router_free_s, event)
            else:
                self._handle(event)
                self._plan()

    def go_on_from(self, other: Simulation) -> None:
        """Note what becomes of another simulation's requests beside its outcomes of them."""
        self.outcomes, self._outcomes_of = other.outcomes, other._outcomes_of

    def _push(self, time_s: float, event: _Event) -> None:
        heapq.heappush(self._heap, (time_s, next(self._order), event))

    def _handle(self, event: SchedulerEvent | StepResult | None) -> None:
        """Let the router hear of something."""
        if event is None:
            return
        if isinstance(event, StepResult):
            self._deliver(self.core.on_result(event, self.now_s))
            return
        if isinstance(event, FromFrontend) and isinstance(event.message, Abort):
            request_id = event.message.request_id
            self.outcomes.pop(RequestKey(event.frontend_id, request_id), None)
            self._outcomes_of[event.frontend_id].pop(request_id, None)
        self._deliver(self.core.on_message(event, self.now_s))

    def _note_arrival(self, event: FromFrontend) -> None:
        """Note when a request was sent; the router may be busy, and hear of it later."""
        if isinstance(event.message, Submit):
            key = RequestKey(event.frontend_id, event.message.request_id)
            if key not in self.outcomes:
                outcome = self.outcomes[key] = Outcome(arrival_s=self.now_s)
                self._outcomes_of[key.frontend_id][key.request_id] = outcome

    def _plan(self) -> None:
        """Send what is to be sent now; with a router that takes time, one plan after the other."""
        while isinstance(step := self.core.plan(self.now_s), PlannedStep):
            router_s = self._router_time_factor * self._router_time(step)
            self._router_free_s = self.now_s + router_s
            plan = self.core.commit(step, self._router_free_s)
            if router_s:
                self._push(self._router_free_s, plan)
                return
            self._sent.append(plan)
            self._start_next()
        if step.at_s is not None and step.at_s != self._wake_s:
            self._wake_s = step.at_s
            self._push(step.at_s, None)

    def _start_next(self) -> None:
        if self._is_busy or not self._sent:
            return
        plan = self._sent.popleft()
        exec_s = self._step_time(plan)
        idle_s = self.now_s - self._free_since_s
        self._is_busy = True
        result = self._worker.execute(plan, exec_s=exec_s, idle_s=idle_s)
        self._push(self.now_s + exec_s, _Finished(result))

    def _deliver(self, news: list[Outgoing]) -> None:
        for outgoing in news:
            frontend_id, message = outgoing.frontend_id, outgoing.message
            outcomes = self._outcomes_of[frontend_id]
            told = message.requests
            if self._hears_tokens and self._frontend is not None:
                told = message.each()
            elif message.request_ids:
                self._note_tokens(outcomes, message)
            for delta in told:
                outcome = outcomes[delta.request_id]
                assert outcome.finish_reason is None, "news after the end"
                outcome.note(delta, self.now_s)
                if self._frontend is not None:
                    for timed in self._frontend(frontend_id, delta, self.now_s):
                        self._push(timed.time_s, timed.event)

    def _note_tokens(self, outcomes: dict[int, Outcome], message: TokenDelta) -> None:
        """Note the requests that have one more token each."""
        now_s = self.now_s
        request_ids = unpack_int64(message.request_ids).tolist()
        token_ids = unpack_int32(message.token_ids).tolist()
        for request_id, token_id in zip(request_ids, token_ids, strict=True):
            outcome = outcomes[request_id]
            assert outcome.finish_reason is None, "news after the end"
            outcome.token_ids.append(token_id)
            outcome.token_times_s.append(now_s)


_Event = SchedulerEvent | StepPlan | StepResult | _Finished | None
"""An event of the router or the worker; None: the router looks again."""
