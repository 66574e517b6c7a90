"""What happened to one request, as its client saw it.

All times are seconds after the start of the run, on the client's monotonic clock.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

UNFINISHED = "unfinished"
TIMEOUT = "timeout"
CONNECT = "connect"
DISCONNECTED = "disconnected"
TORN = "torn"
ERROR_EVENT = "error_event"
MALFORMED = "malformed"
CLIENT = "client"

ERROR_KINDS = {
    "http_<status>": "an answer with an error status; http_429 is a refusal",
    CONNECT: "no connection",
    DISCONNECTED: "the connection broke before the answer's end",
    TORN: "a well-formed end of the stream without finish_reason, [DONE] or an error",
    ERROR_EVENT: "an error as an event of the stream",
    MALFORMED: "an event that is not JSON of the expected shape",
    TIMEOUT: "not finished --timeout-s after its intended arrival",
    UNFINISHED: "not finished when the run ended (--drain-s, Ctrl-C)",
    CLIENT: "the client's own: out of sockets",
}


@dataclass
class Record:
    """One arrival. It is complete when `end_s` is set; it failed when `error` is set as well."""

    index: int
    request_class: str
    intended_s: float
    """When it should arrive; latencies count from here."""
    wanted_prompt_tokens: int
    wanted_output_tokens: int
    source: int = 0
    """Index of its traffic."""
    request_id: str = ""
    priority: int | None = None
    """None: the request says nothing of it."""
    sent_s: float | None = None
    """When its task began to send."""
    end_s: float | None = None
    """When the last event that counts arrived (finish reason or text), or the failure."""
    event_times_s: array[float] = field(default_factory=lambda: array("d"))
    """Arrival of every event that has text."""
    event_chars: array[int] = field(default_factory=lambda: array("q"))
    """Characters of each of them."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    """By the server's usage; None where it reports none."""
    cached_tokens: int | None = None
    error: str | None = None
    error_detail: str = ""

    def fail(self, kind: str, detail: str, now_s: float) -> None:
        """Set the error; the first one stays."""
        if self.error is None:
            self.error = kind
            self.error_detail = detail[:300]
            self.end_s = now_s

    @property
    def is_completed(self) -> bool:
        """Whether the whole answer came."""
        return self.end_s is not None and self.error is None
