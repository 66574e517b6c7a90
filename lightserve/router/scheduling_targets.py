"""Targets by which newcomers are scheduled, raised to the times of an idle server.

A target that an idle server could not meet is replaced, for scheduling, by 1.2
times the predicted idle time. The client is told (`Request.scheduled_slo`), it is counted here,
and attainment is judged by what was asked all the same. Nothing is raised while too little is
known of what steps take. `Scheduler` asks once for every request that it takes in, and only
under policies that look at deadlines.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from lightserve.router.arrivals import is_tight
from lightserve.router.config import SchedulerConfig
from lightserve.router.kv.cache import KVStore
from lightserve.router.pipeline import Pipeline
from lightserve.router.request import ENDED, Request
from lightserve.router.retry_after import QueueDelay
from lightserve.router.slo import (
    CompletionLedger,
    FeasibleSLO,
    IdleTimes,
    LineDeadline,
    SharedDue,
    raise_to_feasible,
    track,
)
from lightserve.router.step_cost import StepShape
from lightserve.types import SLO, FrontendId, RequestClass


class RaisedTarget(NamedTuple):
    """Which target of which class."""

    request_class: RequestClass
    target: str
    """A field of `SLO`."""


class SchedulingTargets:
    """Sets deadlines; O(1) per request, but for a look at the cache where a target seems tight."""

    def __init__(self, config: SchedulerConfig, pipeline: Pipeline, waits: QueueDelay) -> None:
        self.num_raised: Counter[RaisedTarget] = Counter()
        """Since boot."""
        self._meets_deadlines = config.policy.meets_deadlines
        self._shared: WeakValueDictionary[tuple[FrontendId, int], SharedDue]
        self._shared = WeakValueDictionary()
        """Shared times of batches; their lines hold them."""
        self._has_jobs = False
        """Whether any request has had a completion time."""
        self._clock = config.slo_clock
        self._lengths = config.lengths
        self._pipeline = pipeline
        self._cost = pipeline.cost
        self._waits = waits

    def apply(self, request: Request, kv: KVStore | None) -> float:
        """Give a new request its deadlines, by targets that an idle server can meet.

        Args:
            request: it begins to wait; `deadlines` and `scheduled_slo` are set.
            kv: what an idle server would find of its prompt; None without workers.

        Returns:
            What an idle server leaves of the time to its first token, in seconds; infinite without
            a target.
        """
        if not self._meets_deadlines:
            return math.inf
        num_output = self._mean_output(request)
        if request.batch and request.slo.completion_s is not None:
            due_s, batch = request.arrival_s + request.slo.completion_s, request.batch
            shared = self.move_batch(request.key.frontend_id, batch, due_s) or SharedDue(due_s)
            self._shared[request.key.frontend_id, batch] = shared
            request.deadlines = LineDeadline(shared, num_tokens_to_come=num_output)
            return math.inf
        (slo, raised), slack_s = self._feasible(request, num_output, kv)
        if raised:
            request.scheduled_slo = slo
            for target in raised:
                self.num_raised[RaisedTarget(request.request_class, target)] += 1
        request.deadlines = track(
            self._clock(slo), request.arrival_s, num_tokens_to_come=num_output
        )
        self._has_jobs |= slo.completion_s is not None
        return slack_s

    def move_batch(self, frontend_id: FrontendId, batch: int, due_s: float) -> SharedDue | None:
        """Have all lines of a batch be due then; None: there are none."""
        shared = self._shared.get((frontend_id, batch))
        if shared is not None:
            shared.due_s = due_s
        return shared

    def foresee(self, requests: Iterable[Request]) -> None:
        """Expect anew, of requests that have had tokens, how many jobs among them are to have.

        Up to the mean of their class that is the rest of it; one that has outrun it will have as
        many more as those in the history that were as long.
        """
        if not self._has_jobs:
            return
        jobs = [
            (request, request.deadlines)
            for request in requests
            if isinstance(request.deadlines, CompletionLedger) and request.state is not ENDED
        ]
        outrun = []
        for request, ledger in jobs:
            num_left = self._mean_output(request) - len(request.output_token_ids)
            if num_left >= 1.0:
                ledger.expect(num_left)
            elif len(request.output_token_ids) < request.max_tokens:
                outrun.append((request, ledger))
        if not outrun:
            return
        jobs = outrun
        generated = np.array([len(r.output_token_ids) for r, _ in jobs], np.int64)
        limits = np.array([r.max_tokens for r, _ in jobs], np.int64)
        rests = self._lengths.expected_rest(generated, limits, [r.prediction_key for r, _ in jobs])
        for (_, ledger), rest in zip(jobs, rests.tolist(), strict=True):
            ledger.expect(rest)

    def _mean_output(self, request: Request) -> float:
        average = self._waits.mean_output(request.request_class) or self._lengths.average
        return min(float(request.max_tokens), average)

    def _feasible(
        self, request: Request, num_output: float, kv: KVStore | None
    ) -> tuple[FeasibleSLO, float]:
        """Return the targets to schedule by, and what `apply` returns."""
        asked = request.slo
        if asked == SLO() or not self._cost.is_settled:
            return FeasibleSLO(asked, ()), math.inf
        idle = self._idle_times(request, num_output, start=0)
        feasible = raise_to_feasible(asked, idle)
        is_short = feasible.raised or is_tight(*_first_token(feasible, idle))
        if is_short and kv is not None and kv.tree is not None:
            start = kv.look_up(request).start  # what is cached has not to be computed
            idle = self._idle_times(request, num_output, start=start)
            feasible = raise_to_feasible(asked, idle)
        slack_s, _ = _first_token(feasible, idle)
        return feasible, slack_s

    def _idle_times(self, request: Request, num_output: float, *, start: int) -> IdleTimes:
        """Return what the request would take alone: its prompt from `start` on, then decodes."""
        ttft_s = self._prompt_seconds(start, request.num_prompt_tokens - start)
        ttft_s += self._pipeline.encoding.seconds_left(request, start)
        middle = request.num_prompt_tokens + round(num_output / 2)
        tpot_s = self._cost.seconds(StepShape().plus(middle, 1))
        return IdleTimes(ttft_s, tpot_s, ttft_s + max(0.0, num_output - 1) * tpot_s)

    def _prompt_seconds(self, start: int, num_tokens: int) -> float:
        """Return the time of a prompt in chunks of the token budget, from `start` on.

        A chunk's time is linear in where it starts, so that all whole ones together take as many
        times the mean of the first and the last.
        """
        budget = self._pipeline.max_num_batched_tokens
        num_whole, rest = divmod(num_tokens, budget)
        seconds = 0.0
        if num_whole:
            last = start + (num_whole - 1) * budget
            ends_s = sum(
                self._cost.seconds(StepShape().plus(place, budget)) for place in (start, last)
            )
            seconds += num_whole * ends_s / 2
        if rest:
            place = start + num_whole * budget
            seconds += self._cost.seconds(StepShape().plus(place, rest))
        return seconds


def _first_token(feasible: FeasibleSLO, idle: IdleTimes) -> tuple[float, float]:
    """Return what an idle server leaves of the time to a first token, and that time."""
    ttft_ms = feasible.slo.ttft_ms
    ttft_s = math.inf if ttft_ms is None else ttft_ms / 1e3
    return ttft_s - idle.ttft_s, ttft_s
