"""What rounding costs: distributions of quantized engines beside those of bfloat16 and float32.

    python -m bench.engine.accuracy [--model DIR] [--tokens 150] [--files]
        [--checkpoint NAME=PATH ...] [--write-tokens tokens.json] [--other NAME=logits.npz ...]

A model goes on with prompts, at temperature 1 and in float32; then each engine computes the logits
of all these tokens, a prompt as one chunk and what follows token by token, as it is served.
Printed are the mean KL divergence (nats) from bfloat16's and from float32's distributions, and how
often the most probable token is the same as bfloat16's: of all positions, and of those at which
bfloat16's two best are further apart than it is itself from float32 in the 99th percentile.

With --files the model is also written in the formats of quantised checkpoints, by plain rounding,
and each file served: as it is, and as plain numbers in bfloat16, which is what a machine without
the native core makes of it. --checkpoint serves another directory or GGUF file of the same model
as it is.

Another program's logits stand beside them: it reads the tokens of --write-tokens (a list for each
sequence) and writes float32 arrays [tokens, vocabulary] under the names "0", "1", ….
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from support.gguf_files import write_gguf
from support.model_runs import load_tiny
from support.parity import DirectDriver, run_sequences, schedule
from support.quantised_files import (
    FORMATS,
    GPTQ,
    Module,
    awq,
    compressed,
    fp8,
    gptq,
    int8,
    packed,
    quantise_by,
)
from support.tiny_models import load_reference
from tokenizers import Tokenizer
from torch import Tensor

from bench.table import print_head, print_row
from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.kernels.select import make_kernels
from lightserve.models.config import load_model_config
from lightserve.models.gguf_model import unpack
from lightserve.models.weight_files import quantised_as
from lightserve.worker.build import linear_method

PROMPTS = Path(__file__).resolve().parents[2] / "examples" / "prompts.txt"


class Engine(NamedTuple):
    """One way to serve the model."""

    dtype: torch.dtype
    quantization: str = "none"
    kv_dtype: torch.dtype | None = None
    keeps_files: bool = True
    """Whether weights that are quantised in the files stay so where they can."""
    backend: str = "auto"
    """Its kernels, as --attention-backend names them."""


ENGINES = {
    "float32": Engine(torch.float32),
    "bfloat16": Engine(torch.bfloat16),
    "int8": Engine(torch.bfloat16, "int8"),
    "w8a8": Engine(torch.bfloat16, "w8a8"),
    "int4": Engine(torch.bfloat16, "int4"),
    "fp8": Engine(torch.bfloat16, "fp8"),
    "KV int8": Engine(torch.bfloat16, kv_dtype=torch.int8),
    "KV fp8": Engine(torch.bfloat16, kv_dtype=torch.uint8, backend="reference"),
}


FILES: dict[str, tuple[dict[str, Any], Callable[[Tensor], Module]]] = {
    "GPTQ, 4 bits of 128": (GPTQ | {"group_size": 128}, lambda weight: gptq(weight, size=128)),
    "GPTQ, 8 bits of 128": (
        GPTQ | {"group_size": 128, "bits": 8},
        lambda weight: gptq(weight, bits=8, size=128),
    ),
    "GPTQ, desc_act": (
        GPTQ | {"group_size": 128, "desc_act": True},
        lambda weight: gptq(weight, size=128, order=True),
    ),
    "AWQ, 4 bits of 128": (
        {"quant_method": "awq", "bits": 4, "group_size": 128},
        lambda weight: awq(weight, size=128),
    ),
    "W4A16 of 128": (
        compressed("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 128}),
        lambda weight: packed(weight, size=128),
    ),
    "W8A8": (FORMATS["w8a8"][0], lambda weight: int8(weight, has_least=False)),
    "FP8, blocks of 128": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        lambda weight: fp8(weight, block=(128, 128), name="weight_scale_inv"),
    ),
    "FP8 of an output": FORMATS["fp8 of an output"],
}
"""`quantization_config`, and what makes a module's tensors of its weight."""
BLOCKS = ("Q8_0", "Q4_0")
"""Types of GGUF."""


def texts(model_dir: Path, num_tokens: int) -> list[Tensor]:
    """Return the tokens of prompts and of what the model goes on with, int64 [n] each."""
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    reference = load_reference(model_dir, torch.float32)
    sequences = []
    for prompt in PROMPTS.read_text().splitlines():
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        answer = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
        )
        sequences.append(answer[0])
    return sequences


