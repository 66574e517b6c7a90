"""Rotary embedding, and the write of KV: a program has a token.

Everything is computed in float32 and rounded where transformers rounds.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from lightserve.kernels.interface import WORD_BYTES, QKNorm
from lightserve.kernels.triton.configs import KV_KINDS
from lightserve.kernels.triton.launch import cdiv, launched, next_power_of_2
from lightserve.kernels.triton.norms import codes_of, factors_of

# QK-norm, rotary embedding and the write of KV in one kernel: six launches of a layer become one.
#
# Queries are rotated in place; keys go, rotated, and values, as they are, to their slots of the
# pool. A program takes some heads of one token: blocks of query heads first, then of KV heads.

BLOCK_ELEMENTS = 1024
"""Elements of a program: 64 threads with 16 bytes of each half of their heads."""
NUM_WARPS = 2


@triton.jit
def _scaled(part, scale, weight, kind: tl.constexpr):
    """Round as the norm of its own does: before the weight to its type, after it to `kind`."""
    rounded = (part * scale).to(weight.dtype).to(tl.float32)
    return (rounded * weight.to(tl.float32)).to(kind).to(tl.float32)


@triton.jit
def _store_factors(places, factors, mask):
    tl.store(places.to(tl.pointer_type(tl.float32)), factors, mask=mask)


@triton.jit
def _rotate(
    x_ptr, x_stride_h, out_ptr, out_stride_h, cos_ptr, sin_ptr, norm_ptr, eps, heads,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, HAS_NORM: tl.constexpr, IN_PLACE: tl.constexpr, KIND: tl.constexpr,
    TOP: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate some heads of one token, from x to out, in 8 bits by KIND.

    Inputs that all heads share are loaded once for each, from the cache, so that they come to the
    threads that need it without a detour over shared memory.
    """
    kind: tl.constexpr = x_ptr.dtype.element_ty
    columns = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (heads < NUM_HEADS) & (columns < HALF)
    shared = columns + 0 * heads
    cos = tl.load(cos_ptr + shared, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + shared, mask=mask, other=0.0)
    first = tl.load(x_ptr + heads * x_stride_h + columns, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + heads * x_stride_h + HALF + columns, mask=mask, other=0.0)
    second = second.to(tl.float32)
    if REST > 0:
        rest_columns = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        rest_mask = (heads < NUM_HEADS) & (rest_columns < 2 * HALF + REST)
        rest = tl.load(x_ptr + heads * x_stride_h + rest_columns, mask=rest_mask, other=0.0)
        rest = rest.to(tl.float32)
    if HAS_NORM:
        weight = tl.load(norm_ptr + shared, mask=mask, other=0.0)
        second_weight = tl.load(norm_ptr + HALF + shared, mask=mask, other=0.0)
        squares = tl.sum(first * first + second * second, axis=1)
        if REST > 0:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / (2 * HALF + REST) + eps)[:, None]
        first = _scaled(first, scale, weight, kind)
        second = _scaled(second, scale, second_weight, kind)
        if REST > 0:
            rest_weight = tl.load(norm_ptr + rest_columns + 0 * heads, mask=rest_mask, other=0.0)
            rest = _scaled(rest, scale, rest_weight, kind)
    target = out_ptr + heads * out_stride_h + columns
    if KIND == "plain":
        tl.store(target, (first * cos - second * sin).to(kind), mask=mask)
        tl.store(target + HALF, (second * cos + first * sin).to(kind), mask=mask)
        if REST > 0 and not (IN_PLACE and not HAS_NORM):
            tl.store(out_ptr + heads * out_stride_h + rest_columns, rest.to(kind), mask=rest_mask)
    else:
        turned, other = first * cos - second * sin, second * cos + first * sin
        largest = tl.max(tl.maximum(tl.abs(turned), tl.abs(other)), axis=1)
        sums = tl.sum(turned * 0.0 + other * 0.0, axis=1)
        if REST > 0:
            largest = tl.maximum(largest, tl.max(tl.abs(rest), axis=1))
            sums += tl.sum(rest * 0.0, axis=1)
        factors, inverse = factors_of(largest, sums, TOP)
        byte = out_ptr.dtype.element_ty
        tl.store(target, codes_of(turned * inverse, KIND).to(byte), mask=mask)
        tl.store(target + HALF, codes_of(other * inverse, KIND).to(byte), mask=mask)
        line = out_ptr + heads * out_stride_h
        if REST > 0:
            tl.store(line + rest_columns, codes_of(rest * inverse, KIND).to(byte), mask=rest_mask)
        _store_factors(line + 2 * HALF + REST, factors, heads < NUM_HEADS)


