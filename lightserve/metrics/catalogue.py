"""Every metric family: name, kind, help, labels, buckets; docs/metrics.md is made from this.

Names follow vLLM's after the prefix, so that dashboards port. Label values come from closed sets
(classes, codes, route templates, process names), never from what a client sends. Every series
also has the labels of `COMMON_LABELS`.
"""

from __future__ import annotations

from lightserve.metrics.recording import (
    BATCH_BUCKETS,
    CLASS,
    FAMILIES,
    GAP_BUCKETS_S,
    LATENCY_BUCKETS_S,
    REQUEST_BUCKETS_S,
    STEP_BUCKETS_S,
    STEP_ERROR_BUCKETS_S,
    STEP_HEADROOM_BUCKETS_S,
    STEP_RATIO_BUCKETS,
    TOKEN_BUCKETS,
    TURN_BUCKETS_S,
    Family,
    Origin,
)


def all_families() -> tuple[Family, ...]:
    """Return the catalogue in the order in which it is rendered."""
    return tuple(FAMILIES.values())


def family_named(name: str) -> Family | None:
    """Return a family of the catalogue, None if there is no such."""
    return FAMILIES.get(name)


# ---------------------------------------------------------------- requests, seen by frontends

TIME_TO_FIRST_TOKEN = Origin.FRONTEND.histogram(
    "time_to_first_token_seconds",
    "From a request's headers to its first token.",
    LATENCY_BUCKETS_S,
    CLASS,
)
INTER_TOKEN_LATENCY = Origin.FRONTEND.histogram(
    "inter_token_latency_seconds",
    "Gaps between a request's deliveries of tokens; tokens that come together are one delivery.",
    GAP_BUCKETS_S,
    CLASS,
)
TIME_PER_OUTPUT_TOKEN = Origin.FRONTEND.histogram(
    "time_per_output_token_seconds",
    "Mean gap of each finished request of at least two tokens: (last - first) / (tokens - 1).",
    GAP_BUCKETS_S,
    CLASS,
)
MAX_INTER_TOKEN_LATENCY = Origin.FRONTEND.histogram(
    "max_inter_token_latency_seconds",
    "Largest gap of each finished request of at least two deliveries.",
    GAP_BUCKETS_S,
    CLASS,
)
E2E_REQUEST_LATENCY = Origin.FRONTEND.histogram(
    "e2e_request_latency_seconds",
    "From a finished request's headers to its last token.",
    REQUEST_BUCKETS_S,
    CLASS,
)
REQUEST_PROMPT_TOKENS = Origin.FRONTEND.histogram(
    "request_prompt_tokens", "Prompt lengths of finished requests.", TOKEN_BUCKETS, CLASS
)
REQUEST_GENERATION_TOKENS = Origin.FRONTEND.histogram(
    "request_generation_tokens", "Output lengths of finished requests.", TOKEN_BUCKETS, CLASS
)
PROMPT_TOKENS = Origin.FRONTEND.counter(
    "prompt_tokens_total", "Prompt tokens of requests that got a first token.", CLASS
)
GENERATION_TOKENS = Origin.FRONTEND.counter("generation_tokens_total", "Tokens delivered.", CLASS)
REQUEST_SUCCESS = Origin.FRONTEND.counter(
    "request_success_total",
    "Requests by end: stop and length are whole answers, abort is a client that left. Each of a"
    " request's n completions, and each of its prompts, counts by itself, here and above.",
    ("request_class", "finished_reason"),
)
REQUEST_FAILURE = Origin.FRONTEND.counter(
    "request_failure_total",
    "Valid requests refused by a queue, or not answered to their end, by error code (timeout:"
    " their own). Refusals"
    " before a request's class is known (not ready, shutting down) are HTTP responses only.",
    ("request_class", "code"),
)
SLO_REQUESTS = Origin.FRONTEND.counter(
    "slo_requests_total",
    "Ended requests by whether they met a target they had (ttft, tpot, mtpot, completion, or all"
    " of those), their own or else the server's, mtpot four times tpot unless given; whatever was"
    " refused or did not finish has missed it.",
    ("request_class", "target", "outcome"),
)
GOODPUT_REQUESTS = Origin.FRONTEND.counter(
    "goodput_requests_total",
    "Requests that were answered to their end and met every target they had.",
    CLASS,
)
GOODPUT_TOKENS = Origin.FRONTEND.counter(
    "goodput_tokens_total", "Tokens of these requests' outputs.", CLASS
)
REQUESTS_IN_FLIGHT = Origin.FRONTEND.gauge(
    "http_requests_in_flight", "Generating HTTP requests between admission and their last byte."
)
BATCHES = Origin.FRONTEND.gauge("batches", "Batches that the store has, by status.", ("status",))
BATCH_LINES = Origin.FRONTEND.gauge(
    "batch_lines", "Lines of the batches in progress, by state.", ("state",)
)
BATCHES_LATE = Origin.FRONTEND.gauge(
    "batches_late", "Batches in progress that will not be done in their windows, as things stand."
)
BATCH_RESULTS_LATE = Origin.FRONTEND.counter(
    "batch_results_late_total",
    "Results of lines that were no longer leased when they came: their batch had ended.",
)
BATCH_OLDEST = Origin.FRONTEND.gauge(
    "batch_oldest_seconds", "Age of the oldest batch in progress; 0: there is none."
)
BATCH_FORECAST_RATIO = Origin.FRONTEND.gauge(
    "batch_forecast_ratio",
    "Time until a batch will be done, as forecast, over time until its window ends: the largest of"
    " those in progress. Above 1 one is late; 0: there is none, or nothing is known yet.",
)
BATCH_LEASES_LOST = Origin.FRONTEND.counter(
    "batch_leases_lost_total",
    "Lines in flight that had to be given up, as another process had taken over their leases.",
)
BATCH_STORE_TIME = Origin.FRONTEND.histogram(
    "batch_store_seconds",
    "Calls of the batch store, by frontends and the batches process; the wait for those before is"
    " counted.",
    LATENCY_BUCKETS_S,
)
HTTP_RESPONSES = Origin.FRONTEND.counter(
    "http_responses_total",
    "HTTP responses by method, route template and status; status 0 is a client that left before"
    " there was one.",
    ("method", "route", "status"),
)
IMAGES = Origin.FRONTEND.counter(
    "images_total",
    "Images of requests, by whether their files were decoded, or the image was kept from an earlier"
    " request of the same client.",
    ("source",),
)
HTTP_REJECTIONS = Origin.FRONTEND.counter(
    "http_rejections_total",
    "Requests and connections refused before any route saw them, by error code: missing keys,"
    " wrong hosts, limits.",
    ("code",),
)

