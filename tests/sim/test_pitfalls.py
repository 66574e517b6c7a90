"""Failures that users of other servers reported, as scenes.

One test for each row of that table, with its source; rows that are tested elsewhere are named in
`ELSEWHERE`, and that they are there is tested.
"""

from __future__ import annotations

import ast
import itertools
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.core_scenes import Arrival, RecklessAdmission, check_outcome, submit

from lightserve import sim
from lightserve.config import ServeConfig
from lightserve.errors import ProtocolError
from lightserve.messages.common import StepCoefficients
from lightserve.messages.router_worker import (
    StepPlan,
    StepResult,
    plan_rows,
)
from lightserve.router.admission.base import AdmissionRule
from lightserve.router.admission.baselines import ConservativeAdmission
from lightserve.router.admission.classwise import ClasswiseAdmission
from lightserve.router.config import SchedulerConfig
from lightserve.router.events import FromFrontend, WorkersReady
from lightserve.router.from_submit import QueueLimits
from lightserve.router.kv.cache import KVOptions, Preemption
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.policies import POLICIES
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep, Reason
from lightserve.sim.hybrid import HybridRun
from lightserve.sim.simulation import Outcome
from lightserve.sim.worker import SimulatedWorker
from lightserve.types import SLO, FrontendId, RequestClass, RequestId, RequestKey, StepId

RT, BE = RequestClass.RT, RequestClass.BE
FRONTEND = FrontendId(0)
MAX_LEN = 400
BASE_S, TOKEN_S = 0.004, 0.0001
"""What a step takes, and each of its tokens."""
PROFILE = StepCoefficients(
    **dict.fromkeys(StepCoefficients.__struct_fields__, 0.0)
    | {"floor_s": BASE_S, "per_new_s": TOKEN_S}
)

ELSEWHERE = {
    "SGLang 14972: pauses, resumes and aborts with a plan ahead leave nothing": [
        ("tests/sim/test_core_faults.py", "test_every_request_gets_its_tokens"),
        ("tests/sim/test_core_faults.py", "test_nothing_is_left_after_a_storm"),
    ],
    "opposite signs of priority": [
        ("tests/unit/router/test_queue.py", "test_under_every_policy_lower_numbers_start_first"),
    ],
    "SGLang 17026: metrics by class": [
        (
            "tests/unit/router/test_router_metrics.py",
            "test_steps_are_compared_by_kind_and_tokens_counted_by_class",
        ),
    ],
    "SGLang 17026: a request without a class is real-time": [
        ("tests/unit/frontend/test_frontend_fields.py", "test_a_tier_is_a_class_and_is_stated"),
    ],
    "vLLM 39375: no request is preempted for nothing": [
        ("tests/unit/router/test_preemption.py", "test_a_newcomer_takes_all_it_needs_or_nothing"),
    ],
}


class Scene:
    """One step after the other, with a plan ahead, in virtual time; all steps are remembered."""

    def __init__(
        self,
        policy: str = "unified",
        *,
        num_slots: int = 1000,
        num_rows: int = 16,
        budget: int = 256,
        admission: AdmissionRule | None = None,
    ) -> None:
        self.core = Scheduler(
            SchedulerConfig(
                max_model_len=MAX_LEN,
                max_num_seqs=num_rows,
                max_num_batched_tokens=budget,
                queue_limits=dict.fromkeys(RequestClass, QueueLimits(1000, 1 << 30)),
                policy=POLICIES[policy](),
                kv=KVOptions(preemption=Preemption.CHECKPOINT),
                admission=admission or RecklessAdmission(),
                lengths=OutputLengths(max_output_tokens=MAX_LEN),
            )
        )
        self.worker = SimulatedWorker(
            num_slots=num_slots, max_num_seqs=num_rows, max_model_len=MAX_LEN, num_host_slots=1000
        )
        self.now_s = 0.0
        self.sent: deque[StepPlan] = deque()
        self.steps: list[PlannedStep] = []
        self.arrivals: dict[int, Arrival] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.core.on_message(WorkersReady(num_slots, 1000, PROFILE), 0.0)

    def add(
        self, number: int, of: RequestClass, num_prompt: int, num_output: int, **slo: float
    ) -> None:
        arrival = Arrival(self.now_s, num_prompt, num_output, num_output, request_class=of)
        self.arrivals[number], self.outcomes[number] = arrival, Outcome(self.now_s)
        message = submit(number, arrival, slo=SLO(**slo))
        self.core.on_message(FromFrontend(FRONTEND, message), self.now_s)

    def run(self, num_steps: int) -> None:
        """Let so many steps end; the next one is sent while one runs."""
        for _ in range(num_steps):
            self.plan()
            if not self.sent:
                return
            plan = self.sent.popleft()
            exec_s = BASE_S + TOKEN_S * sum(row.num_tokens for row in plan_rows(plan))
            self.now_s += 0.99 * exec_s
            if not self.sent:
                self.plan()
            self.now_s += 0.01 * exec_s
            result = self.worker.execute(plan, exec_s=exec_s, idle_s=0.0)
            for outgoing in self.core.on_result(result, self.now_s):
                for delta in outgoing.message.each():
                    self.outcomes[int(delta.request_id)].note(delta, self.now_s)
        self.core.check_integrity()

    def plan(self) -> None:
        while isinstance(step := self.core.plan(self.now_s), PlannedStep):
            self.steps.append(step)
            self.sent.append(self.core.commit(step, self.now_s))

    def run_dry(self) -> None:
        self.run(5000)
        for number, outcome in self.outcomes.items():
            check_outcome(self.arrivals[number], outcome)
        assert self.core.num_used_slots == 0

    def moved(self, step: PlannedStep) -> dict[int, int]:
        return {int(request.key.request_id): count for request, count in step.scheduled}

    def stops_of(self, number: int) -> int:
        return sum(int(r.key.request_id) == number for step in self.steps for r in step.paused)


