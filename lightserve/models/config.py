"""What a Hugging Face `config.json` says about a model, checked. Torch-free.

Imported by the supervisor, the router and the frontends as well as by the workers.
`auto_map` and every other key that names code are never looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from lightserve.errors import ConfigError, ModelLoadError
from lightserve.models.json_fields import JsonFields, read_json_object
from lightserve.models.rope import (
    DEFAULT_THETA,
    FULL,
    SLIDING,
    DynamicRope,
    LinearRope,
    RopeConfig,
    YarnRope,
    parse_local_rope,
    parse_rope,
    parse_rotary_dim,
)

CONFIG_FILE = "config.json"
MAX_LAYERS = 4096
DTYPE_NAMES = ("float32", "bfloat16", "float16")


class Architecture(StrEnum):
    """The closed list of what can be served, by the names `config.json` uses."""

    LLAMA = "LlamaForCausalLM"
    MISTRAL = "MistralForCausalLM"
    QWEN2 = "Qwen2ForCausalLM"
    QWEN3 = "Qwen3ForCausalLM"
    PHI3 = "Phi3ForCausalLM"
    GRANITE = "GraniteForCausalLM"
    SMOLLM3 = "SmolLM3ForCausalLM"
    OLMO2 = "Olmo2ForCausalLM"
    GLM = "GlmForCausalLM"
    GLM4 = "Glm4ForCausalLM"
    GEMMA = "GemmaForCausalLM"
    GEMMA3 = "Gemma3ForCausalLM"


_GLM = (Architecture.GLM, Architecture.GLM4)
_GEMMA = (Architecture.GEMMA, Architecture.GEMMA3)
_GEMMA3_THETA = 1_000_000.0
_BIASED = (
    Architecture.LLAMA,
    Architecture.QWEN3,
    Architecture.GRANITE,
    Architecture.SMOLLM3,
    Architecture.OLMO2,
    *_GEMMA,
)
"""Families whose `attention_bias` is that of all four products."""
_WITHOUT_WINDOW = (
    Architecture.LLAMA,
    Architecture.GRANITE,
    Architecture.OLMO2,
    Architecture.GEMMA,
    *_GLM,
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of one model, of whatever family; all checked against each other."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """A divisor of `num_heads`."""
    head_dim: int
    """Even; not necessarily hidden_size / num_heads."""
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    qkv_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Whether queries and keys are normalised per head before the rotary embedding."""
    has_whole_qk_norm: bool = False
    """Whether all heads together are."""
    rotary_share: int | None = None
    """How many of a head's dimensions are rotated; None: all."""
    local_rope: RopeConfig | None = None
    """Of layers with a window; None: the same."""
    rotates_neighbours: bool = False
    """Whether the file has a rotated pair as dimensions 2i and 2i + 1, not half a head apart."""
    unrotated_layers: frozenset[int] = frozenset()
    merged: frozenset[str] = frozenset()
    """Products that the file has as one tensor: `qkv`, `gate_up`."""
    has_gelu: bool = False
    """Whether the gate is GELU, by its approximation with tanh, in place of SiLU."""
    norm_offset: float = 0.0
    """What is added to the weights of norms."""
    layer_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Of what attention and feed-forward add."""
    attention_scale: float | None = None
    """Of products of queries and keys; None: head_dim ** -0.5."""
    logits_divisor: float = 1.0
    tie_word_embeddings: bool
    sliding_windows: tuple[int | None, ...]
    """One per layer; None: the layer sees everything."""
    dtype: str | None
    """One of DTYPE_NAMES as stated by the model, None when it states none."""

    @property
    def rotary_dim(self) -> int:
        """How many of a head's dimensions are rotated."""
        return self.rotary_share or self.head_dim

    @property
    def max_context_len(self) -> int:
        """The longest sequence that may be asked for with --max-model-len.

        The default is `max_position_embeddings`; RoPE kinds that are configured beside an
        unchanged `max_position_embeddings` (YaRN as Qwen documents it, linear, dynamic) can be
        stretched by their factor.
        """
        match self.rope:
            case LinearRope(factor=factor) | DynamicRope(factor=factor):
                stretched = int(self.max_position_embeddings * factor)
            case YarnRope(factor=factor, original_max_position_embeddings=original):
                stretched = int(original * factor)
            case _:
                stretched = 0
        return max(self.max_position_embeddings, stretched)


