"""Batches and KV for the check of kernels at the start: small, and full of borders.

Rows stand anywhere in the table, their slots are scattered, and slots of no row hold NaN. The
values at the borders of what a query may see are large, so that one position too many or too few
is no rounding error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch, KernelShapes, UnknownValues

Row = tuple[int, int]
"""New tokens and context of a row."""
CHUNKS: tuple[Row, ...] = ((5, 5), (64, 64), (17, 81), (65, 193), (2, 1030))
DECODES = (1, 2, 15, 63, 64, 65, 128, 129, 257, 1025)
MAX_WINDOW = 4096
MAX_WINDOW_ON_CPU = 512
"""A longer window is tried at this length."""
NUM_PADDING = 2
EDGE_FACTOR = 16.0


@dataclass(frozen=True, eq=False)
class CheckBatch:
    """A batch, and keys and values for it."""

    name: str
    batch: AttentionBatch
    window: int | None
    num_padding: int
    """Last rows that stand for no request; all have the pool's last slot."""
    k_pool: Tensor
    """[Hkv, S, D]: in memory a head's tokens are together, as in `KVPool`."""
    v_pool: Tensor

    def recorded(self) -> AttentionBatch:
        """Return the batch as kernels see it while a graph is captured."""
        num_rows = len(self.batch.host_rows)
        return replace(
            self.batch,
            host_rows=UnknownValues("host_rows", num_rows),
            host_context_lens=UnknownValues("host_context_lens", num_rows),
            prepared={},
        )


def check_batches(
    shapes: KernelShapes, device: torch.device, generator: torch.Generator
) -> list[CheckBatch]:
    """Return, for each window, a batch of chunks and decodes and one as a graph has them."""
    longest = MAX_WINDOW_ON_CPU if device.type == "cpu" else MAX_WINDOW
    batches = []
    for window in shapes.sliding_windows:
        tried = None if window is None else min(window, longest)
        chunks, decodes = _rows(tried, shapes.context_len)
        # Chunks and decodes take turns.
        mixed = [row for pair in zip(chunks, decodes, strict=False) for row in pair]
        mixed += decodes[len(chunks) :] + chunks[len(decodes) :]
        for name, rows, num_padding in (
            ("chunks and decodes", mixed, 0),
            ("decodes of a graph", decodes, NUM_PADDING),
        ):
            num_slots = _num_slots(rows)
            batch = _make_batch(rows, num_padding, device, generator)
            pools = _make_pools(batch, num_slots + 1, tried, shapes, generator)
            batches.append(CheckBatch(name, batch, tried, num_padding, *pools))
    return batches


def _rows(window: int | None, context_len: int) -> tuple[list[Row], list[Row]]:
    chunks, decodes = list(CHUNKS), [(1, context) for context in DECODES]
    if window is not None:
        chunks.append((8, window + 9))
        decodes += [(1, window + offset) for offset in (0, 1, 64) if window + offset > 0]
    return tuple(  # type: ignore[return-value]
        list(
            dict.fromkeys(
                (min(new, context_len), min(context, context_len)) for new, context in rows
            )
        )
        for rows in (chunks, decodes)
    )


def _num_slots(rows: list[Row]) -> int:
    """Return M: a fifth of the slots is no row's."""
    return 5 * sum(context for _, context in rows) // 4 + 1


def _make_batch(
    rows: list[Row], num_padding: int, device: torch.device, generator: torch.Generator
) -> AttentionBatch:
    """Lay out rows, then padding rows: the table's last row, whose one position is slot M.

    table row    0 … 2R-1, half of them used, in any order    2R: padding
    slot         0 … M-1, most of them used, in any order        M: padding
    """
    num_rows, width = len(rows), max(context for _, context in rows)
    num_slots = _num_slots(rows)
    free = torch.randperm(num_slots, generator=generator, device=device)
    table = torch.full((2 * num_rows + 1, width), num_slots, dtype=torch.int32, device=device)
    places = Random(num_rows).sample(range(2 * num_rows), num_rows)
    used = 0
    for place, (_, context) in zip(places, rows, strict=True):
        table[place, :context] = free[used : used + context].int()
        used += context
    rows = rows + [(1, 1)] * num_padding
    places += [2 * num_rows] * num_padding
    new = [row[0] for row in rows]
    index = torch.tensor(places, device=device)
    positions = torch.cat([torch.arange(end - n, end, device=device) for n, end in rows])
    of_token = torch.cat([index[i].expand(n) for i, n in enumerate(new)])
    offsets = torch.tensor([0, *new], device=device).cumsum(0)
    return AttentionBatch(
        positions=positions,
        slot_mapping=table[of_token, positions].long(),
        req_to_slot=table,
        rows=index,
        cu_seqlens_q=offsets.int(),
        context_lens=torch.tensor([end for _, end in rows], dtype=torch.int32, device=device),
        host_rows=tuple(places),
        host_q_lens=tuple(new),
        host_context_lens=tuple(end for _, end in rows),
    )


def _make_pools(
    batch: AttentionBatch,
    num_slots: int,
    window: int | None,
    shapes: KernelShapes,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    device = batch.rows.device
    pools = [
        torch.full(
            (shapes.num_kv_heads, num_slots, shapes.head_dim),
            torch.nan,
            dtype=shapes.dtype,
            device=device,
        )
        for _ in range(2)
    ]
    for row, end in zip(batch.host_rows, batch.host_context_lens, strict=True):
        slots = batch.req_to_slot[row, :end].long()
        shape = (2, shapes.num_kv_heads, end, shapes.head_dim)
        keys, values = torch.randn(shape, generator=generator, device=device)
        first = 0 if window is None else max(0, end - window)
        values[:, max(0, first - 1) : first + 1] *= EDGE_FACTOR
        for pool, numbers in zip(pools, (keys, values), strict=True):
            pool[:, slots] = numbers.to(shapes.dtype)
    return pools[0], pools[1]
