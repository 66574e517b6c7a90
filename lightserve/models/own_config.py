"""Families whose repositories bring their own code, as fields of `ModelConfig`. Torch-free.

Qwen 1, Baichuan 1 and 2, InternLM 1 and 2, ChatGLM 2 and 3 with GLM-4-9B in its first format. The
code (`auto_map`) is never looked at: keys have the meaning of the authors' published configuration
and model files. All are Llama but for names, merged products and positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightserve.models.json_fields import JsonFields
from lightserve.models.plain_config import GROUPS, named_sizes, rotary_fields, slopes_of, unrotated
from lightserve.models.rope import DEFAULT_THETA, DefaultRope

NORM_HEAD_VOCAB_SIZE = 125_696
"""Vocabulary of Baichuan 2; Baichuan 1 has 64,000 tokens and no normalised output layer."""


def parse_internlm(fields: JsonFields) -> dict[str, Any]:
    """Return InternLM 1: Llama with biases in attention."""
    theta = DEFAULT_THETA
    if fields.has("rotary"):
        rotary = fields.child("rotary")
        rotary.only("type", "origin")
        theta = rotary.number("base", default=theta, above=1.0)
    return {
        **_sizes(fields, {}),
        "rope": DefaultRope(theta=theta),
        "qkv_bias": (has_bias := fields.boolean("bias", default=True)),
        "attention_output_bias": has_bias,
    }


def parse_internlm2(fields: JsonFields) -> dict[str, Any]:
    """Return InternLM 2 and 2.5: queries, keys and values in one tensor, group by group."""
    sizes = _sizes(fields, GROUPS)
    return {
        **sizes,
        **rotary_fields(fields, sizes),
        "qkv_bias": (has_bias := fields.boolean("bias", default=False)),
        "attention_output_bias": has_bias,
        "merged": frozenset({"grouped_qkv"}),
        "stored_names": (
            ("model.embed_tokens", "model.tok_embeddings"),
            ("lm_head", "output"),
            ("self_attn.qkv_proj", "attention.wqkv"),
            ("self_attn.o_proj", "attention.wo"),
            ("mlp.gate_proj", "feed_forward.w1"),
            ("mlp.down_proj", "feed_forward.w2"),
            ("mlp.up_proj", "feed_forward.w3"),
            ("post_attention_layernorm", "ffn_norm"),
            ("input_layernorm", "attention_norm"),
        ),
    }


def parse_baichuan(fields: JsonFields) -> dict[str, Any]:
    """Return Baichuan 1 or 2: 7B with rotary positions, 13B, whose file names none, with ALiBi."""
    has_positions = fields.has("max_position_embeddings")
    names = {} if has_positions else {"max_position_embeddings": "model_max_length"}
    sizes = _sizes(fields, names)
    if has_positions:
        own = rotary_fields(fields, sizes)
    else:
        slopes = slopes_of(sizes["num_heads"])
        own = {**unrotated(sizes["num_layers"]), "alibi_slopes": slopes}
    is_second = fields.has("z_loss_weight") or sizes["vocab_size"] == NORM_HEAD_VOCAB_SIZE
    return {
        **sizes,
        **own,
        "merged": frozenset({"qkv"}),
        "has_normalised_head": is_second,
        "stored_names": (("self_attn.qkv_proj", "self_attn.W_pack"),),
    }


def parse_qwen1(fields: JsonFields) -> dict[str, Any]:
    """Return Qwen 1, up to the length it was trained with.

    Beyond it the authors' code scales queries (`use_logn_attn`) and changes the base of the rotary
    embedding (`use_dynamic_ntk`) by each sequence's length: cached keys would not fit.
    """
    sizes = _sizes(fields, {"rms_norm_eps": "layer_norm_epsilon"})
    trained = fields.integer("seq_length", default=sizes["max_position_embeddings"])
    sizes["max_position_embeddings"] = min(trained, sizes["max_position_embeddings"])
    if sizes["intermediate_size"] % 2:
        raise fields.error("intermediate_size", "must be even: gates and ups have half of it each")
    sizes["intermediate_size"] //= 2
    fields.only("rotary_pct", 1)
    fields.only("kv_channels", sizes["head_dim"])
    has_bias = not fields.boolean("no_bias", default=True)
    theta = fields.number("rotary_emb_base", default=DEFAULT_THETA, above=1.0)
    return {
        **sizes,
        "rope": DefaultRope(theta=theta),
        "qkv_bias": True,
        "attention_output_bias": has_bias,
        "mlp_bias": has_bias,
        "merged": frozenset({"qkv"}),
        "stored_names": (
            ("model.embed_tokens", "transformer.wte"),
            ("model.norm", "transformer.ln_f"),
            ("model.layers.", "transformer.h."),
            ("self_attn.qkv_proj", "attn.c_attn"),
            ("self_attn.o_proj", "attn.c_proj"),
            ("mlp.up_proj", "mlp.w1"),
            ("mlp.gate_proj", "mlp.w2"),
            ("mlp.down_proj", "mlp.c_proj"),
            ("input_layernorm", "ln_1"),
            ("post_attention_layernorm", "ln_2"),
        ),
    }


_CHATGLM_SWITCHES = {
    "rmsnorm": True,
    "post_layer_norm": True,
    "original_rope": True,
    "apply_residual_connection_post_layernorm": False,
}


_CHATGLM_NAMES = {
    "num_hidden_layers": "num_layers",
    "vocab_size": "padded_vocab_size",
    "max_position_embeddings": "seq_length",
    "rms_norm_eps": "layernorm_epsilon",
    "head_dim": "kv_channels",
}


def parse_chatglm(fields: JsonFields) -> dict[str, Any]:
    """Return ChatGLM 2 or 3, or GLM-4-9B in its first format.

    Half of each head is rotated, in neighbouring pairs.
    """
    for key, needed in _CHATGLM_SWITCHES.items():
        fields.only(key, needed)
    is_grouped = fields.boolean("multi_query_attention", default=False)
    names = _CHATGLM_NAMES | (
        {"num_key_value_heads": "multi_query_group_num"} if is_grouped else {}
    )
    sizes = _sizes(fields, names, "ffn_hidden_size")
    if sizes["head_dim"] % 4:
        raise fields.error("kv_channels", f"must be a multiple of 4, got {sizes['head_dim']}")
    has_bias = fields.boolean("add_bias_linear", default=False)
    ratio = fields.number("rope_ratio", default=1.0)
    return {
        **sizes,
        "rope": DefaultRope(theta=DEFAULT_THETA * ratio),
        "rotary_share": sizes["head_dim"] // 2,
        "rotates_neighbours": True,
        "qkv_bias": has_bias or fields.boolean("add_qkv_bias", default=False),
        "attention_output_bias": has_bias,
        "mlp_bias": has_bias,
        "merged": frozenset({"qkv", "gate_up"}),
        "stored_names": (
            ("model.embed_tokens", "transformer.embedding.word_embeddings"),
            ("model.norm", "transformer.encoder.final_layernorm"),
            ("lm_head", "transformer.output_layer"),
            ("model.layers.", "transformer.encoder.layers."),
            ("self_attn.qkv_proj", "self_attention.query_key_value"),
            ("self_attn.o_proj", "self_attention.dense"),
            ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
            ("mlp.down_proj", "mlp.dense_4h_to_h"),
        ),
    }


def _sizes(
    fields: JsonFields, names: Mapping[str, str], inner_key: str = "intermediate_size"
) -> dict[str, Any]:
    """Return sizes and the fields that all share; `names`: see `named_sizes`."""
    fields.only("hidden_act", "silu")
    sizes = named_sizes(fields, names)
    return {**sizes, "intermediate_size": fields.integer(inner_key)}
