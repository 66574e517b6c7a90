"""How a mixed batch becomes launches: decodes split over their context, chunks by blocks.

Where few blocks walk long contexts, these are cut as well (`cuts`), in a launch of their own.

Decodes alone are planned on the device (see `decode`): nothing here reads the host's numbers of
such a batch but how many new tokens each row has, which is one, so that what is launched can be
recorded in a graph. With chunks beside them one small array goes to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch
from lightserve.kernels.triton.configs import (
    AttentionConfigs,
    AttentionShape,
    ChunkClass,
    Gpu,
    PrefillConfig,
)
from lightserve.kernels.triton.cuts import Blocks, blocks_of, cut, rows_to_cut
from lightserve.kernels.triton.decode import DecodeWork, schedule_decodes
from lightserve.kernels.triton.merge import Parts, make_parts, max_splits


@dataclass(frozen=True, eq=False)
class CutWork:
    """Of chunks whose contexts are cut (see `cuts`): the same in every layer."""

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
        short.split_len, num_kv_heads=shape.num_kv_heads, max_len=batch.req_to_slot.shape[1]
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
