"""The check at the start of what layers with experts need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightserve.kernels.check_pair import (
    CHECKED_GROUP,
    LINEAR_ROWS,
    MAX_WEIGHT_NUMBERS,
    Comparison,
    Pair,
    Poison,
)
from lightserve.kernels.composed import choose_experts
from lightserve.kernels.interface import (
    ExpertBiases,
    ExpertKernels,
    ExpertMixingKernels,
    Kernels,
    KernelShapes,
    PackedExpertKernels,
)
from lightserve.kernels.reference import ReferenceKernels, numbers_of_fp4

CHOICE_ROWS = 7


def _size(shapes: KernelShapes) -> int:
    """Return how many features of an expert are tried: of a large one, fewer."""
    most = MAX_WEIGHT_NUMBERS // (3 * shapes.hidden_size) // CHECKED_GROUP * CHECKED_GROUP
    return min(shapes.expert_size, max(CHECKED_GROUP, most))


def mixes_experts(pair: Pair) -> bool:
    """Return whether the kernels go through the model's experts in turn."""
    plain = pair.shapes.expert_gate is None and not pair.shapes.has_expert_biases
    has_type = pair.shapes.dtype is not torch.float16
    return plain and has_type and isinstance(pair.kernels, ExpertMixingKernels)


def expert_choices(pair: Pair) -> Iterator[Comparison]:
    """Compare the experts of a few tokens and their weights, beside torch's."""
    choice, num_experts = pair.shapes.expert_choice, pair.shapes.num_experts
    if choice is None or not isinstance(pair.kernels, ExpertMixingKernels):
        return
    drawn: dict[str, Any] = {"generator": pair.generator, "device": pair.device}
    products = torch.randn(CHOICE_ROWS, num_experts, **drawn)
    bias = 0.1 * torch.randn(num_experts, **drawn) if pair.shapes.has_choice_bias else None
    found, truth = (
        torch.zeros_like(products).scatter(1, *choose(products, bias, choice))
        for choose in (pair.kernels.choose_experts, choose_experts)
    )
    yield Comparison("choose_experts", f"{choice.num_chosen} of {num_experts}", found, truth)


def expert_products(pair: Pair) -> Iterator[Comparison]:
    """Compare products of a few experts: as many as tokens choose, and one that none does."""
    shapes = pair.shapes
    num_chosen, size, hidden = shapes.num_chosen_experts, _size(shapes), shapes.hidden_size
    num_experts = min(shapes.num_experts, num_chosen + 1)
    gate_up = pair.random(num_experts, 2 * size, hidden, scale=hidden**-0.5)
    down = pair.random(num_experts, hidden, size, scale=size**-0.5)

    def mix(kernels: Kernels, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        if isinstance(kernels, ExpertMixingKernels):
            packed = [
                (kernels.pack_weight(first, is_gated=True), kernels.pack_weight(second))
                for first, second in zip(*args[3:5], strict=True)
            ]
            mixer = kernels.expert_mixer(packed, shapes.dtype)
            assert mixer is not None
            return (mixer(*args[:3]),)
        assert isinstance(kernels, ExpertKernels)
        biases = ExpertBiases(*args[5:]) if shapes.has_expert_biases else None
        return (kernels.mix_experts(*args[:5], biases=biases, gate=shapes.expert_gate),)

    for num_tokens in LINEAR_ROWS:
        x = pair.random(num_tokens, hidden)
        order = pair.random(num_tokens, num_chosen).float().argsort(dim=1)
        weights = pair.random(num_tokens, num_chosen).float().softmax(dim=1)
        biases: tuple[Tensor, ...] = ()
        if shapes.has_expert_biases:
            biases = (pair.random(num_experts, 2 * size), pair.random(num_experts, hidden))
        yield from pair.compare(
            "mix_experts",
            f"{num_tokens} tokens, {num_chosen} of {num_experts} experts of {size}",
            mix,
            (x, order, weights, gate_up, down, *biases),
        )


def packed_expert_products(pair: Pair) -> Iterator[Comparison]:
    """Compare products of a few experts whose numbers have 4 bits."""
    kernels = pair.kernels
    assert isinstance(kernels, PackedExpertKernels)
    shapes, num_experts = pair.shapes, pair.shapes.num_chosen_experts + 1
    num_features, hidden = _size(shapes), shapes.hidden_size
    packed, wide = [], []
    for outputs, inputs in ((2 * num_features, hidden), (hidden, num_features)):
        drawn: dict[str, Any] = {"generator": pair.generator, "device": pair.device}
        codes = torch.randint(16, (num_experts, outputs, inputs), **drawn).byte()
        sizes = (num_experts, outputs, -(-inputs // CHECKED_GROUP))
        factors = pair.random(*sizes, scale=0.5 * inputs**-0.5).float()
        pairs = list(zip(codes, factors, strict=True))
        size = CHECKED_GROUP
        own = [kernels.pack_fp4(*both, group_size=size) for both in pairs]
        packed.append(kernels.stack_experts(own))
        wide.append(torch.stack([numbers_of_fp4(*both, size) for both in pairs]))
    for num_tokens in LINEAR_ROWS:
        x = pair.random(num_tokens, hidden)
        order = pair.random(num_tokens, num_experts).float().argsort(dim=1)[:, :-1]
        weights = pair.random(*order.shape).float().softmax(dim=1)
        with Poison():
            found = kernels.mix_packed_experts(
                x, order, weights, packed[0], packed[1], gate=shapes.expert_gate
            )
        truth = ReferenceKernels().mix_experts(
            x.float(), order, weights, wide[0], wide[1], gate=shapes.expert_gate
        )
        text = f"{num_tokens} tokens, {num_experts} experts of {num_features}"
        yield Comparison("packed mix_experts", text, found, truth)
