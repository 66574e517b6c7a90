"""GGUF files of every architecture beside llama.cpp's own logits of them, in float32.

    python -m bench.engine.gguf DIR               # writes random models as files, and tokens
    OTHER_PYTHON bench/engine/llama_cpp_logits.py DIR
    python -m bench.engine.gguf DIR --compare

Printed are the largest difference of log-probabilities over all positions and the vocabulary, and
how often the most probable token is the same.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import numpy as np
import torch
from support.gguf_models import CONVERTED, converted
from support.model_runs import load_tiny
from support.parity import TokenSequence, schedule
from torch import Tensor

from bench.table import print_head, print_row
from lightserve.kernels.reference import ReferenceKernels
from lightserve.models.gguf_model import unpack

NUM_TOKENS = 90


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--compare", action="store_true")
    options = parser.parse_args()
    directory: Path = options.directory.resolve()
    if options.compare:
        compare(directory)
        return
    for name in CONVERTED:
        (directory / name).mkdir(parents=True)
        _, file = converted(name, directory / name)
        file.rename(directory / f"{name}.gguf")
    tokens = torch.randint(0, 200, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))
    (directory / "tokens.json").write_text(json.dumps(tokens.tolist()))


def compare(directory: Path) -> None:
    os.environ["XDG_CACHE_HOME"] = str(directory / "cache")
    tokens = torch.tensor(json.loads((directory / "tokens.json").read_text()))
    print_head("file", "largest difference", "same most probable token")
    for file in sorted(directory.glob("*.npy")):
        theirs = torch.from_numpy(np.load(file)).log_softmax(-1)
        ours = logits(file.with_suffix(".gguf"), tokens).log_softmax(-1)
        same = (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
        print_row(file.stem, f"{(ours - theirs).abs().max():.1e}", f"{same:.3f}")


def logits(file: Path, tokens: Tensor) -> Tensor:
    """Return what lightserve says of a file, [tokens, vocabulary]."""
    loaded = load_tiny(unpack(file), torch.float32, ReferenceKernels())
    passes = schedule([len(tokens)], chunk=16, num_decodes=8)
    found = loaded.run([TokenSequence(tokens, torch.empty(0))], passes)
    assert found is not None
    return found[0]


if __name__ == "__main__":
    main()
