"""Options of the KV pool, of what it keeps, and of the host's share."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.config.fields import option, parse_memory
from lightserve.errors import ConfigError

DEFAULT_GPU_MEMORY_UTILIZATION = 0.9


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
        if self.preemption != "checkpoint" and self.clean_ahead_tokens != 0:
            raise ConfigError("--clean-ahead-tokens needs --preemption checkpoint")
