"""All requests end, under every policy, though all are admitted and memory runs out all the time.

No policy and no order of requests may leave a state in which nothing is in flight, a request could
move, and none does: nothing would ever happen again.
"""

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

from lightserve.messages.frontend_router import ErrorCode
from lightserve.messages.router_worker import StepPlan
from lightserve.router.core import RouterCore
from lightserve.router.events import (
    FromFrontend,
    Outgoing,
    PlannedStep,
    WorkersGone,
    WorkersReady,
)
from lightserve.router.kv.cache import KVOptions, Preemption
from lightserve.router.kv.prefix_node import task_aware
from lightserve.router.policies.registry import POLICIES
from lightserve.sim.simulation import Outcome
from lightserve.sim.worker import SimulatedWorker
from lightserve.types import FrontendId, RequestClass, RequestId

FRONTEND = FrontendId(0)
LAST_S = 40
NUM_SLOTS = 67  # the last block is a short one
STORES = {
    "checkpoint": KVOptions(
        cache_order=task_aware, block_size=4, preemption=Preemption.CHECKPOINT, clean_ahead_tokens=9
    ),
    "protected": KVOptions(
        cache_order=task_aware, preemption=Preemption.CHECKPOINT, rt_cache_min_tokens=60
    ),
    "swap": KVOptions(cache_order=task_aware, block_size=4, preemption=Preemption.SWAP),
    "recompute": KVOptions(preemption=Preemption.RECOMPUTE),
    "exclusive": KVOptions(block_size=16, is_exclusive=True, preemption=Preemption.RECOMPUTE),
}


class Scene:
    """Random requests over a core; the workers may die once."""

    def __init__(self, seed: int, policy: str, kv: KVOptions, num_slots: int) -> None:
        rng = random.Random(seed)
        self.num_slots = num_slots
        self.core: RouterCore = make_core(
            policy, rng.choice([6, 24, 64]), admission=RecklessAdmission(), kv=kv
        )
        self.arrivals = [
            Arrival(
                rng.randrange(LAST_S),
                rng.randint(1, 40),
                rng.randint(1, 24),
                24,
                request_class=rng.choice(list(RequestClass)),
                family=rng.choice([None, 0]),
            )
            for _ in range(16)
        ]
        self.outcomes = [Outcome(0.0) for _ in self.arrivals]
        self.death_s = rng.choice([10, 20, None])
        self.sent: deque[StepPlan] = deque()
        self.start_workers()

    def start_workers(self) -> None:
        self.worker = SimulatedWorker(
            num_slots=self.num_slots,
            max_num_seqs=MAX_SEQS,
            max_model_len=MAX_LEN,
            num_host_slots=20,
        )
        self.sent.clear()
        self.take_in(self.core.on_message(WorkersReady(self.num_slots, 20), 0.0))

    def take_in(self, news: list[Outgoing]) -> None:
        for outgoing in news:
            for delta in outgoing.message.each():
                outcome = self.outcomes[delta.request_id]
                outcome.token_ids.extend(delta.token_ids)
                outcome.finish_reason, outcome.error = delta.finish_reason, delta.error

    def run(self, num_rounds: int) -> None:
        for now_s in range(num_rounds):
            if now_s > LAST_S and not self.sent and all(map(has_ended, self.outcomes)):
                return
            for number, arrival in enumerate(self.arrivals):
                if arrival.time_s == now_s:
                    event = FromFrontend(FRONTEND, submit(number, arrival))
                    self.take_in(self.core.on_message(event, float(now_s)))
            if now_s == self.death_s:
                self.take_in(self.core.on_message(WorkersGone(), float(now_s)))
                self.start_workers()
            while isinstance(step := self.core.plan(float(now_s)), PlannedStep):
                self.sent.append(self.core.commit(step, float(now_s)))
            self.core.check_integrity()
            if self.sent:
                result = self.worker.execute(self.sent.popleft(), exec_s=0.01, idle_s=0.0)
                self.take_in(self.core.on_result(result, float(now_s)))


def has_ended(outcome: Outcome) -> bool:
    return outcome.finish_reason is not None or outcome.error is not None


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("store", sorted(STORES))
def test_all_requests_end(policy: str, store: str) -> None:
    for seed in range(9):
        scene = Scene(seed, policy, STORES[store], NUM_SLOTS)
        scene.run(1000)
        for number, (arrival, outcome) in enumerate(
            zip(scene.arrivals, scene.outcomes, strict=True)
        ):
            if outcome.error is None:
                assert outcome.finish_reason is not None, f"seed {seed}: {number} never ends"
                check_outcome(arrival, outcome)
            else:
                assert outcome.error is ErrorCode.WORKER_LOST, RequestId(number)
        assert scene.core.num_used_slots == 0


def test_a_suspect_without_memory_lets_those_run_who_hold_it() -> None:
    """Two that were in flight when workers died: the first, cleared, keeps what the second needs
    for the rest of its prompt, and is senior to it."""
    scene = Scene(0, "chunked", KVOptions(preemption=Preemption.RECOMPUTE), NUM_SLOTS)
    scene.core = make_core("chunked", 16, admission=RecklessAdmission())
    sizes = [(33, 24), (40, 24)]
    scene.arrivals = [
        Arrival(0, *size, 24, request_class=RequestClass.BE, family=None) for size in sizes
    ]
    scene.outcomes = [Outcome(0.0) for _ in sizes]
    scene.death_s = 2
    scene.start_workers()
    scene.run(300)
    for arrival, outcome in zip(scene.arrivals, scene.outcomes, strict=True):
        check_outcome(arrival, outcome)
