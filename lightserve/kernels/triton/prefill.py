"""Prefill attention: one program per block of new tokens and KV head.

Queries that share a KV head are stacked, so that every key and value is read once for the whole
group:  row r of a program is token r // GROUP, query head kv_head * GROUP + r % GROUP.

Where blocks are few and contexts long, a program walks one stretch of the context (see `plan`)
and leaves parts, which are merged with those of decodes.

Source: FlashAttention-2 (Dao 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch, ScoreMod
from lightserve.kernels.triton.launch import launched, next_power_of_2
from lightserve.kernels.triton.merge import MIN_DOT, load_part, sinks_of, walk
from lightserve.kernels.triton.plan import (
    CHUNK_BEGIN,
    CHUNK_END,
    CHUNK_FIELDS,
    CHUNK_PART,
    INDEX,
    PARTS,
    START,
    AttentionWork,
)


# fmt: off
@launched
@triton.jit(
    do_not_specialize_on_alignment=[
        "rows_ptr", "cu_seqlens_ptr", "context_lens_ptr", "items_ptr", "totals_ptr",
    ],
)
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, rows_ptr, cu_seqlens_ptr, context_lens_ptr,
    items_ptr, totals_ptr, values_ptr, lse_ptr, scale, window,
    soft_cap, slopes_ptr, sinks_ptr, q_stride_t, q_stride_h, kv_stride_s, kv_stride_h, out_stride_t,
    out_stride_h, table_stride, IS_CUT: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SLOPES: tl.constexpr,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, TURNED_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDEN: tl.constexpr,
):
    # fmt: on
    """Attend one block; with IS_CUT perhaps over one stretch of its context."""
    if tl.program_id(0) >= tl.load(totals_ptr + 1):
        return
    item, kv_head = items_ptr + tl.program_id(0) * CHUNK_FIELDS, tl.program_id(1).to(tl.int64)
    index, first = tl.load(item + INDEX), tl.load(item + START)
    q_start = tl.load(cu_seqlens_ptr + index)
    q_len = tl.load(cu_seqlens_ptr + index + 1) - q_start
    context_len = tl.load(context_lens_ptr + index)
    row = tl.load(rows_ptr + index).to(tl.int64)

    stacked = tl.arange(0, BLOCK_Q)
    tokens = first + stacked // GROUP
    heads = kv_head * GROUP + stacked % GROUP
    offs_d = tl.arange(0, BLOCK_D)
    exists = (stacked < TOKENS * GROUP) & (tokens < q_len)
    token_rows = (q_start + tokens).to(tl.int64)
    q_places = q_ptr + token_rows[:, None] * q_stride_t + heads[:, None] * q_stride_h
    q = load_part(q_places, exists, 0, HEAD_DIM, BLOCK_D, WIDEN)
    q_turned = q
    if TURNED_DIM:
        q_turned = load_part(q_places, exists, HEAD_DIM, TURNED_DIM, BLOCK_T, WIDEN)

    first_position = context_len - q_len + first
    end = tl.minimum(context_len, first_position + TOKENS)
    begin, edge_end = 0, 0
    if HAS_WINDOW:
        begin = tl.maximum(0, first_position - window + 1) // BLOCK_N * BLOCK_N
        edge_end = end - window
    if IS_CUT:
        begin = tl.load(item + CHUNK_BEGIN)
        end = tl.load(item + CHUNK_END)
    slopes = tl.load(slopes_ptr + heads) if HAS_SLOPES else 0.0
    # fmt: off
    acc, largest, total = walk(
        q, q_turned, first_position + stacked // GROUP, table_ptr + row * table_stride,
        k_ptr + kv_head * kv_stride_h, v_ptr + kv_head * kv_stride_h, kv_stride_s, begin, end,
        first_position + 1, edge_end, context_len - 1, scale, window, soft_cap, slopes,
        HAS_WINDOW, HAS_CAP, HAS_SLOPES, HEAD_DIM, TURNED_DIM, BLOCK_Q, BLOCK_D, BLOCK_T, BLOCK_N,
        False, WIDEN,
    )
    # fmt: on
    if IS_CUT:
        # A query sees nothing of a stretch that begins behind it.
        total = tl.where(total > 0.0, total, 1.0)
    # Read again: places of queries that are kept through the loop take registers that it needs.
    again = tl.load(item + START, volatile=True)
    stacked = tl.arange(0, BLOCK_Q) + again * GROUP
    tokens = stacked // GROUP
    if IS_CUT and (HAS_WINDOW or BLOCK_D == 256):
        first = again
    exists = (stacked < (first + TOKENS) * GROUP) & (tokens < q_len)
    heads = kv_head * GROUP + stacked % GROUP
    mask = exists[:, None] & (offs_d < HEAD_DIM)[None, :]
    part = tl.load(item + CHUNK_PART) if IS_CUT else -1
    if HAS_SINKS:  # of several parts, the merge counts them
        seen = tl.where(part < 0, largest, 0.0)
        total += tl.where(part < 0, sinks_of(sinks_ptr, heads, exists, seen), 0.0)
    acc = acc / total[:, None]
    if part < 0:
        places = (q_start + tokens).to(tl.int64)[:, None] * out_stride_t
        places += heads[:, None] * out_stride_h + offs_d[None, :]
        tl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        parts = part + (tokens - first) * tl.load(item + PARTS)
        head_parts = parts.to(tl.int64) * (tl.num_programs(1) * GROUP) + heads
        offsets = head_parts[:, None] * HEAD_DIM + offs_d[None, :]
        tl.store(values_ptr + offsets, acc, mask=mask)
        tl.store(lse_ptr + head_parts, largest + tl.log2(total), mask=exists)


def attend_chunks(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    out: Tensor,
    batch: AttentionBatch,
    work: AttentionWork,
    scale_log2: float,
    window: int | None,
    mod: ScoreMod,
) -> None:
    """Attend rows with more than few new tokens; writes their part of `out`, or parts.

    `scale_log2` turns scores into exponents of 2.
    """
    if not len(work.chunks):
        return
    group, head_dim = q.shape[1] // k_pool.shape[1], out.shape[2]
    config = work.prefill
    _prefill_kernel[len(work.chunks), k_pool.shape[1]](
        q,
        k_pool,
        v_pool,
        out,
        batch.req_to_slot,
        batch.rows,
        batch.cu_seqlens_q,
        batch.context_lens,
        work.chunks,
        work.totals,
        work.parts.values,
        work.parts.lse,
        scale_log2,
        window or 0,
        mod.soft_cap or 0.0,
        mod.slopes,
        mod.sinks,
        *q.stride()[:2],
        *k_pool.stride()[:2],
        *out.stride()[:2],
        batch.req_to_slot.stride(0),
        IS_CUT=work.is_cut,
        HAS_WINDOW=window is not None,
        HAS_CAP=mod.soft_cap is not None,
        HAS_SLOPES=mod.slopes is not None,
        HAS_SINKS=mod.sinks is not None,
        GROUP=group,
        TOKENS=config.tokens(group),
        HEAD_DIM=head_dim,
        TURNED_DIM=q.shape[2] - head_dim,
        BLOCK_Q=max(config.block_m, next_power_of_2(group)),
        BLOCK_D=max(MIN_DOT, next_power_of_2(head_dim)),
        BLOCK_T=max(MIN_DOT, next_power_of_2(q.shape[2] - head_dim)),
        BLOCK_N=config.block_n,
        WIDEN=q.device.type == "cpu",  # interpreted by numpy, which has no bfloat16
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )
