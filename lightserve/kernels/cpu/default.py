"""The default CPU kernels: torch operations, gathering no more KV than a row attends to.

The index work of a step (which rows go together, their slots, their masks) is done once and
shared by all layers; see `plan.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.kernels.cpu.plan import AttentionPlan, DecodeGroup, PrefillRow
from lightserve.kernels.interface import AttentionBatch


class TorchKernels:
    """See `Kernels`. Holds the plan of the batch it saw last, and nothing else."""

    name = "torch"

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None
        self._plans: dict[int | None, AttentionPlan] = {}

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Kernels.linear`."""
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.rms_norm`."""
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.add_rms_norm`."""
        residual = x + residual
        return self.rms_norm(residual, weight, eps), residual

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """See `Kernels.rotary`."""
        cos, sin = cos[:, None], sin[:, None]
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `Kernels.silu_and_mul`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def write_kv(
        self, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor
    ) -> None:
        """See `Kernels.write_kv`."""
        k_pool.index_copy_(0, slot_mapping, k)
        v_pool.index_copy_(0, slot_mapping, v)

    def attention(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        """See `Kernels.attention`."""
        plan = self._plan(batch, sliding_window, q.dtype)
        out = torch.empty_like(q)
        for group in plan.decodes:
            out[group.tokens] = _decode(q[group.tokens], k_pool, v_pool, group, scale)
        for row in plan.prefills:
            out[row.tokens] = _prefill(q[row.tokens], k_pool, v_pool, row, scale)
        return out

    def _plan(
        self, batch: AttentionBatch, sliding_window: int | None, dtype: torch.dtype
    ) -> AttentionPlan:
        if self._batch is not batch:
            self._batch, self._plans = batch, {}
        plan = self._plans.get(sliding_window)
        if plan is None:
            plan = self._plans[sliding_window] = AttentionPlan.of(batch, sliding_window, dtype)
        return plan


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    # float32 tables widen the products; the result is rounded once.
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    if 2 * half == x.shape[-1]:
        return rotated.to(x.dtype)
    return torch.cat([rotated.to(x.dtype), x[..., 2 * half :]], dim=-1)


def _decode(q: Tensor, k_pool: Tensor, v_pool: Tensor, group: DecodeGroup, scale: float) -> Tensor:
    """Attend one query per row; q [B, Hq, D] -> [B, Hq, D].

    The query heads of a KV head stand in for query positions, so each key is read once.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_pool.shape[1]
    k, v = (group.gather(pool).transpose(1, 2) for pool in (k_pool, v_pool))
    q = q.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scale)
    return out.reshape(num_rows, num_heads, head_dim)


def _prefill(q: Tensor, k_pool: Tensor, v_pool: Tensor, row: PrefillRow, scale: float) -> Tensor:
    """Attend the last N positions of one row; q [N, Hq, D] -> [N, Hq, D]."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_pool.shape[1]
    group = num_heads // num_kv_heads
    k, v = (
        row.gather(pool).transpose(0, 1)[:, None].expand(num_kv_heads, group, -1, head_dim)
        for pool in (k_pool, v_pool)
    )
    q = q.view(num_tokens, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=row.mask, is_causal=row.mask is None, scale=scale
    )
    return out.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)
