"""The host pool of the workers as the router keeps it: free slots, ranges of requests, copies.

BROS (section V) copies to the host only what is about to be overwritten. KV is written once, so a
copy never goes stale: it stays, while there is room, when its tokens are back in the pool, and
taking them again costs nothing.

Memory is taken from the end of a paused request; before its slots are overwritten, exactly the
tokens in them that are not on the host yet are saved. When the host is full, copies that are spare,
because their tokens are in the pool as well, are given up; when that is not enough, the tokens are
lost and will be computed again.

Prefixes that leave the pool take what requests do not (`host_tier`), and give it up for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lightserve.messages.common import NO_INT32, Int32Array, pack_int32
from lightserve.messages.router_worker import NO_COPIES, KVCopies
from lightserve.router.request import HostRange, Request


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
    """Copies of several requests, merged into one list."""

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
    """Copies of a plan, as `StepPlan` names them."""

    saves: KVCopies = NO_COPIES
    loads: KVCopies = NO_COPIES
    ahead_loads: KVCopies = NO_COPIES


def _packed(parts: Sequence[Int32Array]) -> bytes:
    return pack_int32(np.concatenate(parts))


class Checkpoints:
    """The host ranges of all requests, and the copies that the next plan is to make."""

    def __init__(self, num_slots: int, num_prefix_slots: int = 0) -> None:
        """`num_slots` for requests, and `num_prefix_slots` more for prefixes."""
        self.num_slots = num_slots
        """Slots that requests may have."""
        self.num_used = 0
        """Slots that they have."""
        self.host = HostSlots(num_slots + num_prefix_slots)
        self.make_room: Callable[[int], None] = lambda _num_slots: None
        """Lets prefixes give up copies until so many slots are free, if they have so many."""
        self._owners: dict[Request, None] = {}
        """Requests with a host range, those that got it first at the front."""
        self.saves, self.loads, self.ahead_loads = CopyList(), CopyList(), CopyList()
        """Copies of the plan that is being made; no step waits for the last ones."""

    def take_copies(self) -> PlanCopies:
        """Return what the plan that is being made has to copy."""
        lists = self.saves, self.loads, self.ahead_loads
        return PlanCopies(*[copies.take() for copies in lists])

    def save(self, request: Request, start: int) -> int | None:
        """Save what is missing so that positions `start` … of a paused request are on the host.

        So is then its state in recurrent layers, unlike KV never before it is taken.

        Returns:
            How many slots are copied for that; None: there is no room for them, and no copy of
            the request is left.
        """
        if request.host is not None and request.host.end < start:
            self.drop(request)  # the gap would be copied though nothing overwrites it
        num_saved = self._cover(request, start, request.num_kept_tokens)
        if num_saved is None:
            self.drop(request)
        return num_saved

    def load(self, request: Request, start: int, end: int, *, is_ahead: bool) -> None:
        """Bring positions start … end-1 of a request, all on the host, back to its slots.

        The copies stay, now spare. `is_ahead`: the plan's step does not wait for them.
        """
        assert request.host is not None and request.slots is not None
        copies = self.ahead_loads if is_ahead else self.loads
        copies.add(request.slots[start:end], request.host.slots_from(start)[: end - start])

    def load_state(self, request: Request) -> None:
        """Bring a request's state back to its slots; as the next step changes it, no copy stays."""
        own = request.recurrent
        self.loads.add(own.slots, own.host_slots)
        self._release(own.host_slots)  # saves of this plan are all booked by now
        own.host_slots = NO_INT32

    def drop(self, request: Request) -> None:
        """Give up all copies of a request."""
        self._release(request.recurrent.host_slots)
        request.recurrent.host_slots = NO_INT32
        if request.host is not None:
            self._release(request.host.slots)
            request.host = None
            del self._owners[request]

    def _release(self, slots: Int32Array) -> None:
        self.host.release(slots)
        self.num_used -= len(slots)

    def _cover(self, request: Request, start: int, end: int) -> int | None:
        """Widen a request's host range to start … end-1; None if the host has no room."""
        kept = request.host or HostRange(start, NO_INT32)
        positions = np.concatenate([np.arange(start, kept.start), np.arange(kept.end, end)])
        own = request.recurrent
        count = len(positions) + len(own.slots)
        if count == 0:
            return 0
        if not self._displace(count, except_for=request):
            return None
        assert request.slots is not None
        new = self.host.acquire(count)
        self.num_used += count
        self.saves.add(np.concatenate([request.slots[positions], own.slots]), new)
        if len(own.slots):
            new, own.host_slots = np.split(new, [len(positions)])
        num_before = max(0, kept.start - start)
        slots = np.concatenate([new[:num_before], kept.slots, new[num_before:]])
        request.host = HostRange(min(start, kept.start), slots)
        self._owners[request] = None
        return count

    def _displace(self, num_slots: int, *, except_for: Request) -> bool:
        """Give up spare copies, oldest first, until there is room for so many; whether there is.

        Those of prefixes go as far as they take what is the requests'.
        """
        for owner in list(self._owners) if self.num_slots - self.num_used < num_slots else ():
            if self.num_slots - self.num_used >= num_slots:
                break
            host = owner.host
            assert host is not None
            if len(owner.recurrent.host_slots):
                continue  # nothing of it is spare: it goes on from there
            if owner is not except_for and owner.num_held_tokens >= host.end:
                self.drop(owner)
        if self.num_slots - self.num_used < num_slots:
            return False
        self.make_room(num_slots)
        return self.host.num_free >= num_slots

    def check_integrity(
        self, requests: Iterable[Request], of_prefixes: Sequence[Int32Array] = ()
    ) -> None:
        """Assert that every host slot is free or has one owner, a request or a prefix."""
        requests = list(requests)
        ranges = [request.host.slots for request in requests if request.host is not None]
        own = np.concatenate([NO_INT32, *ranges, *(r.recurrent.host_slots for r in requests)])
        held = np.concatenate([own, *of_prefixes])
        assert len(np.unique(held)) == len(held), "a host slot has two owners"
        assert len(own) == self.num_used <= self.num_slots, "host slots leaked"
        assert len(held) + self.host.num_free == self.host.num_slots, "host slots leaked"
        assert len(ranges) == len(self._owners)
