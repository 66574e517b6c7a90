"""What each hand-set number on the planning path buys: `python -m bench.scheduling.margins`.

The hybrid workload of `bench.scheduling.hybrid` in virtual time, with one number at a time made to
mean nothing, and beside it all as it is. `--scene` and `--row` pick some; seeds by `--seeds`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from unittest.mock import patch

from bench.scheduling.hybrid import Cell, Figures, Setting, play
from bench.table import print_head, print_row


class Scene(NamedTuple):
    """A load, and the pool."""

    rate: float
    capacity_tokens: int


SCENES = {
    "half loaded": Scene(16.0, 60_000),
    "little memory": Scene(16.0, 20_000),
    "overload": Scene(30.0, 60_000),
}
MANY = 1e9
NEUTRAL: dict[str, Mapping[str, float]] = {
    "(as it is)": {},
    "FEASIBLE_FACTOR": {"FEASIBLE_FACTOR": 1.0},
    "LEAST_SHARE": {"LEAST_SHARE": 1.0},
    "RESERVE_SHARE": {"RESERVE_SHARE": 0.0},
    "MAX_RESERVE_SHARE": {"MAX_RESERVE_SHARE": 1.0},
    "GUARD_DEVIATIONS": {"GUARD_DEVIATIONS": 0.0},
    "OUTLIER_DEVIATIONS": {"OUTLIER_DEVIATIONS": MANY},
    "GUARD_CUT": {"GUARD_CUT": 1.0},
    "LINK_SHARE": {"LINK_SHARE": 1.0},
    "MAX_SHARE": {"MAX_SHARE": 1.0},
    "BUSY_SHARE": {"BUSY_SHARE": 0.0},
    "SHARE_PER_FREE": {"SHARE_PER_FREE": MANY},
    "both: no share of the pool": {"MAX_SHARE": MANY, "BUSY_SHARE": MANY},
    "OVER_SHARE": {"OVER_SHARE": 0.0},
    "FADE": {"FADE": 1e-6},
    "STRETCH_PER_FREE": {"STRETCH_PER_FREE": 0.0},
    "MUCH_FREE": {"MUCH_FREE": 0.0},
    "DECODE_STRETCH": {"DECODE_STRETCH": 0.0},
    "NEARLY_FREE": {"NEARLY_FREE": 0.0},
    "IDLE_FLOORS": {"IDLE_FLOORS": 1.0},
    "IDLE_SHARE": {"IDLE_SHARE": MANY},
    "MAX_IDLE_LIMIT_S": {"MAX_IDLE_LIMIT_S": MANY},
    "RT_GROWTH": {"RT_GROWTH": 0},
    "LATE_POOL_SHARE": {"LATE_POOL_SHARE": 1.0},
    "MIN_CHUNK": {"MIN_CHUNK": 1},
    "MAX_RESCUED": {"MAX_RESCUED": 0},
    "ALIKE": {"ALIKE": 0.0},
    "LOOK_AHEAD": {"LOOK_AHEAD": 1},
    "MIN_IN_FLIGHT_TOKENS": {"MIN_IN_FLIGHT_TOKENS": 1 << 40},
    "WAVES": {"WAVES": 0.0},
    "STEP": {"STEP": 0.0},
    "ROUTER_TIME_FACTOR": {"ROUTER_TIME_FACTOR": 1.0},
    "ERROR_FACTOR": {"ERROR_FACTOR": 0.0},
}
"""By row: numbers of the router, and the values at which they mean nothing."""


@contextlib.contextmanager
def neutral(numbers: Mapping[str, float]) -> Iterator[None]:
    """Give numbers of the router other values wherever they are read. Raises KeyError."""
    with contextlib.ExitStack() as stack:
        for name, value in numbers.items():
            owners = [
                module
                for path, module in list(sys.modules.items())
                if path.startswith("lightserve.") and hasattr(module, name)
            ]
            if not owners:
                raise KeyError(name)
            for module in owners:
                stack.enter_context(patch.object(module, name, value))
        yield


def run(name: str, scene: Scene, seed: int) -> Figures:
    """Run a scene with a row's numbers."""
    with neutral(NEUTRAL[name]):
        return play(
            Cell(
                Setting("unified"),
                scene.rate,
                seed=seed,
                duration_s=45.0,
                margin_s=10.0,
                capacity_tokens=scene.capacity_tokens,
            )
        )


def main() -> None:
    """Print a table for each scene."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scene", choices=SCENES, action="append")
    parser.add_argument("--row", choices=NEUTRAL, action="append")
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    print_head("scene", "without", "TTFT %", "goodput/s", "BE tokens/s", "evictions")
    for title in args.scene or SCENES:
        for name in args.row or NEUTRAL:
            runs = [run(name, SCENES[title], seed) for seed in range(args.seeds)]
            print_row(
                title,
                name,
                ", ".join(f"{figures.ttft_pct:.1f}" for figures in runs),
                ", ".join(f"{figures.goodput:.2f}" for figures in runs),
                ", ".join(f"{figures.be_tps:.0f}" for figures in runs),
                ", ".join(f"{figures.evictions:.0f}" for figures in runs),
            )


if __name__ == "__main__":
    main()
