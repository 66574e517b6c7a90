"""Reads tensors of a GGUF file as plain numbers, some rows at a time."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightserve.errors import ModelLoadError
from lightserve.models.gguf import BLOCK_TYPES, GgufFile, GgufTensor
from lightserve.models.gguf_blocks import codes_of_blocks, integers_of_blocks, numbers_of_blocks
from lightserve.models.gguf_config import name_in_file
from lightserve.models.parallel import Part
from lightserve.models.stored_weights import StoredWeight, fp4_weight
from lightserve.models.weight_copies import WeightCopies, is_finite, weight_copies
from lightserve.models.weight_files import WeightFiles
from lightserve.progress import Advance

CHUNK_NUMBERS = 1 << 22
"""Made numbers at a time: 16 MiB of float32."""


class GgufReader:
    """A `WeightReader` over one file."""

    def __init__(
        self,
        files: WeightFiles,
        gguf: GgufFile,
        *,
        rotated_head_dim: int | None,
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
        if len(tensor.shape) == 1:  # a bias or a norm: the numbers are what `rows` counts
            part = rows or Part(0, tensor.shape[0])
            numbers = self._numbers(tensor, Part(0, 1))[0, part.start : part.start + part.size]
            self._copy(target, numbers, stored)
        else:
            self._read_matrix(target, tensor, stored, rows or Part(0, tensor.shape[0]), columns)
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
        weight = _stored_weight(self._data(tensor, rows), tensor.kind, columns)
        if weight is None:
            return None
        if weight.factors.numel() and not is_finite(weight.factors):
            raise self._error(stored, "has values that are not finite")
        self._count(stored, tensor)
        if not self._is_rotated(stored):
            return weight
        order = torch.arange(rows.size).view(-1, self._rotated // 2, 2)
        return weight.rows(order.transpose(1, 2).flatten())

    def _is_rotated(self, stored: str) -> bool:
        """Whether a tensor's outputs are heads whose rotated pairs are neighbours."""
        return self._rotated > 0 and stored.split(".")[-2] in ("attn_q", "attn_k")

    def _count(self, name: str, tensor: GgufTensor) -> None:
        if name not in self._counted:
            self._counted.add(name)
            self._advance(math.prod(tensor.shape) * self.dtype.itemsize)

    def check_finite(self) -> None:
        """Refuse NaN and infinity in what was read. Raises ModelLoadError naming a tensor."""
        if bad := self._copies.not_finite():
            raise self._error(bad[0], f"has values that are not finite in {self.dtype}")

    def _error(self, name: str, complaint: str) -> ModelLoadError:
        name = name_in_file(self._gguf, name)
        return ModelLoadError(f"{self._gguf.path}: tensor {name!r} {complaint}")

    def _read_matrix(
        self, target: Tensor, tensor: GgufTensor, name: str, rows: Part, columns: Part | None
    ) -> None:
        columns = columns or Part(0, tensor.shape[1])
        size = max(1, CHUNK_NUMBERS // tensor.shape[1])
        for first in range(0, rows.size, size):
            count = min(size, rows.size - first)
            numbers = self._numbers(tensor, Part(rows.start + first, count))
            part = numbers[:, columns.start : columns.start + columns.size]
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
        data = np.frombuffer(
            self._gguf.data,
            np.uint8,
            count=rows.size * tensor.row_bytes,
            offset=tensor.start + rows.start * tensor.row_bytes,
        )
        return data.reshape(rows.size, -1)


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
