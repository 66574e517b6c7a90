"""The two-ended allocator against a brute-force model, and its order of search scene by scene."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from support.grids import choose, more_when_long

from lightserve.router.kv.slots import BlockSlotPool
from lightserve.types import RequestClass

RT, BE = RequestClass.RT, RequestClass.BE
BLOCK_SIZES = (1, 2, 4, 8, 16)


def int32(slots: object) -> np.ndarray:
    return np.array(slots, dtype=np.int32)


def pool_of(picture: str) -> BlockSlotPool:
    """Return a pool of blocks of four: taken slots are #, blocks are separated by spaces."""
    blocks = picture.split()
    pool = BlockSlotPool(sum(map(len, blocks)), block_size=4)
    everything = pool.acquire("before", RT, pool.num_slots)
    pool.stop_growing("before")
    free = [i for i, sign in enumerate("".join(blocks)) if sign == "."]
    for slot in reversed(free):  # so that the lowest empty block is the first to be taken
        pool.release(everything[slot : slot + 1])
    pool.check_integrity()
    return pool


@dataclass
class Scene:
    """Shares taken one after the other, and what the last one should get."""

    why: str
    picture: str
    last: tuple[str, RequestClass, int]
    want: list[int]
    before: list[tuple[str, RequestClass, int]] = field(default_factory=list)
    prepare: Callable[[BlockSlotPool], None] = lambda pool: None


SCENES = [
    Scene("RT fills a block upwards", ".... ....", ("a", RT, 6), [0, 1, 2, 3, 4, 5]),
    Scene("BE fills a block downwards", ".... ....", ("a", BE, 6), [3, 2, 1, 0, 7, 6]),
    Scene("its growing block comes first", ".... ....", ("a", RT, 2), [1, 2], [("a", RT, 1)]),
    Scene("also for BE", ".... ....", ("a", BE, 2), [2, 1], [("a", BE, 1)]),
    Scene("then empty blocks", ".... .... ....", ("a", RT, 5), [2, 3, 8, 9, 10],
          [("a", RT, 2), ("b", BE, 1)]),
    Scene("an empty block before an open end", "##.. ....", ("a", RT, 1), [4]),
    Scene("an empty block before most of an open end", "#... ....", ("a", BE, 1), [7]),
    Scene("the block with most free slots", "###. #... ##..", ("a", RT, 1), [5]),
    Scene("for BE from its own end", "###. #... ##..", ("a", BE, 4), [7, 6, 5, 11]),
    Scene("the block with a free end before one with more room", ".... #.## ####",
          ("b", RT, 1), [5], [("a", RT, 1)]),
    Scene("the other class's block is open", ".... ####", ("b", BE, 2), [3, 2], [("a", RT, 1)]),
    Scene("RT comes beside BE", ".... ####", ("b", RT, 2), [0, 1], [("a", BE, 1)]),
    Scene("both ends grow until they meet", ".... ####", ("a", RT, 1), [2],
          [("a", RT, 1), ("b", BE, 1), ("a", RT, 1)]),
    Scene("at last any slot", ".... ####", ("b", RT, 2), [1, 2], [("a", RT, 1)]),
    Scene("at last any slot, for BE", ".... ####", ("b", BE, 2), [2, 1], [("a", BE, 1)]),
    Scene("who came in so does not grow there", ".... #### ####", ("b", RT, 1), [5],
          [("a", RT, 1), ("b", RT, 1)], lambda pool: pool.release(int32([5, 6]))),
    Scene("who came to an open end grows there", "##.. #### ####", ("a", RT, 2), [3, 4],
          [("a", RT, 1)], lambda pool: pool.release(int32([4, 5, 6]))),
    Scene("an end is open again when its owner stopped", ".... #.## ####", ("b", RT, 1), [1],
          [("a", RT, 1)], lambda pool: pool.stop_growing("a")),
    Scene("full blocks are left alone", "#### ...# ####", ("a", RT, 3), [4, 5, 6]),
    Scene("a short last block is used when the others are", "#.## ..", ("a", RT, 2), [4, 5]),
    Scene("where all slots go, RT has them rising", "#.## ..", ("a", RT, 3), [1, 4, 5]),
    Scene("where all slots go, BE has them falling", "#.## ..", ("a", BE, 3), [5, 4, 1]),
    Scene("a short last block from above", "#### ...", ("a", BE, 2), [6, 5]),
]  # fmt: skip


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.why)
def test_order_of_search(scene: Scene) -> None:
    pool = pool_of(scene.picture)
    for share in scene.before:
        pool.acquire(*share)
    scene.prepare(pool)
    assert pool.acquire(*scene.last).tolist() == scene.want
    pool.check_integrity()


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("num_slots", [64, 75])
def test_a_lone_request_is_contiguous_and_the_last_freed_are_reused(
    num_slots: int, block_size: int
) -> None:
    pool = BlockSlotPool(num_slots, block_size=block_size)
    first = pool.acquire("a", RT, 48)
    assert first.tolist() == list(range(48))
    assert pool.acquire("a", RT, num_slots - 48).tolist() == list(range(48, num_slots))
    pool.release(first)
    pool.stop_growing("a")
    assert pool.acquire("b", RT, 48).tolist() == list(range(48))
    pool.release(int32(range(16, 32)))
    pool.release(int32(range(16)))
    assert pool.acquire("c", RT, 32).tolist() == list(range(32)), "freed last, taken first"
    pool.check_integrity()


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_shares_of_one_step_are_those_taken_one_by_one(block_size: int) -> None:
    rng = np.random.default_rng(block_size)
    together, single = (BlockSlotPool(1001, block_size=block_size) for _ in range(2))
    for _ in range(200):
        shares = [
            (int(owner), RT if owner % 2 else BE, int(rng.choice([1, 1, 1, 40])))
            for owner in rng.choice(20, rng.integers(1, 8), replace=False)
        ]
        if sum(count for _, _, count in shares) <= together.num_free:
            slots = together.acquire_many(shares)
            one_by_one = [single.acquire(*share) for share in shares]
            assert slots.tolist() == np.concatenate(one_by_one).tolist()
        gone = np.flatnonzero(_is_taken(together) & (rng.random(1001) < 0.2)).astype(np.int32)
        rng.shuffle(gone)
        together.release(gone)
        single.release(gone)
    together.check_integrity()


