"""What the slots of the KV pool hold: how a frontend asks the router, and what it is told.

Part of the link between a frontend and the router. A map is a picture of one moment for people
(GET /debug/kv); nothing is decided by it.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from lightserve.messages.common import (
    MAX_FRAME_BYTES,
    Int32Array,
    Message,
    pack_int32,
    unpack_int32,
)
from lightserve.types import RequestClass

UInt8Array = npt.NDArray[np.uint8]

MAX_SLOTS_BYTES = MAX_FRAME_BYTES - 1024 * 1024
"""Largest `PackedKinds`: the rest of a frame is for the figures."""


class DescribeKV(Message, frozen=True):
    """From a frontend: answer with `KVMap`."""

    query_id: int


class PackedKinds(msgspec.Struct, frozen=True, array_like=True):
    """What each slot is, from slot 0 on, as runs of equal ones; see `pack_kinds`."""

    kinds: bytes
    """uint8 [num_runs], each a `SlotKind`."""
    lengths: bytes
    """int32 [num_runs], slots in each run; empty: each run is one slot."""


class KindRuns(NamedTuple):
    """`PackedKinds`, read; consecutive runs may be of one kind."""

    kinds: UInt8Array
    """uint8 [num_runs]."""
    lengths: Int32Array
    """int32 [num_runs], >= 1."""


class ClassSlots(msgspec.Struct, frozen=True, array_like=True):
    """What the requests of one class have in the pool; a slot of both classes is real-time's."""

    num_requests: int
    """Running and paused ones that hold slots."""
    num_slots: int
    num_checkpointed_slots: int
    """Those of them that are CHECKPOINTED."""


class KVPool(msgspec.Struct, frozen=True, kw_only=True):
    """The KV pool at one moment."""

    num_slots: int
    block_size: int
    """Slots of a block; the last block may be shorter."""
    num_slots_of_kind: list[int]
    """By `SlotKind`."""
    classes: dict[RequestClass, ClassSlots]
    """Every class."""
    num_free_blocks: int
    """All of whose slots are free."""
    num_shared_blocks: int
    """In which both classes have slots."""
    mean_run_length: float
    """Mean number of consecutive slots, ascending or descending, that a request holds; 0.0 if
    there is no request."""
    num_host_slots: int
    """Tokens that the host pool holds."""
    num_used_host_slots: int
    slots: PackedKinds | None
    """None: more than MAX_SLOTS_BYTES, which takes a fragmented pool of over 15 million slots."""


class KVMap(Message, frozen=True):
    """From the router: the answer to `DescribeKV`."""

    query_id: int
    pool: KVPool | None
    """None: there are no workers."""


def pack_kinds(kinds: UInt8Array) -> PackedKinds | None:
    """Encode `SlotKind`s of all slots, uint8 [num_slots]; None if they need over MAX_SLOTS_BYTES.

    As runs where that is shorter, so that it is never longer than a byte per slot.
    """
    if len(kinds) == 0:
        return PackedKinds(b"", b"")
    starts = np.concatenate([[0], 1 + np.flatnonzero(kinds[1:] != kinds[:-1])])
    if 5 * len(starts) < len(kinds):
        lengths = np.diff(starts, append=len(kinds)).astype(np.int32)
        packed = PackedKinds(kinds[starts].tobytes(), pack_int32(lengths))
    else:
        packed = PackedKinds(kinds.tobytes(), b"")
    return packed if len(packed.kinds) + len(packed.lengths) <= MAX_SLOTS_BYTES else None


def unpack_kinds(packed: PackedKinds) -> KindRuns:
    """Decode `pack_kinds`.

    Raises:
        ValueError: there is not one length for each kind.
    """
    kinds = np.frombuffer(packed.kinds, dtype=np.uint8)
    if not packed.lengths:
        return KindRuns(kinds, np.ones(len(kinds), dtype=np.int32))
    lengths = unpack_int32(packed.lengths)
    if len(lengths) != len(kinds):
        raise ValueError(f"{len(kinds)} runs with {len(lengths)} lengths")
    return KindRuns(kinds, lengths)
