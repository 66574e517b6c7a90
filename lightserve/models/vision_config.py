"""Models that see images: their text part and the encoder, as `config.json` says. Torch-free.

LLaVA-1.5 (Liu et al., "Improved Baselines with Visual Instruction Tuning", 2023) has the encoder of
CLIP, and two products behind it. Qwen2-VL (Wang et al., 2024), Qwen2.5-VL and Qwen3-VL take images
of any size, rotate by a patch's row and column, and make one embedding of four patches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightserve.messages.images import EncoderWork, Image
from lightserve.models.architectures import Architecture
from lightserve.models.image_processor import (
    ImageProcessor,
    has_image_processor,
    load_image_processor,
)
from lightserve.models.json_fields import JsonFields
from lightserve.models.plain_config import MAX_LAYERS, Activation
from lightserve.models.rope import parse_axes

# The text part.


def _text_fields(fields: JsonFields) -> JsonFields:
    """Return the keys of the text part, which stood beside the others in Qwen's first files."""
    if fields.has("text_config"):
        return fields.child("text_config")
    own = {key: value for key, value in fields.items() if key != "model_type"}
    return (
        JsonFields(fields.path, own) if fields.has("hidden_size") else fields.child("text_config")
    )


class _TextPart(NamedTuple):
    """A kind of text part, by its `model_type`."""

    architecture: Architecture
    model_type: str
    defaults: dict[str, Any]
    """Values that transformers takes where the file is silent."""


_QWEN2_VL: dict[str, Any] = {
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
}
_TEXT_PARTS = {
    Architecture.GEMMA3_WHOLE: (
        _TextPart(
            Architecture.GEMMA3,
            "gemma3_text",
            {
                "vocab_size": 262_208,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "max_position_embeddings": 131_072,
                "rms_norm_eps": 1e-6,
            },
        ),
    ),
    Architecture.GEMMA4_WHOLE: (_TextPart(Architecture.GEMMA4, "gemma4_text", {}),),
    Architecture.LLAMA4_WHOLE: (_TextPart(Architecture.LLAMA4, "llama4_text", {}),),
    Architecture.QWEN3_5_WHOLE: (_TextPart(Architecture.QWEN3_5, "qwen3_5_text", {}),),
    Architecture.QWEN3_5_MOE_WHOLE: (_TextPart(Architecture.QWEN3_5_MOE, "qwen3_5_moe_text", {}),),
    Architecture.MISTRAL3_WHOLE: (
        _TextPart(Architecture.MISTRAL, "mistral", {}),
        _TextPart(Architecture.MINISTRAL3, "ministral3", {}),
        _TextPart(Architecture.MISTRAL4, "mistral4", {}),
    ),
    Architecture.QWEN2_VL: (_TextPart(Architecture.QWEN2, "qwen2_vl_text", _QWEN2_VL),),
    Architecture.QWEN2_5_VL: (_TextPart(Architecture.QWEN2, "qwen2_5_vl_text", _QWEN2_VL),),
    Architecture.QWEN3_VL: (
        _TextPart(
            Architecture.QWEN3,
            "qwen3_vl_text",
            {"rope_theta": 500_000.0, "max_position_embeddings": 128_000, "rms_norm_eps": 1e-6},
        ),
    ),
    Architecture.LLAVA: (
        _TextPart(
            Architecture.LLAMA,
            "llama",
            {
                "vocab_size": 32_000,
                "hidden_size": 4096,
                "intermediate_size": 11_008,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-6,
            },
        ),
        _TextPart(Architecture.MISTRAL, "mistral", {}),
        _TextPart(Architecture.QWEN2, "qwen2", {}),
    ),
}


