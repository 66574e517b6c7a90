"""Decode attention, split over the context and merged by log-sum-exp (flash-decoding).

One program per decode, KV head and split. Query heads that share a KV head are stacked, so that
every key and value is read once for the whole group: row r is query head kv_head * GROUP + r.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch
from lightserve.kernels.triton.online_softmax import MIN_DOT, walk
from lightserve.kernels.triton.plan import BLOCK_N, AttentionPlan


# fmt: off
@triton.jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, part_ptr, lse_ptr, table_ptr, rows_ptr, cu_seqlens_ptr,
    context_lens_ptr, decode_rows_ptr, scale, window, q_stride_t, q_stride_h, k_stride_s,
    k_stride_h, v_stride_s, v_stride_h, table_stride, num_heads, NUM_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, WIDEN: tl.constexpr,
):
    # fmt: on
    decode = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    index = tl.load(decode_rows_ptr + decode)
    token_row = tl.load(cu_seqlens_ptr + index).to(tl.int64)
    context_len = tl.load(context_lens_ptr + index)
    row = tl.load(rows_ptr + index)

    stacked = tl.arange(0, BLOCK_Q)
    heads = kv_head * GROUP + stacked
    offs_d = tl.arange(0, BLOCK_D)
    d_mask = offs_d < HEAD_DIM
    mask = (stacked < GROUP)[:, None] & d_mask[None, :]
    q_offsets = token_row * q_stride_t + heads[:, None] * q_stride_h + offs_d[None, :]
    q = tl.load(q_ptr + q_offsets, mask=mask, other=0.0)
    if WIDEN:
        q = q.to(tl.float32)

    first = 0
    if HAS_WINDOW:
        first = tl.maximum(0, context_len - window) // BLOCK_N * BLOCK_N
    num_blocks = tl.cdiv(context_len - first, BLOCK_N)
    per_split = tl.cdiv(num_blocks, NUM_SPLITS)
    begin = first + split * per_split * BLOCK_N
    end = tl.minimum(context_len, begin + per_split * BLOCK_N)
    acc, largest, total = walk(
        q,
        tl.full([BLOCK_Q], 0, dtype=tl.int32) + context_len - 1,
        table_ptr + row * table_stride,
        k_ptr + kv_head * k_stride_h,
        v_ptr + kv_head * v_stride_h,
        begin,
        end,
        context_len,
        scale,
        k_stride_s,
        v_stride_s,
        offs_d,
        d_mask,
        HAS_WINDOW,
        window,
        BLOCK_Q,
        BLOCK_D,
        BLOCK_N,
        WIDEN,
    )
    is_empty = total == 0.0
    acc = acc / tl.where(is_empty, 1.0, total)[:, None]
    lse = tl.where(is_empty, float("-inf"), largest + tl.log2(tl.where(is_empty, 1.0, total)))
    part = (decode.to(tl.int64) * num_heads + heads) * NUM_SPLITS + split
    tl.store(part_ptr + part[:, None] * HEAD_DIM + offs_d[None, :], acc, mask=mask)
    tl.store(lse_ptr + part, lse, mask=stacked < GROUP)


@triton.jit
def _merge_kernel(
    part_ptr,
    lse_ptr,
    out_ptr,
    cu_seqlens_ptr,
    decode_rows_ptr,
    out_stride_t,
    out_stride_h,
    num_heads,
    NUM_SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Weigh the parts of one decode's head by their share of the softmax."""
    decode = tl.program_id(0)
    head = tl.program_id(1)
    token_row = tl.load(cu_seqlens_ptr + tl.load(decode_rows_ptr + decode)).to(tl.int64)
    parts = (decode.to(tl.int64) * num_heads + head) * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    offs_d = tl.arange(0, BLOCK_D)
    d_mask = offs_d < HEAD_DIM
    lse = tl.load(lse_ptr + parts)
    weights = tl.exp2(lse - tl.max(lse, axis=0))
    values = tl.load(
        part_ptr + parts[:, None] * HEAD_DIM + offs_d[None, :], mask=d_mask[None, :], other=0.0
    )
    merged = tl.sum(values * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    out = out_ptr + token_row * out_stride_t + head * out_stride_h + offs_d
    tl.store(out, merged.to(out_ptr.dtype.element_ty), mask=d_mask)


def attend_decodes(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    out: Tensor,
    batch: AttentionBatch,
    plan: AttentionPlan,
    scale_log2: float,
    window: int | None,
) -> None:
    """Attend the rows with one new token; writes their part of `out`.

    `scale_log2` turns scores into exponents of 2.
    """
    num_decodes, num_heads, num_kv_heads = len(plan.decode_rows), q.shape[1], k_pool.shape[1]
    group = num_heads // num_kv_heads
    shape = (num_decodes, num_heads, plan.num_splits)
    parts = torch.empty((*shape, q.shape[2]), dtype=torch.float32, device=q.device)
    lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    block_d = max(MIN_DOT, triton.next_power_of_2(q.shape[2]))
    _decode_kernel[num_decodes, num_kv_heads, plan.num_splits](
        q,
        k_pool,
        v_pool,
        parts,
        lse,
        batch.req_to_slot,
        batch.rows,
        batch.cu_seqlens_q,
        batch.context_lens,
        plan.decode_rows,
        scale_log2,
        window or 0,
        *q.stride()[:2],
        *k_pool.stride()[:2],
        *v_pool.stride()[:2],
        batch.req_to_slot.stride(0),
        num_heads,
        NUM_SPLITS=plan.num_splits,
        HAS_WINDOW=window is not None,
        GROUP=group,
        HEAD_DIM=q.shape[2],
        BLOCK_Q=max(MIN_DOT, triton.next_power_of_2(group)),
        BLOCK_D=block_d,
        BLOCK_N=BLOCK_N,
        WIDEN=q.device.type == "cpu",  # interpreted by numpy, which has no bfloat16
        num_warps=4,
        num_stages=3,
    )
    _merge_kernel[num_decodes, num_heads](
        parts,
        lse,
        out,
        batch.cu_seqlens_q,
        plan.decode_rows,
        *out.stride()[:2],
        num_heads,
        NUM_SPLITS=plan.num_splits,
        HEAD_DIM=q.shape[2],
        BLOCK_D=block_d,
    )
