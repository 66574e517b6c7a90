"""Time of a step: a floor, then linear in what it computes (mechanisms B4, E9, A2).

    T = floor + a * max(0, new tokens - knee) + d * decodes + s * chunks
        + b * context of decodes + e * context of chunks + c * pairs of chunks + copies

Below the knee a step's time is that of reading the weights, above it that of multiplying with
them: AccelGen's pivot, and `max(floor, linear)` by another name. A mixed step is *joint*: it
reads the weights once, so its tokens share one floor and one knee, and the rest is a sum. That
rule has a lower error on steps that were not fitted than the maximum and the sum of a
step of each phase, and than Echo's mixture of both (`bench/step_cost.py`). Copies that a step
waits for are added (B5 takes the maximum, which is right where they overlap).

No coefficient is negative, so time is monotone in every part of a shape.
"""

from __future__ import annotations

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
