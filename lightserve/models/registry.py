"""The closed mapping from architecture names to model classes. No name is ever imported by text."""

from __future__ import annotations

from lightserve.models.config import Architecture
from lightserve.models.decoder import DecoderModel
from lightserve.models.llama import LlamaForCausalLM
from lightserve.models.mistral import MistralForCausalLM
from lightserve.models.qwen2 import Qwen2ForCausalLM
from lightserve.models.qwen3 import Qwen3ForCausalLM

MODELS: dict[Architecture, type[DecoderModel]] = {
    Architecture.LLAMA: LlamaForCausalLM,
    Architecture.MISTRAL: MistralForCausalLM,
    Architecture.QWEN2: Qwen2ForCausalLM,
    Architecture.QWEN3: Qwen3ForCausalLM,
}
