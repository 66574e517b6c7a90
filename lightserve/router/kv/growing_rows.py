"""Where sequences grow in the pool's blocks, as columns by rows; see `slots`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import numpy as np
import numpy.typing as npt

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
