"""Weights that are quantised in the files, as maps: by their own integers and factors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightserve.kernels.interface import (
    Fp8Kernels,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    QuantizingKernels,
)
from lightserve.models.layers.linear import (
    GroupedLinear,
    Int8Linear,
    Linear,
    ModuleShard,
    UnquantizedMethod,
    WeightLinear,
    WeightReader,
    merged_bias,
)
from lightserve.models.layers.packed_weights import packed_weight


class RoundedLinear(Int8Linear):
    """A weight of 8-bit integers, of a model whose activations are made for 8 bits as well."""

    __slots__ = ()

    def apply(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """See `Linear.apply`."""
        assert dtype is None and isinstance(self.kernels, Fp8Kernels)
        return self.kernels.linear_rounded(x, self.weight, self.bias)


class Fp8Linear(WeightLinear[Fp8Kernels, Fp8Weight]):
    """A weight of floating point of 8 bits."""

    __slots__ = ()

    def apply(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """See `Linear.apply`."""
        assert dtype is None, "no output layer is of 8 bits in files"
        return self.kernels.linear_fp8(x, self.weight, self.bias)


class StoredMethod(UnquantizedMethod):
    """Weights that are quantised in the files, by their own integers and factors, others plain.

    Where the kernels cannot hold them without a loss, they become plain as well.
    """

    def __init__(self, kernels: QuantizingKernels, *, rounds_tokens: bool = False) -> None:
        """`rounds_tokens`: see `WeightFormat`; for kernels that have such products."""
        super().__init__(kernels)
        self.kernels = kernels
        self._rounds_tokens = rounds_tokens and isinstance(kernels, Fp8Kernels)
        self.num_kept = 0
        self.num_widened = 0
        """Products by quantised weights that became plain."""

    def create(
        self, reader: WeightReader, shards: Sequence[ModuleShard], *, is_gated: bool = False
    ) -> Linear:
        """See `LinearMethod.create`."""
        parts = [
            reader.read_stored(f"{shard.name}.weight", rows=shard.rows, columns=shard.columns)
            for shard in shards
        ]
        stored = [part for part in parts if part is not None]
        packed = None
        if len(stored) == len(parts):
            packed = packed_weight(self.kernels, stored, reader.device, is_gated=is_gated)
        if packed is None:
            self.num_widened += bool(stored)
            return super().create(reader, shards, is_gated=is_gated)
        self.num_kept += 1
        bias = merged_bias(reader, shards)
        match packed:
            case Int8Weight():
                kind = RoundedLinear if self._rounds_tokens else Int8Linear
                return kind(self.kernels, packed, bias)
            case GroupedWeight():
                return GroupedLinear(self.kernels, packed, bias)
        assert isinstance(self.kernels, Fp8Kernels)
        return Fp8Linear(self.kernels, packed, bias)
