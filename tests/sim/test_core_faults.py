"""Faults under random traffic: worker groups die, pools change, rows fail; and a poison request."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest
from support.core_scenes import (
    MAX_LEN,
    MAX_SEQS,
    NUM_SLOTS,
    Arrival,
    RecklessAdmission,
    check_outcome,
    events_of,
    make_core,
    pack_results,
    step_time,
    submit,
)
from support.grids import choose, every_value, more_when_long
from support.storms import storm

from lightserve.messages.frontend_router import Abort, ErrorCode, RequestDelta
from lightserve.messages.router_worker import (
    RowError,
    RowResult,
    StepPlan,
    row_results,
)
from lightserve.router.admission.baselines import ConservativeAdmission
from lightserve.router.events import FromFrontend, FrontendGone, Outgoing, WorkersGone, WorkersReady
from lightserve.router.kv.cache import KVOptions, Preemption
from lightserve.router.kv.prefix_node import task_aware
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep
from lightserve.sim.simulation import Outcome, Simulation, TimedEvent
from lightserve.sim.worker import SimulatedWorker
from lightserve.types import FinishReason, FrontendId, RequestClass, RequestId, RequestKey


class FaultyWorld:
    """A core, a worker that dies at random, and frontends that check what they get."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        admission = self.rng.choice(
            [ConservativeAdmission(), RecklessAdmission(), ConservativeAdmission(overcommit=1.7)]
        )
        self.core = make_core(
            self.rng.choice(["chunked", "fcfs"]),
            self.rng.randint(MAX_SEQS, 64),
            max_waiting=self.rng.choice([3, 1000]),
            admission=admission,
        )
        self.now_s = 0.0
        self.worker: SimulatedWorker | None = None
        self.sent: deque[StepPlan] = deque()
        self.live: dict[RequestKey, Arrival] = {}
        self.outcomes: dict[RequestKey, Outcome] = {}
        self.num_requests = 0

    def deliver(self, news: list[Outgoing]) -> None:
        for out in news:
            for delta in out.message.each():
                self._on_delta(RequestKey(out.frontend_id, delta.request_id), delta)

    def _on_delta(self, key: RequestKey, delta: RequestDelta) -> None:
        outcome = self.outcomes[key]
        outcome.token_ids.extend(delta.token_ids)
        outcome.finish_reason, outcome.error = delta.finish_reason, delta.error
        if delta.finish_reason is None:
            assert key in self.live, "news after the end"
            return
        arrival = self.live.pop(key)
        if delta.finish_reason is not FinishReason.ERROR:
            check_outcome(arrival, outcome)

    def pump(self) -> None:
        """Send what is due; the core's books must be right after every call."""
        self.core.check_integrity()
        while isinstance(step := self.core.plan(self.now_s), PlannedStep):
            assert self.worker is not None, "a plan for no workers"
            self.sent.append(self.core.commit(step, self.now_s))
            self.core.check_integrity()
        assert len(self.sent) <= 2, "one plan ahead, not two"

    def start_workers(self, num_slots: int) -> None:
        self.worker = SimulatedWorker(
            num_slots=num_slots, max_num_seqs=MAX_SEQS, max_model_len=MAX_LEN
        )
        self.deliver(self.core.on_message(WorkersReady(num_slots), self.now_s))

    def kill_workers(self) -> None:
        self.sent.clear()
        self.worker = None
        self.deliver(self.core.on_message(WorkersGone(), self.now_s))

    def arrive(self) -> None:
        rng = self.rng
        arrival = Arrival(
            self.now_s,
            rng.randint(1, 40),
            rng.randint(1, 24),
            rng.randint(1, 24),
            frontend_id=rng.randint(0, 1),
            request_class=rng.choice(list(RequestClass)),
        )
        key = RequestKey(FrontendId(arrival.frontend_id), RequestId(self.num_requests))
        self.live[key], self.outcomes[key] = arrival, Outcome(self.now_s)
        request = FromFrontend(key.frontend_id, submit(self.num_requests, arrival))
        self.num_requests += 1
        self.deliver(self.core.on_message(request, self.now_s))

    def abort(self) -> None:
        if self.live:
            key = self.rng.choice(list(self.live))
            del self.live[key]
            abort = FromFrontend(key.frontend_id, Abort(request_id=key.request_id))
            self.core.on_message(abort, self.now_s)

    def lose_frontend(self) -> None:
        gone = FrontendId(self.rng.randint(0, 1))
        self.live = {key: a for key, a in self.live.items() if key.frontend_id != gone}
        self.core.on_message(FrontendGone(gone), self.now_s)

    def finish_step(self, *, may_fail: bool) -> None:
        assert self.worker is not None
        plan = self.sent.popleft()
        result = self.worker.execute(plan, exec_s=0.005, idle_s=0.0)
        rows = row_results(plan, result)
        if may_fail and rows and self.rng.random() < 0.05:
            index = self.rng.randrange(len(rows))
            rows[index] = RowResult(rows[index].row, [], RowError.NON_FINITE_LOGITS)
            result = pack_results(plan, rows, exec_s=0.005)
        self.deliver(self.core.on_result(result, self.now_s))

    def move(self) -> None:
        self.now_s += self.rng.random() * 0.01
        dice = self.rng.random()
        if self.worker is None and dice < 0.3:
            self.start_workers(self.rng.choice([60, 120]))
        elif dice < 0.45:
            self.arrive()
        elif dice < 0.52:
            self.abort()
        elif dice < 0.54:
            self.lose_frontend()
        elif dice < 0.57 and self.worker is not None:
            self.kill_workers()
        elif self.sent:
            self.finish_step(may_fail=True)
        self.pump()

    def run_dry(self) -> None:
        if self.worker is None:
            self.start_workers(120)
        for _ in range(20_000):
            self.now_s += 0.01
            self.pump()
            if not self.sent:
                return
            self.finish_step(may_fail=False)


