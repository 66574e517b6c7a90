"""Copies of KV beside a GPU, without one: queues that run everything at once, and plain torch."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightserve.worker.device import CopyStreams, Event


def immediate_copy_queues() -> CopyStreams:
    """Return queues that run everything at once, in the order in which it is queued."""
    queue = ImmediateQueue()
    return CopyStreams(queue, queue, queue)


class ImmediateQueue:
    """The CPU: nothing is ever waited for."""

    def run(self, work: Callable[[], None]) -> None:
        """See `Queue.run`."""
        work()

    def upload(self, host: Tensor) -> Tensor:
        """See `Queue.upload`."""
        return host

    def record(self, *, is_timed: bool = False) -> Event:
        """See `Queue.record`."""
        return ImmediateEvent()

    def wait(self, event: Event) -> None:
        """See `Queue.wait`."""


class ImmediateEvent:
    """See `Event`: always reached, and no time has passed."""

    def seconds_since(self, earlier: Event) -> float:
        """See `Event.seconds_since`."""
        return 0.0


class TorchCopies:
    """See `CopyKernels`; everything on one device."""

    def gather(self, pool: Tensor, slots: Tensor, rows: Tensor) -> None:
        """See `CopyKernels.gather`."""
        rows.copy_(_rows_of(pool).index_select(0, slots))

    def scatter(self, rows: Tensor, pool: Tensor, slots: Tensor) -> None:
        """See `CopyKernels.scatter`."""
        pieces = rows.reshape(-1, *pool.shape[:3], pool.shape[4])
        pool.index_copy_(3, slots.long(), pieces.movedim(0, 3))

    def put_rows(self, source: Tensor, rows: Tensor, row_ids: Tensor) -> None:
        """See `CopyKernels.put_rows`."""
        rows.index_copy_(0, row_ids.long(), source)

    def take_rows(self, rows: Tensor, row_ids: Tensor, target: Tensor) -> None:
        """See `CopyKernels.take_rows`."""
        target.copy_(rows.index_select(0, row_ids))


def _rows_of(pool: Tensor) -> Tensor:
    """Return the pool as [num_slots, pieces, head_dim]; a view."""
    return pool.flatten(0, 2).transpose(0, 1)
