"""What a Hugging Face `config.json` says about a model, checked. Torch-free.

Imported by the supervisor, the router and the frontends as well as by the workers.
`auto_map` and every other key that names code are never looked at.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from lightserve.errors import ConfigError, ModelLoadError

# Typed, checked reading of JSON objects: every complaint names the file and the key.
#
# Torch-free. A `JsonFields` wraps one object of a file; its getters return a value of the asked
# type within the asked limits, or raise `ModelLoadError`.

MAX_JSON_BYTES = 64 * 1024 * 1024
"""No configuration or shard index is nearly as long."""

MAX_INT = 2**31 - 1
"""Sizes, ids and lengths are 32-bit everywhere else."""


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`. Raises ModelLoadError naming the file."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ModelLoadError(f"{path}: {size} bytes, more than {MAX_JSON_BYTES}")
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path}: no such file") from error
    except OSError as error:
        raise ModelLoadError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object, got {_describe(value)}")
    return value


class JsonFields:
    """One JSON object of a file. A key that is absent and one that is null count as the same."""

    def __init__(self, path: Path, values: dict[str, Any], *, prefix: str = "") -> None:
        self.path = path
        self._values = values
        self._prefix = prefix

    def error(self, key: str, complaint: str) -> ModelLoadError:
        """Return the error that names file, key and complaint."""
        return ModelLoadError(f"{self.path}: key {self._prefix + key!r} {complaint}")

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Whether the key is there with the value null."""
        return key in self._values and self._values[key] is None

    def integer(
        self, key: str, *, default: int | None = None, low: int = 1, high: int = MAX_INT
    ) -> int:
        """Return an integer between `low` and `high`; without a default the key is required."""
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"must be an integer, got {_describe(value)}")
        if not low <= value <= high:
            raise self.error(key, f"must be between {low} and {high}, got {value}")
        return value

    def number(self, key: str, *, default: float | None = None, above: float = 0.0) -> float:
        """Return a finite number greater than `above`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"must be a number, got {_describe(value)}")
        if not math.isfinite(value) or value <= above:
            raise self.error(key, f"must be finite and greater than {above}, got {value}")
        return float(value)

    def optional_number(self, key: str, *, above: float = 0.0) -> float | None:
        """Return a finite number greater than `above`, or None when the key is absent."""
        return self.number(key, above=above) if self.has(key) else None

    def boolean(self, key: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, got {_describe(value)}")
        return value

    def string(self, key: str, *, default: str | None = None) -> str:
        """Return a string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, got {_describe(value)}")
        return value

    def array(self, key: str) -> list[Any]:
        """Return a list."""
        value = self._get(key, None)
        if not isinstance(value, list):
            raise self.error(key, f"must be a list, got {_describe(value)}")
        return value

    def child(self, key: str) -> JsonFields:
        """Return the object under a key."""
        value = self._get(key, None)
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, got {_describe(value)}")
        return JsonFields(self.path, value, prefix=f"{self._prefix}{key}.")

    def items(self) -> list[tuple[str, Any]]:
        """Return all keys with their raw values."""
        return list(self._values.items())

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is None:
            raise self.error(key, "is missing" if key not in self._values else "is null")
        return default


def _describe(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


# Kinds of rotary embedding that the served families use, parsed from `config.json`. Torch-free.
#
# Two layouts are read: the old one (`rope_theta` beside `rope_scaling`) and transformers 5's
# (`rope_parameters`, which holds both). As in transformers, a non-empty `rope_scaling` wins, a
# base inside the object wins over the one beside it, and `original_max_position_embeddings`
# beside it wins over the one inside.

DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, kw_only=True)
class DefaultRope:
    """The original rotary embedding."""

    theta: float


@dataclass(frozen=True, kw_only=True)
class LinearRope:
    """Positions divided by `factor`."""

    theta: float
    factor: float


