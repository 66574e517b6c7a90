"""Encoding of images as work of steps, which is cut between layers.

Where a prompt comes to an image that is not encoded, the step encodes it with its first tokens if
it has time for both. Otherwise layers of the image take the place of these tokens, as many as the
step would have time for as a chunk, in the order in which the policy looks at requests; its tokens
follow in a step behind the last layer. A step in which nothing else advances has one layer at
least, and is no longer than one with as many tokens as it may have: who comes meanwhile waits for
it. All of this is pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightserve.messages.common import MAX_INT32, StepCoefficients
from lightserve.messages.images import (
    MAX_PIXEL_BYTES,
    MIN_KEPT_TOKENS,
    EncodeOrder,
    EncoderWork,
    Image,
    ImageSums,
    KeptImages,
    without_pixels,
)
from lightserve.router.request import Request
from lightserve.router.step_cost import RATIO_MEMORY
from lightserve.types import BE, RT, RequestClass

IDLE_PLANS = 64
"""An image that was not gone on with for so many plans keeps no other from being begun: the request
that it was begun for may have left."""


class _Progress(NamedTuple):
    """How far an image is encoded."""

    num_layers: int
    """That plans have ordered."""
    plan: int
    """Number of the last plan that did."""


class Encoding:
    """Progress of images, and the time that a layer takes, learnt from results."""

    def __init__(self, work: EncoderWork | None = None) -> None:
        """`work`: of the workers' encoder; None: they have none."""
        self.work = work
        self.max_kept_tokens = MIN_KEPT_TOKENS if work is None else work.max_kept_tokens
        self._kept: KeptImages[_Progress] = KeptImages(self.max_kept_tokens)
        self._num_plans = 0
        self._token_s = 0.0
        """Seconds of one token's work; 0: nothing is known."""

    def use_profile(self, coefficients: StepCoefficients) -> None:
        """Start from what was measured of fresh workers, if an encoder was."""
        self._token_s = coefficients.per_encoder_token_s or self._token_s

    def num_left(self, image: Image) -> int:
        """Return how many layers an image still needs."""
        if self.work is None:
            return 0
        return self.work.num_layers - self._num_done(image)

    def _num_done(self, image: Image) -> int:
        found = self._kept.get(image)
        return 0 if found is None else found.num_layers

    def layer_s(self, image: Image) -> float:
        """Return the seconds of one of its layers, as predicted; 0: nothing is known."""
        return 0.0 if self.work is None else self._token_s * self.work.of_layer(image)

    def seconds_of(self, sums: ImageSums) -> float:
        """Return the seconds of all layers of such images, as predicted; 0: nothing is known."""
        work = self.work
        return 0.0 if work is None else self._token_s * work.num_layers * work.of_sums(sums)

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

    def can_begin(self, image: Image, of: RequestClass, num_begun: int = 0) -> bool:
        """Whether an image can be begun for a class without losing what others have got.

        Best-effort requests leave half of the room to real-time ones. `num_begun`: tokens of images
        that the same step begins.
        """
        if self._num_done(image):
            return True
        least = self._num_plans - IDLE_PLANS
        num_awaited = num_begun + self._kept.num_awaited(lambda known: known.plan >= least)
        most = self.max_kept_tokens if of is RT else self.max_kept_tokens // 2
        return num_awaited == 0 or num_awaited + image.num_tokens <= most

    def note_orders(self, orders: Sequence[EncodeOrder]) -> None:
        """Note what a plan orders, behind the chunks of that plan."""
        for image, num_layers in ((order.image, order.num_layers) for order in orders):
            progress = _Progress(self._num_done(image) + num_layers, self._num_plans)
            self._kept.put(image, progress)
        self._num_plans += 1

    def note_chunk(self, request: Request, num_tokens: int) -> None:
        """Note that a plan computes a request's next tokens, and encodes what these need."""
        if self.work is None:
            return
        start = request.next_position
        progress = _Progress(self.work.num_layers, self._num_plans)
        for image in request.parameters.images:
            if image.start < start + num_tokens and image.end > start:
                self._kept.put(image, progress, is_computed=True)

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
        self.seconds_by_class: dict[RequestClass, float] = {}
        """The part of each class that has one."""
        self.cut: set[RequestClass] = set()
        """Classes of requests for whose images there was no time for all layers."""
        self._num_begun = 0
        """Tokens of images that begin."""
        self._num_bytes = 0
        """Bytes of images that begin."""
        self._num_tokens = 0
        """Tokens of all that are ordered: of more than are kept, one would push out another."""
        self._of_chunks: set[bytes] = set()
        """Digests of images that the step encodes with their tokens."""

    def missing(self, request: Request, start: int, num_tokens: int) -> Iterator[Image]:
        """Yield images of a request's next tokens that this step does not encode yet."""
        for image in self._encoding.missing(request, start, num_tokens):
            if image.digest not in self._of_chunks:
                yield image

    def seconds_of(self, image: Image) -> float:
        """Return the seconds of the layers that an image needs, as predicted; 0: not known."""
        return self._encoding.num_left(image) * self._encoding.layer_s(image)

    def seconds_with(self, request: Request, start: int, num_tokens: int) -> float:
        """Return what a request's next tokens make the step longer by their images."""
        return sum([self.seconds_of(image) for image in self.missing(request, start, num_tokens)])

    def add_chunk(self, request: Request, start: int, num_tokens: int) -> None:
        """Count the images that are encoded with a prompt's next tokens."""
        for image in list(self.missing(request, start, num_tokens)):
            self._of_chunks.add(image.digest)
            self._add(self.seconds_of(image), request.request_class)

    def _add(self, seconds: float, of: RequestClass) -> None:
        self.seconds += seconds
        self.seconds_by_class[of] = self.seconds_by_class.get(of, 0.0) + seconds

    def order(
        self,
        image: Image,
        room_s: float,
        of: RequestClass,
        *,
        least: int = 1,
        is_empty: bool = False,
    ) -> None:
        """Encode layers of an image for a class: as many as have time.

        `least`: so many in any case if it is the step's first image, or its layers' time is not
        known. `is_empty`: whether nothing else advances: then it may push out another.
        """
        encoding = self._encoding
        if any(order.image.digest == image.digest for order in self.orders):
            return
        if self.orders and self._num_tokens + image.num_tokens > encoding.max_kept_tokens:
            return
        num_left, layer_s = encoding.num_left(image), encoding.layer_s(image)
        is_begun = encoding.work is not None and num_left < encoding.work.num_layers
        if not is_begun and (self.orders or (of is BE and not is_empty)):
            fits = self._num_bytes + image.num_bytes <= MAX_PIXEL_BYTES
            can_begin = encoding.can_begin(image, of, self._num_begun)
            if (self.orders and not fits) or not can_begin:
                return
        count = num_left
        if layer_s == 0.0:
            count, least = 0, 1
        elif room_s < math.inf:
            count = min(count, max(0, int(room_s / layer_s)))
        if not self.orders:
            count = max(count, min(least, num_left))
        if count < num_left:
            self.cut.add(of)
        if count:
            self._num_tokens += image.num_tokens
            self._num_begun += 0 if is_begun else image.num_tokens
            self._num_bytes += 0 if is_begun else image.num_bytes
            self.orders.append(EncodeOrder(without_pixels(image) if is_begun else image, count))
            self._add(count * layer_s, of)
