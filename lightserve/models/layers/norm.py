"""Normalisation, alone or fused with the residual sum before it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lightserve.kernels.interface import Kernels
from lightserve.models.layers.linear import WeightReader, read_vector


class Norm(Protocol):
    """Normalises the last dimension."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised x [..., size]."""

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual), all [T, size]; may overwrite `residual`."""


class RMSNorm:
    """x / rms(x) * weight over the last dimension, in float32 inside."""

    __slots__ = ("_eps", "_kernels", "_weight")

    def __init__(
        self,
        kernels: Kernels,
        reader: WeightReader,
        name: str,
        *,
        size: int,
        eps: float,
        offset: float = 0.0,
    ) -> None:
        self._kernels = kernels
        self._weight = read_vector(reader, f"{name}.weight", size, offset=offset)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """See `Norm`."""
        return self._kernels.rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `Norm.add`."""
        return self._kernels.add_rms_norm(x, residual, self._weight, self._eps)


class LayerNorm:
    """(x - mean(x)) / std(x) * weight + bias over the last dimension, in float32 inside."""

    __slots__ = ("_bias", "_eps", "_kernels", "_weight")

    def __init__(
        self,
        kernels: Kernels,
        reader: WeightReader,
        name: str,
        *,
        size: int,
        eps: float,
        has_bias: bool = True,
    ) -> None:
        self._kernels = kernels
        self._weight = read_vector(reader, f"{name}.weight", size)
        self._bias = read_vector(reader, f"{name}.bias", size) if has_bias else None
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """See `Norm`."""
        return self._kernels.layer_norm(x, self._weight, self._bias, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `Norm.add`."""
        residual = x + residual
        return self(residual), residual
