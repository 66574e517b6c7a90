"""Pictures become what transformers' processors make of them, or a clear complaint."""

from __future__ import annotations

import struct
import sys
import zlib
from io import BytesIO
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image
from support.tiny_vision import PROCESSOR, data_url, file_of, picture
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from lightserve.errors import InvalidRequest
from lightserve.frontend.pictures import Picture, _data_of, _Process
from lightserve.models.image_processor import AnySize, ImageProcessor
from lightserve.picture_process import MAX_PIXELS, Given, decode

MEAN, STD = tuple(PROCESSOR["image_mean"]), tuple(PROCESSOR["image_std"])
SIZES = [(40, 30), (28, 28), (1, 1), (27, 400), (336, 28), (20, 21), (501, 333)]
"""Width and height."""


def clip(side: int, **changes: Any) -> ImageProcessor:
    fields: dict[str, Any] = {
        "background": None,
        "shortest_edge": side,
        "size": (0, 0),
        "resample": 3,
        "crop": (side, side),
        "scale": 1 / 255,
        "mean": MEAN,
        "std": STD,
    }
    return ImageProcessor(**(fields | changes))


def values(made: Any, processor: ImageProcessor) -> np.ndarray:
    """Return what the encoder computes with, float32 [3, height, width]."""
    assert made.complaint == ""
    pixels = np.frombuffer(made.pixels, np.uint8).reshape(made.height, made.width, 3)
    scaled = pixels.astype(np.float32) * np.float32(processor.scale)
    normal = (scaled - np.float32(processor.mean)) / np.float32(processor.std)
    return normal.transpose(2, 0, 1)


@pytest.mark.parametrize("side", [28, 35, 336])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_pixels_are_those_of_transformers(side: int, size: tuple[int, int]) -> None:
    image = picture(size[0], *size)
    own = {**PROCESSOR, "size": {"shortest_edge": side}}
    own["crop_size"] = {"height": side, "width": side}
    expected = CLIPImageProcessorPil(**own)(image)["pixel_values"][0]
    made = values(decode(file_of(image), clip(side)), clip(side))
    assert np.abs(made - expected).max() < 1e-6


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_squares_are_those_of_transformers(size: tuple[int, int]) -> None:
    image = picture(size[0], *size)
    own = {**PROCESSOR, "do_pad": True}
    del own["image_processor_type"]
    expected = LlavaImageProcessorPil(**own)(image)["pixel_values"][0]
    grey = tuple(int(value * 255) for value in MEAN)
    processor = clip(28, background=grey)
    made = values(decode(file_of(image), processor), processor)
    assert np.abs(made - expected).max() < 1e-6


