"""Models some of whose layers keep a state in place of keys and values, as `config.json` describes
them. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightserve.models.json_fields import JsonFields
from lightserve.models.moe_config import MoeConfig, parse_qwen_moe
from lightserve.models.plain_config import MAX_LAYERS
from lightserve.models.rope import parse_rope, parse_rotary_dim

FULL_ATTENTION, LINEAR_ATTENTION = "full_attention", "linear_attention"
MAX_HEAD_DIM = 512
MAX_CONVOLUTION = 16
STATE_BYTES = 4
"""Bytes of a number of a state's matrix; a convolution's inputs have the model's type."""


@dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """Layers of the gated delta rule behind a short convolution (Yang et al. 2024, section 3.4)."""

    layers: frozenset[int]
    """Neither empty nor all layers."""
    num_key_heads: int
    num_value_heads: int
    """A multiple of `num_key_heads`."""
    key_dim: int
    value_dim: int
    width: int
    """Tokens that the convolution sees, at least 2."""
    is_grouped: bool
    """Whether the file has the products of a key head and its value heads side by side."""

    @property
    def key_size(self) -> int:
        """Numbers of all key heads."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Numbers of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    def state_bytes(self, number_bytes: int) -> tuple[int, ...]:
        """Return the bytes of each state tensor of a layer of all ranks: inputs, then matrices.

        `number_bytes`: of a number of the model's type.
        """
        inputs = (self.width - 1) * self.channels * number_bytes
        return inputs, self.num_value_heads * self.key_dim * self.value_dim * STATE_BYTES

    def tensors(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return name and shape of a layer's own tensors."""
        heads, hidden = self.num_value_heads, hidden_size
        linears = {"qkvz": self.channels + self.value_size, "ba": 2 * heads}
        if not self.is_grouped:
            linears = {"qkv": self.channels, "z": self.value_size, "b": heads, "a": heads}
        return {
            f"linear_attn.in_proj_{name}.weight": (n, hidden) for name, n in linears.items()
        } | {
            "linear_attn.conv1d.weight": (self.channels, 1, self.width),
            "linear_attn.A_log": (heads,),
            "linear_attn.dt_bias": (heads,),
            "linear_attn.norm.weight": (self.value_dim,),
            "linear_attn.out_proj.weight": (hidden, self.value_size),
        }

    def divided_sizes(self) -> dict[str, int]:
        """Return the sizes that the number of ranks must divide, by key."""
        return {"linear_num_key_heads": self.num_key_heads}


def parse_qwen3_next(fields: JsonFields) -> dict[str, Any]:
    """Return Qwen3-Next as fields of `ModelConfig`; absent keys are as in transformers."""
    own = _parse_qwen(fields, is_grouped=True)
    moe = _experts(fields, own["num_layers"], (512, 10))
    return {**own, "intermediate_size": fields.integer("intermediate_size"), "moe": moe}


def parse_qwen3_5(fields: JsonFields) -> dict[str, Any]:
    """Return the text part of Qwen3.5; its layers for several tokens at once are left out."""
    own = _parse_qwen(fields, is_grouped=False)
    return {**own, "intermediate_size": fields.integer("intermediate_size")}


def parse_qwen3_5_moe(fields: JsonFields) -> dict[str, Any]:
    """Return the text part of Qwen3.5-MoE: every layer has experts."""
    own = _parse_qwen(fields, is_grouped=False)
    moe = _experts(fields, own["num_layers"], (256, 8))
    return {**own, "intermediate_size": moe.shared_size, "moe": moe}


def _experts(fields: JsonFields, num_layers: int, experts: tuple[int, int]) -> MoeConfig:
    return parse_qwen_moe(
        fields, num_layers, experts=experts, size=512, shared=512, normalises=True
    )


def _parse_qwen(fields: JsonFields, *, is_grouped: bool) -> dict[str, Any]:
    if (activation := fields.string("hidden_act", default="silu")) != "silu":
        raise fields.error("hidden_act", f"must be 'silu', got {activation!r}")
    num_layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads", default=16)
    num_kv_heads = fields.integer("num_key_value_heads", default=2 if is_grouped else None)
    if num_heads % num_kv_heads:
        complaint = f"must divide num_attention_heads {num_heads}, got {num_kv_heads}"
        raise fields.error("num_key_value_heads", complaint)
    head_dim = fields.integer("head_dim", default=256)
    if head_dim % 2:
        raise fields.error("head_dim", f"must be even, got {head_dim}")
    rotary_dim = parse_rotary_dim(fields, head_dim, share=0.25)
    length = fields.integer("max_position_embeddings", default=32768)
    has_bias = fields.boolean("attention_bias", default=False)
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("rms_norm_eps", default=1e-6),
        "norm_offset": 1.0,
        "rope": parse_rope(fields, max_position_embeddings=length, rotary_dim=rotary_dim),
        "rotary_share": rotary_dim,
        "max_position_embeddings": length,
        "qkv_bias": has_bias,
        "attention_output_bias": has_bias,
        "mlp_bias": False,
        "qk_norm": True,
        "has_output_gate": True,
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=False),
        "sliding_windows": (None,) * num_layers,
        "recurrent": _delta(fields, num_layers, is_grouped=is_grouped),
    }


def _delta(fields: JsonFields, num_layers: int, *, is_grouped: bool) -> DeltaConfig:
    key_heads = fields.integer("linear_num_key_heads", default=16)
    value_heads = fields.integer("linear_num_value_heads", default=32)
    if value_heads % key_heads:
        complaint = f"must be a multiple of linear_num_key_heads {key_heads}, got {value_heads}"
        raise fields.error("linear_num_value_heads", complaint)
    return DeltaConfig(
        layers=_recurrent_layers(fields, num_layers),
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=fields.integer("linear_key_head_dim", default=128, high=MAX_HEAD_DIM),
        value_dim=fields.integer("linear_value_head_dim", default=128, high=MAX_HEAD_DIM),
        width=fields.integer("linear_conv_kernel_dim", default=4, low=2, high=MAX_CONVOLUTION),
        is_grouped=is_grouped,
    )


def _recurrent_layers(fields: JsonFields, num_layers: int) -> frozenset[int]:
    """Return which layers keep a state."""
    key = "layer_types"
    if fields.has(key):
        kinds = fields.array(key)
        if len(kinds) != num_layers:
            raise fields.error(key, f"must have {num_layers} entries, got {len(kinds)}")
        for kind in kinds:
            if kind not in (FULL_ATTENTION, LINEAR_ATTENTION):
                known = f"{FULL_ATTENTION} and {LINEAR_ATTENTION} are supported"
                raise fields.error(key, f"has the entry {kind!r}; {known}")
        layers = frozenset(i for i, kind in enumerate(kinds) if kind == LINEAR_ATTENTION)
    else:
        key = "full_attention_interval"
        interval = fields.integer(key, default=4)
        layers = frozenset(layer for layer in range(num_layers) if (layer + 1) % interval)
    if not 0 < len(layers) < num_layers:
        found = "no" if not layers else "only"
        complaint = f"gives {found} layers of {LINEAR_ATTENTION} where both kinds are needed"
        raise fields.error(key, complaint)
    return layers
