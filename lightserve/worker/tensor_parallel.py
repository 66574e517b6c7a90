"""Tensor parallelism over torch.distributed: one process per rank, gloo on CPUs.

The ranks of one generation meet at a file of the private run directory, and gloo's sockets
listen on the loopback interface alone. A collective that a dead peer does not join raises at
once, one that a hung peer does not join within the time limit; the supervisor replaces the
group anyhow, as one.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightserve.errors import StartupError
from lightserve.models.parallel import SingleRank, TensorParallel


class ProcessGroupTensorParallel:
    """This process as one rank of torch's process group."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor | None:
        """Return the ranks' `x` [N, K] side by side, [N, size*K], on rank 0, None elsewhere."""
        x = x.contiguous()
        if self.rank != 0:
            dist.gather(x)
            return None
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.gather(x, parts)
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrite `x` with rank 0's."""
        dist.broadcast(x, src=0)
        return x

    def close(self) -> None:
        """Leave the group; peers that wait for this rank get an error."""
        dist.destroy_process_group()


def join_group(
    *, rank: int, size: int, store_path: str, timeout_s: float, backend: str = "gloo"
) -> TensorParallel:
    """Meet the other ranks and return this rank's end of the group; once per process.

    Args:
        rank: 0 … size-1.
        size: number of ranks; with one no group is made.
        store_path: a file, the same for all ranks and fresh for each generation.
        timeout_s: for the meeting and for each collective.
        backend: torch.distributed's name: "gloo" for CPU tensors.

    Raises:
        StartupError: the others did not come in time.
    """
    if size == 1:
        return SingleRank()
    os.environ["GLOO_SOCKET_IFNAME"] = _loopback_interface()
    timeout = timedelta(seconds=timeout_s)
    try:
        store = dist.FileStore(store_path, size)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise StartupError(f"rank {rank} of {size} could not meet the others: {error}") from error
    return ProcessGroupTensorParallel()


def _loopback_interface() -> str:
    """Return the name of the loopback interface: lo, or lo0 on macOS."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
