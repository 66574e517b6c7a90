"""The host pool of one rank: KV of paused requests, and copies between it and the KV pool.

KV bytes are never altered on the way (contract N1). Both pools have the same layout, so that all
layers of all tokens of a list of copies move with one gather and one scatter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightserve.errors import ProtocolError
from lightserve.messages.common import unpack_int32
from lightserve.messages.router_worker import KVCopies
from lightserve.models.kv_layout import KVLayout
from lightserve.worker.kv_pool import KVPool


class HostPool:
    """Keys and values of `num_slots` tokens; pages are touched only when they are written."""

    def __init__(self, layout: KVLayout, num_slots: int, pool: KVPool) -> None:
        """`pool` is the KV pool, of the same layout, that is copied from and to."""
        self.num_slots = num_slots
        self._pool = pool
        self._tensors = [
            torch.empty(
                (*tensor.shape[:3], num_slots, tensor.shape[4]),
                dtype=tensor.dtype,
                pin_memory=tensor.is_cuda,
            )
            for tensor in pool.tensors
        ]
        assert len(self._tensors) == len(layout.groups)

    def save(self, copies: KVCopies) -> None:
        """Copy tokens from the KV pool to the host. Raises ProtocolError if a place is none."""
        slots, host_slots = self._places(copies)
        if len(slots):
            for tensor, host in zip(self._pool.tensors, self._tensors, strict=True):
                host.index_copy_(3, host_slots, tensor.index_select(3, slots).cpu())

    def load(self, copies: KVCopies) -> None:
        """Copy tokens from the host to the KV pool. Raises ProtocolError if a place is none."""
        slots, host_slots = self._places(copies)
        if len(slots):
            for tensor, host in zip(self._pool.tensors, self._tensors, strict=True):
                found = host.index_select(3, host_slots).to(tensor.device)
                tensor.index_copy_(3, slots, found)

    def _places(self, copies: KVCopies) -> tuple[Tensor, Tensor]:
        """Return places in the pool (on its device) and on the host, int64 [n] each."""
        slots = _checked(copies.slots, self._pool.num_slots)
        host_slots = _checked(copies.host_slots, self.num_slots)
        if len(slots) != len(host_slots):
            raise ProtocolError(f"{len(slots)} slots to copy, {len(host_slots)} on the host")
        return slots.to(self._pool.tensors[0].device), host_slots


def _checked(data: bytes, num_slots: int) -> Tensor:
    """Return the places in a message, int64 [n]. Raises ProtocolError if one is outside."""
    places = torch.from_numpy(unpack_int32(data).astype("int64"))
    if len(places) and not 0 <= int(places.min()) <= int(places.max()) < num_slots:
        raise ProtocolError(f"a copy names a place outside 0 … {num_slots - 1}")
    return places
