"""Kernels as a GPU's are: of a batch they read tensors and the number of rows, and nothing else.

Plain torch on any device, for passes that are recorded on the CPU or run on fake CUDA tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch, Can, MostTokens, ScoreMod
from lightserve.kernels.reference import ReferenceKernels, modified


class TensorKernels(ReferenceKernels):
    """Decodes, and recorded passes, over the whole width of the table, the rest of it masked."""

    name = "tensor"
    can = ReferenceKernels.can | Can.GRAPHS

    def attention(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        sliding_window: int | None,
        score_mod: ScoreMod | None = None,
    ) -> Tensor:
        last = batch.context_lens[:, None] - 1
        rows = batch.rows
        if batch.most is not None:  # every token is a decode of its row, of a shorter context
            tokens = torch.arange(len(q), device=q.device, dtype=torch.int32)
            ends = batch.cu_seqlens_q[1:]
            owners = torch.searchsorted(ends, tokens, right=True).clamp(max=len(ends) - 1)
            back = ends.index_select(0, owners) - 1 - tokens  # negative: padding
            last = (last[owners, 0] - back.clamp(min=0))[:, None]
            rows = rows.index_select(0, owners)
        elif any(q_len > 1 for q_len in batch.host_q_lens):
            return super().attention(
                q,
                k_pool,
                v_pool,
                batch,
                scale=scale,
                sliding_window=sliding_window,
                score_mod=score_mod,
            )
        group = q.shape[1] // k_pool.shape[1]
        slots = batch.req_to_slot[rows].long()  # [R, width]
        k, v = (pool[slots].float().repeat_interleave(group, dim=2) for pool in (k_pool, v_pool))
        scores = torch.einsum("rhd,rphd->rhp", q.float(), k) * scale
        positions = torch.arange(slots.shape[1], device=q.device)
        if score_mod is not None:
            scores = modified(scores.transpose(0, 1), score_mod, last - positions).transpose(0, 1)
        hidden = positions > last
        if sliding_window is not None:
            hidden |= positions <= last - sliding_window
        # What is hidden may be anything: a weight of zero would not stop a NaN.
        weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(dim=-1)
        v = v.masked_fill(hidden[:, :, None, None], 0.0)
        return torch.einsum("rhp,rphd->rhd", weights, v).to(q.dtype)


class FromTensors(TensorKernels):
    """As a GPU's: where rows are is in tensors alone, whatever the host believes."""

    def attention(
        self, q: Tensor, k_pool: Tensor, v_pool: Tensor, batch: AttentionBatch, **options: Any
    ) -> Tensor:
        batch = replace(batch, most=batch.most or MostTokens(len(q), len(q)))
        return super().attention(q, k_pool, v_pool, batch, **options)
