"""Images of prompts, and the ids by which the router knows their tokens.

Frontends and workers write a place-holder of the vocabulary for each token of an image. The router
writes an id beyond the vocabulary in its place, a number that it gives to each content once, so
that all that goes by tokens tells images apart: prefixes, pauses, replays.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

from lightserve.errors import ProtocolError
from lightserve.messages.common import Int32Array

T = TypeVar("T")

IMAGE_ID = 1 << 30
"""Least id of an image's tokens."""
MAX_IMAGES = 64
"""Images of a request."""
MAX_PIXEL_BYTES = 48 * 1024 * 1024
"""Bytes of all images of a request, as the encoder reads them: a message has to hold them. An image
may have all: the 16,777,216 pixels of Qwen3-VL."""
DIGEST_BYTES = 32
MIN_KEPT_TOKENS = 4096
"""See `EncoderWork.max_kept_tokens`."""
MAX_KNOWN = 65_536
"""Contents whose numbers are remembered; an older one that comes again gets a new number."""


if TYPE_CHECKING:
    Pixels = bytes
else:
    Pixels = memoryview  # not copied from the frame of the message


class Image(msgspec.Struct, frozen=True, array_like=True):
    """An image of a prompt, as its encoder reads it."""

    start: int
    """Position of its first token."""
    num_tokens: int
    height: int
    width: int
    pixels: Pixels
    """uint8 [height, width, 3], red, green, blue."""
    digest: bytes
    """DIGEST_BYTES that only the same pixels of the same size have."""
    sees_itself: bool = False
    """Whether its tokens see each other, those behind them as well: a step computes all that are
    left of them."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its pixels, also where a decision log has left them out."""
        return 3 * self.height * self.width

    @property
    def end(self) -> int:
        """First position behind it."""
        return self.start + self.num_tokens


class ImageSums(NamedTuple):
    """Sums over images."""

    num_tokens: int = 0
    num_pairs: int = 0
    """Pairs of tokens of one image."""


