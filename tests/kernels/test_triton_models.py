"""Whole models on Triton's kernels, in the interpreter where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.model_runs import load_tiny, standard_sequences
from support.parity import ParityReport, compare_all, schedule
from support.tiny_models import find_tiny_model, load_reference, write_tiny_model

from lightserve.errors import ConfigError
from lightserve.kernels import select
from lightserve.kernels.select import make_kernels

NUM_SEQUENCES = 3


def report_of(name: str, dtype: torch.dtype, path: Path, **changes: object) -> ParityReport:
    write_tiny_model(find_tiny_model(name), path, dtype=dtype)
    sequences = standard_sequences(load_reference(path, torch.float32))[:NUM_SEQUENCES]
    loaded = load_tiny(path, dtype, make_kernels("triton", batch_invariant=False), **changes)
    lengths = [len(sequence.tokens) for sequence in sequences]
    logits = loaded.run(sequences, schedule(lengths, chunk=37, num_decodes=2))
    assert logits is not None
    return compare_all(sequences, logits, dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama-mqa-tied", torch.float32),
        ("llama-head-dim", torch.bfloat16),
        ("mistral-window", torch.float32),
        ("qwen3", torch.bfloat16),
    ],
)
def test_parity_with_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    report = report_of(name, dtype, tmp_path)
    assert report.holds(dtype), report


def test_a_wrong_window_is_seen(tmp_path: Path) -> None:
    report = report_of("mistral-window", torch.float32, tmp_path, sliding_windows=(23,) * 3)
    assert not report.holds(torch.float32), report


def test_neither_gpu_nor_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs a GPU"):
        make_kernels("triton", batch_invariant=False)


def test_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the extra gpu"):
        make_kernels("triton", batch_invariant=False)
