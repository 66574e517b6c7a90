"""The sizes of a model's parts as the kernels of one rank see them."""

from __future__ import annotations

import torch

from lightserve.kernels.shapes import KernelShapes
from lightserve.models.config import ModelConfig
from lightserve.models.parallel import TensorParallel, even_part, kv_head_part


def kernel_shapes(
    config: ModelConfig, tp: TensorParallel, *, dtype: torch.dtype, context_len: int
) -> KernelShapes:
    """Return the sizes of this rank's part of a model."""
    return KernelShapes(
        dtype=dtype,
        hidden_size=config.hidden_size,
        intermediate_size=even_part(config.intermediate_size, tp).size,
        num_heads=even_part(config.num_heads, tp).size,
        num_kv_heads=kv_head_part(config.num_kv_heads, tp).size,
        head_dim=config.head_dim,
        rotary_dim=config.head_dim,
        sliding_windows=tuple(dict.fromkeys(config.sliding_windows)),
        rms_norm_eps=config.rms_norm_eps,
        qk_norm=config.qk_norm,
        qkv_bias=config.qkv_bias,
        context_len=context_len,
    )
