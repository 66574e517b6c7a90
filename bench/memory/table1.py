"""Past-Future's Table 1 from the real router core: `python -m bench.memory.table1 [--jobs 2]`.

Every cell is the median of several seeds, with the options of the authors' published
simulation. Steps are compared as ratios to the same seeds' optimum.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict
from typing import NamedTuple

import numpy as np

from lightserve.sim.offline import OfflineConfig, run_offline
from lightserve.sim.report import Report
from lightserve.sim.workload import load_workload

CAPACITY_TOKENS = 120_000
PAPER_REQUESTS = 3000


class Cell(NamedTuple):
    """A row of the table: the rule, and what the paper has for it."""

    workload: str
    label: str
    admission: str
    options: dict[str, float]
    paper_steps: int
    paper_consumed_pct: float
    paper_evicted_pct: float
    is_target: bool = True
    """Whether the paper's figures are a target; with overcommit they are only shown."""


def _rules(workload: str, figures: Iterable[tuple[int, float, float]]) -> list[Cell]:
    overcommit = 1.25 if workload == "dist2" else 1.5
    rules: list[tuple[str, str, dict[str, float], bool]] = [
        ("optimum", "oracle", {}, True),
        ("past-future 3%", "past-future", {"reserve": 0.03}, True),
        ("past-future 5%", "past-future", {"reserve": 0.05}, True),
        ("past-future 10%", "past-future", {"reserve": 0.10}, True),
        ("aggressive 99%", "aggressive", {"watermark": 0.99}, True),
        ("aggressive 95%", "aggressive", {"watermark": 0.95}, True),
        ("aggressive 90%", "aggressive", {"watermark": 0.90}, True),
        ("conservative", "conservative", {}, True),
        (f"conservative {overcommit:.0%}", "conservative", {"overcommit": overcommit}, False),
    ]
    return [
        Cell(workload, label, admission, options, *paper, is_target)
        for (label, admission, options, is_target), paper in zip(rules, figures, strict=True)
    ]


CELLS = [
    *_rules(
        "dist1",
        [
            (294_250, 94.87, 0.0),
            (296_710, 93.61, 6.86),
            (301_680, 91.87, 3.37),
            (320_720, 87.09, 1.58),
            (284_160, 98.41, 93.7),
            (290_980, 96.10, 24.1),
            (302_900, 92.46, 10.8),
            (485_650, 57.75, 0.0),
            (320_530, 87.34, 17.2),
        ],
    ),
    *_rules(
        "dist2",
        [
            (653_120, 92.57, 0.0),
            (654_500, 92.16, 7.42),
            (669_770, 90.07, 4.39),
            (705_920, 85.26, 1.54),
            (616_230, 97.83, 97.7),
            (628_410, 95.86, 26.2),
            (654_190, 92.37, 13.9),
            (842_470, 71.71, 0.0),
            (665_970, 90.64, 84.3),
        ],
    ),
    *_rules(
        "dist3",
        [
            (230_690, 96.60, 0.0),
            (239_260, 94.50, 2.59),
            (241_650, 92.64, 0.87),
            (263_670, 87.80, 0.0),
            (227_250, 98.13, 34.3),
            (234_540, 95.07, 3.23),
            (247_130, 90.29, 0.17),
            (374_250, 59.73, 0.0),
            (246_870, 90.45, 19.1),
        ],
    ),
]


def run_cell(cell: Cell, seed: int, num_requests: int) -> Report:
    """Run one cell with one seed."""
    workload = load_workload(
        cell.workload,
        num_requests=num_requests,
        rng=np.random.default_rng(seed),
        cut_outputs=False,
    )
    config = OfflineConfig(
        capacity_tokens=CAPACITY_TOKENS,
        admission=cell.admission,
        admission_options=cell.options,
        paper_artifact=True,
        keeps_timeline=False,
        seed=seed,
    )
    return run_offline(workload, config)


def judge(cell: Cell, ratio: float, paper_ratio: float, consumed: float, evicted: float) -> str:
    """Say whether a cell is within the target's margins."""
    if not cell.is_target:
        return "shown only"
    misses = []
    if abs(ratio - paper_ratio) > 0.03:
        misses.append("steps")
    if abs(consumed - cell.paper_consumed_pct) > 1.5:
        misses.append("memory")
    if abs(evicted - cell.paper_evicted_pct) > max(3.0, 0.3 * cell.paper_evicted_pct):
        misses.append("evictions")
    return "missed: " + ", ".join(misses) if misses else "met"


def note(num_requests: int) -> str:
    """Return what is to be known of a smaller run than the paper's; nothing for that one."""
    if num_requests == PAPER_REQUESTS:
        return ""
    return (
        f"The paper's figures, and so the last column, hold for {PAPER_REQUESTS:,} requests:"
        f" start and end weigh more in {num_requests:,}.\n"
    )


def show_progress(jobs: Collection[Future[Report]]) -> None:
    """Count the runs that are done, on standard error, until all are."""
    start_s = time.perf_counter()
    for done, _ in enumerate(as_completed(jobs), 1):
        left_s = (time.perf_counter() - start_s) / done * (len(jobs) - done)
        end = "\n" if done == len(jobs) else ""
        print(
            f"\r{done}/{len(jobs)} runs, {left_s:.0f} s left ", end=end, file=sys.stderr, flush=True
        )


def main() -> None:
    """Run all cells and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--num-requests", type=int, default=PAPER_REQUESTS)
    parser.add_argument("--workload", choices=["dist1", "dist2", "dist3"])
    parser.add_argument("--json", help="file for every single report")
    args = parser.parse_args()
    cells = [cell for cell in CELLS if args.workload in (None, cell.workload)]
    start_s = time.perf_counter()
    with ProcessPoolExecutor(args.jobs) as pool:
        jobs = {
            (number, seed): pool.submit(run_cell, cell, seed, args.num_requests)
            for (number, cell), seed in itertools.product(enumerate(cells), range(args.seeds))
        }
        show_progress(jobs.values())
        reports = {key: job.result() for key, job in jobs.items()}
    print(
        "| workload | rule | steps/optimum (paper) | memory % (paper) | evicted % (paper) | ± | |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for number, cell in enumerate(cells):
        optimum = next(i for i, other in enumerate(cells) if other.workload == cell.workload)
        ratios = [
            reports[number, seed].decode_steps / reports[optimum, seed].decode_steps
            for seed in range(args.seeds)
        ]
        runs = [reports[number, seed] for seed in range(args.seeds)]
        ratio = statistics.median(ratios)
        consumed = statistics.median(run.consumed_pct for run in runs)
        evicted = statistics.median(run.evicted_pct for run in runs)
        paper_ratio = cell.paper_steps / cells[optimum].paper_steps
        print(
            f"| {cell.workload} | {cell.label} | {ratio:.3f} ({paper_ratio:.3f})"
            f" | {consumed:.1f} ({cell.paper_consumed_pct:.1f})"
            f" | {evicted:.2f} ({cell.paper_evicted_pct:.2f})"
            f" | ±{(max(ratios) - min(ratios)) / 2:.3f}"
            f" | {judge(cell, ratio, paper_ratio, consumed, evicted)} |"
        )
    print(f"\n{note(args.num_requests)}{len(jobs)} runs of {args.num_requests} requests, ", end="")
    print(f"{time.perf_counter() - start_s:.0f} s")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as stream:  # noqa: PTH123
            json.dump(
                {
                    f"{cells[n].workload} {cells[n].label} {s}": asdict(r)
                    for (n, s), r in reports.items()
                },
                stream,
            )


if __name__ == "__main__":
    main()
