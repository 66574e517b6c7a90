"""A paused request comes back bit by bit, beside the steps of others, and may be stopped in it.

A step takes 10 ms and one more for each token beyond the first, and the link brings eleven tokens
back in its time: all that is missing takes longer than a step may that keeps real-time deadlines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from support.core_scenes import Arrival, RecklessAdmission, check_outcome, submit

from lightserve.messages.common import StepCoefficients
from lightserve.messages.frontend_router import Abort
from lightserve.messages.router_worker import StepPlan
from lightserve.router.config import SchedulerConfig
from lightserve.router.events import FromFrontend, WorkersGone, WorkersReady
from lightserve.router.from_submit import QueueLimits
from lightserve.router.kv.cache import KVOptions, Preemption
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.policies import POLICIES
from lightserve.router.request import Request
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep, Reason
from lightserve.sim.simulation import Outcome
from lightserve.sim.virtual_gpus import ProfiledHardware
from lightserve.sim.worker import SimulatedWorker, VirtualWorker
from lightserve.types import SLO, FrontendId, RequestClass, RequestId

RT, BE = RequestClass.RT, RequestClass.BE
NUM_SLOTS, MAX_LEN, MAX_SEQS = 290, 400, 4
STEP_S, TOKEN_S, COPY_S = 0.01, 0.001, 0.0009
PROFILE = StepCoefficients(
    floor_s=STEP_S,
    knee=1.0,
    per_new_s=TOKEN_S,
    per_decode_s=0.0,
    per_chunk_s=0.0,
    per_decode_context_s=0.0,
    per_chunk_context_s=0.0,
    per_chunk_pair_s=0.0,
    per_saved_token_s=COPY_S,
    per_loaded_token_s=COPY_S,
)
FRONTEND = FrontendId(0)
VICTIM, STREAM, BURST = 0, 1, 2


class Scene:
    """A core and a worker; a best-effort request that lost half of its KV to a real-time one."""

    def __init__(self, policy: str = "unified", *, overlaps: bool = True) -> None:
        self.core = Scheduler(
            SchedulerConfig(
                max_model_len=MAX_LEN,
                max_num_seqs=MAX_SEQS,
                max_num_batched_tokens=512,
                queue_limits=dict.fromkeys(RequestClass, QueueLimits(100, 1 << 30)),
                policy=POLICIES[policy](),
                kv=KVOptions(preemption=Preemption.CHECKPOINT),
                admission=RecklessAdmission(),
                lengths=OutputLengths(max_output_tokens=MAX_LEN),
            )
        )
        self.hardware = ProfiledHardware(PROFILE, 1, overlaps_copies=overlaps)
        self.num_burst = 190 if policy == "unified" else 220
        """Tokens that come bit by bit while the others go on, or all at once."""
        self.now_s = 0.0
        self.sent: deque[StepPlan] = deque()
        self.steps: list[PlannedStep] = []
        self.step_times_s: list[float] = []
        """From the end of a step to that of the next."""
        self.arrivals: dict[int, Arrival] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.start_workers()

    def start_workers(self) -> None:
        self.sent.clear()
        checking = SimulatedWorker(
            num_slots=NUM_SLOTS, max_num_seqs=MAX_SEQS, max_model_len=MAX_LEN, num_host_slots=300
        )
        self.worker = VirtualWorker(self.hardware, checking, rng=np.random.default_rng(0))
        ready = WorkersReady(NUM_SLOTS, 300, PROFILE, self.hardware.overlaps_copies)
        self.core.on_message(ready, self.now_s)

    def add(self, number: int, of: RequestClass, num_prompt: int, num_output: int) -> None:
        arrival = Arrival(self.now_s, num_prompt, num_output, num_output, request_class=of)
        self.arrivals[number], self.outcomes[number] = arrival, Outcome(self.now_s)
        slo = SLO(ttft_ms=5000.0, tpot_ms=16.0, mtpot_ms=32.0) if of is RT else SLO()
        self.core.on_message(FromFrontend(FRONTEND, submit(number, arrival, slo=slo)), self.now_s)

    def lose(self) -> Request:
        """Let the victim lose its end to a real-time request that soon goes; return it."""
        self.add(VICTIM, BE, 100, 40)
        self.add(STREAM, RT, 20, 110)
        self.run(4)
        (victim,) = [r for r in self.core.running if r.request_class is BE]
        self.add(BURST, RT, self.num_burst, 4)
        self.run_until(lambda: self.outcomes[BURST].finish_reason is not None)
        assert victim.is_paused and victim.host is not None
        assert victim.host.end - victim.num_held_tokens > 50
        self.steps.clear()
        self.step_times_s.clear()
        return victim

    def run(self, num_steps: int) -> None:
        """Let so many steps end; the next one is sent while one runs."""
        for _ in range(num_steps):
            self.plan()
            if not self.sent:
                return
            plan = self.sent.popleft()
            exec_s = self.worker.seconds(plan)
            self.now_s += 0.95 * exec_s
            if not self.sent:
                self.plan()
            self.now_s += 0.05 * exec_s
            self.step_times_s.append(exec_s)
            result = self.worker.execute(plan, exec_s=exec_s, idle_s=0.0)
            for outgoing in self.core.on_result(result, self.now_s):
                for delta in outgoing.message.each():
                    self.outcomes[int(delta.request_id)].note(delta, self.now_s)
            self.core.check_integrity()

    def plan(self) -> None:
        while isinstance(step := self.core.plan(self.now_s), PlannedStep):
            self.steps.append(step)
            self.sent.append(self.core.commit(step, self.now_s))

    def run_until(self, is_reached: Callable[[], bool], most: int = 200) -> None:
        for _ in range(most):
            if is_reached():
                return
            self.run(1)
        raise AssertionError("it does not happen")

    def run_dry(self) -> None:
        self.run(2000)
        for number, outcome in self.outcomes.items():
            check_outcome(self.arrivals[number], outcome)
        kv = self.core._kv
        assert kv is not None and (kv.num_used, kv.checkpoints.num_used) == (0, 0)

    def num_missed(self) -> int:
        """Deadlines of real-time requests that run."""
        deadlines = [r.deadlines for r in self.core.running if r.request_class is RT]
        return sum(tracker.kept.num_missed for tracker in deadlines if tracker is not None)

    def num_loaded_ahead(self) -> list[int]:
        return [count for step in self.steps for _, count in step.loaded]


@pytest.mark.parametrize(
    ("policy", "overlaps"), [("unified", True), ("unified", False), ("priority", True)]
)
def test_it_comes_back_beside_the_decodes_of_others(policy: str, overlaps: bool) -> None:
    """While the stream of the other goes on, whose deadlines are nearer than all of its loads."""
    scene = Scene(policy, overlaps=overlaps)
    victim = scene.lose()
    num_missing = victim.num_kept_tokens - victim.num_held_tokens
    num_missed = scene.num_missed()
    scene.run_until(lambda: victim in scene.core.running)
    assert scene.outcomes[STREAM].finish_reason is None and len(scene.steps) < 40
    num_at_once = 0 if overlaps else 10  # as there is time for so many in the step that runs it
    assert num_missing - num_at_once <= sum(scene.num_loaded_ahead()) <= num_missing
    assert len(scene.num_loaded_ahead()) > 3
    loads = [step for step in scene.steps if step.loaded]
    assert all((victim, Reason.LOADING) in step.left_out.each() for step in loads)
    first_run = next(step for step in scene.steps if victim in dict(step.scheduled))
    assert first_run.step_id == loads[-1].step_id + 1, "in the step after its last token"
    gaps_s = scene.step_times_s
    if overlaps and policy == "unified":
        assert max(gaps_s) <= 1.2 * sorted(gaps_s)[len(gaps_s) // 2], "not waited for"
    assert max(gaps_s) < 0.032
    assert scene.num_missed() == num_missed
    scene.run_dry()


def test_what_it_has_loaded_goes_again_at_no_cost() -> None:
    scene = Scene()
    victim = scene.lose()
    scene.run_until(lambda: len(scene.num_loaded_ahead()) == 3)
    counters = scene.core.counters[BE]
    assert victim.host is not None
    num_taken, num_saved, start = counters.taken_tokens, counters.saved_tokens, victim.host.start
    scene.add(9, RT, 200, 4)
    scene.run_until(lambda: counters.taken_tokens - num_taken > 20)
    num_saved = counters.saved_tokens - num_saved
    assert num_saved == start - victim.host.start, "those alone that were never on the host"
    assert counters.taken_tokens - num_taken - num_saved > 10
    scene.run_until(lambda: victim in scene.core.running)
    scene.run_dry()


@pytest.mark.parametrize("num_steps", range(1, 5))
def test_it_may_be_aborted_at_any_point(num_steps: int) -> None:
    scene = Scene()
    victim = scene.lose()
    scene.run_until(lambda: len(scene.num_loaded_ahead()) >= num_steps)
    del scene.outcomes[VICTIM]
    abort = Abort(request_id=RequestId(VICTIM))
    scene.core.on_message(FromFrontend(FRONTEND, abort), scene.now_s)
    scene.core.check_integrity()
    assert victim.slots is None and victim.host is None
    scene.run_dry()


def test_it_is_computed_again_where_the_workers_die() -> None:
    scene = Scene()
    victim = scene.lose()
    scene.run_until(lambda: len(scene.num_loaded_ahead()) == 3)
    del scene.outcomes[STREAM]  # it had sent tokens: that is the end of it
    scene.core.on_message(WorkersGone(), scene.now_s)
    assert victim.num_held_tokens == 0 and victim.host is None
    scene.start_workers()
    scene.run_dry()


def test_alone_it_loads_all_at_once() -> None:
    """There is no request that would wait."""
    scene = Scene()
    victim = scene.lose()
    del scene.outcomes[STREAM]
    abort = Abort(request_id=RequestId(STREAM))
    scene.core.on_message(FromFrontend(FRONTEND, abort), scene.now_s)
    scene.run_until(lambda: victim in scene.core.running)
    scene.run_dry()
    assert scene.num_loaded_ahead() == []


def test_an_arrival_that_is_real_time_does_not_wait_for_loads() -> None:
    """Its first step leaves as if nothing were loaded, and takes no longer."""
    scene = Scene()
    scene.lose()
    scene.run_until(lambda: len(scene.num_loaded_ahead()) == 2)
    scene.add(9, RT, 20, 4)
    num_planned = len(scene.steps)
    scene.run(len(scene.sent) + 1)
    first = scene.steps[num_planned]
    assert 9 in {int(request.key.request_id) for request, _ in first.scheduled}
    assert max(scene.step_times_s) == pytest.approx(STEP_S + 20 * TOKEN_S)
    scene.run_dry()
