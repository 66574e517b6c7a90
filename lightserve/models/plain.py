"""GPT-NeoX, Phi-1 and 2, StarCoder 1 and 2, OPT, Falcon, BLOOM, MPT."""

from __future__ import annotations

from lightserve.models.decoder import DecoderModel


class GPTNeoXForCausalLM(DecoderModel):
    """GPT-NeoX and Pythia."""


class PhiForCausalLM(DecoderModel):
    """Phi-1, 1.5 and 2."""


class Starcoder2ForCausalLM(DecoderModel):
    """StarCoder 2."""


class OPTForCausalLM(DecoderModel):
    """OPT."""


class FalconForCausalLM(DecoderModel):
    """Falcon."""


class BloomForCausalLM(DecoderModel):
    """BLOOM."""


class MptForCausalLM(DecoderModel):
    """MPT."""


class GPTBigCodeForCausalLM(DecoderModel):
    """GPT-BigCode and StarCoder 1."""
