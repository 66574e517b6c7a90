"""Options of the server's front, its CUDA graphs, its memory, and of several machines."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from functools import cache

from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.config.fields import (
    GPU,
    GPU_KERNELS,
    Need,
    node_option,
    option,
    parse_hosts,
    parse_memory,
    profile_option,
    simulate_option,
)
from lightserve.errors import ConfigError
from lightserve.http_access import is_loopback
from lightserve.types import MAX_PRIORITY

# ----------------------------------------------------------------------
# Options of a server whose ranks are spread over several machines (nodes).


_SEVERAL_NODES = (Need("nnodes", refused=(1,), words="--nnodes, at least 2"),)
"""Needs of options of several machines."""


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """See the module's docstring."""

    nnodes: int = option(
        1,
        "Machines that the ranks of --tp are spread over, evenly. Give all machines the same"
        " options except --node-rank.",
        low=1,
        high=64,
        section="Several machines",
    )
    node_rank: int = node_option(
        0,
        "Number of this machine among --nnodes: 0 serves, the others only run workers for it.",
        low=0,
        high=63,
        needs=_SEVERAL_NODES,
    )
    master_addr: str = node_option(
        "",
        "Address of node 0 in a network that is the nodes' own: IPv4, or a name for it.",
        needs=_SEVERAL_NODES,
    )
    master_port: int = option(
        29500,
        "Port of --master-addr where node 0 awaits the others; it takes further ones as needed.",
        low=1,
        high=65535,
        needs=_SEVERAL_NODES,
    )
    node_key_file: str = node_option(
        "",
        "The key that all nodes have and nothing else may, as lightserve node-key writes it.",
        needs=_SEVERAL_NODES,
    )
    node_timeout_s: float = option(
        10.0,
        "A node that is silent for this time is lost, and its group of workers replaced once it is"
        " back.",
        low=1.0,
        high=3600.0,
        needs=_SEVERAL_NODES,
    )

    def check_nodes(self, *, tp: int) -> None:
        """Refuse nodes without a key or an address of their own; `tp` is another field."""
        if self.nnodes == 1:
            return
        if self.node_rank >= self.nnodes:
            raise ConfigError(
                f"--node-rank must be below --nnodes ({self.nnodes}), got {self.node_rank}"
            )
        if tp % self.nnodes:
            raise ConfigError(f"--tp must be a multiple of --nnodes ({self.nnodes}), got {tp}")
        if not self.node_key_file:
            raise ConfigError(
                "--nnodes needs --node-key-file, which keeps strangers from the workers"
            )
        if not self.master_addr or "*" in self.master_addr or _is_no_ipv4(self.master_addr):
            raise ConfigError(
                "--master-addr must be node 0's own IPv4 address or a name for it, not the address"
                f" of all interfaces, got {self.master_addr!r}"
            )


