"""Loading a tiny model's rank and running sequences through it: what the parity tests share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightserve.kernels.interface import Kernels
from lightserve.models.base import Model, SingleRank, TensorParallel, kv_layout
from lightserve.models.config import ModelConfig, load_model_config
from lightserve.models.layers.linear import LinearMethod
from lightserve.models.loader import load_model
from support.parity import CPU, Chunk, DirectDriver, TokenSequence, make_sequences, run_sequences

CONTEXT_LEN = 256
NUM_OTHERS = 16
NUM_DECODES = 8
"""Tokens at the end of each sequence that are run one at a time."""

LENGTHS = ((100, 24), *((38 + 7 * i, 0) for i in range(NUM_OTHERS)))
"""(prompt length, tokens of the reference) of the sequence under test and of 16 others."""


@dataclass(frozen=True)
class LoadedModel:
    """One rank of a model, ready to be driven."""

    model: Model
    config: ModelConfig
    dtype: torch.dtype
    num_kv_heads: int
    device: torch.device = CPU
    kv_dtype: torch.dtype | None = None
    """Of keys and values, default the model's."""
    num_generated: int | None = None
    """See `DirectDriver`."""

    def driver(self, sequences: Sequence[TokenSequence], *, seed: int = 0) -> DirectDriver:
        return DirectDriver(
            self.model,
            num_kv_heads=self.num_kv_heads,
            dtype=self.kv_dtype or self.dtype,
            lengths=[len(sequence.tokens) for sequence in sequences],
            seed=seed,
            device=self.device,
            num_generated=self.num_generated,
        )

    def run(
        self, sequences: Sequence[TokenSequence], passes: Sequence[Sequence[Chunk]]
    ) -> list[Tensor] | None:
        tokens = [sequence.tokens for sequence in sequences]
        return run_sequences(self.driver(sequences), tokens, passes)


def load_tiny(
    path: Path,
    dtype: torch.dtype,
    kernels: Kernels,
    *,
    tp: TensorParallel | None = None,
    device: torch.device = CPU,
    method: LinearMethod | None = None,
    **changes: Any,
) -> LoadedModel:
    """Load a directory to a device; `changes` replace fields of its configuration."""
    config = dataclasses.replace(load_model_config(path), **changes)
    tp = tp or SingleRank()
    model = load_model(
        path,
        config,
        dtype=dtype,
        kernels=kernels,
        tp=tp,
        method=method,
        context_len=CONTEXT_LEN,
        device=device,
    )
    layout = kv_layout(config, tp_size=tp.size, dtype=str(dtype).removeprefix("torch."))
    return LoadedModel(model, config, dtype, layout.groups[0].num_kv_heads, device)


def standard_sequences(reference: Any, count: int = len(LENGTHS)) -> list[TokenSequence]:
    """Return the sequence under test followed by up to 16 others."""
    return make_sequences(reference, LENGTHS[:count], seed=0)
