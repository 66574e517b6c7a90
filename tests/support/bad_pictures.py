"""Files of pictures as strangers send them: of every kind, broken, cut off, too large, or none."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from io import BytesIO

import numpy as np
from PIL import Image

EXIF_ORIENTATION = 0x0112
MODES = {
    "PNG": ("RGB", "RGBA", "L", "LA", "P", "1", "I;16"),
    "JPEG": ("RGB", "L", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L"),
    **dict.fromkeys(("BMP", "TIFF", "ICO", "PPM", "PDF", "EPS", "TGA", "JPEG2000"), ("RGB",)),
}
SIZES = ((1, 1), (40, 30), (3, 200), (640, 480))
OTHERS = (
    b"",
    b"\x00" * 5000,
    b"no picture",
    b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) (r) file\n",
    b"GIF89a",
    b"\x89PNG\r\n\x1a\n",
    b"RIFF\xff\xff\xff\xffWEBPVP8X\x0a\x00\x00\x00" + b"\xff" * 10,
)


def bad_pictures(count: int, seed: int) -> Iterator[bytes]:
    """Yield files; about a third of them are whole."""
    rng = np.random.default_rng(seed)
    whole = list(_whole(rng))
    changes: tuple[Callable[[bytes, np.random.Generator], bytes], ...] = (
        *(_as_it_is, _cut, _cut, _flipped, _flipped),
        *(_moved, _with_more, _with_sizes, _other),
    )
    for _ in range(count):
        data = whole[int(rng.integers(len(whole)))]
        yield changes[int(rng.integers(len(changes)))](data, rng)


def _whole(rng: np.random.Generator) -> Iterator[bytes]:
    for width, height in SIZES:
        noise = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for kind, modes in MODES.items():
            for mode in modes:
                source = noise.convert("L").convert("I;16") if mode == "I;16" else noise
                yield _file(source.convert(mode), kind)
        exif = Image.Exif()
        for orientation in range(10):  # two of these are none
            exif[EXIF_ORIENTATION] = orientation
            yield _file(noise, "JPEG", exif=exif, progressive=bool(orientation % 2))
        frames = [noise.rotate(90 * n).convert("P") for n in range(4)]
        for kind in ("GIF", "WEBP", "PNG"):  # animated
            yield _file(frames[0], kind, save_all=True, append_images=frames[1:])
    yield _file(Image.new("L", (6300, 6300)), "PNG")  # 40 million pixels in 40 KB
    yield _file(Image.new("P", (6300, 6300)), "GIF")
    yield _file(Image.new("RGB", (20_000, 60)), "PNG")
    yield png_of(30_000, 30_000)


def _file(picture: Image.Image, kind: str, **options: object) -> bytes:
    file = BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def png_of(width: int, height: int) -> bytes:
    """Return a file that claims a size and has no pixels."""
    data = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    for kind, body in ((b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")):
        data += struct.pack(">I", len(body)) + kind + body
        data += struct.pack(">I", zlib.crc32(kind + body))
    return data


def _as_it_is(data: bytes, rng: np.random.Generator) -> bytes:
    return data


def _cut(data: bytes, rng: np.random.Generator) -> bytes:
    return data[: int(rng.integers(len(data)))]


def _flipped(data: bytes, rng: np.random.Generator) -> bytes:
    values = np.frombuffer(data, dtype=np.uint8).copy()
    first = int(rng.integers(2))  # heads say most: half of the changes are there
    most = len(values) if first else min(len(values), 64)
    places = rng.integers(most, size=1 + len(values) // 500)
    values[places] = rng.integers(0, 256, len(places))
    return values.tobytes()


def _moved(data: bytes, rng: np.random.Generator) -> bytes:
    """Return it with a stretch twice, or left out."""
    first, second = sorted(int(n) for n in rng.integers(len(data), size=2))
    return data[:second] + data[first:] if rng.integers(2) else data[:first] + data[second:]


def _with_more(data: bytes, rng: np.random.Generator) -> bytes:
    return data + rng.bytes(int(rng.integers(1, 5000)))


def _with_sizes(data: bytes, rng: np.random.Generator) -> bytes:
    """Return it with large numbers somewhere in its head."""
    place = int(rng.integers(8, 40))
    number = int(rng.choice([0, 0x7FFF, 0xFFFF, 30_000, 40_000_001, 0x7FFF_FFFF, 0xFFFF_FFFF]))
    order = ">I" if rng.integers(2) else "<I"
    return data[:place] + struct.pack(order, number) + data[place + 4 :]


def _other(data: bytes, rng: np.random.Generator) -> bytes:
    return OTHERS[int(rng.integers(len(OTHERS)))]
