"""Products of a few rows by a large weight, with what stands before and behind them in one launch.

A decode of up to `MAX_ROWS` rows waits for its weights: every program reads some outputs' weights
from beginning to end, all of them once, and computes with all rows.

    residual + x ─ norm ─┐
                         ├─ products ─ bias ─ silu(gate) * up
    weight [M, K] ───────┘

The norm's factor of a row is known when all of the row has been read, so that it is multiplied to
the products' float32 sums. A sum over all inputs is one program's: its bits depend on the
configuration and on nothing else. Configurations are measured against cuBLAS (`tuning`); where none
is faster, these kernels take no part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightserve.kernels.triton.experts import gated
from lightserve.kernels.triton.launch import cdiv, launched, next_power_of_2

MAX_ROWS = 8
PRODUCT_ROWS = (1, 2, 4, MAX_ROWS)
"""Numbers of rows that get configurations of their own; others are as the next larger one."""
DOT_ROWS = 8
"""Rows of a product on tensor cores; those that are not there are zeros."""


@dataclass(frozen=True)
class ProductConfig:
    """How a product is cut up."""

    block_n: int
    """Outputs of a program."""
    block_k: int
    """Inputs that are taken at once."""
    num_warps: int
    num_stages: int
    """Blocks of weights that are on their way at once; 1: those of one step, in registers."""
    is_dot: int
    """1: on tensor cores; 0: number by number."""


class ProductKey(NamedTuple):
    """The key of a configuration in one model; the number of outputs follows from it."""

    num_inputs: int
    num_rows: int
    """A power of two, at most `MAX_ROWS`: so many rows, or fewer."""
    has_norm: bool
    is_gated: bool


class ProductChoice(NamedTuple):
    """A configuration that was faster than cuBLAS."""

    config: ProductConfig
    max_outputs: int
    """Most outputs, with which it was measured: a larger weight is another one, the output
    layer's."""


ProductChoices = dict[ProductKey, ProductChoice]
"""Products of few rows that are not cuBLAS's."""


def product_config(
    choices: ProductChoices, x: Tensor, weight: Tensor, *, has_norm: bool, is_gated: bool
) -> ProductConfig | None:
    """Return how to multiply x [T, K] by a weight [M, K]; None: by cuBLAS."""
    num_rows = len(x)
    if not 0 < num_rows <= MAX_ROWS:
        return None
    key = ProductKey(weight.shape[1], next_power_of_2(num_rows), has_norm, is_gated)
    choice = choices.get(key)
    if choice is None or weight.shape[0] > choice.max_outputs:
        return None
    if not (weight.is_contiguous() and x.stride(1) == 1):
        return None
    return choice.config


