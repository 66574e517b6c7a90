"""A process that decodes pictures for a frontend: `python -m lightserve.picture_process`.

Decoders read what strangers send, so the kernel bounds the memory and the time that one picture may
take. A process that goes beyond is gone, and with it no more than that picture.

Standard input is a socket. It brings pictures and takes a `Decoded` for each, in order: four bytes
of length, then msgpack. The process ends with its input.
"""

from __future__ import annotations

import os
import sys
import warnings
from io import BytesIO
from typing import NoReturn

import msgspec
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from lightserve.grammar_process import (
    OUT_OF_MEMORY,
    address_space,
    begin_process,
    limit_cpu,
    limit_memory,
    read_frame,
    trim,
    write_frame,
)
from lightserve.models.image_processor import MAX_RATIO, ImageProcessor, Tiles
from lightserve.structured import yield_to_others

COMMAND = (sys.executable, "-P", "-m", "lightserve.picture_process")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS = 40_000_000
"""Pixels of a picture as it is in its file: four bytes each in Pillow, and a few copies."""
MAX_SIDE = 32_768
"""Pixels of a side behind resizing: narrow pictures become long ones."""
MAX_WORK_BYTES = 1024 * 1024 * 1024
"""Memory for one picture, beside the memory of the process at its start."""
MAX_SCANS = 64
"""Scans of a JPEG: a progressive one has about ten, and each costs as much as the whole picture."""
MAX_CPU_S = 10
"""Processor time of one picture; the kernel counts whole seconds: it may be one more."""
_NICENESS = 5
"""A picture stands before the first token of its own request, and must not hold up others' tokens:
beside two threads that compute on two cores, one of 640 x 480 takes 25 ms (15 with the priority of
all, 54 with that of grammars), one of 12 million pixels 0.3 s (0.2, 0.7)."""
_BEGIN_OF_SCAN = b"\xff\xda"
"""In the data of a scan such bytes stand apart, by a zero."""


class Given(msgspec.Struct, frozen=True, array_like=True):
    """A picture's file, and what is to be made of it."""

    data: bytes
    processor: ImageProcessor
    is_measured: bool = False
    """Whether only its size is wanted: then no pixel is decoded."""


class Decoded(msgspec.Struct, frozen=True, array_like=True):
    """A picture as the encoder reads it."""

    complaint: str = ""
    """The fault; empty: there is none."""
    height: int = 0
    width: int = 0
    pixels: bytes = b""
    """uint8 [height, width, 3]; empty where only the size was wanted."""


ENCODER = msgspec.msgpack.Encoder()
Image.MAX_IMAGE_PIXELS = None  # MAX_PIXELS is the limit


