"""What the check of the simulator charges for what happens before the router."""

from __future__ import annotations

import numpy as np
import pytest

from bench.scheduling.simulator_check import Outcome, Outside


def outcomes(router_s: list[float], besides_s: list[float]) -> dict[str, Outcome]:
    router = np.array(router_s)
    return {
        "router": Outcome(100.0, 1.0, router),
        "client": Outcome(100.0, 1.0, router + np.array(besides_s)),
    }


def test_requests_of_one_moment_wait_for_those_before_them() -> None:
    outside = Outside(alone_s=0.008, turn_s=0.002)
    assert outside.seconds(np.zeros(4)) == pytest.approx([0.008, 0.010, 0.012, 0.014])


def test_one_waits_for_what_is_left_of_those_that_came_before() -> None:
    outside = Outside(alone_s=0.0, turn_s=0.002)
    times_s = np.array([0.0, 0.001, 0.0015, 0.010, 0.5])
    assert outside.seconds(times_s) == pytest.approx([0.0, 0.001, 0.0025, 0.0, 0.0])


def test_what_each_takes_is_told_from_runs_of_other_requests() -> None:
    """The median of those in one moment: a moment of others does not count."""
    spread = outcomes([0.1, 0.2, 0.3], [0.008] * 3)
    at_once = outcomes([1.0, 2.0, 3.0], [0.008, 0.010, 0.012])
    stalled = outcomes([1.0, 2.0, 3.0], [0.5, 0.7, 0.9])
    outside = Outside.of(spread, [at_once, stalled, at_once])
    assert (outside.alone_s, outside.turn_s) == pytest.approx((0.008, 0.002))
    assert Outside.of(at_once, [spread]).turn_s == 0.0
