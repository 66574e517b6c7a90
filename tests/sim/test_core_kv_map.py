"""The map of the KV pool says at any moment what the core's own figures say."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
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

from lightserve.messages.kv_map import KVPool, unpack_kinds
from lightserve.router.core import RouterCore
from lightserve.router.kv.cache import KVOptions, Preemption
from lightserve.router.kv.prefix_node import task_aware
from lightserve.sim.simulation import Simulation
from lightserve.sim.worker import SimulatedWorker
from lightserve.types import RequestClass, SlotKind

NUM_HOST_SLOTS = 60

some_arrivals = st.lists(
    st.builds(
        Arrival,
        time_s=st.floats(0, 0.2),
        num_prompt=st.integers(1, 40),
        num_output=st.integers(1, 24),
        max_tokens=st.integers(1, 24),
        abort_after_s=st.none() | st.floats(0, 0.2),
        family=st.none() | st.integers(0, 1),
        request_class=st.sampled_from(RequestClass),
    ),
    min_size=1,
    max_size=20,
)
some_options = st.builds(
    KVOptions,
    cache_order=st.sampled_from([None, task_aware]),
    block_size=st.sampled_from([1, 4, 16]),
    preemption=st.sampled_from(Preemption),
    clean_ahead_tokens=st.sampled_from([0, 40]),
)


def _simulation(core: RouterCore) -> Simulation:
    worker = SimulatedWorker(
        num_slots=NUM_SLOTS,
        max_num_seqs=MAX_SEQS,
        max_model_len=MAX_LEN,
        num_host_slots=NUM_HOST_SLOTS,
    )
    return Simulation(core, worker, step_time, num_slots=NUM_SLOTS, num_host_slots=NUM_HOST_SLOTS)


def _checked_map(core: RouterCore) -> KVPool:
    """Return the map, which agrees with itself and with the core's figures."""
    pool = core.kv_map()
    assert pool is not None and pool.slots is not None
    kinds = np.repeat(*unpack_kinds(pool.slots)).tolist()
    assert len(kinds) == pool.num_slots == NUM_SLOTS
    assert pool.num_slots_of_kind == [kinds.count(kind) for kind in SlotKind]
    assert kinds.count(SlotKind.CACHED) == core.num_cached_slots
    num_used = NUM_SLOTS - kinds.count(SlotKind.FREE) - kinds.count(SlotKind.CACHED)
    assert num_used == core.num_used_slots
    assert num_used == sum(slots.num_slots for slots in pool.classes.values())
    return pool


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    arrivals=some_arrivals,
    options=some_options,
    policy=st.sampled_from(["priority", "chunked"]),
    budget=st.integers(MAX_SEQS, 64),
)
def test_at_any_moment(
    arrivals: list[Arrival], options: KVOptions, policy: str, budget: int
) -> None:
    core = make_core(policy, budget, admission=RecklessAdmission(), kv=options)
    simulation = _simulation(core)
    for until_s in (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, float("inf")):
        simulation.run(events_of(arrivals) if until_s == 0.02 else [], until_s=until_s)
        pool = _checked_map(core)
        assert pool.block_size == options.block_size
        assert pool.num_host_slots == NUM_HOST_SLOTS
    assert pool.num_used_host_slots == core.num_used_slots == pool.mean_run_length == 0


def test_what_is_copied_ahead_is_checkpointed() -> None:
    options = KVOptions(block_size=4, preemption=Preemption.CHECKPOINT, clean_ahead_tokens=24)
    core = make_core("priority", 64, admission=RecklessAdmission(), kv=options)
    core._booking._steps_since_take = 0  # memory was just taken from a request
    arrivals = [
        Arrival(0.0, 30, 20, 20, request_class=request_class) for request_class in RequestClass
    ]
    _simulation(core).run(events_of(arrivals), until_s=0.06)
    pool = _checked_map(core)
    rt, be = (pool.classes[request_class] for request_class in RequestClass)
    assert rt.num_requests == be.num_requests == 1
    assert rt.num_slots > 30 and be.num_slots > 30
    assert rt.num_checkpointed_slots == 0  # best-effort's memory goes first
    assert 0 < be.num_checkpointed_slots == pool.num_used_host_slots < be.num_slots
    assert pool.num_slots_of_kind == [
        NUM_SLOTS - rt.num_slots - be.num_slots,
        rt.num_slots,
        be.num_slots - be.num_checkpointed_slots,
        0,
        be.num_checkpointed_slots,
    ]
    assert pool.mean_run_length > 4