def _is_no_ipv4(text: str) -> bool:
    """Whether it is an address, but of IPv6, or one that stands for all of a machine's."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return not text.strip("[]") or ":" in text or "/" in text
    return address.version != 4 or address.is_unspecified or address.is_multicast


_OBJECTIVE = re.compile(
    r"(?P<name>[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?)=(?P<priority>-?\d{1,6})"
)
"""A name as Kubernetes has them, and a whole number."""
_ORIGIN = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?")

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

    model: str = profile_option(
        str(BUNDLED_MODEL_DIR),
        "Directory with a Hugging Face model, or a hub id. Default: the bundled small model.",
        section="Model and its names",
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
        "Sampling parameters that a request leaves open: auto takes them from the model's"
        " generation_config.json, none is temperature 1 without truncation.",
        choices=("auto", "none"),
    )
    host: str = option("127.0.0.1", "Address to listen on.", section="Addresses, keys and TLS")
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
        "Names, separated by commas, that the Host header may have beside loopback names. Only"
        " without API keys.",
    )
    allowed_origins: str = option(
        "",
        "Origins, separated by commas, whose web pages may use the server (CORS), such as"
        " https://chat.example; * is any, which needs API keys.",
    )
    inference_objectives: str = option(
        "",
        "Priorities of a gateway's InferenceObjectives, separated by commas, such as"
        " chat=10,nightly=-1. A request names its objective in the header"
        " x-gateway-inference-objective; below 0 it is best-effort.",
    )
    ssl_certfile: str = option("", "PEM file of a certificate chain: serves https.")
    ssl_keyfile: str = option(
        "",
        "PEM file of its key. Default: the key is in --ssl-certfile as well.",
        needs=(Need("ssl_certfile"),),
    )
    enable_docs: bool = option(False, "Show the API's description as a page at /docs.")
    max_body_bytes: int = option(
        4_194_304,
        "Largest body of a request.",
        low=1024,
        section="Limits on what clients send and hold",
    )
    max_image_bytes: int = option(
        16_777_216,
        "Most bytes of all images of a request, as they come: within its body, which may be larger"
        " by so much, or from other servers.",
        low=1024,
    )
    max_images: int = option(64, "Most images of a request.", low=1, high=64)
    allow_image_hosts: str = option(
        "",
        "Hosts, separated by commas, from which images are fetched by http and https, such as"
        " images.example,10.0.0.5:8080; without a port it is the usual one. Addresses that are not"
        " public are refused unless they are named themselves. Default: nothing is fetched.",
    )
    max_held_body_bytes: int = option(
        268_435_456,
        "Most memory for the bodies of all requests in flight at one frontend. A client may use"
        " half of the memory that others leave; above that requests get a 429.",
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
        1024, "Least rate of a body, over every 10 seconds of its arrival.", low=1
    )
    max_pending_body_bytes: int = option(
        67_108_864,
        "Most bytes of all bodies that are arriving at a frontend. Above it the client with the"
        " most bytes loses its body without progress for longest.",
        low=1024,
    )
    max_kept_answer_bytes: int = option(
        268_435_456,
        "Most memory of a frontend for answers that are not streamed and for unread parts of"
        " streams. Above it the client with the most bytes loses its answer without progress for"
        " longest.",
        low=1_048_576,
    )
    max_connections: int = option(
        8192,
        "Most open connections per frontend; a new one then closes an idle one. Requests in"
        " progress of one API key may use half of the connections that other keys leave.",
        low=1,
    )
    max_connections_per_ip: int = option(
        4096,
        "Most open connections of one client address per frontend, shared among keys in the"
        " same way.",
        low=1,
    )
    sse_keepalive_s: float = option(
        15.0, "A silent stream sends a comment after this time.", low=0.05
    )
    be_stream_interval_ms: float = option(
        100.0,
        "Least time between two events of a best-effort stream, as each event costs as much as"
        " a token. First tokens, ends, and requests with stop strings do not wait. 0: an event"
        " with each step.",
        low=0,
        high=10_000,
    )
    max_completions: int = option(
        128, "Most completions of one request, prompts times n.", low=1, high=4096
    )
    max_answer_items: int = option(
        2_000_000,
        "Most tokens and log-probabilities of one answer: prompts times n times max_tokens"
        " times (1 + log-probabilities), plus the entries for the prompts.",
        low=1,
    )
    metrics_host: str = option(
        "127.0.0.1",
        "Address of the metrics port. An address that other machines reach needs an operator's"
        " key.",
        section="Metrics",
        needs=(Need("metrics_port", refused=(-1,)),),
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
        """The origins of `allowed_origins`."""
        return frozenset(split_names(self.allowed_origins))

    @property
    def objectives(self) -> dict[str, int]:
        """Priorities of `inference_objectives`, by name."""
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
            ("--allow-image-hosts", self.allow_image_hosts),
        ):
            if names and not split_names(names):
                raise ConfigError(f"{flag} must have at least one name, got {names!r}")
        parse_hosts(split_names(self.allow_image_hosts), "--allow-image-hosts")
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


# Options of the CUDA graphs that steps run as.


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """See the module's docstring."""

    cuda_graphs: str = profile_option(
        "auto",
        "Whether steps run as CUDA graphs, captured at the start: auto (on a GPU"
        " with the kernels triton) or off (slower steps, less memory, a shorter start).",
        choices=("auto", "off"),
        section="CUDA graphs",
        needs=GPU_KERNELS,
    )
    cuda_graph_max_seqs: int = profile_option(
        0,
        "Most sequences of a step that runs as a CUDA graph; 0 takes --max-num-seqs, at most 512.",
        low=0,
        needs=(Need("cuda_graphs", ("auto",)), *GPU_KERNELS),
    )
    cuda_graph_max_tokens: int = profile_option(
        -1,
        "Most new tokens of a step with prompts that runs as a CUDA graph; 0: such steps are"
        " launched kernel by kernel; -1: up to where a graph gains time, at most 2,048.",
        low=-1,
        needs=(Need("cuda_graphs", ("auto",)), *GPU_KERNELS),
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
_ZMQ_ADDRESS = re.compile(
    r"ipc://[^\x00-\x20]{1,100}|tcp://(?P<host>\*|[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):[0-9*]{1,5}"
)


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """See the module's docstring."""

    cache_policy: str = simulate_option(
        "task-aware",
        "Cached prefixes that are evicted first when KV memory is needed: task-aware (the"
        " fewest waiting requests share them), lru, or off (nothing is cached).",
        choices=("task-aware", "lru", "off"),
        section="KV memory",
    )
    rt_cache_min_tokens: int = simulate_option(
        0,
        "Cached tokens of real-time requests that best-effort ones may not take.",
        low=0,
        needs=(Need("cache_policy", ("task-aware", "lru")),),
    )
    max_retained_tokens: int = option(
        -1,
        "Prompt tokens of each API key that the prefix cache keeps longer on request"
        " (prompt_cache_retention, cache_control). -1: a tenth of the KV pool; 0: none, and such"
        " requests are refused.",
        low=-1,
    )
    kv_events: str = node_option(
        "",
        "ZeroMQ address, such as tcp://127.0.0.1:5557 or ipc:///run/kv-events, at which the"
        " router publishes cached and evicted blocks, in vLLM's format. Subscribers can read the"
        " token ids of prompts.",
        needs=(Need("cache_policy", ("task-aware", "lru")),),
    )
    kv_events_block_size: int = node_option(
        16, "Tokens of the blocks of --kv-events.", low=1, high=1024, needs=(Need("kv_events"),)
    )
    kv_events_keys: str = node_option(
        "",
        "Directory of ZeroMQ certificates (CURVE) for --kv-events: server.key_secret, and in"
        " clients/ the public keys of allowed subscribers.",
        needs=(Need("kv_events"),),
    )
    kv_events_insecure: bool = node_option(
        False,
        "Let --kv-events listen without keys where other machines reach it.",
        needs=(Need("kv_events"),),
    )
    preemption: str = simulate_option(
        "checkpoint",
        "KV of a request that is paused for lack of memory: checkpoint (only overwritten parts"
        " go to the host), recompute (it is dropped).",
        choices=("checkpoint", "recompute"),
    )
    block_owner: str = simulate_option(
        "two-ended",
        "two-ended: blocks of KV slots are filled by real-time requests from the left and by"
        " best-effort ones from the right; exclusive: a block belongs to one request.",
        choices=("two-ended", "exclusive"),
        needs=(Need("preemption", ("recompute",)), Need("cache_policy", ("off",))),
    )
    block_size: int = simulate_option(
        16, "KV slots per block of the allocator: 1, 2, 4, 8 or 16.", low=1, high=16
    )
    host_kv_memory: str = profile_option(
        "auto",
        "Host memory per rank for the KV of paused requests, such as 512MiB; auto is half of the"
        " KV pool's size, or of what the KV pool leaves free, and beside a GPU, for which it is"
        " locked at the start, at most 16GiB.",
        needs=(Need("preemption", ("checkpoint",)),),
    )
    prefix_host_memory: str = profile_option(
        "auto",
        "Host memory per rank for prefixes that leave the KV pool, such as 8GiB, beside"
        " --host-kv-memory, the free part of which they use as well; 0: what leaves the pool is"
        " lost. auto is half of what both pools leave free, at most the KV pool's size, and beside"
        " a GPU at most 16GiB of both; 0 without --cache-policy, and for models with recurrent"
        " layers.",
        needs=(Need("cache_policy", ("task-aware", "lru")),),
    )
    gpu_memory_utilization: float = option(
        DEFAULT_GPU_MEMORY_UTILIZATION,
        "Share of a GPU's memory to use in all. The KV pool gets the rest after weights, the"
        " largest step, CUDA graphs and other processes.",
        low=0.05,
        high=1.0,
        needs=(GPU, Need("kv_memory", ("auto",))),
    )
    kv_memory: str = profile_option(
        "auto",
        "Memory of the KV pool per rank, such as 512MiB or 4GiB. auto on a CPU is min(4GiB,"
        " half of the free memory) shared by the ranks, on a GPU the memory that"
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

    def check_memory(self) -> None:
        """Refuse sizes and combinations that the KV book-keeping does not have."""
        if self.kv_memory != "auto" and parse_memory(self.kv_memory, "--kv-memory") == 0:
            raise ConfigError(f"--kv-memory must be above 0, got {self.kv_memory!r}")
        if self.host_kv_memory != "auto":
            parse_memory(self.host_kv_memory, "--host-kv-memory")
        if self.prefix_host_memory != "auto":
            parse_memory(self.prefix_host_memory, "--prefix-host-memory")
        if self.max_retained_tokens > 0 and self.cache_policy == "off":
            raise ConfigError("--max-retained-tokens needs --cache-policy task-aware or lru")
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"--block-size must be 1, 2, 4, 8 or 16, got {self.block_size}")
        if self.kv_events:
            self._check_kv_events()

    def _check_kv_events(self) -> None:
        if self.kv_events_insecure and self.kv_events_keys:
            raise ConfigError("--kv-events-insecure contradicts --kv-events-keys")
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
