"""Plans steps: what may advance is put before the policy, which fills the step (`Step`).

Pure: it writes to nothing but the step. What starting a request would take is found once per plan
and goes to `commit` with it (`Found`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from lightserve.router.admission.base import PoolView
from lightserve.router.admission.peak import SharedPrefixes
from lightserve.router.arrivals import ArrivalStats, Outlook
from lightserve.router.config import SchedulerConfig
from lightserve.router.drafting import Drafting
from lightserve.router.kv.cache import KVStore
from lightserve.router.memory_plan import MemoryPlan
from lightserve.router.pipeline import Pipeline
from lightserve.router.policies.base import Step, Waiting
from lightserve.router.policies.step_budget import CopyTimes, Pool, Starts, StepLimits
from lightserve.router.queue import WaitingQueue
from lightserve.router.request import RUNNING, WAITING, FoundOf, Request
from lightserve.router.request_table import Decodes, DueTimes, RequestTable, Running
from lightserve.router.seats import Seats
from lightserve.router.step import (
    LeftOut,
    PlannedStep,
    Skips,
    Unseen,
    decodes_and_chunks,
    nums_of_samples,
    shape_of,
)
from lightserve.router.step_cost import StepShape
from lightserve.router.victims import VictimView
from lightserve.types import BE, RT, RequestClass

MAX_NEWCOMERS = 32
"""Requests that begin or resume in one step: each takes the router about half a millisecond between
two steps, for forecasts of memory above all, and the worker some time as well."""
RT_GROWTH = 2
"""Real-time requests may come to hold so many times `ArrivalStats.most_held`."""


Attempt = tuple[Running, Waiting, int]
"""Requests that run, those that wait, and cached slots that stay reserved for real-time ones."""


class Planner:
    """Plans steps over the queue, the rows and the pipeline."""

    def __init__(
        self,
        config: SchedulerConfig,
        waiting: WaitingQueue,
        rows: RequestTable,
        pipeline: Pipeline,
        demand: ArrivalStats,
    ) -> None:
        self._config = config
        self._policy = config.policy
        self._waiting = waiting
        self._rows = rows
        self._pipeline = pipeline
        self._demand = demand
        self._seats = Seats()
        """Seats of the last plan."""
        self.drafting = Drafting(config.max_draft_tokens, rows)

    def plan(
        self, kv: KVStore, suspects: Sequence[Request], headroom: int, now_s: float
    ) -> PlannedStep | None:
        """Return the next step; None: nothing can advance before news come.

        `suspects` may have killed workers: the next to be tried alone comes first. Best-effort
        newcomers may not count on `headroom` slots.
        """
        self._seats = Seats()
        if self._config.keys_take_turns:
            heads = {of: self._waiting.heads(of) for of in (RT, BE)}
            self._seats = Seats(self._rows.of(self._rows.rows), heads, now_s)
        start_s = self._pipeline.next_start_s(now_s)
        outlook = self._demand.outlook(self._pipeline.cost.work, start_s)
        running = Running(self._rows, self._seats.rows_in_order(self._rows))
        be_room = functools.partial(self._be_room, kv, running, outlook)
        found: FoundOf = functools.cache(kv.look_up)
        num_kept = headroom + kv.states.num_kept
        pool = PoolView(kv.num_slots, num_kept, functools.cache(be_room), found)

        def fill(attempt: Attempt, spared: Sequence[Request] = ()) -> Step:
            running, waiting, num_reserved = attempt
            memory = MemoryPlan(
                kv,
                self._rows,
                functools.partial(self._by_loss, kv, start_s),
                found,
                num_reserved,
                is_class_aware=self._policy.is_class_aware,
                seats=self._seats,
                spared=spared,
            )
            step = Step(
                running,
                waiting,
                self._limits(running, waiting, kv, outlook, start_s),
                memory,
                self._config.admission.begin(list(self._rows), pool),
                found=found,
                is_class_aware=self._policy.is_class_aware,
                meets_deadlines=self._policy.meets_deadlines,
            )
            self._policy.fill(step)
            step.note_rest()
            return step

        for attempt in self._attempts(kv, running, suspects):
            step = fill(attempt)
            if step.memory.robbed:
                again = fill(attempt, spared=step.memory.robbed)
                if step.memory.real_time() < again.memory.real_time():
                    step = again
            if step.memory.parts or step.budget.loads.encodes.orders:
                return self._planned(step, headroom, now_s)
        return None

    def _attempts(
        self, kv: KVStore, running: Running, suspects: Sequence[Request]
    ) -> Iterator[Attempt]:
        """Yield requests that may advance together.

        Each is for a step in which none of those before could. The reserve is given up where
        nothing could ever advance otherwise: one may need more than the rest of the pool.
        """
        is_idle, num_reserved = self._pipeline.oldest is None, kv.num_reserved_for_rt
        holders: list[Request] = []
        if suspects:
            suspect = suspects[0]
            if is_idle or suspect.num_inflight_steps > 0:
                yield *self._only([suspect]), num_reserved
            if not is_idle:
                return
            if num_reserved:
                yield *self._only([suspect]), 0
            # Where there is no room for it, those before it that were cleared make some.
            holders = [request for request in self.holders() if request not in suspects]
            running, waiting = self._only(holders)
        else:
            tree = kv.tree if self._config.be_by_sharing else None
            waiting = Waiting(self._waiting, running, self._seats, tree)
        yield running, waiting, num_reserved
        if num_reserved and not any(h.num_inflight_steps for h in self.holders()):
            yield running, waiting, 0
        # With nothing in flight no result will make room, and something has to move at last: the
        # highest rank that holds memory can take from all.
        if is_idle:
            for request in holders or self.holders():
                if request.num_schedulable_tokens > 0:
                    yield *self._only([request]), 0

    def _only(self, requests: Sequence[Request]) -> tuple[Running, Waiting]:
        """Return requests that may advance, and no others."""
        rows = [request.row for request in requests if request.state is RUNNING]
        running = Running(self._rows, np.array(rows, dtype=np.int64))
        waiting = WaitingQueue()
        waiting.requeue([request for request in requests if request.state is WAITING])
        return running, Waiting(waiting, running)

    def _limits(
        self, running: Running, waiting: Waiting, kv: KVStore, outlook: Outlook, start_s: float
    ) -> StepLimits:
        pipeline, owed = self._pipeline, self._seats.owed_of
        num_free = min(self._rows.num_free, MAX_NEWCOMERS)
        num_be, num_rt_starts = len(running.of(BE)), num_free
        if self._policy.is_class_aware:
            num_rt_starts = min(num_free + num_be + len(owed(RT)), MAX_NEWCOMERS)
        return StepLimits(
            max_num_batched_tokens=pipeline.max_num_batched_tokens,
            starts=Starts(
                num_rt_starts, num_free + len(owed(BE)), self._config.max_be_seqs - num_be
            ),
            step_number=pipeline.next_step_id,
            pool=Pool(kv.num_slots, kv.num_available - kv.num_cached, kv.num_cached, kv.num_wanted),
            num_steps_in_time=pipeline.num_steps_in_time,
            start_s=start_s,
            cost=pipeline.cost,
            copies=CopyTimes(
                pipeline.load_seconds, pipeline.ahead_seconds, pipeline.overlaps_copies
            ),
            best_effort_time=pipeline.best_effort_time,
            average_step_s=pipeline.average_step_s,
            outlook=outlook,
            turn=waiting.queue.turn(),
            seats=self._seats,
            encoding=pipeline.encoding,
        )

    def _planned(self, step: Step, headroom: int, now_s: float) -> PlannedStep:
        memory = step.memory
        decodes, chunks = decodes_and_chunks(self._rows, memory.parts)
        for request, reason in memory.stopped_for.items():
            step.skips.lose(request, reason)
        left_out = step.skips.of_step(decodes, chunks)
        newcomers = [r for r, _ in chunks if r.state is WAITING]
        changes = memory.changes()
        found = {r: step.found(r) for r in (*newcomers, *(r for r, _ in changes.loaded))}
        shape = shape_of([decodes, *chunks], step.found)
        shape, decodes = self._with_drafts(decodes, shape, step)
        return PlannedStep(
            step_id=self._pipeline.next_step_id,
            decodes=decodes,
            chunks=chunks,
            num_samples=nums_of_samples(chunks, step.found),
            paused=changes.paused,
            checkpointed=changes.checkpointed,
            preempted=changes.preempted,
            planned_at_s=now_s,
            shape=shape,
            predicted_s=self._pipeline.predict(shape, memory.num_copied)
            + step.budget.loads.encodes.seconds,
            encodes=tuple(step.budget.loads.encodes.orders),
            encode_s=step.budget.loads.encodes.seconds_by_class,
            loaded=changes.loaded,
            found=found,
            urgent=step.urgent,
            seats_given=self._seats.given(changes.paused, newcomers),
            left_out=left_out,
            unseen=self._unseen(newcomers, left_out, step.skips),
            limit_s=step.budget.deadline_s if math.isfinite(step.budget.deadline_s) else None,
            hits_limit=step.hits_limit,
            best_effort_s=step.best_effort_s,
            forecast_peak=step.admission.forecast_peak,
            headroom=headroom,
        )

    def _with_drafts(
        self, decodes: Decodes, shape: StepShape, step: Step
    ) -> tuple[StepShape, Decodes]:
        """Return a step's shape and decodes with the drafts that pay."""
        if not self.drafting.most or not len(decodes) or self.drafting.rests:
            return shape, decodes
        budget, cost = step.budget, self._pipeline.cost
        room = step.memory.num_spare - shape.num_new  # the next step needs as many slots
        drafts = self.drafting.choose(
            decodes,
            shape,
            cost,
            room=min(room, self._pipeline.max_num_batched_tokens - shape.num_new),
            limit_s=budget.deadline_s / cost.guard,
            is_late=lambda: budget.due.of_rows(decodes.rows, budget.due.residuals.due) < 0.0,
        )
        if not len(drafts):
            return shape, decodes
        contexts = self._rows.next_position[decodes.rows]
        shape = shape.plus_drafts(int(drafts.sum()), int((drafts * contexts).sum()))
        return shape, replace(decodes, drafts=drafts)

    def _unseen(
        self, newcomers: Sequence[Request], left_out: LeftOut, skips: Skips
    ) -> dict[RequestClass, Unseen]:
        """Return, per class, how many of those that wait were not looked at for a step, and why."""
        looked_at = [*newcomers, *[r for r in left_out.waiting if r.state is WAITING]]
        num_rt = len([request for request in looked_at if request.request_class is RT])
        unseen: dict[RequestClass, Unseen] = {}
        for request_class, count in ((RT, num_rt), (BE, len(looked_at) - num_rt)):
            num_requests = self._waiting.backlog(request_class).num_requests - count
            reason = skips.stopped_by.get(request_class) if num_requests else None
            unseen[request_class] = Unseen(num_requests, reason)
        return unseen

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
        held += len(running.of(RT)) * kv.states.num_slots
        num_rt = min(kv.num_slots, math.ceil(RT_GROWTH * held))
        num_known = sum([r.num_known_tokens + r.recurrent.num_slots for r in started])
        num_known -= SharedPrefixes(started).num_counted_twice
        return max(0, kv.checkpoints.num_slots + kv.num_slots - num_rt - num_known)

    def holders(self) -> list[Request]:
        """Return the running and paused requests, the highest rank first (see `MemoryPlan`).

        Those that are owed a seat have that seat's rank, whether they hold anything or not.
        """
        paused = {c: list(self._waiting.paused(c)) for c in RequestClass}
        running = self._rows.of(self._rows.rows)
        if not self._policy.is_class_aware:
            return running + paused[RT] + paused[BE]
        holders: list[Request] = []
        for request_class in (RT, BE):
            owed = self._seats.owed_of(request_class)
            seated = [r for r in running if r.request_class is request_class] + owed
            holders += self._seats.in_order(seated)
            holders += [request for request in paused[request_class] if request not in owed]
        return holders

    def _by_loss(self, kv: KVStore, start_s: float) -> list[Request]:
        """Return `holders`, in each class and state those that can best be done without last.

        All but the first of each class: it is never taken from, so that it comes to its end.
        """
        holders, can_go = self.holders(), self._config.victims
        if can_go is None:
            return holders
        due, cost = DueTimes(self._rows, start_s), self._pipeline.cost
        view = VictimView(kv, due, cost, self._config.lengths, self._pipeline.encoding)
        in_order: list[Request] = []
        firsts: set[RequestClass] = set()
        for (of, _), group in itertools.groupby(holders, key=self._standing):
            requests = list(group)
            num_kept = int(of not in firsts)
            firsts.add(of)
            others = sorted(requests[num_kept:], key=lambda request: can_go(request, view))
            in_order += [*requests[:num_kept], *others]
        return in_order

    def _standing(self, request: Request) -> tuple[RequestClass, bool]:
        of = request.request_class if self._policy.is_class_aware else RT
        return of, request.state is RUNNING
