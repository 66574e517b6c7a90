"""How a mixed batch becomes launches: decodes split over their context, chunks by blocks.

Decodes alone are planned on the device (see `decode`): nothing here reads the host's numbers of
such a batch but how many new tokens each row has, which is one, so that what is launched can be
recorded in a graph. With chunks beside them one small array goes to the device.
"""

from __future__ import annotations

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
from lightserve.kernels.triton.decode import DecodeWork, schedule_decodes


@dataclass(frozen=True, eq=False)
class ChunkWork:
    """Blocks of queries, those with the longest contexts first: the same in every layer."""

    config: PrefillConfig
    tokens: int
    """Of a block; its queries are these times the heads of a group."""
    rows: Tensor
    """int32 [num blocks], row of each block."""
    starts: Tensor
    """int32 [num blocks], its first token within the row's new tokens."""


class AttentionWork(NamedTuple):
    """What is launched for a batch."""

    chunks: ChunkWork | None
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
        return AttentionWork(None, _decode_work(batch, None, shape, window, configs, gpu))
    q_lens = np.array(batch.host_q_lens)
    context_lens = np.array(batch.host_context_lens)
    config = configs.prefill(shape, gpu, chunk_class(q_lens, context_lens, shape, gpu))
    decodes = np.flatnonzero(q_lens == 1)
    tokens = max(1, config.block_m // shape.group)
    rows, starts = _blocks(q_lens, context_lens, tokens)
    packed = np.concatenate([decodes, rows, starts]).astype(np.int32)
    parts = _upload(packed, batch.rows.device).split([len(decodes), len(rows), len(starts)])
    return AttentionWork(
        ChunkWork(config, tokens, parts[1], parts[2]) if len(rows) else None,
        _decode_work(batch, parts[0], shape, window, configs, gpu) if len(decodes) else None,
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


def _blocks(q_lens: np.ndarray, context_lens: np.ndarray, size: int) -> tuple[np.ndarray, ...]:
    """Return row and first token of every block of `size` tokens of the rows with several.

    The longest first: what starts last should not take longest.
    """
    chunks = np.flatnonzero(q_lens > 1)
    counts = -(-q_lens[chunks] // size)
    rows = np.repeat(chunks, counts)
    starts = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * size
    order = np.argsort(q_lens[rows] - context_lens[rows] - starts, kind="stable")
    return rows[order], starts[order]


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


def _upload(values: np.ndarray, device: torch.device) -> Tensor:
    host = torch.from_numpy(values)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
