"""Builds a model from memory-mapped safetensors, each rank reading its part of each tensor.

Layers ask for parts of tensors and the bytes go from the mapping straight into the final,
merged and sharded parameter, on a GPU through two small buffers (`StagedCopies`): memory holds
one copy of this rank's weights, plus file pages that the system may drop at any time.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightserve.errors import ModelLoadError
from lightserve.kernels.interface import Kernels
from lightserve.models.base import Model
from lightserve.models.config import Architecture, ModelConfig, check_tp
from lightserve.models.context import ModelContext
from lightserve.models.decoder import DecoderModel
from lightserve.models.gemma import Gemma3ForCausalLM, GemmaForCausalLM
from lightserve.models.gguf_reader import GgufReader
from lightserve.models.glm import Glm4ForCausalLM, GlmForCausalLM
from lightserve.models.granite import GraniteForCausalLM
from lightserve.models.layers.linear import LinearMethod, UnquantizedMethod
from lightserve.models.llama import LlamaForCausalLM
from lightserve.models.mistral import MistralForCausalLM
from lightserve.models.moe import (
    Glm4MoeForCausalLM,
    MixtralForCausalLM,
    OlmoeForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3MoeForCausalLM,
)
from lightserve.models.olmo2 import Olmo2ForCausalLM
from lightserve.models.parallel import Part, TensorParallel
from lightserve.models.phi3 import Phi3ForCausalLM
from lightserve.models.plain import (
    FalconForCausalLM,
    GPTNeoXForCausalLM,
    OPTForCausalLM,
    PhiForCausalLM,
    Starcoder2ForCausalLM,
)
from lightserve.models.qwen2 import Qwen2ForCausalLM
from lightserve.models.qwen3 import Qwen3ForCausalLM
from lightserve.models.smollm3 import SmolLM3ForCausalLM
from lightserve.models.weight_copies import is_finite, weight_copies
from lightserve.models.weight_files import (
    FLOAT_DTYPES,
    WeightFiles,
    check_weights,
    needed_tensors,
    open_shard,
)
from lightserve.progress import Advance, progress

# The closed mapping from architecture names to model classes. No name is ever imported by text.

MODELS: dict[Architecture, type[DecoderModel]] = {
    Architecture.LLAMA: LlamaForCausalLM,
    Architecture.MISTRAL: MistralForCausalLM,
    Architecture.QWEN2: Qwen2ForCausalLM,
    Architecture.QWEN3: Qwen3ForCausalLM,
    Architecture.PHI3: Phi3ForCausalLM,
    Architecture.GRANITE: GraniteForCausalLM,
    Architecture.SMOLLM3: SmolLM3ForCausalLM,
    Architecture.OLMO2: Olmo2ForCausalLM,
    Architecture.GLM: GlmForCausalLM,
    Architecture.GLM4: Glm4ForCausalLM,
    Architecture.GEMMA: GemmaForCausalLM,
    Architecture.GEMMA3: Gemma3ForCausalLM,
    Architecture.MIXTRAL: MixtralForCausalLM,
    Architecture.QWEN2_MOE: Qwen2MoeForCausalLM,
    Architecture.QWEN3_MOE: Qwen3MoeForCausalLM,
    Architecture.OLMOE: OlmoeForCausalLM,
    Architecture.GLM4_MOE: Glm4MoeForCausalLM,
    Architecture.GPT_NEOX: GPTNeoXForCausalLM,
    Architecture.PHI: PhiForCausalLM,
    Architecture.STARCODER2: Starcoder2ForCausalLM,
    Architecture.OPT: OPTForCausalLM,
    Architecture.FALCON: FalconForCausalLM,
}


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
        config: what `load_model_config` returned.
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
    shapes = needed_tensors(config, files).values()
    total_bytes = sum(math.prod(shape) for shape in shapes) * dtype.itemsize
    with (
        progress("loading weights", total_bytes, is_shown=tp.rank == 0, in_bytes=True) as advance,
        _reader(config, files, dtype, device or torch.device("cpu"), advance) as reader,
    ):
        context = ModelContext(
            config=config,
            reader=reader,
            kernels=kernels,
            tp=tp,
            method=method or UnquantizedMethod(kernels),
            context_len=context_len or config.max_position_embeddings,
        )
        model = MODELS[config.architecture](context)
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
    is_llama = config.architecture is Architecture.LLAMA
    return GgufReader(
        files,
        files.gguf,
        rotated_head_dim=config.head_dim if is_llama else None,
        dtype=dtype,
        device=device,
        advance=advance,
    )


class _Source(NamedTuple):
    """Part of a tensor in a file."""

    file: Path
    name: str
    rows: Part | None
    columns: Part | None


class SafetensorsReader:
    """A `WeightReader` over the shards of a directory; open shards are mapped until `close`."""

    def __init__(
        self,
        files: WeightFiles,
        *,
        dtype: torch.dtype,
        device: torch.device,
        advance: Advance = lambda _: None,
    ) -> None:
        """Read into parameters of one type on one device.

        `advance` is told the bytes of each tensor as a whole parameter, whatever part is read.
        """
        self.dtype = dtype
        self.device = device
        self._files = files
        self._shards: dict[Path, Any] = {}
        self._exit = ExitStack()
        self._copies = weight_copies(device)
        self._sources: dict[str, _Source] = {}
        """What has been read since the last check, by what the copies call it."""
        self._advance = advance
        self._counted: set[str] = set()

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
        return self._files.has(name)

    def read_into(
        self, target: Tensor, name: str, *, rows: Part | None = None, columns: Part | None = None
    ) -> None:
        """See `WeightReader.read_into`."""
        if target.numel() == 0:
            return  # a rank beyond the end of a tiny vocabulary
        if not self.has(name):
            stored = self._files.stored(name)
            raise ModelLoadError(f"{self._files.index}: tensor {stored!r} is missing")
        name = self._files.stored(name)
        place = _Source(self._files.file_of[name], name, rows, columns)
        source = self._part(place)
        if source.shape != target.shape:
            raise ModelLoadError(
                f"{place.file}: tensor {name!r} has shape {list(source.shape)} where"
                f" {list(target.shape)} is needed"
            )
        label = f"{name} {len(self._sources)}"
        self._sources[label] = place
        self._copies.copy(target, source, label)
        if target.device.type == "cpu":
            self.check_finite()
        if name not in self._counted:
            self._counted.add(name)
            self._advance(math.prod(self._header(place).get_shape()) * self.dtype.itemsize)

    def check_finite(self) -> None:
        """Refuse NaN and infinity in what was read, stored or made by the conversion.

        Raises:
            ModelLoadError: names the first tensor that has any.
        """
        bad = self._copies.not_finite()
        if bad:
            place = self._sources[bad[0]]
            is_stored = not is_finite(self._part(place))
            what = "that are not finite" if is_stored else f"beyond {self.dtype}"
            raise ModelLoadError(f"{place.file}: tensor {place.name!r} has values {what}")
        self._sources.clear()

    def _part(self, place: _Source) -> Tensor:
        """Return a view of the mapped file."""
        tensor = self._header(place)
        index = tuple(
            slice(None) if part is None else slice(part.start, part.start + part.size)
            for part in (place.rows, place.columns)
        )
        part: Tensor = tensor[index[: len(tensor.get_shape())]]
        return part

    def _header(self, place: _Source) -> Any:
        """Return what safetensors knows of a tensor before it is read."""
        tensor = self._shard(place.file).get_slice(place.name)
        if tensor.get_dtype() not in FLOAT_DTYPES:
            raise ModelLoadError(
                f"{place.file}: tensor {place.name!r} has type {tensor.get_dtype()}"
            )
        return tensor

    def _shard(self, file: Path) -> Any:
        if file not in self._shards:
            shard = self._exit.enter_context(open_shard(file, framework="pt"))
            self._shards[file] = shard
        return self._shards[file]
