"""Where layers get their weights from: the seam between the layers and the loader."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lightserve.models.parallel import Part


class WeightReader(Protocol):
    """Reads parts of named tensors into final parameters."""

    dtype: torch.dtype
    """Type of all parameters."""
    device: torch.device

    def has(self, name: str) -> bool:
        """Whether the model has a tensor of this name."""

    def read_into(
        self, target: Tensor, name: str, *, rows: Part | None = None, columns: Part | None = None
    ) -> None:
        """Copy a part (default: all) of the tensor `name` into `target`, which has its shape.

        Converts to the target's dtype; on a device the copy may be under way on return. Raises
        ModelLoadError naming file and tensor when the tensor is missing or has another shape, and,
        now or when all is read, when it holds a value that is not finite.
        """


def read_vector(reader: WeightReader, name: str, size: int) -> Tensor:
    """Return the whole one-dimensional tensor `name`, shape [size]."""
    vector = torch.empty(size, dtype=reader.dtype, device=reader.device)
    reader.read_into(vector, name)
    return vector
