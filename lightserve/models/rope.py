"""Kinds of rotary embedding that the served families use, parsed from `config.json`. Torch-free.

Two layouts are read: the old one (`rope_theta` beside `rope_scaling`) and transformers 5's
(`rope_parameters`, which holds both). As in transformers, a non-empty `rope_scaling` wins, a base
inside the object wins over the one beside it, and `original_max_position_embeddings` beside it
wins over the one inside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightserve.errors import ModelLoadError
from lightserve.models.gguf import GgufFile
from lightserve.models.json_fields import JsonFields

DEFAULT_THETA = 10_000.0
FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers, in the words of `layer_types`, which may have rotary embeddings of their own."""


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


@dataclass(frozen=True, kw_only=True)
class LongRope:
    """LongRoPE: a factor for each frequency, others beyond the length of the first training."""

    theta: float
    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    attention_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class ProportionalRope:
    """The original one of the whole head, of which the slower frequencies stand still (Gemma 4)."""

    theta: float
    share: float
    """Share of the frequencies that turn."""
    factor: float
    """Divisor of positions."""


RopeConfig = (
    DefaultRope | LinearRope | DynamicRope | Llama3Rope | YarnRope | LongRope | ProportionalRope
)


def parse_rope(
    config: JsonFields,
    *,
    max_position_embeddings: int,
    rotary_dim: int,
    is_phi: bool = False,
    default_theta: float = DEFAULT_THETA,
) -> RopeConfig:
    """Return the rotary embedding of a model, of its layers without a window if others differ.

    Phi's first files call LongRoPE `su` or `yarn`. Raises ModelLoadError naming the key.
    """
    outer_theta = config.number("rope_theta", default=default_theta, above=1.0)
    fields = _rope_object(config)
    if fields is not None and fields.has(FULL):
        fields = fields.child(FULL)
    if fields is None:
        return DefaultRope(theta=outer_theta)
    theta = fields.number("rope_theta", default=outer_theta, above=1.0)
    kind = fields.string("rope_type", default=fields.string("type", default="default"))
    if is_phi and kind in ("su", "yarn"):
        kind = "longrope"
    match kind:
        case "default" | "mrope":  # by three positions, which are one for text
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
        case "longrope":
            original = _original_length(config, fields, max_position_embeddings)
            return _longrope(fields, theta, original, max_position_embeddings, rotary_dim)
        case "proportional":
            share = fields.number("partial_rotary_factor", default=1.0)
            if share > 1.0:
                raise fields.error("partial_rotary_factor", f"must be at most 1, got {share}")
            factor = _factor(fields) if fields.has("factor") else 1.0
            return ProportionalRope(theta=theta, share=share, factor=factor)
        case _:
            known = "default, linear, dynamic, llama3, yarn, longrope, proportional"
            raise fields.error("rope_type", f"must be one of {known}, got {kind!r}")


def parse_local_rope(config: JsonFields, *, default: float = DEFAULT_THETA) -> RopeConfig:
    """Return the rotary embedding of layers with a window, for families where it is another.

    `default`: its base where the file gives none.
    """
    fields = _rope_object(config)
    theta = config.number("rope_local_base_freq", default=default, above=1.0)
    if fields is None or not fields.has(SLIDING):
        return DefaultRope(theta=theta)
    fields = fields.child(SLIDING)
    fields.only("rope_type", "default")
    return DefaultRope(theta=fields.number("rope_theta", default=theta, above=1.0))


def unrotated_layers(
    fields: JsonFields, num_layers: int, *, key_may_be_empty: bool = False
) -> frozenset[int]:
    """Return which layers of SmolLM3 or Llama 4 know no positions."""
    key = "no_rope_layers"  # 1 where a layer has it
    if not fields.has(key) or (key_may_be_empty and not fields.array(key)):
        interval = fields.integer("no_rope_layer_interval", default=4)
        return frozenset(range(interval - 1, num_layers, interval))
    flags = fields.array(key)
    if len(flags) != num_layers or any(flag not in (0, 1) for flag in flags):
        raise fields.error(key, f"must be {num_layers} times 0 or 1")
    return frozenset(layer for layer, flag in enumerate(flags) if not flag)


