"""How a picture becomes what an encoder of images reads, by a model's own files. Torch-free."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from lightserve.errors import ModelLoadError
from lightserve.messages.images import MAX_PIXEL_BYTES
from lightserve.models.json_fields import JsonFields, read_json_object

PREPROCESSOR_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"
MAX_PIXELS = MAX_PIXEL_BYTES // 3
"""Most pixels of an image that the encoder reads: a message has to hold them."""
MAX_RATIO = 200
"""By so much a picture may be longer than wide where its size may be any."""
CLIP, LLAVA, QWEN = "CLIPImageProcessor", "LlavaImageProcessor", "Qwen2VLImageProcessor"
PIXTRAL, TILES = "PixtralImageProcessor", "GotOcr2ImageProcessor"
GEMMA3, GEMMA4 = "Gemma3ImageProcessor", "Gemma4ImageProcessor"
"""Kinds of processors, as their files name them."""
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_MAX_FILTER = 5
_BILINEAR, _BICUBIC = 2, 3
_HALVES = (0.5, 0.5, 0.5)
_MAX_SIDE = 4096


class AnySize(msgspec.Struct, frozen=True):
    """Sizes of images that keep the proportions of their pictures (Qwen2-VL, section 2.1)."""

    factor: int
    """Pixels of which both sides are multiples."""
    min_pixels: int
    max_pixels: int
    """At most MAX_PIXELS."""
    longest_edge: int | None = None
    """Pixels into which sides are fitted before they are rounded up (Pixtral, section 2.2); None:
    they are rounded to the nearest multiple."""
    fills: bool = False
    """Pictures fill the limit: each becomes as large as `max_pixels` lets it, as in Gemma 4."""

    def of(self, height: int, width: int) -> tuple[int, int] | None:
        """Return height and width for those of a picture; None: it is too narrow."""
        if max(height, width) > MAX_RATIO * min(height, width):
            return None
        if self.fills:
            return self._largest(height, width)
        factor = self.factor
        if self.longest_edge is None:
            sides = [round(side / factor) * factor for side in (height, width)]
        else:
            ratio = max(1.0, height / self.longest_edge, width / self.longest_edge)
            sides = [
                math.ceil(max(1, math.floor(side / ratio)) / factor) * factor
                for side in (height, width)
            ]
        if sides[0] * sides[1] > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            sides = [
                max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)
            ]
        elif sides[0] * sides[1] < self.min_pixels:
            growth = math.sqrt(self.min_pixels / (height * width))
            sides = [math.ceil(side * growth / factor) * factor for side in (height, width)]
        return sides[0], sides[1]

    def _largest(self, height: int, width: int) -> tuple[int, int]:
        """Return the largest sides, rounded down; of narrow pictures one is `factor`."""
        factor, growth = self.factor, math.sqrt(self.max_pixels / (height * width))
        rows, columns = (math.floor(growth * side / factor) for side in (height, width))
        most = max(1, self.max_pixels // factor**2)
        if not rows:
            rows, columns = 1, most
        elif not columns:
            rows, columns = most, 1
        return rows * factor, columns * factor


class Tiles(msgspec.Struct, frozen=True):
    """Squares of `ImageProcessor.size` that a picture is cut into (InternVL 1.5, section 3.3).

    The image is these below each other, row after row, and where they are several behind them the
    whole picture, as small.
    """

    least: int
    most: int

    @property
    def most_in_all(self) -> int:
        """The most of an image, with the whole picture."""
        return self.most + (self.most > 1)

    def grid(self, height: int, width: int, area: int) -> tuple[int, int]:
        """Return the rows and columns whose proportions are nearest to a picture's.

        `area`: pixels of a tile. Of equal ones the larger, unless the picture is much smaller.
        """
        grids = [
            (rows, columns)
            for columns in range(1, self.most + 1)
            for rows in range(1, self.most // columns + 1)
            if rows * columns >= self.least
        ]
        best, distance = (1, 1), math.inf
        for rows, columns in sorted(grids, key=math.prod):
            own = abs(width / height - columns / rows)
            is_filled = height * width > 0.5 * area * rows * columns
            if own < distance or (own == distance and is_filled):
                best, distance = (rows, columns), own
        return best


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
    any_size: AnySize | None = None
    """Its size behind resizing, in place of `shortest_edge` and `size`; None: these say it."""
    tiles: Tiles | None = None
    """Parts that are resized to `size` each; None: it stays whole."""

    @property
    def side(self) -> int:
        """Height of an image, or of a tile, where all have one size."""
        return (self.crop or self.size)[0]

    def makes(self, height: int, width: int) -> bool:
        """Whether an image may have this size."""
        if self.tiles is not None:
            number, rest = divmod(height, self.size[0])
            return rest == 0 and width == self.size[1] and 1 <= number <= self.tiles.most_in_all
        if self.any_size is None:
            return (height, width) == (self.crop or self.size)
        factor = self.any_size.factor
        is_whole = height % factor == width % factor == 0
        return is_whole and height > 0 < width and height * width <= MAX_PIXELS

    def largest(self, max_pixels: int) -> tuple[int, int]:
        """Return height and width of the largest image of at most so many pixels, if any is."""
        if self.tiles is not None:
            number = min(self.tiles.most_in_all, max_pixels // math.prod(self.size))
            return max(1, number) * self.size[0], self.size[1]
        if self.any_size is None:
            return self.crop or self.size
        factor = self.any_size.factor
        if self.any_size.fills:  # no other image has more tokens than a strip
            number = min(max_pixels, self.any_size.max_pixels) // factor**2
            return factor, max(1, number) * factor
        side = math.isqrt(min(max_pixels, self.any_size.max_pixels)) // factor * factor
        return max(side, factor), max(side, factor)


def clip_processor(side: int) -> ImageProcessor:
    """Return the processor of a model whose files have none: CLIP's, but for what it cuts off.

    `side`: of the square that a picture becomes, in pixels.
    """
    return ImageProcessor(
        background=None,
        shortest_edge=None,
        size=(side, side),
        resample=_BICUBIC,
        crop=None,
        scale=1 / 255,
        mean=_CLIP_MEAN,
        std=_CLIP_STD,
    )


def load_image_processor(
    path: Path, *known: str, image_size: int = 0, factor: int = 1
) -> ImageProcessor:
    """Read preprocessor_config.json or processor_config.json of the model in directory `path`.

    `known`: kinds that the model may have, first its own. `image_size`: height and width that the
    encoder reads, or of a tile; where images have any size, their sides are multiples of `factor`.

    Raises:
        ModelLoadError: neither is there, or one names what is not supported; names file and key.
    """
    fields = _processor_fields(path)
    kind = fields.string("image_processor_type", default=known[0])
    base = kind.removesuffix("Fast").removesuffix("Pil")
    if base not in known:
        raise fields.error("image_processor_type", f"must be {' or '.join(known)}, got {kind!r}")
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        wanted = (base, key) != (GEMMA4, "do_normalize")  # that encoder does it itself
        fields.only(key, wanted)
    fields.only("do_pan_and_scan", False)
    is_gemma = base == GEMMA3
    mean = _colours(fields, "image_mean", _HALVES if is_gemma else _CLIP_MEAN)
    std = _colours(fields, "image_std", _HALVES if is_gemma else _CLIP_STD)
    if base == GEMMA4:
        mean = std = _HALVES
    resample = _BILINEAR if is_gemma else _BICUBIC
    pads = base == LLAVA and fields.boolean("do_pad", default=False)
    processor = ImageProcessor(
        background=(int(mean[0] * 255), int(mean[1] * 255), int(mean[2] * 255)) if pads else None,
        shortest_edge=None,
        size=(0, 0),
        resample=fields.integer("resample", default=resample, low=0, high=_MAX_FILTER),
        crop=None,
        scale=fields.number("rescale_factor", default=1 / 255),
        mean=mean,
        std=std,
    )
    if base in _READ_ANY_SIZE:
        return msgspec.structs.replace(processor, any_size=_READ_ANY_SIZE[base](fields, factor))
    if base == TILES:
        return _in_tiles(fields, processor, image_size)
    return _of_one_size(fields, processor, image_size, is_gemma=is_gemma)


def _in_tiles(fields: JsonFields, processor: ImageProcessor, image_size: int) -> ImageProcessor:
    """Return the processor with the steps that cut pictures into tiles of one size.

    `crop_to_patches` is not read: transformers' processor of the model always sets it.
    """
    size = _size(fields, "size")
    if size != (image_size, image_size):
        raise fields.error("size", f"must be the encoder's {image_size} x {image_size}")
    most, high = fields.integer("max_patches", default=12), MAX_PIXELS // image_size**2 - 1
    if most > max(1, high):
        raise fields.error("max_patches", f"must be at most {max(1, high)}, got {most}")
    tiles = Tiles(fields.integer("min_patches", default=1, high=most), most)
    return msgspec.structs.replace(processor, size=size, tiles=tiles)


def _fitted_size(fields: JsonFields, factor: int) -> AnySize:
    """Return the sizes that Pixtral's processor makes."""
    most, longest = math.isqrt(MAX_PIXELS) // factor * factor, 1024
    if fields.has("size"):
        longest = fields.child("size").integer("longest_edge", high=most)
    side = math.ceil(longest / factor) * factor
    return AnySize(factor, 1, min(side**2, MAX_PIXELS), longest)


