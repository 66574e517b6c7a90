"""How many tokens the KV pool may hold: from flags, and from the memory that is really free.

Linux only: counts the rest of a container's limit (cgroup v2 and v1) as well as the machine's
available memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from lightserve.config import ServeConfig
from lightserve.config.fields import flag_name, parse_memory
from lightserve.errors import ConfigError, StartupError
from lightserve.kernels.weights import StateBank
from lightserve.messages.common import unpack_int32
from lightserve.messages.router_worker import SlotRange, StateCopies
from lightserve.models.base import DTYPE_BYTES, KVLayout
from lightserve.worker.device import DeviceQueue

# Linux control groups: where the limits of this process's container are, and those of CPU time.
#
# Version 2 has one hierarchy, version 1 one per controller; the limits of the own group and of all
# above it hold. In a container the own group is the root of what is mounted.


def group_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, int]]:
    """Yield every control group this process is in, from its own up, with its version, 1 or 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base, version = root / "sys/fs/cgroup", 2
        elif controller in controllers.split(","):
            base, version = root / "sys/fs/cgroup" / controller, 1
        else:
            continue
        own = Path(path.lstrip("/"))
        for folder in (own, *own.parents):
            yield base / folder, version


def read_number(path: Path) -> int | None:
    """Return the number in a file; None if there is no such file or it says `max`."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def usable_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may keep busy: those that it may run on, or fewer where
    a container limits its CPU time (`docker --cpus`, limits of Kubernetes).

    More threads than that would be stopped for most of each period, all in the middle of a step.
    """
    cores = float(len(os.sched_getaffinity(0)))
    for folder, version in group_folders("cpu", root):
        quota, period = _quota_v2(folder) if version == 2 else _quota_v1(folder)
        if quota is not None and period:
            cores = min(cores, quota / period)
    return max(1, int(cores))


def _quota_v2(folder: Path) -> tuple[int | None, int | None]:
    try:
        quota, _, period = (folder / "cpu.max").read_text().strip().partition(" ")
    except OSError:
        return None, None
    return (int(quota), int(period)) if quota.isdigit() and period.isdigit() else (None, None)


def _quota_v1(folder: Path) -> tuple[int | None, int | None]:
    """A quota of -1 is none."""
    return read_number(folder / "cpu.cfs_quota_us"), read_number(folder / "cpu.cfs_period_us")


# The KV tensors of one rank: one pool of token slots per layer.


_LIBC = ctypes.CDLL(None)
MADV_DONTNEED, MADV_NOHUGEPAGE = 4, 15
"""Linux's advice: pages are given back, and are there again, empty, when they are written; and
memory never comes in huge pages."""


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt."""


def keep_freed_memory() -> None:
    """Let memory that is freed from now on serve the next allocations, and not go back to the
    system.

    Every step makes and frees tensors of one size: the logits of 64 rows of a vocabulary of
    150,000 are 39 MB, whose pages the system would empty anew in each step. Other C libraries than
    glibc do as they do.
    """
    if hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(M_MMAP_MAX, 0)
        _LIBC.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def give_back_freed_memory() -> None:
    """Let memory that was freed so far go back to the system, before work of another kind."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


def advise(tensor: Tensor, advice: int) -> None:
    """Tell the system how the whole pages of a tensor's memory are used."""
    page = os.sysconf("SC_PAGE_SIZE")
    first = -(-tensor.data_ptr() // page) * page
    num_bytes = (tensor.data_ptr() + tensor.nbytes - first) // page * page
    if num_bytes > 0:
        _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), advice)


