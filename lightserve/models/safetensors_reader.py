"""Reads tensors of mapped safetensors in parts: quantised weights, and stacked experts, as well."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightserve.errors import ModelLoadError
from lightserve.models.base import Part
from lightserve.models.config import ModelConfig
from lightserve.models.moe_config import Stacked
from lightserve.models.stored_weights import StoredWeight, fp4_weight, read_stored
from lightserve.models.weight_copies import is_finite, not_finite, weight_copies
from lightserve.models.weight_files import BLOCKS, FLOAT_DTYPES, SCALES, WeightFiles, open_shard
from lightserve.progress import Advance

CHUNK_NUMBERS = 1 << 22
"""Numbers that are made of a quantised weight at a time: 16 MiB of float32."""


class _Source(NamedTuple):
    """Part of a tensor in a file."""

    file: Path
    name: str
    rows: Part | None
    columns: Part | None


class SafetensorsReader:
    """A `WeightReader` over the shards of a directory; open shards are mapped until `close`."""

    def __init__(
        self,
        files: WeightFiles,
        *,
        dtype: torch.dtype,
        device: torch.device,
        advance: Advance = lambda _: None,
    ) -> None:
        """Read into parameters of one type on one device.

        `advance` is told the bytes of each tensor as a whole parameter, whatever part is read.
        """
        self.dtype = dtype
        self.device = device
        self._files = files
        self._shards: dict[Path, Any] = {}
        self._exit = ExitStack()
        self._copies = weight_copies(device)
        self._sources: dict[str, _Source] = {}
        """Sources that have been read since the last check, by the names that the copies have for
        them."""
        self._advance = advance
        self._counted: set[str] = set()

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap all shards."""
        self._shards.clear()
        self._exit.close()

    def has(self, name: str) -> bool:
        """Whether the model has a tensor of this name."""
        return self._files.has(name)

    def read_into(
        self, target: Tensor, name: str, *, rows: Part | None = None, columns: Part | None = None
    ) -> None:
        """See `WeightReader.read_into`."""
        if target.numel() == 0:
            return  # a rank beyond the end of a tiny vocabulary
        name = self._files.stored(name)
        if name in self._files.quantised:
            self._read_numbers(target, name, rows, columns)
            return
        if name not in self._files.file_of:
            raise ModelLoadError(f"{self._files.index}: tensor {name!r} is missing")
        place = _Source(self._files.file_of[name], name, rows, columns)
        source = self._part(place)
        if source.shape != target.shape:
            raise ModelLoadError(
                f"{place.file}: tensor {name!r} has shape {list(source.shape)} where"
                f" {list(target.shape)} is needed"
            )
        if not source.dim() and not source.isnan():  # the end of a range, which may have none
            target.copy_(source)
            self._count(name, [])
            return
        label = f"{name} {len(self._sources)}"
        self._sources[label] = place
        self._copies.copy(target, source, label)
        if target.device.type == "cpu":
            self.check_finite()
        self._count(name, self._header(place).get_shape())

    def read_stored(
        self, name: str, *, rows: Part | None = None, columns: Part | None = None
    ) -> StoredWeight | None:
        """See `WeightReader.read_stored`."""
        name = self._files.stored(name)
        shape = self._files.quantised.get(name)
        if shape is None:
            return None
        weight = self._stored(name, rows, columns)
        self._count(name, shape)
        return weight

    def read_bytes(self, name: str, *, rows: Part) -> Tensor:
        """Return some rows of a tensor of bytes, on the host."""
        name = self._files.stored(name)
        part = self._slice(_Source(self._files.file_of[name], name, rows, None))
        self._count(name, self._shard(self._files.file_of[name]).get_slice(name).get_shape())
        return part

    def place_of(self, name: str) -> str:
        """Return where a tensor is, for people."""
        stored = self._files.stored(name)
        return f"{self._files.file_of[stored]}: tensor {stored!r}"

    def _count(self, name: str, shape: Sequence[int]) -> None:
        if name not in self._counted:
            self._counted.add(name)
            self._advance(math.prod(shape) * self.dtype.itemsize)

    def _stored(self, name: str, rows: Part | None, columns: Part | None) -> StoredWeight:
        """Return a part of a quantised weight, by the name that it would have as a plain one."""
        form = self._files.form
        assert form is not None
        module = name.removesuffix("weight")
        file = self._files.file_of[module + form.factors]

        def read(own: str, first: Part | None, second: Part | None) -> Tensor:
            full = module + own
            return self._slice(_Source(self._files.file_of[full], full, first, second))

        has_order = module + form.order in self._files.file_of
        shape = self._files.quantised[name]
        try:
            weight = read_stored(form, shape, rows, columns, read, has_order=has_order)
        except ValueError as error:
            raise ModelLoadError(f"{file}: tensor {module + str(error)}") from error
        if not is_finite(weight.factors):
            bad = module + form.factors
            raise ModelLoadError(f"{file}: tensor {bad!r} {not_finite(weight.factors)}")
        is_fp8 = weight.values.dtype is torch.float8_e4m3fn
        if is_fp8 and bool(((weight.values.view(torch.uint8) & 0x7F) == 0x7F).any()):
            bad = module + form.values
            raise ModelLoadError(
                f"{file}: tensor {bad!r} has values that are not finite in {self.dtype}"
            )
        return weight

    def _read_numbers(
        self, target: Tensor, name: str, rows: Part | None, columns: Part | None
    ) -> None:
        """Make plain numbers of a part of a quantised weight, some rows at a time."""
        shape = self._files.quantised[name]
        form = self._files.form
        assert form is not None
        part = rows or Part(0, shape[0])
        num_columns = shape[1] if columns is None else columns.size
        if target.shape != (part.size, num_columns):
            raise ModelLoadError(
                f"{self._files.index}: tensor {name!r} has shape {[part.size, num_columns]} where"
                f" {list(target.shape)} is needed"
            )
        source = _Source(
            self._files.file_of[name.removesuffix("weight") + form.factors], name, None, None
        )
        size = max(1, CHUNK_NUMBERS // shape[1])
        for first in range(0, part.size, size):
            some = Part(part.start + first, min(size, part.size - first))
            label = f"{name} {len(self._sources)}"
            self._sources[label] = source
            numbers = self._stored(name, some, columns).numbers()
            self._copies.copy(target[first : first + some.size], numbers, label)
            if target.device.type == "cpu":
                self.check_finite()
        self._count(name, shape)

    def check_finite(self) -> None:
        """Refuse NaN and infinity in the numbers read so far, stored or made by the conversion.

        Raises:
            ModelLoadError: names the first tensor that has any.
        """
        bad = self._copies.not_finite()
        if bad:
            place = self._sources[bad[0]]
            what = f"that are not finite in {self.dtype}"
            if place.name not in self._files.quantised:
                is_stored = not is_finite(self._part(place))
                what = "that are not finite" if is_stored else f"beyond {self.dtype}"
            raise ModelLoadError(f"{place.file}: tensor {place.name!r} has values {what}")
        self._sources.clear()

    def _part(self, place: _Source) -> Tensor:
        """Return a view of the mapped file."""
        self._header(place)
        return self._slice(place)

    def _slice(self, place: _Source) -> Tensor:
        """Return a view of the mapped file, of whatever type."""
        tensor = self._shard(place.file).get_slice(place.name)
        index = tuple(
            slice(None) if part is None else slice(part.start, part.start + part.size)
            for part in (place.rows, place.columns)
        )
        part: Tensor = tensor[index[: len(tensor.get_shape())]]
        return part

    def _header(self, place: _Source) -> Any:
        """Return the view of a tensor that safetensors gives before it is read."""
        tensor = self._shard(place.file).get_slice(place.name)
        if tensor.get_dtype() not in FLOAT_DTYPES:
            raise ModelLoadError(
                f"{place.file}: tensor {place.name!r} has type {tensor.get_dtype()}"
            )
        return tensor

    def _shard(self, file: Path) -> Any:
        if file not in self._shards:
            shard = self._exit.enter_context(open_shard(file, framework="pt"))
            self._shards[file] = shard
        return self._shards[file]


# Experts that a file has stacked in one tensor for each layer, in the forms of `Stacked`.
#
# Source of gpt-oss's: gpt-oss-120b & gpt-oss-20b Model Card (OpenAI 2025), sections 2.1 to 2.3.


_EXPERT = re.compile(
    r"(?P<experts>.*\.experts)\.(?P<number>\d+)\.(?P<half>gate|up|down)_proj\.(?P<kind>weight|bias)"
)


class StackedExperts:
    """A reader that gives each expert's parts by names of their own: `experts.3.up_proj.weight`.

    gate_up_proj [experts, inputs, gates and ups by turns]    its bias without inputs
    down_proj    [experts, inputs, outputs]

    In MXFP4 outputs come before groups of inputs, with `Stacked.HALVES` before inputs; there and
    with `Stacked.INPUTS` gates come before ups.
    """

    def __init__(self, reader: SafetensorsReader, config: ModelConfig) -> None:
        moe = config.moe
        assert moe is not None
        self.dtype, self.device = reader.dtype, reader.device
        self.has = reader.has
        self._reader = reader
        self._is_packed = moe.stacked is Stacked.MXFP4
        self._has_halves = moe.stacked in (Stacked.HALVES, Stacked.INPUTS)
        self._has_outputs_first = moe.stacked is Stacked.HALVES
        hidden, inner = config.hidden_size, moe.intermediate_size
        self._shapes = {"gate_up_proj": (hidden, 2 * inner), "down_proj": (inner, hidden)}
        self._last: tuple[str, int, Tensor] | None = None
        """The last tensor and expert: gates are read first, then ups."""

    def read_into(
        self, target: Tensor, name: str, *, rows: Part | None = None, columns: Part | None = None
    ) -> None:
        """See `WeightReader.read_into`."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            self._reader.read_into(target, name, rows=rows, columns=columns)
            return
        if (stored := self.read_stored(name, rows=rows, columns=columns)) is not None:
            target.copy_(stored.numbers())
            if not is_finite(target):
                place = self._reader.place_of(_stacked(match) + SCALES)
                raise ModelLoadError(f"{place} gives values beyond {self.dtype}")
            return
        whole = self._half(self._expert(match), match)
        for dimension, part in enumerate((rows, columns)):
            if part is not None:
                whole = whole.narrow(dimension, part.start, part.size)
        target.copy_(whole)

    def read_stored(
        self, name: str, *, rows: Part | None = None, columns: Part | None = None
    ) -> StoredWeight | None:
        """See `WeightReader.read_stored`."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return self._reader.read_stored(name, rows=rows, columns=columns)
        if not self._is_packed or match["kind"] == "bias":
            return None
        stacked, own = _stacked(match), Part(int(match["number"]), 1)
        blocks, scales = (
            self._half(self._reader.read_bytes(stacked + part, rows=own)[0], match)
            for part in (BLOCKS, SCALES)
        )
        if rows is not None:
            blocks, scales = (part.narrow(0, rows.start, rows.size) for part in (blocks, scales))
        weight = _weight(blocks, scales, columns)
        if weight.factors.numel() and not is_finite(weight.factors):
            place = self._reader.place_of(stacked + SCALES)
            raise ModelLoadError(f"{place} {not_finite(weight.factors)}")
        return weight

    def _expert(self, match: re.Match[str]) -> Tensor:
        """Return one expert's part of a plain tensor, outputs before inputs."""
        is_bias, number = match["kind"] == "bias", int(match["number"])
        name = f"{_stacked(match)}_bias" if is_bias else _stacked(match)
        if self._last is None or self._last[:2] != (name, number):
            shape = self._shapes[_stacked(match).rpartition(".")[2]]
            sizes = shape[::-1] if self._has_outputs_first else shape[is_bias:]
            part = torch.empty(1, *sizes, dtype=self.dtype, device=self.device)
            self._reader.read_into(part, name, rows=Part(number, 1))
            self._last = (name, number, part[0])
        part = self._last[2]
        return part if is_bias or self._has_outputs_first else part.T

    def _half(self, outputs: Tensor, match: re.Match[str]) -> Tensor:
        """Return gates or ups of a tensor that has both."""
        if match["half"] == "down":
            return outputs
        number = int(match["half"] == "up")
        return outputs.chunk(2)[number] if self._has_halves else outputs[number::2]


def _stacked(match: re.Match[str]) -> str:
    """Return the name of the tensor that an expert's weight is in."""
    return f"{match['experts']}.{'down' if match['half'] == 'down' else 'gate_up'}_proj"


def _weight(blocks: Tensor, scales: Tensor, columns: Part | None) -> StoredWeight:
    """Return a weight [M, K] of blocks uint8 [M, K / 32, 16] and scales uint8 [M, K / 32].

    The lower half of a byte is the first of its two numbers.
    """
    codes = torch.stack([blocks & 0xF, blocks >> 4], dim=-1).flatten(1)
    return fp4_weight(codes, scales, columns or Part(0, codes.shape[1]))
