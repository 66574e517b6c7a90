"""Storms over the real core with the unified planner: everything that can happen, at random.

Arrivals with targets of every kind, aborts, frontends that acknowledge late or vanish, worker
groups that die and come back with another pool, rows that fail, cost models that are right, wrong
or unknown, pools without a host and hosts without room. Every decision of the policy is checked
as it falls, the books after every call, and in the end every request must have had its tokens.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lightserve.messages.common import StepCoefficients
from lightserve.messages.frontend_router import (
    Abort,
    Acknowledge,
    BatchDue,
    Finish,
    Progress,
    RequestDelta,
)
from lightserve.messages.router_worker import (
    StepPlan,
    plan_rows,
)
from lightserve.router.admission.base import AdmissionRule
from lightserve.router.admission.baselines import ConservativeAdmission
from lightserve.router.admission.classwise import ClasswiseAdmission
from lightserve.router.config import SchedulerConfig
from lightserve.router.events import FromFrontend, FrontendGone, Outgoing, WorkersGone, WorkersReady
from lightserve.router.from_submit import QueueLimits
from lightserve.router.kv.cache import KVOptions, Preemption
from lightserve.router.kv.prefix_node import least_recently_used, task_aware
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.policies.base import Step
from lightserve.router.policies.step_budget import NO_LIMIT
from lightserve.router.policies.unified import UnifiedPolicy
from lightserve.router.queue import OLDEST_EVERY
from lightserve.router.request import Request
from lightserve.router.scheduler import Scheduler
from lightserve.router.slo import curve_clock, gap_clock
from lightserve.router.step import PlannedStep, Scheduled, shape_of
from lightserve.sim.simulation import Outcome
from lightserve.sim.worker import SimulatedWorker
from lightserve.types import SLO, FinishReason, FrontendId, RequestClass, RequestId, RequestKey
from support.core_scenes import MAX_LEN, Arrival, RecklessAdmission, check_outcome, submit

RT, BE = RequestClass.RT, RequestClass.BE
STEPS_PER_TOKEN = 20  # more of them: requests go round in circles
ROUNDING_S = 1e-9


class WatchedPolicy(UnifiedPolicy):
    """The unified policy; each of its decisions is held against the planner's invariants."""

    num_loads = 0
    """Times that a request loaded beside a step."""
    num_timed = 0
    """Steps in which a deadline limited what best-effort requests or prompts got."""

    def fill(self, step: Step) -> None:
        super().fill(step)
        chosen = [part for part in step.budget.parts if isinstance(part, Scheduled)]
        assert len({request for request, _ in step.budget.parts}) == len(step.budget.parts)
        assert sum(count for _, count in chosen) <= step.limits.max_num_batched_tokens
        for request, count in chosen:
            assert 1 <= count <= step.found(request).num_left
        self.num_loads += len(step.budget.parts) - len(chosen)
        self._watch_deadlines(chosen, step)

    def _watch_deadlines(self, chosen: Sequence[Scheduled], step: Step) -> None:
        """No request is late that would be in time without those that rank behind it.

        Best-effort rows harm no real-time token, and prompts harm no decode.
        """
        real_time = [part for part in chosen if part.request.request_class is RT]
        decodes = [
            (r, count)
            for r, count in real_time
            if r.row is not None and step.found(r).num_left == 1
        ]
        due = [r for r, count in real_time if count == step.found(r).num_left]
        self._watch(due, real_time, chosen, step)
        self._watch([r for r, _ in decodes], decodes, real_time, step)

    def _watch(
        self,
        due: Sequence[Request],
        before: Sequence[Scheduled],
        after: Sequence[Scheduled],
        step: Step,
    ) -> None:
        cost = step.limits.cost
        before_s, after_s = (cost.guard * cost.seconds(shape_of(part)) for part in (before, after))
        for request in due:
            residual_s = step.budget.due.of(request)
            if residual_s >= before_s + ROUNDING_S:
                assert after_s <= residual_s + ROUNDING_S, "made late by others"
                self.num_timed += len(after) > len(before)