def empty_pool(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor for KV, whose memory on a CPU is there page by page as it is written.

    In huge pages the first token takes one for each head of each layer, 192 MiB where 24 layers
    have two heads; attention is as fast without.
    """
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and tensor.numel():
        advise(tensor, MADV_NOHUGEPAGE)
    return tensor


class KVPool:
    """Keys and values of `num_slots` tokens; pages are touched only when they are written.

    In memory a head's tokens lie together, [num_kv_heads, num_slots + 1, head_size]: attention then
    gathers in the order in which it multiplies, and consecutive slots need no gather.

        slot:  0 ······················ num_slots-1 │ num_slots
               └── the router gives these out ────┘ │ scratch: what pads CUDA graphs writes here
    """

    def __init__(self, layout: KVLayout, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        """Slots that can be given out; slot `num_slots`, behind them, belongs to no request."""
        self.bytes_per_token = layout.bytes_per_token
        self.device = device
        self.tensors: list[Tensor] = []
        """One per group, [num_parts, num_layers, num_kv_heads, num_slots + 1, head_size], keys
        first."""
        self.k: list[Tensor] = []
        """One view [num_slots + 1, num_kv_heads, head_size] per layer."""
        self.v: list[Tensor] = []
        for group in layout.groups:
            sizes = (group.num_layers, group.num_kv_heads, num_slots + 1, group.head_size)
            shape = (group.num_parts, *sizes)
            tensor = empty_pool(shape, group.pool_dtype, device)
            # Padding rows read the scratch slot: no garbage of before may become NaN.
            tensor.select(3, num_slots).zero_()
            self.tensors.append(tensor)
            parts = tensor.transpose(2, 3).unbind(0)
            self.k.extend(parts[0].unbind(0))
            # Values of latent vectors are the first numbers of their keys.
            size = group.head_size if group.value_dim is None else group.value_dim
            self.v.extend(parts[-1].narrow(-1, 0, size).unbind(0))
        self.num_state_slots = layout.num_state_slots
        """Slots of each row that hold its states; 0: the model has none."""
        self.states = [
            tuple(
                StateBank(self.tensors[0][:, place.kv_layer].view(torch.uint8), *place[1:])
                for place in layer
            )
            for layer in layout.state_places()
        ]
        """The state tensors of each recurrent layer."""

    def touch(self, first_slot: int, end_slot: int) -> None:
        """Write into the memory of some slots, which hold nothing that counts, as steps would.

        Reading memory that was never written costs less: the system shows the same empty page
        everywhere.
        """
        for tensor in self.tensors:
            tensor[:, :, :, first_slot:end_slot, :1].zero_()

    def copy(self, copies: StateCopies, queue: DeviceQueue) -> None:
        """Copy all bytes of some slots to others."""
        if not copies.from_slots:
            return
        both = (copies.from_slots, copies.to_slots)
        from_slots, to_slots = queue.upload([unpack_int32(p).astype(np.int64) for p in both])
        for tensor in self.tensors:
            tensor.index_copy_(3, to_slots, tensor.index_select(3, from_slots))

    def forget(self) -> None:
        """Lose all that was written, and on a CPU give the memory back until it is used."""
        if self.device.type != "cpu":
            return
        for tensor in self.tensors:
            advise(tensor, MADV_DONTNEED)


class StateTable:
    """The slots of each row's states, on the device."""

    def __init__(self, max_num_seqs: int, pool: KVPool, queue: DeviceQueue) -> None:
        """The last row is for padding, see `SequenceTable`: all its slots are the scratch slot."""
        shape = max_num_seqs + 1, pool.num_state_slots
        self.slots = torch.zeros(shape, dtype=torch.int32, device=queue.device)
        """int32 [max_num_seqs + 1, pool.num_state_slots]."""
        self.slots[max_num_seqs].fill_(pool.num_slots)
        self._queue = queue

    def take_in(self, ranges: Sequence[SlotRange]) -> None:
        """Take in ranges of negative positions, which `check_states` has seen; no others."""
        own = [part for part in ranges if part.start_position < 0]
        if not own:
            return
        width = self.slots.shape[1]
        slots = [unpack_int32(part.slots) for part in own]
        places = [
            (part.row + 1) * width + part.start_position + np.arange(len(these))
            for part, these in zip(own, slots, strict=True)
        ]
        both = self._queue.upload([np.concatenate(places), np.concatenate(slots)])
        self.slots.view(-1).index_copy_(0, *both)


AUTO_LIMIT_BYTES = 4 * 2**30
AUTO_LOCKED_BYTES = 16 * 2**30
"""Most host memory that is locked for a GPU unless asked for: it takes seconds, and the system can
do nothing else with it."""
MIN_SLOTS = 16
"""Fewest tokens that a pool holds beside the state of a sequence."""
SLOTS_WITHOUT_KV = 65_536
"""Slots for a model that keeps no keys and values: tokens of prompts that may be under way."""


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that this process could still allocate: the machine's rest, or a
    container's.

    Page cache that the kernel would drop counts as free, above all memory-mapped weights.
    """
    rests = [
        _cgroup_rest(folder, _FILES[version]) for folder, version in group_folders("memory", root)
    ]
    return min(
        [_mem_available(root / "proc/meminfo"), *(rest for rest in rests if rest is not None)]
    )


def num_kv_slots(
    config: ServeConfig, layout: KVLayout, *, free_bytes: int, kept_bytes: int = 0
) -> int:
    """Return the size in tokens of this rank's pool on the CPU.

    Args:
        config: --kv-memory (per rank, or auto), --max-kv-tokens, --tp.
        layout: knows the bytes of one token on this rank.
        free_bytes: free memory, before the pool, on the machine that all ranks share.
        kept_bytes: of it, what each rank needs for the inputs of guesses, see `DraftStates`.

    Raises:
        ConfigError: --kv-memory is no size, or more than is free, or an option needs a GPU.
        StartupError: not even `MIN_SLOTS` tokens fit, or those inputs do not.
    """
    if config.has_gpu_memory_utilization:
        raise ConfigError("--gpu-memory-utilization needs a GPU, and none was found")
    num_ranks = len(config.local_ranks)
    check_kept(kept_bytes, free_bytes, f"for {num_ranks} rank(s)", num_ranks)
    rest = free_bytes - kept_bytes * num_ranks
    if config.kv_memory == "auto":
        budget = min(AUTO_LIMIT_BYTES, rest // 2) // num_ranks
    else:
        budget = parse_memory(config.kv_memory, "--kv-memory")
        if budget * num_ranks > rest:
            beside = f" beside {_kept(kept_bytes)}" * bool(kept_bytes)
            raise ConfigError(
                f"--kv-memory {config.kv_memory} for {num_ranks} rank(s) is more than the"
                f" {rest / 2**20:.0f} MiB that are free{beside}"
            )
    num_slots = _slots_within(budget, layout)
    if config.max_kv_tokens:
        num_slots = min(num_slots, config.max_kv_tokens)
    if num_slots < min_slots(layout):
        raise StartupError(
            f"the KV pool would hold {num_slots} tokens of {layout.bytes_per_token} bytes, at least"
            f" {min_slots(layout)} are needed{_with_states(layout)}: raise --kv-memory or"
            " --max-kv-tokens"
        )
    return num_slots


def check_kept(kept_bytes: int, free_bytes: int, where: str, num_ranks: int = 1) -> None:
    """Check that there is memory for the inputs of guesses, before it is taken.

    Args:
        kept_bytes: of a rank, see `DraftStates`.
        free_bytes: free memory, which so many ranks share.
        where: whose memory that is, for the error.
        num_ranks: see above.

    Raises:
        StartupError: there is not, or nothing would be left for keys and values.
    """
    if kept_bytes and kept_bytes * num_ranks >= free_bytes:
        raise StartupError(
            f"{_kept(kept_bytes)} are more than the {free_bytes / 2**20:.0f} MiB that are free"
            f" {where}: lower --max-draft-tokens, --max-num-seqs or --max-num-batched-tokens"
        )


def _kept(kept_bytes: int) -> str:
    return f"{kept_bytes / 2**20:.0f} MiB for inputs of guesses (--speculation) on each rank"


def min_slots(layout: KVLayout) -> int:
    """Return the fewest slots of a pool."""
    return MIN_SLOTS + layout.num_state_slots


def _with_states(layout: KVLayout) -> str:
    num_states = layout.num_state_slots
    return f" ({num_states} of them for the state of one sequence)" if num_states else ""


def _slots_within(budget: int, layout: KVLayout) -> int:
    """Return how many tokens a budget of bytes holds."""
    return budget // layout.bytes_per_token if layout.bytes_per_token else SLOTS_WITHOUT_KV


class HostSizes(NamedTuple):
    """Tokens that the host pool of a rank holds."""

    num_slots: int
    """For requests that are paused."""
    num_prefix_slots: int
    """More of them, for prefixes that left the KV pool."""


def host_sizes(
    config: ServeConfig,
    layout: KVLayout,
    *,
    num_slots: int,
    free_bytes: int,
    is_beside_gpu: bool = False,
) -> HostSizes:
    """Return the sizes of this rank's host pool.

    Args:
        config: --host-kv-memory and --prefix-host-memory (per rank, or auto), --tp.
        layout: knows the bytes of one token on this rank.
        num_slots: size of its KV pool; one on the CPU has not touched its memory yet.
        free_bytes: free memory of the machine that all ranks share, the pools not taken off.
        is_beside_gpu: the KV pool is on a GPU: it takes nothing off, but memory will be locked.

    Raises:
        ConfigError: one of them is more than is free beside the KV pool, or has no use.
    """
    token_bytes = layout.bytes_per_token
    if not token_bytes:
        return HostSizes(0, 0)  # nothing is ever copied there
    pool_bytes = num_slots * token_bytes
    rest = max(0, free_bytes // len(config.local_ranks) - (0 if is_beside_gpu else pool_bytes))
    most = AUTO_LOCKED_BYTES if is_beside_gpu else pool_bytes
    for_requests = for_prefixes = 0
    if config.preemption != "recompute":
        most_auto = min(pool_bytes, rest) // 2
        for_requests = _host_bytes(config, "host_kv_memory", rest, min(most_auto, most))
    if layout.num_state_slots and config.prefix_host_memory not in ("auto", "0"):
        raise ConfigError(
            f"--prefix-host-memory {config.prefix_host_memory} does not go with a model that has"
            " recurrent layers: its prefixes, with their states, stay in the KV pool"
        )
    if config.cache_policy != "off" and not layout.num_state_slots:
        rest -= for_requests
        most_auto = min(pool_bytes, rest // 2)
        most = max(0, most - for_requests) if is_beside_gpu else most  # locked: one limit for both
        for_prefixes = _host_bytes(config, "prefix_host_memory", rest, min(most_auto, most))
    return HostSizes(for_requests // token_bytes, for_prefixes // token_bytes)


def _host_bytes(config: ServeConfig, option: str, rest: int, most_auto: int) -> int:
    """Return the bytes of host memory that an option asks for. Raises ConfigError: too many."""
    flag, text = flag_name(option), getattr(config, option)
    budget = most_auto if text == "auto" else parse_memory(text, flag)
    if budget > rest:
        raise ConfigError(
            f"{flag} {text} for {len(config.local_ranks)} rank(s) is more than the"
            f" {rest / 2**20:.0f} MiB that are free for each beside the other pools"
        )
    return budget


_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Files of a control group, by version: limit, use, and the part of the use that the kernel would
drop."""


def _cgroup_rest(folder: Path, names: tuple[str, str, str]) -> int | None:
    """Return the bytes that a group may still take; None if it has no limit."""
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


# How much of a GPU the KV pool may take: what is left once everything else has been measured.
#
#     │ others │ weights │ kept │ activations │ graphs │ staging │ KV pool ····· │ kept free │
#     └────────────────── total * --gpu-memory-utilization ──────────────────────┘
#
# `others` is what other processes and the CUDA libraries of this one take, `kept` the inputs of
# guesses (`DraftStates`), whose room is there like the weights. Weights are loaded and
# the largest steps run before the pool is made, so that nothing is guessed but the memory of CUDA
# graphs, which are captured behind it: two of them say what all will take.

MAX_STAGED_TOKENS = 8192
STAGING_SHARE = 128
"""Staging memory for copies is at most this part of the device: 1.1 GiB of an H200, enough for
8,192 tokens of a model of 8 B parameters to leave the pool within one step."""


KEPT_FREE = 50
"""One part in so many of the device is free where --kv-memory is given, 2.8 GiB of an H200: the
measurement at the start misses some memory (blocks of torch's allocator with gaps, late allocations
of drivers and NCCL)."""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The bytes of a GPU that are taken beside the KV pool."""

    total: int
    others: int
    """Other processes, and the memory of CUDA and its libraries in this one."""
    weights: int
    activations: int
    """Further bytes of the largest step, as torch's allocator reserves them."""
    graphs: int = 0
    staging: int = 0
    kept: int = 0
    """Inputs of guesses, see `DraftStates`."""

    @property
    def taken(self) -> int:
        """All of it."""
        parts = (self.others, self.weights, self.kept, self.activations, self.graphs, self.staging)
        return sum(parts)

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "the largest step": self.activations,
            "CUDA graphs": self.graphs,
            "staged copies": self.staging,
            "inputs of guesses": self.kept,
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
        StartupError: the wanted size does not fit, or not even `MIN_SLOTS` tokens do.
    """
    if config.kv_memory == "auto":
        limit = int(memory.total * config.gpu_memory_utilization)
        asked = f"--gpu-memory-utilization {config.gpu_memory_utilization:g}"
        budget = limit - memory.taken
    else:
        asked = f"--kv-memory {config.kv_memory}"
        limit = memory.total - memory.total // KEPT_FREE
        budget = parse_memory(config.kv_memory, "--kv-memory")
    num_slots = _slots_within(budget, layout) - 1
    if config.max_kv_tokens:
        num_slots = min(num_slots, config.max_kv_tokens)
    # With the scratch slot an even number: each layer of 8-bit heads begins at a multiple of 16,
    # without which kernels read byte by byte.
    if any(DTYPE_BYTES[group.dtype] == 1 and group.head_size % 16 for group in layout.groups):
        num_slots -= 1 - num_slots % 2
    needed = (num_slots + 1) * layout.bytes_per_token
    if config.kv_memory != "auto" and needed > limit - memory.taken:
        raise StartupError(
            f"{asked} does not fit on a GPU of {_gib(memory.total)}: {memory}, and"
            f" {_gib(memory.total - limit)} that are kept free, leave"
            f" {_gib(max(0, limit - memory.taken))}, and the pool would take {_gib(needed)}"
        )
    if num_slots < min_slots(layout):
        guesses = " --max-draft-tokens," * bool(memory.kept)
        raise StartupError(
            f"no room for a KV pool: {memory} leave {_gib(max(0, budget))} of the {_gib(limit)}"
            f" that {asked} allows of {_gib(memory.total)}, {max(0, num_slots)} tokens where"
            f" {min_slots(layout)} are needed{_with_states(layout)}. Lower{guesses}"
            " --max-num-batched-tokens or --max-num-seqs, use more ranks (--tp), or free the GPU"
        )
    return num_slots


def num_staged_slots(config: ServeConfig, layout: KVLayout, *, total_bytes: int) -> int:
    """Return how many tokens on their way to the host the GPU has staging memory for."""
    saves = config.preemption != "recompute" and config.host_kv_memory != "0"
    keeps = config.cache_policy != "off" and config.prefix_host_memory != "0"
    if not layout.bytes_per_token or not (saves or (keeps and not layout.num_state_slots)):
        return 0
    return max(1, min(MAX_STAGED_TOKENS, total_bytes // STAGING_SHARE // layout.bytes_per_token))


class MemoryStatistics(Protocol):
    """Figures of a GPU and of torch's allocator on it."""

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
    """Run the largest steps and return their memory and all that was taken before.

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
