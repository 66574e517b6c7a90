"""Kernels of `sampling` that search among the tokens of a row, by their keys (`sampling_scan`)."""

from __future__ import annotations

import triton
import triton.language as tl

from lightserve.kernels.triton.launch import launched
from lightserve.kernels.triton.sampling_scan import (
    BELOW_ONE,
    chunk_totals,
    key_of,
    logit_of,
    logits_at,
    row_of,
    token_of,
    uniform,
    weights_of,
)

_LOWEST_KEY = tl.constexpr(-(2**63))
HIGHEST_KEY = tl.constexpr(2**63 - 1)
_ALL = tl.constexpr(2**31 - 1)


@triton.jit
def measure(
    logits, IS_ADJUSTED: tl.constexpr, keys_ptr, size, is_all, pivot, weighing,
    CANDIDATES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return (number, weight) of the tokens whose keys are above the pivot, the lowest key of
    those, and the highest key of the others. The tokens: `size` keys, or a row of `size` logits.

    `logits`: see `row_of`; `weighing`: the row's largest logit, its temperature, and min-p.
    """
    top, temperature, min_p = weighing
    lanes = tl.arange(0, TILE)
    number = tl.zeros([TILE], dtype=tl.int32)
    weight = tl.zeros([TILE], dtype=tl.float64)
    lowest_above = tl.full([TILE], HIGHEST_KEY, dtype=tl.int64)
    highest_below = tl.full([TILE], _LOWEST_KEY, dtype=tl.int64)
    for start in range(0, size, TILE):
        at = start + lanes
        # Loads of 16 bytes need bounds that are known to be multiples of 4: not `size`.
        if is_all:
            x = logits_at(logits, IS_ADJUSTED, at)
            keys = key_of(x, at)
        else:
            keys = tl.load(keys_ptr + at, mask=at < CANDIDATES, other=_LOWEST_KEY)
            x = tl.where(at < size, logit_of(keys), -float("inf"))
        weights = weights_of(x, top, temperature)
        is_kept = (x > -float("inf")) & (weights >= min_p)
        is_above = is_kept & (keys > pivot)
        number += is_above.to(tl.int32)
        weight += tl.where(is_above, weights, 0.0).to(tl.float64)
        lowest_above = tl.minimum(lowest_above, tl.where(is_above, keys, HIGHEST_KEY))
        is_below = is_kept & (keys <= pivot)
        highest_below = tl.maximum(highest_below, tl.where(is_below, keys, _LOWEST_KEY))
    return (
        tl.sum(number, axis=0),
        tl.sum(weight, axis=0),
        tl.min(lowest_above, axis=0),
        tl.max(highest_below, axis=0),
    )


@triton.jit
def _collect(
    logits, IS_ADJUSTED: tl.constexpr, keys_ptr, number_ptr, low, high, weighing,
    TILE: tl.constexpr,
):  # fmt: skip
    """Store those keys of a row of logits that are in (low, high], in any order."""
    top, temperature, min_p = weighing
    tl.debug_barrier()  # other threads may still read what is there
    tl.store(number_ptr, 0)
    tl.debug_barrier()
    lanes = tl.arange(0, TILE)
    for start in range(0, logits[3], TILE):
        at = start + lanes
        x = logits_at(logits, IS_ADJUSTED, at)
        keys = key_of(x, at)
        is_wanted = (keys > low) & (keys <= high) & (x > -float("inf"))
        is_wanted = is_wanted & (weights_of(x, top, temperature) >= min_p)
        # One token at a time, for few are wanted: a running sum would cost every tile.
        place = tl.atomic_add(number_ptr + tl.zeros([TILE], tl.int32), 1, mask=is_wanted)
        tl.store(keys_ptr + place, keys, mask=is_wanted)
    tl.debug_barrier()


@triton.jit
def _search(
    logits, IS_ADJUSTED: tl.constexpr, keys_ptr, number_ptr, size, is_all, low, highest, most,
    limit, weighing, REACHES: tl.constexpr, CANDIDATES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the lowest key above which there are fewer than `most` tokens and less weight than
    `limit` (REACHES: not more), and that weight. `highest` is the highest of all keys,
    `low` is below the wanted one.

    Halves the range of keys, low < the wanted one <= high, and moves both ends to keys that are
    there, which takes about 20 passes for a whole vocabulary, equal logits or not. Among all
    tokens, the rest of the range becomes candidates as soon as it is small enough.
    """
    high, weight_above = highest, tl.full((), 0.0, tl.float64)
    number_above, number_above_low = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32) + size
    # Of tokens above all that are looked at.
    more, more_weight = tl.full((), 0, tl.int32), tl.full((), 0.0, tl.float64)
    is_open = high > low
    while is_open:
        pivot = (low >> 1) + (high >> 1) + (low & high & 1)
        number, weight, above, below = measure(
            logits, IS_ADJUSTED, keys_ptr, size, is_all, pivot, weighing, CANDIDATES, TILE
        )
        number += more
        weight += more_weight
        is_less = weight < limit
        if REACHES:
            is_less = weight <= limit
        if (number < most) & is_less & (below > low):
            high = below
            number_above = number
            weight_above = weight
        else:
            low = above - 1
            number_above_low = number
            is_open = above < high
        if is_open & is_all & (number_above_low - number_above <= CANDIDATES):
            keys_ptr = keys_ptr + CANDIDATES  # its room, behind the row's candidates
            _collect(logits, IS_ADJUSTED, keys_ptr, number_ptr, low, high, weighing, TILE)
            size = number_above_low - number_above
            is_all = is_all & False
            more = number_above
            more_weight = weight_above
    return high, weight_above