def _of_one_size(
    fields: JsonFields, processor: ImageProcessor, image_size: int, *, is_gemma: bool
) -> ImageProcessor:
    """Return the processor with the steps that make images of one size."""
    size = _size(fields, "size", default=(224, 224) if is_gemma else 224)
    crop = None
    if fields.boolean("do_center_crop", default=not is_gemma):
        crop = _size(fields, "crop_size")
    processor = msgspec.structs.replace(
        processor,
        shortest_edge=size if isinstance(size, int) else None,
        size=(0, 0) if isinstance(size, int) else size,
        crop=(crop, crop) if isinstance(crop, int) else crop,
    )
    if not processor.makes(image_size, image_size):
        key = "crop_size" if processor.crop else "size"
        raise fields.error(key, f"must be the encoder's {image_size} x {image_size}")
    return processor


def _any_size(fields: JsonFields, factor: int) -> AnySize:
    """Return the sizes that Qwen's processor makes; old files have other keys."""
    limits = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}
    for (key, default), edge in zip(
        list(limits.items()), ("shortest_edge", "longest_edge"), strict=True
    ):
        holder, name = fields, key
        if not fields.has(key) and fields.has("size"):
            holder, name = fields.child("size"), edge
        limits[key] = holder.integer(name, default=default)
    merge = fields.integer("merge_size", default=2)
    if (found := fields.integer("patch_size", default=14) * merge) != factor:
        raise fields.error("patch_size", f"times merge_size must be {factor}, got {found}")
    if factor**2 > MAX_PIXELS:
        most = math.isqrt(MAX_PIXELS)
        raise fields.error("patch_size", f"times merge_size must be at most {most}, got {factor}")
    if limits["min_pixels"] > limits["max_pixels"]:
        raise fields.error("min_pixels", f"must be at most max_pixels, got {limits['min_pixels']}")
    return AnySize(
        factor, min(limits["min_pixels"], MAX_PIXELS), min(limits["max_pixels"], MAX_PIXELS)
    )


