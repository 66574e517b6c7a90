"""A random model without files or transformers, on any device, fake ones too."""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch
from torch import Tensor

from lightserve.kernels.interface import Kernels
from lightserve.models.architectures import Architecture
from lightserve.models.base import KVLayout, Part, SingleRank, TensorParallel, kv_layout
from lightserve.models.config import ModelConfig
from lightserve.models.decoder import DecoderModel
from lightserve.models.layers.linear import LinearMethod, ModelContext, UnquantizedMethod
from lightserve.models.recurrent_config import (
    ConvolutionConfig,
    DeltaConfig,
    Joined,
    MambaConfig,
    RecurrentConfig,
)
from lightserve.models.rope import DefaultRope

CPU = torch.device("cpu")

_FIRST = frozenset({0})
RECURRENT: dict[str, RecurrentConfig] = {
    "delta": DeltaConfig(
        layers=_FIRST, num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=12, width=3,
        joined=Joined.HEADS,
    ),
    "mamba": MambaConfig(
        layers=_FIRST, num_heads=4, head_dim=12, num_groups=2, state_size=16, width=3,
        has_conv_bias=True, has_bias=False,
    ),
    "kimi": DeltaConfig(
        layers=_FIRST, num_key_heads=2, num_value_heads=2, key_dim=16, value_dim=12, width=3,
        joined=Joined.NONE, rank=8,
    ),
    "convolution": ConvolutionConfig(layers=_FIRST, channels=64, width=3, has_bias=False),
}  # fmt: skip
"""Each kind of recurrent layer, as the first of two layers."""


class RandomReader:
    """Weights by their names and places, so that ranks' parts fit together: about 1 in norms,
    otherwise of deviation 1, in an embedding, or 1/8: a fan-in of about 64."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device

    def has(self, name: str) -> bool:
        return not name.startswith("lm_head")

    def read_into(
        self, target: Tensor, name: str, *, rows: Part | None = None, columns: Part | None = None
    ) -> None:
        if self.device.type != "cpu":
            target.zero_()
            return
        noise = _noise(zlib.crc32(name.encode()), tuple(target.shape), rows, columns)
        if name.endswith("norm.weight"):
            target.copy_(1.0 + 0.2 * noise)
        else:
            target.copy_(noise if "embed_tokens" in name else noise / 8)


def _noise(seed: int, shape: tuple[int, ...], rows: Part | None, columns: Part | None) -> Tensor:
    """Return numbers of deviation 1 that are functions of the seed and their place."""
    starts = [0 if part is None else part.start for part in (rows, columns)] + [0] * len(shape)
    places = torch.zeros(shape, dtype=torch.float64)
    for dim, size in enumerate(shape):
        index = torch.arange(starts[dim], starts[dim] + size, dtype=torch.float64)
        places += (index * (12.9898 if dim else 78.233)).view(-1, *[1] * (len(shape) - dim - 1))
    uniform = ((places + seed % 9973).sin() * 43758.5453).frac().abs()
    return (uniform - 0.5) * math.sqrt(12)


def tiny_config(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "architecture": Architecture.LLAMA,
        "vocab_size": 200,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope": DefaultRope(theta=10_000.0),
        "max_position_embeddings": 256,
        "qkv_bias": True,
        "attention_output_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "tie_word_embeddings": True,
        "dtype": None,
    }
    fields |= changes
    fields.setdefault("sliding_windows", (None,) * fields["num_layers"])
    return ModelConfig(**fields)


def random_model(
    kernels: Kernels,
    config: ModelConfig,
    *,
    context_len: int = 64,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    tp: TensorParallel | None = None,
    method: LinearMethod | None = None,
) -> DecoderModel:
    """Return a model whose weights are functions of their names."""
    return DecoderModel(
        ModelContext(
            config=config,
            reader=RandomReader(dtype, device),
            kernels=kernels,
            tp=tp or SingleRank(),
            method=method or UnquantizedMethod(kernels),
            context_len=context_len,
        )
    )


def layout_of(config: ModelConfig, dtype: str = "float32", *, tp_size: int = 1) -> KVLayout:
    return kv_layout(config, tp_size=tp_size, dtype=dtype)
