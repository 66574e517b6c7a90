"""Moving the KV of single tokens between a pool, whose layers lie apart, and rows that hold all.

    pool  [2, num_layers, num_kv_heads, num_slots, head_dim]    one slot: 2 * layers * heads pieces
    rows  [num_rows, 2 * num_layers * num_kv_heads, head_dim]   one row: all pieces, side by side

Bytes are never altered (contract N1). Rows are staging memory on the device or memory of the
host; on a GPU in `kernels.triton.copies`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class CopyKernels(Protocol):
    """What the host pool needs; all indices are int32 [n], where the pool is."""

    def gather(self, pool: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Copy slot slots[i] of the pool to rows[i], for rows [n, …]."""

    def scatter(self, rows: Tensor, pool: Tensor, slots: Tensor) -> None:
        """Copy rows[i] to slot slots[i] of the pool, for rows [n, …]."""

    def put_rows(self, source: Tensor, rows: Tensor, row_ids: Tensor) -> None:
        """Copy source[i] to rows[row_ids[i]]; `rows` may be page-locked memory of the host."""

    def take_rows(self, rows: Tensor, row_ids: Tensor, target: Tensor) -> None:
        """Copy rows[row_ids[i]] to target[i]; `rows` may be page-locked memory of the host."""
