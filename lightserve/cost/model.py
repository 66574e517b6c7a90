"""Time of a step: a floor, then linear in what it computes, after BROS, Echo and AccelGen.

    T = floor + a * max(0, new tokens - knee) + d * (decodes + drafts) + s * chunks
        + b * context of decodes + e * context of chunks + c * pairs of chunks + copies

Below the knee a step's time is that of reading the weights, above it that of multiplying with
them: AccelGen's pivot, and `max(floor, linear)` by another name. A mixed step is *joint*: it
reads the weights once, so its tokens share one floor and one knee, and the rest is a sum. That
rule has a lower error on mixed steps that were not fitted than the maximum and the sum of a step
of each phase, and than Echo's mixture of both (`bench/engine/step_cost.py`). Copies that a step
waits for are added (BROS takes the maximum, which is right where they overlap).

No coefficient is negative, so time is monotone in every part of a shape.

Where workers pad steps to some sizes, as they have recorded graphs of these alone, the new tokens
of such a step are those of its size: up to the next size tokens cost their attention.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightserve.messages.common import NO_SIZES, GraphSizes, StepCoefficients

# What of a step its time depends on, as an accumulator.


class StepShape(NamedTuple):
    """Sums over the rows of a step; one row's share is added or taken away in O(1)."""

    num_new: int = 0
    """Tokens computed."""
    decode_context: int = 0
    """Sum of the context lengths of rows that compute one token."""
    chunk_pairs: int = 0
    """Over rows that compute more: pairs of a new token and one of its context."""
    num_decodes: int = 0
    """Rows that compute one token."""
    num_chunks: int = 0
    """Rows that compute more."""
    chunk_context: int = 0
    """Sum over those of the context lengths that they start from."""
    num_drafts: int = 0
    """Tokens beside their first in rows that compute one, each with logits of its own."""

    def plus(self, start: int, num_tokens: int) -> StepShape:
        """Return the shape with one more row: tokens at positions `start` …"""
        if num_tokens == 1:
            return self.plus_decodes(1, start)
        return StepShape(
            self.num_new + num_tokens,
            self.decode_context,
            self.chunk_pairs + chunk_pairs(start, num_tokens),
            self.num_decodes,
            self.num_chunks + 1,
            self.chunk_context + start,
            self.num_drafts,
        )

    def plus_decodes(self, num_rows: int, context: int) -> StepShape:
        """Return the shape with more rows that compute one token, contexts summed."""
        return StepShape(
            self.num_new + num_rows,
            self.decode_context + context,
            self.chunk_pairs,
            self.num_decodes + num_rows,
            self.num_chunks,
            self.chunk_context,
            self.num_drafts,
        )

    def plus_drafts(self, num_drafts: int, pairs: int) -> StepShape:
        """Return the shape with more tokens in rows that compute one, each over its context."""
        return self._replace(
            num_new=self.num_new + num_drafts,
            chunk_pairs=self.chunk_pairs + pairs,
            num_drafts=self.num_drafts + num_drafts,
        )

    @property
    def has_rows_of_several(self) -> bool:
        """Whether any row has more than one new token, drafts included."""
        return self.num_new > self.num_decodes

    @property
    def num_requests(self) -> int:
        """Rows in all."""
        return self.num_decodes + self.num_chunks

    @property
    def decodes(self) -> StepShape:
        """The rows that compute one token, alone and without drafts."""
        return StepShape(self.num_decodes, self.decode_context, 0, self.num_decodes, 0)

    @property
    def chunks(self) -> StepShape:
        """The rows that compute more, and all drafts, alone."""
        return self._replace(
            num_new=self.num_new - self.num_decodes, decode_context=0, num_decodes=0
        )


def chunk_pairs(start: int, num_tokens: int) -> int:
    """Return the pairs of a new token and one that it attends to, itself left out."""
    return num_tokens * start + num_tokens * (num_tokens - 1) // 2


FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

FIXED_SHARE = 0.125
"""Part of a step's time that may be what every step takes, however few its tokens."""


