"""Products of few rows: their numbers, when they take part, and how many launches they save."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.kernel_grid import SMALL_SHAPES, Poisoned, make_batch
from support.random_model import random_model, tiny_config
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from lightserve.kernels.reference import ReferenceKernels
from lightserve.kernels.self_check import disagreement
from lightserve.kernels.triton import kernels as kernels_module
from lightserve.kernels.triton import norms, products
from lightserve.kernels.triton.kernels import TritonKernels
from lightserve.kernels.triton.products import (
    MAX_ROWS,
    PRODUCT_ROWS,
    NormInputs,
    ProductChoice,
    ProductChoices,
    ProductConfig,
    ProductKey,
    candidates,
    multiply,
    product_config,
)
from lightserve.kernels.weights import linears_of
from lightserve.models.base import SingleRank
from lightserve.models.layers.attention import AttentionInputs

CPU = torch.device("cpu")
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
CONFIGS = [
    ProductConfig(4, 32, 4, 1, 0),
    ProductConfig(8, 128, 4, 2, 0),
    ProductConfig(16, 64, 1, 3, 1),
]


def error(found: Tensor, truth: Tensor) -> float:
    assert found.shape == truth.shape
    return float((found.float() - truth).norm() / truth.norm())


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("sizes", [(1, 64, 32), (3, 100, 50), (8, 256, 64)])
def test_products(dtype: torch.dtype, config: ProductConfig, sizes: tuple[int, int, int]) -> None:
    """With and without a norm, a bias and gates; sizes that blocks do not divide; views."""
    num_rows, num_inputs, num_outputs = sizes
    torch.manual_seed(num_inputs)
    reference = ReferenceKernels()
    for is_gated, has_norm, has_bias in itertools.product((False, True), repeat=3):
        x = torch.randn(num_rows, num_inputs + 8).to(dtype)[:, 3 : 3 + num_inputs]
        residual = torch.randn(num_rows, num_inputs).to(dtype)
        weight = (torch.randn(num_outputs, num_inputs) / num_inputs**0.5).to(dtype)
        bias = torch.randn(num_outputs).to(dtype) if has_bias else None
        norm = torch.randn(num_inputs).to(dtype)
        before = NormInputs(residual, norm, 1e-5) if has_norm else None
        kept = residual.clone()
        with Poisoned():
            found, total = multiply(x, weight, bias, config, norm=before, is_gated=is_gated)
        wide = x.float()
        if has_norm:
            wide, _ = reference.add_rms_norm(wide, residual.float(), norm.float(), 1e-5)
            _, sums = norms.add_rms_norm(x, residual.clone(), norm, 1e-5)
            assert torch.equal(total, sums), "as many rows have it"
        linear = reference.gated_linear if is_gated else reference.linear
        truth = linear(wide, weight.float(), None if bias is None else bias.float())
        assert found.dtype is dtype
        assert error(found, truth) <= LIMITS[dtype], (is_gated, has_norm, has_bias)
        assert torch.equal(residual, kept), "other programs read it"


@pytest.mark.parametrize("config", CONFIGS)
def test_a_rows_bits_do_not_depend_on_the_others(config: ProductConfig) -> None:
    """Nor on how often they are computed: padding, and other requests, change nothing."""
    torch.manual_seed(0)
    x, residual = torch.randn(MAX_ROWS, 96), torch.randn(MAX_ROWS, 96)
    weight, norm = torch.randn(48, 96), torch.randn(96)
    whole, total = multiply(x, weight, None, config, norm=NormInputs(residual, norm, 1e-5))
    for num_rows in (5, 7, 8):
        other = torch.randn(MAX_ROWS, 96)
        other[2] = x[2]
        own, sums = multiply(
            other[:num_rows], weight, None, config, norm=NormInputs(residual[:num_rows], norm, 1e-5)
        )
        assert torch.equal(own[2], whole[2]) and torch.equal(sums[2], total[2])


def test_large_numbers_of_float16() -> None:
    """A row times the norm's weight may be beyond float16: candidates of it have no such step."""
    x, residual = torch.full((2, 64), 30_000.0), torch.full((2, 64), 20_000.0)
    norm, weight = torch.full((64,), 4.0), torch.full((32, 64), 0.01)
    x, residual, norm, weight = (t.half() for t in (x, residual, norm, weight))
    key = ProductKey(64, 2, True, False)
    for config in candidates(key, torch.float16):
        found, _ = multiply(x, weight, None, config, norm=NormInputs(residual, norm, 1e-5))
        assert error(found, torch.full((2, 32), 2.56)) < 2e-3
    assert any(config.is_dot for config in candidates(key, torch.bfloat16))


def test_who_multiplies() -> None:
    """Up to 8 rows of a weight that was measured, contiguous; cuBLAS has all else."""
    key = ProductKey(64, 4, False, False)
    choices = ProductChoices({key: ProductChoice(CONFIGS[0], 32)})

    def of(x: Tensor, weight: Tensor, *, has_norm: bool = False) -> ProductConfig | None:
        return product_config(choices, x, weight, has_norm=has_norm, is_gated=False)

    weight = torch.randn(32, 64)
    assert of(torch.randn(3, 64), weight) is of(torch.randn(4, 64), weight) is CONFIGS[0]
    assert of(torch.randn(4, 64), weight, has_norm=True) is None
    assert of(torch.randn(2, 64), weight) is None, "cuBLAS was faster"
    assert of(torch.randn(9, 64), weight) is None
    assert of(torch.randn(0, 64), weight) is None
    assert of(torch.randn(4, 64), torch.randn(33, 64)) is None, "the output layer"
    assert of(torch.randn(4, 64), torch.randn(64, 32).T) is None
    assert of(torch.randn(64, 4).T, weight) is None


