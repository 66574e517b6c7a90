"""One of the two ends of all blocks: who grows there, and who may come where nobody does.

Part of `block_slots`, whose masks it shares and writes.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from lightserve.messages.common import Int32Array

_FEW_SLOTS = 32
"""Up to here a loop is faster than numpy."""


class BlockEnd:
    """The low end of the blocks, which real-time fills upwards, or the high end.

    A block's *rank* for newcomers: its free slots, plus B if nobody grows at this end; 0 if it
    has none. Ranks fall by themselves, when slots are taken; what lets one rise (`on_release`,
    `stop`) drops the buckets, to be built anew by the next search. So a block is in exactly one
    bucket at or above its rank, and is found in amortized constant time.
    """

    def __init__(self, masks: array[int], block_size: int, *, is_low: bool) -> None:
        self.is_low = is_low
        places = range(block_size) if is_low else range(block_size - 1, -1, -1)
        self.first_place = places[0]
        """The place in an empty block that is taken first, 0 … B-1."""
        self.first_bit = 1 << self.first_place
        self.order: Int32Array = np.array(places, dtype=np.int32)
        """The places of a block in the order in which they are taken, int32 [B]."""
        self.block_of: dict[Hashable, int] = {}
        """Where sequences grow; the block may be full."""
        self.owner_of: dict[int, Hashable] = {}
        """The same the other way round."""
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
        """Let a sequence grow in a block where nobody does, no longer where it did."""
        before = self.block_of.get(owner)
        if before is not None:
            del self.owner_of[before]
            self._is_grown[before] = 0
        if self._masks[block] == self._full:
            if before is not None:
                del self.block_of[owner]
            return
        self.block_of[owner] = block
        self.owner_of[block] = owner
        self._is_grown[block] = 1

    def stop(self, owner: Hashable) -> None:
        """Let a sequence grow nowhere, if it did."""
        block = self.block_of.pop(owner, None)
        if block is not None:
            del self.owner_of[block]
            self._is_grown[block] = 0
            self._buckets = None

    def on_release(self, emptied: Int32Array) -> None:
        """Slots were released: those who grew in the blocks that are empty now do so no longer."""
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

    def take_scattered(self, owner: Hashable) -> int:
        """Take one slot, of a block that is not empty; one must be free."""
        block = self._best_block()
        free = self._masks[block] ^ self._full
        bit = free & -free if self.is_low else 1 << free.bit_length() - 1
        self._masks[block] |= bit
        if free != bit:
            self._put_back(owner, block)
        return block * self._size + bit.bit_length() - 1

    def _put_back(self, owner: Hashable, block: int) -> None:
        """Let `owner` grow in a block of which it has got a slot, if nobody does there."""
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
        while True:
            bucket = buckets[-1]
            while bucket:
                block = bucket.pop()
                rank = (masks[block] ^ full).bit_count()  # `_rank`, for speed
                if rank and not is_grown[block]:
                    rank += self._size
                if rank == len(buckets) - 1:
                    return block
                if rank:
                    buckets[rank].append(block)
            buckets.pop()

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
