"""The unified planner against all steps that there are, in random states of up to ten requests.

`support.small_states` says what is feasible: the constraint of BROS with deadlines of `slo.py`,
leaving out requests that are late, or would be even if they had the server for themselves; and
steps in which late requests have their turn. `bench.scheduling.planner_optimality` is the same for
as many states as one likes.
"""

from __future__ import annotations

from statistics import mean

import pytest
from support.best_plans import best_step, only_real_time
from support.policy_scenes import BE, RT, make_request
from support.small_states import Reading, State, empty_state, make_state

from lightserve.messages.common import StepCoefficients
from lightserve.router.policies import POLICIES
from lightserve.router.step import Scheduled

NUM_STATES = 240
MAX_MISSED = 0.01
"""Known misses: cuts of prompts that will be late anyway, by either reading."""
MIN_RATE = 0.85
TEN_MS_AND_A_TENTH_A_TOKEN = StepCoefficients(
    **dict.fromkeys(StepCoefficients.__struct_fields__, 0.0) | {"floor_s": 0.01, "per_new_s": 1e-4}
)


@pytest.fixture(scope="module")
def states() -> list[State]:
    return [make_state(seed) for seed in range(NUM_STATES)]


@pytest.mark.parametrize("reading", Reading)
def test_it_finds_a_feasible_step_where_there_is_one(reading: Reading, states: list[State]) -> None:
    planned = [(state, state.is_feasible(state.planned(), reading)) for state in states]
    found = sum(is_feasible for _, is_feasible in planned)
    missed = [state for state, is_feasible in planned if not is_feasible]
    num_missed = sum(best_step(state, reading) is not None for state in missed)
    assert found > 0.9 * NUM_STATES
    assert num_missed <= MAX_MISSED * (found + num_missed)


def test_planners_that_know_no_deadlines_do_not(states: list[State]) -> None:
    """The test before can fail: `priority` lets best-effort requests lengthen every step."""
    some = states[:80]
    missed = [
        s for s in some if not s.is_feasible(s.planned(POLICIES["priority"]()), Reading.SHARE)
    ]
    num_missed = sum(best_step(state, Reading.SHARE) is not None for state in missed)
    assert num_missed > 3 * MAX_MISSED * len(some)


def test_best_effort_gets_what_is_left(states: list[State]) -> None:
    """Of what the best step gives it that gives real-time requests no less."""
    rates = []
    for state in states:
        step = state.planned()
        best = best_step(state, Reading.SHARE, with_all_of=only_real_time(step))
        if best is not None and state.be_rate(best) > 0:
            rates.append(state.be_rate(step) / state.be_rate(best))
    assert len(rates) > NUM_STATES / 4
    assert mean(min(1.0, rate) for rate in rates) >= MIN_RATE


def test_a_state_by_hand() -> None:
    """Of a prompt beside a decode, the best is what ends at the decode's deadline."""
    decode = make_request(0, RT, prompt=20, output=5)
    prompt = make_request(1, BE, prompt=400)
    state = empty_state(
        num_slots=1000, num_rows=4, budget=2048, coefficients=TEN_MS_AND_A_TENTH_A_TOKEN
    )
    state.put(decode, num_held=24)
    state.put(prompt)
    state.mean_step_s = 0.005
    state.set_due(decode, 30.0)
    best = best_step(state, Reading.SHARE)
    assert best == [Scheduled(decode, 1), Scheduled(prompt, 199)]
    planned = dict(state.planned())
    assert planned[decode] == 1 and planned[prompt] in (198, 199), "but for rounding"
    assert not state.is_feasible([Scheduled(decode, 1), Scheduled(prompt, 200)], Reading.SHARE)
    assert state.is_feasible([Scheduled(prompt, 150)], Reading.SHARE), "the decode can wait"
    assert not state.is_feasible([Scheduled(prompt, 151)], Reading.SHARE)
    state.set_due(decode, 5.0)
    assert state.is_lost(decode), "it asks for nothing any more"
    assert best_step(state, Reading.SHARE) == [Scheduled(prompt, 400)]
