"""Admission of requests that share KV, through the core: more of them fit, and never too many."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.core_scenes import (
    MAX_LEN,
    MAX_SEQS,
    NUM_SLOTS,
    Arrival,
    events_of,
    make_core,
    make_simulation,
    submit,
)

from lightserve.config import ServeConfig
from lightserve.router.events import FromFrontend
from lightserve.router.factory import make_admission
from lightserve.router.kv.prefix_node import task_aware
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.policies.registry import POLICIES
from lightserve.sim.simulation import TimedEvent
from lightserve.types import FrontendId, RequestClass

arrivals_of_families = st.lists(
    st.builds(
        Arrival,
        time_s=st.floats(0, 0.4),
        num_prompt=st.integers(1, 40),
        num_output=st.integers(1, 24),
        max_tokens=st.integers(1, 24),
        abort_after_s=st.none() | st.none() | st.floats(0, 0.2),
        family=st.integers(0, 2),
        request_class=st.sampled_from(RequestClass),
    ),
    min_size=1,
    max_size=30,
)


@pytest.mark.parametrize("policy", ["chunked", "fcfs"])
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(arrivals=arrivals_of_families, budget=st.integers(MAX_SEQS, 64))
def test_a_request_that_reserves_the_worst_case_loses_nothing(
    policy: str, arrivals: list[Arrival], budget: int
) -> None:
    """Shared tokens are reserved once: enough, whichever of those that share them ends first."""
    core = make_core(policy, budget, cache_order=task_aware)
    make_simulation(core).run(events_of(arrivals))
    assert core.num_preemptions == 0


@pytest.mark.parametrize("admission", ["conservative", "risk", "past-future", "ema", "aggressive"])
@pytest.mark.parametrize("policy", ["chunked", "priority"])
def test_a_crowd_with_one_prompt_runs_at_once(policy: str, admission: str) -> None:
    """40 tokens that all share and at most 10 more of each: 6 need 100 of 120 slots, not 300."""
    lengths = OutputLengths(max_output_tokens=MAX_LEN)
    rule = make_admission(
        ServeConfig(admission=admission),
        lengths,
        0,
        is_class_aware=POLICIES[policy]().is_class_aware,
    )
    core = make_core(policy, 64, admission=rule, lengths=lengths, cache_order=task_aware)
    simulation = make_simulation(core)
    arrival = Arrival(0.0, 41, 10, 10, family=0)

    def crowd(first: int, count: int, at_s: float) -> list[TimedEvent]:
        # Numbers that differ by a multiple of three have the very same prompt.
        messages = [submit(3 * number, arrival) for number in range(first, first + count)]
        return [TimedEvent(at_s, FromFrontend(FrontendId(0), message)) for message in messages]

    simulation.run(crowd(0, 1, 0.0))
    simulation.run(crowd(1, MAX_SEQS, simulation.now_s), until_s=simulation.now_s + 0.03)
    assert len(core.running) == MAX_SEQS
    assert core.num_used_slots < NUM_SLOTS
    simulation.run([])
    assert core.num_preemptions == 0
