"""Normalisation, rotary embedding, gating, and the write of KV: a program has a token, or a few.

Everything is computed in float32 and rounded where transformers rounds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _normed(x, weight, eps, WIDTH: tl.constexpr, kind: tl.constexpr):
    """Normalise rows [ROWS, BLOCK] in float32, rounding before the weight and after it."""
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)[:, None]
    return ((x * scale).to(kind).to(tl.float32) * weight).to(kind)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    eps,
    x_stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows) & (columns < WIDTH)
    x = tl.load(x_ptr + rows * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns + 0 * rows, mask=mask, other=0.0).to(tl.float32)
    out = _normed(x, weight, eps, WIDTH, out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows * WIDTH + columns, out, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    eps,
    x_stride,
    residual_stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows) & (columns < WIDTH)
    residual = residual_ptr + rows * residual_stride + columns
    x = tl.load(x_ptr + rows * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    before = tl.load(residual, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns + 0 * rows, mask=mask, other=0.0).to(tl.float32)
    rounded = (x + before).to(residual_ptr.dtype.element_ty)
    tl.store(residual, rounded, mask=mask)
    out = _normed(rounded.to(tl.float32), weight, eps, WIDTH, out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows * WIDTH + columns, out, mask=mask)


@triton.jit
def _rotate_heads(
    x_ptr,
    cos,
    sin,
    stride_h,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    heads = tl.arange(0, BLOCK_H)
    columns = tl.arange(0, BLOCK_HALF)
    mask = (heads < NUM_HEADS)[:, None] & (columns < HALF)[None, :]
    first_ptr = x_ptr + heads[:, None] * stride_h + columns[None, :]
    first = tl.load(first_ptr, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    kind = x_ptr.dtype.element_ty
    tl.store(first_ptr, (first * cos - second * sin).to(kind), mask=mask)
    tl.store(first_ptr + HALF, (second * cos + first * sin).to(kind), mask=mask)


@triton.jit
def _rotary_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    angle_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_KV_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_HALF)
    mask = columns < HALF
    cos = tl.load(cos_ptr + token * angle_stride + columns, mask=mask, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * angle_stride + columns, mask=mask, other=0.0)[None, :]
    q = q_ptr + token * q_stride_t
    k = k_ptr + token * k_stride_t
    _rotate_heads(q, cos, sin, q_stride_h, NUM_HEADS, HALF, BLOCK_H, BLOCK_HALF)
    _rotate_heads(k, cos, sin, k_stride_h, NUM_KV_HEADS, HALF, BLOCK_KV_H, BLOCK_HALF)


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    gate = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    gated = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, (gated * up).to(kind), mask=mask)


@triton.jit
def _write_kv_kernel(
    k_ptr,
    v_ptr,
    k_pool_ptr,
    v_pool_ptr,
    slots_ptr,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    k_pool_stride_s,
    k_pool_stride_h,
    v_pool_stride_s,
    v_pool_stride_h,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    # A head of a small model's pool may have more numbers than 32 bits count.
    heads = tl.arange(0, BLOCK_H)[:, None].to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    mask = (heads < NUM_KV_HEADS) & (offs_d < HEAD_DIM)
    k = tl.load(k_ptr + token * k_stride_t + heads * k_stride_h + offs_d, mask=mask)
    v = tl.load(v_ptr + token * v_stride_t + heads * v_stride_h + offs_d, mask=mask)
    k_to = k_pool_ptr + slot * k_pool_stride_s + heads * k_pool_stride_h + offs_d
    v_to = v_pool_ptr + slot * v_pool_stride_s + heads * v_pool_stride_h + offs_d
    tl.store(k_to, k, mask=mask)
    tl.store(v_to, v, mask=mask)


SILU_BLOCK = 1024
THREAD_ELEMENTS = 16
"""Of a row that a thread has: two loads of 16 bytes in flight, in a type of 2 bytes."""
MAX_NORM_WARPS = 16
SMALL_BLOCK = 1024
"""Narrower rows share a program, so that its threads have whole loads and a row needs no barrier
between warps."""


def _norm_launch(width: int) -> dict[str, int]:
    """Return block sizes and warps for rows of a width."""
    block = triton.next_power_of_2(width)
    rows = max(1, SMALL_BLOCK // block)
    warps = min(MAX_NORM_WARPS, max(1, rows * block // (32 * THREAD_ELEMENTS)))
    return {"WIDTH": width, "ROWS": rows, "BLOCK": block, "num_warps": warps}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Kernels.rms_norm`."""
    rows = x.reshape(-1, x.shape[-1])
    num_rows, width = rows.shape
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    launch = _norm_launch(width)
    if num_rows:
        _rms_norm_kernel[triton.cdiv(num_rows, launch["ROWS"]),](
            rows,
            weight,
            out,
            num_rows,
            eps,
            rows.stride(0),
            **launch,
            enable_fp_fusion=True,
        )
    return out.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `Kernels.add_rms_norm`; overwrites `residual`."""
    num_rows, width = x.shape
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    launch = _norm_launch(width)
    if num_rows:
        _add_rms_norm_kernel[triton.cdiv(num_rows, launch["ROWS"]),](
            x,
            residual,
            weight,
            out,
            num_rows,
            eps,
            x.stride(0),
            residual.stride(0),
            **launch,
            enable_fp_fusion=True,
        )
    return out, residual


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `Kernels.rotary`; in place."""
    half = cos.shape[1]
    if len(q):
        _rotary_kernel[len(q),](
            q,
            k,
            cos,
            sin,
            *q.stride()[:2],
            *k.stride()[:2],
            cos.stride(0),
            NUM_HEADS=q.shape[1],
            NUM_KV_HEADS=k.shape[1],
            HALF=half,
            BLOCK_H=triton.next_power_of_2(q.shape[1]),
            BLOCK_KV_H=triton.next_power_of_2(k.shape[1]),
            BLOCK_HALF=triton.next_power_of_2(half),
            enable_fp_fusion=True,
        )
    return q, k


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `Kernels.silu_and_mul`."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(SILU_BLOCK, triton.next_power_of_2(width))
    if num_rows:
        _silu_and_mul_kernel[num_rows, triton.cdiv(width, block)](
            gate_up,
            out,
            gate_up.stride(0),
            WIDTH=width,
            BLOCK=block,
            enable_fp_fusion=True,
        )
    return out


def write_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor) -> None:
    """See `Kernels.write_kv`."""
    if not len(k):
        return
    _write_kv_kernel[len(k),](
        k,
        v,
        k_pool,
        v_pool,
        slot_mapping,
        *k.stride()[:2],
        *v.stride()[:2],
        *k_pool.stride()[:2],
        *v_pool.stride()[:2],
        NUM_KV_HEADS=k.shape[1],
        HEAD_DIM=k.shape[2],
        BLOCK_H=triton.next_power_of_2(k.shape[1]),
        BLOCK_D=triton.next_power_of_2(k.shape[2]),
        enable_fp_fusion=True,
    )