@pytest.mark.parametrize("policy", ["unified", "priority"])
def test_real_time_gets_a_row_of_best_effort(policy: str) -> None:
    """vLLM 40004: a high-priority request never preempts where `max_num_seqs` is full."""
    scene = Scene(policy, num_rows=4)
    for number in range(4):
        scene.add(number, BE, 20, 200)
    scene.run(10)
    assert len(scene.core.running) == 4
    scene.plan()
    num_before, num_in_flight = len(scene.steps), len(scene.sent)
    scene.add(9, RT, 30, 20, ttft_ms=200.0)
    scene.run(num_in_flight + 2)
    next_step = scene.steps[num_before]
    assert scene.moved(next_step)[9] == 30, "it is in the next plan that leaves"
    assert len(next_step.paused) == 1
    scene.run_dry()


def test_real_time_is_in_the_plan_behind_the_step_that_runs() -> None:
    """With a row free, nothing has to be waited for."""
    scene = Scene()
    for number in range(4):
        scene.add(number, BE, 20, 200)
    scene.run(10)
    scene.plan()
    num_before = len(scene.steps)
    scene.add(9, RT, 30, 20, ttft_ms=200.0)
    scene.run(1)
    assert scene.moved(scene.steps[num_before])[9] == 30
    scene.run_dry()


@pytest.mark.parametrize("policy", ["unified", "priority", "chunked"])
@pytest.mark.parametrize("of", RequestClass)
def test_equals_do_not_take_from_each_other_in_turn(policy: str, of: RequestClass) -> None:
    """vLLM 45561, review: by the tie-break by arrival, equals preempt each other."""
    scene = Scene(policy, num_slots=MAX_LEN)
    for number in range(4):
        scene.add(number, of, 50, 150)
    scene.run_dry()
    stops = [scene.stops_of(number) for number in range(4)]
    assert stops[0] == 0, "the most senior loses nothing"
    assert sum(stops) > 0, "memory did run out"
    assert max(stops) <= 3, "one for each who is before it"


def test_paused_requests_resume_before_new_ones_on_what_they_hold() -> None:
    """vLLM 41951: a preempted request loses its place, its blocks, and all its work."""
    scene = Scene(num_slots=600, num_rows=3)
    for number in range(3):
        scene.add(number, BE, 100, 100)
    scene.run(20)
    for number in range(3, 6):
        scene.add(number, BE, 40, 20)
    for number in range(10, 12):
        scene.add(number, RT, 150, 20, ttft_ms=400.0)
    scene.run_dry()
    paused = [number for number in range(3) if scene.stops_of(number)]
    assert paused
    first = {number: outcome.token_times_s[0] for number, outcome in scene.outcomes.items()}
    resumed_s = max(
        min(t for t in scene.outcomes[number].token_times_s if t > first[11]) for number in paused
    )
    assert all(resumed_s <= first[number] for number in range(3, 6)), "before those that are new"
    counters = scene.core.counters[BE]
    assert counters.num_pauses >= len(paused)
    assert counters.lost_tokens == 0, "nothing is computed again"
    computed = sum(count for step in scene.steps for _, count in step.scheduled)
    assert computed == sum(a.num_prompt + a.num_output - 1 for a in scene.arrivals.values())


def test_none_is_paused_for_one_that_it_does_not_suffice() -> None:
    """vLLM 39375: all are preempted, then the request still does not fit."""
    scene = Scene(num_slots=400)
    scene.add(0, RT, 250, 60, ttft_ms=200.0, tpot_ms=50.0)
    scene.add(1, BE, 40, 60)
    scene.run(6)
    scene.add(2, RT, 180, 5, ttft_ms=50.0)
    num_before = len(scene.steps)
    while scene.core.running and scene.outcomes[0].finish_reason is None:
        scene.run(1)
    assert len(scene.steps) > num_before + 20
    waiting = scene.steps[num_before : num_before + 20]
    assert all(not step.paused and not step.preempted and not step.checkpointed for step in waiting)
    reasons = {
        reason
        for step in waiting
        for request, reason in step.left_out.each()
        if request.request_class is RT and request.num_schedulable_tokens > 1
    }
    assert Reason.KV_NOW in reasons, "memory is what it lacks"
    scene.run_dry()


