"""QK-norm, rotary embedding and the write of KV in one kernel: six launches of a layer become one.

Queries are rotated in place; keys go, rotated, and values, as they are, to their slots of the
pool. A program takes some heads of one token: blocks of query heads first, then of KV heads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightserve.kernels.interface import QKNorm

BLOCK_ELEMENTS = 1024
"""Of a program: 64 threads with 16 bytes of each half of their heads."""
NUM_WARPS = 2


@triton.jit
def _normed(part, scale, weight, kind: tl.constexpr):
    """Round as the norm of its own does, once before and once after the weight."""
    return ((part * scale).to(kind).to(tl.float32) * weight).to(kind).to(tl.float32)


@triton.jit
def _rotate(
    x_ptr,
    x_stride_h,
    out_ptr,
    out_stride_h,
    cos_ptr,
    sin_ptr,
    norm_ptr,
    eps,
    heads,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IN_PLACE: tl.constexpr,
):
    """Normalise and rotate some heads of one token, from x to out.

    What all heads share is loaded once for each, from the cache, so that it comes to the threads
    that need it without a detour over shared memory.
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
        weight = tl.load(norm_ptr + shared, mask=mask, other=0.0).to(tl.float32)
        second_weight = tl.load(norm_ptr + HALF + shared, mask=mask, other=0.0).to(tl.float32)
        squares = tl.sum(first * first + second * second, axis=1)
        if REST > 0:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / (2 * HALF + REST) + eps)[:, None]
        first = _normed(first, scale, weight, kind)
        second = _normed(second, scale, second_weight, kind)
        if REST > 0:
            rest_weight = tl.load(norm_ptr + rest_columns + 0 * heads, mask=rest_mask, other=0.0)
            rest = _normed(rest, scale, rest_weight.to(tl.float32), kind)
    target = out_ptr + heads * out_stride_h + columns
    tl.store(target, (first * cos - second * sin).to(kind), mask=mask)
    tl.store(target + HALF, (second * cos + first * sin).to(kind), mask=mask)
    if REST > 0 and not (IN_PLACE and not HAS_NORM):
        tl.store(out_ptr + heads * out_stride_h + rest_columns, rest.to(kind), mask=rest_mask)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _rotate_and_write_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_pool_ptr,
    v_pool_ptr,
    slots_ptr,
    eps,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    angle_stride,
    k_pool_stride_s,
    k_pool_stride_h,
    v_pool_stride_s,
    v_pool_stride_h,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
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
            NUM_HEADS, HALF, REST, BLOCK_HALF, BLOCK_REST, HAS_NORM, True,
        )  # fmt: skip
    else:
        heads = ((block - q_blocks) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        heads = heads.to(tl.int64)
        slot = tl.load(slots_ptr + token)
        columns = tl.arange(0, BLOCK_D)[None, :]
        mask = (heads < NUM_KV_HEADS) & (columns < 2 * HALF + REST)
        v = v_ptr + token * v_stride_t + heads * v_stride_h + columns
        v_to = v_pool_ptr + slot * v_pool_stride_s + heads * v_pool_stride_h + columns
        tl.store(v_to, tl.load(v, mask=mask), mask=mask)
        k, k_to = k_ptr + token * k_stride_t, k_pool_ptr + slot * k_pool_stride_s
        _rotate(
            k, k_stride_h, k_to, k_pool_stride_h, cos, sin, k_norm_ptr, eps, heads,
            NUM_KV_HEADS, HALF, REST, BLOCK_HALF, BLOCK_REST, HAS_NORM, False,
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
    block_half = triton.next_power_of_2(half)
    block_h = max(1, BLOCK_ELEMENTS // (2 * block_half))
    if not num_tokens:
        return q
    num_blocks = triton.cdiv(num_heads, block_h) + triton.cdiv(num_kv_heads, block_h)
    _rotate_and_write_kernel[num_tokens, num_blocks](
        q,
        k,
        v,
        cos,
        sin,
        q if qk_norm is None else qk_norm.q_weight,
        k if qk_norm is None else qk_norm.k_weight,
        k_pool,
        v_pool,
        slot_mapping,
        0.0 if qk_norm is None else qk_norm.eps,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        cos.stride(0),
        *k_pool.stride()[:2],
        *v_pool.stride()[:2],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=half,
        REST=rest,
        BLOCK_H=block_h,
        BLOCK_HALF=block_half,
        BLOCK_REST=triton.next_power_of_2(max(1, rest)),
        BLOCK_D=triton.next_power_of_2(head_dim),
        HAS_NORM=qk_norm is not None,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
    return q
