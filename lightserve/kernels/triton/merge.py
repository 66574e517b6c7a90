"""Merges the parts of an attention that was split over the context, by log-sum-exp.

A part is the result of a softmax over a stretch of the context: a mean of values for each head, and
the logarithm of the sum behind it. Decodes and chunks of prompts split alike (flash-decoding).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.kernels.triton.launch import launched, next_power_of_2

# A walk over a stretch of context, one block of keys and values after the other.
#
# The softmax is online, in base 2, accumulated in float32. The context is walked in order of
# position, so slots in any order give the same bits.
#
#                     begin                                              end
#     positions         |  window's edge  |      seen by all     | diagonal |
#     blocks            [ masked ][masked][    ][    ][    ][    ][ masked  ]
#
# Whether a block is masked is one comparison per block, in one loop: what the compiler fetches
# ahead is not interrupted where masks begin.

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)
MIN_DOT = 16
"""Smallest side of a matrix product on tensor cores."""
MASKED = tl.constexpr(-(2.0**126))
"""Score of a position that a query does not see.

Finite: where a query has seen nothing yet, its difference with itself must not be NaN; values
gathered meanwhile are wiped out by the first position that it sees. A power of two: its product
with the scale is exact, so that in a fused multiply-add too the difference is 0, and not a rounding
error of 1e30, whose power of two is infinite.
"""


@triton.jit
def _exponents(
    scores, q_positions, positions, scale, soft_cap, slopes, k_factors, v_factors,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr, IS_SMALL: tl.constexpr,
):  # fmt: skip
    """Return exponents of 2: scores [BLOCK_Q, BLOCK_N] times `scale`, changed by a `ScoreMod`.

    Where nothing changes them, they stay in units of `scale`. IS_SMALL: see `walk`.
    """
    if IS_SMALL:
        scores *= (k_factors if HAS_CAP else k_factors * scale)[None, :]
    elif HAS_SLOPES and not HAS_CAP:
        scores *= scale
    if HAS_CAP:  # tanh, by the exponential function
        power = tl.exp2(scores * (2.0 / soft_cap * scale))
        scores = (1.0 - 2.0 / (power + 1.0)) * (soft_cap * _LOG2_E)
    if HAS_SLOPES:
        distances = (q_positions[:, None] - positions[None, :]).to(tl.float32)
        scores -= (slopes * _LOG2_E)[:, None] * distances
    if IS_SMALL:
        scores += tl.log2(v_factors)[None, :]
    return scores


@triton.jit
def load_part(
    places, exists, FIRST: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Return numbers FIRST … FIRST + SIZE - 1 of heads at `places` [N, 1], [N, BLOCK]."""
    offsets = tl.arange(0, BLOCK)
    mask = exists[:, None] & (offsets < SIZE)[None, :]
    part = tl.load(places + FIRST + offsets[None, :], mask=mask, other=0.0)
    if WIDEN:
        part = part.to(tl.float32)
    return part


