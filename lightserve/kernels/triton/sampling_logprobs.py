"""The kernel of `sampling` that finds log-probabilities among a row's candidates."""

from __future__ import annotations

import triton
import triton.language as tl

from lightserve.kernels.triton.sampling_rows import logit_of, token_of, weights_of
from lightserve.kernels.triton.sampling_search import HIGHEST_KEY, measure


@triton.jit(do_not_specialize=["num_top"])
def logprobs_kernel(
    own_ptr,
    token_ptr,
    largest_ptr,
    total_ptr,
    finite_ptr,
    number_ptr,
    keys_ptr,
    chosen_ptr,
    top_token_ptr,
    top_ptr,
    is_finite_ptr,
    stride,
    vocab_size,
    num_chunks,
    num_top,
    CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program per row: the given token, then the most probable ones, one after the other."""
    row = tl.program_id(0)
    chunks = tl.arange(0, BLOCK_C)
    there = chunks < num_chunks
    at = row * num_chunks + chunks
    largest = tl.load(largest_ptr + at, mask=there, other=-float("inf"))
    is_fine = tl.min(tl.load(finite_ptr + at, mask=there, other=1), axis=0) != 0
    top = tl.max(largest, axis=0)
    totals = tl.load(total_ptr + at, mask=there, other=0.0) * weights_of(largest, top, 1.0)
    everything = top + tl.log(tl.sum(tl.where(there, totals, 0.0), axis=0))
    own = own_ptr + row.to(tl.int64) * stride
    tl.store(chosen_ptr + row, tl.load(own + tl.load(token_ptr + row)).to(tl.float32) - everything)
    tl.store(is_finite_ptr + row, is_fine)
    if is_fine & (num_top > 0):
        keys = keys_ptr + row.to(tl.int64) * (2 * CANDIDATES)
        size = tl.load(number_ptr + 2 * row)
        is_all = (size > CANDIDATES) | (size < num_top)
        size = tl.where(is_all, vocab_size, size)
        last = tl.full((), HIGHEST_KEY, tl.int64)
        for number in range(0, num_top):
            _, _, _, last = measure(
                own,
                own,
                -1,
                False,
                keys,
                size,
                is_all,
                last - 1,
                top,
                1.0,
                0.0,
                vocab_size,
                CANDIDATES,
                TILE,
            )
            tl.store(top_token_ptr + row * num_top + number, token_of(last).to(tl.int32))
            tl.store(top_ptr + row * num_top + number, logit_of(last) - everything)
