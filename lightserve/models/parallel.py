"""Tensor parallelism as the layers see it: who am I, and three collectives.

Every rank calls the same collectives in the same order with the same shapes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

from torch import Tensor


class TensorParallel(Protocol):
    """A group of ranks, each with its part of every weight."""

    rank: int
    """0 … size-1; rank 0 has the logits and samples."""
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks, same shape and dtype; may overwrite `x`."""

    def gather(self, x: Tensor) -> Tensor | None:
        """Return the ranks' `x` [N, K] side by side, [N, size*K], on rank 0 and None elsewhere."""

    def broadcast(self, x: Tensor) -> Tensor:
        """Return rank 0's `x`; every rank passes a tensor of its shape and dtype, overwritten."""

    def recording(self) -> AbstractContextManager[None]:
        """Return what collectives are called within that become part of CUDA graphs."""

    def close(self) -> None:
        """Leave the group."""


class SingleRank:
    """The group of one: nothing to exchange."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x

    def gather(self, x: Tensor) -> Tensor | None:
        """Return `x`."""
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x

    def recording(self) -> AbstractContextManager[None]:
        """Return nothing to do."""
        return nullcontext()

    def close(self) -> None:
        """Nothing to leave."""


class Part(NamedTuple):
    """A rank's half-open range of a dimension."""

    start: int
    size: int


def even_part(total: int, tp: TensorParallel) -> Part:
    """Return this rank's equal part of a dimension that divides."""
    assert total % tp.size == 0, (total, tp.size)
    size = total // tp.size
    return Part(tp.rank * size, size)


def kv_head_part(num_kv_heads: int, tp: TensorParallel) -> Part:
    """Return this rank's KV heads: an equal part, or one head shared with its neighbours.

    With 2 KV heads on 4 ranks: ranks 0 and 1 hold head 0, ranks 2 and 3 head 1, as do the
    query heads that read them.
    """
    if num_kv_heads >= tp.size:
        return even_part(num_kv_heads, tp)
    assert tp.size % num_kv_heads == 0, (num_kv_heads, tp.size)
    return Part(tp.rank * num_kv_heads // tp.size, 1)
