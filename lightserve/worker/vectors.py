"""Vectors of prompts: one for each row that is there for it, of length 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from lightserve.models.pooling import Pooling
from lightserve.worker.device import DeviceQueue


class Vectors(NamedTuple):
    """Those of a step."""

    indices: Sequence[int]
    """Of their rows, among those that sample."""
    values: Tensor
    """float32 [len(indices), hidden_size]."""

    def items(self) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """Yield each with its index, once they are on the host and the step is over."""
        yield from zip(self.indices, self.values.numpy(), strict=True)

    def on_host(self, queue: DeviceQueue) -> Vectors:
        """Return the same as they will be on the host."""
        return self._replace(values=queue.download([self.values])[0])


def row_vectors(indices: Sequence[int], hidden: Tensor) -> Vectors:
    """Return the vectors of rows from what becomes them, [len(indices), hidden_size]."""
    return Vectors(indices, functional.normalize(hidden.float(), dim=-1))


def pooled(hidden: Tensor, lengths: Sequence[int], rows: Sequence[int], kind: Pooling) -> Tensor:
    """Return what becomes the vectors of whole prompts.

    Args:
        hidden: [T, hidden_size], of all tokens of a step.
        lengths: how many of them each row has, in order.
        rows: which rows, by their place among those.
        kind: how a prompt's tokens become one.

    Returns:
        float32 [len(rows), hidden_size].
    """
    prompts = hidden.split_with_sizes(list(lengths))
    chosen = [prompts[row] for row in rows]
    match kind:
        case Pooling.CLS:
            return torch.stack([prompt[0] for prompt in chosen]).float()
        case Pooling.MEAN:
            return torch.stack([prompt.float().mean(0) for prompt in chosen])
        case Pooling.LAST:
            return torch.stack([prompt[-1] for prompt in chosen]).float()
