"""Norms, gates, and rows rounded to 8 bits: each alone, or what comes first with the rounding.

Everything is computed in float32 and rounded where transformers rounds. Rows for products by an
`Fp8Weight` are e4m3, each number over the factor that it shares with all of its row, or with the
numbers of its group:

    row       0 … group-1   group … 2*group-1   …        factors   [groups, rows]

A kernel that rounds what it has just computed gives the bits of one that reads it: results have
the model's type before they are e4m3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.kernels.triton.launch import cdiv, launched, next_power_of_2


class RoundedRows(NamedTuple):
    """Rows [N, K] of e4m3, for products by a weight of e4m3 and by nothing else."""

    values: Tensor
    """uint8 [N, K]."""
    factors: Tensor
    """float32 [groups, N], in the kernels' own unit."""
    group: int
    """Numbers of a row that share a factor; 0: all."""
    dtype: torch.dtype
    """Type that the rows had, and that of products."""


@triton.jit
def factors_of(largest, sums, TOP: tl.constexpr):
    """Return factors of heads float32 [H, 1], and their inverses, by the largest number of each.

    `sums` of a head's numbers, each times 0, are 0, or no number where one of them is none.
    """
    is_zero = largest < 1e-30
    top = tl.full(largest.shape, TOP, tl.float32)
    factors = tl.where(is_zero, 0.0, tl.div_rn(largest, top)) + sums
    inverse = tl.div_rn(top, tl.where(is_zero, 1.0, largest))
    return factors[:, None], tl.where(is_zero, 0.0, inverse)[:, None]


@triton.jit
def codes_of(numbers, KIND: tl.constexpr):
    """Return float32 numbers of at most 127, or 448, as integers or e4m3 in 8 bits, in int32.

    Ties go to even: sums are rounded where their last bit stands for the unit.
    """
    if KIND == "int8":
        codes = (numbers + 12582912.0).to(tl.int32, bitcast=True)
    else:
        size = tl.abs(numbers)
        bits = size.to(tl.int32, bitcast=True)
        codes = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2 ** -6 codes count units of 2 ** -9.
        small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        codes = tl.where(size < 0.015625, small, codes)
        codes |= (numbers.to(tl.int32, bitcast=True) >> 24) & 0x80
    return codes


@triton.jit
def _store_rounded(
    numbers, out_ptr, factors_ptr, first_row, first_column, num_rows, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Store float32 numbers [ROWS, BLOCK] as e4m3 in rows of WIDTH, and factors in UNIT.

    SIZE: numbers that share a factor, a power of 2 of at most BLOCK. Those beyond WIDTH are 0.
    """
    groups: tl.constexpr = BLOCK // SIZE
    lines = tl.reshape(numbers, (ROWS * groups, SIZE))
    largest, sums = tl.max(tl.abs(lines), axis=1), tl.sum(lines * 0.0, axis=1)
    factors, inverse = factors_of(largest, sums, 448.0)
    codes = tl.reshape(codes_of(lines * inverse, "fp8"), (ROWS, BLOCK)).to(tl.uint8)
    rows = first_row + tl.arange(0, ROWS)[:, None]
    columns = first_column + tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows) & (columns < WIDTH)
    tl.store(out_ptr + rows * WIDTH + columns, codes, mask=mask)
    line = tl.arange(0, ROWS * groups)[:, None]
    row, group = first_row + line // groups, first_column // SIZE + line % groups
    mask = (row < num_rows) & (group * SIZE < WIDTH)
    tl.store(factors_ptr + group * num_rows + row, factors * UNIT, mask=mask)


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _round_rows_kernel(
    x_ptr, out_ptr, factors_ptr, num_rows, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    SIZE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Round BLOCK numbers of a row, see `_store_rounded`."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + row * x_stride + columns, mask=columns < WIDTH, other=0.0)
    _store_rounded(
        x.to(tl.float32), out_ptr, factors_ptr, row, first, num_rows, WIDTH, 1, BLOCK, SIZE, UNIT
    )


@launched
@triton.jit
def _round_wide_rows_kernel(
    x_ptr, out_ptr, factors_ptr, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Round a row by the largest of all its numbers, which are read twice, BLOCK at once."""
    row = tl.program_id(0).to(tl.int64)
    largest, sums = tl.zeros((1,), tl.float32), tl.zeros((1,), tl.float32)
    for first in range(0, WIDTH, BLOCK):
        columns = first + tl.arange(0, BLOCK)[None, :]
        x = tl.load(x_ptr + row * x_stride + columns, mask=columns < WIDTH, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(x.to(tl.float32)), axis=1))
        sums += tl.sum(x.to(tl.float32) * 0.0, axis=1)
    factors, inverse = factors_of(largest, sums, 448.0)
    for first in range(0, WIDTH, BLOCK):
        columns = first + tl.arange(0, BLOCK)[None, :]
        x = tl.load(x_ptr + row * x_stride + columns, mask=columns < WIDTH, other=0.0)
        codes = codes_of(x.to(tl.float32) * inverse, "fp8").to(tl.uint8)
        tl.store(out_ptr + row * WIDTH + columns, codes, mask=columns < WIDTH)
    tl.store(factors_ptr + row + tl.arange(0, 1)[:, None], factors * UNIT)


@triton.jit
def _normed(x, weight, eps, WIDTH: tl.constexpr, kind: tl.constexpr):
    """Normalise rows [ROWS, BLOCK], rounding before the weight to its type, after it to `kind`."""
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)[:, None]
    return ((x * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(kind)


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, factors_ptr, num_rows, eps, x_stride, residual_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Normalise rows, or, with a residual, the sum that is stored in its place.

    SIZE: see `_store_rounded`; 0: results have the model's type, and no factors.
    """
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    rows = first_row + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows) & (columns < WIDTH)
    x = tl.load(x_ptr + rows * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = residual_ptr + rows * residual_stride + columns
        before = tl.load(residual, mask=mask, other=0.0).to(tl.float32)
        rounded = (x + before).to(residual_ptr.dtype.element_ty)
        tl.store(residual, rounded, mask=mask)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + columns + 0 * rows, mask=mask, other=0.0)
    out = _normed(x, weight, eps, WIDTH, x_ptr.dtype.element_ty)
    if SIZE:
        _store_rounded(
            out.to(tl.float32), out_ptr, factors_ptr, first_row, 0, num_rows, WIDTH, ROWS, BLOCK,
            SIZE, UNIT,
        )  # fmt: skip
    else:
        tl.store(out_ptr + rows * WIDTH + columns, out, mask=mask)


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _silu_and_mul_kernel(
    x_ptr, out_ptr, factors_ptr, num_rows, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    SIZE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """SIZE: as in `_norm_kernel`."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)[None, :]
    mask = columns < WIDTH
    gate = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    kind: tl.constexpr = x_ptr.dtype.element_ty
    gated = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    out = (gated * up).to(kind)
    if SIZE:
        _store_rounded(
            out.to(tl.float32), out_ptr, factors_ptr, row, first, num_rows, WIDTH, 1, BLOCK, SIZE,
            UNIT,
        )  # fmt: skip
    else:
        tl.store(out_ptr + row * WIDTH + columns, out, mask=mask)


SILU_BLOCK = 1024
ROUNDED_BLOCK = 2048
MOST_ROUNDED = 1 << 14
"""Numbers of a row up to which norms round it, or it is rounded alone, without spilling registers;
gates twice as many."""
THREAD_ELEMENTS = 16
"""Elements of a row for each thread: two loads of 16 bytes in flight, in a type of 2 bytes."""
MAX_WARPS = 16
SMALL_BLOCK = 1024
"""Narrower rows share a program, so that its threads have whole loads and a row needs no barrier
between warps."""


def _norm_launch(width: int) -> dict[str, int]:
    """Return block sizes and warps for rows of a width."""
    block = next_power_of_2(width)
    rows = max(1, SMALL_BLOCK // block)
    return {"WIDTH": width, "ROWS": rows, "BLOCK": block, "num_warps": _num_warps(rows * block)}


def _num_warps(num_elements: int) -> int:
    return min(MAX_WARPS, max(1, num_elements // (32 * THREAD_ELEMENTS)))


def _rounding(group: int | None, block: int, device: torch.device) -> dict[str, int | float]:
    """Return the constants of results in groups, see `RoundedRows`; None: they are not rounded."""
    size = 0 if group is None else group or block
    assert not size or block % size == 0
    # Products make a 256th of a number of 8 bits, and the interpreter, which is on CPUs, of both.
    return {"SIZE": size, "UNIT": 256.0 if device.type == "cpu" else 2.0**-8}


def _rounded_like(x: Tensor, width: int, group: int) -> RoundedRows:
    """Return memory for as many rows as x has."""
    num_rows, num_groups = len(x), cdiv(width, group or width)
    values = torch.empty((num_rows, width), dtype=torch.uint8, device=x.device)
    factors = torch.empty((num_groups, num_rows), dtype=torch.float32, device=x.device)
    return RoundedRows(values, factors, group, x.dtype)


def round_rows(x: Tensor, group: int) -> RoundedRows:
    """Return rows [N, K] as e4m3; `group`: see `RoundedRows`."""
    num_rows, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = _rounded_like(x, width, group)
    block = next_power_of_2(width)
    block = min(block, ROUNDED_BLOCK) if group else block
    constants = _rounding(group, block, x.device)
    if num_rows and not group and width > MOST_ROUNDED:
        _round_wide_rows_kernel[(num_rows,)](
            x, out.values, out.factors, x.stride(0), WIDTH=width, BLOCK=MOST_ROUNDED // 2,
            UNIT=constants["UNIT"], num_warps=MAX_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
    elif num_rows:
        _round_rows_kernel[num_rows, cdiv(width, block)](
            x, out.values, out.factors, num_rows, x.stride(0), WIDTH=width, BLOCK=block,
            **constants, num_warps=_num_warps(block), enable_fp_fusion=True,
        )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Kernels.rms_norm`."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _norm(rows, None, weight, eps, out, None, None)
    return out.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `Kernels.add_rms_norm`; overwrites `residual`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(x, residual, weight, eps, out, None, None)
    return out, residual


def add_rms_norm_rounded(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: int
) -> tuple[RoundedRows, Tensor]:
    """Return what `round_rows` makes of the result of `add_rms_norm`, and x + residual."""
    if x.shape[1] > MOST_ROUNDED:
        rows, residual = add_rms_norm(x, residual, weight, eps)
        return round_rows(rows, group), residual
    out = _rounded_like(x, x.shape[1], group)
    _norm(x, residual, weight, eps, out.values, out.factors, group)
    return out, residual


def _norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    factors: Tensor | None,
    group: int | None,
) -> None:
    num_rows, width = x.shape
    launch = _norm_launch(width)
    if num_rows:
        _norm_kernel[cdiv(num_rows, launch["ROWS"]),](
            x, residual, weight, out, factors, num_rows, eps, x.stride(0),
            0 if residual is None else residual.stride(0), **launch,
            **_rounding(group, launch["BLOCK"], x.device), enable_fp_fusion=True,
        )  # fmt: skip


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `Kernels.silu_and_mul`."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    _silu_and_mul(gate_up, out, None, None)
    return out


def silu_and_mul_rounded(gate_up: Tensor, group: int) -> RoundedRows:
    """Return what `round_rows` makes of the result of `silu_and_mul`."""
    width = gate_up.shape[1] // 2
    if group == 0 and width > 2 * MOST_ROUNDED:
        return round_rows(silu_and_mul(gate_up), group)
    out = _rounded_like(gate_up, width, group)
    _silu_and_mul(gate_up, out.values, out.factors, group)
    return out


def _silu_and_mul(gate_up: Tensor, out: Tensor, factors: Tensor | None, group: int | None) -> None:
    num_rows, width = out.shape
    block, num_warps = next_power_of_2(width), 4
    if group == 0:
        num_warps = _num_warps(block)
    else:
        block = min(SILU_BLOCK, block)
    if num_rows:
        _silu_and_mul_kernel[num_rows, cdiv(width, block)](
            gate_up, out, factors, num_rows, gate_up.stride(0), WIDTH=width, BLOCK=block,
            **_rounding(group, block, out.device), num_warps=num_warps, enable_fp_fusion=True,
        )  # fmt: skip
