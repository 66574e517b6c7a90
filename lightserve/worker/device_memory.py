"""How much of a GPU the KV pool may take: what is left once everything else has been measured.

    │ others │ weights │ activations │ graphs │ staging │ KV pool ·········· │ kept free │
    └────────────────── total * --gpu-memory-utilization ────────────────────┘

`others` is what other processes and the CUDA libraries of this one take. Weights are loaded and
the largest steps run before the pool is made, so that nothing is guessed but the memory of CUDA
graphs, which are captured behind it: two of them say what all will take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from lightserve.config import ServeConfig
from lightserve.config.fields import parse_memory
from lightserve.errors import StartupError
from lightserve.models.kv_layout import KVLayout
from lightserve.worker.memory import MIN_SLOTS

MAX_STAGED_TOKENS = 8192
STAGING_SHARE = 128
"""Staging memory for copies is at most this part of the device: 1.1 GiB of an H200, enough for
8,192 tokens of a model of 8 B parameters to leave the pool within one step."""


KEPT_FREE = 50
"""One part in so many of the device is free where --kv-memory is given, 2.8 GiB of an H200: what is
measured at the start is not all (blocks of torch's allocator with gaps, what drivers and NCCL take
late)."""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """What takes how many bytes of a GPU beside the KV pool."""

    total: int
    others: int
    """Other processes, and what CUDA and its libraries hold in this one."""
    weights: int
    activations: int
    """What the largest step takes more, as torch's allocator reserves it."""
    graphs: int = 0
    staging: int = 0

    @property
    def taken(self) -> int:
        """All of it."""
        return self.others + self.weights + self.activations + self.graphs + self.staging

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "the largest step": self.activations,
            "CUDA graphs": self.graphs,
            "staged copies": self.staging,
            "other processes and libraries": self.others,
        }
        return ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)


def num_device_slots(config: ServeConfig, layout: KVLayout, memory: DeviceMemory) -> int:
    """Return the size in tokens of a KV pool on a GPU; it takes one slot more.

    Args:
        config: --gpu-memory-utilization, or --kv-memory, beside which `KEPT_FREE` is free; and
            --max-kv-tokens.
        layout: knows the bytes of one token on this rank.
        memory: of this rank's GPU.

    Raises:
        StartupError: what is asked for does not fit, or not even `MIN_SLOTS` tokens do.
    """
    if config.kv_memory == "auto":
        limit = int(memory.total * config.gpu_memory_utilization)
        asked = f"--gpu-memory-utilization {config.gpu_memory_utilization:g}"
        budget = limit - memory.taken
    else:
        asked = f"--kv-memory {config.kv_memory}"
        limit = memory.total - memory.total // KEPT_FREE
        budget = parse_memory(config.kv_memory, "--kv-memory")
    num_slots = budget // layout.bytes_per_token - 1
    if config.max_kv_tokens:
        num_slots = min(num_slots, config.max_kv_tokens)
    needed = (num_slots + 1) * layout.bytes_per_token
    if config.kv_memory != "auto" and needed > limit - memory.taken:
        raise StartupError(
            f"{asked} does not fit on a GPU of {_gib(memory.total)}: {memory}, and"
            f" {_gib(memory.total - limit)} that are kept free, leave"
            f" {_gib(max(0, limit - memory.taken))}, and the pool would take {_gib(needed)}"
        )
    if num_slots < MIN_SLOTS:
        raise StartupError(
            f"no room for a KV pool: {memory} leave {_gib(max(0, budget))} of the {_gib(limit)}"
            f" that {asked} allows of {_gib(memory.total)}, {max(0, num_slots)} tokens where"
            f" {MIN_SLOTS} are needed. Lower --max-num-batched-tokens or --max-num-seqs, use more"
            " ranks (--tp), or free the GPU"
        )
    return num_slots


def num_staged_slots(config: ServeConfig, layout: KVLayout, *, total_bytes: int) -> int:
    """Return how many tokens on their way to the host the GPU has staging memory for."""
    if config.preemption == "recompute" or config.host_kv_memory == "0":
        return 0
    return max(1, min(MAX_STAGED_TOKENS, total_bytes // STAGING_SHARE // layout.bytes_per_token))


class MemoryStatistics(Protocol):
    """What a GPU and torch's allocator on it say."""

    def begin(self) -> int:
        """Forget peaks and unused blocks; return the bytes that tensors take."""

    def peak(self) -> int:
        """Return the most bytes that were reserved since, once all work is done."""

    def others(self) -> int:
        """Return the bytes that are taken now, and not by this process's allocator."""

    def total(self) -> int:
        """Return the size of the GPU."""

    def end(self) -> None:
        """Give unused blocks back."""


def measure_step(statistics: MemoryStatistics, largest_steps: Callable[[], None]) -> DeviceMemory:
    """Run the largest steps and return what they and all that was there before take.

    Args:
        statistics: of the GPU that they run on.
        largest_steps: runs them on a pool of a few slots; weights and tables are in place.
    """
    weights = statistics.begin()
    largest_steps()
    peak = statistics.peak()
    memory = DeviceMemory(
        total=statistics.total(),
        others=statistics.others(),
        weights=weights,
        activations=max(0, peak - weights),
    )
    statistics.end()
    return memory


class CudaStatistics:
    """See `MemoryStatistics`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> int:
        """See `MemoryStatistics.begin`."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """See `MemoryStatistics.peak`: reserved and not allocated, so that gaps count."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device)

    def others(self) -> int:
        """See `MemoryStatistics.others`."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free - torch.cuda.memory_reserved(self._device)

    def total(self) -> int:
        """See `MemoryStatistics.total`."""
        return torch.cuda.mem_get_info(self._device)[1]

    def end(self) -> None:
        """See `MemoryStatistics.end`."""
        torch.cuda.empty_cache()


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
