"""llama.cpp's logits of the files that bench.engine.gguf wrote: for a Python that has its package.

python bench/engine/llama_cpp_logits.py DIR       # llama-cpp-python 0.3.36, numpy
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np

NUM_SLOTS = 256


def main() -> None:
    directory = Path(sys.argv[1])
    llama_cpp = importlib.import_module("llama_cpp")  # of no environment of this repository
    tokens = json.loads((directory / "tokens.json").read_text())
    for file in sorted(directory.glob("*.gguf")):
        model = llama_cpp.Llama(
            str(file),
            n_ctx=NUM_SLOTS,
            n_batch=NUM_SLOTS,
            n_ubatch=NUM_SLOTS,
            logits_all=True,
            verbose=False,
            n_threads=1,
            type_k=0,  # float32, as everything is here
            type_v=0,
            flash_attn=False,
        )
        model.eval(tokens)
        np.save(file.with_suffix(".npy"), np.array(model.scores[: len(tokens)], dtype=np.float32))


if __name__ == "__main__":
    main()
