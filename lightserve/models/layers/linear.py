"""Linear layers and norms: how weights are stored and multiplied, and how ranks share them.

A `LinearMethod` turns the shards of one or more modules of a checkpoint into a `Linear`: it keeps
plain weights as they are or rounds them, or keeps weights that a checkpoint has rounded itself
(`layers.quantized`).

    merged column-parallel weight of rank r, [sum of part sizes, in]:
        ┌── q_proj rows of r ──┬─ k_proj rows of r ─┬─ v_proj rows of r ─┐
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from lightserve.kernels.interface import AttentionBatch, Kernels
from lightserve.kernels.weights import (
    Fp4Weight,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    Packed,
    Weight,
)
from lightserve.models.base import Part, TensorParallel, logits_dtype
from lightserve.models.config import ModelConfig
from lightserve.models.plain_config import NormWeights
from lightserve.models.stored_weights import StoredWeight

# Where layers get their weights from: the seam between the layers and the loader.


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
        now or when all is read, when it holds a value that is not finite; an infinite single
        number, without dimensions, is the end of a range that has none.
        """

    def read_stored(
        self, name: str, *, rows: Part | None = None, columns: Part | None = None
    ) -> StoredWeight | None:
        """Return a part of a weight as it is quantised in the files; None: it is not.

        Raises ModelLoadError naming file and tensor.
        """


def read_tensor(
    reader: WeightReader,
    name: str,
    *shape: int,
    rows: Part | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the tensor `name`, or some rows of it, of a shape; `dtype` None: the reader's."""
    tensor = torch.empty(shape, dtype=dtype or reader.dtype, device=reader.device)
    reader.read_into(tensor, name, rows=rows)
    return tensor


def rounded_root(size: int, dtype: torch.dtype) -> float:
    """Return the square root of a size, rounded to a type."""
    return float(torch.tensor(math.sqrt(size), dtype=dtype))


# Normalisation, alone or fused with the residual sum before it.


class Norm(Protocol):
    """Normalises the last dimension."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised x [..., size]."""

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual), all [T, size]; may overwrite `residual`."""


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """x / rms(x) * weight over the last dimension, in float32 inside."""

    kernels: Kernels
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """See `Norm`."""
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `Norm.add`."""
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """(x - mean(x)) / std(x) * weight + bias over the last dimension, in float32 inside."""

    kernels: Kernels
    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """See `Norm`."""
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See `Norm.add`."""
        residual = x + residual
        return self(residual), residual


class SplitNorm:
    """An RMS norm over features that are split over the ranks."""

    def __init__(self, context: ModelContext, name: str, part: Part, num_features: int) -> None:
        """`part`: this rank's features; with fewer KV heads than ranks several have the same."""
        self._weight = context.norm_weight(name, part)
        self._tp, self._kernels = context.tp, context.kernels
        self._eps = context.config.rms_norm_eps
        self._num_counted = part.size * context.tp.size
        """Numbers that the ranks' sums have together; some are counted several times."""
        assert self._num_counted % num_features == 0

    def __call__(self, x: Tensor) -> Tensor:
        """Return the normalised x [T, this rank's features]."""
        if self._tp.size == 1:
            return self._kernels.rms_norm(x.contiguous(), self._weight, self._eps)
        wide = x.float()
        total = self._tp.all_reduce(wide.square().sum(dim=-1, keepdim=True))
        wide = wide * torch.rsqrt(total / self._num_counted + self._eps)
        return (wide * self._weight.float()).to(x.dtype)


# Embedding and LM head, each rank holding an equal range of the vocabulary.
#
# The vocabulary is padded to a multiple of the number of ranks; padded rows are zero, and padded
# logits are cut off after the gather.


