"""Random weights of Llama 3 8B's shape in files, written once, for all parts that start a server.

They go with the bundled tokenizer. Greedy answers are words: the LM head's other rows are zero, so
that every token is text and every event one token.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.gpu.device import Machine
from bench.gpu.models import LLAMA_8B, TINY_LLAMA, RandomModel, RandomReader
from bench.gpu.table import Bench
from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.models.weight_files import LM_HEAD, expected_tensors

NUM_WRITERS = 4
INDEX = "model.safetensors.index.json"
_WORD = re.compile("Ġ?[a-z]+")

TINY_SERVED: Mapping[str, Any] = dict(TINY_LLAMA) | {
    "vocab_size": 4096,
    "max_position_embeddings": 512,
}
"""What rehearsals serve."""


def served_model(bench: Bench) -> RandomModel:
    """Return the model that servers of this check serve; its files are written by `weights`."""
    shape = TINY_SERVED if bench.rehearse else LLAMA_8B
    return RandomModel.make(bench.shared / "model", shape)


def weights(bench: Bench) -> None:
    """Write the files."""
    model = served_model(bench)
    start_s = time.monotonic()
    num_bytes = write_weights(model, bench.machine)
    seconds = time.monotonic() - start_s
    note = f"{num_bytes / 1e9:.3g} GB in {bench.shared.parent}"
    bench.rows.figure("weights written", num_bytes / seconds / 1e9, "GB/s", note=note)


def write_weights(model: RandomModel, machine: Machine) -> int:
    """Write random weights and the bundled tokenizer beside the model's config.json.

    Returns:
        Bytes of the weights.
    """
    reader = RandomReader(model.config, dtype=torch.bfloat16, device=machine.device)
    files: dict[str, str] = {}
    num_bytes = 0
    room = BoundedSemaphore(2 * NUM_WRITERS)  # files that are in memory at once

    def write(tensors: dict[str, Tensor], path: Path) -> None:
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        finally:
            room.release()

    with ThreadPoolExecutor(NUM_WRITERS) as writers:
        written = []
        for number, names in enumerate(_shards(model)):
            room.acquire()
            file = f"model-{number:05}.safetensors"
            tensors = {name: _tensor(reader, model, name).cpu() for name in names}
            num_bytes += sum(tensor.nbytes for tensor in tensors.values())
            written.append(writers.submit(write, tensors, model.path / file))
            files |= dict.fromkeys(names, file)
        for each in written:
            each.result()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL_DIR / name, model.path)
    index = {"metadata": {}, "weight_map": files}
    (model.path / INDEX).write_text(json.dumps(index))
    return num_bytes


def _shards(model: RandomModel) -> Iterator[list[str]]:
    """Yield the names of each file's tensors: a layer, or one of the others."""
    by_layer: dict[str, list[str]] = {}
    for name in expected_tensors(model.config):
        parts = name.split(".")
        key = parts[2] if parts[1] == "layers" else name
        by_layer.setdefault(key, []).append(name)
    yield from by_layer.values()


def _tensor(reader: RandomReader, model: RandomModel, name: str) -> Tensor:
    shape = expected_tensors(model.config)[name]
    tensor = torch.empty(shape, dtype=reader.dtype, device=reader.device)
    reader.read_into(tensor, name)
    if name == LM_HEAD:
        vocab = json.loads((BUNDLED_MODEL_DIR / "tokenizer.json").read_text())["model"]["vocab"]
        words = [number for piece, number in vocab.items() if _WORD.fullmatch(piece)]
        is_word = torch.zeros(shape[0], 1, dtype=tensor.dtype)
        is_word[words] = 1
        tensor *= is_word.to(tensor.device)
    return tensor
