"""The CPU kernels for everyday use: packed weights, and attention that gathers only scattered keys.

torch's fused attention keeps scores in float32 whatever the model's type. Two products around a
softmax are no faster over the same gathered keys, and in bfloat16 they round a score of 200 by
one half and generate code for each new shape (0.5 ms), while contexts grow with every step.

Of 64 queries and more in half precision the fused attention also generates code, and keeps it for
ever: 30 to 90 KiB for each number of queries and keys modulo its tiles, and there are 100,000 such
pairs. So these numbers are rounded up. (One core with AMX, 8 heads of 32, lengths at random: 1,500
prompts left 78 MiB and took 3.1 ms each; padded 2 MiB and 2.1 ms.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightserve.kernels.cpu.plan import AttentionPlan, DecodeGroup, PrefillRow, attention_plan
from lightserve.kernels.interface import AttentionBatch, Can, ScoreMod
from lightserve.kernels.recurrent import RecurrentOperations
from lightserve.kernels.reference import modified, weights_of
from lightserve.kernels.weights import Weight

# Weights packed once into oneDNN's own layout.
#
# Measured (bfloat16, one core): packed products of 1 to 16 rows take 1/3 to 2/3 of the time of
# `F.linear`, which packs anew in every call. Where oneDNN has no kernels for a type, weights stay
# as they are.
#
# oneDNN generates code for every shape that it has not seen lately, 1 to 10 ms each, and keeps
# about 0.6 MiB for it; and a server has another number of rows in almost every step. So rows are
# padded to one of a few numbers, at most a quarter more. (A model of five shapes: 44 numbers up to
# 512 rows held 122 to 136 MiB, these 24 hold 65 to 69; steps of 65 to 512 rows multiply 9 % more
# rows in the mean, not 3.) The least is four: oneDNN takes another way for one row or two, slower
# by 10 to 25 %.


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine multiplies packed weights of `dtype`."""
    if not torch._C._has_mkldnn:
        return False
    match dtype:
        case torch.float32:
            return True
        case torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        case torch.float16:
            return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False


