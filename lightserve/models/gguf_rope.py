"""Rotary embeddings of GGUF files, in the words of config.json. Torch-free."""

from __future__ import annotations

from typing import Any

from lightserve.errors import ModelLoadError
from lightserve.models.gguf import GgufFile

FREQUENCY_FACTORS = "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
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
    if _LONG_FACTORS in gguf.tensors and _SHORT_FACTORS in gguf.tensors:
        original = gguf.integer(f"{name}.rope.scaling.original_context_length", default=length)
        scaled = rope | {
            "rope_type": "longrope",
            "short_factor": _float32(gguf, _SHORT_FACTORS, size // 2),
            "long_factor": _float32(gguf, _LONG_FACTORS, size // 2),
            "original_max_position_embeddings": original,
        }
        return scaled | _attention_factor(gguf, name)
    if FREQUENCY_FACTORS in gguf.tensors:
        # Llama 3.1's scaling, worked out: a factor for each frequency, whatever the length.
        factors = _float32(gguf, FREQUENCY_FACTORS, size // 2)
        return rope | {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": length,
        }
    kind = gguf.string(f"{name}.rope.scaling.type", default="none")
    match kind:
        case "none":
            return rope
        case "linear":
            factor = gguf.number(f"{name}.rope.scaling.factor")
            return rope | {"rope_type": "linear", "factor": factor}
        case "yarn":
            original = gguf.integer(f"{name}.rope.scaling.original_context_length")
            scaled = rope | {
                "rope_type": "yarn",
                "factor": gguf.number(f"{name}.rope.scaling.factor"),
                "original_max_position_embeddings": original,
                "beta_fast": gguf.number(f"{name}.rope.scaling.yarn_beta_fast", default=32.0),
                "beta_slow": gguf.number(f"{name}.rope.scaling.yarn_beta_slow", default=1.0),
            }
            return scaled | _attention_factor(gguf, name)
        case _:
            key = f"{name}.rope.scaling.type"
            raise gguf.error(key, f"must be none, linear or yarn, got {kind!r}")


def _attention_factor(gguf: GgufFile, name: str) -> dict[str, Any]:
    key = f"{name}.rope.scaling.attn_factor"
    return {"attention_factor": gguf.number(key)} if key in gguf.metadata else {}


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
