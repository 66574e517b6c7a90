"""The Triton implementation of the kernel interface; matrix products stay with torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from lightserve.kernels.interface import AttentionBatch, QKNorm
from lightserve.kernels.triton import attention, elementwise, rotary_write
from lightserve.kernels.triton.configs import AttentionConfigs


class TritonKernels:
    """See `Kernels`."""

    name = "triton"
    is_capturable = True

    def __init__(self, configs: AttentionConfigs | None = None) -> None:
        self.configs = configs or AttentionConfigs()

    def pack_weight(self, weight: Tensor) -> Tensor:
        """See `Kernels.pack_weight`: as it is."""
        return weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Kernels.linear`."""
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.rms_norm`."""
        return elementwise.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.add_rms_norm`."""
        return elementwise.add_rms_norm(x, residual, weight, eps)

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """See `Kernels.rotary`."""
        return elementwise.rotary(q, k, cos, sin)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `Kernels.silu_and_mul`."""
        return elementwise.silu_and_mul(gate_up)

    def write_kv(
        self, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor
    ) -> None:
        """See `Kernels.write_kv`."""
        elementwise.write_kv(k, v, k_pool, v_pool, slot_mapping)

    def rotate_and_write(
        self,
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
        return rotary_write.rotate_and_write(
            q,
            k,
            v,
            cos=cos,
            sin=sin,
            k_pool=k_pool,
            v_pool=v_pool,
            slot_mapping=slot_mapping,
            qk_norm=qk_norm,
        )

    def attention(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        """See `Kernels.attention`."""
        return attention.attention(
            q,
            k_pool,
            v_pool,
            batch,
            configs=self.configs,
            scale=scale,
            sliding_window=sliding_window,
        )
