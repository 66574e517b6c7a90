"""Pictures of a request, from their URLs to what the model's encoder reads.

They stand in data URLs, or are fetched (`image_hosts`). They are decoded by a process apart
(`picture_process`), which a thread talks to; clients take turns there. Images are kept for a while,
for each client apart: in the next turn of a conversation the same pictures come again.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import functools
import hashlib
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from lightserve.config import ServeConfig
from lightserve.config.fields import flag_name
from lightserve.errors import InvalidRequest
from lightserve.frontend.connections import Held, Seats
from lightserve.frontend.errors import RequestFailed
from lightserve.frontend.json_body import MAX_ITEMS, Backlog, show
from lightserve.grammar_process import OUT_OF_MEMORY, environment, read_frame, write_frame
from lightserve.messages.images import MAX_PIXEL_BYTES, Image, digest_of, without_pixels
from lightserve.metrics.catalogue import IMAGES
from lightserve.metrics.recording import Recorder
from lightserve.models.image_processor import ImageProcessor
from lightserve.models.vision_config import VisionConfig
from lightserve.picture_process import (
    COMMAND,
    ENCODER,
    FORMATS,
    MAX_CPU_S,
    MAX_WORK_BYTES,
    Decoded,
    Given,
)
from lightserve.turn_threads import WHOSE, TurnThreads

if TYPE_CHECKING:
    from lightserve.frontend.image_hosts import ImageHosts

T = TypeVar("T")

FETCH_S = 15.0
"""Time for all images of a request that are fetched."""
DETAILS = ("auto", "low", "high")
_LOW_PIXELS = 512 * 512
"""Most pixels of an image of the detail low, as OpenAI has it."""
READING_BYTES = 256 * 1024 * 1024
"""Memory for pictures of requests that are being read, files that are fetched among them, and for
their images so far."""
KEPT_BYTES = 64 * 1024 * 1024
"""Memory for images that were decoded before; the client with the most loses its oldest."""
REPLY_TIMEOUT_S = 60.0
"""For a picture; `picture_process` ends what takes too much of a processor long before that."""
_TYPES = {f"image/{name.lower()}": name for name in (*FORMATS, "jpg")}
_DECODED = msgspec.msgpack.Decoder(Decoded)
_LAST_MOMENT_S = 1.0


class Picture(NamedTuple):
    """A picture as a request has it."""

    url: str
    place: str
    """The field, for errors."""
    detail: str | None = None
    """One of DETAILS; None: auto, as the model has it."""
    min_pixels: int | None = None
    max_pixels: int | None = None

    def processor(self, own: ImageProcessor) -> ImageProcessor:
        """Return the model's processor with the sizes that are asked for.

        Raises:
            InvalidRequest: the model reads images in one size, or they contradict each other.
        """
        asked = [self.min_pixels, self.max_pixels, _LOW_PIXELS if self.detail == "low" else None]
        if asked == [None] * 3 and self.detail != "high":
            return own
        if own.tiles is not None and asked[:2] == [None] * 2:
            return msgspec.structs.replace(own, tiles=None if self.detail == "low" else own.tiles)
        if (sizes := own.any_size) is None:
            raise _refusal(
                self,
                "must have neither min_pixels nor max_pixels, and the detail auto: the model reads"
                " images in one size",
            )
        if sizes.fills and self.min_pixels is not None:
            raise _refusal(
                self,
                "must have no min_pixels: the model reads each picture as large as max_pixels"
                " lets it",
            )
        most = min(sizes.max_pixels, _LOW_PIXELS) if self.detail == "low" else sizes.max_pixels
        if self.max_pixels is not None:
            most = self.max_pixels
        if most > sizes.max_pixels:
            raise _refusal(
                self, f"must have max_pixels of at most the model's {sizes.max_pixels}, got {most}"
            )
        least = self.min_pixels or min(sizes.min_pixels, most)
        if least > most:
            raise _refusal(self, f"must have min_pixels of at most max_pixels {most}, got {least}")
        sizes = msgspec.structs.replace(sizes, min_pixels=least, max_pixels=most)
        return msgspec.structs.replace(own, any_size=sizes)


@dataclass
class _Left:
    """Limits of a request, less what its pictures so far have taken."""

    num_bytes: int
    """Bytes of files, in base64 or fetched."""
    fetch_s: float
    num_pixel_bytes: int


_Name = tuple[str, bytes, ImageProcessor]
"""A client, the digest of a file, and how it is processed."""


class Measured(NamedTuple):
    """Images of a request that are not decoded yet, each with its place yet to be found."""

    images: tuple[Image, ...]
    """Without pixels."""
    read: Callable[[Callable[[], Awaitable[None]]], Awaitable[list[Image]]]
    """Returns them with pixels, once what it is given has asked whether the request may come.

    Clients take turns there, so that of many that ask for one place few are decoded in vain. Raises
    what that raises, and as `PictureReader.measured`. What stands behind a PNG's pixels may turn
    them: then it has another size.
    """


class PictureReader:
    """Makes images of pictures, for one model."""

    def __init__(
        self, vision: VisionConfig | None, config: ServeConfig, recorder: Recorder
    ) -> None:
        """`vision`: None: the model reads text alone."""
        self._recorder = recorder
        self._images: dict[_Name, Image] = {}
        """Images that were decoded before; the thread alone uses it."""
        self._held: Held[_Name] = Held(KEPT_BYTES)
        self._is_shared = not config.api_key_file
        """Clients share images if none has a key; else lines of batches keep none."""
        self._vision, self._model = vision, config.model_names[0]
        self._max_images, self._max_bytes = config.max_images, config.max_image_bytes
        self._threads = TurnThreads(1, "pictures")
        self._backlog = Backlog()
        self._reading = Backlog(max_size=READING_BYTES)
        # Requests that may come, up to the last of their pictures: one of each of two clients.
        self._seats = Seats(num_seats=2, max_waiting=MAX_ITEMS)
        self._process = _Process()
        self._hosts: ImageHosts | None = None
        if vision is not None and config.allow_image_hosts:
            from lightserve.frontend.image_hosts import ImageHosts  # noqa: PLC0415 - an extra

            self._hosts = ImageHosts(config.allow_image_hosts)

    @property
    def max_bytes(self) -> int:
        """Bytes by which a body may be larger for its pictures."""
        return 0 if self._vision is None else self._max_bytes

    @contextlib.asynccontextmanager
    async def measured(self, pictures: Sequence[Picture]) -> AsyncIterator[Measured]:
        """Yield the images without their pixels: no picture is decoded before `Measured.read`.

        Raises:
            InvalidRequest: the model reads text alone, a picture is none or too large, cannot be
                fetched, or there are too many; names the field.
            RequestFailed: too many are waiting.
        """
        files: list[tuple[bytes | None, contextlib.ExitStack]] = []
        images: list[Image] = []
        left = self._check(pictures)
        with contextlib.ExitStack() as held:
            if pictures:
                held.enter_context(self._reading.admitted(sum(len(p.url) for p in pictures)))
            for picture in pictures:
                own = held.enter_context(contextlib.ExitStack())
                files.append((await self._fetched(picture, left, own), own))
                image = await self._in_thread(self._size_of, picture, files[-1][0])
                images.append(image)
                left.num_pixel_bytes -= image.num_bytes
                if left.num_pixel_bytes < 0:
                    raise InvalidRequest(
                        f"messages must have images of at most {MAX_PIXEL_BYTES} bytes together, as"
                        f" the encoder reads them, got {MAX_PIXEL_BYTES - left.num_pixel_bytes} up"
                        f" to {picture.place}",
                        param="messages",
                        code="too_many_images",
                    )

            async def read(ask: Callable[[], Awaitable[None]]) -> list[Image]:
                async with self._seats.taken(WHOSE.get()):
                    await ask()
                    for place, picture in enumerate(pictures):
                        data, own = files.pop(0)
                        images[place], was_kept = await self._in_thread(
                            self._decoded, picture, data
                        )
                        source = "kept" if was_kept else "decoded"
                        self._recorder.counter(IMAGES, source).value += 1
                        data = None  # before its memory is another's
                        own.close()
                        held.enter_context(self._reading.admitted(images[place].num_bytes))
                return images

            yield Measured(tuple(images), read)

    def _check(self, pictures: Sequence[Picture]) -> _Left:
        """Return what a request's pictures may take beside their URLs. Raises InvalidRequest."""
        if pictures and self._vision is None:
            raise InvalidRequest(
                f"{pictures[0].place} is an image, but the model {show(self._model)} reads text"
                " alone",
                param=pictures[0].place,
                code="model_reads_no_images",
            )
        if len(pictures) > self._max_images:
            raise InvalidRequest(
                f"messages must have at most {self._max_images} images"
                f" ({flag_name('max_images')}), got {len(pictures)}",
                param="messages",
                code="too_many_images",
            )
        left = _Left(self._max_bytes - sum(len(p.url) for p in pictures), FETCH_S, MAX_PIXEL_BYTES)
        if left.num_bytes < 0:
            raise InvalidRequest(
                f"messages must have images of at most {self._max_bytes} bytes in base64 together"
                f" ({flag_name('max_image_bytes')}), got {self._max_bytes - left.num_bytes}",
                param="messages",
                code="request_too_large",
                status=413,
            )
        return left

    async def _in_thread(
        self, work: Callable[[Picture, bytes | None, str], T], picture: Picture, data: bytes | None
    ) -> T:
        """Return what the thread makes of a picture, or of its file, for the current client."""
        size = len(picture.url) + len(data or b"")
        own = functools.partial(work, picture, data, WHOSE.get())
        return await self._backlog.in_thread(self._threads, own, size)

    async def _fetched(
        self, picture: Picture, left: _Left, held: contextlib.ExitStack
    ) -> bytes | None:
        """Return the file of a picture that is to be fetched; None: its URL is to hold it.

        `held`: gives its memory back.
        """
        if self._hosts is None or not picture.url[:8].lower().startswith(("http://", "https://")):
            return None
        from lightserve.frontend.image_hosts import FetchError  # noqa: PLC0415 - an extra

        clock = asyncio.get_running_loop().time
        start_s = clock()
        try:
            data = await self._hosts.fetch(
                picture.url,
                most=left.num_bytes,
                timeout_s=max(0.0, left.fetch_s),
                reserve=lambda size: held.enter_context(self._reading.admitted(size)),
            )
        except FetchError as error:
            raise _refusal(picture, str(error)) from None
        left.num_bytes -= len(data)
        left.fetch_s -= clock() - start_s
        return data

    def close(self) -> None:
        """Let running work end; drop what waits."""
        self._threads.close(self._process.close)
        if self._hosts is not None:
            self._hosts.close()

    def _given(self, picture: Picture, data: bytes | None, whose: str) -> tuple[_Name, Given]:
        """Return a picture for the process, and the name of its image among a client's."""
        assert self._vision is not None, "checked"
        processor = picture.processor(self._vision.processor)
        data = _data_of(picture) if data is None else data
        name = (whose, hashlib.blake2b(data, digest_size=32).digest(), processor)
        return name, Given(data, processor)

    def _size_of(self, picture: Picture, data: bytes | None, whose: str) -> Image:
        """Return an image without pixels."""
        name, given = self._given(picture, data, whose)
        kept = self._images.get(name)
        measured = msgspec.structs.replace(given, is_measured=True)
        return self._made(picture, measured) if kept is None else without_pixels(kept)

    def _decoded(self, picture: Picture, data: bytes | None, whose: str) -> tuple[Image, bool]:
        """Return an image, and whether it was kept; it is kept for the client `whose`."""
        name, given = self._given(picture, data, whose)
        image = self._images.get(name)
        if was_kept := image is not None:
            self._held.release(name)
        else:
            image = self._made(picture, given)
        if self._is_shared or whose:
            self._images[name] = image
            for gone in self._held.hold(name, whose, image.num_bytes):
                del self._images[gone]
        return image, was_kept

    def _made(self, picture: Picture, given: Given) -> Image:
        """Return what the process makes of a picture. Raises InvalidRequest: it complains."""
        vision = self._vision
        assert vision is not None, "checked"
        decoded = self._process.decode(given)
        if decoded.complaint:
            raise _refusal(picture, decoded.complaint)
        height, width, pixels = decoded.height, decoded.width, decoded.pixels
        own = vision.processor.any_size
        if own is not None and given.processor.any_size != own and height * width > own.max_pixels:
            raise _refusal(picture, f"would have {height} x {width} pixels, over {own.max_pixels}")
        digest = digest_of(height, width, pixels)
        num_tokens = vision.num_tokens(height, width)
        return Image(0, num_tokens, height, width, pixels, digest, vision.prompt.sees_itself)