@more_when_long
@pytest.mark.parametrize("block", range(4))
def test_random_faults(block: int) -> None:
    """No request gets stuck, no token is lost or repeated, no slot leaks."""
    for seed in range(block * 40, block * 40 + choose(5, 40)):
        world = FaultyWorld(seed)
        for _ in range(world.rng.randint(20, 200)):
            world.move()
        world.run_dry()
        assert not world.live, f"seed {seed}: {len(world.live)} requests are stuck"
        assert world.core.num_used_slots == 0


def run_with_poison(core: Scheduler, poison: int, num_requests: int) -> dict[int, ErrorCode | None]:
    """Kill the workers whenever a plan has the poison's row; return how each request ended."""
    arrivals = [Arrival(0.0, 4, 3, 3) for _ in range(num_requests)]
    ends: dict[int, ErrorCode | None] = {}

    def deliver(news: list[Outgoing]) -> None:
        for out in news:
            for delta in out.message.each():
                if delta.finish_reason is not None:
                    ends[delta.request_id] = delta.error

    for number, arrival in enumerate(arrivals):
        deliver(core.on_message(FromFrontend(FrontendId(0), submit(number, arrival)), 0.0))
    for _ in range(4):  # lives of the worker group
        core.on_message(WorkersReady(120), 0.0)
        worker = SimulatedWorker(num_slots=120, max_num_seqs=MAX_SEQS, max_model_len=MAX_LEN)
        while isinstance(step := core.plan(0.0), PlannedStep):
            plan = core.commit(step, 0.0)
            if any(part.request.key.request_id == poison for part in step.scheduled):
                deliver(core.on_message(WorkersGone(), 0.0))
                break
            deliver(core.on_result(worker.execute(plan, exec_s=0.01, idle_s=0.0), 0.0))
            core.check_integrity()
        else:
            return ends
    raise AssertionError("the poison killed four groups")


@pytest.mark.parametrize("poison", [0, 2, 4])
def test_a_poison_request_is_found_alone(poison: int) -> None:
    """It kills two groups at most and gets the error; its neighbours get their answers."""
    ends = run_with_poison(make_core("chunked", budget=64), poison, 5)
    assert ends == {i: ErrorCode.WORKER_LOST if i == poison else None for i in range(5)}


