"""Builds a model from memory-mapped safetensors, each rank reading its part of each tensor.

Layers ask for parts of tensors and the bytes go from the mapping straight into the final,
merged and sharded parameter, on a GPU through two small buffers (`StagedCopies`): memory holds
one copy of this rank's weights, plus file pages that the system may drop at any time.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from lightserve.kernels.interface import Kernels
from lightserve.models.base import Model, TensorParallel
from lightserve.models.config import ModelConfig, check_tp
from lightserve.models.families import build_model
from lightserve.models.gguf_config import family_of
from lightserve.models.gguf_reader import GgufReader, TiledHeads
from lightserve.models.layers.linear import LinearMethod, ModelContext, UnquantizedMethod
from lightserve.models.recurrent_config import DeltaConfig, Joined
from lightserve.models.safetensors_reader import SafetensorsReader, StackedExperts
from lightserve.models.weight_files import WeightFiles, as_in_files, check_weights, needed_tensors
from lightserve.progress import Advance, progress


def load_model(
    path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    kernels: Kernels,
    tp: TensorParallel,
    method: LinearMethod | None = None,
    context_len: int | None = None,
    device: torch.device | None = None,
) -> Model:
    """Load this rank's part of the model in directory `path`; rank 0 shows how far it is.

    Args:
        path: the directory that `config` was read from.
        config: the result of `load_model_config`.
        dtype: float32, bfloat16 or float16, of all parameters.
        kernels: operations the layers call.
        tp: this rank's group.
        method: how weights are kept, default as they are.
        context_len: longest sequence to serve, default `config.max_position_embeddings`; at
            most `config.max_context_len`.
        device: where the parameters go; default the CPU.

    Raises:
        ModelLoadError: names file and tensor.
    """
    check_tp(config, tp.size)
    files = check_weights(path, config)
    config = as_in_files(config, files)
    shapes = needed_tensors(config, files).values()
    total_bytes = sum(math.prod(shape) for shape in shapes) * dtype.itemsize
    with (
        progress("loading weights", total_bytes, is_shown=tp.rank == 0, in_bytes=True) as advance,
        _reader(config, files, dtype, device or torch.device("cpu"), advance) as reader,
    ):
        context = ModelContext(
            config=config,
            reader=_with_experts(reader, config),
            kernels=kernels,
            tp=tp,
            method=method or UnquantizedMethod(kernels),
            context_len=context_len or config.max_position_embeddings,
        )
        model = build_model(context)
        reader.check_finite()
        return model


def _reader(
    config: ModelConfig,
    files: WeightFiles,
    dtype: torch.dtype,
    device: torch.device,
    advance: Advance,
) -> SafetensorsReader | GgufReader:
    if files.gguf is None:
        return SafetensorsReader(files, dtype=dtype, device=device, advance=advance)
    has_neighbours, delta, tiled = family_of(files.gguf).has_neighbours, config.recurrent, None
    if isinstance(delta, DeltaConfig) and delta.joined is Joined.HEADS:
        heads = delta.num_key_heads, delta.num_value_heads
        tiled = TiledHeads(*heads, delta.value_dim, 2 * delta.key_size)
    return GgufReader(
        files,
        files.gguf,
        rotated_head_dim=config.head_dim if has_neighbours else None,
        tiled=tiled,
        dtype=dtype,
        device=device,
        advance=advance,
    )


def _with_experts(
    reader: SafetensorsReader | GgufReader, config: ModelConfig
) -> SafetensorsReader | GgufReader | StackedExperts:
    """Return a reader that finds each expert by a name of its own, as GGUF files' readers do."""
    if config.moe is None or config.moe.stacked is None or isinstance(reader, GgufReader):
        return reader
    return StackedExperts(reader, config)