@pytest.mark.parametrize(
    ("factor", "limits"), [(28, (56 * 56, 28 * 28 * 20)), (32, (65_536, 300_000)), (14, (1, 999))]
)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_any_size_is_that_of_transformers(
    size: tuple[int, int], factor: int, limits: tuple[int, int]
) -> None:
    image = picture(size[0], *size)
    own = {"min_pixels": limits[0], "max_pixels": limits[1], "patch_size": factor // 2}
    expected = Qwen2VLImageProcessorPil(image_mean=list(MEAN), image_std=list(STD), **own)(image)
    _, rows, columns = np.array(expected["image_grid_thw"])[0].tolist()
    processor = clip(28, shortest_edge=None, crop=None, any_size=AnySize(factor, *limits))
    made = values(decode(file_of(image), processor), processor)
    assert made.shape == (3, rows * factor // 2, columns * factor // 2)
    assert processor.makes(*made.shape[1:])
    patch = factor // 2
    shape = (rows // 2, columns // 2, 2, 2, 3, 2, patch, patch)
    frames = np.array(expected["pixel_values"]).reshape(shape).transpose(5, 4, 0, 2, 6, 1, 3, 7)
    for frame in frames.reshape(2, *made.shape):
        assert np.abs(made - frame).max() < 1e-6


def test_largest_images() -> None:
    processor = clip(28, shortest_edge=None, crop=None, any_size=AnySize(28, 784, 28 * 28 * 30))
    assert processor.largest(10**9) == (140, 140)
    assert processor.largest(28 * 28 * 5) == (56, 56)
    assert processor.largest(1) == (28, 28)
    assert clip(336).largest(1) == (336, 336)
    assert not processor.makes(28, 30) and not processor.makes(0, 28)
    assert not processor.makes(2800, 2800) and processor.makes(28, 56)


def test_a_size_of_both_sides() -> None:
    image = picture(1, 50, 20)
    own = {**PROCESSOR, "size": {"height": 21, "width": 35}, "do_center_crop": False}
    expected = CLIPImageProcessorPil(**own)(image)["pixel_values"][0]
    processor = clip(28, shortest_edge=None, size=(21, 35), crop=None)
    made = values(decode(file_of(image), processor), processor)
    assert made.shape == (3, 21, 35) and np.abs(made - expected).max() < 1e-6


def test_kinds_of_files() -> None:
    image = picture(3)
    expected = decode(file_of(image), clip(28)).pixels
    assert decode(file_of(image, "WEBP", lossless=True), clip(28)).pixels == expected
    jpeg = decode(file_of(image, "JPEG", quality=95), clip(28))
    assert _distance(jpeg.pixels, expected) < 4
    frames = [image.quantize(64), picture(9).quantize(64)]
    gif = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert _distance(decode(gif, clip(28)).pixels, expected) < 12  # the first, in 64 colours


def test_what_cameras_and_programs_write() -> None:
    image = picture(4, 60, 40)
    plain = decode(file_of(image), clip(28)).pixels
    turned = Image.Exif()
    turned[0x0112] = 6  # to be turned by 90 degrees to the right
    side_on = image.transpose(Image.Transpose.ROTATE_90)
    assert decode(file_of(side_on, exif=turned), clip(28)).pixels == plain
    assert _distance(decode(file_of(image.convert("CMYK"), "JPEG"), clip(28)).pixels, plain) < 6
    grey = decode(file_of(image.convert("L")), clip(28)).pixels
    deep = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    assert _distance(decode(file_of(deep), clip(28)).pixels, grey) < 1
    clear = image.copy()
    clear.putalpha(77)
    assert decode(file_of(clear), clip(28)).pixels == plain  # as transformers: colours are kept
    assert len(decode(file_of(image.quantize(16)), clip(28)).pixels) == 3 * 28 * 28


def _distance(first: bytes, second: bytes) -> float:
    """Return the mean difference of two lists of pixels."""
    pair = [np.frombuffer(data, np.uint8).astype(float) for data in (first, second)]
    assert len(pair[0]) == len(pair[1])
    return float(np.abs(pair[0] - pair[1]).mean())


def png_of(width: int, height: int) -> bytes:
    """Return a PNG that says it is so large, and has one row."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1 + 3 * width))
    parts = [(b"IHDR", head), (b"IDAT", rows), (b"IEND", b"")]
    data = b"\x89PNG\r\n\x1a\n"
    for kind, body in parts:
        data += struct.pack(">I", len(body)) + kind + body
        data += struct.pack(">I", zlib.crc32(kind + body))
    return data


def test_narrow_pictures_of_any_size() -> None:
    processor = clip(28, shortest_edge=None, crop=None, any_size=AnySize(28, 784, 10**6))
    complaint = decode(file_of(picture(1, 2, 401)), processor).complaint
    assert complaint == "must be at most 200 times as long as it is wide, got 2 x 401"
    assert not decode(file_of(picture(1, 2, 400)), processor).complaint


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "must be a picture of the kind PNG, JPEG, WEBP, GIF"),
        (b"no picture", "must be a picture of the kind"),
        (file_of(picture(1), "BMP"), "must be a picture of the kind"),
        (file_of(picture(1))[:-200], "is broken or cut off"),
        (file_of(picture(1, 400, 300), "JPEG")[:600], "is broken or cut off"),
        (png_of(30_000, 30_000), f"must have at most {MAX_PIXELS} pixels, got 30000 x 30000"),
        (file_of(picture(1, 2, 4000)), "must be at most 1170 times as long as it is wide"),
    ],
    ids=["empty", "text", "bmp", "short", "short-jpeg", "huge", "narrow"],
)
def test_complaints(data: bytes, complaint: str) -> None:
    assert decode(data, clip(28)).complaint.startswith(complaint)


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        (
            "https://example.org/a.png",
            "must be a data URL, such as data:image/png;base64,…: this server fetches no images (-",
        ),
        ("data:image/png;base64", "must be a data URL, such as"),
        ("data:application/pdf;base64,AAAA", "of one of image/png, image/jpeg"),
        ("data:image/png,AAAA", "must be a data URL in base64"),
        ("data:image/png;base64,AA*A", "whose base64 is valid"),
    ],
)
def test_complaints_of_urls(url: str, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint.replace("(", r"\(")) as caught:
        _data_of(Picture(url, "messages[0].content[1].image_url"))
    assert caught.value.param == "messages[0].content[1].image_url"
    assert str(caught.value).startswith("messages[0].content[1].image_url must be")


def test_a_data_url() -> None:
    data = file_of(picture(2))
    for kind in ("image/png", "IMAGE/JPG", "image/webp"):
        assert _data_of(Picture(data_url(data, kind), "x")) == data


def test_the_process_survives_its_pictures() -> None:
    process = _Process()
    try:
        good = Given(file_of(picture(1)), clip(28))
        expected = decode(good.data, good.processor)
        assert process.decode(good) == expected
        bad = msgspec.structs.replace(good, data=b"no picture")
        assert process.decode(bad).complaint and process.decode(good) == expected
        running = process._running
        assert running is not None
        pid = running[0].pid
        running[0].kill()  # as the kernel does for want of memory
        running[0].wait()
        with pytest.raises(Exception, match="cannot be decoded at the moment"):
            process.decode(good)
        assert process.decode(good) == expected
        assert process._running is not None and process._running[0].pid != pid
    finally:
        process.close()


def test_a_picture_that_takes_too_much_memory_ends_the_process_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = Image.new("RGB", (6000, 6000))
    file = BytesIO()
    large.save(file, "PNG", compress_level=1)
    command = (
        "from lightserve import picture_process as p\n"
        "p.MAX_WORK_BYTES = 100 * 1024 * 1024\n"
        "p.main()\n"
    )

    monkeypatch.setattr(
        "lightserve.frontend.pictures.COMMAND", (sys.executable, "-P", "-c", command)
    )
    process = _Process()
    try:
        made = process.decode(Given(file.getvalue(), clip(28)))
        assert "MiB of memory to decode" in made.complaint
        small = Given(file_of(picture(1)), clip(28))
        assert process.decode(small).complaint == ""
    finally:
        process.close()
