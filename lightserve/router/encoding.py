"""Encoding of images as work of steps, which is cut between layers.

Where a prompt comes to an image that is not encoded, beside decodes of others, layers of the image
take the place of its next tokens: as many as the step has time for as it would have for a chunk,
one at least in each step, in the order in which the policy looks at requests. Its tokens follow
in a step behind the last layer. A step in which nothing else advances encodes whole images with
their first tokens: it holds up no token of others. All of this is pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from lightserve.messages.common import MAX_INT32, StepCoefficients
from lightserve.messages.images import (
    MAX_KEPT_TOKENS,
    MAX_PIXEL_BYTES,
    EncodeOrder,
    EncoderWork,
    Image,
    KeptImages,
    without_pixels,
)
from lightserve.router.request import Request
from lightserve.router.step_cost import RATIO_MEMORY
from lightserve.types import RequestClass


class Encoding:
    """Progress of images, and the time that a layer takes, learnt from results."""

    def __init__(self, work: EncoderWork | None = None) -> None:
        """`work`: of the workers' encoder; None: they have none."""
        self.work = work
        self._layers: KeptImages[int] = KeptImages()
        """Layers that plans have ordered."""
        self._token_s = 0.0
        """Seconds of one token's work; 0: nothing is known."""

    def use_profile(self, coefficients: StepCoefficients) -> None:
        """Start from what was measured of fresh workers, if an encoder was."""
        self._token_s = coefficients.per_encoder_token_s or self._token_s

    def num_left(self, image: Image) -> int:
        """Return how many layers an image still needs."""
        if self.work is None:
            return 0
        return self.work.num_layers - (self._layers.get(image) or 0)

    def layer_s(self, image: Image) -> float:
        """Return the seconds of one of its layers, as predicted; 0: nothing is known."""
        return 0.0 if self.work is None else self._token_s * self.work.of_layer(image)

    def missing(self, request: Request, start: int, num_tokens: int) -> Iterator[Image]:
        """Yield the images with tokens among the next ones that are not encoded, each once."""
        found: set[bytes] = set()
        for image in request.parameters.images:
            if image.start >= start + num_tokens:
                break
            is_held = request.row is not None and image.start < start  # by its row, from then on
            if image.end > start and not is_held and self.num_left(image):
                if image.digest not in found:
                    yield image
                found.add(image.digest)

    def seconds_left(self, request: Request, start: int, num_tokens: int = MAX_INT32) -> float:
        """Return the seconds of all layers that tokens from `start` on need, as predicted."""
        if self.work is None or not request.parameters.images:
            return 0.0
        images = self.missing(request, start, num_tokens)
        return sum([self.num_left(image) * self.layer_s(image) for image in images])

    def can_begin(self, image: Image) -> bool:
        """Whether an image can be begun without losing what others have got."""
        if self._layers.get(image) or self.work is None:
            return True
        num_layers = self.work.num_layers
        return self._layers.has_room(image, lambda done: done >= num_layers)

    def note_orders(self, orders: Sequence[EncodeOrder]) -> None:
        """Note what a plan orders."""
        for image, num_layers in ((order.image, order.num_layers) for order in orders):
            self._layers.put(image, (self._layers.get(image) or 0) + num_layers)

    def note_chunk(self, request: Request, num_tokens: int) -> None:
        """Note that a plan computes a request's next tokens, and encodes what these need."""
        if self.work is None:
            return
        start = request.next_position
        for image in request.parameters.images:
            if image.start < start + num_tokens and image.end > start:
                self._layers.put(image, self.work.num_layers)

    def observe(self, seconds: float, work: float) -> None:
        """Learn from a result that encoded so much."""
        if work > 0.0:
            token_s = seconds / work
            self._token_s += (RATIO_MEMORY if self._token_s else 1.0) * (token_s - self._token_s)


NO_ENCODING = Encoding()


class StepEncodes:
    """The orders of a step that is being filled."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self.orders: list[EncodeOrder] = []
        self.seconds = 0.0
        """The time that they take, as predicted."""
        self.cut: set[RequestClass] = set()
        """Classes of requests for whose images there was no time for all layers."""
        self._num_bytes = 0
        """Bytes of images that begin."""
        self._num_tokens = 0
        """Tokens of all that are ordered: of more than are kept, one would push out another."""
        self._of_chunks: set[bytes] = set()
        """Digests of images that the step encodes with their tokens."""

    def before(self, request: Request, start: int, num_tokens: int) -> Image | None:
        """Return an image of a request's next tokens that has to be encoded before them."""
        if not request.parameters.images or self._encoding.work is None:
            return None
        images = self._encoding.missing(request, start, num_tokens)
        return next((image for image in images if image.digest not in self._of_chunks), None)

    def add_chunk(self, request: Request, start: int, num_tokens: int) -> None:
        """Count the images that a prompt's next tokens encode: an empty step takes them whole."""
        for image in self._encoding.missing(request, start, num_tokens):
            if image.digest not in self._of_chunks:
                self._of_chunks.add(image.digest)
                self.seconds += self._encoding.num_left(image) * self._encoding.layer_s(image)

    def order(self, image: Image, room_s: float, of: RequestClass) -> None:
        """Encode layers of an image for a class: as many as have time, of the step's first one."""
        encoding = self._encoding
        if any(order.image.digest == image.digest for order in self.orders):
            return
        if self.orders and self._num_tokens + image.num_tokens > MAX_KEPT_TOKENS:
            return
        is_begun = encoding.num_left(image) < (encoding.work.num_layers if encoding.work else 0)
        if self.orders and not is_begun:
            fits = self._num_bytes + image.num_bytes <= MAX_PIXEL_BYTES
            if not fits or not encoding.can_begin(image):
                return
        layer_s = encoding.layer_s(image)
        count = encoding.num_left(image)
        if layer_s > 0.0 and room_s < math.inf:
            count = min(count, max(0, int(room_s / layer_s)))
        elif layer_s == 0.0:
            count = 0
        count = max(count, int(not self.orders))
        if count < encoding.num_left(image):
            self.cut.add(of)
        if count:
            self._num_tokens += image.num_tokens
            self._num_bytes += 0 if is_begun else image.num_bytes
            self.orders.append(EncodeOrder(without_pixels(image) if is_begun else image, count))
            self.seconds += count * layer_s
