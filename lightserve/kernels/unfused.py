"""Fused operations made of the single ones, for kernels that have nothing faster."""

from __future__ import annotations

from torch import Tensor

from lightserve.kernels.interface import Kernels, QKNorm


def rotate_and_write(
    kernels: Kernels,
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
    """See `Kernels.rotate_and_write`."""
    if qk_norm is not None:
        q = kernels.rms_norm(q, qk_norm.q_weight, qk_norm.eps)
        k = kernels.rms_norm(k, qk_norm.k_weight, qk_norm.eps)
    q, k = kernels.rotary(q, k, cos, sin)
    kernels.write_kv(k, v, k_pool, v_pool, slot_mapping)
    return q
