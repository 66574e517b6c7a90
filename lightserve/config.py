"""The server's configuration: one declaration gives field, flag, help text, default and limits.

`ServeConfig` is frozen, validated once when built, and never edited after start. Every process
gets the same one; its hash is part of every hello. `lightserve.cli` turns the fields into flags.
"""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
from dataclasses import dataclass

import msgspec

from lightserve.bundled import BUNDLED_MODEL_DIR, BUNDLED_MODEL_NAME
from lightserve.config_fields import check_limits, flag_name, option, parse_memory
from lightserve.errors import ConfigError

ADMISSION_OF_OPTION = {
    "overcommit": "conservative",
    "watermark": "aggressive",
    "reserve": "past-future",
    "samples": "past-future",
    "rt_memory_risk": "risk",
    "be_memory_risk": "risk",
}
"""Options that belong to one admission rule."""

METRICS_HOST = "127.0.0.1"
"""Where metrics are served unless told otherwise."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Everything `lightserve serve` can be told. Units are in the names."""

    model: str = option(
        str(BUNDLED_MODEL_DIR),
        "Directory with a Hugging Face model, or a hub id. Default: the bundled small model.",
    )
    served_model_name: str = option(
        "",
        "Names clients use for the model, separated by commas; the first one is its own."
        " Default: the last part of --model.",
    )
    generation_config: str = option(
        "auto",
        "Sampling where a request says nothing: what the model's generation_config.json"
        " recommends (auto), or temperature 1 and no truncation (none).",
        choices=("auto", "none"),
    )
    sse_keepalive_s: float = option(
        15.0, "A stream that has had nothing to say for this time sends a comment.", low=0.05
    )
    max_completions: int = option(
        128, "Most completions of one request, prompts times n.", low=1, high=4096
    )
    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.", low=0, high=65535)
    http_workers: int = option(1, "Number of frontend processes.", low=1, high=64)
    api_key_file: str = option(
        "",
        "File of API keys, a line each: NAME, then a key or sha256:DIGEST, then perhaps admin."
        " SIGHUP reads it again.",
    )
    insecure_no_auth: bool = option(
        False, "Serve without API keys even on an address that other machines reach."
    )
    allowed_hosts: str = option(
        "",
        "Names, separated by commas, that the Host header may have besides loopback ones while"
        " there are no API keys.",
    )
    ssl_certfile: str = option("", "PEM file of a certificate chain: serves https.")
    ssl_keyfile: str = option(
        "", "PEM file of its key. Default: the key is in --ssl-certfile as well."
    )
    enable_docs: bool = option(False, "Show the API's description as a page at /docs.")
    max_body_bytes: int = option(4_194_304, "Largest body of a request.", low=1024)
    max_json_depth: int = option(
        64, "Most objects and lists inside each other in a body.", low=4, high=256
    )
    max_header_bytes: int = option(
        65536, "Largest head of a request: its line and headers.", low=1024
    )
    max_headers: int = option(100, "Most headers of a request.", low=8)
    header_timeout_s: float = option(
        10.0, "Time for the head of a request to arrive; connections that miss it end.", low=0.1
    )
    body_timeout_s: float = option(
        60.0, "Time for a body to arrive; slower ones need --min-body-bytes-per-s.", low=0.1
    )
    min_body_bytes_per_s: int = option(
        1024, "Least average rate of bodies that take longer than --body-timeout-s.", low=1
    )
    max_connections: int = option(
        8192, "Open connections per frontend; a new one then ends the longest idle one.", low=1
    )
    max_connections_per_ip: int = option(
        4096, "Open connections of one client address per frontend; more are refused.", low=1
    )
    metrics_host: str = option(METRICS_HOST, "Address on which metrics are served without a key.")
    metrics_port: int = option(
        8001, "Port of GET /metrics; 0 takes a free one, -1 opens none.", low=-1, high=65535
    )
    ttft_slo_ms: float = option(
        0.0, "Target of real-time requests: time to the first token; 0 sets none.", low=0.0
    )
    tpot_slo_ms: float = option(
        0.0, "Target of real-time requests: mean time per output token; 0 sets none.", low=0.0
    )
    mtpot_slo_ms: float = option(
        0.0,
        "Target of real-time requests: largest gap between tokens; 0 takes four times"
        " --tpot-slo-ms.",
        low=0.0,
    )
    min_ttft_slo_ms: float = option(
        0.0, "Least target of the time to the first token that a request may ask for.", low=0.0
    )
    min_tpot_slo_ms: float = option(
        0.0, "Least target of times per token, mean or largest, that it may ask for.", low=0.0
    )
    tp: int = option(1, "Tensor-parallel degree: one worker process per rank.", low=1, high=64)
    dtype: str = option(
        "auto",
        "Type of weights and KV; auto takes the model's own.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    max_model_len: int = option(
        0, "Longest sequence, prompt and output, in tokens; 0 takes the model's own.", low=0
    )
    max_num_seqs: int = option(256, "Most sequences that run at once.", low=1, high=65536)
    max_num_batched_tokens: int = option(
        512, "Most new tokens in one step: the budget that prefill chunks fill.", low=1
    )
    max_be_seqs: int = option(
        0, "Most best-effort sequences that run at once; 0 sets no limit of their own.", low=0
    )
    policy: str = option(
        "chunked",
        "Who advances in a step: chunked (decodes, then chunks of prompts in order of arrival),"
        " fcfs (whole prompts, else decodes), mlfq (those who got least), priority (real-time"
        " before best-effort), round-robin (the classes in turn), unified (real-time tokens by"
        " their deadlines, best-effort ones in the time that is left).",
        choices=("chunked", "fcfs", "mlfq", "priority", "round-robin", "unified"),
    )
    admission: str = option(
        "risk",
        "Who may start, by memory.",
        choices=("conservative", "aggressive", "ema", "past-future", "risk"),
    )
    overcommit: float = option(
        1.0, "conservative: how many times the KV pool may be promised.", low=1.0, high=16.0
    )
    watermark: float = option(
        0.95, "aggressive: share of the KV pool that newcomers may fill.", low=0.01, high=1.0
    )
    reserve: float = option(
        0.05, "past-future: share of the KV pool kept free of forecasts.", low=0.0, high=0.9
    )
    samples: int = option(5, "past-future: most futures drawn for a small batch.", low=1, high=1024)
    rt_memory_risk: float = option(
        0.05, "risk: accepted chance of running out by a real-time request.", low=0.0, high=1.0
    )
    be_memory_risk: float = option(
        0.2, "risk: accepted chance of running out by a best-effort request.", low=0.0, high=1.0
    )
    rt_max_waiting_requests: int = option(
        4096, "Real-time requests that may wait in the router; more get a 429.", low=1
    )
    rt_max_waiting_tokens: int = option(
        4_194_304, "Prompt tokens of waiting real-time requests; more get a 429.", low=1
    )
    be_max_waiting_requests: int = option(
        65536, "Best-effort requests that may wait in the router; more get a 429.", low=1
    )
    be_max_waiting_tokens: int = option(
        67_108_864, "Prompt tokens of waiting best-effort requests; more get a 429.", low=1
    )
    cache_policy: str = option(
        "task-aware",
        "Which cached prefixes go first when KV memory is needed: task-aware (what fewest waiting"
        " requests want), lru, or off (nothing is cached).",
        choices=("task-aware", "lru", "off"),
    )
    rt_cache_min_tokens: int = option(
        0, "Cached tokens of real-time requests that best-effort ones may not take.", low=0
    )
    preemption: str = option(
        "checkpoint",
        "What happens to the KV of a request that is paused for want of memory: checkpoint (only"
        " what is overwritten goes to the host), swap (all of it does), recompute (it is dropped).",
        choices=("checkpoint", "swap", "recompute"),
    )
    block_owner: str = option(
        "two-ended",
        "two-ended: blocks of KV slots are filled by real-time requests from the left and by"
        " best-effort ones from the right; exclusive: a block belongs to one request.",
        choices=("two-ended", "exclusive"),
    )
    block_size: int = option(
        16, "KV slots per block of the allocator: 1, 2, 4, 8 or 16.", low=1, high=16
    )
    clean_ahead_tokens: int = option(
        0,
        "Tokens of likely victims that are copied to the host before they are paused; -1: 2 % of"
        " the KV pool, 0: none.",
        low=-1,
    )
    burst_headroom_s: float = option(
        0.0,
        "KV memory that best-effort requests leave free: what real-time ones bring within this"
        " time, in all but the worst cases; 0 leaves none.",
        low=0.0,
        high=3600.0,
    )
    host_kv_memory: str = option(
        "auto",
        "Host memory per rank for the KV of paused requests, such as 512MiB; auto is half of the"
        " KV pool's size, or of what the KV pool leaves free.",
    )
    kv_memory: str = option(
        "auto",
        "Memory of the KV pool per rank, such as 512MiB or 4GiB; auto on a CPU is"
        " min(4GiB, half of what is free) shared by the ranks.",
    )
    max_kv_tokens: int = option(
        0, "Upper limit of the KV pool in tokens; 0 sets none beyond --kv-memory.", low=0
    )
    attention_backend: str = option(
        "auto", "Kernels of the workers.", choices=("auto", "torch", "triton", "reference")
    )
    batch_invariant: bool = option(
        False,
        "Make each request's tokens independent, bit for bit, of what runs beside it"
        " (float32 only; slower).",
    )
    num_threads: int = option(
        0, "CPU threads per worker; 0 divides the cores among the ranks.", low=0
    )
    profile: str = option(
        "auto",
        "Step times that the router starts from: auto (those cached for this model, type, device,"
        " threads and TP, else measured in the first seconds and cached), off (learnt while"
        " serving), or a file that lightserve profile wrote.",
    )
    chat_template: str = option(
        "", "File with a Jinja chat template to use instead of the model's own."
    )
    tool_call_parser: str = option(
        "none",
        "How the model writes tool calls: <tool_call> tags (hermes, Qwen), JSON (llama3_json).",
        choices=("none", "hermes", "llama3_json"),
    )
    reasoning_parser: str = option(
        "none",
        "What the model writes between <think> tags becomes reasoning_content (think).",
        choices=("none", "think"),
    )
    start_timeout_s: float = option(
        600.0, "A child that is not ready after this time is a failed start.", low=1.0
    )
    step_timeout_s: float = option(
        60.0,
        "Workers that finish no step for this time while they have work are replaced.",
        low=0.5,
    )
    shutdown_timeout_s: float = option(
        30.0, "After SIGTERM, requests in flight may go on this long.", low=0.0
    )
    max_restarts: int = option(
        5, "Restarts of children within --restart-window-s before the server gives up.", low=0
    )
    restart_window_s: float = option(60.0, "See --max-restarts.", low=1.0)
    run_dir: str = option(
        "", "Directory under which the private socket directory is made; default: the system's."
    )
    log_level: str = option(
        "info", "Least severe log records to print.", choices=("debug", "info", "warning", "error")
    )
    log_format: str = option(
        "text", "How log records are printed; json is an object per line.", choices=("text", "json")
    )

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            check_limits(spec, getattr(self, spec.name))
        self._refuse_idle_options()
        if self.batch_invariant and self.dtype not in ("auto", "float32"):
            raise ConfigError(
                f"--batch-invariant needs --dtype float32 (or auto), got {self.dtype!r}"
            )
        if self.batch_invariant and self.attention_backend in ("reference", "triton"):
            raise ConfigError(
                "--batch-invariant needs --attention-backend torch or auto,"
                f" got {self.attention_backend!r}"
            )
        if self.max_model_len == 1:
            raise ConfigError(
                "--max-model-len must be 0 or at least 2 (a prompt and an output token), got 1"
            )
        if self.kv_memory != "auto" and parse_memory(self.kv_memory, "--kv-memory") == 0:
            raise ConfigError(f"--kv-memory must be more than nothing, got {self.kv_memory!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens must be at least --max-num-seqs ({self.max_num_seqs}),"
                f" got {self.max_num_batched_tokens}"
            )
        self._check_memory()
        self._check_access()

    def _check_memory(self) -> None:
        """Refuse sizes and combinations that the KV book-keeping does not have."""
        if self.host_kv_memory != "auto":
            parse_memory(self.host_kv_memory, "--host-kv-memory")
        if self.host_kv_memory != "auto" and self.preemption == "recompute":
            raise ConfigError("--host-kv-memory needs --preemption checkpoint or swap")
        if self.rt_cache_min_tokens > 0 and self.cache_policy == "off":
            raise ConfigError("--rt-cache-min-tokens needs --cache-policy task-aware or lru")
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"--block-size must be 1, 2, 4, 8 or 16, got {self.block_size}")
        if self.block_owner == "exclusive" and self.preemption == "checkpoint":
            raise ConfigError(
                "--block-owner exclusive needs --preemption swap or recompute: parts of a block"
                " cannot be taken"
            )
        if self.block_owner == "exclusive" and self.cache_policy != "off":
            raise ConfigError("--block-owner exclusive needs --cache-policy off")
        if self.burst_headroom_s > 0 and self.policy not in ("priority", "unified"):
            raise ConfigError(
                f"--burst-headroom-s needs --policy priority or unified, got {self.policy!r}:"
                " others know no classes"
            )
        if self.preemption != "checkpoint" and self.clean_ahead_tokens != 0:
            raise ConfigError("--clean-ahead-tokens needs --preemption checkpoint")

    def _check_access(self) -> None:
        """Refuse an open door, and options that would have no effect."""
        if self.api_key_file and self.insecure_no_auth:
            raise ConfigError("--insecure-no-auth contradicts --api-key-file")
        if not (self.is_loopback or self.api_key_file or self.insecure_no_auth):
            raise ConfigError(
                f"--host {self.host!r} can be reached from other machines: give --api-key-file,"
                " or --insecure-no-auth to serve everybody"
            )
        if self.allowed_hosts and (self.api_key_file or not self.is_loopback):
            raise ConfigError("--allowed-hosts needs a loopback --host and no --api-key-file")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        if self.metrics_port == -1 and self.metrics_host != METRICS_HOST:
            raise ConfigError(f"--metrics-host {self.metrics_host!r} needs --metrics-port, not -1")
        if 0 < self.mtpot_slo_ms < self.tpot_slo_ms:
            raise ConfigError(
                f"--mtpot-slo-ms must be at least --tpot-slo-ms ({self.tpot_slo_ms:g}),"
                f" got {self.mtpot_slo_ms:g}"
            )

    def _refuse_idle_options(self) -> None:
        """An option of another admission rule would be accepted and ignored."""
        for spec in dataclasses.fields(self):
            rule = ADMISSION_OF_OPTION.get(spec.name, self.admission)
            if rule != self.admission and getattr(self, spec.name) != spec.default:
                raise ConfigError(
                    f"{flag_name(spec.name)} needs --admission {rule}, got {self.admission!r}"
                )

    @property
    def is_loopback(self) -> bool:
        """Whether `host` can be reached from this machine only."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names that clients may use, the model's own first."""
        names = (name.strip() for name in self.served_model_name.split(","))
        return tuple(dict.fromkeys(name for name in names if name)) or (self.model_name,)

    @property
    def model_name(self) -> str:
        """The model's own name."""
        if self.served_model_name:
            return self.model_names[0]
        if self.model == str(BUNDLED_MODEL_DIR):
            return BUNDLED_MODEL_NAME
        return self.model.rstrip("/").rsplit("/", 1)[-1]

    @property
    def digest(self) -> str:
        """Hash over all fields, carried by every hello: all processes must run the same."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]
