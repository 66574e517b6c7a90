"""Families with LayerNorm and feed-forward blocks without a gate, as fields of `ModelConfig`.

GPT-NeoX, Phi-1 and 2, StarCoder 1 and 2, OPT, Falcon, BLOOM, MPT. Torch-free.
"""

from __future__ import annotations

import struct
from enum import Enum, auto
from typing import Any

from lightserve.models.json_fields import JsonFields
from lightserve.models.rope import DEFAULT_THETA, DefaultRope, parse_rope, parse_rotary_dim
from lightserve.types import Activation

MAX_LAYERS = 4096


class NormWeights(Enum):
    """Weights of RMS norms."""

    PLAIN = auto()
    """Weights of the model's type, which multiply numbers that are rounded to it."""
    WIDE = auto()
    """float32: nothing is rounded before the product."""
    ABOVE_ONE = auto()
    """float32, and one larger than in the files."""


_ACTIVATIONS = {
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
}
_ONE_NORM = ("input_layernorm",)
_TWO_NORMS = ("input_layernorm", "post_attention_layernorm")


def parse_gpt_neox(fields: JsonFields) -> dict[str, Any]:
    """Return GPT-NeoX, such as Pythia: both blocks read the same sum, each normed."""
    heads = _heads(fields, kv_heads_key=None)
    share = fields.number("rotary_pct", default=0.25)
    theta = fields.number("rotary_emb_base", default=DEFAULT_THETA, above=1.0)
    has_bias = fields.boolean("attention_bias", default=True)
    return {
        **_sizes(fields, heads, is_tied=False),
        **_rotary(fields, heads["head_dim"], share=share, theta=theta),
        "rms_norm_eps": fields.number("layer_norm_eps", default=1e-5),
        "activation": parse_activation(fields, "hidden_act", "gelu"),
        "qkv_bias": has_bias,
        "attention_output_bias": has_bias,
        "mlp_bias": True,
        "merged": frozenset({"grouped_qkv"}),
        "is_parallel": fields.boolean("use_parallel_residual", default=True),
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
        **_sizes(fields, heads, is_tied=False),
        **_rotary(fields, heads["head_dim"], share=0.5),
        "rms_norm_eps": fields.number("layer_norm_eps", default=1e-5),
        "activation": parse_activation(fields, "hidden_act", "gelu_new"),
        **_biases(True),
        "lm_head_bias": True,
        "is_parallel": True,
        "layer_norms": _ONE_NORM,
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
        "sliding_windows": (window,) * heads["num_layers"],
        "rms_norm_eps": fields.number("norm_epsilon", default=1e-5),
        "activation": parse_activation(fields, "hidden_act", "gelu_pytorch_tanh"),
        **_biases(has_bias),
        "stored_names": (("mlp.up_proj", "mlp.c_fc"), ("mlp.down_proj", "mlp.c_proj")),
    }


def parse_opt(fields: JsonFields) -> dict[str, Any]:
    """Return OPT: learned positions, the first of them third in their table; no rotation.

    Its size of 350 M has norms behind the sums, and embeddings of half the size.
    """
    if not fields.boolean("layer_norm_elementwise_affine", default=True):
        raise fields.error("layer_norm_elementwise_affine", "must be true")
    if fields.boolean("_remove_final_layer_norm", default=False):
        raise fields.error("_remove_final_layer_norm", "must be false")
    heads = _heads(fields, kv_heads_key=None)
    has_bias = fields.boolean("enable_bias", default=True)
    num_layers = heads["num_layers"]
    is_post_norm = not fields.boolean("do_layer_norm_before", default=True)
    last_norm = f"model.layers.{num_layers - 1}." if is_post_norm else "model."
    return {
        **_sizes(fields, heads, inner_key="ffn_dim"),
        **_unrotated(num_layers),
        "position_offset": 2,
        "is_post_norm": is_post_norm,
        "word_size": fields.integer("word_embed_proj_dim", default=heads["hidden_size"]),
        "rms_norm_eps": 1e-5,
        "activation": parse_activation(fields, "activation_function", "relu"),
        **_biases(has_bias),
        "stored_names": (
            ("post_attention_layernorm", "final_layer_norm"),
            ("input_layernorm", "self_attn_layer_norm"),
            ("model.norm", f"{last_norm}final_layer_norm"),
            ("model.", "model.decoder."),
            ("self_attn.o_proj", "self_attn.out_proj"),
            ("mlp.up_proj", "fc1"),
            ("mlp.down_proj", "fc2"),
        ),
    }


