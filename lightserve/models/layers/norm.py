"""Normalisation, alone or fused with the residual sum before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lightserve.kernels.interface import Kernels


class Norm(Protocol):
    """Normalises the last dimension."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised x [..., size]."""

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual), all [T, size]; may overwrite `residual`."""


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """x / rms(x) * weight over the last dimension, in float32 inside."""

    kernels: Kernels
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """See `Norm`."""
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `Norm.add`."""
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """(x - mean(x)) / std(x) * weight + bias over the last dimension, in float32 inside."""

    kernels: Kernels
    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """See `Norm`."""
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `Norm.add`."""
        residual = x + residual
        return self(residual), residual
