"""What real-time requests ask for, and the time that is lent to best-effort ones by it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightserve.cost.model import StepModel, StepShape
from lightserve.messages.common import StepCoefficients
from lightserve.router.arrivals import (
    GAP_SHARE,
    IDLE_LIMIT_S,
    IDLE_SHARE,
    MAX_IDLE_LIMIT_S,
    MEMORY_S,
    NO_OUTLOOK,
    ArrivalStats,
    Outlook,
)
from lightserve.router.output_lengths import PRIOR_MOST, expected_output
from lightserve.router.policies.unified import (
    IDLE_FLOORS,
    TIGHT_PACE,
    lent_until_s,
)

shares = st.floats(0.0, 1.0)
outlooks = st.builds(
    Outlook,
    st.floats(0.0, 2.0),
    st.floats(0.0, 1e7),
    *(2 * [st.floats(0.01, 10.0) | st.just(math.inf)]),
)


def _tokens(shape: StepShape) -> float:
    return 1e-3 * shape.num_new


def _steady(rate: float, duration_s: float, *, prompt: int, output: int) -> ArrivalStats:
    demand = ArrivalStats()
    for number in range(round(rate * duration_s)):
        demand.note_arrival(number / rate, prompt, max_output_tokens=1000)
        demand.note_decodes(output, sum(range(prompt + 1, prompt + output + 1)), number / rate)
        demand.note_end(prompt, output + 1)
    return demand


def test_nothing_is_asked_for_at_first() -> None:
    demand = ArrivalStats()
    assert demand.outlook(_tokens, 0.0) == NO_OUTLOOK
    demand.note_arrival(0.0, 10, max_output_tokens=1000)
    assert demand.outlook(_tokens, 0.4) == NO_OUTLOOK


def test_a_steady_stream_is_known() -> None:
    """4 per second of 60 + 40 tokens: 0.4 s of work, and 4 x 40 steps of 80 tokens on average."""
    outlook = _steady(4.0, 500.0, prompt=60, output=40).outlook(_tokens, 500.0)
    assert outlook.load == pytest.approx(0.4, rel=0.05)
    assert outlook.kv_per_step_s == pytest.approx(4 * 40 * 80, rel=0.05)
    assert outlook.freed_per_decode == pytest.approx((60 + 39) / 39, rel=0.05)


def test_images_are_work() -> None:
    """As many as before, half of which have 50 ms for the encoder."""
    demands = [_steady(4.0, 100.0, prompt=60, output=40) for _ in range(2)]
    for demand, encode_s in zip(demands, (0.0, 0.05), strict=True):
        for number in range(400):
            now_s = 100.0 + number / 4.0
            demand.note_arrival(now_s, 60, max_output_tokens=1000, encode_s=encode_s)
    loads = [demand.outlook(_tokens, 200.0).load for demand in demands]
    assert loads[1] - loads[0] == pytest.approx(4.0 * 0.025, rel=0.02)


def test_what_is_assumed_soon_weighs_nothing() -> None:
    """Of 148 tokens that are assumed of four lives, 7 are left per life after 80 that had one."""
    demand = ArrivalStats()
    for number in range(80):
        demand.note_arrival(0.1 * number, 1, max_output_tokens=1 << 17)
    assert expected_output(PRIOR_MOST) < 150
    before = demand.outlook(_tokens, 8.0).load
    assert before == pytest.approx(10 * (1 + expected_output(PRIOR_MOST)) * 1e-3, rel=0.05)
    for _ in range(80):
        demand.note_decodes(1, 2, 8.0)
        demand.note_end(1, 2)
    after = demand.outlook(_tokens, 8.0).load
    assert after == pytest.approx(10 * (2 + expected_output(PRIOR_MOST) * 4 / 84) * 1e-3, rel=0.1)


@given(st.floats(50.0, 500.0), st.integers(0, 1000))
def test_those_that_go_on_count_by_what_they_have_had(mean: float, seed: int) -> None:
    """Half of many are still running: the mean of those that ended would be a third of it."""
    lengths = np.random.default_rng(seed).geometric(1 / mean, 120)
    demand = ArrivalStats()
    for number in range(len(lengths)):
        demand.note_arrival(0.01 * number, 1, max_output_tokens=100)
    for age in range(int(np.median(lengths))):
        num_alive = int((lengths > age).sum())
        demand.note_decodes(num_alive, (2 + age) * num_alive, 1.2)
        for _ in range(int((lengths == age + 1).sum())):
            demand.note_end(1, age + 2)
    load = demand.outlook(_tokens, 1.2).load
    assert 0.5 * mean < load / 0.1 - 1 < 1.5 * mean


def test_the_mean_is_not_that_of_the_short_ones_that_end_first() -> None:
    """One begins per step, every fifth of 1,001 tokens, others of 21: those that have ended in the
    first 900 steps, 700 of them, had 20 decodes each; all together have 212 on average, or 216."""
    lengths = np.where(np.arange(900) % 5 == 0, 1000, 20)
    demand, begins = ArrivalStats(), np.arange(900)
    for now in range(900):
        demand.note_arrival(0.01 * now, 1, max_output_tokens=2000)
        ages = now - begins
        is_alive = (ages >= 0) & (ages < lengths)
        num_held = int((ages[is_alive] + 2).sum())
        demand.note_decodes(int(is_alive.sum()), num_held, 0.01 * now)
        for _ in range(int((ages + 1 == lengths).sum())):
            demand.note_end(1, 21)
    outlook = demand.outlook(_tokens, 9.0)
    num_decodes, held = lengths.mean(), (lengths * (lengths + 3) / 2).mean()
    assert 0.6 * num_decodes < outlook.load / 0.1 - 1 < 1.4 * num_decodes
    assert 0.3 * held < outlook.kv_per_step_s / 100 < 1.4 * held


def test_most_memory_is_by_littles_law_until_more_was_seen() -> None:
    """4 per second with 40 steps of 80 tokens: 640 where a step takes 50 ms, and 1,280 in 100."""
    demand = ArrivalStats()
    assert demand.most_held(0.0, 0.05) == 0
    demand.note_arrival(0.0, 60, max_output_tokens=1000)
    assert demand.most_held(4 * 40 * 80, 0.05) == pytest.approx(640)
    demand.note_decodes(2, 900, 1.0)
    assert demand.most_held(4 * 40 * 80, 0.05) == 900
    assert demand.most_held(4 * 40 * 80, 0.1) == pytest.approx(1280)
    demand.note_decodes(0, 0, 1.0 + MEMORY_S)
    assert demand.most_held(4 * 40 * 80, 0.05) == 900
    demand.note_decodes(0, 0, 1.0 + 2 * MEMORY_S)
    assert demand.most_held(4 * 40 * 80, 0.05) == pytest.approx(640)


def test_what_stopped_is_forgotten() -> None:
    demand = _steady(4.0, 100.0, prompt=60, output=40)
    now = demand.outlook(_tokens, 100.0)
    later = demand.outlook(_tokens, 100.0 + MEMORY_S)
    assert later.load == pytest.approx(now.load * np.exp(-1), rel=0.01)
    assert demand.outlook(_tokens, 100.0) == now, "asking changes nothing"


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 900)), max_size=20), st.data())
def test_work_is_what_a_shape_adds_to_a_large_step(
    rows: list[tuple[int, int]], data: st.DataObject
) -> None:
    coefficients = StepCoefficients(
        floor_s=data.draw(st.floats(0.0, 0.1)),
        knee=data.draw(st.floats(0.0, 500.0)),
        per_new_s=data.draw(st.floats(0.0, 1e-3)),
        per_decode_s=1e-5,
        per_chunk_s=1e-4,
        per_decode_context_s=1e-6,
        per_chunk_context_s=1e-7,
        per_chunk_pair_s=1e-9,
    )
    model = StepModel(coefficients)
    large, shape = StepShape(num_new=1000, num_chunks=1), StepShape()
    both = large
    for num_tokens, start in rows:
        shape, both = shape.plus(start, num_tokens), both.plus(start, num_tokens)
    assert model.work(shape) == pytest.approx(model.seconds(both) - model.seconds(large), abs=1e-9)


@given(st.floats(1e-4, 1.0), st.floats(0.0, 1.0), shares, outlooks)
def test_what_is_lent(base_s: float, floor_s: float, held_share: float, outlook: Outlook) -> None:
    """Never less than the step takes, never more than an arrival may wait, less under pressure."""
    lent_s = lent_until_s(base_s, floor_s, held_share, outlook, 10_000)
    assert base_s <= lent_s <= max(outlook.idle_limit_s, IDLE_FLOORS * floor_s, base_s)
    busier = outlook._replace(load=outlook.load + 0.1)
    hungrier = outlook._replace(kv_per_step_s=2 * outlook.kv_per_step_s)
    assert lent_until_s(base_s, floor_s, held_share, busier, 10_000) <= lent_s
    assert lent_until_s(base_s, floor_s, held_share, hungrier, 10_000) <= lent_s
    fuller = min(1.0, held_share + 0.1)
    assert lent_until_s(base_s, floor_s, fuller, outlook, 10_000) <= lent_s


def test_at_full_load_nothing_is_lent() -> None:
    assert lent_until_s(0.02, 0.01, 0.3, Outlook(1.0, 1e6), 60_000) == 0.02


def test_nothing_is_lent_while_real_time_requests_hold_more_than_their_share() -> None:
    """With half of the time free three quarters of the pool, with a fifth of it 0.6: the time of a
    step at which they come to hold as much is lent below."""
    half, fifth = Outlook(0.5, 1e6), Outlook(0.8, 1e6)
    assert lent_until_s(0.02, 0.01, 0.74, half, 60_000) == pytest.approx(0.045)
    assert lent_until_s(0.02, 0.01, 0.76, half, 60_000) == 0.02
    assert lent_until_s(0.02, 0.01, 0.59, fifth, 60_000) == pytest.approx(0.036)
    assert lent_until_s(0.02, 0.01, 0.61, fifth, 60_000) == 0.02


def test_an_idle_server_lends_all() -> None:
    assert lent_until_s(0.0, 0.01, 0.0, NO_OUTLOOK, 60_000) == IDLE_LIMIT_S


def test_the_limit_of_an_idle_server_follows_the_tightest_target() -> None:
    """A third of it, as far as no step is longer than half a second; of the last half minute."""
    demand = ArrivalStats()

    def limit_after(now_s: float, ttft_s: float) -> float:
        demand.note_arrival(now_s, 100, max_output_tokens=20, ttft_s=ttft_s)
        outlook = demand.outlook(_tokens, now_s)
        return lent_until_s(0.0, 0.001, 0.0, outlook._replace(load=0, kv_per_step_s=0), 60_000)

    assert limit_after(0.0, math.inf) == IDLE_LIMIT_S
    assert limit_after(1.0, 1.2) == pytest.approx(0.36)
    assert limit_after(2.0, 0.2) == pytest.approx(0.06)
    assert limit_after(14.0, 1.2) == pytest.approx(0.06)
    assert limit_after(16.0, 1.2) == pytest.approx(0.06)
    assert limit_after(32.0, 1.2) == pytest.approx(0.36)
    assert limit_after(47.0, 60.0) == pytest.approx(0.36)
    assert limit_after(62.0, 60.0) == MAX_IDLE_LIMIT_S


def test_the_tightest_gap_limits_a_step_where_no_mean_leaves_a_reserve() -> None:
    demand = ArrivalStats()

    def limit_after(now_s: float, gap_s: float, ttft_s: float = 1.2) -> float:
        demand.note_arrival(now_s, 100, max_output_tokens=20, ttft_s=ttft_s, gap_s=gap_s)
        return demand.outlook(_tokens, now_s).idle_limit_s

    assert limit_after(0.0, math.inf) == pytest.approx(0.36)
    assert limit_after(1.0, 0.5) == pytest.approx(GAP_SHARE * 0.5)
    assert limit_after(16.0, math.inf) == pytest.approx(GAP_SHARE * 0.5)
    assert limit_after(32.0, 2.0) == pytest.approx(0.36)
    assert limit_after(62.0, 0.1, math.inf) == pytest.approx(GAP_SHARE * 0.1)


def test_a_first_token_without_a_target_waits_for_less_than_the_pace() -> None:
    """Of the last quarter of a minute; where no pace is kept, for as long as before."""
    demand = ArrivalStats()

    def limit_after(now_s: float, ttft_s: float, pace_s: float = 0.033) -> float:
        is_untimed = ttft_s == math.inf
        demand.note_arrival(now_s, 100, max_output_tokens=20, ttft_s=ttft_s, is_untimed=is_untimed)
        outlook = demand.outlook(_tokens, now_s)._replace(load=0.0, kv_per_step_s=0.0)
        return lent_until_s(0.0, 0.001, 0.0, outlook, 60_000, pace_s=pace_s)

    assert lent_until_s(0.0, 0.001, 0.0, NO_OUTLOOK, 60_000, pace_s=0.033) == IDLE_LIMIT_S
    assert limit_after(0.0, 1.2) == pytest.approx(0.36)
    assert limit_after(1.0, math.inf) == pytest.approx(IDLE_SHARE * 0.066)
    assert limit_after(2.0, math.inf, pace_s=math.inf) == pytest.approx(0.36)
    assert limit_after(16.0, 1.2) == pytest.approx(IDLE_SHARE * 0.066)
    assert limit_after(32.0, 1.2) == pytest.approx(0.36)


def test_tight_first_tokens_wait_for_less_and_find_decodes_that_have_time() -> None:
    demand = ArrivalStats()

    def lent(slack_s: float, now_s: float, base_s: float = 0.0, tpot_s: float = math.inf) -> float:
        demand.note_arrival(now_s, 100, max_output_tokens=20, ttft_s=1.0, slack_s=slack_s)
        outlook = demand.outlook(_tokens, now_s)._replace(load=0.0, kv_per_step_s=0.0)
        return lent_until_s(base_s, 0.001, 0.0, outlook, 60_000, tpot_s=tpot_s)

    assert lent(0.6, 0.0) == pytest.approx(0.3)
    assert lent(0.6, 0.0, 0.01, 0.02) == pytest.approx(0.3)  # deadlines alone limit it
    assert lent(0.4, 1.0) == pytest.approx(0.04)
    assert lent(0.9, 14.0) == pytest.approx(0.04)
    assert lent(0.9, 14.0, 0.01, 0.02) == pytest.approx(TIGHT_PACE * 0.02)
    assert lent(0.9, 14.0, 0.019, 0.02) == 0.019
    lent(0.9, 32.0)
    assert lent(0.9, 47.0) == pytest.approx(0.3)


def test_a_slow_machine_is_not_left_with_one_row_a_step() -> None:
    assert lent_until_s(0.0, 0.5, 0.0, Outlook(1.0, 1e9), 60_000) == IDLE_FLOORS * 0.5


def test_no_output_is_expected_beyond_what_may_be() -> None:
    demand = ArrivalStats()
    for number in range(40):
        demand.note_arrival(0.1 * number, 1, max_output_tokens=20)
    outlook = demand.outlook(_tokens, 4.0)
    length = expected_output(20)
    assert length < 20
    assert outlook.load == pytest.approx(10 * (1 + length) * 1e-3, rel=0.05)
    assert outlook.kv_per_step_s == pytest.approx(10 * length * (1 + length), rel=0.05)
