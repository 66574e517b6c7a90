"""The host pool of the workers as the router keeps it: free slots, ranges of requests, copies.

BROS (section V) copies to the host only what is about to be overwritten. KV is written once, so a
copy never goes stale: it stays, while there is room, when its tokens are back in the pool, and
taking them again costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lightserve.messages.common import Int32Array, pack_int32
from lightserve.messages.router_worker import NO_COPIES, KVCopies


@dataclass(slots=True, eq=False)
class HostRange:
    """Consecutive positions of one request that are, or will be with the next plan, on the host."""

    start: int
    slots: Int32Array
    """int32 [n], host slots of positions start … start+n-1."""

    @property
    def end(self) -> int:
        """First position behind it."""
        return self.start + len(self.slots)

    def slots_from(self, position: int) -> Int32Array:
        """Return the host slots of positions `position` … end-1; `position` is in the range."""
        return self.slots[position - self.start :]


class HostSlots:
    """A stack of the free host slots: those given back last go out first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._stack: Int32Array = np.arange(num_slots - 1, -1, -1, dtype=np.int32)
        self.num_free = num_slots

    def acquire(self, count: int) -> Int32Array:
        """Take `count` slots, int32 [count]; that many are free."""
        assert count <= self.num_free
        self.num_free -= count
        return self._stack[self.num_free : self.num_free + count][::-1].copy()

    def release(self, slots: Int32Array) -> None:
        """Give slots back."""
        assert self.num_free + len(slots) <= self.num_slots, "host slots released twice"
        self._stack[self.num_free : self.num_free + len(slots)] = slots[::-1]
        self.num_free += len(slots)


@dataclass(slots=True)
class CopyList:
    """Copies of several requests, merged into one list (B12)."""

    _slots: list[Int32Array] = field(default_factory=list)
    _host_slots: list[Int32Array] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, slots: Int32Array, host_slots: Int32Array) -> None:
        """Add tokens: their places in the pool and on the host, int32 [n] each."""
        self._slots.append(slots.copy())
        self._host_slots.append(host_slots)
        self.num_tokens += len(slots)

    def take(self) -> KVCopies:
        """Return them as part of a message, and begin anew."""
        if self.num_tokens == 0:
            return NO_COPIES
        copies = KVCopies(_packed(self._slots), _packed(self._host_slots))
        self._slots, self._host_slots, self.num_tokens = [], [], 0
        return copies


class PlanCopies(NamedTuple):
    """What a plan copies; see `StepPlan`."""

    saves: KVCopies = NO_COPIES
    loads: KVCopies = NO_COPIES
    ahead_saves: KVCopies = NO_COPIES
    ahead_loads: KVCopies = NO_COPIES


def _packed(parts: Sequence[Int32Array]) -> bytes:
    return pack_int32(np.concatenate(parts))
