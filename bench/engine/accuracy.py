"""What rounding costs: distributions of quantized engines beside those of bfloat16 and float32.

    python -m bench.engine.accuracy [--model DIR] [--tokens 150]
        [--write-tokens tokens.json] [--other NAME=logits.npz ...]

A model goes on with prompts, at temperature 1 and in float32; then each engine computes the logits
of all these tokens, a prompt as one chunk and what follows token by token, as it is served.
Printed are the mean KL divergence (nats) from bfloat16's and from float32's distributions, and how
often the most probable token is the same as bfloat16's: of all positions, and of those at which
bfloat16's two best are further apart than it is itself from float32 in the 99th percentile.

Another program's logits stand beside them: it reads the tokens of --write-tokens (a list for each
sequence) and writes float32 arrays [tokens, vocabulary] under the names "0", "1", ….
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from support.model_runs import load_tiny
from support.parity import DirectDriver, run_sequences, schedule
from support.tiny_models import load_reference
from tokenizers import Tokenizer
from torch import Tensor

from bench.table import print_head, print_row
from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.kernels.select import make_kernels
from lightserve.worker.engine import linear_method

PROMPTS = Path(__file__).resolve().parents[2] / "examples" / "prompts.txt"


class Engine(NamedTuple):
    """One way to serve the model."""

    dtype: torch.dtype
    quantization: str = "none"
    kv_dtype: torch.dtype | None = None


ENGINES = {
    "float32": Engine(torch.float32),
    "bfloat16": Engine(torch.bfloat16),
    "int8": Engine(torch.bfloat16, "int8"),
    "int4": Engine(torch.bfloat16, "int4"),
    "KV int8": Engine(torch.bfloat16, kv_dtype=torch.int8),
}


def texts(model_dir: Path, num_tokens: int, seed: int) -> list[Tensor]:
    """Return the tokens of prompts and of what the model goes on with, int64 [n] each."""
    torch.manual_seed(seed)
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
    kernels = make_kernels("auto", batch_invariant=False)
    method = linear_method(engine.quantization, kernels, engine.dtype)
    loaded = load_tiny(model_dir, engine.dtype, kernels, method=method)
    lengths = [len(sequence) for sequence in sequences]
    driver = DirectDriver(
        loaded.model,
        num_kv_heads=loaded.num_kv_heads,
        dtype=engine.kv_dtype or engine.dtype,
        lengths=lengths,
    )
    logits = run_sequences(
        driver, sequences, schedule(lengths, chunk=None, num_decodes=min(lengths) // 2)
    )
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


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL_DIR)
    parser.add_argument("--tokens", type=int, default=150, help="of each answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write-tokens", type=Path)
    parser.add_argument("--other", action="append", default=[], metavar="NAME=FILE")
    args = parser.parse_args()
    sequences = texts(args.model, args.tokens, args.seed)
    if args.write_tokens is not None:
        args.write_tokens.write_text(json.dumps([one.tolist() for one in sequences]))
    found = {name: logits_of(args.model, engine, sequences) for name, engine in ENGINES.items()}
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
