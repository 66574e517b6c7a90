"""Incremental detokenisation: token ids in, pieces of valid UTF-8 text out.

Bytes that do not yet make a whole character are held back until they do, or until they cannot
any more (then U+FFFD, once per maximal invalid part, as the WHATWG decoder does). So the deltas
joined are the decoding of the whole, whatever the cuts. Special tokens have no text.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightserve.models.json_fields import JsonFields

# ----------------------------------------------------------------------
# How a vocabulary's pieces become bytes: the `decoder` of a tokenizer.json, one piece at a time.
#
# A Hugging Face decoder maps a list of pieces to a text, which cannot be done incrementally. Here
# the decoders of the families that are served are read as a map from each piece to bytes plus what
# happens at the start of a text; `detokenizer` turns the bytes into valid UTF-8.
#
# Supported: `ByteLevel` (Llama 3, Qwen, the bundled model); `Metaspace`, and sequences of
# `Replace`, `ByteFallback`, `Metaspace`, `Fuse` and `Strip` (Llama 1/2, Mistral: what sentencepiece
# models are converted to). Without a decoder (null) pieces are joined by blanks.


_BYTE_PIECE_LEN = len("<0x0A>")


@dataclass(frozen=True, kw_only=True)
class PieceDecoder:
    """The way from pieces to bytes."""

    piece_to_bytes: Callable[[str], bytes]
    """The piece's bytes, perhaps a part of a character, in the middle of a text."""
    first_piece_to_bytes: Callable[[str], bytes]
    """`piece_to_bytes` at the start of a text."""
    num_stripped: int
    """Up to this many …"""
    stripped: bytes
    """… of this byte are taken off the start of a text."""


def parse_decoder(path: Path, tokenizer: dict[str, Any]) -> PieceDecoder:
    """Return the piece decoder of a parsed tokenizer.json.

    Raises:
        ModelLoadError: a kind of decoder that is not supported; names file and key.
    """
    if JsonFields(path, tokenizer).is_null("decoder"):
        return _joined_by_blanks()
    fields = JsonFields(path, tokenizer).child("decoder")
    kind = fields.string("type")
    if kind == "ByteLevel":
        return _byte_level()
    if kind == "WordPiece":
        return _word_piece(
            fields.string("prefix", default="##"), cleans_up=fields.boolean("cleanup", default=True)
        )
    steps = [fields]
    if kind == "Sequence":
        steps = [
            JsonFields(path, step, prefix="decoder.decoders.") for step in fields.array("decoders")
        ]
        if [step.string("type") for step in steps] == ["ByteLevel"]:
            return _byte_level()
    return _sentencepiece(steps)


def byte_level_alphabet() -> dict[str, int]:
    """Return the byte behind each character of byte-level BPE, as GPT-2 defined it.

    Printable bytes stand for themselves, the other 68 for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in alphabet)
    return alphabet | {chr(0x100 + number): byte for number, byte in enumerate(list(others))}


def _byte_level() -> PieceDecoder:
    alphabet = byte_level_alphabet()

    def to_bytes(piece: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in piece])
        except KeyError:
            return piece.encode()  # an added token, which is plain text

    return PieceDecoder(
        piece_to_bytes=to_bytes, first_piece_to_bytes=to_bytes, num_stripped=0, stripped=b""
    )


def _joined_by_blanks() -> PieceDecoder:
    """Return the text that `tokenizers`, and so transformers, makes without a decoder."""
    return PieceDecoder(
        piece_to_bytes=lambda piece: f" {piece}".encode(),
        first_piece_to_bytes=str.encode,
        num_stripped=0,
        stripped=b"",
    )


_CLOSE_UP = {
    " .": ".",
    " ?": "?",
    " !": "!",
    " ,": ",",
    " ' ": "'",
    " n't": "n't",
    " 'm": "'m",
    " do not": " don't",
    " 's": "'s",
    " 've": "'ve",
    " 're": "'re",
}
"""Replacements of `cleanup` of the `tokenizers` library in each piece, in this order."""


def _word_piece(prefix: str, *, cleans_up: bool) -> PieceDecoder:
    """Return BERT's: pieces with a prefix go on with a word, others begin one behind a blank."""

    def close_up(text: str) -> bytes:
        for pattern, content in _CLOSE_UP.items() if cleans_up else ():
            text = text.replace(pattern, content)
        return text.encode()

    def to_bytes(piece: str) -> bytes:
        goes_on = piece.startswith(prefix)
        return close_up(piece[len(prefix) :] if goes_on else f" {piece}")

    return PieceDecoder(
        piece_to_bytes=to_bytes, first_piece_to_bytes=close_up, num_stripped=0, stripped=b""
    )


