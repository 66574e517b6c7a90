"""The mission's traffic on an H200 as it was measured: chats with tight targets beside a backlog.

    python -m bench.scheduling.h200 policies    10 to 60 chats a second under four policies
    python -m bench.scheduling.h200 pace        streams without targets beside long prompts

Chats of 53 to 1,127 prompt and 80 output tokens come by a Poisson process, their first token due in
150 ms and the others 20 ms apart in the mean; 256 best-effort streams of the same prompts and 200
output tokens run beside them.

The streams of `pace` run there and on a CPU with a small model, with `--pace-ms 0` and by default.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import compress
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from bench.table import print_head, print_row
from lightserve.messages.common import StepCoefficients
from lightserve.sim import HybridConfig, HybridReport, Targets, run_hybrid
from lightserve.sim.hybrid import HybridRun
from lightserve.sim.virtual_gpus import H200_LLAMA_8B, ProfiledHardware

TARGETS = Targets(ttft_s=0.15, tpot_s=0.02, mtpot_s=0.08)
PROMPTS = "uniform:53-1127"
POLICIES = ("unified", "echo", "priority", "chunked")


class Cell(NamedTuple):
    """One run."""

    policy: str = "unified"
    rate: float = 0.0
    """Chats a second."""
    seed: int = 0
    duration_s: float = 30.0
    margin_s: float = 4.0

    def config(self) -> HybridConfig:
        """Return what is run: a server's settings, as they were on the H200."""
        return HybridConfig(
            rt=f"poisson:{self.rate}",
            rt_lengths=f"{PROMPTS},80-80",
            be="closed:256",
            be_lengths=f"{PROMPTS},200-200",
            duration_s=self.duration_s,
            margin_s=self.margin_s,
            capacity_tokens=760_287,
            host_kv_tokens=32_768,
            budget_tokens=8192,
            policy=self.policy,
            hardware=H200_LLAMA_8B,
            targets=TARGETS,
            serve_options={"max_num_seqs": 320},
            seed=self.seed,
        )

    def in_time_pct(self, report: HybridReport) -> float:
        """Return how many of the chats met all their targets."""
        window_s = self.duration_s - 2 * self.margin_s
        return 100 * report.rt.goodput_rps * window_s / report.rt.arrivals


def run(cell: Cell) -> HybridReport:
    """Run it."""
    return run_hybrid(cell.config())


def run_all(cells: Sequence[Cell], processes: int) -> dict[Cell, HybridReport]:
    """Run cells beside each other."""
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        return dict(zip(cells, pool.map(run, cells), strict=True))


def show_policies(processes: int, seeds: int) -> None:
    """Print the chats in time and the best-effort tokens by rate and policy, means over seeds."""
    rates = range(10, 70, 10)
    cells = [Cell(p, rate, s) for rate in rates for p in POLICIES for s in range(seeds)]
    reports = run_all(cells, processes)
    print_head("chats/s", *[f"`{p}`: in time, %; best effort, tokens/s" for p in POLICIES])
    for rate in rates:
        row = []
        for policy in POLICIES:
            of_cell = [(c, r) for c, r in reports.items() if (c.rate, c.policy) == (rate, policy)]
            in_time = fmean(cell.in_time_pct(report) for cell, report in of_cell)
            tokens = fmean(report.be.throughput_tps for _, report in of_cell)
            row.append(f"{in_time:.1f}; {tokens:,.0f}")
        print_row(rate, *row)


SMALL_CPU = ProfiledHardware(
    StepCoefficients(
        *(5.6e-3, 0.0, 3.6e-4, 1e-4, 5e-4, 2e-7, 0.0, 1e-7),
    ),
    kv_bytes_per_token=16_384,
    spread=0.05,
)
"""A Llama of hidden size 512 and 8 layers on two cores, rounded: 160 tokens a second alone, 0.37 s
for 512 tokens of a prompt of 7,000."""
PEACE_TOKENS_PER_S = 30.0
BESIDE_S = 1.0
"""Streams are alone for so long."""


class Mix(NamedTuple):
    """Streams, and prompts that come while they run."""

    hardware: str
    """"cpu" or "h200"."""
    num_streams: int
    num_prompts: int
    prompt_tokens: int
    prompt_class: str = "rt"


MIXES = (
    *(Mix("cpu", 1, 2, 7000), Mix("cpu", 1, 1, 1000), Mix("cpu", 4, 2, 3000)),
    *(Mix("cpu", 8, 4, 7000), Mix("cpu", 16, 2, 7000), Mix("cpu", 1, 2, 7000, "be")),
    *(Mix("h200", 1, 2, 64_000), Mix("h200", 1, 1, 8000), Mix("h200", 16, 2, 32_000)),
    *(Mix("h200", 64, 4, 16_000), Mix("h200", 200, 2, 64_000), Mix("h200", 16, 2, 16_000, "be")),
)


