"""Whether answers are exact: beside transformers, over pauses and copies, cut into streams.

python -m bench.engine.exact parity [--models NAME,...] [--kernels NAME]
    tokens and log-probabilities against transformers, over the whole grid
python -m bench.engine.exact lossless [--schedules 1000] [--jobs 2] [--seconds 900]
    random schedules of the real core over a real runner of a small random model, in
    virtual time: all tokens compared with each request run alone (`--batch-invariant`,
    float32), all KV that is read with what was computed. Exits with 1 if anything differs
python -m bench.engine.exact streams [--cases 10000]
    forced outputs through the whole HTTP path, characters and stop strings cut across tokens
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from hypothesis import HealthCheck, given, settings
from support.forced_streams import (
    LAGS_S,
    ForcedCase,
    ForcedFrontend,
    forced_cases,
)
from support.lossless import Catalogue, Tally, make_runner, make_schedule
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

from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.kernels.select import make_kernels
from lightserve.models.config import load_model_config

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


def parity() -> int:
    """Run everything and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", default="torch", help="name for make_kernels")
    parser.add_argument("--models", default="", help="comma-separated names; default: all")
    arguments = parser.parse_args()
    names = set(filter(None, arguments.models.split(",")))
    if unknown := names - {tiny.name for tiny in TINY_MODELS}:
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
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


SCHEDULES_PER_CATALOGUE = 25


def run_part(first: int, count: int) -> Tally:
    """Run schedules first … over requests of their own."""
    torch.set_num_threads(1)
    tally = Tally()
    with tempfile.TemporaryDirectory() as directory:
        catalogue = Catalogue(make_runner(Path(directory)), first)
    for number in range(first, first + count):
        tally.add(catalogue.run(make_schedule(number)))
    return tally


def lossless() -> None:
    """Run the schedules and print what they contained."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=900.0, help="begin nothing after these")
    options = parser.parse_args()
    start_s = time.monotonic()
    total = Tally()
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        parts = [
            pool.submit(run_part, first, min(SCHEDULES_PER_CATALOGUE, options.schedules - first))
            for first in range(0, options.schedules, SCHEDULES_PER_CATALOGUE)
        ]
        for part in as_completed(parts):
            if part.cancelled():
                continue
            total.add(part.result())
            elapsed_s = time.monotonic() - start_s
            done = f"{total.num_schedules} schedules, {total.num_different} different"
            print(f"{elapsed_s:.0f} s: {done}", file=sys.stderr)
            if elapsed_s > options.seconds:
                for other in parts:
                    other.cancel()
    figures = asdict(total)
    for name, value in {**figures, **figures.pop("seen")}.items():
        if name != "seen":
            print(f"{name:24} {value:,}")
    print(f"{'seconds':24} {time.monotonic() - start_s:.0f}")
    sys.exit(total.num_different > 0)


def streams() -> None:
    """Run the cases and print how many there were."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cases", type=int, default=10_000)
    num_cases: int = parser.parse_args().cases
    start_s = time.monotonic()
    num_run = num_stopped = 0
    with ForcedFrontend() as forced:
        vocab_size = load_model_config(BUNDLED_MODEL_DIR).vocab_size

        @given(forced_cases(forced.tokenizer, vocab_size=vocab_size))
        @settings(
            max_examples=num_cases,
            deadline=None,
            database=None,
            suppress_health_check=[*HealthCheck],
        )
        def check(case: ForcedCase) -> None:
            nonlocal num_run, num_stopped
            num_stopped += forced.check(case)
            num_run += 1

        check()
    print(f"cases {num_run}, of these ended by a stop string {num_stopped}, different 0")
    print(f"answers {num_run * 2 * len(LAGS_S)}, seconds {time.monotonic() - start_s:.0f}")


COMMANDS = {"parity": parity, "lossless": lossless, "streams": streams}

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        sys.exit(COMMANDS[sys.argv.pop(1)]())
    raise SystemExit(__doc__)
