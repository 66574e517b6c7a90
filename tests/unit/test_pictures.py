"""Pictures become what transformers' processors make of them, or a clear complaint."""

from __future__ import annotations

import asyncio
import errno
import json
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil
import pytest
from PIL import Image
from support.bad_pictures import bad_pictures, png_of
from support.fake_router import BOOT_ID, FakeRouter, Setup, eventually, frontend, says
from support.tiny_vision import (
    FILLING,
    NUM_TOKENS,
    PLACEHOLDER,
    PROCESSOR,
    SIDE,
    data_url,
    file_of,
    picture,
    write_llava,
    write_vision_model,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from lightserve.batches.process import InnerRoutes
from lightserve.batches.records import LeasedLine
from lightserve.batches.runner import Room
from lightserve.config import ServeConfig
from lightserve.errors import InvalidRequest, ProtocolError
from lightserve.frontend.errors import RequestFailed
from lightserve.frontend.pictures import Picture, PictureReader, _data_of, _Process
from lightserve.messages.frontend_router import (
    ErrorCode,
    FrontendMessage,
    MaySubmit,
    RequestDelta,
    RouterWelcome,
    Verdict,
)
from lightserve.messages.images import MAX_IMAGES, check_images
from lightserve.messages.images import Image as SentImage
from lightserve.metrics.catalogue import IMAGES
from lightserve.metrics.recording import Recorder
from lightserve.models.config import load_model_config
from lightserve.models.image_processor import AnySize, ImageProcessor, Tiles, clip_processor
from lightserve.picture_process import MAX_PIXELS, MAX_SCANS, MAX_WORK_BYTES, Given, decode
from lightserve.turn_threads import WHOSE
from lightserve.types import FinishReason

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
def test_a_model_without_a_processors_file_stretches(size: tuple[int, int]) -> None:
    """The first Qwen-VL, whose authors' program resizes to a square and has CLIP's colours."""
    image, sides = picture(size[0], *size), {"height": 448, "width": 448}
    own = {**PROCESSOR, "size": sides, "do_center_crop": False}
    expected = CLIPImageProcessorPil(**own)(image)["pixel_values"][0]
    made = values(decode(file_of(image), clip_processor(448)), clip_processor(448))
    assert made.shape == (3, 448, 448) and np.abs(made - expected).max() < 1e-6


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


@pytest.mark.parametrize(("factor", "longest"), [(14, 70), (28, 1540), (16, 100)])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_fitted_sizes_are_those_of_transformers(
    size: tuple[int, int], factor: int, longest: int
) -> None:
    image = picture(size[0], *size)
    own: dict[str, Any] = {"size": {"longest_edge": longest}}
    own |= {"patch_size": {"height": factor, "width": factor}}
    (expected,) = PixtralImageProcessorPil(**own)(image)["pixel_values"]
    any_size = AnySize(factor, 1, 4_194_304, longest)
    processor = clip(28, shortest_edge=None, crop=None, any_size=any_size)
    made = values(decode(file_of(image), processor), processor)
    assert processor.makes(*made.shape[1:]) and np.abs(made - expected).max() < 1e-6


@pytest.mark.parametrize(("patch", "merge", "most"), [(16, 3, 280), (16, 3, 70), (7, 2, 17)])
@pytest.mark.parametrize("size", [*SIZES, (700, 5), (7, 640), (1, 200)], ids=str)
def test_filled_sizes_are_those_of_transformers(
    size: tuple[int, int], patch: int, merge: int, most: int
) -> None:
    """As many pixels as the budget lets, also of narrow pictures, of which a side rounds to 0."""
    image, factor = picture(size[0], *size), patch * merge
    own = {"patch_size": patch, "pooling_kernel_size": merge, "max_soft_tokens": most}
    expected = Gemma4ImageProcessorPil(**own)(image, input_data_format="channels_last")
    (num_tokens,), (flat,) = expected["num_soft_tokens_per_image"], expected["pixel_values"]
    halves = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    any_size = AnySize(factor, 1, most * factor**2, fills=True)
    processor = clip(28, shortest_edge=None, crop=None, any_size=any_size, **halves)
    made = values(decode(file_of(image), processor), processor)
    assert processor.makes(*made.shape[1:]) and num_tokens == made[0].size // factor**2
    rows, columns = (side // patch for side in made.shape[1:])
    by_patch = flat[: rows * columns].reshape(rows, columns, patch, patch, 3)
    whole = by_patch.transpose(4, 0, 2, 1, 3).reshape(made.shape)
    assert np.abs(made - 2 * (whole - 0.5)).max() < 1e-6  # as the encoder begins
    assert processor.largest(10**9) == (factor, most * factor)
    assert processor.largest(1) == (factor, factor)


def test_filled_sizes_that_are_asked_for(tmp_path: Path) -> None:
    vision = load_model_config(write_vision_model(tmp_path, "gemma4")).vision
    assert vision is not None and vision.processor.any_size is not None
    own, factor = vision.processor, vision.factor
    assert own.any_size == AnySize(factor, 1, FILLING["max_soft_tokens"] * factor**2, fills=True)
    data = file_of(picture(1, 400, 300))

    def asked(**options: Any) -> tuple[int, int]:
        made = decode(data, Picture("", "x", **options).processor(own))
        return made.height // factor, made.width // factor

    assert asked() == asked(detail="high") == asked(detail="low") == (3, 4)
    assert asked(max_pixels=6 * factor**2) == (2, 2)
    assert asked(max_pixels=factor**2) == asked(max_pixels=1) == (1, 1)
    with pytest.raises(InvalidRequest, match="x must have no min_pixels: the model reads each"):
        asked(min_pixels=1)
    with pytest.raises(InvalidRequest, match="of at most the model's 3332, got 3333"):
        asked(max_pixels=3333)


def test_fitted_sizes_keep_what_is_asked() -> None:
    own = AnySize(14, 1, 4_194_304, 70)
    assert own.of(70, 30) == (70, 42) and own.of(2, 400) == (14, 70) and own.of(2, 401) is None
    smaller = msgspec.structs.replace(own, max_pixels=14 * 14 * 8)
    assert smaller.of(70, 70) == (28, 28) and smaller.of(28, 50) == (28, 56)
    assert msgspec.structs.replace(own, min_pixels=14 * 14 * 4).of(14, 14) == (28, 28)


@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 4), (3, 7), (1, 12)])
@pytest.mark.parametrize("size", [*SIZES, (56, 84), (90, 60), (30, 200)], ids=str)
def test_tiles_are_those_of_transformers(size: tuple[int, int], least: int, most: int) -> None:
    image = picture(size[0], *size)
    own: dict[str, Any] = {"size": {"height": 28, "width": 28}}
    own |= {"min_patches": least, "max_patches": most}
    expected = GotOcr2ImageProcessorPil(**own, crop_to_patches=True)(image)["pixel_values"]
    processor = clip(28, shortest_edge=None, size=(28, 28), crop=None, tiles=Tiles(least, most))
    made = values(decode(file_of(image), processor), processor)
    below = np.concatenate(list(expected), axis=1)
    assert processor.makes(*made.shape[1:]) and not processor.makes(made.shape[1] + 1, 28)
    assert made.shape == below.shape and np.abs(made - below).max() < 1e-6
    assert processor.largest(28 * 28 * 3)[0] == 28 * min(3, most if most == 1 else most + 1)
    assert processor.largest(1) == (28, 28) and not processor.makes(28 * 14, 28)


