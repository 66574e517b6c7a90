"""Models that see images: their text part, the encoder, and how pictures are prepared. Torch-free.

LLaVA-1.5 (Liu et al., "Improved Baselines with Visual Instruction Tuning", 2023): the encoder of
CLIP, and two products behind it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lightserve.errors import ModelLoadError
from lightserve.messages.images import HEAD_TOKENS, Image
from lightserve.models.architectures import Architecture
from lightserve.models.json_fields import JsonFields, read_json_object
from lightserve.models.plain_config import MAX_LAYERS, Activation

PREPROCESSOR_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"

# The text part.


class _TextPart(NamedTuple):
    """A kind of text part, by its `model_type`."""

    architecture: Architecture
    model_type: str
    defaults: dict[str, Any]
    """Values that transformers takes where the file is silent."""


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
    Architecture.LLAMA4_WHOLE: (_TextPart(Architecture.LLAMA4, "llama4_text", {}),),
    Architecture.QWEN3_5_WHOLE: (_TextPart(Architecture.QWEN3_5, "qwen3_5_text", {}),),
    Architecture.QWEN3_5_MOE_WHOLE: (_TextPart(Architecture.QWEN3_5_MOE, "qwen3_5_moe_text", {}),),
    Architecture.MISTRAL3_WHOLE: (
        _TextPart(Architecture.MISTRAL, "mistral", {}),
        _TextPart(Architecture.MINISTRAL3, "ministral3", {}),
        _TextPart(Architecture.MISTRAL4, "mistral4", {}),
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
    text = fields.child("text_config")
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


class VisionConfig(NamedTuple):
    """The encoder of images, and the two products that make embeddings of its results."""

    placeholder: int
    """Id of the token that stands for an image in templates."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    """Layers in the files."""
    num_used_layers: int
    """Layers that are computed: embeddings are made of the result of the last of these."""
    num_heads: int
    image_size: int
    """Height and width of every image, in pixels."""
    patch_size: int
    norm_eps: float
    activation: Activation
    drops_class: bool
    """Whether the result of the token that stands for the whole image is left out."""
    projector_activation: Activation
    has_projector_bias: bool
    processor: ImageProcessor

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    def takes(self, image: Image) -> bool:
        """Whether an image is as the encoder reads it."""
        return (image.height, image.width, image.num_tokens) == (
            self.image_size,
            self.image_size,
            self.num_tokens,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of an image in a prompt."""
        return self.num_patches + (not self.drops_class)


_ACTIVATIONS = {
    "quick_gelu": Activation.QUICK_GELU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}
_VISION_KIND = "clip_vision_model"


def parse_vision(fields: JsonFields, architecture: Architecture) -> VisionConfig | None:
    """Return the encoder of a model; None: it sees no images, or its text part alone is served.

    `fields` are those of the whole file. Raises ModelLoadError naming the key.
    """
    if architecture is not Architecture.LLAVA:
        return None
    own = fields.child("vision_config")
    if (kind := own.string("model_type", default=_VISION_KIND)) != _VISION_KIND:
        raise own.error("model_type", f"must be {_VISION_KIND!r}, got {kind!r}")
    if (channels := own.integer("num_channels", default=3)) != 3:
        raise own.error("num_channels", f"must be 3, got {channels}")
    hidden, heads = (
        own.integer("hidden_size", default=1024),
        own.integer("num_attention_heads", default=16),
    )
    if hidden % heads:
        raise own.error("hidden_size", f"must divide by num_attention_heads {heads}, got {hidden}")
    num_layers = own.integer("num_hidden_layers", default=24, high=MAX_LAYERS)
    strategy = fields.string("vision_feature_select_strategy", default="default")
    if strategy not in ("default", "full"):
        raise fields.error(
            "vision_feature_select_strategy", f"must be 'default' or 'full', got {strategy!r}"
        )
    image_size = own.integer("image_size", default=336, high=4096)
    config = VisionConfig(
        placeholder=fields.integer(
            "image_token_id" if fields.has("image_token_id") else "image_token_index",
            default=32_000,
            low=0,
        ),
        hidden_size=hidden,
        intermediate_size=own.integer("intermediate_size", default=4096),
        num_layers=num_layers,
        num_used_layers=_num_used_layers(fields, num_layers),
        num_heads=heads,
        image_size=image_size,
        patch_size=own.integer("patch_size", default=14, high=4096),
        norm_eps=own.number("layer_norm_eps", default=1e-5),
        activation=_activation(own, "hidden_act", "quick_gelu"),
        drops_class=strategy == "default",
        projector_activation=_activation(fields, "projector_hidden_act", "gelu"),
        has_projector_bias=fields.boolean("multimodal_projector_bias", default=True),
        processor=load_image_processor(fields.path.parent, image_size),
    )
    if config.num_tokens < HEAD_TOKENS:
        raise own.error(
            "image_size", f"must make at least {HEAD_TOKENS} patches, got {config.num_patches}"
        )
    return config


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


