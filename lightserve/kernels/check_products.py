"""The check at the start of products: by plain and by packed weights, and of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightserve.kernels.check_pair import (
    CHECKED_GROUP,
    LINEAR_ROWS,
    MAX_WEIGHT_NUMBERS,
    PRODUCT_ROWS,
    Comparison,
    Pair,
    Poison,
)
from lightserve.kernels.interface import Can, Kernels
from lightserve.kernels.reference import (
    ReferenceKernels,
    numbers_of_fp4,
    numbers_of_groups,
    rounded_to_e4m3,
    rounded_to_int8,
)
from lightserve.kernels.weights import (
    SILU_GATES,
    ExpertBiases,
    Fp8Block,
    Fp8Weight,
    KernelShapes,
    PromptRuns,
    linears_of,
)

CHECKED_FP8_GROUP = 128
CHOICE_ROWS = 7


def linears(pair: Pair) -> Iterator[Comparison]:
    """Compare the plain products of a layer."""
    for name, (num_rows_of_weight, num_inputs) in linears_of(pair.shapes).items():
        num_outputs = min(num_rows_of_weight, max(16, MAX_WEIGHT_NUMBERS // num_inputs) // 2 * 2)
        weight = pair.random(num_outputs, num_inputs, scale=num_inputs**-0.5)
        bias = pair.random(num_outputs) if name == "qkv" and pair.shapes.qkv_bias else None
        wide_weight, wide_bias = weight.float(), None if bias is None else bias.float()
        operation = "gated_linear" if name == "gate_up" else "linear"
        packed = pair.kernels.pack_weight(weight, is_gated=name == "gate_up")
        for num_rows in PRODUCT_ROWS:
            x = pair.random(num_rows, num_inputs)
            with Poison():
                result = getattr(pair.kernels, operation)(x, packed, bias)
            truth = getattr(ReferenceKernels(), operation)(x.float(), wide_weight, wide_bias)
            shape = f"[{num_rows}, {num_inputs}] to {num_outputs}"
            yield Comparison(f"linear ({name})", shape, result, truth)
            is_normed = name in {"qkv", "gate_up"} and num_rows < PRODUCT_ROWS[-1]
            if is_normed and Can.NORM_PRODUCTS in pair.kernels.can:
                yield from _norm_products(pair, x, weight, bias, is_gated=name == "gate_up")


def _norm_products(
    pair: Pair, x: Tensor, weight: Tensor, bias: Tensor | None, *, is_gated: bool
) -> Iterator[Comparison]:
    """Add, normalise and multiply at once, as layers do."""
    eps = pair.shapes.rms_norm_eps
    if pair.device.type == "cpu":  # Triton's interpreter cuts bfloat16 off, here too often
        x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
    residual, norm = pair.random(*x.shape).to(x.dtype), pair.random(x.shape[1]).to(x.dtype)
    with Poison():
        result, total = pair.kernels.add_norm_linear(
            x, residual.clone(), (norm, eps), weight, bias, is_gated=is_gated
        )
    reference = ReferenceKernels()
    multiply = reference.gated_linear if is_gated else reference.linear
    normed = reference.rms_norm(total.float(), norm.float(), eps)  # of the sum as it is kept
    truth = multiply(normed, weight.float(), None if bias is None else bias.float())
    shape = f"{list(x.shape)} to {len(weight)}"
    yield Comparison("add_norm_linear", shape, total, x.float() + residual.float())
    yield Comparison("add_norm_linear", shape, result, truth)


def int8_linears(pair: Pair) -> Iterator[Comparison]:
    """Compare products by integers of 8 bits, and of integers by integers."""
    for name, (num_rows_of_weight, num_inputs) in linears_of(pair.shapes).items():
        num_outputs = min(num_rows_of_weight, max(16, MAX_WEIGHT_NUMBERS // num_inputs))
        weight = pair.random(num_outputs, num_inputs, scale=num_inputs**-0.5)
        packed, rounded = pair.kernels.quantize(weight), rounded_to_int8(weight)
        for num_rows in LINEAR_ROWS:
            x = pair.random(num_rows, num_inputs)
            with Poison():
                result = pair.kernels.linear(x, packed, None)
            truth = ReferenceKernels().linear(x.float(), rounded, None)
            shape = f"[{num_rows}, {num_inputs}] to {num_outputs}"
            yield Comparison(f"int8 linear ({name})", shape, result, truth)
        is_narrow = pair.shapes.dtype is torch.bfloat16
        if Can.FP8 in pair.kernels.can or (Can.ROUNDED_PROMPTS in pair.kernels.can and is_narrow):
            prompts = PromptRuns(np.array([len(x), 1, 0, len(x)]))
            with Poison():
                rounding = packed._replace(rounds_rows=True, prompts=prompts)
                result = pair.kernels.linear(x, rounding, None)
            truth = ReferenceKernels().linear(rounded_to_int8(x), rounded, None)
            yield Comparison(f"int8 by int8 linear ({name})", shape, result, truth)


def int4_linears(pair: Pair) -> Iterator[Comparison]:
    """Compare products by integers of 4 bits in groups."""
    for name, (num_rows_of_weight, num_inputs) in linears_of(pair.shapes).items():
        num_outputs = min(num_rows_of_weight, max(16, MAX_WEIGHT_NUMBERS // num_inputs))
        sizes = (num_outputs, -(-num_inputs // CHECKED_GROUP))
        drawn: dict[str, Any] = {"generator": pair.generator, "device": pair.device}
        integers = torch.randint(16, (num_outputs, num_inputs), **drawn)
        factors = pair.random(*sizes, scale=0.2 * num_inputs**-0.5).half()
        zeros = torch.randint(16, sizes, **drawn)
        packed = pair.kernels.pack_groups(
            integers.byte(), factors, zeros.byte(), bits=4, group_size=CHECKED_GROUP
        )
        wide = numbers_of_groups(integers, factors, zeros, CHECKED_GROUP)
        for num_rows in LINEAR_ROWS:
            x = pair.random(num_rows, num_inputs)
            with Poison():
                result = pair.kernels.linear(x, packed, None)
            truth = ReferenceKernels().linear(x.float(), wide, None)
            shape = f"[{num_rows}, {num_inputs}] to {num_outputs}"
            yield Comparison(f"int4 linear ({name})", shape, result, truth)


def fp8_linears(pair: Pair) -> Iterator[Comparison]:
    """Compare products by floating point of 8 bits: with factors of groups, and of outputs."""
    for name, (num_rows_of_weight, num_inputs) in linears_of(pair.shapes).items():
        num_outputs = min(num_rows_of_weight, max(16, MAX_WEIGHT_NUMBERS // num_inputs))
        values = pair.random(num_outputs, num_inputs).to(torch.float8_e4m3fn)
        for size in dict.fromkeys((CHECKED_FP8_GROUP, num_inputs)):
            sizes = (num_outputs, -(-num_inputs // size))
            factors = pair.random(*sizes, scale=num_inputs**-0.5).float()
            packed = pair.kernels.pack_fp8(values, factors, group_size=size)
            wide = values.float() * factors.repeat_interleave(size, dim=1)[:, :num_inputs]
            for num_rows in LINEAR_ROWS:
                x = pair.random(num_rows, num_inputs)
                with Poison():
                    result = pair.kernels.linear(x, packed, None)
                truth = ReferenceKernels().linear(x.float(), wide, None)
                shape = f"[{num_rows}, {num_inputs}] to {num_outputs}"
                yield Comparison(f"fp8 linear ({name})", shape, result, truth)
                if Can.FP8_PRODUCTS not in pair.kernels.can:
                    continue
                with Poison():
                    result = pair.kernels.linear(x, packed._replace(rounds_rows=True), None)
                truth = ReferenceKernels().linear(rounded_to_e4m3(x, size), wide, None)
                yield Comparison(f"fp8 by fp8 linear ({name})", shape, result, truth)
    if Can.FP8_PRODUCTS in pair.kernels.can:
        yield from _fp8_blocks(pair)


def _fp8_blocks(pair: Pair) -> Iterator[Comparison]:
    """Compare norms and gates that round what they give with the same and products by themselves.

    Those have been compared with the reference; of it features between two codes would go either
    way.
    """
    kernels, eps, hidden = pair.kernels, pair.shapes.rms_norm_eps, pair.shapes.hidden_size
    size = min(pair.shapes.intermediate_size, MAX_WEIGHT_NUMBERS // hidden // 64 * 64)
    if size == 0 or hidden == 0:
        return

    def weight(outputs: int, inputs: int, group: int, *, is_gated: bool) -> Fp8Weight:
        values = pair.random(outputs, inputs).to(torch.float8_e4m3fn)
        factors = pair.random(outputs, -(-inputs // group), scale=inputs**-0.5).float()
        packed = kernels.pack_fp8(values, factors, group_size=group, is_gated=is_gated)
        return packed._replace(rounds_rows=True)

    for groups in ((CHECKED_FP8_GROUP, CHECKED_FP8_GROUP), (hidden, size)):
        first = weight(2 * size, hidden, groups[0], is_gated=True)
        second = weight(hidden, size, groups[1], is_gated=False)
        norm = pair.random(hidden)
        for num_rows in LINEAR_ROWS:
            x, residual = pair.random(num_rows, hidden), pair.random(num_rows, hidden)
            shape = f"[{num_rows}, {hidden}], {size} features"
            rows, total = kernels.add_rms_norm(x.clone(), residual.clone(), norm, eps)
            gated = kernels.linear(rows, first, None)
            truth = kernels.linear(gated, second, None)
            with Poison():
                result, kept = kernels.add_norm_linear(
                    x.clone(), residual.clone(), (norm, eps), first, None, is_gated=True
                )
                block = Fp8Block(first, None, second)
                found, again = kernels.add_norm_linear(
                    x.clone(), residual, (norm, eps), block, None, is_gated=False
                )
            yield Comparison("fp8 add_norm_linear", shape, result, gated)
            yield Comparison("fp8 add_norm_linear", shape, kept, total)
            yield Comparison("fp8 block", shape, found, truth)
            yield Comparison("fp8 block", shape, again, total)


def _expert_sizes(shapes: KernelShapes) -> tuple[int, int]:
    """Return inputs of an expert, and how many of its features are tried: of a large one, fewer."""
    num_inputs = shapes.expert_inputs or shapes.hidden_size
    most = MAX_WEIGHT_NUMBERS // (3 * num_inputs) // CHECKED_GROUP * CHECKED_GROUP
    return num_inputs, min(shapes.expert_size, max(CHECKED_GROUP, most))


def expert_choices(pair: Pair) -> Iterator[Comparison]:
    """Compare the experts of a few tokens and their weights, beside torch's."""
    choice, num_experts = pair.shapes.expert_choice, pair.shapes.num_experts
    if choice is None:
        return
    drawn: dict[str, Any] = {"generator": pair.generator, "device": pair.device}
    products = torch.randn(CHOICE_ROWS, num_experts, **drawn)
    bias = 0.1 * torch.randn(num_experts, **drawn) if pair.shapes.has_choice_bias else None
    found, truth = (
        torch.zeros_like(products).scatter(1, *choose(products, bias, choice))
        for choose in (pair.kernels.choose_experts, ReferenceKernels().choose_experts)
    )
    yield Comparison("choose_experts", f"{choice.num_chosen} of {num_experts}", found, truth)