def test_a_picture_of_low_detail_is_one_tile() -> None:
    own = clip(28, shortest_edge=None, size=(28, 28), crop=None, tiles=Tiles(1, 12))
    data = file_of(picture(1, 300, 100))
    low = Picture("", "image", detail="low").processor(own)
    assert decode(data, low).height == 28 and own.makes(28, 28)
    assert Picture("", "image", detail="high").processor(own) == own
    assert decode(data, own).height == 28 * 13
    with pytest.raises(InvalidRequest, match="must have neither min_pixels"):
        Picture("", "image", detail="low", max_pixels=99).processor(own)


def test_largest_images() -> None:
    processor = clip(28, shortest_edge=None, crop=None, any_size=AnySize(28, 784, 28 * 28 * 30))
    assert processor.largest(10**9) == (140, 140)
    assert processor.largest(28 * 28 * 5) == (56, 56)
    assert processor.largest(1) == (28, 28)
    assert clip(336).largest(1) == (336, 336)
    assert not processor.makes(28, 30) and not processor.makes(0, 28)
    assert not processor.makes(4200, 4200) and processor.makes(28, 56)


def test_a_size_of_both_sides() -> None:
    image = picture(1, 50, 20)
    own = {**PROCESSOR, "size": {"height": 21, "width": 35}, "do_center_crop": False}
    expected = CLIPImageProcessorPil(**own)(image)["pixel_values"][0]
    processor = clip(28, shortest_edge=None, size=(21, 35), crop=None)
    made = values(decode(file_of(image), processor), processor)
    assert made.shape == (3, 21, 35) and np.abs(made - expected).max() < 1e-6