# How a picture becomes what the encoder reads.

_PROCESSORS = ("CLIPImageProcessor", "LlavaImageProcessor")
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_MAX_FILTER = 5
_BICUBIC = 3


class ImageProcessor(msgspec.Struct, frozen=True):
    """Steps that make an encoder's pixels of a picture, in this order."""

    background: tuple[int, int, int] | None
    """Colour with which it is made a square; None: it is not."""
    shortest_edge: int | None
    """Length of its shorter side behind resizing; None: `size` says both."""
    size: tuple[int, int]
    """Height and width behind resizing, or 0 and 0."""
    resample: int
    """Pillow's number of the filter."""
    crop: tuple[int, int] | None
    """Height and width of the part in the middle that is taken; None: all of it."""
    scale: float
    """Factor of the pixels' values."""
    mean: tuple[float, float, float]
    """Numbers that are taken off red, green and blue."""
    std: tuple[float, float, float]
    """Numbers by which red, green and blue are divided then."""


def load_image_processor(path: Path, image_size: int) -> ImageProcessor:
    """Read preprocessor_config.json or processor_config.json of the model in directory `path`.

    Raises:
        ModelLoadError: neither is there, or one names what is not supported; names file and key.
    """
    fields = _processor_fields(path)
    kind = fields.string("image_processor_type", default=_PROCESSORS[0])
    base = kind.removesuffix("Fast").removesuffix("Pil")
    if base not in _PROCESSORS:
        raise fields.error("image_processor_type", f"must be {' or '.join(_PROCESSORS)}")
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not fields.boolean(key, default=True):
            raise fields.error(key, "must be true")
    size = _size(fields, "size", shortest_edge=224)
    crop = None
    if fields.boolean("do_center_crop", default=True):
        crop = _size(fields, "crop_size", shortest_edge=None)
    mean, std = (
        _colours(fields, key, default)
        for key, default in (("image_mean", _CLIP_MEAN), ("image_std", _CLIP_STD))
    )
    pads = base == _PROCESSORS[1] and fields.boolean("do_pad", default=False)
    processor = ImageProcessor(
        background=(int(mean[0] * 255), int(mean[1] * 255), int(mean[2] * 255)) if pads else None,
        shortest_edge=size if isinstance(size, int) else None,
        size=(0, 0) if isinstance(size, int) else size,
        resample=fields.integer("resample", default=_BICUBIC, low=0, high=_MAX_FILTER),
        crop=(crop, crop) if isinstance(crop, int) else crop,
        scale=fields.number("rescale_factor", default=1 / 255),
        mean=mean,
        std=std,
    )
    whole = (image_size, image_size)
    made = processor.crop or processor.size
    if made != whole:
        key = "crop_size" if processor.crop else "size"
        raise fields.error(key, f"must be the encoder's {whole[0]} x {whole[1]}")
    return processor


def _processor_fields(path: Path) -> JsonFields:
    file = path / PREPROCESSOR_FILE
    if file.is_file():
        return JsonFields(file, read_json_object(file))
    both = path / PROCESSOR_FILE
    if both.is_file():
        fields = JsonFields(both, read_json_object(both))
        if fields.has("image_processor"):
            return fields.child("image_processor")
    raise ModelLoadError(f"{file}: no such file, which a model that sees images needs")


def _size(fields: JsonFields, key: str, *, shortest_edge: int | None) -> int | tuple[int, int]:
    """Return a length, or height and width; `shortest_edge`: the default, if there is one."""
    if not fields.has(key) and shortest_edge is not None:
        return shortest_edge
    if isinstance(dict(fields.items()).get(key), int):  # of old files
        return fields.integer(key, high=4096)
    own = fields.child(key)
    if own.has("shortest_edge"):
        return own.integer("shortest_edge", high=4096)
    return own.integer("height", high=4096), own.integer("width", high=4096)


def _colours(
    fields: JsonFields, key: str, default: tuple[float, float, float]
) -> tuple[float, float, float]:
    if not fields.has(key):
        return default
    values = fields.array(key)
    is_number = [isinstance(v, int | float) and math.isfinite(v) for v in values]
    if len(values) != 3 or not all(is_number) or (key == "image_std" and min(values) <= 0):
        raise fields.error(key, f"must hold three numbers, got {values!r}"[:200])
    return float(values[0]), float(values[1]), float(values[2])
