"""Rotary embeddings of GGUF files, in the words of config.json. Torch-free."""

from __future__ import annotations

import math
from typing import Any

from lightserve.errors import ModelLoadError
from lightserve.models.gguf import GgufFile

FREQUENCY_FACTORS = "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_KINDS = ("none", "linear", "yarn", "longrope")
_OR_KINDS = "none, linear, yarn or longrope"
_PARTLY_ROTATED = ("phi2", "phi3", "gptneox", "glm4", "chatglm")


def rope_of(gguf: GgufFile, name: str, head_dim: int, theta: float) -> dict[str, Any]:
    """Return `rope_parameters` of architecture `name`; `theta`: where the file gives no base."""
    rope: dict[str, Any] = {
        "rope_theta": gguf.number(f"{name}.rope.freq_base", default=theta),
        "rope_type": "default",
    }
    length = gguf.integer(f"{name}.context_length")
    size = gguf.integer(f"{name}.rope.dimension_count", default=head_dim)
    if size != head_dim and name not in _PARTLY_ROTATED:
        key = f"{name}.rope.dimension_count"
        raise gguf.error(key, f"must be that of keys, {head_dim}, got {size}")
    if name in _PARTLY_ROTATED:
        rope["partial_rotary_factor"] = size / head_dim
    kind = gguf.string(f"{name}.rope.scaling.type", default="linear")
    if kind not in _KINDS:
        raise gguf.error(f"{name}.rope.scaling.type", f"must be {_OR_KINDS}, got {kind!r}")
    factor = 1.0 if kind == "none" else _scaling_factor(gguf, name)
    if _LONG_FACTORS in gguf.tensors and _SHORT_FACTORS in gguf.tensors:
        original = gguf.integer(f"{name}.rope.scaling.original_context_length", default=length)
        scaled = rope | {
            "rope_type": "longrope",
            "short_factor": _factors(gguf, _SHORT_FACTORS, size // 2, times=factor),
            "long_factor": _factors(gguf, _LONG_FACTORS, size // 2, times=factor),
            "original_max_position_embeddings": original,
        }
        return scaled | _attention_factor(gguf, name)
    if FREQUENCY_FACTORS in gguf.tensors:
        if kind == "yarn":
            key = f"{name}.rope.scaling.type"
            raise gguf.error(key, f"must not be 'yarn' beside the tensor {FREQUENCY_FACTORS!r}")
        # Llama 3.1's scaling, worked out: a factor for each frequency, whatever the length.
        factors = _factors(gguf, FREQUENCY_FACTORS, size // 2, times=factor)
        return rope | {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": _attention_factor(gguf, name).get("attention_factor", 1.0),
            "original_max_position_embeddings": length,
        }
    if kind == "yarn":
        original = gguf.integer(f"{name}.rope.scaling.original_context_length", default=length)
        scaled = rope | {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": gguf.number(f"{name}.rope.scaling.yarn_beta_fast", default=32.0),
            "beta_slow": gguf.number(f"{name}.rope.scaling.yarn_beta_slow", default=1.0),
        }
        if own := _attention_factor(gguf, name):
            # By the file's factor queries and keys grow beyond YaRN's own growth.
            own["attention_factor"] *= 0.1 * math.log(factor) + 1.0
        return scaled | own
    _refuse_growth(gguf, name)
    return rope if factor == 1.0 else rope | {"rope_type": "linear", "factor": factor}


def _scaling_factor(gguf: GgufFile, name: str) -> float:
    """Return what positions are divided by; an old key has it where the new one is absent."""
    key = f"{name}.rope.scaling.factor"
    if key not in gguf.metadata:
        key = f"{name}.rope.scale_linear"
    factor = gguf.number(key, default=1.0) or 1.0
    if factor < 1.0:
        raise gguf.error(key, f"must be 0 or at least 1, got {factor}")
    return factor


def _refuse_growth(gguf: GgufFile, name: str) -> None:
    """Refuse a factor of queries and keys where positions alone are scaled."""
    if _attention_factor(gguf, name).get("attention_factor", 1.0) != 1.0:
        key = f"{name}.rope.scaling.attn_factor"
        raise gguf.error(key, "must be 1 without YaRN and without a factor for each frequency")


def _attention_factor(gguf: GgufFile, name: str) -> dict[str, Any]:
    key = f"{name}.rope.scaling.attn_factor"
    return {"attention_factor": gguf.number(key)} if key in gguf.metadata else {}


def _factors(gguf: GgufFile, name: str, length: int, *, times: float) -> list[float]:
    """Return what each frequency is divided by: the file's number, times its common factor."""
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
