"""Time of a step: a floor, then linear in what it computes; learnt while serving (B4, E9, A2).

    T = floor + a * max(0, new tokens - knee) + b * context of decodes + c * pairs of prompts

where pairs count, for every new prompt token, the tokens that it attends to. Below the knee a
step's time is that of reading the weights, above it that of multiplying with them: AccelGen's
pivot. A line through both is off by over 40 % below it.

Shapes are sampled as they come, as many of each size, so that a long stretch of decodes does not
make the model forget what prompts cost. Between fits a running ratio of observed to predicted
time corrects the model, and its spread is the guard that planners add.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lightserve.router.policies.base import Allotment

FloatArray = npt.NDArray[np.float64]

SAMPLES_PER_SIZE = 48
"""Steps remembered of each size; sizes are powers of two of new tokens."""
NUM_KNEES = 8
REFIT_STEPS = 64
RATIO_MEMORY = 0.1
GUARD_DEVIATIONS = 2.0
_SCALE: FloatArray = np.array([1.0, 1e-2, 1e-4, 1e-6])


@dataclass(frozen=True, slots=True)
class StepShape:
    """What of a step its time depends on."""

    num_new: int = 0
    decode_context: int = 0
    """Sum of the context lengths of rows that compute one token."""
    chunk_pairs: int = 0
    """Over rows that compute more: pairs of a new token and one of its context."""

    def plus(self, start: int, num_tokens: int) -> StepShape:
        """Return the shape with one more row: tokens at positions `start` …"""
        num_new = self.num_new + num_tokens
        if num_tokens == 1:
            return replace(self, num_new=num_new, decode_context=self.decode_context + start)
        pairs = num_tokens * start + num_tokens * num_tokens // 2
        return replace(self, num_new=num_new, chunk_pairs=self.chunk_pairs + pairs)


def shape_of(allotments: tuple[Allotment, ...]) -> StepShape:
    """Return a step's shape, before its requests have moved."""
    num_new = decode_context = chunk_pairs = 0
    for request, num_tokens in allotments:
        start = request.next_position
        num_new += num_tokens
        if num_tokens == 1:
            decode_context += start
        else:
            chunk_pairs += num_tokens * start + num_tokens * num_tokens // 2
    return StepShape(num_new, decode_context, chunk_pairs)


class StepCost:
    """See the module. Queries are O(1); a fit takes about a millisecond."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[int, int, int, float]]] = {}
        self._knee = 0.0
        self._weights: FloatArray = np.zeros(4)
        self._num_observed = 0
        self._ratio = 1.0
        self._deviation = 0.0
        self.error_s = 0.0
        """Running average of the absolute error."""

    @property
    def is_known(self) -> bool:
        """Whether anything has been learnt."""
        return self._num_observed > 0

    @property
    def guard(self) -> float:
        """Factor >= 1 on predicted times that makes misses rare."""
        return 1.0 + GUARD_DEVIATIONS * self._deviation

    @property
    def pivot(self) -> float:
        """New tokens at which a step stops being free (A2)."""
        return self._knee

    def seconds(self, shape: StepShape) -> float:
        """Return the predicted seconds of a step; 0 before the first observation."""
        floor, per_new, per_context, per_pair = self._weights.tolist()
        time_s = floor + per_new * max(0.0, shape.num_new - self._knee)
        time_s += per_context * shape.decode_context + per_pair * shape.chunk_pairs
        return float(time_s * self._ratio)

    def tokens_within(self, shape: StepShape, limit_s: float, start: int, most: int) -> int:
        """Return how many tokens of one more prompt, from `start` on, keep a step in its limit.

        At most `most`; the inverse of the model (A2, A4).
        """
        counts = range(1, most + 1)
        return bisect.bisect_right(
            counts, limit_s, key=lambda count: self.seconds(shape.plus(start, count))
        )

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from a finished step."""
        size = shape.num_new.bit_length()
        samples = self._samples.setdefault(size, deque(maxlen=SAMPLES_PER_SIZE))
        samples.append((shape.num_new, shape.decode_context, shape.chunk_pairs, seconds))
        if self.is_known:
            error_s = abs(seconds - self.seconds(shape))
            self.error_s += RATIO_MEMORY * (error_s - self.error_s)
            ratio = self._ratio * seconds / max(self.seconds(shape), 1e-9)
            error = abs(ratio / self._ratio - 1.0)
            self._ratio += RATIO_MEMORY * (min(ratio, 4.0) - self._ratio)
            self._deviation += RATIO_MEMORY * (min(error, 1.0) - self._deviation)
        self._num_observed += 1
        count = self._num_observed
        if count % REFIT_STEPS == 0 or (count < REFIT_STEPS and count & (count - 1) == 0):
            self._fit()

    def _fit(self) -> None:
        """Fit all weights to the samples, with the knee among their sizes that fits best."""
        rows = np.array([row for samples in self._samples.values() for row in samples])
        seconds = rows[:, 3]
        knees = np.unique(np.quantile(rows[:, 0], np.linspace(0.0, 0.9, NUM_KNEES)))
        best = np.inf
        for knee in knees.tolist():
            features = np.column_stack(
                [np.ones(len(rows)), np.maximum(0.0, rows[:, 0] - knee), rows[:, 1], rows[:, 2]]
            )
            weights = _least_squares(features * _SCALE / seconds[:, None], np.ones(len(rows)))
            error = float(np.square(features * _SCALE @ weights / seconds - 1.0).sum())
            if error < best:
                best, self._knee, self._weights = error, knee, weights * _SCALE
        self._ratio = 1.0


def _least_squares(features: FloatArray, targets: FloatArray) -> FloatArray:
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
