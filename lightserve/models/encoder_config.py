"""Encoders of the BERT class, as fields of `ModelConfig`. Torch-free.

BERT, RoBERTa and XLM-RoBERTa (bge, e5, gte), Nomic Embed. Norms stand behind the sums, and each
token sees all others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lightserve.models.architectures import CROSS_ENCODERS
from lightserve.models.json_fields import JsonFields
from lightserve.models.plain_config import biases, named_sizes, unrotated
from lightserve.models.rope import DefaultRope
from lightserve.types import Activation

_ACTIVATIONS = {
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}
_NORMS = ("attention_norm", "mlp_norm")
"""Each behind its block."""


class Encoder(NamedTuple):
    """Fields of an encoder that decoders do not have."""

    num_token_types: int
    """Rows of the table whose first the tokens of a text have."""
    tells_pairs: bool = False
    """Whether the tokens of a pair's second text have the second row: their ids in a prompt are
    those of the vocabulary plus its size."""
    has_score_head: bool = False
    """Whether a head makes a number of the first token's state: the score of a pair."""


def parse_bert(fields: JsonFields) -> dict[str, Any]:
    """Return BERT: learned positions from 0 on, and types that tell the texts of a pair apart."""
    head = (("score.dense", "bert.pooler.dense"), ("score.out", "classifier"))
    return _bert(fields, position_offset=0, tells_pairs=True, prefix="bert.", head=head)


def parse_roberta(fields: JsonFields) -> dict[str, Any]:
    """Return RoBERTa: positions are counted from behind the number of the padding token."""
    offset = fields.integer("pad_token_id", default=1, low=0) + 1
    head = (("score.dense", "classifier.dense"), ("score.out", "classifier.out_proj"))
    return _bert(fields, position_offset=offset, tells_pairs=False, prefix="roberta.", head=head)


def _bert(
    fields: JsonFields,
    *,
    position_offset: int,
    tells_pairs: bool,
    prefix: str,
    head: tuple[tuple[str, str], ...],
) -> dict[str, Any]:
    """Return BERT's fields; `prefix` and `head` are names of tensors in files with a score head."""
    has_head = fields.array("architectures")[0] in CROSS_ENCODERS
    if has_head:
        labels = fields.child("id2label").items() if fields.has("id2label") else [()] * 2
        if len(labels) != 1:
            raise fields.error("id2label", f"must have one label, the score, got {len(labels)}")
    else:
        prefix, head = "", ()
    for key in ("is_decoder", "add_cross_attention"):
        fields.only(key, False)
    fields.only("position_embedding_type", "absolute")
    num_types = fields.integer("type_vocab_size", default=2)
    sizes = _sizes(fields, 512, {"rms_norm_eps": "layer_norm_eps"})
    if (num_positions := sizes["max_position_embeddings"]) <= position_offset:
        raise fields.error("max_position_embeddings", f"must be above {position_offset}")
    return {
        **sizes,
        "encoder": Encoder(num_types, tells_pairs and num_types > 1, has_head),
        "intermediate_size": fields.integer("intermediate_size"),
        "max_position_embeddings": num_positions - position_offset,
        "position_offset": position_offset,
        **unrotated(sizes["num_layers"]),
        "activation": fields.choice("hidden_act", _ACTIVATIONS, "gelu"),
        **biases(True),
        "stored_names": (
            *head,
            ("model.embed_tokens", f"{prefix}embeddings.word_embeddings"),
            ("model.embed_positions", f"{prefix}embeddings.position_embeddings"),
            ("model.embed_types", f"{prefix}embeddings.token_type_embeddings"),
            ("model.norm", f"{prefix}embeddings.LayerNorm"),
            ("model.layers.", f"{prefix}encoder.layer."),
            ("self_attn.q_proj", "attention.self.query"),
            ("self_attn.k_proj", "attention.self.key"),
            ("self_attn.v_proj", "attention.self.value"),
            ("self_attn.o_proj", "attention.output.dense"),
            ("attention_norm", "attention.output.LayerNorm"),
            ("mlp_norm", "output.LayerNorm"),
            ("mlp.up_proj", "intermediate.dense"),
            ("mlp.down_proj", "output.dense"),
        ),
    }


_NOMIC_KEYS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
    "rms_norm_eps": "layer_norm_epsilon",
}
"""Keys of the model's own files, by transformers' names."""


def parse_nomic_bert(fields: JsonFields) -> dict[str, Any]:
    """Return Nomic Embed: rotary positions, gated blocks, no biases but those of norms."""
    own = fields.has("n_embd")
    for key in ("prenorm", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "use_rms_norm"):
        fields.only(key, False)
    for key in ("rotary_scaling_factor", "rotary_emb_scale_base"):
        fields.only(key, None)
    fields.only("rotary_emb_fraction", 1)
    fields.only("activation_function" if own else "hidden_act", "silu", "swiglu")
    sizes = _sizes(fields, 2048, _NOMIC_KEYS if own else {"rms_norm_eps": "layer_norm_eps"})
    inner_key, inner = "n_inner" if own else "intermediate_size", 4 * sizes["hidden_size"]
    theta = fields.number("rotary_emb_base", default=1000.0, above=1.0)
    if fields.has("rope_parameters"):
        rope = fields.child("rope_parameters")
        rope.only("rope_type", "default")
        theta = rope.number("rope_theta", default=theta, above=1.0)
    return {
        **sizes,
        "intermediate_size": fields.integer(inner_key, default=inner),
        "rope": DefaultRope(theta=theta),
        "merged": frozenset({"qkv"}),
        "stored_names": (
            ("model.embed_tokens", "embeddings.word_embeddings"),
            ("model.embed_types", "embeddings.token_type_embeddings"),
            ("model.norm", "emb_ln"),
            ("model.layers.", "encoder.layers."),
            ("self_attn.qkv_proj", "attn.Wqkv"),
            ("self_attn.o_proj", "attn.out_proj"),
            ("attention_norm", "norm1"),
            ("mlp_norm", "norm2"),
            ("mlp.gate_proj", "mlp.fc12"),
            ("mlp.up_proj", "mlp.fc11"),
            ("mlp.down_proj", "mlp.fc2"),
        ),
    }


def _sizes(fields: JsonFields, num_positions: int, names: dict[str, str]) -> dict[str, Any]:
    """Return sizes and the fields that all share; `names`: see `named_sizes`."""
    defaults = {"max_position_embeddings": num_positions, "rms_norm_eps": 1e-12}
    return named_sizes(fields, names, defaults) | {
        "encoder": Encoder(fields.integer("type_vocab_size", default=2)),
        "layer_norm_bias": True,
        "layer_norms": _NORMS,
        "tie_word_embeddings": True,
    }
