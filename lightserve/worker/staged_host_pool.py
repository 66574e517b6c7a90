"""The host pool beside a GPU: copies overlap with forward passes and never stop the host.

Saved KV is gathered into staging memory on the device first, at the speed of its memory, so that
slots can be overwritten at once; from there it drains to the host while the next steps run.
Loaded KV comes the same way back. Over the bus the copy engines do the work and not the
GPU's processors: copies are put into the order of their host slots, which mostly are a few runs
that lie together in memory. Only where they are scattered, a kernel takes them one by one.

    compute:  forward i-1 ┬─────────────────── wait ─ forward i ───────────── wait ─ forward i+1
    pool:                 └ saves i ─ loads i ─┘────────── ahead loads i ────────┘
    drain:                     └ saves i to the host ──────

Ordering, with pool copies and drains each in the order in which they are queued:

1. A copy that touches the pool waits for every forward pass launched before it: that may have
   written the saved KV, and may still read or write the overwritten slots.
2. A forward pass waits for the saves and loads of its plan and for all copies of plans before:
   it may overwrite slots that they read, and read KV that they bring. It does not wait for drains.
3. A gather into staging memory waits until its earlier contents have drained.
4. A drain waits for its gather. So it also follows every load queued before, from the host slots
   that it may overwrite.
5. A load waits for the drains that wrote its host slots.

Each place in the pool or on the host is so read and written in the order of the plans.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightserve.errors import StartupError
from lightserve.logs import one_line
from lightserve.messages.common import Int32Array, unpack_int32
from lightserve.messages.router_worker import KVCopies, StepPlan
from lightserve.progress import progress
from lightserve.worker.device import CopyStreams, Event, Stream, cuda_copy_streams
from lightserve.worker.host_pool import CopyWait, DirectHostPool, HostPool, Waited
from lightserve.worker.memory import KVPool

# Moving the KV of single tokens between a pool, whose layers lie apart, and rows that hold all.
#
#   pool  [2, num_layers, num_kv_heads, num_slots, head_dim]    one slot: 2 * layers * heads pieces
#   rows  [num_rows, 2 * num_layers * num_kv_heads, head_dim]   one row: all pieces, side by side
#
# Bytes are never altered. Rows are memory of the device or the host; see `kernels.triton.copies`.


class CopyKernels(Protocol):
    """The copies that the host pool needs; all indices are int32 [n], where the pool is."""

    def gather(self, pool: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Copy slot slots[i] of the pool to rows[i], for rows [n, …]."""

    def scatter(self, rows: Tensor, pool: Tensor, slots: Tensor) -> None:
        """Copy rows[i] to slot slots[i] of the pool, for rows [n, …]."""

    def put_rows(self, source: Tensor, rows: Tensor, row_ids: Tensor) -> None:
        """Copy source[i] to rows[row_ids[i]]; `rows` may be page-locked memory of the host."""

    def take_rows(self, rows: Tensor, row_ids: Tensor, target: Tensor) -> None:
        """Copy rows[row_ids[i]] to target[i]; `rows` may be page-locked memory of the host."""


# Large page-locked host memory: what a GPU reads and writes beside everything else.
#
# torch's own `pin_memory` rounds up to a power of two (33 GiB would take 64) and is silent for as
# long as it takes. Here memory is mapped first, in huge pages where the system has them, and locked
# as one: a copy may not cross from what was locked by one call to what was by another.

_MAPPED_AND_PORTABLE = 0x03
"""cudaHostRegisterPortable | cudaHostRegisterMapped: with an address on the device."""


class _Pages(mmap.mmap):
    """Mapped memory that is unlocked before it is unmapped.

    `weakref.finalize` would come too late: a mapping is gone by then, and CUDA's error about that
    would be raised by whatever is launched next.
    """

    locked_at = 0

    def __del__(self) -> None:
        if self.locked_at and not sys.is_finalizing():
            _unlock(self.locked_at)


