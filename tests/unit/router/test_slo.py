"""Deadlines of tokens: transitions by table, properties by hypothesis."""

from __future__ import annotations

import dataclasses
import itertools
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightserve.router.slo import (
    CompletionLedger,
    DeadlineTracker,
    IdleTimes,
    Kept,
    TokenDeadlines,
    gap_clock,
    raise_to_feasible,
    track,
)
from lightserve.types import NO_SLO, SLO, largest_gap

ARRIVAL_S = 100.0
CURVE = SLO(ttft_ms=1000, tpot_ms=100, mtpot_ms=300)
Deliveries = list[tuple[float, int]]
"""Seconds after arrival, and how many tokens came then."""


def deadlines(tracker: DeadlineTracker, deliveries: Deliveries) -> list[float]:
    """Return the deadline before and after each delivery, in seconds after arrival."""
    found = [tracker.deadline_of_next_token - ARRIVAL_S]
    for after_s, num_tokens in deliveries:
        tracker.on_tokens(num_tokens, ARRIVAL_S + after_s)
        found.append(tracker.deadline_of_next_token - ARRIVAL_S)
    return found


@pytest.mark.parametrize(
    ("slo", "deliveries", "expected", "kept"),
    [
        # What the first token leaves of its time is not for others: the mean counts from it on.
        (CURVE, [(0.2, 1)], [1.0, 0.3], Kept(1, True, 0)),
        # What others leave is, as far as a gap may go.
        (
            CURVE,
            [(0.2, 1), (0.21, 1), (0.22, 1), (0.23, 1), (0.24, 1)],
            [1.0, 0.3, 0.4, 0.5, 0.53, 0.54],
            Kept(5, True, 0),
        ),
        # Each token in time moves the deadline by tpot; what a late one took too long, those
        # behind it make up for, by a quarter of tpot each, until the mean is kept again.
        (
            CURVE,
            [(1.0, 1), (1.1, 1), (1.15, 1), (1.45, 1), (1.5, 1), (1.55, 1)],
            [1.0, 1.1, 1.2, 1.3, 1.525, 1.575, 1.625],
            Kept(6, True, 1),
        ),
        (
            CURVE,
            [(1.0, 1), (1.15, 1), (1.2, 1), (1.25, 1)],
            [1.0, 1.1, 1.225, 1.3, 1.4],
            Kept(4, True, 1),
        ),
        # Of a stall beyond mtpot the rest is forgotten.
        (
            CURVE,
            [(1.0, 1), (2.0, 1), (2.05, 1), (2.1, 1), (2.15, 1), (2.2, 1)],
            [1.0, 1.1, 2.075, 2.125, 2.175, 2.225, 2.3],
            Kept(6, True, 1),
        ),
        # Tokens that come together buy the slack of each.
        (CURVE, [(1.0, 2), (1.2, 1)], [1.0, 1.2, 1.3], Kept(3, True, 0)),
        (CURVE, [(1.0, 9)], [1.0, 1.3], Kept(9, True, 0)),
        # A late first token is one miss, and what follows counts from there.
        (CURVE, [(2.0, 1), (2.1, 1)], [1.0, 2.1, 2.2], Kept(2, False, 1)),
        (SLO(ttft_ms=1000, tpot_ms=100, mtpot_ms=400), [(0.1, 9)], [1.0, 0.5], Kept(9, True, 0)),
        # Without a TTFT target the first token starts the curve.
        (SLO(tpot_ms=100), [(7.0, 1), (7.05, 1)], [math.inf, 7.1, 7.2], Kept(2, True, 0)),
        (SLO(mtpot_ms=300), [(7.0, 1), (7.4, 1)], [math.inf, 7.3, 7.7], Kept(2, True, 1)),
        (SLO(ttft_ms=1000), [(0.5, 1), (9.0, 1)], [1, math.inf, math.inf], Kept(2, True, 0)),
        (NO_SLO, [(3.0, 1)], [math.inf, math.inf], Kept(1, True, 0)),
        # The gap clock gives nothing to those that were early.
        (gap_clock(CURVE), [(0.2, 4), (0.25, 1)], [1.0, 0.3, 0.35], Kept(5, True, 0)),
        # A job: equal shares; what one token overuses the others have to make up for.
        (
            SLO(completion_s=4),
            [(0.5, 1), (2.5, 1), (2.6, 2), (5.0, 1)],
            [1.0, 2.0, 3.0, 4.0, 4.0],
            Kept(5, True, 2),
        ),
    ],
)
def test_transitions(slo: SLO, deliveries: Deliveries, expected: list[float], kept: Kept) -> None:
    tracker = track(slo, ARRIVAL_S, num_tokens_to_come=4)
    assert deadlines(tracker, deliveries) == pytest.approx(expected)
    assert dataclasses.astuple(tracker.kept) == pytest.approx(dataclasses.astuple(kept))
    now_s = ARRIVAL_S + 2.0
    assert tracker.residual(now_s) == pytest.approx(expected[-1] - 2.0)


