"""Products of experts: the reference, and Triton's, against one expert after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.kernel_grid import SMALL_SHAPES, Poisoned
from torch import Tensor
from torch.nn import functional

from lightserve.kernels import check_products
from lightserve.kernels.check_pair import Pair
from lightserve.kernels.check_products import (
    expert_choices,
    expert_products,
    packed_expert_products,
)
from lightserve.kernels.cpu.default import TorchKernels
from lightserve.kernels.cpu.native import NativeKernels
from lightserve.kernels.interface import Kernels
from lightserve.kernels.reference import ReferenceKernels, rounded_to_int8
from lightserve.kernels.select import missing_core
from lightserve.kernels.self_check import _comparisons
from lightserve.kernels.triton.kernels import TritonKernels
from lightserve.kernels.weights import BlockActivation, ExpertBiases, ExpertChoice, Fp8Weight
from lightserve.types import Activation

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}

SHAPES = replace(SMALL_SHAPES, num_experts=9)

# tokens, experts, chosen, inputs, intermediate features
CASES = [
    (1, 8, 2, 64, 96),
    (5, 3, 3, 72, 40),
    (33, 5, 1, 100, 130),
    (90, 2, 2, 64, 24),
    (0, 4, 2, 64, 32),
    (17, 130, 6, 32, 16),
    (2050, 4, 2, 8, 8),
]


def inputs(
    case: tuple[int, int, int, int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_tokens, num_experts, num_chosen, hidden, size = case
    torch.manual_seed(num_tokens)
    x = torch.randn(num_tokens, hidden + 8).to(dtype)[:, 3 : 3 + hidden]
    # Some experts are chosen by no token, others by most.
    popularity = torch.linspace(-2.0, 2.0, num_experts)
    scores = torch.randn(num_tokens, num_experts) + popularity
    weights, chosen = scores.softmax(-1).topk(num_chosen, dim=-1)
    gate_up = (torch.randn(num_experts, 2 * size, hidden) / hidden**0.5).to(dtype)
    down = (torch.randn(num_experts, hidden, size) / size**0.5).to(dtype)
    return x, chosen, weights, gate_up, down


def one_by_one(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    out = torch.zeros(x.shape)
    for token, (experts, shares) in enumerate(zip(chosen.tolist(), weights, strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            gate, up = (gate_up[expert].float() @ x[token].float()).chunk(2)
            out[token] += share * (down[expert].float() @ (functional.silu(gate) * up))
    return out


def error(result: Tensor, truth: Tensor) -> float:
    assert result.shape == truth.shape
    if not truth.numel():
        return 0.0
    return float((result.float() - truth.float()).norm() / truth.float().norm())


@pytest.mark.parametrize("case", CASES)
def test_the_reference(case: tuple[int, int, int, int, int]) -> None:
    args = inputs(case, torch.float32)
    assert error(ReferenceKernels().mix_experts(*args), one_by_one(*args)) < 1e-5


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", LIMITS)
def test_triton(case: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    args = inputs(case, dtype)
    with Poisoned():
        result = TritonKernels().mix_experts(*args)
    assert result.dtype is dtype
    assert error(result, one_by_one(*args)) <= LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS)
def test_biases_and_clamped_gates(dtype: torch.dtype) -> None:
    """Gates of gpt-oss; without them, or with biases of another expert, it is another result."""
    x, chosen, weights, gate_up, down = inputs(CASES[2], dtype)
    gate = BlockActivation(Activation.CLAMPED_SILU, alpha=1.702, limit=1.5)
    biases = ExpertBiases(torch.randn(gate_up.shape[:2]).to(dtype), torch.randn(5, 100).to(dtype))
    truth = torch.zeros(x.shape)
    for token, (expert, share) in enumerate(zip(chosen[:, 0].tolist(), weights[:, 0], strict=True)):
        features = gate_up[expert].float() @ x[token].float() + biases.gate_up[expert].float()
        gates, ups = features.chunk(2)
        gates, ups = gates.clamp(max=1.5), ups.clamp(-1.5, 1.5)
        gated = gates * torch.sigmoid(1.702 * gates) * (ups + 1.0)
        truth[token] = share * (down[expert].float() @ gated + biases.down[expert].float())

    def run(kernels: Kernels, **options: Any) -> float:
        return error(kernels.mix_experts(x, chosen, weights, gate_up, down, **options), truth)

    for kernels in (ReferenceKernels(), TritonKernels()):
        assert run(kernels, biases=biases, activation=gate) <= LIMITS[dtype]
        others = ExpertBiases(biases.gate_up.roll(1, 0), biases.down)
        for wrong in (
            {"biases": biases},
            {"activation": gate},
            {"biases": others, "activation": gate},
        ):
            assert run(kernels, **wrong) > 2 * LIMITS[dtype]


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: functional.silu,
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: partial(functional.gelu, approximate="tanh"),
    Activation.RELU: functional.relu,
    Activation.RELU_SQUARED: lambda x: x.clamp(min=0) ** 2,
    Activation.QUICK_GELU: lambda x: x * torch.sigmoid(1.702 * x),
}


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(kind: Activation, *, is_gated: bool) -> None:
    """Those of gates and of whole products; another activation is another result."""
    x, chosen, weights, gate_up, down = inputs(CASES[1], torch.float32)
    if not is_gated:
        gate_up = gate_up[:, : gate_up.shape[1] // 2].contiguous()
    truth = torch.zeros(x.shape)
    for token, (experts, shares) in enumerate(zip(chosen.tolist(), weights, strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            first, *ups = (gate_up[expert] @ x[token]).chunk(2 if is_gated else 1)
            features = ACTIVATIONS[kind](first) * (ups[0] if is_gated else 1.0)
            truth[token] += share * (down[expert] @ features)
    for kernels in (ReferenceKernels(), TritonKernels()):
        errors = {
            other: error(
                kernels.mix_experts(
                    *(x, chosen, weights, gate_up, down),
                    activation=BlockActivation(other, is_gated=is_gated),
                ),
                truth,
            )
            for other in ACTIVATIONS
        }
        assert errors.pop(kind) <= LIMITS[torch.float32]
        assert min(errors.values()) > 10 * LIMITS[torch.float32]


def test_what_the_limits_show() -> None:
    """An expert too few, weights of other tokens, gates in place of ups."""
    x, chosen, weights, gate_up, down = inputs(CASES[5], torch.bfloat16)
    truth = one_by_one(x, chosen, weights, gate_up, down)
    kernels, limit = TritonKernels(), LIMITS[torch.bfloat16]
    few = kernels.mix_experts(x, chosen[:, :5], weights[:, :5], gate_up, down)
    others = kernels.mix_experts(x, chosen, weights.roll(1, dims=0), gate_up, down)
    turned = kernels.mix_experts(x, chosen, weights, gate_up.roll(16, dims=1), down)
    assert all(error(wrong, truth) > 2 * limit for wrong in (few, others, turned))


def test_the_check_at_the_start() -> None:
    """It compares experts where a model has any, with kernels that multiply by several at once."""

    class Broken(TritonKernels):
        def mix_experts(self, x: Tensor, chosen: Tensor, *args: Any, **options: Any) -> Tensor:
            return super().mix_experts(x, chosen.roll(1, dims=0), *args, **options)

    limit = LIMITS[torch.bfloat16]

    class BrokenInTurn(NativeKernels):
        def expert_mixer(self, experts: Any, dtype: torch.dtype) -> Any:
            return super().expert_mixer(experts[::-1], dtype)

    checked = [(TritonKernels(), True), (Broken(), False)]
    if not missing_core():
        checked += [(NativeKernels(), True), (BrokenInTurn(), False)]
    for kernels, agrees in checked:
        pair = Pair(kernels, SHAPES, torch.device("cpu"))
        errors = [
            comparison.error()
            for comparison in _comparisons(pair)
            if comparison.operation == "mix_experts"
        ]
        assert len(errors) == 3 and (max(errors) <= limit) == agrees, errors
    assert not list(expert_products(Pair(TorchKernels(), SHAPES, torch.device("cpu"))))
    squared = BlockActivation(Activation.RELU_SQUARED, is_gated=False)
    latent = replace(SHAPES, expert_inputs=24, expert_activation=squared)
    for kernels, agrees in ((TritonKernels(), True), (Broken(), False)):
        for comparison in expert_products(Pair(kernels, latent, torch.device("cpu"))):
            assert comparison.result.shape[1] == 24
            assert (comparison.error() <= limit) == (agrees or len(comparison.result) == 1)


@pytest.mark.parametrize("products", [expert_products, packed_expert_products])
def test_parts_of_large_experts(products: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check at the start takes some features of an expert, and groups of them whole."""
    monkeypatch.setattr(check_products, "MAX_WEIGHT_NUMBERS", 3 * 96 * 70)
    for size, tried in ((40, 40), (80, 64), (14336, 64)):
        pair = Pair(TritonKernels(), replace(SHAPES, expert_size=size), torch.device("cpu"))
        assert next(products(pair)).shape.endswith(f" of {tried}")


