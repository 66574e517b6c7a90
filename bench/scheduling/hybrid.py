"""The unified planner beside tuned baselines on the hybrid workload (mechanisms, section 6).

    python -m bench.scheduling.hybrid tune       the best setting of each baseline at each rate
    python -m bench.scheduling.hybrid t6 | t7 | t8 | t9 | t10
    python -m bench.scheduling.hybrid all        everything, and the pictures in docs/results

Real-time lengths from ShareGPT, Poisson arrivals, a closed loop of 256 best-effort requests, on
virtual hardware that the router knows by a profile fitted to noisy samples; every policy is the
real router core's. Each run is kept in a file of JSON lines, `--runs`: who is interrupted goes on.
The file knows nothing of the code: a changed policy needs a new one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.scheduling import hybrid_plots as plots
from bench.scheduling import hybrid_tables as tables
from bench.scheduling.hybrid_cells import Runner
from bench.scheduling.hybrid_tables import Bench
from bench.scheduling.hybrid_tuning import BASELINES, Load, by_best_effort, tuned, tuned_for_goodput


def tune(bench: Bench) -> None:
    """Print the best settings."""
    for rate in tables.RATES:
        for policy in bench.baselines:
            setting = tuned_for_goodput(bench.runner, policy, Load(rate))
            print(f"{rate:g}/s, goodput: {setting}")
    for load in (Load(8.0), Load(16.0), tables.TIGHT):
        setting = tuned(bench.runner, "priority", load, by_best_effort)
        print(f"{load.rate:g}/s, {load.capacity_tokens} tokens, best-effort: {setting}")


TABLES: Mapping[str, Callable[[Bench], None]] = {
    "tune": tune,
    "t7": tables.t7,
    "t8": tables.t8,
    "t9": tables.t9,
    "t10": tables.t10,
    "t6": tables.t6,
    "plots": plots.draw,
}


def main() -> None:
    """Print what the command line names, and its time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=(*TABLES, "all"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--runs", type=Path, default=Path("build/hybrid_runs.jsonl"))
    parser.add_argument("--baselines", nargs="+", default=BASELINES, choices=BASELINES)
    args = parser.parse_args()
    args.runs.parent.mkdir(parents=True, exist_ok=True)
    bench = Bench(Runner(args.runs, num_jobs=args.jobs), args.seeds, args.baselines)
    started_s = time.monotonic()
    for name in TABLES if args.table == "all" else [args.table]:
        print(f"\n### {name.upper()}\n")
        TABLES[name](bench)
    print(f"\n{args.seeds} seeds, {time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
