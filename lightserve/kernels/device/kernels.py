"""`--attention-backend torch` on a GPU: no kernel of our own, gathers and torch's attention.

For comparison, and where the Triton kernels are at fault. Every row's keys and values are gathered
in every layer, so that it is far from their speed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.kernels.cpu.default import TorchKernels, decode_attention, rotate
from lightserve.kernels.cpu.plan import PrefillRow
from lightserve.kernels.device.plan import device_plan
from lightserve.kernels.interface import AttentionBatch


class DeviceTorchKernels(TorchKernels):
    """See `Kernels`: like the CPU's, but for packed weights and plans made on the host."""

    def pack_weight(self, weight: Tensor) -> Tensor:
        """See `Kernels.pack_weight`: as it is."""
        return weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Kernels.linear`."""
        return F.linear(x, weight, bias)

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """See `Kernels.rotary`."""
        cos, sin = cos[:, None], sin[:, None]
        return rotate(q, cos, sin), rotate(k, cos, sin)

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
        plan = device_plan(batch, sliding_window)
        out = torch.empty_like(q)
        for group in plan.decodes:
            assert group.tokens is not None
            out[group.tokens] = decode_attention(q[group.tokens], k_pool, v_pool, group, scale)
        for row in plan.prefills:
            out[row.tokens] = _prefill(q[row.tokens], k_pool, v_pool, row, scale)
        return out


def _prefill(q: Tensor, k_pool: Tensor, v_pool: Tensor, row: PrefillRow, scale: float) -> Tensor:
    """Attend the new tokens of one row; q [N, Hq, D] -> [N, Hq, D].

    With a mask each query head gets a KV head of its own: of torch's kernels on CUDA that take a
    mask, the one that does not write all scores to memory takes no groups.
    """
    k, v = row.source.read(k_pool), row.source.read(v_pool)
    if row.mask is not None:
        group = q.shape[1] // k.shape[0]
        k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
    heads = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k[None],
        v[None],
        attn_mask=row.mask,
        is_causal=row.mask is None,
        scale=scale,
        enable_gqa=row.mask is None,
    )
    return heads[0].transpose(0, 1)
