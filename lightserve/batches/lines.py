"""The lines of an input file, checked before a batch is made of it, and those of its results."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Callable

import msgspec

from lightserve.batches.records import (
    MAX_CUSTOM_ID_CHARS,
    MAX_LINE_BYTES,
    MAX_LINES,
    LeasedLine,
    NewLine,
)
from lightserve.errors import InvalidRequest

BATCH_TIER = "flex"
_MAX_SHOWN_CHARS = 64


class InputLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct, frozen=True):
    """Fields of a body that a batch decides; the routes check all others when the line runs."""

    model: str
    stream: bool | None = None
    service_tier: str | msgspec.UnsetType | None = msgspec.UNSET
    slo: msgspec.Raw = msgspec.Raw(b"null")
    max_tokens: msgspec.Raw = msgspec.Raw(b"null")
    max_completion_tokens: msgspec.Raw = msgspec.Raw(b"null")
    max_output_tokens: msgspec.Raw = msgspec.Raw(b"null")
    n: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def output_limit(self) -> int | None:
        """The most tokens of all outputs; None: it does not say, or what it says is wrong."""
        given = (self.max_tokens, self.max_completion_tokens, self.max_output_tokens)
        limits = [bytes(text) for text in given if bytes(text).isdigit() and len(text) < 9]
        n = int(self.n) if bytes(self.n).isdigit() and len(self.n) < 4 else 1
        return int(limits[0]) * n if limits else None


_LINE = msgspec.json.Decoder(InputLine)
_BODY = msgspec.json.Decoder(_Body)


class LineCheck:
    """Checks the lines of an input file as it is read; blank ones and a byte order mark are passed
    over.

    It keeps a digest of each custom_id and no more: the lines are for the caller to write.
    Each method raises InvalidRequest: a line is none of a batch for `endpoint`; the first such is
    named.
    """

    def __init__(self, endpoint: str, check_model: Callable[[str], None]) -> None:
        self._endpoint, self._check_model = endpoint, check_model
        self._lines: list[NewLine] = []
        self._seen: dict[bytes, int] = {}
        """Numbers of lines, by digests of their ids."""
        self._number, self._position, self._rest = 1, 0, b""
        """Number, position in the file and bytes of the line that has begun."""

    def add(self, data: bytes) -> list[NewLine]:
        """Take in the next piece of the file; return the lines that end in it."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            self._add(line)
            self._number += 1
            self._position += len(line) + 1
        if len(self._rest) > MAX_LINE_BYTES:
            self._add(self._rest)
        return self._taken()

    def finish(self) -> list[NewLine]:
        """Return the last line, if it has no end: the file is over."""
        if self._rest:
            self._add(self._rest)
        if not self._seen:
            raise InvalidRequest(
                "the input file must have at least one line, got 0", param="input_file_id"
            )
        return self._taken()

    def _taken(self) -> list[NewLine]:
        lines, self._lines = self._lines, []
        return lines

    def _add(self, line: bytes) -> None:
        number = self._number
        start = len(codecs.BOM_UTF8) if number == 1 and line.startswith(codecs.BOM_UTF8) else 0
        line = line[start:]
        if len(line) > MAX_LINE_BYTES:
            raise _refusal(
                number,
                f"a line must have at most {MAX_LINE_BYTES} bytes, got {len(line)} or more",
                code="line_too_large",
            )
        if number > MAX_LINES:
            raise _refusal(number, f"a batch must have at most {MAX_LINES} lines")
        if not line.strip():
            return
        custom_id, max_tokens = _check(number, line, self._endpoint, self._check_model)
        digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
        if digest in self._seen:
            raise _refusal(
                number,
                f"custom_id must be unique, got {_show(custom_id)} as in line {self._seen[digest]}",
                code="duplicate_custom_id",
            )
        self._seen[digest] = number
        self._lines.append(NewLine(custom_id, self._position + start, len(line), max_tokens))


def body_of(line: bytes) -> bytes:
    """Return the request in a line that has been checked, as one of best effort."""
    body = bytes(_LINE.decode(line).body).strip()
    tier = _BODY.decode(body).service_tier
    if tier is msgspec.UNSET:
        return b'{"service_tier":"%s",' % BATCH_TIER.encode() + body[1:]
    if tier is None:  # null is the same as absent
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return msgspec.json.encode({**fields, "service_tier": BATCH_TIER})
    return body


def result_line(line: LeasedLine, *, status: int, request_id: str, body: bytes) -> bytes:
    """Return a line of an output or error file; `body` is JSON."""
    head = json.dumps({"id": line.id, "custom_id": line.custom_id})
    response = json.dumps({"status_code": status, "request_id": request_id})
    return (
        head[:-1].encode()
        + b', "response": '
        + response[:-1].encode()
        + b', "body": '
        + body
        + b'}, "error": null}'
    )


def _check(
    number: int, line: bytes, endpoint: str, check_model: Callable[[str], None]
) -> tuple[str, int | None]:
    """Return the custom_id of a line, and its limit of output tokens. Raises InvalidRequest."""
    try:
        line.decode("utf-8")
        given = _LINE.decode(line)
        body = _BODY.decode(given.body)
    except UnicodeDecodeError:
        raise _refusal(number, "it is not valid UTF-8", code="invalid_json") from None
    except msgspec.ValidationError as error:
        raise _refusal(number, _in_words(error)) from None
    except (msgspec.DecodeError, RecursionError):
        raise _refusal(number, "it is not valid JSON", code="invalid_json") from None
    if not 1 <= len(given.custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise _refusal(
            number,
            f"custom_id must have 1 to {MAX_CUSTOM_ID_CHARS} characters,"
            f" got {len(given.custom_id)}",
        )
    # A client's own id may have any character but the one that PostgreSQL's texts cannot hold.
    if "\0" in given.custom_id:
        raise _refusal(
            number, f"custom_id must not have the character U+0000, got {_show(given.custom_id)}"
        )
    if given.method != "POST":
        raise _refusal(number, f'method must be "POST", got {_show(given.method)}')
    if given.url != endpoint:
        raise _refusal(
            number, f"url must be the batch's endpoint {endpoint}, got {_show(given.url)}"
        )
    try:
        check_model(body.model)
    except InvalidRequest as refusal:
        raise _refusal(number, f"body.{refusal.message}", code=refusal.code) from None
    if body.stream:
        raise _refusal(number, "body.stream must be false, got true")
    if body.service_tier not in (None, BATCH_TIER, msgspec.UNSET):
        raise _refusal(
            number, f'body.service_tier must be "{BATCH_TIER}", got {_show(body.service_tier)}'
        )
    if bytes(body.slo) != b"null":
        raise _refusal(number, "body.slo is not supported: the completion_window is the target")
    return given.custom_id, body.output_limit


def _refusal(number: int, complaint: str, *, code: str = "invalid_line") -> InvalidRequest:
    return InvalidRequest(
        f"line {number} of the input file: {complaint}", param="input_file_id", code=code
    )


def _in_words(error: msgspec.ValidationError) -> str:
    """Return what a decoder says of a line, without the names of Python's types."""
    text, _, place = str(error).partition(" - at `$")
    field = place.rstrip("`").lstrip(".")
    return f"{field}: {text}" if field else text


def _show(text: str) -> str:
    return json.dumps(text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…")
