"""What `config.json` says of a mixture of experts, family by family. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lightserve.models.json_fields import JsonFields

MAX_EXPERTS = 4096
MXFP4_GROUP = 32
"""Inputs that share a factor in that format."""
_HALVES = (0, 1, 2, 3, 4, 6, 8, 12)
FP4_HALVES = (*_HALVES, *(-half for half in _HALVES))
"""Twice what its numbers of 4 bits stand for, by their codes."""
MXFP4_BIAS = 127
"""Of the byte that is a factor's exponent."""
MXFP4_NO_NUMBER = 255
"""An exponent that stands for none."""


class Scoring(StrEnum):
    """What a token's products with the router's weight become."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    CHOSEN = "chosen"
    """Softmax over those of the chosen experts alone."""


class Stacked(StrEnum):
    """How a file has the experts of a layer that are in one tensor."""

    PLAIN = "plain"
    """Inputs before outputs, gates and ups by turns."""
    MXFP4 = "mxfp4"
    """Outputs before inputs, of which 32 share a power of two (OCP Microscaling, section 5.3)."""


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """The layers that have experts in place of one feed-forward block, and how they choose."""

    layers: frozenset[int]
    """Not empty; the others have a block of `ModelConfig.intermediate_size`."""
    num_experts: int
    num_chosen: int
    """Experts of each token."""
    intermediate_size: int
    """Of each expert."""
    size_key: str = "moe_intermediate_size"
    """Key of `config.json` that has it."""
    normalises: bool
    """Whether the weights of a token's experts are divided by their sum."""
    scoring: Scoring = Scoring.SOFTMAX
    has_choice_bias: bool = False
    """Whether a bias is added to scores where experts are chosen, and nowhere else."""
    num_groups: int = 1
    """Equal groups of experts; a divisor of `num_experts`."""
    num_chosen_groups: int = 1
    """A token's experts are in the groups with the largest sums of their best."""
    group_best: int = 2
    """Of how many."""
    scale: float = 1.0
    """Of what the chosen experts add together."""
    shared_size: int = 0
    """Size of a block that every token goes through; 0: none."""
    shared_module: str = ""
    """Its name."""
    has_shared_gate: bool = False
    """Whether what it adds is times a sigmoid."""
    module: str = "mlp"
    """Name of the block in a layer."""
    router: str = "gate"
    """Name of the router in it."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    has_biases: bool = False
    """Of the router and of all experts."""
    clamp: tuple[float, float] | None = None
    """Alpha and limit of gates as `ClampedGate` has them; None: SiLU."""
    stacked: Stacked | None = None
    """None: each expert has tensors of its own."""


def parse_mixtral(fields: JsonFields, num_layers: int, intermediate_size: int) -> MoeConfig:
    """Return Mixtral's experts: every layer has them."""
    num_experts = fields.integer("num_local_experts", default=8, high=MAX_EXPERTS)
    return MoeConfig(
        layers=frozenset(range(num_layers)),
        num_experts=num_experts,
        num_chosen=_num_chosen(fields, num_experts, default=2),
        intermediate_size=intermediate_size,
        size_key="intermediate_size",
        normalises=True,
        module="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )


def parse_qwen_moe(fields: JsonFields, num_layers: int, *, is_qwen2: bool) -> MoeConfig:
    """Return the experts of Qwen2-MoE, which has a shared one beside them, or of Qwen3-MoE."""
    key = "num_experts" if fields.has("num_experts") else "num_local_experts"
    num_experts = fields.integer(key, default=60 if is_qwen2 else 128, high=MAX_EXPERTS)
    step = fields.integer("decoder_sparse_step", default=1)
    dense = set()
    if fields.has("mlp_only_layers"):
        dense = {_layer(fields, entry) for entry in fields.array("mlp_only_layers")}
    layers = frozenset(
        layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0
    )
    if not layers:
        raise fields.error("decoder_sparse_step", f"{step} leaves no layer with experts")
    shared = 0
    if is_qwen2:
        shared = fields.integer("shared_expert_intermediate_size", default=5632)
    return MoeConfig(
        layers=layers,
        num_experts=num_experts,
        num_chosen=_num_chosen(fields, num_experts, default=4 if is_qwen2 else 8),
        intermediate_size=fields.integer(
            "moe_intermediate_size", default=1408 if is_qwen2 else 768
        ),
        normalises=fields.boolean("norm_topk_prob", default=False),
        shared_size=shared,
        shared_module="shared_expert",
        has_shared_gate=is_qwen2,
    )


def parse_olmoe(fields: JsonFields, num_layers: int, intermediate_size: int) -> MoeConfig:
    """Return OLMoE's experts: every layer has them."""
    num_experts = fields.integer("num_experts", default=64, high=MAX_EXPERTS)
    return MoeConfig(
        layers=frozenset(range(num_layers)),
        num_experts=num_experts,
        num_chosen=_num_chosen(fields, num_experts, default=8),
        intermediate_size=intermediate_size,
        size_key="intermediate_size",
        normalises=fields.boolean("norm_topk_prob", default=False),
    )


def parse_glm_moe(fields: JsonFields, num_layers: int) -> MoeConfig:
    """Return the experts of GLM-4.5: chosen as DeepSeek-V3's are, behind some dense layers."""
    num_experts = fields.integer("n_routed_experts", default=128, high=MAX_EXPERTS)
    num_groups = fields.integer("n_group", default=1, high=num_experts)
    if num_experts % num_groups or num_experts // num_groups < 2:
        raise fields.error("n_group", f"must give even groups of {num_experts}, got {num_groups}")
    num_chosen_groups = fields.integer("topk_group", default=1, high=num_groups)
    num_chosen = _num_chosen(fields, num_experts, default=8)
    if num_chosen > num_experts // num_groups * num_chosen_groups:
        raise fields.error("num_experts_per_tok", f"exceeds what topk_group leaves: {num_chosen}")
    num_dense = fields.integer("first_k_dense_replace", default=1, low=0)
    if num_dense >= num_layers:
        raise fields.error("first_k_dense_replace", f"must be below {num_layers}, got {num_dense}")
    size = fields.integer("moe_intermediate_size", default=1408)
    return MoeConfig(
        layers=frozenset(range(num_dense, num_layers)),
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=size,
        normalises=fields.boolean("norm_topk_prob", default=True),
        scoring=Scoring.SIGMOID,
        has_choice_bias=True,
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        scale=fields.number("routed_scaling_factor", default=1.0),
        shared_size=size * fields.integer("n_shared_experts", default=1),
        shared_module="shared_experts",
    )


def _num_chosen(fields: JsonFields, num_experts: int, *, default: int) -> int:
    return fields.integer("num_experts_per_tok", default=default, high=num_experts)


def _layer(fields: JsonFields, entry: object) -> int:
    if isinstance(entry, bool) or not isinstance(entry, int):
        raise fields.error("mlp_only_layers", f"has the entry {entry!r}, which is no layer")
    return entry