@triton.jit
def _weights(
    weight_ptr, outputs, inputs, NUM_INPUTS: tl.constexpr, NUM_OUTPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return weights of [outputs, inputs], which are used once: they need not stay in a cache."""
    # What is beyond the last output is the last one's again: its products are not kept.
    lines = weight_ptr + tl.minimum(outputs, NUM_OUTPUTS - 1).to(tl.int64) * NUM_INPUTS
    if NUM_INPUTS % BLOCK_K == 0:
        values = tl.load(lines + inputs, eviction_policy="evict_first")
    else:
        is_input = (inputs < NUM_INPUTS) & (outputs >= 0)
        values = tl.load(lines + inputs, mask=is_input, other=0.0, eviction_policy="evict_first")
    return values


# fmt: off
@triton.jit
def _inputs(
    x_ptr, residual_ptr, norm_ptr, sum_ptr, rows, inputs, num_rows, x_stride, residual_stride,
    NUM_INPUTS: tl.constexpr, HAS_NORM: tl.constexpr,
):
    # fmt: on
    """Return (x of rows and inputs, float32 [R, …, K], times the norm's weight, and squares of it).

    With HAS_NORM, x + residual, rounded as it is kept, which the first program keeps.
    """
    mask = (rows < num_rows) & (inputs < NUM_INPUTS)
    x = tl.load(x_ptr + rows * x_stride + inputs, mask=mask, other=0.0).to(tl.float32)
    squares = x
    if HAS_NORM:
        before = tl.load(residual_ptr + rows * residual_stride + inputs, mask=mask, other=0.0)
        kept = (x + before.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        num_kept = tl.where(tl.program_id(0) == 0, num_rows, 0)
        tl.store(sum_ptr + rows * NUM_INPUTS + inputs, kept, mask=mask & (rows < num_kept))
        x = kept.to(tl.float32)
        squares = x * x
        norm = tl.load(norm_ptr + inputs, mask=inputs < NUM_INPUTS, other=0.0)
        x *= norm.to(tl.float32)
    return x, squares


# fmt: off
@launched
@triton.jit(do_not_specialize=["num_rows"])
def _rows_kernel(
    x_ptr, residual_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, num_rows, eps, x_stride,
    residual_stride, NUM_INPUTS: tl.constexpr, NUM_OUTPUTS: tl.constexpr, HAS_NORM: tl.constexpr,
    IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    """Number by number: a thread has sums of its own until the end. Of gates and ups two sums."""
    rows = tl.arange(0, ROWS)[:, None, None]
    outputs = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :, None]
    columns = tl.arange(0, BLOCK_K)[None, None, :]
    total = tl.zeros((ROWS, BLOCK_N, BLOCK_K), dtype=tl.float32)
    second = total
    squares = tl.zeros((ROWS, 1, BLOCK_K), dtype=tl.float32)
    for start in tl.range(0, NUM_INPUTS, BLOCK_K, num_stages=STAGES):
        inputs = start + columns
        weights = _weights(
            weight_ptr, outputs, inputs, NUM_INPUTS, NUM_OUTPUTS, BLOCK_N, BLOCK_K
        )
        if IS_GATED:
            ups = _weights(
                weight_ptr + NUM_OUTPUTS * NUM_INPUTS, outputs, inputs, NUM_INPUTS, NUM_OUTPUTS,
                BLOCK_N, BLOCK_K,
            )  # fmt: skip
        x, own = _inputs(
            x_ptr, residual_ptr, norm_ptr, sum_ptr, rows, inputs, num_rows, x_stride,
            residual_stride, NUM_INPUTS, HAS_NORM,
        )  # fmt: skip
        total += x * weights.to(tl.float32)
        if IS_GATED:
            second += x * ups.to(tl.float32)
        if HAS_NORM:
            squares += own
    sums = tl.sum(total, axis=2)
    gates = sums
    if IS_GATED:
        gates = tl.sum(second, axis=2)
    _finish(
        sums, gates, tl.sum(tl.sum(squares, axis=2), axis=1), bias_ptr, out_ptr,
        tl.arange(0, ROWS), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), num_rows, eps,
        NUM_INPUTS, NUM_OUTPUTS, HAS_NORM, IS_GATED, HAS_BIAS,
    )  # fmt: skip


# fmt: off
@launched
@triton.jit(do_not_specialize=["num_rows"])
def _dot_kernel(
    x_ptr, residual_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, num_rows, eps, x_stride,
    residual_stride, NUM_INPUTS: tl.constexpr, NUM_OUTPUTS: tl.constexpr, HAS_NORM: tl.constexpr,
    IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, WIDEN: tl.constexpr,
):
    # fmt: on
    """On tensor cores: weights [outputs, inputs] times rows [inputs, ROWS]."""
    rows = tl.arange(0, ROWS)[:, None]
    outputs = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    columns = tl.arange(0, BLOCK_K)[None, :]
    kind: tl.constexpr = tl.float32 if WIDEN else weight_ptr.dtype.element_ty
    total = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    second = total
    squares = tl.zeros((ROWS,), dtype=tl.float32)
    for start in tl.range(0, NUM_INPUTS, BLOCK_K, num_stages=STAGES):
        inputs = start + columns
        weights = _weights(
            weight_ptr, outputs, inputs, NUM_INPUTS, NUM_OUTPUTS, BLOCK_N, BLOCK_K
        )
        if IS_GATED:
            ups = _weights(
                weight_ptr + NUM_OUTPUTS * NUM_INPUTS, outputs, inputs, NUM_INPUTS, NUM_OUTPUTS,
                BLOCK_N, BLOCK_K,
            )  # fmt: skip
        x, own = _inputs(
            x_ptr, residual_ptr, norm_ptr, sum_ptr, rows, inputs, num_rows, x_stride,
            residual_stride, NUM_INPUTS, HAS_NORM,
        )  # fmt: skip
        x = tl.trans(x.to(kind))
        total = tl.dot(weights.to(kind), x, total, input_precision="ieee")
        if IS_GATED:
            second = tl.dot(ups.to(kind), x, second, input_precision="ieee")
        if HAS_NORM:
            squares += tl.sum(own, axis=1)
    _finish(
        tl.trans(total), tl.trans(second), squares, bias_ptr, out_ptr, tl.arange(0, ROWS),
        tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), num_rows, eps, NUM_INPUTS, NUM_OUTPUTS,
        HAS_NORM, IS_GATED, HAS_BIAS,
    )  # fmt: skip


# fmt: off
@triton.jit
def _finish(
    sums, ups, squares, bias_ptr, out_ptr, rows, outputs, num_rows, eps, NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr, HAS_NORM: tl.constexpr, IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    # fmt: on
    """Make results of sums [R, N] and, of gated ones, those of ups, and store them."""
    is_output = outputs < NUM_OUTPUTS
    if HAS_NORM:
        scale = tl.rsqrt(squares / NUM_INPUTS + eps)[:, None]
        sums *= scale
        ups *= scale
    if HAS_BIAS:
        sums += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            bias = tl.load(bias_ptr + NUM_OUTPUTS + outputs, mask=is_output, other=0.0)
            ups += bias.to(tl.float32)[None, :]
    if IS_GATED:
        sums = gated(sums, ups, 0.0, 0.0, "silu")
    mask = (rows < num_rows)[:, None] & is_output[None, :]
    target = out_ptr + rows[:, None] * NUM_OUTPUTS + outputs[None, :]
    tl.store(target, sums.to(out_ptr.dtype.element_ty), mask=mask)


class NormInputs(NamedTuple):
    """The inputs of a norm before a product."""

    residual: Tensor
    """[T, K]."""
    weight: Tensor
    """[K]."""
    eps: float


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: ProductConfig,
    *,
    norm: NormInputs | None = None,
    is_gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (x @ weight.T + bias, x), or of norm(x + residual) and with x + residual.

    x [T, K] with 0 < T <= MAX_ROWS, weight [M, K], contiguous; with `is_gated` gates first, of
    which silu(gate) * up is made -> [T, M / 2].
    """
    num_rows, num_inputs = x.shape
    num_outputs = weight.shape[0] // 2 if is_gated else weight.shape[0]
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    residual, norm_weight, eps, total = x, x, 0.0, x
    if norm is not None:
        residual, norm_weight, eps = norm
        total = torch.empty((num_rows, num_inputs), dtype=x.dtype, device=x.device)
    sizes = {
        "NUM_INPUTS": num_inputs,
        "NUM_OUTPUTS": num_outputs,
        "HAS_NORM": norm is not None,
        "IS_GATED": is_gated,
        "HAS_BIAS": bias is not None,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    strides = (x.stride(0), residual.stride(0))
    pointers = (x, residual, norm_weight, weight, bias, out, total)
    grid = (cdiv(num_outputs, config.block_n),)
    kernel = _dot_kernel if config.is_dot else _rows_kernel
    sizes["ROWS"] = DOT_ROWS if config.is_dot else next_power_of_2(num_rows)
    if config.is_dot:
        sizes["WIDEN"] = x.device.type == "cpu"  # interpreted by numpy, which has no bfloat16
    kernel[grid](*pointers, num_rows, eps, *strides, **sizes, enable_fp_fusion=True)
    return out, total


def candidates(key: ProductKey, dtype: torch.dtype) -> list[ProductConfig]:
    """Return configurations of which one may be faster than cuBLAS."""
    by_number = {
        1: ((4, 512, 2, 1), (4, 512, 4, 1), (8, 512, 4, 1), (2, 1024, 4, 1), (4, 1024, 4, 3)),
        2: ((4, 512, 2, 1), (2, 1024, 4, 1), (4, 512, 4, 1)),
        4: ((4, 512, 4, 1),),
    }
    found = [ProductConfig(*sizes, 0) for sizes in by_number.get(key.num_rows, ())]
    # A row's numbers times the norm's weight may be beyond what float16 holds.
    if dtype == torch.bfloat16 or not key.has_norm:
        sizes = ((16, 256, 1, 4), (16, 512, 2, 4), (32, 256, 2, 4), (32, 128, 2, 6))
        found += [ProductConfig(*size, 1) for size in sizes[: 2 if key.num_rows == 1 else None]]
    return found
