"""Weights and activations of 8-bit floating point: --quantization fp8.

A weight is rounded to float8_e4m3fn when it is read, by the largest number of each output, and
activations when they come, by the largest of each token, as FP8 Formats for Deep Learning
(Micikevicius et al. 2022) has it. GPUs multiply these numbers by their tensor cores; on a CPU they
are widened, and the same product costs as much as the model's own type does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightserve.errors import ModelLoadError
from lightserve.kernels.interface import Fp8Kernels, Fp8Weight, Kernels
from lightserve.models.layers.linear import (
    Linear,
    ModuleShard,
    UnquantizedMethod,
    WeightReader,
    merged_shards,
)

LARGEST = torch.finfo(torch.float8_e4m3fn).max
"""448."""
UNIT = 16
"""Inputs and outputs of a product on a GPU must be a multiple of this."""


def rounded_to_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [N, K] as float8_e4m3fn, and the factor of each, float32 [N, 1]."""
    wide = rows.float()
    factors = (wide.abs().amax(dim=1, keepdim=True) / LARGEST).clamp_min(1e-30)
    return (wide / factors).to(torch.float8_e4m3fn), factors


class RoundingLinear:
    """A weight whose products are by numbers of 8 bits, and perhaps a bias [out]."""

    __slots__ = ("_bias", "_factors", "_is_gated", "_kernels", "_weight")

    def __init__(
        self, kernels: Kernels, weight: Tensor, bias: Tensor | None, *, is_gated: bool
    ) -> None:
        values, factors = rounded_to_fp8(weight)
        self._kernels, self._bias, self._is_gated = kernels, bias, is_gated
        self._factors = factors.T.contiguous()
        # On a CPU numbers of 8 bits are those of the model's type, too.
        self._weight = values if weight.is_cuda else kernels.pack_weight(values.to(weight.dtype))

    def apply(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """See `Linear.apply`."""
        assert dtype is None, "the output layer is not rounded"
        values, factors = rounded_to_fp8(x)
        if x.is_cuda:
            product = scaled_product(values, self._weight, factors, self._factors)
        else:
            sums = self._kernels.linear(values.to(x.dtype), self._weight, None, dtype=torch.float32)
            product = sums.mul_(factors).mul_(self._factors)
        if self._bias is not None:
            product = product + self._bias
        product = product.to(x.dtype)
        return self._kernels.silu_and_mul(product) if self._is_gated else product

    def rows(self, in_size: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
        """See `Linear.rows`."""
        return None


def scaled_product(x: Tensor, weight: Tensor, of_rows: Tensor, of_outputs: Tensor) -> Tensor:
    """Return x [N, K] times weight [M, K], both float8_e4m3fn, bfloat16 [N, M].

    of_rows [N, 1] and of_outputs [1, M] are factors, float32.
    """
    return torch._scaled_mm(
        x, weight.T, scale_a=of_rows, scale_b=of_outputs, out_dtype=torch.bfloat16
    )


class Fp8Method(UnquantizedMethod):
    """Weights rounded to 8 bits as they are read: --quantization fp8.

    The output layer, which `make` is for, stays as it is: it decides between tokens.
    """

    def create(
        self, reader: WeightReader, shards: Sequence[ModuleShard], *, is_gated: bool = False
    ) -> Linear:
        """See `LinearMethod.create`."""
        weight, bias = merged_shards(reader, shards)
        if weight.is_cuda and any(size % UNIT for size in weight.shape):
            names = ", ".join(shard.name for shard in shards)
            raise ModelLoadError(
                f"{names}: --quantization fp8 needs sizes that are multiples of {UNIT} on a GPU,"
                f" got {list(weight.shape)}"
            )
        return RoundingLinear(self._kernels, weight, bias, is_gated=is_gated)

    def round_expert(self, reader: WeightReader, shards: Sequence[ModuleShard]) -> Fp8Weight:
        """See `RoundingMethod.round_expert`: activations stay as they are."""
        assert isinstance(self._kernels, Fp8Kernels)
        values, factors = rounded_to_fp8(merged_shards(reader, shards)[0])
        return self._kernels.pack_fp8(values, factors, group_size=values.shape[1])
