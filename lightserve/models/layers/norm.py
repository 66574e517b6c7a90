"""RMS normalisation, alone or fused with the residual sum before it."""

from __future__ import annotations

from torch import Tensor

from lightserve.kernels.interface import Kernels
from lightserve.models.layers.weights import WeightReader, read_vector


class RMSNorm:
    """x / rms(x) * weight over the last dimension, in float32 inside."""

    __slots__ = ("_eps", "_kernels", "_weight")

    def __init__(
        self, kernels: Kernels, reader: WeightReader, name: str, *, size: int, eps: float
    ) -> None:
        self._kernels = kernels
        self._weight = read_vector(reader, f"{name}.weight", size)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised x [..., size]."""
        return self._kernels.rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual), all [T, size]; may overwrite `residual`."""
        return self._kernels.add_rms_norm(x, residual, self._weight, self._eps)
