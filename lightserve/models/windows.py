"""Which layers see a window of the context only, and which know no positions. Torch-free."""

from __future__ import annotations

from lightserve.models.architectures import Architecture
from lightserve.models.json_fields import JsonFields
from lightserve.models.rope import FULL, SLIDING

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
"""Families of which all layers have a window, or none."""
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