@launched
@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _rotate_and_write_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, k_pool_ptr, v_pool_ptr,
    slots_ptr, eps, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    angle_stride, k_pool_stride_s, k_pool_stride_h, v_pool_stride_s, v_pool_stride_h,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr, HAS_NORM: tl.constexpr, KIND: tl.constexpr, TOP: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cos = cos_ptr + token * angle_stride
    sin = sin_ptr + token * angle_stride
    q_blocks: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    if block < q_blocks:
        q_heads = (block * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        q = q_ptr + token * q_stride_t
        _rotate(
            q, q_stride_h, q, q_stride_h, cos, sin, q_norm_ptr, eps, q_heads,
            NUM_HEADS, HALF, REST, BLOCK_HALF, BLOCK_REST, HAS_NORM, True, "plain", TOP,
        )  # fmt: skip
    else:
        heads = ((block - q_blocks) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        heads = heads.to(tl.int64)
        slot = tl.load(slots_ptr + token)
        columns = tl.arange(0, BLOCK_D)[None, :]
        mask = (heads < NUM_KV_HEADS) & (columns < 2 * HALF + REST)
        v = v_ptr + token * v_stride_t + heads * v_stride_h + columns
        v_line = v_pool_ptr + slot * v_pool_stride_s * UNIT + heads * v_pool_stride_h * UNIT
        if KIND == "plain":
            tl.store(v_line + columns, tl.load(v, mask=mask), mask=mask)
        else:
            numbers = tl.load(v, mask=mask, other=0.0).to(tl.float32)
            largest, sums = tl.max(tl.abs(numbers), axis=1), tl.sum(numbers * 0.0, axis=1)
            factors, inverse = factors_of(largest, sums, TOP)
            codes = codes_of(numbers * inverse, KIND).to(v_pool_ptr.dtype.element_ty)
            tl.store(v_line + columns, codes, mask=mask)
            _store_factors(v_line + 2 * HALF + REST, factors, heads < NUM_KV_HEADS)
        k, k_to = k_ptr + token * k_stride_t, k_pool_ptr + slot * k_pool_stride_s * UNIT
        # A head of a small model's pool may have more bytes than 32 bits count.
        head_stride = tl.cast(k_pool_stride_h, tl.int64) * UNIT
        _rotate(
            k, k_stride_h, k_to, head_stride, cos, sin, k_norm_ptr, eps, heads,
            NUM_KV_HEADS, HALF, REST, BLOCK_HALF, BLOCK_REST, HAS_NORM, False, KIND, TOP,
        )  # fmt: skip


def rotate_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cos: Tensor,
    sin: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slot_mapping: Tensor,
    qk_norm: QKNorm | None,
) -> Tensor:
    """See `Kernels.rotate_and_write`; q in place."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, half = k.shape[1], cos.shape[1]
    rest = head_dim - 2 * half
    block_half = next_power_of_2(half)
    block_h = max(1, BLOCK_ELEMENTS // (2 * block_half))
    if not num_tokens:
        return q
    num_blocks = cdiv(num_heads, block_h) + cdiv(num_kv_heads, block_h)
    kind = KV_KINDS.get(k_pool.dtype, "plain")
    strides = (*k_pool.stride()[:2], *v_pool.stride()[:2])
    unit = 1 if kind == "plain" else math.gcd(*strides, WORD_BYTES)
    _rotate_and_write_kernel[num_tokens, num_blocks](
        q, k, v, cos, sin, q if qk_norm is None else qk_norm.q_weight,
        k if qk_norm is None else qk_norm.k_weight, k_pool, v_pool, slot_mapping,
        0.0 if qk_norm is None else qk_norm.eps, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        cos.stride(0), *(stride // unit for stride in strides),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=half,
        REST=rest,
        BLOCK_H=block_h,
        BLOCK_HALF=block_half,
        BLOCK_REST=next_power_of_2(max(1, rest)),
        BLOCK_D=next_power_of_2(head_dim),
        HAS_NORM=qk_norm is not None,
        KIND=kind,
        TOP=448.0 if kind == "fp8" else 127.0,
        UNIT=unit,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )  # fmt: skip
    return q


@triton.jit
def _rotate_heads(
    x_ptr, cos, sin, stride_h, NUM_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    heads = tl.arange(0, BLOCK_H)
    columns = tl.arange(0, BLOCK_HALF)
    mask = (heads < NUM_HEADS)[:, None] & (columns < HALF)[None, :]
    first_ptr = x_ptr + heads[:, None] * stride_h + columns[None, :]
    first = tl.load(first_ptr, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    kind = x_ptr.dtype.element_ty
    tl.store(first_ptr, (first * cos - second * sin).to(kind), mask=mask)
    tl.store(first_ptr + HALF, (second * cos + first * sin).to(kind), mask=mask)


@launched
@triton.jit
def _rotary_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_stride_t, q_stride_h, k_stride_t, k_stride_h, angle_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_KV_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_HALF)
    mask = columns < HALF
    cos = tl.load(cos_ptr + token * angle_stride + columns, mask=mask, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * angle_stride + columns, mask=mask, other=0.0)[None, :]
    q = q_ptr + token * q_stride_t
    k = k_ptr + token * k_stride_t
    _rotate_heads(q, cos, sin, q_stride_h, NUM_HEADS, HALF, BLOCK_H, BLOCK_HALF)
    _rotate_heads(k, cos, sin, k_stride_h, NUM_KV_HEADS, HALF, BLOCK_KV_H, BLOCK_HALF)


@launched
@triton.jit
def _write_kv_kernel(
    k_ptr, v_ptr, k_pool_ptr, v_pool_ptr, slots_ptr, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    k_pool_stride_s, k_pool_stride_h, v_pool_stride_s, v_pool_stride_h, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
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


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `Kernels.rotary`; in place."""
    half = cos.shape[1]
    if len(q):
        _rotary_kernel[len(q),](
            q, k, cos, sin, *q.stride()[:2], *k.stride()[:2], cos.stride(0),
            NUM_HEADS=q.shape[1],
            NUM_KV_HEADS=k.shape[1],
            HALF=half,
            BLOCK_H=next_power_of_2(q.shape[1]),
            BLOCK_KV_H=next_power_of_2(k.shape[1]),
            BLOCK_HALF=next_power_of_2(half),
            enable_fp_fusion=True,
        )  # fmt: skip
    return q, k


def write_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor) -> None:
    """See `Kernels.write_kv`."""
    if not len(k):
        return
    _write_kv_kernel[len(k),](
        k, v, k_pool, v_pool, slot_mapping, *k.stride()[:2], *v.stride()[:2], *k_pool.stride()[:2],
        *v_pool.stride()[:2],
        NUM_KV_HEADS=k.shape[1],
        HEAD_DIM=k.shape[2],
        BLOCK_H=next_power_of_2(k.shape[1]),
        BLOCK_D=next_power_of_2(k.shape[2]),
        enable_fp_fusion=True,
    )  # fmt: skip
