"""Models split over two GPUs, a process each, against transformers (contract N3).

The ranks talk over NCCL; in a rehearsal over gloo, on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from support.model_runs import LENGTHS
from support.parity import TokenSequence, compare_all, make_sequences
from support.tiny_models import TINY_MODELS, find_tiny_model, load_reference, write_tiny_model
from support.tp_run import Job, run_ranks

from bench.gpu.context import Bench

TP_SIZE = 2


@dataclass(frozen=True)
class Scale:
    """What is compared."""

    models: Sequence[str]
    lengths: Sequence[tuple[int, int]]
    chunk: int
    kernels: str


GPU = Scale([tiny.name for tiny in TINY_MODELS], LENGTHS, 37, "triton")
REHEARSED = Scale(["llama-mha"], ((9, 9), (5, 9)), 4, "torch")


class Case(NamedTuple):
    """A model in one type, and what transformers says."""

    name: str
    dtype: torch.dtype
    sequences: list[TokenSequence]
    job: Job


def run(bench: Bench) -> None:
    """Compare every tiny model in both types, all in one start of the ranks."""
    if bench.machine.is_gpu and torch.cuda.device_count() < TP_SIZE:
        bench.rows.skip("two ranks over NCCL", f"{torch.cuda.device_count()} GPU")
        return
    scale = REHEARSED if bench.rehearse else GPU
    with TemporaryDirectory() as directory:
        cases = [
            _case(name, dtype, scale, Path(directory))
            for name in scale.models
            for dtype in (torch.float32, torch.bfloat16)
        ]
        jobs = [case.job for case in cases]
        found = run_ranks(jobs, TP_SIZE, Path(directory), device=bench.machine.device.type)
    for case, logits in zip(cases, found, strict=True):
        report = compare_all(case.sequences, logits, case.dtype)
        note = (
            f"{report.num_positions} positions, {report.num_excused} excused,"
            f" largest log-probability difference {report.max_logprob_delta:.2g}"
        )
        name = f"{case.name}, {case.job['dtype']}, {TP_SIZE} ranks: tokens that differ"
        bench.rows.claim(name, report.holds(case.dtype), note)


def _case(name: str, dtype: torch.dtype, scale: Scale, directory: Path) -> Case:
    """Write a model and let the reference speak."""
    text = str(dtype).removeprefix("torch.")
    path = write_tiny_model(find_tiny_model(name), directory / f"{name}-{text}", dtype=dtype)
    sequences = make_sequences(load_reference(path, torch.float32), scale.lengths, seed=0)
    job = Job(
        path=str(path),
        dtype=text,
        kernels=scale.kernels,
        chunk=scale.chunk,
        tokens=[one.tokens for one in sequences],
    )
    return Case(name, dtype, sequences, job)