def parse_falcon(fields: JsonFields) -> dict[str, Any]:
    """Return Falcon: both blocks read one sum, or one norm of it; rotary positions or ALiBi."""
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
    positions = _rotary(fields, heads["head_dim"])
    if fields.boolean("alibi", default=False):
        # Scores are scaled behind the slopes, which were rounded in training.
        slopes = (as_bfloat16(slope) for slope in slopes_of(heads["num_heads"]))
        positions = _unrotated(heads["num_layers"])
        positions["alibi_slopes"] = tuple(slope * heads["head_dim"] ** -0.5 for slope in slopes)
    return {
        **_sizes(fields, heads, inner=inner),
        **positions,
        "rms_norm_eps": fields.number("layer_norm_epsilon", default=1e-5),
        "activation": parse_activation(fields, "activation", "gelu"),
        **_biases(has_bias),
        "merged": frozenset({"grouped_qkv"}),
        "is_parallel": is_parallel,
        "layer_norms": _ONE_NORM if is_parallel and num_norms == 1 else _TWO_NORMS,
        "stored_names": tuple(names),
    }


def parse_bloom(fields: JsonFields) -> dict[str, Any]:
    """Return BLOOM: ALiBi, and a norm of the embeddings."""
    if fields.boolean("apply_residual_connection_post_layernorm", default=False):
        raise fields.error("apply_residual_connection_post_layernorm", "must be false")
    heads_key = "n_head" if fields.has("n_head") else "num_attention_heads"
    hidden_key = "n_embed" if fields.has("n_embed") else "hidden_size"
    layers_key = "n_layer" if fields.has("n_layer") else "num_hidden_layers"
    heads = _heads(fields, kv_heads_key=None, keys=(heads_key, hidden_key, layers_key))
    return {
        **_sizes(fields, heads, inner=4 * heads["hidden_size"], length_key="seq_length"),
        **_unrotated(heads["num_layers"]),
        "alibi_slopes": slopes_of(heads["num_heads"]),
        "has_embedding_norm": True,
        "rms_norm_eps": fields.number("layer_norm_epsilon", default=1e-5),
        "activation": Activation.GELU_TANH,
        **_biases(True),
        "merged": frozenset({"grouped_qkv"}),
        "stored_names": (
            ("model.layers.", "transformer.h."),
            ("model.embed_tokens", "transformer.word_embeddings"),
            ("model.embed_norm", "transformer.word_embeddings_layernorm"),
            ("model.norm", "transformer.ln_f"),
            ("self_attn.qkv_proj", "self_attention.query_key_value"),
            ("self_attn.o_proj", "self_attention.dense"),
            ("mlp.up_proj", "mlp.dense_h_to_4h"),
            ("mlp.down_proj", "mlp.dense_4h_to_h"),
        ),
    }


def parse_mpt(fields: JsonFields) -> dict[str, Any]:
    """Return MPT: ALiBi with slopes of its own, and no bias anywhere."""
    heads = _heads(fields, kv_heads_key=None, keys=("n_heads", "d_model", "n_layers"))
    inner = fields.integer("expansion_ratio", default=4) * heads["hidden_size"]
    max_bias, scale = 8.0, None
    if fields.has("attn_config"):
        attention = fields.child("attn_config")
        if not attention.boolean("alibi", default=True):
            raise attention.error("alibi", "must be true")
        for key in ("qk_ln", "prefix_lm"):
            if attention.boolean(key, default=False):
                raise attention.error(key, "must be false")
        if attention.has("clip_qkv"):
            raise attention.error("clip_qkv", "must be null")
        max_bias = attention.number("alibi_bias_max", default=max_bias)
        scale = attention.optional_number("softmax_scale")
    if fields.has("logit_scale"):
        raise fields.error("logit_scale", "must be null")
    if not fields.boolean("no_bias", default=True):
        raise fields.error("no_bias", "must be true")
    return {
        **_sizes(fields, heads, inner=inner, length_key="max_seq_len"),
        **_unrotated(heads["num_layers"]),
        "alibi_slopes": mpt_slopes(heads["num_heads"], max_bias),
        "attention_scale": scale,
        "layer_norm_bias": False,
        "rms_norm_eps": fields.number("layer_norm_epsilon", default=1e-5),
        "activation": Activation.GELU,
        **_biases(False),
        "merged": frozenset({"qkv"}),
        "stored_names": (
            ("model.layers.", "transformer.blocks."),
            ("model.embed_tokens", "transformer.wte"),
            ("model.norm", "transformer.norm_f"),
            ("self_attn.qkv_proj", "attn.Wqkv"),
            ("self_attn.o_proj", "attn.out_proj"),
            ("mlp.", "ffn."),
            ("input_layernorm", "norm_1"),
            ("post_attention_layernorm", "norm_2"),
        ),
    }