targets_ms = st.floats(1, 5000)
deliveries_of = st.lists(
    st.tuples(st.floats(0, 3), st.integers(1, 5)), min_size=1, max_size=30
)  # seconds after the one before


@st.composite
def slos(draw: st.DrawFn) -> SLO:
    tpot_ms = draw(st.none() | targets_ms)
    mtpot_ms = draw(st.none() | st.floats(tpot_ms or 1, 20_000))
    return SLO(draw(st.none() | targets_ms), tpot_ms, largest_gap(tpot_ms, mtpot_ms))


@given(slos(), deliveries_of)
def test_deadlines_follow_the_recurrence(slo: SLO, deliveries: Deliveries) -> None:
    """Together or one by one; never below 0.75 tpot, nor above mtpot, after a token."""
    tpot_s = math.inf if slo.tpot_ms is None else slo.tpot_ms / 1e3
    mtpot_s = math.inf if slo.mtpot_ms is None else slo.mtpot_ms / 1e3
    together, singly = TokenDeadlines(slo, 0.0), TokenDeadlines(slo, 0.0)
    now_s = 0.0
    for number, (gap_s, num_tokens) in enumerate(deliveries):
        now_s += gap_s
        before_s = together.deadline_of_next_token
        together.on_tokens(num_tokens, now_s)
        for _ in range(num_tokens):
            singly.on_tokens(1, now_s)
        after_s = together.deadline_of_next_token
        assert after_s == pytest.approx(singly.deadline_of_next_token)
        assert now_s + min(0.75 * tpot_s, mtpot_s) <= after_s + 1e-9 <= now_s + mtpot_s + 2e-9
        if number > 0:  # before, what the first token left is cut
            assert after_s >= before_s
    assert together.kept == singly.kept


@given(slos(), deliveries_of, st.integers(1, 3), st.floats(0, 1))
def test_what_is_due_behind_tokens_in_flight(
    slo: SLO, deliveries: Deliveries, num_tokens: int, later_s: float
) -> None:
    """It is what would be due if they came, and nothing has changed."""
    times = itertools.accumulate(after_s for after_s, _ in deliveries)
    deliveries = [(time_s, count) for time_s, (_, count) in zip(times, deliveries, strict=True)]
    for tracker in (
        track(slo, ARRIVAL_S, num_tokens_to_come=20.0),
        CompletionLedger(9.0, ARRIVAL_S, num_tokens_to_come=20.0),
    ):
        before = deadlines(tracker, deliveries)
        now_s = ARRIVAL_S + deliveries[-1][0] + later_s
        residual_s = tracker.residual_behind(num_tokens, now_s)
        assert tracker.deadline_of_next_token - ARRIVAL_S == before[-1]
        tracker.on_tokens(num_tokens, now_s)
        assert residual_s == pytest.approx(tracker.residual(now_s))