def pack(weight: Tensor) -> Tensor:
    """Return `weight` [M, K] packed where that is possible, otherwise as it is."""
    if not can_pack(weight.dtype) or weight.numel() == 0:
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias for a weight from `pack`; x [N, K] -> [N, M]."""
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    num_rows = x.shape[0]
    padding = padded_rows(num_rows) - num_rows
    if padding == 0:
        return _multiply(x.contiguous(), weight, bias)
    return _multiply(F.pad(x, (0, 0, 0, padding)), weight, bias)[:num_rows]


def padded_rows(num_rows: int) -> int:
    """Return the number that `num_rows` are padded to: a multiple of 4, then four per doubling."""
    step = 4
    while num_rows > 8 * step:
        step *= 2
    return -(-num_rows // step) * step


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


PADDED_FROM = 64
"""Queries of a prompt; fewer make torch generate no code."""
QUERY_STEP, KEY_STEP = 32, 64
"""Numbers of queries and keys are padded to multiples of these."""


class TorchKernels(RecurrentOperations):
    """See `Kernels`."""

    name = "torch"
    can = Can.LATENTS

    def pack_weight(self, weight: Tensor, *, is_gated: bool = False) -> Tensor:
        """See `Kernels.pack_weight`."""
        return pack(weight)

    def linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """See `Kernels.linear`."""
        assert isinstance(weight, Tensor)
        return linear(x, weight, bias).to(dtype or x.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.rms_norm`."""
        wide = x.float()
        scale = wide.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
        return ((wide * scale).to(weight.dtype) * weight).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.add_rms_norm`; overwrites `residual`."""
        residual += x
        return self.rms_norm(residual, weight, eps), residual

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """See `Kernels.rotary`."""
        rotated = rotate(_joined(q, k), cos[:, None], sin[:, None])
        return rotated[:, : q.shape[1]], rotated[:, q.shape[1] :]

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `Kernels.silu_and_mul`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

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
        score_mod: ScoreMod | None = None,
    ) -> Tensor:
        """See `Kernels.attention`."""
        plan = attention_plan(batch, sliding_window)
        if score_mod is not None:
            return modified_attention(q, k_pool, v_pool, plan, scale, mod=score_mod)
        if len(plan.decodes) == 1 and plan.decodes[0].tokens is None:
            return decode_attention(q, k_pool, v_pool, plan.decodes[0], scale)
        out = q.new_empty(*q.shape[:2], v_pool.shape[2])
        for group in plan.decodes:
            out[group.tokens] = decode_attention(q[group.tokens], k_pool, v_pool, group, scale)
        for row in plan.prefills:
            out[row.tokens] = _prefill(q[row.tokens], k_pool, v_pool, row, scale)
        return out


def _joined(q: Tensor, k: Tensor) -> Tensor:
    """Return the heads of q and k as one [T, Hq + Hkv, D]: one set of operations for both.

    A view where they lie side by side, as slices of one product do.
    """
    num_tokens, num_heads, head_dim = q.shape
    end = q.storage_offset() + num_heads * head_dim
    is_neighbour = (
        q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
        and q.stride() == k.stride()
        and q.stride()[1:] == (head_dim, 1)
        and k.storage_offset() == end
    )
    if not is_neighbour:
        return torch.cat([q, k], dim=1)
    return q.as_strided((num_tokens, num_heads + k.shape[1], head_dim), q.stride())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 * half dimensions of x [T, H, D]; cos and sin [T, 1, half]."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    # float32 tables widen the products; the result is rounded once.
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    if 2 * half == x.shape[-1]:
        return rotated.to(x.dtype)
    return torch.cat([rotated.to(x.dtype), x[..., 2 * half :]], dim=-1)


def decode_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, group: DecodeGroup, scale: float
) -> Tensor:
    """Attend one query per row; q [B, Hq, D] -> [B, Hq, D]."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_pool.shape[1]
    if num_rows == 1:
        # For one row the fused kernel is the quickest. The query heads of a KV head stand in for
        # positions, so that each key is read once.
        k, v = (group.source.read(pool)[None] for pool in (k_pool, v_pool))
        grouped = q.view(1, num_kv_heads, -1, head_dim)
        heads = F.scaled_dot_product_attention(grouped, k, v, scale=scale)
        return heads.reshape(1, num_heads, -1)
    shape = (num_kv_heads, num_rows, group.source.length, -1)
    # The query heads of a KV head stand in for query positions, so that each key is read once.
    heads = F.scaled_dot_product_attention(
        q.view(num_rows, num_kv_heads, -1, head_dim).transpose(0, 1),
        group.source.read(k_pool).view(shape),
        group.source.read(v_pool).view(shape),
        attn_mask=group.mask,
        scale=scale,
    )
    return heads.transpose(0, 1).reshape(num_rows, num_heads, -1)


def _prefill(q: Tensor, k_pool: Tensor, v_pool: Tensor, row: PrefillRow, scale: float) -> Tensor:
    """Attend the new tokens of one row; q [N, Hq, D] -> [N, Hq, D]."""
    q, k, v = q.transpose(0, 1), row.source.read(k_pool), row.source.read(v_pool)
    num_queries, mask = q.shape[1], row.mask
    if num_queries >= PADDED_FROM and q.dtype != torch.float32:
        more_queries = -num_queries % QUERY_STEP
        # Without a mask they are as many, and no real query sees a padded key.
        more_keys = more_queries if mask is None else -k.shape[1] % KEY_STEP
        q = F.pad(q, (0, 0, 0, more_queries))
        k, v = (F.pad(part, (0, 0, 0, more_keys)) for part in (k, v))
        mask = None if mask is None else F.pad(mask, (0, more_keys, 0, more_queries))
    heads = F.scaled_dot_product_attention(
        q[None],
        k[None],
        v[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return heads[0, :, :num_queries].transpose(0, 1)


# Attention whose scores are changed (`ScoreMod`), in plain torch: its fused attention cannot.

QUERIES_AT_ONCE = 64
"""Queries of a prompt whose scores are all in memory at once."""


def modified_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, plan: AttentionPlan, scale: float, *, mod: ScoreMod
) -> Tensor:
    """See `Kernels.attention`."""
    out = torch.empty_like(q)
    for group in plan.decodes:
        tokens = slice(None) if group.tokens is None else group.tokens
        out[tokens] = _modified_decodes(q[tokens], k_pool, v_pool, group, scale, mod=mod)
    for row in plan.prefills:
        out[row.tokens] = _modified_prefill(q[row.tokens], k_pool, v_pool, row, scale, mod=mod)
    return out


def _modified_decodes(
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


def _modified_prefill(
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
