"""The device of a worker, and the way of host data to it."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError
from lightserve.kernels.select import kernel_name
from lightserve.messages.common import DeviceFacts

# What a step needs of the device that it runs on: arrays up, results down, marks in its work.
#
#     host     arrays ─ pack ─► pinned ─┐                             ┌─► pinned ─ after the mark ─►
#     device                            └─ copy ─► tables, pass, sampling ─ copy ─┘
#
# Everything is put into one stream and done in that order; nothing here waits but `Mark.wait`.
# Pinned memory comes from torch's caching allocator, which keeps it and gives a block out again
# only when the copies that read or write it are over: it is the ring of buffers.

Array = npt.NDArray[Any]

_ALIGNMENT = 16
"""Bytes; every element type may start at a multiple of it."""


class Mark(Protocol):
    """A point in a device's work: past once everything that was put before it is done."""

    def is_past(self) -> bool:
        """Whether the device has passed it. Raises RuntimeError if its work failed."""

    def wait(self) -> None:
        """Return when the device has passed it; may be called by any thread.

        Raises:
            RuntimeError: the device's work failed.
        """

    def seconds_since(self, earlier: Mark) -> float:
        """Return the device's time from an earlier mark of its queue to this one, both past."""


class DeviceQueue(Protocol):
    """A device, and the order in which it works."""

    device: torch.device
    is_at_once: bool
    """Whether what is put into it is done when the call returns."""

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Return the arrays on the device, each with its shape and type.

        They may share memory with the arrays, which must not be written any more.
        """

    def download(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors on the host; they hold nothing until a later mark is past."""

    def mark(self) -> Mark:
        """Put a mark behind everything so far."""


def make_queue(device: torch.device) -> DeviceQueue:
    """Return the queue of a device: one per process and device."""
    return HostQueue() if device.type == "cpu" else CudaQueue(device)


class HostMark:
    """A mark that is past from the beginning: the host's work is done when it returns."""

    __slots__ = ("_at_s",)

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def is_past(self) -> bool:
        """See `Mark.is_past`."""
        return True

    def wait(self) -> None:
        """See `Mark.wait`."""

    def seconds_since(self, earlier: Mark) -> float:
        """See `Mark.seconds_since`."""
        assert isinstance(earlier, HostMark)
        return self._at_s - earlier._at_s


