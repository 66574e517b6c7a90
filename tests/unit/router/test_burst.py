"""The burst headroom against the definition: mean + 2 deviations over the intervals of a window."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.grids import choose, more_when_long
from test_admission import history, make_request

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError
from lightserve.router.arrivals import (
    BURST_WINDOW_S,
    BurstHeadroom,
    HeldByRealTime,
    expected_kv_tokens,
)

POOL = 10_000

arrivals = st.lists(st.tuples(st.integers(0, 900), st.integers(1, 3000)), max_size=40)


@more_when_long
@settings(max_examples=choose(100, 300), deadline=None)
@given(arrivals=arrivals, interval_s=st.sampled_from([0.5, 2.0, 10.0, 100.0, 1000.0]))
@example(arrivals=[], interval_s=2.0)
@example(arrivals=[(900, 1)] * 3, interval_s=0.5)
def test_headroom_equals_its_definition(arrivals: list[tuple[int, int]], interval_s: float) -> None:
    """Arrivals up to fifteen minutes apart; asked after each, as by a planner."""
    burst, now_s, began_s = BurstHeadroom(interval_s), 100.25, 100.25
    seen: list[tuple[float, int]] = []
    burst.note_time(now_s)
    for wait_s, num_tokens in arrivals:
        now_s += wait_s
        burst.note_arrival(now_s, num_tokens)
        seen.append((now_s, num_tokens))
        assert burst.headroom(now_s, POOL) == _by_definition(seen, began_s, now_s, interval_s)
    now_s += interval_s
    assert burst.headroom(now_s, POOL) == _by_definition(seen, began_s, now_s, interval_s)


def _by_definition(
    arrivals: list[tuple[float, int]], began_s: float, now_s: float, interval_s: float
) -> int:
    first, current = int(began_s // interval_s), int(now_s // interval_s)
    length = max(20, round(BURST_WINDOW_S / interval_s))
    tokens = dict.fromkeys(range(max(first, current - length), current), 0)
    for at_s, num_tokens in arrivals:
        if (interval := int(at_s // interval_s)) in tokens:
            tokens[interval] += num_tokens
    if not any(tokens.values()):
        return 0
    per_interval = np.array(list(tokens.values()), dtype=np.float64)
    wanted = per_interval.mean() + 2 * per_interval.std()
    # The same number, but for the last bits of sums in another order.
    return min(POOL, math.ceil(round(float(wanted) / 100, 9)) * 100)


def test_steady_arrivals_need_their_mean_and_bursts_more() -> None:
    steady, bursts = BurstHeadroom(1.0), BurstHeadroom(1.0)
    for second in range(900):
        steady.note_arrival(second, 100)
        if second % 10 == 0:
            bursts.note_arrival(second, 1000)
    assert steady.headroom(900, POOL) == 100
    assert bursts.headroom(900, POOL) == 700  # 100 + 2 * 300
    assert bursts.headroom(900, 500) == 500, "never more than there is"
    assert bursts.headroom(1800, POOL) == 0, "all of it is out of the window"


@pytest.mark.parametrize("second", [0.0, 0.9, 5.0])
def test_nothing_is_left_free_where_none_is_wanted_or_nothing_is_known(second: float) -> None:
    unwanted, unknown = BurstHeadroom(0.0), BurstHeadroom(1.0)
    unwanted.note_arrival(0.0, 1000)
    assert unwanted.headroom(second, POOL) == 0
    assert unknown.headroom(second, POOL) == 0


def test_it_changes_at_most_once_per_interval() -> None:
    burst = BurstHeadroom(2.0)
    rng = np.random.default_rng(0)
    seen: dict[int, set[int]] = {}
    for now_s in np.sort(rng.uniform(0, 60, 2000)):
        burst.note_arrival(now_s, int(rng.integers(1, 50)))
        seen.setdefault(int(now_s // 2.0), set()).add(burst.headroom(now_s, POOL))
    assert len(seen) == 30 and all(len(values) == 1 for values in seen.values())
    assert len(set.union(*seen.values())) > 2


def test_what_a_request_will_need() -> None:
    lengths = history(40)
    assert expected_kv_tokens(make_request(0, prompt=10), lengths) == 49
    assert expected_kv_tokens(make_request(0, prompt=10, max_tokens=30), lengths) == 39


def test_a_headroom_that_no_rule_would_respect_is_refused() -> None:
    assert ServeConfig(burst_headroom_s=2.0, policy="priority").burst_headroom_s == 2.0
    with pytest.raises(ConfigError, match="--burst-headroom-s needs --policy priority"):
        ServeConfig(burst_headroom_s=2.0, policy="chunked")


def test_what_real_time_requests_hold_at_most_of_late_stays_free() -> None:
    """Half of the time 100 tokens, half of it 300: mean 200, deviation 100."""
    held = HeldByRealTime(2.0)
    for second in range(4000):
        held.note(300 if second % 2 else 100, float(second))
    assert held.headroom(1000) == 400 - 300
    held.note(0, 4000.0)
    assert held.headroom(1000) in (400, 410)  # as the last interval weighs most
    held.note(700, 4000.0)
    assert held.headroom(1000) == 0
    assert HeldByRealTime(0.0).headroom(1000) == 0
