"""Models whose attention is over latent vectors, as `config.json` describes them. Torch-free.

DeepSeek-V2, DeepSeek-V3, GLM-4.7-Flash and Mistral 4; their experts stand in groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lightserve.models.json_fields import JsonFields
from lightserve.models.moe_config import (
    MAX_EXPERTS,
    MoeConfig,
    Scoring,
    Stacked,
    behind_dense,
    groups_of,
    num_chosen_of,
)
from lightserve.models.plain_config import sizes_of
from lightserve.models.rope import RopeConfig, YarnRope, parse_query_growth, parse_rope


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Sizes of an attention whose keys and values are made of one vector for each token."""

    query_rank: int | None
    """Size of the vector that queries are made of; None: they are made of the hidden state."""
    rank: int
    """Size of the vector that keys and values are made of, which is kept of a token."""
    plain_dim: int
    """Size of a query head's part that is not rotated."""
    rope_dim: int
    """Size of a query head's rotated part, which is kept of a token as well; even."""
    value_dim: int
    """Size of a value head."""
    is_split: bool = False
    """Keys and values are made by a tensor each in the file, that of the keys transposed, in place
    of one for both."""

    @property
    def query_dim(self) -> int:
        """Size of a query head."""
        return self.plain_dim + self.rope_dim


_V2: dict[str, Any] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "scoring_func": "softmax",
}
"""Values that transformers takes where a file of DeepSeek-V2 is silent, …"""
DEEPSEEK_V3 = _V2 | {
    "max_position_embeddings": 4096,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
"""… of DeepSeek-V3, …"""
_GLM_LITE = DEEPSEEK_V3 | {
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "max_position_embeddings": 202_752,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8,
}
"""… of GLM-4.7-Flash, …"""
_MISTRAL4 = DEEPSEEK_V3 | {
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "max_position_embeddings": 1_048_576,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
}
"""… and of Mistral 4."""


def parse_deepseek_v2(fields: JsonFields) -> dict[str, Any]:
    """Return DeepSeek-V2 as fields of `ModelConfig`."""
    fields = fields.with_defaults(_V2)
    for key in ("norm_topk_prob", "mlp_bias"):
        fields.only(key, False)
    return parse_latent(fields, "greedy", "group_limited_greedy", interleaves=True)


def parse_deepseek_v3(fields: JsonFields) -> dict[str, Any]:
    """Return DeepSeek-V3 without its layers for several tokens at once."""
    return parse_latent(fields.with_defaults(DEEPSEEK_V3), "noaux_tc")


def parse_glm_lite(fields: JsonFields) -> dict[str, Any]:
    """Return GLM-4.7-Flash, which is a DeepSeek-V3 that may name the layers with experts."""
    return parse_latent(fields.with_defaults(_GLM_LITE), "noaux_tc")


def parse_mistral4(fields: JsonFields) -> dict[str, Any]:
    """Return Mistral 4: experts by a softmax, and queries that grow with their positions."""
    own = parse_latent(fields.with_defaults(_MISTRAL4), "noaux_tc", stacked=Stacked.HALVES)
    growth = parse_query_growth(fields, own["max_position_embeddings"])
    return own | {"query_growth": growth}


def parse_latent(
    fields: JsonFields,
    *methods: str,
    interleaves: bool | None = None,
    stacked: Stacked | None = None,
) -> dict[str, Any]:
    """Return a model with latents; `methods`: ways of choosing experts that the family has."""
    fields.only("hidden_act", "silu")
    latent = _latent_sizes(fields)
    sizes = sizes_of(fields, head_dim=latent.rank + latent.rope_dim, num_kv_heads=1)
    length = sizes["max_position_embeddings"]
    rope = parse_rope(fields, max_position_embeddings=length, rotary_dim=latent.rope_dim)
    has_bias = fields.boolean("attention_bias", default=False)
    return sizes | {
        "intermediate_size": fields.integer("intermediate_size"),
        "latent": latent,
        "rope": rope,
        "rotary_share": latent.rope_dim,
        "rotates_neighbours": interleaves or fields.boolean("rope_interleave", default=True),
        "attention_scale": _latent_scale(latent, rope),
        "qkv_bias": has_bias,
        "attention_output_bias": has_bias,
        "moe": _latent_experts(fields, sizes["num_layers"], methods, stacked),
    }


def _latent_sizes(fields: JsonFields) -> LatentConfig:
    return LatentConfig(
        query_rank=None if fields.is_null("q_lora_rank") else fields.integer("q_lora_rank"),
        rank=fields.integer("kv_lora_rank"),
        plain_dim=fields.integer("qk_nope_head_dim"),
        rope_dim=fields.even("qk_rope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
    )


def _latent_scale(latent: LatentConfig, rope: RopeConfig) -> float:
    """Return the factor of scores: YaRN's factor on cos and sin reaches a part of a head only."""
    scale = 1.0 / math.sqrt(latent.query_dim)
    if isinstance(rope, YarnRope) and rope.mscale_all_dim and rope.factor > 1:
        scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
    return scale


_METHODS = {"greedy": 0, "group_limited_greedy": 1, "noaux_tc": 2}
"""Ways of choosing experts: of how many of its best a group's rank is the sum; 0: no groups."""


def _latent_experts(
    fields: JsonFields, num_layers: int, methods: tuple[str, ...], stacked: Stacked | None
) -> MoeConfig:
    method = fields.only("topk_method", *methods)
    scoring = fields.only("scoring_func", fields.default("scoring_func"))
    fields.only("moe_layer_freq", 1)
    num_experts = fields.integer("n_routed_experts", high=MAX_EXPERTS)
    groups, best = (1, 1), _METHODS[method]
    if best:
        groups = groups_of(fields, num_experts, best=best, defaults=(None, None))
    size = fields.integer("moe_intermediate_size")
    return MoeConfig(
        layers=_sparse_layers(fields, num_layers),
        num_experts=num_experts,
        num_chosen=num_chosen_of(fields, num_experts, default=None, groups=groups),
        intermediate_size=size,
        normalises=fields.boolean("norm_topk_prob", default=fields.default("norm_topk_prob")),
        scoring=Scoring(scoring),
        has_choice_bias=scoring == Scoring.SIGMOID,
        num_groups=groups[0],
        num_chosen_groups=groups[1],
        group_best=best or 1,
        scale=fields.number("routed_scaling_factor"),
        shared_size=size * fields.integer("n_shared_experts"),
        shared_module="shared_experts",
        stacked=stacked,
    )


def _sparse_layers(fields: JsonFields, num_layers: int) -> frozenset[int]:
    """Return the layers with experts: those that a list of all names, or all behind some."""
    if not fields.has(key := "mlp_layer_types"):
        return behind_dense(fields, num_layers, default=None)
    kinds = fields.array(key)
    if len(kinds) != num_layers or any(kind not in ("dense", "sparse") for kind in kinds):
        raise fields.error(key, f"must be {num_layers} times 'dense' or 'sparse'")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse")