class HostQueue:
    """The CPU, which does everything at once; nothing is copied."""

    device = torch.device("cpu")
    is_at_once = True

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        """See `DeviceQueue.upload`."""
        return [torch.from_numpy(array) for array in arrays]

    def download(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See `DeviceQueue.download`."""
        return list(tensors)

    def mark(self) -> Mark:
        """See `DeviceQueue.mark`."""
        return HostMark()


class CudaMark:
    """An event of the current stream."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        # Blocking: who waits for a step sleeps, as planning and HTTP want the cores meanwhile.
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def is_past(self) -> bool:
        """See `Mark.is_past`."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """See `Mark.wait`."""
        # A thread begins on the first GPU: waiting there, it would give another rank a context.
        with torch.cuda.device(self._event.device):
            self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        """See `Mark.seconds_since`."""
        assert isinstance(earlier, CudaMark)
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class CudaQueue:
    """The current stream of a GPU."""

    is_at_once = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        """See `DeviceQueue.upload`: one copy for all of them, each at a multiple of 16 bytes."""
        # Small operations cost more than the copy: there is one view per type, which is split.
        by_type: dict[np.dtype[Any], list[int]] = {}
        for index, array in enumerate(arrays):
            by_type.setdefault(array.dtype, []).append(index)
        groups = [_Group([arrays[index] for index in group]) for group in by_type.values()]
        if not groups:
            return []
        packed = np.concatenate([group.data for group in groups])
        pinned = self.pinned(packed.shape, torch.uint8).copy_(torch.from_numpy(packed))
        data = pinned.to(self.device, non_blocking=True)
        found: list[tuple[int, Tensor]] = []
        start = 0
        for indices, group in zip(by_type.values(), groups, strict=True):
            end = start + len(group.data)
            found += zip(indices, group.split(data[start:end]), strict=True)
            start = end
        found.sort(key=itemgetter(0))
        return [tensor for _, tensor in found]

    def download(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See `DeviceQueue.download`."""
        return [
            self.pinned(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)
            for tensor in tensors
        ]

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return page-locked memory of the host."""
        return torch.empty(*shape, dtype=dtype, pin_memory=True)

    def mark(self) -> Mark:
        """See `DeviceQueue.mark`."""
        return CudaMark()


_DTYPES = {
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class _Group:
    """Arrays of one type, side by side: each is followed by padding up to 16 bytes."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        per_unit = _ALIGNMENT // arrays[0].itemsize
        zeros = np.zeros(per_unit, dtype=arrays[0].dtype)
        self._arrays = arrays
        self._sizes: list[int] = []
        parts: list[Array] = []
        for array in arrays:
            padding = -array.size % per_unit
            self._sizes += (array.size, padding)
            parts += (array.ravel(), zeros[:padding])
        self.data: npt.NDArray[np.uint8] = np.concatenate(parts).view(np.uint8)
        """[num_bytes]."""

    def split(self, data: Tensor) -> list[Tensor]:
        """Return the arrays as views of their bytes, uint8 [num_bytes], on any device."""
        parts = data.view(_DTYPES[self._arrays[0].dtype]).split_with_sizes(self._sizes)
        return [
            part if array.ndim == 1 else part.view(array.shape)
            for part, array in zip(parts[::2], self._arrays, strict=True)
        ]


def resolve_device(name: str, rank: int) -> torch.device:
    """Return the device of this node's `rank`-th rank for --device auto, cpu or cuda.

    Raises:
        ConfigError: cuda without a GPU for every rank up to this one.
    """
    if name == "cpu":
        return torch.device("cpu")
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto" and num_devices == 0:
        return torch.device("cpu")
    if rank >= num_devices:
        raise ConfigError(f"--device {name}: rank {rank} needs a GPU, found {num_devices}")
    return torch.device("cuda", rank)


def device_of_rank(config: ServeConfig, rank: int) -> torch.device:
    """Return the device of one of this node's ranks; see `resolve_device`."""
    return resolve_device(config.device, rank - config.local_ranks.start)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor on `device`, itself on the CPU; does not wait for the copy."""
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def put(array: Array, target: Tensor) -> None:
    """Copy an array into a tensor of its shape and type, behind the work that is queued there."""
    host = torch.from_numpy(array)
    if target.is_cuda:
        # Quicker than `pin_memory`, which first asks the driver about the memory that it copies.
        host = torch.empty(host.shape, dtype=host.dtype, pin_memory=True).copy_(host)
    target.copy_(host, non_blocking=True)


# Queues of device work behind a small interface: what is queued where, and what waits for what.
#
# On a GPU work runs later, beside the host and beside other queues. Tests have forms of the
# interface that run it at once, and that choose the worst order that a GPU may.


class Event(Protocol):
    """A point of a queue: reached once all that was queued before it has run."""

    def seconds_since(self, earlier: Event) -> float:
        """Return the seconds between two timed events that have been reached."""


class Stream(Protocol):
    """Work in order, concurrent with that of other queues but for `wait`."""

    def run(self, work: Callable[[], None]) -> None:
        """Queue the launches of `work`."""

    def upload(self, host: Tensor) -> Tensor:
        """Return a host tensor on the device, as later work of this queue sees it."""

    def record(self, *, is_timed: bool = False) -> Event:
        """Return the point behind all that is queued."""

    def wait(self, event: Event) -> None:
        """Let later work of this queue run after an event of another queue."""


class CopyStreams(NamedTuple):
    """The streams that copies of KV are queued to."""

    compute: Stream
    """Where forward passes run; nothing is run here by copies, they are waited for."""
    pool: Stream
    """All that touches the KV pool: gathers into staging memory, and loads."""
    drain: Stream
    """From staging memory to the host."""


def cuda_copy_streams(device: torch.device) -> CopyStreams:
    """Return the queues of a GPU: its current stream, and two of their own for copies."""
    return CopyStreams(
        CudaStream(torch.cuda.current_stream(device)),
        CudaStream(torch.cuda.Stream(device)),  # type: ignore[no-untyped-call]
        CudaStream(torch.cuda.Stream(device)),  # type: ignore[no-untyped-call]
    )


class CudaStream:
    """A CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, work: Callable[[], None]) -> None:
        """See `Stream.run`."""
        with torch.cuda.stream(self._stream):
            work()

    def upload(self, host: Tensor) -> Tensor:
        """See `Stream.upload`."""
        with torch.cuda.stream(self._stream):
            return to_device(host, self._stream.device)

    def record(self, *, is_timed: bool = False) -> Event:
        """See `Stream.record`."""
        return CudaEvent(self._stream, is_timed=is_timed)

    def wait(self, event: Event) -> None:
        """See `Stream.wait`."""
        assert isinstance(event, CudaEvent)
        self._stream.wait_event(event.event)


class CudaEvent:
    """See `Event`."""

    def __init__(self, stream: torch.cuda.Stream, *, is_timed: bool) -> None:
        self.event = torch.cuda.Event(enable_timing=is_timed)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def seconds_since(self, earlier: Event) -> float:
        """See `Event.seconds_since`."""
        assert isinstance(earlier, CudaEvent)
        return float(earlier.event.elapsed_time(self.event)) / 1e3


# What this rank computes on, for people and for the key of its profile.

CPU_INFO = Path("/proc/cpuinfo")
DRIVER_INFO = Path("/proc/driver/nvidia/version")


def facts_of(config: ServeConfig, device: torch.device) -> DeviceFacts:
    """Return the facts of a rank's device and of the kernels that a configuration takes there."""
    kernels = kernel_name(
        config.attention_backend, batch_invariant=config.batch_invariant, device=device
    )
    if device.type == "cpu":
        return DeviceFacts("cpu", _cpu_name(), 0, "", "", str(torch.__version__), "", kernels)
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(
        kind=device.type,
        name=properties.name,
        memory_bytes=properties.total_memory,
        driver=_driver_version(),
        cuda=torch.version.cuda or "",
        torch=str(torch.__version__),
        triton=_triton_version(),
        kernels=kernels,
    )


def _cpu_name() -> str:
    """Return the name of the processor, as well as the system knows it."""
    try:
        found = re.search(r"^model name\s*: (.*)$", CPU_INFO.read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else f"cpu {platform.machine()}"


def _driver_version() -> str:
    """Return the driver's version, such as 580.159.04; "unknown" where the system does not say."""
    try:
        found = re.search(r"Kernel Module(?: +for \S+)? +(\d+(?:\.\d+)+)", DRIVER_INFO.read_text())
    except OSError:
        found = None
    return found[1] if found else "unknown"


def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""
