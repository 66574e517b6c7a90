"""A walk over a stretch of context, one block of keys and values after the other.

The softmax is online, in base 2, accumulated in float32. The context is walked in order of
position, so slots in any order give the same bits (contract N1).

                    begin                                              end
    positions         |  window's edge  |      seen by all     | diagonal |
    blocks            [ masked ][masked][    ][    ][    ][    ][ masked  ]

Whether a block is masked is one comparison per block, in one loop: what the compiler fetches ahead
is not interrupted where masks begin.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
MIN_DOT = 16
"""Smallest side of a matrix product on tensor cores."""
MASKED = tl.constexpr(-(2.0**126))
"""Score of what a query does not see.

Finite: where a query has seen nothing yet, its difference with itself must not be NaN; what is
gathered meanwhile is wiped out by the first position that it sees. A power of two: its product
with the scale is exact, so that in a fused multiply-add too the difference is 0, and not a
rounding error of 1e30, whose power of two is infinite.
"""


# fmt: off
@triton.jit
def walk(
    q, q_positions, table, k_pool, v_pool, kv_stride, begin, end, seen_end, edge_end, last, scale,
    window, HAS_WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SUM_LATE: tl.constexpr, WIDEN: tl.constexpr,
):
    # fmt: on
    """Attend positions begin … end-1: q [BLOCK_Q, BLOCK_D] -> (acc, largest score, sum).

    Every query sees the positions edge_end … seen_end-1. `last` is the last position that exists;
    beyond it the walk reads that one again, hidden by the mask, as every query's own position is
    at most `last`. Scores are counted in units of `scale`, which is positive.

    SUM_LATE keeps the sums of each column of a block apart until the end: no exchange between
    warps in every block, for BLOCK_Q x BLOCK_N numbers in registers.
    """
    # Products of float32 (tests) in float32, not tf32.
    precision: tl.constexpr = "ieee" if q.dtype == tl.float32 else "tf32"
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], dtype=tl.float32)
    largest = tl.full([BLOCK_Q], MASKED, dtype=tl.float32)
    total = tl.zeros([BLOCK_Q, BLOCK_N] if SUM_LATE else [BLOCK_Q], dtype=tl.float32)
    slots = tl.load(table + tl.minimum(begin + offs_n, last))
    for start in range(begin, end, BLOCK_N):
        positions = start + offs_n
        offsets = slots.to(tl.int64)[:, None] * kv_stride + offs_d[None, :]
        slots = tl.load(table + tl.minimum(positions + BLOCK_N, last))
        if HEAD_DIM == BLOCK_D:
            k = tl.load(k_pool + offsets)
            v = tl.load(v_pool + offsets)
        else:
            d_mask = (offs_d < HEAD_DIM)[None, :]
            k = tl.load(k_pool + offsets, mask=d_mask, other=0.0)
            v = tl.load(v_pool + offsets, mask=d_mask, other=0.0)
        if WIDEN:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision=precision)
        is_masked = start + BLOCK_N > seen_end
        if HAS_WINDOW:
            is_masked = is_masked | (start < edge_end)
        if is_masked:
            visible = positions[None, :] <= q_positions[:, None]
            if HAS_WINDOW:
                visible &= positions[None, :] > q_positions[:, None] - window
            scores = tl.where(visible, scores, MASKED)
        new_largest = tl.maximum(largest, tl.max(scores, axis=1) * scale)
        weights = tl.exp2(scores * scale - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        if SUM_LATE:
            total = total * shrink[:, None] + weights
        else:
            total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=precision)
        largest = new_largest
    if SUM_LATE:
        total = tl.sum(total, axis=1)
    return acc, largest, total
