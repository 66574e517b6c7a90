"""How a mixed batch becomes two launches: decodes split over their context, prefills by blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch

BLOCK_M = 64
"""Query rows of a prefill program: tokens times the query heads that share a KV head."""
BLOCK_N = 64
"""Positions of the context that a program takes at once."""
MAX_SPLITS = 32
MIN_BLOCKS_PER_SPLIT = 4
TARGET_PROGRAMS = 512
"""Decode programs that keep a large GPU busy."""


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """Which rows of a batch go where; the same in every layer."""

    decode_rows: Tensor
    """int32 [num decodes], index of each row with one new token."""
    num_splits: int
    """Parts into which the context of every decode is cut."""
    block_rows: Tensor
    """int32 [num blocks], row of each block of queries."""
    block_starts: Tensor
    """int32 [num blocks], its first token within the row's new tokens."""


def attention_plan(batch: AttentionBatch, *, group: int, num_kv_heads: int) -> AttentionPlan:
    """Return the plan of a batch, worked out in the first layer.

    `group` is the number of query heads per KV head.
    """
    key = ("triton", group, num_kv_heads)
    if key not in batch.prepared:
        batch.prepared[key] = _plan(batch, group, num_kv_heads)
    plan: AttentionPlan = batch.prepared[key]
    return plan


def tokens_per_block(group: int) -> int:
    """Return how many tokens' queries, of all heads of a group, a prefill program takes."""
    return max(1, BLOCK_M // group)


def _plan(batch: AttentionBatch, group: int, num_kv_heads: int) -> AttentionPlan:
    lens = batch.host_q_lens
    decodes = [index for index, q_len in enumerate(lens) if q_len == 1]
    size = tokens_per_block(group)
    blocks = [
        (index, start)
        for index, q_len in enumerate(lens)
        if q_len > 1
        for start in range(0, q_len, size)
    ]
    # The longest context first: what starts last should not take longest.
    blocks.sort(key=lambda block: -(batch.host_context_lens[block[0]] - lens[block[0]] + block[1]))
    longest = max((batch.host_context_lens[index] for index in decodes), default=1)
    device = batch.rows.device
    return AttentionPlan(
        decode_rows=_indices(decodes, device),
        num_splits=num_splits(longest, len(decodes) * num_kv_heads),
        block_rows=_indices([row for row, _ in blocks], device),
        block_starts=_indices([start for _, start in blocks], device),
    )


def num_splits(context_len: int, num_programs: int) -> int:
    """Return into how many parts the contexts of `num_programs` programs are cut, a power of two.

    As many as fill the GPU, but none so short that merging costs more than it saves.
    """
    num_blocks = -(-context_len // BLOCK_N)
    splits = 1
    while (
        splits < MAX_SPLITS
        and splits * num_programs < TARGET_PROGRAMS
        and num_blocks >= 2 * splits * MIN_BLOCKS_PER_SPLIT
    ):
        splits *= 2
    return splits


def _indices(values: list[int], device: torch.device) -> Tensor:
    host = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
