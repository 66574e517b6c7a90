"""Weights of 8 and of 4 bits: rounded as they are read, or as files have them.

--quantization fp8: a weight is rounded to float8_e4m3fn when it is read, by the largest number of
each output, and activations when they come, by the largest of each token, as FP8 Formats for Deep
Learning (Micikevicius et al. 2022) has it. GPUs multiply these numbers by their tensor cores, as
those of FP8 files; on a CPU they are widened, and a product costs as much as the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightserve.errors import ModelLoadError
from lightserve.kernels.interface import AttentionBatch, Can, Kernels
from lightserve.kernels.weights import (
    Fp4Weight,
    Fp8Weight,
    Int8Weight,
    Packed,
    PackedWeight,
    PromptRuns,
)
from lightserve.models.layers.linear import (
    AnyPacked,
    Experts,
    Linear,
    LinearMethod,
    ModuleShard,
    PackedExpertWeights,
    UnquantizedMethod,
    WeightLinear,
    WeightReader,
    merged_bias,
    merged_shards,
)
from lightserve.models.stored_weights import StoredWeight, fp8_of, groups_of

LARGEST = torch.finfo(torch.float8_e4m3fn).max
"""448."""


class Int8Method(UnquantizedMethod):
    """Weights rounded to 8 bits as they are read, by each output's largest: --quantization int8."""

    kinds = Packed.INT8

    def make(self, weight: Tensor, bias: Tensor | None, *, is_gated: bool = False) -> Linear:
        """See `LinearMethod.make`."""
        return WeightLinear(self.kernels, self.kernels.quantize(weight, is_gated=is_gated), bias)

    def pack_experts(
        self, reader: WeightReader, gate_ups: Experts, downs: Experts
    ) -> PackedExpertWeights | None:
        """See `LinearMethod.pack_experts`."""

        def rounded(shards: Sequence[ModuleShard]) -> AnyPacked:
            return self._rounded(merged_shards(reader, shards)[0], shards)

        return list(map(rounded, gate_ups)), list(map(rounded, downs))

    def _rounded(
        self, weight: Tensor, shards: Sequence[ModuleShard], *, is_gated: bool = False
    ) -> PackedWeight:
        return self.kernels.quantize(weight, is_gated=is_gated)


class RoundingPromptsMethod(Int8Method):
    """Weights of 8 bits, and inputs of prompts' tokens as well: --quantization w8a8.

    A token is rounded or not by its place alone, whatever is beside it: what was generated never
    is, nor anything in the last layer, where an answer's tokens go on alone, or before queries,
    keys and values, where it costs most.
    """

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels)
        self._prompts = PromptRuns()

    @property
    def exact_inputs(self) -> LinearMethod:
        """See `LinearMethod.exact_inputs`."""
        return Int8Method(self.kernels)

    def begin_pass(self, batch: AttentionBatch) -> None:
        """See `LinearMethod.begin_pass`."""
        self._prompts.runs = batch.prompt_runs()

    def create(
        self, reader: WeightReader, shards: Sequence[ModuleShard], *, is_gated: bool = False
    ) -> Linear:
        """See `LinearMethod.create`."""
        weight, bias = merged_shards(reader, shards)
        rounded = self.kernels.quantize(weight, is_gated=is_gated)
        return WeightLinear(self.kernels, rounded._replace(prompts=self._prompts), bias)


class Int4Method(Int8Method):
    """Weights rounded to 4 bits in groups of inputs as they are read: --quantization int4.

    The output layer, which `make` is for, has 8 bits: it decides between tokens.
    """

    GROUP_SIZE = 32
    kinds = Packed.INT8 | Packed.INT4

    def create(
        self, reader: WeightReader, shards: Sequence[ModuleShard], *, is_gated: bool = False
    ) -> Linear:
        """See `LinearMethod.create`."""
        weight, bias = merged_shards(reader, shards)
        return WeightLinear(self.kernels, self._rounded(weight, shards, is_gated=is_gated), bias)

    def _rounded(
        self, weight: Tensor, shards: Sequence[ModuleShard], *, is_gated: bool = False
    ) -> PackedWeight:
        rounded = self.kernels.quantize_groups(weight, self.GROUP_SIZE, is_gated=is_gated)
        if not bool(rounded.factors.isfinite().all()):
            names = ", ".join(shard.name for shard in shards)
            raise ModelLoadError(
                f"{names}: numbers as large as {float(weight.abs().max()):.3g} are beyond what"
                " --quantization int4 can hold"
            )
        return rounded


