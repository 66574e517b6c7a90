"""Damaged files of models: is each refused in one line, or still a model, and in how much memory?

    python -m bench.engine.damaged [--kind safetensors gguf] [--copies 60] [--seed 1]

A tiny model of each family, a checkpoint in each quantised format, and a GGUF file of each
architecture are damaged again and again: cut off, bytes changed in heads and in values, words of
`config.json` replaced, and heads that lie (lengths, offsets, shapes, types, depth). Safetensors are
loaded whole, GGUF files as well. Each model has a process of its own, so that a crash is counted;
memory is the process's largest during a load (VmHWM, which is reset before) above what it was after
the whole model had been loaded once. Exits with 1 after a crash, an error of another kind, or more
memory than the files' length plus 64 MiB.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from models.test_quantised_files import PLAIN
from support.gguf_models import CONVERTED, converted
from support.model_runs import load_tiny
from support.quantised_files import FORMATS, quantise_by
from support.tiny_models import TINY_MODELS, TinyModel, find_tiny_model, write_tiny_model

from bench.table import print_head, print_row
from lightserve.errors import ModelLoadError
from lightserve.kernels.reference import ReferenceKernels
from lightserve.models.gguf_model import unpack, unpacked_root

MORE_BYTES = 64 << 20
WORDS: list[Any] = [None, True, -1, 0, 7, 2**40, 2**63, 1.5, "", "gptq", [], {}, [128], 1e300]
BYTES = (0, 1, 8, 9, 0x7F, 0x80, 0xFF)


class Found(NamedTuple):
    """What became of one model's copies."""

    num_refused: int = 0
    num_taken: int = 0
    more_bytes: int = 0
    """Most memory above idle."""
    wrong: tuple[str, ...] = ()
    """Errors of another kind, and of several lines."""


def write_models(kinds: list[str], directory: Path) -> Iterator[tuple[str, Path]]:
    """Write the models one at a time; yields names and what is loaded, a directory or a file."""
    if "safetensors" in kinds:
        first: dict[str, TinyModel] = {}
        for tiny in TINY_MODELS:
            first.setdefault(tiny.family, tiny)
        first["sharded"] = find_tiny_model("llama-biases-sharded")
        for tiny in first.values():
            yield tiny.name, write_tiny_model(tiny, directory / tiny.name)
        plain = write_tiny_model(PLAIN, directory / "plain")
        for name, (config, make) in FORMATS.items():
            yield name, quantise_by(plain, directory / name.replace(" ", "-"), config, make)
    if "gguf" in kinds:
        for name in CONVERTED:
            (directory / f"gguf-{name}").mkdir()
            yield f"GGUF of {name}", converted(name, directory / f"gguf-{name}")[1]


def damaged_bytes(whole: bytes, draw: random.Random, head: int) -> bytes:
    """Return a file's bytes cut off, or with some changed, most of them in its first `head`."""
    if draw.random() < 0.25:
        return whole[: draw.randrange(len(whole))]
    data = bytearray(whole)
    for _ in range(draw.choice((1, 1, 2, 8))):
        end = head if draw.random() < 0.9 else len(data)
        data[draw.randrange(end)] = draw.choice((*BYTES, draw.randrange(256)))
    return bytes(data)


def lying_head(whole: bytes, draw: random.Random) -> bytes:
    """Return a safetensors file whose head says what is not so."""
    length = int.from_bytes(whole[:8], "little")
    tensors: dict[str, Any] = json.loads(whole[8 : 8 + length])
    name = draw.choice([key for key in tensors if key != "__metadata__"])
    own = tensors[name]
    start, end = own["data_offsets"]
    many: Any = []
    for _ in range(draw.choice((3, 900))):
        many = [many]
    key, value = draw.choice(
        [
            ("data_offsets", [end, start]),
            ("data_offsets", [start, 2**62]),
            ("data_offsets", [-1, end]),
            ("data_offsets", [0, end - start]),
            ("data_offsets", many),
            ("shape", [2**62, 4]),
            ("shape", [2**32, 2**32]),
            ("shape", [-1, *own["shape"][1:]]),
            ("shape", [1] * 5000),
            ("shape", many),
            ("dtype", "F128"),
            ("dtype", "I64"),
            ("dtype", None),
            ("dtype", "X" * 100_000),
        ]
    )
    own[key] = value
    text = json.dumps(tensors).encode()
    if draw.random() < 0.2:
        text = b"[" * draw.choice((1000, 200_000)) + text
    said = draw.choice((len(text), len(text), len(text), len(text) - 1, 2**40, 2**63, 100_000_001))
    return said.to_bytes(8, "little") + text + whole[8 + length :]


