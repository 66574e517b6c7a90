"""Families with Mamba-2 layers, as their `config.json` describes them. Torch-free."""

from __future__ import annotations

import math
from typing import Any

from lightserve.models.json_fields import JsonFields
from lightserve.models.moe_config import (
    MAX_EXPERTS,
    MoeConfig,
    Scoring,
    Stacked,
    groups_of,
    num_chosen_of,
)
from lightserve.models.plain_config import ACTIVATIONS, MAX_LAYERS, NormWeights, decoder_fields
from lightserve.models.recurrent_config import MambaConfig, SideBySide
from lightserve.models.recurrent_families import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    MAX_CONVOLUTION,
    MAX_HEAD_DIM,
    recurrent_layers,
)

FEED_FORWARD, EXPERTS = "mlp", "moe"
PATTERN = {"M": LINEAR_ATTENTION, "*": FULL_ATTENTION, "-": FEED_FORWARD, "E": EXPERTS}
"""Kinds of layers by their letters in Nemotron-H's files."""
OLDER_KINDS = {"attention": FULL_ATTENTION, "mamba": LINEAR_ATTENTION}
"""Kinds of layers by the names of older files."""


# Granite 4.


def parse_granite_hybrid(fields: JsonFields) -> dict[str, Any]:
    """Return Granite 4, with Mamba-2 layers or without: a block each, or experts beside it."""
    defaults = {
        "num_key_value_heads": fields.integer("num_attention_heads"),
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    }
    own = decoder_fields(fields.with_defaults(defaults))
    num_layers = own["num_layers"]
    positions, known = "position_embedding_type", ("rope", "nope")
    kind = "nope" if fields.is_null(positions) else fields.string(positions, default="nope")
    if kind not in known:
        raise fields.error(positions, f"must be one of {', '.join(known)}, got {kind!r}")
    kinds = fields.array("layer_types") if fields.has("layer_types") else []
    is_plain = len(kinds) == num_layers and {*map(str, kinds)} <= {"attention", FULL_ATTENTION}
    recurrent = None
    if not is_plain:
        layers = recurrent_layers(fields, num_layers, older=OLDER_KINDS)
        inner = fields.integer("mamba_expand", default=2) * own["hidden_size"]
        recurrent = _mamba(fields, layers, inner)
    return own | {
        "intermediate_size": fields.integer("shared_intermediate_size", default=1024),
        "unrotated_layers": frozenset(range(num_layers) if kind == "nope" else ()),
        "merged": frozenset({"gate_up"}),
        "moe": _granite_experts(fields, num_layers),
        "stored_names": (
            ("block_sparse_moe.mlp", "mlp"),
            ("experts.gate_up_proj", "input_linear.weight"),
            ("experts.down_proj", "output_linear.weight"),
            ("mlp.gate_up_proj", "shared_mlp.input_linear"),
            ("mlp.down_proj", "shared_mlp.output_linear"),
        ),
        **granite_factors(fields),
        "recurrent": recurrent,
    }


def _granite_experts(fields: JsonFields, num_layers: int) -> MoeConfig | None:
    num_experts = fields.integer("num_local_experts", default=8, low=0, high=MAX_EXPERTS)
    if not num_experts:
        return None
    return MoeConfig(
        layers=frozenset(range(num_layers)),
        num_experts=num_experts,
        num_chosen=num_chosen_of(fields, num_experts, default=2),
        intermediate_size=fields.integer("intermediate_size", default=11008),
        size_key="intermediate_size",
        normalises=True,
        scoring=Scoring.CHOSEN,
        shared_size=fields.integer("shared_intermediate_size", default=1024),
        shared_module="mlp",
        module="block_sparse_moe",
        router="router.layer",
        stacked=Stacked.HALVES,
    )


def granite_factors(fields: JsonFields) -> dict[str, float]:
    """Return the factors of Granite's embeddings, sums, scores and logits."""
    return {
        "embedding_multiplier": fields.number("embedding_multiplier", default=1.0),
        "residual_multiplier": fields.number("residual_multiplier", default=1.0),
        "attention_scale": fields.number("attention_multiplier", default=1.0),
        "logits_divisor": fields.number("logits_scaling", default=1.0),
    }


