"""What the native core does number by number, and LayerNorm, by every set of instructions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.kernel_grid import Poisoned
from torch import Tensor
from torch.nn import functional

from lightserve.kernels import select
from lightserve.kernels.cpu.core import Element, Level, load_core
from lightserve.kernels.cpu.native import NativeKernels

pytestmark = pytest.mark.skipif(bool(select.missing_core()), reason=select.missing_core())
LEVELS = (Level.AVX2, Level.AVX512)  # all others take the latter's
DTYPES = (torch.float32, torch.bfloat16)
SIZES = ((1, 1), (1, 7), (3, 8), (2, 16), (5, 17), (33, 100), (2, 20_000))
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


@pytest.fixture(params=LEVELS, ids=[level.name for level in LEVELS])
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    if request.param > load_core().level:
        pytest.skip(f"this machine has no {request.param.name}")
    return NativeKernels(level=request.param)


def views(dtype: torch.dtype, *, spread: float = 3.0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of rows that lie apart, with numbers between them that belong to neither."""
    generator = torch.Generator().manual_seed(1)
    for num_rows, size in SIZES:
        both = torch.full((num_rows, 2 * size + 5), torch.nan)
        a, b = both[:, 1 : size + 1], both[:, size + 3 : 2 * size + 3]
        for part in (a, b):
            part.copy_(torch.randn(num_rows, size, generator=generator) * spread)
        a[0, -1] = -0.0
        wide = both.to(dtype)
        yield wide[:, 1 : size + 1], wide[:, size + 3 : 2 * size + 3]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(BITS[a.dtype]), b.contiguous().view(BITS[b.dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_passes_take_over_from_torch_is_torchs_to_the_bit(
    kernels: NativeKernels, dtype: torch.dtype
) -> None:
    operations = kernels._operations[dtype]
    for a, b in views(dtype):
        for element, other, factor, expected in (
            (Element.COPY, None, 0.0, a),
            (Element.SUM, b, 0.0, a + b),
            (Element.PRODUCT, b, 0.0, a * b),
            (Element.SCALED, None, 0.22, a * 0.22),
            (Element.RELU, None, 0.0, functional.relu(a)),
        ):
            out = torch.full((len(a), a.shape[1] + 3), 5.0, dtype=dtype)
            operations.elements(
                *(element, a.data_ptr(), a.stride(0)),
                *((None, 0) if other is None else (other.data_ptr(), other.stride(0))),
                *(factor, *a.shape, out.data_ptr(), out.stride(0), int(kernels._level), 2),
            )
            assert same_bits(out[:, : a.shape[1]], expected), (element, a.shape)
            assert bool((out[:, a.shape[1] :] == 5.0).all()), "it wrote beyond a row"


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu(kernels: NativeKernels, dtype: torch.dtype, *, is_exact: bool) -> None:
    limits = {torch.float32: (2e-6, 4e-7), torch.bfloat16: (4.1e-3, 1e-6)}
    relative, absolute = limits[dtype]
    approximate = "none" if is_exact else "tanh"
    for a, b in views(dtype):
        expected = functional.gelu(a.double(), approximate=approximate)
        for up in (None, b):
            with Poisoned():
                out = kernels.gelu(a, up, is_exact=is_exact)
            if up is not None:  # GELU itself is rounded before it is multiplied
                expected = kernels.gelu(a, is_exact=is_exact).double() * up.double()
            most = 1.0 if up is None else float(up.abs().max())
            torch.testing.assert_close(
                out.double(), expected, rtol=relative, atol=absolute * most, msg=str(a.shape)
            )
    ends = torch.tensor([[-1e4, -50.0, 50.0, 1e4, torch.nan]], dtype=dtype)
    out = kernels.gelu(ends, is_exact=is_exact)[0]
    assert out[:2].abs().max() < 1e-30 and torch.equal(out[2:4], ends[0, 2:4])
    assert out[4].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm(kernels: NativeKernels, dtype: torch.dtype) -> None:
    limit = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for x, others in views(dtype):
        weight, bias = others[0].contiguous(), others[-1].contiguous() * 0.5
        for shift, eps, own in ((0.0, 1e-5, bias), (30.0, 1e-5, None), (0.0, 50.0, bias)):
            moved = x + shift
            with Poisoned():
                out = kernels.layer_norm(moved, weight, own, eps)
            truth = functional.layer_norm(
                moved.double(),
                weight.shape,
                weight.double(),
                None if own is None else own.double(),
                eps,
            )
            most = limit * (1.0 + shift / 5.0)  # a mean of as many digits as float32 has
            torch.testing.assert_close(out.double(), truth, rtol=limit, atol=most)
    heads = torch.randn(3, 4, 8).to(dtype)
    ones = torch.ones(8, dtype=dtype)
    truth = functional.layer_norm(heads.double(), (8,), eps=1e-5)
    torch.testing.assert_close(
        kernels.layer_norm(heads, ones, None, 1e-5).double(), truth, rtol=limit, atol=limit
    )