def few_rows_kernels(config: ProductConfig) -> TritonKernels:
    """Return kernels that have this configuration for every product of a model."""
    shapes = SMALL_SHAPES
    sizes = {num_inputs for _, num_inputs in linears_of(shapes).values()}
    choices = {
        ProductKey(num_inputs, num_rows, has_norm, is_gated): ProductChoice(config, 1 << 20)
        for num_inputs in sizes | {32, 48, 64, 96}
        for num_rows in PRODUCT_ROWS
        for has_norm in (False, True)
        for is_gated in (False, True)
    }
    return TritonKernels(products=ProductChoices(choices))


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[2]])
def test_the_start_checks_them(config: ProductConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = replace(SMALL_SHAPES, qkv_bias=True, num_experts=0)
    assert disagreement(few_rows_kernels(config), shapes, CPU) is None

    def wrong(x: Tensor, *args: object, **options: object) -> tuple[Tensor, Tensor]:
        out, total = multiply(x, *args, **options)  # type: ignore[arg-type]
        out[-1, -1] += 1.0 if options.get("norm") else 0.0
        return out, total

    monkeypatch.setattr("lightserve.kernels.triton.kernels.multiply", wrong)
    found = disagreement(few_rows_kernels(config), shapes, CPU)
    assert found is not None and found.startswith("add_norm_linear of [1, ")


# What a decode launches: a layer of Llama-3-8B's kind, and 32 of them.

NUM_LAYERS = 32
MAX_LAUNCHES = 256
"""Of a decode of 8B: 32 layers, and about 30 launches before and behind them."""


def launches_of_a_layer(
    kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, *, num_rows: int = 1, tp_size: int = 1
) -> list[str]:
    """Return the kernels of a layer behind the first one, cuBLAS' too, in their order."""
    config = tiny_config(qkv_bias=False, num_layers=3)
    tp = SingleRank() if tp_size == 1 else HalfRank()
    model = random_model(kernels, config, context_len=512, tp=tp)
    batch = make_batch([(1, 400)] * num_rows, "scattered")
    size = (len(model._layers), config.num_kv_heads // tp_size, 2000, config.head_dim)
    pools = [torch.randn(size).transpose(1, 2) for _ in range(2)]
    kv = SimpleNamespace(k=pools[0], v=pools[1])
    names: list[str] = []
    run, linear = InterpretedFunction.run, kernels_module.F.linear

    def launched(self: Any, *args: Any, **options: Any) -> Any:
        names.append(self.fn.__name__)
        return run(self, *args, **options)

    def multiplied(*args: Any) -> Tensor:
        names.append("cuBLAS")
        return linear(*args)

    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(InterpretedFunction, "run", launched)
        patch.setattr(kernels_module.F, "linear", multiplied)
        tables = model._tables(batch.positions)
        inputs = AttentionInputs(batch, *tables[:2])
        x, residual = torch.randn(num_rows, config.hidden_size), None
        for layer in model._layers[:2]:
            names.clear()
            heads, residual = layer.attend(x, residual, inputs, kv)  # type: ignore[arg-type]
            x, residual = layer.finish(heads, residual)
    return names


class HalfRank(SingleRank):
    """One of two ranks, alone."""

    size = 2


def test_launches_of_a_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    before = launches_of_a_layer(TritonKernels(), monkeypatch)
    assert before == [
        "_norm_kernel", "cuBLAS", "_rotate_and_write_kernel", "_decode_kernel",
        "_merge_kernel", "cuBLAS", "_norm_kernel", "cuBLAS", "_silu_and_mul_kernel",
        "cuBLAS",
    ]  # fmt: skip
    kernels = few_rows_kernels(CONFIGS[0])
    for num_rows in (1, MAX_ROWS):
        names = launches_of_a_layer(kernels, monkeypatch, num_rows=num_rows)
        assert names == [
            "_rows_kernel", "_rotate_and_write_kernel", "_decode_kernel", "_merge_kernel",
            "_rows_kernel", "_rows_kernel", "_rows_kernel",
        ]  # fmt: skip
        assert NUM_LAYERS * len(names) + 30 <= MAX_LAUNCHES
    many = launches_of_a_layer(kernels, monkeypatch, num_rows=MAX_ROWS + 1)
    assert many == before, "more rows are cuBLAS'"
    ranks = launches_of_a_layer(kernels, monkeypatch, tp_size=2)
    assert ranks == names, "what ranks add is added between launches"


def test_float32_sums() -> None:
    """A product that is to be float32 is not rounded before."""
    kernels = few_rows_kernels(CONFIGS[0])
    num_inputs = SMALL_SHAPES.hidden_size
    x, weight = torch.randn(2, num_inputs).half(), torch.randn(8, num_inputs).half()
    assert kernels.linear(x, weight, None, dtype=torch.float32).dtype is torch.float32
    assert products.MAX_ROWS == 8
