"""Small states of a planner at random, and which steps are feasible in them; see `best_plans`."""

from __future__ import annotations

import copy
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from lightserve.messages.common import StepCoefficients
from lightserve.router.admission.base import PoolView
from lightserve.router.arrivals import ArrivalStats
from lightserve.router.config import SchedulerConfig
from lightserve.router.kv.cache import KVOptions, KVStore, Preemption
from lightserve.router.memory_plan import MemoryPlan
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.pipeline import Pipeline
from lightserve.router.planner import Planner
from lightserve.router.policies.base import Policy
from lightserve.router.policies.unified import UnifiedPolicy
from lightserve.router.queue import WaitingQueue
from lightserve.router.request import RUNNING, FoundOf, Request, RequestState, progress
from lightserve.router.request_table import RequestTable
from lightserve.router.slo import TokenDeadlines
from lightserve.router.step import Scheduled, each_scheduled, shape_of
from lightserve.router.step_cost import StepShape
from lightserve.types import SLO, StepId
from support.policy_scenes import BE, RT, make_request

MAX_REQUESTS = 10
START_S = 1000.0
NUM_HOST_SLOTS = 1 << 16
ROUNDING_S = 1e-9


class WholePrompts:
    """Admits requests whose whole prompts find memory, best-effort ones without taking any."""

    forecast_peak = None

    def __init__(self, kv: KVStore, num_best_effort: int) -> None:
        """`num_best_effort` slots are in the hands of best-effort requests."""
        self._left = {RT: kv.num_available + num_best_effort, BE: kv.num_available}
        self._found: FoundOf = progress

    def begin(self, live: Collection[Request], pool: PoolView) -> WholePrompts:
        del live
        again = copy.copy(self)
        again._left, again._found = dict(self._left), pool.found
        return again

    def admit(self, request: Request) -> bool:
        found = self._found(request)
        num_tokens = found.num_loaded + found.num_left
        if num_tokens > self._left[request.request_class]:
            return False
        self._left = {of: count - num_tokens for of, count in self._left.items()}
        return True


class Reading(Enum):
    """When a real-time request whose prompt is cut counts as one that advances."""

    SHARE = "share"
    TOKEN = "token"


