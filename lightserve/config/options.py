"""Options of what clients meet: the model, addresses, keys, limits of requests and connections."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.config.fields import option, parse_memory
from lightserve.errors import ConfigError
from lightserve.http_access import is_loopback
from lightserve.types import MAX_PRIORITY

_OBJECTIVE = re.compile(
    r"(?P<name>[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?)=(?P<priority>-?\d{1,6})"
)
"""A name as Kubernetes has them, and a whole number."""
_ORIGIN = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?")

METRICS_HOST = "127.0.0.1"
"""Where metrics are served unless told otherwise."""


ANY_NAME = "*"
"""Among the names of a model: clients may use any."""


def split_names(text: str) -> tuple[str, ...]:
    """Return the names in a list that commas separate, each once."""
    names = (name.strip() for name in text.split(","))
    return tuple(dict.fromkeys(name for name in names if name))


@cache
def _objectives(text: str) -> dict[str, int]:
    """Return priorities by name; each request asks for them."""
    pairs = (_OBJECTIVE.fullmatch(part) for part in split_names(text))
    return {pair["name"]: int(pair["priority"]) for pair in pairs if pair is not None}


@dataclass(frozen=True, kw_only=True)
class FrontendOptions:
    """See the module's docstring."""

    model: str = option(
        str(BUNDLED_MODEL_DIR),
        "Directory with a Hugging Face model, or a hub id. Default: the bundled small model.",
    )
    served_model_name: str = option(
        "",
        "Names clients use for the model, separated by commas; the first one is its own. With *"
        " among them any name is accepted. Default: the last part of --model.",
    )
    model_sha256: str = option(
        "",
        "JSON file of SHA-256 digests, by name of file in the model directory: checked before the"
        " server listens. Every file of weights must be in it.",
    )
    generation_config: str = option(
        "auto",
        "Sampling where a request says nothing: what the model's generation_config.json"
        " recommends (auto), or temperature 1 and no truncation (none).",
        choices=("auto", "none"),
    )
    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.", low=0, high=65535)
    http_workers: int = option(
        0,
        "Number of frontend processes, or auto: one for each four cores, at most 8.",
        low=0,
        high=64,
        zero_word="auto",
    )
    api_key_file: str = option(
        "",
        "File of API keys, a line each: NAME, then a key or sha256:DIGEST, then"
        " perhaps admin, gateway, rpm=N, tpm=N, batch_lines=N."
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
    allowed_origins: str = option(
        "",
        "Origins, separated by commas, whose web pages may use the server (CORS), such as"
        " https://chat.example; * is any, which needs API keys.",
    )
    inference_objectives: str = option(
        "",
        "Priorities of the InferenceObjectives of a gateway, separated by commas, such as"
        " chat=10,nightly=-1: a request names one in the header x-gateway-inference-objective."
        " Below 0 it is best-effort.",
    )
    ssl_certfile: str = option("", "PEM file of a certificate chain: serves https.")
    ssl_keyfile: str = option(
        "", "PEM file of its key. Default: the key is in --ssl-certfile as well."
    )
    enable_docs: bool = option(False, "Show the API's description as a page at /docs.")
    max_body_bytes: int = option(4_194_304, "Largest body of a request.", low=1024)
    max_held_body_bytes: int = option(
        268_435_456,
        "Memory of the bodies of all requests that one frontend has in flight; a client may have"
        " half of what others leave of it; more get a 429.",
        low=1,
    )
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
    body_timeout_s: float = option(120.0, "Time for a body to arrive.", low=0.1)
    min_body_bytes_per_s: int = option(
        1024, "Least rate of a body, over each 10 seconds in which it arrives.", low=1
    )
    max_pending_body_bytes: int = option(
        67_108_864,
        "All bodies together that are arriving at a frontend; beyond it the client with the most"
        " in sum loses the one that has not come on for longest.",
        low=1024,
    )
    max_kept_answer_bytes: int = option(
        268_435_456,
        "Memory of a frontend for answers that are not streamed, until they are read, and for what"
        " the readers of streams are behind; beyond it the client with the most in sum loses the"
        " one that has not come on for longest.",
        low=1_048_576,
    )
    max_connections: int = option(
        8192,
        "Open connections per frontend; a new one then ends an idle one. Requests in progress of"
        " one API key have half of what others leave of them.",
        low=1,
    )
    max_connections_per_ip: int = option(
        4096,
        "Open connections of one client address per frontend, shared among keys in the same way.",
        low=1,
    )
    sse_keepalive_s: float = option(
        15.0, "A stream that has had nothing to say for this time sends a comment.", low=0.05
    )
    be_stream_interval_ms: float = option(
        100.0,
        "Best-effort streams say what has come of them at most this often, as each writing costs"
        " as much as a token; first tokens, ends, and requests with stop strings do not wait."
        " 0: with each step.",
        low=0,
        high=10_000,
    )
    max_completions: int = option(
        128, "Most completions of one request, prompts times n.", low=1, high=4096
    )
    max_answer_items: int = option(
        2_000_000,
        "Most tokens and log-probabilities of one answer: prompts times n times max_tokens times"
        " (1 + log-probabilities), and what it says of the prompts.",
        low=1,
    )
    metrics_host: str = option(
        METRICS_HOST,
        "Address on which metrics are served; one that other machines reach wants the key of an"
        " operator.",
    )
    metrics_port: int = option(
        8001, "Port of GET /metrics; 0 takes a free one, -1 opens none.", low=-1, high=65535
    )

    @property
    def is_loopback(self) -> bool:
        """Whether `host` can be reached from this machine only."""
        return is_loopback(self.host)

    @property
    def metrics_need_key(self) -> bool:
        """Whether the metrics port wants an operator's key: where other machines reach it."""
        return bool(self.api_key_file) and not is_loopback(self.metrics_host)

    @property
    def origins(self) -> frozenset[str]:
        """What `allowed_origins` names."""
        return frozenset(split_names(self.allowed_origins))

    @property
    def objectives(self) -> dict[str, int]:
        """What `inference_objectives` says: priorities by name."""
        return _objectives(self.inference_objectives)

    def check_objectives(self) -> None:
        """Refuse what are no objectives, and two of one name."""
        names = set()
        for text in split_names(self.inference_objectives):
            pair = _OBJECTIVE.fullmatch(text)
            if pair is None or abs(int(pair["priority"])) > MAX_PRIORITY:
                raise ConfigError(
                    "--inference-objectives must have names and priorities from"
                    f" {-MAX_PRIORITY} to {MAX_PRIORITY}, such as chat=10,nightly=-1, got {text!r}"
                )
            if pair["name"] in names:
                raise ConfigError(f"--inference-objectives must have {pair['name']!r} once")
            names.add(pair["name"])

    def check_access(self) -> None:
        """Refuse an open door, and options that would have no effect."""
        for flag, names in (
            ("--served-model-name", self.served_model_name),
            ("--allowed-hosts", self.allowed_hosts),
            ("--allowed-origins", self.allowed_origins),
            ("--inference-objectives", self.inference_objectives),
        ):
            if names and not split_names(names):
                raise ConfigError(f"{flag} must have at least one name, got {names!r}")
        if self.api_key_file and self.insecure_no_auth:
            raise ConfigError("--insecure-no-auth contradicts --api-key-file")
        if not (self.is_loopback or self.api_key_file or self.insecure_no_auth):
            raise ConfigError(
                f"--host {self.host!r} can be reached from other machines: give --api-key-file,"
                " or --insecure-no-auth to serve every client"
            )
        if self.metrics_port >= 0 and not (
            is_loopback(self.metrics_host) or self.api_key_file or self.insecure_no_auth
        ):
            raise ConfigError(
                f"--metrics-host {self.metrics_host!r} can be reached from other machines: give"
                " --api-key-file, or --insecure-no-auth to serve every client"
            )
        if self.allowed_hosts and (self.api_key_file or not self.is_loopback):
            raise ConfigError("--allowed-hosts needs a loopback --host and no --api-key-file")
        for origin in sorted(self.origins - {"*"}):
            if _ORIGIN.fullmatch(origin) is None:
                raise ConfigError(
                    "--allowed-origins must have origins such as https://chat.example or"
                    f" http://localhost:3000, in small letters and without a path, got {origin!r}"
                )
        if "*" in self.origins and not self.api_key_file:
            raise ConfigError("--allowed-origins '*' needs --api-key-file")
        if self.max_pending_body_bytes < self.max_body_bytes:
            raise ConfigError(
                f"--max-pending-body-bytes must be at least --max-body-bytes,"
                f" {self.max_body_bytes}, got {self.max_pending_body_bytes}"
            )
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        if self.metrics_port == -1 and self.metrics_host != METRICS_HOST:
            raise ConfigError(f"--metrics-host {self.metrics_host!r} needs --metrics-port, not -1")


# Options of the CUDA graphs that steps run as.


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """See the module's docstring."""

    cuda_graphs: str = option(
        "auto",
        "Whether steps run as CUDA graphs, captured at the start: auto (on a GPU"
        " with the kernels triton) or off (slower steps, less memory, a shorter start).",
        choices=("auto", "off"),
    )
    cuda_graph_max_seqs: int = option(
        0,
        "Most sequences of a step that runs as a CUDA graph; 0 takes --max-num-seqs, at most 512.",
        low=0,
    )
    cuda_graph_max_tokens: int = option(
        -1,
        "Most new tokens of a step with prompts that runs as a CUDA graph; 0: such steps are"
        " launched kernel by kernel; -1: up to where a graph gains time, at most 2,048.",
        low=-1,
    )

    def check_graphs(self, *, device: str, attention_backend: str, max_num_seqs: int) -> None:
        """Refuse options that would have no effect; arguments are other fields' values."""
        if self.cuda_graph_max_seqs and self.cuda_graphs == "off":
            raise ConfigError("--cuda-graph-max-seqs needs --cuda-graphs auto")
        if self.cuda_graph_max_tokens >= 0 and self.cuda_graphs == "off":
            raise ConfigError("--cuda-graph-max-tokens needs --cuda-graphs auto")
        if self.cuda_graph_max_seqs > max_num_seqs:
            raise ConfigError(
                f"--cuda-graph-max-seqs must be at most --max-num-seqs ({max_num_seqs}),"
                f" got {self.cuda_graph_max_seqs}"
            )
        for flag in self.given_graph_flags:
            if device == "cpu":
                raise ConfigError(f"{flag} needs a GPU, got --device cpu")
            if attention_backend in ("torch", "reference"):
                raise ConfigError(
                    f"{flag} needs --attention-backend triton, got {attention_backend!r}"
                )

    @property
    def given_graph_flags(self) -> list[str]:
        """Flags that are not at their defaults, which only CUDA graphs have a use for."""
        flags = []
        if self.cuda_graphs != "auto":
            flags.append("--cuda-graphs")
        if self.cuda_graph_max_seqs:
            flags.append("--cuda-graph-max-seqs")
        if self.cuda_graph_max_tokens >= 0:
            flags.append("--cuda-graph-max-tokens")
        return flags


# Options of the KV pool, of what it keeps, and of the host's share.

DEFAULT_GPU_MEMORY_UTILIZATION = 0.9
DEFAULT_EVENT_BLOCK = 16
_ZMQ_ADDRESS = re.compile(
    r"ipc://[^\x00-\x20]{1,100}|tcp://(?P<host>\*|[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):[0-9*]{1,5}"
)


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """See the module's docstring."""

    cache_policy: str = option(
        "task-aware",
        "Which cached prefixes go first when KV memory is needed: task-aware (what fewest waiting"
        " requests want), lru, or off (nothing is cached).",
        choices=("task-aware", "lru", "off"),
    )
    rt_cache_min_tokens: int = option(
        0, "Cached tokens of real-time requests that best-effort ones may not take.", low=0
    )
    max_retained_tokens: int = option(
        -1,
        "Prompt tokens of each API key that the prefix cache keeps longer where requests"
        " ask for it (prompt_cache_retention, cache_control); -1: a tenth of the KV pool, 0: none,"
        " and such requests are refused.",
        low=-1,
    )
    kv_events: str = option(
        "",
        "ZeroMQ address, such as tcp://127.0.0.1:5557 or ipc:///run/kv-events, at which the router"
        " tells of what is cached and evicted, in vLLM's format. Token ids of prompts can be read"
        " there.",
    )
    kv_events_block_size: int = option(
        DEFAULT_EVENT_BLOCK, "Tokens of the blocks of --kv-events.", low=1, high=1024
    )
    kv_events_keys: str = option(
        "",
        "Directory of ZeroMQ certificates (CURVE) for --kv-events: server.key_secret, and in"
        " clients/ the public keys of those that may subscribe.",
    )
    kv_events_insecure: bool = option(
        False, "Let --kv-events listen without keys where other machines reach it."
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
    host_kv_memory: str = option(
        "auto",
        "Host memory per rank for the KV of paused requests, such as 512MiB; auto is half of the"
        " KV pool's size, or of what the KV pool leaves free, and beside a GPU, for which it is"
        " locked at the start, at most 16GiB.",
    )
    gpu_memory_utilization: float = option(
        DEFAULT_GPU_MEMORY_UTILIZATION,
        "Share of a GPU's memory that may be taken in all; what weights, the largest step, CUDA"
        " graphs and other processes leave of it is the KV pool.",
        low=0.05,
        high=1.0,
    )
    kv_memory: str = option(
        "auto",
        "Memory of the KV pool per rank, such as 512MiB or 4GiB; auto on a CPU is"
        " min(4GiB, half of what is free) shared by the ranks, on a GPU what"
        " --gpu-memory-utilization allows.",
    )
    max_kv_tokens: int = option(
        0, "Upper limit of the KV pool in tokens; 0 sets none beyond --kv-memory.", low=0
    )

    @property
    def retains_prefixes(self) -> bool:
        """Whether requests may ask for prefixes to be kept longer."""
        return self.cache_policy != "off" and self.max_retained_tokens != 0

    @property
    def has_gpu_memory_utilization(self) -> bool:
        """Whether that option is not at its default."""
        return self.gpu_memory_utilization != DEFAULT_GPU_MEMORY_UTILIZATION

    def check_gpu_memory(self, *, device: str) -> None:
        """Refuse --gpu-memory-utilization where it has no effect; `device` is another field."""
        if not self.has_gpu_memory_utilization:
            return
        if device == "cpu":
            raise ConfigError("--gpu-memory-utilization needs a GPU, got --device cpu")
        if self.kv_memory != "auto":
            raise ConfigError(
                f"--gpu-memory-utilization needs --kv-memory auto, got {self.kv_memory!r}"
            )

    def check_memory(self) -> None:
        """Refuse sizes and combinations that the KV book-keeping does not have."""
        if self.kv_memory != "auto" and parse_memory(self.kv_memory, "--kv-memory") == 0:
            raise ConfigError(f"--kv-memory must be more than nothing, got {self.kv_memory!r}")
        if self.host_kv_memory != "auto":
            parse_memory(self.host_kv_memory, "--host-kv-memory")
        if self.host_kv_memory != "auto" and self.preemption == "recompute":
            raise ConfigError("--host-kv-memory needs --preemption checkpoint or swap")
        if self.rt_cache_min_tokens > 0 and self.cache_policy == "off":
            raise ConfigError("--rt-cache-min-tokens needs --cache-policy task-aware or lru")
        if self.max_retained_tokens > 0 and self.cache_policy == "off":
            raise ConfigError("--max-retained-tokens needs --cache-policy task-aware or lru")
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"--block-size must be 1, 2, 4, 8 or 16, got {self.block_size}")
        if self.block_owner == "exclusive" and self.preemption == "checkpoint":
            raise ConfigError(
                "--block-owner exclusive needs --preemption swap or recompute: parts of a block"
                " cannot be taken"
            )
        if self.block_owner == "exclusive" and self.cache_policy != "off":
            raise ConfigError("--block-owner exclusive needs --cache-policy off")
        self._check_kv_events()
        if self.preemption != "checkpoint" and self.clean_ahead_tokens != 0:
            raise ConfigError("--clean-ahead-tokens needs --preemption checkpoint")

    def _check_kv_events(self) -> None:
        if not self.kv_events:
            for flag, is_given in (
                ("--kv-events-keys", self.kv_events_keys),
                ("--kv-events-insecure", self.kv_events_insecure),
                ("--kv-events-block-size", self.kv_events_block_size != DEFAULT_EVENT_BLOCK),
            ):
                if is_given:
                    raise ConfigError(f"{flag} needs --kv-events")
            return
        if self.kv_events_insecure and self.kv_events_keys:
            raise ConfigError("--kv-events-insecure contradicts --kv-events-keys")
        if self.cache_policy == "off":
            raise ConfigError("--kv-events needs --cache-policy task-aware or lru")
        match = _ZMQ_ADDRESS.fullmatch(self.kv_events)
        if match is None:
            raise ConfigError(
                "--kv-events must be an address such as tcp://127.0.0.1:5557 or ipc:///run/kv-events,"
                f" got {self.kv_events!r}"
            )
        is_private = match["host"] is None or is_loopback(match["host"])
        if not (is_private or self.kv_events_keys or self.kv_events_insecure):
            raise ConfigError(
                f"--kv-events {self.kv_events!r} can be reached from other machines: give"
                " --kv-events-keys, or --kv-events-insecure to let anyone there read the token"
                " ids of prompts"
            )
