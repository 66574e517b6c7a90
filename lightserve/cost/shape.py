"""What of a step its time depends on, as an accumulator."""

from __future__ import annotations

from typing import NamedTuple


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

    def plus(self, start: int, num_tokens: int) -> StepShape:
        """Return the shape with one more row: tokens at positions `start` …"""
        return self._moved(start, num_tokens, 1)

    def plus_decodes(self, num_rows: int, context: int) -> StepShape:
        """Return the shape with more rows that compute one token, contexts summed."""
        return StepShape(
            self.num_new + num_rows,
            self.decode_context + context,
            self.chunk_pairs,
            self.num_decodes + num_rows,
            self.num_chunks,
            self.chunk_context,
        )

    def minus(self, start: int, num_tokens: int) -> StepShape:
        """Return the shape without a row that is in it."""
        return self._moved(start, num_tokens, -1)

    @property
    def decodes(self) -> StepShape:
        """The rows that compute one token, alone."""
        return StepShape(self.num_decodes, self.decode_context, 0, self.num_decodes, 0)

    @property
    def chunks(self) -> StepShape:
        """The rows that compute more, alone."""
        num_new = self.num_new - self.num_decodes
        return StepShape(
            num_new, 0, self.chunk_pairs, 0, self.num_chunks, chunk_context=self.chunk_context
        )

    def _moved(self, start: int, num_tokens: int, sign: int) -> StepShape:
        if num_tokens == 1:
            return self.plus_decodes(sign, sign * start)
        return StepShape(
            self.num_new + sign * num_tokens,
            self.decode_context,
            self.chunk_pairs + sign * chunk_pairs(start, num_tokens),
            self.num_decodes,
            self.num_chunks + sign,
            self.chunk_context + sign * start,
        )


def chunk_pairs(start: int, num_tokens: int) -> int:
    """Return the pairs of a new token and one that it attends to, itself left out."""
    return num_tokens * start + num_tokens * (num_tokens - 1) // 2
