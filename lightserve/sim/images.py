"""Images of simulated requests, and the time that a worker's encoder has with them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from lightserve.errors import ConfigError
from lightserve.messages.common import MAX_INT32
from lightserve.messages.images import DIGEST_BYTES, MAX_IMAGES, EncoderWork, Image, KeptImages
from lightserve.messages.router_worker import StepPlan
from lightserve.types import RowId

_SIDE = 14
"""Pixels along the side of a token's square, as LLaVA-1.5 has them."""


def parse_images(spec: str, *, flag: str) -> tuple[int, ...]:
    """Return the tokens of each image of a request by `N:TOKENS`, or 0. Raises ConfigError."""
    match = re.fullmatch(r"0|([1-9]\d?):([1-9]\d{0,6})", spec)
    if match is None or int(match[1] or 0) > MAX_IMAGES:
        raise ConfigError(
            f"{flag} must be N:TOKENS, 1 to {MAX_IMAGES} images of so many each, or 0, got {spec!r}"
        )
    return (int(match[2] or 0),) * int(match[1] or 0)


def images_of_rows(rows: Sequence[Mapping[str, str]]) -> list[tuple[int, ...]] | None:
    """Return the tokens of each image of a trace's rows; None: no column says them.

    Raises:
        ValueError: a row says what cannot be, or which prompts begin like others.
    """
    if "image_tokens" not in rows[0]:
        return None
    images: list[tuple[int, ...]] = []
    for number, row in enumerate(rows, start=1):
        sizes = tuple(map(int, (row["image_tokens"] or "").split()))
        is_possible = min(sizes, default=1) > 0 and sum(sizes) < int(row["prompt_tokens"])
        if row.get("block_ids_512") or len(sizes) > MAX_IMAGES or not is_possible:
            raise ValueError(
                f"row {number}: image_tokens must be at most {MAX_IMAGES}, above 0, together fewer"
                f" than prompt_tokens, and not beside block_ids_512, got {row['image_tokens']!r}"
            )
        images.append(sizes)
    return images


def draw_images(sizes: Sequence[int], rng: np.random.Generator) -> tuple[Image, ...]:
    """Return new images without pixels, one after the other behind a prompt's first token."""
    images: list[Image] = []
    start = 1
    for num_tokens in sizes:
        digest = rng.bytes(DIGEST_BYTES)
        images.append(Image(start, num_tokens, _SIDE, _SIDE * num_tokens, b"", digest))
        start += num_tokens
    return tuple(images)


class SimulatedEncoder:
    """Says what is encoded: it keeps images for as long as workers do (`worker.images`)."""

    def __init__(self, work: EncoderWork | None) -> None:
        """`work`: of the encoder; None: the model sees no images."""
        self._work = work
        self._kept: KeptImages[int] = KeptImages(work.max_kept_tokens) if work else KeptImages()
        """Layers that are computed."""
        self._of_rows: dict[RowId, dict[Image, bool]] = {}
        """Images of each row, and whether it has encoded them."""

    def work_of(self, plan: StepPlan) -> float:
        """Return the work of the next plan, see `EncoderWork.of_layer`.

        Raises:
            ConfigError: there are images, but no encoder.
        """
        work = 0.0
        for row in plan.left_rows:
            self._of_rows.pop(row, None)
        for each in plan.sequences:
            self._of_rows[each.row] = dict.fromkeys(each.images, False)
            if each.images and self._work is None:
                raise ConfigError(
                    "requests with images need --hardware of a model whose encoder was measured"
                )
        for part in plan.rows:
            images, end = self._of_rows.get(part.row, {}), part.start_position + part.num_tokens
            for image, is_held in images.items():
                if image.start < end and image.end > part.start_position:
                    work += 0.0 if is_held else self._advance(image, is_computed=True)
                    images[image] = True
        return work + sum(self._advance(order.image, order.num_layers) for order in plan.encodes)

    def _advance(self, image: Image, most: int = MAX_INT32, *, is_computed: bool = False) -> float:
        """Compute layers of an image, all that are left or `most`; return their work."""
        assert self._work is not None, "only images have layers"
        done = self._kept.get(image) or 0
        count = min(most, self._work.num_layers - done)
        self._kept.put(image, done + count, is_computed=is_computed)
        return count * self._work.of_layer(image)
