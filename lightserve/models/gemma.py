"""Gemma: GELU, scaled embeddings, norms of 1 + weight (rounded to the model's type when read).

Gemma 2 also norms what attention and feed-forward give, caps scores and logits, and has a window in
every other layer. Gemma 3 has no caps, norms every head, and five layers of six have a window and a
rotary embedding of their own. The rest is in the configuration.
"""

from __future__ import annotations

from lightserve.models.decoder import DecoderModel, OutputNormLayer
from lightserve.models.qwen3 import Qwen3Attention


class GemmaForCausalLM(DecoderModel):
    """Gemma 1: the decoder as it is."""


class Gemma2ForCausalLM(DecoderModel):
    """Gemma 2."""

    layer_type = OutputNormLayer


class Gemma3Layer(OutputNormLayer):
    """A layer with norms of outputs and of heads."""

    attention_type = Qwen3Attention


class Gemma3ForCausalLM(DecoderModel):
    """The text part of Gemma 3."""

    layer_type = Gemma3Layer
