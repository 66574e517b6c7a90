"""Book-keeping of the KV pool's slots: what may write where. The tensors are in the workers.

Slots are given out by *blocks* of B neighbours with two ends: real-time takes the lowest free
slots of a block upwards, best-effort the highest downwards, so that the newest tokens of a
best-effort request lie next to real-time's end.

    slot of the block   0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15
                        r0  r1  r2  r3  ->  .   .   .   .   .   .  <-  b3  b2  b1  b0

Any number of sequences, live or cached, may have slots in a block, but at each end at most one
*grows*: whatever is free there is its own next slots as long as others find any elsewhere. A
class looks for slots in
    1. the block in which the sequence grows already,
    2. empty blocks, those emptied last first,
    3. blocks at whose end of this class no sequence grows, those with most free slots first,
    4. any block with free slots,
so that no search fails while enough slots are free. Source: BROS (section V), without its rule that
a block has two owners: what is full or finished does not matter to a token-level pool.

Blocks exist in this file alone; at B = 1 the same code is a plain pool of slots. In *exclusive*
mode, the baseline, a block belongs to one sequence until all of its slots are released.

Invariants: used + free = num_slots; an empty block is in `_empty`, and no sequence grows in it.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lightserve.messages.common import Int32Array
from lightserve.types import BE, RT, RequestClass

MAX_BLOCK_SIZE = 16

_FEW_BLOCKS, _FEW_SLOTS = 4, 32
"""Up to here a loop is faster than numpy."""


UInt16Array = npt.NDArray[np.uint16]
IndexArray = npt.NDArray[np.int64]

NOWHERE = -1
"""Stands for the block or the place of a sequence that does not grow."""


class GrowingRows:
    """Where the sequences of running requests grow, as columns by their rows."""

    def __init__(self, block_size: int) -> None:
        self.blocks: IndexArray = np.empty(0, dtype=np.int64)
        """int64 [rows]; `NOWHERE`: in no block."""
        self.is_high: IndexArray = np.empty(0, dtype=np.int64)
        """1 for those that grow from the high end, int64 [rows]."""
        self.owners: list[Hashable] = []
        self._row_of: dict[Hashable, int] = {}
        free = np.arange((1 << block_size) - 1, -1, -1)  # of each mask, which slots are not taken
        lowest, highest = np.frexp(free & -free)[1] - 1, np.frexp(free)[1] - 1
        # Of two that grow in one block with a single free slot only the first may have it.
        is_one = free & (free - 1) == 0
        places = [np.where(is_one, NOWHERE, one) for one in (lowest, highest)]
        self._places: IndexArray = np.concatenate(places).astype(np.int64)
        """The next place by end and mask."""
        self._num_masks = len(free)

    def next_places(self, rows: IndexArray, masks: UInt16Array) -> IndexArray:
        """Return the next place in each row's block, int64 [n]; `NOWHERE`: perhaps none is free."""
        blocks = self.blocks.take(rows)
        places = self._places.take(self.is_high.take(rows) * self._num_masks + masks)
        return places if blocks.min() != NOWHERE else np.where(blocks == NOWHERE, NOWHERE, places)

    def bind(self, row: int, owner: Hashable, block: int, *, is_low: bool) -> None:
        """Give a row to a sequence that grows in a block."""
        if (num_more := row + 1 - len(self.owners)) > 0:
            self.blocks = np.append(self.blocks, np.full(num_more, NOWHERE))
            self.is_high = np.append(self.is_high, np.zeros(num_more, np.int64))
            self.owners += [None] * num_more
        self.unbind(self.owners[row])
        self.unbind(owner)
        self.owners[row], self._row_of[owner] = owner, row
        self.blocks[row], self.is_high[row] = block, not is_low

    def unbind(self, owner: Hashable) -> None:
        """Know a sequence by no row, if it had one."""
        if (row := self._row_of.pop(owner, None)) is not None:
            self.owners[row] = None
            self.blocks[row] = NOWHERE

    def note(self, owner: Hashable, block: int) -> None:
        """Note where a sequence grows now."""
        if (row := self._row_of.get(owner)) is not None:
            self.blocks[row] = block

    def check_integrity(self, low: Mapping[Hashable, int], high: Mapping[Hashable, int]) -> None:
        """Assert that the columns say what the ends do: where sequences grow at each."""
        for owner, row in self._row_of.items():
            block_of = high if self.is_high[row] else low
            assert self.owners[row] is owner and self.blocks[row] == block_of.get(owner, NOWHERE)


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
        self._rows = GrowingRows(block_size)
        self._rt = BlockEnd(self._masks, block_size, self._rows, is_low=True)
        self._be = BlockEnd(self._masks, block_size, self._rows, is_low=False)
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

    def num_free_in_block_of(self, slot: int) -> int:
        """Return how many slots of a slot's block hold nothing."""
        return (self._masks[slot // self.block_size] ^ self._full).bit_count()

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

    def bind(self, row: int, owner: Hashable, request_class: RequestClass) -> None:
        """Know a sequence by a row from now on, until another one is bound to it."""
        end = self._end(request_class)
        self._rows.bind(row, owner, end.block_of.get(owner, NOWHERE), is_low=end.is_low)

    def num_real_time(self, rows: IndexArray) -> int:
        """Return how many sequences of rows, int64 [n], are real-time."""
        return len(rows) - int(np.count_nonzero(self._rows.is_high.take(rows)))

    def acquire_one_each(self, rows: IndexArray) -> Int32Array:
        """Take the next slot of each of the sequences bound to `rows`, int64 [n], all different.

        Those are the slots of `acquire_many`, but where blocks that are not empty have to be
        searched: then those go first that have room to grow where they do.

        Raises:
            ValueError: together they cost more than is free; nothing is taken then.
        """
        if self._is_exclusive or len(rows) >= self._num_free:
            return self.acquire_many(self._shares(rows))
        self._num_free -= len(rows)
        blocks = self._rows.blocks.take(rows)
        places = self._rows.next_places(rows, self._mask_array.take(blocks))
        if places.min() != NOWHERE:
            return self._take_places(blocks, places)
        is_next, others = places != NOWHERE, np.flatnonzero(places == NOWHERE)
        slots, taken = np.empty(len(rows), np.int32), np.empty(len(others), np.int32)
        slots[is_next] = self._take_places(blocks[is_next], places[is_next])
        self._take_one_each(rows[others], taken)
        slots[others] = taken
        return slots

    def _take_one_each(self, rows: IndexArray, slots: Int32Array) -> None:
        """Fill `slots` with one for each row: as `_take`, stretches of one class at a time."""
        is_high = self._rows.is_high.take(rows)
        owners = [self._rows.owners[row] for row in rows.tolist()]
        stops = (np.flatnonzero(np.diff(is_high)) + 1).tolist()
        start = 0
        for stop in [*stops, len(owners)]:
            end = self._be if is_high[start] else self._rt
            slots[start:stop] = end.take_one_each(owners[start:stop], self._empty)
            start = stop

    def _take_places(self, blocks: IndexArray, places: IndexArray) -> Int32Array:
        """Take a free place of each block, int64 [n] both; returns their slots."""
        np.add.at(self._mask_array, blocks, self._bits.take(places))
        slots: Int32Array = (blocks * self.block_size + places).astype(np.int32)
        return slots

    def _shares(self, rows: IndexArray) -> list[tuple[Hashable, RequestClass, int]]:
        """Return shares of one slot for the sequences bound to rows."""
        owners, is_high = self._rows.owners, self._rows.is_high
        return [(owners[row], BE if is_high[row] else RT, 1) for row in rows.tolist()]

    def _take(
        self, shares: Sequence[tuple[Hashable, RequestClass, int]], slots: Int32Array
    ) -> None:
        """Fill `slots`, share by share, in the order of search."""
        start = 0
        for owner, request_class, count in shares:
            end = self._rt if request_class is RT else self._be
            stop = start + count
            if count != 1 or self._is_exclusive:
                self._fill(owner, end, slots, start, stop)
            else:
                slots[start] = end.take_one_each([owner], self._empty)[0]
            start = stop

    def _take_everything(
        self, shares: Sequence[tuple[Hashable, RequestClass, int]], slots: Int32Array
    ) -> None:
        """Do that where all free slots go, as in every step while the cache is full.

        No sequence will grow, so that the order of search does not matter, but for that
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
        self._rows.unbind(owner)

    def go_back(self, owner: Hashable, request_class: RequestClass, slot: int) -> None:
        """Let a sequence that lost slots behind `slot` grow nowhere; exclusive: in that block."""
        self.stop_growing(owner)
        if self._is_exclusive:
            self._end(request_class).grow(owner, slot // self.block_size)

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
            assert not set(end.owner_of) & set(empty), "a sequence grows in an empty block"
        self._rows.check_integrity(self._rt.block_of, self._be.block_of)
        if self._is_exclusive:
            assert not set(self._rt.owner_of) & set(self._be.owner_of), "a block has two owners"


class BlockEnd:
    """The low end of the blocks, which real-time fills upwards, or the high end.

    A block's *rank* for newcomers: its free slots, plus B if none grows at this end; 0 if it
    has none. Ranks fall by themselves, when slots are taken; what lets one rise (`on_release`,
    `stop`) drops the buckets, to be built anew by the next search. So a block is in exactly one
    bucket at or above its rank, and is found in amortized constant time.
    """

    def __init__(
        self, masks: array[int], block_size: int, rows: GrowingRows, *, is_low: bool
    ) -> None:
        self.is_low = is_low
        self._rows = rows
        places = range(block_size) if is_low else range(block_size - 1, -1, -1)
        self.first_place = places[0]
        """The place in an empty block that is taken first, 0 … B-1."""
        self.first_bit = 1 << self.first_place
        self.order: Int32Array = np.array(places, dtype=np.int32)
        """The places of a block in the order in which they are taken, int32 [B]."""
        self.block_of: dict[Hashable, int] = {}
        """Where sequences grow; the block may be full."""
        self.owner_of: dict[int, Hashable] = {}
        """Owners by block."""
        self._masks = masks
        self._mask_array: npt.NDArray[np.uint16] = np.frombuffer(masks, dtype=np.uint16)
        self._size = block_size
        self._full = (1 << block_size) - 1
        self._is_grown = bytearray(len(masks))
        """`owner_of`'s keys, for numpy."""
        self._grown_array: npt.NDArray[np.uint8] = np.frombuffer(self._is_grown, dtype=np.uint8)
        self._buckets: list[list[int]] | None = None
        """Blocks with free slots at or above their rank; from the last non-empty bucket up
        there are none any more."""

    # ---------------------------------------------------------------- growing

    def grow(self, owner: Hashable, block: int) -> None:
        """Let a sequence grow in a block where none does, no longer where it did."""
        before = self.block_of.get(owner)
        if before is not None:
            del self.owner_of[before]
            self._is_grown[before] = 0
        if self._masks[block] == self._full:
            if before is not None:
                del self.block_of[owner]
                self._rows.note(owner, NOWHERE)
            return
        self.block_of[owner] = block
        self._rows.note(owner, block)
        self.owner_of[block] = owner
        self._is_grown[block] = 1

    def stop(self, owner: Hashable) -> None:
        """Let a sequence grow nowhere, if it did."""
        block = self.block_of.pop(owner, None)
        if block is not None:
            self._rows.note(owner, NOWHERE)
            del self.owner_of[block]
            self._is_grown[block] = 0
            self._buckets = None

    def on_release(self, emptied: Int32Array) -> None:
        """Slots were released: what grew in the blocks that are empty now does so no longer."""
        self._buckets = None
        if self.owner_of and len(emptied):
            for block in emptied[self._grown_array[emptied] != 0].tolist():
                self.stop(self.owner_of[block])

    # ---------------------------------------------------------------- filling

    def fill(self, block: int, slots: Int32Array, start: int, stop: int) -> int:
        """Fill slots[start:stop] with free ones of a block; returns up to where."""
        free = self._masks[block] ^ self._full
        first = block * self._size
        while free and start < stop:
            place = (free & -free if self.is_low else free).bit_length() - 1
            free ^= 1 << place
            slots[start] = first + place
            start += 1
        self._masks[block] = free ^ self._full
        return start

    def fill_scattered(self, owner: Hashable, slots: Int32Array, start: int, stop: int) -> None:
        """Fill slots[start:stop] from blocks that are not empty; enough must be free."""
        if stop - start > _FEW_SLOTS:
            start = self._fill_many(slots, start, stop)
        while start < stop:
            block = self._best_block()
            start = self.fill(block, slots, start, stop)
            if self._masks[block] != self._full:  # so this was the last one
                self._put_back(owner, block)

    def take_one_each(self, owners: Sequence[Hashable], empty: array[int]) -> list[int]:
        """Take one slot for each owner, in the order of search; enough must be free.

        `empty` are the pool's empty blocks. In full pools nearly every decode of every step comes
        through here, so all is in one loop: the block that grows, an empty one, the best other.
        """
        masks, full, size, is_low = self._masks, self._full, self._size, self.is_low
        block_of, is_grown = self.block_of, self._is_grown
        taken: list[int] = []
        for owner in owners:
            block = block_of.get(owner, NOWHERE)
            if block != NOWHERE and (free := masks[block] ^ full):
                place = (free & -free if is_low else free).bit_length() - 1
                masks[block] |= 1 << place
                taken.append(block * size + place)
                continue
            if empty:
                block = empty.pop()
                masks[block] = self.first_bit
                taken.append(block * size + self.first_place)
                self.grow(owner, block)
                continue
            block = self._best_block()
            free = masks[block] ^ full
            place = (free & -free if is_low else free).bit_length() - 1
            free ^= 1 << place
            masks[block] = free ^ full
            taken.append(block * size + place)
            if free:
                if not is_grown[block]:
                    self.grow(owner, block)
                assert self._buckets is not None
                self._buckets[free.bit_count()].append(block)
        return taken

    def _put_back(self, owner: Hashable, block: int) -> None:
        """Let `owner` grow in a block of which it has got a slot, if none does there."""
        if not self._is_grown[block]:
            self.grow(owner, block)
        assert self._buckets is not None
        self._buckets[(self._masks[block] ^ self._full).bit_count()].append(block)

    def _fill_many(self, slots: Int32Array, start: int, stop: int) -> int:
        """Do that with all free slots of as many blocks as are certainly needed."""
        blocks, ranks = self._ranked()
        num_free = (ranks - 1) % self._size + 1
        num_taken = np.cumsum(num_free[::-1], dtype=np.int64)
        num_blocks = int(np.searchsorted(num_taken, stop - start, side="right"))
        taken = self.take_all(blocks[::-1][:num_blocks])
        slots[start : start + len(taken)] = taken
        num_left = len(blocks) - num_blocks
        self._buckets = self._bucketed(blocks[:num_left], ranks[:num_left])
        return start + len(taken)

    def take_all(self, blocks: Int32Array) -> Int32Array:
        """Take all free slots of these blocks, int32 [n], block by block from this end."""
        free = self._mask_array[blocks] ^ np.uint16(self._full)
        is_free = (free[:, None] >> self.order.astype(np.uint16)) & 1  # [num_blocks, B]
        rows, columns = np.nonzero(is_free)
        self._mask_array[blocks] = self._full
        slots: Int32Array = blocks[rows] * self._size + self.order[columns]
        return slots

    # ---------------------------------------------------------------- ranks

    def _rank(self, block: int) -> int:
        num_free = (self._masks[block] ^ self._full).bit_count()
        return num_free if self._is_grown[block] or num_free == 0 else num_free + self._size

    def _best_block(self) -> int:
        """Return a block of the highest rank, taken out of the buckets."""
        if self._buckets is None:
            self._buckets = self._bucketed(*self._ranked())
        buckets, masks, full, is_grown = self._buckets, self._masks, self._full, self._is_grown
        size, most = self._size, len(self._buckets) - 1
        while True:
            bucket = buckets[most]
            while bucket:
                block = bucket.pop()
                rank = (masks[block] ^ full).bit_count()  # `_rank`, for speed
                if rank and not is_grown[block]:
                    rank += size
                if rank == most:
                    return block
                if rank:
                    buckets[rank].append(block)
            buckets.pop()
            most -= 1

    def _bucketed(self, blocks: Int32Array, ranks: npt.NDArray[np.uint8]) -> list[list[int]]:
        """Return the buckets of these blocks, which come by rising rank."""
        stops = np.cumsum(np.bincount(ranks, minlength=2 * self._size + 1)).tolist()
        in_order = blocks.tolist()
        return [in_order[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]

    def _ranked(self) -> tuple[Int32Array, npt.NDArray[np.uint8]]:
        """Return the blocks with free slots by rising rank, falling number, and their ranks."""
        blocks = np.flatnonzero(self._mask_array != self._full)[::-1].astype(np.int32)
        num_free = np.bitwise_count(self._mask_array[blocks] ^ np.uint16(self._full))
        ranks = num_free + (1 - self._grown_array[blocks]) * np.uint8(self._size)
        order = np.argsort(ranks, kind="stable")
        return blocks[order], ranks[order]

    def check_integrity(self) -> None:
        """Assert that growers are known both ways, and buckets hold what they must."""
        assert {block: owner for owner, block in self.block_of.items()} == self.owner_of
        assert np.flatnonzero(self._grown_array).tolist() == sorted(self.owner_of)
        if self._buckets is not None:
            found: dict[int, int] = {}
            for rank, bucket in enumerate(self._buckets):
                assert not found.keys() & bucket and len(set(bucket)) == len(bucket)
                found.update(dict.fromkeys(bucket, rank))
            for block in np.flatnonzero(self._mask_array != self._full).tolist():
                assert found.get(block, -1) >= self._rank(block), "a block is not found"
