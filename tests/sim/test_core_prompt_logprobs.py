"""Log-probabilities of prompts: every position once, in order, and bounded per step."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.core_scenes import Arrival, RecklessAdmission, make_core, make_simulation, submit

from lightserve.messages.router_worker import OutputKind, StepPlan
from lightserve.router import planning
from lightserve.router.events import FromFrontend
from lightserve.sim.simulation import TimedEvent
from lightserve.sim.worker import position_logprob
from lightserve.types import FrontendId, RequestId, RequestKey, SamplingParams

FRONTEND = FrontendId(0)
CAP = 7


@pytest.mark.parametrize("policy", ["chunked", "fcfs"])
@settings(max_examples=60, deadline=None)
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
        patch.object(planning, "MAX_PROMPT_LOGPROB_POSITIONS", CAP),
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
