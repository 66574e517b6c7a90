"""What requests are scheduled by: targets that no server could meet are raised, the rest kept."""

from __future__ import annotations

from typing import Any

import pytest
from support.core_scenes import MAX_LEN, Arrival, make_core, pack_results, submit

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError
from lightserve.messages.common import StepCoefficients
from lightserve.messages.frontend_router import BatchDue, RequestDelta
from lightserve.messages.router_worker import (
    OutputKind,
    RowResult,
    plan_rows,
)
from lightserve.router.events import FromFrontend, Outgoing, WorkersReady
from lightserve.router.kv.prefix_node import task_aware
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.policies import POLICIES
from lightserve.router.scheduler import Scheduler
from lightserve.router.slo import SLO_CLOCKS, CompletionLedger, LineDeadline
from lightserve.router.step import PlannedStep
from lightserve.types import NO_SLO, SLO, FrontendId, RequestClass

COST = StepCoefficients(
    floor_s=0.002,
    knee=0.0,
    per_new_s=0.001,
    per_decode_s=0.0,
    per_chunk_s=0.0,
    per_decode_context_s=0.0001,
    per_chunk_context_s=0.0001,
    per_chunk_pair_s=0.0,
)
"""2 ms a step and 1 ms a token, and 0.1 ms for each token that a row starts from."""
RT, BE = RequestClass.RT, RequestClass.BE
BUDGET = 16


class Server:
    """A core with workers, driven by hand; steps take as long as predicted, if anything is."""

    def __init__(self, core: Scheduler, *, cost: StepCoefficients | None = COST) -> None:
        self.core = core
        self.now_s = 0.0
        core.on_message(WorkersReady(100, step_cost=cost), 0.0)

    def arrive(self, number: int, arrival: Arrival, **fields: Any) -> list[Outgoing]:
        message = submit(number, arrival, **fields)
        return self.core.on_message(FromFrontend(FrontendId(0), message), self.now_s)

    def step(self) -> tuple[dict[int, int], list[RequestDelta]]:
        """Run one step: tokens of each request in it by number, and what frontends hear."""
        step = self.core.plan(self.now_s)
        assert isinstance(step, PlannedStep)
        plan = self.core.commit(step, self.now_s)
        seconds = step.predicted_s or 0.01
        self.now_s += seconds
        rows = [RowResult(r.row, [5]) for r in plan_rows(plan) if r.output is OutputKind.SAMPLE]
        result = pack_results(plan, rows, exec_s=seconds)
        news = self.core.on_result(result, self.now_s)
        shares: dict[int, int] = {r.key.request_id: num_tokens for r, num_tokens in step.scheduled}
        return shares, [delta for outgoing in news for delta in outgoing.message.each()]

    def first_delta(self, number: int) -> RequestDelta:
        """Run until a request has its first token."""
        for _ in range(20):
            for delta in self.step()[1]:
                if delta.request_id == number:
                    return delta
        raise AssertionError("it never came")


def average_of(length: int) -> OutputLengths:
    lengths = OutputLengths(max_output_tokens=MAX_LEN)
    lengths.average = float(length)
    return lengths


# A prompt of 40 tokens goes in 16, 16 and 8: 18 + 19.6 + 13.2 ms. Of 11 expected tokens the
# middle is at 40 + round(5.5) = 46: 3 + 4.6 ms each.
TTFT_MS, TPOT_MS = 50.8, 7.6
JCT_S = (TTFT_MS + 10 * TPOT_MS) / 1e3


@pytest.mark.parametrize(
    ("asked", "scheduled"),
    [
        (NO_SLO, None),
        (SLO(51, 8, 9), None),
        (SLO(50, 8, 9), SLO(1.2 * TTFT_MS, 8, 9)),
        (SLO(51, 7, 28), SLO(51, 1.2 * TPOT_MS, 28)),
        (SLO(51, 7, 7), SLO(51, 1.2 * TPOT_MS, 1.2 * TPOT_MS)),
        (SLO(completion_s=0.13), None),
        (SLO(completion_s=0.12), SLO(completion_s=1.2 * JCT_S)),
    ],
)
def test_a_target_that_an_idle_server_would_miss_is_raised(asked: SLO, scheduled: SLO) -> None:
    """And counted, and told with the first token, once; the deadline follows it."""
    server = Server(make_core("unified", BUDGET, lengths=average_of(11)))
    server.arrive(0, Arrival(0.0, 40, 20, 20), slo=asked)
    delta = server.first_delta(0)
    names = ("ttft_ms", "tpot_ms", "mtpot_ms", "completion_s")
    told = delta.scheduled_slo
    if scheduled is None:
        assert told is None and not server.core.num_raised_targets
        return
    assert told is not None
    differing = {name for name in names if getattr(asked, name) != getattr(scheduled, name)}
    for name in names:
        assert getattr(told, name) == pytest.approx(getattr(scheduled, name))
    assert dict(server.core.num_raised_targets) == {(RT, name): 1 for name in differing}
    assert server.first_delta(0).scheduled_slo is None
    (request,) = server.core.running
    assert request.slo == asked