@dataclass(slots=True)
class State:
    """What the planner of a core sees: queues, rows, memory, and a cost model that is right."""

    kv: KVStore
    rows: RequestTable
    budget: int
    pipeline: Pipeline = field(default_factory=Pipeline)
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    mean_step_s: float = 0.0
    requests: list[Request] = field(default_factory=list)
    """All of them, real-time ones first."""

    def put(self, request: Request, *, num_held: int = 0, num_on_host: int | None = None) -> None:
        """Add a request: new, or running if it holds anything, or (with a host part) paused."""
        self.requests.append(request)
        self.requests.sort(key=lambda one: one.request_class is BE)
        if request.state is RequestState.WAITING:
            self.waiting.append(request)
        else:
            request.slots = np.empty(request.max_known_tokens, dtype=np.int32)
            request.slots[:num_held] = self.kv.acquire([(request, num_held)])
            if num_on_host is None:
                self.rows.acquire(request)
        if num_on_host is not None:
            request.pause()
            if num_on_host:
                self.kv.take(request, num_on_host)
                self.kv.take_copies()
            self.waiting.requeue([request])

    def set_due(self, request: Request, in_ms: float) -> None:
        """Let a request's next token be due so long after the start of the step."""
        request.deadlines = TokenDeadlines(SLO(ttft_ms=in_ms), START_S)
        if request.row is not None:
            self.rows.track(request.row, request.deadlines)
            self.rows.is_timed[request.row] = True

    def residual(self, request: Request) -> float:
        """Return the seconds from the start of the step to a request's deadline."""
        assert request.deadlines is not None
        return request.deadlines.residual(START_S)

    def is_lost(self, request: Request) -> bool:
        """Whether a request is late, or would be if it had the server for itself from here on."""
        found = self.kv.look_up(request)
        seconds, start = 0.0, found.start
        while (rest := found.num_left + found.start - start) > 0:
            count = min(rest, self.budget)
            seconds += self.pipeline.cost.seconds(StepShape().plus(start, count))
            start += count
        seconds += self.copy_seconds(request)
        return seconds > self.residual(request)

    def copy_seconds(self, *newcomers: Request) -> float:
        """Return the seconds that a step waits for the copies of those who resume."""
        num_loaded = sum(self.kv.look_up(request).num_loaded for request in newcomers)
        return self.pipeline.copy_seconds(num_loaded)

    def seconds(self, step: Sequence[Scheduled]) -> float:
        """Return the predicted seconds of a step."""
        shape = shape_of(step, self.kv.look_up)
        return self.pipeline.cost.seconds(shape) + self.copy_seconds(*(r for r, _ in step))

    def planner(self, policy: Policy | None = None) -> Planner:
        """Return the planner of a core with a policy, by default the unified one."""
        best_effort = [r for r in self.requests if r.request_class is BE]
        config = SchedulerConfig(
            max_model_len=1 << 16,
            max_num_seqs=len(self.rows) + self.rows.num_free,
            max_num_batched_tokens=self.budget,
            queue_limits={},
            policy=policy or UnifiedPolicy(),
            admission=WholePrompts(self.kv, sum(r.num_held_tokens for r in best_effort)),
            lengths=OutputLengths(max_output_tokens=1 << 16),
        )
        demand = ArrivalStats()
        return Planner(config, self.waiting, self.rows, self.pipeline, demand)

    def planned(self, policy: Policy | None = None) -> list[Scheduled]:
        """Return the step that the planner comes to."""
        step = self.planner(policy).plan(self.kv, (), 0, START_S)
        return [] if step is None else step.scheduled

    def fits(self, step: Sequence[Scheduled]) -> bool:
        """Whether memory and rows allow all of a step."""
        holders, found = self.planner().holders, self.kv.look_up
        memory = MemoryPlan(self.kv, self.rows, holders, found, 0, is_class_aware=True)
        for part in step:
            memory.place(part)
        return set(each_scheduled(memory.parts)) == set(step)

    def is_feasible(self, step: Sequence[Scheduled], reading: Reading) -> bool:
        """Whether a step that memory and rows allow keeps all deadlines; see the module."""
        advancing = {
            request
            for request, count in step
            if reading is Reading.SHARE or count == self.kv.look_up(request).num_left
        }
        time_s = self.seconds(step)
        return all(
            time_s + (0.0 if request in advancing else self.mean_step_s)
            <= self.residual(request) + ROUNDING_S
            for request in self.requests
            if request.request_class is RT and not self.is_lost(request)
        )

    def be_rate(self, step: Sequence[Scheduled]) -> float:
        """Return best-effort tokens per second."""
        tokens = sum(count for request, count in step if request.request_class is BE)
        return tokens / self.seconds(step) if step else 0.0


def empty_state(
    *, num_slots: int, num_rows: int, budget: int, coefficients: StepCoefficients
) -> State:
    """Return a state without requests; it is no turn of late ones."""
    kv = KVStore(
        num_slots, KVOptions(preemption=Preemption.CHECKPOINT), num_host_slots=NUM_HOST_SLOTS
    )
    state = State(kv, RequestTable(num_rows), budget)
    state.pipeline.next_step_id = StepId(1)
    state.pipeline.max_num_batched_tokens = budget
    state.pipeline.cost.use_profile(coefficients)
    return state


