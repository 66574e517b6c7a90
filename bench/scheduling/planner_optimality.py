"""The unified planner against the best of all steps, in random states of up to ten requests.

    python -m bench.scheduling.planner_optimality [--states 10000] [--first 0] [--jobs 2]

What a state, a feasible step and the best one are: `tests/support/best_plans.py`. Says how many
feasible steps the planner misses, the smallest states in which it does, and how its best-effort
tokens per second are distributed, as shares of those of two best steps: of all, which may leave
out every real-time request that can wait for a step more; and of those that give real-time
requests no less than the planner gives them.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import mean, quantiles
from typing import NamedTuple

from support.best_plans import best_step, only_real_time
from support.small_states import Reading, make_state

SHARES = (1, 5, 10, 25, 50, 75)


class Comparison(NamedTuple):
    """A state in which some step is feasible."""

    seed: int
    num_requests: int
    is_found: bool
    of_best: float | None
    """Best-effort tokens per second, as a share; None: the best step has none, or it is missed."""
    of_best_given: float | None
    """The same, of the best step that gives real-time requests no less."""


def compare(seed: int, reading: Reading) -> Comparison | None:
    """Return how the planner does in a state; None: no step is feasible."""
    state = make_state(seed)
    best = best_step(state, reading)
    if best is None:
        return None
    step = state.planned()
    if not state.is_feasible(step, reading):
        return Comparison(
            seed, len(state.requests), is_found=False, of_best=None, of_best_given=None
        )
    given = best_step(state, reading, with_all_of=only_real_time(step))
    rate = state.be_rate(step)
    shares = [
        None if one is None or state.be_rate(one) == 0 else min(1.0, rate / state.be_rate(one))
        for one in (best, given)
    ]
    return Comparison(seed, len(state.requests), True, *shares)


def report(reading: Reading, results: list[Comparison | None]) -> None:
    """Print a table row for each best step, and the smallest misses."""
    found = [result for result in results if result is not None]
    missed = sorted((r.num_requests, r.seed) for r in found if not r.is_found)
    print(f"\n{len(results)} states, a cut prompt advances with its {reading.value}:")
    if not found:
        print("  none feasible")
        return
    print(f"  {len(found)} feasible, {len(missed)} missed = {len(missed) / len(found):.2%}")
    print(f"  smallest missed (requests, seed): {missed[:8]}")
    print("  BE tokens/s, share of      states  mean  " + "  ".join(f"p{p:<3}" for p in SHARES))
    for name, shares in (
        ("the best step", [r.of_best for r in found]),
        ("the best with RT as given", [r.of_best_given for r in found]),
    ):
        known = [share for share in shares if share is not None]
        if len(known) < 2:  # no quantiles
            print(f"  {name:26} {len(known):6}")
            continue
        cuts = quantiles(known, n=100, method="inclusive")
        row = "  ".join(f"{cuts[p - 1]:.2f}" for p in SHARES)
        print(f"  {name:26} {len(known):6}  {mean(known):.3f}  {row}")


def main() -> None:
    """Compare, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--states", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first state")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    start_s = time.monotonic()
    seeds = range(options.first, options.first + options.states)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for reading in Reading:
            readings = [reading] * len(seeds)
            report(reading, list(pool.map(compare, seeds, readings, chunksize=50)))
    print(f"\n{time.monotonic() - start_s:.0f} s")


if __name__ == "__main__":
    main()
