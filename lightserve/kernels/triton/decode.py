"""Decode attention, split over the context and merged by log-sum-exp (flash-decoding).

Three kernels. The first cuts contexts into stretches and lists them as items of work, once per
step; the second, a fixed number of programs, walks the items of all KV heads in turn; the third
merges the parts of rows that have several. Everything that depends on contexts is worked out on
the device: a launch depends on the number of rows alone, so a captured graph replays it for any
contexts. And a row is cut by its own context length alone, so its bits do not depend on its
neighbours, nor on how many programs there are.

Query heads that share a KV head are stacked, so that every key and value is read once for the
whole group: row r of a program is query head kv_head * GROUP + r.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch, ScoreMod
from lightserve.kernels.triton.configs import AttentionShape, DecodeConfig
from lightserve.kernels.triton.merge import (
    MIN_DOT,
    Parts,
    load_part,
    make_parts,
    max_splits,
    merge,
    sinks_of,
    walk,
)
from lightserve.kernels.triton.sizes import next_power_of_2

_ROW, _TOKEN, _BEGIN, _END, _LAST, _PART = (tl.constexpr(field) for field in range(6))
_NUM_FIELDS = tl.constexpr(6)
_DECODES_AT_ONCE = 1024
"""Decodes that a program of `_schedule_kernel` looks at together: more would not fit registers."""


@triton.jit
def _parts_of(
    lens, window, HAS_WINDOW: tl.constexpr, MAX_SPLITS: tl.constexpr, SPLIT_LEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return where contexts begin, their number of parts, and the blocks of each part.

    Stretches of whole blocks, at least SPLIT_LEN long, at most MAX_SPLITS of them.
    """
    begins = lens * 0
    if HAS_WINDOW:
        begins = tl.maximum(0, lens - window) // BLOCK_N * BLOCK_N
    num_blocks = tl.cdiv(lens - begins, BLOCK_N)
    per_part = tl.maximum(tl.cdiv(num_blocks, MAX_SPLITS), SPLIT_LEN // BLOCK_N)
    return begins, tl.cdiv(num_blocks, per_part), per_part


# fmt: off
@triton.jit(
    do_not_specialize_on_alignment=[
        "rows_ptr", "cu_seqlens_ptr", "context_lens_ptr", "decode_rows_ptr",
    ],
)
def _schedule_kernel(
    items_ptr, num_parts_ptr, rows_ptr, cu_seqlens_ptr, context_lens_ptr, decode_rows_ptr,
    window, HAS_DECODE_ROWS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    MAX_SPLITS: tl.constexpr, SPLIT_LEN: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    # fmt: on
    """One program per decode: its items follow those of the decodes before it.

    items int32 [num_decodes * MAX_SPLITS, _NUM_FIELDS]; num_parts int32 [1 + num_decodes], the
    first is the number of all items.
    """
    own = tl.program_id(0)
    first_item = 0
    for start in range(0, own, BLOCK_R):  # the decodes before it, so many at a time
        decodes = start + tl.arange(0, BLOCK_R)
        is_before = decodes < own
        indices = decodes
        if HAS_DECODE_ROWS:
            indices = tl.load(decode_rows_ptr + decodes, mask=is_before, other=0)
        lens = tl.load(context_lens_ptr + indices, mask=is_before, other=1)
        _, num_parts, _ = _parts_of(lens, window, HAS_WINDOW, MAX_SPLITS, SPLIT_LEN, BLOCK_N)
        first_item += tl.sum(tl.where(is_before, num_parts, 0), axis=0)

    index = own
    if HAS_DECODE_ROWS:
        index = tl.load(decode_rows_ptr + own)
    context_len = tl.load(context_lens_ptr + index)
    first, own_parts, per_part = _parts_of(
        context_len, window, HAS_WINDOW, MAX_SPLITS, SPLIT_LEN, BLOCK_N
    )
    stretch = per_part * BLOCK_N
    splits = tl.arange(0, MAX_SPLITS)
    begin = first + splits * stretch
    item = items_ptr + (first_item + splits) * _NUM_FIELDS
    mask = splits < own_parts
    row = tl.load(rows_ptr + index).to(tl.int32)
    tl.store(item + _ROW, tl.zeros_like(splits) + row, mask=mask)
    tl.store(item + _TOKEN, tl.zeros_like(splits) + tl.load(cu_seqlens_ptr + index), mask=mask)
    tl.store(item + _BEGIN, begin, mask=mask)
    tl.store(item + _END, tl.minimum(begin + stretch, context_len), mask=mask)
    tl.store(item + _LAST, tl.zeros_like(splits) + context_len - 1, mask=mask)
    # Negative: the row's only part, which is the result.
    tl.store(item + _PART, tl.where(own_parts == 1, -1, own * MAX_SPLITS + splits), mask=mask)
    tl.store(num_parts_ptr + 1 + own, own_parts)
    if own == tl.num_programs(0) - 1:
        tl.store(num_parts_ptr, first_item + own_parts)


# fmt: off
@triton.jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, parts_ptr, lse_ptr, table_ptr, items_ptr, num_parts_ptr, scale,
    window, soft_cap, slopes_ptr, sinks_ptr, q_stride_t, q_stride_h, kv_stride_s, kv_stride_h,
    out_stride_t, out_stride_h, table_stride, NUM_KV_HEADS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, TURNED_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, WIDEN: tl.constexpr,
):
    # fmt: on
    stacked = tl.arange(0, BLOCK_Q)
    offs_d = tl.arange(0, BLOCK_D)
    mask = (stacked < GROUP)[:, None] & (offs_d < HEAD_DIM)[None, :]
    num_work = tl.load(num_parts_ptr) * NUM_KV_HEADS
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        item = items_ptr + work // NUM_KV_HEADS * _NUM_FIELDS
        kv_head = tl.cast(work % NUM_KV_HEADS, tl.int64)
        row = tl.load(item + _ROW).to(tl.int64)
        token = tl.load(item + _TOKEN).to(tl.int64)
        begin = tl.load(item + _BEGIN)
        end = tl.load(item + _END)
        last = tl.load(item + _LAST)
        part = tl.load(item + _PART)
        heads = kv_head * GROUP + stacked
        q_places = q_ptr + token * q_stride_t + heads[:, None] * q_stride_h
        q = load_part(q_places, stacked < GROUP, 0, HEAD_DIM, BLOCK_D, WIDEN)
        q_turned = q
        if TURNED_DIM:
            q_turned = load_part(
                q_places, stacked < GROUP, HEAD_DIM, TURNED_DIM, BLOCK_T, WIDEN
            )
        slopes = 0.0
        if HAS_SLOPES:
            slopes = tl.load(slopes_ptr + heads, mask=stacked < GROUP, other=0.0)
        acc, largest, total = walk(
            q,
            q_turned,
            tl.zeros([BLOCK_Q], dtype=tl.int32) + last,
            table_ptr + row * table_stride,
            k_ptr + kv_head * kv_stride_h,
            v_ptr + kv_head * kv_stride_h,
            kv_stride_s,
            begin,
            end,
            last + 1,
            last + 1 - window,
            last,
            scale,
            window,
            soft_cap,
            slopes,
            HAS_WINDOW,
            HAS_CAP,
            HAS_SLOPES,
            HEAD_DIM,
            TURNED_DIM,
            BLOCK_Q,
            BLOCK_D,
            BLOCK_T,
            BLOCK_N,
            SUM_LATE=True,
            WIDEN=WIDEN,
        )
        if HAS_SINKS:  # of several parts, the merge counts them
            total += tl.where(
                part < 0, sinks_of(sinks_ptr, heads, stacked < GROUP, largest), 0.0
            )
        acc = acc / total[:, None]
        if part < 0:
            offsets = token * out_stride_t + heads[:, None] * out_stride_h + offs_d[None, :]
            tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            head_parts = part.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
            offsets = head_parts[:, None] * HEAD_DIM + offs_d[None, :]
            tl.store(parts_ptr + offsets, acc, mask=mask)
            tl.store(lse_ptr + head_parts, largest + tl.log2(total), mask=stacked < GROUP)


@dataclass(frozen=True, eq=False)
class DecodeWork:
    """The items of a step's decodes, and room for their parts: the same in every layer."""

    config: DecodeConfig
    num_decodes: int
    max_splits: int
    num_programs: int
    decode_rows: Tensor | None
    """int32 [num_decodes], row of each decode; None: all rows are decodes."""
    items: Tensor
    """int32, see `_schedule_kernel`."""
    num_parts: Tensor
    """int32 [1 + num_decodes]: of all decodes, and of each."""
    parts: Parts
    """`max_splits` of each decode."""


def schedule_decodes(
    batch: AttentionBatch,
    decode_rows: Tensor | None,
    shape: AttentionShape,
    window: int | None,
    config: DecodeConfig,
    *,
    num_sms: int,
) -> DecodeWork:
    """Cut the contexts of a step's decodes into items of work, on the device.

    `decode_rows` int32 names the rows that are decodes; None: all are.
    """
    num_decodes = len(batch.rows) if decode_rows is None else len(decode_rows)
    max_len = batch.req_to_slot.shape[1]
    splits = max_splits(
        config.split_len,
        num_kv_heads=shape.num_kv_heads,
        max_len=max_len,
        part_size=shape.num_heads * shape.head_dim,
    )
    size = num_decodes * splits
    device = batch.rows.device
    work = DecodeWork(
        config=config,
        num_decodes=num_decodes,
        max_splits=splits,
        num_programs=min(size * shape.num_kv_heads, num_sms * config.programs_per_sm),
        decode_rows=decode_rows,
        items=torch.empty((size, _NUM_FIELDS.value), dtype=torch.int32, device=device),
        num_parts=torch.empty(1 + num_decodes, dtype=torch.int32, device=device),
        parts=make_parts(size, shape.num_heads, shape.head_dim, device),
    )
    _schedule_kernel[num_decodes,](
        work.items,
        work.num_parts,
        batch.rows,
        batch.cu_seqlens_q,
        batch.context_lens,
        work.decode_rows,
        window or 0,
        HAS_DECODE_ROWS=decode_rows is not None,
        HAS_WINDOW=shape.has_window,
        MAX_SPLITS=splits,
        SPLIT_LEN=config.split_len,
        BLOCK_N=config.block_n,
        BLOCK_R=_DECODES_AT_ONCE,
        enable_fp_fusion=True,
    )
    return work


def attend_decodes(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    out: Tensor,
    batch: AttentionBatch,
    work: DecodeWork,
    scale_log2: float,
    window: int | None,
    mod: ScoreMod,
) -> None:
    """Attend the rows with one new token; writes their part of `out`.

    `scale_log2` turns scores into exponents of 2.
    """
    num_heads, head_dim = out.shape[1:]
    num_kv_heads = k_pool.shape[1]
    config = work.config
    _decode_kernel[work.num_programs,](
        q,
        k_pool,
        v_pool,
        out,
        work.parts.values,
        work.parts.lse,
        batch.req_to_slot,
        work.items,
        work.num_parts,
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
    if work.max_splits > 1:
        merge(
            work.parts,
            out,
            counts=work.num_parts[1:],
            tokens=batch.cu_seqlens_q,
            indices=work.decode_rows,
            max_splits=work.max_splits,
            sinks=mod.sinks,
        )