needs_core = pytest.mark.skipif(bool(missing_core()), reason=missing_core())
NATIVE_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@needs_core
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", NATIVE_LIMITS)
@pytest.mark.parametrize("method", ["plain", "int8", "int4"])
def test_native(case: tuple[int, int, int, int, int], dtype: torch.dtype, method: str) -> None:
    """Weights as a method keeps them, beside numbers that are the same."""
    kernels = NativeKernels()
    x, chosen, weights, gate_up, down = inputs(case, dtype)

    def packed(weight: Tensor, *, is_gated: bool) -> object:
        if method == "int8":
            return kernels.quantize(weight, is_gated=is_gated)
        if method == "int4":
            return kernels.quantize_groups(weight, 32, is_gated=is_gated)
        return kernels.pack_weight(weight, is_gated=is_gated)

    def numbers(weight: Tensor) -> Tensor:
        if method == "int8":
            return rounded_to_int8(weight)
        if method == "int4":
            own = kernels.quantize_groups(weight, 32)
            return kernels.linear(torch.eye(weight.shape[1]), own, None).T
        return weight.float()

    mix = kernels.expert_mixer(
        [
            (packed(first, is_gated=True), packed(second, is_gated=False))
            for first, second in zip(gate_up, down, strict=True)
        ],
        dtype,
    )
    assert mix is not None
    with Poisoned():
        result = mix(x, chosen, weights)
    assert result.dtype is dtype
    both = (torch.stack([numbers(own) for own in part]) for part in (gate_up, down))
    truth = ReferenceKernels().mix_experts(x.float(), chosen, weights, *both)
    assert error(result, truth) < NATIVE_LIMITS[dtype]