@triton.jit
def _load_block(
    lines, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, KIND: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Return keys or values at `lines` [N, 1], [N, BLOCK_D] of DTYPE; of "bits", a 256th."""
    offsets = tl.arange(0, BLOCK_D)[None, :]
    if HEAD_DIM == BLOCK_D:
        values = tl.load(lines + offsets)
    else:
        values = tl.load(lines + offsets, mask=offsets < HEAD_DIM, other=0)
    if KIND == "fp8":
        values = values.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif KIND == "bits":
        # A sign, four bits of exponent and three behind it, as they stand in float16.
        wide = values.to(tl.uint16)
        values = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return values.to(DTYPE)


@triton.jit
def _load_factors(lines, HEAD_DIM: tl.constexpr, KIND: tl.constexpr):
    """Return the factors float32 [N] that stand behind heads of 8 bits at `lines` [N]; of none 1.

    Heads that are all 0 have a factor of 0, which has no logarithm: any other does as well.
    """
    factors = 1.0
    if KIND != "plain":
        factors = tl.load((lines + HEAD_DIM).to(tl.pointer_type(tl.float32)))
        factors = tl.where(factors == 0.0, 1.0, factors * (256.0 if KIND == "bits" else 1.0))
    return factors


# fmt: off
@triton.jit
def walk(
    q, q_turned, q_positions, table, k_pool, v_pool, kv_stride, begin, end, seen_end, edge_end,
    last, scale, window, soft_cap, slopes, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HEAD_DIM: tl.constexpr, TURNED_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    SUM_LATE: tl.constexpr, KIND: tl.constexpr, WIDEN: tl.constexpr,
):
    # fmt: on
    """Attend positions begin … end-1: q [BLOCK_Q, BLOCK_D] -> (acc, largest score, sum).

    Every query sees the positions edge_end … seen_end-1. `last` is the last position that exists;
    beyond it the walk reads that one again, hidden by the mask, as every query's own position is
    at most `last`. Scores are counted in units of `scale`, which is positive. With HAS_CAP and
    HAS_SLOPES, `soft_cap` and `slopes` [BLOCK_Q] are those of a `ScoreMod`.

    With TURNED_DIM, keys are latents: HEAD_DIM numbers that are their values, too, read once, and
    behind them TURNED_DIM ones, whose queries are `q_turned` [BLOCK_Q, BLOCK_T].

    SUM_LATE keeps the sums of each column of a block apart until the end: no exchange between
    warps in every block, for BLOCK_Q x BLOCK_N numbers in registers.

    Of 8 bits (KIND, see `KVOptions`), a key's factor multiplies its scores. A value's factor goes
    into the exponent of its weight, so that the largest weight of all is 1 and float16 holds them;
    it is taken out of the sum again.
    """
    is_small: tl.constexpr = KIND != "plain"
    if is_small and KIND != "int8" and q.dtype == tl.bfloat16:
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    # Products of float32 (tests) in float32, not tf32.
    precision: tl.constexpr = "ieee" if q.dtype == tl.float32 else "tf32"
    unit = 1.0 if HAS_CAP or HAS_SLOPES or is_small else scale
    offs_n = tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], dtype=tl.float32)
    largest = tl.full([BLOCK_Q], MASKED, dtype=tl.float32)
    total = tl.zeros([BLOCK_Q, BLOCK_N] if SUM_LATE else [BLOCK_Q], dtype=tl.float32)
    slots = tl.load(table + tl.minimum(begin + offs_n, last))
    for start in range(begin, end, BLOCK_N):
        positions = start + offs_n
        lines = slots.to(tl.int64) * kv_stride
        slots = tl.load(table + tl.minimum(positions + BLOCK_N, last))
        k = _load_block(k_pool + lines[:, None], HEAD_DIM, BLOCK_D, KIND, q.dtype)
        v = k
        if not TURNED_DIM:
            v = _load_block(v_pool + lines[:, None], HEAD_DIM, BLOCK_D, KIND, q.dtype)
        k_factors = _load_factors(k_pool + lines, HEAD_DIM, KIND)
        v_factors = _load_factors(v_pool + lines, HEAD_DIM, KIND)
        scores = tl.dot(q, tl.trans(k), input_precision=precision)
        if TURNED_DIM:
            places = k_pool + lines[:, None]
            turned = load_part(places, offs_n >= 0, HEAD_DIM, TURNED_DIM, BLOCK_T, WIDEN)
            scores = tl.dot(q_turned, tl.trans(turned), scores, input_precision=precision)
        scores = _exponents(
            scores, q_positions, positions, scale, soft_cap, slopes, k_factors, v_factors, HAS_CAP,
            HAS_SLOPES, is_small,
        )
        is_masked = start + BLOCK_N > seen_end
        if HAS_WINDOW:
            is_masked = is_masked | (start < edge_end)
        if is_masked:
            visible = positions[None, :] <= q_positions[:, None]
            if HAS_WINDOW:
                visible &= positions[None, :] > q_positions[:, None] - window
            scores = tl.where(visible, scores, MASKED)
        new_largest = tl.maximum(largest, tl.max(scores, axis=1) * unit)
        weights = tl.exp2(scores * unit - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        shares = weights * (1.0 / v_factors)[None, :] if is_small else weights
        if SUM_LATE:
            total = total * shrink[:, None] + shares
        else:
            total = total * shrink + tl.sum(shares, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=precision)
        largest = new_largest
    if SUM_LATE:
        total = tl.sum(total, axis=1)
    return acc, largest, total



@triton.jit
def sinks_of(sinks_ptr, heads, mask, largest):
    """Return the share of the sinks of `heads` in sums of weights, whose scores were `largest`."""
    sinks = tl.load(sinks_ptr + heads, mask=mask, other=0.0)
    return tl.exp2(sinks * _LOG2_E - largest)


MAX_PARTS = 256
"""Most parts of a token over all KV heads: enough to fill a large GPU with one block of queries."""
MAX_PART_NUMBERS = 1 << 20
"""Most numbers of a token's parts: there is room for those of all decodes at once."""
_MERGED_AT_ONCE = 8
_PROGRAMS_PER_SM = 32
"""Programs of a merge, a warp each: as many as a multiprocessor holds."""


def max_splits(
    split_len: int, *, num_kv_heads: int, max_len: int, part_size: int = 1
) -> int:
    """Return into how many parts `max_len` positions are cut at most, a power of two.

    `split_len` is the shortest stretch that is worth a part, which has `part_size` numbers.
    """
    most = min(MAX_PARTS // num_kv_heads, MAX_PART_NUMBERS // part_size)
    wanted = min(most, -(-max_len // split_len))
    return next_power_of_2(max(1, wanted))


@dataclass(frozen=True, eq=False)
class Parts:
    """Room for parts: the same in every layer."""

    values: Tensor
    """float32 [P, Hq, D]."""
    lse: Tensor
    """float32 [P, Hq], in base 2."""


def make_parts(num_parts: int, num_heads: int, head_dim: int, device: torch.device) -> Parts:
    """Return room for so many parts; its contents mean nothing yet."""
    shape = (num_parts, num_heads)
    return Parts(
        torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )


# fmt: off
@launched
@triton.jit
def _merge_kernel(
    values_ptr, lse_ptr, out_ptr, merged_ptr, totals_ptr, sinks_ptr, out_stride_t, out_stride_h,
    NUM_HEADS: tl.constexpr, HAS_SINKS: tl.constexpr, MAX_SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):
    # fmt: on
    """Weigh the parts of tokens' heads by their share of the softmax."""
    head = tl.program_id(1)
    splits = tl.arange(0, MAX_SPLITS)
    offs_s = tl.arange(0, BLOCK_S)
    offs_d = tl.arange(0, BLOCK_D)
    d_mask = offs_d < HEAD_DIM
    for unit in range(tl.program_id(0), tl.load(totals_ptr + 2), tl.num_programs(0)):
        token = tl.load(merged_ptr + unit * 3).to(tl.int64)
        first = tl.load(merged_ptr + unit * 3 + 1).to(tl.int64)
        num_parts = tl.load(merged_ptr + unit * 3 + 2)
        own_lse = lse_ptr + first * NUM_HEADS + head
        lse = tl.load(own_lse + splits * NUM_HEADS, mask=splits < num_parts, other=float("-inf"))
        largest = tl.max(lse, axis=0)
        total = tl.sum(tl.exp2(lse - largest), axis=0)
        if HAS_SINKS:
            total += tl.exp2(tl.load(sinks_ptr + head) * _LOG2_E - largest)
        merged = tl.zeros([BLOCK_D], dtype=tl.float32)
        for start in range(0, num_parts, BLOCK_S):
            some = start + offs_s
            exists = some < num_parts
            weights = tl.load(own_lse + some * NUM_HEADS, mask=exists, other=float("-inf"))
            weights = tl.exp2(weights - largest)
            values = tl.load(
                values_ptr
                + ((first + some) * NUM_HEADS + head)[:, None] * HEAD_DIM
                + offs_d[None, :],
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
    merged: Tensor,
    totals: Tensor,
    max_splits: int,
    num_sms: int,
    sinks: Tensor | None = None,
) -> None:
    """Merge the parts of tokens into their rows of `out` [N, Hq, D].

    Args:
        parts: those of a token follow one another.
        out: written for the tokens that `merged` names.
        merged: int32 [U, 3], of each token its number, first part and parts (at most `max_splits`).
        totals: int32 [3], the last says how many of `merged` there are.
        max_splits: a power of two.
        num_sms: multiprocessors of the GPU.
        sinks: see `ScoreMod`.
    """
    if not len(merged):
        return
    num_heads, head_dim = out.shape[1:]
    most = max(1, num_sms * _PROGRAMS_PER_SM // num_heads)
    _merge_kernel[min(len(merged), most), num_heads](
        parts.values, parts.lse, out, merged, totals, sinks, *out.stride()[:2],
        NUM_HEADS=num_heads,
        HAS_SINKS=sinks is not None,
        MAX_SPLITS=max_splits,
        HEAD_DIM=head_dim,
        BLOCK_D=max(MIN_DOT, next_power_of_2(head_dim)),
        BLOCK_S=min(_MERGED_AT_ONCE, max_splits),
        num_warps=1,
        enable_fp_fusion=True,
    )  # fmt: skip
