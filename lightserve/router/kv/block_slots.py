"""Book-keeping of the KV pool's slots: who may write where. The tensors are in the workers.

Slots are given out by *blocks* of B neighbours with two ends: real-time takes the lowest free
slots of a block upwards, best-effort the highest downwards, so that the newest tokens of a
best-effort request lie next to real-time's end.

    slot of the block   0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15
                        R0  R1  R2  R3  ->  .   .   .   .   .   .  <-  b3  b2  b1  b0

Any number of sequences, live or cached, may have slots in a block, but at each end at most one
*grows*: whatever is free there is its own next slots as long as others find any elsewhere. A
class looks for slots in
    1. the block in which the sequence grows already,
    2. empty blocks, those emptied last first,
    3. blocks at whose end of this class nobody grows, those with most free slots first,
    4. any block with free slots,
so that nobody fails while enough slots are free. Source: BROS (section V), without its rule that
a block has two owners: what is full or finished does not matter to a token-level pool.

Blocks exist in this file alone; at B = 1 the same code is a plain pool of slots. In *exclusive*
mode, the baseline, a block belongs to one sequence until all of its slots are released.

Invariants: used + free = num_slots; an empty block is in `_empty`, and nobody grows in it.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from lightserve.messages.common import Int32Array
from lightserve.router.kv.block_end import BlockEnd
from lightserve.types import RT, RequestClass

UInt16Array = npt.NDArray[np.uint16]

MAX_BLOCK_SIZE = 16

_FEW_BLOCKS = 4
"""Up to here a loop is faster than numpy."""


class BlockSlotPool:
    """The slots of a pool of `num_slots` tokens, of which sequences (`owner`s) acquire some."""

    def __init__(
        self, num_slots: int, *, block_size: int = MAX_BLOCK_SIZE, is_exclusive: bool = False
    ) -> None:
        assert num_slots > 0 and 1 <= block_size <= MAX_BLOCK_SIZE
        self.num_slots = num_slots
        self.block_size = block_size
        self._is_exclusive = is_exclusive
        self._num_free = num_slots
        num_whole, num_over = divmod(num_slots, block_size)
        num_blocks = num_whole + (num_over > 0)
        self._full = (1 << block_size) - 1
        self._num_over = num_over
        """Slots of the last block, where it is a short one; 0: there is none."""
        self._outside = self._full & -(1 << num_over) if num_over else 0
        """The bits of a short last block that are not slots: always set."""
        self._masks = array("H", bytes(2 * num_blocks))
        """Which slots of each block are taken, bit i the i-th. For Python, for numpy as below."""
        if num_over:
            self._masks[-1] = self._outside
        self._mask_array: UInt16Array = np.frombuffer(self._masks, dtype=np.uint16)
        self._empty = array("i", range(num_whole - 1, -1, -1))
        """Empty blocks of full size, the next one last."""
        self._rt = BlockEnd(self._masks, block_size, is_low=True)
        self._be = BlockEnd(self._masks, block_size, is_low=False)
        self._bits: UInt16Array = (1 << np.arange(block_size)).astype(np.uint16)
        self._scratch: Int32Array = np.empty(num_blocks, dtype=np.int32)

    # ---------------------------------------------------------------- figures

    @property
    def num_free(self) -> int:
        """Slots that a newcomer can get; exclusive: those of entirely empty blocks."""
        if not self._is_exclusive:
            return self._num_free
        return len(self._empty) * self.block_size + self._num_free_over()

    @property
    def num_used(self) -> int:
        """The other slots."""
        return self.num_slots - self.num_free

    def _num_free_over(self) -> int:
        """Return the slots of a short last block that is empty, else 0."""
        return self._num_over if self._num_over and self._masks[-1] == self._outside else 0

    def block_masks(self) -> UInt16Array:
        """Return which slots of each block are taken, uint16 [num_blocks], a copy.

        Bit i is the i-th slot of the block; bits behind the end of the pool are set.
        """
        return self._mask_array.copy()

    def cost(self, owner: Hashable, request_class: RequestClass, count: int) -> int:
        """Return by how much `num_free` falls if `owner` acquires `count` slots.

        That is `count`; exclusive: whole blocks, for what the owner's last block has no room for.
        """
        if not self._is_exclusive:
            return count
        block = self._end(request_class).block_of.get(owner)
        left = 0 if block is None else (self._masks[block] ^ self._full).bit_count()
        num_blocks = -(-max(count - left, 0) // self.block_size)
        if num_blocks == len(self._empty) + 1 and count - left <= self.num_free:
            return self.num_free  # the last one is the short one
        return num_blocks * self.block_size

    def gain(self, slots: Int32Array) -> int:
        """Return by how much `num_free` would rise if these slots, int32 [n], were released."""
        if not self._is_exclusive:
            return len(slots)
        blocks, counts = np.unique(slots // self.block_size, return_counts=True)
        used = np.bitwise_count(self._mask_array[blocks])
        if not self._num_over:
            return int(np.count_nonzero(used == counts)) * self.block_size
        is_last = blocks == len(self._masks) - 1
        used -= is_last * np.uint8(self._outside.bit_count())
        sizes = np.where(is_last, self._num_over, self.block_size)
        return int(sizes[used == counts].sum())

    # ---------------------------------------------------------------- acquire

    def acquire(self, owner: Hashable, request_class: RequestClass, count: int) -> Int32Array:
        """Take the next `count` slots of a sequence, int32 [count], in order of its tokens.

        Raises:
            ValueError: they cost more than is free; nothing is taken then.
        """
        return self.acquire_many([(owner, request_class, count)])

    def acquire_many(self, shares: Sequence[tuple[Hashable, RequestClass, int]]) -> Int32Array:
        """Take the next slots of several sequences, int32 [sum of counts], share by share.

        Raises:
            ValueError: together they cost more than is free; nothing is taken then.
        """
        total = sum([count for _, _, count in shares])
        self._check(total, shares)
        self._num_free -= total
        slots = np.empty(total, dtype=np.int32)
        if self._num_free == 0 and not self._is_exclusive:
            self._take_everything(shares, slots)
        else:
            self._take(shares, slots)
        return slots

    def _take(
        self, shares: Sequence[tuple[Hashable, RequestClass, int]], slots: Int32Array
    ) -> None:
        """Fill `slots`, share by share, in the order of search."""
        masks, full, empty, size = self._masks, self._full, self._empty, self.block_size
        rt, be, real_time = self._rt, self._be, RT
        places = slots.data  # faster than numpy for single slots
        start = 0
        for owner, request_class, count in shares:
            end = rt if request_class is real_time else be
            stop = start + count
            if count != 1 or self._is_exclusive:
                self._fill(owner, end, slots, start, stop)
                start = stop
                continue
            block = end.block_of.get(owner)
            if block is not None and (free := masks[block] ^ full):  # the usual decode
                place = (free & -free if end.is_low else free).bit_length() - 1
                masks[block] |= 1 << place
                places[start] = block * size + place
            elif empty:
                block = empty.pop()
                masks[block] = end.first_bit
                places[start] = block * size + end.first_place
                end.grow(owner, block)
            else:
                places[start] = end.take_scattered(owner)
            start = stop

    def _take_everything(
        self, shares: Sequence[tuple[Hashable, RequestClass, int]], slots: Int32Array
    ) -> None:
        """Do that where all free slots go, as in every step while the cache is full.

        Nobody will grow, so the order of search is nothing to anybody; what matters is that
        real-time's slots rise and best-effort's fall.
        """
        blocks = self._pop_empty(len(self._empty))
        if len(blocks) * self.block_size < len(slots):
            blocks = np.flatnonzero(self._mask_array != self._full).astype(np.int32)
        everything = self._rt.take_all(blocks).tolist()
        rising, falling, places = iter(everything), reversed(everything), slots.data
        start, real_time = 0, RT
        for _, request_class, count in shares:
            following = rising if request_class is real_time else falling
            if count == 1:
                places[start] = next(following)
            else:
                slots[start : start + count] = list(itertools.islice(following, count))
            start += count

    def _check(self, total: int, shares: Sequence[tuple[Hashable, RequestClass, int]]) -> None:
        """Refuse what costs too much."""
        cost = total
        if self._is_exclusive:
            totals: dict[tuple[Hashable, RequestClass], int] = {}
            for owner, request_class, count in shares:
                totals[owner, request_class] = totals.get((owner, request_class), 0) + count
            cost = sum(self.cost(*key, count) for key, count in totals.items())
        if cost > self.num_free:
            raise ValueError(f"{cost} slots asked for, {self.num_free} free")

    def _fill(
        self, owner: Hashable, end: BlockEnd, slots: Int32Array, start: int, stop: int
    ) -> None:
        """Fill slots[start:stop] with a sequence's next ones, in the order of search."""
        size = self.block_size
        block = end.block_of.get(owner)
        if block is not None:
            start = end.fill(block, slots, start, stop)
        num_whole = min((stop - start) // size, len(self._empty))
        if num_whole > _FEW_BLOCKS:
            blocks = self._pop_empty(num_whole)
            self._mask_array[blocks] = self._full
            middle = start + num_whole * size
            np.add(blocks[:, None] * size, end.order, out=slots[start:middle].reshape(-1, size))
            start = middle
        while start < stop and self._empty:
            block = self._empty.pop()
            start = end.fill(block, slots, start, stop)
            end.grow(owner, block)
        if start == stop:
            return
        if self._is_exclusive:
            last = len(self._masks) - 1
            assert self._num_free_over(), "no block is left, though the cost was checked"
            end.fill(last, slots, start, stop)
            end.grow(owner, last)
        else:
            end.fill_scattered(owner, slots, start, stop)

    def _pop_empty(self, num_blocks: int) -> Int32Array:
        """Take the next empty blocks, int32 [num_blocks]."""
        first = len(self._empty) - num_blocks
        blocks = np.frombuffer(self._empty[first:], dtype=np.int32)[::-1]
        del self._empty[first:]
        return blocks

    # ---------------------------------------------------------------- release

    def release(self, slots: Int32Array) -> None:
        """Give slots, int32 [n] in any order, back. Blocks emptied last are the next to be taken.

        Of those that one call empties, the block of the first slots comes first.
        """
        if len(slots) == 0:
            return
        blocks = slots // self.block_size
        bits = self._bits[slots - blocks * self.block_size]
        assert (self._mask_array[blocks] & bits).all(), "slots released twice"
        np.subtract.at(self._mask_array, blocks, bits)
        left = self._mask_array[blocks]
        # A bit is still there if it was subtracted twice: that borrows from those above it.
        assert not (left & bits).any(), "slots released twice at once"
        self._num_free += len(slots)
        emptied = blocks[left == 0]
        if len(emptied):
            emptied = self._distinct(emptied)
            self._empty.frombytes(emptied[::-1].tobytes())
        for end in (self._rt, self._be):
            end.on_release(emptied)
            if self._num_free_over():
                end.on_release(np.array([len(self._masks) - 1], dtype=np.int32))

    def stop_growing(self, owner: Hashable) -> None:
        """Open the end at which a sequence grows to others: it has ended, paused or moved."""
        self._rt.stop(owner)
        self._be.stop(owner)

    def _distinct(self, blocks: Int32Array) -> Int32Array:
        """Return blocks once each, in order (of the last time each occurs)."""
        places = np.arange(len(blocks), dtype=np.int32)
        self._scratch[blocks] = places
        distinct: Int32Array = blocks[self._scratch[blocks] == places]
        return distinct

    def _end(self, request_class: RequestClass) -> BlockEnd:
        return self._rt if request_class is RT else self._be

    def check_integrity(self) -> None:
        """Assert the invariants."""
        num_taken = int(np.bitwise_count(self._mask_array).sum()) - self._outside.bit_count()
        assert num_taken + self._num_free == self.num_slots, "slots leaked"
        empty = np.flatnonzero(self._mask_array == 0).tolist()
        assert sorted(self._empty) == empty, "empty blocks are not all known, once each"
        assert self._outside == 0 or self._masks[-1] & self._outside == self._outside
        for end in (self._rt, self._be):
            end.check_integrity()
            assert not set(end.owner_of) & set(empty), "somebody grows in an empty block"
        if self._is_exclusive:
            assert not set(self._rt.owner_of) & set(self._be.owner_of), "a block has two owners"
