"""What the router's core takes for a step here, by rows: a table for `lightserve simulate`.

    python -m bench.scheduling.router_times > times.csv
    lightserve simulate … --router-times times.csv

CPU time of all calls of the core for every eighth step of the hybrid workload, a class of rows
after the other: median of each. With the table a simulation is a function of its seed again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.scheduling.paper_loads import bros_load
from lightserve.sim import HybridConfig
from lightserve.sim.hybrid import HybridRun

RATES = (4.0, 16.0, 24.0, 32.0)
"""Real-time requests a second."""
NUM_CLASSES = 12
MIN_STEPS = 20
"""Of a class."""


def table(rows: Sequence[int], seconds: Sequence[float]) -> list[tuple[int, float]]:
    """Return the median number of rows, and of milliseconds, of classes with as many steps each."""
    order = np.argsort(rows, kind="stable")
    num_classes = max(1, min(NUM_CLASSES, len(order) // MIN_STEPS))
    found: dict[int, float] = {}
    for part in np.array_split(order, num_classes):
        middle = int(np.median(np.asarray(rows)[part]))
        found[middle] = 1e3 * float(np.median(np.asarray(seconds)[part]))
    return sorted(found.items())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="virtual ones, at each rate")
    args = parser.parse_args()
    rows: list[int] = []
    seconds: list[float] = []
    for rate in RATES:
        load = bros_load(Path(), 0) | {"rt": f"poisson:{rate:g}", "be": "closed:256"}
        run = HybridRun(HybridConfig(**load | {"duration_s": args.seconds, "margin_s": 1.0}))
        run.advance(args.seconds)
        rows += run.core.step_rows
        seconds += run.core.step_cpu_s
    print("rows,ms")
    for num_rows, ms in table(rows, seconds):
        print(f"{num_rows},{ms:.3f}")


if __name__ == "__main__":
    main()
