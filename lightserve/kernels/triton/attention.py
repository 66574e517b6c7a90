"""Attention over a mixed batch: chunks in a launch, decodes in another, then a merge of parts.

Prefill: one program per block of new tokens and KV head. Where blocks are few and contexts long, a
program walks one stretch of the context (see `plan`) and leaves parts. Source: FlashAttention-2
(Dao 2023).

Decodes: a fixed number of programs walks the decode items of all KV heads in turn (see `plan`),
which are stretches of contexts (flash-decoding). A row is cut by its own context length alone, so
its bits do not depend on its neighbours, nor on how many programs there are.

Parts of tokens that have several are merged by log-sum-exp behind both. Query heads that share a KV
head are stacked, so that every key and value is read once for the whole group: row r of a program
is token r // GROUP, query head kv_head * GROUP + r % GROUP; of decodes, as many new tokens of a row
are stacked as there is room for in the smallest matrix product.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch, ScoreMod
from lightserve.kernels.triton.configs import (
    KV_KINDS,
    AttentionConfigs,
    KVOptions,
    attention_shape,
    gpu_of,
)
from lightserve.kernels.triton.launch import launched, next_power_of_2
from lightserve.kernels.triton.merge import LOG2_E, MIN_DOT, load_part, merge, sinks_of, walk
from lightserve.kernels.triton.plan import (
    BEGIN,
    CHUNK_BEGIN,
    CHUNK_END,
    CHUNK_FIELDS,
    CHUNK_PART,
    COUNT,
    DECODE_FIELDS,
    END,
    INDEX,
    LAST,
    PART,
    PARTS,
    ROW,
    START,
    TOKEN,
    AttentionWork,
    attention_work,
)


def attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    batch: AttentionBatch,
    *,
    configs: AttentionConfigs,
    scale: float,
    sliding_window: int | None,
    score_mod: ScoreMod | None = None,
) -> Tensor:
    """See `Kernels.attention`; both pools must lie in memory in the same way.

    Values that are shorter than keys must be the first numbers of these.
    """
    assert q.stride(2) == k_pool.stride(2) == 1, "head_dim is not contiguous"
    assert k_pool.stride() == v_pool.stride(), "one offset serves both pools"
    kv = KV_KINDS.get(k_pool.dtype, "plain")
    num_heads, value_dim = q.shape[1], (v_pool if kv == "plain" else q).shape[2]
    if not len(q):
        return q.new_empty(*q.shape[:2], value_dim)
    out = _output(q, value_dim, batch)
    shape = attention_shape(
        num_heads,
        k_pool.shape[1],
        q.shape[2],
        q.dtype,
        has_window=sliding_window is not None,
        value_dim=value_dim,
        kv=kv,
    )
    if shape.turned_dim:
        assert kv == "plain", "latents are not kept in 8 bits"
        assert k_pool.data_ptr() == v_pool.data_ptr(), "values are not those of the keys"
        k_pool = k_pool.expand(-1, shape.num_kv_heads, -1)
    gpu, mod = gpu_of(q.device), score_mod or ScoreMod()
    work = attention_work(batch, shape, sliding_window, configs, gpu)
    kv_options, head_dim = KVOptions.of(k_pool, gpu), out.shape[2]
    # Scores are exponents of 2 for kernels.
    numbers = (
        *(scale * LOG2_E, sliding_window or 0, mod.soft_cap or 0.0, mod.slopes, mod.sinks),
        *(*q.stride()[:2], *kv_options.strides, *out.stride()[:2], batch.req_to_slot.stride(0)),
    )
    constants = {
        "HAS_WINDOW": sliding_window is not None,
        "HAS_CAP": mod.soft_cap is not None,
        "HAS_SLOPES": mod.slopes is not None,
        "HAS_SINKS": mod.sinks is not None,
        "GROUP": num_heads // k_pool.shape[1],
        "HEAD_DIM": head_dim,
        "TURNED_DIM": q.shape[2] - head_dim,
        "BLOCK_D": max(MIN_DOT, next_power_of_2(head_dim)),
        "BLOCK_T": max(MIN_DOT, next_power_of_2(q.shape[2] - head_dim)),
        "KIND": kv_options.kind,
        "UNIT": kv_options.unit,
        "WIDEN": q.device.type == "cpu",  # interpreted by numpy, which has no bfloat16
    }
    tensors = (q, k_pool, v_pool, out)
    _attend_chunks(tensors, batch, work, numbers, constants)
    _attend_decodes(tensors, batch, work, numbers, constants, num_sms=gpu.num_sms)
    merge(
        work.parts,
        out,
        merged=work.merged,
        totals=work.totals,
        max_splits=work.max_splits,
        num_sms=gpu.num_sms,
        sinks=mod.sinks,
    )
    return out


def _output(q: Tensor, value_dim: int, batch: AttentionBatch) -> Tensor:
    """Return where attention's result goes; tokens of padding, which nothing writes, are 0.

    All layers of a recorded pass share it: each has been read before the next one is written.
    """
    if batch.most is None:
        return q.new_empty(*q.shape[:2], value_dim)
    key = ("triton output", q.shape[1], value_dim)
    if key not in batch.prepared:
        batch.prepared[key] = q.new_zeros(*q.shape[:2], value_dim)
    out: Tensor = batch.prepared[key]
    return out


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
    KIND: tl.constexpr, UNIT: tl.constexpr, WIDEN: tl.constexpr,
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
    of_head = kv_head * kv_stride_h * UNIT
    # fmt: off
    acc, largest, total = walk(
        q, q_turned, first_position + stacked // GROUP, table_ptr + row * table_stride,
        k_ptr + of_head, v_ptr + of_head, kv_stride_s * UNIT, begin, end,
        first_position + 1, edge_end, context_len - 1, scale, window, soft_cap, slopes,
        HAS_WINDOW, HAS_CAP, HAS_SLOPES, HEAD_DIM, TURNED_DIM, BLOCK_Q, BLOCK_D, BLOCK_T, BLOCK_N,
        False, KIND, WIDEN,
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


def _attend_chunks(
    tensors: tuple[Tensor, ...],
    batch: AttentionBatch,
    work: AttentionWork,
    numbers: tuple[Any, ...],
    constants: dict[str, Any],
) -> None:
    """Attend rows with more than few new tokens; writes their part of the output, or parts."""
    if not len(work.chunks):
        return
    config, group = work.prefill, constants["GROUP"]
    _prefill_kernel[len(work.chunks), tensors[1].shape[1]](
        *(*tensors, batch.req_to_slot, batch.rows, batch.cu_seqlens_q, batch.context_lens),
        *(work.chunks, work.totals, work.parts.values, work.parts.lse, *numbers),
        **constants,
        IS_CUT=work.is_cut,
        TOKENS=config.tokens(group),
        BLOCK_Q=max(config.block_m, next_power_of_2(group)),
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
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
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr,
    WIDEN: tl.constexpr,
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
        of_head = kv_head * kv_stride_h * UNIT
        # fmt: off
        acc, largest, total = walk(
            q, q_turned, first + number, table_ptr + row * table_stride,
            k_ptr + of_head, v_ptr + of_head, kv_stride_s * UNIT, begin, end,
            first + 1, last + 1 - window, last, scale, window, soft_cap, slopes, HAS_WINDOW,
            HAS_CAP, HAS_SLOPES, HEAD_DIM, TURNED_DIM, BLOCK_Q, BLOCK_D, BLOCK_T, BLOCK_N,
            True, KIND, WIDEN,
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


def _attend_decodes(
    tensors: tuple[Tensor, ...],
    batch: AttentionBatch,
    work: AttentionWork,
    numbers: tuple[Any, ...],
    constants: dict[str, Any],
    *,
    num_sms: int,
) -> None:
    """Attend the rows with few new tokens; writes their part of the output, or parts."""
    if not len(work.decodes):
        return
    config, num_kv_heads = work.decode, tensors[1].shape[1]
    most = len(work.decodes) * num_kv_heads
    _decode_kernel[min(most, num_sms * config.programs_per_sm),](
        *(*tensors, work.parts.values, work.parts.lse, batch.req_to_slot),
        *(work.decodes, work.totals, *numbers),
        **constants,
        NUM_KV_HEADS=num_kv_heads,
        TOGETHER=work.together,
        SPLITS=work.decode_splits,
        BLOCK_Q=max(MIN_DOT, next_power_of_2(constants["GROUP"])),
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )
