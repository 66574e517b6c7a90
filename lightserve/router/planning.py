"""Who advances in the next step: the policy's choice, as far as memory and rows allow.

Reads the router's state and changes nothing but notes on waiting requests (what starting them
would take), which are made anew for every plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from lightserve.messages.common import TokenLogprob
from lightserve.messages.router_worker import MAX_PROMPT_LOGPROB_POSITIONS
from lightserve.router.admission.base import PoolView
from lightserve.router.admission.peak import SharedPrefixes
from lightserve.router.core_config import CoreConfig
from lightserve.router.demand import Outlook, RealTimeDemand
from lightserve.router.kv.cache import KVStore
from lightserve.router.pipeline import Pipeline
from lightserve.router.placement import fit_into_memory
from lightserve.router.policies.base import StepLimits, Waiting
from lightserve.router.queue import Turn, WaitingQueue, prefix_in_flight
from lightserve.router.request import RUNNING, WAITING, Request
from lightserve.router.request_table import RequestTable, Running
from lightserve.router.shares import Allotment, Fit, LeftOut, Reason, Share, Skips, Unseen
from lightserve.types import BE, RT, RequestClass

# Log-probabilities of prompts: how many a step may compute, and which are news. Pure.


def cap_positions(shares: Sequence[Share], skips: Skips) -> list[Share]:
    """Cut the chunks of prompts whose log-probabilities are wanted to the step's limit."""
    chunks = [share for share in shares if isinstance(share, Allotment)]
    if not [r for r, _ in chunks if r.sampling.num_prompt_logprobs is not None]:
        return list(shares)
    num_left = MAX_PROMPT_LOGPROB_POSITIONS
    capped: list[Share] = []
    for share in shares:
        if not isinstance(share, Allotment):
            capped.append(share)
            continue
        request, chunk = share
        if request.wants_prompt_logprobs:
            chunk = min(chunk, num_left)
            num_left -= chunk
        if chunk > 0:
            capped.append(Allotment(request, chunk))
        else:
            skips.note(request, Reason.TOKENS)
    return capped


def take_news(
    request: Request, start_position: int, logprobs: list[TokenLogprob]
) -> list[TokenLogprob]:
    """Return the log-probabilities that have not been sent yet, and count them as sent.

    `logprobs` are those of prompt tokens start_position+1 …; a preempted request computes some
    of them twice.
    """
    num_known = request.num_prompt_logprobs_sent - start_position
    news = logprobs[max(0, num_known) :]
    request.num_prompt_logprobs_sent += len(news)
    return news


MAX_NEWCOMERS = 32
"""Requests that begin or resume in one step: each takes the router about half a millisecond between
two steps, for forecasts of memory above all, and the worker some time as well."""
RT_GROWTH = 2
"""Real-time requests may come to hold so many times `RealTimeDemand.most_held`."""


class StepPlanner:
    """Chooses steps over the core's queues, rows and pipeline."""

    def __init__(
        self,
        config: CoreConfig,
        waiting: WaitingQueue,
        rows: RequestTable,
        pipeline: Pipeline,
        demand: RealTimeDemand,
    ) -> None:
        self._config = config
        self._waiting = waiting
        self._rows = rows
        self._pipeline = pipeline
        self._demand = demand
        self._is_class_aware = config.policy.is_class_aware

    def running(self) -> list[Request]:
        """Return the requests that hold rows and have not ended, in order of admission."""
        return self._rows.of(self._rows.rows)

    def choose(
        self,
        kv: KVStore,
        suspects: Sequence[Request],
        headroom: int,
        now_s: float,
        skips: Skips,
    ) -> Fit:
        """Return who advances: a suspect alone if there is one, else whom the policy selects.

        Args:
            kv: the pool.
            suspects: requests that may have killed workers, the next to be tried first.
            headroom: slots that best-effort newcomers may not count on.
            now_s: the time.
            skips: is told whom the step leaves out.
        """
        running = Running(self._rows)
        start_s = self._pipeline.next_start_s(now_s)
        outlook = self._demand.outlook(self._pipeline.cost.work, start_s)
        be_room = self._be_room(kv, running, outlook)
        attempt = _Attempt(kv, headroom, be_room, start_s, outlook, skips)
        if suspects:
            fit = self._try_suspect(attempt, suspects)
            skips.note_rows(running.rows, Reason.ORDER)
            skips.stop_all(Reason.ORDER)
            return fit
        looked_up = _LookedUp(
            self._waiting, kv, running, skips, by_sharing=self._config.be_by_sharing
        )
        return self._first_fit(attempt, running, looked_up) or self._senior_alone(attempt)

    def unseen(
        self, fit: Fit, left_out: LeftOut, stopped_by: Mapping[RequestClass, Reason]
    ) -> dict[RequestClass, Unseen]:
        """Return, per class, how many of those who wait were not looked at for a step, and why.

        Args:
            fit: who advances.
            left_out: what was looked at and does not.
            stopped_by: what ended the search of those of a class that wait.
        """
        looked_at = [*fit.newcomers, *[r for r in left_out.waiting if r.state is WAITING]]
        num_rt = len([request for request in looked_at if request.request_class is RT])
        num_seen = {RT: num_rt, BE: len(looked_at) - num_rt}
        unseen: dict[RequestClass, Unseen] = {}
        for request_class, count in num_seen.items():
            num_requests = self._waiting.backlog(request_class).num_requests - count
            reason = stopped_by.get(request_class) if num_requests else None
            unseen[request_class] = Unseen(num_requests, reason)
        return unseen

    def _try_suspect(self, attempt: _Attempt, suspects: Sequence[Request]) -> Fit:
        """Return a step of the first suspect alone, or one of those that hold what it needs."""
        suspect = suspects[0]
        if not self._pipeline.is_empty and suspect.num_inflight_steps == 0:
            return Fit(())
        kv = attempt.kv
        alone = self._first_fit(attempt, *self._one(suspect, kv))
        if alone or not self._pipeline.is_empty:
            return alone
        # Where there is no room for it, those before it that were cleared make some.
        cleared = [request for request in self.holders() if request not in suspects]
        running = self._running([request for request in cleared if request.state is RUNNING])
        paused = _Only([kv.look_up(request) for request in cleared if request.is_paused])
        return self._first_fit(attempt, running, paused) or self._senior_alone(attempt)

    def _running(self, requests: Sequence[Request]) -> Running:
        """Return these requests, which have rows, and no others."""
        rows = np.array([request.row for request in requests], dtype=np.int64)
        return Running(self._rows, rows)

    def _one(self, request: Request, kv: KVStore) -> tuple[Running, _Only]:
        """Return what runs and what waits if there is nothing but this request."""
        if request.state is RUNNING:
            return self._running([request]), _Only([])
        return self._running([]), _Only([kv.look_up(request)])

    def _first_fit(self, attempt: _Attempt, running: Running, waiting: Waiting) -> Fit:
        """Return the first choice of the policy of which something fits; falsy if none does.

        With nothing in flight no result will make room, and somebody has to move at last: when it
        is the turn of those who miss memory, it becomes that of those who hold it.
        """
        for num_skipped in (0, 1) if self._pipeline.is_empty else (0,):
            for who in (waiting, _Only([])):
                if fit := self._select(attempt, running, who, num_skipped=num_skipped):
                    return fit
        return Fit(())

    def _senior_alone(self, attempt: _Attempt) -> Fit:
        """Let the most senior holder of memory move if nothing is in flight: it can take from all.

        The policy may go on choosing requests that cannot take from anybody.
        """
        if self._pipeline.is_empty:
            for request in self.holders():
                one = self._one(request, attempt.kv)
                if request.num_schedulable_tokens > 0:
                    return self._select(attempt, *one)
        return Fit(())

    def _select(
        self,
        attempt: _Attempt,
        running: Running,
        waiting: Waiting,
        *,
        num_skipped: int = 0,
    ) -> Fit:
        """Ask the policy who of these advances, and see that it fits; falsy if nobody can.

        Args:
            attempt: the pool, and what else holds for all attempts at a step.
            running: who may advance.
            waiting: who may start.
            num_skipped: turns that are skipped, for policies that serve in turn.
        """
        kv, skips = attempt.kv, attempt.skips
        num_free = min(self._rows.num_free, MAX_NEWCOMERS)
        num_yielding = len(running.of(BE))
        limits = StepLimits(
            max_num_batched_tokens=self._pipeline.max_num_batched_tokens,
            num_free_rows=num_free,
            max_be_seqs=self._config.max_be_seqs,
            step_number=self._pipeline.next_step_id + num_skipped,
            num_slots=kv.num_slots,
            num_free_slots=kv.num_available - kv.num_cached,
            start_s=attempt.start_s,
            cost=self._pipeline.cost,
            guard=self._pipeline.guard,
            best_effort_time=self._pipeline.best_effort_time,
            average_step_s=self._pipeline.average_step_s,
            load_seconds=self._pipeline.load_seconds,
            ahead_seconds=self._pipeline.ahead_seconds,
            overlaps_copies=self._pipeline.overlaps_copies,
            outlook=attempt.outlook,
            num_yielding_rows=(
                min(num_yielding, MAX_NEWCOMERS - num_free) if self._is_class_aware else 0
            ),
            turn=self._waiting.turn() if isinstance(waiting, _LookedUp) else Turn(),
            skips=skips,
        )
        admission = self._config.admission.begin(
            list(self._rows),
            PoolView(kv.num_slots, attempt.headroom, attempt.be_room),
        )
        wanted = self._config.policy.select(running, waiting, limits, admission)
        fit = fit_into_memory(
            cap_positions(wanted, skips),
            kv,
            self.holders,
            self._rows.num_free,
            is_class_aware=self._is_class_aware,
        )
        fit = replace(fit, forecast_peak=admission.forecast_peak)
        for request, reason in fit.refused.items():
            skips.take_back(request, Reason.LOADING)
            skips.note(request, reason)
        for request, reason in fit.stopped_for.items():
            skips.lose(request, reason)
        return fit

    def _be_room(self, kv: KVStore, running: Running, outlook: Outlook) -> int | None:
        """Return how many tokens best-effort newcomers may bring, see `PoolView`; None: any.

        One may start however large it is while no other of its class holds anything.
        """
        if not kv.saves or self._waiting.backlog(BE).num_requests == 0:
            return None
        started = self._rows.of(running.of(BE))
        started += self._waiting.paused(BE)
        if not started:
            return None
        held = self._demand.most_held(outlook.kv_per_step_s, self._pipeline.average_step_s)
        num_rt = min(kv.num_slots, math.ceil(RT_GROWTH * held))
        num_known = sum([r.num_known_tokens for r in started])
        num_known -= SharedPrefixes(started).num_counted_twice
        return max(0, kv.checkpoints.num_slots + kv.num_slots - num_rt - num_known)

    def holders(self) -> list[Request]:
        """Return the running and paused requests, the most senior first (see `fit_into_memory`)."""
        paused = {c: list(self._waiting.paused(c)) for c in RequestClass}
        running = self.running()
        if not self._is_class_aware:
            return running + paused[RT] + paused[BE]
        holders: list[Request] = []
        for request_class in (RT, BE):
            holders += [r for r in running if r.request_class is request_class]
            holders += paused[request_class]
        return holders