def main() -> NoReturn:
    """Decode what comes until no more does."""
    begin_process("pictures")
    yield_to_others(_NICENESS)
    warnings.simplefilter("ignore")
    Image.preinit()
    Image.init()
    source, sink = os.fdopen(0, "rb"), os.fdopen(os.dup(0), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # decoders write there what they find
    limit_memory(address_space() + MAX_WORK_BYTES)
    decoder = msgspec.msgpack.Decoder(Given)
    try:
        while (data := read_frame(source)) is not None:
            limit_cpu(MAX_CPU_S)
            given = decoder.decode(data)
            made = decode(given.data, given.processor, is_measured=given.is_measured)
            write_frame(sink, ENCODER.encode(made))
            trim()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    os._exit(0)


def decode(data: bytes, processor: ImageProcessor, *, is_measured: bool = False) -> Decoded:
    """Return a picture as the encoder reads it, or what is wrong with it. Passes MemoryError on.

    `is_measured`: without pixels, by the file's head alone, which need not be all that turns it.
    """
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as picture:
            width, height = picture.size
            if width * height > MAX_PIXELS:
                return Decoded(f"must have at most {MAX_PIXELS} pixels, got {width} x {height}")
            if picture.format in ("JPEG", "MPO") and data.count(_BEGIN_OF_SCAN) > MAX_SCANS:
                return Decoded(f"must have at most {MAX_SCANS} scans")
            if is_measured:
                exif = Image.Image.getexif(picture)  # a PNG's own would decode it to look behind
                is_turned = exif.get(ExifTags.Base.Orientation) in range(5, 9)
                return _measured(*((height, width) if is_turned else (width, height)), processor)
            picture.load()
            return _processed(_in_rgb(ImageOps.exif_transpose(picture)), processor)
    except UnidentifiedImageError:
        return Decoded(f"must be a picture of the kind {', '.join(FORMATS)}")
    except MemoryError:
        raise
    except Exception:  # decoders raise anything
        return Decoded("is broken or cut off")


def _in_rgb(picture: Image.Image) -> Image.Image:
    """Return it in red, green and blue of 8 bits, as transformers converts it."""
    if picture.mode.startswith("I;16"):  # Pillow would clip its values, not scale them
        picture = picture.point(lambda value: value / 256).convert("L")
    return picture if picture.mode == "RGB" else picture.convert("RGB")


def _measured(width: int, height: int, processor: ImageProcessor) -> Decoded:
    """Return the size that `_processed` makes of another, or its complaint."""
    if processor.background is not None:
        width = height = max(width, height)
    if (tiles := processor.tiles) is not None:
        rows, columns = tiles.grid(height, width, processor.size[0] * processor.size[1])
        count = rows * columns
        return Decoded("", processor.size[0] * (count + (count > 1)), processor.size[1])
    sides = _resized(width, height, processor)
    return sides if isinstance(sides, Decoded) else Decoded("", *(processor.crop or sides))


def _processed(picture: Image.Image, processor: ImageProcessor) -> Decoded:
    if processor.background is not None and picture.width != picture.height:
        side = max(picture.size)
        square = Image.new("RGB", (side, side), processor.background)
        square.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
        picture = square
    if processor.tiles is not None:
        return _tiled(picture, processor, processor.tiles)
    sides = _resized(*picture.size, processor)
    if isinstance(sides, Decoded):
        return sides
    picture = picture.resize(sides[::-1], Image.Resampling(processor.resample))
    if processor.crop is not None:
        picture = _cropped(picture, *processor.crop)
    return Decoded("", picture.height, picture.width, picture.tobytes())


def _resized(width: int, height: int, processor: ImageProcessor) -> tuple[int, int] | Decoded:
    """Return height and width to which a picture without tiles is resized, or a complaint."""
    if processor.any_size is not None:
        sides, most = processor.any_size.of(height, width), MAX_RATIO
    elif (edge := processor.shortest_edge) is not None:
        other = int(edge * max(width, height) / min(width, height))
        sides, most = ((other, edge) if width <= height else (edge, other)), MAX_SIDE // edge
        sides = sides if other <= MAX_SIDE else None
    else:
        return processor.size
    return sides or Decoded(
        f"must be at most {most} times as long as it is wide, got {width} x {height}"
    )


def _tiled(picture: Image.Image, processor: ImageProcessor, tiles: Tiles) -> Decoded:
    """Return the tiles of a picture, below each other."""
    height, width = processor.size
    rows, columns = tiles.grid(picture.height, picture.width, height * width)
    resample = Image.Resampling(processor.resample)
    whole = picture.resize((columns * width, rows * height), resample)
    corners = [(x * width, y * height) for y in range(rows) for x in range(columns)]
    parts = [whole.crop((x, y, x + width, y + height)) for x, y in corners]
    if len(parts) > 1:
        parts.append(picture.resize((width, height), resample))
    pixels = b"".join(part.tobytes() for part in parts)
    return Decoded("", height * len(parts), width, pixels)


def _cropped(picture: Image.Image, height: int, width: int) -> Image.Image:
    """Return the middle of a picture; beyond its edges it is black."""
    # Where it is too small, transformers' halves are rounded up before it is cut.
    left, top = _first(picture.width, width), _first(picture.height, height)
    return picture.crop((left, top, left + width, top + height))


def _first(length: int, wanted: int) -> int:
    """Return where the middle begins; negative: so far before a picture's edge."""
    return (length - wanted) // 2


if __name__ == "__main__":
    main()
