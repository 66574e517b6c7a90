"""A picture of the KV pool for people: what each slot is for, and figures about all of them.

Derived from scratch from what holds each slot, so that it can show what the book-keeping gets
wrong; O(slots) numpy, for the moments in which an operator asks (GET /debug/kv).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightserve.messages.common import Int32Array
from lightserve.messages.frontend_router import ClassSlots, KVPool, UInt8Array, pack_kinds
from lightserve.router.kv.cache import KVStore
from lightserve.router.kv.states import all_slots
from lightserve.router.request import Request
from lightserve.types import RequestClass, SlotKind

BoolArray = npt.NDArray[np.bool_]


class SlotUser(NamedTuple):
    """A running or paused request, as far as the map is concerned."""

    slots: Int32Array
    """int32 [n], different ones: where positions 0 … n-1 are, shared and in flight included."""
    request_class: RequestClass
    saved: range = range(0)
    """Positions whose KV is on the host; also some that are not in the pool."""


@dataclass(slots=True)
class _Use:
    """Who uses each slot; bool [num_slots] each."""

    rt: BoolArray
    """Some real-time request."""
    be: BoolArray
    """Best-effort requests, and no real-time one."""
    checkpointed: BoolArray
    """One request alone, which has it on the host as well."""


def describe_pool(
    num_slots: int,
    users: Sequence[SlotUser],
    cached: Iterable[Int32Array],
    *,
    block_size: int,
    num_host_slots: int = 0,
    num_used_host_slots: int = 0,
    num_prefix_host_slots: int = 0,
    num_used_prefix_host_slots: int = 0,
) -> KVPool:
    """Return the map and its figures.

    Args:
        num_slots: size of the pool.
        users: all requests that hold slots.
        cached: slots that the prefix tree holds, with and without users; int32 [n] each.
        block_size: slots of a block.
        num_host_slots: size of the host pool, and so on.
    """
    use = _use(num_slots, users)
    kinds = _kinds(use, cached)
    of_class = {RequestClass.RT: use.rt, RequestClass.BE: use.be}
    holders = [user for user in users if len(user.slots)]
    num_held = sum(len(user.slots) for user in holders)
    return KVPool(
        num_slots=num_slots,
        block_size=block_size,
        num_slots_of_kind=[int(np.count_nonzero(kinds == kind)) for kind in SlotKind],
        classes={
            request_class: ClassSlots(
                sum(user.request_class is request_class for user in holders),
                int(np.count_nonzero(mine)),
                int(np.count_nonzero(mine & use.checkpointed)),
            )
            for request_class, mine in of_class.items()
        },
        num_free_blocks=int(np.count_nonzero(~_blocks_with(kinds != SlotKind.FREE, block_size))),
        num_shared_blocks=int(
            np.count_nonzero(_blocks_with(use.rt, block_size) & _blocks_with(use.be, block_size))
        ),
        mean_run_length=num_held / max(1, sum(_num_runs(user.slots) for user in holders)),
        num_host_slots=num_host_slots,
        num_used_host_slots=num_used_host_slots,
        num_prefix_host_slots=num_prefix_host_slots,
        num_used_prefix_host_slots=num_used_prefix_host_slots,
        slots=pack_kinds(kinds),
    )


def _use(num_slots: int, users: Iterable[SlotUser]) -> _Use:
    rt, be, shared, saved = (np.zeros(num_slots, dtype=np.bool_) for _ in range(4))
    for slots, request_class, positions in users:
        shared[slots] |= rt[slots] | be[slots]
        (rt if request_class is RequestClass.RT else be)[slots] = True
        saved[slots[positions.start : positions.stop]] = True
    return _Use(rt, be & ~rt, saved & ~shared)


def _kinds(use: _Use, cached: Iterable[Int32Array]) -> UInt8Array:
    kinds = np.full(len(use.rt), SlotKind.FREE, dtype=np.uint8)
    for slots in cached:
        kinds[slots] = SlotKind.CACHED
    kinds[use.be] = SlotKind.BE
    kinds[use.rt] = SlotKind.RT
    kinds[use.checkpointed] = SlotKind.CHECKPOINTED
    return kinds


def _blocks_with(mask: BoolArray, block_size: int) -> BoolArray:
    """Return which blocks have a slot that is set, bool [num_blocks]."""
    if len(mask) == 0:
        return mask
    return np.logical_or.reduceat(mask, np.arange(0, len(mask), block_size))


def _num_runs(slots: Int32Array) -> int:
    """Return how many runs a request's slots are; as they are different, no run turns round."""
    return 1 + int(np.count_nonzero(np.abs(np.diff(slots)) != 1))


def describe_kv(requests: Iterable[Request], store: KVStore) -> KVPool:
    """Return what every slot is for.

    `requests` may hold slots: they run, are paused, or have ended and a plan in flight still names
    them; others do no harm.
    """
    nodes = () if store.tree is None else store.tree.nodes()
    tier = None if store.tree is None else store.tree.tier
    return describe_pool(
        store.num_slots,
        [_user(request) for request in requests if request.slots is not None],
        [slots for node in nodes for slots in (node.slots, node.snapshot) if slots is not None],
        block_size=store.options.block_size,
        num_host_slots=store.checkpoints.num_slots,
        num_used_host_slots=store.checkpoints.num_used,
        num_prefix_host_slots=0 if tier is None else tier.num_slots,
        num_used_prefix_host_slots=0 if tier is None else tier.num_used,
    )


def _user(request: Request) -> SlotUser:
    host = request.host
    saved = range(0) if host is None else range(host.start, host.end)
    slots = np.concatenate([request.held_slots, all_slots(request.recurrent)])
    return SlotUser(slots, request.request_class, saved)
