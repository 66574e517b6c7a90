"""How a mixed batch becomes launches: decodes split over their context, chunks by blocks.

One kernel plans a pass, on the device, in the first layer of each kind; all layers use its lists:

    decode items   stretches of the contexts of rows with few new tokens, which share a program
    chunk items    blocks of queries of the other rows, those of the longest context first; where
                   few blocks walk long contexts, stretches of these
    merged         tokens that several items have parts of

Nothing here reads the host's numbers of a batch but how many new tokens each row has; a pass that
is recorded (`AttentionBatch.most`) has upper bounds in their place, and surplus programs end at
once. So the same launches serve any rows, and a graph can repeat them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.kernels.interface import FEW_TOKENS, MAX_FEW_TOKENS, AttentionBatch, MostTokens
from lightserve.kernels.triton.configs import (
    AttentionConfigs,
    AttentionShape,
    ChunkClass,
    DecodeConfig,
    Gpu,
    PrefillConfig,
    num_prefill_programs,
    padded_dim,
)
from lightserve.kernels.triton.launch import launched, next_power_of_2
from lightserve.kernels.triton.merge import MIN_DOT, Parts, make_parts, max_splits

_FEW_BLOCK = tl.constexpr(16)

# Fields of the lists, int32 each.
DECODE_FIELDS = tl.constexpr(7)
ROW, TOKEN, BEGIN, END, LAST, PART, COUNT = (tl.constexpr(field) for field in range(7))
"""Fields of a decode item: row of the table; first of its COUNT new tokens and the LAST one's
position; positions BEGIN … END-1; part of its first token, negative: the only one, which is the
result."""
CHUNK_FIELDS = tl.constexpr(6)
INDEX, START, CHUNK_BEGIN, CHUNK_END, CHUNK_PART, PARTS = (tl.constexpr(f) for f in range(6))
"""Fields of a chunk item: index of its row in the batch and first token within the row's new ones;
positions; part of its first token, or negative; parts of each token."""
MERGED_FIELDS = tl.constexpr(3)
"""Fields of a token that is merged: its number, its first part, and its number of parts."""

_ROWS_AT_ONCE = 1024
"""Rows that a program of `_plan_kernel` looks at together: more would not fit registers."""
_ITEMS_AT_ONCE = tl.constexpr(256)


@triton.jit
def _decode_parts(
    q_lens, context_lens, window, HAS_WINDOW: tl.constexpr, SPLITS: tl.constexpr,
    SPLIT_LEN: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return where contexts begin, their number of parts, and the blocks of each part.

    Stretches of whole blocks, at least SPLIT_LEN long, at most SPLITS of them: the cuts of a row
    depend on its own length alone.
    """
    begins = context_lens * 0
    if HAS_WINDOW:
        begins = tl.maximum(0, context_lens - q_lens + 1 - window) // BLOCK_N * BLOCK_N
    num_blocks = tl.cdiv(context_lens - begins, BLOCK_N)
    per_part = tl.maximum(tl.cdiv(num_blocks, SPLITS), SPLIT_LEN // BLOCK_N)
    return begins, tl.cdiv(num_blocks, per_part), per_part


@triton.jit
def _walked(
    q_lens, context_lens, window, few, HAS_WINDOW: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Return the blocks of chunks, 0 of other rows, and the mean of the positions they walk."""
    blocks = tl.where(q_lens > few, tl.cdiv(q_lens, TOKENS), 0)
    mean = context_lens - q_lens + TOKENS * (blocks - 1) // 2 + q_lens // tl.maximum(blocks, 1)
    if HAS_WINDOW:
        mean = tl.minimum(mean, window + TOKENS)
    return blocks, tl.maximum(mean, 0)


# fmt: off
@triton.jit
def _list_decodes(
    decodes_ptr, merged_ptr, row, own_start, q_len, context_len, first_decode, first_few,
    first_merged, window, HAS_WINDOW: tl.constexpr, SPLITS: tl.constexpr, SPLIT_LEN: tl.constexpr,
    BLOCK_N: tl.constexpr, TOGETHER: tl.constexpr,
):
    # fmt: on
    """List the items of a row of few tokens, and its tokens where these have several parts."""
    begin, parts, per_part = _decode_parts(
        q_len, context_len, window, HAS_WINDOW, SPLITS, SPLIT_LEN, BLOCK_N
    )
    number = tl.arange(0, SPLITS)
    begins = begin + number * per_part * BLOCK_N
    for first in range(0, q_len, TOGETHER):
        count = tl.minimum(TOGETHER, q_len - first)
        last = context_len - q_len + first + count - 1
        places = first_decode + first // TOGETHER * parts + number
        item, mask = decodes_ptr + places * DECODE_FIELDS, number < parts
        ends = tl.minimum(begins + per_part * BLOCK_N, last + 1)
        part = tl.where(parts == 1, -1, (first_few + first) * SPLITS + number)
        tl.store(item + ROW, number * 0 + row, mask=mask)
        tl.store(item + TOKEN, number * 0 + own_start + first, mask=mask)
        tl.store(item + BEGIN, begins, mask=mask)
        tl.store(item + END, ends, mask=mask)
        tl.store(item + LAST, number * 0 + last, mask=mask)
        tl.store(item + PART, part, mask=mask)
        tl.store(item + COUNT, number * 0 + count, mask=mask)
    token = tl.arange(0, _FEW_BLOCK)
    unit = merged_ptr + (first_merged + token) * MERGED_FIELDS
    mask = token < tl.where(parts > 1, q_len, 0)
    tl.store(unit, own_start + token, mask=mask)
    tl.store(unit + 1, (first_few + token) * SPLITS, mask=mask)
    tl.store(unit + 2, token * 0 + parts, mask=mask)


# fmt: off
@triton.jit
def _list_chunks(
    chunks_ptr, merged_ptr, index, own_start, q_len, context_len, first_chunk, first_part,
    first_merged, least, window, most_few, HAS_WINDOW: tl.constexpr, TOKENS: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
):
    # fmt: on
    """List the blocks of a row's chunk, or their stretches, and then its tokens as well."""
    blocks, mean = _walked(q_len, context_len, window, most_few, HAS_WINDOW, TOKENS)
    splits = tl.where(mean >= 2 * least, tl.minimum(mean // least, SPLITS), 1)
    number_within = tl.arange(0, _ITEMS_AT_ONCE)
    for start in range(0, blocks * splits, _ITEMS_AT_ONCE):
        number = start + number_within  # the last block, whose context is longest, first
        block, split = blocks - 1 - number // splits, number % splits
        mask = number < blocks * splits
        first = block * TOKENS
        position = context_len - q_len + first
        begins, ends = first * 0, tl.minimum(context_len, position + TOKENS)
        if HAS_WINDOW:
            begins = tl.maximum(0, position - window + 1) // BLOCK_N * BLOCK_N
        stretch = tl.cdiv(tl.cdiv(ends - begins, splits), BLOCK_N) * BLOCK_N
        part = first_part + first * splits + split
        item = chunks_ptr + (first_chunk + number) * CHUNK_FIELDS
        tl.store(item + INDEX, number * 0 + index, mask=mask)
        tl.store(item + START, first, mask=mask)
        tl.store(item + CHUNK_BEGIN, begins + split * stretch, mask=mask)
        tl.store(item + CHUNK_END, tl.minimum(ends, begins + (split + 1) * stretch), mask=mask)
        tl.store(item + CHUNK_PART, tl.where(splits == 1, -1, part), mask=mask)
        tl.store(item + PARTS, number * 0 + splits, mask=mask)
    for start in range(0, tl.where(splits > 1, q_len, 0), _ITEMS_AT_ONCE):
        token = start + number_within
        unit = merged_ptr + (first_merged + token) * MERGED_FIELDS
        mask = token < q_len
        tl.store(unit, own_start + token, mask=mask)
        tl.store(unit + 1, first_part + token * splits, mask=mask)
        tl.store(unit + 2, token * 0 + splits, mask=mask)


@triton.jit
def _q_lens(cu_seqlens_ptr, rows, exists):
    """Return the new tokens of rows, 0 of those that are not there."""
    ends = tl.load(cu_seqlens_ptr + rows + 1, mask=exists, other=0)
    return ends - tl.load(cu_seqlens_ptr + rows, mask=exists, other=0)


@triton.jit
def _num_few(cu_seqlens_ptr, num_rows, most_few, BLOCK_R: tl.constexpr):
    """Return the new tokens of all rows that have at most `most_few`."""
    count = num_rows * 0
    for start in range(0, num_rows, BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        q_lens = _q_lens(cu_seqlens_ptr, rows, rows < num_rows)
        count += tl.sum(tl.where(q_lens <= most_few, q_lens, 0), axis=0)
    return count


# fmt: off
@launched
@triton.jit(
    do_not_specialize=["first_chunk_part", "most_few"],
    do_not_specialize_on_alignment=["rows_ptr", "cu_seqlens_ptr", "context_lens_ptr"],
)
def _plan_kernel(
    decodes_ptr, chunks_ptr, merged_ptr, totals_ptr, rows_ptr, cu_seqlens_ptr, context_lens_ptr,
    window, first_chunk_part, most_few, HAS_WINDOW: tl.constexpr, SPLITS: tl.constexpr,
    SPLIT_LEN: tl.constexpr, BLOCK_N: tl.constexpr, TOGETHER: tl.constexpr,
    HAS_CHUNKS: tl.constexpr, TOKENS: tl.constexpr, CHUNK_SPLITS: tl.constexpr,
    CHUNK_SPLIT_LEN: tl.constexpr, CHUNK_BLOCK_N: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr, BLOCK_R: tl.constexpr, FEW_ROOM: tl.constexpr,
):
    # fmt: on
    """List the items of one row per program, behind those of the rows before it.

    The last program writes the totals: int32 [3], decode items, chunk items, merged tokens.
    FEW_ROOM: 0, or new tokens that there is room for of rows with at most `most_few`: where they
    have more, rows of several tokens are chunks.
    """
    own, num_rows = tl.program_id(0), tl.num_programs(0)
    own_start = tl.load(cu_seqlens_ptr + own)
    q_len = tl.load(cu_seqlens_ptr + own + 1) - own_start
    context_len = tl.load(context_lens_ptr + own)

    if FEW_ROOM > 0:
        num_few = _num_few(cu_seqlens_ptr, num_rows, most_few, BLOCK_R)
        most_few = tl.where(num_few > FEW_ROOM, 1, most_few)

    least = CHUNK_SPLIT_LEN  # positions that are worth a program
    if HAS_CHUNKS and CHUNK_SPLITS > 1:
        walked = (num_rows * 0).to(tl.int64)
        for start in range(0, num_rows, BLOCK_R):
            others = start + tl.arange(0, BLOCK_R)
            exists = others < num_rows
            q_lens = _q_lens(cu_seqlens_ptr, others, exists)
            lens = tl.load(context_lens_ptr + others, mask=exists, other=1)
            blocks, mean = _walked(q_lens, lens, window, most_few, HAS_WINDOW, TOKENS)
            walked += tl.sum(blocks.to(tl.int64) * mean, axis=0)
        fair = (walked * NUM_KV_HEADS + NUM_PROGRAMS - 1) // NUM_PROGRAMS
        least = tl.maximum(fair, CHUNK_SPLIT_LEN).to(tl.int32)

    first_decode, first_few, first_chunk, first_part, first_merged = 0, 0, 0, 0, 0
    num_decodes, num_chunks, num_merged = 0, 0, 0
    for start in range(0, num_rows, BLOCK_R):
        others = start + tl.arange(0, BLOCK_R)
        exists = others < num_rows
        is_before = others < own
        q_lens = _q_lens(cu_seqlens_ptr, others, exists)
        lens = tl.load(context_lens_ptr + others, mask=exists, other=1)
        few = tl.where(q_lens <= most_few, q_lens, 0)
        _, parts, _ = _decode_parts(few, lens, window, HAS_WINDOW, SPLITS, SPLIT_LEN, BLOCK_N)
        items = tl.cdiv(few, TOGETHER) * parts
        merged = tl.where(parts > 1, few, 0)
        first_decode += tl.sum(tl.where(is_before, items, 0), axis=0)
        first_few += tl.sum(tl.where(is_before, few, 0), axis=0)
        num_decodes += tl.sum(items, axis=0)
        if HAS_CHUNKS:
            blocks, mean = _walked(q_lens, lens, window, most_few, HAS_WINDOW, TOKENS)
            splits = tl.where(mean >= 2 * least, tl.minimum(mean // least, CHUNK_SPLITS), 1)
            is_longer = (lens > context_len) | ((lens == context_len) & is_before)
            first_chunk += tl.sum(tl.where(is_longer, blocks * splits, 0), axis=0)
            num_chunks += tl.sum(blocks * splits, axis=0)
            cut = tl.where((blocks > 0) & (splits > 1), q_lens, 0)
            first_part += tl.sum(tl.where(is_before, cut * splits, 0), axis=0)
            merged += cut
        first_merged += tl.sum(tl.where(is_before, merged, 0), axis=0)
        num_merged += tl.sum(merged, axis=0)
    if own == num_rows - 1:
        tl.store(totals_ptr, num_decodes)
        tl.store(totals_ptr + 1, num_chunks)
        tl.store(totals_ptr + 2, num_merged)

    if (q_len > 0) & (q_len <= most_few):
        _list_decodes(
            decodes_ptr, merged_ptr, tl.load(rows_ptr + own).to(tl.int32), own_start, q_len,
            context_len, first_decode, first_few, first_merged, window, HAS_WINDOW, SPLITS,
            SPLIT_LEN, BLOCK_N, TOGETHER,
        )  # fmt: skip
    if HAS_CHUNKS and q_len > most_few:
        _list_chunks(
            chunks_ptr, merged_ptr, own, own_start, q_len, context_len, first_chunk,
            first_chunk_part + first_part, first_merged, least, window, most_few, HAS_WINDOW,
            TOKENS, CHUNK_SPLITS, CHUNK_BLOCK_N,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class AttentionWork:
    """The items of a pass: the same in every layer of a kind."""

    decode: DecodeConfig
    together: int
    """Most new tokens of a row that a decode program takes at once."""
    decode_splits: int
    """Most parts of a token of a row with few, a power of two."""
    decodes: Tensor
    """int32 [most decode items, DECODE_FIELDS]."""
    prefill: PrefillConfig
    chunks: Tensor
    """int32 [most chunk items, CHUNK_FIELDS]."""
    is_cut: bool
    """Whether contexts of chunks may be cut."""
    merged: Tensor
    """int32 [most tokens that are merged, MERGED_FIELDS]."""
    totals: Tensor
    """int32 [3]: decode items, chunk items and merged tokens that there are."""
    max_splits: int
    """Most parts of a token, a power of two."""
    parts: Parts


def attention_work(
    batch: AttentionBatch,
    shape: AttentionShape,
    window: int | None,
    configs: AttentionConfigs,
    gpu: Gpu,
) -> AttentionWork:
    """Return the work of a batch in layers of this shape; planned in the first such layer."""
    key = ("triton", shape, window)
    work: AttentionWork | None = batch.prepared.get(key)
    if work is None:
        work = batch.prepared[key] = _plan(batch, shape, window, configs, gpu)
    return work


@dataclass(frozen=True)
class _Most:
    """Numbers of a pass, or their upper bounds where it is recorded."""

    few: int
    """New tokens of rows that have few."""
    decode_items: int
    """Items of whole contexts."""
    chunk_tokens: int
    blocks: int
    """Blocks of chunks."""


def _plan(
    batch: AttentionBatch,
    shape: AttentionShape,
    window: int | None,
    configs: AttentionConfigs,
    gpu: Gpu,
) -> AttentionWork:
    decode, device = configs.decode(shape, gpu), batch.rows.device
    together = max(1, MIN_DOT // shape.group)
    if padded_dim(shape) > 128:  # their places take registers that three programs have not
        together = 1
    most_few = _most_few(batch)
    prefill = configs.prefill(shape, gpu, _chunk_class(batch, shape, gpu, most_few))
    most = _most(batch, together, prefill.tokens(shape.group), most_few)
    # Numbers that kernels are compiled for depend on the table's width and on nothing of the batch.
    splits = _splits(decode.split_len, batch, shape)
    chunk_splits = _splits(prefill.split_len, batch, shape)
    num_programs = num_prefill_programs(prefill, shape, gpu)
    # Stretches together are as many as programs run at once, see `_plan_kernel`.
    is_cut = chunk_splits > 1
    stretches = num_programs // shape.num_kv_heads if is_cut and most.blocks else 0
    first_chunk_part = most.few * splits if splits > 1 else 0
    num_parts = first_chunk_part + stretches * prefill.tokens(shape.group)
    merged = (most.few if splits > 1 else 0) + (most.chunk_tokens if stretches else 0)

    def table(count: int, fields: int) -> Tensor:
        return torch.empty((count, fields), dtype=torch.int32, device=device)

    work = AttentionWork(
        decode=decode,
        together=together,
        decode_splits=splits,
        decodes=table(most.decode_items * splits, DECODE_FIELDS.value),
        prefill=prefill,
        chunks=table(most.blocks + stretches, CHUNK_FIELDS.value),
        is_cut=is_cut,
        merged=table(merged, MERGED_FIELDS.value),
        totals=torch.empty(3, dtype=torch.int32, device=device),
        max_splits=max(splits, chunk_splits),
        parts=make_parts(num_parts, shape.num_heads, shape.head_dim, device),
    )
    _plan_kernel[len(batch.rows),](
        work.decodes, work.chunks, work.merged, work.totals, batch.rows, batch.cu_seqlens_q,
        batch.context_lens, window or 0, first_chunk_part, most_few,
        HAS_WINDOW=shape.has_window,
        SPLITS=splits,
        SPLIT_LEN=decode.split_len,
        BLOCK_N=decode.block_n,
        TOGETHER=together,
        HAS_CHUNKS=most.blocks > 0,
        TOKENS=prefill.tokens(shape.group),
        CHUNK_SPLITS=chunk_splits,
        CHUNK_SPLIT_LEN=prefill.split_len,
        CHUNK_BLOCK_N=prefill.block_n,
        NUM_KV_HEADS=shape.num_kv_heads,
        NUM_PROGRAMS=num_programs,
        BLOCK_R=min(_ROWS_AT_ONCE, next_power_of_2(max(16, len(batch.req_to_slot)))),
        FEW_ROOM=0 if batch.most is None else _few_room(batch.most),
        enable_fp_fusion=True,
    )  # fmt: skip
    return work


def _splits(split_len: int, batch: AttentionBatch, shape: AttentionShape) -> int:
    """Return into how many parts a context is cut at most."""
    return max_splits(
        split_len,
        num_kv_heads=shape.num_kv_heads,
        max_len=batch.req_to_slot.shape[1],
        part_size=shape.num_heads * shape.head_dim,
    )


def _most_few(batch: AttentionBatch) -> int:
    """Return the most new tokens of a row that is attended as a decode: FEW_TOKENS, or 1.

    Every token of such a row has room for all parts that the longest context may have. Where there
    are more of them than is kept free for, rows of several tokens are chunks, whose parts are few.
    Of a recorded pass the kernel finds that out, see `_few_room`.
    """
    if batch.most is not None:
        return FEW_TOKENS
    q_lens = np.array(batch.host_q_lens)
    num_few = int(q_lens[q_lens <= FEW_TOKENS].sum())
    return FEW_TOKENS if num_few <= max(MAX_FEW_TOKENS, len(batch.req_to_slot)) else 1


def _few_room(most: MostTokens) -> int:
    """Return the new tokens of rows of few that a recorded pass has room for; 0: for all."""
    return most.few_tokens if most.few_tokens < most.num_tokens else 0


def _most(batch: AttentionBatch, together: int, tokens: int, most_few: int) -> _Most:
    """Return the numbers of a pass whose chunks are computed in blocks of `tokens`."""
    if batch.most is not None:
        # Each chunk may end with a block that is not full. It has a token more than few, or two.
        num_tokens, few = batch.most.num_tokens, batch.most.few_tokens
        shortest = 2 if _few_room(batch.most) else FEW_TOKENS + 1
        chunks = min(len(batch.rows), num_tokens // shortest)
        blocks = (num_tokens - chunks) // tokens + chunks
        return _Most(few, few, num_tokens if chunks else 0, blocks)
    q_lens = np.array(batch.host_q_lens)
    short, long = q_lens[q_lens <= most_few], q_lens[q_lens > most_few]
    return _Most(
        int(short.sum()),
        int((-(-short // together)).sum()),
        int(long.sum()),
        int((-(-long // tokens)).sum()),
    )


def _chunk_class(
    batch: AttentionBatch, shape: AttentionShape, gpu: Gpu, most_few: int
) -> ChunkClass:
    """Return the class of a pass's chunks; rows of few tokens do not count."""
    if batch.most is not None:
        is_short = batch.most.num_tokens * shape.num_heads < gpu.num_sms * 128
        return ChunkClass.SHORT if is_short else ChunkClass.WHOLE
    q_lens = np.array(batch.host_q_lens)
    is_chunk = q_lens > most_few
    num_new = int(q_lens[is_chunk].sum())
    if num_new * shape.num_heads < gpu.num_sms * 128:
        return ChunkClass.SHORT
    num_cached = int(np.array(batch.host_context_lens)[is_chunk].sum()) - num_new
    return ChunkClass.CACHED if num_cached > num_new else ChunkClass.WHOLE
