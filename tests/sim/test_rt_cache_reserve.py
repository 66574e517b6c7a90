"""What is kept for real-time's cache is not kept from a request that could never run otherwise."""

from __future__ import annotations

import pytest
from support.core_scenes import (
    NUM_SLOTS,
    Arrival,
    RecklessAdmission,
    check_outcome,
    events_of,
    make_core,
    make_simulation,
)

from lightserve.router.kv.cache import KVOptions
from lightserve.router.kv.prefix_node import task_aware
from lightserve.types import RequestClass


@pytest.mark.parametrize("num_prompt", [30, 50])
def test_the_reserve_gives_way_where_nothing_else_can_run(num_prompt: int) -> None:
    """30 tokens start beside the reserve and then cannot grow, 50 cannot even start."""
    arrivals = [
        Arrival(0.0, 48, 2, 2),
        Arrival(0.0, 48, 2, 2),
        Arrival(5.0, num_prompt, 12, 12, request_class=RequestClass.BE),
    ]
    options = KVOptions(cache_order=task_aware, rt_cache_min_tokens=90)
    core = make_core("priority", budget=64, admission=RecklessAdmission(), kv=options)
    simulation = make_simulation(core)
    simulation.run(events_of(arrivals), until_s=4.0)
    assert NUM_SLOTS - core.num_cached_slots < num_prompt + 12
    simulation.run([])
    assert len(simulation.outcomes) == 3
    for arrival, outcome in zip(arrivals, simulation.outcomes.values(), strict=True):
        check_outcome(arrival, outcome)