class VocabWeight:
    """This rank's rows [ceil(vocab / size), hidden] of an embedding or LM-head matrix."""

    def __init__(
        self,
        reader: WeightReader,
        tp: TensorParallel,
        name: str,
        *,
        vocab_size: int,
        hidden_size: int,
    ) -> None:
        self.vocab_size = vocab_size
        num_rows = -(-vocab_size // tp.size)
        self.first_id = tp.rank * num_rows
        self.num_ids = max(0, min(num_rows, vocab_size - self.first_id))
        self.dtype, self.device = reader.dtype, reader.device
        self.tensor = torch.empty(num_rows, hidden_size, dtype=self.dtype, device=self.device)
        self.tensor[self.num_ids :].zero_()
        reader.read_into(self.tensor[: self.num_ids], name, rows=Part(self.first_id, self.num_ids))
        self._rows: Callable[[Tensor], Tensor] | None = None

    def read_bias(self, reader: WeightReader, name: str) -> Tensor:
        """Return the bias of this rank's rows, zero for padded ones."""
        bias = torch.zeros(len(self.tensor), dtype=self.dtype, device=self.device)
        reader.read_into(bias[: self.num_ids], name, rows=Part(self.first_id, self.num_ids))
        return bias

    def normalise(self) -> None:
        """Divide each row by its length."""
        lengths = self.tensor.float().norm(dim=1, keepdim=True).clamp_min(1e-12)
        self.tensor.copy_(self.tensor.float() / lengths)

    def look_up(self, rows: Tensor) -> Tensor:
        """Return rows int64 [T] of this rank's, [T, hidden]."""
        if self._rows is None:
            return functional.embedding(rows, self.tensor)
        return self._rows(rows)

    def keep_only(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Look rows up by `rows` from now on, and forget the plain weight."""
        self._rows = rows
        self.tensor = self.tensor[:0].clone()


class VocabEmbedding:
    """Token ids to hidden states."""

    def __init__(self, weight: VocabWeight, tp: TensorParallel) -> None:
        self._weight = weight
        self._tp = tp

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Look up int64 ids [T] in 0 … vocab_size-1 -> [T, hidden], on every rank."""
        weight = self._weight
        if self._tp.size == 1:
            return weight.look_up(input_ids)
        local_ids = input_ids - weight.first_id
        elsewhere = (local_ids < 0) | (local_ids >= weight.num_ids)
        hidden = weight.look_up(local_ids.masked_fill(elsewhere, 0))
        return self._tp.all_reduce(hidden.masked_fill_(elsewhere.unsqueeze(1), 0))


class LMHead:
    """Hidden states to logits on rank 0.

    Keeps its weight as `method` does and not `weight` itself. The embedding of a tied model looks
    its rows up there, too, where the kernels can: it is kept once.
    """

    def __init__(
        self,
        weight: VocabWeight,
        tp: TensorParallel,
        method: LinearMethod,
        *,
        bias: Tensor | None = None,
    ) -> None:
        """`bias`: of this rank's rows, as many as `weight` has."""
        self._linear = method.make(weight.tensor, bias)
        rows = self._linear.rows(weight.tensor.shape[1], weight.dtype)
        if rows is not None:
            weight.keep_only(rows)
        self._vocab_size = weight.vocab_size
        self._device = weight.device
        self._dtype = logits_dtype(weight.dtype, self._device)
        self._tp = tp

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor | None:
        """Return logits [L, vocab] on rank 0, None elsewhere; hidden [L, hidden].

        `out` [L, vocab] is filled and returned instead of a new tensor.
        """
        logits = self._tp.gather(self._linear.apply(hidden, dtype=self._dtype))
        if logits is None:
            return None
        logits = logits[:, : self._vocab_size]
        return logits if out is None else out.copy_(logits)

    def no_logits(self) -> Tensor | None:
        """Return the result of a pass without wanted logits: [0, vocab], None beyond rank 0."""
        if self._tp.rank != 0:
            return None
        return torch.empty(0, self._vocab_size, dtype=self._dtype, device=self._device)


@dataclass(frozen=True)
class ModuleShard:
    """The part of one module's matrix that this rank holds."""

    name: str
    """Module name in the checkpoint, such as model.layers.0.self_attn.q_proj."""
    rows: Part
    """Output features."""
    columns: Part
    """Input features."""
    has_bias: bool = False


class Linear(Protocol):
    """A loaded linear map."""

    def apply(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return x @ weight.T + bias; x [N, in] -> [N, out] of this rank.

        `dtype` is x's own, the default, or float32. A map of gates and ups, made with `is_gated`,
        gives silu(gate) * up, [N, out / 2], of x's dtype.
        """

    def rows(self, in_size: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
        """Return a function that looks up rows int64 [N] of the weight [out, in], or None."""


AnyPacked = Int8Weight | GroupedWeight | Fp8Weight | Fp4Weight
Experts = Sequence[Sequence[ModuleShard]]
"""Modules of each expert of a layer."""
PackedExpertWeights = tuple[Sequence[AnyPacked], Sequence[AnyPacked]]
"""First and last weights of each expert."""


class LinearMethod(Protocol):
    """How weights are kept."""

    kernels: Kernels
    kinds: Packed
    """Kinds of packed weights that it may make."""
    has_fp8_rows: bool
    """Whether it has made weights for which whole rows are rounded to e4m3."""

    @property
    def exact_inputs(self) -> LinearMethod:
        """Method for weights whose inputs stay as they are, whatever is done to others'."""

    def begin_pass(self, batch: AttentionBatch) -> None:
        """Take in the pass whose products come next."""

    def make(self, weight: Tensor, bias: Tensor | None, *, is_gated: bool = False) -> Linear:
        """Return the map of a plain weight [out, in]; `weight` itself is not kept."""

    def create(
        self, reader: WeightReader, shards: Sequence[ModuleShard], *, is_gated: bool = False
    ) -> Linear:
        """Read the shards, stack their outputs in order, and return the merged map.

        All shards have the same columns and all or none a bias. With `is_gated` there are two of
        one size, gates and ups.
        """

    def pack_experts(
        self, reader: WeightReader, gate_ups: Experts, downs: Experts
    ) -> PackedExpertWeights | None:
        """Return each expert's merged weights for `Kernels.stack_experts`, without biases.

        None: the weights are plain, or cannot all be packed in one way.
        """


def merged_shards(
    reader: WeightReader, shards: Sequence[ModuleShard]
) -> tuple[Tensor, Tensor | None]:
    """Read plain shards into one contiguous weight, and their biases into one."""
    num_rows = sum(shard.rows.size for shard in shards)
    num_columns = shards[0].columns.size
    weight = torch.empty(num_rows, num_columns, dtype=reader.dtype, device=reader.device)
    start = 0
    for shard in shards:
        end = start + shard.rows.size
        reader.read_into(
            weight[start:end], f"{shard.name}.weight", rows=shard.rows, columns=shard.columns
        )
        start = end
    return weight, merged_bias(reader, shards)


def merged_bias(reader: WeightReader, shards: Sequence[ModuleShard]) -> Tensor | None:
    """Read their biases into one; None: they have none."""
    if not shards[0].has_bias:
        return None
    num_rows = sum(shard.rows.size for shard in shards)
    bias = torch.empty(num_rows, dtype=reader.dtype, device=reader.device)
    start = 0
    for shard in shards:
        end = start + shard.rows.size
        reader.read_into(bias[start:end], f"{shard.name}.bias", rows=shard.rows)
        start = end
    return bias


class WeightLinear:
    """A weight [out, in] as kernels hold it, and perhaps a bias [out]."""

    __slots__ = ("bias", "is_gated", "kernels", "weight")

    def __init__(
        self, kernels: Kernels, weight: Weight, bias: Tensor | None, *, is_gated: bool = False
    ) -> None:
        """`is_gated`: a plain weight holds gates and ups; packed ones say so themselves."""
        self.kernels = kernels
        self.weight = weight
        self.bias = bias
        self.is_gated = is_gated

    def apply(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """See `Linear.apply`."""
        if not self.is_gated:
            return self.kernels.linear(x, self.weight, self.bias, dtype=dtype)
        assert isinstance(self.weight, Tensor) and dtype is None
        return self.kernels.gated_linear(x, self.weight, self.bias)

    def rows(self, in_size: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
        """See `Linear.rows`."""
        return self.kernels.rows_of(self.weight, in_size, dtype)


def rounding_weight(linear: Linear) -> tuple[Fp8Weight, Tensor | None] | None:
    """Return the weight and bias of a map that rounds its rows to e4m3; None: it does not."""
    if not isinstance(linear, WeightLinear) or not isinstance(linear.weight, Fp8Weight):
        return None
    return (linear.weight, linear.bias) if linear.weight.rounds_rows else None


class UnquantizedMethod:
    """Weights as the checkpoint has them, in the model's dtype and the kernels' layout."""

    kinds = Packed.NONE
    """See `LinearMethod`."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.has_fp8_rows = False

    @property
    def exact_inputs(self) -> LinearMethod:
        """See `LinearMethod.exact_inputs`."""
        return self

    def begin_pass(self, batch: AttentionBatch) -> None:
        """See `LinearMethod.begin_pass`."""

    def make(self, weight: Tensor, bias: Tensor | None, *, is_gated: bool = False) -> Linear:
        """See `LinearMethod.make`."""
        packed = self.kernels.pack_weight(weight, is_gated=is_gated)
        return WeightLinear(self.kernels, packed, bias, is_gated=is_gated)

    def create(
        self, reader: WeightReader, shards: Sequence[ModuleShard], *, is_gated: bool = False
    ) -> Linear:
        """See `LinearMethod.create`."""
        return self.make(*merged_shards(reader, shards), is_gated=is_gated)

    def pack_experts(
        self, reader: WeightReader, gate_ups: Experts, downs: Experts
    ) -> PackedExpertWeights | None:
        """See `LinearMethod.pack_experts`."""
        return None


class ColumnParallelLinear:
    """Several modules with one input merged; each rank computes its part of the outputs."""

    __slots__ = ("_is_gated", "_joined", "_kernels", "linear")

    def __init__(
        self,
        context: ModelContext,
        parts: Sequence[tuple[str, Part]],
        *,
        has_bias: bool = False,
        in_size: int | None = None,
        is_gated: bool = False,
    ) -> None:
        """Load the modules of `parts` (name, this rank's output features) in that order.

        `in_size`: None: that of hidden states. With `is_gated` they are gates and ups.
        """
        columns = Part(0, in_size or context.config.hidden_size)
        shards = [ModuleShard(name, rows, columns, has_bias) for name, rows in parts]
        self._is_gated = is_gated
        self.linear = linear = context.method.create(context.reader, shards, is_gated=is_gated)
        self._kernels = context.kernels
        self._joined: tuple[Tensor | Fp8Weight, Tensor | None] | None = rounding_weight(linear)
        """A weight by which kernels multiply in one call with the norm before, and its bias."""
        if isinstance(linear, WeightLinear) and isinstance(linear.weight, Tensor):
            self._joined = linear.weight, linear.bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return this rank's outputs; x [T, in] -> [T, sum of part sizes], gated: half of it."""
        return self.linear.apply(x)

    def wide(self, x: Tensor) -> Tensor:
        """Return this rank's outputs in float32."""
        return self.linear.apply(x, dtype=torch.float32)

    def behind(self, norm: Norm, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (outputs of norm(x + residual), x + residual); may overwrite `residual`."""
        if self._joined is None or not isinstance(norm, RMSNorm):
            x, residual = norm.add(x, residual)
            return self.linear.apply(x), residual
        return self._kernels.add_norm_linear(
            x, residual, (norm.weight, norm.eps), *self._joined, is_gated=self._is_gated
        )


class RowParallelLinear:
    """Each rank multiplies its part of the inputs; the sum over the ranks is the output."""

    __slots__ = ("_tp", "linear")

    def __init__(
        self, context: ModelContext, name: str, columns: Part, *, has_bias: bool = False
    ) -> None:
        """Load this rank's `columns`, which give hidden states; rank 0 alone adds the bias."""
        rows, adds_bias = Part(0, context.config.hidden_size), has_bias and context.tp.rank == 0
        shard = ModuleShard(name, rows, columns, adds_bias)
        self.linear = context.method.create(context.reader, [shard])
        self._tp = context.tp

    def __call__(self, x: Tensor) -> Tensor:
        """Return the whole output on every rank; x [T, columns] -> [T, out]."""
        return self._tp.all_reduce(self.share(x))

    def share(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sum."""
        return self.linear.apply(x)


@dataclass(frozen=True, kw_only=True)
class ModelContext:
    """Everything that a layer's constructor needs; layers keep the parts that they use."""

    config: ModelConfig
    reader: WeightReader
    kernels: Kernels
    tp: TensorParallel
    method: LinearMethod
    context_len: int
    """Longest sequence that is served, in tokens."""

    @property
    def exact(self) -> ModelContext:
        """The context of weights whose inputs stay as they are, see `LinearMethod.exact_inputs`."""
        return replace(self, method=self.method.exact_inputs)

    @property
    def plain(self) -> ModelContext:
        """The context of weights that are not rounded."""
        return replace(self, method=UnquantizedMethod(self.kernels))

    def whole(
        self, name: str, num_outputs: int, num_inputs: int, *, has_bias: bool = False
    ) -> Linear:
        """Load a product that every rank has whole, and whose inputs stay as they are."""
        shard = ModuleShard(name, Part(0, num_outputs), Part(0, num_inputs), has_bias)
        return self.method.exact_inputs.create(self.reader, [shard])

    def norm_weight(self, name: str, part: Part) -> Tensor:
        """Load a part of the weight of the norm `name`."""
        kind, reader = self.config.norm_weights, self.reader
        dtype = reader.dtype if kind is NormWeights.PLAIN else torch.float32
        weight = read_tensor(reader, f"{name}.weight", part.size, rows=part, dtype=dtype)
        return weight.add_(1.0) if kind is NormWeights.ABOVE_ONE else weight

    def norm(self, name: str, *, size: int) -> Norm:
        """Load the normalisation `name`."""
        config, reader = self.config, self.reader
        weight = self.norm_weight(name, Part(0, size))
        if config.layer_norm_bias is None:
            return RMSNorm(self.kernels, weight, config.rms_norm_eps)
        bias = read_tensor(reader, f"{name}.bias", size) if config.layer_norm_bias else None
        return LayerNorm(self.kernels, weight, bias, config.rms_norm_eps)
