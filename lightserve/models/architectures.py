"""The families that can be served, by name, and the keys of `config.json` that some of them have.

Which layers see a window, and the fields of `ModelConfig` that are a family's own. Torch-free.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

from lightserve.models.json_fields import JsonFields
from lightserve.models.moe_config import (
    parse_glm_moe,
    parse_minimax,
    parse_mixtral,
    parse_olmoe,
    parse_qwen_moe,
)
from lightserve.models.rope import FULL, SLIDING, parse_local_rope, unrotated_layers


class Architecture(StrEnum):
    """The closed list of architectures that can be served, by the names `config.json` uses."""

    LLAMA = "LlamaForCausalLM"
    MISTRAL = "MistralForCausalLM"
    MINISTRAL3 = "Ministral3ForCausalLM"
    MISTRAL3_WHOLE = "Mistral3ForConditionalGeneration"
    LLAVA = "LlavaForConditionalGeneration"
    QWEN2_VL = "Qwen2VLForConditionalGeneration"
    QWEN2_5_VL = "Qwen2_5_VLForConditionalGeneration"
    QWEN3_VL = "Qwen3VLForConditionalGeneration"
    QWEN2 = "Qwen2ForCausalLM"
    QWEN3 = "Qwen3ForCausalLM"
    PHI3 = "Phi3ForCausalLM"
    GRANITE = "GraniteForCausalLM"
    SEED_OSS = "SeedOssForCausalLM"
    EXAONE4 = "Exaone4ForCausalLM"
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
    QWEN3_NEXT = "Qwen3NextForCausalLM"
    QWEN3_5 = "Qwen3_5ForCausalLM"
    QWEN3_5_WHOLE = "Qwen3_5ForConditionalGeneration"
    QWEN3_5_MOE = "Qwen3_5MoeForCausalLM"
    QWEN3_5_MOE_WHOLE = "Qwen3_5MoeForConditionalGeneration"
    OLMOE = "OlmoeForCausalLM"
    LLAMA4 = "Llama4ForCausalLM"
    LLAMA4_WHOLE = "Llama4ForConditionalGeneration"
    MINIMAX_M2 = "MiniMaxM2ForCausalLM"
    GPT_OSS = "GptOssForCausalLM"
    DEEPSEEK_V2 = "DeepseekV2ForCausalLM"
    DEEPSEEK_V3 = "DeepseekV3ForCausalLM"
    GLM4_MOE = "Glm4MoeForCausalLM"
    GLM4_MOE_LITE = "Glm4MoeLiteForCausalLM"
    MISTRAL4 = "Mistral4ForCausalLM"
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
WITHOUT_NORM_WEIGHTS = (Architecture.LLAMA4,)
"""Families whose norms of query and key heads have no weights."""

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
    Architecture.SEED_OSS,
    Architecture.MINIMAX_M2,
)

THETAS = {
    Architecture.GEMMA3: 1_000_000.0,
    Architecture.MIXTRAL: 1_000_000.0,
    Architecture.OLMO3: 500_000.0,
    Architecture.MINIMAX_M2: 5_000_000.0,
}
"""Bases of rotary embeddings where a file gives none and transformers takes another."""
_BEHIND = ("post_attention_layernorm", "post_feedforward_layernorm")
"""Norms of layers that have none before attention and feed-forward."""


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
        case Architecture.GEMMA3 | Architecture.EXAONE4:
            default = 6 if architecture is Architecture.GEMMA3 else 4
            interval = fields.integer("sliding_window_pattern", default=default)
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


def fields_of(fields: JsonFields, architecture: Architecture, num_layers: int) -> dict[str, Any]:
    """Return one family's own fields of `ModelConfig`; absent keys are as in transformers."""
    match architecture:
        case Architecture.PHI3:
            return {"merged": frozenset({"qkv", "gate_up"})}
        case Architecture.GLM:
            return {"merged": frozenset({"gate_up"}), "rotates_neighbours": True}
        case Architecture.GLM4:
            norms = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm")
            return {
                "merged": frozenset({"gate_up"}),
                "rotates_neighbours": True,
                "layer_norms": (*norms, "post_mlp_layernorm"),
            }
        case Architecture.OLMO2 | Architecture.OLMO3:
            return _olmo(fields, architecture)
        case Architecture.EXAONE4:
            return _exaone(fields, num_layers)
        case Architecture.GEMMA | Architecture.GEMMA2 | Architecture.GEMMA3:
            return _gemma(fields, architecture)
        case Architecture.GRANITE:
            return {
                "embedding_multiplier": fields.number("embedding_multiplier", default=1.0),
                "residual_multiplier": fields.number("residual_multiplier", default=1.0),
                "attention_scale": fields.number("attention_multiplier", default=1.0),
                "logits_divisor": fields.number("logits_scaling", default=1.0),
            }
        case Architecture.SMOLLM3:
            return {"unrotated_layers": unrotated_layers(fields, num_layers)}
        case _:
            return _experts_of(fields, architecture, num_layers)


