"""Attention whose scores are changed (`ScoreMod`), in plain torch: its fused attention cannot."""

from __future__ import annotations

import torch
from torch import Tensor

from lightserve.kernels.cpu.plan import AttentionPlan, DecodeGroup, PrefillRow
from lightserve.kernels.interface import ScoreMod
from lightserve.kernels.reference import modified, weights_of

QUERIES_AT_ONCE = 64
"""Of a prompt: all scores of so many queries are in memory."""


def modified_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, plan: AttentionPlan, scale: float, *, mod: ScoreMod
) -> Tensor:
    """See `Kernels.attention`."""
    out = torch.empty_like(q)
    for group in plan.decodes:
        tokens = slice(None) if group.tokens is None else group.tokens
        out[tokens] = _decodes(q[tokens], k_pool, v_pool, group, scale, mod=mod)
    for row in plan.prefills:
        out[row.tokens] = _prefill(q[row.tokens], k_pool, v_pool, row, scale, mod=mod)
    return out


def _decodes(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, group: DecodeGroup, scale: float, *, mod: ScoreMod
) -> Tensor:
    """Attend one query per row; q [B, Hq, D] -> [B, Hq, D]."""
    num_rows, num_heads, head_dim = q.shape
    shape = (k_pool.shape[1], num_rows, group.source.length, head_dim)
    k, v = (group.source.read(pool).reshape(shape).float() for pool in (k_pool, v_pool))
    grouped = q.float().view(num_rows, shape[0], -1, head_dim)
    scores = torch.einsum("bhgd,hbld->hgbl", grouped, k).reshape(num_heads, num_rows, -1) * scale
    columns = torch.arange(shape[2], device=q.device)
    # [B, length]; a row's keys come before its padding.
    seen = torch.ones(shape[1:3], dtype=torch.bool, device=q.device)
    if group.mask is not None:
        seen = group.mask[0, :, 0]
    scores = modified(scores, mod, seen.sum(dim=1, keepdim=True) - 1 - columns)
    weights = weights_of(scores.masked_fill(~seen, float("-inf")), mod)
    heads = torch.einsum("hgbl,hbld->bhgd", weights.view(shape[0], -1, *shape[1:3]), v)
    return heads.reshape(q.shape).to(q.dtype)


def _prefill(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, row: PrefillRow, scale: float, *, mod: ScoreMod
) -> Tensor:
    """Attend the new tokens of one row; q [N, Hq, D] -> [N, Hq, D]."""
    num_queries, num_heads, head_dim = q.shape
    k, v = (row.source.read(pool).float() for pool in (k_pool, v_pool))
    num_kv_heads, length = k.shape[:2]
    columns = torch.arange(length, device=q.device)
    places = columns[length - num_queries :, None]
    out = torch.empty_like(q)
    for start in range(0, num_queries, QUERIES_AT_ONCE):
        some = slice(start, start + QUERIES_AT_ONCE)
        grouped = q[some].float().reshape(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        scores = torch.einsum("nhgd,hld->hgnl", grouped, k).flatten(0, 1) * scale
        scores = modified(scores, mod, places[some] - columns)
        seen = columns <= places[some] if row.mask is None else row.mask[some]
        weights = weights_of(scores.masked_fill(~seen, float("-inf")), mod)
        weights = weights.view(num_kv_heads, -1, *weights.shape[1:])
        out[some] = torch.einsum("hgnl,hld->nhgd", weights, v).flatten(1, 2).to(q.dtype)
    return out