@given(
    seed=st.integers(0, 1 << 32),
    num_slots=st.integers(30, 300),
    block_size=st.sampled_from([*BLOCK_SIZES, 3]),
    is_exclusive=st.booleans(),
)
def test_one_slot_for_each_row_is_what_the_loop_gives(
    seed: int, num_slots: int, block_size: int, is_exclusive: bool
) -> None:
    """Two pools with one history; where others have to be searched, growing rows go first."""
    rng = np.random.default_rng(seed)
    by_rows, by_loop = (
        BlockSlotPool(num_slots, block_size=block_size, is_exclusive=is_exclusive) for _ in range(2)
    )
    held: dict[int, np.ndarray] = {}  # owners have their number as their row, but some move
    shift = 0
    for _ in range(40):
        owners = rng.permutation(12)[: rng.integers(1, 13)].tolist()
        shares = [(owner, RT if owner % 2 else BE, 1) for owner in owners]
        if rng.random() < 0.1:
            shift += 1
        for share in shares:
            by_rows.bind((share[0] + shift) % 12, share[0], share[1])
        rows = np.array([(owner + shift) % 12 for owner in owners])
        if sum(by_loop.cost(*share) for share in shares) > by_loop.num_free:
            with pytest.raises(ValueError, match="slots asked for"):
                by_rows.acquire_one_each(rows)
            by_rows.check_integrity()
        else:
            masks, growing = by_rows._mask_array, [by_rows._rows.blocks[row] for row in rows]
            num_new = sum(
                block < 0 or (masks[block] ^ by_rows._full).bit_count() < 2 for block in growing
            )
            slots, expected = by_rows.acquire_one_each(rows), by_loop.acquire_many(shares)
            if num_new <= len(by_rows._empty) + num_new * is_exclusive or by_rows.num_free == 0:
                assert slots.tolist() == expected.tolist()
            assert by_rows.num_free == by_loop.num_free
            if slots.tolist() != expected.tolist():
                return  # two histories from here on
            for owner, slot in zip(owners, slots, strict=True):
                held[owner] = np.append(held.get(owner, int32([])), slot)
        for owner in [owner for owner in held if rng.random() < 0.15]:
            gone = held.pop(owner)
            keeps = rng.random() < 0.5
            held[owner], gone = (gone[:1], gone[1:]) if keeps else (int32([]), gone)
            for pool in (by_rows, by_loop):
                pool.release(gone)
                if not keeps:
                    pool.stop_growing(owner)
    by_rows.check_integrity()


