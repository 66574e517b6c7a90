"""Makes safetensors of a directory with `pytorch_model*.bin`: a program, for `lightserve convert`.

    python -m lightserve.models.pickled_weights FROM TO

These files are pickles. No server ever opens one: this is the only module that does, by torch's
loader for plain tensors (`weights_only`), which makes no other objects and calls nothing, in a
process that ends when it has written the tensors. One shard is in memory at a time, and the process
has no more memory than that takes. A small file can stand for huge tensors, by strides of 0 or by
many names: so the tensors of a file have at most MAX_TIMES its bytes.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lightserve.errors import ModelLoadError
from lightserve.logs import one_line
from lightserve.models.json_fields import JsonFields, read_json_object
from lightserve.models.weight_files import INDEX_FILE, SINGLE_FILE, check_confined

PICKLED_FILE = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
MAX_TIMES = 4
"""Tied weights share memory in a pickle, and are each written. No model has so many of them."""
MAX_COPIED_BYTES = 256 * 1024 * 1024
"""Most bytes of all files that are copied unchanged; a large vocabulary has a tenth of it."""
_OWN_BYTES = 1024 * 1024 * 1024
"""Address space beside tensors that the process may take after its start."""
MAX_NAME_CHARS = 512
_MAX_REASON_CHARS = 300
_SHARD = re.compile(r"pytorch_model-\d{5}-of-\d{5}\.bin")
_COPIED = (".json", ".jinja", ".model", ".tiktoken", ".txt", ".md")
_SAFE_SHARD = "model-{:05}-of-{:05}.safetensors"
_TYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def convert(source: Path, target: Path) -> None:
    """Write a model directory of safetensors, with the other files of `source` that are read.

    Raises:
        ModelLoadError: a file is missing, cannot be read or written, holds something else than
            tensors, or more of them than its own size allows; nothing is written.
    """
    try:
        weight_map, shards = _shards(source)
        copied = list(_copied(source))
        if os.path.lexists(target):
            raise ModelLoadError(f"{target}: is there already")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as name:
            beside = Path(name) / "model"
            beside.mkdir()
            _write(weight_map, shards, beside)
            for file in copied:
                shutil.copyfile(file, beside / file.name)
            beside.rename(target)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        place = error.filename if isinstance(error, OSError) else None
        raise ModelLoadError(f"{place or target}: {reason or one_line(error)}") from error


def _shards(source: Path) -> tuple[Mapping[str, str], list[Path]]:
    """Return the index, names of tensors to names of files, and the files; one file has none."""
    if (source / PICKLED_FILE).is_file():
        check_confined(source, source / PICKLED_FILE)
        return {}, [source / PICKLED_FILE]
    index = source / PICKLED_INDEX
    if not index.is_file():
        raise ModelLoadError(f"{source}: has neither {PICKLED_FILE} nor {PICKLED_INDEX}")
    check_confined(source, index)
    fields = JsonFields(index, read_json_object(index)).child("weight_map")
    weight_map = {name: fields.string(name) for name, _ in fields.items()}
    if not weight_map:
        raise ModelLoadError(f"{index}: key 'weight_map' names no shard")
    names = sorted(set(weight_map.values()))
    for name in names:
        if _SHARD.fullmatch(name) is None or not (source / name).is_file():
            raise ModelLoadError(f"{index}: names {_show(name)}, which is no shard beside it")
        check_confined(source, source / name)
    return weight_map, [source / name for name in names]


def _copied(source: Path) -> Iterator[Path]:
    """Yield the files beside the weights that are copied."""
    num_bytes = 0
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix in _COPIED and file.name != PICKLED_INDEX:
            check_confined(source, file)
            num_bytes += file.stat().st_size
            if num_bytes > MAX_COPIED_BYTES:
                raise ModelLoadError(
                    f"{file}: files beside the weights must have at most {MAX_COPIED_BYTES} bytes"
                    f" in all, got {num_bytes} or more"
                )
            yield file


def _write(listed: Mapping[str, str], shards: Sequence[Path], target: Path) -> None:
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for number, shard in enumerate(shards, start=1):
        tensors = read_tensors(shard)
        for key in tensors:
            if key in weight_map:
                raise ModelLoadError(f"{shard}: {_show(key)} is in another shard as well")
        for key, file in listed.items():
            if file == shard.name and key not in tensors:
                raise ModelLoadError(f"{shard}: the index names {_show(key)}, which is not in it")
        name = SINGLE_FILE if len(shards) == 1 else _SAFE_SHARD.format(number, len(shards))
        save_file(tensors, target / name)
        weight_map |= dict.fromkeys(tensors, name)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (target / INDEX_FILE).write_text(json.dumps(index))


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the contents of a pickle, if they are tensors by name and nothing else.

    Each tensor has memory of its own.

    Raises:
        ModelLoadError: it is not, or not whole, or they have more than MAX_TIMES the file's bytes.
    """
    try:
        if is_mapped := zipfile.is_zipfile(file):
            _check_zip(file)
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=is_mapped)
    except Exception as error:  # of pickles, zip files and torch, a dozen types
        raise ModelLoadError(f"{file}: holds no plain tensors: {_reason(error)}") from error
    if not isinstance(found, dict) or not found:
        raise ModelLoadError(f"{file}: holds a {type(found).__name__}, not tensors by name")
    num_bytes, most = 0, MAX_TIMES * file.stat().st_size
    for name, tensor in found.items():
        _check_tensor(file, name, tensor)
        num_bytes += tensor.nbytes
    if num_bytes > most:
        raise ModelLoadError(
            f"{file}: its tensors must have at most {most} bytes, {MAX_TIMES} times its own,"
            f" got {num_bytes}"
        )
    # Tensors that share memory, as tied ones do, become two.
    return {
        name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in found.items()
    }


