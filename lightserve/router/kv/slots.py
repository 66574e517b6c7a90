"""Book-keeping of the KV pool's slots: who may write where. The tensors are in the workers.

A stack: the slots freed last are given out first (they are the ones still in the caches), and
a fresh pool gives 0, 1, 2, … so that a lone request's KV is contiguous.
"""

from __future__ import annotations

import numpy as np

from lightserve.messages.common import Int32Array


class SlotPool:
    """The free slots of a pool of `num_slots` tokens. Invariant: used + free = num_slots."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._stack: Int32Array = np.arange(num_slots - 1, -1, -1, dtype=np.int32)
        self._num_free = num_slots

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Slots that somebody holds."""
        return self.num_slots - self._num_free

    def acquire(self, count: int) -> Int32Array:
        """Take `count` slots, int32 [count].

        Raises:
            ValueError: fewer are free.
        """
        if count > self._num_free:
            raise ValueError(f"{count} slots asked for, {self._num_free} free")
        slots = self._stack[self._num_free - count : self._num_free][::-1].copy()
        self._num_free -= count
        return slots

    def release(self, slots: Int32Array) -> None:
        """Give slots back; the first of them is the next to be given out."""
        count = len(slots)
        assert self._num_free + count <= self.num_slots, "slots released twice"
        self._stack[self._num_free : self._num_free + count] = slots[::-1]
        self._num_free += count