class Storm:
    """A core in virtual time, and all that is around it."""

    worker_type: type[SimulatedWorker] = SimulatedWorker
    num_state_slots = 0
    families: tuple[int | None, ...] = (None, 0, 1)

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.policy = WatchedPolicy()
        self.num_rows = rng.randint(1, 8)
        self.num_host_slots = rng.choice([0, 0, 24, 400])
        self.lags_s = rng.choice([(0.0, 0.0), (0.0, 0.05), (0.02, 0.5)])  # of acknowledgements
        self.step_s = rng.choice([(0.004, 1e-4), (0.001, 1e-3), (0.01, 0.0)])
        """What a step takes, and each of its tokens."""
        self.error = rng.choice([0.0, 0.0, 0.3])
        link = random.Random(f"link {seed}")
        self.load_s = link.choice([1e-5, 1e-4, 1e-3])
        """For each token from the host, as a profile says."""
        self.overlaps_copies = link.random() < 0.5
        self.num_prefix_slots = self.more_prefix_slots(random.Random(f"prefixes {seed}"))
        self.core = Scheduler(self._config())
        self.now_s = 0.0
        self.num_steps = 0
        self.worker: SimulatedWorker | None = None
        self.sent: deque[StepPlan] = deque()
        self.arrivals: dict[RequestKey, Arrival] = {}
        self.outcomes: dict[RequestKey, Outcome] = {}
        self.stops: dict[RequestKey, int] = {}
        """Tokens after which a request's stop string is found."""
        self.ends: Counter[str] = Counter()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._is_busy = False
        self._group = 0
        self.num_acknowledgements = 0  # on their way
        self.start_workers()

    def _config(self) -> SchedulerConfig:
        rng = self.rng
        lengths = OutputLengths(max_output_tokens=MAX_LEN)
        admission = rng.choice([*["reckless"] * 3, *["loose"] * 2, "conservative"])
        is_exclusive = rng.random() < 0.15
        return SchedulerConfig(
            max_model_len=MAX_LEN,
            max_num_seqs=self.num_rows,
            max_num_batched_tokens=rng.choice([self.num_rows, 16, 24, 64]),
            max_be_seqs=rng.choice([NO_LIMIT, 1, 3]),
            rt_kv_deviations=rng.choice([0.0, 0.0, 2.0]),
            queue_limits=dict.fromkeys(RequestClass, QueueLimits(1000, 1 << 30)),
            policy=self.policy,
            slo_clock=rng.choice([curve_clock, gap_clock]),
            admission=_admission(admission),
            lengths=lengths,
            kv=KVOptions(
                cache_order=None
                if is_exclusive
                else rng.choice([None, task_aware, least_recently_used]),
                block_size=rng.choice([1, 4, 16]),
                is_exclusive=is_exclusive,
                preemption=rng.choice(list(Preemption)),
                rt_cache_min_tokens=0 if is_exclusive else rng.choice([0, 30]),
            ),
        )

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        """Let something happen later."""
        heapq.heappush(self._heap, (self.now_s + delay_s, next(self._order), action))

    def run(self) -> None:
        """Let everything happen, and what follows from it."""
        while self._heap:
            self.now_s, _, action = heapq.heappop(self._heap)
            action()
            self._pump()
        self._check_end()

    def _pump(self) -> None:
        self.core.check_integrity()
        while isinstance(step := self.core.plan(self.now_s), PlannedStep):
            self._check(step)
            self.sent.append(self.core.commit(step, self.now_s))
            self.num_steps += 1
        if step.at_s is not None:
            assert step.at_s > self.now_s, "asks at once again"
            self.at(step.at_s - self.now_s, lambda: None)
        self._execute()
        is_idle = self.worker is not None and not self._is_busy and not self.sent
        if is_idle and self.num_acknowledgements == 0:
            assert not self.core._requests, "hangs: nothing is in flight, nothing will happen"

    def _execute(self) -> None:
        if self._is_busy or not self.sent:
            return
        assert self.worker is not None
        plan = self.sent.popleft()
        base_s, token_s = self.step_s
        exec_s = base_s + token_s * sum(row.num_tokens for row in plan_rows(plan))
        exec_s *= self.rng.uniform(1 - self.error, 1 + 3 * self.error)
        result = self.worker.execute(plan, exec_s=exec_s, idle_s=0.0)
        group = self._group
        self._is_busy = True

        def finish() -> None:
            if group == self._group:
                self._is_busy = False
                self.take_in(self.core.on_result(result, self.now_s))

        self.at(exec_s, finish)

    # ---------------------------------------------------------------- what happens

    def start_workers(self) -> None:
        """A worker group says hello."""
        rng = self.rng
        num_slots = rng.choice([MAX_LEN, 90, 120, 400])
        self.worker = self.worker_type(
            num_slots=num_slots,
            max_num_seqs=self.num_rows,
            max_model_len=MAX_LEN,
            num_host_slots=self.num_host_slots + self.num_prefix_slots,
            num_state_slots=self.num_state_slots,
        )
        factor = rng.choice([1.0, 1.0, 0.3, 3.0])
        base_s, token_s = self.step_s
        zeros = dict.fromkeys(StepCoefficients.__struct_fields__, 0.0)
        known = {
            "floor_s": factor * base_s,
            "per_new_s": factor * token_s,
            "per_loaded_token_s": self.load_s,
        }
        profile = StepCoefficients(**zeros | known) if rng.random() < 0.7 else None
        ready = WorkersReady(
            num_slots,
            self.num_host_slots,
            profile,
            self.overlaps_copies,
            num_state_slots=self.num_state_slots,
            num_prefix_slots=self.num_prefix_slots,
        )
        self.take_in(self.core.on_message(ready, self.now_s))

    def kill_workers(self) -> None:
        """The worker group dies; another one comes."""
        if self.worker is None:
            return
        self.worker, self._is_busy = None, False
        self._group += 1
        self.sent.clear()
        self.take_in(self.core.on_message(WorkersGone(), self.now_s))
        self.at(self.rng.uniform(0, 0.2), self.start_workers)

    def arrive(self) -> None:
        """A request with whatever targets."""
        rng = self.rng
        of = rng.choice([RT, BE])
        arrival = Arrival(
            self.now_s,
            rng.randint(1, 40),
            rng.randint(1, 24),
            rng.randint(1, 24),
            frontend_id=rng.randint(0, 2),
            request_class=of,
            family=rng.choice(self.families),
        )
        key = RequestKey(FrontendId(arrival.frontend_id), RequestId(len(self.arrivals)))
        self.arrivals[key], self.outcomes[key] = arrival, Outcome(self.now_s)
        has_stops = rng.random() < 0.3
        if has_stops:
            self.stops[key] = rng.choice([1000, rng.randint(1, 24)])
        targets = _targets(rng, of)
        batch = rng.randint(0, 2) if of is BE and targets.completion_s is not None else 0
        message = submit(
            int(key.request_id),
            arrival,
            slo=targets,
            batch=batch,
            priority=rng.choice([0, 0, 0, -2, 3]),
            age_s=rng.choice([0.0, 0.05]),
            needs_acknowledgement=has_stops,
            **self.more_of_request(),
        )
        self.take_in(self.core.on_message(FromFrontend(key.frontend_id, message), self.now_s))
        if rng.random() < 0.15:
            self.at(rng.uniform(0, 0.3), lambda: self.abort(key))
        if batch:
            due = BatchDue(batch=batch, due_in_s=rng.uniform(-1.0, 2.0))
            event = FromFrontend(key.frontend_id, due)
            self.at(
                rng.uniform(0, 0.3), lambda: self.take_in(self.core.on_message(event, self.now_s))
            )

    def more_prefix_slots(self, rng: random.Random) -> int:
        """Return how many slots the host pool has for prefixes, beside those of requests."""
        return 0

    def more_of_request(self) -> dict[str, Any]:
        """Return fields of a request that is about to be sent, beside the usual ones."""
        return {}

    def abort(self, key: RequestKey) -> None:
        """Its client goes away."""
        if self.outcomes.pop(key, None) is not None:
            event = FromFrontend(key.frontend_id, Abort(request_id=key.request_id))
            self.take_in(self.core.on_message(event, self.now_s))

    def lose_frontend(self) -> None:
        """One frontend dies."""
        gone = FrontendId(self.rng.randint(0, 2))
        for key in [key for key in self.outcomes if key.frontend_id == gone]:
            del self.outcomes[key]
        self.take_in(self.core.on_message(FrontendGone(gone), self.now_s))

    def take_in(self, news: list[Outgoing]) -> None:
        """Frontends get news; they say how far they have looked, some time later."""
        for outgoing in news:
            for delta in outgoing.message.each():
                self._take_in(RequestKey(outgoing.frontend_id, delta.request_id), delta)

    def _take_in(self, key: RequestKey, delta: RequestDelta) -> None:
        outcome = self.outcomes[key]
        assert outcome.finish_reason is None, "news after the end"
        outcome.note(delta, self.now_s)
        if key not in self.stops or outcome.error is not None:
            return
        count, stop = len(outcome.token_ids), self.stops[key]
        message: Finish | Acknowledge = Acknowledge([Progress(key.request_id, count)])
        if count >= stop or delta.finish_reason is not None:
            message = Finish(key.request_id, min(count, stop))
        self.num_acknowledgements += 1

        def answer() -> None:
            self.num_acknowledgements -= 1
            if isinstance(message, Finish) and outcome.finish_reason is None:
                self.outcomes.pop(key, None)  # it has what it wanted
                self.ends["stop string"] += 1
            self.take_in(self.core.on_message(FromFrontend(key.frontend_id, message), self.now_s))

        self.at(self.rng.uniform(*self.lags_s), answer)

    # ---------------------------------------------------------------- what must hold

    def _check(self, step: PlannedStep) -> None:
        """Invariants of classes, memory and order (`WatchedPolicy` has the planner's)."""
        moved = {request for request, _ in step.scheduled}
        losers = {*step.paused, *step.preempted, *(request for request, _ in step.checkpointed)}
        assert moved, "an empty step"
        assert all(request.key in self.core._requests for request in moved | losers)
        assert not moved & losers, "takes part and loses"
        assert not (step.paused and (self.sent or self._is_busy)), "paused on a guess"
        if any(request.request_class is RT for request in losers):
            self._check_last_resort(step)
        assert self.core._waiting.num_since_oldest < OLDEST_EVERY

    def _check_last_resort(self, step: PlannedStep) -> None:
        """Real-time requests lose to a senior of their class, once best-effort has nothing."""
        kv = self.core._kv
        assert kv is not None
        live = [*self.core.running, *self.core._waiting]
        best_effort = [r for r in live if r.request_class is BE and r.slots is not None]
        kept = [r for r in best_effort if r not in step.preempted]
        taken = sum(kv.gain(r, count) for r, count in step.checkpointed if r in kept)
        left = kv.num_freed_by([*step.preempted, *kept]) - kv.num_freed_by(step.preempted) - taken
        assert left <= 0, "real-time loses beside best-effort memory"
        advancing = {request.request_class for request, _ in step.scheduled}
        assert RT in advancing, "real-time loses for best-effort"

    def _check_end(self) -> None:
        core = self.core
        total = sum(a.num_prompt + a.num_output for a in self.arrivals.values())
        assert self.num_steps <= STEPS_PER_TOKEN * (total + 10), "goes round in circles"
        for key, outcome in self.outcomes.items():
            assert outcome.finish_reason is not None, "starved"
            if outcome.finish_reason is FinishReason.ERROR:
                self.ends[str(outcome.error)] += 1
            elif key not in self.stops:
                check_outcome(self.arrivals[key], outcome)
                self.ends["whole"] += 1
        assert not core._requests and len(core._rows) == 0 and len(core._waiting) == 0
        assert core.num_used_slots == 0, "leaks"
        assert core.kv is None or core.kv.checkpoints.num_used == 0, "leaks"
        assert core.num_unfinished == 0


