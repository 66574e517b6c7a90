"""How many tokens the KV pool may hold: from flags, and from the memory that is really free.

Linux only counts what a container may still take (cgroup v2 and v1) as well as what the machine
has available.
"""

from __future__ import annotations

from pathlib import Path

from lightserve.config import ServeConfig
from lightserve.config.fields import parse_memory
from lightserve.errors import ConfigError, StartupError
from lightserve.models.kv_layout import KVLayout
from lightserve.worker.cgroups import group_folders, read_number

AUTO_LIMIT_BYTES = 4 * 2**30
AUTO_LOCKED_BYTES = 16 * 2**30
"""Most host memory that is locked for a GPU unless asked for: it takes seconds, and the system can
do nothing else with it."""
MIN_SLOTS = 16


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Return what this process could still allocate: the machine's rest, or a container's.

    Page cache that the kernel would drop counts as free, above all memory-mapped weights.
    """
    rests = [
        _cgroup_rest(folder, _FILES[version]) for folder, version in group_folders("memory", root)
    ]
    return min(
        [_mem_available(root / "proc/meminfo"), *(rest for rest in rests if rest is not None)]
    )


def num_kv_slots(config: ServeConfig, layout: KVLayout, *, free_bytes: int) -> int:
    """Return the size in tokens of this rank's pool on the CPU.

    Args:
        config: --kv-memory (per rank, or auto), --max-kv-tokens, --tp.
        layout: knows the bytes of one token on this rank.
        free_bytes: free memory, before the pool, on the machine that all ranks share.

    Raises:
        ConfigError: --kv-memory is no size, or more than is free, or an option needs a GPU.
        StartupError: not even `MIN_SLOTS` tokens fit.
    """
    if config.has_gpu_memory_utilization:
        raise ConfigError("--gpu-memory-utilization needs a GPU, and none was found")
    if config.kv_memory == "auto":
        budget = min(AUTO_LIMIT_BYTES, free_bytes // 2) // config.tp
    else:
        budget = parse_memory(config.kv_memory, "--kv-memory")
        if budget * config.tp > free_bytes:
            raise ConfigError(
                f"--kv-memory {config.kv_memory} for {config.tp} rank(s) is more than the"
                f" {free_bytes / 2**20:.0f} MiB that are free"
            )
    num_slots = budget // layout.bytes_per_token
    if config.max_kv_tokens:
        num_slots = min(num_slots, config.max_kv_tokens)
    if num_slots < MIN_SLOTS:
        raise StartupError(
            f"the KV pool would hold {num_slots} tokens of {layout.bytes_per_token} bytes, at least"
            f" {MIN_SLOTS} are needed: raise --kv-memory or --max-kv-tokens"
        )
    return num_slots


def num_host_slots(
    config: ServeConfig,
    layout: KVLayout,
    *,
    num_slots: int,
    free_bytes: int,
    is_beside_gpu: bool = False,
) -> int:
    """Return the size of this rank's host pool in tokens.

    Args:
        config: --host-kv-memory (per rank, or auto), --tp.
        layout: knows the bytes of one token on this rank.
        num_slots: size of its KV pool; one on the CPU has not touched its memory yet.
        free_bytes: free memory of the machine that all ranks share, the pools not taken off.
        is_beside_gpu: the KV pool is on a GPU: it takes nothing off, but memory will be locked.

    Raises:
        ConfigError: --host-kv-memory is more than is free beside the KV pool.
    """
    if config.preemption == "recompute":
        return 0  # nothing is ever copied there
    pool_bytes = num_slots * layout.bytes_per_token
    rest = max(0, free_bytes // config.tp - (0 if is_beside_gpu else pool_bytes))
    if config.host_kv_memory == "auto":
        budget = min(pool_bytes, rest) // 2
        if is_beside_gpu:
            budget = min(budget, AUTO_LOCKED_BYTES)
        return budget // layout.bytes_per_token
    budget = parse_memory(config.host_kv_memory, "--host-kv-memory")
    if budget > rest:
        raise ConfigError(
            f"--host-kv-memory {config.host_kv_memory} for {config.tp} rank(s) is more than the"
            f" {rest / 2**20:.0f} MiB that "
            + ("are free for each" if is_beside_gpu else "the KV pool leaves for each")
        )
    return budget // layout.bytes_per_token


_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Of a control group, by version: limit, use, and what of it the kernel would drop."""


def _cgroup_rest(folder: Path, names: tuple[str, str, str]) -> int | None:
    """Return what a group may still take; None if it has no limit."""
    limit_name, usage_name, cache_name = names
    limit, usage = read_number(folder / limit_name), read_number(folder / usage_name)
    if limit is None or usage is None:
        return None
    cache = 0
    if (folder / "memory.stat").exists():
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cache = int(stat.get(cache_name, 0))
    return max(0, limit - (usage - cache))


def _mem_available(path: Path) -> int:
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise StartupError(f"{path} has no MemAvailable")
