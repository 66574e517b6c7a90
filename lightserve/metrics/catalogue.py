"""Every metric family: name, kind, help, labels, buckets; docs/metrics.md is made from this.

Names follow vLLM's after the prefix, so that dashboards port. Label values come from closed sets
(classes, codes, route templates, process names), never from what a client sends. Every series
also has the labels of `COMMON_LABELS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

ENGINE_ID = "0"
"""Which engine of a server; there is one."""

COMMON_LABELS = ("model_name", "engine")

OTHER = "other"
"""Stands for label values outside the closed set."""

MAX_SERIES_PER_FAMILY = 1024
"""Far above what the closed sets allow; more are counted under OTHER."""


class Kind(StrEnum):
    """How a family behaves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Origin(StrEnum):
    """Which process records a family."""

    FRONTEND = "frontend"
    ROUTER = "router"
    SUPERVISOR = "supervisor"
    ALL = "all"


@dataclass(frozen=True)
class Family:
    """One metric family."""

    name: str
    kind: Kind
    origin: Origin
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, inclusive, ascending; +Inf follows."""

    @property
    def num_values(self) -> int:
        """Numbers in one sample: one, or a histogram's sum and its buckets, +Inf included."""
        return len(self.buckets) + 2 if self.kind is Kind.HISTOGRAM else 1


_FAMILIES: dict[str, Family] = {}

_CLASS = ("request_class",)
_PREFIX = "lightserve_"