def test_one_that_needs_much_memory_holds_up_none_behind_it() -> None:
    """vLLM 31731: a KV-hungry request at the head blocks all later ones."""
    rule = ClasswiseAdmission(ConservativeAdmission(), ConservativeAdmission())
    scene = Scene(num_slots=500, admission=rule)
    scene.add(0, BE, 100, 200)
    scene.run(4)
    scene.add(1, BE, 200, 100)
    for number in range(2, 5):
        scene.add(number, BE, 20, 20)
    scene.run(30)
    assert not scene.outcomes[1].token_ids, "it has to wait for memory"
    assert all(scene.outcomes[number].token_ids for number in range(2, 5))
    scene.run_dry()


def largest_gap_s(policy: str) -> float:
    """Return the largest gap of a decode beside a stream of long prompts."""
    scene = Scene(policy, num_slots=4000, budget=512)
    scene.add(0, RT, 20, 150, tpot_ms=20.0, mtpot_ms=20.0)
    scene.run(2)
    number = 1
    while scene.outcomes[0].finish_reason is None:
        waiting = [n for n in scene.outcomes if not scene.outcomes[n].token_ids]
        if len(waiting) < 3:
            scene.add(number, RT, 390, 2, ttft_ms=2000.0)
            number += 1
        scene.run(1)
    times = scene.outcomes[0].token_times_s
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def test_decodes_keep_their_gaps_beside_a_stream_of_prompts() -> None:
    """SGLang 32549: with prompts first, decodes come to one batch in 24 seconds."""
    assert largest_gap_s("unified") <= 0.020 + 1e-9
    assert largest_gap_s("fcfs") > 0.1, "the stream is one: whole prompts first starve it"


def test_defaults_and_the_switch() -> None:
    """SGLang 17026: no default priority, and no way to turn preemption into something else."""
    message = submit(0, Arrival(0.0, 3, 3, 3))
    assert message.priority == 0
    assert message.slo == SLO()
    config = ServeConfig(model="m")
    for choice in Preemption:
        assert replace(config, preemption=str(choice)).preemption == choice
    assert {of: str(of) for of in RequestClass} == {RT: "rt", BE: "be"}


def test_results_belong_to_plans() -> None:
    """LightLLM plans ahead on estimates; here results that are not the oldest plan's are errors."""
    scene = Scene()
    scene.add(0, RT, 20, 10)
    scene.plan()
    (plan,) = scene.sent
    for number in (plan.step_id + 1, plan.step_id - 1):
        late = StepResult(
            step_id=StepId(number), incarnation=0, token_ids=b"", exec_s=0.0, idle_s=0.0
        )
        with pytest.raises(ProtocolError, match="out of order"):
            scene.core.on_result(late, scene.now_s)
    scene.run_dry()
    key = RequestKey(FRONTEND, RequestId(0))
    assert all(r.key == key for step in scene.steps for r, _ in step.scheduled)
    assert len(scene.steps) == 10, "no slack: one step for each token, the prompt's included"


@pytest.mark.parametrize("row", ELSEWHERE)
def test_the_other_rows_are_tested_elsewhere(row: str) -> None:
    for path, name in ELSEWHERE[row]:
        tree = ast.parse((Path(__file__).parents[2] / path).read_text())
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, functions)}


# Best-effort work from the first second on: what real-time load is, is measured, not assumed.


def test_best_effort_work_does_not_wait_for_a_history() -> None:
    """Three real-time requests per second, half of what the server can do.

    Lengths up to the model's longest that were assumed at first left best-effort requests nothing
    for two minutes.
    """
    config = sim.HybridConfig(
        rt="poisson:3",
        rt_lengths="uniform:1000-1400,100-300",
        be="closed:64",
        be_lengths="uniform:512-1024,32-128",
        duration_s=30.0,
        margin_s=0.0,
        targets=sim.Targets(1.0, 0.2, 0.2),
    )
    run = HybridRun(config)
    run.advance(config.duration_s)
    outcomes = run.simulation.outcomes.items()
    times = np.concatenate([o.token_times_s for key, o in outcomes if key.frontend_id == 1])
    early, steady = (((times >= a) & (times < b)).sum() / (b - a) for a, b in ((10, 20), (20, 30)))
    assert steady > 100
    assert early >= 0.8 * steady
    waits_s = [
        o.token_times_s[0] - o.arrival_s
        for k, o in outcomes
        if k.frontend_id == 0 and o.token_times_s
    ]
    assert max(waits_s) <= 1.0
