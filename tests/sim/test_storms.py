"""All clients hang up at once, in whatever state: nothing of them is left."""

from __future__ import annotations

from collections import Counter

import pytest
from support.core_scenes import (
    MAX_LEN,
    MAX_SEQS,
    NUM_SLOTS,
    Arrival,
    RecklessAdmission,
    events_of,
    make_core,
    step_time,
)
from support.storms import storm

from lightserve.messages.frontend_router import Abort
from lightserve.router.events import FromFrontend
from lightserve.router.kv.cache import KVOptions, Preemption
from lightserve.router.kv.prefix_node import task_aware
from lightserve.sim.simulation import Simulation, TimedEvent
from lightserve.sim.worker import SimulatedWorker
from lightserve.types import FrontendId, RequestClass, RequestId

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


@pytest.mark.parametrize("at_s", [0.02, 0.1, 0.19, 0.3])
@pytest.mark.parametrize("preemption", list(Preemption))
@pytest.mark.parametrize("policy", ["priority", "unified", "chunked"])
def test_nothing_is_left_after_a_storm(policy: str, preemption: Preemption, at_s: float) -> None:
    options = KVOptions(
        cache_order=task_aware, block_size=16, preemption=preemption, clean_ahead_tokens=10
    )
    core = make_core(policy, 32, admission=RecklessAdmission(), kv=options)
    worker = SimulatedWorker(
        num_slots=NUM_SLOTS,
        max_num_seqs=MAX_SEQS,
        max_model_len=MAX_LEN,
        num_host_slots=NUM_HOST_SLOTS,
    )
    simulation = Simulation(
        core, worker, step_time, num_slots=NUM_SLOTS, num_host_slots=NUM_HOST_SLOTS
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
    assert (core.num_used_slots, core.num_used_host_slots) == (0, 0)
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
        core, worker, step_time, num_slots=NUM_SLOTS, num_host_slots=NUM_HOST_SLOTS
    )
    events, on_host = events_of(arrivals()), []
    for at_s in (0.02, 0.1, 0.19, 0.3):
        simulation.run(events, until_s=at_s)
        events = []
        on_host.append(core.num_used_host_slots)
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