LATENCY_BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
GAP_BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0),
)
REQUEST_BUCKETS_S = (
    *(0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKEN_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
STEP_BUCKETS_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)
STEP_ERROR_BUCKETS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
BATCH_BUCKETS = tuple(float(2**power) for power in range(13))


def all_families() -> tuple[Family, ...]:
    """Return the catalogue in the order in which it is rendered."""
    return tuple(_FAMILIES.values())


def family_named(name: str) -> Family | None:
    """Return a family of the catalogue, None if there is no such."""
    return _FAMILIES.get(name)


def _add(family: Family) -> Family:
    assert family.name not in _FAMILIES, f"{family.name} is there already"
    _FAMILIES[family.name] = family
    return family


def _counter(name: str, origin: Origin, text: str, labels: tuple[str, ...] = ()) -> Family:
    return _add(Family(_PREFIX + name, Kind.COUNTER, origin, text, labels))


def _gauge(name: str, origin: Origin, text: str, labels: tuple[str, ...] = ()) -> Family:
    return _add(Family(_PREFIX + name, Kind.GAUGE, origin, text, labels))


def _histogram(
    name: str,
    origin: Origin,
    text: str,
    buckets: tuple[float, ...],
    labels: tuple[str, ...] = (),
) -> Family:
    return _add(Family(_PREFIX + name, Kind.HISTOGRAM, origin, text, labels, buckets))


# ---------------------------------------------------------------- requests, seen by frontends

TIME_TO_FIRST_TOKEN = _histogram(
    "time_to_first_token_seconds",
    Origin.FRONTEND,
    "From a request's headers to its first token.",
    LATENCY_BUCKETS_S,
    _CLASS,
)
INTER_TOKEN_LATENCY = _histogram(
    "inter_token_latency_seconds",
    Origin.FRONTEND,
    "Gaps between a request's deliveries of tokens; tokens that come together are one delivery.",
    GAP_BUCKETS_S,
    _CLASS,
)
TIME_PER_OUTPUT_TOKEN = _histogram(
    "time_per_output_token_seconds",
    Origin.FRONTEND,
    "Mean gap of each finished request of at least two tokens: (last - first) / (tokens - 1).",
    GAP_BUCKETS_S,
    _CLASS,
)
MAX_INTER_TOKEN_LATENCY = _histogram(
    "max_inter_token_latency_seconds",
    Origin.FRONTEND,
    "Largest gap of each finished request of at least two deliveries.",
    GAP_BUCKETS_S,
    _CLASS,
)
E2E_REQUEST_LATENCY = _histogram(
    "e2e_request_latency_seconds",
    Origin.FRONTEND,
    "From a finished request's headers to its last token.",
    REQUEST_BUCKETS_S,
    _CLASS,
)
REQUEST_PROMPT_TOKENS = _histogram(
    "request_prompt_tokens",
    Origin.FRONTEND,
    "Prompt lengths of finished requests.",
    TOKEN_BUCKETS,
    _CLASS,
)
REQUEST_GENERATION_TOKENS = _histogram(
    "request_generation_tokens",
    Origin.FRONTEND,
    "Output lengths of finished requests.",
    TOKEN_BUCKETS,
    _CLASS,
)
PROMPT_TOKENS = _counter(
    "prompt_tokens_total",
    Origin.FRONTEND,
    "Prompt tokens of requests that got a first token.",
    _CLASS,
)
GENERATION_TOKENS = _counter(
    "generation_tokens_total", Origin.FRONTEND, "Tokens delivered.", _CLASS
)
REQUEST_SUCCESS = _counter(
    "request_success_total",
    Origin.FRONTEND,
    "Requests by end: stop and length are whole answers, abort is a client that left. Each of a"
    " request's n completions, and each of its prompts, counts by itself, here and above.",
    ("request_class", "finished_reason"),
)
REQUEST_FAILURE = _counter(
    "request_failure_total",
    Origin.FRONTEND,
    "Valid requests refused by a queue, or not answered to their end, by error code. Refusals"
    " before a request's class is known (not ready, shutting down) are HTTP responses only.",
    ("request_class", "code"),
)
SLO_REQUESTS = _counter(
    "slo_requests_total",
    Origin.FRONTEND,
    "Ended requests by whether they met a target they had (ttft, tpot, mtpot, or all of those);"
    " whatever was refused or did not finish has missed it.",
    ("request_class", "target", "outcome"),
)
REQUESTS_IN_FLIGHT = _gauge(
    "http_requests_in_flight",
    Origin.FRONTEND,
    "Generating HTTP requests between admission and their last byte.",
)
HTTP_RESPONSES = _counter(
    "http_responses_total",
    Origin.FRONTEND,
    "HTTP responses by method, route template and status; status 0 is a client that left before"
    " there was one.",
    ("method", "route", "status"),
)
HTTP_REJECTIONS = _counter(
    "http_rejections_total",
    Origin.FRONTEND,
    "Requests and connections refused before any route saw them, by error code: missing keys,"
    " wrong hosts, limits.",
    ("code",),
)

# ---------------------------------------------------------------- queues and steps, by the router

REQUEST_QUEUE_TIME = _histogram(
    "request_queue_time_seconds",
    Origin.ROUTER,
    "From a request's headers to its first place in a step.",
    LATENCY_BUCKETS_S,
    _CLASS,
)
NUM_REQUESTS_RUNNING = _gauge(
    "num_requests_running", Origin.ROUTER, "Requests in the batch.", _CLASS
)
NUM_REQUESTS_WAITING = _gauge(
    "num_requests_waiting", Origin.ROUTER, "Requests in the router's queue.", _CLASS
)
NUM_TOKENS_WAITING = _gauge(
    "num_tokens_waiting",
    Origin.ROUTER,
    "Tokens of waiting requests that have yet to be computed.",
    _CLASS,
)
KV_CACHE_USAGE = _gauge(
    "kv_cache_usage_perc", Origin.ROUTER, "Share of the KV pool in use; 1 is all of it."
)
KV_SLOTS_USED = _gauge("kv_slots_used", Origin.ROUTER, "Slots of the KV pool in use, in tokens.")
KV_SLOTS = _gauge("kv_slots", Origin.ROUTER, "Slots of the KV pool, in tokens; 0 without workers.")
KV_SLOTS_CACHED = _gauge(
    "kv_slots_cached",
    Origin.ROUTER,
    "Slots of the KV pool that keep prefixes for requests to come; free for whoever needs them.",
)
PREFIX_CACHE_QUERIES = _counter(
    "prefix_cache_queries_total",
    Origin.ROUTER,
    "Prompt tokens of requests that started.",
    _CLASS,
)
PREFIX_CACHE_HITS = _counter(
    "prefix_cache_hits_total",
    Origin.ROUTER,
    "Those of them whose KV was found, not computed.",
    _CLASS,
)
KV_SLOTS_PEAK = _gauge(
    "kv_slots_used_peak",
    Origin.ROUTER,
    "Most slots of the KV pool in use at once in the second before the report.",
)
KV_SLOTS_FORECAST = _gauge(
    "kv_slots_forecast_peak",
    Origin.ROUTER,
    "Most slots that the batch was expected to need when a request was last admitted, as the"
    " admission rule bounds them; 0 with rules that do not look ahead.",
)
NUM_PREEMPTIONS = _counter(
    "num_preemptions_total",
    Origin.ROUTER,
    "Requests whose KV was freed for others, to be computed again.",
)
PREEMPTED_TOKENS = _counter(
    "preempted_tokens_total", Origin.ROUTER, "Tokens whose KV was lost to preemptions."
)
STEPS = _counter("steps_total", Origin.ROUTER, "Steps finished.")
STEP_TIME = _histogram(
    "step_time_seconds",
    Origin.ROUTER,
    "Execution times of steps, as rank 0 measures them.",
    STEP_BUCKETS_S,
)
PREDICTED_STEP_TIME = _histogram(
    "predicted_step_time_seconds",
    Origin.ROUTER,
    "Execution times that the cost model predicted for the same steps.",
    STEP_BUCKETS_S,
)
STEP_TIME_ERROR = _histogram(
    "step_time_error_seconds",
    Origin.ROUTER,
    "Absolute errors of these predictions.",
    STEP_ERROR_BUCKETS_S,
)
STEP_BATCH_SIZE = _histogram(
    "step_batch_size", Origin.ROUTER, "Sequences in each step.", BATCH_BUCKETS
)
ITERATION_TOKENS = _histogram(
    "iteration_tokens_total", Origin.ROUTER, "Tokens computed by each step.", TOKEN_BUCKETS
)
WORKER_BUSY = _counter(
    "worker_busy_seconds_total", Origin.ROUTER, "Time that rank 0 spent in steps."
)
WORKER_IDLE = _counter(
    "worker_idle_seconds_total",
    Origin.ROUTER,
    "Time that rank 0 waited for a plan although requests could have advanced.",
)
STALLED = _gauge(
    "stalled_seconds", Origin.ROUTER, "How long the running step has been running; 0 without one."
)

# ---------------------------------------------------------------- processes

IPC_REJECTED = _counter(
    "ipc_rejected_total",
    Origin.ALL,
    "Frames from other processes of this server that did not decode, by who received them.",
    ("role",),
)
PROCESS_RESTARTS = _counter(
    "process_restarts_total",
    Origin.SUPERVISOR,
    "Children started in place of others that ended.",
    ("role",),
)
PROCESS_MEMORY = _gauge(
    "process_resident_memory_bytes", Origin.SUPERVISOR, "Resident memory.", ("process",)
)
PROCESS_CPU = _counter(
    "process_cpu_seconds_total",
    Origin.SUPERVISOR,
    "CPU time, user and system, over all lives of a process.",
    ("process",),
)
START_TIME = _gauge(
    "start_time_seconds", Origin.SUPERVISOR, "Unix time at which the server was started."
)
BUILD_INFO = _gauge(
    "build_info",
    Origin.SUPERVISOR,
    "Always 1; the labels say what is running.",
    ("version", "protocol", "python"),
)
CONFIG_INFO = _gauge(
    "config_info",
    Origin.SUPERVISOR,
    "Always 1; the labels are options, and a hash over all of them.",
    (
        "config_hash",
        "dtype",
        "tp",
        "http_workers",
        "policy",
        "admission",
        "max_num_seqs",
        "max_num_batched_tokens",
        "attention_backend",
        "batch_invariant",
    ),
)
