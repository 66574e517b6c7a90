"""What of a model the kernels see, on one rank: sizes, type and windows."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class KernelShapes:
    """Sizes of one rank's part of a model."""

    dtype: torch.dtype
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    """A divisor of `num_heads`."""
    head_dim: int
    rotary_dim: int
    """How many of a head's dimensions are rotated."""
    sliding_windows: tuple[int | None, ...]
    """The different ones of all layers."""
    rms_norm_eps: float
    qk_norm: bool
    """Whether heads are normalised one by one."""
    qkv_bias: bool
    context_len: int
    """Longest sequence that is served."""

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return (outputs, inputs) of a layer's products, by name."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "qkv": (q_size + 2 * kv_size, self.hidden_size),
            "out": (self.hidden_size, q_size),
            "gate_up": (2 * self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
        }