def load_model_config(path: Path) -> ModelConfig:
    """Read and check `path/config.json`. Raises ModelLoadError naming file and key."""
    file = path / CONFIG_FILE
    fields = JsonFields(file, read_json_object(file))
    architecture = _architecture(fields)
    if fields.has("quantization_config"):
        raise fields.error("quantization_config", "is set, but quantised weights are not supported")
    is_gemma = architecture in _GEMMA
    _check_activation(fields, is_gemma=is_gemma)
    num_layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    max_position_embeddings = fields.integer("max_position_embeddings")
    is_glm, is_phi = architecture in _GLM, architecture is Architecture.PHI3
    attention_bias = fields.boolean("attention_bias", default=is_glm)
    reads_mlp_bias = architecture in (
        Architecture.LLAMA,
        Architecture.GRANITE,
        Architecture.SMOLLM3,
    )
    has_all_biases = architecture in _BIASED and attention_bias
    head_dim = _head_dim(fields, architecture, hidden_size, num_heads)
    rotary_dim = parse_rotary_dim(fields, head_dim, share=0.5 if is_glm else 1.0)
    if rotary_dim < head_dim and not (is_glm or is_phi):
        raise fields.error("partial_rotary_factor", "must be 1 in this architecture")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, architecture, num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=parse_rope(
            fields,
            max_position_embeddings=max_position_embeddings,
            rotary_dim=rotary_dim,
            is_phi=is_phi,
            default_theta=_GEMMA3_THETA if architecture is Architecture.GEMMA3 else DEFAULT_THETA,
        ),
        max_position_embeddings=max_position_embeddings,
        qkv_bias=architecture is Architecture.QWEN2
        or has_all_biases
        or (is_glm and attention_bias),
        attention_output_bias=has_all_biases,
        mlp_bias=reads_mlp_bias and fields.boolean("mlp_bias", default=False),
        qk_norm=architecture in (Architecture.QWEN3, Architecture.GEMMA3),
        rotary_share=rotary_dim,
        tie_word_embeddings=fields.boolean(
            "tie_word_embeddings", default=is_gemma or architecture is Architecture.SMOLLM3
        ),
        sliding_windows=_sliding_windows(fields, architecture, num_layers),
        dtype=_dtype(fields),
        **_own_of(fields, architecture, num_layers),
        **(_gemma(fields, architecture, hidden_size) if is_gemma else {}),
    )


def _check_activation(fields: JsonFields, *, is_gemma: bool) -> None:
    key = "hidden_activation" if fields.has("hidden_activation") else "hidden_act"
    # Gemma's first files say `gelu` and mean its approximation.
    known = ("gelu_pytorch_tanh", "gelu") if is_gemma else ("silu",)
    if (activation := fields.string(key, default=known[0])) not in known:
        names = " or ".join(repr(name) for name in known)
        raise fields.error(key, f"must be {names}, got {activation!r}")


def _gemma(fields: JsonFields, architecture: Architecture, hidden_size: int) -> dict[str, Any]:
    """Return what Gemma alone has, as fields of `ModelConfig`."""
    if fields.boolean("use_bidirectional_attention", default=False):
        raise fields.error("use_bidirectional_attention", "must be false")
    own: dict[str, Any] = {
        "has_gelu": True,
        "norm_offset": 1.0,
        "embedding_multiplier": math.sqrt(hidden_size),
    }
    if architecture is Architecture.GEMMA3:
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if fields.has(key):
                raise fields.error(key, "must be null")
        own |= {
            "local_rope": parse_local_rope(fields),
            "attention_scale": fields.number("query_pre_attn_scalar", default=256.0) ** -0.5,
            "layer_norms": (
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ),
        }
    return own


def _own_of(fields: JsonFields, architecture: Architecture, num_layers: int) -> dict[str, Any]:
    """Return what one family alone has, as fields of `ModelConfig`."""
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
        case Architecture.OLMO2:
            behind = ("post_attention_layernorm", "post_feedforward_layernorm")
            return {"has_whole_qk_norm": True, "layer_norms": behind}
        case Architecture.GRANITE:
            return {
                "embedding_multiplier": fields.number("embedding_multiplier", default=1.0),
                "residual_multiplier": fields.number("residual_multiplier", default=1.0),
                "attention_scale": fields.number("attention_multiplier", default=1.0),
                "logits_divisor": fields.number("logits_scaling", default=1.0),
            }
        case Architecture.SMOLLM3:
            return {"unrotated_layers": _unrotated_layers(fields, num_layers)}
        case _:
            return {}


def _unrotated_layers(fields: JsonFields, num_layers: int) -> frozenset[int]:
    key = "no_rope_layers"  # 1 where a layer has it
    if not fields.has(key):
        interval = fields.integer("no_rope_layer_interval", default=4)
        return frozenset(range(interval - 1, num_layers, interval))
    flags = fields.array(key)
    if len(flags) != num_layers or any(flag not in (0, 1) for flag in flags):
        raise fields.error(key, f"must be {num_layers} times 0 or 1")
    return frozenset(layer for layer, flag in enumerate(flags) if not flag)


def resolve_dtype(
    requested: str, config: ModelConfig, *, device_type: str, batch_invariant: bool = False
) -> str:
    """Return the type of weights and KV for --dtype `requested`, one of DTYPE_NAMES.

    `auto` is the model's own type (float32 when it states none), float32 under
    --batch-invariant. On a GPU ("cuda") a model of float32 becomes bfloat16: there float32 takes
    twice the memory, and its products none of the fast units.
    """
    if requested != "auto":
        return requested
    own = "float32" if batch_invariant else config.dtype or "float32"
    return "bfloat16" if device_type == "cuda" and own == "float32" else own