class Kept(NamedTuple):
    """How streams fared beside prompts, and the prompts beside streams."""

    alone_per_s: float
    """Tokens of the slowest stream in a second before the prompts came."""
    beside_per_s: float
    """Tokens of the slowest stream in a second until the last prompt had a token."""
    gaps_ms: tuple[float, float, float]
    """Median, 99th percentile and largest gap of all streams in that time."""
    prompts_s: float
    """Seconds until the last prompt had a token."""

    @property
    def keeps(self) -> bool:
        """Whether the slowest stream had half of its pace, or thirty tokens a second."""
        return self.beside_per_s >= min(0.5 * self.alone_per_s, PEACE_TOKENS_PER_S)


def kept_of(times: list[Any], alone_per_s: float, start_s: float, end_s: float) -> Kept:
    """Return how streams fared beside prompts that came at `start_s` and were done at `end_s`.

    `times` are arrays of when each stream's tokens came, in seconds.
    """
    beside = [each[(each >= start_s) & (each <= end_s)] for each in times]
    gaps_ms = 1e3 * np.concatenate(
        [np.diff(each, prepend=start_s, append=end_s) for each in beside]
    )
    return Kept(
        alone_per_s,
        min(map(len, beside)) / (end_s - start_s),
        (float(np.median(gaps_ms)), float(np.percentile(gaps_ms, 99)), float(gaps_ms.max())),
        end_s - start_s,
    )


def play(mix: Mix, *, policy: str = "unified", seed: int = 0, **options: float | str) -> Kept:
    """Run a mix, with these options of the server."""
    hardware = SMALL_CPU if mix.hardware == "cpu" else H200_LLAMA_8B
    head, prompt = "t,prompt_tokens,output_tokens\n", f"{BESIDE_S},{mix.prompt_tokens},2\n"
    streams, prompts = "0,32,20000\n" * mix.num_streams, prompt * mix.num_prompts
    with tempfile.TemporaryDirectory() as directory:
        path, be_path = Path(directory) / "rt.csv", Path(directory) / "be.csv"
        is_be = mix.prompt_class == "be"
        path.write_text(head + streams + ("" if is_be else prompts))
        be_path.write_text(f"{head}0,32,1\n{prompts}")  # times count from the first row
        config = HybridConfig(
            rt=str(path),
            rt_max_tokens=None,
            be=str(be_path) if is_be else None,
            duration_s=600.0,
            margin_s=0.0,
            capacity_tokens=5_000_000,
            budget_tokens=hardware.server_budget if mix.hardware == "cpu" else 8192,
            policy=policy,
            hardware=hardware,
            targets=Targets(),
            serve_options={"max_num_seqs": 256, **options},
            seed=seed,
        )
        run = HybridRun(config)
    first_s: list[float] = []
    with contextlib.closing(run):
        until_s = BESIDE_S
        while len(first_s) < mix.num_prompts:
            until_s += 0.5
            run.advance(until_s)
            outcomes = list(run.simulation.outcomes.values())
            late = [each for each in outcomes if each.arrival_s >= BESIDE_S]
            first_s = [each.token_times_s[0] for each in late if each.token_times_s]
    end_s = max(first_s)
    is_stream = [each.arrival_s < BESIDE_S and len(each.token_times_s) > 1 for each in outcomes]
    times = [np.array(each.token_times_s) for each in compress(outcomes, is_stream)]
    before = [each[each < BESIDE_S] for each in times]
    alone_per_s = min((len(each) - 1) / (each[-1] - each[0]) for each in before)
    return kept_of(times, alone_per_s, BESIDE_S, end_s)


def show_pace(processes: int, seeds: int) -> None:
    """Print what streams keep with a pace and without, and what it costs the prompts."""
    del processes, seeds  # a run takes a second, and differs little
    heads = ("tokens/s", "gaps p50, p99, most (ms)", "prompts done (s)")
    print_head(
        "hardware", "streams", "prompts", "alone, tokens/s", *(f"{h}: 0, 33 ms" for h in heads)
    )
    for mix in MIXES:
        without, paced = play(mix, pace_ms=0.0), play(mix)
        pair = (without, paced)
        print_row(
            mix.hardware,
            mix.num_streams,
            f"{mix.num_prompts} of {mix.prompt_tokens:,} ({mix.prompt_class})",
            f"{paced.alone_per_s:.0f}",
            ", ".join(f"{kept.beside_per_s:.1f}" for kept in pair)
            + (" kept" if paced.keeps else ""),
            "; ".join("/".join(f"{gap:.0f}" for gap in kept.gaps_ms) for kept in pair),
            ", ".join(f"{kept.prompts_s:.1f}" for kept in pair),
        )


PARTS = {
    "policies": show_policies,
    "pace": show_pace,
}


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    PARTS[arguments.part](arguments.processes, arguments.seeds)


if __name__ == "__main__":
    main()
