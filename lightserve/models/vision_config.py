"""Models that see images: their text part, and the encoder beside it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightserve.messages.images import EncoderWork, Image
from lightserve.models.architectures import Architecture
from lightserve.models.image_processor import MAX_PIXELS, ImageProcessor
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
    """Whether norms of layers are RMS norms; else they are LayerNorm with biases."""
    is_rms_around: bool = False
    """Whether norms before and behind the layers are RMS norms."""
    qk_norm_eps: float | None = None
    """Epsilon of the RMS norms over all heads of queries and of keys; None: there are none."""
    merged: str = ""
    """How the file has queries, keys and values as one tensor, see `ModelConfig.merged`; empty: it
    has three."""
    has_head_norms: bool = False
    """Whether each head's queries, keys and values are normalised, without another scale of scores;
    the first half of a head is turned by columns and the second by rows (Gemma 4)."""
    has_output_norms: bool = False
    """Whether results of blocks are normalised before they are added."""
    clips: bool = False
    """Products clip their inputs and results to ranges of the file."""
    window: int | None = None
    """Embeddings along the side of a square within which layers attend; None: they see all."""
    full: frozenset[int] = frozenset()
    """Layers that see all in any case."""


class Normed(Enum):
    """The numbers that are normalised together before products make an embedding of them."""

    NOTHING = "nothing"
    PATCH = "patch"
    """The numbers of each patch."""
    SQUARE = "square"
    """The numbers of all patches of an embedding."""


@dataclass(frozen=True, kw_only=True)
class PairProjector:
    """Two products, with an activation between them, make an embedding of its patches."""

    normed: Normed = Normed.NOTHING
    norm_eps: float | None = None
    """Epsilon of that norm; None: that of the layers' norms."""
    has_merger: bool = False
    """Whether a product before the two makes as many numbers as a patch has of an embedding's."""
    inner_size: int | None = None
    """Numbers between the products; None: as many as an embedding has."""
    activation: Activation
    has_bias: bool
    deep_layers: tuple[int, ...] = ()
    """Layers whose results are made embeddings, too: they are added behind the first layers of the
    language model, in this order (DeepStack, Meng et al., 2024)."""


@dataclass(frozen=True)
class MeanProjector:
    """One product makes an embedding of the mean of its patches, normalised (Gemma 3)."""


@dataclass(frozen=True, kw_only=True)
class ScaledMeanProjector:
    """One product makes an embedding of the mean of its patches, scaled and then normalised without
    weights (Gemma 4)."""

    standardizes: bool
    """Whether scaled means are moved, and scaled number by number, before the norm."""


@dataclass(frozen=True, kw_only=True)
class QueryProjector:
    """Learned queries, one for each embedding, attend to all patches (Bai et al., 2023, "Qwen-VL",
    section 2.1)."""

    num_queries: int
    num_heads: int


