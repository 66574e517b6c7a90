"""What becomes of best-effort KV when real-time requests need room: `python -m bench.memory.arms`.

Ways to keep the pool and to take memory, under the same load (the hybrid workload of BROS): the
real router core on virtual hardware (A100, Llama-2-7B), policy `priority`, a pool too small, an
endless backlog of best-effort requests, real-time ones with the lengths of ShareGPT. Nothing is
cached in any of them: blocks with one owner cannot be shared, and prompts here do not begin alike.

`bursts` compares amounts of clean-ahead, `headroom` what KV memory left free for bursts brings
(Echo, section 5): two real-time requests per second and bursts of twenty, `--burst-headroom-s` at 0
and above, for best-effort requests that are checkpointed and for ones that are computed anew.
`bench.memory.live` has arms and clean-ahead on a real server.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import gzip
import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.table import print_head, print_row
from lightserve import sim
from lightserve.sim.hybrid import HybridRun
from lightserve.sim.traffic import read_trace

LENGTHS = Path(__file__).parents[1] / "traces" / "sharegpt_lengths.csv.gz"
CAPACITY_TOKENS = 20_000
BURSTS_DURATION_S, MARGIN_S = 240.0, 30.0
RATE, BURST_RATE = 2.0, 20.0
BURST_S, BETWEEN_BURSTS_S = 4.0, 20.0
"""Of a burst, and on average from the end of one to the start of the next."""
HEADROOMS_S = (0.0, 0.5, 2.0, 10.0)
PREEMPTIONS = ("checkpoint", "recompute")


class HeadroomCell(NamedTuple):
    """One run."""

    preemption: str
    headroom_s: float
    seed: int


def write_bursts(path: Path, seed: int) -> None:
    """Write a trace of real-time requests: a steady rate, and bursts at random times."""
    rng = np.random.default_rng(seed)
    lengths = read_trace(LENGTHS)
    times, start_s = _arrivals(rng, 0.0, BURSTS_DURATION_S, RATE), 0.0
    while (start_s := start_s + rng.exponential(BETWEEN_BURSTS_S)) < BURSTS_DURATION_S:
        times += _arrivals(rng, start_s, start_s + BURST_S, BURST_RATE)
        start_s += BURST_S
    rows = rng.integers(len(lengths.prompt_tokens), size=len(times))
    with gzip.open(path, "wt", encoding="ascii", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["t", "prompt_tokens", "output_tokens"])
        for at_s, row in zip(sorted(times), rows, strict=True):
            writer.writerow([at_s, lengths.prompt_tokens[row], lengths.output_tokens[row]])


def _arrivals(rng: np.random.Generator, start_s: float, end_s: float, rate: float) -> list[float]:
    count = rng.poisson(rate * (end_s - start_s))
    return rng.uniform(start_s, end_s, count).tolist()  # type: ignore[no-any-return]


def run_headroom(cell: HeadroomCell) -> sim.HybridReport:
    """Run one cell."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "bursts.csv.gz"
        write_bursts(trace, cell.seed)
        config = sim.HybridConfig(
            rt=str(trace),
            be="closed:400",
            be_lengths="uniform:512-1024,32-128",
            duration_s=BURSTS_DURATION_S,
            margin_s=MARGIN_S,
            capacity_tokens=CAPACITY_TOKENS,
            policy="priority",
            serve_options={
                "preemption": cell.preemption,
                "burst_headroom_s": cell.headroom_s,
            },
            seed=cell.seed,
        )
        return sim.run_hybrid(config)


HEADROOM_HEADER = (
    "preemption | headroom s | RT TTFT p99 ms | TTFT ≤ 0.4 s | MTPOT ≤ 0.2 s | BE tokens/s"
    " | BE evicted | recomputed | copied in steps | copied ahead | loaded"
)


def print_headroom(cells: Sequence[HeadroomCell], reports: Sequence[sim.HybridReport]) -> None:
    """Print a line of the table: means over the seeds, the middle one's p99."""

    ttft_ms = float(np.median([r.rt.ttft_ms_p99 or 0.0 for r in reports]))
    figures = [
        f"{ttft_ms:.0f}",
        f"{mean(r.rt.ttft_attainment for r in reports):.1%}",
        f"{mean(r.rt.mtpot_attainment for r in reports):.1%}",
        f"{mean(r.be.throughput_tps for r in reports):.0f}",
        f"{mean(r.be.evictions for r in reports):.0f}",
        f"{mean(r.be.recomputed_tokens for r in reports):,.0f}",
        f"{mean(r.kv.saved_tokens for r in reports):,.0f}",
        f"{mean(r.kv.ahead_tokens for r in reports):,.0f}",
        f"{mean(r.kv.loaded_tokens for r in reports):,.0f}",
    ]
    print_row(cells[0].preemption, f"{cells[0].headroom_s:g}", *figures)


