"""The map of the KV pool: kinds and figures against a slot-by-slot count, and their encoding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightserve.channels import Codec
from lightserve.messages.common import Int32Array
from lightserve.messages.frontend_router import (
    MAX_SLOTS_BYTES,
    ClassSlots,
    DescribeKV,
    FrontendMessage,
    KVMap,
    KVPool,
    PackedKinds,
    RouterMessage,
    pack_kinds,
    unpack_kinds,
)
from lightserve.router.kv.kv_map import SlotUser, describe_pool
from lightserve.types import RequestClass, SlotKind

RT, BE = RequestClass


def _slots(*slots: int) -> Int32Array:
    return np.array(slots, dtype=np.int32)


@st.composite
def pools(draw: st.DrawFn) -> tuple[int, list[SlotUser], list[Int32Array]]:
    """Any pool, whether the book-keeping could come to it or not."""
    num_slots = draw(st.integers(1, 40))
    some = st.lists(st.integers(0, num_slots - 1), unique=True).map(lambda s: _slots(*s))
    positions = st.tuples(st.integers(0, 45), st.integers(0, 45)).map(
        lambda pair: range(min(pair), max(pair))
    )
    user = st.builds(SlotUser, some, st.sampled_from(RequestClass), positions)
    return num_slots, draw(st.lists(user, max_size=5)), draw(st.lists(some, max_size=3))


def _kind_of(slot: int, users: list[SlotUser], cached: list[Int32Array]) -> SlotKind:
    mine = [user for user in users if slot in user.slots]
    if not mine:
        return SlotKind.CACHED if any(slot in held for held in cached) else SlotKind.FREE
    if len(mine) == 1 and list(mine[0].slots).index(slot) in mine[0].saved:
        return SlotKind.CHECKPOINTED
    return SlotKind.RT if any(user.request_class is RT for user in mine) else SlotKind.BE


def _run_lengths(slots: list[int]) -> list[int]:
    """Walk along a request's slots; a run ends where the next slot is not its next one."""
    lengths: list[int] = []
    step = 0
    for i, slot in enumerate(slots):
        before = slot - slots[i - 1] if i else 0
        if before in (1, -1) and step in (0, before):
            lengths[-1] += 1
            step = before
        else:
            lengths.append(1)
            step = 0
    return lengths


@given(pool=pools(), block_size=st.sampled_from([1, 2, 4, 16]))
def test_every_slot_and_figure_is_what_a_count_says(
    pool: tuple[int, list[SlotUser], list[Int32Array]], block_size: int
) -> None:
    num_slots, users, cached = pool
    expected = [_kind_of(slot, users, cached) for slot in range(num_slots)]
    described = describe_pool(num_slots, users, cached, block_size=block_size)
    assert described.slots is not None
    runs = unpack_kinds(described.slots)
    assert np.repeat(*runs).tolist() == expected
    assert described.num_slots_of_kind == [expected.count(kind) for kind in SlotKind]

    by_class = {
        kind: {s for u in users if u.request_class is kind for s in u.slots} for kind in (RT, BE)
    }
    by_class[BE] -= by_class[RT]
    for request_class, slots in by_class.items():
        assert described.classes[request_class] == ClassSlots(
            sum(user.request_class is request_class and len(user.slots) > 0 for user in users),
            len(slots),
            sum(expected[slot] is SlotKind.CHECKPOINTED for slot in slots),
        )
    blocks = [range(num_slots)[i : i + block_size] for i in range(0, num_slots, block_size)]
    assert described.num_free_blocks == sum(
        all(expected[slot] is SlotKind.FREE for slot in block) for block in blocks
    )
    assert described.num_shared_blocks == sum(
        all(by_class[kind].intersection(block) for kind in (RT, BE)) for block in blocks
    )
    lengths = [length for user in users for length in _run_lengths(user.slots.tolist())]
    assert described.mean_run_length == (sum(lengths) / len(lengths) if lengths else 0.0)


def test_a_small_pool_in_full() -> None:
    """Two blocks of 4: a real-time request up from 0, a paused best-effort one down from 7."""
    users = [SlotUser(_slots(0, 1, 4), RT), SlotUser(_slots(7, 6, 5), BE, range(2, 9))]
    described = describe_pool(
        8, users, [_slots(0, 2)], block_size=4, num_host_slots=10, num_used_host_slots=7
    )
    assert described == KVPool(
        num_slots=8,
        block_size=4,
        num_slots_of_kind=[1, 3, 2, 1, 1],
        classes={RT: ClassSlots(1, 3, 0), BE: ClassSlots(1, 3, 1)},
        num_free_blocks=0,
        num_shared_blocks=1,
        mean_run_length=2.0,
        num_host_slots=10,
        num_used_host_slots=7,
        num_prefix_host_slots=0,
        num_used_prefix_host_slots=0,
        slots=PackedKinds(bytes([1, 1, 3, 0, 1, 4, 2, 2]), b""),
    )


@given(kinds=st.lists(st.tuples(st.sampled_from(SlotKind), st.integers(1, 30)), max_size=20))
def test_packing_keeps_every_slot(kinds: list[tuple[SlotKind, int]]) -> None:
    slots = np.repeat(
        np.array([kind for kind, _ in kinds], dtype=np.uint8), [length for _, length in kinds]
    )
    packed = pack_kinds(slots)
    assert packed is not None
    assert len(packed.kinds) + len(packed.lengths) <= len(slots)
    assert np.repeat(*unpack_kinds(packed)).tolist() == slots.tolist()


def test_the_largest_pools_fit_into_a_frame() -> None:
    codec = Codec[RouterMessage, RouterMessage](send_type=RouterMessage, recv_type=RouterMessage)
    alternating = np.tile(
        np.array([SlotKind.RT, SlotKind.BE], dtype=np.uint8), MAX_SLOTS_BYTES // 2
    )
    one_kind = np.zeros(100_000_000, dtype=np.uint8)
    template = describe_pool(0, [], [], block_size=1)
    for kinds, num_runs in ((alternating, len(alternating)), (one_kind, 1)):
        packed = pack_kinds(kinds)
        assert packed is not None
        values = {name: getattr(template, name) for name in template.__struct_fields__}
        message = KVMap(query_id=1, pool=KVPool(**{**values, "slots": packed}))
        received = codec.decode(codec.encode(message))
        assert isinstance(received, KVMap)
        assert received.pool is not None and received.pool.slots is not None
        runs = unpack_kinds(received.pool.slots)
        assert (len(runs.kinds), int(runs.lengths.sum())) == (num_runs, len(kinds))
    assert pack_kinds(np.append(alternating, alternating[:1])) is None


def test_a_map_whose_parts_do_not_fit_together() -> None:
    with pytest.raises(ValueError, match="2 runs with 1 lengths"):
        unpack_kinds(PackedKinds(b"\0\1", b"\1\0\0\0"))


def test_the_question_and_the_answer_belong_to_the_link() -> None:
    assert isinstance(DescribeKV(query_id=1), FrontendMessage)
    assert isinstance(KVMap(query_id=1, pool=None), RouterMessage)