def damage(model: Path, whole: dict[Path, bytes], draw: random.Random) -> None:
    """Damage one file of a model, whose others are as they were."""
    for file, data in whole.items():
        file.write_bytes(data)
    file = draw.choice(list(whole))
    data = whole[file]
    if file.suffix == ".gguf":
        head = data.index(b"token_embd") + 2000
        file.write_bytes(damaged_bytes(data, draw, min(len(data), head)))
    elif file.suffix == ".safetensors" and draw.random() < 0.4:
        file.write_bytes(lying_head(data, draw))
    elif file.suffix == ".safetensors":
        file.write_bytes(damaged_bytes(data, draw, int.from_bytes(data[:8], "little") + 8))
    elif draw.random() < 0.5:
        file.write_bytes(damaged_bytes(data, draw, len(data)))
    else:
        words = json.loads(data)
        own = words
        while True:
            key = draw.choice(list(own))
            if not (isinstance(own[key], dict) and own[key]):
                break
            own = own[key]
        own[key] = draw.choice(WORDS)
        file.write_text(json.dumps(words))


def load(model: Path) -> None:
    """Load a model as a worker does."""
    load_tiny(
        unpack(model) if model.suffix == ".gguf" else model, torch.float32, ReferenceKernels()
    )


def memory(key: str) -> int:
    """Return a figure of this process's memory, bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{key}:")[2].split()[0]) << 10


def try_copies(model: Path, num_copies: int, seed: int, answer: Any) -> None:
    """Damage a model so many times and load it each time; sends a `Found`."""
    torch.set_num_threads(1)
    draw = random.Random(seed)
    named = [model] if model.is_file() else sorted(model.iterdir())
    whole = {
        file: file.read_bytes()
        for file in named
        if file.suffix in (".safetensors", ".gguf")
        or file.name in ("config.json", "model.safetensors.index.json")
    }
    load(model)
    limit = sum(map(len, whole.values())) + MORE_BYTES
    num_refused, num_taken, most, wrong = 0, 0, 0, []
    idle = memory("VmRSS")
    for number in range(num_copies):
        damage(model, whole, draw)
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        try:
            load(model)
            num_taken += 1
        except ModelLoadError as error:
            num_refused += 1
            if "\n" in str(error):
                wrong.append(f"copy {number}: {error}")
        except Exception as error:  # what must not be: counted
            wrong.append(f"copy {number}: {type(error).__name__}: {str(error)[:200]}")
        more = memory("VmHWM") - idle
        if more > limit:
            wrong.append(f"copy {number}: {more >> 20} MiB")
        most = max(most, more)
        if model.suffix == ".gguf":
            shutil.rmtree(unpacked_root(), ignore_errors=True)
    answer.send(Found(num_refused, num_taken, most, tuple(wrong)))


def main() -> int:
    """Damage and load, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    kinds = ("safetensors", "gguf")
    parser.add_argument("--kind", nargs="+", choices=kinds, default=list(kinds))
    parser.add_argument("--copies", type=int, default=60, help="of each model")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    fork = multiprocessing.get_context("fork")
    num_wrong, found = 0, []
    print_head("model", "refused", "taken", "more than idle, MiB", "anything else")
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XDG_CACHE_HOME"] = directory
        for name, model in write_models(options.kind, Path(directory)):
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(
                target=try_copies, args=(model, options.copies, options.seed, theirs)
            )
            process.start()
            theirs.close()
            try:
                result: Found = ours.recv()
            except EOFError:
                process.join()
                result = Found(wrong=(f"a crash, exit code {process.exitcode}",))
            process.join()
            found.append(result)
            num_wrong += len(result.wrong)
            said = "; ".join(result.wrong) or "none"
            more = f"{result.more_bytes / 2**20:.1f}"
            print_row(name, result.num_refused, result.num_taken, more, said)
    num_refused, num_taken = sum(f.num_refused for f in found), sum(f.num_taken for f in found)
    most = max(result.more_bytes for result in found) / 2**20
    print_row(f"all {len(found)}", num_refused, num_taken, f"{most:.1f}", f"{num_wrong} times")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