@dataclass(frozen=True, slots=True)
class StepModel:
    """Predicts, in O(1)."""

    coefficients: StepCoefficients
    sizes: GraphSizes = NO_SIZES
    """To which steps are padded."""
    tells_rows: bool = True
    """True: measured steps tell a decode's cost from the floor. False: drafts cost no logits."""

    @property
    def per_draft_s(self) -> float:
        """Seconds of a draft's logits."""
        return self.coefficients.per_decode_s if self.tells_rows else 0.0

    @property
    def worthwhile_s(self) -> float:
        """Time of so many tokens that what every step takes is a small part of theirs."""
        c = self.coefficients
        fixed_s = max(0.0, c.floor_s - c.per_new_s * c.knee)
        return fixed_s * (1 / FIXED_SHARE - 1)

    def seconds(self, shape: StepShape) -> float:
        """Return the seconds of a step, its copies left out."""
        num_new = self.sizes.padded(shape.num_new, has_chunks=shape.has_rows_of_several)
        return self._seconds(shape, num_new)

    def _seconds(self, shape: tuple[int, int, int, int, int, int, int], num_new: int) -> float:
        """Return the seconds of a step that computes `num_new` tokens for those of its shape."""
        c = self.coefficients
        _, decode_context, pairs, num_decodes, num_chunks, chunk_context, num_drafts = shape
        return (
            c.floor_s
            + c.per_new_s * max(0.0, num_new - c.knee)
            + (c.per_decode_s * num_decodes + self.per_draft_s * num_drafts)
            + c.per_chunk_s * num_chunks
            + c.per_decode_context_s * decode_context
            + c.per_chunk_context_s * chunk_context
            + c.per_chunk_pair_s * pairs
        )

    def seconds_with_drafts(self, shape: StepShape, pairs: IntArray) -> FloatArray:
        """Return `seconds` of a shape with 1 … n drafts, float64 [n].

        `pairs`, [n]: tokens that so many drafts attend to, see `StepShape.plus_drafts`.
        """
        c, counts = self.coefficients, np.arange(1, len(pairs) + 1)
        num_new = self.sizes.padded_all(counts + shape.num_new)
        found: FloatArray = c.per_new_s * np.maximum(0.0, num_new - c.knee)
        found += self._seconds(shape, 0) + self.per_draft_s * counts + c.per_chunk_pair_s * pairs
        return found

    def seconds_of_parts(self, shape: StepShape) -> tuple[float, float, float]:
        """Return `seconds` of a shape, its `decodes` and its `chunks`, without making these."""
        num_new, decode_context, pairs, num_decodes, num_chunks, chunk_context, drafts = shape
        has_chunks, padded = (of_chunks := num_new - num_decodes) > 0, self.sizes.padded
        decodes = (num_decodes, decode_context, 0, num_decodes, 0, 0, 0)
        chunks = (of_chunks, 0, pairs, 0, num_chunks, chunk_context, drafts)
        return (
            self._seconds(shape, padded(num_new, has_chunks=has_chunks)),
            self._seconds(decodes, padded(num_decodes, has_chunks=False)),
            self._seconds(chunks, padded(of_chunks, has_chunks=has_chunks)),
        )

    def work(self, shape: StepShape) -> float:
        """Return what a shape adds to a step that is beyond the knee already, in seconds.

        Its tokens are its own: a large step has others' as well, and little padding for each.
        """
        c = self.coefficients
        below_knee = min(c.knee, float(shape.num_new))
        return self._seconds(shape, shape.num_new) - c.floor_s + c.per_new_s * below_knee

    def chunk_within(self, shape: StepShape, limit_s: float, start: int) -> float:
        """Return how many tokens one more chunk, from `start` on, may have; inf: any number.

        Exact but for rounding, and perhaps negative. The time is the larger one of what it is
        below the knee and of what it is beyond, so the count is the smaller one.
        """
        c, before = self.coefficients, shape.num_new
        below_s = self._seconds(shape, before) - c.per_new_s * max(0.0, before - c.knee)
        below_s += c.per_chunk_s + c.per_chunk_context_s * start
        beyond_s = below_s + c.per_new_s * (before - c.knee)
        per_token_s = c.per_chunk_pair_s * (start - 0.5)
        count = min(
            _root(c.per_chunk_pair_s, per_token_s, limit_s - below_s),
            _root(c.per_chunk_pair_s, per_token_s + c.per_new_s, limit_s - beyond_s),
        )
        sizes = self.sizes.mixed
        if not sizes or count < 1 or before + count >= sizes[-1] + 1:
            return count
        # Padding makes no step shorter, so it is this size or one below it.
        for place in range(bisect.bisect_left(sizes, before + int(count)), -1, -1):
            size, below = sizes[place], sizes[place - 1] if place else 0
            size_s = below_s + c.per_new_s * max(0.0, size - c.knee)
            room = _root(c.per_chunk_pair_s, per_token_s, limit_s - size_s)
            count = min(float(size - before), room)
            if before + count > below or below <= before:
                return count
        return count


def _root(growth: float, slope: float, room: float) -> float:
    """Return the largest n with slope * n + growth / 2 * n^2 <= room; -1 if none is positive."""
    if room < 0:
        return -1.0
    if growth > 0:
        # Without cancellation where the growth is small.
        discriminant = math.sqrt(slope * slope + 2.0 * growth * room)
        if slope + discriminant <= 0:
            return math.inf
        if slope > 0:
            return 2.0 * room / (slope + discriminant)
        return (discriminant - slope) / growth
    return room / slope if slope > 0 else math.inf


# Fits the step model to measured steps: relative least squares, and the best of many knees.

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


def fit(
    samples: Sequence[StepSample], *, sizes: GraphSizes = NO_SIZES, num_knees: int = NUM_KNEES
) -> StepCoefficients:
    """Return the coefficients that fit at least one sample best, none of them negative.

    `sizes` are those to which the steps were padded, see `StepModel`.

    Errors count relative to a step's time, as planners use quotients; large ones by their size
    instead of its square (Huber), as steps are slow when the machine has other work.
    """
    seconds = np.array([sample.seconds for sample in samples])
    computed = [sizes.padded(x.num_new, has_chunks=x.has_rows_of_several) for x, _ in samples]
    num_new = np.array(computed, dtype=np.float64)
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


def held_out_errors(
    samples: Sequence[StepSample], num_folds: int = 4, *, sizes: GraphSizes = NO_SIZES
) -> FitError:
    """Return the errors on samples of models that were fitted to the others."""
    off: list[float] = []
    for fold in range(num_folds):
        others = [sample for index, sample in enumerate(samples) if index % num_folds != fold]
        model = StepModel(fit(others, sizes=sizes), sizes)
        off += [abs(model.seconds(s.shape) / s.seconds - 1.0) for s in samples[fold::num_folds]]
    return FitError(float(np.median(off)), float(np.quantile(off, 0.95)))


def _features(samples: Sequence[StepSample], num_new: FloatArray, knee: float) -> FloatArray:
    rows = [
        (
            s.num_decodes + s.num_drafts,
            s.num_chunks,
            s.decode_context,
            s.chunk_context,
            s.chunk_pairs,
        )
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
