"""The index work of one step, done once for all layers.

Decodes of like context length go together, padded to the longest; a prefill chunk goes alone.
Slots that happen to be contiguous are read in place instead of being gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch

MAX_PADDING = 1.25
"""A group's longest context may be this many times its shortest."""
PADDING_FLOOR = 32
"""Contexts up to this length always go together."""


@dataclass(frozen=True)
class DecodeGroup:
    """Rows with one query each, attended in one call."""

    tokens: slice | Tensor
    """Their queries: a slice, or int64 [B]."""
    slots: Tensor
    """int64 [B * C]; padding repeats a slot of its own row."""
    shape: tuple[int, int]
    """(B, C)."""
    mask: Tensor | None
    """[B, 1, 1, C] added to the scores; None without padding."""
    run: slice | None
    """The slots as a range of the pool, where they are one (B = 1)."""

    def gather(self, pool: Tensor) -> Tensor:
        """Return the group's part of a pool [S, H, D] as [B, C, H, D]."""
        if self.run is not None:
            return pool[self.run][None]
        return pool.index_select(0, self.slots).view(*self.shape, *pool.shape[1:])


@dataclass(frozen=True)
class PrefillRow:
    """One row with several queries."""

    tokens: slice
    slots: Tensor
    """int64 [C]: the slots that any of its queries sees."""
    mask: Tensor | None
    """[N, C] added to the scores; None where plain causal masking of equal lengths is meant."""
    run: slice | None

    def gather(self, pool: Tensor) -> Tensor:
        """Return the row's part of a pool [S, H, D] as [C, H, D]."""
        return pool[self.run] if self.run is not None else pool.index_select(0, self.slots)


@dataclass(frozen=True)
class AttentionPlan:
    """What one kind of layer does in one step."""

    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillRow, ...]

    @staticmethod
    def of(batch: AttentionBatch, sliding_window: int | None, dtype: torch.dtype) -> AttentionPlan:
        """Plan a batch for layers with this window and queries of this type."""
        window = batch.req_to_slot.shape[1] if sliding_window is None else sliding_window
        begins = batch.cu_seqlens_q.tolist()
        rows = [
            _Row(*row)
            for row in zip(
                batch.host_rows,
                begins[:-1],
                batch.host_q_lens,
                batch.host_context_lens,
                strict=True,
            )
        ]
        groups = _by_length([row for row in rows if row.q_len == 1], window)
        return AttentionPlan(
            tuple(_decode_group(batch, members, window, dtype) for members in groups),
            tuple(_prefill_row(batch, row, window, dtype) for row in rows if row.q_len > 1),
        )


class _Row(NamedTuple):
    table_row: int
    """In req_to_slot."""
    token: int
    """Its first query."""
    q_len: int
    context_len: int


def _by_length(rows: list[_Row], window: int) -> list[list[_Row]]:
    """Split decodes into groups of like length; each group in the order of the batch."""
    groups: list[list[_Row]] = []
    limit = 0.0
    for row in sorted(rows, key=lambda row: row.context_len):
        num_seen = min(row.context_len, window)
        if not groups or num_seen > limit:
            groups.append([])
            limit = max(PADDING_FLOOR, MAX_PADDING * num_seen)
        groups[-1].append(row)
    return [sorted(group, key=lambda row: row.token) for group in groups]


def _decode_group(
    batch: AttentionBatch, rows: list[_Row], window: int, dtype: torch.dtype
) -> DecodeGroup:
    ends = torch.tensor([row.context_len for row in rows])
    num_seen = ends.clamp(max=window)
    longest = int(num_seen.max())
    columns = torch.arange(longest)
    is_padding = columns >= num_seen[:, None]
    positions = (ends - num_seen)[:, None] + columns.masked_fill(is_padding, 0)
    table_rows = torch.tensor([row.table_row for row in rows])
    slots = batch.req_to_slot[table_rows[:, None], positions].long().view(-1)
    mask = _score_mask(is_padding, dtype)[:, None, None] if bool(is_padding.any()) else None
    tokens = [row.token for row in rows]
    is_range = tokens[-1] - tokens[0] == len(tokens) - 1
    return DecodeGroup(
        tokens=slice(tokens[0], tokens[-1] + 1) if is_range else torch.tensor(tokens),
        slots=slots,
        shape=(len(rows), longest),
        mask=mask,
        run=_run(slots) if len(rows) == 1 else None,
    )


def _prefill_row(batch: AttentionBatch, row: _Row, window: int, dtype: torch.dtype) -> PrefillRow:
    first = row.context_len - row.q_len
    first_seen = max(0, first - window + 1)
    slots = batch.req_to_slot[row.table_row, first_seen : row.context_len].long()
    mask = None
    if first > 0 or window < row.context_len:
        keys = torch.arange(first_seen, row.context_len)
        queries = torch.arange(first, row.context_len)[:, None]
        mask = _score_mask((keys > queries) | (keys <= queries - window), dtype)
    return PrefillRow(slice(row.token, row.token + row.q_len), slots, mask, _run(slots))


def _score_mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where a key is seen and minus infinity where it is hidden."""
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -torch.inf)


def _run(slots: Tensor) -> slice | None:
    """Return the slots as a range if they are one."""
    first, count = int(slots[0]), slots.shape[0]
    if int(slots[-1]) - first != count - 1 or not bool((slots.diff() == 1).all()):
        return None
    return slice(first, first + count)