def _mamba(fields: JsonFields, layers: frozenset[int], inner: int, **own: Any) -> MambaConfig:
    """Return layers of `inner` numbers; `own`: fields of `MambaConfig` that are a family's own."""
    num_heads = fields.integer("mamba_n_heads", default=128)
    num_groups = fields.integer("mamba_n_groups", default=1)
    if num_heads % num_groups:
        raise fields.error("mamba_n_groups", f"must divide mamba_n_heads {num_heads}")
    key, head_dim = "mamba_d_head", inner // num_heads
    if dict(fields.items()).get(key, "auto") != "auto":
        head_dim = fields.integer(key, high=MAX_HEAD_DIM)
    if head_dim * num_heads != inner:
        complaint = f"times mamba_n_heads {num_heads} must be {inner}, got {head_dim}"
        raise fields.error(key, complaint)
    _check_rates(fields)
    return MambaConfig(
        layers=layers,
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_size=fields.integer("mamba_d_state", default=256, high=MAX_HEAD_DIM),
        width=fields.integer("mamba_d_conv", default=4, low=2, high=MAX_CONVOLUTION),
        has_conv_bias=fields.boolean("mamba_conv_bias", default=True),
        has_bias=fields.boolean("mamba_proj_bias", default=False),
        **own,
    )


def _check_rates(fields: JsonFields) -> None:
    limits = dict(fields.items()).get("time_step_limit")
    if limits not in (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}]):
        raise fields.error("time_step_limit", f"must be [0, Infinity], got {limits!r}")


# Falcon-H1.


