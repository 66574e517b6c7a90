"""Images of rows: pixels come with a sequence, embeddings are made in the step that needs them.

An image is encoded in steps before, layer by layer as plans order it; the first step that computes
one of its tokens encodes the rest. Its embeddings stay until the last of them has been computed, or
the row is left, as a prompt may be computed in several steps; those of the latest images stay
longer (`KeptImages`), for rows that have the same ones.

Some models turn queries and keys of an image's tokens by row and column (`VisionConfig.axes`), and
go on behind it from the larger of both:

    place in the row    0 1 2 3 4 5 6 7 8 9        an image of 2 rows and 3 columns at 2 … 7
    time                0 1 2 2 2 2 2 2 5 6
    row                 0 1 2 2 2 3 3 3 5 6
    column              0 1 2 3 4 2 3 4 5 6        shift of 8, 9 and all that follow: 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightserve.errors import ProtocolError
from lightserve.kernels.interface import SeenWhole
from lightserve.messages.images import EncoderWork, Image, KeptImages
from lightserve.messages.router_worker import StepPlan
from lightserve.models.base import ImageEncoding, Model, Replaced
from lightserve.types import RowId
from lightserve.worker.device import DeviceQueue, Mark
from lightserve.worker.tables import Int64Array, StepInputs, ranges


class EncodeTime(NamedTuple):
    """The part of a step that encodes images."""

    spans: tuple[tuple[Mark, Mark], ...] = ()
    """Begin and end of each."""
    work: float = 0.0
    """See `EncoderWork.of_layer`."""

    @property
    def seconds(self) -> float:
        """The device's time; the step is over."""
        return sum([end.seconds_since(start) for start, end in self.spans])


NO_ENCODE_TIME = EncodeTime()


@dataclass
class _Encoded:
    """An image that is encoded, or on its way."""

    encoding: ImageEncoding | None
    """None: there are embeddings."""
    num_left: int
    """Layers that are not computed."""
    embeddings: Tensor | None = None


@dataclass
class _Held:
    """An image that a row has yet to compute, or has computed in part."""

    image: Image
    embeddings: Tensor | None = None
    """[num_tokens, hidden] on the device; None: it is not encoded yet."""