def _check_zip(file: Path) -> None:
    """Check that a zip file is as torch writes it. Raises ModelLoadError, BadZipFile, OSError."""
    with zipfile.ZipFile(file) as opened:
        entries = opened.infolist()
    if len({entry.filename for entry in entries}) < len(entries):
        raise ModelLoadError("two files in it have one name")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ModelLoadError("files in it are compressed")


def _check_tensor(file: Path, name: object, tensor: object) -> None:
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        raise ModelLoadError(f"{file}: {_show(name)} is no plain tensor")
    if tensor.is_quantized or tensor.dtype not in _TYPES or tensor.device.type != "cpu":
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ModelLoadError(
            f"{file}: {_show(name)} is no plain tensor: {kind} on {tensor.device.type}"
        )
    is_name = isinstance(name, str) and name.isprintable() and 1 <= len(name) <= MAX_NAME_CHARS
    if not is_name or name == "__metadata__":
        raise ModelLoadError(
            f"{file}: {_show(name)} is no name of a tensor: they have 1 to {MAX_NAME_CHARS}"
            " characters that can be printed"
        )


def _show(name: object) -> str:
    if not isinstance(name, str):
        return f"a key of type {type(name).__name__}"
    return repr(name if len(name) <= 64 else f"{name[:64]}…")


def _reason(error: Exception) -> str:
    """Return why torch reads a file not; without its advice to run the pickle after all."""
    text = one_line(error).rpartition("WeightsUnpickler error: ")[2]
    return text if len(text) <= _MAX_REASON_CHARS else f"{text[:_MAX_REASON_CHARS]}…"


def _limit_memory(source: Path) -> None:
    """Have this process take no more memory than the largest file and its tensors need."""
    sizes = [file.stat().st_size for file in source.glob("pytorch_model*.bin") if file.is_file()]
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = num_pages * resource.getpagesize() + _OWN_BYTES + (1 + MAX_TIMES) * max(sizes, default=0)
    torch.set_num_threads(1)  # stacks of many threads take address space as well
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def main(arguments: Sequence[str]) -> int:
    """Convert; return an exit code, with one line on stderr where that is not 0."""
    source, target = map(Path, arguments)
    try:
        _limit_memory(source)
        convert(source, target)
    except Exception as error:  # whatever a file that is broken on purpose leads to
        sys.stderr.write(f"lightserve: error: {one_line(error)}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
