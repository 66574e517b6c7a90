"""A request that does not advance has a reason, or is counted among those not looked at.

And on the same random schedules: replayed from its log, a core decides the same.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.core_scenes import (
    MAX_SEQS,
    Arrival,
    RecklessAdmission,
    events_of,
    make_core,
    make_simulation,
)

from lightserve.decisions.records import Decision, Input, RecordedCore, decision_of, event_of
from lightserve.messages.frontend_router import Submit
from lightserve.messages.router_worker import StepPlan, StepResult
from lightserve.router.admission.baselines import ConservativeAdmission
from lightserve.router.events import FromFrontend, FrontendGone, WorkersGone
from lightserve.router.kv.cache import KVOptions
from lightserve.router.kv.prefix_node import task_aware
from lightserve.router.policies import POLICIES
from lightserve.router.request import RequestState
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep, Reason
from lightserve.sim.simulation import TimedEvent
from lightserve.types import FrontendId, RequestClass

arrivals_strategy = st.lists(
    st.builds(
        Arrival,
        time_s=st.floats(0, 0.2),
        num_prompt=st.integers(1, 40),
        num_output=st.integers(1, 24),
        max_tokens=st.just(24),
        abort_after_s=st.none() | st.none() | st.floats(0, 0.2),
        request_class=st.sampled_from(RequestClass),
        family=st.none() | st.integers(0, 1),
    ),
    min_size=4,
    max_size=25,
)


class AccountingCore(Scheduler):
    """Checks each step that it books: all live requests are in it, or are accounted for, once."""

    num_checked = 0

    def commit(self, planned: PlannedStep, now_s: float) -> StepPlan:
        self.num_checked += 1
        advancing = [request for request, _ in planned.scheduled]
        skipped = [request for request, _ in planned.skipped]
        named = {*advancing, *skipped}
        assert len(named) == len(advancing) + len(skipped), "a request is named twice"
        live = set(self._requests.values())
        assert named <= live
        left = live - named
        assert all(request.state is RequestState.WAITING for request in left), "no reason"
        counts = Counter(request.request_class for request in left)
        for request_class, (num_requests, stopped_by) in planned.unseen.items():
            assert num_requests == counts[request_class]
            assert (num_requests == 0) == (stopped_by is None), "what stopped the scan?"
        for request, reason in planned.skipped:
            if reason is Reason.BLOCKED and request.request_class is RequestClass.RT:
                assert request.num_schedulable_tokens == 0  # no other's prefix holds it up
        for request in planned.paused:
            assert (request, Reason.KV_NOW) in planned.skipped or (
                (request, Reason.ROWS) in planned.skipped
            )
        return super().commit(planned, now_s)


class Lines:
    """A log in memory."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def append(self, record: Input | Decision) -> None:
        self.lines.append(msgspec.json.encode(record))

    def replay(self, core: Scheduler) -> None:
        """Check that a fresh core decides what the lines say."""
        for line in self.lines:
            record = msgspec.json.decode(line, type=Input | Decision)
            if isinstance(record, Decision):
                step = core.plan(record.planned_at_s)
                assert isinstance(step, PlannedStep)
                plan = core.commit(step, record.committed_at_s)
                assert decision_of(step, plan, record.committed_at_s) == record
            elif isinstance(event := event_of(record), StepResult):
                core.on_result(event, record.now_s)
            else:
                core.on_message(event, record.now_s)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    arrivals=arrivals_strategy,
    budget=st.integers(MAX_SEQS, 48),
    max_be_seqs=st.sampled_from([1, 3, 100]),
    shares=st.booleans(),
    is_reckless=st.booleans(),
    needs_acknowledgement=st.booleans(),
    gone_s=st.none() | st.floats(0.01, 0.2),
)
def test_every_request_is_accounted_for(
    *,
    policy: str,
    arrivals: list[Arrival],
    budget: int,
    max_be_seqs: int,
    shares: bool,
    is_reckless: bool,
    needs_acknowledgement: bool,
    gone_s: float | None,
) -> None:
    plain = make_core(
        policy,
        budget,
        admission=RecklessAdmission() if is_reckless else ConservativeAdmission(),
        kv=KVOptions(cache_order=task_aware if shares else None),
    )
    config = dataclasses.replace(plain._config, max_be_seqs=max_be_seqs)
    core, log = AccountingCore(config), Lines()
    recorded = RecordedCore(core, log)
    events = events_of(arrivals)
    if (
        needs_acknowledgement
    ):  # and no frontend acknowledges: requests run 16 tokens, then are blocked
        events[::2] = [_with_stop_strings(timed) for timed in events[::2]]
    simulation = make_simulation(recorded)
    if gone_s is not None:
        simulation.run([e for e in events if e.time_s <= gone_s], until_s=gone_s)
        recorded.on_message(WorkersGone(), gone_s)
        core.check_integrity()
        events = [event for event in events if event.time_s > gone_s]
        outcomes, simulation = simulation.outcomes, make_simulation(recorded)
        simulation.outcomes = outcomes
        events.append(TimedEvent(gone_s, FrontendGone(FrontendId(7))))
    simulation.run(events)
    assert core.num_checked > 0
    log.replay(Scheduler(config))


def _with_stop_strings(timed: TimedEvent) -> TimedEvent:
    match timed.event:
        case FromFrontend(frontend_id, Submit() as message):
            submit = msgspec.structs.replace(message, needs_acknowledgement=True)
            return TimedEvent(timed.time_s, FromFrontend(frontend_id, submit))
    return timed