def parse_gpt_bigcode(fields: JsonFields) -> dict[str, Any]:
    """Return GPT-BigCode, such as StarCoder 1: learned positions, one KV head for all."""
    for key in ("scale_attn_weights", "multi_query"):
        if not fields.boolean(key, default=True):
            raise fields.error(key, "must be true")
    if fields.boolean("add_cross_attention", default=False):
        raise fields.error("add_cross_attention", "must be false")
    heads = _heads(fields, kv_heads_key=None, keys=("n_head", "n_embd", "n_layer"))
    heads["num_kv_heads"] = 1
    inner = fields.integer("n_inner", default=4 * heads["hidden_size"])
    return {
        **_sizes(fields, heads, inner=inner, length_key="n_positions"),
        **_unrotated(heads["num_layers"]),
        "position_offset": 0,
        "rms_norm_eps": fields.number("layer_norm_epsilon", default=1e-5),
        "activation": parse_activation(fields, "activation_function", "gelu_pytorch_tanh"),
        **_biases(True),
        "merged": frozenset({"qkv"}),
        "stored_names": (
            ("model.layers.", "transformer.h."),
            ("model.embed_tokens", "transformer.wte"),
            ("model.embed_positions", "transformer.wpe"),
            ("model.norm", "transformer.ln_f"),
            ("self_attn.qkv_proj", "attn.c_attn"),
            ("self_attn.o_proj", "attn.c_proj"),
            ("mlp.up_proj", "mlp.c_fc"),
            ("mlp.down_proj", "mlp.c_proj"),
            ("input_layernorm", "ln_1"),
            ("post_attention_layernorm", "ln_2"),
        ),
    }


def _heads(
    fields: JsonFields,
    *,
    kv_heads_key: str | None = "num_key_value_heads",
    default_kv_heads: int | None = None,
    keys: tuple[str, str, str] = ("num_attention_heads", "hidden_size", "num_hidden_layers"),
) -> dict[str, int]:
    """Return the sizes of attention; without a key, each query head has a KV head of its own."""
    heads_key, hidden_key, layers_key = keys
    num_heads, hidden = fields.integer(heads_key), fields.integer(hidden_key)
    if hidden % num_heads or hidden // num_heads % 2:
        raise fields.error(hidden_key, f"must be {num_heads} times an even number, got {hidden}")
    num_kv_heads = num_heads
    if kv_heads_key is not None:
        default = num_heads if default_kv_heads is None else default_kv_heads
        num_kv_heads = fields.integer(kv_heads_key, default=default)
        if num_heads % num_kv_heads:
            raise fields.error(
                kv_heads_key, f"must divide {heads_key} {num_heads}, got {num_kv_heads}"
            )
    return {
        "hidden_size": hidden,
        "num_layers": fields.integer(layers_key, high=MAX_LAYERS),
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
    length_key: str = "max_position_embeddings",
    is_tied: bool = True,
) -> dict[str, Any]:
    return {
        **heads,
        "vocab_size": fields.integer("vocab_size"),
        "intermediate_size": fields.integer(inner_key) if inner is None else inner,
        "max_position_embeddings": fields.integer(length_key, default=2048),
        "sliding_windows": (None,) * heads["num_layers"],
        "layer_norm_bias": True,
        "qk_norm": False,
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=is_tied),
    }


def _biases(has_bias: bool) -> dict[str, bool]:
    return dict.fromkeys(("qkv_bias", "attention_output_bias", "mlp_bias"), has_bias)


def _rotary(
    fields: JsonFields, head_dim: int, *, share: float = 1.0, theta: float = DEFAULT_THETA
) -> dict[str, Any]:
    rotary_dim = parse_rotary_dim(fields, head_dim, share=share)
    length = fields.integer("max_position_embeddings", default=2048)
    rope = parse_rope(
        fields, max_position_embeddings=length, rotary_dim=rotary_dim, default_theta=theta
    )
    return {"rope": rope, "rotary_share": rotary_dim}


def _unrotated(num_layers: int) -> dict[str, Any]:
    rope = DefaultRope(theta=DEFAULT_THETA)
    return {"rope": rope, "unrotated_layers": frozenset(range(num_layers))}


def parse_activation(fields: JsonFields, key: str, default: str) -> Activation:
    """Return the activation that a key names."""
    name = fields.string(key, default=default)
    if name not in _ACTIVATIONS:
        raise fields.error(key, f"must be one of {', '.join(_ACTIVATIONS)}, got {name!r}")
    return _ACTIVATIONS[name]


# ALiBi: how much less a head's scores are with each position between query and key.
#
# Source: Press et al. 2022, "Train Short, Test Long", section 3; heads whose number is no power of
# two as in its authors' code.


def slopes_of(num_heads: int) -> tuple[float, ...]:
    """Return each head's slope: the slopes of a power of two, then every other one of twice as
    many."""
    power = 1 << (num_heads.bit_length() - 1)
    return (_of_power(power) + _of_power(2 * power)[::2])[:num_heads]


def _of_power(num_heads: int) -> tuple[float, ...]:
    """Return 2 ** (-8 / n), its square, and so on."""
    return tuple(2.0 ** (-8.0 * head / num_heads) for head in range(1, num_heads + 1))


def mpt_slopes(num_heads: int, max_bias: float) -> tuple[float, ...]:
    """Return MPT's: of the next power of two, the steep half first."""
    power = 1 << (num_heads - 1).bit_length()
    slopes = tuple(2.0 ** (-max_bias * head / power) for head in range(1, power + 1))
    return slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]


def as_bfloat16(number: float) -> float:
    """Return the nearest number of type bfloat16, ties to even."""
    bits = int.from_bytes(struct.pack(">f", number), "big")
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(struct.unpack(">f", bits.to_bytes(4, "big"))[0])
