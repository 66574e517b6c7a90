"""What a profile of virtual hardware says: fitted to noisy samples of it, its formula unseen.

The router of a server knows its workers by a profile that `lightserve profile` has measured; that
of a simulation knows them by the same fit to as many samples as a short profile takes.
"""

from __future__ import annotations

import msgspec
import numpy as np

from lightserve.cost.fit import StepSample, fit
from lightserve.cost.shape import StepShape
from lightserve.messages.step_cost import StepCoefficients
from lightserve.sim.hardware import Hardware

NUM_SAMPLES = 150
_MAX_DECODES = 200
_CONTEXT = (50, 2000)
"""Tokens that rows have before the step, both ends included."""
_MAX_CHUNK = 2048
_COPIED_TOKENS = 2000


def fitted_profile(
    hardware: Hardware, *, noise: float, rng: np.random.Generator
) -> StepCoefficients:
    """Return the coefficients fitted to samples of steps and copies.

    A third each are decodes, chunks, and both; chunks are log-uniform in length.

    Args:
        hardware: what is sampled.
        noise: standard deviation of the logarithm of a sample.
        rng: of shapes and noise.
    """
    samples = []
    for number in range(NUM_SAMPLES):
        shape = StepShape() if number % 3 == 1 else _decodes(rng)
        if number % 3:
            count = round(np.exp(rng.uniform(np.log(2), np.log(_MAX_CHUNK))))
            shape = shape.plus(int(rng.integers(_CONTEXT[1], endpoint=True)), count)
        samples.append(StepSample(shape, hardware.step_seconds(shape) * _factor(noise, rng)))
    saved_s = hardware.copy_seconds(num_saved=_COPIED_TOKENS) * _factor(noise, rng)
    loaded_s = hardware.copy_seconds(num_loaded=_COPIED_TOKENS) * _factor(noise, rng)
    return msgspec.structs.replace(
        fit(samples),
        per_saved_token_s=saved_s / _COPIED_TOKENS,
        per_loaded_token_s=loaded_s / _COPIED_TOKENS,
    )


def _decodes(rng: np.random.Generator) -> StepShape:
    contexts = rng.integers(*_CONTEXT, size=rng.integers(1, _MAX_DECODES), endpoint=True)
    return StepShape().plus_decodes(len(contexts), int(contexts.sum()))


def _factor(noise: float, rng: np.random.Generator) -> float:
    """Return a lognormal factor of mean one."""
    return float(rng.lognormal(-0.5 * noise**2, noise))