def logits_of(model_dir: Path, engine: Engine, sequences: Sequence[Tensor]) -> Tensor:
    """Return logits [all tokens, vocab] of an engine: prompts whole, then token by token."""
    kernels = make_kernels(engine.backend, batch_invariant=False)
    is_stored = engine.keeps_files and quantised_as(model_dir, load_model_config(model_dir))
    method = linear_method(engine.quantization, kernels, engine.dtype, is_stored=bool(is_stored))
    loaded = load_tiny(model_dir, engine.dtype, kernels, method=method)
    lengths = [len(sequence) for sequence in sequences]
    half = min(lengths) // 2
    driver = DirectDriver(
        loaded.model,
        num_kv_heads=loaded.num_kv_heads,
        dtype=engine.kv_dtype or engine.dtype,
        lengths=lengths,
        num_generated=half,
    )
    logits = run_sequences(driver, sequences, schedule(lengths, chunk=None, num_decodes=half))
    assert logits is not None
    return torch.cat(logits)


class Row(NamedTuple):
    """How one engine differs."""

    kl_bf16: float
    kl_fp32: float
    agreement: float
    """Share of positions with bfloat16's most probable token."""
    clear_agreement: float
    """The same where that is no near-tie."""


def differences(logits: Tensor, bf16: Tensor, fp32: Tensor) -> Row:
    """Compare logits [tokens, vocab] at the same positions."""
    best = bf16.topk(2, dim=-1).values
    noise = (bf16.log_softmax(-1) - fp32.log_softmax(-1)).abs().amax(-1).quantile(0.99)
    is_clear = best[:, 0] - best[:, 1] > noise
    same = logits.argmax(-1) == bf16.argmax(-1)
    return Row(
        _divergence(bf16, logits),
        _divergence(fp32, logits),
        same.float().mean().item(),
        same[is_clear].float().mean().item(),
    )


def _divergence(of: Tensor, other: Tensor) -> float:
    """Return the mean KL divergence of `other` from `of`, nats."""
    known, found = of.double().log_softmax(-1), other.double().log_softmax(-1)
    return (known.exp() * (known - found)).sum(-1).mean().item()


def logits_of_files(model_dir: Path, sequences: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the logits of the model in each format, kept as it is and as numbers."""
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XDG_CACHE_HOME"] = directory
        made = {
            name: quantise_by(model_dir, Path(directory, str(number)), config, make)
            for number, (name, (config, make)) in enumerate(FILES.items())
        }
        for kind in BLOCKS:
            file = Path(directory, f"{kind}.gguf")
            made[f"GGUF {kind}"] = unpack(write_gguf(model_dir, file, name="llama", kind=kind))
        for name, path in made.items():
            for keeps_files in (True, False):
                engine = Engine(torch.bfloat16, keeps_files=keeps_files)
                label = name if keeps_files else f"{name}, as numbers"
                found[label] = logits_of(path, engine, sequences)
    return found


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL_DIR)
    parser.add_argument("--tokens", type=int, default=150, help="of each answer")
    parser.add_argument("--files", action="store_true", help="quantised checkpoints as well")
    parser.add_argument("--checkpoint", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--write-tokens", type=Path)
    parser.add_argument("--other", action="append", default=[], metavar="NAME=FILE")
    args = parser.parse_args()
    sequences = texts(args.model, args.tokens)
    if args.write_tokens is not None:
        args.write_tokens.write_text(json.dumps([one.tolist() for one in sequences]))
    found = {name: logits_of(args.model, engine, sequences) for name, engine in ENGINES.items()}
    if args.files:
        found |= logits_of_files(args.model, sequences)
    for checkpoint in args.checkpoint:
        name, _, path = checkpoint.partition("=")
        served = unpack(Path(path)) if path.endswith(".gguf") else Path(path)
        found[name] = logits_of(served, Engine(torch.bfloat16), sequences)
    for other in args.other:
        name, _, path = other.partition("=")
        with np.load(path) as arrays:
            found[name] = torch.cat(
                [torch.from_numpy(arrays[str(index)]) for index in range(len(sequences))]
            )
    print(f"{len(found['float32'])} positions of {args.model.name}")
    print_head("", "KL from bf16, 1e-4", "from fp32", "top-1 as bf16, %", "without near-ties")
    for name, logits in found.items():
        row = differences(logits, found["bfloat16"], found["float32"])
        shares = f"{row.agreement:.2%}", f"{row.clear_agreement:.2%}"
        print_row(name, f"{row.kl_bf16 * 1e4:.3f}", f"{row.kl_fp32 * 1e4:.3f}", *shares)


if __name__ == "__main__":
    main()