class EncoderWork(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The work of an encoder of images: layers, one after the other, all of one size."""

    num_layers: int
    pair_share: float
    """Work that each pair of an image's tokens adds, as a share of a token's own."""
    max_image_tokens: int = 0
    """Tokens of the largest image; 0: it is small."""
    sees_itself: bool = False
    """See `Image.sees_itself`."""

    @property
    def max_kept_tokens(self) -> int:
        """Tokens of images whose encodings workers keep beside those that rows are computing.

        Half of it is for best-effort requests, each half for the largest image at least.
        """
        return max(MIN_KEPT_TOKENS, 2 * self.max_image_tokens)

    def of_layer(self, image: Image) -> float:
        """Return the work of a layer, in tokens."""
        return self.of_sums(ImageSums(image.num_tokens, image.num_tokens**2))

    def of_sums(self, sums: ImageSums) -> float:
        """Return the work of a layer for several images together, in tokens."""
        return sums.num_tokens + self.pair_share * sums.num_pairs


class EncodeOrder(msgspec.Struct, frozen=True, array_like=True):
    """The next layers of an image's encoding, before a row computes its tokens."""

    image: Image
    """With pixels where these layers are the first; its `start` means nothing."""
    num_layers: int


class KeptImages(Generic[T]):
    """Values of images that were encoded lately, at least in part, by their digests.

    Router and workers keep those of the same images, up to so many tokens. Beyond that the oldest
    goes of which a row has computed tokens; the others are waited for, and go last.
    """

    def __init__(self, max_tokens: int = MIN_KEPT_TOKENS) -> None:
        """`max_tokens`: see `EncoderWork.max_kept_tokens`."""
        self._max_tokens = max_tokens
        self._awaited: OrderedDict[bytes, tuple[int, T]] = OrderedDict()
        self._computed: OrderedDict[bytes, tuple[int, T]] = OrderedDict()
        self._num_tokens = 0

    def get(self, image: Image) -> T | None:
        """Return what is kept of an image."""
        found = self._awaited.get(image.digest) or self._computed.get(image.digest)
        return None if found is None else found[1]

    def put(self, image: Image, value: T, *, is_computed: bool = False) -> None:
        """Keep it as the latest, and forget others beyond the limit.

        `is_computed`: whether a row computes tokens of the image with this step.
        """
        for kept in (self._awaited, self._computed):
            self._num_tokens -= kept.pop(image.digest, (0, value))[0]
        own = self._computed if is_computed else self._awaited
        own[image.digest] = image.num_tokens, value
        self._num_tokens += image.num_tokens
        while self._num_tokens > self._max_tokens and len(self._awaited) + len(self._computed) > 1:
            oldest = self._computed or self._awaited
            self._num_tokens -= oldest.popitem(last=False)[1][0]

    def num_awaited(self, counts: Callable[[T], bool]) -> int:
        """Return the tokens of all images that are waited for and whose value counts."""
        return sum([num for num, value in self._awaited.values() if counts(value)])


def digest_of(height: int, width: int, pixels: bytes) -> bytes:
    """Return the digest of an image of this size."""
    size = height.to_bytes(4, "little") + width.to_bytes(4, "little")
    return hashlib.blake2b(size + pixels, digest_size=DIGEST_BYTES).digest()


def salted(images: Sequence[Image], prefix_salt: str) -> tuple[Image, ...]:
    """Return images with digests that only requests with this salt have.

    Router and workers keep by digests what they know of images: so no time tells a client what
    those of another salt have sent.
    """
    if not images:
        return ()
    key = hashlib.blake2b(prefix_salt.encode(), digest_size=DIGEST_BYTES).digest()
    return tuple(
        msgspec.structs.replace(
            image,
            digest=hashlib.blake2b(image.digest, key=key, digest_size=DIGEST_BYTES).digest(),
        )
        for image in images
    )


def without_pixels(image: Image) -> Image:
    """Return an image as decision logs have it."""
    return msgspec.structs.replace(image, pixels=b"")


def together(images: Sequence[Image], start: int, num_tokens: int) -> int:
    """Return how many of a prompt's tokens from `start` on one step computes, for about as many.

    It ends before an image that it could compute in part alone, or behind one that it begins with.
    """
    for image in images:
        if image.sees_itself and image.start < start + num_tokens < image.end:
            return image.start - start if image.start > start else image.end - start
    return num_tokens


def check_images(
    images: Sequence[Image], num_prompt_tokens: int, *, has_pixels: bool = True
) -> None:
    """Check that images are what a message may hold; `has_pixels`: none may be without them.

    Raises:
        ProtocolError: they are too many or too large, not in order, or not within the prompt.
    """
    if len(images) > MAX_IMAGES or sum(image.num_bytes for image in images) > MAX_PIXEL_BYTES:
        raise ProtocolError(f"more than {MAX_IMAGES} images or {MAX_PIXEL_BYTES} bytes of them")
    end = 0
    for image in images:
        is_placed = end <= image.start and image.end <= num_prompt_tokens
        is_sized = image.height > 0 and image.width > 0 and image.num_tokens > 0
        is_whole = len(image.pixels) == (image.num_bytes if has_pixels else 0)
        if not (is_placed and is_sized and is_whole and len(image.digest) == DIGEST_BYTES):
            raise ProtocolError("an image that is none")
        end = image.end


class ImageNumbers:
    """A number for each content of images, by its digest.

    All 256 bits of a digest are compared, however few tokens an image has. A number is not given
    again before 2**30 others: no prefix cache holds as many tokens.
    """

    def __init__(self, max_known: int = MAX_KNOWN) -> None:
        self._max_known = max_known
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._num_given = 0

    def of(self, images: Sequence[Image]) -> list[int]:
        """Return the number of each image's content."""
        return [self._number(image.digest) for image in images]

    def _number(self, digest: bytes) -> int:
        if (number := self._numbers.get(digest)) is None:
            number = self._numbers[digest] = self._num_given % IMAGE_ID
            self._num_given += 1
            if len(self._numbers) > self._max_known:
                self._numbers.popitem(last=False)
        else:
            self._numbers.move_to_end(digest)
        return number


def with_image_ids(
    token_ids: Int32Array, images: Sequence[Image], numbers: Sequence[int]
) -> Int32Array:
    """Return a prompt's ids with those of its images in place of place-holders, int32 [n].

    `numbers`: see `ImageNumbers`. Tokens among an image's that break its rows are left.
    """
    if not images:
        return token_ids
    ids = token_ids.copy()
    for image, number in zip(images, numbers, strict=True):
        own = ids[image.start : image.end]
        own[own == own[0]] = IMAGE_ID | number
    return ids


def without_image_ids(token_ids: Int32Array, placeholder: int) -> Int32Array:
    """Return ids with a place-holder for each token of an image, int32 [n]."""
    is_image = token_ids >= IMAGE_ID
    return np.where(is_image, np.int32(placeholder), token_ids) if is_image.any() else token_ids


def text_tokens(token_ids: Int32Array) -> int:
    """Return how many ids stand before the first image's."""
    is_image = token_ids >= IMAGE_ID
    return int(is_image.argmax()) if is_image.any() else len(token_ids)
