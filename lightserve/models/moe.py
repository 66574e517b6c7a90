"""Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE and GLM-4.5: decoders that exist, with experts in layers.

How experts are chosen and what stands beside them is in the configuration (`ModelConfig.moe`).
"""

from __future__ import annotations

from lightserve.models.decoder import DecoderLayer, DecoderModel
from lightserve.models.olmo2 import Olmo2Attention
from lightserve.models.qwen3 import Qwen3ForCausalLM


class MixtralForCausalLM(DecoderModel):
    """Mistral with experts."""


class Qwen2MoeForCausalLM(DecoderModel):
    """Qwen2 with experts and a shared one."""


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3 with experts."""


class OlmoeLayer(DecoderLayer):
    """A layer with one norm over all query heads and one over all key heads."""

    attention_type = Olmo2Attention


class OlmoeForCausalLM(DecoderModel):
    """OLMoE."""

    layer_type = OlmoeLayer


class Glm4MoeForCausalLM(Qwen3ForCausalLM):
    """GLM-4.5 and 4.6, of which the larger ones normalise heads."""
