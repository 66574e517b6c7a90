"""Qwen 1, Baichuan, InternLM 1 and 2, ChatGLM: decoders whose repositories bring their own code.

All differences from Llama are in the configuration (`own_config`).
"""

from __future__ import annotations

from lightserve.models.decoder import DecoderModel


class QWenLMHeadModel(DecoderModel):
    """Qwen 1."""


class BaichuanForCausalLM(DecoderModel):
    """Baichuan 1 and 2."""


class InternLMForCausalLM(DecoderModel):
    """InternLM 1."""


class InternLM2ForCausalLM(DecoderModel):
    """InternLM 2 and 2.5."""


class ChatGLMModel(DecoderModel):
    """ChatGLM 2 and 3, and GLM-4-9B in its first format."""