def expert_products(pair: Pair) -> Iterator[Comparison]:
    """Compare products of a few experts: as many as tokens choose, and one that none does."""
    shapes, is_joint = pair.shapes, Can.EXPERTS in pair.kernels.can
    activation = shapes.expert_activation
    if not is_joint and (activation != SILU_GATES or shapes.has_expert_biases):
        return
    num_chosen, (hidden, size) = shapes.num_chosen_experts, _expert_sizes(shapes)
    num_experts = min(shapes.num_experts, num_chosen + 1)
    num_first = activation.num_parts * size
    gate_up = pair.random(num_experts, num_first, hidden, scale=hidden**-0.5)
    down = pair.random(num_experts, hidden, size, scale=size**-0.5)

    mixer: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    if not is_joint:
        packed = [
            (pair.kernels.pack_weight(first, is_gated=True), pair.kernels.pack_weight(second))
            for first, second in zip(gate_up, down, strict=True)
        ]
        mixer = pair.kernels.expert_mixer(packed, shapes.dtype)
        if mixer is None:
            return

    def mix(kernels: Kernels, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        if kernels is pair.kernels and mixer is not None:
            return (mixer(*args[:3]),)
        biases = ExpertBiases(*args[5:]) if shapes.has_expert_biases else None
        return (kernels.mix_experts(*args[:5], biases=biases, activation=activation),)

    for num_tokens in LINEAR_ROWS:
        x = pair.random(num_tokens, hidden)
        order = pair.random(num_tokens, num_chosen).float().argsort(dim=1)
        weights = pair.random(num_tokens, num_chosen).float().softmax(dim=1)
        biases: tuple[Tensor, ...] = ()
        if shapes.has_expert_biases:
            biases = (pair.random(num_experts, num_first), pair.random(num_experts, hidden))
        yield from pair.compare(
            "mix_experts",
            f"{num_tokens} tokens, {num_chosen} of {num_experts} experts of {size}",
            mix,
            (x, order, weights, gate_up, down, *biases),
        )


def packed_expert_products(pair: Pair) -> Iterator[Comparison]:
    """Compare products of a few experts whose numbers have 4 bits."""
    kernels, shapes, num_experts = pair.kernels, pair.shapes, pair.shapes.num_chosen_experts + 1
    hidden, num_features = _expert_sizes(shapes)
    activation, packed, wide = shapes.expert_activation, [], []
    num_first = activation.num_parts * num_features
    for outputs, inputs in ((num_first, hidden), (hidden, num_features)):
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
            found = kernels.mix_experts(x, order, weights, *packed, activation=activation)
        truth = ReferenceKernels().mix_experts(
            x.float(), order, weights, *wide, activation=activation
        )
        text = f"{num_tokens} tokens, {num_experts} experts of {num_features}"
        yield Comparison("packed mix_experts", text, found, truth)
