"""The result format: one JSON document with one or more runs. `--schema` prints its JSON schema."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from lightserve.errors import LoadTestError
from lightserve.loadtest.options import ServerOptions, Targets, Traffic

FORMAT = "lightserve-bench/1"


class Spread(msgspec.Struct, frozen=True):
    """A metric over requests, or over gaps; None without any sample."""

    num: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None
    quantiles: list[float] = []
    """At 0, 0.5, 1 ... 100 %: the CDF."""


class Lengths(msgspec.Struct, frozen=True):
    """How exactly lengths were met, over completed requests whose usage is known."""

    mean_wanted: float | None
    mean: float | None
    error_p50_pct: float | None
    """Median of |actual - wanted| / wanted."""
    error_p99_pct: float | None


class ErrorCount(msgspec.Struct, frozen=True):
    """Failures of one kind."""

    count: int
    example: str


class ClassSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One class, or all together. Definitions are in statistics.py."""

    num_arrivals: int
    num_completed: int
    num_met: int
    num_failed: int
    errors: dict[str, ErrorCount]
    attainment: float | None
    attainment_by_target: dict[str, float]
    targets: Targets
    ttft_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread
    itl_per_token_ms: Spread
    mtpot_ms: Spread
    e2el_ms: Spread
    normalized_ms: Spread
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    goodput_requests_per_s: float
    goodput_tokens_per_s: float
    tokens_per_event: float | None
    tokens_are_counted_by: str
    prompt_lengths: Lengths
    output_lengths: Lengths
    cached_tokens_share: float | None
    """Cached prompt tokens / prompt tokens, where usage says."""
    makespan_s: float | None = None
    """From the first arrival to the last end; None without an arrival."""
    num_images: int = 0
    """Pictures of completed requests."""


class ClientReport(msgspec.Struct, frozen=True):
    """Whether the client itself is to be believed."""

    cpu_share: float
    """CPU seconds of this process per second; 1.0 is a whole core."""
    cpu_us_per_event: float | None
    num_events: int
    lag_ms: Spread
    """Task of an arrival started, minus intended arrival; part of every latency."""
    is_calibrated: bool


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles of the samples of a bin, in ms."""

    p50: float
    p99: float


class Timeline(msgspec.Struct, frozen=True):
    """Figures of bins of `bin_s`, from the start of the run, by class."""

    bin_s: float
    arrivals: dict[str, list[int]]
    failures: dict[str, list[int]]
    tokens: dict[str, list[float]]
    in_flight: dict[str, list[int]]
    """At the end of the bin."""
    ttft_ms: dict[str, list[Percentiles | None]]
    """TTFT of the first events in the bin; None without any."""
    itl_ms: dict[str, list[Percentiles | None]]
    """Gaps that end in the bin."""
    goodput_requests_per_s: dict[str, list[float]]
    """Requests per second that end in the bin within their targets."""


class RequestRow(msgspec.Struct, frozen=True, array_like=True):
    """One request; written with --save-requests."""

    request_class: str
    intended_s: float
    sent_s: float | None
    first_s: float | None
    end_s: float | None
    prompt_tokens: int | None
    output_tokens: int | None
    mtpot_ms: float | None
    is_met: bool
    error: str | None
    priority: int | None = None


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    label: str
    started_at: str
    server: ServerOptions
    traffic: list[Traffic]
    seed: int
    text_seed: int
    window_s: tuple[float, float]
    """Arrivals and tokens between these two are counted."""
    duration_s: float
    was_interrupted: bool
    offered_requests_per_s: float
    client: ClientReport
    classes: dict[str, ClassSummary]
    timeline: Timeline
    requests: list[RequestRow] = []


class ResultFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A result file."""

    format: str
    runs: list[Run]


def document(runs: list[Run]) -> bytes:
    """Return the text of a result file."""
    return msgspec.json.format(msgspec.json.encode(ResultFile(format=FORMAT, runs=runs))) + b"\n"


def save(path: Path, runs: list[Run]) -> None:
    """Write a result file. Raises LoadTestError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(document(runs))
    except OSError as error:
        raise LoadTestError(f"cannot write {path}: {error}") from error


def load(path: Path) -> list[Run]:
    """Read a result file. Raises LoadTestError: unreadable, or another format."""
    try:
        loaded = msgspec.json.decode(path.read_bytes(), type=ResultFile)
    except OSError as error:
        raise LoadTestError(f"cannot read {path}: {error}") from error
    except msgspec.MsgspecError as error:
        raise LoadTestError(f"{path} is not a result of this program: {error}") from error
    if loaded.format != FORMAT:
        raise LoadTestError(f"{path} has format {loaded.format!r}, not {FORMAT!r}")
    return loaded.runs


def schema() -> bytes:
    """Return the JSON schema of a result file."""
    return msgspec.json.format(msgspec.json.encode(msgspec.json.schema(ResultFile)))


# ----------------------------------------------------------------------
# What happened to one request, as its client saw it.
#
# All times are seconds after the start of the run, on the client's monotonic clock.


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
    num_images: int = 0
    """Pictures beside the wanted tokens."""
    source: int = 0
    """Index of its traffic."""
    request_id: str = ""
    priority: int | None = None
    """None: the request says nothing of it."""
    targets: Targets | None = None
    """Its own; None: those of its class."""
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
    retry_after_s: float = 0.0
    """When a server that refused it says that it is worth trying again."""

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
