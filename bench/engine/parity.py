"""Parity: every tiny model against transformers, over the whole grid.

    python -m bench.engine.parity [--kernels torch] [--models qwen3,qwen2]

float32 and bfloat16; alone and with 16 others in the same passes; chunks of 16, 37, 64 and the
whole prompt; one rank and two (over gloo). Prints a table per grid column, and exits with 1 if
parity is broken anywhere. `different` must be 0; `excused` are positions where the reference's two
best tokens are tied. The reference is transformers in
float32; the last table compares with transformers in bfloat16, beside what transformers itself
loses by it (see `support.parity`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from support.model_runs import (
    NUM_DECODES,
    load_tiny,
    standard_sequences,
)
from support.parity import (
    ParityReport,
    TokenSequence,
    compare_all,
    logits_of,
    schedule,
)
from support.tiny_models import (
    TINY_MODELS,
    TinyModel,
    load_reference,
    write_tiny_model,
)
from support.tp_run import Job, run_ranks
from torch import Tensor

from lightserve.kernels.select import make_kernels

CHUNKS = (16, 37, 64, 0)
TP_SIZE = 2


class Case(NamedTuple):
    """One column of the grid."""

    dtype: torch.dtype
    tp: int
    alone: bool
    chunk: int
    """0: whole."""

    @property
    def label(self) -> str:
        """Words for the table."""
        dtype = str(self.dtype).removeprefix("torch.")
        company = "alone" if self.alone else "with 16"
        return f"{dtype:9} tp {self.tp}  {company:8} chunk {self.chunk or 'whole'}"


class Prepared(NamedTuple):
    """A model directory and the reference's sequences."""

    tiny: TinyModel
    path: Path
    sequences: list[TokenSequence]


def grid(dtype: torch.dtype, tp: int) -> Iterator[Case]:
    """All cases of one dtype and degree."""
    for alone in (True, False):
        for chunk in CHUNKS:
            yield Case(dtype, tp, alone, chunk)


def run_single(model: Prepared, cases: Sequence[Case], kernels: str) -> list[list[Tensor]]:
    """Logits of every case on one rank."""
    loaded = load_tiny(model.path, cases[0].dtype, make_kernels(kernels, batch_invariant=False))
    results = []
    for case in cases:
        chosen = model.sequences[:1] if case.alone else model.sequences
        lengths = [len(sequence.tokens) for sequence in chosen]
        passes = schedule(lengths, chunk=case.chunk or None, num_decodes=NUM_DECODES)
        logits = loaded.run(chosen, passes)
        assert logits is not None
        results.append(logits)
    return results


def jobs_of(model: Prepared, cases: Sequence[Case], kernels: str) -> list[Job]:
    """The same for processes."""
    return [
        Job(
            path=str(model.path),
            dtype=str(case.dtype).removeprefix("torch."),
            kernels=kernels,
            chunk=case.chunk,
            tokens=[
                sequence.tokens
                for sequence in (model.sequences[:1] if case.alone else model.sequences)
            ],
        )
        for case in cases
    ]


def measure(
    tiny_models: Sequence[TinyModel], kernels: str, directory: Path
) -> dict[tuple[str, Case], ParityReport]:
    """Run the grid; return the report of each model and case."""
    reports: dict[tuple[str, Case], ParityReport] = {}

    def add(model: Prepared, case: Case, logits: list[Tensor]) -> None:
        chosen = model.sequences[:1] if case.alone else model.sequences
        reports[model.tiny.name, case] = compare_all(chosen, logits, case.dtype)

    for dtype in (torch.float32, torch.bfloat16):
        models = [prepare(tiny, directory / str(dtype), dtype) for tiny in tiny_models]
        single, split = list(grid(dtype, 1)), list(grid(dtype, TP_SIZE))
        for model in models:
            for case, logits in zip(single, run_single(model, single, kernels), strict=True):
                add(model, case, logits)
        jobs = [job for model in models for job in jobs_of(model, split, kernels)]
        results = iter(run_ranks(jobs, TP_SIZE, directory / str(dtype)))
        for model in models:
            for case in split:
                add(model, case, next(results))
    return reports


def measure_bfloat16(
    tiny_models: Sequence[TinyModel], kernels: str, directory: Path
) -> dict[str, ParityReport]:
    """Compare lightserve and transformers, both in bfloat16, and each with float32."""
    dtype = torch.bfloat16
    case = Case(dtype, 1, alone=False, chunk=16)
    reports: dict[str, ParityReport] = defaultdict(ParityReport)
    for tiny in tiny_models:
        model = prepare(tiny, directory / "rounding", dtype)
        ours = run_single(model, [case], kernels)[0]
        theirs = logits_of(load_reference(model.path, dtype), model.sequences)
        rounded = [
            TokenSequence(sequence.tokens, logits)
            for sequence, logits in zip(model.sequences, theirs, strict=True)
        ]
        reports["lightserve bf16 / transformers f32"] += compare_all(model.sequences, ours, dtype)
        reports["transformers bf16 / transformers f32"] += compare_all(
            model.sequences, theirs, dtype
        )
        reports["lightserve bf16 / transformers bf16"] += compare_all(rounded, ours, dtype)
    return reports


def prepare(tiny: TinyModel, directory: Path, dtype: torch.dtype) -> Prepared:
    """Write a model and let the reference speak."""
    path = write_tiny_model(tiny, directory / tiny.name, dtype=dtype)
    return Prepared(tiny, path, standard_sequences(load_reference(path, torch.float32)))


def print_table(title: str, reports: dict[str, ParityReport]) -> None:
    """Print one table."""
    print(f"\n{title:40} {'positions':>10} {'different':>10} {'excused':>8} {'max |dlogp|':>12}")
    for label, report in reports.items():
        print(
            f"{label:40} {report.num_positions:10} {report.num_different:10}"
            f" {report.num_excused:8} {report.max_logprob_delta:12.2g}"
        )


def main() -> int:
    """Run everything and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", default="torch", help="name for make_kernels")
    parser.add_argument("--models", default="", help="comma-separated names; default: all")
    arguments = parser.parse_args()
    names = set(filter(None, arguments.models.split(",")))
    chosen = [tiny for tiny in TINY_MODELS if not names or tiny.name in names]
    with tempfile.TemporaryDirectory() as directory:
        reports = measure(chosen, arguments.kernels, Path(directory))
        rounding = measure_bfloat16(chosen, arguments.kernels, Path(directory))
    by_case: dict[str, ParityReport] = defaultdict(ParityReport)
    by_model: dict[torch.dtype, dict[str, ParityReport]] = defaultdict(
        lambda: defaultdict(ParityReport)
    )
    for (name, case), report in reports.items():
        by_case[case.label] += report
        by_model[case.dtype][name] += report
    print_table("case, all models", by_case)
    for dtype, figures in by_model.items():
        print_table(f"model, all cases, {str(dtype).removeprefix('torch.')}", figures)
    print_table("rounding: with 16 others, chunk 16", rounding)
    broken = [key for key, report in reports.items() if not report.holds(key[1].dtype)]
    for name, case in broken:
        print(f"BROKEN: {name}, {case.label}: {reports[name, case]}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