@dataclass(frozen=True, kw_only=True)
class DynamicRope:
    """NTK scaling: beyond the trained length, a base that grows with the context length."""

    theta: float
    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between."""

    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class YarnRope:
    """YaRN: NTK by parts, and a factor on cos and sin."""

    theta: float
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None
    mscale: float | None
    mscale_all_dim: float | None
    beta_fast: float
    beta_slow: float
    truncate: bool


RopeConfig = DefaultRope | LinearRope | DynamicRope | Llama3Rope | YarnRope


def parse_rope(config: JsonFields, *, max_position_embeddings: int) -> RopeConfig:
    """Return the rotary embedding of a model. Raises ModelLoadError naming the key."""
    outer_theta = config.number("rope_theta", default=DEFAULT_THETA, above=1.0)
    fields = _rope_object(config)
    if fields is None:
        return DefaultRope(theta=outer_theta)
    theta = fields.number("rope_theta", default=outer_theta, above=1.0)
    for holder in (config, fields):
        if holder.number("partial_rotary_factor", default=1.0) != 1.0:
            raise holder.error("partial_rotary_factor", "must be 1 in this architecture")
    kind = fields.string("rope_type", default=fields.string("type", default="default"))
    match kind:
        case "default":
            return DefaultRope(theta=theta)
        case "linear":
            return LinearRope(theta=theta, factor=_factor(fields))
        case "dynamic":
            return DynamicRope(theta=theta, factor=_factor(fields))
        case "llama3":
            original = _original_length(config, fields, max_position_embeddings)
            return _llama3(fields, theta=theta, original=original)
        case "yarn":
            original = _original_length(config, fields, max_position_embeddings)
            return _yarn(fields, theta, original, max_position_embeddings)
        case _:
            known = "default, linear, dynamic, llama3, yarn"
            raise fields.error("rope_type", f"must be one of {known}, got {kind!r}")


def _rope_object(config: JsonFields) -> JsonFields | None:
    for key in ("rope_scaling", "rope_parameters"):
        if config.has(key):
            fields = config.child(key)
            if fields.items():
                return fields
    return None


def _factor(fields: JsonFields) -> float:
    factor = fields.number("factor")
    if factor < 1:
        raise fields.error("factor", f"must be at least 1, got {factor}")
    return factor


def _original_length(config: JsonFields, fields: JsonFields, max_position_embeddings: int) -> int:
    key = "original_max_position_embeddings"
    inner = fields.integer(key, default=max_position_embeddings)
    return config.integer(key, default=inner)


def _llama3(fields: JsonFields, *, theta: float, original: int) -> Llama3Rope:
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if high <= low:
        raise fields.error("high_freq_factor", f"must exceed low_freq_factor {low}, got {high}")
    return Llama3Rope(
        theta=theta,
        factor=_factor(fields),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )


def _yarn(
    fields: JsonFields, theta: float, original: int, max_position_embeddings: int
) -> YarnRope:
    has_factor = fields.has("factor") or not fields.is_null("factor")
    return YarnRope(
        theta=theta,
        factor=_factor(fields) if has_factor else max_position_embeddings / original,
        original_max_position_embeddings=original,
        attention_factor=fields.optional_number("attention_factor"),
        mscale=fields.optional_number("mscale", above=-1.0),
        mscale_all_dim=fields.optional_number("mscale_all_dim", above=-1.0),
        beta_fast=fields.number("beta_fast", default=32.0),
        beta_slow=fields.number("beta_slow", default=1.0),
        truncate=fields.boolean("truncate", default=True),
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
    tie_word_embeddings: bool
    sliding_windows: tuple[int | None, ...]
    """One per layer; None: the layer sees everything."""
    dtype: str | None
    """One of DTYPE_NAMES as stated by the model, None when it states none."""

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
    if (activation := fields.string("hidden_act", default="silu")) != "silu":
        raise fields.error("hidden_act", f"must be 'silu', got {activation!r}")
    num_layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    max_position_embeddings = fields.integer("max_position_embeddings")
    attention_bias = fields.boolean("attention_bias", default=False)
    is_llama, is_qwen2 = architecture is Architecture.LLAMA, architecture is Architecture.QWEN2
    reads_attention_bias = architecture in (Architecture.LLAMA, Architecture.QWEN3)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, architecture, num_heads),
        head_dim=_head_dim(fields, architecture, hidden_size, num_heads),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=parse_rope(fields, max_position_embeddings=max_position_embeddings),
        max_position_embeddings=max_position_embeddings,
        qkv_bias=is_qwen2 or (reads_attention_bias and attention_bias),
        attention_output_bias=reads_attention_bias and attention_bias,
        mlp_bias=is_llama and fields.boolean("mlp_bias", default=False),
        qk_norm=architecture is Architecture.QWEN3,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        sliding_windows=_sliding_windows(fields, architecture, num_layers),
        dtype=_dtype(fields),
    )


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
    may_be_absent = architecture is Architecture.LLAMA or fields.is_null(key)
    num_kv_heads = fields.integer(key, default=num_heads if may_be_absent else None)
    if num_heads % num_kv_heads:
        raise fields.error(key, f"must divide num_attention_heads {num_heads}, got {num_kv_heads}")
    return num_kv_heads


def _head_dim(
    fields: JsonFields, architecture: Architecture, hidden_size: int, num_heads: int
) -> int:
    if fields.has("head_dim"):
        head_dim = fields.integer("head_dim")
    elif architecture is Architecture.QWEN3:
        head_dim = 128  # what transformers takes when a Qwen3 config is silent
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
    if architecture is Architecture.LLAMA:
        return (None,) * num_layers
    window = None
    if not fields.is_null("sliding_window"):
        window = fields.integer("sliding_window", default=4096)
    if architecture is Architecture.MISTRAL:
        return (window,) * num_layers
    if window is None or not fields.boolean("use_sliding_window", default=False):
        return (None,) * num_layers
    if not fields.has("layer_types"):
        first = fields.integer("max_window_layers", default=28, low=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    kinds = fields.array("layer_types")
    if len(kinds) != num_layers:
        raise fields.error("layer_types", f"must have {num_layers} entries, got {len(kinds)}")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.error("layer_types", f"has the unknown entry {kind!r}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _dtype(fields: JsonFields) -> str | None:
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    if not fields.has(key):
        return None
    name = fields.string(key).removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise fields.error(key, f"must be one of {', '.join(DTYPE_NAMES)}, got {name!r}")
    return name
