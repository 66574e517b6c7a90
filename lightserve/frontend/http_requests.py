"""Requests as they come: h11's reading of HTTP, within limits of work."""

from __future__ import annotations

import re
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer

from lightserve.config import ServeConfig
from lightserve.errors import InvalidRequest

FREE_CHUNKS = 2048
LEAST_CHUNK_BYTES = 128
"""A body in chunks must have so many bytes for each chunk beyond the free ones: a chunk of one byte
costs the event loop as much as kilobytes in one piece."""
_BLANK_LINE = re.compile(rb"\n\r?\n")
_EMPTY_LINES = re.compile(rb"(?:\r?\n)+")
_WITH_HOST = re.compile(rb"https?://([^/?@]+)(.*)", re.IGNORECASE)


class _CountedLines(ReceiveBuffer):
    """Counts the lines of a head, or of a trailer, before h11 looks at each: 16,000 take 30 ms."""

    def __init__(self, max_headers: int) -> None:
        super().__init__()
        self._max_headers = max_headers
        self.refusal: InvalidRequest | None = None
        """The fault in the bytes, after an error."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Return the lines up to a blank one, once that is there. Raises LocalProtocolError."""
        if self._data.count(b"\n") > self._max_headers:
            end = _BLANK_LINE.search(self._data)
            # Between the lines of a whole head there is one break for each header.
            num_breaks = self._data.count(b"\n", 0, end.start() if end else len(self._data))
            num_headers = num_breaks if end else num_breaks - 1
            if num_headers > self._max_headers:
                message = (
                    f"a request must have at most {self._max_headers} headers, got {num_headers}"
                )
                self.refusal = InvalidRequest(message, code="too_many_headers", status=431)
                raise h11.LocalProtocolError(message, error_status_hint=431)
        return super().maybe_extract_lines()

    def skip_empty_lines(self) -> bool:
        """Drop empty lines before a head; return whether half of one is left."""
        if empty := _EMPTY_LINES.match(self._data):
            self._extract(empty.end())
        return self._data == b"\r"


class RequestReader(h11.Connection):
    """h11, which also takes what RFC 9112 asks of servers: empty lines before a request (section
    2.2), and targets that begin with a scheme and a host (section 3.2.2).

    Refuses what takes the event loop long: heads in many lines, and bodies in tiny chunks, which
    arrive by the ten thousand in one turn of the loop."""

    def __init__(self, limits: ServeConfig) -> None:
        super().__init__(h11.SERVER, limits.max_header_bytes)
        self._lines = self._receive_buffer = _CountedLines(limits.max_headers)
        self._chunks_refusal: InvalidRequest | None = None
        self._num_chunks = 0
        self._num_bytes = 0

    @property
    def refusal(self) -> InvalidRequest:
        """The error for a request that `next_event` refused."""
        return (
            self._lines.refusal
            or self._chunks_refusal
            or InvalidRequest("the request is not valid HTTP", code="invalid_http")
        )

    def next_event(self) -> Any:
        """Return the next event. Raises h11.RemoteProtocolError."""
        if self.their_state is h11.IDLE and self._lines.skip_empty_lines():
            return h11.NEED_DATA
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
            return _of_path(event)
        if isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > FREE_CHUNKS + self._num_bytes // LEAST_CHUNK_BYTES:
                complaint = (
                    f"a body in more than {FREE_CHUNKS} chunks must have at least"
                    f" {LEAST_CHUNK_BYTES} bytes for each further one, got {self._num_bytes} bytes"
                    f" in {self._num_chunks} chunks"
                )
                self._chunks_refusal = InvalidRequest(complaint, code="invalid_http")
                raise h11.RemoteProtocolError(complaint)
        return event


def _of_path(request: h11.Request) -> h11.Request:
    """Return a request whose target is a path; a host in the target stands for the header."""
    if (found := _WITH_HOST.fullmatch(request.target)) is None:
        return request
    host, path = found.groups()
    others = [(name, value) for name, value in request.headers if name != b"host"]
    return h11.Request(
        method=request.method,
        headers=[(b"host", host), *others],
        target=path if path.startswith(b"/") else b"/" + path,
        http_version=request.http_version,
    )