def test_a_jpeg_has_few_scans() -> None:
    """Each scan of a progressive file is as much work as the whole picture."""
    data = file_of(picture(1, 60, 40), "JPEG", progressive=True)
    assert decode(data, clip(28)).complaint == ""
    last, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    bomb = data[:end] + data[last:end] * MAX_SCANS + data[end:]
    assert decode(bomb, clip(28)).complaint == f"must have at most {MAX_SCANS} scans"


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


@pytest.mark.parametrize(
    ("photo", "sizes", "expected"),
    [  # 12 and 30 megapixels, the limits of Qwen2-VL's files and of Qwen3-VL's
        ((4032, 3024), AnySize(28, 3136, 12_845_056), (3024, 4032)),
        ((6708, 4472), AnySize(32, 65_536, 16_777_216), (3328, 4992)),
    ],
)
def test_photos_are_as_large_as_a_model_reads_them(
    photo: tuple[int, int], sizes: AnySize, expected: tuple[int, int]
) -> None:
    processor = clip(28, shortest_edge=None, crop=None, any_size=sizes)
    own = smart_resize(photo[1], photo[0], sizes.factor, sizes.min_pixels, sizes.max_pixels)
    assert own == expected
    file = file_of(Image.new("RGB", photo, (9, 90, 200)), "JPEG")
    process = _Process()
    try:
        made = process.decode(Given(file, processor))
    finally:
        process.close()
    assert not made.complaint and (made.height, made.width) == own
    check_images([of_size(*own)], 16_384)
    with pytest.raises(ProtocolError, match="bytes of them"):
        check_images([of_size(4096, 4097)], 16_384)


def of_size(height: int, width: int) -> SentImage:
    return SentImage(0, 16_384, height, width, bytes(3 * height * width), bytes(32))


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
        assert psutil.Process(pid).nice() == min(19, psutil.Process().nice() + 5)
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


def test_bad_files_end_no_process() -> None:
    """Each is an image or a complaint, in bounded memory; so is the good one behind them."""
    process, peak = _Process(), 0
    good = Given(file_of(picture(1)), clip(28))
    expected = decode(good.data, good.processor)
    try:
        assert process.decode(good) == expected
        assert process._running is not None
        pid, num_images = process._running[0].pid, 0
        for data in bad_pictures(500, seed=5):
            made = process.decode(Given(data, clip(28)))
            if not made.complaint:
                num_images += 1
                assert (made.height, made.width, len(made.pixels)) == (28, 28, 3 * 28 * 28)
            assert process._running is not None and process._running[0].pid == pid, made.complaint
        assert 100 < num_images < 400
        peak = psutil.Process(pid).memory_info().rss
        assert peak < MAX_WORK_BYTES // 4 and process.decode(good) == expected
    finally:
        process.close()


def test_a_process_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: Any, **_more: Any) -> Any:
        raise OSError(errno.EAGAIN, "no more processes")

    process = _Process()
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", refuse)
        before = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(RequestFailed) as caught:
            process.decode(Given(b"", clip(28)))
        assert caught.value.status == 503 and "no more" not in str(caught.value)
        assert len(list(Path("/proc/self/fd").iterdir())) == before
    try:
        assert process.decode(Given(file_of(picture(1)), clip(28))).complaint == ""
    finally:
        process.close()


