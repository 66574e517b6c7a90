"""Outputs kept in little memory, and JSON written piece by piece.

An answer that is not streamed is kept until its end, with up to millions of log-probabilities.
Here they are numbers side by side, some 12 bytes each instead of 70 as objects, and the answer's
JSON is made from them while it is sent: neither all of it nor its objects are ever in memory, and
the event loop turns between the pieces.
"""

from __future__ import annotations

import codecs
import itertools
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from msgspec.json import encode

from lightserve.messages.common import TokenLogprob

ITEMS_PER_PIECE = 1024
"""Tokens and log-probabilities that are written at a time: 2 ms or so."""
CHARS_PER_PIECE = 16_384

T = TypeVar("T")


class Piece(NamedTuple):
    """One token and the text that became certain with it, before stop strings are looked for."""

    token_id: int
    text: str
    logprob: TokenLogprob | None = None


class LogprobColumns:
    """Log-probabilities of consecutive tokens, each with equally many others."""

    def __init__(self) -> None:
        self.own = array("d")
        """Log-probability of each token itself."""
        self._num_top = 0
        self._top_ids = array("i")
        self._top_logprobs = array("d")

    def __len__(self) -> int:
        return len(self.own)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the columns take."""
        return 8 * len(self.own) + 12 * len(self._top_ids)

    def __iter__(self) -> Iterator[TokenLogprob]:
        for index, own in enumerate(self.own):
            top = slice(index * self._num_top, (index + 1) * self._num_top)
            yield TokenLogprob(own, self._top_ids[top].tolist(), self._top_logprobs[top].tolist())

    def append(self, logprob: TokenLogprob) -> None:
        """Add those of the next token, with as many others as the first one's."""
        self._num_top = len(logprob.top_token_ids)
        self.own.append(logprob.logprob)
        self._top_ids.extend(logprob.top_token_ids)
        self._top_logprobs.extend(logprob.top_logprobs)

    def extend(self, other: LogprobColumns) -> None:
        """Add those of the next tokens."""
        if other.own:
            self._num_top = other._num_top
            self.own.extend(other.own)
            self._top_ids.extend(other._top_ids)
            self._top_logprobs.extend(other._top_logprobs)

    def part(self, start: int, stop: int) -> LogprobColumns:
        """Return a copy of those of the tokens `start` to `stop`."""
        taken = LogprobColumns()
        top = slice(start * self._num_top, stop * self._num_top)
        taken._num_top = self._num_top
        taken.own = self.own[start:stop]
        taken._top_ids, taken._top_logprobs = self._top_ids[top], self._top_logprobs[top]
        return taken

    @property
    def tokens_per_piece(self) -> int:
        """Tokens that are written down at a time."""
        return max(1, ITEMS_PER_PIECE // (1 + self._num_top))


class TextBuffer:
    """A text that grows, as UTF-8."""

    def __init__(self, text: str = "") -> None:
        self._data = bytearray(text.encode())

    def append(self, text: str) -> int:
        """Add text; return its bytes."""
        size = len(self._data)
        self._data += text.encode()
        return len(self._data) - size

    @property
    def num_bytes(self) -> int:
        """Its length."""
        return len(self._data)

    def __str__(self) -> str:
        return self._data.decode()

    def parts(self) -> Iterator[str]:
        """Yield the text in parts."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        for start in range(0, len(self._data), CHARS_PER_PIECE):
            yield decoder.decode(self._data[start : start + CHARS_PER_PIECE])

    def cut(self, sizes: Iterable[int]) -> Iterator[str]:
        """Yield the text in parts of so many bytes."""
        start = 0
        for size in sizes:
            yield self._data[start : start + size].decode()
            start += size


class PieceColumns:
    """The tokens of an output."""

    def __init__(self) -> None:
        self.token_ids = array("i")
        self.logprobs = LogprobColumns()
        """One for each token, or none at all."""
        self._text = TextBuffer()
        self._sizes = array("i")

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, pieces: Iterable[Piece]) -> None:
        """Add the next ones."""
        for piece in pieces:
            self.token_ids.append(piece.token_id)
            self._sizes.append(self._text.append(piece.text))
            if piece.logprob is not None:
                self.logprobs.append(piece.logprob)

    def texts(self) -> Iterator[str]:
        """Yield the text of each token."""
        return self._text.cut(self._sizes)

    def __iter__(self) -> Iterator[Piece]:
        logprobs = iter(self.logprobs) if self.logprobs else itertools.repeat(None)
        return map(Piece, self.token_ids, self.texts(), logprobs)


# ---------------------------------------------------------------------- JSON


def json_text(parts: Iterable[str]) -> Iterator[bytes]:
    """Yield a string that is given in parts."""
    yield b'"'
    for part in parts:
        yield encode(part)[1:-1]
    yield b'"'


def text_parts(text: str) -> Iterator[str]:
    """Yield a text in parts."""
    for start in range(0, len(text), CHARS_PER_PIECE):
        yield text[start : start + CHARS_PER_PIECE]


def json_list(items: Iterable[Any], per_piece: int) -> Iterator[bytes]:
    """Yield a list, so many of its items at a time; they are taken as they are written."""
    separator = b"["
    for part in batches(items, per_piece):
        yield separator + encode(part)[1:-1]
        separator = b","
    yield b"[]" if separator == b"[" else b"]"


def json_array(values: Iterable[Iterator[bytes]]) -> Iterator[bytes]:
    """Yield a list of values that come in pieces themselves."""
    separator = b"["
    for value in values:
        yield separator
        yield from value
        separator = b","
    yield b"[]" if separator == b"[" else b"]"


def json_object(fields: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield an object; values that are iterators are pieces of JSON."""
    separator = b"{"
    for name, value in fields.items():
        yield separator + encode(name) + b":"
        if isinstance(value, Iterator):
            yield from value
        else:
            yield encode(value)
        separator = b","
    yield b"}"


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield so many items at a time."""
    rest = iter(items)
    while batch := list(itertools.islice(rest, size)):
        yield batch
