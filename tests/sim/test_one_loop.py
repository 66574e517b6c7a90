"""Scenes in which one limit of a step must not cost what another would still allow."""

from __future__ import annotations

from statistics import mean
from typing import Any

import pytest
from support.best_plans import best_step, only_real_time
from support.core_scenes import MAX_SEQS, Arrival, RecklessAdmission, make_core, submit
from support.policy_scenes import (
    BE,
    RT,
    Admitting,
    Queue,
    filled,
    make_limits,
    make_request,
    running_of,
)
from support.small_states import Reading, State, empty_state, make_state

from lightserve.messages.common import StepCoefficients
from lightserve.router.events import FromFrontend, WorkersGone, WorkersReady
from lightserve.router.kv.cache import KVOptions
from lightserve.router.kv.prefix_node import task_aware
from lightserve.router.policies import POLICIES
from lightserve.router.policies.base import Step
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep, Scheduled
from lightserve.sim.worker import SimulatedWorker
from lightserve.types import SLO, FrontendId, RequestClass, SamplingParams

MAX_LEN = 4000


class Scene:
    """A core and a worker whose tokens take `token_s` each."""

    def __init__(
        self, core: Scheduler, num_slots: int, *, floor_s: float = 0.01, token_s: float = 0.0
    ) -> None:
        self.core, self.now_s = core, 0.0
        self.planned: PlannedStep | None = None
        self._times_s = floor_s, token_s
        self.start(num_slots)

    def start(self, num_slots: int) -> None:
        self._worker = SimulatedWorker(
            num_slots=num_slots, max_num_seqs=MAX_SEQS, max_model_len=MAX_LEN
        )
        floor_s, token_s = self._times_s
        zeros = dict.fromkeys(StepCoefficients.__struct_fields__, 0.0)
        profile = StepCoefficients(**{**zeros, "floor_s": floor_s, "per_new_s": token_s})
        self.core.on_message(WorkersReady(num_slots, 0, profile if token_s else None), self.now_s)

    def arrive(
        self, number: int, num_prompt: int, request_class: RequestClass, **more: Any
    ) -> None:
        num_output = more.pop("num_output", 3)
        arrival = Arrival(
            self.now_s, num_prompt, num_output, num_output, request_class=request_class
        )
        self.core.on_message(
            FromFrontend(FrontendId(0), submit(number, arrival, **more)), self.now_s
        )

    def step(self) -> dict[int, int]:
        """Run one step; return what moved by how much."""
        planned = self.core.plan(self.now_s)
        if not isinstance(planned, PlannedStep):
            return {}
        self.planned = planned
        moved = {int(r.key.request_id): count for r, count in planned.scheduled}
        plan = self.core.commit(planned, self.now_s)
        floor_s, token_s = self._times_s
        exec_s = max(floor_s, token_s * sum(moved.values()))
        self.now_s += exec_s
        result = self._worker.execute(plan, exec_s=exec_s, idle_s=0.0)
        self.core.on_result(result, self.now_s)
        return moved


@pytest.mark.parametrize("policy", ["chunked", "priority", "unified"])
def test_a_prompt_without_log_probabilities_passes_those_that_wait_for_positions(
    policy: str,
) -> None:
    core = make_core(policy, 4000, admission=RecklessAdmission(), max_model_len=MAX_LEN)
    scene = Scene(core, 20_000)
    for number in (0, 1):
        scene.arrive(number, 600, RT, sampling=SamplingParams(num_prompt_logprobs=0))
    scene.arrive(2, 50, RT)
    assert scene.step() == {0: 512, 2: 50}


def test_what_memory_refuses_leaves_its_time_to_prompts_in_progress() -> None:
    """The newcomer is due sooner, and would be cut where the tokens end."""
    core = make_core("unified", 40, admission=RecklessAdmission(), max_model_len=MAX_LEN)
    scene = Scene(core, 100)
    scene.arrive(0, 30, RT, num_output=60)
    scene.step()
    scene.arrive(1, 60, RT, slo=SLO(5000.0, None, None))
    assert scene.step() == {0: 1, 1: 39}
    scene.arrive(2, 50, RT, slo=SLO(1000.0, None, None))
    assert scene.step() == {0: 1, 1: 21}


