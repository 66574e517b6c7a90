"""The families that can be served, by name. Torch-free."""

from __future__ import annotations

from enum import StrEnum


class Architecture(StrEnum):
    """The closed list of what can be served, by the names `config.json` uses."""

    LLAMA = "LlamaForCausalLM"
    MISTRAL = "MistralForCausalLM"
    MINISTRAL3 = "Ministral3ForCausalLM"
    MISTRAL3_WHOLE = "Mistral3ForConditionalGeneration"
    QWEN2 = "Qwen2ForCausalLM"
    QWEN3 = "Qwen3ForCausalLM"
    PHI3 = "Phi3ForCausalLM"
    GRANITE = "GraniteForCausalLM"
    SMOLLM3 = "SmolLM3ForCausalLM"
    OLMO2 = "Olmo2ForCausalLM"
    OLMO3 = "Olmo3ForCausalLM"
    GLM = "GlmForCausalLM"
    GLM4 = "Glm4ForCausalLM"
    GEMMA = "GemmaForCausalLM"
    GEMMA2 = "Gemma2ForCausalLM"
    GEMMA3 = "Gemma3ForCausalLM"
    GEMMA3_WHOLE = "Gemma3ForConditionalGeneration"
    MIXTRAL = "MixtralForCausalLM"
    QWEN2_MOE = "Qwen2MoeForCausalLM"
    QWEN3_MOE = "Qwen3MoeForCausalLM"
    OLMOE = "OlmoeForCausalLM"
    GPT_OSS = "GptOssForCausalLM"
    DEEPSEEK_V2 = "DeepseekV2ForCausalLM"
    DEEPSEEK_V3 = "DeepseekV3ForCausalLM"
    GLM4_MOE = "Glm4MoeForCausalLM"
    GPT_NEOX = "GPTNeoXForCausalLM"
    PHI = "PhiForCausalLM"
    STARCODER2 = "Starcoder2ForCausalLM"
    OPT = "OPTForCausalLM"
    FALCON = "FalconForCausalLM"
    BLOOM = "BloomForCausalLM"
    MPT = "MptForCausalLM"
    GPT_BIGCODE = "GPTBigCodeForCausalLM"
    QWEN = "QWenLMHeadModel"
    BAICHUAN = "BaichuanForCausalLM"
    BAICHUAN_FIRST = "BaiChuanForCausalLM"
    INTERNLM = "InternLMForCausalLM"
    INTERNLM2 = "InternLM2ForCausalLM"
    CHATGLM = "ChatGLMModel"
    CHATGLM_WHOLE = "ChatGLMForConditionalGeneration"
    BERT = "BertModel"
    ROBERTA = "RobertaModel"
    XLM_ROBERTA = "XLMRobertaModel"
    NOMIC_BERT = "NomicBertModel"


HEADLESS = {
    "LlamaModel": Architecture.LLAMA,
    "MistralModel": Architecture.MISTRAL,
    "Qwen2Model": Architecture.QWEN2,
    "Qwen3Model": Architecture.QWEN3,
}
"""Decoders that are saved without their LM head, for vectors of prompts."""
