"""The future: how much KV memory a batch will need at its peak (Past-Future, section 3.3).

Sort the requests of a batch by what they still generate, longest first. When request i ends,
the i requests before and including it are alive and each has grown by rest_i, so

    M_i = sum of base_j for j <= i, plus rest_i * i          M* = max over i of M_i   (eq. 2-4)

where base is what a request holds now (its prompt counted whole, chunked or not) and rest is
what it still generates. Memory only falls when a request ends, so the peak is at one of these
moments. `FutureMemory` keeps many futures (columns of sampled rests) at once, and answers "and
with one more request?" without sorting again.

Tokens that several requests hold together leave with the last of them: they belong to the base
of the one that stays longest, which differs from future to future.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

_INT32_LIMIT = 2**30
"""Sums below it leave room for a newcomer's tokens as well."""


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
    # Who stays longest: the largest of rest and index in one number. Futures side by side, as they
    # are drawn, so that numpy compares many at once.
    fits = (int(rest.max(initial=0)) + 1) * num_requests < 2 * _INT32_LIMIT
    dtype = np.int32 if fits else np.int64
    stays = rest.T[users].astype(dtype) * dtype(num_requests) + users.astype(dtype)[:, None]
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    longest = np.maximum.reduceat(stays, starts, axis=0).astype(np.int64) % num_requests
    places = longest * num_futures + np.arange(num_futures)
    weights = np.repeat(counts, num_futures)
    once = np.bincount(places.ravel(), weights, num_requests * num_futures).astype(np.int64)
    result: IntArray = ((base - twice)[:, None] + once.reshape(num_requests, num_futures)).T
    return result


class WithNewcomer(NamedTuple):
    """The futures with one more request; what `FutureMemory.add` needs to let it join."""

    peaks: IntArray
    """M* of each future, int64 [num_futures]."""
    num_tokens: int
    """Tokens that the newcomer holds, shared or not."""
    rest: IntArray
    """Tokens that it is still to generate, int64 [num_futures]."""
    is_alive: npt.NDArray[np.bool_]
    """Whether the newcomer still lives at each moment, bool [num_futures, n]."""
    brings: IntArray | int
    """Tokens that it then holds alone, [num_futures, n]."""
    grown: IntArray
    """Tokens needed at each moment, newcomer included, [num_futures, n]."""
    held: IntArray
    """By those who live at the newcomer's own end, without growth, int64 [num_futures]."""
    needed: IntArray
    """By those, with growth, int64 [num_futures]."""


