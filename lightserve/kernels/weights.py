"""Weights as kernels hold them, the rules of layers with experts or states, and all their sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Flag, auto
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightserve.types import Activation

NO_RUNS: npt.NDArray[np.int64] = np.zeros(2, dtype=np.int64)
"""Runs of a pass without tokens of prompts; never written."""


@dataclass
class PromptRuns:
    """The tokens of prompts in the pass whose products come next, as `AttentionBatch.prompt_runs`
    has them."""

    runs: npt.NDArray[np.int64] = field(default_factory=lambda: NO_RUNS)


class Packed(Flag):
    """Kinds of packed weights; the check of a start tries the products of each."""

    NONE = 0
    INT8 = auto()
    INT4 = auto()
    FP8 = auto()
    FP4_EXPERTS = auto()


class Int8Weight(NamedTuple):
    """A weight [M, K] of 8-bit integers; each output has a factor of its own."""

    packed: Tensor
    """int8, in the kernels' own layout."""
    factors: Tensor
    """float32 [at least M]."""
    num_outputs: int
    """M."""
    is_gated: bool = False
    """Whether its products are gated, as `Kernels.gated_linear` gives them."""
    rounds_rows: bool = False
    """Whether kernels may also round each of many rows x to 8 bits, by its largest number: the
    files of some models ask for products of integers (W8A8, a factor for each token)."""
    prompts: PromptRuns | None = None
    """Rows that are rounded so, however many, in kernels of `Can.ROUNDED_PROMPTS`."""


class GroupedWeight(NamedTuple):
    """A weight [M, K] of unsigned integers; each group of inputs has a factor and a zero.

    A number is (integer - zero) * factor, with the factor and zero of its output's group.
    """

    packed: Tensor
    """uint8, in the kernels' own layout."""
    factors: Tensor
    """float16 [panels, groups, outputs of a panel]."""
    zeros: Tensor
    """uint8, shaped as `factors`."""
    num_outputs: int
    """M."""
    num_inputs: int
    """K."""
    bits: int
    """4 or 8 for each integer."""
    group_size: int
    """32, 64, 96 or 128 inputs; the last group may have fewer."""
    is_gated: bool = False
    """See `Int8Weight`."""


class Fp8Weight(NamedTuple):
    """A weight [M, K] of float8_e4m3fn; each group of an output's inputs has a factor."""

    packed: Tensor
    """float8_e4m3fn [M, K]."""
    factors: Tensor
    """float32, in the kernels' own layout."""
    group_size: int
    """Inputs that share a factor; at least K where an output has one factor."""
    is_gated: bool = False
    """See `Int8Weight`."""
    rounds_rows: bool = False
    """The rows that are multiplied by this weight are rounded to float8_e4m3fn as well, by the
    largest number of each row, or of each of its groups; needs `Can.FP8_PRODUCTS`."""

    @property
    def group(self) -> int:
        """Inputs that share a factor; 0: all."""
        return 0 if self.group_size >= self.packed.shape[1] else self.group_size


class Fp8Block(NamedTuple):
    """The weights of a gated block, which round their rows: a product by them is that of the second
    with the gated ones of the first; needs `Can.FP8_PRODUCTS`."""

    first: Fp8Weight
    """Gates and ups, `is_gated`."""
    first_bias: Tensor | None
    second: Fp8Weight

    @property
    def is_gated(self) -> bool:
        """Return whether the products of a weight are gated once more."""
        return False


class Fp4Weight(NamedTuple):
    """A weight [M, K] of 4-bit floating point (MXFP4); groups of inputs have a factor each.

    A number has a sign, two bits of exponent and one bit of fraction.
    """

    packed: Tensor
    """uint8, in the kernels' own layout."""
    factors: Tensor
    """float32, in the kernels' own layout."""
    group_size: int