def rounded_to_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [N, K] as float8_e4m3fn, and the factor of each, float32 [N, 1]."""
    wide = rows.float()
    factors = (wide.abs().amax(dim=1, keepdim=True) / LARGEST).clamp_min(1e-30)
    return (wide / factors).to(torch.float8_e4m3fn), factors


class RoundingLinear:
    """A weight on a CPU whose products are by numbers of 8 bits, and perhaps a bias [out]."""

    __slots__ = ("_bias", "_factors", "_is_gated", "_kernels", "_weight")

    def __init__(
        self, kernels: Kernels, weight: Tensor, bias: Tensor | None, *, is_gated: bool
    ) -> None:
        values, factors = rounded_to_fp8(weight)
        self._kernels, self._bias, self._is_gated = kernels, bias, is_gated
        self._factors = factors.T.contiguous()
        # Numbers of 8 bits are those of the model's type, too.
        self._weight = kernels.pack_weight(values.to(weight.dtype))

    def apply(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """See `Linear.apply`."""
        assert dtype is None, "the output layer is not rounded"
        values, factors = rounded_to_fp8(x)
        sums = self._kernels.linear(values.to(x.dtype), self._weight, None, dtype=torch.float32)
        product = sums.mul_(factors).mul_(self._factors)
        if self._bias is not None:
            product = product + self._bias
        product = product.to(x.dtype)
        return self._kernels.silu_and_mul(product) if self._is_gated else product

    def rows(self, in_size: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
        """See `Linear.rows`."""
        return None


class Fp8Method(Int8Method):
    """Weights rounded to 8-bit floating point as they are read: --quantization fp8.

    The output layer, which `make` is for, stays as it is: it decides between tokens.
    """

    kinds = Packed.FP8

    make = UnquantizedMethod.make

    def create(
        self, reader: WeightReader, shards: Sequence[ModuleShard], *, is_gated: bool = False
    ) -> Linear:
        """See `LinearMethod.create`."""
        weight, bias = merged_shards(reader, shards)
        if Can.FP8 not in self.kernels.can:
            return RoundingLinear(self.kernels, weight, bias, is_gated=is_gated)
        self.has_fp8_rows = True
        rounded = self._rounded(weight, shards, is_gated=is_gated)
        return WeightLinear(self.kernels, rounded._replace(rounds_rows=True), bias)

    def _rounded(
        self, weight: Tensor, shards: Sequence[ModuleShard], *, is_gated: bool = False
    ) -> Fp8Weight:
        """Round a weight; of an expert activations stay as they are."""
        values, factors = rounded_to_fp8(weight)
        return self.kernels.pack_fp8(values, factors, group_size=values.shape[1], is_gated=is_gated)


class StoredMethod(UnquantizedMethod):
    """Weights that are quantised in the files, by their own integers and factors, others plain.

    Where the kernels cannot hold them without a loss, they become plain as well.
    """

    kinds = ~Packed.NONE

    def __init__(self, kernels: Kernels, *, rounds_tokens: bool = False) -> None:
        """`rounds_tokens`: see `WeightFormat`."""
        super().__init__(kernels)
        self._rounds_tokens = rounds_tokens
        self.num_kept = 0
        self.num_widened = 0
        """Products by quantised weights that became plain."""
        self.num_fp8 = 0
        """Products by weights of floating point of 8 bits."""

    def create(
        self, reader: WeightReader, shards: Sequence[ModuleShard], *, is_gated: bool = False
    ) -> Linear:
        """See `LinearMethod.create`."""
        stored, packed = self._stored(reader, shards), None
        if len(stored) == len(shards):
            packed = packed_weight(self.kernels, stored, reader.device, is_gated=is_gated)
            if isinstance(packed, Int8Weight | Fp8Weight):
                packed = packed._replace(rounds_rows=self._rounds_rows(packed))
        if packed is None:
            self.num_widened += bool(stored)
            return super().create(reader, shards, is_gated=is_gated)
        self.num_kept += 1
        return WeightLinear(self.kernels, packed, merged_bias(reader, shards))

    def pack_experts(
        self, reader: WeightReader, gate_ups: Experts, downs: Experts
    ) -> PackedExpertWeights | None:
        """See `LinearMethod.pack_experts`."""
        found: tuple[list[AnyPacked], list[AnyPacked]] = ([], [])
        for pair in zip(gate_ups, downs, strict=True):
            for weights, shards in zip(found, pair, strict=True):
                stored = self._stored(reader, shards)
                if len(stored) < len(shards):
                    return None
                packed: AnyPacked | None = packed_fp4(self.kernels, stored, reader.device)
                packed = packed or packed_weight(self.kernels, stored, reader.device)
                if isinstance(packed, Int8Weight | Fp8Weight):
                    packed = packed._replace(rounds_rows=self._rounds_rows(packed))
                if packed is None or type(packed) is not type((weights or [packed])[0]):
                    self.num_widened += len(gate_ups) + len(downs)
                    return None
                weights.append(packed)
        self.num_kept += len(gate_ups) + len(downs)
        return found

    def _rounds_rows(self, packed: Int8Weight | Fp8Weight) -> bool:
        """Return whether rows are rounded for products by a weight, too."""
        if isinstance(packed, Int8Weight):
            return self._rounds_tokens
        self.num_fp8 += 1
        is_rounded = Can.FP8_PRODUCTS in self.kernels.can
        self.has_fp8_rows |= is_rounded and packed.group == 0
        return is_rounded

    def _stored(self, reader: WeightReader, shards: Sequence[ModuleShard]) -> list[StoredWeight]:
        """Return the parts that are quantised in the files."""
        parts = (
            reader.read_stored(f"{shard.name}.weight", rows=shard.rows, columns=shard.columns)
            for shard in shards
        )
        return [part for part in parts if part is not None]


def packed_weight(
    kernels: Kernels, parts: list[StoredWeight], device: torch.device, *, is_gated: bool = False
) -> PackedWeight | None:
    """Return parts with the same inputs, one below the other; None: the kernels hold no such."""
    fp8 = fp8_of(parts) if Can.FP8 in kernels.can else None
    if fp8 is not None:
        own = fp8.values.to(device), fp8.factors.to(device)
        return kernels.pack_fp8(*own, group_size=fp8.group_size, is_gated=is_gated)
    groups = groups_of(parts)
    if groups is None:
        return None
    if groups.has_output_factors:
        integers = (groups.integers ^ 0x80).view(torch.int8).to(device)
        return kernels.pack_int8(integers, groups.factors[:, 0].to(device), is_gated=is_gated)
    return kernels.pack_groups(
        groups.integers.to(device),
        groups.factors.half().to(device),
        groups.zeros.to(torch.uint8).to(device),
        bits=groups.bits,
        group_size=groups.group_size,
        is_gated=is_gated,
    )


def packed_fp4(
    kernels: Kernels, parts: list[StoredWeight], device: torch.device
) -> Fp4Weight | None:
    """Return parts one below the other; None: no numbers of 4 bits, or they begin in a group."""
    codes = [part.codes for part in parts if part.codes is not None]
    size = parts[0].group_size
    if size is None or len(codes) < len(parts) or any(part.first_input for part in parts):
        return None
    # A code stands for itself, where values and factors are of twice as much.
    factors = torch.cat([2.0 * part.factors for part in parts])
    return kernels.pack_fp4(torch.cat(codes).to(device), factors.to(device), group_size=size)
