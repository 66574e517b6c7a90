"""Families some of whose layers keep a state, as their `config.json` describes them. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from lightserve.models.json_fields import JsonFields
from lightserve.models.latent_config import DEEPSEEK_V3, parse_latent
from lightserve.models.moe_config import (
    MAX_EXPERTS,
    MoeConfig,
    Scoring,
    num_chosen_of,
    parse_qwen_moe,
)
from lightserve.models.plain_config import NormWeights, decoder_fields
from lightserve.models.recurrent_config import ConvolutionConfig, DeltaConfig, Joined

FULL_ATTENTION, LINEAR_ATTENTION, CONVOLUTION = "full_attention", "linear_attention", "conv"
MAX_HEAD_DIM = 512
MAX_CONVOLUTION = 16


def parse_qwen3_next(fields: JsonFields) -> dict[str, Any]:
    """Return Qwen3-Next as fields of `ModelConfig`; absent keys are as in transformers."""
    own = _parse_qwen(fields, joined=Joined.GROUPS)
    moe = _experts(fields, own["num_layers"], (512, 10))
    return {**own, "intermediate_size": fields.integer("intermediate_size"), "moe": moe}


def parse_qwen3_5(fields: JsonFields) -> dict[str, Any]:
    """Return the text part of Qwen3.5; its layers for several tokens at once are left out."""
    own = _parse_qwen(fields, joined=Joined.HEADS)
    return {**own, "intermediate_size": fields.integer("intermediate_size")}


def parse_qwen3_5_moe(fields: JsonFields) -> dict[str, Any]:
    """Return the text part of Qwen3.5-MoE: every layer has experts."""
    own = _parse_qwen(fields, joined=Joined.HEADS)
    moe = _experts(fields, own["num_layers"], (256, 8))
    return {**own, "intermediate_size": moe.shared_size, "moe": moe}


def _experts(fields: JsonFields, num_layers: int, experts: tuple[int, int]) -> MoeConfig:
    return parse_qwen_moe(
        fields, num_layers, experts=experts, size=512, shared=512, normalises=True
    )


def _parse_qwen(fields: JsonFields, *, joined: Joined) -> dict[str, Any]:
    kv_heads = 2 if joined is Joined.GROUPS else None
    fields = fields.with_defaults(
        {
            "num_attention_heads": 16,
            "num_key_value_heads": kv_heads,
            "head_dim": 256,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
        }
    )
    own = decoder_fields(fields, share=0.25)
    return own | {
        "norm_weights": NormWeights.ABOVE_ONE,
        "qk_norm": True,
        "has_output_gate": True,
        "recurrent": _delta(fields, own["num_layers"], joined=joined),
    }


def _delta(
    fields: JsonFields,
    num_layers: int,
    *,
    joined: Joined,
    heads: tuple[int, int] = (16, 32),
    sizes: tuple[int, int] = (128, 128),
    **own: Any,
) -> DeltaConfig:
    """Return the layers of the delta rule; `heads` and `sizes`, of keys and of values, where the
    file is silent, and fields of `DeltaConfig` that are a family's own.
    """
    key_heads = fields.integer("linear_num_key_heads", default=heads[0])
    value_heads = fields.integer("linear_num_value_heads", default=heads[1])
    if value_heads % key_heads:
        complaint = f"must be a multiple of linear_num_key_heads {key_heads}, got {value_heads}"
        raise fields.error("linear_num_value_heads", complaint)
    return DeltaConfig(
        layers=recurrent_layers(fields, num_layers),
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=fields.integer("linear_key_head_dim", default=sizes[0], high=MAX_HEAD_DIM),
        value_dim=fields.integer("linear_value_head_dim", default=sizes[1], high=MAX_HEAD_DIM),
        width=fields.integer("linear_conv_kernel_dim", default=4, low=2, high=MAX_CONVOLUTION),
        joined=joined,
        **own,
    )


def recurrent_layers(
    fields: JsonFields,
    num_layers: int,
    kind: str = LINEAR_ATTENTION,
    older: Mapping[str, str] = MappingProxyType({}),
) -> frozenset[int]:
    """Return which layers keep a state; `kind`: their name; `older`: other names of kinds."""
    key = "layer_types"
    if fields.has(key):
        kinds = fields.array(key)
        if len(kinds) != num_layers:
            raise fields.error(key, f"must have {num_layers} entries, got {len(kinds)}")
        kinds = [older.get(own, own) if isinstance(own, str) else own for own in kinds]
        for other in kinds:
            if other not in (FULL_ATTENTION, kind):
                known = f"{FULL_ATTENTION} and {kind} are supported"
                raise fields.error(key, f"has the entry {other!r}; {known}")
        layers = frozenset(i for i, other in enumerate(kinds) if other == kind)
    elif kind == CONVOLUTION:
        key = "full_attn_idxs"
        full = fields.array(key)
        if not all(type(layer) is int and 0 <= layer < num_layers for layer in full):
            raise fields.error(key, f"must hold layers from 0 to {num_layers - 1}, got {full!r}")
        layers = frozenset(range(num_layers)) - frozenset(full)
    else:
        key = "full_attention_interval"
        interval = fields.integer(key, default=4)
        layers = frozenset(layer for layer in range(num_layers) if (layer + 1) % interval)
    if not 0 < len(layers) < num_layers:
        found = "no" if not layers else "only"
        raise fields.error(key, f"gives {found} layers of {kind} where both kinds are needed")
    return layers


# OLMo-Hybrid.


def parse_olmo_hybrid(fields: JsonFields) -> dict[str, Any]:
    """Return OLMo-Hybrid: OLMo 3's attention, with rotary embeddings or without, between layers of
    the delta rule that have their norms in front.
    """
    num_heads = fields.integer("num_attention_heads")
    fields = fields.with_defaults(
        {
            "num_hidden_layers": 32,
            "num_key_value_heads": num_heads,
            "max_position_embeddings": 65_536,
            "rms_norm_eps": 1e-6,
        }
    )
    own = decoder_fields(fields)
    is_rotated = fields.has("rope_scaling") or fields.has("rope_theta")
    if not fields.has("rope_scaling") and fields.has("rope_parameters"):
        is_rotated = not fields.child("rope_parameters").is_null("rope_theta")
    key_heads = fields.integer("linear_num_key_heads", default=num_heads)
    key_dim = max(1, 3 * own["hidden_size"] // (4 * key_heads))
    key_dim = fields.integer("linear_key_head_dim", default=key_dim)
    recurrent = _delta(
        fields,
        own["num_layers"],
        joined=Joined.NONE,
        heads=(num_heads, num_heads),
        sizes=(key_dim, 2 * key_dim),
        norms=("input_layernorm", "post_attention_layernorm"),
        beta_scale=2.0 if fields.boolean("linear_allow_neg_eigval", default=True) else 1.0,
        norm_eps=1e-5,
    )
    return own | {
        "intermediate_size": fields.integer("intermediate_size"),
        "unrotated_layers": frozenset(() if is_rotated else range(own["num_layers"])),
        "has_whole_qk_norm": True,
        "norm_weights": NormWeights.WIDE,
        "layer_norms": ("post_attention_layernorm", "post_feedforward_layernorm"),
        "recurrent": recurrent,
        "stored_names": (
            ("linear_attn.in_proj_z", "linear_attn.g_proj"),
            *((f"linear_attn.in_proj_{name}.", f"linear_attn.{name}_proj.") for name in "qkvab"),
            ("linear_attn.norm", "linear_attn.o_norm"),
            ("linear_attn.out_proj", "linear_attn.o_proj"),
            ("input_layernorm", "input_layernorm", "attention_layer_norm"),
            ("post_attention_layernorm", "post_attention_layernorm", "feedforward_layer_norm"),
        ),
    }


# Kimi-Linear.


_KIMI = DEEPSEEK_V3 | {
    "hidden_size": 2304,
    "num_attention_heads": 32,
    "q_lora_rank": None,
    "max_position_embeddings": 1_048_576,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 256,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 1024,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.446,
}
"""Values that transformers takes where a file of Kimi-Linear is silent."""
_KIMI_KEYS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}


def parse_kimi_linear(fields: JsonFields) -> dict[str, Any]:
    """Return Kimi-Linear: DeepSeek-V3's attention without positions, and Kimi Delta Attention."""
    stated = {_KIMI_KEYS.get(key, key): value for key, value in fields.items()}
    stated.setdefault("q_lora_rank", None)
    own = parse_latent(JsonFields(fields.path, stated, defaults=_KIMI), "noaux_tc")
    num_layers = own["num_layers"]
    key, inner = "linear_attn_config", fields
    sizes = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
    width = "linear_conv_kernel_dim"
    if fields.has(key):
        inner, width, sizes = fields.child(key), "short_conv_kernel_size", {}
    num_heads, head_dim = (
        inner.integer(sizes.get(name, name), default=default, high=high)
        for name, default, high in (("num_heads", 32, 4096), ("head_dim", 128, MAX_HEAD_DIM))
    )
    if fields.has("layer_types"):
        layers = recurrent_layers(fields, num_layers)
    elif inner is not fields:
        layers = _layers_from_one(inner, num_layers)
    else:
        layers = frozenset(layer for layer in range(num_layers) if layer % 4 or not layer)
    recurrent = DeltaConfig(
        layers=layers,
        num_key_heads=num_heads,
        num_value_heads=num_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        width=inner.integer(width, default=4, low=2, high=MAX_CONVOLUTION),
        joined=Joined.NONE,
        rank=head_dim,
    )
    moe = replace(own["moe"], module="block_sparse_moe", projections=("w1", "w3", "w2"))
    return own | {
        "unrotated_layers": frozenset(range(num_layers)),
        "moe": moe,
        "recurrent": recurrent,
        "stored_names": (
            *((f"linear_attn.in_proj_{name}.", f"linear_attn.{name}_proj.") for name in "qkvb"),
            ("linear_attn.norm", "linear_attn.o_norm"),
            ("linear_attn.out_proj", "linear_attn.o_proj"),
            ("linear_attn.", "self_attn."),
            (".mlp.", ".mlp.", ".block_sparse_moe."),
        ),
    }


