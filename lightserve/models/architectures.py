"""The families that can be served, by name, and the keys of `config.json` that some of them have.

Which layers see a window, and the fields of `ModelConfig` that are a family's own. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from lightserve.models.json_fields import JsonFields
from lightserve.models.mamba_families import granite_factors
from lightserve.models.moe_config import (
    MAX_EXPERTS,
    MoeConfig,
    Stacked,
    parse_glm_moe,
    parse_minimax,
    parse_mixtral,
    parse_olmoe,
    parse_qwen_moe,
)
from lightserve.models.plain_config import NormWeights, sizes_of
from lightserve.models.recurrent_config import RecurrentConfig
from lightserve.models.rope import (
    FULL,
    SLIDING,
    ProportionalRope,
    RopeConfig,
    has_rope,
    parse_local_rope,
    parse_rope,
    unrotated_layers,
)


class Architecture(StrEnum):
    """The closed list of architectures that can be served, by the names `config.json` uses."""

    LLAMA = "LlamaForCausalLM"
    MISTRAL = "MistralForCausalLM"
    MINISTRAL3 = "Ministral3ForCausalLM"
    MISTRAL3_WHOLE = "Mistral3ForConditionalGeneration"
    LLAVA = "LlavaForConditionalGeneration"
    INTERNVL = "InternVLForConditionalGeneration"
    QWEN2_VL = "Qwen2VLForConditionalGeneration"
    QWEN2_5_VL = "Qwen2_5_VLForConditionalGeneration"
    QWEN3_VL = "Qwen3VLForConditionalGeneration"
    QWEN2 = "Qwen2ForCausalLM"
    QWEN3 = "Qwen3ForCausalLM"
    PHI3 = "Phi3ForCausalLM"
    GRANITE = "GraniteForCausalLM"
    GRANITE_HYBRID = "GraniteMoeHybridForCausalLM"
    FALCON_H1 = "FalconH1ForCausalLM"
    NEMOTRON_H = "NemotronHForCausalLM"
    SEED_OSS = "SeedOssForCausalLM"
    EXAONE4 = "Exaone4ForCausalLM"
    SMOLLM3 = "SmolLM3ForCausalLM"
    OLMO2 = "Olmo2ForCausalLM"
    OLMO3 = "Olmo3ForCausalLM"
    OLMO_HYBRID = "OlmoHybridForCausalLM"
    LFM2 = "Lfm2ForCausalLM"
    LFM2_MOE = "Lfm2MoeForCausalLM"
    GLM = "GlmForCausalLM"
    GLM4 = "Glm4ForCausalLM"
    GEMMA = "GemmaForCausalLM"
    GEMMA2 = "Gemma2ForCausalLM"
    GEMMA3 = "Gemma3ForCausalLM"
    GEMMA3_WHOLE = "Gemma3ForConditionalGeneration"
    GEMMA4 = "Gemma4ForCausalLM"
    GEMMA4_WHOLE = "Gemma4ForConditionalGeneration"
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
    KIMI_LINEAR = "KimiLinearForCausalLM"
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
"""Norms of layers that have none before attention and feed-forward, …"""
_BEFORE_AND_BEHIND = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
"""… of layers that have both, …"""
BESIDE_NORMS = (
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
)
"""… and of experts beside a block: before them, behind the block, and behind them."""


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
        default = fields.default("sliding_window") or 4096
        window = fields.integer("sliding_window", default=default)
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
        case Architecture.GEMMA3 | Architecture.GEMMA4 | Architecture.EXAONE4:
            default = 4 if architecture is Architecture.EXAONE4 else 6
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
            return granite_factors(fields)
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
            fields.only("clip_qkv", None)
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
    fields.only("use_bidirectional_attention", False)
    own: dict[str, Any] = {
        "has_gelu": True,
        "norm_weights": NormWeights.ABOVE_ONE,
        "embedding_multiplier": None,
    }
    if architecture is Architecture.GEMMA2:
        own |= {
            "attention_soft_cap": _soft_cap(fields, "attn_logit_softcapping", 50.0),
            "logits_soft_cap": _soft_cap(fields, "final_logit_softcapping", 30.0),
        }
    if architecture is Architecture.GEMMA3:
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            fields.only(key, None)
        own["local_rope"] = parse_local_rope(fields)
    if architecture is not Architecture.GEMMA:
        own |= {
            "attention_scale": fields.number("query_pre_attn_scalar", default=256.0) ** -0.5,
            "layer_norms": _BEFORE_AND_BEHIND,
        }
    return own


@dataclass(frozen=True, kw_only=True)
class Gemma4Config:
    """Gemma 4's layers, in all that those of Gemma 3 have not.

    A layer that sees everything, a global one, has heads of another size than one with a window.
    """

    num_global_kv_heads: int
    """KV heads of a global layer."""
    global_head_dim: int
    """Size of a global layer's heads; even."""
    has_global_values: bool
    """Whether global layers have a product for values; they take that for keys otherwise."""
    num_sharing: int
    """The last layers, which read the keys and values of the last layer of their kind before."""
    widens_sharing: bool
    """Whether these have twice the intermediate features."""
    input_size: int
    """Numbers of the embedding of a token that each layer has for itself; 0: there is none."""
    input_vocab: int
    """Ids that have such embeddings."""
    pad_id: int
    """Id of which images' tokens have them."""

    def tensors(self, hidden: int, moe: MoeConfig | None) -> dict[str, tuple[int, ...]]:
        """Return name and shape of tensors that a layer has beside its linear maps and norms."""
        shapes: dict[str, tuple[int, ...]] = {"layer_scalar": (1,)}
        if size := self.input_size:
            shapes |= {
                "per_layer_input_gate.weight": (size, hidden),
                "per_layer_projection.weight": (hidden, size),
                "post_per_layer_input_norm.weight": (hidden,),
            }
        if moe is not None:
            shapes |= {"router.scale": (hidden,), "router.per_expert_scale": (moe.num_experts,)}
            shapes |= {f"{name}.weight": (hidden,) for name in BESIDE_NORMS}
        return shapes


