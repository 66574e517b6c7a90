"""Feed-forward blocks: a gated one, or experts, a few of them for each token.

Experts are split over the ranks as other blocks are: each rank has its part of every expert's
intermediate features, so all ranks have the same work whichever experts are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from lightserve.kernels.interface import Can, activate, features_of, sigmoid
from lightserve.kernels.weights import (
    SILU_GATES,
    BlockActivation,
    ExpertBiases,
    Fp8Block,
    PackedExperts,
)
from lightserve.models.architectures import BESIDE_NORMS
from lightserve.models.base import Part, choice_of, even_part, expert_activation
from lightserve.models.layers.linear import (
    ColumnParallelLinear,
    Linear,
    ModelContext,
    ModuleShard,
    Norm,
    RMSNorm,
    RowParallelLinear,
    WeightLinear,
    read_tensor,
    rounding_weight,
)
from lightserve.models.moe_config import MoeConfig, Scoring
from lightserve.models.weight_files import CHOICE_BIAS, LATENT_INPUTS, LATENT_RESULTS, SHARED_GATE
from lightserve.types import Activation


class FeedForward(Protocol):
    """The block behind a layer's attention."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden], the same on every rank."""

    def behind(self, norm: Norm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (the block of norm(x + residual), x + residual); may overwrite `residual`."""


def feed_forward(context: ModelContext, layer: int) -> FeedForward:
    """Load the block of a layer."""
    prefix, moe = f"model.layers.{layer}", context.config.moe
    if moe is not None and layer in moe.layers and not moe.is_beside:
        return ExpertMLP(context, f"{prefix}.{moe.module}", moe)
    return block(context, f"{prefix}.mlp", context.config.shape_of(layer).inner_size)


class MLP:
    """Computes down(activate(first(x))); `block` and `gated_mlp` make it."""

    def __init__(
        self,
        context: ModelContext,
        prefix: str,
        first: ColumnParallelLinear,
        part: Part,
        activate: Callable[[Tensor], Tensor],
    ) -> None:
        """Load `down`, which has `part` of the intermediate features."""
        self._first, self._activate = first, activate
        has_bias = context.config.mlp_bias
        self._down = RowParallelLinear(context, f"{prefix}.down_proj", part, has_bias=has_bias)
        self._kernels, self._tp = context.kernels, context.tp
        self._block: tuple[Fp8Block, Tensor | None] | None = None
        """The weights of all of it, if kernels compute it in one call, and the last bias."""
        own, last = rounding_weight(first.linear), rounding_weight(self._down.linear)
        if own and last and own[0].is_gated:
            self._block = Fp8Block(*own, last[0]), last[1]

    def __call__(self, x: Tensor) -> Tensor:
        """See `FeedForward`."""
        return self._tp.all_reduce(self.share(x))

    def behind(self, norm: Norm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `FeedForward.behind`."""
        if self._block is None or not isinstance(norm, RMSNorm):
            x, residual = self._first.behind(norm, x, residual)
            return self._down(self._activate(x)), residual
        share, residual = self._kernels.add_norm_linear(
            x, residual, (norm.weight, norm.eps), *self._block, is_gated=False
        )
        return self._tp.all_reduce(share), residual

    def share(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sum."""
        if self._block is not None:
            return self._kernels.linear(x, *self._block)
        return self._down.share(self._activate(self._first(x)))


def block(context: ModelContext, prefix: str, size: int) -> MLP:
    """Load a block with a gate, or down(activation(up(x))) as `ModelConfig.activation` says.

    `size`: intermediate features of all ranks.
    """
    if (activation := context.config.activation) is None:
        return gated_mlp(context, prefix, size)
    part = even_part(size, context.tp)
    own = [(f"{prefix}.up_proj", part)]
    first = ColumnParallelLinear(context, own, has_bias=context.config.mlp_bias)
    return MLP(context, prefix, first, part, partial(activate, context.kernels, kind=activation))


def gated_mlp(
    context: ModelContext,
    prefix: str,
    size: int,
    activation: Activation | None = None,
    *,
    factor: float = 1.0,
) -> MLP:
    """Load a block down(silu(factor * gate(x)) * up(x)), or with GELU without a factor, gate and up
    merged into one weight.

    `size`: intermediate features of all ranks; `activation`: that of gates, a GELU; None: the
    model's.
    """
    config, kernels = context.config, context.kernels
    part = even_part(size, context.tp)
    parts = [(f"{prefix}.gate_proj", part), (f"{prefix}.up_proj", part)]
    if "gate_up" in config.merged:
        name, up_start = f"{prefix}.gate_up_proj", size + part.start
        parts = [(name, part), (name, Part(up_start, part.size))]
    if activation is None and config.has_gelu:
        activation = Activation.GELU_TANH
    is_gated = activation is None and factor == 1.0
    first = ColumnParallelLinear(context, parts, has_bias=config.mlp_bias, is_gated=is_gated)
    if is_gated:
        return MLP(context, prefix, first, part, lambda x: x)
    if activation is None:
        return MLP(context, prefix, first, part, partial(_scaled_gate, factor))
    gates = BlockActivation(activation)
    return MLP(context, prefix, first, part, partial(features_of, kernels, activation=gates))


class ExpertMLP:
    """The sum of the results of a token's experts, each times its weight, and of a shared block.

    Routing as in Mixtral of Experts (section 2), groups and biases as in DeepSeek-V3 (section
    2.1.2).
    """

    def __init__(self, context: ModelContext, prefix: str, moe: MoeConfig) -> None:
        self._router = _Router(context, f"{prefix}.{moe.router}", moe)
        names = [f"{prefix}.experts.{number}" for number in range(moe.num_experts)]
        self._experts = _experts(context, names, moe)
        self._scales_inputs = moe.scales_inputs
        self._tp = context.tp
        self._shared: MLP | None = None
        self._shared_gate: Linear | None = None
        if moe.shared_size:
            self._shared = block(context, f"{prefix}.{moe.shared_module}", moe.shared_size)
        self._latent: tuple[Linear, Linear] | None = None
        if moe.latent_size is not None:
            self._latent = _latents(context, prefix, moe.latent_size)
        if moe.has_shared_gate:
            self._shared_gate = _plain(context, f"{prefix}.{SHARED_GATE}", 1)

    def __call__(self, x: Tensor) -> Tensor:
        """See `FeedForward`."""
        chosen, weights = self._router(x)
        own = x if self._latent is None else self._latent[0].apply(x)
        if self._scales_inputs:
            out = self._of_scaled(own, chosen, weights)
        else:
            out = self._experts.mix(own, chosen, weights)
        if self._latent is not None:
            out = self._latent[1].apply(out)
        if self._shared is not None:
            shared = self._shared.share(x)
            if self._shared_gate is not None:
                shared = shared * sigmoid(self._shared_gate.apply(x))
            out = out + shared
        return self._tp.all_reduce(out)

    def _of_scaled(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of experts of inputs that are scaled by the experts' weights."""
        ones = torch.ones_like(weights[:, :1])
        places = [slice(place, place + 1) for place in range(chosen.shape[1])]
        parts = [
            self._experts.mix(x * weights[:, place].to(x.dtype), chosen[:, place], ones)
            for place in places
        ]
        return sum(parts[1:], parts[0])

    def behind(self, norm: Norm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `FeedForward.behind`."""
        x, residual = norm.add(x, residual)
        return self(x), residual


class ExpertsBeside:
    """Gemma 4's: experts that read the sum which a layer's block reads; theirs and its results are
    normed and added. The weights of chosen experts have factors of their own.
    """

    def __init__(self, context: ModelContext, prefix: str, moe: MoeConfig) -> None:
        """`prefix`: that of the layer."""
        config, reader = context.config, context.reader
        hidden = config.hidden_size
        names = [f"{prefix}.mlp.experts.{number}" for number in range(moe.num_experts)]
        scale = read_tensor(reader, f"{prefix}.router.scale", hidden, dtype=torch.float32)
        self._router_norm = RMSNorm(context.kernels, scale * hidden**-0.5, config.rms_norm_eps)
        self._router = _Router(context, f"{prefix}.mlp.{moe.router}", moe)
        self._factors = read_tensor(reader, f"{prefix}.router.per_expert_scale", moe.num_experts)
        self._experts = _experts(context, names, moe)
        self._before, self._behind_block, self._behind = (
            context.norm(f"{prefix}.{name}", size=hidden) for name in BESIDE_NORMS
        )
        self._tp = context.tp

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return the sum; x: the block's results, `residual`: of what; all [T, hidden]."""
        chosen, weights = self._router(self._router_norm(residual))
        weights = weights * self._factors[chosen]
        mixed = self._tp.all_reduce(self._experts.mix(self._before(residual), chosen, weights))
        return self._behind_block(x) + self._behind(mixed)


class _Router:
    """Chooses experts, in float32, the same on every rank."""

    def __init__(self, context: ModelContext, name: str, moe: MoeConfig) -> None:
        self._weight = _plain(context, name, moe.num_experts, has_bias=moe.has_biases)
        self._bias: Tensor | None = None
        if moe.has_choice_bias:
            bias, size = f"{name}.{CHOICE_BIAS}", moe.num_experts
            self._bias = read_tensor(context.reader, bias, size, dtype=torch.float32)
        self._moe, self._choice = moe, choice_of(moe)
        self._choose = context.kernels.choose_experts

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden] -> experts int64 [T, num_chosen], their weights, float32."""
        moe = self._moe
        products = self._weight.apply(x, dtype=torch.float32)
        if moe.scoring is Scoring.CHOSEN:
            best = products.topk(moe.num_chosen, dim=-1)
            return best.indices, best.values.softmax(-1)
        return self._choose(products, self._bias, self._choice)


def _plain(context: ModelContext, name: str, num_outputs: int, *, has_bias: bool = False) -> Linear:
    """Load a weight that is too small, and decides too much, to be rounded; whole on every rank."""
    return context.plain.whole(name, num_outputs, context.config.hidden_size, has_bias=has_bias)


def _latents(context: ModelContext, prefix: str, size: int) -> tuple[Linear, Linear]:
    """Load the products before experts and behind, whole on every rank; the second is of a rank's
    share, so rank 0 alone adds its bias.
    """
    hidden, has_bias = context.config.hidden_size, context.config.mlp_bias
    first, second = f"{prefix}.{LATENT_INPUTS}", f"{prefix}.{LATENT_RESULTS}"
    adds_bias = has_bias and context.tp.rank == 0
    return (
        context.whole(first, size, hidden, has_bias=has_bias),
        context.whole(second, hidden, size, has_bias=adds_bias),
    )


class _Experts(Protocol):
    """This rank's part of all experts of a layer."""

    def mix(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of this rank's parts of the chosen experts; see `Kernels.mix_experts`."""


def _experts(context: ModelContext, names: Sequence[str], moe: MoeConfig) -> _Experts:
    can = context.kernels.can
    packed = _packed_weights(context, names, moe) if Can.PACKED_EXPERTS in can else None
    if packed is not None:
        return _JointExperts(context, names, moe, packed)
    if Can.EXPERTS in can:
        return _JointExperts(context, names, moe, _plain_weights(context, names, moe))
    return _SeparateExperts(context, names, moe)


class _JointExperts:
    """For kernels that multiply by several experts' weights at once."""

    def __init__(
        self,
        context: ModelContext,
        names: Sequence[str],
        moe: MoeConfig,
        weights: tuple[Tensor, Tensor] | tuple[PackedExperts, PackedExperts],
    ) -> None:
        self._kernels, self._weights = context.kernels, weights
        self._activation = expert_activation(context.config)
        self._biases: ExpertBiases | None = None
        if moe.has_biases:
            part = even_part(moe.intermediate_size, context.tp)
            self._biases = _biases(context, names, moe, part)

    def mix(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """See `_Experts.mix`."""
        return self._kernels.mix_experts(
            x, chosen, weights, *self._weights, biases=self._biases, activation=self._activation
        )


def _plain_weights(
    context: ModelContext, names: Sequence[str], moe: MoeConfig
) -> tuple[Tensor, Tensor]:
    """Load this rank's parts of all experts, gates first, as `Kernels.mix_experts` takes them."""
    hidden, reader = moe.latent_size or context.config.hidden_size, context.reader
    part = even_part(moe.intermediate_size, context.tp)
    *halves, down = moe.projections
    shape = (len(names), len(halves), part.size, hidden)
    gate_ups = torch.empty(shape, dtype=reader.dtype, device=reader.device)
    shape_down = (len(names), hidden, part.size)
    downs = torch.empty(shape_down, dtype=reader.dtype, device=reader.device)
    for number, name in enumerate(names):
        for own, half in zip(gate_ups[number], halves, strict=True):
            reader.read_into(own, f"{name}.{half}.weight", rows=part)
        reader.read_into(downs[number], f"{name}.{down}.weight", columns=part)
    return gate_ups.flatten(1, 2), downs


def _packed_weights(
    context: ModelContext, names: Sequence[str], moe: MoeConfig
) -> tuple[PackedExperts, PackedExperts] | None:
    """Load this rank's parts packed, gates first, where the method packs the weights of experts."""
    part = even_part(moe.intermediate_size, context.tp)
    hidden = Part(0, moe.latent_size or context.config.hidden_size)
    *halves, down = moe.projections
    packed = context.method.pack_experts(
        context.reader,
        [[ModuleShard(f"{name}.{half}", part, hidden) for half in halves] for name in names],
        [[ModuleShard(f"{name}.{down}", hidden, part)] for name in names],
    )
    if packed is None:
        return None
    return context.kernels.stack_experts(packed[0]), context.kernels.stack_experts(packed[1])


def _biases(
    context: ModelContext, names: Sequence[str], moe: MoeConfig, part: Part
) -> ExpertBiases:
    """Load the biases of all experts; rank 0 alone adds the biases of outputs."""
    reader, hidden = context.reader, moe.latent_size or context.config.hidden_size
    *halves, down = moe.projections
    dtype, device = reader.dtype, reader.device
    gate_up = torch.empty(len(names), len(halves), part.size, dtype=dtype, device=device)
    outputs = torch.zeros(len(names), hidden, dtype=dtype, device=device)
    for number, name in enumerate(names):
        for own, half in zip(gate_up[number], halves, strict=True):
            reader.read_into(own, f"{name}.{half}.bias", rows=part)
        if context.tp.rank == 0:
            reader.read_into(outputs[number], f"{name}.{down}.bias")
    return ExpertBiases(gate_up.flatten(1, 2), outputs)


def _scaled_gate(factor: float, gate_up: Tensor) -> Tensor:
    """Return silu(factor * gate) * up [T, I] of gate_up [T, 2*I], gates first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate * factor) * up


class _SeparateExperts:
    """A map for each expert, its weight kept as the model's others are: one after the other.

    Each token's sum is in the order of its experts' numbers: nothing depends on other tokens.
    """

    def __init__(self, context: ModelContext, names: Sequence[str], moe: MoeConfig) -> None:
        method, reader = context.method.exact_inputs, context.reader
        part = even_part(moe.intermediate_size, context.tp)
        inputs = Part(0, moe.latent_size or context.config.hidden_size)
        adds_bias = moe.has_biases and context.tp.rank == 0
        activation = expert_activation(context.config)
        self._activate: Callable[[Tensor], Tensor] | None = None  # products by gated weights have
        if activation != SILU_GATES:
            self._activate = partial(features_of, context.kernels, activation=activation)
        *firsts, down = moe.projections
        self._gate_ups, self._downs = [], []
        for name in names:
            pair = [ModuleShard(f"{name}.{half}", part, inputs, moe.has_biases) for half in firsts]
            self._gate_ups.append(method.create(reader, pair, is_gated=self._activate is None))
            last = ModuleShard(f"{name}.{down}", inputs, part, adds_bias)
            self._downs.append(method.create(reader, [last]))
        self._mixer: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
        if not (self._activate or moe.has_biases):
            pairs = [
                (gate_up.weight, down.weight)
                for gate_up, down in zip(self._gate_ups, self._downs, strict=True)
                if isinstance(gate_up, WeightLinear) and isinstance(down, WeightLinear)
            ]
            if len(pairs) == len(names):
                self._mixer = context.kernels.expert_mixer(pairs, reader.dtype)

    def mix(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """See `_Experts.mix`."""
        if self._mixer is not None:
            return self._mixer(x, chosen, weights)
        num_chosen = chosen.shape[1]
        pairs = chosen.flatten()
        order = pairs.argsort(stable=True)
        tokens, shares = order // num_chosen, weights.flatten()[order, None]
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        end = 0
        for expert, count in enumerate(pairs.bincount(minlength=len(self._downs)).tolist()):
            if count == 0:
                continue
            start, end = end, end + count
            rows = tokens[start:end]
            features = self._gate_ups[expert].apply(x[rows])
            if self._activate is not None:
                features = self._activate(features)
            added = self._downs[expert].apply(features)
            out.index_add_(0, rows, added * shares[start:end])
        return out.to(x.dtype)
