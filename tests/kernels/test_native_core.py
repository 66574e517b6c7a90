"""The CPU engine's native core: every set of instructions, threads, and machines without it."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import logging
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import kernel_grid
from support.kernel_grid import CPU, Poisoned, make_batch, make_inputs, relative_error
from support.sampled_rows import make_batch as make_drawn
from support.software_tiles import check_tiles, software_core
from torch import Tensor

from lightserve.kernels import select
from lightserve.kernels.cpu import core
from lightserve.kernels.cpu.core import CoreMissingError, Level, load_core
from lightserve.kernels.cpu.default import TorchKernels
from lightserve.kernels.cpu.native import NativeKernels
from lightserve.kernels.reference import (
    ReferenceKernels,
    int8_by_int8,
    kv_in_8_bits,
    numbers_of_8_bit_kv,
    numbers_of_groups,
    rounded_to_int8,
)
from lightserve.kernels.select import make_kernels
from lightserve.kernels.weights import GroupedWeight, PromptRuns
from lightserve.types import SamplingParams
from lightserve.worker import build
from lightserve.worker.sampling import sampler

pytestmark = pytest.mark.skipif(bool(select.missing_core()), reason=select.missing_core())
LEVELS = [level for level in Level if level is not Level.NONE]
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
ROWS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 100)
OUTPUTS = (1, 15, 16, 17, 32, 33, 100, 257)
INPUTS = (1, 2, 31, 32, 33, 100, 300)


def kernels_of(level: Level) -> NativeKernels:
    """Return kernels with these instructions: AMX tiles are software where a machine has none."""
    if level <= load_core().level:
        return NativeKernels(level=level)
    own = software_core() if level is Level.AMX else None
    if own is None:
        pytest.skip(f"this machine has no {level.name}")
    return NativeKernels(own)


@pytest.fixture(autouse=True)
def _tiles() -> Iterator[None]:
    yield
    check_tiles()


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


FORMS = ("plain", "gated", "wide")
"""What becomes of a product: numbers of x's type, gates times ups, or numbers of float32."""