def text_part(
    fields: JsonFields, architecture: Architecture, dtype: str | None
) -> tuple[Architecture, JsonFields]:
    """Return the text part of a model, with the whole model's `dtype`; of others the model itself.

    Raises ModelLoadError: it is of a kind that cannot be served.
    """
    parts = _TEXT_PARTS.get(architecture)
    if parts is None:
        return architecture, fields
    text = _text_fields(fields)
    kind = text.string("model_type", default=parts[0].model_type)
    part = next((part for part in parts if part.model_type == kind), None)
    if part is None:
        known = " or ".join(repr(part.model_type) for part in parts)
        raise text.error("model_type", f"must be {known}, got {kind!r}")
    values: dict[str, Any] = {**part.defaults}
    if dtype is not None:
        values["dtype"] = dtype
    if fields.has("tie_word_embeddings"):
        values["tie_word_embeddings"] = fields.boolean("tie_word_embeddings", default=False)
    stated = {key: value for key, value in text.items() if value is not None or key not in values}
    return part.architecture, JsonFields(fields.path, values | stated, prefix="text_config.")


# The encoder.


@dataclass(frozen=True, kw_only=True)
class EncoderLayers:
    """The layers of an encoder of images."""

    count: int
    """Layers that are computed: embeddings are made of the result of the last of these."""
    num_heads: int
    intermediate_size: int
    norm_eps: float
    activation: Activation | None
    """Activation of feed-forward blocks; None: they have gates, by SiLU."""
    is_rms: bool = False
    """Norms are RMS norms, not LayerNorm with biases."""
    has_merged_qkv: bool = False
    """Whether the file has queries, keys and values as one tensor."""
    window: int | None = None
    """Embeddings along the side of a square within which layers attend; None: they see all."""
    full: frozenset[int] = frozenset()
    """Layers that see all in any case."""


