"""Models with a mixture of experts, as `config.json` describes them. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lightserve.models.json_fields import JsonFields
from lightserve.models.plain_config import MAX_LAYERS
from lightserve.models.rope import (
    FULL,
    SLIDING,
    RopeConfig,
    YarnRope,
    has_rope,
    parse_query_growth,
    parse_rope,
)
from lightserve.models.weight_format import is_mxfp4

MAX_EXPERTS = 4096
MXFP4_GROUP = 32
"""Inputs that share a factor in that format."""
_HALVES = (0, 1, 2, 3, 4, 6, 8, 12)
FP4_HALVES = (*_HALVES, *(-half for half in _HALVES))
"""Twice the numbers of 4 bits, by their codes."""
MXFP4_BIAS = 127
"""Bias of the byte that is a factor's exponent."""
MXFP4_NO_NUMBER = 255
"""An exponent that stands for none."""


class Scoring(StrEnum):
    """Scores that a token's products with the router's weight become."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    CHOSEN = "chosen"
    """Softmax over the products of the chosen experts alone."""


class Stacked(StrEnum):
    """The form of a layer's experts that a file holds in one tensor."""

    PLAIN = "plain"
    """Inputs before outputs, gates and ups by turns."""
    MXFP4 = "mxfp4"
    """Outputs before inputs; 32 inputs share a power of two (OCP Microscaling, section 5.3)."""
    HALVES = "halves"
    """Outputs before inputs, gates before ups."""


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """The layers that have experts in place of one feed-forward block, and how they choose."""

    layers: frozenset[int]
    """Not empty; the others have a block of `ModelConfig.intermediate_size`."""
    num_experts: int
    num_chosen: int
    """Experts of each token."""
    intermediate_size: int
    """Intermediate size of each expert."""
    size_key: str = "moe_intermediate_size"
    """Key of `config.json` that has it."""
    normalises: bool
    """Whether the weights of a token's experts are divided by their sum."""
    scoring: Scoring = Scoring.SOFTMAX
    has_choice_bias: bool = False
    """Whether a bias is added to scores where experts are chosen, and nowhere else."""
    num_groups: int = 1
    """Equal groups of experts; a divisor of `num_experts`."""
    num_chosen_groups: int = 1
    """A token's experts are in the groups with the largest sums of their best."""
    group_best: int = 2
    """Number of a group's best scores that are added."""
    scale: float = 1.0
    """Factor of the sum of the chosen experts."""
    shared_size: int = 0
    """Size of a block that every token goes through; 0: none."""
    shared_module: str = ""
    """Its name."""
    has_shared_gate: bool = False
    """Whether its result is multiplied by a sigmoid."""
    module: str = "mlp"
    """Name of the block in a layer."""
    router: str = "gate"
    """Name of the router in it."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    has_biases: bool = False
    """Whether the router and all experts have biases."""
    clamp: tuple[float, float] | None = None
    """Alpha and limit of gates as `ClampedGate` has them; None: SiLU."""
    stacked: Stacked | None = None
    """None: each expert has tensors of its own."""


def parse_mixtral(fields: JsonFields, num_layers: int, intermediate_size: int) -> MoeConfig:
    """Return Mixtral's experts: every layer has them."""
    num_experts = fields.integer("num_local_experts", default=8, high=MAX_EXPERTS)
    return MoeConfig(
        layers=frozenset(range(num_layers)),
        num_experts=num_experts,
        num_chosen=_num_chosen(fields, num_experts, default=2),
        intermediate_size=intermediate_size,
        size_key="intermediate_size",
        normalises=True,
        module="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )


def parse_qwen_moe(fields: JsonFields, num_layers: int, *, is_qwen2: bool) -> MoeConfig:
    """Return the experts of Qwen2-MoE, which has a shared one beside them, or of Qwen3-MoE."""
    key = "num_experts" if fields.has("num_experts") else "num_local_experts"
    num_experts = fields.integer(key, default=60 if is_qwen2 else 128, high=MAX_EXPERTS)
    step = fields.integer("decoder_sparse_step", default=1)
    dense = set()
    if fields.has("mlp_only_layers"):
        dense = {_layer(fields, entry) for entry in fields.array("mlp_only_layers")}
    layers = frozenset(
        layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0
    )
    if not layers:
        raise fields.error("decoder_sparse_step", f"{step} leaves no layer with experts")
    shared = 0
    if is_qwen2:
        shared = fields.integer("shared_expert_intermediate_size", default=5632)
    return MoeConfig(
        layers=layers,
        num_experts=num_experts,
        num_chosen=_num_chosen(fields, num_experts, default=4 if is_qwen2 else 8),
        intermediate_size=fields.integer(
            "moe_intermediate_size", default=1408 if is_qwen2 else 768
        ),
        normalises=fields.boolean("norm_topk_prob", default=False),
        shared_size=shared,
        shared_module="shared_expert",
        has_shared_gate=is_qwen2,
    )


def parse_olmoe(fields: JsonFields, num_layers: int, intermediate_size: int) -> MoeConfig:
    """Return OLMoE's experts: every layer has them."""
    num_experts = fields.integer("num_experts", default=64, high=MAX_EXPERTS)
    return MoeConfig(
        layers=frozenset(range(num_layers)),
        num_experts=num_experts,
        num_chosen=_num_chosen(fields, num_experts, default=8),
        intermediate_size=intermediate_size,
        size_key="intermediate_size",
        normalises=fields.boolean("norm_topk_prob", default=False),
    )


def parse_minimax(fields: JsonFields, num_layers: int, intermediate_size: int) -> MoeConfig:
    """Return the experts of MiniMax-M2: every layer has them, a bias takes part in their choice."""
    if (scoring := fields.string("scoring_func", default="sigmoid")) != "sigmoid":
        raise fields.error("scoring_func", f"must be sigmoid, got {scoring!r}")
    if fields.integer("shared_intermediate_size", default=0, low=0):
        raise fields.error("shared_intermediate_size", "must be 0")
    num_experts = fields.integer("num_local_experts", default=256, high=MAX_EXPERTS)
    return MoeConfig(
        layers=frozenset(range(num_layers)),
        num_experts=num_experts,
        num_chosen=_num_chosen(fields, num_experts, default=8),
        intermediate_size=intermediate_size,
        size_key="intermediate_size",
        normalises=True,
        scoring=Scoring.SIGMOID,
        has_choice_bias=True,
        module="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )


def parse_glm_moe(fields: JsonFields, num_layers: int) -> MoeConfig:
    """Return the experts of GLM-4.5: chosen as DeepSeek-V3's are, behind some dense layers."""
    num_experts = fields.integer("n_routed_experts", default=128, high=MAX_EXPERTS)
    groups = _groups(fields, num_experts, best=2, defaults=(1, 1))
    num_chosen = _num_chosen(fields, num_experts, default=8, groups=groups)
    size = fields.integer("moe_intermediate_size", default=1408)
    return MoeConfig(
        layers=_behind_dense(fields, num_layers, default=1),
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=size,
        normalises=fields.boolean("norm_topk_prob", default=True),
        scoring=Scoring.SIGMOID,
        has_choice_bias=True,
        num_groups=groups[0],
        num_chosen_groups=groups[1],
        scale=fields.number("routed_scaling_factor", default=1.0),
        shared_size=size * fields.integer("n_shared_experts", default=1),
        shared_module="shared_experts",
    )


def _num_chosen(
    fields: JsonFields, num_experts: int, *, default: int | None, groups: tuple[int, int] = (1, 1)
) -> int:
    """Return how many experts a token has, of `groups` (all, and chosen ones)."""
    num_chosen = fields.integer("num_experts_per_tok", default=default, high=num_experts)
    most = num_experts // groups[0] * groups[1]
    if num_chosen > most:
        complaint = f"must be at most {most}, the experts of topk_group groups, got {num_chosen}"
        raise fields.error("num_experts_per_tok", complaint)
    return num_chosen


def _groups(
    fields: JsonFields, num_experts: int, *, best: int, defaults: tuple[int | None, int | None]
) -> tuple[int, int]:
    """Return how many groups experts form, of at least `best` each, and how many are chosen."""
    num_groups = fields.integer("n_group", default=defaults[0], high=num_experts)
    if num_experts % num_groups or num_experts // num_groups < best:
        raise fields.error("n_group", f"must give even groups of {num_experts}, got {num_groups}")
    return num_groups, fields.integer("topk_group", default=defaults[1], high=num_groups)


def _behind_dense(fields: JsonFields, num_layers: int, *, default: int | None) -> frozenset[int]:
    """Return the layers with experts, which stand behind some dense ones."""
    num_dense = fields.integer("first_k_dense_replace", default=default, low=0)
    if num_dense >= num_layers:
        raise fields.error("first_k_dense_replace", f"must be below {num_layers}, got {num_dense}")
    return frozenset(range(num_dense, num_layers))


def _layer(fields: JsonFields, entry: object) -> int:
    if isinstance(entry, bool) or not isinstance(entry, int):
        raise fields.error("mlp_only_layers", f"has the entry {entry!r}, which is no layer")
    return entry


# DeepSeek-V2 and DeepSeek-V3, and two families of the same parts: latents, grouped experts.


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
    """Whether the file has two tensors: one that makes keys, transposed, and one that makes
    values."""

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
_V3 = _V2 | {
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
_GLM_LITE = _V3 | {
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
_MISTRAL4 = _V3 | {
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
        if fields.boolean(key, default=False):
            raise fields.error(key, "must be false")
    return _parse_latent(fields, "greedy", "group_limited_greedy", interleaves=True)


def parse_deepseek_v3(fields: JsonFields) -> dict[str, Any]:
    """Return DeepSeek-V3 without its layers for several tokens at once."""
    return _parse_latent(fields.with_defaults(_V3), "noaux_tc")


def parse_glm_lite(fields: JsonFields) -> dict[str, Any]:
    """Return GLM-4.7-Flash, which is a DeepSeek-V3 that may name the layers with experts."""
    return _parse_latent(fields.with_defaults(_GLM_LITE), "noaux_tc")


def parse_mistral4(fields: JsonFields) -> dict[str, Any]:
    """Return Mistral 4: experts by a softmax, and queries that grow with their positions."""
    own = _parse_latent(fields.with_defaults(_MISTRAL4), "noaux_tc", stacked=Stacked.HALVES)
    growth = parse_query_growth(fields, own["max_position_embeddings"])
    return own | {"query_growth": growth}


def _parse_latent(
    fields: JsonFields,
    *methods: str,
    interleaves: bool | None = None,
    stacked: Stacked | None = None,
) -> dict[str, Any]:
    """Return a model with latents; `methods`: ways of choosing experts that the family has."""
    if (activation := fields.string("hidden_act", default="silu")) != "silu":
        raise fields.error("hidden_act", f"must be 'silu', got {activation!r}")
    num_layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    latent = _latent_sizes(fields)
    length = fields.integer("max_position_embeddings")
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
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "rope": rope,
        "rotary_share": latent.rope_dim,
        "rotates_neighbours": interleaves or fields.boolean("rope_interleave", default=True),
        "attention_scale": _latent_scale(latent, rope),
        "max_position_embeddings": length,
        "qkv_bias": has_bias,
        "attention_output_bias": has_bias,
        "mlp_bias": False,
        "qk_norm": False,
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=False),
        "sliding_windows": (None,) * num_layers,
        "moe": _latent_experts(fields, num_layers, methods, stacked),
    }


def _latent_sizes(fields: JsonFields) -> LatentConfig:
    rope_dim = fields.integer("qk_rope_head_dim")
    if rope_dim % 2:
        raise fields.error("qk_rope_head_dim", f"must be even, got {rope_dim}")
    return LatentConfig(
        query_rank=None if fields.is_null("q_lora_rank") else fields.integer("q_lora_rank"),
        rank=fields.integer("kv_lora_rank"),
        plain_dim=fields.integer("qk_nope_head_dim"),
        rope_dim=rope_dim,
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
    if (method := fields.string("topk_method")) not in methods:
        raise fields.error("topk_method", f"must be {' or '.join(methods)}, got {method!r}")
    scoring = fields.default("scoring_func")
    if (found := fields.string("scoring_func")) != scoring:
        raise fields.error("scoring_func", f"must be {scoring}, got {found!r}")
    if fields.integer("moe_layer_freq", default=1) != 1:
        raise fields.error("moe_layer_freq", "must be 1")
    num_experts = fields.integer("n_routed_experts", high=MAX_EXPERTS)
    groups, best = (1, 1), _METHODS[method]
    if best:
        groups = _groups(fields, num_experts, best=best, defaults=(None, None))
    size = fields.integer("moe_intermediate_size")
    return MoeConfig(
        layers=_sparse_layers(fields, num_layers),
        num_experts=num_experts,
        num_chosen=_num_chosen(fields, num_experts, default=None, groups=groups),
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
        return _behind_dense(fields, num_layers, default=None)
    kinds = fields.array(key)
    if len(kinds) != num_layers or any(kind not in ("dense", "sparse") for kind in kinds):
        raise fields.error(key, f"must be {num_layers} times 'dense' or 'sparse'")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sparse")


# gpt-oss.


GPT_OSS_THETA = 150_000.0


def parse_gpt_oss(fields: JsonFields) -> dict[str, Any]:
    """Return gpt-oss as fields of `ModelConfig`; absent keys are as in transformers."""
    num_layers = fields.integer("num_hidden_layers", default=36, high=MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads", default=64)
    num_kv_heads = fields.integer("num_key_value_heads", default=8)
    if num_heads % num_kv_heads:
        complaint = f"must divide num_attention_heads {num_heads}, got {num_kv_heads}"
        raise fields.error("num_key_value_heads", complaint)
    head_dim = fields.integer("head_dim", default=64)
    if head_dim % 2:
        raise fields.error("head_dim", f"must be even, got {head_dim}")
    if (activation := fields.string("hidden_act", default="silu")) != "silu":
        raise fields.error("hidden_act", f"must be 'silu', got {activation!r}")
    length = fields.integer("max_position_embeddings", default=131_072)
    has_bias = fields.boolean("attention_bias", default=True)
    hidden, inner = (
        fields.integer(key, default=2880) for key in ("hidden_size", "intermediate_size")
    )
    return {
        "vocab_size": fields.integer("vocab_size", default=201_088),
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("rms_norm_eps", default=1e-5),
        "rope": _gpt_oss_rope(fields, length, head_dim),
        "max_position_embeddings": length,
        "qkv_bias": has_bias,
        "attention_output_bias": has_bias,
        "mlp_bias": False,
        "qk_norm": False,
        "has_sinks": True,
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=False),
        "sliding_windows": _gpt_oss_windows(fields, num_layers),
        "moe": _gpt_oss_experts(fields, num_layers, inner),
    }


def _gpt_oss_rope(fields: JsonFields, length: int, head_dim: int) -> RopeConfig:
    if has_rope(fields):
        return parse_rope(
            fields, max_position_embeddings=length, rotary_dim=head_dim, default_theta=GPT_OSS_THETA
        )
    return YarnRope(
        theta=fields.number("rope_theta", default=GPT_OSS_THETA, above=1.0),
        factor=32.0,
        original_max_position_embeddings=4096,
        attention_factor=None,
        mscale=None,
        mscale_all_dim=None,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
    )


def _gpt_oss_windows(fields: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    """Return each layer's window: every second has one, beginning with the first."""
    window = fields.integer("sliding_window", default=128)
    kinds = [SLIDING if layer % 2 == 0 else FULL for layer in range(num_layers)]
    if fields.has("layer_types"):
        kinds = fields.array("layer_types")
        if len(kinds) != num_layers or any(kind not in (FULL, SLIDING) for kind in kinds):
            raise fields.error("layer_types", f"must be {num_layers} times {FULL!r} or {SLIDING!r}")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _gpt_oss_experts(fields: JsonFields, num_layers: int, inner: int) -> MoeConfig:
    num_experts = fields.integer("num_local_experts", default=128, high=MAX_EXPERTS)
    return MoeConfig(
        layers=frozenset(range(num_layers)),
        num_experts=num_experts,
        num_chosen=fields.integer("num_experts_per_tok", default=4, high=num_experts),
        intermediate_size=inner,
        size_key="intermediate_size",
        normalises=False,
        scoring=Scoring.CHOSEN,
        router="router",
        has_biases=True,
        clamp=(
            fields.number("swiglu_alpha", default=1.702),
            fields.number("swiglu_limit", default=7.0),
        ),
        stacked=Stacked.MXFP4 if is_mxfp4(fields) else Stacked.PLAIN,
    )
