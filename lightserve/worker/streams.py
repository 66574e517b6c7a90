"""Queues of device work behind a small interface: what is queued where, and what waits for what.

On a GPU work runs later, beside the host and beside other queues. Tests have forms of the interface
that run it at once, and that choose the worst order that a GPU may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightserve.worker.device import to_device


class Event(Protocol):
    """A point of a queue: reached once all that was queued before it has run."""

    def seconds_since(self, earlier: Event) -> float:
        """Return the seconds between two timed events that have been reached."""


class Queue(Protocol):
    """Work in order, concurrent with that of other queues but for `wait`."""

    def run(self, work: Callable[[], None]) -> None:
        """Queue what `work` launches."""

    def upload(self, host: Tensor) -> Tensor:
        """Return a host tensor on the device, as what is queued here from now on sees it."""

    def record(self, *, is_timed: bool = False) -> Event:
        """Return the point behind all that is queued."""

    def wait(self, event: Event) -> None:
        """Let what is queued from here on run after an event of another queue."""


class CopyQueues(NamedTuple):
    """What copies of KV are queued to."""

    compute: Queue
    """Where forward passes run; nothing is run here by copies, they are waited for."""
    pool: Queue
    """All that touches the KV pool: gathers into staging memory, and loads."""
    drain: Queue
    """From staging memory to the host."""


def cuda_copy_queues(device: torch.device) -> CopyQueues:
    """Return the queues of a GPU: its current stream, and two of their own for copies."""
    return CopyQueues(
        CudaQueue(torch.cuda.current_stream(device)),
        CudaQueue(torch.cuda.Stream(device)),  # type: ignore[no-untyped-call]
        CudaQueue(torch.cuda.Stream(device)),  # type: ignore[no-untyped-call]
    )


class CudaQueue:
    """A CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, work: Callable[[], None]) -> None:
        """See `Queue.run`."""
        with torch.cuda.stream(self._stream):
            work()

    def upload(self, host: Tensor) -> Tensor:
        """See `Queue.upload`."""
        with torch.cuda.stream(self._stream):
            return to_device(host, self._stream.device)

    def record(self, *, is_timed: bool = False) -> Event:
        """See `Queue.record`."""
        return CudaEvent(self._stream, is_timed=is_timed)

    def wait(self, event: Event) -> None:
        """See `Queue.wait`."""
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
