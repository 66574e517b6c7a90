"""Memory that stays free for bursts: mean + deviations of what real-time requests held."""

from __future__ import annotations

import pytest

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError
from lightserve.router.arrivals import HeldByRealTime


def test_a_headroom_that_no_rule_would_respect_is_refused() -> None:
    assert ServeConfig(rt_kv_deviations=2.0, policy="priority").rt_kv_deviations == 2.0
    with pytest.raises(ConfigError, match="--rt-kv-deviations needs --policy priority"):
        ServeConfig(rt_kv_deviations=2.0, policy="chunked")


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
