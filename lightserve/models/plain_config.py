"""Sizes that all decoders have, and families with LayerNorm and feed-forward blocks without a gate,
as fields of `ModelConfig`.

GPT-NeoX, Phi-1 and 2, StarCoder 1 and 2, OPT, Falcon, BLOOM, MPT. Torch-free.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType
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


ACTIVATIONS = {
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
    sizes = _plain(fields, {"rms_norm_eps": "layer_norm_eps"}, is_tied=False)
    share = fields.number("rotary_pct", default=0.25)
    theta = fields.number("rotary_emb_base", default=DEFAULT_THETA, above=1.0)
    has_bias = fields.boolean("attention_bias", default=True)
    return {
        **sizes,
        **rotary_fields(fields, sizes, share=share, theta=theta),
        "intermediate_size": fields.integer("intermediate_size"),
        "activation": fields.choice("hidden_act", ACTIVATIONS, "gelu"),
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
    fields.only("qk_layernorm", False)
    sizes = _plain(fields, GROUPS | {"rms_norm_eps": "layer_norm_eps"}, is_tied=False)
    return {
        **sizes,
        **rotary_fields(fields, sizes, share=0.5),
        "intermediate_size": fields.integer("intermediate_size"),
        "activation": fields.choice("hidden_act", ACTIVATIONS, "gelu_new"),
        **biases(True),
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
    sizes = _plain(fields, {"rms_norm_eps": "norm_epsilon"})
    has_bias = fields.boolean("use_bias", default=True)
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    return {
        **sizes,
        **rotary_fields(fields, sizes),
        "num_kv_heads": fields.num_kv_heads(sizes["num_heads"], default=2),
        "intermediate_size": fields.integer("intermediate_size"),
        "sliding_windows": (window,) * sizes["num_layers"],
        "activation": fields.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh"),
        **biases(has_bias),
        "stored_names": (("mlp.up_proj", "mlp.c_fc"), ("mlp.down_proj", "mlp.c_proj")),
    }


def parse_opt(fields: JsonFields) -> dict[str, Any]:
    """Return OPT: learned positions, the first of them third in their table; no rotation.

    Its size of 350 M has norms behind the sums, and embeddings of half the size.
    """
    fields.only("layer_norm_elementwise_affine", True)
    fields.only("_remove_final_layer_norm", False)
    sizes = _plain(fields)
    has_bias = fields.boolean("enable_bias", default=True)
    num_layers = sizes["num_layers"]
    is_post_norm = not fields.boolean("do_layer_norm_before", default=True)
    last_norm = f"model.layers.{num_layers - 1}." if is_post_norm else "model."
    return {
        **sizes,
        **unrotated(num_layers),
        "intermediate_size": fields.integer("ffn_dim"),
        "position_offset": 2,
        "is_post_norm": is_post_norm,
        "word_size": fields.integer("word_embed_proj_dim", default=sizes["hidden_size"]),
        "rms_norm_eps": 1e-5,
        "activation": fields.choice("activation_function", ACTIVATIONS, "relu"),
        **biases(has_bias),
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
    names = {"rms_norm_eps": "layer_norm_epsilon"}
    sizes = _plain(fields, names | ({"num_key_value_heads": "num_kv_heads"} if is_new else {}))
    if not is_new:
        sizes["num_kv_heads"] = 1 if is_multi_query else sizes["num_heads"]
    is_parallel = is_new or fields.boolean("parallel_attn", default=True)
    num_norms = fields.integer("num_ln_in_parallel_attn", default=2, high=2) if is_new else 1
    has_bias = fields.boolean("bias", default=False)
    stored = [
        ("model.layers.", "transformer.h."),
        ("model.embed_tokens", "transformer.word_embeddings"),
        ("model.norm", "transformer.ln_f"),
        ("self_attn.qkv_proj", "self_attention.query_key_value"),
        ("self_attn.o_proj", "self_attention.dense"),
        ("mlp.up_proj", "mlp.dense_h_to_4h"),
        ("mlp.down_proj", "mlp.dense_4h_to_h"),
    ]
    if is_new and num_norms == 2:
        stored += [("input_layernorm", "ln_attn"), ("post_attention_layernorm", "ln_mlp")]
    positions = rotary_fields(fields, sizes)
    if fields.boolean("alibi", default=False):
        # Scores are scaled behind the slopes, which were rounded in training.
        slopes = (as_bfloat16(slope) for slope in slopes_of(sizes["num_heads"]))
        positions = unrotated(sizes["num_layers"])
        positions["alibi_slopes"] = tuple(slope * sizes["head_dim"] ** -0.5 for slope in slopes)
    return {
        **sizes,
        **positions,
        "intermediate_size": fields.integer("ffn_hidden_size", default=4 * sizes["hidden_size"]),
        "activation": fields.choice("activation", ACTIVATIONS, "gelu"),
        **biases(has_bias),
        "merged": frozenset({"grouped_qkv"}),
        "is_parallel": is_parallel,
        "layer_norms": _ONE_NORM if is_parallel and num_norms == 1 else _TWO_NORMS,
        "stored_names": tuple(stored),
    }


def parse_bloom(fields: JsonFields) -> dict[str, Any]:
    """Return BLOOM: ALiBi, and a norm of the embeddings."""
    fields.only("apply_residual_connection_post_layernorm", False)
    names = {
        "num_attention_heads": "n_head",
        "hidden_size": "n_embed",
        "num_hidden_layers": "n_layer",
    }
    names = {key: name for key, name in names.items() if fields.has(name)}
    names |= {"rms_norm_eps": "layer_norm_epsilon", "max_position_embeddings": "seq_length"}
    sizes = _plain(fields, names)
    return {
        **sizes,
        **unrotated(sizes["num_layers"]),
        "intermediate_size": 4 * sizes["hidden_size"],
        "alibi_slopes": slopes_of(sizes["num_heads"]),
        "has_embedding_norm": True,
        "activation": Activation.GELU_TANH,
        **biases(True),
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
    sizes = _plain(fields, _short("n_heads", "d_model", "n_layers", "max_seq_len"))
    max_bias, scale = 8.0, None
    if fields.has("attn_config"):
        attention = fields.child("attn_config")
        for key, only in (
            ("alibi", True),
            ("qk_ln", False),
            ("prefix_lm", False),
            ("clip_qkv", None),
        ):
            attention.only(key, only)
        max_bias = attention.number("alibi_bias_max", default=max_bias)
        scale = attention.optional_number("softmax_scale")
    fields.only("logit_scale", None)
    fields.only("no_bias", True)
    return {
        **sizes,
        **unrotated(sizes["num_layers"]),
        "intermediate_size": fields.integer("expansion_ratio", default=4) * sizes["hidden_size"],
        "alibi_slopes": mpt_slopes(sizes["num_heads"], max_bias),
        "attention_scale": scale,
        "layer_norm_bias": False,
        "activation": Activation.GELU,
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
        fields.only(key, True)
    fields.only("add_cross_attention", False)
    sizes = _plain(fields, _short("n_head", "n_embd", "n_layer", "n_positions"))
    return {
        **sizes,
        **unrotated(sizes["num_layers"]),
        "num_kv_heads": 1,
        "intermediate_size": fields.integer("n_inner", default=4 * sizes["hidden_size"]),
        "position_offset": 0,
        "activation": fields.choice("activation_function", ACTIVATIONS, "gelu_pytorch_tanh"),
        **biases(True),
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


def sizes_of(
    fields: JsonFields, *, head_dim: int | None = None, num_kv_heads: int | None = None
) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that are sizes of any decoder, but for those of blocks.

    `head_dim` and `num_kv_heads` are read where they are not given.
    """
    num_layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    num_heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    if head_dim is None and (fields.default("head_dim") or fields.has("head_dim")):
        head_dim = fields.even("head_dim")
    elif head_dim is None and (hidden % num_heads or hidden // num_heads % 2):
        raise fields.error("hidden_size", f"must be {num_heads} times an even number, got {hidden}")
    is_tied = bool(fields.default("tie_word_embeddings"))
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads or fields.num_kv_heads(num_heads),
        "head_dim": head_dim or hidden // num_heads,
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=is_tied),
        "sliding_windows": (None,) * num_layers,
    }


