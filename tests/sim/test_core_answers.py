"""Stop strings end requests at the frontend: acknowledgements, Finish, and what becomes history."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.core_scenes import (
    MAX_LEN,
    Arrival,
    RecklessAdmission,
    make_core,
    make_simulation,
    submit,
)
from support.grids import choose, more_when_long

from lightserve.messages.frontend_router import (
    MAX_UNACKNOWLEDGED_TOKENS,
    Abort,
    Acknowledge,
    Finish,
    Progress,
    RequestDelta,
)
from lightserve.messages.router_worker import OutputKind, StepPlan
from lightserve.router.events import FromFrontend, FrontendGone, SchedulerEvent
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.policies import base
from lightserve.router.scheduler import Scheduler
from lightserve.sim.simulation import TimedEvent
from lightserve.sim.worker import position_logprob
from lightserve.types import FrontendId, RequestId, RequestKey, SamplingParams

FRONTEND = FrontendId(0)


class NotedLengths(OutputLengths):
    """Notes what becomes history."""

    def __init__(self) -> None:
        super().__init__(max_output_tokens=MAX_LEN)
        self.noted: list[int] = []

    def record(self, length: int, key: Hashable = None, num_reasoning: int | None = None) -> None:
        self.noted.append(length)
        super().record(length, key, num_reasoning)


@dataclass
class LaggingFrontend:
    """Finds a stop string `stops[request]` tokens into an output, `lag_s` after it came."""

    stops: list[int]
    lag_s: float
    received: dict[RequestId, int] = field(default_factory=dict)
    looked_at: dict[RequestId, int] = field(default_factory=dict)
    finished: set[RequestId] = field(default_factory=set)

    def __call__(self, _: FrontendId, delta: RequestDelta, now_s: float) -> list[TimedEvent]:
        request_id = delta.request_id
        count = self.received.get(request_id, 0) + len(delta.token_ids)
        self.received[request_id] = count
        assert count <= self.looked_at.get(request_id, 0) + MAX_UNACKNOWLEDGED_TOKENS
        if request_id in self.finished:
            return []
        stop = self.stops[request_id]
        self.looked_at[request_id] = count
        message: Finish | Acknowledge = Acknowledge(progress=[Progress(request_id, count)])
        if count >= stop or delta.finish_reason is not None:
            self.finished.add(request_id)
            message = Finish(request_id=request_id, num_tokens=min(count, stop))
        return [TimedEvent(now_s + self.lag_s, FromFrontend(FRONTEND, message))]


def run(
    core: Scheduler, arrivals: list[Arrival], frontend: LaggingFrontend
) -> dict[int, list[int]]:
    simulation = make_simulation(core, frontend)
    simulation.run(
        [
            TimedEvent(a.time_s, FromFrontend(FRONTEND, submit(i, a, needs_acknowledgement=True)))
            for i, a in enumerate(arrivals)
        ]
    )
    core.check_integrity()
    return {key.request_id: outcome.token_ids for key, outcome in simulation.outcomes.items()}


scenes = st.lists(
    st.tuples(
        st.builds(
            Arrival,
            time_s=st.floats(0, 0.1),
            num_prompt=st.integers(1, 20),
            num_output=st.integers(1, 44),
            max_tokens=st.integers(1, 44),
        ),
        st.integers(1, 50),
    ),
    min_size=1,
    max_size=12,
)


@more_when_long
@pytest.mark.parametrize("reckless", [False, True], ids=["roomy", "preempting"])
@settings(max_examples=choose(10, 60), deadline=None)
@given(scene=scenes)
def test_the_lag_changes_nothing_visible(reckless: bool, scene: list[tuple[Arrival, int]]) -> None:
    """0, 5 and 50 ms: the same tokens up to the stop, and exactly these become history."""
    arrivals, stops = [a for a, _ in scene], [stop for _, stop in scene]
    expected = [min(a.num_output, a.max_tokens, stop) for a, stop in scene]
    seen = []
    for lag_s in (0.0, 0.005, 0.05):
        lengths = NotedLengths()
        admission = RecklessAdmission() if reckless else None
        core = make_core("chunked", admission=admission, lengths=lengths)
        tokens = run(core, arrivals, LaggingFrontend(stops, lag_s))
        assert sorted(lengths.noted) == sorted(expected)
        assert core.num_unfinished == 0
        seen.append([tokens[i][: expected[i]] for i in range(len(arrivals))])
        assert [len(part) for part in seen[-1]] == expected
    assert seen[0] == seen[1] == seen[2]


def test_a_silent_frontend_pauses_its_request_only() -> None:
    lengths = NotedLengths()
    core = make_core("chunked", lengths=lengths)
    simulation = make_simulation(core)
    arrival = Arrival(0.0, 4, 40, 40)
    waits = FromFrontend(FRONTEND, submit(0, arrival, needs_acknowledgement=True))
    goes_on = FromFrontend(FRONTEND, submit(1, arrival))
    simulation.run([TimedEvent(0.0, waits), TimedEvent(0.0, goes_on)])
    paused, free = (simulation.outcomes[RequestKey(FRONTEND, RequestId(i))] for i in (0, 1))
    assert len(paused.token_ids) == MAX_UNACKNOWLEDGED_TOKENS and paused.finish_reason is None
    assert len(free.token_ids) == 40 and lengths.noted == [40]
    progress = Acknowledge(progress=[Progress(RequestId(0), 10)])
    simulation.run([TimedEvent(simulation.now_s, FromFrontend(FRONTEND, progress))])
    assert len(paused.token_ids) == 10 + MAX_UNACKNOWLEDGED_TOKENS
    finish = Finish(request_id=RequestId(0), num_tokens=12)
    simulation.run([TimedEvent(simulation.now_s, FromFrontend(FRONTEND, finish))])
    assert lengths.noted == [40, 12] and core.num_used_slots == 0
    core.check_integrity()


@pytest.mark.parametrize(
    "ending", [FromFrontend(FRONTEND, Abort(request_id=RequestId(0))), FrontendGone(FRONTEND)]
)
def test_a_request_that_never_says_finish_is_forgotten(ending: SchedulerEvent) -> None:
    lengths = NotedLengths()
    core = make_core("chunked", lengths=lengths)
    simulation = make_simulation(core)
    arrival = Arrival(0.0, 4, 3, 9)
    simulation.run(
        [TimedEvent(0.0, FromFrontend(FRONTEND, submit(0, arrival, needs_acknowledgement=True)))]
    )
    assert core.num_unfinished == 1 and core.num_used_slots == 0
    core.on_message(ending, simulation.now_s)
    late = Finish(request_id=RequestId(0), num_tokens=3)
    core.on_message(FromFrontend(FRONTEND, late), simulation.now_s)
    assert core.num_unfinished == 0 and lengths.noted == []


# Log-probabilities of prompts: every position once, in order, and bounded per step.

CAP = 7


@more_when_long
@pytest.mark.parametrize("policy", ["chunked", "fcfs"])
@settings(max_examples=choose(10, 60), deadline=None)
@given(
    scene=st.lists(
        st.tuples(
            st.builds(
                Arrival,
                time_s=st.floats(0, 0.05),
                num_prompt=st.integers(1, 40),
                num_output=st.integers(1, 20),
                max_tokens=st.integers(1, 20),
            ),
            st.booleans(),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_each_position_once(policy: str, scene: list[tuple[Arrival, bool]]) -> None:
    """Also with preemptions, which compute positions again."""
    core = make_core(policy, 16 if policy == "chunked" else 64, admission=RecklessAdmission())
    simulation = make_simulation(core)
    plans: list[StepPlan] = []
    execute = simulation._worker.execute

    def note(plan: StepPlan, *, exec_s: float, idle_s: float) -> object:
        plans.append(plan)
        return execute(plan, exec_s=exec_s, idle_s=idle_s)

    events = []
    for number, (arrival, wants) in enumerate(scene):
        total = arrival.num_prompt + arrival.num_output
        sampling = SamplingParams(seed=total, num_prompt_logprobs=0 if wants else None)
        message = submit(number, arrival, sampling=sampling)
        events.append(TimedEvent(arrival.time_s, FromFrontend(FRONTEND, message)))
    with (
        patch.object(simulation._worker, "execute", note),
        patch.object(base, "MAX_PROMPT_LOGPROB_POSITIONS", CAP),
    ):
        simulation.run(events)
    core.check_integrity()
    for number, (arrival, wants) in enumerate(scene):
        outcome = simulation.outcomes[RequestKey(FRONTEND, RequestId(number))]
        positions = range(1, arrival.num_prompt) if wants else ()
        assert outcome.prompt_logprobs == [position_logprob(p) for p in positions]
        assert outcome.finish_reason is not None
    for plan in plans:
        asked = [row.num_tokens for row in plan.rows if OutputKind.PROMPT_LOGPROBS in row.output]
        assert sum(asked) <= CAP
