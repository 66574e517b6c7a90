"""Batch invariance of whole models: logits are bit-equal over batches, chunks and slots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.model_runs import LoadedModel, load_tiny
from support.parity import DirectDriver, run_sequences, schedule
from support.tiny_models import VOCAB_SIZE, find_tiny_model, write_tiny_model
from torch import Tensor

from lightserve.kernels.cpu.default import TorchKernels
from lightserve.kernels.cpu.invariant import InvariantKernels
from lightserve.kernels.interface import Kernels

MODELS = ("llama-mha", "llama-biases-sharded", "mistral-window-mqa", "qwen3-window-yarn")
LENGTHS = (100, 17, 64, 3, 81)
NUM_DECODES = 6


def make_tokens() -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]


def run(
    loaded: LoadedModel, tokens: Sequence[Tensor], *, chunk: int | None, num_decodes: int, seed: int
) -> list[Tensor]:
    lengths = [len(sequence) for sequence in tokens]
    driver = DirectDriver(
        loaded.model,
        num_kv_heads=loaded.num_kv_heads,
        dtype=loaded.dtype,
        lengths=lengths,
        seed=seed,
    )
    logits = run_sequences(driver, tokens, schedule(lengths, chunk=chunk, num_decodes=num_decodes))
    assert logits is not None
    return logits


def num_different(kernels: Kernels, path: Path) -> int:
    """Return the sequences with other logits than alone and whole, over several schedules."""
    loaded = load_tiny(path, torch.float32, kernels)
    tokens = make_tokens()
    alone = [run(loaded, [one], chunk=None, num_decodes=0, seed=1)[0] for one in tokens]
    count = 0
    for seed, chunk in enumerate((None, 16, 7)):
        together = run(loaded, tokens, chunk=chunk, num_decodes=NUM_DECODES, seed=seed)
        count += sum(not torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    return count


@pytest.mark.parametrize("name", MODELS)
def test_logits_do_not_depend_on_batch_chunks_or_slots(name: str, tmp_path: Path) -> None:
    path = write_tiny_model(find_tiny_model(name), tmp_path)
    assert num_different(InvariantKernels(), path) == 0
    assert num_different(TorchKernels(), path) > 0, "the test can tell"