def _layers_from_one(fields: JsonFields, num_layers: int) -> frozenset[int]:
    """Return the layers of Kimi Delta Attention, which the file counts from one."""
    numbers = fields.array(key := "kda_layers")
    is_good = all(type(number) is int and 1 <= number <= num_layers for number in numbers)
    if not is_good or not 0 < len(set(numbers)) < num_layers:
        complaint = f"must hold layers from 1 to {num_layers}, and not all, got {numbers!r}"
        raise fields.error(key, complaint)
    return frozenset(number - 1 for number in numbers)


# LFM2.


_LFM2: dict[str, Any] = {
    "vocab_size": 65_536,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
"""Values that transformers takes where a file of LFM2 is silent."""


def parse_lfm2(fields: JsonFields) -> dict[str, Any]:
    """Return LFM2: short convolutions, and attention in a few layers."""
    inner = fields.integer(
        "block_ff_dim" if fields.has("block_ff_dim") else "intermediate_size", default=12_288
    )
    if fields.boolean("block_auto_adjust_ff_dim", default=True):
        inner = int(fields.number("block_ffn_dim_multiplier", default=1.0) * int(2 * inner / 3))
        multiple = fields.integer("block_multiple_of", default=256)
        inner = multiple * -(-inner // multiple)
    return _parse_lfm2(fields, inner)


def parse_lfm2_moe(fields: JsonFields) -> dict[str, Any]:
    """Return LFM2-MoE: experts behind some dense layers."""
    own = _parse_lfm2(fields, fields.integer("intermediate_size", default=7168))
    num_layers = own["num_layers"]
    num_experts = fields.integer("num_experts", default=32, high=MAX_EXPERTS)
    num_dense = fields.integer("num_dense_layers", default=2, low=0, high=num_layers - 1)
    moe = MoeConfig(
        layers=frozenset(range(num_dense, num_layers)),
        num_experts=num_experts,
        num_chosen=num_chosen_of(fields, num_experts, default=4),
        intermediate_size=fields.integer("moe_intermediate_size", default=1792),
        normalises=fields.boolean("norm_topk_prob", default=True),
        scoring=Scoring.SIGMOID,
        has_choice_bias=fields.boolean("use_expert_bias", default=True),
        added=1e-6,
        scale=fields.number("routed_scaling_factor", default=1.0),
        module="feed_forward",
        projections=("w1", "w3", "w2"),
    )
    names = ((".gate.e_score_correction_bias", ".expert_bias"), *own["stored_names"])
    return {**own, "moe": moe, "stored_names": names}


def _parse_lfm2(fields: JsonFields, inner: int) -> dict[str, Any]:
    stated = dict(fields.items())
    stated |= {
        ours: stated[theirs]
        for ours, theirs in (("rms_norm_eps", "norm_eps"), ("tie_word_embeddings", "tie_embedding"))
        if theirs in stated
    }
    own = decoder_fields(JsonFields(fields.path, stated, defaults=_LFM2), theta=1_000_000.0)
    return own | {
        "intermediate_size": inner,
        "qk_norm": True,
        "recurrent": ConvolutionConfig(
            layers=recurrent_layers(fields, own["num_layers"], CONVOLUTION),
            channels=own["hidden_size"],
            width=fields.integer("conv_L_cache", default=3, low=2, high=MAX_CONVOLUTION),
            has_bias=fields.boolean("conv_bias", default=False),
        ),
        "stored_names": (
            ("model.norm.", "model.embedding_norm."),
            ("self_attn.o_proj", "self_attn.out_proj"),
            ("self_attn.q_norm", "self_attn.q_layernorm"),
            ("self_attn.k_norm", "self_attn.k_layernorm"),
            ("input_layernorm", "operator_norm"),
            ("post_attention_layernorm", "ffn_norm"),
            ("mlp.gate_proj", "feed_forward.w1"),
            ("mlp.up_proj", "feed_forward.w3"),
            ("mlp.down_proj", "feed_forward.w2"),
        ),
    }