def test_deadlines_follow_what_is_scheduled_by() -> None:
    server = Server(make_core("unified", BUDGET, lengths=average_of(11)))
    server.arrive(0, Arrival(0.0, 40, 20, 20), slo=SLO(ttft_ms=1))
    server.step()
    (request,) = server.core.running
    assert request.deadlines is not None
    assert request.deadlines.deadline_of_next_token == pytest.approx(1.2 * TTFT_MS / 1e3)


def test_a_short_answer_is_done_sooner() -> None:
    """Of an answer that may have 2 tokens no more are expected."""
    server = Server(make_core("unified", BUDGET, lengths=average_of(11)))
    server.arrive(0, Arrival(0.0, 40, 2, 2), slo=SLO(completion_s=0.06))
    assert server.first_delta(0).scheduled_slo is None


def test_outputs_are_expected_to_be_as_long_as_those_of_the_class() -> None:
    """After one of a single token: its completion time is that of its prompt."""
    server = Server(make_core("unified", BUDGET, lengths=average_of(11)))
    server.arrive(0, Arrival(0.0, 40, 1, 1))
    server.first_delta(0)
    server.arrive(1, Arrival(0.0, 40, 20, 20), slo=SLO(completion_s=0.06))
    assert server.first_delta(1).scheduled_slo is None
    other = Arrival(0.0, 40, 20, 20, request_class=BE)
    server.arrive(2, other, slo=SLO(completion_s=0.06))
    assert server.core.num_raised_targets == {(BE, "completion_s"): 1}


def test_what_is_cached_takes_no_time() -> None:
    core = make_core("unified", BUDGET, lengths=average_of(11), cache_order=task_aware)
    server = Server(core)
    for number, is_raised in ((0, True), (3, False)):  # the same prompt, see `prompt_of`
        server.arrive(number, Arrival(0.0, 40, 1, 1, family=1), slo=SLO(ttft_ms=10))
        delta = server.first_delta(number)
        assert (delta.scheduled_slo is not None) is is_raised
    assert dict(core.num_raised_targets) == {(RT, "ttft_ms"): 1}


@pytest.mark.parametrize(
    ("ttft_ms", "family", "num_tokens"),
    [
        (83, 1, 16),  # the least there is
        (100, 1, 28),
        (83, 2, 22),
    ],
)
def test_where_a_prompt_leaves_little_of_its_time_best_effort_steps_are_short(
    ttft_ms: float, family: int, num_tokens: int
) -> None:
    """42 ms of 83 are more than half; of what is cached, as family 2 is, next to none."""
    server = Server(make_core("unified", 64, lengths=average_of(11), cache_order=task_aware))
    server.arrive(0, Arrival(0.0, 40, 1, 1, family=2), slo=SLO(completion_s=9))
    server.first_delta(0)
    server.arrive(3, Arrival(0.0, 40, 1, 1, family=family), slo=SLO(ttft_ms=ttft_ms))
    server.first_delta(3)
    server.arrive(4, Arrival(0.0, 50, 1, 1, request_class=BE))
    assert server.step()[0] == {4: num_tokens}


@pytest.mark.parametrize(("policy", "cost"), [("unified", None), ("chunked", COST)])
def test_nothing_is_raised_unknown_or_unasked(policy: str, cost: StepCoefficients | None) -> None:
    """Without a profile nothing is known of steps; some policies ask for no deadlines."""
    server = Server(make_core(policy, BUDGET, lengths=average_of(11)), cost=cost)
    server.arrive(0, Arrival(0.0, 40, 20, 20), slo=SLO(ttft_ms=0.001))
    assert server.first_delta(0).scheduled_slo is None
    assert not server.core.num_raised_targets