def test_sizes_that_are_asked_for() -> None:
    any_size = AnySize(factor=28, min_pixels=28 * 28, max_pixels=1_000_000)
    own = clip(28, any_size=any_size, shortest_edge=None, crop=None)

    def asked(**options: Any) -> tuple[int, int]:
        found = Picture("", "messages[0].content[0].image_url", **options).processor(own)
        made = decode(file_of(picture(1, 2000, 1000)), found)
        assert made.height % 28 == made.width % 28 == 0
        return made.height, made.width

    assert asked() == asked(detail="auto") == asked(detail="high") == (700, 1400)
    assert asked(detail="low") == (336, 700)
    assert asked(max_pixels=200_000) == (308, 616)
    assert asked(detail="low", max_pixels=400_000) == (420, 868)
    assert asked(max_pixels=28 * 28) == (28, 28)
    small = decode(file_of(picture(1, 56, 56)), Picture("", "x", min_pixels=90_000).processor(own))
    assert (small.height, small.width) == (308, 308)
    for options, complaint in (
        ({"max_pixels": 1_000_001}, "must have max_pixels of at most the model's 1000000, got 100"),
        (
            {"min_pixels": 5000, "max_pixels": 4999},
            "min_pixels of at most max_pixels 4999, got 5000",
        ),
        ({"detail": "low", "min_pixels": 300_000}, "of at most max_pixels 262144, got 300000"),
    ):
        with pytest.raises(InvalidRequest, match=complaint):
            Picture("", "x", **options).processor(own)  # type: ignore[arg-type]
    for options in ({"detail": "low"}, {"detail": "high"}, {"min_pixels": 1}, {"max_pixels": 9}):
        with pytest.raises(InvalidRequest, match="x must have neither min_pixels nor max_pixels"):
            Picture("", "x", **options).processor(clip(28))  # type: ignore[arg-type]
    assert Picture("", "x", detail="auto").processor(clip(28)) == clip(28)


async def may_come() -> None:
    pass


async def read(reader: PictureReader, pictures: list[Picture]) -> list[Any]:
    """Read pictures of a request that may come."""
    async with reader.measured(pictures) as measured:
        images = await measured.read(may_come)
    sizes = [(image.num_tokens, image.height, image.width) for image in images]
    assert sizes == [(image.num_tokens, image.height, image.width) for image in measured.images]
    assert not any(image.pixels for image in measured.images)
    return images


def turned(image: Image.Image) -> bytes:
    """Return a PNG that only what stands behind its pixels turns by 90 degrees."""
    exif = Image.Exif()
    exif[0x0112] = 6
    chunk = b"eXIf" + exif.tobytes().removeprefix(b"Exif\0\0")
    data, end = file_of(image), b"\0\0\0\0IEND"
    size, check = (len(chunk) - 4).to_bytes(4), zlib.crc32(chunk).to_bytes(4)
    return data.replace(end, size + chunk + check + end)


@pytest.mark.parametrize(
    "processor",
    [
        clip(28),
        clip(28, background=(1, 2, 3)),
        clip(28, crop=None),
        clip(28, shortest_edge=None, size=(21, 35), crop=None),
        clip(28, shortest_edge=None, crop=None, any_size=AnySize(28, 784, 28 * 28 * 20)),
        clip(28, shortest_edge=None, crop=None, any_size=AnySize(14, 1, 4_194_304, 70)),
        clip(28, shortest_edge=None, crop=None, any_size=AnySize(14, 1, 9800, fills=True)),
        clip(28, shortest_edge=None, size=(28, 28), crop=None, tiles=Tiles(1, 12)),
    ],
    ids=lambda processor: str(processor.any_size or processor.tiles or processor.crop),
)
def test_a_size_is_known_before_pixels_are(processor: ImageProcessor) -> None:
    """Also where the camera was held upright, by a file whose pixels are cut off."""
    for number, size in enumerate([*SIZES, (5, 700), (3, 1000)]):
        image, exif = picture(number, *size), Image.Exif()
        exif[0x0112] = number % 8 + 1
        for kind in ("PNG", "JPEG", "WEBP", "GIF"):
            options = {} if kind == "GIF" else {"exif": exif}
            data = file_of(image.quantize(8) if kind == "GIF" else image, kind, **options)
            whole, made = (decode(data, processor, is_measured=only) for only in (False, True))
            assert made == msgspec.structs.replace(whole, pixels=b""), (size, kind, number)
            if kind in ("PNG", "JPEG") and not whole.complaint and len(data) > 2000:
                assert decode(data[:-200], processor, is_measured=True) == made
                assert decode(data[:-200], processor).complaint


def asking(data: bytes, **fields: Any) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": data_url(data)}}
    content = [part, {"type": "text", "text": "What is it?"}]
    return {"messages": [{"role": "user", "content": content}], "model": "m", **fields}


def num_decoded(setup: Setup) -> int:
    """Return how many pictures a frontend has decoded."""
    return int(setup.service.observation.recorder.counter(IMAGES, "decoded").value)


