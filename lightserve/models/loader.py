"""Builds a model from memory-mapped safetensors, each rank reading its part of each tensor.

Layers ask for parts of tensors and the bytes go from the mapping straight into the final,
merged and sharded parameter: memory holds one copy of this rank's weights, plus file pages
that the system may drop at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightserve.errors import ModelLoadError
from lightserve.kernels.interface import Kernels
from lightserve.models.base import Model
from lightserve.models.config import ModelConfig, check_tp
from lightserve.models.context import ModelContext
from lightserve.models.layers.linear import UnquantizedMethod
from lightserve.models.parallel import Part, TensorParallel
from lightserve.models.registry import MODELS
from lightserve.models.weight_files import (
    FLOAT_DTYPES,
    WeightFiles,
    check_weights,
    needed_tensors,
    open_shard,
)

Progress = Callable[[int, int], None]
"""Called after each tensor with (tensors read, tensors of the model; a rank may need fewer)."""


def load_model(
    path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    kernels: Kernels,
    tp: TensorParallel,
    context_len: int | None = None,
    device: torch.device | None = None,
    progress: Progress | None = None,
) -> Model:
    """Load this rank's part of the model in directory `path`.

    Args:
        path: the directory that `config` was read from.
        config: what `load_model_config` returned.
        dtype: float32, bfloat16 or float16, of all parameters.
        kernels: operations the layers call.
        tp: this rank's group.
        context_len: longest sequence to serve, default `config.max_position_embeddings`; at
            most `config.max_context_len`.
        device: where the parameters go; default the CPU.
        progress: told after each tensor.

    Raises:
        ModelLoadError: names file and tensor.
    """
    check_tp(config, tp.size)
    files = check_weights(path, config)
    with SafetensorsReader(
        files,
        dtype=dtype,
        device=device or torch.device("cpu"),
        num_tensors=len(needed_tensors(config, files)),
        progress=progress,
    ) as reader:
        context = ModelContext(
            config=config,
            reader=reader,
            kernels=kernels,
            tp=tp,
            method=UnquantizedMethod(kernels),
            context_len=context_len or config.max_position_embeddings,
        )
        return MODELS[config.architecture](context)


class SafetensorsReader:
    """A `WeightReader` over the shards of a directory; open shards are mapped until `close`."""

    def __init__(
        self,
        files: WeightFiles,
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_tensors: int,
        progress: Progress | None = None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._files = files
        self._shards: dict[Path, Any] = {}
        self._exit = ExitStack()
        self._num_tensors = num_tensors
        self._num_read = 0
        self._progress = progress

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap all shards."""
        self._shards.clear()
        self._exit.close()

    def has(self, name: str) -> bool:
        """Whether the model has a tensor of this name."""
        return name in self._files.file_of

    def read_into(
        self, target: Tensor, name: str, *, rows: Part | None = None, columns: Part | None = None
    ) -> None:
        """See `WeightReader.read_into`."""
        if target.numel() == 0:
            return  # a rank beyond the end of a tiny vocabulary
        if not self.has(name):
            raise ModelLoadError(f"{self._files.index}: tensor {name!r} is missing")
        file = self._files.file_of[name]
        source = self._part(file, name, rows, columns)
        if source.shape != target.shape:
            raise ModelLoadError(
                f"{file}: tensor {name!r} has shape {list(source.shape)} where"
                f" {list(target.shape)} is needed"
            )
        target.copy_(source)
        _check_finite(file, name, source, target)
        self._num_read += 1
        if self._progress is not None:
            self._progress(self._num_read, self._num_tensors)

    def _part(self, file: Path, name: str, rows: Part | None, columns: Part | None) -> Tensor:
        tensor = self._shard(file).get_slice(name)
        if tensor.get_dtype() not in FLOAT_DTYPES:
            raise ModelLoadError(f"{file}: tensor {name!r} has type {tensor.get_dtype()}")
        index = tuple(
            slice(None) if part is None else slice(part.start, part.start + part.size)
            for part in (rows, columns)
        )
        part: Tensor = tensor[index[: len(tensor.get_shape())]]
        return part

    def _shard(self, file: Path) -> Any:
        if file not in self._shards:
            shard = self._exit.enter_context(open_shard(file, framework="pt"))
            self._shards[file] = shard
        return self._shards[file]


def _check_finite(file: Path, name: str, source: Tensor, target: Tensor) -> None:
    """Refuse NaN and infinity, stored or made by the conversion."""
    if all(_is_finite(bound) for bound in target.aminmax()):
        return
    if all(_is_finite(bound) for bound in source.aminmax()):
        raise ModelLoadError(f"{file}: tensor {name!r} has values beyond {target.dtype}")
    raise ModelLoadError(f"{file}: tensor {name!r} has values that are not finite")


def _is_finite(bound: Tensor) -> bool:
    return bool(torch.isfinite(bound))
