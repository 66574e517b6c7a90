"""Models that see images: their text part, and the encoder beside it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightserve.messages.images import EncoderWork, Image
from lightserve.models.architectures import Architecture
from lightserve.models.image_processor import ImageProcessor
from lightserve.models.json_fields import JsonFields
from lightserve.types import Activation

# The text part.


def text_fields(fields: JsonFields) -> JsonFields:
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
_MISTRAL: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
}
_MINISTRAL3 = _MISTRAL | {
    "vocab_size": 131_072,
    "num_hidden_layers": 34,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
}
_QWEN: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
}
_QWEN3_MOE = _QWEN | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
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
        _TextPart(Architecture.MISTRAL, "mistral", _MISTRAL),
        _TextPart(Architecture.MINISTRAL3, "ministral3", _MINISTRAL3),
        _TextPart(Architecture.MISTRAL4, "mistral4", {}),
    ),
    Architecture.INTERNVL: (
        _TextPart(Architecture.QWEN2, "qwen2", _QWEN),
        _TextPart(Architecture.QWEN3, "qwen3", _QWEN | {"head_dim": 128}),
        _TextPart(Architecture.QWEN3_MOE, "qwen3_moe", _QWEN3_MOE),
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
        _TextPart(Architecture.MISTRAL, "mistral", _MISTRAL),
        _TextPart(Architecture.QWEN2, "qwen2", _QWEN),
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
    text = text_fields(fields)
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
    # Sizes of heads that are null follow from others; any other null is as if the key were absent.
    unset = values.keys() - {"num_key_value_heads", "head_dim"}
    stated = {key: value for key, value in text.items() if value is not None or key not in unset}
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
    """Activation of feed-forward blocks, or of their gates; None: SiLU."""
    is_gated: bool = False
    """Whether feed-forward blocks have gates."""
    qkv_bias: bool = True
    """Whether products that make queries, keys and values have biases."""
    has_bias: bool = True
    """Whether the other products have biases."""
    has_scales: bool = False
    """Whether results of blocks are scaled, each number by a factor of its own (LayerScale)."""
    is_rms: bool = False
    """Norms are RMS norms, not LayerNorm with biases; …"""
    is_rms_around: bool = False
    """… so are those before and behind the layers."""
    qk_norm_eps: float | None = None
    """Epsilon of the RMS norms over all heads of queries and of keys; None: there are none."""
    merged: str = ""
    """How the file has queries, keys and values as one tensor, see `ModelConfig.merged`; empty: it
    has three."""
    has_head_norms: bool = False
    """Whether heads are those of Gemma 4: queries, keys and values are normalised, scores have no
    other scale, the first half of a head is turned by columns and the second by rows; …"""
    has_output_norms: bool = False
    """… and results of blocks are normalised before they are added."""
    clips: bool = False
    """Products clip their inputs and results to ranges of the file."""
    window: int | None = None
    """Embeddings along the side of a square within which layers attend; None: they see all."""
    full: frozenset[int] = frozenset()
    """Layers that see all in any case."""


@dataclass(frozen=True, kw_only=True)
class Projector:
    """The two products that make embeddings of an encoder's results."""

    has_norm: bool = False
    """Whether patches are normalised before they become an embedding, …"""
    norms_squares: bool = False
    """… all of an embedding together."""
    norm_eps: float | None = None
    """Epsilon of this norm; None: that of the layers' norms."""
    pools: bool = False
    """Whether an embedding is made of the mean of patches, normalised, by one product."""
    num_queries: int = 0
    """Learned queries that attend to all patches, one for each embedding; 0: embeddings are made of
    patches of their own."""
    num_query_heads: int = 0
    scales_means: bool = False
    """Whether means are scaled before that, and their norm has no weights, as in Gemma 4; …"""
    standardizes: bool = False
    """… and moved and scaled number by number."""
    has_merger: bool = False
    """Whether a product before the two makes as many numbers as a patch has of an embedding's."""
    inner_size: int | None = None
    """Numbers between the products; None: as many as an embedding has."""
    activation: Activation
    has_bias: bool
    deep_layers: tuple[int, ...] = ()
    """Layers whose results are made embeddings, too: they are added behind the first layers of the
    language model, in this order (DeepStack, Meng et al., 2024)."""


