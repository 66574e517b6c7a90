"""What the layers of one model are built from."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.kernels.interface import Kernels
from lightserve.models.config import ModelConfig
from lightserve.models.layers.linear import LinearMethod, WeightReader, read_vector
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
        config, reader = self.config, self.reader
        weight = read_vector(reader, f"{name}.weight", size, offset=config.norm_offset)
        if not config.has_layer_norm:
            return RMSNorm(self.kernels, weight, config.rms_norm_eps)
        bias = read_vector(reader, f"{name}.bias", size) if config.has_norm_bias else None
        return LayerNorm(self.kernels, weight, bias, config.rms_norm_eps)