class PackedExperts(NamedTuple):
    """The weights of all experts of a layer, packed in one way, all outputs in one tensor."""

    kind: str
    values: Tensor
    factors: Tensor | None
    zeros: Tensor | None
    num_experts: int
    group: int
    """Inputs that share a factor; 0: all inputs of an output."""
    block_k: int
    rounds_rows: bool = False
    """See `Fp8Weight`."""


PackedWeight = Int8Weight | GroupedWeight | Fp8Weight
Weight = Tensor | PackedWeight | Fp8Block


class ExpertBiases(NamedTuple):
    """The biases of a layer's experts."""

    gate_up: Tensor
    """[E, 2*I], gates first."""
    down: Tensor
    """[E, K]."""


class ExpertChoice(NamedTuple):
    """The rule by which products with the router's weight become a token's experts and weights."""

    num_chosen: int
    is_sigmoid: bool
    """Whether scores are sigmoids of products; else their softmax."""
    normalises: bool
    """Whether the weights of a token's experts are divided by their sum and `added`."""
    scale: float = 1.0
    """Factor of all weights."""
    num_groups: int = 1
    """Number of equal groups of experts."""
    num_chosen_groups: int = 1
    """Number of groups that a token's experts come from: the groups with the largest sums."""
    group_best: int = 1
    """Number of a group's best scores in its sum."""
    added: float = 1e-20

    def within_groups(self, ranks: Tensor) -> Tensor:
        """Leave out experts [T, E] of groups that are not chosen."""
        groups = ranks.view(len(ranks), self.num_groups, -1)
        sums = groups.topk(self.group_best, dim=-1).values.sum(-1)
        best = sums.topk(self.num_chosen_groups, dim=-1).indices
        is_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(-1, best, False)
        return groups.masked_fill(is_out[..., None], float("-inf")).view_as(ranks)


class BlockActivation(NamedTuple):
    """The way from a feed-forward block's first product to its features."""

    kind: Activation = Activation.SILU
    is_gated: bool = True
    """The product has gates, whose activation multiplies ups; else all of it is activated."""
    alpha: float = 0.0
    limit: float = 0.0
    """Largest gate of `CLAMPED_SILU`, and largest up on either side of zero."""

    @property
    def num_parts(self) -> int:
        """Numbers of the product for each feature."""
        return 2 if self.is_gated else 1


SILU_GATES = BlockActivation()


class StateBank(NamedTuple):
    """Memory of one state tensor of a recurrent layer, for all rows."""

    pieces: Tensor
    """uint8 [parts, Hkv, S, bytes]: keys and values of an attention layer. A state is a row's slots
    of them, in this order of dimensions."""
    first: int
    """The first of these slots among those that a row has for states."""
    num_slots: int
    """Number of them; their last bytes may hold nothing."""


class KeptInputs(NamedTuple):
    """Inputs of recurrent layers from which the states of some rows are made behind a pass.

    The pass leaves the states of these rows as they are: how many of their tokens count is known
    behind it. Layers write the inputs of K tokens of the pass side by side, in order.
    """

    is_held: Tensor
    """uint8 [rows of the tables], 1 for the rows whose states the pass leaves as they are."""
    inputs: Tensor
    """[K, inputs of all recurrent layers], of the model's type."""
    rates: Tensor
    """float32 [K, rates of all recurrent layers]."""
    tokens: Tensor
    """int64 [K], which tokens of the pass these are of: those of the rows that are held."""

    def first(self, count: int) -> KeptInputs:
        """Return the part for `count` tokens, or for all if they are fewer."""
        parts = (part[:count] for part in (self.inputs, self.rates, self.tokens))
        return KeptInputs(self.is_held, *parts)


class MambaRule(NamedTuple):
    """The numbers of a Mamba-2 layer, of one rank."""

    num_groups: int
    state_size: int
    head_dim: int
    decay: Tensor
    """float32 [H], below 0: factor of a token's rate, which gives the logarithm of a decay."""
    rate_bias: Tensor
    """float32 [H]."""
    skip: Tensor
    """float32 [H], factor of a token's own numbers in its result."""


