"""Attention over a mixed batch: prefill chunks in a launch or two, decodes in others."""

from __future__ import annotations

import torch
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch
from lightserve.kernels.triton.configs import AttentionConfigs, AttentionShape, gpu_of
from lightserve.kernels.triton.decode import attend_decodes
from lightserve.kernels.triton.online_softmax import LOG2_E
from lightserve.kernels.triton.plan import attention_work
from lightserve.kernels.triton.prefill import attend_chunks


def attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    batch: AttentionBatch,
    *,
    configs: AttentionConfigs,
    scale: float,
    sliding_window: int | None,
) -> Tensor:
    """See `Kernels.attention`; both pools must lie in memory in the same way."""
    assert q.stride(2) == k_pool.stride(2) == 1, "head_dim is not contiguous"
    assert k_pool.stride() == v_pool.stride(), "one offset serves both pools"
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not len(q):
        return out
    shape = AttentionShape(
        q.shape[1], k_pool.shape[1], q.shape[2], q.dtype, sliding_window is not None
    )
    work = attention_work(batch, shape, sliding_window, configs, gpu_of(q.device))
    scale_log2 = scale * LOG2_E
    for chunks in work.chunks:
        attend_chunks(q, k_pool, v_pool, out, batch, chunks, scale_log2, sliding_window)
    if work.decodes is not None:
        attend_decodes(q, k_pool, v_pool, out, batch, work.decodes, scale_log2, sliding_window)
    return out
