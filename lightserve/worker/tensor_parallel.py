"""Tensor parallelism over torch.distributed: a process per rank, on one machine or several.

Tensors on GPUs travel over NCCL, tensors on the host over gloo, in one group: decisions of hosts
(how long a profile lasts) never wait for a device, and collectives on a device never wait for the
host. Each is an operation of the current stream, so that it can be part of a CUDA graph.

The ranks of one incarnation meet at a file of the private run directory; sockets are on the
loopback interface alone, and NCCL's data goes over NVLink, PCIe or shared memory. Those of several
machines meet at a socket of rank 0's, and all of their sockets are on the interface by which that
is reached: neither torch's rendezvous nor the ranks' messages are encrypted, so that network has to
be theirs alone.

On GPUs there are two communicators: recorded collectives of CUDA graphs go over one, all others
over the other, so that neither finds the other's state in its own.

A dead peer. gloo raises at once. NCCL's kernels go on waiting on the device, so nothing is left
to the rank itself: who started the ranks (the supervisor, `lightserve profile`) sees the death of
one and kills the others, which ends their kernels. A peer that hangs is noticed by the steps that
do not finish (--step-timeout-s), and by the time limit of each collective.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightserve.errors import StartupError
from lightserve.models.base import SingleRank, TensorParallel

# Not said to be exported, though documented.
_FileStore, _TCPStore = dist.FileStore, dist.TCPStore  # type: ignore[attr-defined]

TCP = "tcp://"
"""Begins the address of a rendezvous that is no file."""
_SIOCGIFADDR = 0x8915
"""Linux's request for an interface's first IPv4 address."""

# torch 2.13 gives it this name and warns of the one that it has had.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ProcessGroupTensorParallel:
    """This process as one rank of torch's process group."""

    def __init__(self, unrecorded: dist.ProcessGroup | None = None) -> None:
        """`unrecorded`: group for collectives outside graphs; None: the group of everything."""
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._group = unrecorded

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        dist.all_reduce(x, group=self._group)
        return x

    def gather(self, x: Tensor) -> Tensor | None:
        """Return the ranks' `x` [N, K] side by side, [N, size*K], on rank 0, None elsewhere.

        Every rank gets all of them: NCCL gathers for all in one kernel, for one by a message from
        each peer, over connections of their own.
        """
        parts = x.new_empty(self.size * x.shape[0], x.shape[1])
        _all_gather(parts, x.contiguous(), group=self._group)
        if self.rank != 0:
            return None
        return parts.view(self.size, *x.shape).transpose(0, 1).reshape(x.shape[0], -1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrite `x` with rank 0's."""
        dist.broadcast(x, src=0, group=self._group)
        return x

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Have collectives go over the communicator of the graphs meanwhile."""
        unrecorded, self._group = self._group, None
        try:
            yield
        finally:
            self._group = unrecorded

    def close(self) -> None:
        """Leave the group; peers that wait for this rank get an error."""
        dist.destroy_process_group()


def join_group(
    *,
    rank: int,
    size: int,
    store: str,
    timeout_s: float,
    store_fd: int = -1,
    device: torch.device | None = None,
) -> TensorParallel:
    """Meet the other ranks and return this rank's end of the group; once per process.

    Args:
        rank: 0 … size-1.
        size: number of ranks; with one no group is made.
        store: where to meet, fresh for each incarnation: a file of ranks on one machine, or
            tcp://ADDRESS:PORT of rank 0's.
        timeout_s: for the meeting and for each collective.
        store_fd: rank 0's socket, bound to that address.
        device: where this rank computes, no other rank's if it is a GPU; default the CPU.

    Raises:
        StartupError: the others did not come in time.
    """
    if size == 1:
        return SingleRank()
    host, _, port = store.removeprefix(TCP).rpartition(":")
    is_far = store.startswith(TCP)
    interface = _interface_towards(host) if is_far else _loopback_interface()
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    backend, gpu = "gloo", None
    if device is not None and device.type == "cuda":
        backend, gpu = "cpu:gloo,cuda:nccl", device
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"
        if not is_far:
            os.environ["NCCL_IB_DISABLE"] = "1"
    timeout = timedelta(seconds=timeout_s)
    try:
        place: Any
        if is_far:
            place = _tcp_store(host, int(port), size=size, fd=store_fd, timeout=timeout)
        else:
            place = _FileStore(store, size)
        place.set_timeout(timeout)
        # With a GPU named, NCCL connects now and not in the first step.
        dist.init_process_group(
            backend, store=place, rank=rank, world_size=size, timeout=timeout, device_id=gpu
        )
        unrecorded = None if gpu is None else dist.new_group(timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise StartupError(f"rank {rank} of {size} could not meet the others: {error}") from error
    return ProcessGroupTensorParallel(unrecorded)


def _tcp_store(host: str, port: int, *, size: int, fd: int, timeout: timedelta) -> Any:
    """Serve the rendezvous on the socket `fd`, or reach it where that is -1."""
    if fd < 0:
        return _TCPStore(host, port, size, is_master=False, timeout=timeout)
    socket.socket(fileno=os.dup(fd)).listen()
    return _TCPStore(
        *(host, port, size),
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=fd,
    )


def _interface_towards(host: str) -> str:
    """Return the name of the interface by which an IPv4 address is reached, or that has it.

    Raises:
        StartupError: there is none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 1))  # sends nothing
        except OSError as error:
            raise StartupError(
                f"--master-addr: {host} cannot be reached: {error.strerror}"
            ) from error
        own = probe.getsockname()[0]
        if own.startswith("127."):
            return _loopback_interface()
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                request = struct.pack("256s", name.encode()[:15])
                if socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]) == own:
                    return name
    raise StartupError(f"--master-addr: no interface has {own} as its first address")


def _loopback_interface() -> str:
    """Return the name of the loopback interface: lo, or lo0 on macOS."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
