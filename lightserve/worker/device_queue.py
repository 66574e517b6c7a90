"""What a step needs of the device that it runs on: arrays up, results down, marks in its work.

    host     arrays ─ pack ─► pinned ─┐                             ┌─► pinned ─ after the mark ─►
    device                            └─ copy ─► tables, pass, sampling ─ copy ─┘

Everything is put into one stream and done in that order; nothing here waits but `Mark.wait`.
Pinned memory comes from torch's caching allocator, which keeps it and gives a block out again
only when the copies that read or write it are over: it is the ring of buffers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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
            RuntimeError: what the device did failed.
        """

    def seconds_since(self, earlier: Mark) -> float:
        """Return the device's time from an earlier mark of its queue to this one, both past."""


class DeviceQueue(Protocol):
    """A device, and the order in which it works."""

    device: torch.device

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
    """Past from the beginning: what the host does is done when it returns."""

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
