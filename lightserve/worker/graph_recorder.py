"""Records device work once and repeats it: CUDA graphs behind a small interface.

What is recorded are launches on fixed addresses with fixed scalars. A function that is recorded
therefore may read no value from the device, may let no value of the host decide anything that
changes later, and must find its inputs and leave its outputs in the same tensors every time.
Tests have forms of the interface for the CPU (tests/support/graph_recorders.py).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch

NUM_WARM_UPS = 2
"""Runs before a function is recorded: the first compiles kernels and makes handles, the second
finds them made."""


MAX_DRIVER_BYTES = 64 << 20
"""Most that a driver takes for a graph of some thousand launches, of which each is some KiB."""


class MemoryUse(NamedTuple):
    """Bytes of a device."""

    reserved: int
    """By this process's allocator."""
    in_all: int
    """By drivers and other processes as well."""

    def since(self, earlier: MemoryUse) -> int:
        """Return what the recording of one graph has taken.

        What the allocator took is exact. A driver keeps a graph's launches elsewhere, of which
        only the device as a whole is known, and others take and give back memory meanwhile: no
        more counts than a graph can need.
        """
        reserved = self.reserved - earlier.reserved
        outside = self.in_all - earlier.in_all - reserved
        return reserved + min(max(0, outside), MAX_DRIVER_BYTES)


class GraphRecorder(Protocol):
    """Makes graphs that are replayed one at a time, in any order, and never side by side."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Run `function` to warm it up, record it, and return what repeats its work.

        Work that was launched before is done before the replay's, and this before what follows.

        Raises:
            RuntimeError: the function did what cannot be recorded, or memory ran out.
        """

    def memory(self) -> MemoryUse:
        """Return what is taken, after giving back what is only kept for later."""


class CudaGraphRecorder:
    """CUDA graphs on one device, all with one pool of memory for what is between.

    Every graph's intermediate tensors are free again when it ends, so that the next may take the
    same memory: record the largest first. Ranks that share collectives record the same functions
    in the same order, as NCCL's kernels are part of the graphs.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        recording: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`recording`: what functions run within, see `TensorParallel.recording`."""
        self._device = device
        self._recording = recording
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """See `GraphRecorder.record`."""
        with self._recording():
            return self._record(function)

    def _record(self, function: Callable[[], None]) -> Callable[[], None]:
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARM_UPS):
                function()
        outer.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog, pinned memory) may do what this one must not.
        with (
            _no_collection(),
            torch.cuda.graph(
                graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            function()
        return graph.replay

    def memory(self) -> MemoryUse:
        """See `GraphRecorder.memory`; the graphs' pool is the allocator's."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return MemoryUse(torch.cuda.memory_reserved(self._device), total_bytes - free_bytes)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector off: a tensor's or a graph's end must not fall into a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