class LayerShape(NamedTuple):
    """Sizes and parts of one layer."""

    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    """Number of a head's dimensions that are rotated."""
    products: str
    """Products of attention by their letters: for queries, keys and values, in this order."""
    kv_source: int
    """The layer whose keys and values it reads, mostly itself."""
    inner_size: int
    """Intermediate features of its block, where it has one."""
    states: RecurrentConfig | None
    """Kind of the state that it keeps; None: it keeps none."""
    has_attention: bool
    norms: tuple[str, ...]
    """Their names."""


_GEMMA4: dict[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262_144,
    "tie_word_embeddings": True,
}
"""Values that transformers takes where a file of Gemma 4 is silent."""


def parse_gemma4(fields: JsonFields) -> dict[str, Any]:
    """Return the text part of Gemma 4 as fields of `ModelConfig`."""
    fields = fields.with_defaults(_GEMMA4)
    fields.only("hidden_activation", "gelu_pytorch_tanh")
    # "vision" lets the tokens of an image see each other; see `parse_vision`.
    fields.only("use_bidirectional_attention", None, "vision")
    sizes = sizes_of(fields)
    windows = sliding_windows(fields, Architecture.GEMMA4, sizes["num_layers"])
    windows = (*windows[:-1], None)
    own = _gemma4_kinds(fields, windows)
    rope: RopeConfig = ProportionalRope(theta=1_000_000.0, share=0.25, factor=1.0)
    if has_rope(fields):
        rope = parse_rope(
            fields,
            max_position_embeddings=sizes["max_position_embeddings"],
            rotary_dim=own.global_head_dim,
            default_theta=1_000_000.0,
        )
    has_bias = fields.boolean("attention_bias", default=False)
    return sizes | {
        "intermediate_size": fields.integer("intermediate_size"),
        "gemma4": own,
        "rope": rope,
        "local_rope": parse_local_rope(fields),
        "qkv_bias": has_bias,
        "attention_output_bias": has_bias,
        "qk_norm": True,
        "has_gelu": True,
        "layer_norms": _BEFORE_AND_BEHIND,
        "attention_scale": 1.0,
        "norm_weights": NormWeights.WIDE,
        "embedding_multiplier": None,
        "logits_soft_cap": fields.optional_number("final_logit_softcapping"),
        "sliding_windows": windows,
        "moe": _gemma4_experts(fields, sizes["num_layers"]),
        "stored_names": ((".mlp.experts", ".experts"), (".mlp.router", ".router.proj")),
    }


