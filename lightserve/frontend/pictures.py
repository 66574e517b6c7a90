"""Pictures of a request, from data URLs to what the model's encoder reads.

They are decoded by a process apart (`picture_process`), which a thread talks to; clients take turns
there. The same picture that comes again, in the next turn of a conversation, is decoded again.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import signal
import socket
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from lightserve.errors import InvalidRequest
from lightserve.frontend.errors import RequestFailed
from lightserve.frontend.json_body import Backlog, show
from lightserve.grammar_process import OUT_OF_MEMORY, environment, read_frame, write_frame
from lightserve.messages.images import (
    MAX_IMAGES,
    MAX_PIXEL_BYTES,
    Image,
    digest_of,
)
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
from lightserve.turn_threads import TurnThreads

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


class PictureReader:
    """Makes images of pictures, for one model."""

    def __init__(self, vision: VisionConfig | None, model: str) -> None:
        """`vision`: None: the model reads text alone; `model` is its name, for errors."""
        self._vision, self._model = vision, model
        self._threads = TurnThreads(1, "pictures")
        self._backlog = Backlog()
        self._process = _Process()

    async def read(self, pictures: Sequence[Picture]) -> list[Image]:
        """Return the images, each with its place yet to be found.

        Raises:
            InvalidRequest: the model reads text alone, a picture is none or too large, or there are
                too many; names the field.
            RequestFailed: too many are waiting.
        """
        vision = self._vision
        if vision is None and pictures:
            raise InvalidRequest(
                f"{pictures[0].place} is an image, but the model {show(self._model)} reads text"
                " alone",
                param=pictures[0].place,
                code="model_reads_no_images",
            )
        if vision is None:
            return []
        if len(pictures) > MAX_IMAGES:
            raise InvalidRequest(
                f"messages must have at most {MAX_IMAGES} images, got {len(pictures)}",
                param="messages",
                code="too_many_images",
            )
        images: list[Image] = []
        left = MAX_PIXEL_BYTES
        for picture in pictures:
            size = len(picture.url)
            image = await self._backlog.in_thread(
                self._threads, functools.partial(self._image, picture, vision), size
            )
            images.append(image)
            left -= len(image.pixels)
            if left < 0:
                raise InvalidRequest(
                    f"messages must have images of at most {MAX_PIXEL_BYTES} bytes together, as"
                    f" the encoder reads them, got {len(images)} of {len(image.pixels)} bytes",
                    param="messages",
                    code="too_many_images",
                )
        return images

    def close(self) -> None:
        """Let running work end; drop what waits."""
        self._threads.close(self._process.close)

    def _image(self, picture: Picture, vision: VisionConfig) -> Image:
        data = _data_of(picture)
        given = Given(data, vision.processor)
        decoded = self._process.decode(given)
        if decoded.complaint:
            raise _refusal(picture, decoded.complaint)
        height, width, pixels = decoded.height, decoded.width, decoded.pixels
        digest = digest_of(height, width, pixels)
        num_tokens = vision.num_tokens(height, width)
        return Image(0, num_tokens, height, width, pixels, digest)


def _data_of(picture: Picture) -> bytes:
    """Return the file in a data URL. Raises InvalidRequest: there is none."""
    head, comma, body = picture.url.partition(",")
    scheme, _, rest = head.partition(":")
    if scheme.lower() != "data" or not comma:
        raise _refusal(
            picture,
            "must be a data URL, such as data:image/png;base64,…: this server fetches no images,"
            f" got {show(picture.url[:64])}",
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
        if self._running is None:
            ours, theirs = socket.socketpair()
            ours.settimeout(REPLY_TIMEOUT_S)
            with theirs:
                process = subprocess.Popen(COMMAND, stdin=theirs.fileno(), env=environment())
            self._running = process, ours
        try:
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
        code = self._end()
        if complaint := _complaint_of_death(code):
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
