"""Makes safetensors of a directory with `pytorch_model*.bin`: a program, for `lightserve convert`.

    python -m lightserve.models.pickled_weights FROM TO

These files are pickles. No server ever opens one: this is the only module that does, by torch's
loader for plain tensors (`weights_only`), which makes no other objects and calls nothing, in a
process that ends when it has written what it found. One shard is in memory at a time.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from lightserve.errors import ModelLoadError
from lightserve.logs import one_line
from lightserve.models.json_fields import JsonFields, read_json_object
from lightserve.models.weight_files import INDEX_FILE, SINGLE_FILE

PICKLED_FILE = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
_SHARD = re.compile(r"pytorch_model-\d{5}-of-\d{5}\.bin")
_COPIED = (".json", ".jinja", ".model", ".tiktoken", ".txt", ".md")
_SAFE_SHARD = "model-{:05}-of-{:05}.safetensors"


def convert(source: Path, target: Path) -> None:
    """Write a model directory of safetensors, with the other files of `source` that are read.

    Raises:
        ModelLoadError: a file is missing, or holds something else than tensors; nothing is written.
    """
    shards = _shards(source)
    if target.exists():
        raise ModelLoadError(f"{target}: is there already")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as name:
            beside = Path(name) / "model"
            beside.mkdir()
            _write(source, shards, beside)
            beside.rename(target)
    except OSError as error:
        raise ModelLoadError(f"{error.filename or target}: {error.strerror}") from error


def _shards(source: Path) -> list[Path]:
    if (source / PICKLED_FILE).is_file():
        return [source / PICKLED_FILE]
    index = source / PICKLED_INDEX
    if not index.is_file():
        raise ModelLoadError(f"{source}: has neither {PICKLED_FILE} nor {PICKLED_INDEX}")
    weight_map = JsonFields(index, read_json_object(index)).child("weight_map")
    names = sorted({weight_map.string(name) for name, _ in weight_map.items()})
    for name in names:
        if _SHARD.fullmatch(name) is None or not (source / name).is_file():
            raise ModelLoadError(f"{index}: names {name!r}, which is no shard beside it")
    return [source / name for name in names]


def _write(source: Path, shards: Sequence[Path], target: Path) -> None:
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for number, shard in enumerate(shards, start=1):
        tensors = read_tensors(shard)
        name = SINGLE_FILE if len(shards) == 1 else _SAFE_SHARD.format(number, len(shards))
        # Tensors that share memory, as tied ones do, become two.
        save_file({key: tensor.clone() for key, tensor in tensors.items()}, target / name)
        weight_map |= dict.fromkeys(tensors, name)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (target / INDEX_FILE).write_text(json.dumps(index))
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix in _COPIED and file.name != PICKLED_INDEX:
            shutil.copyfile(file, target / file.name)


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return what a pickle holds, if that is tensors by name and nothing else.

    Raises:
        ModelLoadError: it is not, or not whole.
    """
    try:
        is_mapped = zipfile.is_zipfile(file)
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=is_mapped)
    except Exception as error:  # of pickles, zip files and torch, a dozen types
        raise ModelLoadError(f"{file}: holds no plain tensors: {one_line(error)}") from error
    if not isinstance(found, dict) or not found:
        raise ModelLoadError(f"{file}: holds a {type(found).__name__}, not tensors by name")
    for name, tensor in found.items():
        if not isinstance(name, str) or type(tensor) is not Tensor or tensor.is_sparse:
            raise ModelLoadError(f"{file}: {name!r} is no plain tensor")
    return {name: tensor.contiguous() for name, tensor in found.items()}


def main(arguments: Sequence[str]) -> int:
    """Convert; return an exit code, with one line on stderr where that is not 0."""
    source, target = map(Path, arguments)
    try:
        convert(source, target)
    except ModelLoadError as error:
        sys.stderr.write(f"lightserve: error: {one_line(error)}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
