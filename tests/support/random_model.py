"""A random model without files or transformers, on any device, fake ones too."""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch
from torch import Tensor

from lightserve.kernels.interface import Kernels
from lightserve.models.config import Architecture, ModelConfig
from lightserve.models.context import ModelContext
from lightserve.models.decoder import DecoderModel
from lightserve.models.kv_layout import KVLayout, kv_layout
from lightserve.models.layers.linear import UnquantizedMethod
from lightserve.models.parallel import Part, SingleRank, TensorParallel
from lightserve.models.rope_config import DefaultRope

CPU = torch.device("cpu")


class RandomReader:
    """Weights by their names: 1 about norms, otherwise of deviation 1 / sqrt(fan-in)."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device

    def has(self, name: str) -> bool:
        return not name.startswith("lm_head")

    def read_into(
        self, target: Tensor, name: str, *, rows: Part | None = None, columns: Part | None = None
    ) -> None:
        assert rows is None or rows.start == 0, "one rank only"
        if self.device.type != "cpu":
            target.zero_()
            return
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(target.shape, generator=generator)
        is_norm = name.endswith("norm.weight")
        is_table = "embed_tokens" in name
        scale = 1.0 if is_table else 1 / math.sqrt(target.shape[-1])
        target.copy_(1.0 + 0.2 * noise if is_norm else scale * noise)


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
) -> DecoderModel:
    """Return a model whose weights are functions of their names."""
    return DecoderModel(
        ModelContext(
            config=config,
            reader=RandomReader(dtype, device),
            kernels=kernels,
            tp=tp or SingleRank(),
            method=UnquantizedMethod(kernels),
            context_len=context_len,
        )
    )


def layout_of(config: ModelConfig, dtype: str = "float32") -> KVLayout:
    return kv_layout(config, tp_size=1, dtype=dtype)
