"""Time of a step: a floor, then linear in what it computes (mechanisms B4, E9, A2).

    T = floor + a * max(0, new tokens - knee) + d * decodes + s * chunks
        + b * context of decodes + c * pairs of chunks + copies

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

from lightserve.cost.shape import StepShape, chunk_pairs
from lightserve.messages.step_cost import StepCoefficients


@dataclass(frozen=True, slots=True)
class StepModel:
    """Predicts; every query is O(1), `tokens_within` O(log most)."""

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
            + c.per_chunk_pair_s * shape.chunk_pairs
            + c.per_saved_token_s * num_saved
            + c.per_loaded_token_s * num_loaded
        )

    def tokens_within(self, shape: StepShape, limit_s: float, start: int, most: int) -> int:
        """Return how many tokens of one more prompt, from `start` on, fit into `limit_s`.

        The largest of 0 … `most` (A2, A4). One token is a decode, more are a chunk, and may
        take less: each of the two is looked at.
        """
        c = self.coefficients
        fixed_s = self.seconds(shape) - c.per_new_s * max(0.0, shape.num_new - c.knee)
        fixed_s += c.per_chunk_s

        def fits(count: int) -> bool:
            beyond = max(0.0, shape.num_new + count - c.knee)
            pairs = chunk_pairs(start, count)
            return fixed_s + c.per_new_s * beyond + c.per_chunk_pair_s * pairs <= limit_s

        low, high = 1, most  # `low` fits, or is 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        if low > 1:
            return low
        return int(most > 0 and self.seconds(shape.plus(start, 1)) <= limit_s)
