"""Products by packed weights in Triton's kernels: exactness, borders, whole files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.grids import choose, long_but
from support.kernel_grid import LIMITS, SMALL_SHAPES, Poisoned, relative_error
from support.model_runs import load_tiny
from support.parity import TokenSequence, schedule
from support.quantised_files import quantise
from support.tiny_models import TinyModel, find_tiny_model, write_tiny_model
from torch import Tensor

from lightserve.errors import ConfigError, StartupError
from lightserve.kernels.cpu.default import TorchKernels
from lightserve.kernels.cpu.native import NativeKernels
from lightserve.kernels.interface import Can, Kernels
from lightserve.kernels.reference import (
    ReferenceKernels,
    numbers_of_fp4,
    numbers_of_groups,
    rounded_to_e4m3,
    rounded_to_int8,
)
from lightserve.kernels.select import missing_core
from lightserve.kernels.self_check import check_quantized
from lightserve.kernels.triton import experts, quantized
from lightserve.kernels.triton.kernels import TritonKernels
from lightserve.kernels.triton.norms import RoundedRows
from lightserve.kernels.weights import SILU_GATES, BlockActivation, ExpertBiases, Fp8Weight, Packed
from lightserve.models.config import load_model_config
from lightserve.models.layers.linear import (
    Linear,
    LinearMethod,
    ModuleShard,
    UnquantizedMethod,
    WeightReader,
    merged_shards,
)
from lightserve.models.layers.quantized import (
    Fp8Method,
    Int4Method,
    Int8Method,
    StoredMethod,
    packed_weight,
    rounded_to_fp8,
)
from lightserve.models.stored_weights import StoredWeight, fp8_of
from lightserve.types import Activation
from lightserve.worker import build
from lightserve.worker.build import linear_method

KERNELS = TritonKernels()
SIZES = [(1, 70, 200), (5, 33, 96), (40, 130, 64), (3, 64, 300)]
"""(rows, outputs, inputs): borders of blocks on both sides."""


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(
    found: Tensor,
    x: Tensor,
    numbers: Tensor,
    bias: Tensor | None,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Compare with the product by the same numbers, and see that others would be noticed."""
    truth = ReferenceKernels().linear(x.float(), numbers, None if bias is None else bias.float())
    dtype = dtype or x.dtype
    limit = 1e-5 if dtype is torch.float32 else LIMITS[dtype] / 4
    assert found.dtype is dtype and relative_error(found, truth) <= limit
    assert relative_error(found, truth.flip(1)) > 0.1


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("size", SIZES)
def test_integers_of_8_bits(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, outputs, inputs = size
    x, bias = normal(rows, inputs + 8, dtype=dtype)[:, :inputs], normal(outputs, dtype=dtype)
    weight = normal(outputs, inputs, seed=1)
    weight[3] = 0.0
    packed = KERNELS.quantize(weight)
    with Poisoned():
        found = KERNELS.linear(x, packed, bias)
    numbers = rounded_to_int8(weight)
    check(found, x, numbers, bias)
    wide = KERNELS.linear(x, packed, None, dtype=torch.float32)
    assert wide.dtype is torch.float32
    look_up = KERNELS.rows_of(packed, inputs, torch.float32)
    assert torch.equal(look_up(torch.tensor([4, 0])), numbers[[4, 0]])


@pytest.mark.parametrize("dtype", LIMITS)
def test_integers_by_integers(dtype: torch.dtype) -> None:
    """Of many rows, each rounded by its own largest number; few stay as they are."""
    for rows, outputs, inputs in ((40, 130, 64), (33, 70, 200)):
        x, bias = normal(rows, inputs, dtype=dtype), normal(outputs, dtype=dtype)
        x *= torch.logspace(-3, 3, rows)[:, None].to(dtype)
        x[2] = 0.0
        weight = normal(outputs, inputs, seed=1)
        packed, numbers = KERNELS.quantize(weight), rounded_to_int8(weight)
        rounding = packed._replace(rounds_rows=True)
        with Poisoned():
            found = KERNELS.linear(x, rounding, bias)
        check(found, rounded_to_int8(x), numbers, bias, dtype=dtype)
        exact = x.float() @ numbers.T
        assert relative_error(KERNELS.linear(x, rounding, None), exact) > 3e-3
        few = KERNELS.linear(x[:32], rounding, bias)
        assert torch.equal(few, KERNELS.linear(x[:32], packed, bias))
        x[5, 3] = torch.nan
        is_good = torch.arange(rows) != 5
        found = KERNELS.linear(x, rounding, bias)
        assert found[5].isnan().all() and found[is_good].isfinite().all()


@pytest.mark.parametrize(
    ("size", "bits", "group_size"),
    long_but(
        [(size, bits, group) for size in SIZES for bits in (4, 8) for group in (32, 64, 96, 128)],
        [
            (SIZES[i % 4], bits, group)
            for i, (bits, group) in enumerate(
                [(4, 32), (4, 64), (4, 96), (4, 128), (8, 32), (8, 96), (8, 128)]
            )
        ],
    ),
)
def test_integers_in_groups(size: tuple[int, int, int], bits: int, group_size: int) -> None:
    rows, outputs, inputs = size
    num_groups = -(-inputs // group_size)
    integers = torch.randint(2**bits, (outputs, inputs), dtype=torch.uint8)
    zeros = torch.randint(2**bits, (outputs, num_groups), dtype=torch.uint8)
    factors = normal(outputs, num_groups, seed=2).half()
    packed = KERNELS.pack_groups(integers, factors, zeros, bits=bits, group_size=group_size)
    numbers = numbers_of_groups(integers, factors, zeros, group_size)
    if bits == 4:
        assert packed.packed.nbytes <= (outputs * (inputs + 127)) // 2
    for dtype in (torch.float32, torch.bfloat16):
        x, bias = normal(rows, inputs, dtype=dtype, seed=3), normal(outputs, dtype=dtype)
        with Poisoned():
            found = KERNELS.linear(x, packed, bias)
        check(found, x, numbers, bias)


@pytest.mark.parametrize("group_size", [64, 128, 1000])
def test_floating_point_of_8_bits(group_size: int) -> None:
    for rows, outputs, inputs in SIZES[:: choose(2, 1)]:
        values = normal(outputs, inputs).to(torch.float8_e4m3fn)
        factors = normal(outputs, -(-inputs // group_size), seed=4)
        packed = KERNELS.pack_fp8(values, factors, group_size=group_size)
        grid = factors.repeat_interleave(group_size, dim=1)[:, :inputs]
        for dtype in (torch.float32, torch.bfloat16):
            x = normal(rows, inputs, dtype=dtype, seed=5)
            with Poisoned():
                found = KERNELS.linear(x, packed, None)
            check(found, x, values.float() * grid, None)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinity times 0
@pytest.mark.parametrize("group_size", [64, 128, 1000])
def test_floating_point_of_8_bits_on_both_sides(group_size: int) -> None:
    """Rows are rounded whatever their number, each alone, by the largest of each group."""
    for rows, outputs, inputs in ((1, 70, 200), (40, 130, 256)):
        values = normal(outputs, inputs).to(torch.float8_e4m3fn)
        factors = normal(outputs, -(-inputs // group_size), seed=4)
        packed = KERNELS.pack_fp8(values, factors, group_size=group_size)
        rounding = packed._replace(rounds_rows=True)
        grid = factors.repeat_interleave(group_size, dim=1)[:, :inputs]
        for dtype in (torch.float32, torch.bfloat16):
            x, bias = normal(rows, inputs + 8, dtype=dtype, seed=5)[:, :inputs], normal(outputs)
            x *= torch.logspace(-3, 3, rows)[:, None].to(dtype)
            x[rows // 2] = 0.0
            if rows == 1:
                x[0, 5] = 1.0
            with Poisoned():
                found = KERNELS.linear(x, rounding, bias.to(dtype))
            numbers = values.float() * grid
            check(found, rounded_to_e4m3(x, group_size), numbers, bias.to(dtype), dtype=dtype)
            assert torch.equal(KERNELS.linear(x[:1], rounding, bias.to(dtype)), found[:1])
            if rows > 1:
                exact = x.float() @ numbers.T
                assert relative_error(KERNELS.linear(x, rounding, None), exact) > 1e-2
                x[5, 3], x[7, 9] = torch.nan, torch.inf
                found, is_good = KERNELS.linear(x, rounding, None), torch.ones(rows).bool()
                is_good[[5, 7]] = False
                assert found[is_good].isfinite().all() and found[~is_good].isnan().any(1).all()


def test_experts_of_floating_point_on_both_sides() -> None:
    """Rows are rounded before gates and ups, features before downs."""
    num_experts, size, hidden = 3, 128, 192
    for group, num_tokens in ((64, 4), (1000, 100)):
        x = normal(num_tokens, hidden)
        chosen = torch.stack([torch.randperm(num_experts)[:2] for _ in range(num_tokens)])
        weights, packed, plain = torch.rand(num_tokens, 2), [], []
        for sizes in ((2 * size, hidden), (hidden, size)):
            own = []
            for seed in range(num_experts):
                values = normal(*sizes, seed=seed).to(torch.float8_e4m3fn)
                factors = torch.rand(sizes[0], -(-sizes[1] // group)) / 10
                weight = KERNELS.pack_fp8(values, factors, group_size=group)
                grid = factors.repeat_interleave(group, dim=1)[:, : sizes[1]]
                own.append((weight._replace(rounds_rows=True), values.float() * grid))
            packed.append(KERNELS.stack_experts([weight for weight, _ in own]))
            plain.append([numbers for _, numbers in own])
        found = KERNELS.mix_experts(x, chosen, weights, *packed)
        truth = torch.zeros_like(x)
        rounded = rounded_to_e4m3(x, group)
        for expert in range(num_experts):
            features = ReferenceKernels().silu_and_mul(rounded @ plain[0][expert].T)
            added = rounded_to_e4m3(features, group) @ plain[1][expert].T
            truth += added * (weights * (chosen == expert)).sum(1, keepdim=True)
        # A feature at the border between two codes may go either way.
        assert relative_error(found, truth) < 3e-3


def test_products_of_8_bits_are_checked_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = TritonKernels()
    kernels.can |= Can.FP8_PRODUCTS
    assert Can.FP8_PRODUCTS not in TritonKernels.can
    check_quantized(kernels, SMALL_SHAPES, torch.device("cpu"), ~Packed.NONE)
    exact = quantized.round_rows

    def larger(x: Tensor, group: int) -> RoundedRows:
        rows = exact(x, group)
        return rows._replace(factors=1.1 * rows.factors)

    monkeypatch.setattr(quantized, "round_rows", larger)
    with pytest.raises(StartupError, match="fp8 by fp8 linear"):
        check_quantized(kernels, SMALL_SHAPES, torch.device("cpu"), ~Packed.NONE)


def test_files_of_floating_point_are_multiplied_in_8_bits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In blocks and by outputs, experts among them, where the GPU can; it is said either way."""
    tiny = replace(find_tiny_model("mixtral"), sharded=False)
    path = quantise(
        write_tiny_model(tiny, tmp_path / "plain"), tmp_path / "packed", "fp8 of an output"
    )
    logits = {}
    for has_products in (False, True):
        kernels = TritonKernels()
        if has_products:
            kernels.can |= Can.FP8_PRODUCTS
        method = StoredMethod(kernels)
        logits[has_products] = logits_of(path, kernels, method)
        assert method.num_fp8 == method.num_kept > 0
        with caplog.at_level("INFO"):
            build._tell_of_stored("fp8, 8 bits", method, "bfloat16", is_said=True)
        said = "activations are rounded to FP8" if has_products else "weights alone, made numbers"
        assert f"FP8 weights: {said}" in caplog.text
        caplog.clear()
    assert 5e-3 < relative_error(logits[True], logits[False]) < 0.2


def test_every_number_of_8_bits_is_itself() -> None:
    """Of either sign, those too small for an exponent among them."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    values = codes.view(torch.float8_e4m3fn)[:, None]
    packed = KERNELS.pack_fp8(values, torch.ones(len(codes), 1), group_size=1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = KERNELS.linear(torch.ones(1, 1, dtype=dtype), packed, None)
        assert torch.equal(found[0].float(), values[:, 0].float())


def test_gates_and_ups() -> None:
    x, weight, bias = normal(3, 128), normal(96, 128, seed=1), normal(96, seed=2)
    fp8 = weight.to(torch.float8_e4m3fn)
    for packed in (
        KERNELS.quantize(weight, is_gated=True),
        KERNELS.quantize_groups(weight, 32, is_gated=True),
        KERNELS.pack_fp8(fp8, torch.ones(96, 1), group_size=128, is_gated=True),
    ):
        plain = KERNELS.linear(x, packed._replace(is_gated=False), bias)
        gated = KERNELS.linear(x, packed, bias)
        torch.testing.assert_close(gated, ReferenceKernels().silu_and_mul(plain))


@pytest.mark.skipif(bool(missing_core()), reason=missing_core())
def test_4_bits_are_rounded_as_the_native_core_does() -> None:
    weight = normal(40, 300) * torch.logspace(-3, 3, 40)[:, None]
    weight[3], weight[4, :32], weight[5] = 0.0, 1e-9, weight[5].abs()
    native, eye = NativeKernels(), torch.eye(300)
    for size in (32, 128):
        truth = native.linear(eye, native.quantize_groups(weight, size), None).T
        found = KERNELS.linear(eye, KERNELS.quantize_groups(weight, size), None).T
        lost = [float((numbers - weight).square().sum()) for numbers in (truth, found)]
        assert lost[1] <= 1.001 * lost[0]
    weight[1, 40] = 2e6
    assert KERNELS.quantize_groups(weight, 32).factors.isinf().sum() == 1


def test_parts_of_blocks_begin_where_a_factor_does() -> None:
    """A rank's inputs may begin within a block of 128: then factors are of 64; else they widen."""

    def part(first: int, factors: int) -> StoredWeight:
        values = normal(4, 256).to(torch.float8_e4m3fn)
        own = torch.arange(4 * factors, dtype=torch.float32).view(4, factors)
        return StoredWeight(values, own, None, 8, 128, first)

    whole, late = fp8_of([part(0, 2)] * 2), fp8_of([part(64, 3)])
    assert whole is not None and (whole.group_size, len(whole.values)) == (128, 8)
    assert late is not None and late.group_size == 64
    assert late.factors[0].tolist() == [0.0, 1.0, 1.0, 2.0]
    assert fp8_of([part(32, 3)]) is None


@pytest.mark.parametrize(("num_ranks", "group"), [(1, 128), (2, 64), (3, 0), (4, None)])
def test_parts_of_blocks_add_up(num_ranks: int, group: int | None) -> None:
    """Ranks that begin within a block of inputs; None: theirs are made numbers of."""
    values, factors = normal(70, 384).to(torch.float8_e4m3fn), torch.rand(70, 3) + 0.1
    x, size, total = normal(5, 384, seed=1), 384 // num_ranks, torch.zeros(5, 70)
    for start in range(0, 384, size):
        end = start + size
        own = factors[:, start // 128 : -(-end // 128)]
        stored = StoredWeight(values[:, start:end].clone(), own, None, 8, 128, start % 128)
        packed = packed_weight(KERNELS, [stored], torch.device("cpu"))
        if packed is None:
            assert group is None and start % 64
            total += x[:, start:end] @ stored.numbers().T
            continue
        assert isinstance(packed, Fp8Weight)
        assert group is None or packed.group == group or start % 128 == 0
        total += KERNELS.linear(x[:, start:end], packed, None)
    whole = values.float() * factors.repeat_interleave(128, dim=1)
    assert relative_error(total, x @ whole.T) < 1e-5


PLAIN = TinyModel("", "Llama", {"attention_bias": True, "vocab_size": 203, "num_hidden_layers": 1})
KEPT = {
    "gptq": 4,
    "awq": 4,
    "w4a16 asymmetric": 4,
    "w8a8": 4,
    "fp8 of an output": 4,
    "fp8 blocks": 0,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(PLAIN, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("name", KEPT)
def test_a_model_is_what_its_files_say(name: str, plain: Path, tmp_path: Path) -> None:
    path, tokens = quantise(plain, tmp_path, name), torch.arange(7, 37)

    def logits(directory: Path, kernels: Kernels, method: StoredMethod | None) -> Tensor:
        loaded = load_tiny(directory, torch.float32, kernels, method=method)
        passes = schedule([len(tokens)], chunk=20, num_decodes=2)
        results = loaded.run([TokenSequence(tokens, torch.empty(0))], passes)
        assert results is not None
        return results[0].float()

    method = linear_method("none", KERNELS, torch.float32, is_stored=True)
    assert isinstance(method, StoredMethod)
    found = logits(path, KERNELS, method)
    assert (method.num_kept, method.num_widened) == (KEPT[name], 4 - KEPT[name])
    torch.testing.assert_close(
        found, logits(path / "numbers", ReferenceKernels(), None), rtol=1e-4, atol=1e-4
    )


def test_a_model_whose_files_round_activations(plain: Path, tmp_path: Path) -> None:
    """Of prompts, tokens that decode alone stay as they are."""
    path = quantise(plain, tmp_path, "w8a8 by token")
    form = load_model_config(path).weight_format
    assert form is not None and form.rounds_tokens
    method = linear_method("none", KERNELS, torch.float32, is_stored=True, rounds_tokens=True)
    tokens = torch.arange(7, 57)
    with patch.object(quantized, "linear_rounded", side_effect=quantized.linear_rounded) as calls:
        results = load_tiny(path, torch.float32, KERNELS, method=method).run(
            [TokenSequence(tokens, torch.empty(0))], schedule([50], chunk=40, num_decodes=2)
        )
    assert results is not None and {len(call.args[0]) for call in calls.call_args_list} > {40, 1}
    loaded = load_tiny(path / "numbers", torch.float32, ReferenceKernels())
    exact = loaded.run(
        [TokenSequence(tokens, torch.empty(0))], schedule([50], chunk=40, num_decodes=2)
    )
    assert exact is not None
    assert 1e-3 < relative_error(results[0].float(), exact[0].float()) < 5e-2


def test_triton_rounds_what_the_native_core_rounds() -> None:
    for name, method in (("int8", Int8Method), ("int4", Int4Method)):
        for dtype in (torch.bfloat16, torch.float16):
            assert type(linear_method(name, KERNELS, dtype)) is method
    with pytest.raises(ConfigError, match="needs the native core for CPUs, got reference kernels"):
        linear_method("int4", ReferenceKernels(), torch.bfloat16)


SHAPES = replace(SMALL_SHAPES, dtype=torch.float32, num_experts=4)


@pytest.mark.parametrize(
    "operation",
    ["linear_int8", "linear_rounded", "linear_groups", "linear_fp8", "mix_experts"],
)
def test_the_check_at_the_start(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(*args: Any, **options: Any) -> Tensor:
        result: Tensor = multiply(*args, **options)
        return result.roll(1, dims=1)

    module = experts if operation == "mix_experts" else quantized
    cpu, multiply = torch.device("cpu"), getattr(module, operation)
    if operation == "linear_fp8":
        check_quantized(KERNELS, SHAPES, cpu, ~Packed.NONE)
    monkeypatch.setattr(module, operation, shifted)
    name = {
        "linear_int8": "int8 linear",
        "linear_rounded": "int8 by int8 linear",
        "linear_groups": "int4 linear",
        "linear_fp8": "fp8 linear",
    }
    with pytest.raises(StartupError, match=name.get(operation, "packed mix_experts")):
        check_quantized(KERNELS, SHAPES, cpu, ~Packed.NONE)


# Experts, as files have them.


def packed_experts(kind: str, num_experts: int, outputs: int, inputs: int) -> tuple[Any, Tensor]:
    """Return random experts that are packed, and their numbers [E, M, K]."""
    weights, numbers = [], []
    for expert in range(num_experts):
        own = normal(outputs, inputs, seed=expert) / inputs**0.5
        num_groups = -(-inputs // 32)
        factors = normal(outputs, num_groups, seed=expert).abs() * 0.02 + 0.01
        match kind:
            case "int8":
                weights.append(KERNELS.quantize(own))
                numbers.append(rounded_to_int8(own))
            case "fp8":
                values = (own * 64).to(torch.float8_e4m3fn)
                scale = torch.full((outputs, 1), 1 / 64)
                weights.append(KERNELS.pack_fp8(values, scale, group_size=inputs))
                numbers.append(values.float() / 64)
            case "fp4":
                codes = torch.randint(16, (outputs, inputs), dtype=torch.uint8)
                weights.append(KERNELS.pack_fp4(codes, factors, group_size=32))
                numbers.append(numbers_of_fp4(codes, factors, 32))
            case _:
                bits = 4 if kind == "int4" else 8
                integers = torch.randint(2**bits, (outputs, inputs), dtype=torch.uint8)
                zeros = torch.randint(2**bits, factors.shape, dtype=torch.uint8)
                half = (factors * 16 / 2**bits).half()
                packed = KERNELS.pack_groups(integers, half, zeros, bits=bits, group_size=32)
                weights.append(packed)
                numbers.append(numbers_of_groups(integers, half, zeros, 32))
    return KERNELS.stack_experts(weights), torch.stack(numbers)


CLAMPED = BlockActivation(Activation.CLAMPED_SILU, alpha=1.7, limit=3.0)
SQUARED = BlockActivation(Activation.RELU_SQUARED, is_gated=False)


@pytest.mark.parametrize("kind", ["int8", "int4", "uint8", "fp8", "fp4"])
def test_experts_of_every_kind(kind: str) -> None:
    """With gates of gpt-oss and biases, without either, and plain; some that no token chose."""
    for (tokens, num_experts, chosen_each, hidden, size), dtype in (
        ((5, 4, 2, 100, 72), torch.float32),
        ((70, 3, 1, 64, 40), torch.bfloat16),
    ):
        both = {n: packed_experts(kind, num_experts, n * size, hidden) for n in (1, 2)}
        down, wide_down = packed_experts(kind, num_experts, hidden, size)
        x = normal(tokens, hidden, dtype=dtype, seed=7)
        weights, chosen = normal(tokens, num_experts, seed=8).softmax(-1).topk(chosen_each, dim=-1)
        biases = ExpertBiases(normal(num_experts, 2 * size), normal(num_experts, hidden))
        for own, activation in ((None, SILU_GATES), (biases, CLAMPED), (None, SQUARED)):
            gate_up, wide_gate_up = both[activation.num_parts]
            narrow = own and ExpertBiases(own.gate_up.to(dtype), own.down.to(dtype))
            with Poisoned():
                found = KERNELS.mix_experts(
                    x, chosen, weights, gate_up, down, biases=narrow, activation=activation
                )
            wide = narrow and ExpertBiases(narrow.gate_up.float(), narrow.down.float())
            truth = ReferenceKernels().mix_experts(
                *(x.float(), chosen, weights, wide_gate_up, wide_down),
                biases=wide,
                activation=activation,
            )
            assert relative_error(found, truth) <= (1e-5 if dtype is torch.float32 else 1e-2)
            assert relative_error(found.roll(1, 1), truth) > 0.1


def logits_of(directory: Path, kernels: Kernels, method: LinearMethod | None) -> Tensor:
    loaded = load_tiny(directory, torch.float32, kernels, method=method)
    results = loaded.run(
        [TokenSequence(torch.arange(7, 27), torch.empty(0))],
        schedule([20], chunk=16, num_decodes=1),
    )
    assert results is not None
    return results[0].float()


@pytest.mark.parametrize("name", ["gptq", "w8a8", "fp8 of an output"])
def test_experts_are_what_their_files_say(name: str, tmp_path: Path) -> None:
    tiny = replace(find_tiny_model("mixtral"), sharded=False)
    path = quantise(write_tiny_model(tiny, tmp_path / "plain"), tmp_path / "packed", name)
    method = StoredMethod(KERNELS)
    found = logits_of(path, KERNELS, method)
    assert method.num_kept > 2 * 5 and not method.num_widened
    torch.testing.assert_close(
        found, logits_of(path / "numbers", ReferenceKernels(), None), rtol=2e-4, atol=2e-4
    )


class ByNumbers(UnquantizedMethod):
    """Maps by the numbers that --quantization makes of weights, an expert at a time."""

    def __init__(self, name: str) -> None:
        super().__init__(TorchKernels())
        self._name = name

    def create(
        self, reader: WeightReader, shards: Sequence[ModuleShard], *, is_gated: bool = False
    ) -> Linear:
        if self._name == "fp8" and "experts" not in shards[0].name:
            return Fp8Method(self.kernels).create(reader, shards, is_gated=is_gated)
        weight, bias = merged_shards(reader, shards)
        match self._name:
            case "int8":
                weight = rounded_to_int8(weight)
            case "int4":
                eye = torch.eye(weight.shape[1])
                weight = KERNELS.linear(eye, KERNELS.quantize_groups(weight, 32), None).T
            case _:
                values, factors = rounded_to_fp8(weight)
                weight = values.float() * factors
        return super().make(weight.contiguous(), bias, is_gated=is_gated)

    def make(self, weight: Tensor, bias: Tensor | None, *, is_gated: bool = False) -> Linear:
        own = weight if self._name == "fp8" else rounded_to_int8(weight)
        return super().make(own, bias, is_gated=is_gated)


@pytest.mark.parametrize(
    ("model", "name"),
    [("mixtral", "int8"), ("mixtral", "int4"), ("mixtral", "fp8"), ("gpt-oss", "int8")],
)
def test_experts_are_rounded_as_they_are_read(model: str, name: str, tmp_path: Path) -> None:
    """A whole model, with --quantization; without it, it says something else."""
    path = write_tiny_model(find_tiny_model(model), tmp_path)
    method: LinearMethod = Fp8Method(KERNELS)
    if name != "fp8":
        method = linear_method(name, KERNELS, torch.bfloat16)
    with patch.object(experts, "plain_experts", side_effect=AssertionError("by numbers")):
        found = logits_of(path, KERNELS, method)
    truth = logits_of(path, TorchKernels(), ByNumbers(name))
    plain = logits_of(path, TorchKernels(), None)
    assert relative_error(found, truth) < relative_error(found, plain) / 5, "it is rounded"
    torch.testing.assert_close(found, truth, rtol=1e-3, atol=1e-3)