class FutureMemory:
    """The futures of a batch as moments, one for each request: when it ends, and what is needed.

    One sort at the start. One more request, whether it is asked about or joins, costs a few
    passes over [num_futures, n]: its own moment is one more, and it counts at all earlier ones.
    """

    def __init__(self, base: IntArray, rest: IntArray) -> None:
        """`base` is int64 [n], or [num_futures, n] where tokens are shared; `rest` the latter."""
        num_requests = rest.shape[1]
        self._num_requests: int = num_requests
        longest = int(rest.max(initial=0))
        # Value and index in one number: sorting plain integers is several times faster.
        index_bits = num_requests.bit_length()
        # How much sooner than the longest: ascending is then the order that is wanted.
        fits = (longest + 1) << index_bits < 2 * _INT32_LIMIT
        packed = np.empty(rest.shape, np.int32 if fits else np.int64)
        np.subtract(longest, rest, out=packed, casting="same_kind")
        packed <<= index_bits
        packed |= np.arange(num_requests, dtype=packed.dtype)
        packed.sort(axis=1)
        order = packed & ((1 << index_bits) - 1)
        self._longest = longest
        self._bound = int(base.sum(axis=-1).max())
        """No less than all that is held, in any future."""
        # Contiguous: numpy takes such arrays in one go, and rows of wider ones one by one.
        dtype = self._narrowest()
        packed >>= index_bits
        self._ends: IntArray = np.subtract(longest, packed, dtype=dtype, casting="same_kind")
        """In how many steps each request ends, [num_futures, n]."""
        if base.ndim == 2:  # flat, with the places of each future behind those of the one before
            order += np.arange(0, packed.size, num_requests, dtype=order.dtype)[:, None]
        base = base.astype(dtype, order="C").ravel().take(order)
        self._held = base.cumsum(axis=1, dtype=dtype)
        """Tokens that requests alive then hold now, [num_futures, n]."""
        self._needed = self._ends * np.arange(1, num_requests + 1, dtype=dtype)
        """Tokens that they then need, [num_futures, n]."""
        self._needed += self._held
        self._ends_at_peak: IntArray | None = None
        self._peaks: IntArray = self._needed.max(axis=1, initial=0).astype(np.int64)

    def _narrowest(self) -> type[np.signedinteger[Any]]:
        """Return a type that holds every sum; half the bytes are nearly half the time."""
        most = self._bound + self._longest * (self._num_requests + 2)
        return np.int32 if most < _INT32_LIMIT else np.int64

    @property
    def num_requests(self) -> int:
        """Size of the batch."""
        return self._num_requests

    @property
    def peaks(self) -> IntArray:
        """M* of each future, int64 [num_futures]; 0 for an empty batch."""
        return self._peaks

    def peaks_at_least(self, base: int, rest: IntArray) -> IntArray:
        """Return a lower bound of `with_newcomer(base, rest).peaks` for much less work.

        It looks at one moment of each future: that of the peak without the newcomer.
        """
        if self._ends_at_peak is None:
            futures = np.arange(len(self._ends))
            at_peak = self._needed.argmax(axis=1)
            self._ends_at_peak = self._ends[futures, at_peak].astype(np.int64)
        grown = self._ends_at_peak + base
        grown *= self._ends_at_peak < rest
        grown += self._peaks
        return grown

    def with_newcomer(
        self, base: int, rest: IntArray, shared: Sequence[SharedTokens] = ()
    ) -> WithNewcomer:
        """Return what one more request would come to.

        It alone holds `base` tokens, `rest` are still to come, int64 [num_futures].
        """
        # Masks are multiplied by: several times faster than choosing by them.
        ends, held, needed = self._ends, self._held, self._needed
        is_alive = ends < rest.astype(ends.dtype)[:, None]
        rank = self._num_requests + 1 - is_alive.sum(axis=1)
        own_held = (held * ~is_alive).max(axis=1, initial=0).astype(np.int64) + base
        brings: IntArray | int = base
        if shared:
            brings = _inherited(shared, ends) + base
            own_held += _inherited(shared, rest[:, None])[:, 0]
        own_needed = own_held + rest * rank
        grown = (ends + brings) * is_alive
        grown += needed
        peaks = np.maximum(grown.max(axis=1, initial=0), own_needed)
        num_tokens = base + sum(part.num_tokens for part in shared)
        return WithNewcomer(peaks, num_tokens, rest, is_alive, brings, grown, own_held, own_needed)

    def add(self, newcomer: WithNewcomer) -> None:
        """Let a request join for good, about which this was asked since the last one joined."""
        self._bound += newcomer.num_tokens
        self._longest = max(self._longest, int(newcomer.rest.max()))
        self._num_requests += 1
        dtype = self._narrowest()
        self._ends = _append(self._ends, newcomer.rest, dtype)
        self._held = _append(self._held, newcomer.held, dtype)
        self._held[:, :-1] += newcomer.is_alive * newcomer.brings
        self._needed = _append(newcomer.grown, newcomer.needed, dtype)
        self._peaks, self._ends_at_peak = newcomer.peaks, None


def _append(moments: IntArray, newcomer: IntArray, dtype: type[np.signedinteger[Any]]) -> IntArray:
    """Return moments [num_futures, n] with one more, int64 [num_futures]."""
    result: IntArray = np.empty((len(moments), moments.shape[1] + 1), dtype)
    result[:, :-1], result[:, -1] = moments, newcomer
    return result


def _inherited(shared: Sequence[SharedTokens], steps: IntArray) -> IntArray:
    """Return how many shared tokens no other holds any more after so many steps.

    `steps` and the result are integers [num_futures, n].
    """
    total: IntArray = np.zeros(steps.shape, dtype=steps.dtype)
    for part in shared:
        is_held = part.held_for.astype(steps.dtype)[:, None] >= steps
        total += ~is_held * steps.dtype.type(part.num_tokens)
    return total
