"""The future: how much KV memory a batch will need at its peak (Past-Future, section 3.3).

Sort the requests of a batch by what they still generate, longest first. When request i ends,
the i requests before and including it are alive and each has grown by rest_i, so

    M_i = sum of base_j for j <= i, plus rest_i * i          M* = max over i of M_i   (eq. 2-4)

where base is what a request holds now (its prompt counted whole, chunked or not) and rest is
what it still generates. Memory only falls when a request ends, so the peak is at one of these
moments. `FutureMemory` keeps many futures (columns of sampled rests) at once, and answers "and
with one more request?" without sorting again.

Tokens that several requests hold together leave with the last of them: they belong to the base
of the one that stays longest (mechanisms C7), which differs from future to future.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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


class SharedTokens(NamedTuple):
    """Tokens of a newcomer that others hold as well."""

    num_tokens: int
    held_for: IntArray
    """How many steps the last of the others stays, int64 [num_futures]."""


def base_with_shared(
    base: IntArray, rest: IntArray, shared: Sequence[tuple[int, Sequence[int]]]
) -> IntArray:
    """Return the base of each request in each future, int64 [num_futures, n].

    Args:
        base: tokens that each request holds, those it shares included, int64 [n].
        rest: tokens still to come, int64 [num_futures, n].
        shared: numbers of tokens that several requests hold together, and which (indices).
    """
    num_futures, num_requests = rest.shape
    counts = np.array([count for count, _ in shared])
    sizes = np.array([len(users) for _, users in shared])
    users = np.concatenate([users for _, users in shared])
    twice = np.bincount(users, np.repeat(counts, sizes), num_requests).astype(np.int64)
    # Who stays longest: the largest of rest and index in one number.
    stays = rest[:, users] * num_requests + users
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    longest = np.maximum.reduceat(stays, starts, axis=1) % num_requests
    longest += np.arange(num_futures)[:, None] * num_requests
    weights = np.broadcast_to(counts, longest.shape).ravel()
    once = np.bincount(longest.ravel(), weights, num_futures * num_requests).astype(np.int64)
    result: IntArray = base - twice + once.reshape(rest.shape)
    return result


class FutureMemory:
    """The sorted futures of a batch; one more request costs O(num_futures * n) without a sort."""

    def __init__(self, base: IntArray, rest: IntArray) -> None:
        """`base` is int64 [n], or [num_futures, n] where tokens are shared; `rest` the latter."""
        num_requests = rest.shape[1]
        longest = int(rest.max(initial=0))
        self._bound = int(base.sum(axis=-1).max())
        kind = self._narrowest(longest, num_requests)
        # Value and index in one number: sorting plain integers is several times faster.
        index_bits = num_requests.bit_length()
        fits = (longest + 1) << index_bits < _INT32_LIMIT
        packed = (longest - rest).astype(np.int32 if fits else np.int64)
        np.left_shift(packed, index_bits, out=packed)
        np.bitwise_or(packed, np.arange(num_requests, dtype=packed.dtype), out=packed)
        packed.sort(axis=1)
        order = packed & ((1 << index_bits) - 1)
        sorted_base = base[order] if base.ndim == 1 else np.take_along_axis(base, order, axis=1)
        self._held = sorted_base.cumsum(axis=1, dtype=kind)
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
        self._with_one_more = peaks
        np.maximum.accumulate(peaks[:, ::-1], axis=1, out=self._suffix_max[:, -2::-1])
        self._peaks: IntArray = self._prefix_max[:, -1].astype(np.int64)

    def peaks_with(
        self, base: int, rest: IntArray, shared: Sequence[SharedTokens] = ()
    ) -> IntArray:
        """Return M* of each future if one more request joined, int64 [num_futures].

        Args:
            base: tokens that it alone holds.
            rest: tokens still to come, int64 [num_futures].
            shared: what else it holds, together with others.
        """
        rank = (self._rest >= rest[:, None]).sum(axis=1)
        futures = np.arange(len(rest))
        own = self._held_before[futures, rank].astype(np.int64) + base + rest * (rank + 1)
        if shared:
            own += _inherited(shared, rest[:, None])[:, 0]
            behind = self._with_one_more + _inherited(shared, self._rest)
            is_behind = np.arange(self.num_requests) >= rank[:, None]
            behind = behind.max(axis=1, where=is_behind, initial=0)
        else:
            behind = self._suffix_max[futures, rank].astype(np.int64)
        behind = np.where(rank < self.num_requests, behind + base, 0)
        result: IntArray = np.maximum(np.maximum(self._prefix_max[futures, rank], own), behind)
        return result

    def add(self, base: int, rest: IntArray, shared: Sequence[SharedTokens] = ()) -> None:
        """Let one more request join for good; see `peaks_with`."""
        num_futures, num_requests = self._rest.shape
        self._bound += base + sum(part.num_tokens for part in shared)
        longest = max(int(rest.max()), int(self._rest.max(initial=0)))
        kind = self._narrowest(longest, num_requests + 1)
        rank = (self._rest >= rest[:, None]).sum(axis=1)
        is_before = np.arange(num_requests + 1) < rank[:, None]
        futures = np.arange(num_futures)
        held_before = self._held_before[futures, rank]
        new_rest = _spread(self._rest, self._rest, is_before)
        new_rest[futures, rank] = rest
        behind = self._held + kind(base)
        if shared:
            behind += _inherited(shared, self._rest).astype(kind)
            held_before = held_before + _inherited(shared, rest[:, None])[:, 0]
        held = _spread(self._held, behind, is_before)
        held[futures, rank] = held_before + base
        self._held, self._rest = held, new_rest
        self._index()


def _inherited(shared: Sequence[SharedTokens], steps: IntArray) -> IntArray:
    """Return how many shared tokens nobody else holds any more after so many steps.

    `steps` and the result are int64 [num_futures, n].
    """
    total: IntArray = np.zeros(steps.shape, dtype=np.int64)
    for part in shared:
        total += part.num_tokens * (part.held_for[:, None] < steps)
    return total


def _spread(before: IntArray, behind: IntArray, is_before: npt.NDArray[np.bool_]) -> IntArray:
    """Return rows one longer: `before` where it says so, else `behind`, one place later."""
    padding = np.zeros((len(before), 1), dtype=before.dtype)
    kept = np.concatenate([before, padding], axis=1)
    moved = np.concatenate([padding, behind], axis=1)
    return np.where(is_before, kept, moved)