def test_best_effort_goes_on_while_a_real_time_newcomer_has_no_slots() -> None:
    core = make_core("priority", 100, admission=RecklessAdmission(), max_model_len=MAX_LEN)
    scene = Scene(core, 100)
    scene.arrive(0, 60, RT, num_output=30)
    scene.arrive(1, 4, BE, num_output=30)
    scene.step()
    scene.arrive(2, 50, RT)
    assert scene.step() == {0: 1, 1: 1}


def test_decodes_that_give_way_take_no_memory() -> None:
    """The pool is nearly full; the urgent one is in time without the others."""
    core = make_core("unified", 64, admission=RecklessAdmission(), max_model_len=MAX_LEN)
    scene = Scene(core, 100, floor_s=0.0, token_s=0.002)
    scene.arrive(5, 42, BE, num_output=40)
    scene.step()
    for number in range(4):
        scene.arrive(number, 5, RT, num_output=60, slo=SLO(10_000.0, 2_000.0, 4_000.0))
    scene.step()
    scene.step()
    scene.arrive(4, 5, RT, num_output=60, slo=SLO(10_000.0, 6.0, 6.0))
    scene.step()
    for _ in range(7):
        assert 4 in scene.step()
        assert scene.planned is not None
        assert not scene.planned.paused and not scene.planned.preempted


def test_a_class_blind_policy_lets_real_time_pass_what_the_reserve_refuses() -> None:
    kv = KVOptions(cache_order=task_aware, rt_cache_min_tokens=40)
    core = make_core("chunked", 100, admission=RecklessAdmission(), max_model_len=MAX_LEN, kv=kv)
    scene = Scene(core, 100)
    scene.arrive(0, 60, RT, num_output=2)
    scene.step()
    scene.step()
    scene.arrive(1, 5, BE, num_output=30)
    scene.step()
    scene.arrive(2, 70, BE)
    scene.arrive(3, 20, RT)
    assert scene.step() == {1: 1, 3: 20}


class RunsOn:
    """Every request that runs goes forty steps on by itself."""

    is_class_aware = False
    meets_deadlines = False

    def fill(self, step: Step) -> None:
        step.take(list(step.running), classes=(), num_tokens=40)


def test_runs_of_decodes_do_not_end_with_the_budget() -> None:
    running = running_of([make_request(number, output=3) for number in range(3)])
    limits = make_limits(64, num_free_rows=4)
    step = filled(RunsOn(), running, Queue([]), limits, Admitting())
    assert [(r.arrival_number, count) for r, count in step.budget.parts] == [
        (0, 40),
        (1, 40),
        (2, 40),
    ]


@pytest.mark.parametrize("policy", ["priority", "unified"])
def test_a_suspect_gets_what_is_reserved_where_nothing_else_could_move(policy: str) -> None:
    kv = KVOptions(cache_order=task_aware, rt_cache_min_tokens=30)
    core = make_core(policy, 128, admission=RecklessAdmission(), max_model_len=128, kv=kv)
    scene = Scene(core, 200)
    scene.arrive(0, 40, RT)
    scene.arrive(1, 85, BE)
    planned = core.plan(0.0)
    assert isinstance(planned, PlannedStep)
    core.commit(planned, 0.0)
    core.on_message(WorkersGone(), 1.0)
    scene.start(100)
    moved = [scene.step() for _ in range(6)]
    assert {1: 85} in moved


# The unified planner against all steps that there are, in random states of up to ten requests.
# `support.small_states` says what is feasible: the constraint of BROS with deadlines of `slo.py`,
# leaving out requests that are late, or would be even if they had the server for themselves; and
# steps in which late requests have their turn. `bench.scheduling.planner_optimality` is the same
# for as many states as one likes.

NUM_STATES = 240
MAX_MISSED = 0.01
"""Known misses: cuts of prompts that will be late anyway, by either reading."""
MIN_RATE = 0.84
"""Of the best step's rate. Near capacity nothing stretches a step."""
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
