"""How a mixed batch becomes launches: decodes split over their context, chunks by blocks.

Where few blocks walk long contexts, these are cut as well, in a launch of their own.

Decodes alone are planned on the device (see `decode`): nothing here reads the host's numbers of
such a batch but how many new tokens each row has, which is one, so that what is launched can be
recorded in a graph. With chunks beside them one small array goes to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch
from lightserve.kernels.triton.configs import (
    AttentionConfigs,
    AttentionShape,
    ChunkClass,
    Gpu,
    PrefillConfig,
    num_prefill_programs,
)
from lightserve.kernels.triton.decode import DecodeWork, schedule_decodes
from lightserve.kernels.triton.merge import Parts, make_parts, max_splits

# Which chunks' contexts are cut into stretches, so that a few programs need not walk them alone.
#
# A block of queries walks its context in one program, and a chunk of some hundred tokens has but a
# few blocks: over a long context the rest of the GPU would wait for them.
#
#     64 tokens over 16,320 cached, 8 KV heads, 132 multiprocessors
#     whole    2 blocks x 8 heads =  16 programs, each walks 16,384 positions
#     cut      … x 8 stretches    = 128 programs, each walks  2,048, then a merge
#
# A context is cut where it is at least twice a program's fair share of the step: of all positions
# that blocks walk, divided by the programs that run at once. All numbers are the host's.

Ints = npt.NDArray[np.int64]


class Blocks(NamedTuple):
    """Blocks of queries, int64 [num blocks] each."""

    rows: Ints
    starts: Ints
    """First token of each within its row's new tokens."""


class Cuts(NamedTuple):
    """Stretches of the contexts of blocks, and the parts that they give each token; int64."""

    rows: Ints
    """[num stretches], of the block."""
    starts: Ints
    """[num stretches], of the block."""
    stretches: Ints
    """[num stretches, 4]: begin, end, the part of the block's first token, parts of a token."""
    tokens: Ints
    """[num tokens], indices among the batch's new tokens."""
    firsts: Ints
    """[num tokens], first part of each."""
    counts: Ints
    """[num tokens], parts of each."""

    @property
    def num_parts(self) -> int:
        """Of all tokens."""
        return int(self.counts.sum())


def blocks_of(chunks: Ints, q_lens: Ints, size: int) -> Blocks:
    """Return the blocks of `size` tokens of the rows `chunks`, in order."""
    counts = _up(q_lens[chunks], size)
    starts = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * size
    return Blocks(np.repeat(chunks, counts), starts)


def rows_to_cut(
    q_lens: Ints,
    context_lens: Ints,
    shape: AttentionShape,
    window: int | None,
    config: PrefillConfig,
    gpu: Gpu,
) -> Ints:
    """Return the rows with several new tokens of which some block's context is to be cut."""
    chunks = np.flatnonzero(q_lens > 1)
    # Most steps: no context is long enough, in whatever pieces.
    if not chunks.size or int(context_lens[chunks].max()) < 2 * config.split_len:
        return chunks[:0]
    size = config.tokens(shape.group)
    blocks = blocks_of(chunks, q_lens, size)
    lens = _lens(blocks, q_lens, context_lens, size, window)
    is_long = lens >= 2 * _least(lens, shape, config, gpu)
    return np.unique(blocks.rows[is_long])