async def refused(setup: Setup, path: str, verdict: Verdict) -> Any:
    """Have a request refused by the router when it comes; return status, headers and body."""
    setup.router.answer = lambda submit: [
        RequestDelta(
            submit.request_id,
            [],
            FinishReason.ERROR,
            verdict.error,
            retry_after_s=verdict.retry_after_s,
            max_tokens=verdict.max_tokens,
        )
    ]
    body = {"messages": [{"role": "user", "content": "hi"}], "model": "m", "max_tokens": 5}
    return _parts(await setup.post(path, body))


def _parts(response: httpx.Response) -> Any:
    headers = {name: value for name, value in response.headers.items() if name != "x-request-id"}
    return response.status_code, headers, response.content


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(query_id=0, error=ErrorCode.QUEUE_FULL, retry_after_s=17.2),
        Verdict(query_id=0, error=ErrorCode.REQUEST_QUOTA, retry_after_s=3.5),
        Verdict(query_id=0, error=ErrorCode.TOKEN_QUOTA, retry_after_s=40.0),
        Verdict(query_id=0, error=ErrorCode.TOO_LARGE, max_tokens=9),
    ],
    ids=lambda verdict: str(verdict.error),
)
def test_a_refused_request_has_no_picture_decoded(tmp_path: Path, verdict: Verdict) -> None:
    """It is answered as one that comes to the router; one that may come is decoded once."""
    model = str(write_llava(tmp_path))
    source = {"type": "base64", "media_type": "image/png"}
    source["data"] = data_url(file_of(picture(2))).partition(",")[2]
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
    bodies = {
        "/v1/chat/completions": asking(file_of(picture(1)), max_tokens=5, n=2),
        "/v1/messages": {
            "model": "m",
            "max_tokens": 5,
            "messages": [{"role": "user", "content": blocks}],
        },
    }

    async def scenario() -> None:
        async with frontend(model=model, served_model_name="m") as setup:
            for number, (path, body) in enumerate(bodies.items(), 1):
                expected = await refused(setup, path, verdict)
                num_submits = len(setup.router.submits)
                setup.router.verdict = verdict
                for _ in range(3):
                    assert _parts(await setup.post(path, body)) == expected
                assert len(setup.router.submits) == num_submits
                assert num_decoded(setup) == number - 1
                setup.router.verdict, setup.router.answer = Verdict(query_id=0), says([5])
                assert (await setup.post(path, body)).status_code == 200
                assert num_decoded(setup) == number
                submit, *others = setup.router.submits[num_submits:]
                (image,) = submit.images
                assert len(image.pixels) == image.num_bytes > 0
                assert len(others) == 2 - number and all(submit.images == o.images for o in others)
                asked = [m for m in setup.router.sent if isinstance(m, MaySubmit)][-1].submit
                assert asked.images[0].pixels == b"" and asked.prompt == submit.prompt

    asyncio.run(scenario())


def test_a_slow_router_is_waited_for_as_by_requests_without_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightserve.frontend.router_client.ANSWER_TIMEOUT_S", 0.01)

    async def scenario() -> None:
        model = str(write_llava(tmp_path))
        async with frontend(says([5]), model=model, served_model_name="m") as setup:
            heard: list[Any] = []
            hear = setup.service.router.on_message
            monkeypatch.setattr(setup.service.router, "on_message", heard.append)
            body = asking(file_of(picture(1)))
            waiting = asyncio.create_task(setup.post("/v1/chat/completions", body))
            await eventually(lambda: len(heard) == 1)
            await asyncio.sleep(0.1)
            monkeypatch.undo()
            hear(heard[0])
            assert (await waiting).status_code == 200

    asyncio.run(scenario())


