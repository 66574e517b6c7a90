"""Reads tensors of a GGUF file as plain numbers, some rows at a time.

The layouts of blocks are those of llama.cpp's `ggml-quants` (`block_q4_0` to `block_q8_0`,
`block_q2_K` to `block_q6_K`, `block_iq4_nl`, `block_iq4_xs`, `block_mxfp4`). K-quants and IQ4_XS:
256 numbers in sub-blocks of 32 or 16, whose factors (and, in Q2_K, Q4_K and Q5_K, least values) are
themselves integers times a factor of the whole block. IQ4: codes of 4 bits stand for integers of a
table.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightserve.errors import ModelLoadError
from lightserve.models.base import Part
from lightserve.models.gguf import BLOCK_TYPES, GgufFile, GgufTensor
from lightserve.models.gguf_config import name_in_file
from lightserve.models.moe_config import FP4_HALVES, MXFP4_BIAS, MXFP4_NO_NUMBER
from lightserve.models.stored_weights import StoredWeight, fp4_weight
from lightserve.models.weight_copies import WeightCopies, is_finite, not_finite, weight_copies
from lightserve.models.weight_files import WeightFiles
from lightserve.progress import Advance

_VALUES = {
    **dict.fromkeys(("attn_qkv", "attn_gate", "ssm_conv1d"), False),
    **dict.fromkeys(("ssm_alpha", "ssm_beta", "ssm_dt", "ssm_a"), True),
}
"""Tensors with rows of value heads, and whether a head has one alone."""
_DECAYS = ".ssm_a"
"""Ending of the tensor that has decays themselves, not the logarithms of their sizes."""
CHUNK_NUMBERS = 1 << 22
"""Made numbers at a time: 16 MiB of float32."""


class TiledHeads(NamedTuple):
    """Value heads of Qwen3.5 as llama.cpp has them: the first of each key head, then the second.

    Layers have those of a key head side by side.
    """

    num_keys: int
    num_values: int
    """Value heads of all key heads."""
    dim: int
    """Numbers of a value head."""
    first: int
    """Channels of the convolution before those of values."""

    def places(self, part: Part, dim: int, first: int = 0) -> list[Part]:
        """Return where parts of a dimension are, in their order here.

        `part` has whole heads of `dim` numbers, behind `first` others.
        """
        end = part.start + part.size
        found = [Part(part.start, min(end, first) - part.start)] if part.start < first else []
        group = self.num_values // self.num_keys
        for head in range(max(0, part.start - first) // dim, max(0, end - first) // dim):
            place = head % group * self.num_keys + head // group
            found.append(Part(first + place * dim, dim))
        return found


class GgufReader:
    """A `WeightReader` over one file."""

    def __init__(
        self,
        files: WeightFiles,
        gguf: GgufFile,
        *,
        rotated_head_dim: int | None,
        tiled: TiledHeads | None = None,
        dtype: torch.dtype,
        device: torch.device,
        advance: Advance = lambda _: None,
    ) -> None:
        """Read into parameters of one type on one device.

        `rotated_head_dim`: size of heads whose rotated pairs are neighbours in the file, as
        llama.cpp stores those of its `llama` and others; None: they are half a head apart.
        """
        self.dtype = dtype
        self.device = device
        self._files = files
        self._gguf = gguf
        self._rotated = rotated_head_dim or 0
        self._tiled = tiled
        self._copies: WeightCopies = weight_copies(device)
        self._advance = advance
        self._counted: set[str] = set()

    def __enter__(self) -> GgufReader:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing is open but the mapping, which goes with the last reference."""

    def has(self, name: str) -> bool:
        """Whether the model has a tensor of this name."""
        return self._files.has(name)

    def read_into(
        self, target: Tensor, name: str, *, rows: Part | None = None, columns: Part | None = None
    ) -> None:
        """See `WeightReader.read_into`; `rows` of queries and keys are whole heads."""
        if target.numel() == 0:
            return
        stored = self._files.stored(name)
        if stored not in self._gguf.tensors:
            raise self._error(stored, "is missing")
        tensor = self._gguf.tensors[stored]
        rows = rows or Part(0, tensor.shape[0])
        wide = target.flatten(1) if len(tensor.shape) > 1 else target
        inputs = self._columns(stored, columns or Part(0, math.prod(tensor.shape[1:])))
        row = 0
        for part in self._rows(stored, rows):
            place = wide[row : row + part.size]
            if wide.dim() == 1:  # a bias or a norm: the numbers are what `rows` counts
                numbers = self._numbers(tensor, Part(0, 1))[0]
                self._copy(place, numbers[part.start : part.start + part.size], stored)
            else:
                self._read_matrix(place, tensor, stored, part, inputs)
            row += part.size
        if stored.endswith(_DECAYS):
            if bool((target >= 0).any()):
                raise self._error(stored, "must hold negative numbers")
            target.neg_().log_()
        if self._is_rotated(stored):
            pairs = target.view(-1, self._rotated // 2, 2, *target.shape[1:])
            target.copy_(pairs.transpose(1, 2).reshape(target.shape))
        if target.device.type == "cpu":
            self.check_finite()
        self._count(stored, tensor)

    def read_stored(
        self, name: str, *, rows: Part | None = None, columns: Part | None = None
    ) -> StoredWeight | None:
        """See `WeightReader.read_stored`: blocks of integers with one factor each."""
        stored = self._files.stored(name)
        tensor = self._gguf.tensors.get(stored)
        if tensor is None or len(tensor.shape) != 2:
            return None
        rows, columns = rows or Part(0, tensor.shape[0]), columns or Part(0, tensor.shape[1])
        data = _joined([self._data(tensor, part) for part in self._rows(stored, rows)], 0)
        parts = self._columns(stored, columns)
        own = columns if parts == [columns] else Part(0, tensor.shape[1])
        weight = _stored_weight(data, tensor.kind, own)
        if weight is not None and own is not columns:
            weight = weight.columns(parts)
        if weight is None:
            return None
        if weight.factors.numel() and not is_finite(weight.factors):
            raise self._error(stored, not_finite(weight.factors))
        self._count(stored, tensor)
        if not self._is_rotated(stored):
            return weight
        order = torch.arange(rows.size).view(-1, self._rotated // 2, 2)
        return weight.rows(order.transpose(1, 2).flatten())

    def _rows(self, stored: str, rows: Part) -> list[Part]:
        """Return which rows of the file are some rows of a tensor."""
        tensor = stored.split(".")[2] if stored.startswith("blk.") else ""
        if self._tiled is None or tensor not in _VALUES:
            return [rows]
        dim = 1 if _VALUES[tensor] else self._tiled.dim
        first = self._tiled.first if tensor in ("attn_qkv", "ssm_conv1d") else 0
        return self._tiled.places(rows, dim, first)

    def _columns(self, stored: str, columns: Part) -> list[Part]:
        """Return which columns of the file are some columns of a tensor."""
        if self._tiled is None or not stored.endswith(".ssm_out.weight"):
            return [columns]
        return self._tiled.places(columns, self._tiled.dim)

    def _is_rotated(self, stored: str) -> bool:
        """Whether a tensor's outputs are heads whose rotated pairs are neighbours."""
        return self._rotated > 0 and stored.split(".")[-2] in ("attn_q", "attn_k")

    def _count(self, name: str, tensor: GgufTensor) -> None:
        if name not in self._counted:
            self._counted.add(name)
            self._advance(math.prod(tensor.shape) * self.dtype.itemsize)

    def check_finite(self) -> None:
        """Refuse NaN and infinity in the numbers read so far. Raises ModelLoadError naming a
        tensor."""
        if bad := self._copies.not_finite():
            raise self._error(bad[0], f"has values that are not finite in {self.dtype}")

    def _error(self, name: str, complaint: str) -> ModelLoadError:
        name = name_in_file(self._gguf, name)
        return ModelLoadError(f"{self._gguf.path}: tensor {name!r} {complaint}")

    def _read_matrix(
        self, target: Tensor, tensor: GgufTensor, name: str, rows: Part, columns: list[Part]
    ) -> None:
        size = max(1, CHUNK_NUMBERS // math.prod(tensor.shape[1:]))
        for first in range(0, rows.size, size):
            count = min(size, rows.size - first)
            numbers = self._numbers(tensor, Part(rows.start + first, count))
            part = _joined([numbers[:, own.start : own.start + own.size] for own in columns], 1)
            self._copy(target[first : first + count], part, name)

    def _copy(self, target: Tensor, numbers: np.ndarray, name: str) -> None:
        if target.shape != numbers.shape:
            shapes = f"has {list(numbers.shape)} where {list(target.shape)} is needed"
            raise self._error(name, shapes)
        self._copies.copy(target, torch.from_numpy(np.ascontiguousarray(numbers)), name)

    def _numbers(self, tensor: GgufTensor, rows: Part) -> np.ndarray:
        """Return rows of a tensor, [rows, columns] in float32."""
        numbers = numbers_of_blocks(self._data(tensor, rows), tensor.kind)
        # What the file's memory holds is read-only, which torch warns of.
        return numbers if numbers.flags.writeable else numbers.copy()

    def _data(self, tensor: GgufTensor, rows: Part) -> npt.NDArray[np.uint8]:
        """Return the bytes of rows of a tensor, [rows, bytes of each]."""
        row_bytes = math.prod(tensor.shape[1:-1]) * tensor.row_bytes
        data = np.frombuffer(
            self._gguf.data,
            np.uint8,
            count=rows.size * row_bytes,
            offset=tensor.start + rows.start * row_bytes,
        )
        return data.reshape(rows.size, -1)


def _joined(parts: list[np.ndarray], axis: int) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis)


def _stored_weight(data: npt.NDArray[np.uint8], kind: int, columns: Part) -> StoredWeight | None:
    """Return columns of rows [R, bytes of each] by their integers; None: blocks have more parts."""
    block = BLOCK_TYPES[kind]
    if block.name == "MXFP4":
        codes, exponents = codes_of_blocks(data)
        return fp4_weight(torch.from_numpy(codes), torch.from_numpy(exponents.copy()), columns)
    found = integers_of_blocks(data, kind)
    if found is None:
        return None
    size = block.num_numbers
    first, end = columns.start // size, -(-(columns.start + columns.size) // size)
    return StoredWeight(
        torch.from_numpy(found.integers)[:, columns.start : columns.start + columns.size],
        torch.from_numpy(found.factors)[:, first:end],
        torch.full((len(data), end - first), found.zero, dtype=torch.int16),
        found.bits,
        size,
        columns.start % size,
    )


# Blocks of quantised numbers, made numbers of float32.


Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def numbers_of_blocks(data: Bytes, kind: int) -> Floats:
    """Return the numbers of whole rows; data [R, row bytes], `kind` of BLOCK_TYPES -> [R, N]."""
    block = BLOCK_TYPES[kind]
    match block.name:
        case "F32":
            return data.view("<f4")
        case "F16":
            return data.view("<f2").astype(np.float32)
        case "BF16":
            return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if (whole := integers_of_blocks(data, kind)) is not None:
        integers = whole.integers.reshape(len(data), -1, block.num_numbers).astype(np.float32)
        numbers = (integers - whole.zero) * whole.factors[..., None]
    else:
        numbers = _UNPACK[block.name](data.reshape(-1, block.num_bytes))
    return numbers.reshape(len(data), -1)


class WholeNumbers(NamedTuple):
    """Rows whose blocks have one factor and integers."""

    integers: Bytes
    """[R, N], without a sign."""
    factors: Floats
    """[R, blocks]."""
    zero: int
    """Number that is taken off integers."""
    bits: int
    """8 or 4, of an integer."""


def integers_of_blocks(data: Bytes, kind: int) -> WholeNumbers | None:
    """Return the integers of rows; None: their blocks have more than a factor and integers."""
    block = BLOCK_TYPES[kind]
    blocks = data.reshape(-1, block.num_bytes)
    match block.name:
        case "Q8_0":
            integers, zero, bits = blocks[:, 2:] ^ np.uint8(128), 128, 8
        case "Q4_0":
            integers, zero, bits = _low_then_high(blocks[:, 2:]), 8, 4
        case "Q5_0":
            integers, zero, bits = _five_bits(blocks[:, 2:]), 16, 8
        case "IQ4_NL":
            integers, zero, bits = _IQ4_SHIFTED[_low_then_high(blocks[:, 2:])], 128, 8
        case _:
            return None
    factors = _halves(blocks, 0).reshape(len(data), -1)
    return WholeNumbers(integers.reshape(len(data), -1), factors, zero, bits)


def codes_of_blocks(data: Bytes) -> tuple[Bytes, Bytes]:
    """Return the codes and exponents of rows of MXFP4; data [R, row bytes].

    Codes [R, N] of numbers of 4 bits, and the exponent [R, N / 32] that 32 of them share.
    """
    blocks = data.reshape(-1, 17)
    codes = _low_then_high(blocks[:, 1:])
    return codes.reshape(len(data), -1), blocks[:, 0].reshape(len(data), -1)


def _halves(blocks: Bytes, start: int) -> Floats:
    """Return the float16 at byte `start` of every block, [B, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _low_then_high(packed: Bytes) -> Bytes:
    """Return [B, 2 N] of [B, N]: the low halves of all bytes, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _five_bits(packed: Bytes) -> Bytes:
    """Return 32 integers of 5 bits of 20 bytes: the fifth bits of all, then the low ones."""
    fifth = np.unpackbits(packed[:, :4], axis=1, bitorder="little")
    return _low_then_high(packed[:, 4:]) | fifth << np.uint8(4)


def _q4_1(blocks: Bytes) -> Floats:
    integers = _low_then_high(blocks[:, 4:]).astype(np.float32)
    return integers * _halves(blocks, 0) + _halves(blocks, 2)


def _q5_1(blocks: Bytes) -> Floats:
    return _five_bits(blocks[:, 4:]).astype(np.float32) * _halves(blocks, 0) + _halves(blocks, 2)


def _six_bits(packed: Bytes) -> tuple[Floats, Floats]:
    """Return eight factors and eight least values, each [B, 8, 1], of 6 bits in 12 bytes."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    factors = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    least = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return factors.astype(np.float32)[:, :, None], least.astype(np.float32)[:, :, None]


def _with_least(blocks: Bytes, integers: Bytes) -> Floats:
    """Return the numbers of Q4_K or Q5_K blocks; integers [B, 8, 32]."""
    factors, least = _six_bits(blocks[:, 4:16])
    factors = factors * _halves(blocks, 0)[:, :, None]
    return integers.astype(np.float32) * factors - least * _halves(blocks, 2)[:, :, None]


def _nibbles(packed: Bytes) -> Bytes:
    """Return [B, 8, 32] of [B, 128]: of each 32 bytes the low nibbles, then the high ones."""
    chunks = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([chunks & 15, chunks >> 4], axis=2).reshape(-1, 8, 32)


def _two_bits(packed: Bytes) -> Bytes:
    """Return [B, 16, 16] of [B, 64]: of each 32 bytes their lowest two bits, then the next."""
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None]
    pairs: Bytes = packed.reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)
    return pairs.reshape(-1, 16, 16)


def _q2_k(blocks: Bytes) -> Floats:
    scales = blocks[:, :16]
    factors = (scales & 15).astype(np.float32) * _halves(blocks, 80)
    least = (scales >> 4).astype(np.float32) * _halves(blocks, 82)
    integers = _two_bits(blocks[:, 16:80]).astype(np.float32)
    numbers: Floats = integers * factors[:, :, None] - least[:, :, None]
    return numbers


def _q3_k(blocks: Bytes) -> Floats:
    low, packed = _low_then_high(blocks[:, 96:104]), blocks[:, 104:108]
    high = np.concatenate([packed >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    factors = ((low | high << 4).astype(np.float32) - 32) * _halves(blocks, 108)
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    third = (blocks[:, None, :32] >> shifts & 1).reshape(-1, 16, 16)
    integers = _two_bits(blocks[:, 32:96]).astype(np.float32) - 4 + 4 * third
    return integers.astype(np.float32) * factors[:, :, None]


def _q4_k(blocks: Bytes) -> Floats:
    return _with_least(blocks, _nibbles(blocks[:, 16:]))


def _q5_k(blocks: Bytes) -> Floats:
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    fifth = (blocks[:, None, 16:48] >> shifts & 1).astype(np.uint8)
    return _with_least(blocks, _nibbles(blocks[:, 48:]) | fifth << np.uint8(4))


def _q6_k(blocks: Bytes) -> Floats:
    # Two halves of 128 numbers: four times 32, whose low bits are nibbles of 64 bytes.
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    integers = (low | (high << 4)).astype(np.float32) - 32
    factors = blocks[:, 192:208].view(np.int8).astype(np.float32) * _halves(blocks, 208)
    return integers.reshape(-1, 16, 16) * factors[:, :, None]


_IQ4 = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int16
)
"""Integers that the codes of IQ4 stand for."""
_IQ4_SHIFTED = (_IQ4 + 128).astype(np.uint8)


def _iq4_xs(blocks: Bytes) -> Floats:
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2) & 3
    factors = ((low | high << 4).astype(np.float32) - 32) * _halves(blocks, 0)
    packed = blocks[:, 8:].reshape(-1, 8, 16)
    codes = np.concatenate([packed & 15, packed >> 4], axis=2)
    integers: Floats = _IQ4[codes].astype(np.float32)
    numbers: Floats = integers * factors[:, :, None]
    return numbers


_FP4: Floats = (np.array(FP4_HALVES) / 2).astype(np.float32)


def _mxfp4(blocks: Bytes) -> Floats:
    codes, exponents = codes_of_blocks(blocks)
    powers = np.minimum(exponents, MXFP4_NO_NUMBER - 1).astype(np.int32) - MXFP4_BIAS
    factors = np.ldexp(np.float32(1), powers).astype(np.float32)
    factors[exponents == MXFP4_NO_NUMBER] = np.nan
    return _FP4[codes] * factors


_UNPACK = {
    "Q4_1": _q4_1,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