def make_state(seed: int, max_requests: int = MAX_REQUESTS) -> State:
    """Return a random state: decodes, prompts in progress, newcomers, paused ones, both classes.

    Steps cost what they may cost on hardware from small to large; deadlines go from just missed
    to far off, pools from full to nearly empty.
    """
    rng = random.Random(seed)
    kinds = rng.choices(
        ["rt decode", "rt prompt", "rt new", "be decode", "be prompt", "be new", "be paused"],
        weights=[6, 2, 3, 4, 2, 3, 1],
        k=rng.randint(1, max_requests),
    )
    requests = [_request(number, kind, rng) for number, kind in enumerate(kinds)]
    num_held = sum(request.num_computed_tokens for request in requests)
    num_spare = round(rng.choice([rng.uniform(0, 100), rng.uniform(0, 1000), 20_000]))
    num_running = sum(kind.endswith(("decode", "prompt")) for kind in kinds)
    num_slots = max(num_held + num_spare, *(r.num_known_tokens + 1 for r in requests), 1)
    state = empty_state(
        num_slots=num_slots,
        num_rows=max(1, num_running + rng.choice([0, 1, 2, MAX_REQUESTS])),
        budget=rng.choice([256, 512, 1024, 2048]),
        coefficients=_coefficients(rng),
    )
    cost = state.pipeline.cost
    _set_deadlines(requests, rng)
    for request, kind in zip(requests, kinds, strict=True):
        num_held = request.num_computed_tokens
        num_on_host = rng.choice([0, rng.randint(0, num_held)]) if kind.endswith("paused") else None
        state.put(request, num_held=num_held, num_on_host=num_on_host)
    decodes = [Scheduled(r, 1) for r in state.rows if r.num_schedulable_tokens == 1]
    state.mean_step_s = cost.seconds(shape_of(decodes).plus(0, rng.randint(2, 512)))
    state.pipeline.average_step_s = state.mean_step_s
    state.waiting.sink_late(START_S)
    return state


def _set_deadlines(requests: Sequence[Request], rng: random.Random) -> None:
    """Real-time tokens are due at random; with targets alike, those that wait are by arrival."""
    real_time = [request for request in requests if request.request_class is RT]
    residuals = {
        request: rng.choice([rng.uniform(-0.02, 0.1), rng.uniform(0.0, 0.4)])
        for request in real_time
    }
    fresh = [r for r in real_time if r.state is not RUNNING]
    if rng.random() < 0.5:
        alike = sorted(residuals[request] for request in fresh)
        residuals |= dict(zip(fresh, alike, strict=True))
    for request, residual_s in residuals.items():
        request.slo = SLO(tpot_ms=residual_s * 1e3)
        request.deadlines = TokenDeadlines(SLO(ttft_ms=residual_s * 1e3), START_S)


def _coefficients(rng: random.Random) -> StepCoefficients:
    return StepCoefficients(
        floor_s=rng.uniform(2e-3, 15e-3),
        knee=rng.choice([0.0, rng.uniform(16, 256)]),
        per_new_s=rng.uniform(15e-6, 100e-6),
        per_decode_s=rng.choice([0.0, rng.uniform(0, 200e-6)]),
        per_chunk_s=rng.choice([0.0, rng.uniform(0, 500e-6)]),
        per_decode_context_s=rng.uniform(0.05e-6, 0.5e-6),
        per_chunk_context_s=rng.uniform(0, 0.1e-6),
        per_chunk_pair_s=rng.uniform(1e-9, 10e-9),
        per_loaded_token_s=rng.uniform(2e-6, 20e-6),
    )


def _request(number: int, kind: str, rng: random.Random) -> Request:
    of, stage = kind.split()
    num_prompt = round(2.0 ** rng.uniform(1, 11))
    request = make_request(number, RT if of == "rt" else BE, prompt=num_prompt)
    if stage != "new":
        request.state = RequestState.RUNNING
    if stage in {"decode", "paused"}:
        request.output_token_ids = [1] * rng.randint(1, 400)
        request.num_computed_tokens = request.num_known_tokens - 1
    elif stage == "prompt":
        request.num_computed_tokens = rng.randint(0, max(0, num_prompt - 2))
    return request
