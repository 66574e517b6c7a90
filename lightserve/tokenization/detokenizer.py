"""Incremental detokenisation: token ids in, pieces of valid UTF-8 text out.

Bytes that do not yet make a whole character are held back until they do, or until they cannot
any more (then U+FFFD, once per maximal invalid part, as the WHATWG decoder does). So the deltas
joined are the decoding of the whole, whatever the cuts. Special tokens have no text.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable

from lightserve.tokenization.byte_pieces import PieceDecoder


class PieceTable:
    """The bytes of each token, worked out when first seen; shared by all detokenisers."""

    def __init__(
        self,
        decoder: PieceDecoder,
        *,
        piece_of: Callable[[int], str | None],
        special_ids: frozenset[int],
    ) -> None:
        self.num_stripped = decoder.num_stripped
        self.stripped = decoder.stripped
        self._decoder = decoder
        self._piece_of = piece_of
        self._special_ids = special_ids
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Return a token's bytes in the middle of a text; none for special and unknown tokens."""
        known = self._bytes.get(token_id)
        if known is None:
            piece = self._visible_piece(token_id)
            known = b"" if piece is None else self._decoder.piece_to_bytes(piece)
            self._bytes[token_id] = known
        return known

    def first_bytes_of(self, token_id: int) -> bytes:
        """Return a token's bytes at the start of a text."""
        piece = self._visible_piece(token_id)
        return b"" if piece is None else self._decoder.first_piece_to_bytes(piece)

    def has_text(self, token_id: int) -> bool:
        """Whether a token is part of the text at all."""
        return self._visible_piece(token_id) is not None

    def _visible_piece(self, token_id: int) -> str | None:
        return None if token_id in self._special_ids else self._piece_of(token_id)


class Detokenizer:
    """Turns one sequence's tokens into text, delta by delta.

    `continues`: the text goes on after a prompt, so its first space is part of it; otherwise the
    first space that sentencepiece vocabularies put before a text is dropped.
    """

    def __init__(self, table: PieceTable, *, continues: bool) -> None:
        self._table = table
        self._held = b""
        """Of a character that is not whole."""
        self._is_first = not continues
        self._num_to_strip = 0 if continues else table.num_stripped

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; return the text that is certain now (may be empty)."""
        if self._is_first or self._num_to_strip:
            data = b"".join(self._start_bytes_of(token_id) for token_id in token_ids)
        else:
            data = b"".join(map(self._table.bytes_of, token_ids))
        if self._held:
            data = self._held + data
        text, num_bytes = codecs.utf_8_decode(data, "replace", False)
        self._held = data[num_bytes:]
        return text

    def finish(self) -> str:
        """Return what was held back: nothing, or U+FFFD for an incomplete character."""
        held, self._held = self._held, b""
        return held.decode(errors="replace")

    def _start_bytes_of(self, token_id: int) -> bytes:
        """Return a token's bytes while the start of the text is still to be cleaned."""
        table = self._table
        if not self._is_first:
            data = table.bytes_of(token_id)
        elif table.has_text(token_id):
            self._is_first = False
            data = table.first_bytes_of(token_id)
        else:
            return b""
        while data and self._num_to_strip:
            if not data.startswith(table.stripped):
                self._num_to_strip = 0
                break
            data = data[1:]
            self._num_to_strip -= 1
        return data