def headroom(num_seeds: int, num_jobs: int) -> None:
    """Print one line per way to preempt and headroom."""
    print_head(*HEADROOM_HEADER.split(" | "))
    groups = [
        [HeadroomCell(preemption, headroom_s, seed) for seed in range(num_seeds)]
        for preemption in PREEMPTIONS
        for headroom_s in HEADROOMS_S
    ]
    with ProcessPoolExecutor(num_jobs) as pool:
        pending = [pool.map(run_headroom, cells) for cells in groups]
        for cells, reports in zip(groups, pending, strict=True):
            print_headroom(cells, list(reports))


ARMS: dict[str, dict[str, float | str]] = {
    "two-ended 16, checkpoint": {"block_size": 16, "preemption": "checkpoint"},
    "B = 1, checkpoint": {"block_size": 1, "preemption": "checkpoint"},
    "exclusive 16, swap": {
        "block_size": 16,
        "block_owner": "exclusive",
        "preemption": "swap",
    },
    "exclusive 16, recompute": {
        "block_size": 16,
        "block_owner": "exclusive",
        "preemption": "recompute",
    },
    "two-ended 16, recompute": {"block_size": 16, "preemption": "recompute"},
}
ALONE = "no best-effort requests"
TARGETS = sim.Targets(ttft_s=0.4, tpot_s=0.2, mtpot_s=0.2)
TIGHT_TPOT_S = (0.04, 0.03, 0.025)
RATES = {20_000: (16.0, 18.0, 19.0, 20.0), 30_000: (20.0, 21.0, 22.0, 24.0)}
"""Per second, by the size of the pool: around what it can hold of real-time requests alone."""
CLEAN_AHEAD = (0, -1)


class Cell(NamedTuple):
    """One run."""

    arm: str
    rate: float
    """Real-time requests per second; 0: bursts."""
    capacity_tokens: int
    seed: int
    duration_s: float = 60.0
    margin_s: float = 20.0
    clean_ahead_tokens: int = -1


class Outcome(NamedTuple):
    """What a run came to."""

    report: sim.HybridReport
    tight_tpot: list[float]
    """Attainment with each of `TIGHT_TPOT_S` in place of the target."""


def config_of(cell: Cell, trace: Path | None = None) -> sim.HybridConfig:
    """Return the simulation of a cell, with its rate or the bursts of a trace."""
    config = sim.HybridConfig(
        rt=f"poisson:{cell.rate:g}" if trace is None else str(trace),
        rt_lengths=str(LENGTHS) if trace is None else None,
        be="closed:256",
        be_lengths="uniform:512-1024,32-128",
        duration_s=cell.duration_s,
        margin_s=cell.margin_s,
        capacity_tokens=cell.capacity_tokens,
        policy="priority",
        targets=TARGETS,
        seed=cell.seed,
    )
    if cell.arm == ALONE:
        return dataclasses.replace(
            config, be=None, be_lengths=None, serve_options={"cache_policy": "off"}
        )
    options = ARMS[cell.arm] | {"cache_policy": "off"}
    if options["preemption"] == "checkpoint":
        options["clean_ahead_tokens"] = cell.clean_ahead_tokens
    return dataclasses.replace(config, serve_options=options)


def run(cell: Cell) -> Outcome:
    """Run one cell."""
    with tempfile.TemporaryDirectory() as folder:
        trace = None
        if cell.rate == 0:
            trace = Path(folder) / "bursts.csv.gz"
            write_bursts(trace, cell.seed)
        simulation = HybridRun(config_of(cell, trace))
    simulation.advance(cell.duration_s)
    report, tight = simulation.report(), []
    for tpot_s in TIGHT_TPOT_S:
        targets = TARGETS._replace(tpot_s=tpot_s)
        simulation.config = dataclasses.replace(simulation.config, targets=targets)
        tight.append(simulation.report().rt.tpot_attainment or 0.0)
    return Outcome(report, tight)


def mean(values: Iterable[float | None]) -> float:
    """Return the mean of those that there are."""
    return float(np.mean([value for value in values if value is not None]))


HEADER = (
    "arm | TTFT ≤ 0.4 s | p99 ms | TPOT ≤ 0.2 s | TPOT ≤ 40 / 30 / 25 ms | BE req/s | BE tokens/s"
    " | saved | ahead | loaded | GiB copied | recomputed | RT / BE evictions | pauses | run"
    " | plan bytes | router µs"
)


