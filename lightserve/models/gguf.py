"""GGUF files: their contents, checked against their length before they are believed. Torch-free.

The layout is that of llama.cpp's `gguf.md`, versions 2 and 3, little-endian:

    magic, version, counts | key, type, value … | name, sizes, type, offset … | padding | tensors

A file that is cut off or lies about counts, lengths, offsets or types ends in one `ModelLoadError`.
Arrays stay in the mapped file, strings of them as offsets, so that no file takes more memory than
it is long, and a few MiB.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightserve.errors import ModelLoadError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = MAX_TENSORS = 1 << 16
MAX_NAME_BYTES = 256
MAX_STRING_BYTES = 8 << 20
"""Most bytes of all strings that stand in no array: chat templates, licences."""
MAX_STRINGS = 1 << 22
"""Most strings of an array."""
MAX_DIMS = 4
MAX_NUMBERS = 1 << 40
"""Most numbers of a tensor."""
DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 32, 1 << 16


@dataclass(frozen=True)
class BlockType:
    """A way to store a tensor's numbers: `num_bytes` for each `num_numbers` of a row."""

    name: str
    num_numbers: int
    num_bytes: int


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18),
    23: BlockType("IQ4_XS", 256, 136),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
}
"""Block types that can be served, by their numbers in files."""

_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8",
    12: "<f8",
}  # fmt: skip
_BOOLEAN, _STRING, _ARRAY = 7, 8, 9


class StringArray:
    """Strings that stay in the file until they are asked for."""

    def __init__(self, data: mmap.mmap, starts: npt.NDArray[np.uint64]) -> None:
        """`starts`: where each one's length stands."""
        self._data = data
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts)

    def bytes_of(self, index: int) -> bytes:
        """Return one, as it is stored."""
        start = int(self._starts[index])
        (length,) = struct.unpack_from("<Q", self._data, start)
        return self._data[start + 8 : start + 8 + length]


Value = int | float | bool | str | npt.NDArray[np.generic] | StringArray


@dataclass(frozen=True)
class GgufTensor:
    """The place of a tensor; all of it lies within the file if its type is known."""

    shape: tuple[int, ...]
    """Rows before columns, as in safetensors."""
    kind: int
    """Key of BLOCK_TYPES, or the number of a type that cannot be served."""
    start: int
    """Offset in the file, bytes."""

    @property
    def row_bytes(self) -> int:
        """Bytes of the last dimension."""
        block = BLOCK_TYPES[self.kind]
        return self.shape[-1] // block.num_numbers * block.num_bytes


