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
from lightserve.models.architectures import Architecture
from lightserve.models.base import Model
from lightserve.models.config import ModelConfig, check_tp
from lightserve.models.context import ModelContext
from lightserve.models.decoder import DecoderModel
from lightserve.models.deepseek import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM
from lightserve.models.encoder import EncoderModel
from lightserve.models.gemma import Gemma2ForCausalLM, Gemma3ForCausalLM, GemmaForCausalLM
from lightserve.models.gguf_config import as_stored, family_of
from lightserve.models.gguf_reader import GgufReader
from lightserve.models.glm import Glm4ForCausalLM, GlmForCausalLM
from lightserve.models.gpt_oss import GptOssForCausalLM
from lightserve.models.granite import GraniteForCausalLM
from lightserve.models.layers.linear import LinearMethod, UnquantizedMethod
from lightserve.models.llama import LlamaForCausalLM
from lightserve.models.mistral import Ministral3ForCausalLM, MistralForCausalLM
from lightserve.models.moe import (
    Glm4MoeForCausalLM,
    MixtralForCausalLM,
    OlmoeForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3MoeForCausalLM,
)
from lightserve.models.olmo2 import Olmo2ForCausalLM
from lightserve.models.own_code import (
    BaichuanForCausalLM,
    ChatGLMModel,
    InternLM2ForCausalLM,
    InternLMForCausalLM,
    QWenLMHeadModel,
)
from lightserve.models.parallel import TensorParallel
from lightserve.models.phi3 import Phi3ForCausalLM
from lightserve.models.plain import (
    BloomForCausalLM,
    FalconForCausalLM,
    GPTBigCodeForCausalLM,
    GPTNeoXForCausalLM,
    MptForCausalLM,
    OPTForCausalLM,
    PhiForCausalLM,
    Starcoder2ForCausalLM,
)
from lightserve.models.qwen2 import Qwen2ForCausalLM
from lightserve.models.qwen3 import Qwen3ForCausalLM
from lightserve.models.safetensors_reader import SafetensorsReader
from lightserve.models.smollm3 import SmolLM3ForCausalLM
from lightserve.models.weight_files import WeightFiles, check_weights, needed_tensors
from lightserve.progress import Advance, progress

# The closed mapping from architecture names to model classes. No name is ever imported by text.

MODELS: dict[Architecture, type[DecoderModel | EncoderModel]] = {
    Architecture.LLAMA: LlamaForCausalLM,
    Architecture.MISTRAL: MistralForCausalLM,
    Architecture.MINISTRAL3: Ministral3ForCausalLM,
    Architecture.MISTRAL3_WHOLE: MistralForCausalLM,
    Architecture.QWEN2: Qwen2ForCausalLM,
    Architecture.QWEN3: Qwen3ForCausalLM,
    Architecture.PHI3: Phi3ForCausalLM,
    Architecture.GRANITE: GraniteForCausalLM,
    Architecture.SMOLLM3: SmolLM3ForCausalLM,
    Architecture.OLMO2: Olmo2ForCausalLM,
    Architecture.OLMO3: Olmo2ForCausalLM,
    Architecture.GLM: GlmForCausalLM,
    Architecture.GLM4: Glm4ForCausalLM,
    Architecture.GEMMA: GemmaForCausalLM,
    Architecture.GEMMA2: Gemma2ForCausalLM,
    Architecture.GEMMA3: Gemma3ForCausalLM,
    Architecture.GEMMA3_WHOLE: Gemma3ForCausalLM,
    Architecture.MIXTRAL: MixtralForCausalLM,
    Architecture.QWEN2_MOE: Qwen2MoeForCausalLM,
    Architecture.QWEN3_MOE: Qwen3MoeForCausalLM,
    Architecture.OLMOE: OlmoeForCausalLM,
    Architecture.GLM4_MOE: Glm4MoeForCausalLM,
    Architecture.GPT_OSS: GptOssForCausalLM,
    Architecture.DEEPSEEK_V2: DeepseekV2ForCausalLM,
    Architecture.DEEPSEEK_V3: DeepseekV3ForCausalLM,
    Architecture.GPT_NEOX: GPTNeoXForCausalLM,
    Architecture.PHI: PhiForCausalLM,
    Architecture.STARCODER2: Starcoder2ForCausalLM,
    Architecture.OPT: OPTForCausalLM,
    Architecture.FALCON: FalconForCausalLM,
    Architecture.BLOOM: BloomForCausalLM,
    Architecture.MPT: MptForCausalLM,
    Architecture.GPT_BIGCODE: GPTBigCodeForCausalLM,
    Architecture.QWEN: QWenLMHeadModel,
    Architecture.BAICHUAN: BaichuanForCausalLM,
    Architecture.BAICHUAN_FIRST: BaichuanForCausalLM,
    Architecture.INTERNLM: InternLMForCausalLM,
    Architecture.INTERNLM2: InternLM2ForCausalLM,
    Architecture.CHATGLM: ChatGLMModel,
    Architecture.CHATGLM_WHOLE: ChatGLMModel,
    Architecture.BERT: EncoderModel,
    Architecture.ROBERTA: EncoderModel,
    Architecture.XLM_ROBERTA: EncoderModel,
    Architecture.NOMIC_BERT: EncoderModel,
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
    if files.gguf is not None:
        config = as_stored(config, files.gguf)
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
    has_neighbours = family_of(files.gguf).has_neighbours
    return GgufReader(
        files,
        files.gguf,
        rotated_head_dim=config.head_dim if has_neighbours else None,
        dtype=dtype,
        device=device,
        advance=advance,
    )