# All clients hang up at once, in whatever state: nothing of them is left.

NUM_REQUESTS, NUM_HOST_SLOTS = 60, 80


def arrivals() -> list[Arrival]:
    """A backlog of best-effort requests, and bursts of real-time ones over it."""
    return [
        Arrival(
            time_s=0.0 if number % 3 else 0.05 * (number // 12),
            num_prompt=12 + number % 20,
            num_output=20,
            max_tokens=20,
            request_class=RequestClass.BE if number % 3 else RequestClass.RT,
            family=number % 4 or None,
        )
        for number in range(NUM_REQUESTS)
    ]


@pytest.mark.parametrize(
    ("policy", "preemption", "at_s"),
    every_value(["priority", "unified", "chunked"], list(Preemption), [0.02, 0.1, 0.19, 0.3]),
)
def test_nothing_is_left_after_a_storm(policy: str, preemption: Preemption, at_s: float) -> None:
    options = KVOptions(cache_order=task_aware, block_size=16, preemption=preemption)
    core = make_core(policy, 32, admission=RecklessAdmission(), kv=options)
    worker = SimulatedWorker(
        num_slots=NUM_SLOTS,
        max_num_seqs=MAX_SEQS,
        max_model_len=MAX_LEN,
        num_host_slots=NUM_HOST_SLOTS,
    )
    simulation = Simulation(
        core, worker, step_time, WorkersReady(NUM_SLOTS, num_host_slots=NUM_HOST_SLOTS)
    )
    simulation.run(events_of(arrivals()), until_s=at_s)
    assert core.num_used_slots > 0
    aborts = [
        TimedEvent(at_s, FromFrontend(FrontendId(0), Abort(request_id=RequestId(number))))
        for number in range(NUM_REQUESTS)
    ]
    simulation.run(aborts, until_s=at_s)
    late = [TimedEvent(10.0, one.event) for one in aborts]
    simulation.run(late)
    core.check_integrity()
    assert core.kv is not None and core.num_used_slots == core.kv.checkpoints.num_used == 0
    status = core.status(simulation.now_s)
    assert sum(load.num_waiting + load.num_running for load in status.load.values()) == 0


def test_the_storm_hits_paused_requests() -> None:
    """Teeth: at one of these moments requests are paused, with KV on the host."""
    options = KVOptions(cache_order=task_aware, block_size=16, preemption=Preemption.CHECKPOINT)
    core = make_core("priority", 32, admission=RecklessAdmission(), kv=options)
    worker = SimulatedWorker(
        num_slots=NUM_SLOTS,
        max_num_seqs=MAX_SEQS,
        max_model_len=MAX_LEN,
        num_host_slots=NUM_HOST_SLOTS,
    )
    simulation = Simulation(
        core, worker, step_time, WorkersReady(NUM_SLOTS, num_host_slots=NUM_HOST_SLOTS)
    )
    events, on_host = events_of(arrivals()), []
    for at_s in (0.02, 0.1, 0.19, 0.3):
        simulation.run(events, until_s=at_s)
        events = []
        assert core.kv is not None
        on_host.append(core.kv.checkpoints.num_used)
    assert max(on_host) > 0


# Storms over the unified planner: no hang, no leak, no circle, none starved or made late.
#
# What is random, and what is checked at every move: `support.storms`.

NUM_STORMS, PER_BLOCK = 10, 5


@pytest.mark.parametrize("block", range(NUM_STORMS // PER_BLOCK))
def test_every_request_gets_its_tokens(block: int) -> None:
    ends: Counter[str] = Counter()
    num_timed = 0
    for seed in range(block * PER_BLOCK, (block + 1) * PER_BLOCK):
        over = storm(seed)
        ends += over.ends
        num_timed += over.policy.num_timed
    assert ends["whole"] > 10 * PER_BLOCK, "most requests get through"
    assert ends["stop string"] > 0
    assert num_timed > 10 * PER_BLOCK, "deadlines limited steps"
