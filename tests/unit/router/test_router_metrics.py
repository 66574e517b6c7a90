"""What the router counts, with the real core: queue times, steps, preemptions, memory."""

from __future__ import annotations

import msgspec
import pytest
from support.core_scenes import (
    MAX_SEQS,
    Arrival,
    RecklessAdmission,
    make_core,
    pack_results,
    step_time,
    submit,
)

from lightserve.messages.common import StepCoefficients
from lightserve.messages.router_worker import (
    OutputKind,
    RowResult,
    StepPlan,
    StepResult,
    plan_rows,
)
from lightserve.metrics.recording import Recorder
from lightserve.router.admission.baselines import EmaAdmission
from lightserve.router.events import FromFrontend, WorkersGone, WorkersReady
from lightserve.router.kv.prefix_node import task_aware
from lightserve.router.metrics import RecentSteps, RouterMetrics
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep
from lightserve.types import NO_SLO, SLO, FrontendId, RequestClass

TEN_MS = StepCoefficients(0.01, 1e9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
"""Every step takes as long."""


class Driver:
    """Runs a core by hand, on a clock of its own, as the router's loop does."""

    def __init__(self, core: Scheduler, num_kv_slots: int, num_state_slots: int = 0) -> None:
        self.core = core
        self.metrics = RouterMetrics(Recorder())
        self.recent = RecentSteps()
        self.recent.tell(0.0)
        self.now_s = 0.0
        ready = WorkersReady(num_kv_slots, num_state_slots=num_state_slots)
        core.on_message(ready, self.now_s)

    def arrive(self, number: int, arrival: Arrival, age_s: float = 0.0, slo: SLO = NO_SLO) -> None:
        message = submit(number, arrival, age_s=age_s, slo=slo)
        self.core.on_message(FromFrontend(FrontendId(0), message), self.now_s)

    def send(self) -> StepPlan | None:
        step = self.core.plan(self.now_s)
        if not isinstance(step, PlannedStep):
            return None
        self.metrics.on_commit(step, self.now_s)
        self.recent.on_commit(step, self.now_s)
        return self.core.commit(step, self.now_s)

    def finish(self, plan: StepPlan, exec_s: float) -> None:
        self.now_s += exec_s
        rows = [RowResult(r.row, [5]) for r in plan_rows(plan) if r.output is OutputKind.SAMPLE]
        result = pack_results(plan, rows, exec_s=exec_s, idle_s=0.25)
        predicted_s = self.core.predicted_step_s
        self.metrics.on_result(result, self.core.num_used_slots, predicted_s)
        self.recent.on_result(result.step_id, exec_s, predicted_s)
        self.core.on_result(result, self.now_s)

    def run_out(self) -> int:
        """Run until nothing is left; return the number of steps."""
        count = 0
        while (plan := self.send()) is not None:
            self.finish(plan, step_time(plan))
            count += 1
        return count

    def values(self, num_rejected: int = 0) -> dict[tuple[str, ...], list[float]]:
        self.metrics.collect(self.core, self.core.status(self.now_s), num_rejected)
        return {
            (sample.family.removeprefix("lightserve_"), *sample.labels): sample.values
            for sample in self.metrics.recorder.snapshot()
        }


def test_one_request_from_its_arrival_to_its_end() -> None:
    driver = Driver(make_core("chunked"), 100)
    driver.now_s = 50.0
    driver.arrive(0, Arrival(0.0, num_prompt=10, num_output=3, max_tokens=3), age_s=0.5)
    values = driver.values()
    assert values["num_requests_waiting", "rt"] == [1]
    assert values["num_tokens_waiting", "rt"] == [10]
    driver.now_s = 51.0
    plan = driver.send()
    assert plan is not None
    values = driver.values(num_rejected=4)
    total_s, *counts = values["request_queue_time_seconds", "rt"]
    assert (total_s, sum(counts)) == (1.5, 1)
    assert values["num_requests_running", "rt"] == [1]
    assert values["kv_slots_used",] == [10]
    assert values["kv_cache_usage_perc",] == [0.1]
    assert values["ipc_rejected_total", "router"] == [4]
    driver.finish(plan, 0.25)
    assert driver.run_out() == 2
    values = driver.values()
    assert values["steps_total",] == [3]
    for family, total in (("step_batch_size", 3), ("iteration_tokens", 12)):
        assert (values[family,][0], sum(values[family,][1:])) == (total, 3)
    observed_s, predicted_s, error_s = (
        values[f"{name}_seconds",]
        for name in ("step_time", "predicted_step_time", "step_time_error")
    )
    assert observed_s[0] == pytest.approx(0.25 + 2 * 0.0045)
    assert observed_s[0] == values["worker_busy_seconds_total",][0]
    assert sum(observed_s[1:]) == sum(predicted_s[1:]) == sum(error_s[1:]) == 3
    assert error_s[0] >= 0.25  # of the first step nothing was known
    assert values["kv_slots_used",] == [0]
    assert values["kv_slots_used_peak",] == [12]
    assert driver.values()["kv_slots_used_peak",] == [0]  # of each second anew
    assert sum(values["request_queue_time_seconds", "be"][1:]) == 0


def test_a_preempted_request_has_queued_once() -> None:
    driver = Driver(make_core("chunked", admission=RecklessAdmission()), 30)
    for number in range(3):
        arrival = Arrival(0.0, 6, 12, 12, request_class=RequestClass.BE)
        driver.arrive(number, arrival)
    driver.run_out()
    values = driver.values()
    assert values["num_preemptions_total",][0] > 0
    assert values["preempted_tokens_total",][0] > 0
    assert sum(values["request_queue_time_seconds", "be"][1:]) == 3
    assert values["prefix_cache_queries_total", "be"] == [18]
    assert values["num_requests_running", "be"] == [0]


def test_steps_of_lost_workers_are_not_waited_for() -> None:
    driver = Driver(make_core("chunked"), 100)
    driver.arrive(0, Arrival(0.0, 6, 4, 4))
    lost = driver.send()
    assert lost is not None
    driver.core.on_message(WorkersGone(), driver.now_s)
    driver.metrics.on_workers_gone()
    driver.metrics.on_result(
        StepResult(step_id=lost.step_id, incarnation=0, token_ids=b"", exec_s=1.0, idle_s=0.0),
        num_used_slots=0,
        predicted_s=0.5,
    )
    values = driver.values()
    assert sum(values["step_time_seconds",][1:]) == 0
    assert values["kv_slots",] == values["kv_cache_usage_perc",] == [0]
    driver.core.on_message(WorkersReady(100), driver.now_s)
    assert driver.run_out() == 4
    assert sum(driver.values()["request_queue_time_seconds", "rt"][1:]) == 1


def test_prefixes_that_were_found_are_counted() -> None:
    driver = Driver(make_core("chunked", cache_order=task_aware), 100)
    for number in (0, 3):  # numbers that differ by a multiple of three have the same prompt
        driver.arrive(number, Arrival(0.0, 20, 4, 4, family=1))
        driver.run_out()
        if number == 0:
            assert driver.values()["prefix_cache_hits_total", "rt"] == [0]
    values = driver.values()
    assert values["prefix_cache_queries_total", "rt"] == [40]
    assert values["prefix_cache_hits_total", "rt"] == [19]  # the last token's logits are needed
    assert values["kv_slots_cached",][0] > 0
    assert driver.values()["prefix_cache_queries_total", "rt"] == [40]


def test_snapshots_of_states_are_counted() -> None:
    """The second prompt parts from the first one where a snapshot is made for the third."""
    driver = Driver(make_core("chunked", 64, cache_order=task_aware), 200, num_state_slots=5)
    hits = []
    for number in range(3):
        driver.arrive(number, Arrival(0.0, 20, 4, 4, family=1))
        driver.run_out()
        hits.append(driver.values()["prefix_cache_hits_total", "rt"])
    assert hits == [[0], [0], [19]]
    values = driver.values()
    assert values["kv_state_slots",] == [5]
    assert values["kv_slots_snapshots",][0] % 5 == 0 < values["kv_slots_snapshots",][0]
    assert values["state_snapshots_total", "rt"][0] > 1
    driver.core.on_message(WorkersGone(), driver.now_s)
    values = driver.values()
    assert values["kv_state_slots",] == values["kv_slots_snapshots",] == [0]
    assert values["state_snapshots_total", "rt"][0] > 1


def test_the_forecast_peak_of_the_rule_is_told() -> None:
    """A request of 5 tokens that may output 4 is expected to hold 9 at most."""
    lengths = OutputLengths(max_output_tokens=64)
    rule = EmaAdmission(lengths)
    driver = Driver(make_core("chunked", admission=rule, lengths=lengths), 64)
    assert driver.values()["kv_slots_forecast_peak",] == [0]
    driver.arrive(0, Arrival(0.0, num_prompt=5, num_output=4, max_tokens=4))
    assert driver.run_out() > 0
    assert driver.values()["kv_slots_forecast_peak",] == [9]


def test_skipped_requests_are_counted_by_reason() -> None:
    """Six rows for nine requests: every step leaves out three, of which it looks at none."""
    driver = Driver(make_core("chunked", budget=24), num_kv_slots=1000)
    for number in range(9):
        driver.arrive(number, Arrival(0.0, 4, 5, 5))
    plan = driver.send()
    assert plan is not None and len(plan_rows(plan)) == MAX_SEQS
    driver.finish(plan, 0.01)
    plan = driver.send()
    assert plan is not None
    values = driver.values()
    assert values["requests_unseen_total", "rt", "tokens"] == [3]
    assert values["requests_unseen_total", "rt", "rows"] == [3]
    driver.finish(plan, 0.01)
    driver.run_out()
    values = driver.values()
    assert values["requests_unseen_total", "rt", "rows"] == [3 * 4]


def test_steps_are_compared_by_kind_and_tokens_counted_by_class() -> None:
    """Three steps of one request of each class: both prompts, two decodes, a decode beside one."""
    driver = Driver(make_core("unified"), 100)
    driver.core.on_message(WorkersGone(), 0.0)
    driver.core.on_message(WorkersReady(100, step_cost=TEN_MS), 0.0)
    slo = SLO(ttft_ms=500, tpot_ms=25, mtpot_ms=25)
    driver.arrive(0, Arrival(0.0, num_prompt=5, num_output=4, max_tokens=4), slo=slo)
    driver.arrive(1, Arrival(0.0, 6, 9, 9, request_class=RequestClass.BE))
    for seconds in (0.01, 0.02, 0.005):
        plan = driver.send()
        assert plan is not None
        driver.finish(plan, seconds)
    values = driver.values()
    ratios = {kind: values["step_time_ratio", kind] for kind in ("decode", "mixed", "prefill")}
    assert {kind: sum(counts) for kind, (_, *counts) in ratios.items()} == {
        "decode": 2,
        "mixed": 0,
        "prefill": 1,
    }
    assert ratios["prefill"][0] == pytest.approx(1.0)
    assert ratios["decode"][0] > 2.0  # it took twice as long, and what follows was expected to
    computed = {
        (name, kind): values["computed_tokens_total", name, kind]
        for name in ("rt", "be")
        for kind in ("prompt", "decode")
    }
    assert computed == {
        ("rt", "prompt"): [5],
        ("rt", "decode"): [2],
        ("be", "prompt"): [6],
        ("be", "decode"): [2],
    }
    # A first token is due after 500 ms, the others 25 ms apart; steps were to take 10 at least.
    headroom_s, *counts = values["step_headroom_seconds",]
    assert sum(counts) >= 2
    assert 0 < headroom_s <= 0.49 + 2 * 0.015 + 1e-9


def test_saves_of_prefixes_are_in_a_step_s_predicted_time() -> None:
    """A prompt takes the slots of another's, of which each takes a millisecond to save.

    So they are in what the step leaves of its limit, and in what the dashboard shows.
    """
    driver = Driver(make_core("unified", 64, cache_order=task_aware), 40)
    driver.core.on_message(WorkersGone(), 0.0)
    cost = msgspec.structs.replace(TEN_MS, per_loaded_token_s=0.001)
    driver.core.on_message(WorkersReady(40, step_cost=cost, num_prefix_slots=100), 0.0)
    for number in range(2):
        arrival = Arrival(0.0, num_prompt=30, num_output=1, max_tokens=1)
        driver.arrive(number, arrival, slo=SLO(ttft_ms=500))
        plan = driver.send()
        assert plan is not None
        num_saved = len(plan.saves.slots) // 4
        assert (num_saved > 0) is (number == 1)
        driver.finish(plan, 0.01 + 0.001 * num_saved)
    total, *counts = driver.values()["step_time_ratio", "prefill"]
    assert sum(counts) == 2 and total == pytest.approx(2.0)
    first, second = driver.recent.tell(driver.now_s)
    assert (first.predicted_s, second.predicted_s) == pytest.approx(
        (0.01, 0.01 + 0.001 * num_saved)
    )
    headroom_s = sum((note.limit_s or 0.0) - note.predicted_s for note in (first, second))
    assert driver.values()["step_headroom_seconds",][0] == pytest.approx(headroom_s)


def test_what_waits_is_told_in_tokens_and_seconds() -> None:
    driver = Driver(make_core("priority"), 100)
    driver.core.on_message(WorkersGone(), 0.0)
    driver.core.on_message(WorkersReady(100, step_cost=TEN_MS), 0.0)
    assert driver.values()["predicted_wait_seconds", "be"] == [0]
    for number in range(4):
        driver.arrive(number, Arrival(0.0, 16, 4, 4, request_class=RequestClass.BE))
    values = driver.values()
    assert values["num_tokens_waiting", "be"] == [64]
    assert values["predicted_wait_seconds", "be"][0] == pytest.approx(0.04)  # 16 tokens a step
    assert values["predicted_wait_seconds", "rt"] == [0]


def test_targets_that_were_raised_are_counted_by_name() -> None:
    driver = Driver(make_core("unified"), 100)
    driver.core.on_message(WorkersGone(), 0.0)
    driver.core.on_message(WorkersReady(100, step_cost=TEN_MS), 0.0)
    for number, slo in enumerate((SLO(ttft_ms=1, tpot_ms=5, mtpot_ms=50), SLO(ttft_ms=9))):
        driver.arrive(number, Arrival(0.0, 5, 4, 4), slo=slo)
    driver.arrive(2, Arrival(0.0, 5, 4, 4, request_class=RequestClass.BE), slo=SLO(completion_s=1))
    raised = {key: v for key, v in driver.values().items() if key[0] == "raised_targets_total"}
    assert {key[1:]: v[0] for key, v in raised.items() if v != [0]} == {
        ("rt", "ttft"): 2,
        ("rt", "tpot"): 1,
    }
    assert len(raised) == 8


def test_the_headroom_for_bursts_is_told() -> None:
    """What real-time requests held while they decoded, rounded up; none runs any more."""
    driver = Driver(make_core("priority", rt_kv_deviations=2.0), 100)
    assert driver.values()["burst_headroom_tokens",] == [0]
    for second in range(5):
        driver.now_s = float(second)
        driver.arrive(second, Arrival(0.0, 20, 8, 8))
        driver.run_out()
    (headroom,) = driver.values()["burst_headroom_tokens",]
    assert 0 < headroom <= 28
