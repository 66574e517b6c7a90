"""Faults under random traffic: worker groups die, pools change, rows fail; and a poison request."""

from __future__ import annotations

import random
from collections import deque

import pytest
from support.core_scenes import (
    MAX_LEN,
    MAX_SEQS,
    Arrival,
    RecklessAdmission,
    check_outcome,
    make_core,
    submit,
)
from support.grids import choose, more_when_long

from lightserve.messages.frontend_router import Abort, ErrorCode, RequestDelta
from lightserve.messages.router_worker import (
    RowError,
    RowResult,
    StepPlan,
    pack_results,
    row_results,
)
from lightserve.router.admission.baselines import ConservativeAdmission
from lightserve.router.events import FromFrontend, FrontendGone, Outgoing, WorkersGone, WorkersReady
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep
from lightserve.sim.simulation import Outcome
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
    for seed in range(block * 40, block * 40 + choose(10, 40)):
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