@triton.jit
def _are_enough(keys_ptr, number, cut, top_k, top_p, everything, weighing, CANDIDATES, TILE):
    """Return whether every token that top-k and top-p leave is among a row's candidates, and
    these candidates' weight, 0 if some are missing."""
    top, temperature, min_p = weighing
    are_enough = False
    weight = tl.full((), 0.0, tl.float64)
    if number <= CANDIDATES:
        no_logits = (keys_ptr, keys_ptr, -1, 0)
        _, weight, _, _ = measure(
            no_logits, False, keys_ptr, number, False, _LOWEST_KEY, weighing, CANDIDATES, TILE
        )
        # Everything is: no cut, or one below what min-p drops.
        are_enough = (cut == -float("inf")) | (weights_of(cut, top, temperature) < 0.999 * min_p)
        are_enough = are_enough | ((top_k > 0) & (number >= top_k))
        are_enough = are_enough | ((top_k == 0) & (weight >= top_p * everything))
    return are_enough, weight


@triton.jit
def _lowest_kept(
    logits, IS_ADJUSTED: tl.constexpr, keys_ptr, number_ptr, size, is_all, highest, top_k, top_p,
    everything, weighing, CANDIDATES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the lowest key that top-k and then top-p leave, and the weight of all they leave."""
    most = tl.where(top_k > 0, top_k, _ALL)
    lowest = key_of(tl.full((), -float("inf"), tl.float32), tl.full((), 0, tl.int32))
    kept = everything
    # First what top-k leaves, of which top-p takes a share; each only if it is asked for.
    for part in tl.static_range(2):
        is_asked = (top_p < 1.0) | (top_k == 0)
        limit = tl.where(top_p < 1.0, top_p * kept, float("inf"))
        if part == 0:
            is_asked = top_k > 0
            limit = float("inf")
        if is_asked:
            lowest, above = _search(
                logits, IS_ADJUSTED, keys_ptr, number_ptr, size, is_all, lowest - 1, highest, most,
                limit, weighing, False, CANDIDATES, TILE,
            )  # fmt: skip
            kept = above + weights_of(logit_of(lowest), weighing[0], weighing[1])
    return lowest, kept


@triton.jit
def _draw_top(
    logits, IS_ADJUSTED: tl.constexpr, keys_ptr, number_ptr, cut, highest, top_k, top_p,
    number_drawn, everything, weighing, CANDIDATES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the key of a row's token: how far down top-k and top-p go, then one above."""
    number, vocab_size = tl.load(number_ptr), logits[3]
    are_enough, weight = _are_enough(
        keys_ptr, number, cut, top_k, top_p, everything, weighing, CANDIDATES, TILE
    )
    is_all = are_enough == 0
    lowest, kept = _lowest_kept(
        logits, IS_ADJUSTED, keys_ptr, number_ptr + 1, tl.where(is_all, vocab_size, number), is_all,
        highest, top_k, top_p, everything, weighing, CANDIDATES, TILE,
    )  # fmt: skip
    target = tl.minimum(number_drawn * kept, kept * BELOW_ONE)
    # Candidates that are not enough for top-p have most of its weight all the same.
    is_all = is_all & (target >= weight)
    drawn, _ = _search(
        logits, IS_ADJUSTED, keys_ptr, number_ptr + 1, tl.where(is_all, vocab_size, number), is_all,
        lowest - 1, highest, _ALL, target, weighing, True, CANDIDATES, TILE,
    )  # fmt: skip
    return drawn


@launched
@triton.jit
def draw_top_kernel(
    own_ptr, adjusted_ptr, source_ptr, temperature_ptr, min_p_ptr, top_p_ptr, top_k_ptr, states_ptr,
    positions_ptr, largest_ptr, first_ptr, total_ptr, cut_ptr, number_ptr, keys_ptr, kept_ptr,
    token_ptr, is_finite_ptr, stride, vocab_size, num_chunks, IS_ADJUSTED: tl.constexpr,
    CANDIDATES: tl.constexpr, TILE: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One program per row with top-k or top-p."""
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    is_finite = tl.load(is_finite_ptr + row) != 0
    if is_finite & (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0)):
        min_p = tl.load(min_p_ptr + row)
        top_k = tl.where(top_k < vocab_size, top_k, 0)
        chunks = tl.arange(0, BLOCK_C)
        there = chunks < num_chunks
        at = row * num_chunks + chunks
        largest = tl.load(largest_ptr + at, mask=there, other=-float("inf"))
        first = tl.load(first_ptr + at, mask=there, other=vocab_size)
        top = tl.max(largest, axis=0)
        highest = key_of(top, tl.min(tl.where(largest == top, first, vocab_size), axis=0))
        totals = chunk_totals(
            largest, total_ptr, kept_ptr, at, there, top, temperature, min_p, True
        )
        logits = row_of(own_ptr, adjusted_ptr, source_ptr, row, stride, vocab_size, IS_ADJUSTED)
        drawn = _draw_top(
            logits, IS_ADJUSTED, keys_ptr + row.to(tl.int64) * (2 * CANDIDATES),
            number_ptr + 2 * row, tl.load(cut_ptr + row), highest, top_k, top_p,
            uniform(states_ptr, positions_ptr, row), tl.sum(totals, axis=0),
            (top, temperature, min_p), CANDIDATES, TILE,
        )  # fmt: skip
        tl.store(token_ptr + row, token_of(drawn))
