"""What `config.json` says of gpt-oss. Torch-free."""

from __future__ import annotations

from typing import Any

from lightserve.models.json_fields import JsonFields
from lightserve.models.moe_config import MAX_EXPERTS, MoeConfig, Scoring, Stacked
from lightserve.models.plain_config import MAX_LAYERS
from lightserve.models.rope import FULL, SLIDING, RopeConfig, YarnRope, has_rope, parse_rope
from lightserve.models.weight_format import is_mxfp4

THETA = 150_000.0


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
        "rope": _rope(fields, length, head_dim),
        "max_position_embeddings": length,
        "qkv_bias": has_bias,
        "attention_output_bias": has_bias,
        "mlp_bias": False,
        "qk_norm": False,
        "has_sinks": True,
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=False),
        "sliding_windows": _windows(fields, num_layers),
        "moe": _experts(fields, num_layers, hidden, inner),
    }


def _rope(fields: JsonFields, length: int, head_dim: int) -> RopeConfig:
    if has_rope(fields):
        return parse_rope(
            fields, max_position_embeddings=length, rotary_dim=head_dim, default_theta=THETA
        )
    return YarnRope(
        theta=fields.number("rope_theta", default=THETA, above=1.0),
        factor=32.0,
        original_max_position_embeddings=4096,
        attention_factor=None,
        mscale=None,
        mscale_all_dim=None,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
    )


def _windows(fields: JsonFields, num_layers: int) -> tuple[int | None, ...]:
    """Return each layer's window: every second has one, beginning with the first."""
    window = fields.integer("sliding_window", default=128)
    kinds = [SLIDING if layer % 2 == 0 else FULL for layer in range(num_layers)]
    if fields.has("layer_types"):
        kinds = fields.array("layer_types")
        if len(kinds) != num_layers or any(kind not in (FULL, SLIDING) for kind in kinds):
            raise fields.error("layer_types", f"must be {num_layers} times {FULL!r} or {SLIDING!r}")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _experts(fields: JsonFields, num_layers: int, hidden: int, inner: int) -> MoeConfig:
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
