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


RopeConfig = DefaultRope | LinearRope | DynamicRope | Llama3Rope | YarnRope | LongRope


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
        case "longrope":
            original = _original_length(config, fields, max_position_embeddings)
            return _longrope(fields, theta, original, max_position_embeddings, rotary_dim)
        case _:
            known = "default, linear, dynamic, llama3, yarn, longrope"
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
    if (kind := fields.string("rope_type", default="default")) != "default":
        raise fields.error("rope_type", f"must be default, got {kind!r}")
    return DefaultRope(theta=fields.number("rope_theta", default=theta, above=1.0))


class QueryGrowth(NamedTuple):
    """By how much queries grow with their position: 1 + beta * log(1 + position // length)."""

    beta: float
    length: int


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
