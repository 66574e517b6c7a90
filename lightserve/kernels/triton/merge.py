"""Merges the parts of an attention that was split over the context, by log-sum-exp.

A part is what a softmax over a stretch of the context gave: a mean of values for each head, and
the logarithm of the sum behind it. Decodes and chunks of prompts split alike (flash-decoding).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.kernels.triton.online_softmax import MIN_DOT

MAX_PARTS = 256
"""Most parts of a token over all KV heads: enough to fill a large GPU with one block of queries."""
_MERGED_AT_ONCE = 8


def max_splits(split_len: int, *, num_kv_heads: int, max_len: int) -> int:
    """Return into how many parts `max_len` positions are cut at most, a power of two.

    `split_len` is the shortest stretch that is worth a part.
    """
    wanted = min(MAX_PARTS // num_kv_heads, -(-max_len // split_len))
    return triton.next_power_of_2(max(1, wanted))


@dataclass(frozen=True, eq=False)
class Parts:
    """Room for parts: the same in every layer."""

    values: Tensor
    """float32 [P, Hq, D]."""
    lse: Tensor
    """float32 [P, Hq], in base 2."""


def make_parts(num_parts: int, num_heads: int, head_dim: int, device: torch.device) -> Parts:
    """Return room for so many parts; what is in it means nothing yet."""
    shape = (num_parts, num_heads)
    return Parts(
        torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )


# fmt: off
@triton.jit(
    do_not_specialize_on_alignment=["counts_ptr", "tokens_ptr", "indices_ptr", "firsts_ptr"],
)
def _merge_kernel(
    values_ptr, lse_ptr, out_ptr, counts_ptr, tokens_ptr, indices_ptr, firsts_ptr, out_stride_t,
    out_stride_h, NUM_HEADS: tl.constexpr, HAS_INDICES: tl.constexpr, HAS_FIRSTS: tl.constexpr,
    MAX_SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):
    # fmt: on
    """Weigh the parts of one token's head by their share of the softmax."""
    unit = tl.program_id(0)
    head = tl.program_id(1)
    num_parts = tl.load(counts_ptr + unit)
    if HAS_FIRSTS:
        first = tl.load(firsts_ptr + unit).to(tl.int64)
    else:
        if num_parts == 1:
            return
        first = unit.to(tl.int64) * MAX_SPLITS
    index = unit
    if HAS_INDICES:
        index = tl.load(indices_ptr + unit)
    token = tl.load(tokens_ptr + index).to(tl.int64)
    splits = tl.arange(0, MAX_SPLITS)
    own_lse = lse_ptr + first * NUM_HEADS + head
    lse = tl.load(own_lse + splits * NUM_HEADS, mask=splits < num_parts, other=float("-inf"))
    largest = tl.max(lse, axis=0)
    total = tl.sum(tl.exp2(lse - largest), axis=0)
    offs_s = tl.arange(0, BLOCK_S)
    offs_d = tl.arange(0, BLOCK_D)
    d_mask = offs_d < HEAD_DIM
    merged = tl.zeros([BLOCK_D], dtype=tl.float32)
    for start in range(0, num_parts, BLOCK_S):
        some = start + offs_s
        exists = some < num_parts
        weights = tl.load(own_lse + some * NUM_HEADS, mask=exists, other=float("-inf"))
        weights = tl.exp2(weights - largest)
        values = tl.load(
            values_ptr + ((first + some) * NUM_HEADS + head)[:, None] * HEAD_DIM + offs_d[None, :],
            mask=exists[:, None] & d_mask[None, :],
            other=0.0,
        )
        merged += tl.sum(values * weights[:, None], axis=0)
    out = out_ptr + token * out_stride_t + head * out_stride_h + offs_d
    tl.store(out, (merged / total).to(out_ptr.dtype.element_ty), mask=d_mask)


def merge(
    parts: Parts,
    out: Tensor,
    *,
    counts: Tensor,
    tokens: Tensor,
    indices: Tensor | None = None,
    firsts: Tensor | None = None,
    max_splits: int,
) -> None:
    """Merge the parts of `U` tokens into their rows of `out` [N, Hq, D].

    Args:
        parts: those of a token follow one another.
        out: written where `tokens` says.
        counts: int32 [U], parts of each token, at most `max_splits`.
        tokens: int32, row of `out` of each token, or of those that `indices` picks.
        indices: int32 [U].
        firsts: int32 [U], first part of each token; without, token u's is u * max_splits, and
            tokens of one part are left alone: they have been written.
        max_splits: a power of two.
    """
    num_heads, head_dim = out.shape[1:]
    _merge_kernel[len(counts), num_heads](
        parts.values,
        parts.lse,
        out,
        counts,
        tokens,
        indices,
        firsts,
        *out.stride()[:2],
        NUM_HEADS=num_heads,
        HAS_INDICES=indices is not None,
        HAS_FIRSTS=firsts is not None,
        MAX_SPLITS=max_splits,
        HEAD_DIM=head_dim,
        BLOCK_D=max(MIN_DOT, triton.next_power_of_2(head_dim)),
        BLOCK_S=min(_MERGED_AT_ONCE, max_splits),
        num_warps=1,
        enable_fp_fusion=True,
    )
