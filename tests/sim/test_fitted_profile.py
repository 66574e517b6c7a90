"""A router in the simulator knows the hardware as a server's does: by a fit to noisy samples."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lightserve import sim
from lightserve.cost.model import StepModel, StepShape
from lightserve.sim.hybrid import HybridRun, fitted_profile
from lightserve.sim.worker import A100_LLAMA2_7B

NOISE = 0.05


@pytest.mark.parametrize("seed", range(3))
def test_it_predicts_steps_that_it_has_not_seen(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = StepModel(fitted_profile(A100_LLAMA2_7B, noise=NOISE, rng=rng))
    errors = []
    for _ in range(200):
        contexts = rng.integers(50, 2000, size=rng.integers(1, 100))
        shape = StepShape().plus_decodes(len(contexts), int(contexts.sum()))
        shape = shape.plus(int(rng.integers(0, 1500)), int(rng.integers(16, 1500)))
        errors.append(model.seconds(shape) / A100_LLAMA2_7B.step_seconds(shape) - 1.0)
    assert 0.0 < np.median(np.abs(errors)) < 0.05, "samples are noisy; the formula is not known"
    assert np.quantile(np.abs(errors), 0.95) < 0.12
    copies_s = model.seconds(StepShape(), num_saved=100, num_loaded=50) - model.seconds(StepShape())
    assert copies_s == pytest.approx(150 * 21e-6, rel=4 * NOISE)


def test_the_router_starts_with_it_or_learns() -> None:
    config = sim.HybridConfig(
        be="closed:4", be_lengths="uniform:10-20,5-9", duration_s=3.0, margin_s=1.0
    )
    profiled = HybridRun(config)
    learning = HybridRun(dataclasses.replace(config, is_profiled=False))
    for run, is_known in ((profiled, True), (learning, False)):
        run.advance(0.0)
        planned = next(iter(run.core._pipeline._in_flight))
        assert (planned.planned.predicted_s > 0.0) is is_known
