"""The unified planner against `priority` on the hybrid workload (mechanisms, section 6: T7, T9).

    python bench/planner.py [--rates 16 24 28 32] [--seeds 2] [--jobs 2]

Real-time lengths from ShareGPT, Poisson arrivals, over a closed loop of 256 best-effort requests,
on virtual hardware; every policy is the real router core's. `priority` gets the better of two
token budgets at each rate.
"""

from __future__ import annotations

import argparse
import itertools
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from lightserve.sim import HybridConfig, run_hybrid

LENGTHS = str(Path(__file__).parent / "traces/sharegpt_lengths.csv.gz")
ARMS = (("unified", 512), ("priority", 256), ("priority", 512))


class Run(NamedTuple):
    """One cell."""

    policy: str
    budget: int
    rate: float
    seed: int
    duration_s: float
    capacity_tokens: int


class Figures(NamedTuple):
    """What a run came to."""

    ttft_pct: float
    mtpot_pct: float
    goodput_rps: float
    latency_ms: float
    be_rps: float
    rt_evictions: int


def play(run: Run) -> Figures:
    """Run one cell."""
    report = run_hybrid(
        HybridConfig(
            rt=f"poisson:{run.rate}",
            rt_lengths=LENGTHS,
            be="closed:256",
            be_lengths="uniform:512-1024,32-128",
            duration_s=run.duration_s,
            capacity_tokens=run.capacity_tokens,
            policy=run.policy,
            budget_tokens=run.budget,
            seed=run.seed,
        )
    )
    rt, be = report.rt, report.be
    return Figures(
        100.0 * (rt.ttft_attainment or 0.0),
        100.0 * (rt.mtpot_attainment or 0.0),
        rt.goodput_rps,
        rt.normalized_latency_ms or 0.0,
        be.throughput_rps,
        rt.evictions,
    )


def averaged(found: list[Figures]) -> Figures:
    """Return means over seeds; evictions are summed."""
    means = [mean(column) for column in zip(*(figures[:-1] for figures in found), strict=True)]
    ttft_pct, mtpot_pct, goodput_rps, latency_ms, be_rps = means
    num_evictions = sum(figures.rt_evictions for figures in found)
    return Figures(ttft_pct, mtpot_pct, goodput_rps, latency_ms, be_rps, num_evictions)


def main() -> None:
    """Run all cells and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[16, 24, 28, 32])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--duration-s", type=float, default=120.0)
    parser.add_argument("--capacity-tokens", type=int, default=60_000)
    args = parser.parse_args()
    started_s = time.monotonic()
    cells = list(itertools.product(args.rates, ARMS))
    runs = [
        Run(policy, budget, rate, seed, args.duration_s, args.capacity_tokens)
        for rate, (policy, budget) in cells
        for seed in range(args.seeds)
    ]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        found = iter(list(pool.map(play, runs)))
    print("| RT/s | policy | TTFT % | gaps % | goodput/s | ms/token | BE/s | RT evictions |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for rate, (policy, budget) in cells:
        figures = averaged([next(found) for _ in range(args.seeds)])
        print(
            f"| {rate:g} | {policy} {budget} | {figures.ttft_pct:.1f} | {figures.mtpot_pct:.1f}"
            f" | {figures.goodput_rps:.2f} | {figures.latency_ms:.0f} | {figures.be_rps:.2f}"
            f" | {figures.rt_evictions} |"
        )
    print(f"\n{len(runs)} runs of {args.duration_s:g} s, {time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
