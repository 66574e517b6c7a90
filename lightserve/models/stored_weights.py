"""Quantised weights as checkpoints have them: read in parts, made numbers or integers in groups.

Every layout becomes a `StoredWeight`. `numbers` are its numbers; `groups_of` is the same as the
native core's products take it, where these lose nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightserve.models.base import Part
from lightserve.models.moe_config import FP4_HALVES, MXFP4_BIAS, MXFP4_GROUP, MXFP4_NO_NUMBER
from lightserve.models.weight_format import WORD_BITS, Layout, WeightFormat

ReadPart = Callable[[str, Part | None, Part | None], Tensor]
"""Returns a part (first and second dimension) of a module's tensor, by name."""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place of each of eight outputs in an int32, in values of 4 bits from the lowest."""
PACKED_SIZES = (128, 96, 64, 32)
"""Inputs of a group that `pack_groups` takes, the best first."""
FP8_SIZES = (128, 64)
"""Group sizes of `pack_fp8`."""


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """A part of a weight, [M, K]: (value - zero) * factor, with its output's and group's."""

    values: Tensor
    """uint8 or float8_e4m3fn [M, K]."""
    factors: Tensor
    """float32 [M, G]."""
    zeros: Tensor | None
    """int16 [M, G]; None: 0."""
    bits: int
    group_size: int | None
    """Inputs that share a factor, one group after the other; None: `groups` says."""
    first_input: int = 0
    """Inputs of the first group that stand before the part."""
    groups: Tensor | None = None
    """int64 [K], each input's group, where they do not follow each other."""
    codes: Tensor | None = None
    """uint8 [M, K] below 16, where values stand for numbers of floating point of 4 bits."""

    def numbers(self) -> Tensor:
        """Return its numbers, float32 [M, K]."""
        groups = self.groups
        if groups is None:
            assert self.group_size is not None
            places = torch.arange(self.values.shape[1]) + self.first_input
            groups = places // self.group_size
        wide = self.values.float()
        if self.zeros is not None:
            wide -= self.zeros.float()[:, groups]
        return wide.mul_(self.factors[:, groups])

    def rows(self, order: Tensor) -> StoredWeight:
        """Return the outputs int64 [n] in that order."""
        return StoredWeight(
            self.values[order],
            self.factors[order],
            None if self.zeros is None else self.zeros[order],
            self.bits,
            self.group_size,
            self.first_input,
            self.groups,
            None if self.codes is None else self.codes[order],
        )

    def columns(self, parts: Sequence[Part]) -> StoredWeight | None:
        """Return parts of the inputs, one after the other; None: a part is not of whole groups."""
        size = self.group_size
        if size is None or self.first_input or any(p.start % size or p.size % size for p in parts):
            return None

        def taken(tensor: Tensor, unit: int) -> Tensor:
            found = [tensor.narrow(1, p.start // unit, p.size // unit) for p in parts]
            return torch.cat(found, dim=1)

        return StoredWeight(
            taken(self.values, 1),
            taken(self.factors, size),
            None if self.zeros is None else taken(self.zeros, size),
            self.bits,
            size,
            codes=None if self.codes is None else taken(self.codes, 1),
        )


# MXFP4 (OCP Microscaling Formats 1.0, section 5.3.3): a number has a sign, two bits of exponent and
# one of mantissa; 32 inputs share a power of two, whose exponent is a byte. Twice a number is an
# integer up to 12: these products of 8-bit integers in groups are exact.

_ZERO = max(FP4_HALVES)
_INTEGERS = torch.tensor([_ZERO + half for half in FP4_HALVES], dtype=torch.uint8)
"""Twice the number of each code, plus `_ZERO`."""


def fp4_weight(codes: Tensor, exponents: Tensor, columns: Part) -> StoredWeight:
    """Return columns of a weight in MXFP4; codes uint8 [M, K], exponents uint8 [M, K / 32].

    Groups whose exponent stands for no number have NaN as their factor.
    """
    first = columns.start // MXFP4_GROUP
    end = -(-(columns.start + columns.size) // MXFP4_GROUP)
    stored = exponents[:, first:end]
    powers = stored.int() - MXFP4_BIAS - 1  # of halves
    factors = torch.ldexp(torch.ones(powers.shape), powers)
    own = codes.narrow(1, columns.start, columns.size)
    return StoredWeight(
        values=_INTEGERS[own.int()],
        factors=factors.masked_fill_(stored == MXFP4_NO_NUMBER, torch.nan),
        zeros=torch.full(powers.shape, _ZERO, dtype=torch.int16),
        bits=8,
        group_size=MXFP4_GROUP,
        first_input=columns.start % MXFP4_GROUP,
        codes=own,
    )


class IntegerGroups(NamedTuple):
    """A weight [M, K] as `Kernels.pack_groups` takes it."""

    integers: Tensor
    """uint8 [M, K]."""
    factors: Tensor
    """float32 [M, G]."""
    zeros: Tensor
    """int16 [M, G]."""
    bits: int
    group_size: int

    @property
    def has_output_factors(self) -> bool:
        """Whether each output has one factor and these are integers with a sign: of 8 bits."""
        one = bool((self.factors == self.factors[:, :1]).all())
        return self.bits == 8 and one and bool((self.zeros == 128).all())


def groups_of(parts: list[StoredWeight]) -> IntegerGroups | None:
    """Return parts with the same inputs, one below the other; None: the core cannot hold them.

    Factors must be float16's, or those of whole outputs of 8 bits, and zeros not negative.
    """
    bits = {part.bits for part in parts}
    if len(bits) > 1 or any(part.values.dtype is not torch.uint8 for part in parts):
        return None
    sizes = [_packed_size(part) for part in parts]
    found = [size for size in sizes if size is not None]
    if len(found) < len(parts):
        return None
    size = min(found)
    if any(other % size for other in found):
        size = PACKED_SIZES[-1]
    num_inputs = parts[0].values.shape[1]
    starts = torch.arange(0, num_inputs, size)
    factors, zeros = [], []
    for part in parts:
        assert part.group_size is not None
        places = (starts + part.first_input) // part.group_size
        factors.append(part.factors[:, places])
        none = torch.zeros_like(part.factors, dtype=torch.int16)
        zeros.append((none if part.zeros is None else part.zeros)[:, places])
    groups = IntegerGroups(
        torch.cat([part.values for part in parts]),
        torch.cat(factors),
        torch.cat(zeros),
        parts[0].bits,
        size,
    )
    if groups.has_output_factors:
        return groups
    is_kept = torch.equal(groups.factors.half().float(), groups.factors)
    fits = bool(((groups.zeros >= 0) & (groups.zeros <= 255)).all())
    return groups if is_kept and fits else None


class Fp8Groups(NamedTuple):
    """A weight [M, K] as `Kernels.pack_fp8` takes it."""

    values: Tensor
    """float8_e4m3fn [M, K]."""
    factors: Tensor
    """float32 [M, G]."""
    group_size: int


def fp8_of(parts: list[StoredWeight]) -> Fp8Groups | None:
    """Return parts with the same inputs, one below the other; None: they are not of that kind."""
    if any(part.values.dtype is not torch.float8_e4m3fn for part in parts):
        return None
    num_inputs = parts[0].values.shape[1]
    values = torch.cat([part.values.view(torch.uint8) for part in parts])
    sizes = {_packed_size(part, FP8_SIZES) for part in parts}
    factors = [part.factors for part in parts]
    if all(own.shape[1] == 1 for own in factors):
        return Fp8Groups(values.view(torch.float8_e4m3fn), torch.cat(factors), num_inputs)
    if len(sizes) > 1 or None in sizes:
        return None
    (size,) = sizes
    assert size is not None
    starts = torch.arange(0, num_inputs, size)
    factors = [
        part.factors[:, (starts + part.first_input) // (part.group_size or num_inputs)]
        for part in parts
    ]
    return Fp8Groups(values.view(torch.float8_e4m3fn), torch.cat(factors), size)


def _packed_size(part: StoredWeight, sizes: tuple[int, ...] = PACKED_SIZES) -> int | None:
    """Return the largest size of groups that begin wherever a group of the part begins."""
    if part.group_size is None:
        return None
    if part.factors.shape[1] == 1:
        return sizes[0]
    start = part.first_input % part.group_size
    fitting = (
        size
        for size in sizes
        if part.group_size % size == 0 and (part.group_size - start) % size == 0
    )
    return next(fitting, None)


# Reading.


def read_stored(
    form: WeightFormat,
    shape: tuple[int, int],
    rows: Part | None,
    columns: Part | None,
    read: ReadPart,
    *,
    has_order: bool,
) -> StoredWeight:
    """Return a part of the weight of a module, [M, K] as a whole.

    `has_order`: whether there is a tensor that names each input's group.

    Raises:
        ValueError: a tensor has a value that cannot be, beginning with the tensor's name.
    """
    rows, columns = rows or Part(0, shape[0]), columns or Part(0, shape[1])
    values, groups = _values(form, rows, columns, read), None
    if has_order:
        groups = read(form.order, columns, None).long()
    size = form.block_inputs or shape[1]
    part = _group_part(shape[1], size, columns, has_order=has_order)
    factors, zeros = _factors(form, shape, rows, part, read)
    if groups is not None:
        if bool(((groups < 0) | (groups >= factors.shape[1])).any()):
            raise ValueError(f"{form.order} names a group that there is not")
        in_turn = torch.arange(columns.start, columns.start + columns.size) // size
        if torch.equal(groups, in_turn):
            groups, part = None, _group_part(shape[1], size, columns, has_order=False)
            factors = factors[:, part.start : part.start + part.size]
            zeros = None if zeros is None else zeros[:, part.start : part.start + part.size]
    return StoredWeight(
        values,
        factors,
        zeros,
        form.bits,
        None if groups is not None else size,
        columns.start % size,
        groups,
    )


def _group_part(num_inputs: int, size: int, columns: Part, *, has_order: bool) -> Part:
    """Return the groups that inputs are of, all if their order is another."""
    if has_order:
        return Part(0, -(-num_inputs // size))
    first, end = columns.start // size, -(-(columns.start + columns.size) // size)
    return Part(first, end - first)


def _values(form: WeightFormat, rows: Part, columns: Part, read: ReadPart) -> Tensor:
    """Return uint8 or float8_e4m3fn [M, K]; integers with a sign are 128 larger."""
    match form.layout:
        case Layout.GPTQ:
            inner = columns.start % form.per_word
            words = read(form.values, _words(columns, form.per_word), rows)
            return _unpacked(words, form.bits, dim=0)[inner : inner + columns.size].T.contiguous()
        case Layout.AWQ:
            inner = rows.start % form.per_word
            words = read(form.values, columns, _words(rows, form.per_word))
            integers = _unpacked(words, form.bits, dim=1, order=AWQ_ORDER)
            return integers[:, inner : inner + rows.size].T.contiguous()
        case Layout.PACKED:
            inner = columns.start % form.per_word
            words = read(form.values, rows, _words(columns, form.per_word))
            return _unpacked(words, form.bits, dim=1)[:, inner : inner + columns.size].contiguous()
        case Layout.INT8:
            return _shifted(read(form.values, rows, columns))
        case Layout.FP8:
            return read(form.values, rows, columns).contiguous()


def _factors(
    form: WeightFormat, shape: tuple[int, int], rows: Part, groups: Part, read: ReadPart
) -> tuple[Tensor, Tensor | None]:
    """Return factors float32 [M, G] and zeros int16 [M, G] of some outputs and groups."""
    num_groups, half = form.num_groups(shape[1]), 1 << (form.bits - 1)
    match form.layout:
        case Layout.GPTQ | Layout.AWQ:
            factors = read(form.factors, groups, rows).float().T.contiguous()
            words = read(form.zeros, groups, _words(rows, form.per_word))
            order = AWQ_ORDER if form.layout is Layout.AWQ else None
            zeros = _unpacked(words, form.bits, dim=1, order=order).to(torch.int16)
            inner = rows.start % form.per_word
            return factors, zeros[:, inner : inner + rows.size].T + form.zero_offset
        case Layout.PACKED:
            factors = read(form.factors, rows, groups).float()
            zeros = torch.full(factors.shape, half, dtype=torch.int16)
            if form.has_zeros:
                words = read(form.zeros, _words(rows, form.per_word), groups)
                inner = rows.start % form.per_word
                unpacked = _unpacked(words, form.bits, dim=0)
                zeros = unpacked[inner : inner + rows.size].to(torch.int16)
            return factors, zeros
        case Layout.INT8 | Layout.FP8:
            factors = _spread(form, form.factors, shape[0], num_groups, read)
            factors = factors[rows.start : rows.start + rows.size]
            factors = factors[:, groups.start : groups.start + groups.size].float()
            if form.layout is Layout.FP8:
                return factors, None
            zeros = torch.full(factors.shape, half, dtype=torch.int16)
            if form.has_zeros:
                own = _spread(form, form.zeros, shape[0], num_groups, read)
                own = own[rows.start : rows.start + rows.size]
                zeros = zeros + own[:, groups.start : groups.start + groups.size].to(torch.int16)
            return factors, zeros


def _spread(
    form: WeightFormat, name: str, num_outputs: int, num_groups: int, read: ReadPart
) -> Tensor:
    """Return a tensor of factors as one of [all outputs, all groups]."""
    tensor = read(name, None, None)
    if form.block_outputs is None:
        return tensor.reshape(1, 1).expand(num_outputs, num_groups)
    return tensor.reshape(-1, num_groups).repeat_interleave(form.block_outputs, 0)[:num_outputs]


def _words(part: Part, per_word: int) -> Part:
    """Return the int32 that hold a part."""
    first, end = part.start // per_word, -(-(part.start + part.size) // per_word)
    return Part(first, end - first)


def _unpacked(
    words: Tensor, bits: int, *, dim: int, order: tuple[int, ...] | None = None
) -> Tensor:
    """Return the values in int32 [A, B] along `dim`, uint8; the first in the lowest bits."""
    places = order or tuple(range(WORD_BITS // bits))
    parts = [
        (words >> (bits * place)).bitwise_and_((1 << bits) - 1).to(torch.uint8) for place in places
    ]
    return torch.stack(parts, dim=dim + 1).flatten(dim, dim + 1)


def _shifted(integers: Tensor) -> Tensor:
    """Return int8 as uint8, 128 larger."""
    return integers.contiguous().view(torch.uint8) ^ 0x80