def test_counting_decodes_no_picture(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with frontend(model=str(write_llava(tmp_path)), served_model_name="m") as setup:
            body = asking(file_of(picture(1)))
            answer = await setup.post("/v1/chat/completions/render", body)
            assert answer.json()["token_ids"].count(PLACEHOLDER) == NUM_TOKENS
            assert num_decoded(setup) == 0

    asyncio.run(scenario())


def test_of_many_that_ask_for_few_places_few_are_decoded_in_vain(tmp_path: Path) -> None:
    class Places(FakeRouter):
        """Has three places, and says so until three requests have come."""

        def send(self, message: FrontendMessage) -> None:
            is_full = len(self.submits) >= 3
            error = ErrorCode.QUEUE_FULL if is_full else None
            self.verdict = Verdict(query_id=0, error=error)
            super().send(message)

    async def scenario() -> None:
        async with frontend(model=str(write_llava(tmp_path)), served_model_name="m") as setup:
            router = Places(setup.service.router, says([5]))
            setup.service.router.detach()
            setup.service.router.attach(router, BOOT_ID)
            setup.service.router.on_message(RouterWelcome(boot_id=BOOT_ID, num_kv_slots=10_000))
            bodies = [asking(file_of(picture(number))) for number in range(30)]
            answers = await asyncio.gather(
                *(setup.post("/v1/chat/completions", body) for body in bodies)
            )
            codes = Counter(answer.status_code for answer in answers)
            assert codes[200] >= 3 and codes[200] + codes[429] == 30
            assert num_decoded(setup) <= 3 + 2

    asyncio.run(scenario())


def test_a_picture_that_is_turned_behind_its_pixels(tmp_path: Path) -> None:
    """Of other rows than its head says: the prompt is that of the turned picture."""
    model = str(write_vision_model(tmp_path, "mistral3"))
    image = picture(1, 70, 28)
    upright = file_of(image.transpose(Image.Transpose.ROTATE_270))

    async def scenario() -> None:
        async with frontend(says([5]), model=model, served_model_name="m") as setup:
            for data in (turned(image), upright):
                answer = await setup.post("/v1/chat/completions", asking(data))
                assert answer.status_code == 200, answer.text
            first, second = setup.router.submits
            assert first.images == second.images and first.prompt == second.prompt
            asked = [m.submit for m in setup.router.sent if isinstance(m, MaySubmit)]
            assert asked[0].prompt != asked[1].prompt == first.prompt

    asyncio.run(scenario())


def test_a_line_of_a_batch_is_tried_again_without_its_pictures(tmp_path: Path) -> None:
    """As often as the router refuses it; decoded once, when it may come."""
    body = asking(file_of(picture(1)), max_tokens=5)

    async def scenario() -> None:
        async with frontend(
            says([5]), model=str(write_llava(tmp_path)), served_model_name="m"
        ) as setup:
            routes = InnerRoutes(setup.service, Room())
            line = {"custom_id": "a", "method": "POST", "url": "", "body": body}
            leased = LeasedLine(
                batch=1,
                number=1,
                batch_id="batch_1",
                custom_id="a",
                endpoint="/v1/chat/completions",
                key_name="",
                attempt=0,
                losses=0,
                line=json.dumps(line).encode(),
                expires_s=0,
            )
            full = Verdict(query_id=0, error=ErrorCode.QUEUE_FULL, retry_after_s=7.0)
            setup.router.verdict = full
            for _ in range(3):
                answer = await routes.answer(leased, due_in_s=60.0)
                assert (answer.status, answer.retry_after_s) == (429, 7.0)
                assert not answer.is_own_refusal
            assert num_decoded(setup) == 0 and not setup.router.submits
            setup.router.verdict = Verdict(query_id=0)
            assert (await routes.answer(leased, due_in_s=60.0)).status == 200
            assert num_decoded(setup) == 1

    asyncio.run(scenario())


def test_pictures_that_are_read_have_a_bound_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """URLs count, and images until the last of their request is there: both are given back."""
    vision = load_model_config(write_llava(tmp_path)).vision
    urls = [data_url(file_of(picture(number))) for number in range(2)]
    size = sum(map(len, urls)) + 2 * 3 * SIDE * SIDE
    pictures = [Picture(url, "x") for url in urls]

    async def scenario(room: int) -> None:
        monkeypatch.setattr("lightserve.frontend.pictures.READING_BYTES", room)
        reader = PictureReader(vision, ServeConfig(), Recorder())
        try:
            for _ in range(3):
                with reader._reading.admitted(1):  # another request
                    assert len(await read(reader, pictures)) == 2
        finally:
            reader.close()

    asyncio.run(scenario(size + 1))
    with pytest.raises(RequestFailed) as caught:
        asyncio.run(scenario(size - 1))
    assert caught.value.status == 429


def test_images_are_kept_for_each_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vision = load_model_config(write_llava(tmp_path)).vision
    assert vision is not None
    size = 3 * SIDE * SIDE
    monkeypatch.setattr("lightserve.frontend.pictures.KEPT_BYTES", 3 * size)

    async def scenario(keys: str, whose: tuple[str, str]) -> list[list[int]]:
        recorder = Recorder()
        reader = PictureReader(vision, ServeConfig(api_key_file=keys), recorder)
        urls = [data_url(file_of(picture(number))) for number in range(4)]
        known: list[list[int]] = []

        async def send(key: str, *numbers: int) -> list[Any]:
            WHOSE.set(key)
            return await read(reader, [Picture(urls[number], "x") for number in numbers])

        try:
            first = await send(whose[0], 0, 1)
            for key, *numbers in (
                (whose[0], 0, 1),
                (whose[1], 0),
                (whose[0], 2),  # one of the client with the most has to go: its oldest, 0
                (whose[1], 0),
                (whose[0], 1, 2),
                (whose[0], 0),
            ):
                await send(str(key), *map(int, numbers))
                counts = [
                    int(recorder.counter(IMAGES, source).value) for source in ("decoded", "kept")
                ]
                known.append(counts)
            assert [image.digest for image in first] == [
                image.digest for image in await send(whose[0], 0, 1)
            ]
        finally:
            reader.close()
        return known

    by_key = asyncio.run(scenario("keys", ("key a", "key b")))
    assert by_key == [[2, 2], [3, 2], [4, 2], [4, 3], [4, 5], [5, 5]]
    unknown = asyncio.run(scenario("keys", ("", "")))  # lines of batches
    assert unknown[-1] == [10, 0]
    shared = asyncio.run(scenario("", ("", "")))
    assert shared[:2] == [[2, 2], [2, 3]]


def test_files_that_are_fetched_count_until_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key has half of what others leave, however short the URLs are."""
    vision = load_model_config(write_llava(tmp_path)).vision
    monkeypatch.setattr("lightserve.frontend.pictures.READING_BYTES", 20_000)

    class Hosts:
        def __init__(self) -> None:
            self.go_on = asyncio.Event()
            self.num_reserved = 0

        async def fetch(self, url: str, *, reserve: Callable[[int], None], **limits: Any) -> bytes:
            reserve(6000)
            self.num_reserved += 1
            await self.go_on.wait()
            return file_of(picture(1))

        def close(self) -> None:
            pass

    async def scenario() -> None:
        config = ServeConfig(api_key_file="keys", allow_image_hosts="images.example")
        reader, hosts = PictureReader(vision, config, Recorder()), Hosts()
        assert reader._hosts is not None
        reader._hosts.close()
        reader._hosts = hosts  # type: ignore[assignment]

        def send(key: str) -> asyncio.Task[Any]:
            WHOSE.set(key)
            url = "https://images.example/a.png"
            return asyncio.create_task(read(reader, [Picture(url, "x")]))

        try:
            first = send("a")
            await eventually(lambda: hosts.num_reserved == 1)
            with pytest.raises(RequestFailed):
                await send("a")
            other = send("b")
            await eventually(lambda: hosts.num_reserved == 2)
            hosts.go_on.set()
            (image,), _ = await asyncio.gather(first, other)
            assert image.width == SIDE
            await send("a")
            assert reader._reading._shares.size == 0
        finally:
            reader.close()

    asyncio.run(scenario())


def test_a_file_is_kept_no_longer_than_it_is_counted(tmp_path: Path) -> None:
    """Only until it is decoded, though the request is not on its way yet."""
    vision = load_model_config(write_llava(tmp_path)).vision
    data = file_of(picture(1))

    class Hosts:
        async def fetch(self, url: str, **limits: Any) -> bytes:
            return data

        def close(self) -> None:
            pass

    async def scenario() -> None:
        reader = PictureReader(vision, ServeConfig(), Recorder())
        reader._hosts = Hosts()  # type: ignore[assignment]
        reads = Picture("https://images.example/a.png", "x")
        before = sys.getrefcount(data)
        try:
            async with reader.measured([reads, reads]) as measured:
                assert sys.getrefcount(data) == before + 2
                await measured.read(may_come)
                assert sys.getrefcount(data) == before
        finally:
            reader.close()

    asyncio.run(scenario())


def test_a_request_has_as_many_images_as_a_message() -> None:
    assert ServeConfig().max_images == MAX_IMAGES