class QueryGrowth(NamedTuple):
    """By how much queries grow with their position: 1 + beta * log(1 + place // length)."""

    beta: float
    length: int
    first: int = 0
    """Place of the first position."""


def parse_query_growth(config: JsonFields, max_position_embeddings: int) -> QueryGrowth | None:
    """Return how queries grow in Ministral 3, as in Llama 4. Raises ModelLoadError naming a key."""
    fields = _rope_object(config)
    if fields is None:
        raise config.error("rope_parameters", "is missing")
    beta = fields.optional_number("llama_4_scaling_beta")
    if beta is None:
        return None
    return QueryGrowth(beta, _original_length(config, fields, max_position_embeddings))


def has_rope(config: JsonFields) -> bool:
    """Whether the file says anything of rotary embeddings beside their base."""
    return _rope_object(config) is not None


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


def _longrope(
    fields: JsonFields, theta: float, original: int, max_position_embeddings: int, rotary_dim: int
) -> LongRope:
    factors = []
    for key in ("short_factor", "long_factor"):
        values = fields.array(key)
        if len(values) != rotary_dim // 2 or not all(_is_positive(value) for value in values):
            raise fields.error(key, f"must be {rotary_dim // 2} numbers above 0")
        factors.append(tuple(float(value) for value in values))
    growth = fields.number("factor", default=max_position_embeddings / original)
    by_length = 1.0
    if growth > 1.0:
        if original < 2:
            raise fields.error("original_max_position_embeddings", f"must exceed 1, got {original}")
        by_length = math.sqrt(1 + math.log(growth) / math.log(original))
    return LongRope(
        theta=theta,
        short_factors=factors[0],
        long_factors=factors[1],
        attention_factor=fields.number("attention_factor", default=by_length),
        original_max_position_embeddings=original,
    )


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf


def parse_rotary_dim(fields: JsonFields, head_dim: int, *, share: float) -> int:
    """Return how many of a head's dimensions are rotated; `share` where the file does not say."""
    key = "partial_rotary_factor"
    holder = _rope_object(fields)
    if holder is None or not holder.has(key):
        holder = fields
    rotary_dim = int(head_dim * holder.number(key, default=share))
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise holder.error(key, f"must leave an even part of head_dim {head_dim}, got {rotary_dim}")
    return rotary_dim


