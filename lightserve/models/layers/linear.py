"""Linear layers: how a weight is stored and multiplied, and how it is split over the ranks.

A `LinearMethod` turns the shards of one or more modules of a checkpoint into a `Linear`. The
unquantised method is here; a quantised one is another class with the same `create`, which reads
the tensors of its own format under the same module names.

    merged column-parallel weight of rank r, [sum of part sizes, in]:
        ┌── q_proj rows of r ──┬─ k_proj rows of r ─┬─ v_proj rows of r ─┐
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightserve.kernels.interface import Kernels
from lightserve.models.layers.weights import WeightReader
from lightserve.models.parallel import Part, TensorParallel


@dataclass(frozen=True, kw_only=True)
class ModuleShard:
    """The part of one module's matrix that this rank holds."""

    name: str
    """Module name in the checkpoint, such as model.layers.0.self_attn.q_proj."""
    rows: Part
    """Output features."""
    columns: Part
    """Input features."""
    has_bias: bool


class Linear(Protocol):
    """A loaded linear map."""

    def apply(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias; x [N, in] -> [N, out] of this rank."""


class LinearMethod(Protocol):
    """A weight format."""

    def create(self, reader: WeightReader, shards: Sequence[ModuleShard]) -> Linear:
        """Read the shards, stack their outputs in order, and return the merged map.

        All shards have the same columns and all or none a bias.
        """


class UnquantizedLinear:
    """A dense weight [out, in], contiguous, and perhaps a bias [out]."""

    __slots__ = ("bias", "kernels", "weight")

    def __init__(self, kernels: Kernels, weight: Tensor, bias: Tensor | None) -> None:
        self.kernels = kernels
        self.weight = weight
        self.bias = bias

    def apply(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias."""
        return self.kernels.linear(x, self.weight, self.bias)


class UnquantizedMethod:
    """Weights as the checkpoint has them, in the model's dtype and the kernels' layout."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def create(self, reader: WeightReader, shards: Sequence[ModuleShard]) -> Linear:
        """Read the shards into one contiguous weight."""
        num_rows = sum(shard.rows.size for shard in shards)
        num_columns = shards[0].columns.size
        weight = torch.empty(num_rows, num_columns, dtype=reader.dtype, device=reader.device)
        bias = torch.empty(num_rows, dtype=reader.dtype, device=reader.device)
        start = 0
        for shard in shards:
            end = start + shard.rows.size
            reader.read_into(
                weight[start:end], f"{shard.name}.weight", rows=shard.rows, columns=shard.columns
            )
            if shard.has_bias:
                reader.read_into(bias[start:end], f"{shard.name}.bias", rows=shard.rows)
            start = end
        weight = self._kernels.pack_weight(weight)
        return UnquantizedLinear(self._kernels, weight, bias if shards[0].has_bias else None)


class ColumnParallelLinear:
    """Several modules with one input merged; each rank computes its part of the outputs."""

    __slots__ = ("_linear",)

    def __init__(
        self,
        method: LinearMethod,
        reader: WeightReader,
        parts: Sequence[tuple[str, Part]],
        *,
        in_size: int,
        has_bias: bool,
    ) -> None:
        """Load the modules of `parts` (name, this rank's output features) in that order."""
        columns = Part(0, in_size)
        shards = [
            ModuleShard(name=name, rows=rows, columns=columns, has_bias=has_bias)
            for name, rows in parts
        ]
        self._linear = method.create(reader, shards)

    def __call__(self, x: Tensor) -> Tensor:
        """Return this rank's outputs; x [T, in] -> [T, sum of part sizes]."""
        return self._linear.apply(x)


class RowParallelLinear:
    """Each rank multiplies its part of the inputs; the sum over the ranks is the output."""

    __slots__ = ("_linear", "_tp")

    def __init__(
        self,
        method: LinearMethod,
        reader: WeightReader,
        tp: TensorParallel,
        name: str,
        *,
        columns: Part,
        out_size: int,
        has_bias: bool,
    ) -> None:
        """Load this rank's `columns`; rank 0 alone adds the bias."""
        shard = ModuleShard(
            name=name,
            rows=Part(0, out_size),
            columns=columns,
            has_bias=has_bias and tp.rank == 0,
        )
        self._linear = method.create(reader, [shard])
        self._tp = tp

    def __call__(self, x: Tensor) -> Tensor:
        """Return the whole output on every rank; x [T, columns] -> [T, out]."""
        return self._tp.all_reduce(self._linear.apply(x))