def _admission(name: str) -> AdmissionRule:
    if name == "reckless":
        return RecklessAdmission()
    if name == "conservative":
        return ConservativeAdmission()
    rules = (ConservativeAdmission(overcommit=factor) for factor in (1.7, 3.0))
    return ClasswiseAdmission(*rules)


def _targets(rng: random.Random, of: RequestClass) -> SLO:
    if of is BE:
        return SLO(completion_s=rng.choice([None, None, rng.uniform(0.01, 2.0)]))
    if rng.random() < 0.15:
        return SLO(completion_s=rng.uniform(0.01, 2.0))
    ttft_ms = rng.choice([None, 1.0, rng.uniform(1, 300)])
    tpot_ms = rng.choice([None, 0.5, rng.uniform(1, 60)])
    return SLO(ttft_ms, tpot_ms, rng.choice([None, None if tpot_ms is None else 2 * tpot_ms]))


def storm(seed: int, num_events: int = 40) -> Storm:
    """Return a storm that is over."""
    return play(Storm(seed), num_events)


WorldT = TypeVar("WorldT", bound=Storm)


def play(world: WorldT, num_events: int = 40) -> WorldT:
    """Let a storm's events happen; return it when it is over."""
    rng = world.rng
    actions = [
        (world.arrive, 30),
        (world.kill_workers, rng.choice([0, 0, 1])),
        (world.lose_frontend, rng.choice([0, 1])),
    ]
    span_s = rng.choice([0.05, 0.5, 3.0])
    for _ in range(num_events):
        (action,) = rng.choices([a for a, _ in actions], [weight for _, weight in actions])
        world.at(rng.uniform(0, span_s), action)
    world.run()
    return world
