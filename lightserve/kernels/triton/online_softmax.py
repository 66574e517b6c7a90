"""A walk over a stretch of context, one block of keys and values after the other.

The softmax is online, in base 2, accumulated in float32. The context is walked in order of
position, so slots in any order give the same bits (contract N1).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
MIN_DOT = 16
"""Smallest side of a matrix product on tensor cores."""


@triton.jit
def walk(
    q,
    q_positions,
    table,
    k_pool,
    v_pool,
    begin,
    end,
    context_len,
    scale,
    k_stride,
    v_stride,
    offs_d,
    d_mask,
    HAS_WINDOW: tl.constexpr,
    window,
    BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Attend positions begin … end-1: q [BLOCK_Q, BLOCK_D] -> (acc, largest score, sum)."""
    acc = tl.zeros([BLOCK_Q, BLOCK_D], dtype=tl.float32)
    largest = tl.full([BLOCK_Q], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_Q], dtype=tl.float32)
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        exists = positions < context_len
        slots = tl.load(table + positions, mask=exists, other=0).to(tl.int64)
        mask = exists[:, None] & d_mask[None, :]
        k = tl.load(k_pool + slots[:, None] * k_stride + offs_d[None, :], mask=mask, other=0.0)
        v = tl.load(v_pool + slots[:, None] * v_stride + offs_d[None, :], mask=mask, other=0.0)
        if WIDEN:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k)) * scale
        visible = (positions[None, :] <= q_positions[:, None]) & exists[None, :]
        if HAS_WINDOW:
            visible &= positions[None, :] > q_positions[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        # Rows that have seen nothing yet: -inf minus -inf would be NaN.
        anchor = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - anchor[:, None])
        shrink = tl.exp2(largest - anchor)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        largest = new_largest
    return acc, largest, total