@given(slos(), deliveries_of, st.integers(1, 3))
def test_what_is_due_if_nothing_has_to_be_made_up_for(
    slo: SLO, deliveries: Deliveries, num_tokens: int
) -> None:
    """A tpot behind the last token, in flight or not; before the first one, as ever."""
    tracker = TokenDeadlines(slo, 0.0)
    assert tracker.residual_of_late(0, 0.5) == tracker.residual(0.5)
    tpot_s = math.inf if slo.tpot_ms is None else slo.tpot_ms / 1e3
    mtpot_s = math.inf if slo.mtpot_ms is None else slo.mtpot_ms / 1e3
    now_s = 0.0
    for gap_s, count in deliveries:
        now_s += gap_s
        tracker.on_tokens(count, now_s)
    assert tracker.residual_of_late(num_tokens, now_s + 9) == pytest.approx(min(tpot_s, mtpot_s))
    residual_s = tracker.residual_of_late(0, now_s + 0.5)
    assert residual_s == pytest.approx(min(tpot_s, mtpot_s) - 0.5)


@given(slos(), deliveries_of, st.integers(0, 3), st.floats(0, 1))
def test_what_best_effort_work_may_take(
    slo: SLO, deliveries: Deliveries, num_tokens: int, later_s: float
) -> None:
    """No more than there is, and all of it where time that is left cannot be kept."""
    tracker = TokenDeadlines(slo, 0.0)
    assert tracker.lent_behind(0, 0.5) == tracker.residual(0.5)
    now_s = 0.0
    for gap_s, count in deliveries:
        now_s += gap_s
        tracker.on_tokens(count, now_s)
    now_s += later_s
    residual_s = (
        tracker.residual_behind(num_tokens, now_s) if num_tokens else tracker.residual(now_s)
    )
    lent_s = tracker.lent_behind(num_tokens, now_s)
    assert lent_s <= residual_s
    if slo.tpot_ms is None or slo.mtpot_ms == slo.tpot_ms:
        assert lent_s == residual_s


@given(targets_ms, st.integers(2, 80))
def test_what_is_left_by_who_takes_what_is_lent(tpot_ms: float, num_tokens: int) -> None:
    """A tenth of the mean, up to half of a stall of mtpot, here three times tpot."""
    tracker = TokenDeadlines(SLO(tpot_ms=tpot_ms, mtpot_ms=4 * tpot_ms), 0.0)
    now_s = 0.0
    tracker.on_tokens(1, now_s)
    for _ in range(num_tokens - 1):
        now_s += tracker.lent_behind(0, now_s)
        tracker.on_tokens(1, now_s)
    kept_ms = (num_tokens - 1) * tpot_ms - now_s * 1e3
    assert kept_ms == pytest.approx(min(0.1 * (num_tokens - 1), 1.5) * tpot_ms)


@given(targets_ms, st.lists(st.floats(0, 3), min_size=2, max_size=60))
def test_who_keeps_deadlines_after_a_stall_keeps_the_mean(
    tpot_ms: float, jitter: list[float]
) -> None:
    """Tokens late at random, by less than a stall each; then as late as deadlines permit."""
    tpot_s = tpot_ms / 1e3
    tracker = TokenDeadlines(SLO(tpot_ms=tpot_ms), 0.0)
    now_s, last_s, num_tokens = 0.0, 0.0, 1
    tracker.on_tokens(1, now_s)
    for late in jitter:
        now_s = max(last_s, tracker.deadline_of_next_token + (late - 2) * tpot_s / 4)
        last_s = now_s
        tracker.on_tokens(1, now_s)
        num_tokens += 1
    for _ in range(12):  # what is owed is three times tpot at most
        now_s = tracker.deadline_of_next_token
        tracker.on_tokens(1, now_s)
        num_tokens += 1
    assert now_s <= (num_tokens - 1) * tpot_s * (1 + 1e-9)