def _gemma4_kinds(fields: JsonFields, windows: tuple[int | None, ...]) -> Gemma4Config:
    num_layers, num_heads = len(windows), fields.integer("num_attention_heads")
    has_values = not fields.boolean("attention_k_eq_v", default=False)
    heads_key = "num_key_value_heads" if has_values else "num_global_key_value_heads"
    heads, sizes, size_key = fields, fields, "global_head_dim"
    if fields.has("per_layer_config"):  # by transformers; the authors' files have the keys above
        heads = sizes = _one_of_layers(fields, windows)
        heads_key, size_key = "num_key_value_heads", "head_dim"
    if not heads.has(heads_key):
        heads, heads_key = fields, "num_key_value_heads"
    num_sharing = fields.integer("num_kv_shared_layers", default=0, low=0, high=num_layers - 1)
    first = num_layers - num_sharing
    if {w is None for w in windows[first:]} - {w is None for w in windows[:first]}:
        complaint = f"must leave a layer of each kind before the last {num_sharing}"
        raise fields.error("num_kv_shared_layers", complaint)
    vocab, size = fields.integer("vocab_size_per_layer_input"), 0
    if not fields.is_null(key := "hidden_size_per_layer_input"):
        size = fields.integer(key, default=256, low=0)
    pad = "pad_token_id"
    if size and vocab < fields.integer("vocab_size"):
        complaint = f"must be at least vocab_size {fields.integer('vocab_size')}, got {vocab}"
        raise fields.error("vocab_size_per_layer_input", complaint)
    return Gemma4Config(
        num_global_kv_heads=heads.num_kv_heads(num_heads, key=heads_key),
        global_head_dim=(sizes if sizes.has(size_key) else fields).even(size_key),
        has_global_values=has_values,
        num_sharing=num_sharing,
        widens_sharing=fields.boolean("use_double_wide_mlp", default=False),
        input_size=size,
        input_vocab=vocab,
        pad_id=fields.integer("pad_token_id", low=0, high=vocab - 1) if fields.has(pad) else 0,
    )


def _one_of_layers(fields: JsonFields, windows: tuple[int | None, ...]) -> JsonFields:
    """Return the object of sizes that all layers without a window have, and no others."""
    layers = fields.child("per_layer_config")
    names, kinds = zip(*layers.items(), strict=True) if layers.items() else ((), ())
    found = sorted(int(name) for name in names if name.isdigit())  # as "05", among twelve
    wanted = [layer for layer, window in enumerate(windows) if window is None]
    if len(found) != len(names) or found != wanted or any(kind != kinds[0] for kind in kinds):
        complaint = f"must hold one object for each of the {FULL} layers, all alike"
        raise fields.error("per_layer_config", complaint)
    return layers.child(names[0])


def _gemma4_experts(fields: JsonFields, num_layers: int) -> MoeConfig | None:
    """Return the experts beside each layer's block."""
    if not fields.boolean("enable_moe_block", default=False):
        return None
    num_experts = fields.integer("num_experts", high=MAX_EXPERTS)
    return MoeConfig(
        layers=frozenset(range(num_layers)),
        num_experts=num_experts,
        num_chosen=fields.integer("top_k_experts", high=num_experts),
        intermediate_size=fields.integer("moe_intermediate_size"),
        normalises=True,
        router="router",
        stacked=Stacked.HALVES,
        is_beside=True,
    )


def _soft_cap(fields: JsonFields, key: str, default: float) -> float | None:
    return None if fields.is_null(key) else fields.number(key, default=default)


def _olmo(fields: JsonFields, architecture: Architecture) -> dict[str, Any]:
    own: dict[str, Any] = {
        "has_whole_qk_norm": True,
        "norm_weights": NormWeights.WIDE,
        "layer_norms": _BEHIND,
    }
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
        fields.only(key, only)
    return {
        "has_whole_qk_norm": True,
        "moe": parse_minimax(fields, num_layers, fields.integer("intermediate_size")),
        # The bias of its choice stands beside the router.
        "stored_names": ((".gate.e_score", ".e_score"),),
    }