@pytest.mark.parametrize("request_class", [RT, BE])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_chunk_out_of_scattered_slots(block_size: int, request_class: RequestClass) -> None:
    pool = BlockSlotPool(1003, block_size=block_size)
    everything = pool.acquire("a", RT, 1003)
    pool.stop_growing("a")
    gone = np.random.default_rng(0).permutation(everything)[:300]
    pool.release(gone)
    assert pool.num_free == 300
    grower = pool.acquire("b", RT, 1)
    chunk = pool.acquire("c", request_class, 299)
    assert sorted([*chunk.tolist(), *grower.tolist()]) == sorted(gone.tolist())
    assert pool.num_free == 0
    pool.check_integrity()


def test_freeing_one_side_leaves_the_other() -> None:
    pool = BlockSlotPool(4, block_size=4)
    rt, be = pool.acquire("r", RT, 2), pool.acquire("b", BE, 2)
    pool.release(rt)
    assert pool._mask_array.tolist() == [0b1100]
    pool.stop_growing("r")
    assert pool.acquire("b", BE, 2).tolist() == [1, 0], "BE goes on where RT has been"
    pool.release(be)
    assert pool._mask_array.tolist() == [0b0011] and pool.num_free == 2


def test_none_grows_in_a_block_that_was_emptied() -> None:
    pool = BlockSlotPool(8, block_size=4)
    pool.release(pool.acquire("a", RT, 1))
    assert pool.acquire("b", RT, 1).tolist() == [0]
    assert pool.acquire("a", RT, 1).tolist() == [4]
    pool.stop_growing("unknown")


@pytest.mark.parametrize("is_exclusive", [False, True])
def test_too_many_take_nothing(is_exclusive: bool) -> None:
    pool = BlockSlotPool(8, block_size=4, is_exclusive=is_exclusive)
    with pytest.raises(ValueError, match="slots asked for, 8 free"):
        pool.acquire_many([("a", RT, 5), ("b", BE, 4)])
    assert pool.num_free == 8 and pool.num_used == 0
    pool.check_integrity()


@pytest.mark.parametrize("slots", [[0, 1, 0], [3], [0, 1, 2, 3]])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_slot_released_twice_is_noticed(block_size: int, slots: list[int]) -> None:
    pool = BlockSlotPool(8, block_size=block_size)
    pool.acquire("a", RT, 3)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(int32(slots))


class TestExclusive:
    def pool(self, num_slots: int = 10) -> BlockSlotPool:
        return BlockSlotPool(num_slots, block_size=4, is_exclusive=True)

    def test_blocks_are_of_one_owner(self) -> None:
        pool = self.pool()
        assert pool.cost("a", RT, 1) == 4
        assert pool.acquire("a", RT, 1).tolist() == [0]
        assert pool.num_free == 6 and pool.cost("a", RT, 3) == 0 and pool.cost("a", RT, 4) == 4
        assert pool.acquire("b", BE, 1).tolist() == [7], "not in the block of another"
        assert pool.num_free == 2
        assert pool.acquire("a", RT, 5).tolist() == [1, 2, 3, 8, 9]
        assert pool.num_free == 0 and pool.cost("b", BE, 3) == 0 and pool.cost("b", BE, 4) == 4
        with pytest.raises(ValueError, match="4 slots asked for, 0 free"):
            pool.acquire("b", BE, 4)
        pool.check_integrity()

    def test_a_block_is_free_when_all_of_it_is_released(self) -> None:
        pool = self.pool()
        slots = pool.acquire("a", RT, 10)
        assert pool.gain(slots[:3]) == 0 and pool.gain(slots[:4]) == 4
        assert pool.gain(slots[3:]) == 6 and pool.gain(slots) == 10
        pool.release(slots[:3])
        assert pool.num_free == 0
        pool.release(slots[8:])
        assert pool.num_free == 2
        pool.release(slots[3:8])
        pool.stop_growing("a")
        assert pool.num_free == 10
        pool.check_integrity()

    def test_one_that_lost_its_end_goes_on_in_its_block(self) -> None:
        """None else can have the rest of it, and the whole pool may be just enough for one."""
        pool = self.pool()
        slots = pool.acquire("a", RT, 6)
        pool.release(slots[2:])
        pool.go_back("a", RT, int(slots[1]))
        assert pool.cost("a", RT, 8) == pool.num_free == 6
        assert sorted([*slots[:2], *pool.acquire("a", RT, 8)]) == [*range(10)]
        pool.check_integrity()


