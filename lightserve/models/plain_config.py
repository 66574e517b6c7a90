"""Families with LayerNorm and feed-forward blocks without a gate, as fields of `ModelConfig`.

GPT-NeoX, Phi-1 and 2, StarCoder 2, OPT, Falcon. Torch-free.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from lightserve.models.json_fields import JsonFields
from lightserve.models.rope import DEFAULT_THETA, DefaultRope, parse_rope, parse_rotary_dim

MAX_LAYERS = 4096


class Activation(StrEnum):
    """Between the two products of a block without a gate."""

    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"


_ACTIVATIONS = {
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}
_ONE_NORM = ("input_layernorm",)
_TWO_NORMS = ("input_layernorm", "post_attention_layernorm")


def parse_gpt_neox(fields: JsonFields) -> dict[str, Any]:
    """Return GPT-NeoX, of which Pythia is one: both blocks read the same sum, each normed."""
    heads = _heads(fields, kv_heads_key=None)
    share = fields.number("rotary_pct", default=0.25)
    theta = fields.number("rotary_emb_base", default=DEFAULT_THETA, above=1.0)
    has_bias = fields.boolean("attention_bias", default=True)
    return {
        **_sizes(fields, heads),
        **_rotary(fields, heads["head_dim"], share=share, theta=theta),
        **_same_window(None, heads["num_layers"]),
        "rms_norm_eps": fields.number("layer_norm_eps", default=1e-5),
        "activation": _activation(fields, "hidden_act", "gelu"),
        "qkv_bias": has_bias,
        "attention_output_bias": has_bias,
        "mlp_bias": True,
        "merged": frozenset({"grouped_qkv"}),
        "is_parallel": fields.boolean("use_parallel_residual", default=True),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=False),
        "stored_names": (
            ("model.norm", "model.final_layer_norm"),
            ("model.embed_tokens", "model.embed_in"),
            ("model.", "gpt_neox."),
            ("lm_head", "embed_out"),
            ("self_attn.qkv_proj", "attention.query_key_value"),
            ("self_attn.o_proj", "attention.dense"),
            ("mlp.up_proj", "mlp.dense_h_to_4h"),
            ("mlp.down_proj", "mlp.dense_4h_to_h"),
        ),
    }


def parse_phi(fields: JsonFields) -> dict[str, Any]:
    """Return Phi-1, 1.5 or 2: both blocks read one norm; the output layer has a bias."""
    if fields.boolean("qk_layernorm", default=False):
        raise fields.error("qk_layernorm", "must be false")
    heads = _heads(fields)
    return {
        **_sizes(fields, heads),
        **_rotary(fields, heads["head_dim"], share=0.5),
        **_same_window(None, heads["num_layers"]),
        "rms_norm_eps": fields.number("layer_norm_eps", default=1e-5),
        "activation": _activation(fields, "hidden_act", "gelu_new"),
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "lm_head_bias": True,
        "is_parallel": True,
        "layer_norms": _ONE_NORM,
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=False),
        "stored_names": (
            ("model.norm", "model.final_layernorm"),
            ("self_attn.o_proj", "self_attn.dense"),
            ("mlp.up_proj", "mlp.fc1"),
            ("mlp.down_proj", "mlp.fc2"),
        ),
    }


def parse_starcoder2(fields: JsonFields) -> dict[str, Any]:
    """Return StarCoder 2."""
    heads = _heads(fields, default_kv_heads=2)
    has_bias = fields.boolean("use_bias", default=True)
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    return {
        **_sizes(fields, heads),
        **_rotary(fields, heads["head_dim"]),
        **_same_window(window, heads["num_layers"]),
        "rms_norm_eps": fields.number("norm_epsilon", default=1e-5),
        "activation": _activation(fields, "hidden_act", "gelu_pytorch_tanh"),
        "qkv_bias": has_bias,
        "attention_output_bias": has_bias,
        "mlp_bias": has_bias,
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=True),
        "stored_names": (("mlp.up_proj", "mlp.c_fc"), ("mlp.down_proj", "mlp.c_proj")),
    }


def parse_opt(fields: JsonFields) -> dict[str, Any]:
    """Return OPT: learned positions, the first of them third in their table; no rotation."""
    for key in ("do_layer_norm_before", "layer_norm_elementwise_affine"):
        if not fields.boolean(key, default=True):
            raise fields.error(key, "must be true")
    if fields.boolean("_remove_final_layer_norm", default=False):
        raise fields.error("_remove_final_layer_norm", "must be false")
    heads = _heads(fields, kv_heads_key=None)
    hidden = heads["hidden_size"]
    if (size := fields.integer("word_embed_proj_dim", default=hidden)) != hidden:
        raise fields.error("word_embed_proj_dim", f"must be hidden_size {hidden}, got {size}")
    has_bias = fields.boolean("enable_bias", default=True)
    num_layers = heads["num_layers"]
    return {
        **_sizes(fields, heads, inner_key="ffn_dim"),
        **_same_window(None, num_layers),
        "rope": DefaultRope(theta=DEFAULT_THETA),
        "unrotated_layers": frozenset(range(num_layers)),
        "position_offset": 2,
        "rms_norm_eps": 1e-5,
        "activation": _activation(fields, "activation_function", "relu"),
        "qkv_bias": has_bias,
        "attention_output_bias": has_bias,
        "mlp_bias": has_bias,
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=True),
        "stored_names": (
            ("post_attention_layernorm", "final_layer_norm"),
            ("input_layernorm", "self_attn_layer_norm"),
            ("model.norm", "model.final_layer_norm"),
            ("model.", "model.decoder."),
            ("self_attn.o_proj", "self_attn.out_proj"),
            ("mlp.up_proj", "fc1"),
            ("mlp.down_proj", "fc2"),
        ),
    }


def parse_falcon(fields: JsonFields) -> dict[str, Any]:
    """Return Falcon with rotary positions: both blocks read the same sum, or one norm of it."""
    if fields.boolean("alibi", default=False):
        raise fields.error("alibi", "must be false")
    is_new = fields.boolean("new_decoder_architecture", default=False)
    is_multi_query = fields.boolean("multi_query", default=True)
    heads = _heads(fields, kv_heads_key="num_kv_heads" if is_new else None)
    if not is_new and is_multi_query:
        heads["num_kv_heads"] = 1
    is_parallel = is_new or fields.boolean("parallel_attn", default=True)
    num_norms = fields.integer("num_ln_in_parallel_attn", default=2, high=2) if is_new else 1
    has_bias = fields.boolean("bias", default=False)
    names = [
        ("model.layers.", "transformer.h."),
        ("model.embed_tokens", "transformer.word_embeddings"),
        ("model.norm", "transformer.ln_f"),
        ("self_attn.qkv_proj", "self_attention.query_key_value"),
        ("self_attn.o_proj", "self_attention.dense"),
        ("mlp.up_proj", "mlp.dense_h_to_4h"),
        ("mlp.down_proj", "mlp.dense_4h_to_h"),
    ]
    if is_new and num_norms == 2:
        names += [("input_layernorm", "ln_attn"), ("post_attention_layernorm", "ln_mlp")]
    inner = fields.integer("ffn_hidden_size", default=4 * heads["hidden_size"])
    return {
        **_sizes(fields, heads, inner=inner),
        **_rotary(fields, heads["head_dim"]),
        **_same_window(None, heads["num_layers"]),
        "rms_norm_eps": fields.number("layer_norm_epsilon", default=1e-5),
        "activation": _activation(fields, "activation", "gelu"),
        "qkv_bias": has_bias,
        "attention_output_bias": has_bias,
        "mlp_bias": has_bias,
        "merged": frozenset({"grouped_qkv"}),
        "is_parallel": is_parallel,
        "layer_norms": _ONE_NORM if is_parallel and num_norms == 1 else _TWO_NORMS,
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=True),
        "stored_names": tuple(names),
    }


def _heads(
    fields: JsonFields,
    *,
    kv_heads_key: str | None = "num_key_value_heads",
    default_kv_heads: int | None = None,
) -> dict[str, int]:
    """Return the sizes of attention; without a key, each query head has a KV head of its own."""
    num_heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    if hidden % num_heads or hidden // num_heads % 2:
        raise fields.error("hidden_size", f"must be {num_heads} times an even number, got {hidden}")
    num_kv_heads = num_heads
    if kv_heads_key is not None:
        default = num_heads if default_kv_heads is None else default_kv_heads
        num_kv_heads = fields.integer(kv_heads_key, default=default)
        if num_heads % num_kv_heads:
            raise fields.error(
                kv_heads_key, f"must divide num_attention_heads {num_heads}, got {num_kv_heads}"
            )
    return {
        "hidden_size": hidden,
        "num_layers": fields.integer("num_hidden_layers", high=MAX_LAYERS),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": hidden // num_heads,
    }


def _sizes(
    fields: JsonFields,
    heads: dict[str, int],
    *,
    inner_key: str = "intermediate_size",
    inner: int | None = None,
) -> dict[str, Any]:
    return {
        **heads,
        "vocab_size": fields.integer("vocab_size"),
        "intermediate_size": fields.integer(inner_key) if inner is None else inner,
        "max_position_embeddings": fields.integer("max_position_embeddings", default=2048),
        "has_layer_norm": True,
        "qk_norm": False,
    }


def _rotary(
    fields: JsonFields, head_dim: int, *, share: float = 1.0, theta: float = DEFAULT_THETA
) -> dict[str, Any]:
    rotary_dim = parse_rotary_dim(fields, head_dim, share=share)
    length = fields.integer("max_position_embeddings", default=2048)
    rope = parse_rope(
        fields, max_position_embeddings=length, rotary_dim=rotary_dim, default_theta=theta
    )
    return {"rope": rope, "rotary_share": rotary_dim}


def _same_window(window: int | None, num_layers: int) -> dict[str, Any]:
    return {"sliding_windows": (window,) * num_layers}


def _activation(fields: JsonFields, key: str, default: str) -> Activation:
    name = fields.string(key, default=default)
    if name not in _ACTIVATIONS:
        raise fields.error(key, f"must be one of {', '.join(_ACTIVATIONS)}, got {name!r}")
    return _ACTIVATIONS[name]