class PatchRope(NamedTuple):
    """Rotary embeddings by a patch's row and column."""

    theta: float
    """Base."""
    alternates: bool = False
    """Whether a column's frequencies lie between those of a row; else they are the same."""


class PatchWeights(NamedTuple):
    """The product that embeds patches, as a file has it."""

    has_bias: bool = False
    num_frames: int | None = None
    """Equal images that weights are for; None: they are for one, without this size."""
    is_flat: bool = False
    """Weights of patches are a matrix, in the order of pixels."""


ALONE = PatchWeights()


class ImageInPrompt(NamedTuple):
    """An image in a prompt."""

    written: str = ""
    """A template's text for it; empty: the place-holder's."""
    known: str = ""
    """The text in the place of that, which has the place-holder once."""
    row_break: str = ""
    """Token between the rows of its tokens; empty: there is none."""
    is_whole: bool = False
    """See `Image.is_whole`."""


AS_WRITTEN = ImageInPrompt()


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
    patches: PatchWeights = ALONE
    has_class: bool = False
    """Whether a token that stands for the whole image goes before the patches, …"""
    drops_class: bool = False
    """… and its result is left out."""
    num_positions: int = 0
    """Learned positions, with that of the class; where sizes differ the square is stretched. …"""
    has_axes: bool = False
    """… So many of columns and so many of rows, whose sum a patch gets."""
    has_first_norm: bool = False
    """Whether there is a norm before the layers."""
    is_batched: bool = False
    """Whether the file has the class and the positions with a first dimension of 1."""
    has_last_norm: bool = False
    """Whether there is a norm behind the layers."""
    rope: PatchRope | None = None
    """Rotary embeddings by row and column; None: there are none."""
    prompt: ImageInPrompt = AS_WRITTEN
    axes: tuple[int, ...] = ()
    """For each frequency of the language model's rotary embedding, which of a token's three
    positions it turns by: time, row or column; empty: positions are places in the sequence."""

    @property
    def factor(self) -> int:
        """Pixels along the side of an embedding's square."""
        return self.patch_size * self.merge

    def num_tokens(self, height: int, width: int) -> int:
        """Return the tokens of an image in a prompt."""
        if self.projector.num_queries:
            return self.projector.num_queries
        own = self.has_class and not self.drops_class
        rows, columns = height // self.factor, width // self.factor
        return rows * columns + own + (rows - 1 if self.prompt.row_break else 0)

    def image_tokens(
        self, image: Image, first: int, last: int
    ) -> tuple[npt.NDArray[np.int64], slice]:
        """Return which of an image's tokens from `first` to before `last` are not breaks of rows,
        and the embeddings that stand for them."""
        places = np.arange(first, last)
        if not self.prompt.row_break:
            return places, slice(first, last)
        length = image.width // self.factor + 1
        places = places[(places + 1) % length != 0]
        number = first - first // length
        return places, slice(number, number + len(places))

    @property
    def work(self) -> EncoderWork:
        """The work of its layers, by their products and attention."""
        layers = self.layers
        num_products = 3 if layers.is_gated else 2
        products = 4 * self.hidden_size + num_products * layers.intermediate_size
        full = layers.count if layers.window is None else len(layers.full)
        num_patches: float = self.merge**2  # of a token
        if self.projector.num_queries:
            num_patches = (self.processor.side // self.patch_size) ** 2 / self.projector.num_queries
        pair_share = 2 * num_patches / products * full / max(1, layers.count)
        # The tokens of a tile see as many others in each image.
        return EncoderWork(layers.count, 0.0 if self.processor.tiles else pair_share)

    def takes(self, image: Image) -> bool:
        """Whether an image is as the encoder reads it."""
        height, width = image.height, image.width
        if not self.processor.makes(height, width) or image.is_whole != self.prompt.is_whole:
            return False
        return image.num_tokens == self.num_tokens(height, width)