class _Attempt(NamedTuple):
    """What all attempts at one step have in common."""

    kv: KVStore
    headroom: int
    """Slots that best-effort newcomers may not count on."""
    be_room: int | None
    """See `PoolView`."""
    start_s: float
    """When the step will begin."""
    outlook: Outlook
    skips: Skips


class _LookedUp:
    """The waiting, each with notes on what starting it takes; see `policies.base.Waiting`."""

    def __init__(
        self,
        waiting: WaitingQueue,
        kv: KVStore,
        running: Running,
        skips: Skips,
        *,
        by_sharing: bool,
    ) -> None:
        """`by_sharing`: best-effort requests come by what is cached of them, not by arrival."""
        self._waiting = waiting
        self._kv = kv
        self._running = running
        self._skips = skips
        self._tree = kv.tree if by_sharing else None

    def __iter__(self) -> Iterator[Request]:
        return map(self._kv.look_up, self._waiting)

    def of(self, request_class: RequestClass) -> Iterator[Request]:
        """Iterate over one class.

        A best-effort request whose prefix is just being computed by another waits for it where
        these come by what they share; a real-time one does not (architecture 6).
        """
        if request_class is RT:
            return map(self._kv.look_up, self._waiting.real_time())
        return self._best_effort()

    def late(self) -> Iterator[Request]:
        """Iterate over real-time requests that never ran and are late."""
        return map(self._kv.look_up, self._waiting.late())

    def jobs(self) -> Iterator[Request]:
        """Iterate over best-effort requests with a completion time, the earliest first."""
        return map(self._kv.look_up, self._waiting.jobs())

    def _best_effort(self) -> Iterator[Request]:
        count = max(1, len(self._running))
        table, rows = self._running.table, self._running.rows
        context_len = float(table.next_position[rows].sum()) / count
        is_shared = self._tree is not None
        prefilling = table.of(rows[~table.is_plain[rows]]) if is_shared else []
        prefilling = [r for r in prefilling if not r.is_prompt_shared]
        turn = self._waiting.turn()
        for request in self._waiting.best_effort(turn, self._tree, context_len):
            self._kv.look_up(request)
            if is_shared and prefix_in_flight(request, prefilling):
                self._skips.note(request, Reason.BLOCKED)
            else:
                yield request
        self._skips.stop(BE, Reason.ORDER)  # the rest were not worth asking


class _Only:
    """These requests and no others; see `policies.base.Waiting`."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def of(self, request_class: RequestClass) -> Iterator[Request]:
        """Iterate over one class."""
        return (r for r in self._requests if r.request_class is request_class)

    def jobs(self) -> Iterator[Request]:
        """Iterate over those that may have a completion time."""
        return self.of(BE)

    def late(self) -> Iterator[Request]:
        """Iterate over nobody: whoever is tried alone comes in its turn."""
        return iter(())