@needs_core
@pytest.mark.parametrize("groups", [(1, 1, 1, 0.5), (3, 2, 2)])
def test_choices_are_checked_at_the_start(groups: tuple[Any, ...]) -> None:
    class Broken(NativeKernels):
        def choose_experts(self, products: Tensor, bias: Any, choice: Any) -> Any:
            return super().choose_experts(products, None, choice)

    choice = ExpertChoice(2, True, True, 2.5, *groups)
    shapes = replace(SHAPES, expert_choice=choice, has_choice_bias=True)
    for kernels, agrees in ((NativeKernels(), True), (Broken(), False)):
        comparison = next(expert_choices(Pair(kernels, shapes, torch.device("cpu"))))
        assert (comparison.error() <= 1e-5) == agrees


@needs_core
def test_what_the_native_core_does_not_mix() -> None:
    kernels, weight = NativeKernels(), torch.randn(4, 8)
    pair = (kernels.pack_weight(weight, is_gated=True), kernels.pack_weight(torch.randn(8, 2)))
    assert kernels.expert_mixer([pair], torch.float16) is None
    other = Fp8Weight(weight, weight, 8)
    assert kernels.expert_mixer([pair, (pair[0], other)], torch.float32) is None
    mix = kernels.expert_mixer([pair, pair], torch.float32)
    assert mix is not None
    for wrong in (2, -1):
        with pytest.raises(IndexError, match="not below 2"):
            mix(torch.randn(1, 8), torch.tensor([[0, wrong]]), torch.ones(1, 2))