def pinned_bytes(num_bytes: int, *, label: str, is_shown: bool = True) -> Tensor:
    """Return page-locked memory, uint8 [num_bytes], unlocked when no reference to it is left.

    Args:
        num_bytes: at least 1.
        label: its name in the progress.
        is_shown: whether progress is shown.

    Raises:
        StartupError: the system gives no memory, or locks no more of it.
    """
    try:
        # Private: shared pages are never huge but where the system was told so.
        pages = _Pages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise StartupError(f"no {_gib(num_bytes)} of host memory: {error}") from error
    with suppress(OSError):  # a kernel without them: slower to lock, and nothing else
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    with progress(label, num_bytes, is_shown=is_shown, in_bytes=True) as advance:
        _lock(memory.data_ptr(), num_bytes)
        pages.locked_at = memory.data_ptr()
        advance(num_bytes)
    return memory


def _lock(address: int, num_bytes: int) -> None:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(cudart.cudaHostRegister(address, num_bytes, _MAPPED_AND_PORTABLE))
    if error:
        raise StartupError(
            f"cannot page-lock {_gib(num_bytes)} of host memory (CUDA error {error}):"
            " less of --host-kv-memory or --prefix-host-memory would do"
        )


def _unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


NUM_DRAINS = 8
"""One drain takes at most this share of the staging memory, which is so free again bit by bit."""
MAX_RUNS = 32
"""Most runs of host slots that a part is copied in; each takes the host about 5 µs, and a kernel's
launch five times that."""

_NEEDS_TRITON = "Triton cannot compile the copies of KV to the host: {reason}"


