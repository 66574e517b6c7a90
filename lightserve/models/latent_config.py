"""What `config.json` says of DeepSeek-V2 and DeepSeek-V3: latents, grouped experts. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lightserve.models.json_fields import JsonFields
from lightserve.models.moe_config import MAX_EXPERTS, MoeConfig, Scoring
from lightserve.models.plain_config import MAX_LAYERS
from lightserve.models.rope import RopeConfig, YarnRope, parse_rope


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Sizes of an attention whose keys and values are made of one vector for each token."""

    query_rank: int | None
    """Of the vector that queries are made of; None: the hidden state."""
    rank: int
    """Of the vector that keys and values are made of: what is kept of a token."""
    plain_dim: int
    """Of a query head, beside what is rotated."""
    rope_dim: int
    """Of a query head, and kept of a token, rotated; even."""
    value_dim: int
    """Of a value head."""
    is_split: bool = False
    """Whether what makes keys, transposed, and what makes values are two tensors in the file."""

    @property
    def query_dim(self) -> int:
        """Of a query head."""
        return self.plain_dim + self.rope_dim


def parse_deepseek_v2(fields: JsonFields) -> dict[str, Any]:
    """Return DeepSeek-V2 as fields of `ModelConfig`; absent keys are as in transformers."""
    return _parse(fields, is_v3=False)


def parse_deepseek_v3(fields: JsonFields) -> dict[str, Any]:
    """Return DeepSeek-V3 without its layers for several tokens at once."""
    return _parse(fields, is_v3=True)


def _parse(fields: JsonFields, *, is_v3: bool) -> dict[str, Any]:
    if (activation := fields.string("hidden_act", default="silu")) != "silu":
        raise fields.error("hidden_act", f"must be 'silu', got {activation!r}")
    num_layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    latent = _latent(fields)
    length = fields.integer("max_position_embeddings", default=4096 if is_v3 else 2048)
    rope = parse_rope(fields, max_position_embeddings=length, rotary_dim=latent.rope_dim)
    has_bias = fields.boolean("attention_bias", default=False)
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": fields.integer("num_attention_heads"),
        "num_kv_heads": 1,
        "head_dim": latent.rank + latent.rope_dim,
        "latent": latent,
        "rms_norm_eps": fields.number("rms_norm_eps", default=1e-6),
        "rope": rope,
        "rotary_share": latent.rope_dim,
        "rotates_neighbours": fields.boolean("rope_interleave", default=True) if is_v3 else True,
        "attention_scale": _scale(latent, rope),
        "max_position_embeddings": length,
        "qkv_bias": has_bias,
        "attention_output_bias": has_bias,
        "mlp_bias": False if is_v3 else _no_bias(fields),
        "qk_norm": False,
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=False),
        "sliding_windows": (None,) * num_layers,
        "moe": _experts(fields, num_layers, is_v3=is_v3),
    }


def _no_bias(fields: JsonFields) -> bool:
    if fields.boolean("mlp_bias", default=False):
        raise fields.error("mlp_bias", "must be false")
    return False


def _latent(fields: JsonFields) -> LatentConfig:
    query_rank = None
    if not fields.is_null("q_lora_rank"):
        query_rank = fields.integer("q_lora_rank", default=1536)
    rope_dim = fields.integer("qk_rope_head_dim", default=64)
    if rope_dim % 2:
        raise fields.error("qk_rope_head_dim", f"must be even, got {rope_dim}")
    return LatentConfig(
        query_rank=query_rank,
        rank=fields.integer("kv_lora_rank", default=512),
        plain_dim=fields.integer("qk_nope_head_dim", default=128),
        rope_dim=rope_dim,
        value_dim=fields.integer("v_head_dim", default=128),
    )


def _scale(latent: LatentConfig, rope: RopeConfig) -> float:
    """Return the factor of scores: YaRN's factor on cos and sin reaches a part of a head only."""
    scale = 1.0 / math.sqrt(latent.query_dim)
    if isinstance(rope, YarnRope) and rope.mscale_all_dim and rope.factor > 1:
        scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
    return scale


_METHODS = {"greedy": 0, "group_limited_greedy": 1, "noaux_tc": 2}
"""Ways of choosing experts: of how many of its best a group's rank is the sum; 0: no groups."""


def _experts(fields: JsonFields, num_layers: int, *, is_v3: bool) -> MoeConfig:
    known = ("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy")
    method = fields.string("topk_method", default=known[0])
    if method not in known:
        raise fields.error("topk_method", f"must be {' or '.join(known)}, got {method!r}")
    scoring = Scoring.SIGMOID if is_v3 else Scoring.SOFTMAX
    if (found := fields.string("scoring_func", default=scoring)) != scoring:
        raise fields.error("scoring_func", f"must be {scoring}, got {found!r}")
    normalises = fields.boolean("norm_topk_prob", default=is_v3)
    if normalises and not is_v3:
        raise fields.error("norm_topk_prob", "must be false")
    if fields.integer("moe_layer_freq", default=1) != 1:
        raise fields.error("moe_layer_freq", "must be 1")
    num_experts = fields.integer("n_routed_experts", default=256 if is_v3 else 64, high=MAX_EXPERTS)
    num_dense = fields.integer("first_k_dense_replace", default=3 if is_v3 else 0, low=0)
    if num_dense >= num_layers:
        raise fields.error("first_k_dense_replace", f"must be below {num_layers}, got {num_dense}")
    groups, chosen_groups = 1, 1
    if _METHODS[method]:
        groups = fields.integer("n_group", default=8 if is_v3 else None, high=num_experts)
        if num_experts % groups or num_experts // groups < _METHODS[method]:
            raise fields.error("n_group", f"must give even groups of {num_experts}, got {groups}")
        chosen_groups = fields.integer("topk_group", default=4 if is_v3 else None, high=groups)
    num_chosen = fields.integer(
        "num_experts_per_tok", default=8 if is_v3 else None, high=num_experts
    )
    if num_chosen > num_experts // groups * chosen_groups:
        raise fields.error("num_experts_per_tok", f"exceeds what topk_group leaves: {num_chosen}")
    size = fields.integer("moe_intermediate_size", default=2048 if is_v3 else 1407)
    return MoeConfig(
        layers=frozenset(range(num_dense, num_layers)),
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=size,
        normalises=normalises,
        scoring=scoring,
        has_choice_bias=is_v3,
        num_groups=groups,
        num_chosen_groups=chosen_groups,
        group_best=_METHODS[method] or 1,
        scale=fields.number("routed_scaling_factor", default=2.5 if is_v3 else 1.0),
        shared_size=size * fields.integer("n_shared_experts", default=1 if is_v3 else 2),
        shared_module="shared_experts",
    )
