"""Decode attention, split over the context and merged by log-sum-exp (flash-decoding).

A fixed number of programs walks the decode items of all KV heads in turn (see `plan`), which are
stretches of contexts; parts of tokens that have several are merged behind it. A row is cut by its
own context length alone, so its bits do not depend on its neighbours, nor on how many programs
there are.

Query heads that share a KV head are stacked, and so are as many new tokens of a row as there is
room for in the smallest matrix product, so that every key and value is read once for all of them:
row r of a program is the item's token r // GROUP, query head kv_head * GROUP + r % GROUP.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch, ScoreMod
from lightserve.kernels.triton.configs import Gpu
from lightserve.kernels.triton.launch import launched, next_power_of_2
from lightserve.kernels.triton.merge import MIN_DOT, load_part, sinks_of, walk
from lightserve.kernels.triton.plan import (
    BEGIN,
    COUNT,
    DECODE_FIELDS,
    END,
    LAST,
    PART,
    ROW,
    TOKEN,
    AttentionWork,
)


# fmt: off
@launched
@triton.jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, parts_ptr, lse_ptr, table_ptr, items_ptr, totals_ptr, scale,
    window, soft_cap, slopes_ptr, sinks_ptr, q_stride_t, q_stride_h, kv_stride_s, kv_stride_h,
    out_stride_t, out_stride_h, table_stride, NUM_KV_HEADS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr, SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr, TURNED_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, WIDEN: tl.constexpr,
):
    # fmt: on
    stacked = tl.arange(0, BLOCK_Q)
    offs_d = tl.arange(0, BLOCK_D)
    num_work = tl.load(totals_ptr) * NUM_KV_HEADS
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        item = items_ptr + work // NUM_KV_HEADS * DECODE_FIELDS
        kv_head = tl.cast(work % NUM_KV_HEADS, tl.int64)
        row = tl.load(item + ROW).to(tl.int64)
        begin = tl.load(item + BEGIN)
        end = tl.load(item + END)
        last = tl.load(item + LAST)
        number, count = stacked // GROUP, tl.load(item + COUNT)
        if TOGETHER == 1:
            number, count = stacked * 0, 1
        heads = kv_head * GROUP + stacked % GROUP
        tokens = tl.load(item + TOKEN).to(tl.int64) + number
        exists = stacked < count * GROUP
        first = last + 1 - count
        q_places = q_ptr + tokens[:, None] * q_stride_t + heads[:, None] * q_stride_h
        q = load_part(q_places, exists, 0, HEAD_DIM, BLOCK_D, WIDEN)
        q_turned = q
        if TURNED_DIM:
            q_turned = load_part(q_places, exists, HEAD_DIM, TURNED_DIM, BLOCK_T, WIDEN)
        slopes = 0.0
        if HAS_SLOPES:
            slopes = tl.load(slopes_ptr + heads, mask=exists, other=0.0)
        # fmt: off
        acc, largest, total = walk(
            q, q_turned, first + number, table_ptr + row * table_stride,
            k_ptr + kv_head * kv_stride_h, v_ptr + kv_head * kv_stride_h, kv_stride_s, begin, end,
            first + 1, last + 1 - window, last, scale, window, soft_cap, slopes, HAS_WINDOW,
            HAS_CAP, HAS_SLOPES, HEAD_DIM, TURNED_DIM, BLOCK_Q, BLOCK_D, BLOCK_T, BLOCK_N,
            True, WIDEN,
        )
        # fmt: on
        # Of several tokens, the first ones see nothing of a stretch that begins behind them.
        total = tl.where(total > 0.0, total, 1.0)
        # Read again: kept through the loop, they would take registers that it needs.
        if TOGETHER > 1:
            exists = stacked < tl.load(item + COUNT, volatile=True) * GROUP
            number = stacked // GROUP
        tokens = tl.load(item + TOKEN, volatile=True).to(tl.int64) + number
        part = tl.load(item + PART)
        if HAS_SINKS:  # of several parts, the merge counts them
            seen = tl.where(part < 0, largest, 0.0)
            total += tl.where(part < 0, sinks_of(sinks_ptr, heads, exists, seen), 0.0)
        acc = acc / total[:, None]
        mask = exists[:, None] & (offs_d < HEAD_DIM)[None, :]
        if part < 0:
            places = tokens * out_stride_t + heads * out_stride_h
            tl.store(
                out_ptr + places[:, None] + offs_d[None, :],
                acc.to(out_ptr.dtype.element_ty),
                mask=mask,
            )
        else:
            parts = part.to(tl.int64) + number * SPLITS
            head_parts = parts * (NUM_KV_HEADS * GROUP) + heads
            offsets = head_parts[:, None] * HEAD_DIM + offs_d[None, :]
            tl.store(parts_ptr + offsets, acc, mask=mask)
            tl.store(lse_ptr + head_parts, largest + tl.log2(total), mask=exists)


def attend_decodes(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    out: Tensor,
    batch: AttentionBatch,
    work: AttentionWork,
    scale_log2: float,
    window: int | None,
    mod: ScoreMod,
    gpu: Gpu,
) -> None:
    """Attend the rows with few new tokens; writes their part of `out`, or parts.

    `scale_log2` turns scores into exponents of 2.
    """
    if not len(work.decodes):
        return
    num_heads, head_dim = out.shape[1:]
    num_kv_heads = k_pool.shape[1]
    config = work.decode
    most = len(work.decodes) * num_kv_heads
    _decode_kernel[min(most, gpu.num_sms * config.programs_per_sm),](
        q,
        k_pool,
        v_pool,
        out,
        work.parts.values,
        work.parts.lse,
        batch.req_to_slot,
        work.decodes,
        work.totals,
        scale_log2,
        window or 0,
        mod.soft_cap or 0.0,
        mod.slopes,
        mod.sinks,
        *q.stride()[:2],
        *k_pool.stride()[:2],
        *out.stride()[:2],
        batch.req_to_slot.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HAS_WINDOW=window is not None,
        HAS_CAP=mod.soft_cap is not None,
        HAS_SLOPES=mod.slopes is not None,
        HAS_SINKS=mod.sinks is not None,
        GROUP=num_heads // num_kv_heads,
        TOGETHER=work.together,
        SPLITS=work.decode_splits,
        HEAD_DIM=head_dim,
        TURNED_DIM=q.shape[2] - head_dim,
        BLOCK_Q=max(MIN_DOT, next_power_of_2(num_heads // num_kv_heads)),
        BLOCK_D=max(MIN_DOT, next_power_of_2(head_dim)),
        BLOCK_T=max(MIN_DOT, next_power_of_2(q.shape[2] - head_dim)),
        BLOCK_N=config.block_n,
        WIDEN=q.device.type == "cpu",  # interpreted by numpy, which has no bfloat16
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )
