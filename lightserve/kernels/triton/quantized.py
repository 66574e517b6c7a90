"""Products with quantised weights, which stay packed: made numbers tile by tile, in registers.

    int8    int8 [M, K], a factor for each output
    uint8   integers of 8 bits without a sign; groups of inputs have a factor and a zero each
    int4    the same of 4 bits
    fp8     float8_e4m3fn [M, K]; groups of inputs have a factor each
    fp4     the same of a sign, two bits of exponent and one behind it (experts alone)
    plain   numbers of the model's type, not quantised (experts alone)

Rows x are numbers of the model's type, or of 8 bits as well: integers by `int8`, with a factor for
each row, and e4m3 by `fp8`, with a factor for each row's group.

Integers less their zeros, and numbers of 8 bits, are bfloat16's and float16's: nothing is lost
before the product. Factors are multiplied to its float32 sums, group by group. Of 4 bits two
inputs share a byte, HALF apart, so that each half of a tile is a product of its own:

    bytes    0 … HALF-1                                 HALF … 2*HALF-1
    inputs   low bits 0 …, high bits HALF … 2*HALF-1    2*HALF …
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.kernels.triton.launch import cdiv, launched
from lightserve.kernels.triton.norms import (
    RoundedRows,
    add_rms_norm_rounded,
    round_rows,
    silu_and_mul,
    silu_and_mul_rounded,
)
from lightserve.kernels.weights import (
    Fp4Weight,
    Fp8Block,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    PackedWeight,
)

BLOCK_R, LARGE_BLOCK_R = 16, 64
"""Rows of a program: of decodes, and from `LARGE_FROM` rows on."""
LARGE_FROM = 33
INTEGERS_FROM = 33
"""Rows from which W8A8 products are by integers: below, reading the weight takes the time."""
NUM_STAGES = 4
BLOCK_K = 64
"""Inputs that are taken at once, of both halves each; a divisor of groups, or half of it."""
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Shares of a group's width over which its 16 values may be spread: the one with the least error is
taken."""


