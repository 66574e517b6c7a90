"""Best-effort work from the first second on: what real-time load is, is measured, not assumed."""

from __future__ import annotations

import numpy as np

from lightserve import sim
from lightserve.sim.hybrid import HybridRun


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
