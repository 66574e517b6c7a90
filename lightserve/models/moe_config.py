"""Models with a mixture of experts, as `config.json` describes them. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from lightserve.models.json_fields import JsonFields
from lightserve.models.plain_config import NormWeights, decoder_fields
from lightserve.models.rope import FULL, SLIDING, QueryGrowth, YarnRope, has_rope, unrotated_layers
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
    INPUTS = "inputs"
    """Inputs before outputs, gates before ups."""


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
    """Whether the weights of a token's experts are divided by their sum and `added`."""
    added: float = 1e-20
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
    scales_inputs: bool = False
    """The weight of a chosen expert multiplies the expert's inputs in place of its results."""
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
    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """Names of products, without the first where experts have `ModelConfig.activation`."""
    latent_size: int | None = None
    """Numbers that experts read and give, products of hidden states; None: these themselves."""
    has_biases: bool = False
    """Whether the router and all experts have biases."""
    clamp: tuple[float, float] | None = None
    """Alpha and limit of `Activation.CLAMPED_SILU`; None: gates are SiLU, or the model's own."""
    stacked: Stacked | None = None
    """None: each expert has tensors of its own."""
    is_beside: bool = False
    """Whether layers have both, experts and a block; see `ExpertsBeside`."""


def parse_mixtral(
    fields: JsonFields, num_layers: int, intermediate_size: int, experts: tuple[int, int] = (8, 2)
) -> MoeConfig:
    """Return Mixtral's experts, which every layer has.

    `experts` and chosen ones where the file is silent.
    """
    num_experts = fields.integer("num_local_experts", default=experts[0], high=MAX_EXPERTS)
    return MoeConfig(
        layers=frozenset(range(num_layers)),
        num_experts=num_experts,
        num_chosen=num_chosen_of(fields, num_experts, default=experts[1]),
        intermediate_size=intermediate_size,
        size_key="intermediate_size",
        normalises=True,
        module="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )


def parse_qwen_moe(
    fields: JsonFields,
    num_layers: int,
    *,
    experts: tuple[int, int],
    size: int,
    shared: int = 0,
    normalises: bool = False,
) -> MoeConfig:
    """Return the experts of a Qwen; what is given counts where the file is silent.

    Args:
        fields: of the file.
        num_layers: of the model.
        experts: how many there are, and how many a token has.
        size: intermediate features of each.
        shared: intermediate features of the one that every token goes through; 0: there is none.
        normalises: whether weights are divided by their sum.
    """
    key = "num_experts" if fields.has("num_experts") else "num_local_experts"
    num_experts = fields.integer(key, default=experts[0], high=MAX_EXPERTS)
    step = fields.integer("decoder_sparse_step", default=1)
    dense = set()
    if fields.has("mlp_only_layers"):
        key = "mlp_only_layers"
        dense = {_layer(fields, entry, key) for entry in fields.array(key)}
    layers = frozenset(
        layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0
    )
    if not layers:
        raise fields.error("decoder_sparse_step", f"{step} leaves no layer with experts")
    if shared:
        shared = fields.integer("shared_expert_intermediate_size", default=shared)
    return MoeConfig(
        layers=layers,
        num_experts=num_experts,
        num_chosen=num_chosen_of(fields, num_experts, default=experts[1]),
        intermediate_size=fields.integer("moe_intermediate_size", default=size),
        normalises=fields.boolean("norm_topk_prob", default=normalises),
        shared_size=shared,
        shared_module="shared_expert",
        has_shared_gate=shared > 0,
    )


def parse_olmoe(fields: JsonFields, num_layers: int, intermediate_size: int) -> MoeConfig:
    """Return OLMoE's experts: every layer has them."""
    num_experts = fields.integer("num_experts", default=64, high=MAX_EXPERTS)
    return MoeConfig(
        layers=frozenset(range(num_layers)),
        num_experts=num_experts,
        num_chosen=num_chosen_of(fields, num_experts, default=8),
        intermediate_size=intermediate_size,
        size_key="intermediate_size",
        normalises=fields.boolean("norm_topk_prob", default=False),
    )


def parse_minimax(fields: JsonFields, num_layers: int, intermediate_size: int) -> MoeConfig:
    """Return the experts of MiniMax-M2: every layer has them, a bias takes part in their choice."""
    fields.only("scoring_func", "sigmoid")
    fields.only("shared_intermediate_size", 0)
    plain = parse_mixtral(fields, num_layers, intermediate_size, (256, 8))
    return replace(plain, scoring=Scoring.SIGMOID, has_choice_bias=True)


def parse_glm_moe(fields: JsonFields, num_layers: int) -> MoeConfig:
    """Return the experts of GLM-4.5: chosen as DeepSeek-V3's are, behind some dense layers."""
    num_experts = fields.integer("n_routed_experts", default=128, high=MAX_EXPERTS)
    groups = groups_of(fields, num_experts, best=2, defaults=(1, 1))
    num_chosen = num_chosen_of(fields, num_experts, default=8, groups=groups)
    size = fields.integer("moe_intermediate_size", default=1408)
    return MoeConfig(
        layers=behind_dense(fields, num_layers, default=1),
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


def num_chosen_of(
    fields: JsonFields, num_experts: int, *, default: int | None, groups: tuple[int, int] = (1, 1)
) -> int:
    """Return how many experts a token has, of `groups` (all, and chosen ones)."""
    num_chosen = fields.integer("num_experts_per_tok", default=default, high=num_experts)
    most = num_experts // groups[0] * groups[1]
    if num_chosen > most:
        complaint = f"must be at most {most}, the experts of topk_group groups, got {num_chosen}"
        raise fields.error("num_experts_per_tok", complaint)
    return num_chosen


def groups_of(
    fields: JsonFields, num_experts: int, *, best: int, defaults: tuple[int | None, int | None]
) -> tuple[int, int]:
    """Return how many groups experts form, of at least `best` each, and how many are chosen."""
    num_groups = fields.integer("n_group", default=defaults[0], high=num_experts)
    if num_experts % num_groups or num_experts // num_groups < best:
        raise fields.error("n_group", f"must give even groups of {num_experts}, got {num_groups}")
    return num_groups, fields.integer("topk_group", default=defaults[1], high=num_groups)


def behind_dense(fields: JsonFields, num_layers: int, *, default: int | None) -> frozenset[int]:
    """Return the layers with experts, which stand behind some dense ones."""
    num_dense = fields.integer("first_k_dense_replace", default=default, low=0)
    if num_dense >= num_layers:
        raise fields.error("first_k_dense_replace", f"must be below {num_layers}, got {num_dense}")
    return frozenset(range(num_dense, num_layers))


def _layer(fields: JsonFields, entry: object, key: str) -> int:
    if isinstance(entry, bool) or not isinstance(entry, int):
        raise fields.error(key, f"has the entry {entry!r}, which is no layer")
    return entry


# gpt-oss.


GPT_OSS_THETA = 150_000.0


_GPT_OSS: dict[str, Any] = {
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
}
"""Values that transformers takes where a file of gpt-oss is silent."""


def parse_gpt_oss(fields: JsonFields) -> dict[str, Any]:
    """Return gpt-oss as fields of `ModelConfig`."""
    own = decoder_fields(fields.with_defaults(_GPT_OSS), theta=GPT_OSS_THETA)
    num_layers, inner = own["num_layers"], fields.integer("intermediate_size", default=2880)
    if not has_rope(fields):
        own["rope"] = _gpt_oss_rope(fields)
    return own | {
        "intermediate_size": inner,
        "has_sinks": True,
        "norm_weights": NormWeights.WIDE,
        "sliding_windows": _gpt_oss_windows(fields, num_layers),
        "moe": _gpt_oss_experts(fields, num_layers, inner),
    }


def _gpt_oss_rope(fields: JsonFields) -> YarnRope:
    """Return the rotary embedding of a file that says nothing of it."""
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


# Llama 4.


_LLAMA4: dict[str, Any] = {
    "vocab_size": 202_048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "attention_chunk_size": 8192,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
}
"""Values that transformers takes where a file of Llama 4 is silent."""
_CHUNKED = "chunked_attention"


def parse_llama4(fields: JsonFields) -> dict[str, Any]:
    """Return the text part of Llama 4 as fields of `ModelConfig`."""
    fields = fields.with_defaults(_LLAMA4)
    own = decoder_fields(fields, theta=500_000.0)
    num_layers = own["num_layers"]
    unrotated = unrotated_layers(fields, num_layers, key_may_be_empty=True)
    return own | {
        "intermediate_size": fields.integer("intermediate_size_mlp"),
        "rotates_neighbours": True,
        "qk_norm": fields.boolean("use_qk_norm", default=True),
        "query_growth": _llama4_growth(fields),
        "unrotated_layers": unrotated,
        "attention_chunk": _llama4_chunk(fields, num_layers, unrotated),
        "moe": _llama4_experts(fields, num_layers),
        "stored_names": ((".mlp.", ".feed_forward."),),
    }


def _llama4_growth(fields: JsonFields) -> QueryGrowth | None:
    """Return how queries grow in layers without rotary embedding (Nakanishi 2025)."""
    is_tuned = dict(fields.items()).get("attn_temperature_tuning", True)  # Scout's file says 4
    if not isinstance(is_tuned, int):
        raise fields.error("attn_temperature_tuning", f"must be true or false, got {is_tuned!r}")
    if not is_tuned:
        return None
    return QueryGrowth(fields.number("attn_scale"), fields.integer("floor_scale"), first=1)


def _llama4_chunk(fields: JsonFields, num_layers: int, unrotated: frozenset[int]) -> int | None:
    """Return the size of the chunks within which rotated layers attend."""
    kinds = [FULL if layer in unrotated else _CHUNKED for layer in range(num_layers)]
    if fields.has("layer_types") and fields.array("layer_types") != kinds:
        raise fields.error("layer_types", f"must be {_CHUNKED!r} in all layers that are rotated")
    is_null = fields.is_null("attention_chunk_size")
    return None if is_null else fields.integer("attention_chunk_size")


def _llama4_experts(fields: JsonFields, num_layers: int) -> MoeConfig:
    step = fields.integer("interleave_moe_layer_step", default=1)
    layers = frozenset(range(step - 1, num_layers, step))
    if fields.has(key := "moe_layers"):
        layers = frozenset(_layer(fields, entry, key) for entry in fields.array(key))
    if not layers or max(layers) >= num_layers or min(layers) < 0:
        raise fields.error(key, f"must leave layers with experts, from 0 to {num_layers - 1}")
    num_experts = fields.integer("num_local_experts", high=MAX_EXPERTS)
    inner = fields.integer("intermediate_size")
    return MoeConfig(
        layers=layers,
        num_experts=num_experts,
        num_chosen=num_chosen_of(fields, num_experts, default=None),
        intermediate_size=inner,
        size_key="intermediate_size",
        normalises=False,
        scoring=Scoring.SIGMOID,
        scales_inputs=True,
        shared_size=inner,
        shared_module="shared_expert",
        router="router",
        stacked=Stacked.INPUTS,
    )