class ConvolutionSizes(NamedTuple):
    """Sizes of a layer that is a short convolution, of one rank."""

    channels: int
    width: int


class StateSizes(NamedTuple):
    """Sizes of a layer with states as matrices, of one rank."""

    num_key_heads: int
    """Groups of a Mamba-2 layer."""
    num_heads: int
    key_dim: int
    """Size of a Mamba-2 layer's states."""
    value_dim: int
    width: int
    """Tokens that its convolution sees."""
    beta_scale: float = 1.0
    """See `DeltaRule`."""
    decays_channels: bool = False
    """Whether the layer has a decay for each channel of keys, and gates results by sigmoids."""
    is_mamba: bool = False
    """Whether the layer is one of Mamba-2; else it follows the gated delta rule."""

    @property
    def channels(self) -> int:
        """Return the channels of its convolution."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim


class DeltaRule(NamedTuple):
    """The numbers of a layer that follows the gated delta rule, of one rank."""

    num_key_heads: int
    key_dim: int
    value_dim: int
    decay: Tensor
    """float32 [Hv], below 0: factor of a token's rate, which gives the logarithm of a decay."""
    rate_bias: Tensor
    """float32 [Hv], or [Hv * Dk] where each channel of keys has a decay."""
    norm: Tensor
    """[Dv], weight of the norm of each head's result."""
    eps: float
    beta_scale: float = 1.0
    """Factor of the share of a token's value that takes the place of what a state says."""
    gates_by_sigmoid: bool = False
    """Whether the rule multiplies results by the sigmoid of z, not by its SiLU."""

    @property
    def decays_channels(self) -> bool:
        """Whether each channel of keys has a decay."""
        return len(self.rate_bias) > len(self.decay)


# What of a model the kernels see, on one rank: sizes, type and windows.


@dataclass(frozen=True, kw_only=True)
class KernelShapes:
    """Sizes of one rank's part of a model."""

    dtype: torch.dtype
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    """A divisor of `num_heads`."""
    head_dim: int
    value_dim: int | None = None
    """Size of a value head, which is so many of a key's first numbers; None: it has numbers of its
    own."""
    rotary_dim: int
    """Number of a head's dimensions that are rotated."""
    sliding_windows: tuple[int | None, ...]
    """The different ones of all layers."""
    rms_norm_eps: float
    qk_norm: bool
    """True: each head's queries and keys are normalised by themselves."""
    qkv_bias: bool
    context_len: int
    """Longest sequence that is served."""
    has_alibi: bool = False
    soft_cap: float | None = None
    """Cap of scores, see `ScoreMod`."""
    has_wide_norms: bool = False
    """Weights of norms may be float32, see `Kernels.rms_norm`."""
    num_experts: int = 0
    """Experts of a layer that has any."""
    num_chosen_experts: int = 0
    expert_inputs: int | None = None
    """Numbers that each reads and gives; None: `hidden_size`."""
    expert_size: int = 0
    """Intermediate features of each."""
    expert_choice: ExpertChoice | None = None
    has_choice_bias: bool = False
    expert_activation: BlockActivation = SILU_GATES
    has_expert_biases: bool = False
    has_sinks: bool = False
    """True: the softmax of attention has one more score, a sink, for each head."""
    pool_dtype: torch.dtype | None = None
    """Type of the pools of keys and values, see `Kernels.rotate_and_write`; None: `dtype`."""
    delta: StateSizes | None = None
    convolution: ConvolutionSizes | None = None
    """Sizes of layers that are a convolution and nothing else."""


def linears_of(shapes: KernelShapes) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of a layer's products, by name."""
    q_size, kv_size = shapes.num_heads * shapes.head_dim, shapes.num_kv_heads * shapes.head_dim
    return {
        "qkv": (q_size + 2 * kv_size, shapes.hidden_size),
        "out": (shapes.hidden_size, q_size),
        "gate_up": (2 * shapes.intermediate_size, shapes.hidden_size),
        "down": (shapes.hidden_size, shapes.intermediate_size),
    }