@dataclass(frozen=True, kw_only=True)
class Projector:
    """The two products that make embeddings of an encoder's results."""

    has_norm: bool = False
    """Whether patches are normalised before they become an embedding."""
    inner_size: int | None = None
    """Numbers between the products; None: as many as an embedding has."""
    activation: Activation
    has_bias: bool
    deep_layers: tuple[int, ...] = ()
    """Layers whose results are made embeddings, too: they are added behind the first layers of the
    language model, in this order (DeepStack, Meng et al., 2024)."""


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The encoder of images, and the products that make embeddings of its results."""

    placeholder: int
    """Id of the token that stands for an image in templates."""
    processor: ImageProcessor
    names: tuple[tuple[str, str], ...]
    """Parts of tensors' names here, and the file's parts in their places, one after the other."""
    prefixes: tuple[tuple[tuple[str, str], ...], ...]
    """Beginnings of names, in the same way: one of these is that of the file."""
    hidden_size: int
    layers: EncoderLayers
    projector: Projector
    patch_size: int
    merge: int = 1
    """Patches along the side of the square of which an embedding is made."""
    num_frames: int | None = None
    """Equal images that a patch's weights are for; None: they are for one, without this size."""
    has_patch_bias: bool = False
    has_class: bool = False
    """Whether a token that stands for the whole image goes before the patches, …"""
    drops_class: bool = False
    """… and its result is left out."""
    num_positions: int = 0
    """Learned positions, with that of the class; where sizes differ the square is stretched."""
    has_first_norm: bool = False
    """Whether there is a norm before the layers."""
    rope_theta: float | None = None
    """Base of rotary embeddings by row and column; None: there are none."""
    axes: tuple[int, ...] = ()
    """For each frequency of the language model's rotary embedding, which of a token's three
    positions it turns by: time, row or column; empty: positions are places in the sequence."""

    @property
    def factor(self) -> int:
        """Pixels along the side of an embedding's square."""
        return self.patch_size * self.merge

    def num_tokens(self, height: int, width: int) -> int:
        """Return the tokens of an image in a prompt."""
        own = self.has_class and not self.drops_class
        return (height // self.factor) * (width // self.factor) + own

    @property
    def work(self) -> EncoderWork:
        """The work of its layers, by their products and attention."""
        layers = self.layers
        num_products = 2 if layers.activation else 3
        products = 4 * self.hidden_size + num_products * layers.intermediate_size
        full = layers.count if layers.window is None else len(layers.full)
        pair_share = 2 * self.merge**2 / products * full / max(1, layers.count)
        return EncoderWork(layers.count, pair_share)

    def takes(self, image: Image) -> bool:
        """Whether an image is as the encoder reads it."""
        height, width = image.height, image.width
        makes = self.processor.makes(height, width)
        return makes and image.num_tokens == self.num_tokens(height, width)


_ACTIVATIONS = {
    "quick_gelu": Activation.QUICK_GELU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}


def parse_vision(fields: JsonFields, architecture: Architecture) -> VisionConfig | None:
    """Return the encoder of a model; None: it sees no images, or its text part alone is served.

    `fields` are those of the whole file. Raises ModelLoadError naming the key.
    """
    match architecture:
        case Architecture.LLAVA:
            return _parse_llava(fields)
        case Architecture.QWEN2_VL | Architecture.QWEN2_5_VL | Architecture.QWEN3_VL:
            return _parse_qwen(fields, architecture)
        case Architecture.QWEN3_5_WHOLE | Architecture.QWEN3_5_MOE_WHOLE:
            sees = has_image_processor(fields.path.parent)
            return _parse_qwen(fields, architecture) if sees else None
        case _:
            return None


def _parse_llava(fields: JsonFields) -> VisionConfig:
    own = _vision_fields(fields, "clip_vision_model")
    hidden, heads = _heads(own, "hidden_size", 1024, "num_attention_heads")
    num_layers = own.integer("num_hidden_layers", default=24, high=MAX_LAYERS)
    strategy = fields.string("vision_feature_select_strategy", default="default")
    if strategy not in ("default", "full"):
        raise fields.error(
            "vision_feature_select_strategy", f"must be 'default' or 'full', got {strategy!r}"
        )
    image_size = own.integer("image_size", default=336, high=4096)
    patch_size = own.integer("patch_size", default=14, high=4096)
    if not (num_patches := (image_size // patch_size) ** 2):
        raise own.error("image_size", f"must be at least patch_size {patch_size}, got {image_size}")
    return VisionConfig(
        placeholder=_placeholder(fields, 32_000),
        processor=load_image_processor(fields.path.parent, image_size=image_size),
        names=_LLAVA_NAMES,
        prefixes=_LLAVA_PREFIXES,
        hidden_size=hidden,
        layers=EncoderLayers(
            count=_num_used_layers(fields, num_layers),
            num_heads=heads,
            intermediate_size=own.integer("intermediate_size", default=4096),
            norm_eps=own.number("layer_norm_eps", default=1e-5),
            activation=_activation(own, "hidden_act", "quick_gelu"),
        ),
        projector=Projector(
            activation=_activation(fields, "projector_hidden_act", "gelu"),
            has_bias=fields.boolean("multimodal_projector_bias", default=True),
        ),
        patch_size=patch_size,
        has_class=True,
        drops_class=strategy == "default",
        num_positions=1 + num_patches,
        has_first_norm=True,
    )


_LLAVA_NAMES = (
    ("vision.projector.inner", "vision.projector.linear_1"),
    ("vision.projector.outer", "vision.projector.linear_2"),
    ("vision.class", "vision.embeddings.class_embedding"),
    ("vision.patches", "vision.embeddings.patch_embedding"),
    ("vision.positions", "vision.embeddings.position_embedding"),
    ("vision.first_norm", "vision.pre_layrnorm"),
    ("vision.layers", "vision.encoder.layers"),
    (".norm", ".layer_norm"),
    ("self_attn.o_", "self_attn.out_"),
    ("up_proj", "fc1"),
    ("down_proj", "fc2"),
)
_LLAVA_PREFIXES = tuple(
    (
        ("vision.projector.", f"{whole}multi_modal_projector."),
        ("vision.", f"{whole}vision_tower.{inner}"),
    )
    for whole in ("", "model.")
    for inner in ("vision_model.", "")
)


def _parse_qwen(fields: JsonFields, architecture: Architecture) -> VisionConfig:
    """Return the encoder of a Qwen-VL, which takes images of any size; its sizes are the file's."""
    kind = _QWEN_KINDS[architecture]
    own, text = (
        _vision_fields(fields, kind, kind.removesuffix("_vision")),
        _text_fields(fields),
    )
    is_first = architecture is Architecture.QWEN2_VL
    is_third = not is_first and architecture is not Architecture.QWEN2_5_VL
    is_deep = architecture is Architecture.QWEN3_VL
    has_states = is_third and not is_deep
    size_key, size = ("embed_dim", 1280) if is_first else ("hidden_size", None)
    hidden, heads = _heads(own, size_key, size, "num_heads")
    if hidden // heads % 4:
        raise own.error("num_heads", f"must make heads of a multiple of 4, got {heads} of {hidden}")
    num_layers = own.integer("depth", default=27 if is_third else 32, high=MAX_LAYERS)
    merge = own.integer("spatial_merge_size", default=2, high=16)
    patch_size = own.integer("patch_size", default=16 if is_third else 14, high=4096)
    factor = patch_size * merge
    activation: Activation | None = None
    inner, windows = 0, {}
    if architecture is Architecture.QWEN2_5_VL:
        windows = _windows(own, num_layers, factor)
    else:
        name = "gelu_pytorch_tanh" if is_third else "quick_gelu"
        activation = _activation(own, "hidden_act", name)
    if is_first:
        inner = int(hidden * own.number("mlp_ratio", default=4))
    return VisionConfig(
        placeholder=_placeholder(fields, 248_056 if has_states else 151_655),
        processor=load_image_processor(fields.path.parent, image_size=None, factor=factor),
        names=_QWEN2_NAMES if is_first else _QWEN3_NAMES if is_third else _QWEN_NAMES,
        prefixes=((("vision.", "visual."),), (("vision.", "model.visual."),)),
        hidden_size=hidden,
        layers=EncoderLayers(
            count=num_layers,
            num_heads=heads,
            intermediate_size=inner or own.integer("intermediate_size"),
            norm_eps=1e-6,
            activation=activation,
            has_merged_qkv=True,
            **windows,
        ),
        projector=Projector(
            has_norm=True,
            inner_size=hidden * merge**2,
            activation=Activation.GELU,
            has_bias=True,
            deep_layers=_deep_layers(own, num_layers, text) if is_deep else (),
        ),
        patch_size=patch_size,
        merge=merge,
        num_frames=own.integer("temporal_patch_size", default=2, high=16),
        has_patch_bias=is_third,
        num_positions=_num_positions(own) if is_third else 0,
        rope_theta=10_000.0,
        axes=parse_axes(text, is_interleaved=is_third, has_states=has_states),
    )


def _windows(own: JsonFields, num_layers: int, factor: int) -> dict[str, Any]:
    """Return fields of Qwen2.5-VL's layers, most of which see windows."""
    if (activation := own.string("hidden_act", default="silu")) != "silu":
        raise own.error("hidden_act", f"must be 'silu', got {activation!r}")
    key, window = "fullatt_block_indexes", own.integer("window_size", default=112)
    if window < factor:
        raise own.error("window_size", f"must be at least {factor}, got {window}")
    layers = _layers(own, key, num_layers) if own.has(key) else (7, 15, 23, 31)
    return {"is_rms": True, "window": window // factor, "full": frozenset(layers)}


def _deep_layers(own: JsonFields, num_layers: int, text: JsonFields) -> tuple[int, ...]:
    key = "deepstack_visual_indexes"
    layers = _layers(own, key, num_layers) if own.has(key) else (8, 16, 24)
    if len(layers) >= (most := text.integer("num_hidden_layers")):
        raise own.error(key, f"must be fewer than the {most} layers of the language model")
    return layers


def _num_positions(own: JsonFields) -> int:
    num_positions = own.integer("num_position_embeddings", default=2304)
    if math.isqrt(num_positions) ** 2 != num_positions:
        raise own.error("num_position_embeddings", f"must be a square number, got {num_positions}")
    return num_positions


_QWEN_KINDS = {
    Architecture.QWEN2_VL: "qwen2_vl_vision",
    Architecture.QWEN2_5_VL: "qwen2_5_vl_vision",
    Architecture.QWEN3_VL: "qwen3_vl_vision",
    Architecture.QWEN3_5_WHOLE: "qwen3_5_vision",
    Architecture.QWEN3_5_MOE_WHOLE: "qwen3_5_moe_vision",
}
_QWEN_NAMES = (
    ("vision.projector.norm", "vision.merger.ln_q"),
    ("vision.projector.inner", "vision.merger.mlp.0"),
    ("vision.projector.outer", "vision.merger.mlp.2"),
    ("vision.patches", "vision.patch_embed.proj"),
    ("vision.layers", "vision.blocks"),
    ("self_attn.qkv_proj", "attn.qkv"),
    ("self_attn.o_proj", "attn.proj"),
)
_QWEN2_NAMES = (*_QWEN_NAMES, ("up_proj", "fc1"), ("down_proj", "fc2"))
_QWEN3_NAMES = (
    ("vision.projector.deep", "vision.deepstack_merger_list"),
    ("vision.projector.", "vision.merger."),
    (".inner", ".linear_fc1"),
    (".outer", ".linear_fc2"),
    ("vision.positions", "vision.pos_embed"),
    *_QWEN_NAMES[3:],
    ("up_proj", "linear_fc1"),
    ("down_proj", "linear_fc2"),
)


def _vision_fields(fields: JsonFields, *kinds: str) -> JsonFields:
    own = fields.child("vision_config")
    if (kind := own.string("model_type", default=kinds[0])) not in kinds:
        raise own.error("model_type", f"must be {kinds[0]!r}, got {kind!r}")
    for key in ("num_channels", "in_channels", "in_chans"):
        if (channels := own.integer(key, default=3)) != 3:
            raise own.error(key, f"must be 3, got {channels}")
    return own


def _placeholder(fields: JsonFields, default: int) -> int:
    key = "image_token_id" if fields.has("image_token_id") else "image_token_index"
    return fields.integer(key, default=default, low=0)


def _heads(own: JsonFields, size_key: str, default: int | None, heads_key: str) -> tuple[int, int]:
    """Return the numbers of a patch and the heads."""
    hidden, heads = own.integer(size_key, default=default), own.integer(heads_key, default=16)
    if hidden % heads:
        raise own.error(size_key, f"must divide by {heads_key} {heads}, got {hidden}")
    return hidden, heads


def _layers(own: JsonFields, key: str, num_layers: int) -> tuple[int, ...]:
    layers = own.array(key)
    if not all(isinstance(n, int) and 0 <= n < num_layers for n in layers):
        raise own.error(
            key, f"must hold numbers of layers below {num_layers}, got {layers!r}"[:200]
        )
    return tuple(layers)


def _num_used_layers(fields: JsonFields, num_layers: int) -> int:
    """Return how many layers stand before the result that is taken: 0 is that before all."""
    key = "vision_feature_layer"
    layer = fields.integer(key, default=-2, low=-num_layers - 1, high=num_layers)
    return layer if layer >= 0 else num_layers + 1 + layer


def _activation(fields: JsonFields, key: str, default: str) -> Activation:
    name = fields.string(key, default=default)
    if name not in _ACTIVATIONS:
        raise fields.error(key, f"must be one of {', '.join(_ACTIVATIONS)}, got {name!r}")
    return _ACTIVATIONS[name]
