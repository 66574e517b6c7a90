"""Fits the step model to measured steps: relative least squares, and the best of many knees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightserve.cost.model import StepModel
from lightserve.cost.shape import StepShape
from lightserve.messages.step_cost import StepCoefficients

FloatArray = npt.NDArray[np.float64]

NUM_KNEES = 24
_SCALE: FloatArray = np.array([1.0, 1e-2, 1e-2, 1e-1, 1e-4, 1e-4, 1e-6])
"""Brings the features to the order of one."""
NUM_ROUNDS = 4
OUTLIER_ERROR = 0.1
"""From this relative error on, a step counts by its error, not by the square of it."""


class StepSample(NamedTuple):
    """One measured step."""

    shape: StepShape
    seconds: float


class FitError(NamedTuple):
    """Relative errors of predictions, absolute values."""

    median: float
    p95: float


def fit(samples: Sequence[StepSample], *, num_knees: int = NUM_KNEES) -> StepCoefficients:
    """Return the coefficients that fit at least one sample best, none of them negative.

    Errors count relative to a step's time, as planners use quotients; large ones by their size
    instead of its square (Huber), as steps are slow when the machine has other work.
    """
    seconds = np.array([sample.seconds for sample in samples])
    num_new = np.array([sample.shape.num_new for sample in samples], dtype=np.float64)
    best: tuple[float, float, FloatArray] | None = None
    for knee in knee_grid(num_new, num_knees):
        features = _features(samples, num_new, knee) * _SCALE / seconds[:, None]
        weights, error = _robust_fit(features)
        if best is None or error < best[0]:
            best = (error, knee, weights * _SCALE)
    assert best is not None
    floor, *rest = best[2].tolist()
    return StepCoefficients(floor, best[1], *rest)


def knee_grid(num_new: FloatArray, num_knees: int = NUM_KNEES) -> list[float]:
    """Return 0 and numbers of tokens among those measured, evenly in the logarithm."""
    low, high = max(1.0, float(num_new.min())), float(num_new.max())
    return [0.0, *np.unique(np.geomspace(low, max(low, high), num_knees)).tolist()]


def errors(model: StepModel, samples: Sequence[StepSample]) -> FitError:
    """Return how far the model is off on samples."""
    off = [abs(model.seconds(shape) / seconds - 1.0) for shape, seconds in samples]
    return FitError(float(np.median(off)), float(np.quantile(off, 0.95)))


def held_out_errors(samples: Sequence[StepSample], num_folds: int = 4) -> FitError:
    """Return the errors on samples of models that were fitted to the others."""
    off: list[float] = []
    for fold in range(num_folds):
        others = [sample for index, sample in enumerate(samples) if index % num_folds != fold]
        model = StepModel(fit(others))
        off += [abs(model.seconds(s.shape) / s.seconds - 1.0) for s in samples[fold::num_folds]]
    return FitError(float(np.median(off)), float(np.quantile(off, 0.95)))


def _features(samples: Sequence[StepSample], num_new: FloatArray, knee: float) -> FloatArray:
    rows = [
        (s.num_decodes, s.num_chunks, s.decode_context, s.chunk_context, s.chunk_pairs)
        for s in (sample.shape for sample in samples)
    ]
    ones = np.ones(len(samples))
    return np.column_stack([ones, np.maximum(0.0, num_new - knee), np.array(rows)])


def _robust_fit(features: FloatArray) -> tuple[FloatArray, float]:
    """Return weights for which `features` [N, K] @ weights is nearest to 1, and the Huber loss."""
    importance = np.ones(len(features))
    for _ in range(NUM_ROUNDS):
        weights = least_squares(features * importance[:, None], importance)
        off = np.abs(features @ weights - 1.0)
        importance = np.sqrt(np.minimum(1.0, OUTLIER_ERROR / np.maximum(off, 1e-12)))
    loss = np.where(off <= OUTLIER_ERROR, off * off, OUTLIER_ERROR * (2 * off - OUTLIER_ERROR))
    return weights, float(loss.sum())


def least_squares(features: FloatArray, targets: FloatArray) -> FloatArray:
    """Return weights of least squared error that are not negative: who would be is left out."""
    kept = np.ones(features.shape[1], dtype=bool)
    weights: FloatArray = np.zeros(features.shape[1])
    while kept.any():
        found = np.linalg.lstsq(features[:, kept], targets, rcond=None)[0]
        weights[:] = 0.0
        weights[kept] = found
        if (found >= 0).all():
            return weights
        kept &= weights > 0
    return weights
