"""The families that can be served, by name, and which of their layers see a window. Torch-free."""

from __future__ import annotations

from enum import StrEnum

from lightserve.models.json_fields import JsonFields
from lightserve.models.rope import FULL, SLIDING


class Architecture(StrEnum):
    """The closed list of architectures that can be served, by the names `config.json` uses."""

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


CROSS_ENCODERS = {
    "BertForSequenceClassification": Architecture.BERT,
    "RobertaForSequenceClassification": Architecture.ROBERTA,
    "XLMRobertaForSequenceClassification": Architecture.XLM_ROBERTA,
}
"""Encoders that end with a head which scores pairs of texts."""

_WITH_SWITCH = (
    Architecture.QWEN2,
    Architecture.QWEN3,
    Architecture.SMOLLM3,
    Architecture.QWEN2_MOE,
    Architecture.QWEN3_MOE,
)
"""Families whose windows `use_sliding_window` turns on."""
_SAME_WINDOW = (
    Architecture.PHI3,
    Architecture.MISTRAL,
    Architecture.MINISTRAL3,
    Architecture.MIXTRAL,
    Architecture.QWEN3_MOE,
)
"""Families whose layers all have a window, or none."""
_NO_DEFAULT = (
    Architecture.PHI3,
    Architecture.SMOLLM3,
    Architecture.MIXTRAL,
    Architecture.MINISTRAL3,
)
"""Families without a window where the file names no size."""
_WITHOUT_WINDOW = (
    Architecture.LLAMA,
    Architecture.GRANITE,
    Architecture.OLMO2,
    Architecture.GEMMA,
    Architecture.OLMOE,
    Architecture.GLM4_MOE,
    Architecture.GLM,
    Architecture.GLM4,
)


def sliding_windows(
    fields: JsonFields, architecture: Architecture, num_layers: int
) -> tuple[int | None, ...]:
    """Return each layer's window; the defaults for absent keys are transformers'."""
    everything = (None,) * num_layers
    if architecture in _WITHOUT_WINDOW:
        return everything
    if architecture in _WITH_SWITCH and not fields.boolean("use_sliding_window", default=False):
        return everything
    window = None
    if architecture in _NO_DEFAULT:
        window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    elif not fields.is_null("sliding_window"):
        window = fields.integer("sliding_window", default=4096)
    if window is None:
        return everything
    if architecture in _SAME_WINDOW:
        return (window,) * num_layers
    if fields.has("layer_types"):
        kinds = fields.array("layer_types")
        if len(kinds) != num_layers:
            raise fields.error("layer_types", f"must have {num_layers} entries, got {len(kinds)}")
        for kind in kinds:
            if kind not in (FULL, SLIDING):
                raise fields.error("layer_types", f"has the unknown entry {kind!r}")
        has_window = [kind == SLIDING for kind in kinds]
    else:
        has_window = _layers_with_window(fields, architecture, num_layers)
    return tuple(window if is_one else None for is_one in has_window)


def _layers_with_window(
    fields: JsonFields, architecture: Architecture, num_layers: int
) -> list[bool]:
    """Return which layers have a window where the file does not list them."""
    layers = range(num_layers)
    match architecture:
        case Architecture.GEMMA2:
            return [layer % 2 == 0 for layer in layers]
        case Architecture.OLMO3:
            return [layer % 4 != 3 for layer in layers]
        case Architecture.GEMMA3:
            interval = fields.integer("sliding_window_pattern", default=6)
            return [layer % interval != interval - 1 for layer in layers]
        case Architecture.SMOLLM3:
            unrotated = unrotated_layers(fields, num_layers)
            return [layer in unrotated for layer in layers]
        case Architecture.QWEN2_MOE:
            last = fields.integer("max_window_layers", default=28, low=0)
            return [layer % 2 == 0 and layer < last for layer in layers]
        case _:
            first = fields.integer("max_window_layers", default=28, low=0)
            return [layer >= first for layer in layers]


def unrotated_layers(fields: JsonFields, num_layers: int) -> frozenset[int]:
    """Return which layers of SmolLM3 know no positions."""
    key = "no_rope_layers"  # 1 where a layer has it
    if not fields.has(key):
        interval = fields.integer("no_rope_layer_interval", default=4)
        return frozenset(range(interval - 1, num_layers, interval))
    flags = fields.array(key)
    if len(flags) != num_layers or any(flag not in (0, 1) for flag in flags):
        raise fields.error(key, f"must be {num_layers} times 0 or 1")
    return frozenset(layer for layer, flag in enumerate(flags) if not flag)