def parse_axes(
    fields: JsonFields, *, is_interleaved: bool, has_states: bool = False
) -> tuple[int, ...]:
    """Return for each frequency which of a token's three positions turns it: time, row, column.

    Qwen2-VL (Wang et al., 2024, section 2.1) has `mrope_section` one after the other; later models
    have them interleaved, those with states (Qwen3.5) in a quarter of each head. Raises
    ModelLoadError naming the key.
    """
    key, holder = "mrope_section", _rope_object(fields) or fields
    num_heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    usual = (128, 1.0, [24, 20, 20]) if is_interleaved else (hidden // num_heads, 1.0, [16, 24, 24])
    head_dim, share, sections = (256, 0.25, [11, 11, 10]) if has_states else usual
    size = parse_rotary_dim(fields, fields.integer("head_dim", default=head_dim), share=share) // 2
    sections = holder.array(key) if holder.has(key) else sections
    is_count = [type(count) is int and count > 0 for count in sections]
    if len(sections) != 3 or not all(is_count) or sum(sections) != size:
        raise holder.error(
            key, f"must be three numbers with the sum {size}, got {sections!r}"[:200]
        )
    if not holder.boolean("mrope_interleaved", default=is_interleaved):
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    return tuple(place % 3 if place < 3 * sections[place % 3] else 0 for place in range(size))


# Rotary embeddings of GGUF files, in the words of config.json.


FREQUENCY_FACTORS = "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_GGUF_KINDS = ("none", "linear", "yarn", "longrope")
_OR_GGUF_KINDS = "none, linear, yarn or longrope"
_PARTLY_ROTATED = (
    *("phi2", "phi3", "gptneox", "glm4", "chatglm", "minimax-m2"),
    *("qwen3next", "qwen35", "qwen35moe"),
)


def rope_of(gguf: GgufFile, head_dim: int, theta: float) -> dict[str, Any]:
    """Return `rope_parameters` of a file; `theta`: where the file gives no base."""
    rope: dict[str, Any] = {
        "rope_theta": gguf.number(".rope.freq_base", default=theta),
        "rope_type": "default",
    }
    length = gguf.integer(".context_length")
    size = gguf.integer(".rope.dimension_count", default=head_dim)
    if size != head_dim and gguf.architecture not in _PARTLY_ROTATED:
        key = ".rope.dimension_count"
        raise gguf.error(key, f"must be that of keys, {head_dim}, got {size}")
    if gguf.architecture in _PARTLY_ROTATED:
        rope["partial_rotary_factor"] = size / head_dim
    kind = gguf.string(".rope.scaling.type", default="linear")
    if kind not in _GGUF_KINDS:
        raise gguf.error(".rope.scaling.type", f"must be {_OR_GGUF_KINDS}, got {kind!r}")
    factor = 1.0 if kind == "none" else _scaling_factor(gguf)
    if _LONG_FACTORS in gguf.tensors and _SHORT_FACTORS in gguf.tensors:
        original = gguf.integer(".rope.scaling.original_context_length", default=length)
        scaled = rope | {
            "rope_type": "longrope",
            "short_factor": _gguf_factors(gguf, _SHORT_FACTORS, size // 2, times=factor),
            "long_factor": _gguf_factors(gguf, _LONG_FACTORS, size // 2, times=factor),
            "original_max_position_embeddings": original,
        }
        return scaled | _attention_factor(gguf)
    if FREQUENCY_FACTORS in gguf.tensors:
        if kind == "yarn":
            key = ".rope.scaling.type"
            raise gguf.error(key, f"must not be 'yarn' beside the tensor {FREQUENCY_FACTORS!r}")
        # Llama 3.1's scaling, worked out: a factor for each frequency, whatever the length.
        factors = _gguf_factors(gguf, FREQUENCY_FACTORS, size // 2, times=factor)
        return rope | {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": _attention_factor(gguf).get("attention_factor", 1.0),
            "original_max_position_embeddings": length,
        }
    if kind == "yarn":
        original = gguf.integer(".rope.scaling.original_context_length", default=length)
        scaled = rope | {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": gguf.number(".rope.scaling.yarn_beta_fast", default=32.0),
            "beta_slow": gguf.number(".rope.scaling.yarn_beta_slow", default=1.0),
        }
        if own := _attention_factor(gguf):
            # By the file's factor queries and keys grow beyond YaRN's own growth.
            own["attention_factor"] *= 0.1 * math.log(factor) + 1.0
        return scaled | own
    _refuse_growth(gguf)
    return rope if factor == 1.0 else rope | {"rope_type": "linear", "factor": factor}


def _scaling_factor(gguf: GgufFile) -> float:
    """Return the divisor of positions; an old key has it where the new one is absent."""
    key = ".rope.scaling.factor"
    if not gguf.has_key(key):
        key = ".rope.scale_linear"
    factor = gguf.number(key, default=1.0) or 1.0
    if factor < 1.0:
        raise gguf.error(key, f"must be 0 or at least 1, got {factor}")
    return factor


def _refuse_growth(gguf: GgufFile) -> None:
    """Refuse a factor of queries and keys where positions alone are scaled."""
    if _attention_factor(gguf).get("attention_factor", 1.0) != 1.0:
        key = ".rope.scaling.attn_factor"
        raise gguf.error(key, "must be 1 without YaRN and without a factor for each frequency")


def _attention_factor(gguf: GgufFile) -> dict[str, Any]:
    key = ".rope.scaling.attn_factor"
    return {"attention_factor": gguf.number(key)} if gguf.has_key(key) else {}


def _gguf_factors(gguf: GgufFile, name: str, length: int, *, times: float) -> list[float]:
    """Return each frequency's divisor: the file's number, times its common factor."""
    return [times * number for number in _float32(gguf, name, length)]


def _float32(gguf: GgufFile, name: str, length: int) -> list[float]:
    """Return a row of numbers; its length comes first, for it may be as long as the file."""
    tensor = gguf.tensors[name]
    if tensor.kind or tensor.shape != (length,):
        raise ModelLoadError(
            f"{gguf.path}: tensor {name!r} must be a row of {length} in F32, got"
            f" {list(tensor.shape)}"
        )
    data = memoryview(gguf.data)[tensor.start : tensor.start + tensor.row_bytes]
    return list(data.cast("f"))
