"""Time of a step: a floor, then linear in what it computes, after BROS, Echo and AccelGen.

    T = floor + a * max(0, new tokens - knee) + d * decodes + s * chunks
        + b * context of decodes + e * context of chunks + c * pairs of chunks + copies

Below the knee a step's time is that of reading the weights, above it that of multiplying with
them: AccelGen's pivot, and `max(floor, linear)` by another name. A mixed step is *joint*: it
reads the weights once, so its tokens share one floor and one knee, and the rest is a sum. That
rule has a lower error on mixed steps that were not fitted than the maximum and the sum of a step
of each phase, and than Echo's mixture of both (`bench/engine/step_cost.py`). Copies that a step
waits for are added (BROS takes the maximum, which is right where they overlap).

No coefficient is negative, so time is monotone in every part of a shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightserve.cost.shape import StepShape
from lightserve.messages.step_cost import StepCoefficients


@dataclass(frozen=True, slots=True)
class StepModel:
    """Predicts, in O(1)."""

    coefficients: StepCoefficients

    def seconds(self, shape: StepShape, *, num_saved: int = 0, num_loaded: int = 0) -> float:
        """Return the seconds of a step that waits for copies of so many tokens."""
        c = self.coefficients
        return (
            c.floor_s
            + c.per_new_s * max(0.0, shape.num_new - c.knee)
            + c.per_decode_s * shape.num_decodes
            + c.per_chunk_s * shape.num_chunks
            + c.per_decode_context_s * shape.decode_context
            + c.per_chunk_context_s * shape.chunk_context
            + c.per_chunk_pair_s * shape.chunk_pairs
            + c.per_saved_token_s * num_saved
            + c.per_loaded_token_s * num_loaded
        )

    def seconds_of_decodes(self, shape: StepShape) -> float:
        """Return what `seconds` says of the rows that compute one token, alone."""
        c, num_decodes = self.coefficients, shape.num_decodes
        return (
            c.floor_s
            + c.per_new_s * max(0.0, num_decodes - c.knee)
            + c.per_decode_s * num_decodes
            + c.per_decode_context_s * shape.decode_context
        )

    def seconds_of_chunks(self, shape: StepShape) -> float:
        """Return what `seconds` says of the rows that compute more, alone."""
        c = self.coefficients
        return (
            c.floor_s
            + c.per_new_s * max(0.0, shape.num_new - shape.num_decodes - c.knee)
            + c.per_chunk_s * shape.num_chunks
            + c.per_chunk_context_s * shape.chunk_context
            + c.per_chunk_pair_s * shape.chunk_pairs
        )

    def work(self, shape: StepShape) -> float:
        """Return what a shape adds to a step that is beyond the knee already, in seconds."""
        c = self.coefficients
        below_knee = min(c.knee, float(shape.num_new))
        return self.seconds(shape) - c.floor_s + c.per_new_s * below_knee

    def chunk_within(self, shape: StepShape, limit_s: float, start: int) -> float:
        """Return how many tokens one more chunk, from `start` on, may have; inf: any number.

        Exact but for rounding, and perhaps negative. The time is the larger one of what it is
        below the knee and of what it is beyond, so the count is the smaller one.
        """
        c = self.coefficients
        below_s = self.seconds(shape) - c.per_new_s * max(0.0, shape.num_new - c.knee)
        below_s += c.per_chunk_s + c.per_chunk_context_s * start
        beyond_s = below_s + c.per_new_s * (shape.num_new - c.knee)
        per_token_s = c.per_chunk_pair_s * (start - 0.5)
        return min(
            _root(c.per_chunk_pair_s, per_token_s, limit_s - below_s),
            _root(c.per_chunk_pair_s, per_token_s + c.per_new_s, limit_s - beyond_s),
        )


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