class StagedHostPool(HostPool):
    """Keys and values of `num_slots` tokens, each in one row of host memory."""

    overlaps_copies = True

    def __init__(
        self,
        pool: KVPool,
        rows: list[Tensor],
        staging: list[Tensor],
        *,
        queues: CopyStreams,
        kernels: CopyKernels,
        max_runs: int = MAX_RUNS,
    ) -> None:
        """Use memory that the caller has allocated.

        Args:
            pool: the KV pool that is copied from and to.
            rows: per KV group, host memory [num_slots, 2 * num_layers * num_kv_heads, head_dim];
                page-locked where the pool is on a GPU.
            staging: the same for fewer tokens, at least one, where the pool is.
            queues: where copies run.
            kernels: the kernels of the copies.
            max_runs: from more runs on, a kernel copies over the bus.
        """
        super().__init__(len(rows[0]), pool)
        self._rows = rows
        self._staging = staging
        self._queues = queues
        self._kernels = kernels
        self._max_runs = max_runs
        self._ring = _Ring(len(staging[0]), queues.pool)
        self._drained_by = np.full(len(rows[0]), -1, dtype=np.int64)
        """Number of the last drain that writes a host slot."""
        self._ahead: Event | None = None
        """Reached when the copies ahead of the plan before are made."""

    def warm_up(self) -> None:
        """Copy the spare slot to the host and back, so that no request waits for compilers."""
        self._queues.pool.wait(self._queues.compute.record())  # the slot has been filled
        places = torch.tensor([[self._pool.num_slots], [0]], dtype=torch.int32)
        slots, row_ids = self._queues.pool.upload(places)
        self._queues.pool.run(partial(self._run_kernels, slots, row_ids))
        self._queues.compute.wait(self._queues.pool.record())

    def _run_kernels(self, slots: Tensor, row_ids: Tensor) -> None:
        place = slice(0, len(slots))
        self._gather(slots, place)
        for staged, rows in zip(self._staging, self._rows, strict=True):
            self._kernels.put_rows(staged[place], rows, row_ids)
            self._kernels.take_rows(rows, row_ids, staged[place])
        self._scatter(place, slots)

    def begin(self, plan: StepPlan) -> CopyWait:
        """See `HostPool.begin`; the host waits for nothing."""
        compute, pool, _ = self._queues
        is_waited_for = bool(plan.saves.slots or plan.loads.slots)
        is_ahead = bool(plan.ahead_loads.slots)
        if is_waited_for or is_ahead:
            pool.wait(compute.record())  # rule 1
        wait = self._copy_now(plan) if is_waited_for else self._wait_for_last_plan()
        self._ahead = None
        if is_ahead:
            self._load(plan.ahead_loads)
            self._ahead = pool.record()
        return wait

    def end(self, plan: StepPlan) -> None:
        """See `HostPool.end`: all copies of the plan have begun."""

    def _copy_now(self, plan: StepPlan) -> CopyWait:
        """Queue the copies that the forward pass waits for (rule 2), behind earlier copies
        ahead."""
        compute, pool, _ = self._queues
        start = compute.record(is_timed=True)
        self._save(plan.saves)
        self._load(plan.loads)
        compute.wait(pool.record())
        return _QueueWait(start, compute.record(is_timed=True))

    def _wait_for_last_plan(self) -> CopyWait:
        if self._ahead is not None:
            self._queues.compute.wait(self._ahead)  # rule 2
        return Waited(0.0)

    def _save(self, copies: KVCopies) -> None:
        """Gather into staging memory and drain to the host, in as many parts as it takes."""
        if not copies.slots:
            return
        _, pool, drain = self._queues
        places = _ordered(copies)
        slots, targets = pool.upload(torch.from_numpy(places))
        for part, place in self._parts(len(slots)):  # rule 3
            pool.run(partial(self._gather, slots[part], place))
            drain.wait(pool.record())  # rule 4
            drain.run(partial(self._drain, place, places[1, part], targets[part]))
            number = self._ring.release(place, drain.record(), targets)
            self._drained_by[places[1, part]] = number

    def _load(self, copies: KVCopies) -> None:
        """Fetch KV that is on the host by then into staging memory, and scatter it."""
        if not copies.slots:
            return
        pool = self._queues.pool
        places = _ordered(copies)
        self._ring.wait_for(int(self._drained_by[places[1]].max()))  # rule 5
        slots, sources = pool.upload(torch.from_numpy(places))
        for part, place in self._parts(len(slots)):  # free again when this queue is behind it
            pool.run(partial(self._fetch, places[1, part], sources[part], place))
            pool.run(partial(self._scatter, place, slots[part]))

    def _parts(self, num_tokens: int) -> Iterator[tuple[slice, slice]]:
        """Yield parts of a list of tokens, and where in staging memory each of them goes."""
        start = 0
        while start < num_tokens:
            place = self._ring.acquire(num_tokens - start)
            end = start + place.stop - place.start
            yield slice(start, end), place
            start = end

    def _gather(self, slots: Tensor, place: slice) -> None:
        for tensor, staged in zip(self._pool.tensors, self._staging, strict=True):
            self._kernels.gather(tensor, slots, staged[place])

    def _scatter(self, place: slice, slots: Tensor) -> None:
        for tensor, staged in zip(self._pool.tensors, self._staging, strict=True):
            self._kernels.scatter(staged[place], tensor, slots)

    def _drain(self, place: slice, host_slots: Int32Array, row_ids: Tensor) -> None:
        """Copy from staging memory to the host; `row_ids` are `host_slots`, on the device."""
        runs = _runs(host_slots, self._max_runs)
        for staged, rows in zip(self._staging, self._rows, strict=True):
            if runs is None:
                self._kernels.put_rows(staged[place], rows, row_ids)
                continue
            for run, first in runs:
                found = staged[place][run]
                rows[first : first + len(found)].copy_(found, non_blocking=True)

    def _fetch(self, host_slots: Int32Array, row_ids: Tensor, place: slice) -> None:
        """Copy from the host to staging memory; `row_ids` are `host_slots`, on the device."""
        runs = _runs(host_slots, self._max_runs)
        for staged, rows in zip(self._staging, self._rows, strict=True):
            if runs is None:
                self._kernels.take_rows(rows, row_ids, staged[place])
                continue
            for run, first in runs:
                target = staged[place][run]
                target.copy_(rows[first : first + len(target)], non_blocking=True)


class _Drain(NamedTuple):
    number: int
    place: slice
    event: Event
    places: Tensor
    """Indices that the drain's kernel reads: kept until it has run, as torch only knows of the
    pool's queue, which they were made for."""