def _data_of(picture: Picture) -> bytes:
    """Return the file in a data URL. Raises InvalidRequest: there is none."""
    head, comma, body = picture.url.partition(",")
    scheme, _, rest = head.partition(":")
    if scheme.lower() != "data" or not comma:
        raise _refusal(
            picture,
            "must be a data URL, such as data:image/png;base64,…: this server fetches no images"
            f" ({flag_name('allow_image_hosts')}), got {show(picture.url[:64])}",
        )
    kind, *options = rest.split(";")
    if kind.lower() not in _TYPES or "base64" not in map(str.lower, options):
        known = ", ".join(_TYPES)
        raise _refusal(
            picture, f"must be a data URL in base64 of one of {known}, got {show(head[:64])}"
        )
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise _refusal(picture, "must be a data URL whose base64 is valid") from None


def _refusal(picture: Picture, complaint: str) -> InvalidRequest:
    return InvalidRequest(f"{picture.place} {complaint}", param=picture.place, code="invalid_image")


class _Process:
    """The process that decodes pictures; started with the first one, and anew where it ended."""

    def __init__(self) -> None:
        self._running: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    def decode(self, given: Given) -> Decoded:
        """Return a picture as the encoder reads it, or what is wrong with it.

        Raises:
            RequestFailed: the process failed, for reasons that are not the picture's.
        """
        try:
            if self._running is None:
                self._running = _start()
            ours = self._running[1]
            with ours.makefile("wb") as sink, ours.makefile("rb") as source:
                write_frame(sink, ENCODER.encode(given))
                if (answer := read_frame(source)) is not None:
                    return _DECODED.decode(answer)
        except TimeoutError:
            self.close()
            return Decoded(f"takes more than {REPLY_TIMEOUT_S:.0f} s to decode")
        except (OSError, msgspec.MsgspecError):
            pass  # its exit code says why
        if self._running is not None and (complaint := _complaint_of_death(self._end())):
            return Decoded(complaint)
        raise RequestFailed(
            "pictures cannot be decoded at the moment; try again",
            code="pictures_unavailable",
            status=503,
        )

    def _end(self) -> int:
        """End it and return its exit code."""
        assert self._running is not None
        (process, stream), self._running = self._running, None
        stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=_LAST_MOMENT_S)
        process.kill()
        return process.wait()

    def close(self) -> None:
        """End it, whatever it does."""
        if self._running is not None:
            self._running[0].kill()
            self._end()


def _start() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process, with the way to it. Raises OSError: the system has no more of something."""
    with contextlib.ExitStack() as opened:
        ours, theirs = map(opened.enter_context, socket.socketpair())
        ours.settimeout(REPLY_TIMEOUT_S)
        process = subprocess.Popen(
            COMMAND, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment()
        )
        opened.pop_all()
    theirs.close()
    return process, ours


def _complaint_of_death(exit_code: int) -> str | None:
    """Return what an end of the process says of its picture; None: nothing."""
    too_large = f"takes more than {MAX_WORK_BYTES >> 20} MiB of memory to decode"
    return {
        OUT_OF_MEMORY: too_large,
        -signal.SIGABRT: too_large,
        -signal.SIGSEGV: "is broken: its decoder fails",
        -signal.SIGBUS: "is broken: its decoder fails",
        -signal.SIGXCPU: f"takes more than {MAX_CPU_S} s of a processor to decode",
    }.get(exit_code)
