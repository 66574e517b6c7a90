"""The server's configuration: one declaration gives field, flag, help text, default and limits.

`ServeConfig` is frozen, validated once when built, and never edited after start. Every process
gets the same one; its hash is part of every hello. `lightserve.cli` turns the fields into flags.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec

from lightserve.bundled import BUNDLED_MODEL_DIR, BUNDLED_MODEL_NAME
from lightserve.config.fields import (
    GPU_KERNELS,
    Need,
    Scope,
    check_file_store,
    check_limits,
    check_needs,
    has_password,
    is_plain_url,
    is_postgres,
    names_of,
    node_option,
    option,
    parse_memory,
    profile_option,
)
from lightserve.config.options import (
    ANY_NAME,
    FrontendOptions,
    GraphOptions,
    MemoryOptions,
    NodeOptions,
    split_names,
)
from lightserve.config.scheduling import SchedulingOptions
from lightserve.errors import ConfigError
from lightserve.model_formats import CALL_FORMATS, REASONING_FORMATS

LIVES_FOR_SPANS = 1000
"""So many are enough: spans ask for requests as soon as these have ended."""
MIN_DECISION_LOG_BYTES = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class ServeConfig(NodeOptions, GraphOptions, MemoryOptions, SchedulingOptions, FrontendOptions):
    """Everything `lightserve serve` can be told. Units are in the names."""

    tp: int = profile_option(
        1, "Tensor-parallel degree: one worker process per rank.", low=1, high=64, section="Workers"
    )
    dtype: str = profile_option(
        "auto",
        "Type of weights and KV; auto takes the model's own, but bfloat16 for float32 on a GPU.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = profile_option(
        "none",
        "Weights rounded when they are loaded: int8 keeps 8 bits of each, so a decode reads"
        " half as much; int4 keeps about 5, and 8 in the output layer (the CPU's native kernels,"
        " and Triton's on a GPU; activations and KV stay as they are). w8a8 is int8 whose prompts"
        " are multiplied by integers, too, which is faster (CPUs with AVX512-VNNI or AMX,"
        " bfloat16). fp8 rounds activations, too, for GPUs that multiply such numbers; elsewhere"
        " it saves nothing.",
        choices=("none", "int8", "w8a8", "int4", "fp8"),
    )
    kv_dtype: str = profile_option(
        "auto",
        "Type of keys and values: auto is the model's; int8 keeps 8 bits of each number and a"
        " factor for each head, so that nearly twice the tokens fit (the CPU's native kernels,"
        " and Triton's on a GPU). fp8 keeps floating point of 8 bits (e4m3) instead, on GPUs.",
        choices=("auto", "int8", "fp8"),
    )
    pooling: str = option(
        "auto",
        "How prompts become vectors (/v1/embeddings): auto goes by the model's files, as Sentence"
        " Transformers writes them; cls, mean and last (an encoder's first token, all, or the last;"
        " a decoder has last alone). Or yes-no: how a decoder such as Qwen3-Reranker scores pairs"
        " (/v1/rerank).",
        choices=("auto", "cls", "mean", "last", "yes-no"),
    )
    max_model_len: int = profile_option(
        0, "Longest sequence, prompt and output, in tokens; 0 takes the model's own.", low=0
    )
    device: str = profile_option(
        "auto",
        "Device of the workers: auto takes a GPU per rank (cuda) where there is one, else the CPU.",
        choices=("auto", "cpu", "cuda"),
    )
    attention_backend: str = profile_option(
        "auto",
        "Kernels of the workers: auto is triton on a GPU and native on the CPU, or torch where the"
        " native core was not built; torch is for the CPU alone; reference is plain and slow.",
        choices=("auto", "triton", "torch", "reference"),
    )
    kernel_tuning: str = profile_option(
        "auto",
        "Block sizes of Triton kernels, and products of few rows by them or by cuBLAS, of"
        " FP8 by them or by torch: auto (measured at the start on a GPU, and cached), or off (the"
        " built-in ones, cuBLAS, and Triton for FP8).",
        choices=("auto", "off"),
        needs=GPU_KERNELS,
    )
    batch_invariant: bool = profile_option(
        False,
        "Make each request's tokens independent, bit for bit, of the requests beside it"
        " (float32 only; slower).",
    )
    num_threads: int = option(
        0,
        "CPU threads per worker: a number, or auto: a rank's share of the cores, as far as the"
        " model is large enough, and fewer where that is faster beside other processes.",
        low=0,
        zero_word="auto",
        scope=Scope.NODE | Scope.PROFILE,
    )
    profile: str = option(
        "auto",
        "Step times that the router starts from: auto (cached for this model, type, device,"
        " threads and TP, else measured before the first request and cached), off (learnt while"
        " serving), or a file that lightserve profile wrote.",
    )
    chat_template: str = node_option(
        "",
        "File with a Jinja chat template to use instead of the model's own.",
        section="Templates and parsers",
    )
    closed_schemas: bool = node_option(
        False,
        "Objects of JSON schemas that name properties and say nothing of additionalProperties have"
        " no others. Otherwise they may, as JSON Schema has it.",
    )
    tool_call_parser: str = node_option(
        "auto",
        "How the model writes tool calls. auto: as its chat template shows. See docs/api.md.",
        choices=("auto", "none", *CALL_FORMATS),
    )
    reasoning_parser: str = node_option(
        "auto",
        "How the model writes reasoning, which becomes reasoning_content. auto: as its chat"
        " template shows. See docs/api.md.",
        choices=("auto", "none", *REASONING_FORMATS),
    )
    start_timeout_s: float = option(
        600.0,
        "A child that is not ready after this time is a failed start.",
        low=1.0,
        section="Starts, ends and restarts",
    )
    step_timeout_s: float = option(
        60.0,
        "Workers that finish no step for this time while they have work are replaced.",
        low=0.5,
    )
    shutdown_timeout_s: float = node_option(
        30.0, "Longest time for requests in flight after SIGTERM.", low=0.0
    )
    max_restarts: int = node_option(
        5, "Restarts of children within --restart-window-s before the server gives up.", low=0
    )
    restart_window_s: float = node_option(60.0, "See --max-restarts.", low=1.0)
    batch_store: str = node_option(
        "auto",
        "Place of files, batches and responses (/v1/files, /v1/batches, /v1/responses): a"
        " directory on a disk of this machine, made if it does not exist, or postgresql://…,"
        " which any number of servers may share. auto: lightserve/batches-PORT in XDG_STATE_HOME"
        " or ~/.local/state, for files, batches and responses that ask to be stored. none:"
        " nothing is kept.",
        section="Files and batches",
    )
    file_store: str = option(
        "",
        "Place of the bytes of files, instead of --batch-store: s3://BUCKET/PREFIX, of S3 or a"
        " server with its protocol (set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and"
        " AWS_ENDPOINT_URL), or file:///DIRECTORY. Servers that share a store need the same one.",
        needs=(
            Need(
                "batch_store",
                refused=("none", "auto"),
                words="--batch-store DIRECTORY or postgresql://…",
            ),
        ),
    )
    batch_max_in_flight: int = node_option(
        256,
        "Most lines of batches that the router has at once.",
        low=1,
        high=4096,
        needs=(Need("batch_store", refused=("none",)),),
    )
    batch_max_stored_bytes: int = node_option(
        10_000_000_000,
        "Most bytes of files, batches and responses that are kept for one API key; above it"
        " uploads get a 413.",
        low=1,
        needs=(Need("batch_store", refused=("none",)),),
    )
    batch_min_free_bytes: int = node_option(
        500_000_000,
        "With less space free beside the store, uploads, new batches and responses get a 507 and no"
        " line is begun, until there is twice as much. 0: it is used to its end.",
        low=0,
        needs=(Need("batch_store", refused=("none",)),),
    )
    responses_ttl_s: int = node_option(
        30 * 86_400,
        "Time for which responses are kept.",
        low=60,
        high=10 * 365 * 86_400,
        needs=(Need("batch_store", refused=("none",)),),
    )
    run_dir: str = node_option(
        "",
        "Directory under which the private socket directory is made; default: the system's.",
        section="Files and logs",
    )
    log_level: str = node_option(
        "info", "Least severe log records to print.", choices=("debug", "info", "warning", "error")
    )
    log_format: str = node_option(
        "text", "How log records are printed; json is an object per line.", choices=("text", "json")
    )
    decision_log: str = node_option(
        "",
        "File for the router's inputs and decisions, for lightserve replay. It holds prompts as"
        " token ids. An existing file is kept as FILE.1.",
    )
    decision_log_size: str = node_option(
        "4GiB",
        "Size at which the decision log ends; the server continues without it.",
        needs=(Need("decision_log"),),
    )
    request_timelines: int = node_option(
        0,
        "So many of the last requests can be asked for their timeline, GET"
        " /v1/requests/ID/timeline; it takes the router some time in each step.",
        low=0,
        high=100_000,
        zero_word="none",
    )

    otlp_endpoint: str = option(
        "",
        "URL of an OpenTelemetry collector that takes OTLP over HTTP, such as"
        " http://127.0.0.1:4318. Each request becomes a span, without prompt and answer, with"
        " the router's decisions as events. It needs the packages of the extra otel.",
    )
    otlp_sample: float = option(
        1.0,
        "Share of requests that become spans, where their traceparent does not say.",
        low=0.0,
        high=1.0,
        needs=(Need("otlp_endpoint"),),
    )

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            check_limits(spec, getattr(self, spec.name))
        check_needs(self)
        self._check_kernels()
        if self.tool_call_parser == "harmony" and self.reasoning_parser not in ("harmony", "auto"):
            raise ConfigError("--tool-call-parser harmony needs --reasoning-parser harmony")
        if self.max_model_len == 1:
            raise ConfigError(
                "--max-model-len must be 0 or at least 2 (a prompt and an output token), got 1"
            )
        self.check_memory()
        self.check_nodes(tp=self.tp)
        self.check_access()
        self.check_objectives()
        self.check_scheduling()
        if self.cuda_graph_max_seqs > self.max_num_seqs:
            raise ConfigError(
                f"--cuda-graph-max-seqs must be at most --max-num-seqs ({self.max_num_seqs}),"
                f" got {self.cuda_graph_max_seqs}"
            )
        self._check_batches()
        if parse_memory(self.decision_log_size, "--decision-log-size") < MIN_DECISION_LOG_BYTES:
            raise ConfigError(
                f"--decision-log-size must be at least 1MiB, got {self.decision_log_size!r}"
            )
        if self.otlp_endpoint and not is_plain_url(self.otlp_endpoint):
            raise ConfigError(
                "--otlp-endpoint must be an address such as http://127.0.0.1:4318, without user,"
                f" password and query, got {self.otlp_endpoint.rpartition('@')[2]!r}"
            )

    @property
    def num_kept_lives(self) -> int:
        """The router notes the story of so many of the last requests."""
        return max(self.request_timelines, LIVES_FOR_SPANS if self.otlp_endpoint else 0)

    def _check_batches(self) -> None:
        if not self.batch_store:
            raise ConfigError(
                "--batch-store must be a directory, postgresql://…, auto or none, got ''"
            )
        check_file_store(self.file_store)
        if "://" in self.batch_store and not is_postgres(self.batch_store):
            raise ConfigError(  # what follows may be a password
                "--batch-store must be a directory or postgresql://…, got"
                f" {self.batch_store.partition('://')[0]}://…"
            )
        if not is_postgres(self.batch_store):
            return
        if self.batch_min_free_bytes != ServeConfig.batch_min_free_bytes:
            raise ConfigError("--batch-min-free-bytes needs --batch-store DIRECTORY")
        if has_password(self.batch_store):
            raise ConfigError(
                "--batch-store must have no password, which every process list would show: it"
                " belongs into PGPASSWORD, or a file that PGPASSFILE names"
            )

    def _check_kernels(self) -> None:
        """Refuse options that kernels would ignore.

        What --batch-invariant promises is kept by the CPU's own kernels, in float32.
        """
        if self.quantization != "none":
            has_gpu = self.quantization != "w8a8"
            self._check_native(f"--quantization {self.quantization}", has_gpu=has_gpu)
        if self.kv_dtype != "auto":
            what = f"--kv-dtype {self.kv_dtype}"
            self._check_native(what, has_gpu=True, backends=("auto", "triton", "reference"))
        if not self.batch_invariant:
            return
        for flag, value, others in (
            ("--dtype", self.dtype, ("float32", "auto")),
            ("--device", self.device, ("cpu", "auto")),
            ("--attention-backend", self.attention_backend, ("torch", "auto")),
        ):
            if value not in others:
                raise ConfigError(
                    f"--batch-invariant needs {flag} {' or '.join(others)}, got {value!r}"
                )

    def _check_native(
        self, what: str, *, has_gpu: bool = False, backends: tuple[str, ...] = ("auto", "triton")
    ) -> None:
        """Refuse options beside `what`, which the CPU's native kernels alone can do.

        `has_gpu`: and Triton's, and other `backends`.
        """
        types = ("auto", "bfloat16", "float32")
        for flag, given, others in (
            ("--dtype", self.dtype, (*types, "float16") if has_gpu else types),
            ("--device", self.device, ("auto", "cpu", "cuda") if has_gpu else ("auto", "cpu")),
            ("--attention-backend", self.attention_backend, backends if has_gpu else ("auto",)),
        ):
            if given not in others:
                raise ConfigError(f"{what} needs {flag} {' or '.join(others)}, got {given!r}")
        if self.batch_invariant:
            raise ConfigError(f"{what} cannot be had with --batch-invariant")

    @property
    def names_store(self) -> bool:
        """Whether --batch-store says where; then responses are kept whose requests do not ask."""
        return self.batch_store not in ("auto", "none")

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names that clients are told, the model's own first."""
        names = tuple(name for name in split_names(self.served_model_name) if name != ANY_NAME)
        return names or (self._default_name,)

    @property
    def takes_any_model_name(self) -> bool:
        """Whether clients may call the model as they like."""
        return ANY_NAME in split_names(self.served_model_name)

    @property
    def model_name(self) -> str:
        """The model's own name."""
        return self.model_names[0]

    @property
    def _default_name(self) -> str:
        if self.model == str(BUNDLED_MODEL_DIR):
            return BUNDLED_MODEL_NAME
        return self.model.rstrip("/").rsplit("/", 1)[-1]

    @property
    def digest(self) -> str:
        """Hash over all fields, carried by every hello: all processes must run the same."""
        return _hash_of(self)

    @property
    def of_ranks(self) -> dict[str, str]:
        """Options that all ranks must agree on, on whichever nodes they run: JSON by name."""
        return {
            spec.name: msgspec.json.encode(getattr(self, spec.name)).decode()
            for spec in dataclasses.fields(self)
            if spec.name not in _OF_ONE_NODE
        }

    @property
    def ranks_digest(self) -> str:
        """Hash over `of_ranks`, carried by every rank's hello."""
        return _hash_of(self.of_ranks)

    @property
    def local_ranks(self) -> range:
        """The ranks that run on this node."""
        num_ranks = self.tp // self.nnodes
        return range(self.node_rank * num_ranks, (self.node_rank + 1) * num_ranks)


SECTIONS = {
    spec.name: spec.metadata["section"]
    for spec in dataclasses.fields(ServeConfig)
    if spec.metadata["section"]
}
"""Titles of the parts of help and documentation, by the option that each begins with."""
_OF_ONE_NODE = frozenset(
    {
        *(spec.name for spec in dataclasses.fields(FrontendOptions)),
        *names_of(ServeConfig, Scope.NODE),
    }
)
"""Options that node 0 alone uses, and options that may differ from one machine to the next."""


def _hash_of(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:16]