def decoder_fields(
    fields: JsonFields, *, share: float = 1.0, theta: float = DEFAULT_THETA
) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that all decoders with gates of SiLU have.

    `share` of a head that is rotated, and base, where the file gives none.
    """
    fields.only("hidden_act", "silu")
    sizes = sizes_of(fields)
    has_bias = fields.boolean("attention_bias", default=bool(fields.default("attention_bias")))
    rotary = rotary_fields(fields, sizes, share=share, theta=theta)
    return {**sizes, **rotary, "qkv_bias": has_bias, "attention_output_bias": has_bias}


def rotary_fields(
    fields: JsonFields,
    sizes: dict[str, Any],
    *,
    share: float = 1.0,
    theta: float = DEFAULT_THETA,
    is_phi: bool = False,
) -> dict[str, Any]:
    """Return a decoder's rotary embedding as fields of `ModelConfig`; see `decoder_fields`.

    `is_phi`: see `parse_rope`.
    """
    rotary_dim = parse_rotary_dim(fields, sizes["head_dim"], share=share)
    length = sizes["max_position_embeddings"]
    rope = parse_rope(
        fields,
        max_position_embeddings=length,
        rotary_dim=rotary_dim,
        default_theta=theta,
        is_phi=is_phi,
    )
    return {"rope": rope, "rotary_share": rotary_dim}


def unrotated(num_layers: int) -> dict[str, Any]:
    """Return fields of a model without rotary embeddings."""
    rope = DefaultRope(theta=DEFAULT_THETA)
    return {"rope": rope, "unrotated_layers": frozenset(range(num_layers))}


NOTHING: Mapping[str, Any] = MappingProxyType({})
GROUPS = {"num_key_value_heads": "num_key_value_heads"}
"""For `named_sizes`: the usual key of the number of KV heads."""


def named_sizes(
    fields: JsonFields, names: Mapping[str, str], defaults: Mapping[str, Any] = NOTHING
) -> dict[str, Any]:
    """Return `sizes_of` a file that has other `names` of keys.

    Each query head has a KV head of its own, unless `names` has a key for their number and the file
    says it.
    """
    num_heads = fields.with_defaults({}, names).integer("num_attention_heads")
    own = fields.with_defaults({"num_key_value_heads": num_heads, **defaults}, names)
    return sizes_of(own, num_kv_heads=None if "num_key_value_heads" in names else num_heads)


def _plain(
    fields: JsonFields, names: Mapping[str, str] = NOTHING, *, is_tied: bool = True
) -> dict[str, Any]:
    """Return sizes of a family here; `names`: see `named_sizes`."""
    defaults = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    defaults |= {"tie_word_embeddings": is_tied}
    return {**named_sizes(fields, names, defaults), "layer_norm_bias": True}


def _short(heads: str, hidden: str, layers: str, positions: str) -> dict[str, str]:
    """Return names of keys for `named_sizes`."""
    return {
        "num_attention_heads": heads,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "max_position_embeddings": positions,
        "rms_norm_eps": "layer_norm_epsilon",
    }


def biases(has_bias: bool) -> dict[str, bool]:
    """Return whether all products of a layer have biases, as fields of `ModelConfig`."""
    return dict.fromkeys(("qkv_bias", "attention_output_bias", "mlp_bias"), has_bias)


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
