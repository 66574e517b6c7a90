"""The host pool of one rank: KV of paused requests and of prefixes, and copies between it and the
KV pool.

KV bytes are never altered on the way. Here: the common part of host pools, and the host pool of a
KV pool on the CPU, which copies between the steps. Beside a GPU: `staged_host_pool`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from lightserve.errors import ProtocolError
from lightserve.messages.common import Int32Array, unpack_int32
from lightserve.messages.router_worker import KVCopies, StepPlan
from lightserve.worker.memory import KVPool, empty_pool

HOST = torch.device("cpu")
MIN_TOKENS_BY_LAYER = 64
"""From so many tokens on, copies go layer by layer: 2 to 4 times as fast at 1,024 of a model of
150 M parameters, half as fast at 16."""


class CopyWait(Protocol):
    """The time that a step waits for its copies."""

    def seconds(self) -> float:
        """Return how long it was, 0.0 without copies; once the step is done."""


class Waited:
    """Time that the CPU has waited."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds(self) -> float:
        """See `CopyWait.seconds`."""
        return self._seconds


class HostPool(ABC):
    """Keys and values of `num_slots` tokens."""

    overlaps_copies: ClassVar[bool]
    """Whether copies run beside forward passes, as on a GPU; otherwise between them."""

    def __init__(self, num_slots: int, pool: KVPool) -> None:
        """`pool` is the KV pool that is copied from and to."""
        self.num_slots = num_slots
        self.num_prefix_slots = 0
        """So many of them are for prefixes alone."""
        self._pool = pool

    @property
    def num_request_slots(self) -> int:
        """Slots for paused requests."""
        return self.num_slots - self.num_prefix_slots

    def __str__(self) -> str:
        return f"{self.num_request_slots} and {self.num_prefix_slots} more for prefixes"

    def check(self, plan: StepPlan) -> None:
        """Look at all copies of a plan before any is made.

        Raises:
            ProtocolError: a place is outside its pool, or comes twice in a list, or is loaded
                from though the same plan saves to it, or loaded to by two lists.
        """
        lists = (plan.saves, plan.loads, plan.ahead_loads)
        if not any(copies.slots or copies.host_slots for copies in lists):
            return  # as most plans
        for copies in lists:
            slots, host_slots = unpack_int32(copies.slots), unpack_int32(copies.host_slots)
            if len(slots) != len(host_slots):
                raise ProtocolError(f"{len(slots)} slots to copy, {len(host_slots)} on the host")
            _check_places(slots, self._pool.num_slots)
            _check_places(host_slots, self.num_slots)
        for loads in (plan.loads, plan.ahead_loads):
            if _have_common(plan.saves.host_slots, loads.host_slots):
                raise ProtocolError("a host slot is saved to and loaded from by one plan")
        if _have_common(plan.loads.slots, plan.ahead_loads.slots):
            raise ProtocolError("a slot that is loaded ahead is in another copy of the plan")

    @abstractmethod
    def begin(self, plan: StepPlan) -> CopyWait:
        """Make the copies of a plan, which `check` has seen, that its forward pass waits for.

        Called before that is launched. Where copies overlap, those that it does not wait for begin
        as well.
        """

    @abstractmethod
    def end(self, plan: StepPlan) -> None:
        """Make the copies that were not waited for, if they do not overlap; the result is out."""


class DirectHostPool(HostPool):
    """The host pool of a KV pool on the CPU: the same layout; pages are touched only when they are
    written."""

    overlaps_copies = False

    def __init__(self, num_slots: int, pool: KVPool) -> None:
        super().__init__(num_slots, pool)
        self._tensors = [
            empty_pool((*tensor.shape[:3], num_slots, tensor.shape[4]), tensor.dtype, HOST)
            for tensor in pool.tensors
        ]

    def begin(self, plan: StepPlan) -> CopyWait:
        """See `HostPool.begin`."""
        if not plan.saves.slots and not plan.loads.slots:
            return Waited(0.0)
        start_s = time.perf_counter()
        self.save(plan.saves)
        self.load(plan.loads)
        return Waited(time.perf_counter() - start_s)

    def end(self, plan: StepPlan) -> None:
        """See `HostPool.end`."""
        self.load(plan.ahead_loads)

    def save(self, copies: KVCopies) -> None:
        """Copy tokens from the KV pool to the host; `check` has seen their plan."""
        slots, host_slots = _places(copies)
        for source, target in zip(self._pool.tensors, self._tensors, strict=True):
            _copy(source, slots, target, host_slots)

    def load(self, copies: KVCopies) -> None:
        """Copy tokens from the host to the KV pool; `check` has seen their plan."""
        slots, host_slots = _places(copies)
        for target, source in zip(self._pool.tensors, self._tensors, strict=True):
            _copy(source, host_slots, target, slots)


def _places(copies: KVCopies) -> tuple[Tensor, Tensor]:
    """Return places in the pool and on the host, int64 [n] each."""
    slots, host_slots = (
        torch.from_numpy(unpack_int32(data).astype(np.int64))
        for data in (copies.slots, copies.host_slots)
    )
    return slots, host_slots


def _copy(source: Tensor, source_slots: Tensor, target: Tensor, target_slots: Tensor) -> None:
    """Copy tokens of one group, [2, num_layers, num_kv_heads, num_slots, head_dim] both.

    Many tokens go layer by layer, so that gathered tokens are still in the caches when they are
    scattered; for few, one call for all layers costs less.
    """
    if len(source_slots) == 0:
        return
    if len(source_slots) < MIN_TOKENS_BY_LAYER:
        found = source.index_select(3, source_slots)
        target.index_copy_(3, target_slots, found)
        return
    for source_layers, target_layers in zip(source, target, strict=True):
        for source_layer, target_layer in zip(source_layers, target_layers, strict=True):
            found = source_layer.index_select(1, source_slots)
            target_layer.index_copy_(1, target_slots, found)


def _have_common(places: bytes, others: bytes) -> bool:
    """Whether two lists of places, see `pack_int32`, neither with any twice, name the same one."""
    if not places or not others:
        return False
    return _has_twice(np.concatenate([unpack_int32(places), unpack_int32(others)]))


def _check_places(places: Int32Array, num_slots: int) -> None:
    if len(places) == 0:
        return
    if not 0 <= int(places.min()) <= int(places.max()) < num_slots:
        raise ProtocolError(f"a copy names a place outside 0 … {num_slots - 1}")
    if _has_twice(places):
        raise ProtocolError("a copy names a place twice")


def _has_twice(places: Int32Array) -> bool:
    ordered = np.sort(places)
    return bool((ordered[1:] == ordered[:-1]).any())
