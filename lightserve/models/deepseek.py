"""Attention over a latent vector for each token, for all heads.

DeepSeek-V2, DeepSeek-V3, GLM-4.7-Flash and Mistral 4 have it.

    x ─ kv_a ─┬─ norm ─ latent [rank] ───────┐
              └─ rotary [rope_dim] ──────────┴── what is kept of a token, key and value in one
    query head: plain part · W_UK [plain_dim, rank], beside the rotated part
    value head: (weighted latents) · W_UV [rank, value_dim]

The products with W_UK and W_UV, both in `kv_b_proj`, are done on queries and on attention's result:
a token's keys and values are never written out. Ranks share the latent, and split the heads.

Source: DeepSeek-V2 (DeepSeek-AI 2024), section 2.1 and appendix C.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightserve.models.base import KVTensors, Part, even_part
from lightserve.models.layers.attention import (
    AttentionInputs,
    NeighboursApart,
    UnfusedAttention,
    growth_of_queries,
)
from lightserve.models.layers.linear import (
    ColumnParallelLinear,
    ModelContext,
    RMSNorm,
    RowParallelLinear,
    WeightReader,
    read_tensor,
)

NORM_EPS = 1e-6
"""Epsilon of the norms within attention, whatever `rms_norm_eps` says."""


class LatentAttention(UnfusedAttention):
    """See the module; the same calls as `SelfAttention`."""

    def __init__(self, context: ModelContext, prefix: str, *, layer: int) -> None:
        config, reader, latent = context.config, context.reader, context.config.latent
        assert latent is not None and config.attention_scale is not None
        heads = even_part(config.num_heads, context.tp)
        self._kernels, self._latent, self._num_heads = context.kernels, latent, heads.size
        self._scale = config.attention_scale
        self._growth = growth_of_queries(context)
        self._place = config.kv_layers.index(layer)

        def norm(name: str, size: int) -> RMSNorm:
            weight = read_tensor(reader, f"{prefix}.{name}.weight", size)
            return RMSNorm(context.kernels, weight, NORM_EPS)

        self._query_norm: RMSNorm | None = None
        source, in_size = f"{prefix}.q_proj", config.hidden_size
        if latent.query_rank is not None:
            self._query = self._linear(context, f"{prefix}.q_a_proj", Part(0, latent.query_rank))
            self._query_norm = norm("q_a_layernorm", latent.query_rank)
            source, in_size = f"{prefix}.q_b_proj", latent.query_rank
        own = context.exact
        if config.rotates_neighbours:
            names, sizes = {(source, heads.start * latent.query_dim)}, latent.query_dim
            rotated = NeighboursApart(
                reader, frozenset(names), sizes, latent.rope_dim, first=latent.plain_dim
            )
            own = replace(own, reader=rotated)
        parts = [(source, _features(heads, latent.query_dim))]
        self._query_heads = ColumnParallelLinear(own, parts, in_size=in_size)
        self._kept = self._linear(
            context, f"{prefix}.kv_a_proj_with_mqa", Part(0, latent.rank + latent.rope_dim)
        )
        self._norm = norm("kv_a_layernorm", latent.rank)
        self._to_latent, self._from_latent = self._absorbed(reader, prefix, heads)
        self._out = RowParallelLinear(
            context,
            f"{prefix}.o_proj",
            _features(heads, latent.value_dim),
            has_bias=config.attention_output_bias,
        )

    def _linear(self, context: ModelContext, name: str, part: Part) -> ColumnParallelLinear:
        """Load a map of hidden states that every rank has whole; its last outputs are rotated."""
        config, latent, own = context.config, self._latent, context.exact
        if config.rotates_neighbours and part.size == latent.rank + latent.rope_dim:
            rotated = frozenset({(name, 0)})
            reader = NeighboursApart(
                context.reader, rotated, part.size, latent.rope_dim, first=latent.rank
            )
            own = replace(own, reader=reader)
        return ColumnParallelLinear(own, [(name, part)], has_bias=config.qkv_bias)

    def _absorbed(self, reader: WeightReader, prefix: str, heads: Part) -> tuple[Tensor, Tensor]:
        """Return W_UK [H, plain_dim, rank] and W_UV [H, rank, value_dim] of this rank's heads."""
        latent = self._latent

        def of_heads(name: str, size: int, columns: int) -> Tensor:
            rows, name = _features(heads, size), f"{prefix}.{name}.weight"
            return read_tensor(reader, name, rows.size, columns, rows=rows).view(-1, size, columns)

        if latent.is_split:
            keys = of_heads("k_b_proj", latent.rank, latent.plain_dim).transpose(1, 2)
            values = of_heads("v_b_proj", latent.value_dim, latent.rank)
        else:
            size = latent.plain_dim + latent.value_dim
            keys, values = of_heads("kv_b_proj", size, latent.rank).split_with_sizes(
                (latent.plain_dim, latent.value_dim), dim=1
            )
        return keys.contiguous(), values.transpose(1, 2).contiguous()

    def mix(self, x: Tensor, inputs: AttentionInputs, kv: KVTensors) -> Tensor:
        """Write the kept vectors of the new tokens, and attend.

        x [T, hidden], keys [S, 1, rank + rope_dim] (written), values the first `rank` numbers of
        them -> [T, Hq * value_dim].
        """
        k_pool, v_pool = kv.k[self._place], kv.v[self._place]
        latent, kernels, num_tokens = self._latent, self._kernels, x.shape[0]
        source = x if self._query_norm is None else self._query_norm(self._query(x))
        q = self._query_heads(source).view(num_tokens, self._num_heads, latent.query_dim)
        if self._growth is not None:
            q = q * self._growth.index_select(0, inputs.batch.positions)
        kept = self._kept(x)
        plain, turned = q.split_with_sizes((latent.plain_dim, latent.rope_dim), dim=-1)
        own, key = kept.split_with_sizes((latent.rank, latent.rope_dim), dim=-1)
        turned, key = kernels.rotary(
            turned.contiguous(), key[:, None].contiguous(), inputs.cos, inputs.sin
        )
        row = torch.cat([self._norm(own)[:, None], key], dim=-1)
        slots = inputs.batch.slot_mapping
        kernels.write_kv(row, row, k_pool, k_pool, slots)
        absorbed = torch.bmm(plain.transpose(0, 1), self._to_latent).transpose(0, 1)
        heads = kernels.attention(
            torch.cat([absorbed, turned], dim=-1),
            k_pool,
            v_pool,
            inputs.batch,
            scale=self._scale,
            sliding_window=None,
        )
        values = torch.bmm(heads.transpose(0, 1), self._from_latent)
        return values.transpose(0, 1).reshape(num_tokens, self._num_heads * latent.value_dim)


def _features(heads: Part, size: int) -> Part:
    return Part(heads.start * size, heads.size * size)