# ---------------------------------------------------------------- queues and steps, by the router

REQUEST_QUEUE_TIME = Origin.ROUTER.histogram(
    "request_queue_time_seconds",
    "From a request's headers to its first place in a step.",
    LATENCY_BUCKETS_S,
    CLASS,
)
NUM_REQUESTS_RUNNING = Origin.ROUTER.gauge("num_requests_running", "Requests in the batch.", CLASS)
NUM_REQUESTS_WAITING = Origin.ROUTER.gauge(
    "num_requests_waiting", "Requests in the router's queue.", CLASS
)
NUM_TOKENS_WAITING = Origin.ROUTER.gauge(
    "num_tokens_waiting", "Tokens of waiting requests that have yet to be computed.", CLASS
)
PREDICTED_WAIT = Origin.ROUTER.gauge(
    "predicted_wait_seconds",
    "Predicted time until all that waits has begun: Retry-After, before it is bounded.",
    CLASS,
)
BURST_HEADROOM = Origin.ROUTER.gauge(
    "burst_headroom_tokens",
    "Slots of the KV pool that best-effort newcomers leave for real-time arrivals"
    " (--rt-kv-deviations).",
)
RAISED_TARGETS = Origin.ROUTER.counter(
    "raised_targets_total",
    "Targets that an idle server could not meet, and that were raised for scheduling; attainment"
    " is judged by what was asked.",
    ("request_class", "target"),
)
KV_CACHE_USAGE = Origin.ROUTER.gauge(
    "kv_cache_usage_perc", "Share of the KV pool in use; 1 is all of it."
)
KV_SLOTS_USED = Origin.ROUTER.gauge("kv_slots_used", "Slots of the KV pool in use, in tokens.")
KV_SLOTS = Origin.ROUTER.gauge("kv_slots", "Slots of the KV pool, in tokens; 0 without workers.")
KV_SLOTS_CACHED = Origin.ROUTER.gauge(
    "kv_slots_cached",
    "Slots of the KV pool that keep prefixes for requests to come; any request may take them.",
)
KV_STATE_SLOTS = Origin.ROUTER.gauge(
    "kv_state_slots",
    "Slots of the KV pool that the recurrent state of one sequence takes; 0: the model has none.",
)
KV_SLOTS_SNAPSHOTS = Origin.ROUTER.gauge(
    "kv_slots_snapshots",
    "Slots of the KV pool that hold snapshots of recurrent states; requests may take them.",
)
STATE_SNAPSHOTS = Origin.ROUTER.counter(
    "state_snapshots_total",
    "Snapshots of recurrent states that steps have made, at ends of chunks and shared prefixes.",
    CLASS,
)
PREFIX_CACHE_QUERIES = Origin.ROUTER.counter(
    "prefix_cache_queries_total", "Prompt tokens of requests that started.", CLASS
)
PREFIX_CACHE_HITS = Origin.ROUTER.counter(
    "prefix_cache_hits_total", "Those of them whose KV was found, not computed.", CLASS
)
KV_SLOTS_PEAK = Origin.ROUTER.gauge(
    "kv_slots_used_peak",
    "Most slots of the KV pool in use at once in the second before the report.",
)
KV_SLOTS_FORECAST = Origin.ROUTER.gauge(
    "kv_slots_forecast_peak",
    "Most slots that the batch was expected to need when a request was last admitted, as the"
    " admission rule bounds them, or, where all have room at their limits, the sum of these; 0 with"
    " rules that do not look ahead.",
)
NUM_PREEMPTIONS = Origin.ROUTER.counter(
    "num_preemptions_total", "Times that a request, running or paused, lost KV to another one."
)
PREEMPTED_TOKENS = Origin.ROUTER.counter(
    "preempted_tokens_total", "Tokens whose KV was given up for others, to be computed again."
)
PAUSES = Origin.ROUTER.counter(
    "pauses_total", "Times that a running request lost its row or KV.", CLASS
)
REQUESTS_SKIPPED = Origin.ROUTER.counter(
    "requests_skipped_total",
    "Times that a request was considered for a step and left out, by what kept it out: time,"
    " pace, tokens, bytes, rows, kv_now, kv_future, order, loading, encoding or blocked.",
    (*CLASS, "reason"),
)
DRAFT_TOKENS = Origin.ROUTER.counter(
    "spec_decode_num_draft_tokens_total",
    "Tokens that were guessed (--speculation) and verified, by proposer: ngram (the request's own"
    " tokens), prediction, suffix (recent answers), mtp (a layer of the model).",
    (*CLASS, "proposer"),
)
ACCEPTED_TOKENS = Origin.ROUTER.counter(
    "spec_decode_num_accepted_tokens_total",
    "Those of them that were right: as many tokens of output needed no step of their own.",
    (*CLASS, "proposer"),
)
REQUESTS_UNSEEN = Origin.ROUTER.counter(
    "requests_unseen_total",
    "Times that a waiting request was not considered for a step, by what had stopped the search.",
    (*CLASS, "reason"),
)
KV_TOKENS_TAKEN = Origin.ROUTER.counter(
    "kv_tokens_taken_total",
    "Tokens of paused requests whose slots went to others, kept on the host.",
    CLASS,
)
KV_TOKENS_SAVED = Origin.ROUTER.counter(
    "kv_tokens_saved_total",
    "Tokens of requests copied to the host because their slots were needed.",
    CLASS,
)
KV_TOKENS_LOADED = Origin.ROUTER.counter(
    "kv_tokens_loaded_total", "Tokens copied back from the host, those of prefixes included.", CLASS
)
KV_HOST_SLOTS = Origin.ROUTER.gauge(
    "kv_host_slots", "Size of the host pool in tokens, per rank, that of prefixes aside."
)
KV_HOST_SLOTS_USED = Origin.ROUTER.gauge("kv_host_slots_used", "Tokens that it holds.")
PREFIX_HOST_SLOTS = Origin.ROUTER.gauge(
    "prefix_host_slots",
    "Tokens of prefixes that the host may hold beside those of requests, per rank.",
)
PREFIX_HOST_SLOTS_USED = Origin.ROUTER.gauge("prefix_host_slots_used", "Tokens that it holds.")
PREFIX_HOST_TOKENS = Origin.ROUTER.counter(
    "prefix_host_tokens_total",
    "Tokens of prefixes that were saved to the host, loaded back, or given up there.",
    ("event",),
)
STEPS = Origin.ROUTER.counter("steps_total", "Steps finished.")
STEP_TIME = Origin.ROUTER.histogram(
    "step_time_seconds", "Execution times of steps, as rank 0 measures them.", STEP_BUCKETS_S
)
PREDICTED_STEP_TIME = Origin.ROUTER.histogram(
    "predicted_step_time_seconds",
    "Execution times that the cost model predicted for the same steps.",
    STEP_BUCKETS_S,
)
STEP_TIME_ERROR = Origin.ROUTER.histogram(
    "step_time_error_seconds", "Absolute errors of these predictions.", STEP_ERROR_BUCKETS_S
)
STEP_TIME_RATIO = Origin.ROUTER.histogram(
    "step_time_ratio",
    "Observed over predicted time of each step whose time was predicted, by kind of step: decode"
    " (one token of each sequence), draft (guesses beside them), prefill (several), mixed.",
    STEP_RATIO_BUCKETS,
    ("kind",),
)
STEP_HEADROOM = Origin.ROUTER.histogram(
    "step_headroom_seconds",
    "What each step with a time limit leaves of it, as predicted; policies without deadlines set"
    " no limits.",
    STEP_HEADROOM_BUCKETS_S,
)
COMPUTED_TOKENS = Origin.ROUTER.counter(
    "computed_tokens_total",
    "Tokens computed by steps: kind decode for those of sequences that compute one (right guesses"
    " included, wrong ones not), kind prompt for those that compute several (what is computed again"
    " included). Those of class be are what best-effort requests harvest.",
    ("request_class", "kind"),
)
STEP_BATCH_SIZE = Origin.ROUTER.histogram(
    "step_batch_size", "Sequences in each step.", BATCH_BUCKETS
)
ITERATION_TOKENS = Origin.ROUTER.histogram(
    "iteration_tokens", "Tokens computed by each step.", TOKEN_BUCKETS
)
WORKER_BUSY = Origin.ROUTER.counter("worker_busy_seconds_total", "Time that rank 0 spent in steps.")
WORKER_IDLE = Origin.ROUTER.counter(
    "worker_idle_seconds_total",
    "Time that rank 0 waited for a plan although requests could have advanced.",
)
STALLED = Origin.ROUTER.gauge(
    "stalled_seconds", "How long the running step has been running; 0 without one."
)