def print_arm(arm: str, outcomes: Sequence[Outcome]) -> None:
    """Print a line of the table: means over the seeds."""
    reports = [outcome.report for outcome in outcomes]
    tight = np.mean([outcome.tight_tpot for outcome in outcomes], axis=0)
    figures = [
        f"{mean(r.rt.ttft_attainment for r in reports):.1%}",
        f"{mean(r.rt.ttft_ms_p99 for r in reports):.0f}",
        f"{mean(r.rt.tpot_attainment for r in reports):.1%}",
        " / ".join(f"{share:.1%}" for share in tight),
        f"{mean(r.be.throughput_rps for r in reports):.2f}",
        f"{mean(r.be.throughput_tps for r in reports):.0f}",
        f"{mean(r.kv.saved_tokens for r in reports):,.0f}",
        f"{mean(r.kv.ahead_tokens for r in reports):,.0f}",
        f"{mean(r.kv.loaded_tokens for r in reports):,.0f}",
        f"{mean(r.kv.copied_bytes for r in reports) / 2**30:.1f}",
        f"{mean(r.kv.recomputed_tokens for r in reports):,.0f}",
        f"{mean(r.rt.evictions for r in reports):.0f} /"
        f" {mean(r.be.evictions for r in reports):.0f}",
        f"{mean(r.kv.pauses for r in reports):.0f}",
        f"{mean(r.kv.mean_run_tokens for r in reports):.1f}",
        f"{mean(r.router.plan_bytes_mean for r in reports):,.0f}",
        f"{1e3 * mean(r.router.cpu_ms_p50 for r in reports):.0f}",
    ]
    print_row(arm, *figures)


BURSTS_HEADER = (
    "clean-ahead | RT TTFT p99 ms | TTFT ≤ 0.4 s | largest step ms | steps waited for copies, s"
    " | saved | ahead | loaded | BE tokens/s"
)


def print_bursts(cell: Cell, outcomes: Sequence[Outcome]) -> None:
    """Print a line of the table of clean-ahead."""
    reports = [outcome.report for outcome in outcomes]
    figures = [
        f"{mean(r.rt.ttft_ms_p99 for r in reports):.0f}",
        f"{mean(r.rt.ttft_attainment for r in reports):.2%}",
        f"{max(r.kv.max_step_ms for r in reports):.0f}",
        f"{mean(r.kv.copy_wait_s for r in reports):.2f}",
        f"{mean(r.kv.saved_tokens for r in reports):,.0f}",
        f"{mean(r.kv.ahead_tokens for r in reports):,.0f}",
        f"{mean(r.kv.loaded_tokens for r in reports):,.0f}",
        f"{mean(r.be.throughput_tps for r in reports):.0f}",
    ]
    print_row(cell.clean_ahead_tokens, *figures)


def tables(seeds: int) -> Iterator[tuple[str, list[list[Cell]]]]:
    """Yield the title of each table, and the cells of each of its lines."""
    for capacity_tokens, rates in RATES.items():
        for rate in rates:
            groups = [
                [Cell(arm, rate, capacity_tokens, seed) for seed in range(seeds)]
                for arm in (ALONE, *ARMS)
            ]
            yield f"M = {capacity_tokens:,}, {rate:g} real-time requests per second", groups


def burst_groups(seeds: int) -> list[list[Cell]]:
    """Return the cells of each line of the table of clean-ahead."""
    arm = next(iter(ARMS))
    return [
        [Cell(arm, 0.0, 20_000, seed, BURSTS_DURATION_S / 2, 20.0, amount) for seed in range(seeds)]
        for amount in CLEAN_AHEAD
    ]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=["arms", "bursts", "headroom"], default="arms")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write every run's report here")
    args = parser.parse_args()
    start_s = time.perf_counter()
    log: list[dict[str, object]] = []

    def note(cells: Sequence[Cell], outcomes: Sequence[Outcome]) -> None:
        for cell, outcome in zip(cells, outcomes, strict=True):
            report = dataclasses.asdict(outcome.report)
            log.append({**cell._asdict(), "tight_tpot": outcome.tight_tpot, **report})
        if args.json:
            args.json.write_text(json.dumps(log))

    if args.what == "headroom":
        headroom(args.seeds, args.jobs)
        return
    with ProcessPoolExecutor(args.jobs) as pool:
        if args.what == "bursts":
            groups = burst_groups(args.seeds)
            pending = [pool.map(run, cells) for cells in groups]
            print_head(*BURSTS_HEADER.split(" | "))
            for cells, outcomes in zip(groups, map(list, pending), strict=True):
                note(cells, outcomes)
                print_bursts(cells[0], outcomes)
        else:
            planned = [
                (title, groups, [pool.map(run, cells) for cells in groups])
                for title, groups in tables(args.seeds)
            ]
            for title, groups, pending in planned:
                print(f"\n{title}:\n")
                print_head(*HEADER.split(" | "))
                for cells, outcomes in zip(groups, map(list, pending), strict=True):
                    note(cells, outcomes)
                    print_arm(cells[0].arm, outcomes)
    print(f"\n{time.perf_counter() - start_s:.0f} s")


if __name__ == "__main__":
    main()
