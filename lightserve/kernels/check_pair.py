"""Kernels beside the reference, data for both, and how far apart their results are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightserve.kernels.interface import Kernels, KernelShapes
from lightserve.kernels.reference import ReferenceKernels

SEED = 7
LIMITS = {torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Largest relative error by type."""
ELEMENT_SHARE = 10.0
"""One element may be off by this many times the limit, in units of its vector's root mean square:
values a few times that size are rounded more than once."""
LINEAR_ROWS = (1, 7, 33)
"""One, few, and so many that kernels go another way."""
PRODUCT_ROWS = (1, 2, 4, 7, 33)
"""The same of plain products, of which every few rows may have a kernel of their own."""
CHECKED_GROUP = 32
"""Inputs of a group of 4-bit weights."""
MAX_WEIGHT_NUMBERS = 1 << 22
"""Of a large weight only so many numbers are tried: all inputs, fewer outputs."""


class Comparison(NamedTuple):
    """What an operation gave, and what it should have."""

    operation: str
    shape: str
    result: Tensor
    truth: Tensor

    def error(self) -> float:
        """Return the largest relative error of a vector along the last dimension."""
        return relative_error(self.result, self.truth)


def relative_error(result: Tensor, truth: Tensor) -> float:
    """Return the largest error of any vector along the last dimension, NaN if there is any.

    Of its length, or of one element as `ELEMENT_SHARE` says, whichever is larger.
    """
    if result.shape != truth.shape:
        return float("inf")
    difference, truth = result.float() - truth.float(), truth.float()
    size = truth.square().mean(dim=-1).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    lengths = difference.square().mean(dim=-1).sqrt() / size
    elements = difference.abs().amax(dim=-1) / size / ELEMENT_SHARE
    return float(torch.maximum(lengths, elements).max())


class Poison(TorchFunctionMode):
    """Fills with NaN whatever is allocated without a value: results have to be written."""

    _ALLOCATIONS = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._ALLOCATIONS and result.dtype.is_floating_point:
            result.fill_(torch.nan)
        return result


class Pair:
    """The kernels beside the reference, and data for both."""

    def __init__(self, kernels: Kernels, shapes: KernelShapes, device: torch.device) -> None:
        self.kernels = kernels
        self.shapes = shapes
        self.device = device
        self.generator = torch.Generator(device).manual_seed(SEED)

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return normally distributed numbers of the model's type."""
        numbers = torch.randn(shape, generator=self.generator, device=self.device)
        return (numbers * scale).to(self.shapes.dtype)

    def compare(
        self,
        operation: str,
        shape: str,
        run: Callable[[Kernels, tuple[Tensor, ...]], tuple[Tensor, ...]],
        inputs: tuple[Tensor, ...],
    ) -> Iterator[Comparison]:
        """Run both on copies of the inputs, the reference in float32."""
        wide = tuple(
            x.to(torch.float32, copy=True) if x.is_floating_point() else x.clone() for x in inputs
        )
        with Poison():
            results = run(self.kernels, tuple(x.clone() for x in inputs))
        for result, truth in zip(results, run(ReferenceKernels(), wide), strict=True):
            yield Comparison(operation, shape, result, truth)