class _Ring:
    """Which of the staging memory is used by drains that may be under way.

    0 ─────── oldest drain ····· newest drain ─┐ next ─────────── num_tokens
    (behind `next`, drains of the lap before, each waited for before it is overwritten)
    """

    def __init__(self, num_tokens: int, pool: Stream) -> None:
        self._num_tokens = num_tokens
        self._max_tokens = -(-num_tokens // NUM_DRAINS)
        self._pool = pool
        self._next = 0
        self._num_drains = 0
        self._drains: deque[_Drain] = deque()
        """Drains that the pool's queue has not waited for, oldest first."""

    def acquire(self, num_tokens: int) -> slice:
        """Return a place for some of `num_tokens` tokens; the pool's queue may write it next."""
        if self._next == self._num_tokens:
            self._next = 0
        start = self._next
        self._next += min(num_tokens, self._max_tokens, self._num_tokens - start)
        while self._drains and _overlap(self._drains[0].place, slice(start, self._next)):
            self._pool.wait(self._drains.popleft().event)
        return slice(start, self._next)

    def release(self, place: slice, event: Event, places: Tensor) -> int:
        """Note that a place is free at an event; return the number of its drain."""
        number = self._num_drains
        self._num_drains += 1
        self._drains.append(_Drain(number, place, event, places))
        return number

    def wait_for(self, number: int) -> None:
        """Let the pool's queue wait for a drain, unless it has waited for it or a later one."""
        if self._drains and number >= self._drains[0].number:
            self._pool.wait(self._drains[number - self._drains[0].number].event)


class _QueueWait:
    """See `CopyWait`: between two points of the compute queue."""

    def __init__(self, start: Event, end: Event) -> None:
        self._start = start
        self._end = end

    def seconds(self) -> float:
        """See `CopyWait.seconds`."""
        return self._end.seconds_since(self._start)


def _overlap(place: slice, other: slice) -> bool:
    return bool(place.start < other.stop and other.start < place.stop)


def _ordered(copies: KVCopies) -> npt.NDArray[np.int32]:
    """Return places in the pool and on the host, int32 [2, n], in the order of the latter."""
    host_slots = unpack_int32(copies.host_slots)
    order = np.argsort(host_slots)
    return np.stack([unpack_int32(copies.slots)[order], host_slots[order]])


def _runs(host_slots: Int32Array, most: int) -> list[tuple[slice, int]] | None:
    """Return the runs of host slots, which rise, that follow each other: which ones, the first.

    None: there are more than `most`.
    """
    ends = np.flatnonzero(np.diff(host_slots) != 1) + 1
    if len(ends) >= most:
        return None
    starts, stops = [0, *ends.tolist()], [*ends.tolist(), len(host_slots)]
    firsts = host_slots[starts].tolist()
    return [
        (slice(start, stop), first)
        for start, stop, first in zip(starts, stops, firsts, strict=True)
    ]


def make_host_pool(
    num_slots: int, pool: KVPool, *, num_staged: int, is_shown: bool = True
) -> HostPool:
    """Return a host pool for `num_slots` tokens beside a KV pool.

    Args:
        num_slots: 0 where nothing is ever copied.
        pool: on a GPU, copies overlap with its work.
        num_staged: tokens that staging memory on the GPU holds, see `memory.num_staged_slots`.
        is_shown: whether to show how far the locking of host memory is.

    Raises:
        StartupError: the host memory cannot be had, or Triton does not run here.
    """
    if pool.device.type != "cuda" or num_slots == 0:
        return DirectHostPool(num_slots, pool)
    # An optional dependency, and slow to import: only where it is used.
    from lightserve.kernels.triton.copies import TritonCopies  # noqa: PLC0415

    memory = pinned_bytes(
        num_slots * pool.bytes_per_token, label="locking host memory", is_shown=is_shown
    )
    rows, start = [], 0
    for tensor in pool.tensors:
        shape = _row_shape(tensor, num_slots)
        end = start + math.prod(shape) * tensor.itemsize
        rows.append(memory[start:end].view(tensor.dtype).view(shape))
        start = end
    host_pool = StagedHostPool(
        pool,
        rows,
        [tensor.new_empty(_row_shape(tensor, num_staged)) for tensor in pool.tensors],
        queues=cuda_copy_streams(pool.device),
        kernels=TritonCopies(),
    )
    try:
        host_pool.warm_up()
    except RuntimeError as error:  # no C compiler, for one
        raise StartupError(_NEEDS_TRITON.format(reason=one_line(error))) from error
    return host_pool


def _row_shape(tensor: Tensor, num_rows: int) -> tuple[int, int, int]:
    """Return the shape of rows that hold tokens of `KVPool.tensors`' kind."""
    return num_rows, math.prod(tensor.shape[:3]), tensor.shape[4]
