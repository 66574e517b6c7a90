"""What the layers of one model are built from."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.kernels.interface import Kernels
from lightserve.models.config import ModelConfig
from lightserve.models.layers.linear import (
    LinearMethod,
    WeightReader,
)
from lightserve.models.layers.norm import LayerNorm, Norm, RMSNorm
from lightserve.models.parallel import TensorParallel


@dataclass(frozen=True, kw_only=True)
class ModelContext:
    """Everything a layer's constructor needs; layers keep what they use, not this."""

    config: ModelConfig
    reader: WeightReader
    kernels: Kernels
    tp: TensorParallel
    method: LinearMethod
    context_len: int
    """Longest sequence that is served, in tokens."""

    def norm(self, name: str, *, size: int) -> Norm:
        """Load the normalisation `name`."""
        if self.config.has_layer_norm:
            return LayerNorm(
                self.kernels,
                self.reader,
                name,
                size=size,
                eps=self.config.rms_norm_eps,
                has_bias=self.config.has_norm_bias,
            )
        return RMSNorm(
            self.kernels,
            self.reader,
            name,
            size=size,
            eps=self.config.rms_norm_eps,
            offset=self.config.norm_offset,
        )