class Trace(RuleBasedStateMachine):
    """Random moves; who holds what is known as plain sets."""

    held: dict[int, list[int]]

    @initialize(
        num_slots=st.integers(1, 70),
        block_size=st.sampled_from([*BLOCK_SIZES, 3]),
        is_exclusive=st.booleans(),
    )
    def start(self, num_slots: int, block_size: int, is_exclusive: bool) -> None:
        self.pool = BlockSlotPool(num_slots, block_size=block_size, is_exclusive=is_exclusive)
        self.is_exclusive = is_exclusive
        self.held = {}

    def num_free(self) -> int:
        """Return `num_free` by brute force."""
        size, total = self.pool.block_size, self.pool.num_slots
        taken = {slot for slots in self.held.values() for slot in slots}
        if not self.is_exclusive:
            return total - len(taken)
        blocks = [range(i, min(i + size, total)) for i in range(0, total, size)]
        return sum(len(block) for block in blocks if taken.isdisjoint(block))

    def take(self, shares: list[tuple[int, RequestClass, int]]) -> None:
        slots = self.pool.acquire_many(shares)
        assert slots.dtype == np.int32 and len(slots) == sum(count for _, _, count in shares)
        start = 0
        for owner, _, count in shares:
            self.held.setdefault(owner, []).extend(slots[start : start + count].tolist())
            start += count

    @rule(owner=st.integers(0, 5), count=st.integers(0, 40))
    def acquire(self, owner: int, count: int) -> None:
        share = (owner, RT if owner % 2 else BE, count)
        before, cost = self.pool.num_free, self.pool.cost(*share)
        if cost > before:
            with pytest.raises(ValueError, match="slots asked for"):
                self.pool.acquire(*share)
            return
        self.take([share])
        assert before - self.pool.num_free == cost

    @rule(owners=st.sets(st.integers(0, 5), min_size=1), count=st.integers(1, 3))
    def step(self, owners: set[int], count: int) -> None:
        shares = [(owner, RT if owner % 2 else BE, count) for owner in owners]
        if sum(self.pool.cost(*share) for share in shares) <= self.pool.num_free:
            self.take(shares)

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), ends=st.booleans())
    def release(self, data: st.DataObject, ends: bool) -> None:
        owner = data.draw(st.sampled_from([o for o, slots in self.held.items() if slots]))
        slots = self.held[owner]
        if not ends:
            slots = data.draw(st.lists(st.sampled_from(slots), unique=True))
        before, gain = self.pool.num_free, self.pool.gain(int32(slots))
        self.held[owner] = [slot for slot in self.held[owner] if slot not in set(slots)]
        self.pool.release(int32(slots))
        assert self.pool.num_free - before == gain
        if ends:
            self.pool.stop_growing(owner)

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from([o for o, slots in self.held.items() if slots]))
        num_left = data.draw(st.integers(1, len(self.held[owner])))
        self.pool.release(int32(self.held[owner][num_left:]))
        del self.held[owner][num_left:]
        self.pool.go_back(owner, RT if owner % 2 else BE, self.held[owner][-1])

    @precondition(lambda self: not self.is_exclusive)
    @rule(owner=st.integers(0, 5))
    def stop_growing(self, owner: int) -> None:
        self.pool.stop_growing(owner)

    @invariant()
    def is_what_the_model_says(self) -> None:
        pool = self.pool
        pool.check_integrity()
        taken = sorted(slot for slots in self.held.values() for slot in slots)
        assert np.flatnonzero(_is_taken(pool)).tolist() == taken, "given out twice, or leaked"
        assert pool.num_free == self.num_free()
        assert pool.num_used == pool.num_slots - pool.num_free
        if self.is_exclusive:
            owners = [
                {owner for owner, slots in self.held.items() if set(slots) & set(block)}
                for block in np.array_split(range(pool.num_slots), range(
                    pool.block_size, pool.num_slots, pool.block_size))
            ]  # fmt: skip
            assert all(len(owner) <= 1 for owner in owners)


def _is_taken(pool: BlockSlotPool) -> np.ndarray:
    """Return which slots are taken, bool [num_slots]."""
    bits = pool._mask_array[:, None] >> np.arange(pool.block_size, dtype=np.uint16) & 1
    return bits.ravel()[: pool.num_slots] != 0


TestTrace = more_when_long(Trace.TestCase)
TestTrace.settings = settings(max_examples=choose(50, 150), stateful_step_count=30, deadline=None)