def _filled_size(fields: JsonFields, factor: int) -> AnySize:
    """Return the sizes that Gemma 4's processor makes."""
    merge = fields.integer("pooling_kernel_size", default=3)
    if (found := fields.integer("patch_size", default=16) * merge) != factor:
        raise fields.error("patch_size", f"times pooling_kernel_size must be {factor}, got {found}")
    most = fields.integer("max_soft_tokens", default=280, high=MAX_PIXELS // factor**2)
    return AnySize(factor, 1, most * factor**2, fills=True)


_READ_ANY_SIZE = {QWEN: _any_size, PIXTRAL: _fitted_size, GEMMA4: _filled_size}


def has_image_processor(path: Path) -> bool:
    """Whether a model's directory says how pictures are prepared."""
    both = path / PROCESSOR_FILE
    if (path / PREPROCESSOR_FILE).is_file() or not both.is_file():
        return (path / PREPROCESSOR_FILE).is_file()
    return JsonFields(both, read_json_object(both)).has("image_processor")


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


def _size(
    fields: JsonFields, key: str, *, default: int | tuple[int, int] | None = None
) -> int | tuple[int, int]:
    """Return the length of the shorter side, or height and width."""
    if not fields.has(key) and default is not None:
        return default
    if isinstance(dict(fields.items()).get(key), int):  # of old files
        return fields.integer(key, high=_MAX_SIDE)
    own = fields.child(key)
    if own.has("shortest_edge"):
        return own.integer("shortest_edge", high=_MAX_SIDE)
    return own.integer("height", high=_MAX_SIDE), own.integer("width", high=_MAX_SIDE)


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