def _experts_of(fields: JsonFields, architecture: Architecture, num_layers: int) -> dict[str, Any]:
    """Return the same of a family whose layers have experts."""
    match architecture:
        case Architecture.MIXTRAL:
            size = fields.integer("intermediate_size")
            return {"moe": parse_mixtral(fields, num_layers, size)}
        case Architecture.QWEN2_MOE | Architecture.QWEN3_MOE:
            own: dict[str, Any] = {"experts": (128, 8), "size": 768}
            if architecture is Architecture.QWEN2_MOE:
                own = {"experts": (60, 4), "size": 1408, "shared": 5632}
            return {"moe": parse_qwen_moe(fields, num_layers, **own)}
        case Architecture.OLMOE:
            if fields.has("clip_qkv"):
                raise fields.error("clip_qkv", "must be null")
            size = fields.integer("intermediate_size")
            return {"moe": parse_olmoe(fields, num_layers, size), "has_whole_qk_norm": True}
        case Architecture.GLM4_MOE:
            return {"moe": parse_glm_moe(fields, num_layers)}
        case Architecture.MINIMAX_M2:
            return _minimax(fields, num_layers)
        case _:
            return {}


def _gemma(fields: JsonFields, architecture: Architecture) -> dict[str, Any]:
    """Return Gemma's own fields of `ModelConfig`."""
    if fields.boolean("use_bidirectional_attention", default=False):
        raise fields.error("use_bidirectional_attention", "must be false")
    own: dict[str, Any] = {
        "has_gelu": True,
        "norm_offset": 1.0,
        "embedding_multiplier": math.sqrt(fields.integer("hidden_size")),
    }
    if architecture is Architecture.GEMMA2:
        own |= {
            "attention_soft_cap": _soft_cap(fields, "attn_logit_softcapping", 50.0),
            "logits_soft_cap": _soft_cap(fields, "final_logit_softcapping", 30.0),
        }
    if architecture is Architecture.GEMMA3:
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if fields.has(key):
                raise fields.error(key, "must be null")
        own["local_rope"] = parse_local_rope(fields)
    if architecture is not Architecture.GEMMA:
        own |= {
            "attention_scale": fields.number("query_pre_attn_scalar", default=256.0) ** -0.5,
            "layer_norms": (
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ),
        }
    return own


def _soft_cap(fields: JsonFields, key: str, default: float) -> float | None:
    return None if fields.is_null(key) else fields.number(key, default=default)


def _olmo(fields: JsonFields, architecture: Architecture) -> dict[str, Any]:
    own: dict[str, Any] = {"has_whole_qk_norm": True, "layer_norms": _BEHIND}
    if architecture is Architecture.OLMO3:  # layers with a window keep the embedding they had
        theta = fields.number("rope_theta", default=THETAS[architecture], above=1.0)
        own["local_rope"] = parse_local_rope(fields, default=theta)
    return own


def _exaone(fields: JsonFields, num_layers: int) -> dict[str, Any]:
    own: dict[str, Any] = {"layer_norms": _BEHIND}
    if not fields.is_null("sliding_window"):  # layers without a window know no positions then
        windows = sliding_windows(fields, Architecture.EXAONE4, num_layers)
        own["unrotated_layers"] = frozenset(i for i, size in enumerate(windows) if size is None)
    return own


def _minimax(fields: JsonFields, num_layers: int) -> dict[str, Any]:
    for key, only in (("use_qk_norm", True), ("qk_norm_type", "per_layer")):
        if (found := dict(fields.items()).get(key, only)) != only:
            raise fields.error(key, f"must be {only!r}, got {found!r}")
    return {
        "has_whole_qk_norm": True,
        "moe": parse_minimax(fields, num_layers, fields.integer("intermediate_size")),
        # The bias of its choice stands beside the router.
        "stored_names": ((".gate.e_score", ".e_score"),),
    }