@triton.jit
def _widened(values, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Return packed values as numbers of DTYPE: of fp8 and fp4 a fixed part of the number."""
    numbers = values
    if KIND == "fp8":
        # A sign, four bits of exponent and three behind it, as they stand in float16: without a
        # GPU's own conversion, which those before sm_89 lack.
        wide = values.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        numbers = bits.to(tl.float16, bitcast=True)
    elif KIND == "fp4":
        wide = values.to(tl.uint16)
        bits = ((wide & 8) << 12) | ((wide & 7) << 9)
        numbers = bits.to(tl.float16, bitcast=True)
    if KIND != "plain":
        numbers = numbers.to(tl.float32)
    return numbers.to(DTYPE)


@triton.jit
def _e4m3_product(x, values, WIDEN: tl.constexpr):
    """Return x [R, K] times values [K, N], bytes of e4m3; WIDEN: a 65,536th of it."""
    if WIDEN:
        x, values = _widened(x, "fp8", tl.float32), _widened(values, "fp8", tl.float32)
        product = tl.dot(x, values, input_precision="ieee")
    else:
        x = x.to(tl.float8e4nv, bitcast=True)
        product = tl.dot(x, values.to(tl.float8e4nv, bitcast=True))
    return product


@triton.jit
def _add_part(
    total, x_lines, x_factors, is_row, inputs, values, factors_ptr, zeros_ptr, places, is_output,
    NUM_INPUTS: tl.constexpr, KIND: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_FACTORS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Add x [R, K] times values [K, N], whose factors stand at `places` [N].

    Those of x, if it is e4m3, stand at x_factors [R].
    """
    mask = is_row[:, None] & (inputs < NUM_INPUTS)[None, :]
    x = tl.load(x_lines + inputs[None, :], mask=mask, other=0.0)
    # One way out, here and elsewhere: Triton 3.6 goes on compiling behind a `return` in an `if`
    # whose condition it knows.
    if x.dtype == tl.int8:
        total = tl.dot(x, values, total, out_dtype=tl.int32)
    elif x.dtype == tl.uint8:
        # A sum for each block: tensor cores add up e4m3 with fewer bits than float32 has.
        part = _e4m3_product(x, values, WIDEN)
        if HAS_FACTORS:
            part *= tl.load(x_factors, mask=is_row, other=0.0)[:, None]
            part *= tl.load(factors_ptr + places, mask=is_output, other=0.0)[None, :]
        total += part
    else:
        if WIDEN:
            x = x.to(tl.float32)
        numbers = _widened(values, KIND, x.dtype)
        if HAS_ZEROS:
            zeros = tl.load(zeros_ptr + places, mask=is_output, other=0)
            numbers -= zeros.to(tl.float32).to(x.dtype)[None, :]
        if HAS_FACTORS:
            part = tl.dot(x, numbers, input_precision="ieee")
            factors = tl.load(factors_ptr + places, mask=is_output, other=0.0)
            total += part * factors.to(tl.float32)[None, :]
        else:
            total = tl.dot(x, numbers, total, input_precision="ieee")
    return total


# fmt: off
@triton.jit
def add_tile(
    total, start, x_lines, x_factors, x_factors_stride, is_row, values_ptr, factors_ptr, zeros_ptr,
    outputs, is_output, factors_stride, NUM_INPUTS: tl.constexpr, NUM_BYTES: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
):
    # fmt: on
    """Add the products of BLOCK_K values of each output, from `start` on, to float32 [R, N].

    Of rows that begin at x_lines [R, 1], and some outputs [N] of a weight: values [all outputs,
    NUM_BYTES], factors and zeros [groups, all outputs]. GROUP 0: one factor for all inputs, see
    `finished`. Rows of e4m3 have factors at x_factors [R], those of groups x_factors_stride apart.
    """
    places = start + tl.arange(0, BLOCK_K)
    lines = values_ptr + outputs.to(tl.int64)[None, :] * NUM_BYTES
    is_value = is_output[None, :] & (places < NUM_BYTES)[:, None]
    values = tl.load(lines + places[:, None], mask=is_value, other=0)
    if (KIND == "int4") | (KIND == "fp4"):
        first = 2 * start
        inputs = first + tl.arange(0, BLOCK_K)
        low = outputs + first // GROUP * factors_stride
        total = _add_part(
            total, x_lines, x_factors, is_row, inputs, values & 15, factors_ptr, zeros_ptr, low,
            is_output, NUM_INPUTS, KIND, KIND == "int4", True, WIDEN,
        )  # fmt: skip
        # The last half may be beyond all inputs, and then beyond all factors.
        last: tl.constexpr = (NUM_INPUTS - 1) // GROUP
        high = outputs + tl.minimum((first + BLOCK_K) // GROUP, last) * factors_stride
        total = _add_part(
            total, x_lines, x_factors, is_row, inputs + BLOCK_K, values >> 4, factors_ptr,
            zeros_ptr, high, is_output, NUM_INPUTS, KIND, KIND == "int4", True, WIDEN,
        )  # fmt: skip
    else:
        own = outputs
        if GROUP:
            own += start // GROUP * factors_stride
            x_factors += start // GROUP * x_factors_stride
        total = _add_part(
            total, x_lines, x_factors, is_row, places, values, factors_ptr, zeros_ptr, own,
            is_output, NUM_INPUTS, KIND, KIND == "uint8", GROUP > 0, WIDEN,
        )  # fmt: skip
    return total


@triton.jit
def finished(
    total, x_factors, is_row, factors_ptr, bias_ptr, outputs, is_output, KIND: tl.constexpr,
    GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, IS_SMALL: tl.constexpr,
):  # fmt: skip
    """Multiply by the factors of whole rows and outputs, where there are any, and add biases.

    IS_SMALL: rows x are of 8 bits.
    """
    if IS_SMALL & (GROUP == 0):
        of_rows = tl.load(x_factors, mask=is_row, other=0.0)
        total = total.to(tl.float32) * of_rows[:, None]
    if (KIND != "plain") & (GROUP == 0):
        total *= tl.load(factors_ptr + outputs, mask=is_output, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    return total


# fmt: off
@launched
@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x_ptr, x_factors_ptr, values_ptr, factors_ptr, zeros_ptr, bias_ptr, out_ptr, num_rows,
    num_outputs, x_stride, factors_stride, NUM_INPUTS: tl.constexpr, NUM_BYTES: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
):
    # fmt: on
    """x [num_rows, NUM_INPUTS] times a weight, see `add_tile`: out [num_rows, num_outputs].

    x of int8 has a factor for each row, and sums are integers, of a weight of KIND int8.
    """
    is_integer: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    is_small: tl.constexpr = is_integer or x_ptr.dtype.element_ty == tl.uint8
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    total = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.int32 if is_integer else tl.float32)
    for start in range(0, NUM_BYTES, BLOCK_K):
        total = add_tile(
            total, start, x_ptr + rows[:, None] * x_stride, x_factors_ptr + rows, num_rows, is_row,
            values_ptr, factors_ptr, zeros_ptr, outputs, is_output, factors_stride, NUM_INPUTS,
            NUM_BYTES, KIND, GROUP, BLOCK_K, WIDEN,
        )  # fmt: skip
    total = finished(
        total, x_factors_ptr + rows, is_row, factors_ptr, bias_ptr, outputs, is_output, KIND, GROUP,
        HAS_BIAS, is_small,
    )
    out = out_ptr + rows[:, None] * num_outputs + outputs[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


class Launch(NamedTuple):
    """How a product is cut up."""

    block_r: int
    block_n: int
    num_warps: int
    num_stages: int = NUM_STAGES


def launch_of(num_rows: int, kind: str, block_k: int, *, is_e4m3: bool = False) -> Launch:
    """Return blocks with loads of 16 bytes, which do not spill registers.

    `is_e4m3`: rows are, too.
    """
    if is_e4m3:
        return Launch(64, 128, 8, 3) if num_rows >= LARGE_FROM else Launch(BLOCK_R, 32, 4, 6)
    if num_rows >= LARGE_FROM:
        return Launch(LARGE_BLOCK_R, 64, 8 if kind == "int4" else 4)
    return Launch(BLOCK_R, 64 if block_k < BLOCK_K else 32, 4)


class Form(NamedTuple):
    """How kernels read a packed weight."""

    kind: str
    """See the module."""
    group: int
    """Inputs that share a factor; 0: all."""
    block_k: int


def form_of(weight: PackedWeight | Fp4Weight) -> Form:
    """Return how kernels read a weight."""
    match weight:
        case Int8Weight():
            return Form("int8", 0, 2 * BLOCK_K)
        case Fp8Weight():
            return Form("fp8", weight.group, BLOCK_K)
        case Fp4Weight():
            return Form("fp4", weight.group_size, half_of(weight.group_size))
        case GroupedWeight():
            kind = "int4" if weight.bits == 4 else "uint8"
            return Form(kind, weight.group_size, half_of(weight.group_size))


def _multiply(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    *,
    dtype: torch.dtype | None = None,
    x_factors: Tensor | None = None,
) -> Tensor:
    """Return the product, of `dtype` (default: of x); `x_factors`: of rows that are rounded."""
    kind, group, block_k = form_of(weight)
    if kind == "fp8" and x_factors is not None:
        block_k = group or 2 * BLOCK_K
    values, factors = weight.packed, weight.factors
    values = values.view(torch.uint8) if kind == "fp8" else values
    zeros = weight.zeros if isinstance(weight, GroupedWeight) else None
    x = x if x.stride(1) == 1 else x.contiguous()
    (num_rows, num_inputs), (num_outputs, num_bytes) = x.shape, values.shape
    out = torch.empty((num_rows, num_outputs), dtype=dtype or x.dtype, device=x.device)
    if not num_rows:
        return out
    launch = launch_of(num_rows, kind, block_k, is_e4m3=x.dtype is torch.uint8)
    blocks = cdiv(num_rows, launch.block_r), cdiv(num_outputs, launch.block_n)
    _product_kernel[blocks](
        x, factors if x_factors is None else x_factors, values, factors, zeros, bias, out, num_rows,
        num_outputs, x.stride(0), factors.stride(0),
        NUM_INPUTS=num_inputs,
        NUM_BYTES=num_bytes,
        KIND=kind,
        GROUP=group,
        HAS_BIAS=bias is not None,
        BLOCK_R=launch.block_r,
        BLOCK_N=launch.block_n,
        BLOCK_K=block_k,
        WIDEN=x.device.type == "cpu",  # interpreted by numpy, which has no bfloat16
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        enable_fp_fusion=True,
    )  # fmt: skip
    return out


def int8_of(weight: Tensor) -> Int8Weight:
    """See `Kernels.quantize`."""
    wide = weight.float()
    largest = wide.abs().amax(dim=1, keepdim=True)
    is_zero = largest < 1e-30
    inverse = torch.full_like(largest, 127.0) / largest
    integers = (wide * torch.where(is_zero, 0.0, inverse)).round().to(torch.int8)
    factors = torch.where(is_zero, 0.0, largest / 127.0)
    return Int8Weight(integers, factors.T.contiguous(), len(weight))


def linear_rounded(x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    """Return the product; many rows are rounded to 8 bits, see `Int8Weight.rounds_rows`."""
    if len(x) < INTEGERS_FROM:
        return linear_int8(x, weight, bias, None)
    rounded = int8_of(x)
    return _multiply(rounded.packed, weight, bias, dtype=x.dtype, x_factors=rounded.factors)


def linear_int8(
    x: Tensor, weight: Int8Weight, bias: Tensor | None, dtype: torch.dtype | None
) -> Tensor:
    """Return the product by integers of 8 bits, of `dtype` (default: of x)."""
    return _multiply(x, weight, bias, dtype=dtype)


def half_of(group_size: int) -> int:
    """Return how far inputs that share a byte are apart: both halves are within a group."""
    return BLOCK_K if group_size % BLOCK_K == 0 else BLOCK_K // 2


def in_halves(values: Tensor, half: int) -> Tensor:
    """Return values of 4 bits, uint8 [M, K], two to a byte, see the module."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % (2 * half)))
    low, high = padded.view(len(values), -1, 2, half).unbind(2)
    return (low | high << 4).flatten(1)


def pack_fp4(codes: Tensor, factors: Tensor, *, group_size: int) -> Fp4Weight:
    """See `Kernels.pack_fp4`."""
    # What is made of a number is a 16,384th of it.
    own = (factors.float() * 2.0**14).T.contiguous()
    return Fp4Weight(in_halves(codes, half_of(group_size)), own, group_size)


def pack_groups(
    integers: Tensor, factors: Tensor, zeros: Tensor, *, bits: int, group_size: int
) -> GroupedWeight:
    """See `Kernels.pack_groups`."""
    num_outputs, num_inputs = integers.shape
    packed = in_halves(integers, half_of(group_size)) if bits == 4 else integers.contiguous()
    sizes = (num_outputs, num_inputs, bits, group_size)
    return GroupedWeight(packed, factors.T.contiguous(), zeros.T.contiguous(), *sizes)


def quantize_groups(weight: Tensor, group_size: int) -> GroupedWeight:
    """See `Kernels.quantize_groups`."""
    num_outputs, num_inputs = weight.shape
    wide = torch.nn.functional.pad(weight.float(), (0, -num_inputs % group_size))
    wide = wide.view(num_outputs, -1, group_size)
    low, high = wide.amin(-1).clamp(max=0.0), wide.amax(-1).clamp(min=0.0)
    best = torch.zeros_like(wide, dtype=torch.uint8)
    factors, zeros = torch.zeros_like(low).half(), torch.zeros_like(low, dtype=torch.uint8)
    least = torch.full_like(low, torch.inf)
    for share in SHARES:
        factor = ((high - low) * (share / 15.0)).half()
        scale = factor.float()[..., None]
        inverse = torch.where(scale > 0.0, scale.reciprocal(), 0.0)
        zero = (-low * share * inverse[..., 0]).round().clamp(0, 15)
        found = (wide * inverse).round().add_(zero[..., None]).clamp_(0, 15)
        error = ((found - zero[..., None]) * scale - wide).square().sum(-1)
        # The first is taken at least, so that a factor that float16 cannot hold is infinite.
        is_better = (error < least) | (least.isinf() & (share == SHARES[0]))
        least = torch.where(is_better, error, least)
        factors = torch.where(is_better, factor, factors)
        zeros = torch.where(is_better, zero.to(torch.uint8), zeros)
        best = torch.where(is_better[..., None], found.to(torch.uint8), best)
    integers = best.flatten(1)[:, :num_inputs]
    return pack_groups(integers, factors, zeros, bits=4, group_size=group_size)


def linear_groups(x: Tensor, weight: GroupedWeight, bias: Tensor | None) -> Tensor:
    """Return the product by integers in groups."""
    return _multiply(x, weight, bias)


def pack_fp8(values: Tensor, factors: Tensor, *, group_size: int) -> Fp8Weight:
    """See `Kernels.pack_fp8`."""
    assert group_size % BLOCK_K == 0 or group_size >= values.shape[1]
    # What is made of an 8-bit number is a 256th of it.
    return Fp8Weight(values.contiguous(), (factors.float() * 256.0).T.contiguous(), group_size)


SCALED_ROWS = (16, 64, 256, 2048)
"""Numbers of rows for which a start finds out whose products of e4m3 are faster."""
SCALED_UNIT = 16
"""torch's take inputs and outputs in multiples of it."""


class ScaledKey(NamedTuple):
    """A kind of products of e4m3 by e4m3, with one factor for a row and one for an output."""

    num_inputs: int
    num_outputs: int
    num_rows: int
    """At most so many, one of `SCALED_ROWS`; the last stands for more, too."""


def scaled_key(num_rows: int, num_inputs: int, num_outputs: int) -> ScaledKey:
    """Return the kind of a product, by its sizes alone: a graph records what others compute."""
    bound = next((some for some in SCALED_ROWS if num_rows <= some), SCALED_ROWS[-1])
    return ScaledKey(num_inputs, num_outputs, bound)


def scaled_product(x: RoundedRows, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """Return torch's product of rows and a weight without groups, bfloat16 [N, M], on a GPU.

    The units of both sides' factors cancel out there.
    """
    e4m3 = torch.float8_e4m3fn
    return torch._scaled_mm(
        x.values.view(e4m3),
        weight.packed.view(e4m3).T,
        bias=bias,
        scale_a=x.factors.view(-1, 1),
        scale_b=weight.factors,
        out_dtype=torch.bfloat16,
    )


def linear_fp8(
    x: Tensor | RoundedRows,
    weight: Fp8Weight,
    bias: Tensor | None,
    scaled: Set[ScaledKey] = frozenset(),
) -> Tensor:
    """Return the product by floating point of 8 bits, on both sides if rows are rounded.

    `scaled`: products that are torch's.
    """
    if weight.rounds_rows and isinstance(x, Tensor):
        x = round_rows(x, weight.group)
    if isinstance(x, Tensor):
        return _multiply(x, weight, bias)
    assert weight.rounds_rows and x.group == weight.group, "rows are rounded for this weight"
    key = scaled_key(len(x.values), *reversed(weight.packed.shape))
    if key in scaled and x.group == 0 and x.dtype is torch.bfloat16 and len(x.values):
        return scaled_product(x, weight, bias)
    return _multiply(x.values, weight, bias, dtype=x.dtype, x_factors=x.factors)


def multiply_block(
    x: Tensor | RoundedRows, block: Fp8Block, bias: Tensor | None, scaled: Set[ScaledKey]
) -> Tensor:
    """Return the product by a block; gated numbers are rounded where they are made."""
    gate_up = linear_fp8(x, block.first, block.first_bias, scaled)
    features = silu_and_mul_rounded(gate_up, block.second.group)
    return linear_fp8(features, block.second, bias, scaled)


def multiply_behind(
    x: Tensor,
    residual: Tensor,
    norm: tuple[Tensor, float],
    weight: PackedWeight | Fp8Block,
    bias: Tensor | None,
    scaled: Set[ScaledKey],
) -> tuple[Tensor, Tensor]:
    """See `Kernels.add_norm_linear`; rows are rounded where they are normalised."""
    first = weight.first if isinstance(weight, Fp8Block) else weight
    assert isinstance(first, Fp8Weight) and first.rounds_rows, "others have no such product"
    rows, residual = add_rms_norm_rounded(x, residual, *norm, first.group)
    if isinstance(weight, Fp8Block):
        return multiply_block(rows, weight, bias, scaled), residual
    product = linear_fp8(rows, first, bias, scaled)
    return (silu_and_mul(product) if first.is_gated else product), residual


def linear(
    x: Tensor,
    weight: PackedWeight | Fp8Block,
    bias: Tensor | None,
    dtype: torch.dtype | None,
    scaled: Set[ScaledKey] = frozenset(),
) -> Tensor:
    """See `Kernels.linear`; gates are not applied. `scaled`: see `linear_fp8`."""
    if isinstance(weight, Int8Weight):
        if weight.rounds_rows and dtype is None:
            return linear_rounded(x, weight, bias)
        return linear_int8(x, weight, bias, dtype)
    assert dtype is None, "no output layer has such a weight"
    if isinstance(weight, Fp8Block):
        return multiply_block(x, weight, bias, scaled)
    if isinstance(weight, GroupedWeight):
        return linear_groups(x, weight, bias)
    return linear_fp8(x, weight, bias, scaled)