def _sentencepiece(steps: list[JsonFields]) -> PieceDecoder:
    replacements: list[tuple[str, str]] = []
    metaspace: str | None = None
    has_byte_pieces = False
    drops_first_space = False
    num_stripped, stripped = 0, b""
    for step in steps:
        match step.string("type"):
            case "Replace":
                replacements.append((step.child("pattern").string("String"), _text(step)))
            case "ByteFallback":
                has_byte_pieces = True
            case "Metaspace":
                metaspace = step.string("replacement")
                scheme = step.string("prepend_scheme", default="always")
                # The older form of the same switch is a boolean.
                drops_first_space = scheme != "never" and step.boolean(
                    "add_prefix_space", default=True
                )
            case "Fuse":
                pass
            case "Strip":
                num_stripped, stripped = _strip(step)
            case other:
                raise step.error("type", f"names the decoder {other!r}, which is not supported")

    def to_bytes(piece: str, *, first: bool = False) -> bytes:
        for pattern, content in replacements:
            piece = piece.replace(pattern, content)
        if has_byte_pieces and (byte := parse_byte_piece(piece)) is not None:
            return bytes([byte])
        if metaspace is not None:
            piece = piece.replace(metaspace, "" if first and drops_first_space else " ")
        return piece.encode()

    return PieceDecoder(
        piece_to_bytes=to_bytes,
        first_piece_to_bytes=lambda piece: to_bytes(piece, first=True),
        num_stripped=num_stripped,
        stripped=stripped,
    )


def parse_byte_piece(piece: str) -> int | None:
    """Return the byte that a piece such as `<0x0A>` stands for, None for any other piece."""
    if len(piece) != _BYTE_PIECE_LEN or not piece.startswith("<0x") or not piece.endswith(">"):
        return None
    try:
        return int(piece[3:5], 16)
    except ValueError:
        return None


def _text(step: JsonFields) -> str:
    """Return `content`, which may be empty."""
    return step.string("content", default="")


def _strip(step: JsonFields) -> tuple[int, bytes]:
    content = _text(step).encode()
    if len(content) != 1:
        raise step.error("content", "must be one ASCII character to be stripped incrementally")
    if step.integer("stop", default=0, low=0) != 0:
        raise step.error("stop", "is not 0: the end of a text cannot be stripped incrementally")
    return step.integer("start", low=0), content


# ----------------------------------------------------------------------
# Finds stop strings in text that comes in pieces, and holds back what may become one.


@dataclass(frozen=True)
class Stopped:
    """A stop string is complete."""

    text: str
    """Text that may still be shown: the text before it, or with it if it is to be included."""
    stop: str


class StopMatcher:
    """Watches one output. The stop string that is complete first ends it; of several that are
    complete with the same piece, the one that begins first (the longest of them) counts."""

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        """`stops` are not empty; `include` says whether the output shows the one that ended it."""
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, stops))
        self._held = ""

    def push(self, text: str) -> str | Stopped:
        """Add text; return the part that certainly belongs to no stop string, or the end."""
        held = self._held + text
        found = [(held.find(stop), -len(stop), stop) for stop in self._stops if stop in held]
        if found:
            start, _, stop = min(found)
            return Stopped(held[: start + len(stop) if self._include else start], stop)
        keep = self._num_undecided(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """Return the text that was held back: the output ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _num_undecided(self, text: str) -> int:
        """Return the length of the longest end of a text that begins some stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


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
        """Bytes of a character that is not whole."""
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
        """Return the text that was held back: nothing, or U+FFFD for an incomplete character."""
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
