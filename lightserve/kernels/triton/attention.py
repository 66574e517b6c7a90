"""Attention over a mixed batch: prefill chunks in one launch, decodes in another."""

from __future__ import annotations

import torch
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch
from lightserve.kernels.triton.decode import attend_decodes
from lightserve.kernels.triton.online_softmax import LOG2_E
from lightserve.kernels.triton.plan import attention_plan
from lightserve.kernels.triton.prefill import attend_chunks


def attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    """See `Kernels.attention`."""
    assert q.stride(2) == k_pool.stride(2) == v_pool.stride(2) == 1, "head_dim is not contiguous"
    num_kv_heads = k_pool.shape[1]
    plan = attention_plan(batch, group=q.shape[1] // num_kv_heads, num_kv_heads=num_kv_heads)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if len(plan.block_rows):
        attend_chunks(q, k_pool, v_pool, out, batch, plan, scale * LOG2_E, sliding_window)
    if len(plan.decode_rows):
        attend_decodes(q, k_pool, v_pool, out, batch, plan, scale * LOG2_E, sliding_window)
    return out