_FALCON: dict[str, Any] = {
    "vocab_size": 128_000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
"""Values that transformers takes where a file of Falcon-H1 is silent."""


def parse_falcon_h1(fields: JsonFields) -> dict[str, Any]:
    """Return Falcon-H1: every layer has attention and a Mamba-2 state side by side, and factors."""
    own = decoder_fields(fields.with_defaults(_FALCON))
    has_norm = fields.boolean("mamba_rms_norm", default=False)
    if has_norm and fields.boolean(key := "mamba_norm_before_gate", default=True):
        raise fields.error(key, "must be false with mamba_rms_norm")
    has_bias = fields.boolean("mamba_proj_bias", default=False)
    if fields.boolean(key := "projectors_bias", default=False) is not has_bias:
        raise fields.error(key, f"must be {has_bias}, as mamba_proj_bias")
    key = "mamba_d_ssm"
    inner = fields.integer("mamba_expand", default=2) * own["hidden_size"]
    if not fields.is_null(key):
        inner = fields.integer(key, default=1024)
    attention, states = (
        [fields.number(f"{name}_{end}_multiplier", default=1.0) for end in ("in", "out")]
        for name in ("attention", "ssm")
    )
    gate, block = _factors(fields, "mlp_multipliers", 2)
    beside = SideBySide(
        attention=(attention[0], attention[1]),
        states=(states[0], states[1]),
        parts=_factors(fields, "ssm_multipliers", 5),
        gate=gate,
        block=block,
    )
    layers = frozenset(range(own["num_layers"]))
    scale = fields.number("key_multiplier", default=1.0) * own["head_dim"] ** -0.5
    return own | {
        "intermediate_size": fields.integer("intermediate_size", default=14_336),
        "mlp_bias": fields.boolean("mlp_bias", default=False),
        "attention_scale": scale,
        "embedding_multiplier": fields.number("embedding_multiplier", default=1.0),
        "logits_divisor": 1.0 / fields.number("lm_head_multiplier", default=1.0),
        "recurrent": _mamba(fields, layers, inner, has_norm=has_norm, beside=beside),
        "stored_names": (
            ("mlp.", "feed_forward."),
            ("post_attention_layernorm", "pre_ff_layernorm"),
            ("model.norm", "model.final_layernorm"),
        ),
    }


def _factors(fields: JsonFields, key: str, count: int) -> tuple[float, ...]:
    """Return a list of positive numbers, ones where the file is silent."""
    found = fields.array(key) if fields.has(key) else [1.0] * count
    if len(found) != count or not all(
        type(factor) in (int, float) and 0 < factor < math.inf for factor in found
    ):
        raise fields.error(key, f"must hold {count} positive numbers, got {found!r}")
    return tuple(map(float, found))


# Nemotron-H.


def parse_nemotron_h(fields: JsonFields) -> dict[str, Any]:
    """Return Nemotron-H: each layer is one block: states, attention, a feed-forward or experts."""
    kinds, key = _nemotron_kinds(fields)
    layers = {
        kind: frozenset(i for i, own in enumerate(kinds) if own == kind)
        for kind in PATTERN.values()
    }
    blocks = layers[FEED_FORWARD] | layers[EXPERTS]
    needed = {kind: layers[kind] for kind in (FULL_ATTENTION, LINEAR_ATTENTION)}
    for kind, found in (needed | {f"{FEED_FORWARD} or {EXPERTS}": blocks}).items():
        if not found:
            raise fields.error(key, f"gives no layer of {kind}")
    keys = heads_key, groups_key = ("mamba_num_heads", "n_groups")
    mamba_heads = fields.integer(heads_key, default=128)
    num_groups = fields.integer(groups_key, default=8)
    if mamba_heads % num_groups:
        raise fields.error(groups_key, f"must divide {heads_key} {mamba_heads}, got {num_groups}")
    fields.only("mamba_hidden_act", "silu")
    _check_rates(fields)
    return _nemotron_decoder(fields, len(kinds)) | {
        "intermediate_size": fields.integer("intermediate_size", default=21504),
        "unrotated_layers": frozenset(range(len(kinds))),
        "mlp_bias": fields.boolean("mlp_bias", default=False),
        "activation": fields.choice("mlp_hidden_act", ACTIVATIONS, "relu2"),
        "norm_weights": NormWeights.WIDE,
        "layer_norms": ("input_layernorm",),
        "feed_forward_layers": blocks,
        "moe": _nemotron_experts(fields, layers[EXPERTS]),
        "stored_names": (
            ("input_layernorm", "norm"),
            ("model.norm", "model.norm_f"),
            ("embed_tokens", "embeddings"),
            *((name, "mixer.") for name in ("self_attn.", "mamba.", "mlp.")),
            ("model.", "backbone."),
        ),
        "recurrent": MambaConfig(
            layers=layers[LINEAR_ATTENTION],
            num_heads=mamba_heads,
            head_dim=fields.integer("mamba_head_dim", default=64, high=MAX_HEAD_DIM),
            num_groups=num_groups,
            state_size=fields.integer("ssm_state_size", default=128, high=MAX_HEAD_DIM),
            width=fields.integer("conv_kernel", default=4, low=2, high=MAX_CONVOLUTION),
            has_conv_bias=fields.boolean("use_conv_bias", default=True),
            has_bias=fields.boolean("use_bias", default=False),
            keys=keys,
        ),
    }


def _nemotron_decoder(fields: JsonFields, num_layers: int) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that all decoders have."""
    theirs = ("hidden_act", "attention_bias")  # which say nothing here
    stated = {key: value for key, value in fields.items() if key not in theirs}
    stated["num_hidden_layers"] = num_layers
    stated["rms_norm_eps"] = fields.number("layer_norm_epsilon", default=1e-5)
    defaults = {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
    }
    return decoder_fields(JsonFields(fields.path, stated, defaults=defaults))


def _nemotron_kinds(fields: JsonFields) -> tuple[list[object], str]:
    """Return the kind of each layer, and the key that says so."""
    key = "hybrid_override_pattern"
    if fields.has(key):
        kinds: list[object] = [PATTERN.get(letter, letter) for letter in fields.string(key)]
    else:
        key = "layers_block_type" if fields.has("layers_block_type") else "layer_types"
        found = fields.array(key)
        kinds = [OLDER_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in found]
    if len(kinds) > MAX_LAYERS:
        raise fields.error(key, f"must have at most {MAX_LAYERS} entries, got {len(kinds)}")
    for kind in kinds:
        if kind not in PATTERN.values():
            known = ", ".join(PATTERN.values())
            raise fields.error(key, f"has the entry {kind!r}; {known} are supported")
    return kinds, key


def _nemotron_experts(fields: JsonFields, layers: frozenset[int]) -> MoeConfig | None:
    """Return experts without gates, chosen as DeepSeek-V3's are, perhaps of fewer inputs."""
    if not layers:
        return None
    key = "n_routed_experts" if fields.has("n_routed_experts") else "num_local_experts"
    num_experts = fields.integer(key, default=8, high=MAX_EXPERTS)
    num_groups, num_chosen_groups = groups_of(fields, num_experts, best=2, defaults=(1, 1))
    fields.only("n_shared_experts", 1)
    latent = "moe_latent_size"
    return MoeConfig(
        layers=layers,
        num_experts=num_experts,
        num_chosen=num_chosen_of(
            fields, num_experts, default=2, groups=(num_groups, num_chosen_groups)
        ),
        intermediate_size=fields.integer("moe_intermediate_size", default=7688),
        normalises=fields.boolean("norm_topk_prob", default=True),
        scoring=Scoring.SIGMOID,
        has_choice_bias=True,
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        scale=fields.number("routed_scaling_factor", default=1.0),
        shared_size=fields.integer("moe_shared_expert_intermediate_size", default=7688),
        shared_module="shared_experts",
        latent_size=fields.integer(latent) if fields.has(latent) else None,
        projections=("up_proj", "down_proj"),
    )