@given(slos(), st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_a_stream_that_is_in_time_never_misses(slo: SLO, uses: list[float]) -> None:
    """Each token uses some share of the time there is until its deadline."""
    tracker = TokenDeadlines(slo, 0.0)
    now_s = 0.0
    for share in uses:
        residual_s = tracker.residual(now_s)
        assert residual_s >= 0
        now_s = min(now_s + share * min(residual_s, 100.0), tracker.deadline_of_next_token)
        tracker.on_tokens(1, now_s)
    assert tracker.kept.num_missed == 0
    assert tracker.kept.is_first_met


@given(st.floats(0.1, 1000), st.integers(1, 60), deliveries_of, st.integers(1, 60))
def test_the_ledger_conserves_time(
    completion_s: float, num_expected: int, deliveries: Deliveries, corrected: int
) -> None:
    ledger = CompletionLedger(completion_s, 0.0, num_tokens_to_come=num_expected)
    now_s = 0.0
    for number, (gap_s, num_tokens) in enumerate(deliveries):
        if number == len(deliveries) // 2:
            ledger.expect(corrected)
        now_s += gap_s
        granted_s = ledger.granted_s
        ledger.on_tokens(num_tokens, now_s)
        assert ledger.granted_s >= granted_s * (1 - 1e-12)  # but for rounding
        assert ledger.granted_s + ledger.ungranted_s == pytest.approx(completion_s)
        assert ledger.ungranted_s >= -1e-9
        assert ledger.deadline_of_next_token <= completion_s + 1e-9


@given(st.floats(1, 100), st.integers(1, 50), st.data())
def test_tokens_in_time_end_a_job_in_time(
    completion_s: float, num_tokens: int, data: st.DataObject
) -> None:
    """What is computed by each deadline, with the right prediction, ends by the last."""
    ledger = CompletionLedger(completion_s, 0.0, num_tokens_to_come=num_tokens)
    now_s = 0.0
    for _ in range(num_tokens):
        deadline_s = ledger.deadline_of_next_token
        now_s = data.draw(st.floats(min(now_s, deadline_s), deadline_s))
        ledger.on_tokens(1, now_s)
    assert ledger.kept.num_missed == 0
    assert now_s <= completion_s + 1e-9
    assert ledger.ungranted_s == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("work_left_s", "expected"),
    [(1.0, False), (6.0, False), (7.0, True), (10.0, True), (11, False)],
)
def test_a_job_is_urgent_near_its_end_while_it_can_be_saved(
    work_left_s: float, expected: bool
) -> None:
    ledger = CompletionLedger(30.0, 100.0, num_tokens_to_come=9)
    assert ledger.is_urgent(120.0, work_left_s=work_left_s) is expected


IDLE = IdleTimes(ttft_s=0.1, tpot_s=0.02, completion_s=2.0)


@pytest.mark.parametrize(
    ("asked", "feasible", "raised"),
    [
        (NO_SLO, NO_SLO, ()),
        (SLO(100, 20, 20), SLO(100, 20, 20), ()),
        (SLO(99, 20, 20), SLO(120, 20, 20), ("ttft_ms",)),
        (SLO(99, 10), SLO(120, 24), ("ttft_ms", "tpot_ms")),
        (SLO(None, 10, 10), SLO(None, 24, 24), ("tpot_ms", "mtpot_ms")),
        (SLO(None, 10, 22), SLO(None, 24, 24), ("tpot_ms", "mtpot_ms")),
        (SLO(None, 10, 30), SLO(None, 24, 30), ("tpot_ms",)),
        (SLO(completion_s=2), SLO(completion_s=2), ()),
        (SLO(completion_s=1), SLO(completion_s=2.4), ("completion_s",)),
    ],
)
def test_what_an_idle_server_could_not_meet_is_raised(
    asked: SLO, feasible: SLO, raised: tuple[str, ...]
) -> None:
    found = raise_to_feasible(asked, IDLE)
    assert msgspec.structs.astuple(found.slo) == pytest.approx(msgspec.structs.astuple(feasible))
    assert found.raised == raised