def truth_of(form: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the reference's product, in float32."""
    reference = ReferenceKernels()
    multiply = reference.gated_linear if form == "gated" else reference.linear
    return multiply(x.float(), weight.float(), None if bias is None else bias.float())


def product(
    kernels: NativeKernels, form: str, x: Tensor, packed: Any, bias: Tensor | None
) -> Tensor:
    """Return a product that is to be like `truth_of`."""
    dtype = torch.float32 if form == "wide" else None
    with Poisoned():
        if form == "gated" and isinstance(packed, Tensor):
            result = kernels.gated_linear(x, packed, bias)
        else:
            result = kernels.linear(x, packed, bias, dtype=dtype)
    assert result.dtype is (dtype or x.dtype)
    return result


def linear_case(seed: int, dtype: torch.dtype, kernels: NativeKernels) -> tuple[float, object]:
    """Return the error of a product of some odd sizes, and what it was."""
    some, form = random.Random(seed), FORMS[seed // 6 % 3]
    sizes = some.choice(ROWS), some.choice(OUTPUTS), some.choice(INPUTS)
    num_rows, num_outputs, num_inputs = sizes
    num_outputs *= 2 if form == "gated" else 1
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(num_outputs, num_inputs, generator=generator) * num_inputs**-0.5).to(
        dtype
    )
    # Behind each row stand numbers that belong to no product.
    x = torch.full((num_rows, num_inputs + 5), torch.nan, dtype=dtype)
    x[:, :num_inputs] = torch.randn(num_rows, num_inputs, generator=generator).to(dtype)
    x = x[:, :num_inputs]
    bias = torch.randn(num_outputs, generator=generator).to(dtype) if seed % 2 else None
    packed = kernels.pack_weight(weight, is_gated=form == "gated")
    assert packed.shape == weight.shape
    result = product(kernels, form, x, packed, bias)
    return relative_error(result, truth_of(form, x, weight, bias)), (form, sizes)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", LIMITS, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("level", LEVELS, ids=[level.name for level in LEVELS])
def test_products_of_odd_sizes(level: Level, dtype: torch.dtype) -> None:
    kernels = kernels_of(level)
    for seed in range(60):
        torch.set_num_threads(1 + seed % 3)
        error, sizes = linear_case(seed, dtype, kernels)
        assert error <= LIMITS[dtype], sizes


@pytest.mark.parametrize("level", LEVELS[-2:], ids=[level.name for level in LEVELS[-2:]])
@pytest.mark.parametrize(
    ("num_rows", "num_inputs"), [(65, 1600), (300, 2700), (333, 5000), (64, 9000), (700, 1500)]
)
def test_products_that_are_cut_over_rows_and_inputs(
    level: Level, num_rows: int, num_inputs: int
) -> None:
    """Weights and rows that no cache holds at once."""
    kernels = kernels_of(level)
    x = torch.randn(num_rows, num_inputs).bfloat16()
    weight = torch.randn(70, num_inputs).bfloat16() * num_inputs**-0.5
    bias = torch.randn(70).bfloat16()
    for form in FORMS:
        packed = kernels.pack_weight(weight, is_gated=form == "gated")
        result = product(kernels, form, x, packed, bias)
        assert relative_error(result, truth_of(form, x, weight, bias)) <= 5e-3, form


@pytest.mark.parametrize("level", LEVELS, ids=[level.name for level in LEVELS])
@pytest.mark.parametrize("dtype", LIMITS, ids=["float32", "bfloat16"])
def test_gates_beyond_what_powers_of_e_can_be(level: Level, dtype: torch.dtype) -> None:
    kernels = kernels_of(level)
    gates = torch.tensor([-1e30, -200.0, -80.0, -1e-3, 0.0, 1e-3, 80.0, 200.0, 1e30, torch.nan])
    weight = torch.zeros(20, 32, dtype=dtype)
    weight[:10, 0], weight[10:, 1] = gates.to(dtype), 1.0
    x = torch.zeros(5, 32, dtype=dtype)
    x[:, :2] = 1.0
    packed = kernels.pack_weight(weight, is_gated=True)
    result = product(kernels, "gated", x, packed, None)
    expected = torch.nn.functional.silu(gates.to(dtype).float()).to(dtype).expand(5, 10)
    torch.testing.assert_close(result, expected, rtol=8e-3, atol=1e-8, equal_nan=True)


INT8_INPUTS = (1, 2, 31, 32, 33, 63, 64, 65, 100, 300)


def int8_error(
    kernels: NativeKernels, sizes: tuple[int, int, int], dtype: torch.dtype, form: str = "plain"
) -> float:
    """Return the error of a product by 8-bit weights, beside the same rounded numbers."""
    num_rows, num_outputs, num_inputs = sizes
    num_outputs *= 2 if form == "gated" else 1
    weight = (torch.randn(num_outputs, num_inputs) * num_inputs**-0.5).to(dtype)
    weight[num_outputs // 2] = 0  # has no largest number to divide by
    x = torch.full((num_rows, num_inputs + 5), torch.nan, dtype=dtype)
    x[:, :num_inputs] = torch.randn(num_rows, num_inputs).to(dtype)
    x = x[:, :num_inputs]
    bias = torch.randn(num_outputs).to(dtype) if num_inputs % 2 else None
    packed = kernels.quantize(weight, is_gated=form == "gated")
    result = product(kernels, form, x, packed, bias)
    return relative_error(result, truth_of(form, x, rounded_to_int8(weight), bias))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", LIMITS, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("level", LEVELS, ids=[level.name for level in LEVELS])
def test_8_bit_products_of_odd_sizes(level: Level, dtype: torch.dtype) -> None:
    kernels, some = kernels_of(level), random.Random(3)
    torch.manual_seed(3)
    for number in range(60):
        torch.set_num_threads(1 + number % 3)
        sizes = some.choice(ROWS), some.choice(OUTPUTS[1:]), some.choice(INT8_INPUTS)
        form = FORMS[number // 6 % 3]
        assert int8_error(kernels, sizes, dtype, form) <= LIMITS[dtype], (form, sizes)


@pytest.mark.parametrize("level", LEVELS[-2:], ids=[level.name for level in LEVELS[-2:]])
@pytest.mark.parametrize(
    ("num_rows", "num_inputs"), [(65, 1600), (300, 2700), (64, 9001), (700, 1500)]
)
def test_8_bit_products_that_are_cut(level: Level, num_rows: int, num_inputs: int) -> None:
    assert int8_error(kernels_of(level), (num_rows, 70, num_inputs), torch.bfloat16) <= 5e-3


def prompts_of(*rows: tuple[int, int]) -> PromptRuns:
    """The prompts of rows with so many new tokens, the first so many of which are the prompt's."""
    batch = make_batch(tuple((new, new) for new, _ in rows), "scattered")
    batch = dataclasses.replace(batch, host_prompt_lens=[prompt for _, prompt in rows])
    return PromptRuns(batch.prompt_runs())


def rounded_case(seed: int, kernels: dict[str, NativeKernels]) -> None:
    """Rows of prompts have the reference's bits, all others those of products without rounding."""
    some, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows = [
        (n, some.choice([0, n, some.randint(0, n)])) for n in some.choices((1, 3, 16, 33, 70), k=4)
    ]
    num_rows = sum(new for new, _ in rows)
    num_outputs, num_inputs = 2 * some.choice(OUTPUTS[1:]), some.choice(INT8_INPUTS)
    weight = torch.randint(-128, 128, (num_outputs, num_inputs), generator=generator).to(torch.int8)
    factors = torch.rand(num_outputs, generator=generator)
    x = torch.full((num_rows, num_inputs + 5), torch.nan, dtype=torch.bfloat16)
    x[:, :num_inputs] = torch.randn(num_rows, num_inputs, generator=generator)
    x = x[:, :num_inputs]
    x[some.randrange(num_rows)] = 0  # has no largest number to divide by
    bias = torch.randn(num_outputs, generator=generator).bfloat16() if seed % 2 else None
    found: dict[tuple[str, str], Tensor] = {}
    for name, own in kernels.items():
        prompts = prompts_of(*rows)
        for form in FORMS:
            packed = own.pack_int8(weight, factors, is_gated=form == "gated")
            found[name, form] = product(own, form, x, packed._replace(prompts=prompts), bias)
            whole = int8_by_int8(x, weight, factors)
            whole = whole if bias is None else whole + bias.float()
            start = 0
            for new, num_prompt in rows:
                here = found[name, form][start : start + new]
                if form != "gated":
                    expected = whole[start : start + num_prompt].to(here.dtype)
                    assert torch.equal(here[:num_prompt], expected), (name, form, rows)
                start += new
            is_prompt = torch.cat([torch.arange(new) < prompt for new, prompt in rows])
            edges = [0, *(1 + is_prompt.int().diff().nonzero().flatten()).tolist(), num_rows]
            for first, end in itertools.pairwise(edges):
                if not is_prompt[first]:
                    plain = product(own, form, x[first:end], packed, bias)
                    assert torch.equal(found[name, form][first:end], plain), (name, form, rows)
    for form in FORMS:
        results = [found[name, form] for name in kernels]
        rounded = [result[is_prompt] for result in results]
        assert all(torch.equal(rounded[0], other) for other in rounded), (form, rows)
        error = relative_error(results[0], truth_of(form, x, weight * factors[:, None], bias))
        assert error < 0.05, (form, rows)


@pytest.mark.usefixtures("_threads")
def test_rounded_rows_have_the_same_bits_by_vectors_and_tiles_as_by_the_reference() -> None:
    kernels = {level.name: kernels_of(level) for level in LEVELS[-2:]}
    for seed in range(40):
        torch.set_num_threads(1 + seed % 3)
        rounded_case(seed, kernels)


@pytest.mark.parametrize("level", LEVELS[-2:], ids=[level.name for level in LEVELS[-2:]])
def test_sums_of_rounded_rows_fit_where_all_numbers_are_largest(level: Level) -> None:
    kernels = kernels_of(level)
    for sign in (1, -1):
        x = torch.full((17, 65536), 3.0 * sign).bfloat16()
        weight = torch.full((2, 65536), -128, dtype=torch.int8)
        weight[1] = 127
        packed = kernels.pack_int8(weight, torch.ones(2))
        packed = packed._replace(prompts=prompts_of((17, 17)))
        result = kernels.linear(x, packed, None, dtype=torch.float32)
        assert torch.equal(result, int8_by_int8(x, weight, torch.ones(2)))


@pytest.mark.parametrize("level", LEVELS[-2:], ids=[level.name for level in LEVELS[-2:]])
@pytest.mark.parametrize("num_rows", [3, 20])
def test_a_rounded_row_without_numbers_has_none(level: Level, num_rows: int) -> None:
    kernels, x = kernels_of(level), torch.randn(num_rows, 100).bfloat16()
    x[1, 70], x[2, 3] = torch.nan, -torch.inf
    packed = kernels.quantize(torch.randn(33, 100).bfloat16())
    out = kernels.linear(x, packed._replace(prompts=prompts_of((num_rows, num_rows))), None)
    assert not out[1:3].isfinite().any()
    assert out[[0, *range(3, num_rows)]].isfinite().all()


@pytest.mark.parametrize("level", LEVELS, ids=[level.name for level in LEVELS])
@pytest.mark.parametrize("num_rows", [3, 20])
def test_a_row_without_numbers_has_none_after_an_8_bit_product(level: Level, num_rows: int) -> None:
    kernels, x = kernels_of(level), torch.randn(num_rows, 100).bfloat16()
    x[1, 70], x[2, 3] = torch.nan, -torch.inf
    out = kernels.linear(x, kernels.quantize(torch.randn(33, 100).bfloat16()), None)
    assert not out[1:3].isfinite().any(), "the sampler must see that they mean nothing"
    assert out[[0, *range(3, num_rows)]].isfinite().all()


def test_tiles_in_software_multiply_as_the_processor_does() -> None:
    """Products of each kind of weight, and attention, go by tiles; numbers beside real ones."""
    own = software_core()
    if own is None:
        pytest.skip("no compiler, or no AVX512-bf16")
    x, weight = torch.randn(20, 100).bfloat16(), torch.randn(70, 100).bfloat16()
    batch = make_batch([(40, 90)], "scattered")
    inputs = make_inputs(batch, (4, 2, 32), torch.bfloat16)
    calls: list[Callable[[NativeKernels], Tensor]] = [
        lambda kernels: kernels.linear(x, kernels.pack_weight(weight), None),
        lambda kernels: kernels.linear(x, kernels.quantize(weight), None),
        lambda kernels: kernels.linear(x, kernels.quantize_groups(weight, 32), None),
        lambda kernels: kernel_grid.attend(kernels, batch, inputs, None),
    ]
    for call in calls:
        before = own.library.tiles_products()
        found = call(NativeKernels(own))
        assert own.library.tiles_products() > before
        if load_core().level is Level.AMX:
            assert relative_error(call(NativeKernels()), found.float()) <= 1e-3


def test_an_8_bit_product_of_more_inputs_than_sums_of_bytes_hold() -> None:
    kernels, x = NativeKernels(), torch.ones(5, 70_000).bfloat16()
    out = kernels.linear(x, kernels.quantize(torch.ones(2, 70_000).bfloat16()), None)
    assert torch.equal(out, torch.full((5, 2), 70_000.0).bfloat16())


def test_rounding_to_8_bits_is_what_the_reference_says() -> None:
    """By products with single inputs, which show each weight; ties go to even numbers."""
    kernels = NativeKernels()
    weight = torch.tensor([[127.0, 0.5, 1.5, -0.5, -2.5, 126.5], [1e-31, 0, 0, 0, 0, -1e-32]])
    shown = kernels.linear(torch.eye(6), kernels.quantize(weight), None).T
    assert torch.equal(shown, torch.tensor([[127.0, 0, 2, 0, -2, 126], [0] * 6]))
    assert torch.equal(shown, rounded_to_int8(weight))


def group_case(
    kernels: NativeKernels, sizes: tuple[int, int, int], dtype: torch.dtype, bits: int, size: int
) -> float:
    """Return the error of a product by a weight of random integers in groups of `size`."""
    num_rows, num_outputs, num_inputs = sizes
    places = (num_outputs, -(-num_inputs // size))
    integers = torch.randint(2**bits, (num_outputs, num_inputs))
    zeros = torch.randint(2**bits, places)
    factors = torch.randn(places).mul(num_inputs**-0.5 * 2**-bits).half()
    packed = kernels.pack_groups(integers.byte(), factors, zeros.byte(), bits=bits, group_size=size)
    x = torch.full((num_rows, num_inputs + 5), torch.nan, dtype=dtype)
    x[:, :num_inputs] = torch.randn(num_rows, num_inputs).to(dtype)
    x = x[:, :num_inputs]
    bias = torch.randn(num_outputs).to(dtype) if num_inputs % 2 else None
    with Poisoned():
        result = kernels.linear(x, packed, bias)
    truth = ReferenceKernels().linear(
        x.float(),
        numbers_of_groups(integers, factors, zeros, size),
        None if bias is None else bias.float(),
    )
    return relative_error(result, truth)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", LIMITS, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("level", LEVELS, ids=[level.name for level in LEVELS])
def test_products_of_groups_of_odd_sizes(level: Level, dtype: torch.dtype) -> None:
    kernels, some = kernels_of(level), random.Random(4)
    torch.manual_seed(4)
    for number in range(60):
        torch.set_num_threads(1 + number % 3)
        sizes = some.choice(ROWS), some.choice(OUTPUTS), some.choice(INT8_INPUTS)
        bits, size = some.choice((4, 4, 8)), some.choice((32, 64, 128))
        assert group_case(kernels, sizes, dtype, bits, size) <= LIMITS[dtype], (sizes, bits, size)


@pytest.mark.parametrize("level", LEVELS, ids=[level.name for level in LEVELS])
def test_gates_of_weights_in_groups(level: Level) -> None:
    kernels = kernels_of(level)
    torch.manual_seed(6)
    for dtype, num_rows in itertools.product(LIMITS, (2, 5, 40, 70)):
        weight, bias = torch.randn(66, 100).mul(0.1).to(dtype), torch.randn(66).to(dtype)
        numbers = shown(kernels, kernels.quantize_groups(weight, 32))
        x = torch.randn(num_rows, 100).to(dtype)
        packed = kernels.quantize_groups(weight, 32, is_gated=True)
        result = product(kernels, "gated", x, packed, bias)
        assert relative_error(result, truth_of("gated", x, numbers, bias)) <= LIMITS[dtype]


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("level", LEVELS, ids=[level.name for level in LEVELS])
@pytest.mark.parametrize("num_rows", [4, 5, 11, 12, 31, 32, 64, 65, 300])
def test_rounded_products_in_each_way_of_multiplying(level: Level, num_rows: int) -> None:
    kernels = kernels_of(level)
    for num_threads, form in enumerate(FORMS, 1):
        torch.set_num_threads(num_threads)
        assert int8_error(kernels, (num_rows, 70, 1700), torch.bfloat16, form) <= 5e-3, form
    for bits in (4, 8):
        error = group_case(kernels, (num_rows, 70, 1700), torch.bfloat16, bits, 32)
        assert error <= 5e-3, bits


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("level", LEVELS[-2:], ids=[level.name for level in LEVELS[-2:]])
def test_products_of_each_number_of_few_rows(level: Level) -> None:
    """Each has code of its own; while a panel is multiplied, the thread's next one is fetched."""
    kernels, (num_outputs, num_inputs) = kernels_of(level), (514, 700)
    torch.manual_seed(5)
    weight = torch.randn(num_outputs, num_inputs).mul(num_inputs**-0.5).bfloat16()
    x = torch.full((8, num_inputs + 5), torch.nan).bfloat16()
    x[:, :num_inputs] = torch.randn(8, num_inputs).bfloat16()
    bias = torch.randn(num_outputs).bfloat16()
    grouped = shown(kernels, kernels.quantize_groups(weight, 64))
    for form in ("plain", "gated"):
        is_gated = form == "gated"
        for packed, numbers in (
            (kernels.pack_weight(weight, is_gated=is_gated), weight),
            (kernels.quantize(weight, is_gated=is_gated), rounded_to_int8(weight)),
            (kernels.quantize_groups(weight, 64, is_gated=is_gated), grouped),
        ):
            for num_rows in range(1, 9):
                torch.set_num_threads(1 + num_rows % 3)
                rows = x[:num_rows, :num_inputs]
                result = product(kernels, form, rows, packed, bias)
                error = relative_error(result, truth_of(form, rows, numbers, bias))
                assert error <= 5e-3, (form, type(packed).__name__, num_rows)


@pytest.mark.parametrize("level", LEVELS[-2:], ids=[level.name for level in LEVELS[-2:]])
@pytest.mark.usefixtures("_threads")
def test_products_of_many_panels_are_the_same_on_any_number_of_threads(level: Level) -> None:
    kernels, x = kernels_of(level), torch.randn(40, 300).bfloat16()
    weight = torch.randn(3300, 300).bfloat16()
    plain, rounded = kernels.pack_weight(weight), kernels.quantize(weight)
    grouped = kernels.quantize_groups(weight, 64)
    results = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        by_int8 = kernels.linear(x, rounded, None)
        by_groups = kernels.linear(x, grouped, None)
        results.append(torch.stack([kernels.linear(x, plain, None), by_int8, by_groups]))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("level", LEVELS, ids=[level.name for level in LEVELS])
@pytest.mark.parametrize("num_rows", [3, 20])
def test_a_row_without_numbers_has_none_after_a_product_of_groups(
    level: Level, num_rows: int
) -> None:
    kernels, x = kernels_of(level), torch.randn(num_rows, 100).bfloat16()
    x[1, 70], x[2, 3] = torch.nan, -torch.inf
    weight = kernels.quantize_groups(torch.randn(33, 100).bfloat16(), 32)
    out = kernels.linear(x, weight, None)
    assert not out[1:3].isfinite().any(), "the sampler must see that they mean nothing"
    assert out[[0, *range(3, num_rows)]].isfinite().all()


def shown(kernels: NativeKernels, weight: GroupedWeight) -> Tensor:
    """Return a weight's numbers, by products with single inputs."""
    return kernels.linear(torch.eye(weight.num_inputs), weight, None).T


@pytest.mark.parametrize("size", [32, 128])
def test_rounding_to_4_bits_loses_no_more_than_even_steps_between_the_ends(size: int) -> None:
    kernels = NativeKernels()
    torch.manual_seed(1)
    weight = torch.randn(40, 300) * torch.logspace(-3, 3, 40)[:, None]
    weight[3], weight[4, :size], weight[5] = 0.0, 1e-9, weight[5].abs()
    numbers = shown(kernels, kernels.quantize_groups(weight, size))
    lost = (numbers - weight).square()
    for start in range(0, 300, size):
        group = weight[:, start : start + size]
        low, high = group.amin(1, keepdim=True).clamp(max=0), group.amax(1, keepdim=True)
        step = ((high.clamp(min=0) - low) / 15).half().float()
        safe = torch.where(step == 0, 1.0, step)
        zero = (-low / safe).round().clamp(0, 15)
        even = (((group / safe).round() + zero).clamp(0, 15) - zero) * step
        limit = (even - group).square().sum(1) * 1.001 + 1e-16
        assert (lost[:, start : start + size].sum(1) <= limit).all()
    assert torch.equal(numbers, shown(kernels, kernels.quantize_groups(weight.clone(), size)))


def test_what_a_factor_cannot_hold_is_infinite() -> None:
    weight = torch.zeros(3, 64)
    weight[1, 40] = 2e6
    factors = NativeKernels().quantize_groups(weight, 32).factors
    assert factors.isinf().sum() == 1 and factors[0, 1, 1].isinf()


@pytest.mark.parametrize("level", LEVELS, ids=[level.name for level in LEVELS])
@pytest.mark.parametrize("num_rows", [2, 40])
def test_integers_that_others_have_rounded(level: Level, num_rows: int) -> None:
    """Down to -128, with largest ones of any size, plain and as gates and ups."""
    kernels = kernels_of(level)
    torch.manual_seed(8)
    integers = torch.randint(-128, 128, (74, 100)).to(torch.int8)
    integers[5].clamp_(-3, 3)
    factors = torch.rand(74) * 0.02
    grouped = torch.randint(16, (74, 100), dtype=torch.uint8)
    group_factors = torch.rand(74, 2).mul(0.1).half()
    zeros = torch.randint(16, (74, 2), dtype=torch.uint8)
    truths = (
        integers.float() * factors[:, None],
        numbers_of_groups(grouped, group_factors, zeros, 64),
    )
    for dtype, limit in LIMITS.items():
        x = torch.randn(num_rows, 100).to(dtype)
        for is_gated in (False, True):
            results = (
                kernels.linear(x, kernels.pack_int8(integers, factors, is_gated=is_gated), None),
                kernels.linear(
                    x,
                    kernels.pack_groups(
                        grouped, group_factors, zeros, bits=4, group_size=64, is_gated=is_gated
                    ),
                    None,
                ),
            )
            for result, wide in zip(results, truths, strict=True):
                truth = ReferenceKernels().linear(x.float(), wide, None)
                if is_gated:
                    truth = ReferenceKernels().silu_and_mul(truth)
                assert relative_error(result, truth) <= limit


class TestFormats:
    """What other formats hold is held without a loss: numbers are the same to the bit."""

    def test_gguf_q4_0(self) -> None:
        """A block is a float16 and 16 bytes: input i in the low half of byte i, 16 + i above."""
        blocks = torch.randint(256, (33, 3, 18), dtype=torch.uint8)
        factors = torch.randn(33, 3).half()
        low, high = blocks[..., 2:] & 15, blocks[..., 2:] >> 4
        integers = torch.cat([low, high], dim=2).view(33, 96)
        expected = (integers.float() - 8) * factors.float().repeat_interleave(32, 1)
        eight = torch.full((33, 3), 8, dtype=torch.uint8)
        kernels = NativeKernels()
        packed = kernels.pack_groups(integers, factors, eight, bits=4, group_size=32)
        assert torch.equal(shown(kernels, packed), expected)

    def test_gguf_q8_0(self) -> None:
        """A block is a float16 and 32 bytes with a sign."""
        integers = torch.randint(-128, 128, (33, 96), dtype=torch.int8)
        factors = torch.randn(33, 3).half()
        expected = integers.float() * factors.float().repeat_interleave(32, 1)
        unsigned = (integers.int() + 128).byte()
        zeros = torch.full((33, 3), 128, dtype=torch.uint8)
        kernels = NativeKernels()
        packed = kernels.pack_groups(unsigned, factors, zeros, bits=8, group_size=32)
        assert torch.equal(shown(kernels, packed), expected)

    def test_gptq(self) -> None:
        """Eight inputs in 32 bits, the first in the lowest; zeros likewise, less one."""
        words = torch.randint(-(2**31), 2**31, (32, 40), dtype=torch.int64)
        zero_words = torch.randint(-(2**31), 2**31, (2, 5), dtype=torch.int64)
        shifts = torch.arange(0, 32, 4)
        integers = (words[:, None] >> shifts[None, :, None] & 15).reshape(256, 40)
        zeros = (zero_words[:, :, None] >> shifts & 15).reshape(2, 40) + 1
        factors = torch.randn(2, 40).half()
        wide = factors.float().repeat_interleave(128, 0)
        expected = ((integers - zeros.repeat_interleave(128, 0)).float() * wide).T
        kernels = NativeKernels()
        packed = kernels.pack_groups(
            integers.T.byte(), factors.T, zeros.T.byte(), bits=4, group_size=128
        )
        torch.testing.assert_close(shown(kernels, packed), expected, rtol=1e-6, atol=0)

    def test_awq(self) -> None:
        """Eight outputs in 32 bits, in an order of its own."""
        order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7]) * 4
        words = torch.randint(-(2**31), 2**31, (256, 5), dtype=torch.int64)
        zero_words = torch.randint(-(2**31), 2**31, (2, 5), dtype=torch.int64)
        integers = (words[:, :, None] >> order & 15).reshape(256, 40)
        zeros = (zero_words[:, :, None] >> order & 15).reshape(2, 40)
        factors = torch.randn(2, 40).half()
        wide = factors.float().repeat_interleave(128, 0)
        expected = ((integers - zeros.repeat_interleave(128, 0)).float() * wide).T
        kernels = NativeKernels()
        packed = kernels.pack_groups(
            integers.T.byte(), factors.T, zeros.T.byte(), bits=4, group_size=128
        )
        torch.testing.assert_close(shown(kernels, packed), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("level", LEVELS, ids=[level.name for level in LEVELS])
def test_grid_with_each_set_of_instructions(level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the grid that `test_kernel_grid` runs with all of them."""
    kernels = kernels_of(level)
    cases = [case for case in kernel_grid.attention_cases(large=False) if case.dtype in LIMITS][::6]
    monkeypatch.setattr(kernel_grid, "attention_cases", lambda *, large: cases)
    report = kernel_grid.run_grid(CPU, large=False, kernels=kernels)
    assert not report.failures
    assert all(error <= 1e-5 for name, error in report.worst.items() if "float32" in name)


@pytest.mark.parametrize("dtype", LIMITS, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("level", LEVELS, ids=[level.name for level in LEVELS])
def test_attention_of_few_queries_at_once(level: Level, dtype: torch.dtype) -> None:
    """Around each number of lanes that is computed by a way of its own, whole and in parts."""
    kernels = kernels_of(level)
    rows = [(1, 1), (1, 63), (1, 64), (1, 65), (1, 1300), (2, 600), (3, 70)]
    batch = make_batch(rows, "scattered")
    for group, size in ((1, 64), (2, 80), (3, 17), (4, 128), (5, 40), (8, 24), (9, 64)):
        inputs = make_inputs(batch, (2 * group, 2, size), dtype)
        wide = (inputs[0].float(), inputs[1].float(), inputs[2].float())
        for window in (None, 40):
            truth = kernel_grid.attend(ReferenceKernels(), batch, wide, window)
            with Poisoned():
                found = kernel_grid.attend(kernels, batch, inputs, window)
            limit = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
            assert relative_error(found, truth) <= limit, (group, size, window)


@pytest.mark.parametrize("dtype", LIMITS, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("level", LEVELS, ids=[level.name for level in LEVELS])
def test_attention_over_keys_and_values_of_8_bits(level: Level, dtype: torch.dtype) -> None:
    """Beside the reference over the same numbers; slots that are no row's hold no numbers."""
    kernels = kernels_of(level)
    for rows, heads, window in (
        ([(1, 700), (40, 90), (1, 5)], (14, 2, 64), None),
        ([(5, 5), (1, 130), (33, 200)], (3, 3, 80), 50),
        ([(1, 1), (2, 65)], (8, 1, 17), None),
    ):
        batch = make_batch(rows, "scattered")
        q, *pools = make_inputs(batch, heads, dtype)
        small = [kv_in_8_bits(pool, torch.int8) for pool in pools]
        wide = [numbers_of_8_bit_kv(pool, heads[2]) for pool in small]
        truth = kernel_grid.attend(ReferenceKernels(), batch, (q.float(), wide[0], wide[1]), window)
        with Poisoned():
            found = kernel_grid.attend(kernels, batch, (q, small[0], small[1]), window)
        assert relative_error(found, truth) <= {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.parametrize("dtype", LIMITS, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("level", LEVELS, ids=[level.name for level in LEVELS])
def test_keys_and_values_are_rounded_to_8_bits_as_the_reference_says(
    level: Level, dtype: torch.dtype
) -> None:
    kernels = kernels_of(level)
    torch.manual_seed(2)
    qkv = torch.randn(5, 8, 18).to(dtype)
    qkv[1, 5:] = 0  # has no largest number to divide by
    qkv[2, 5, 3] = torch.nan
    q, k, v = qkv.split((4, 2, 2), dim=1)
    # No turn: what is written is what came.
    cos, sin, slots = torch.ones(5, 9), torch.zeros(5, 9), torch.tensor([3, 0, 9, 1, 7])
    pools = torch.full((2, 2, 10, 22), 99, dtype=torch.int8).transpose(1, 2)
    before = k.clone(), v.clone()
    kernels.rotate_and_write(
        q, k, v, cos=cos, sin=sin, k_pool=pools[0], v_pool=pools[1], slot_mapping=slots,
        qk_norm=None,
    )  # fmt: skip
    for pool, numbers in zip(pools, before, strict=True):
        good = numbers.isfinite().all(-1)
        found, expected = pool[slots][good], kv_in_8_bits(numbers, torch.int8)[good]
        assert torch.equal(found[:, -4:], expected[:, -4:])
        off = (found.int() - expected.int()).abs()
        assert off.max() <= 1 and off.float().mean() < 0.02, "half ones may go either way"
        assert numbers_of_8_bit_kv(pool[slots], 18)[~good].isnan().all()
        others = [slot for slot in range(10) if slot not in slots.tolist()]
        assert (pool[others] == 99).all(), "nothing else is written"


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", LIMITS, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("level", LEVELS[-2:], ids=[level.name for level in LEVELS[-2:]])
def test_threads_and_neighbours_change_no_bit(level: Level, dtype: torch.dtype) -> None:
    """Decodes of a long context are cut where their length says, and a row stands for itself."""
    kernels = kernels_of(level)
    rows = [(1, 2000), (1, 700), (40, 90), (1, 5)]
    batch = make_batch(rows, "scattered")
    inputs = make_inputs(batch, (14, 2, 64), dtype)

    def attend() -> Tensor:
        return kernel_grid.attend(kernels, batch, inputs, None)

    torch.set_num_threads(1)
    alone = attend()
    for num_threads in (2, 3, 8):
        torch.set_num_threads(num_threads)
        assert all(torch.equal(attend(), alone) for _ in range(5)), num_threads


def test_callers_at_once() -> None:
    """Who finds the threads taken computes alone; results are the same."""
    kernels, weight = NativeKernels(), torch.randn(400, 300)
    packed, x = kernels.pack_weight(weight), torch.randn(20, 300)
    truth = kernels.linear(x, packed, None)
    wrong = []

    def run() -> None:
        for _ in range(50):
            if not torch.equal(kernels.linear(x, packed, None), truth):
                wrong.append(1)

    callers = [threading.Thread(target=run) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_a_slot_beyond_the_pool_is_refused() -> None:
    kernels = NativeKernels()
    qkv = torch.randn(2, 4, 16)
    q, k, v = qkv.split((2, 1, 1), dim=1)
    pool, cos = torch.zeros(8, 1, 16), torch.ones(2, 8)
    for slot in (8, -1):
        with pytest.raises(IndexError, match=f"{slot}"):
            kernels.rotate_and_write(
                q, k, v, cos=cos, sin=cos, k_pool=pool, v_pool=pool,
                slot_mapping=torch.tensor([0, slot]), qk_norm=None,
            )  # fmt: skip
    assert not pool.any(), "nothing is written then"


DRAWING_LEVELS = (Level.AVX2, Level.AVX512)
"""Sets of instructions that tokens are drawn with."""


def core_of(level: Level) -> core.Core:
    if load_core().level < level:
        pytest.skip(f"this machine has no {level.name}")
    return dataclasses.replace(load_core(), level=level)


@pytest.mark.parametrize("level", DRAWING_LEVELS, ids=[level.name for level in DRAWING_LEVELS])
@pytest.mark.parametrize("vocab_size", [1, 2, 17, 255, 256, 257, 1000, 9_001])
def test_the_native_core_draws_what_torch_draws(
    level: Level, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, generator = core_of(level), torch.Generator().manual_seed(vocab_size)
    options: list[dict[str, float]] = [
        {"temperature": 0.0}, {}, {"temperature": 0.01}, {"temperature": 1.7, "min_p": 0.02},
        {"top_k": 1}, {"top_k": 7}, {"top_p": 0.3}, {"top_k": 300, "top_p": 0.99},
        {"top_p": 0.9, "min_p": 0.001}, {"top_p": 0.9999},
    ]  # fmt: skip
    params = [SamplingParams(seed=seed, **options[seed % 10]) for seed in range(40)]  # type: ignore[arg-type]
    logits = torch.randn(40, vocab_size, generator=generator) * 3
    # Barred tokens come as minus infinity, behind what says whether the model's own are finite.
    barred = torch.rand(40, vocab_size, generator=generator) < 0.3
    barred[:, vocab_size // 2] = False
    batches = [make_drawn(params, range(40)), make_drawn(params, range(40), allowed=~barred)]
    for batch in batches:
        monkeypatch.setattr(sampler, "_core", lambda: None)
        expected = sampler.sample_on_host(logits, batch)
        with monkeypatch.context() as patch:
            patch.setattr(sampler, "_core", lambda: own)
            patch.setattr(sampler, "_probabilities", None)  # however many tokens are kept
            found = sampler.sample_on_host(logits, batch)
        assert torch.equal(found.token_ids, expected.token_ids)
        assert found.is_finite.all() and expected.is_finite.all()
    assert not barred[range(40), found.token_ids].any()


@pytest.mark.parametrize("level", DRAWING_LEVELS, ids=[level.name for level in DRAWING_LEVELS])
def test_the_native_core_takes_the_first_of_equals_and_tells_what_is_no_number(
    level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = core_of(level)
    monkeypatch.setattr(sampler, "_core", lambda: own)
    logits = torch.zeros(6, 3000)
    logits[0, [700, 701, 2999]] = 5.0
    logits[1] = -3e38
    logits[2, 2999] = 3e38  # the row's sum is none, its numbers are
    for row, value in ((3, torch.nan), (4, torch.inf), (5, -torch.inf)):
        logits[row, 2990] = value
    for params in ({"temperature": 0.0}, {"top_k": 1}, {"temperature": 1.0}):
        drawn = sampler.sample_on_host(
            logits,
            make_drawn([SamplingParams(seed=1, **params)] * 6, range(6)),  # type: ignore[arg-type]
        )
        assert drawn.is_finite.tolist() == [True, True, True, False, False, False]
        assert drawn.token_ids[2] == 2999 and drawn.token_ids[3:].tolist() == [0, 0, 0]
        if params != {"temperature": 1.0}:
            assert drawn.token_ids[:2].tolist() == [700, 0]


class TestMissing:
    """No compiler, another processor, or a library from other sources: torch computes."""

    @pytest.fixture(autouse=True)
    def _fresh(self) -> Iterator[None]:
        load_core.cache_clear()
        yield
        load_core.cache_clear()

    def _reason(self) -> str:
        with pytest.raises(CoreMissingError) as caught:
            load_core()
        assert type(make_kernels("auto", batch_invariant=False, device=CPU)) is TorchKernels
        assert select.missing_core() == str(caught.value)
        return str(caught.value)

    def test_not_built(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(core, "LIBRARY", tmp_path / "libcore.so")
        assert "no C++ compiler" in self._reason()

    def test_no_library(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(core, "LIBRARY", tmp_path / "libcore.so")
        (tmp_path / "libcore.so").write_text("anything")
        assert "cannot be loaded" in self._reason()

    def test_other_sources(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(core, "sources_hash", lambda: "0" * 16)
        assert "other sources" in self._reason()

    def test_the_log_says_so(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        native = NativeKernels()
        monkeypatch.setattr(build, "missing_core", lambda: "there is no reason")
        with caplog.at_level(logging.WARNING):
            build._tell_of_slower_kernels(native, torch.bfloat16)
            assert not caplog.text
            build._tell_of_slower_kernels(TorchKernels(), torch.bfloat16)
            build._tell_of_slower_kernels(native, torch.float16)
        first, second = caplog.messages
        assert "1.1 to 1.7 times as long" in first and "there is no reason" in first
        assert second.startswith("float16 is computed by torch")


WITHOUT_MEMORY = """
import resource
import torch
from lightserve.kernels.cpu.native import NativeKernels

def inputs(num_tokens, size):
    q, k, v = (torch.empty(num_tokens, 1, size) for _ in range(3))
    cos, sin = (torch.empty(num_tokens, size // 2) for _ in range(2))
    pools = [torch.empty(num_tokens, 1, size) for _ in range(2)]
    slots = torch.arange(num_tokens)
    return dict(
        q=q, k=k, v=v, cos=cos, sin=sin, k_pool=pools[0], v_pool=pools[1], slot_mapping=slots
    )

kernels = NativeKernels()
few, large = inputs(200, 16), inputs(1, 16 << 20)
for name in ("k", "v", "cos", "sin"):
    few[name].normal_()
few["q"].copy_(few["k"])
torch.set_num_threads(1)
kernels.rotate_and_write(**few, qk_norm=None)
few["q"].copy_(few["k"])
few["k_pool"].zero_()
torch.set_num_threads(4)
resource.setrlimit(resource.RLIMIT_AS, (0, 0))
kernels.rotate_and_write(**few, qk_norm=None)
assert torch.equal(few["q"], few["k_pool"])
print("the same with fewer threads", flush=True)
kernels.rotate_and_write(**large, qk_norm=None)
print("not reached", flush=True)
"""


def test_without_memory_it_makes_do_with_fewer_threads_and_else_ends_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEMORY],
        check=False,
        timeout=600,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "the same with fewer threads\n", done.stderr
    assert done.returncode == -signal.SIGABRT
    assert "the CPU core has no memory for 83886080 bytes" in done.stderr


@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
def test_the_build_leaves_a_library_that_is_current_alone(tmp_path: Path) -> None:
    root = Path(core.__file__).parents[3]
    shutil.copy(core.LIBRARY, tmp_path)
    before = (tmp_path / "libcore.so").stat().st_mtime_ns
    script = f"import pathlib, setup; setup.build_core(pathlib.Path({str(tmp_path)!r}))"
    command = [sys.executable, "-c", script]
    subprocess.run(command, cwd=root, check=True, timeout=600)
    assert (tmp_path / "libcore.so").stat().st_mtime_ns == before
    (tmp_path / "libcore.so").unlink()
    environment = {"PATH": str(tmp_path)}
    done = subprocess.run(
        command, cwd=root, check=True, timeout=600, env=environment, capture_output=True, text=True
    )
    assert "no C++ compiler" in done.stderr and not list(tmp_path.iterdir())
    assert ctypes.CDLL(str(core.LIBRARY)).core_level() >= Level.AVX2


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_heads_of_any_number_of_tokens_are_turned_natively(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the layers cut them: a single token's views have other strides."""
    monkeypatch.setattr(TorchKernels, "rotate_and_write", None)
    q, k, v = (
        part.view(num_tokens, -1, 16)
        for part in torch.randn(num_tokens, 64).split_with_sizes((32, 16, 16), dim=-1)
    )
    pools, cos = torch.zeros(2, 1, 8, 16).transpose(1, 2), torch.ones(num_tokens, 8)
    slots = torch.arange(num_tokens)
    NativeKernels().rotate_and_write(
        q, k, v, cos=cos, sin=cos - 1, k_pool=pools[0], v_pool=pools[1], slot_mapping=slots,
        qk_norm=None,
    )  # fmt: skip
    assert torch.equal(pools[0, :num_tokens], k) and torch.equal(pools[1, :num_tokens], v)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", LIMITS, ids=["float32", "bfloat16"])
def test_rows_of_packed_weights(dtype: torch.dtype) -> None:
    """An embedding that is the output layer's weight too."""
    kernels = NativeKernels()
    for num_outputs, num_inputs in ((1, 1), (33, 31), (70, 65), (64, 300)):
        weight = torch.randn(num_outputs, num_inputs).to(dtype)
        indices = torch.randint(num_outputs, (50,))
        torch.set_num_threads(1 + num_outputs % 3)
        plain = kernels.rows_of(kernels.pack_weight(weight), num_inputs, dtype)
        rounded = kernels.rows_of(kernels.quantize(weight), num_inputs, dtype)
        assert plain is not None
        with Poisoned():
            assert torch.equal(plain(indices), weight[indices])
            assert torch.equal(rounded(indices), rounded_to_int8(weight)[indices].to(dtype))
        for rows in (plain, rounded):
            for wrong in (num_outputs, -1):
                with pytest.raises(IndexError, match=f"row {wrong} of a weight of {num_outputs}"):
                    rows(torch.tensor([0, wrong]))
    assert kernels.rows_of(torch.zeros(2, 2).half(), 2, torch.float16) is None
