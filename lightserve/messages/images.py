"""Images of prompts, and the ids by which the router knows their tokens.

Frontends and workers write a place-holder of the vocabulary for each token of an image. The router
writes ids beyond the vocabulary in their place, made of a digest of the image's content, so that
all that goes by tokens tells images apart: prefixes, pauses, replays.

    bits of an id    30   29 … 27                       26 … 0
                     1    1 … HEAD_TOKENS, behind: 0    hash

The first HEAD_TOKENS ids have 135 bits of the digest. Fewer of them prove nothing: two images may
have the same first ids, so no KV is shared up to a place between them (`whole_images`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from lightserve.errors import ProtocolError
from lightserve.messages.common import Int32Array

HEAD_TOKENS = 5
"""First tokens of an image by which it is told from all others; no image has fewer."""
IMAGE_ID = 1 << 30
"""Least id of an image's tokens."""
MAX_IMAGES = 64
"""Images of a request."""
MAX_PIXEL_BYTES = 12 * 1024 * 1024
"""Bytes of all images of a request, as the encoder reads them: a message has to hold them."""
DIGEST_BYTES = 32
_PLACE_BIT = 27
_HASH_MASK = (1 << _PLACE_BIT) - 1


class Image(msgspec.Struct, frozen=True, array_like=True):
    """An image of a prompt, as its encoder reads it."""

    start: int
    """Position of its first token."""
    num_tokens: int
    """At least HEAD_TOKENS."""
    height: int
    width: int
    pixels: bytes
    """uint8 [height, width, 3], red, green, blue."""
    digest: bytes
    """DIGEST_BYTES that only the same pixels of the same size have."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its pixels, also where a decision log has left them out."""
        return 3 * self.height * self.width

    @property
    def end(self) -> int:
        """First position behind it."""
        return self.start + self.num_tokens


def digest_of(height: int, width: int, pixels: bytes) -> bytes:
    """Return the digest of an image of this size."""
    size = height.to_bytes(4, "little") + width.to_bytes(4, "little")
    return hashlib.blake2b(size + pixels, digest_size=DIGEST_BYTES).digest()


def without_pixels(image: Image) -> Image:
    """Return an image as decision logs have it."""
    return msgspec.structs.replace(image, pixels=b"")


def check_images(images: Sequence[Image], num_prompt_tokens: int) -> None:
    """Check that images are what a message may hold.

    Raises:
        ProtocolError: they are too many or too large, not in order, or not within the prompt.
    """
    if len(images) > MAX_IMAGES or sum(image.num_bytes for image in images) > MAX_PIXEL_BYTES:
        raise ProtocolError(f"more than {MAX_IMAGES} images or {MAX_PIXEL_BYTES} bytes of them")
    end = 0
    for image in images:
        is_placed = end <= image.start and image.end <= num_prompt_tokens
        is_sized = image.height > 0 and image.width > 0 and image.num_tokens >= HEAD_TOKENS
        is_whole = len(image.pixels) == image.num_bytes
        if not (is_placed and is_sized and is_whole and len(image.digest) == DIGEST_BYTES):
            raise ProtocolError("an image that is none")
        end = image.end


def with_image_ids(token_ids: Int32Array, images: Sequence[Image]) -> Int32Array:
    """Return a prompt's ids with those of its images in place of place-holders, int32 [n]."""
    if not images:
        return token_ids
    ids = token_ids.copy()
    for image in images:
        stream = hashlib.shake_256(image.digest).digest(4 * image.num_tokens)
        own = IMAGE_ID | (np.frombuffer(stream, dtype="<u4") & _HASH_MASK).astype(np.int32)
        own[:HEAD_TOKENS] |= np.arange(1, HEAD_TOKENS + 1, dtype=np.int32) << _PLACE_BIT
        ids[image.start : image.end] = own
    return ids


def without_image_ids(token_ids: Int32Array, placeholder: int) -> Int32Array:
    """Return ids with a place-holder for each token of an image, int32 [n]."""
    is_image = token_ids >= IMAGE_ID
    return np.where(is_image, np.int32(placeholder), token_ids) if is_image.any() else token_ids


def whole_images(token_ids: Int32Array, length: int) -> int:
    """Return the number of the first `length` ids that are known to be the same in two prompts.

    That is `length`, or the place before an image of which fewer than HEAD_TOKENS are among them.
    """
    if not length or (last := int(token_ids[length - 1])) < IMAGE_ID:
        return length
    place = (last - IMAGE_ID) >> _PLACE_BIT
    return max(0, length - place) if 0 < place < HEAD_TOKENS else length


def text_tokens(token_ids: Int32Array) -> int:
    """Return how many ids stand before the first image's."""
    is_image = token_ids >= IMAGE_ID
    return int(is_image.argmax()) if is_image.any() else len(token_ids)