class RowImages:
    """The images of one rank's rows."""

    def __init__(self, model: Model, queue: DeviceQueue, max_num_seqs: int) -> None:
        self._model, self._queue = model, queue
        self._held: dict[int, list[_Held]] = {}
        vision = model.config.vision
        self._work = vision.work_within(model.context_len) if vision else EncoderWork(0, 0.0)
        self._kept: KeptImages[_Encoded] = KeptImages(self._work.max_kept_tokens)
        self._time = NO_ENCODE_TIME
        self._turned: dict[int, Int64Array] = {}
        """Positions [3, n] of a row's tokens up to the end of its last image."""
        self.shifts: Int64Array | None = None
        """[max_num_seqs + 1], by how much positions behind each row's images are less than places;
        None: they never are."""
        if vision is not None and vision.axes:
            self.shifts = np.zeros(max_num_seqs + 1, dtype=np.int64)

    def begin(self, plan: StepPlan) -> None:
        """Take in a plan's new sequences, and forget rows that are left.

        Raises:
            ProtocolError: an image is not as the model's encoder reads them.
        """
        for row in plan.left_rows:
            self._held.pop(row, None)
            self._turned.pop(row, None)
        vision = self._model.config.vision
        for sequence in plan.sequences:
            self._held.pop(sequence.row, None)
            for image in sequence.images:
                self._check(image)
            if needed := [_Held(image) for image in sequence.images if image.pixels]:
                self._held[sequence.row] = needed
            if self.shifts is not None and vision is not None:
                self._turn(sequence.row, sequence.images, vision.factor)

    def _check(self, image: Image) -> None:
        vision = self._model.config.vision
        if vision is None or not vision.takes(image):
            raise ProtocolError(f"an image of {image.width} x {image.height} pixels")

    def encode(self, plan: StepPlan) -> None:
        """Encode what a plan orders for later ones; every rank takes part.

        An image that is known no more is left: the row that needs it brings its pixels again.
        """
        for image, num_layers in ((order.image, order.num_layers) for order in plan.encodes):
            self._check(image)
            if (found := self._kept.get(image)) is None and not image.pixels:
                continue
            start = self._queue.mark()
            found = found or self._begun(image)
            count = min(num_layers, found.num_left)
            if found.encoding is not None:
                found.encoding.advance(count)
            found.num_left -= count
            self._kept.put(image, found)
            self._note(start, image, count)

    def _begun(self, image: Image) -> _Encoded:
        flat = np.frombuffer(image.pixels, dtype=np.uint8).copy()
        (pixels,) = self._queue.upload([flat])
        encoding = self._model.encode(pixels.view(image.height, image.width, 3))
        return _Encoded(encoding, self._work.num_layers)

    def _note(self, start: Mark, image: Image, num_layers: int) -> None:
        spans = (*self._time.spans, (start, self._queue.mark()))
        work = self._time.work + num_layers * self._work.of_layer(image)
        self._time = EncodeTime(spans, work)

    def take_time(self) -> EncodeTime:
        """Return what has been encoded since the last call."""
        time, self._time = self._time, NO_ENCODE_TIME
        return time

    def _turn(self, row: RowId, images: Sequence[Image], factor: int) -> None:
        """Take in the positions of a row's tokens; `factor`: pixels of a token along a side."""
        assert self.shifts is not None
        self._turned.pop(row, None)
        parts: list[Int64Array] = []
        place = position = 0
        for image in images:
            text = image.start - place
            parts.append(np.tile(np.arange(position, position + text), (3, 1)))
            rows, columns = image.height // factor, image.width // factor
            parts.append(position + text + np.indices((1, rows, columns)).reshape(3, -1))
            place, position = image.end, position + text + max(rows, columns)
        if parts:
            self._turned[row] = np.concatenate(parts, axis=1)
        self.shifts[row] = place - position

    def turned(self, inputs: StepInputs) -> Int64Array | None:
        """Return the positions by which a step's tokens are turned; None: they are their places.

        [T] where each has one, [3, T] where tokens of images, or before an image, are among them.
        """
        if self.shifts is None or not self._turned:
            return None
        rows, counts, ends = inputs.rows, inputs.q_lens, inputs.context_lens
        starts, offsets = ends - counts, np.cumsum(counts) - counts
        positions = ranges(rows, starts, counts).positions - np.repeat(self.shifts[rows], counts)
        columns = (part.tolist() for part in (rows, starts, counts, offsets))
        for row, start, count, offset in zip(*columns, strict=True):
            own = self._turned.get(row)
            if own is None or start >= own.shape[1] or not count:
                continue
            if positions.ndim == 1:
                positions = np.tile(positions, (3, 1))
            part = own[:, start : start + count]
            positions[:, offset : offset + part.shape[1]] = part
        return positions

    def embedded(self, inputs: StepInputs) -> Replaced | None:
        """Return embeddings of the images' tokens among a step's; None: there are none.

        Images of which they are the last are forgotten. Raises ProtocolError: a step ends within an
        image whose tokens see each other.
        """
        if not self._held:
            return None
        places: list[np.ndarray] = []
        values: list[Tensor] = []
        seen: list[SeenWhole] = []
        offset = 0
        for row, count, end in zip(
            *(part.tolist() for part in (inputs.rows, inputs.q_lens, inputs.context_lens)),
            strict=True,
        ):
            start = end - count
            for held in self._held.get(row, ()):
                image, vision = held.image, self._model.config.vision
                first, last = max(start, image.start), min(end, image.end)
                if first < last and vision is not None:
                    own, part = vision.image_tokens(image, first - image.start, last - image.start)
                    places.append(own + (offset + image.start - start))
                    values.append(self._embeddings(held)[part])
                    if image.sees_itself and last < image.end:
                        raise ProtocolError(f"a step with a part of an image, up to {last}")
                    if image.sees_itself:
                        seen.append(SeenWhole(row, offset + first - start, first, last))
            self._forget(row, end)
            offset += count
        if not places:
            return None
        (uploaded,) = self._queue.upload([np.concatenate(places)])
        return Replaced(uploaded, torch.cat(values), seen)

    def _embeddings(self, held: _Held) -> Tensor:
        if held.embeddings is None:
            image, start = held.image, self._queue.mark()
            found = self._kept.get(image) or self._begun(image)
            if found.encoding is not None:
                found.embeddings, found.encoding = found.encoding.embeddings(), None
                self._note(start, image, found.num_left)
                found.num_left = 0
            assert found.embeddings is not None
            held.embeddings = found.embeddings
        self._kept.put(held.image, _Encoded(None, 0, held.embeddings), is_computed=True)
        return held.embeddings

    def _forget(self, row: RowId, end: int) -> None:
        """Forget the images of a row that end before a position."""
        if row in self._held:
            self._held[row] = [held for held in self._held[row] if held.image.end > end]
            if not self._held[row]:
                del self._held[row]