def resolve_context_len(requested: int, config: ModelConfig) -> int:
    """Return the longest sequence that is served, for --max-model-len `requested` (0: auto).

    Raises:
        ConfigError: more than the model can be stretched to.
    """
    if requested > config.max_context_len:
        raise ConfigError(
            f"--max-model-len must be at most the model's {config.max_context_len}, got {requested}"
        )
    return requested or config.max_position_embeddings


def check_tp(config: ModelConfig, tp: int) -> None:
    """Check that the model can be split over `tp` ranks.

    Heads and the intermediate size must divide; KV heads must divide, or, when there are fewer
    than ranks, `tp` must be a multiple of them (each is then replicated). The vocabulary is
    padded and need not divide.

    Raises:
        ModelLoadError: a size does not divide; names both numbers.
    """
    for key, size in (
        ("num_attention_heads", config.num_heads),
        ("intermediate_size", config.intermediate_size),
    ):
        if size % tp:
            raise ModelLoadError(
                f"{CONFIG_FILE}: key {key!r} is {size}, not divisible by --tp {tp}"
            )
    num_kv_heads = config.num_kv_heads
    if num_kv_heads % tp and tp % num_kv_heads:
        raise ModelLoadError(
            f"{CONFIG_FILE}: key 'num_key_value_heads' is {num_kv_heads}, which neither divides"
            f" nor is divisible by --tp {tp}"
        )


def _architecture(fields: JsonFields) -> Architecture:
    names = fields.array("architectures")
    known = ", ".join(Architecture)
    if len(names) != 1 or not isinstance(names[0], str):
        raise fields.error("architectures", f"must name one architecture, got {names!r}")
    try:
        return Architecture(names[0])
    except ValueError:
        raise fields.error("architectures", f"names {names[0]!r}; supported are {known}") from None


def _num_kv_heads(fields: JsonFields, architecture: Architecture, num_heads: int) -> int:
    key = "num_key_value_heads"
    takes_all = (Architecture.LLAMA, Architecture.PHI3, Architecture.GRANITE, Architecture.OLMO2)
    may_be_absent = architecture in takes_all or fields.is_null(key)
    num_kv_heads = fields.integer(key, default=num_heads if may_be_absent else None)
    if num_heads % num_kv_heads:
        raise fields.error(key, f"must divide num_attention_heads {num_heads}, got {num_kv_heads}")
    return num_kv_heads


def _head_dim(
    fields: JsonFields, architecture: Architecture, hidden_size: int, num_heads: int
) -> int:
    if fields.has("head_dim"):
        head_dim = fields.integer("head_dim")
    elif architecture in _GEMMA:
        head_dim = 256
    elif architecture is Architecture.QWEN3 or architecture in _GLM:
        head_dim = 128  # what transformers takes when their config is silent
    elif hidden_size % num_heads:
        raise fields.error("hidden_size", f"must divide by num_attention_heads {num_heads}")
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise fields.error("head_dim", f"must be even, got {head_dim}")
    return head_dim


def _sliding_windows(
    fields: JsonFields, architecture: Architecture, num_layers: int
) -> tuple[int | None, ...]:
    """Return each layer's window; the defaults for absent keys are transformers'."""
    if architecture in _WITHOUT_WINDOW:
        return (None,) * num_layers
    window = None
    if architecture in (Architecture.PHI3, Architecture.SMOLLM3):
        window = fields.integer("sliding_window") if fields.has("sliding_window") else None
        if architecture is Architecture.PHI3:
            return (window,) * num_layers
    elif not fields.is_null("sliding_window"):
        window = fields.integer("sliding_window", default=4096)
    if architecture is Architecture.MISTRAL:
        return (window,) * num_layers
    is_gemma3 = architecture is Architecture.GEMMA3
    uses_window = is_gemma3 or fields.boolean("use_sliding_window", default=False)
    if window is None or not uses_window:
        return (None,) * num_layers
    if is_gemma3 and not fields.has("layer_types"):
        interval = fields.integer("sliding_window_pattern", default=6)
        return tuple(
            None if layer % interval == interval - 1 else window for layer in range(num_layers)
        )
    if not fields.has("layer_types") and architecture is Architecture.SMOLLM3:
        unrotated = _unrotated_layers(fields, num_layers)
        return tuple(window if layer in unrotated else None for layer in range(num_layers))
    if not fields.has("layer_types"):
        first = fields.integer("max_window_layers", default=28, low=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    kinds = fields.array("layer_types")
    if len(kinds) != num_layers:
        raise fields.error("layer_types", f"must have {num_layers} entries, got {len(kinds)}")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise fields.error("layer_types", f"has the unknown entry {kind!r}")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _dtype(fields: JsonFields) -> str | None:
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    if not fields.has(key):
        return None
    name = fields.string(key).removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise fields.error(key, f"must be one of {', '.join(DTYPE_NAMES)}, got {name!r}")
    return name