Projector = PairProjector | MeanProjector | ScaledMeanProjector | QueryProjector
"""The way from an encoder's results to embeddings."""


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
    sees_itself: bool = False
    """See `Image.sees_itself`."""


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
        if isinstance(self.projector, QueryProjector):
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

    def work_within(self, context_len: int) -> EncoderWork:
        """Return the work of its layers, by their products and attention, for so long a context."""
        layers = self.layers
        num_products = 3 if layers.is_gated else 2
        products = 4 * self.hidden_size + num_products * layers.intermediate_size
        full = layers.count if layers.window is None else len(layers.full)
        num_patches: float = self.merge**2  # of a token
        if isinstance(self.projector, QueryProjector):
            num_patches = (self.processor.side // self.patch_size) ** 2 / self.projector.num_queries
        pair_share = 2 * num_patches / products * full / max(1, layers.count)
        if self.processor.tiles:  # the tokens of a tile see as many others in each image
            pair_share = 0.0
        most = min(context_len, self.num_tokens(*self.processor.largest(MAX_PIXELS)))
        return EncoderWork(layers.count, pair_share, most, self.prompt.sees_itself)

    def takes(self, image: Image) -> bool:
        """Whether an image is as the encoder reads it."""
        height, width = image.height, image.width
        if not self.processor.makes(height, width) or image.sees_itself != self.prompt.sees_itself:
            return False
        return image.num_tokens == self.num_tokens(height, width)


# Its tensors, by the names that layers know.

VISION = "vision."
"""Beginning of the names of tensors of the encoder of images, and of the products behind it."""
VISION_CLASS, VISION_PATCHES = f"{VISION}class", f"{VISION}patches"
VISION_POSITIONS = f"{VISION}positions.weight"
VISION_NORM, VISION_LAST_NORM = f"{VISION}first_norm", f"{VISION}last_norm"
VISION_LAYERS, VISION_PROJECTOR = f"{VISION}layers", f"{VISION}projector"
QUERY_NORMS = ("query_norm", "patch_norm", "last_norm")
"""Norms of a projector with queries: of these, of patches, and of the results."""
VISION_MOVE, VISION_SCALE = f"{VISION}std_bias", f"{VISION}std_scale"
"""Numbers that are taken off means of patches, and by which they are multiplied then."""
RANGES = ("input", "output")
"""Ranges of a product that clips: each is two numbers, `_min` and `_max`."""


def vision_tensors(vision: VisionConfig, size: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of an encoder of images; `size`: of the embeddings that it makes."""
    hidden, patch = vision.hidden_size, vision.patch_size
    frames = () if vision.patches.num_frames is None else (vision.patches.num_frames,)
    shape = (3 * patch**2,) if vision.patches.is_flat else (3, *frames, patch, patch)
    shapes: dict[str, tuple[int, ...]] = {f"{VISION_PATCHES}.weight": (hidden, *shape)}
    if vision.patches.has_bias:
        shapes[f"{VISION_PATCHES}.bias"] = (hidden,)
    lead = (1,) * vision.is_batched + (2,) * vision.has_axes
    if vision.has_class:
        shapes[VISION_CLASS] = (*lead, *lead, hidden)
    if vision.num_positions:
        shapes[VISION_POSITIONS] = (*lead, vision.num_positions, hidden)
    norms: dict[str, int] = {}
    if vision.has_first_norm:
        norms[VISION_NORM] = hidden
    if vision.has_last_norm:
        norms[VISION_LAST_NORM] = hidden
    if isinstance(vision.projector, QueryProjector):
        norms |= {f"{VISION_PROJECTOR}.{name}": size for name in QUERY_NORMS}
    elif isinstance(vision.projector, PairProjector) and vision.projector.normed != Normed.NOTHING:
        norms |= {f"{name}.norm": norm for name, norm in projectors(vision)}
    parts = ("weight",) if vision.layers.is_rms_around else ("weight", "bias")
    shapes |= {f"{name}.{part}": (n,) for name, n in norms.items() for part in parts}
    for layer in range(vision.layers.count):
        shapes |= _layer_tensors(vision, f"{VISION_LAYERS}.{layer}")
    return shapes | _projector_tensors(vision, size)


def _projector_tensors(vision: VisionConfig, size: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the products behind the layers, but for norms in the encoder's form."""
    hidden, others = vision.hidden_size, dict[str, tuple[int, ...]]()
    shapes: dict[str, tuple[int, ...]]
    match vision.projector:
        case PairProjector():
            return _pair_tensors(vision, vision.projector, size)
        case MeanProjector():
            shapes = {"norm.weight": (hidden,), "outer.weight": (hidden, size)}
        case ScaledMeanProjector(standardizes=standardizes):
            shapes = {"outer.weight": (size, hidden)}
            if standardizes:
                others = {VISION_MOVE: (hidden,), VISION_SCALE: (hidden,)}
        case QueryProjector(num_queries=number):
            shapes = {"queries": (number, size), "positions": (number, size), "outer": (size, size)}
            shapes |= {"inner.weight": (size, hidden), "qkv_weight": (3 * size, size)}
            shapes |= {"o_proj.weight": (size, size), "o_proj.bias": (size,)}
            shapes["qkv_bias"] = (3 * size,)
    return {f"{VISION_PROJECTOR}.{name}": shape for name, shape in shapes.items()} | others


def _pair_tensors(
    vision: VisionConfig, projector: PairProjector, size: int
) -> dict[str, tuple[int, ...]]:
    """Return the tensors of `projector`'s products."""
    shapes: dict[str, tuple[int, ...]] = {}
    hidden, middle = vision.hidden_size, projector.inner_size or size
    group = hidden * vision.merge**2
    for name, _ in projectors(vision):
        if projector.has_merger:
            shapes[f"{name}.merger.weight"] = hidden, group
        num_inputs = hidden if projector.has_merger else group
        for part, shape in (("inner", (middle, num_inputs)), ("outer", (size, middle))):
            shapes[f"{name}.{part}.weight"] = shape
            if projector.has_bias:
                shapes[f"{name}.{part}.bias"] = shape[:1]
    return shapes


def _layer_tensors(vision: VisionConfig, prefix: str) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a layer."""
    layers, hidden, inner = vision.layers, vision.hidden_size, vision.layers.intermediate_size
    inputs = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkv"}
    if layers.merged:
        inputs = {"self_attn.qkv_proj": (3 * hidden, hidden)}
    others = {"self_attn.o_proj": (hidden, hidden), "mlp.down_proj": (hidden, inner)}
    for name in ("gate", "up") if layers.is_gated else ("up",):
        others[f"mlp.{name}_proj"] = (inner, hidden)
    shapes: dict[str, tuple[int, ...]] = {}
    for linears, has_bias in ((inputs, layers.qkv_bias), (others, layers.has_bias)):
        shapes |= {f"{prefix}.{name}.weight": shape for name, shape in linears.items()}
        if has_bias:
            shapes |= {f"{prefix}.{name}.bias": shape[:1] for name, shape in linears.items()}
    if layers.has_scales:
        shapes |= {f"{prefix}.scale{n}": (hidden,) for n in (1, 2)}
    for kind in ("norm", "output_norm") if layers.has_output_norms else ("norm",):
        for part in ("weight",) if layers.is_rms else ("weight", "bias"):
            shapes |= {f"{prefix}.{kind}{n}.{part}": (hidden,) for n in (1, 2)}
    if layers.qk_norm_eps is not None or layers.has_head_norms:
        size = hidden // layers.num_heads if layers.has_head_norms else hidden
        shapes |= {f"{prefix}.self_attn.{name}_norm.weight": (size,) for name in "qk"}
    if layers.clips:
        ends = [f"{kind}_{end}" for kind in RANGES for end in ("min", "max")]
        shapes |= {f"{prefix}.{name}.{end}": () for name in (*inputs, *others) for end in ends}
    return shapes


def projectors(vision: VisionConfig) -> list[tuple[str, int]]:
    """Return names of pairs of products behind the encoder, with the numbers that are normalised.

    First those of the last layer, then those of `PairProjector.deep_layers`; none where there are
    no pairs.
    """
    if not isinstance(vision.projector, PairProjector):
        return []
    deep = [f"{VISION_PROJECTOR}.deep.{n}" for n in range(len(vision.projector.deep_layers))]
    group = vision.hidden_size * vision.merge**2
    size = group if vision.projector.normed is Normed.SQUARE else vision.hidden_size
    return [(VISION_PROJECTOR, size), *((name, group) for name in deep)]
