"""The future: how much KV memory a batch will need at its peak (Past-Future, section 3.3).

Sort the requests of a batch by what they still generate, longest first. When request i ends,
the i requests before and including it are alive and each has grown by rest_i, so

    M_i = sum of base_j for j <= i, plus rest_i * i          M* = max over i of M_i   (eq. 2-4)

where base is what a request holds now (its prompt counted whole, chunked or not) and rest is
what it still generates. Memory only falls when a request ends, so the peak is at one of these
moments. `FutureMemory` keeps many futures (columns of sampled rests) at once, and answers "and
with one more request?" without sorting again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

_INT32_LIMIT = 2**31


def peak_memory(base: IntArray, rest: IntArray) -> IntArray:
    """Return M* of each future, int64 [num_futures].

    Args:
        base: tokens held now, int64 [n].
        rest: tokens still to come, int64 [num_futures, n].
    """
    return FutureMemory(base, rest).peaks


class FutureMemory:
    """The sorted futures of a batch; one more request costs O(num_futures * n) without a sort.

    A prefix that several requests share is to be counted in the `base` of the user that stays
    longest (mechanisms C7); this class only sees the result.
    """

    def __init__(self, base: IntArray, rest: IntArray) -> None:
        num_requests = rest.shape[1]
        longest = int(rest.max(initial=0))
        self._bound = int(base.sum())
        kind = self._narrowest(longest, num_requests)
        # Value and index in one number: sorting plain integers is several times faster.
        index_bits = num_requests.bit_length()
        fits = (longest + 1) << index_bits < _INT32_LIMIT
        packed = (longest - rest).astype(np.int32 if fits else np.int64)
        np.left_shift(packed, index_bits, out=packed)
        np.bitwise_or(packed, np.arange(num_requests, dtype=packed.dtype), out=packed)
        packed.sort(axis=1)
        self._held = base[packed & ((1 << index_bits) - 1)].cumsum(axis=1, dtype=kind)
        np.right_shift(packed, index_bits, out=packed)
        self._rest = (longest - packed).astype(kind, copy=False)
        self._index()

    def _narrowest(self, longest: int, num_requests: int) -> type[np.signedinteger[Any]]:
        """Return a type that holds every sum; half the bytes are nearly half the time."""
        return np.int32 if self._bound + longest * (num_requests + 2) < _INT32_LIMIT else np.int64

    @property
    def num_requests(self) -> int:
        """Size of the batch."""
        return int(self._rest.shape[1])

    @property
    def peaks(self) -> IntArray:
        """M* of each future, int64 [num_futures]; 0 for an empty batch."""
        return self._peaks

    def _index(self) -> None:
        """Prepare the prefix and suffix maxima that `peaks_with` needs."""
        num_futures, num_requests = self._rest.shape
        kind = self._rest.dtype
        self._prefix_max = np.zeros((num_futures, num_requests + 1), dtype=kind)
        self._suffix_max = np.zeros_like(self._prefix_max)
        self._held_before = np.zeros_like(self._prefix_max)
        self._held_before[:, 1:] = self._held
        peaks = self._rest * np.arange(1, num_requests + 1, dtype=kind)
        peaks += self._held
        np.maximum.accumulate(peaks, axis=1, out=self._prefix_max[:, 1:])
        peaks += self._rest  # with one more request among those before it
        np.maximum.accumulate(peaks[:, ::-1], axis=1, out=self._suffix_max[:, -2::-1])
        self._peaks: IntArray = self._prefix_max[:, -1].astype(np.int64)

    def peaks_with(self, base: int, rest: IntArray) -> IntArray:
        """Return M* of each future if one more request joined; `rest` is int64 [num_futures]."""
        rank = (self._rest >= rest[:, None]).sum(axis=1)
        futures = np.arange(len(rest))
        own = self._held_before[futures, rank].astype(np.int64) + base + rest * (rank + 1)
        behind = self._suffix_max[futures, rank].astype(np.int64)
        behind = np.where(behind > 0, behind + base, 0)
        result: IntArray = np.maximum(np.maximum(self._prefix_max[futures, rank], own), behind)
        return result

    def add(self, base: int, rest: IntArray) -> None:
        """Let one more request join for good; `rest` is int64 [num_futures]."""
        num_futures, num_requests = self._rest.shape
        self._bound += base
        longest = max(int(rest.max()), int(self._rest.max(initial=0)))
        kind = self._narrowest(longest, num_requests + 1)
        rank = (self._rest >= rest[:, None]).sum(axis=1)
        is_before = np.arange(num_requests + 1) < rank[:, None]
        futures = np.arange(num_futures)
        held_before = self._held_before[futures, rank]
        new_rest = _spread(self._rest, self._rest, is_before)
        new_rest[futures, rank] = rest
        held = _spread(self._held, self._held + kind(base), is_before)
        held[futures, rank] = held_before + base
        self._held, self._rest = held, new_rest
        self._index()


def _spread(before: IntArray, behind: IntArray, is_before: npt.NDArray[np.bool_]) -> IntArray:
    """Return rows one longer: `before` where it says so, else `behind`, one place later."""
    padding = np.zeros((len(before), 1), dtype=before.dtype)
    kept = np.concatenate([before, padding], axis=1)
    moved = np.concatenate([padding, behind], axis=1)
    return np.where(is_before, kept, moved)