def cut(
    chunks: Ints,
    q_lens: Ints,
    context_lens: Ints,
    shape: AttentionShape,
    window: int | None,
    config: PrefillConfig,
    gpu: Gpu,
    *,
    max_splits: int,
) -> Cuts:
    """Cut the contexts of all blocks of some rows, evenly, into at most `max_splits` each.

    Stretches are whole blocks of positions: begin …[ ][ ]…[ ]… end.
    """
    size = config.tokens(shape.group)
    blocks = blocks_of(chunks, q_lens, size)
    lens = _lens(blocks, q_lens, context_lens, size, window)
    least = _least(lens, shape, config, gpu)
    wanted = np.clip(lens // least, 1, max_splits)
    firsts = (context_lens - q_lens)[blocks.rows] + blocks.starts
    begins = np.zeros_like(firsts)
    if window is not None:
        begins = np.maximum(0, firsts - window + 1) // config.block_n * config.block_n
    ends = np.minimum(context_lens[blocks.rows], firsts + size)
    stretch = _up(_up(ends - begins, wanted), config.block_n) * config.block_n
    counts = _up(ends - begins, stretch)

    # A token's parts follow one another, as do the tokens of a block.
    num_tokens = np.minimum(size, q_lens[blocks.rows] - blocks.starts)
    block_parts = np.cumsum(counts * num_tokens) - counts * num_tokens
    number = _within(counts)
    own_begins = np.repeat(begins, counts) + number * np.repeat(stretch, counts)
    own_ends = np.minimum(own_begins + np.repeat(stretch, counts), np.repeat(ends, counts))
    token = _within(num_tokens)
    token_counts = np.repeat(counts, num_tokens)
    row_starts = np.cumsum(q_lens) - q_lens
    return Cuts(
        rows=np.repeat(blocks.rows, counts),
        starts=np.repeat(blocks.starts, counts),
        stretches=np.stack(
            [
                own_begins,
                own_ends,
                np.repeat(block_parts, counts) + number,
                np.repeat(counts, counts),
            ],
            axis=1,
        ),
        tokens=np.repeat(row_starts[blocks.rows] + blocks.starts, num_tokens) + token,
        firsts=np.repeat(block_parts, num_tokens) + token * token_counts,
        counts=token_counts,
    )


def _lens(blocks: Blocks, q_lens: Ints, context_lens: Ints, size: int, window: int | None) -> Ints:
    """Return how many positions each block walks."""
    firsts = (context_lens - q_lens)[blocks.rows] + blocks.starts
    ends = np.minimum(context_lens[blocks.rows], firsts + size)
    return ends if window is None else ends - np.maximum(0, firsts - window + 1)


def _least(lens: Ints, shape: AttentionShape, config: PrefillConfig, gpu: Gpu) -> int:
    """Return the shortest stretch: a program's fair share, if that is worth a program."""
    num_programs = num_prefill_programs(config, shape, gpu)
    return max(config.split_len, -(-int(lens.sum()) * shape.num_kv_heads // num_programs))


def _up(numbers: Ints, size: Ints | int) -> Ints:
    """Return numbers / size, rounded up."""
    return -(-numbers // size)


def _within(counts: Ints) -> Ints:
    """Return 0 … c-1 for each count c, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass(frozen=True, eq=False)
class CutWork:
    """Of chunks whose contexts are cut (see the head of the file): the same in every layer."""

    stretches: Tensor
    """int32 [num blocks, 4]: begin, end, part of the block's first token, parts of a token."""
    tokens: Tensor
    """int32 [num tokens], indices among the batch's new tokens."""
    firsts: Tensor
    """int32 [num tokens], first part of each."""
    counts: Tensor
    """int32 [num tokens], parts of each, at most `max_splits`."""
    max_splits: int
    parts: Parts


@dataclass(frozen=True, eq=False)
class ChunkWork:
    """Blocks of queries that one launch attends: the same in every layer."""

    config: PrefillConfig
    rows: Tensor
    """int32 [num blocks], row of each block."""
    starts: Tensor
    """int32 [num blocks], its first token within the row's new tokens."""
    cuts: CutWork | None = None
    """Where blocks are stretches of contexts."""


class AttentionWork(NamedTuple):
    """What is launched for a batch."""

    chunks: list[ChunkWork]
    """At most two: whole contexts, those of the longest first, and contexts that are cut."""
    decodes: DecodeWork | None


def attention_work(
    batch: AttentionBatch,
    shape: AttentionShape,
    window: int | None,
    configs: AttentionConfigs,
    gpu: Gpu,
) -> AttentionWork:
    """Return the work of a batch in layers of this shape; worked out in the first such layer."""
    key = ("triton", shape, window)
    work: AttentionWork | None = batch.prepared.get(key)
    if work is None:
        work = batch.prepared[key] = _plan(batch, shape, window, configs, gpu)
    return work


def _plan(
    batch: AttentionBatch,
    shape: AttentionShape,
    window: int | None,
    configs: AttentionConfigs,
    gpu: Gpu,
) -> AttentionWork:
    if all(q_len == 1 for q_len in batch.host_q_lens):
        return AttentionWork([], _decode_work(batch, None, shape, window, configs, gpu))
    q_lens = np.array(batch.host_q_lens)
    context_lens = np.array(batch.host_context_lens)
    decodes = np.flatnonzero(q_lens == 1)
    short = configs.prefill(shape, gpu, ChunkClass.SHORT)
    long_rows = rows_to_cut(q_lens, context_lens, shape, window, short, gpu)
    whole_lens = q_lens.copy()
    whole_lens[long_rows] = 0
    config = configs.prefill(shape, gpu, chunk_class(whole_lens, context_lens, shape, gpu))
    blocks = _longest_first(whole_lens, context_lens, config.tokens(shape.group))
    splits = max_splits(
        short.split_len,
        num_kv_heads=shape.num_kv_heads,
        max_len=batch.req_to_slot.shape[1],
        part_size=shape.num_heads * shape.head_dim,
    )
    cuts = None
    if long_rows.size:
        cuts = cut(long_rows, q_lens, context_lens, shape, window, short, gpu, max_splits=splits)
    uploaded = iter(_upload([decodes, *blocks, *(cuts or ())], batch.rows.device))
    decode_rows, rows, starts = (next(uploaded) for _ in range(3))
    chunks = [ChunkWork(config, rows, starts)] if len(rows) else []
    if cuts is not None:
        parts = make_parts(cuts.num_parts, shape.num_heads, shape.head_dim, batch.rows.device)
        rows, starts, stretches, tokens, firsts, counts = uploaded
        work = CutWork(stretches, tokens, firsts, counts, splits, parts)
        chunks.append(ChunkWork(short, rows, starts, work))
    return AttentionWork(
        chunks,
        _decode_work(batch, decode_rows, shape, window, configs, gpu) if len(decodes) else None,
    )


def chunk_class(
    q_lens: np.ndarray, context_lens: np.ndarray, shape: AttentionShape, gpu: Gpu
) -> ChunkClass:
    """Return what a step's chunks look like; rows of one token do not count."""
    is_chunk = q_lens > 1
    num_new = int(q_lens[is_chunk].sum())
    if num_new * shape.num_heads < gpu.num_sms * 128:
        return ChunkClass.SHORT
    num_cached = int(context_lens[is_chunk].sum()) - num_new
    return ChunkClass.CACHED if num_cached > num_new else ChunkClass.WHOLE


def _longest_first(q_lens: np.ndarray, context_lens: np.ndarray, size: int) -> Blocks:
    """Return every block of `size` tokens of the rows with several.

    The longest first: what starts last should not take longest.
    """
    rows, starts = blocks_of(np.flatnonzero(q_lens > 1), q_lens, size)
    order = np.argsort(q_lens[rows] - context_lens[rows] - starts, kind="stable")
    return Blocks(rows[order], starts[order])


def _decode_work(
    batch: AttentionBatch,
    decode_rows: Tensor | None,
    shape: AttentionShape,
    window: int | None,
    configs: AttentionConfigs,
    gpu: Gpu,
) -> DecodeWork:
    config = configs.decode(shape, gpu)
    return schedule_decodes(batch, decode_rows, shape, window, config, num_sms=gpu.num_sms)


def _upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return the arrays as int32 tensors of their shapes on the device, in one copy."""
    host = torch.from_numpy(np.concatenate([a.ravel() for a in arrays]).astype(np.int32))
    if device.type == "cuda":
        host = host.pin_memory()
    parts = host.to(device, non_blocking=True).split([a.size for a in arrays])
    return [part.view(a.shape) for part, a in zip(parts, arrays, strict=True)]
