"""Records of the store, as its readers see them, and their limits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from lightserve.errors import StoreError

MAX_LINES = 50_000
MAX_LINE_BYTES = 1024 * 1024
MAX_FILE_BYTES = 200 * 1000 * 1000
MAX_ACTIVE_BATCHES = 100
"""The most batches in progress of one key."""
MAX_ACTIVE_RESPONSES = 1000
"""The most responses in the background of one key."""
RESPONSE_WINDOW_S = 24 * 3600
"""In which a response in the background has to come."""
RESPONSES = "/v1/responses"
MAX_LINKS = 1024
"""Responses in a row that each go on from the one before: twice as many messages."""
MAX_CUSTOM_ID_CHARS = 512
MAX_FILENAME_CHARS = 255
CHUNK_BYTES = 256 * 1024
"""Bytes of a chunk of a file in the store; only the last chunk has fewer."""
OBJECT_BYTES = 1024 * 1024
"""Bytes of each object of a file but the last."""
DAY_S = 86_400
DEFAULT_TTL_S = 30 * DAY_S
"""Seconds for which a file is kept, unless its owner says otherwise."""
MIN_TTL_S, MAX_TTL_S = 3600, 30 * DAY_S
MIN_WINDOW_S, MAX_WINDOW_S = 60, 30 * DAY_S

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
Purpose = Literal["batch", "batch_output"]
Status = Literal["in_progress", "completed", "expired", "cancelled"]


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is whole."""

    number: int
    id: str
    purpose: Purpose
    filename: str
    num_bytes: int
    created_s: int
    expires_s: int | None
    batch: int | None
    """Number of the batch whose results the file has; None: the file was uploaded."""
    has_errors: bool
    """Whether the file is the error file of `batch`."""
    is_in_objects: bool = False
    """Whether the content is in objects, and not in rows."""

    def body(self) -> dict[str, Any]:
        """Return OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The expected end of a batch in progress."""

    ends_s: int
    is_in_time: bool
    ratio: float
    """Time until it ends over time until its window does; above 1 it is late."""
    is_observed: bool
    """Whether it follows from the pace so far, and not from the cost model alone."""

    def body(self) -> dict[str, Any]:
        """Return `x_forecast`."""
        return {
            "ends_at": self.ends_s,
            "in_time": self.is_in_time,
            "basis": "pace" if self.is_observed else "cost_model",
        }


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch."""

    number: int
    id: str
    endpoint: str
    input_file_id: str
    window: str
    status: Status
    created_s: int
    expires_s: int
    ended_s: int | None
    metadata: str | None
    """JSON."""
    num_lines: int
    num_done: int
    num_failed: int
    output_file_id: str | None
    error_file_id: str | None
    forecast: Forecast | None = None
    """None: it is over, or nothing is known yet."""

    def body(self) -> dict[str, Any]:
        """Return OpenAI's batch object."""
        ended_s = {self.status: self.ended_s}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": None,
            "input_file_id": self.input_file_id,
            "completion_window": self.window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_s,
            "in_progress_at": self.created_s,
            "expires_at": self.expires_s,
            "finalizing_at": ended_s.get("completed"),
            "completed_at": ended_s.get("completed"),
            "failed_at": None,
            "expired_at": ended_s.get("expired"),
            "cancelling_at": ended_s.get("cancelled"),
            "cancelled_at": ended_s.get("cancelled"),
            "request_counts": {
                "total": self.num_lines,
                "completed": self.num_done,
                "failed": self.num_failed,
            },
            "metadata": None if self.metadata is None else json.loads(self.metadata),
            "x_forecast": None if self.forecast is None else self.forecast.body(),
        }


class NewLine(msgspec.Struct, frozen=True):
    """A line of an input file that has been checked."""

    custom_id: str
    position: int
    """Position of its first byte in the file."""
    num_bytes: int
    max_tokens: int | None = None
    """The most tokens of all its outputs; None: the line sets no limit."""


class LineSums(msgspec.Struct):
    """Sums over the lines of a batch."""

    num_lines: int = 0
    num_bytes: int = 0
    limit_tokens: int | None = 0
    """That their outputs may have; None: not every line says so."""

    def add(self, lines: Sequence[NewLine]) -> None:
        """Count further lines."""
        self.num_lines += len(lines)
        self.num_bytes += sum(line.num_bytes for line in lines)
        limits = [line.max_tokens for line in lines]
        if self.limit_tokens is None or None in limits:
            self.limit_tokens = None
        else:
            self.limit_tokens += sum(limit for limit in limits if limit is not None)


class NewBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that is to be made."""

    key_name: str
    endpoint: str
    input_file_id: str
    window: str
    window_s: int
    metadata: str | None
    output_ttl_s: int
    idempotency_key: str | None
    accepts_late: bool = False
    """Whether the batch is made although its window is too short."""
    max_lines: int = 0
    """That its key may have in all without a result; 0: any."""
    max_bytes: int = 0
    """That its key may have stored in all; 0: any."""
    request_digest: str
    """Digest of the whole request: an idempotency key belongs to one request."""


class NewResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response to be kept."""

    id: str
    key_name: str
    previous_id: str | None
    """Id of the response that it continues."""
    input: bytes
    """The input of this request, as a JSON list of items."""
    response: bytes
    """OpenAI's object, as JSON."""
    request: bytes = b""
    """In the background: the line that it is to be answered as."""
    max_lines: int = 0
    """See `NewBatch`."""


class LeasedLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line that one owner works on."""

    batch: int
    number: int
    batch_id: str
    custom_id: str
    endpoint: str
    key_name: str
    attempt: int
    """Failures of the line itself before this attempt."""
    losses: int
    """Times that workers have died with the line."""
    crashes: int = 0
    """Times that the process of batches has died with the line."""
    line: bytes
    """The text of the line in the input file; empty: it is still to be read."""
    num_bytes: int = 0
    object_id: str = ""
    """Id of the file in objects from which the line is to be read."""
    position: int = 0
    """There."""
    expires_s: int
    """End of the window of its batch, Unix time."""

    @property
    def id(self) -> str:
        """The id of its result."""
        return f"batch_req_{self.batch_id.removeprefix('batch_')}_{self.number}"


class LeaseLost(StoreError):
    """The owner has begun anew elsewhere: this epoch of it may say nothing more."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a leased line: a result, or another turn later."""

    batch: int
    number: int
    result: bytes | None
    """A line of the output or error file; None: it is queued again."""
    num_bytes: int = 0
    """Bytes of the line."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    is_error: bool = False
    has_failed: bool = False
    """Queued again: whether the attempt counts against the line."""
    wait_s: float = 0.0
    """Queued again: not before so many seconds."""
    is_lost: bool = False
    """Queued again: whether workers died with it. It may be why: from the second time on it waits,
    longer each time, so that no line makes a server give up on its workers."""