@dataclass(frozen=True, eq=False)
class GgufFile:
    """A checked file, mapped as long as this lives.

    Keys that begin with a dot are those of the file's architecture: `.block_count` stands for
    `llama.block_count`, say.
    """

    path: Path
    data: mmap.mmap
    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """Name of its architecture, in llama.cpp's words."""
        return self.string("general.architecture")

    def _whole(self, key: str) -> str:
        return f"{self.architecture}{key}" if key.startswith(".") else key

    def _value(self, key: str, default: object = None) -> Any:
        return self.metadata.get(self._whole(key), default)

    def has_key(self, key: str) -> bool:
        """Return whether the file has a key."""
        return self._whole(key) in self.metadata

    def has(self, name: str) -> bool:
        """Return whether any layer of the file has a tensor: the first may differ from others."""
        ending = f".{name}"
        return f"blk.0.{name}" in self.tensors or any(own.endswith(ending) for own in self.tensors)

    def need(self, name: str) -> None:
        """Refuse a file no layer of which has a tensor, by ModelLoadError."""
        if not self.has(name):
            raise ModelLoadError(f"{self.path}: tensor 'blk.0.{name}' is missing")

    def error(self, key: str, complaint: str) -> ModelLoadError:
        """Return the error that names file, key and complaint."""
        return ModelLoadError(f"{self.path}: key {self._whole(key)!r} {complaint}")

    def integer(
        self,
        key: str,
        *,
        default: int | None = None,
        low: int = 0,
        high: int | None = None,
        num_layers: int | None = None,
    ) -> int:
        """Return an integer between `low` and `high`; without a default the key is required.

        `num_layers`: the key may have a number for each layer; those that are not 0 are equal.
        """
        value: object = self._value(key, default)
        if num_layers is not None and isinstance(value, np.ndarray):
            found = {number for number in self.integers(key, num_layers) if number}
            if len(found) > 1:
                raise self.error(key, f"must have one number other than 0, got {sorted(found)}")
            value = found.pop() if found else 0
        limits = f"at least {low}" if high is None else f"between {low} and {high}"
        if isinstance(value, bool) or not isinstance(value, int):
            what = "is missing" if value is None else f"must be an integer, {limits}"
            raise self.error(key, what)
        if value < low or (high is not None and value > high):
            raise self.error(key, f"must be {limits}, got {value}")
        return value

    def integers(self, key: str, num_layers: int) -> list[int]:
        """Return an integer of at least 0 for each layer; the key may have one for all."""
        value = self._value(key)
        if not isinstance(value, np.ndarray):
            return [self.integer(key)] * num_layers
        found: list[int] = value[: num_layers + 1].tolist()  # it may be as long as the file
        if len(found) != num_layers or value.dtype.kind not in "iu" or min(found) < 0:
            complaint = f"must be {num_layers} integers of at least 0, got {len(value)} numbers"
            raise self.error(key, complaint)
        return found

    def number(self, key: str, *, default: float | None = None) -> float:
        """Return a finite number."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, "is missing" if value is None else "must be a number")
        if not math.isfinite(value):
            raise self.error(key, f"must be finite, got {value}")
        return float(value)

    def string(self, key: str, *, default: str | None = None) -> str:
        """Return a string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, "is missing" if value is None else "must be a string")
        return value

    def boolean(self, key: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def strings(self, key: str) -> list[str]:
        """Return an array of strings."""
        return list(self.each_string(key))

    def each_string(self, key: str) -> Iterator[str]:
        """Iterate over an array of strings, which need not be in memory together."""
        return (self.string_at(key, index) for index in range(self.count(key)))

    def count(self, key: str) -> int:
        """Return how many strings an array has."""
        return len(self._string_array(key))

    def string_at(self, key: str, index: int) -> str:
        """Return one string of an array."""
        try:
            return self._string_array(key).bytes_of(index).decode()
        except UnicodeDecodeError as error:
            raise self.error(key, "holds a string that is not UTF-8") from error

    def _string_array(self, key: str) -> StringArray:
        value = self._value(key)
        if not isinstance(value, StringArray):
            raise self.error(key, "must be an array of strings")
        return value

    def numbers(self, key: str) -> npt.NDArray[np.generic]:
        """Return an array of numbers, [n]."""
        value = self._value(key)
        if not isinstance(value, np.ndarray):
            raise self.error(key, "must be an array of numbers")
        return value


def read_gguf(path: Path) -> GgufFile:
    """Map a file and check all that stands before its tensors.

    Raises:
        ModelLoadError: it cannot be read, is cut off, or contradicts itself.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise ModelLoadError(f"{path}: not a GGUF file: {error}") from error
    return _Reader(path, data).read()


class _Reader:
    """Reads one value after the other, none beyond the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0
        self._string_bytes = 0

    def read(self) -> GgufFile:
        if self._take(4) != MAGIC:
            raise self._error("does not begin with GGUF")
        version = self._scalar("<I")
        if version not in VERSIONS:
            raise self._error(f"has version {version}, supported are 2 and 3 (little-endian)")
        num_tensors, num_keys = self._scalar("<Q"), self._scalar("<Q")
        if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
            raise self._error(f"has {num_tensors} tensors and {num_keys} keys, at most {MAX_KEYS}")
        metadata: dict[str, Value] = {}
        for _ in range(num_keys):
            key = self._name()
            if key in metadata:
                raise self._error(f"has the key {key!r} twice")
            metadata[key] = self._value(key, self._scalar("<I"))
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if (
            isinstance(alignment, bool)
            or not isinstance(alignment, int)
            or not 8 <= alignment <= MAX_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            raise self._error("key 'general.alignment' must be a power of two from 8 to 65536")
        found = [self._tensor() for _ in range(num_tensors)]
        begin = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, tensor in found:
            if name in tensors:
                raise self._error(f"has the tensor {name!r} twice")
            tensors[name] = self._placed(name, tensor, begin, alignment)
        return GgufFile(self._path, self._data, metadata, tensors)

    def _error(self, complaint: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path}: not a whole GGUF file: {complaint}")

    def _need(self, num_bytes: int) -> None:
        if num_bytes > len(self._data) - self._at:
            raise self._error(f"{num_bytes} bytes from {self._at} on are beyond its end")

    def _take(self, num_bytes: int) -> bytes:
        self._need(num_bytes)
        self._at += num_bytes
        return self._data[self._at - num_bytes : self._at]

    def _scalar(self, layout: str) -> int:
        value: int = struct.unpack(layout, self._take(struct.calcsize(layout)))[0]
        return value

    def _name(self) -> str:
        length = self._scalar("<Q")
        if length > MAX_NAME_BYTES:
            raise self._error(f"has a name of {length} bytes, more than {MAX_NAME_BYTES}")
        return self._decode(self._take(length), "a name")

    def _decode(self, data: bytes, what: str) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is not UTF-8") from error

    def _value(self, key: str, kind: int) -> Value:
        if kind in _SCALARS:
            size = np.dtype(_SCALARS[kind]).itemsize
            number: int | float = np.frombuffer(self._take(size), _SCALARS[kind])[0].item()
            return number
        if kind == _BOOLEAN:
            return self._take(1) != b"\0"
        if kind == _STRING:
            length = self._scalar("<Q")
            self._string_bytes += length
            if self._string_bytes > MAX_STRING_BYTES:
                raise self._error(f"key {key!r}: more than {MAX_STRING_BYTES} bytes of strings")
            return self._decode(self._take(length), f"key {key!r}")
        if kind == _ARRAY:
            return self._array(key)
        raise self._error(f"key {key!r} has the unknown type {kind}")

    def _array(self, key: str) -> Value:
        kind, count = self._scalar("<I"), self._scalar("<Q")
        if kind == _STRING:
            if count > MAX_STRINGS:
                raise self._error(f"key {key!r} has {count} strings, at most {MAX_STRINGS}")
            self._need(8 * count)
            starts = np.empty(count, dtype=np.uint64)
            for index in range(count):
                starts[index] = self._at
                length = self._scalar("<Q")
                self._need(length)
                self._at += length
            return StringArray(self._data, starts)
        layout = "<u1" if kind == _BOOLEAN else _SCALARS.get(kind)
        if layout is None:
            raise self._error(f"key {key!r} is an array of the type {kind}, which is unknown")
        self._need(count * np.dtype(layout).itemsize)
        numbers = np.frombuffer(self._data, layout, count=count, offset=self._at)
        self._at += numbers.nbytes
        return numbers

    def _tensor(self) -> tuple[str, GgufTensor]:
        name = self._name()
        num_dims = self._scalar("<I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._error(f"tensor {name!r} has {num_dims} dimensions, not 1 to {MAX_DIMS}")
        sizes = [self._scalar("<Q") for _ in range(num_dims)]
        if not all(sizes) or math.prod(sizes) > MAX_NUMBERS:
            raise self._error(f"tensor {name!r} has the sizes {sizes}")
        kind = self._scalar("<I")
        return name, GgufTensor(tuple(reversed(sizes)), kind, self._scalar("<Q"))

    def _placed(self, name: str, tensor: GgufTensor, begin: int, alignment: int) -> GgufTensor:
        """Return a tensor with its place in the file in place of that behind `begin`."""
        start = begin + tensor.start
        if tensor.kind in BLOCK_TYPES:
            block = BLOCK_TYPES[tensor.kind]
            if tensor.shape[-1] % block.num_numbers:
                raise self._error(
                    f"tensor {name!r} has rows of {tensor.shape[-1]} numbers, which are no whole"
                    f" blocks of {block.name}"
                )
            num_bytes = math.prod(tensor.shape[:-1]) * tensor.row_bytes
            if tensor.start % alignment or start + num_bytes > len(self._data):
                raise self._error(
                    f"tensor {name!r}, {num_bytes} bytes from {start} on, is not aligned or beyond"
                    f" the end at {len(self._data)}"
                )
        return GgufTensor(tensor.shape, tensor.kind, start)
