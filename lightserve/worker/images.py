"""Images of rows: pixels come with a sequence, embeddings are made in the step that needs them.

An image is encoded in the first step that computes one of its tokens. Its embeddings stay until the
last of them has been computed, or the row is left: a prompt may be computed in several steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightserve.errors import ProtocolError
from lightserve.messages.images import Image
from lightserve.messages.router_worker import StepPlan
from lightserve.models.base import Model, Replaced
from lightserve.types import RowId
from lightserve.worker.device import DeviceQueue
from lightserve.worker.tables import StepInputs


@dataclass
class _Held:
    """An image that a row has yet to compute, or has computed in part."""

    image: Image
    embeddings: Tensor | None = None
    """[num_tokens, hidden] on the device; None: it is not encoded yet."""


class RowImages:
    """The images of one rank's rows."""

    def __init__(self, model: Model, queue: DeviceQueue) -> None:
        self._model, self._queue = model, queue
        self._held: dict[int, list[_Held]] = {}

    def begin(self, plan: StepPlan) -> None:
        """Take in a plan's new sequences, and forget rows that are left.

        Raises:
            ProtocolError: an image is not as the model's encoder reads them.
        """
        for row in plan.left_rows:
            self._held.pop(row, None)
        vision = self._model.config.vision
        for sequence in plan.sequences:
            self._held.pop(sequence.row, None)
            for image in sequence.images:
                if vision is None or not vision.takes(image):
                    raise ProtocolError(f"an image of {image.width} x {image.height} pixels")
            if sequence.images:
                self._held[sequence.row] = [_Held(image) for image in sequence.images]

    def embedded(self, inputs: StepInputs) -> Replaced | None:
        """Return embeddings of the images' tokens among a step's; None: there are none.

        Images of which they are the last are forgotten.
        """
        if not self._held:
            return None
        places: list[np.ndarray] = []
        values: list[Tensor] = []
        offset = 0
        for row, count, end in zip(
            *(part.tolist() for part in (inputs.rows, inputs.q_lens, inputs.context_lens)),
            strict=True,
        ):
            start = end - count
            for held in self._held.get(row, ()):
                first, last = max(start, held.image.start), min(end, held.image.end)
                if first < last:
                    places.append(np.arange(offset + first - start, offset + last - start))
                    own = self._embeddings(held)
                    values.append(own[first - held.image.start : last - held.image.start])
            self._forget(row, end)
            offset += count
        if not places:
            return None
        (uploaded,) = self._queue.upload([np.concatenate(places)])
        return Replaced(uploaded, torch.cat(values))

    def _embeddings(self, held: _Held) -> Tensor:
        if held.embeddings is None:
            image = held.image
            flat = np.frombuffer(image.pixels, dtype=np.uint8).copy()
            (pixels,) = self._queue.upload([flat])
            held.embeddings = self._model.encode(pixels.view(image.height, image.width, 3))
        return held.embeddings

    def _forget(self, row: RowId, end: int) -> None:
        """Forget the images of a row that end before a position."""
        if row in self._held:
            self._held[row] = [held for held in self._held[row] if held.image.end > end]
            if not self._held[row]:
                del self._held[row]