def tokens_beside(slo: SLO, clock: str) -> int:
    """Return how much of a best-effort prompt runs beside the eighth token of a request."""
    core = make_core("unified", 60, lengths=average_of(11), slo_clock=SLO_CLOCKS[clock])
    server = Server(core)
    server.arrive(0, Arrival(0.0, 8, 20, 20), slo=slo)
    for _ in range(7):
        server.step()
    server.arrive(1, Arrival(0.0, 40, 4, 4, request_class=BE))
    shares, _ = server.step()
    assert shares[0] == 1
    return shares.get(1, 0)


def test_the_variants_of_deadlines_decide_differently() -> None:
    """Tokens come early. By the curve that is time for a chunk, up to the largest gap; by the gap
    clock it is lost, as it is where the targets say the same; a job with a lot of time has it, one
    with little has not."""
    slo = SLO(ttft_ms=400, tpot_ms=12, mtpot_ms=60)
    by_curve, by_gap = tokens_beside(slo, "curve"), tokens_beside(slo, "gap")
    assert by_curve == 40 > by_gap
    assert tokens_beside(SLO(ttft_ms=400, tpot_ms=12, mtpot_ms=12), "curve") == by_gap
    assert tokens_beside(SLO(completion_s=9), "curve") == 40
    assert tokens_beside(SLO(completion_s=0.1), "curve") < 40
    only_gap = SLO(ttft_ms=400, mtpot_ms=20)  # without a mean there is nothing to take
    assert tokens_beside(only_gap, "gap") == tokens_beside(only_gap, "curve") < 40


@pytest.mark.parametrize("policy", POLICIES)
def test_the_clock_needs_a_policy_that_looks_at_it(policy: str) -> None:
    if POLICIES[policy]().meets_deadlines:
        assert ServeConfig(policy=policy, slo_clock="gap").slo_clock == "gap"
        return
    with pytest.raises(ConfigError, match="--slo-clock needs --policy unified or accelgen or"):
        ServeConfig(policy=policy, slo_clock="gap")


def test_a_job_that_outlives_the_mean_is_expected_to_be_longer() -> None:
    """Nine of ten outputs have 2 tokens, one has 30: after 5 tokens it is that one."""
    lengths = OutputLengths(max_output_tokens=40)
    for length in ([30] + [2] * 9) * 100:
        lengths.record(length)
    core = make_core("unified", lengths=lengths)
    server = Server(core)
    server.arrive(0, Arrival(0.0, 4, 40, 40, request_class=BE), slo=SLO(completion_s=50.0))
    (request,) = core._waiting
    ledger = request.deadlines
    assert isinstance(ledger, CompletionLedger)
    for _ in range(5):
        server.step()
    assert len(request.output_token_ids) == 5
    assert ledger.num_tokens_to_come == pytest.approx(25, abs=1)


def test_lines_of_a_batch_are_due_together_wherever_they_are() -> None:
    """Those that run and those that wait, by what is said last, of their own frontend alone."""
    server = Server(make_core("unified", budget=BUDGET))
    in_3_s = SLO(completion_s=3.0)
    line = Arrival(0.0, 4, 4, 4, request_class=BE)
    server.arrive(0, line, slo=in_3_s, batch=7)
    other = submit(0, line, slo=in_3_s, batch=7)
    server.core.on_message(FromFrontend(FrontendId(1), other), server.now_s)
    server.step()
    server.now_s = 1.0
    server.arrive(1, line, slo=in_3_s, batch=7)
    assert _dues(server.core) == [(0, 4.0), (1, 3.0), (0, 4.0)]
    server.core.on_message(FromFrontend(FrontendId(0), BatchDue(7, -2.0)), server.now_s)
    server.core.on_message(FromFrontend(FrontendId(0), BatchDue(8, 5.0)), server.now_s)
    assert _dues(server.core) == [(0, -1.0), (1, 3.0), (0, -1.0)]
    rows = server.core._rows
    assert sorted(rows.line_due_s[rows.rows].tolist()) == [-1.0, 3.0], "those that run as well"
    assert not server.core.num_raised_targets


def _dues(core: Scheduler) -> list[tuple[int, float]]:
    found = []
    for request in core._requests.values():
        assert isinstance(request.deadlines, LineDeadline)
        found.append((request.key.frontend_id, request.deadlines.shared.due_s))
    return found
