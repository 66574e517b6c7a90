"""Models of well-known shapes with random weights, made on the device or written to files.

Weights have a standard deviation of about 1/sqrt(fan-in), so that activations stay what they are
in a trained model. Only a `config.json` is needed: no 16 GB are read or written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu.machine import Machine
from lightserve.config import ServeConfig
from lightserve.errors import ModelLoadError
from lightserve.kernels.interface import Kernels
from lightserve.models.base import Model
from lightserve.models.config import CONFIG_FILE, ModelConfig, load_model_config
from lightserve.models.context import ModelContext
from lightserve.models.kv_layout import kv_layout
from lightserve.models.layers.linear import UnquantizedMethod
from lightserve.models.parallel import Part, TensorParallel
from lightserve.models.registry import MODELS
from lightserve.models.weight_files import EMBEDDING, expected_tensors
from lightserve.worker.engine import build_runner
from lightserve.worker.model_runner import ModelRunner

BYTES = 2
"""Of a bfloat16."""


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def _shape(
    architecture: str, sizes: tuple[int, ...], *, theta: float = 10_000.0, **more: Any
) -> Mapping[str, Any]:
    """`sizes`: hidden, intermediate, layers, query heads, KV heads, vocabulary, positions."""
    names = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "vocab_size", "max_position_embeddings"),
    )
    return {
        "architectures": [architecture],
        **dict(zip(names, sizes, strict=True)),
        "rms_norm_eps": 1e-5,
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        **_rope(theta),
        **more,
    }


LLAMA_8B = _shape("LlamaForCausalLM", (4096, 14_336, 32, 32, 8, 128_256, 16_384), theta=500_000.0)
"""Llama 3 8B, for longer sequences."""
QWEN_HALF_B = _shape(
    "Qwen2ForCausalLM",
    (896, 4864, 24, 14, 2, 151_936, 16_384),
    theta=1_000_000.0,
    tie_word_embeddings=True,
)
"""Qwen2.5 0.5B."""
TINY_LLAMA = _shape("LlamaForCausalLM", (64, 96, 2, 4, 2, 200, 64))
TINY_QWEN = _shape("Qwen2ForCausalLM", (32, 48, 2, 2, 1, 200, 64), tie_word_embeddings=True)


class RandomReader:
    """A `WeightReader` whose tensors are random numbers, drawn on the device."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._shapes = expected_tensors(config)
        self._generator = torch.Generator(device).manual_seed(0)

    def has(self, name: str) -> bool:
        """See `WeightReader.has`."""
        return name in self._shapes

    def read_into(
        self, target: Tensor, name: str, *, rows: Part | None = None, columns: Part | None = None
    ) -> None:
        """See `WeightReader.read_into`."""
        if name not in self._shapes:
            raise ModelLoadError(f"random weights: tensor {name!r} is missing")
        shape = self._shapes[name]
        parts = (rows, columns)[: len(shape)]
        wanted = [
            size if part is None else part.size for size, part in zip(shape, parts, strict=True)
        ]
        if list(target.shape) != wanted:
            raise ModelLoadError(f"random weights: {name!r} is {wanted}, not {list(target.shape)}")
        mean, std = _moments(name, shape)
        target.normal_(mean, std, generator=self._generator)


def _moments(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return mean and standard deviation of a tensor's values."""
    if name.endswith("norm.weight"):
        return 1.0, 0.1
    if name.endswith("bias"):
        return 0.0, 0.3
    return 0.0, 1.0 if name == EMBEDDING else 1.0 / math.sqrt(shape[1])


def load_random(
    path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    kernels: Kernels,
    tp: TensorParallel,
    context_len: int | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Model:
    """Do what `load_model` does, without files but `path`/config.json."""
    del path
    context = ModelContext(
        config=config,
        reader=RandomReader(config, dtype=dtype, device=device or torch.device("cpu")),
        kernels=kernels,
        tp=tp,
        method=UnquantizedMethod(kernels),
        context_len=context_len or config.max_position_embeddings,
    )
    return MODELS[config.architecture](context)


@dataclass(frozen=True)
class RandomModel:
    """A directory with nothing but a config.json, and what follows from it."""

    path: Path
    config: ModelConfig

    @staticmethod
    def make(path: Path, values: Mapping[str, Any]) -> RandomModel:
        """Write the directory."""
        path.mkdir(parents=True, exist_ok=True)
        (path / CONFIG_FILE).write_text(json.dumps(values))
        return RandomModel(path, load_model_config(path))

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all layers."""
        return kv_layout(self.config, tp_size=1, dtype="bfloat16").bytes_per_token

    @property
    def decode_weight_bytes(self) -> int:
        """Weights that a decode reads: all but an embedding that is not the LM head as well."""
        shapes = expected_tensors(self.config)
        if not self.config.tie_word_embeddings:
            del shapes[EMBEDDING]
        return BYTES * sum(math.prod(shape) for shape in shapes.values())

    def prefill_operations(self, num_tokens: int) -> int:
        """Operations of a prompt, a multiply-add as two.

        Attention counts the visible pairs. Past the last layer's attention only the last token
        is computed, and only its logits.
        """
        config = self.config
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = config.hidden_size * (heads + 2 * kv_heads)
        rest = config.hidden_size * (heads + 3 * config.intermediate_size)
        layers = config.num_layers
        per_token = layers * qkv + (layers - 1) * rest
        last = rest + config.hidden_size * config.vocab_size
        pairs = num_tokens * (num_tokens + 1) // 2
        return 2 * (num_tokens * per_token + last) + 4 * layers * heads * pairs

    def runner(
        self,
        machine: Machine,
        *,
        kernels: Kernels | None = None,
        **flags: Any,
    ) -> ModelRunner:
        """Return the server's own runner over random weights; `flags` as `ServeConfig`'s.

        `kernels`: others than the configuration's.
        """
        machine.release()
        defaults: dict[str, Any] = {"dtype": "bfloat16", "host_kv_memory": "64MiB"}
        if machine.is_gpu:
            defaults["device"] = "cuda"
        config = ServeConfig(model=str(self.path), **(defaults | flags))

        def load(*args: Any, **options: Any) -> Model:
            return load_random(*args, **(options | ({"kernels": kernels} if kernels else {})))

        return build_runner(config, load=load)


@contextmanager
def graphs_in_use(runner: ModelRunner, in_use: bool) -> Iterator[None]:
    """Let a runner use the graphs that it has, or do without for a while."""
    graphs = runner._graphs
    if not in_use:
        runner._graphs = None
    try:
        yield
    finally:
        runner._graphs = graphs