# ---------------------------------------------------------------- processes

IPC_REJECTED = Origin.ALL.counter(
    "ipc_rejected_total",
    "Frames from other processes of this server that did not decode or say what may not be said, by"
    " who received them.",
    ("role",),
)
REQUEST_PARAMETER_BYTES = Origin.ROUTER.gauge(
    "request_parameter_bytes",
    "Memory in the router for allowed token ids, biases and constraints of requests.",
    CLASS,
)
REQUESTS_UNFINISHED = Origin.ROUTER.gauge(
    "requests_unfinished",
    "Requests with stop strings that have all their tokens, and of which the router waits to hear"
    " where they ended.",
)
IPC_SESSIONS_LOST = Origin.FRONTEND.counter(
    "ipc_sessions_lost_total",
    "Times that a frontend began anew with a router that was silent, or whose messages were lost.",
)
LOOP_TURN_TIME = Origin.ALL.histogram(
    "loop_turn_seconds",
    "Turns of the loops of frontends and router, from one wait for events to the next, in which"
    " nothing else is served: by the CPU time of the loop's own thread (cpu), and by the time that"
    " passed (wall), in which other threads and programs may have had the processor.",
    TURN_BUCKETS_S,
    ("role", "clock"),
)
LOOP_TURN_MAX = Origin.ALL.gauge(
    "loop_turn_max_seconds",
    "The longest of these turns since the process began to serve.",
    ("process", "clock"),
)
TRACE_SPANS = Origin.FRONTEND.counter(
    "trace_spans_total",
    "Spans of requests (--otlp-endpoint): sent, failed (the collector did not take them), dropped"
    " (too many waited).",
    ("outcome",),
)
LOG_LINES_DROPPED = Origin.ALL.counter(
    "log_lines_dropped_total",
    "Log lines that could not be written, as standard error was not read or its disk was full;"
    " those of workers are told of in the log alone.",
    ("role",),
)
PROCESS_RESTARTS = Origin.SUPERVISOR.counter(
    "process_restarts_total", "Children started in place of others that ended.", ("role",)
)
PROCESS_MEMORY = Origin.SUPERVISOR.gauge(
    "process_resident_memory_bytes", "Resident memory.", ("process",)
)
PROCESS_CPU = Origin.SUPERVISOR.counter(
    "process_cpu_seconds_total",
    "CPU time, user and system, over all lives of a process.",
    ("process",),
)
START_TIME = Origin.SUPERVISOR.gauge(
    "start_time_seconds", "Unix time at which the server was started."
)
BUILD_INFO = Origin.SUPERVISOR.gauge(
    "build_info", "Always 1; the labels say what is running.", ("version", "protocol", "python")
)
DEVICE_INFO = Origin.ROUTER.gauge(
    "device_info",
    "Always 1; the labels say what the workers compute on, and with which kernels.",
    ("device", "device_name", "driver", "cuda", "triton", "kernels"),
)
CONFIG_INFO = Origin.SUPERVISOR.gauge(
    "config_info",
    "Always 1; the labels are options, and a hash over all of them.",
    (
        "config_hash",
        "dtype",
        "quantization",
        "tp",
        "http_workers",
        "policy",
        "admission",
        "max_num_seqs",
        "max_num_batched_tokens",
        "device",
        "attention_backend",
        "batch_invariant",
    ),
)
