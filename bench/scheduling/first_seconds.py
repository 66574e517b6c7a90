"""Best-effort work from a server's first second on: `python -m bench.scheduling.first_seconds`.

The unified planner on virtual hardware (A100, Llama-2-7B) that has served nothing before: real-time
requests of azure2023_conv's lengths beside a closed loop of best-effort ones. A row: best-effort
tokens per second in stretches of the run, and how many of the real-time requests of its first two
minutes had their first token and all gaps in time.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightserve.sim import HybridConfig, Targets
from lightserve.sim.hybrid import HybridRun
from lightserve.sim.simulation import Outcome

LENGTHS = str(Path(__file__).parents[1] / "traces/azure2023_conv.csv.gz")
TTFT_S, GAP_S = 1.0, 0.2
WARM_S = 120.0
"""What comes after it is called the steady state."""
DURATION_S = 180.0
STRETCHES = ((0.0, 10.0), (10.0, 30.0), (10.0, WARM_S), (WARM_S, DURATION_S))
RT, BE = 0, 1
"""Frontends of a run: each sends one class."""


class Seen(NamedTuple):
    """What a run came to."""

    tokens_per_s: list[float]
    """Best-effort ones, in each stretch."""
    num_in_time: int
    num_arrivals: int


def play(rate: float, seed: int) -> Seen:
    """Run one server for DURATION_S."""
    config = HybridConfig(
        rt=f"poisson:{rate}",
        rt_lengths=LENGTHS,
        be="closed:64",
        be_lengths="uniform:512-1024,32-128",
        duration_s=DURATION_S,
        margin_s=0.0,
        targets=Targets(ttft_s=TTFT_S, tpot_s=GAP_S, mtpot_s=GAP_S),
        seed=seed,
    )
    run = HybridRun(config)
    run.advance(DURATION_S)
    outcomes = run.simulation.outcomes.items()
    times_s = np.concatenate(
        [
            np.empty(0),
            *(outcome.token_times_s for key, outcome in outcomes if key.frontend_id == BE),
        ]
    )
    rates = [
        float(((times_s >= start_s) & (times_s < end_s)).sum() / (end_s - start_s))
        for start_s, end_s in STRETCHES
    ]
    early = [o for key, o in outcomes if key.frontend_id == RT and o.arrival_s < WARM_S]
    return Seen(rates, sum(map(_is_in_time, early)), len(early))


def _is_in_time(outcome: Outcome) -> bool:
    if not outcome.token_times_s:
        return False
    gaps_s = np.diff(outcome.token_times_s)
    is_prompt = outcome.token_times_s[0] - outcome.arrival_s <= TTFT_S
    return bool(is_prompt and (gaps_s <= GAP_S).all())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.3, 3.0, 16.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    cells = list(product(args.rates, range(args.seeds)))
    spans = " | ".join(f"{start:g} to {end:g} s" for start, end in STRETCHES)
    print(f"| RT/s | seed | {spans} | early / steady | RT in time |")
    print("| --- " * (len(STRETCHES) + 4) + "|")
    with ProcessPoolExecutor(args.jobs) as pool:
        for (rate, seed), seen in zip(
            cells, pool.map(play, *zip(*cells, strict=True)), strict=True
        ):
            early, steady = seen.tokens_per_s[-2:]
            share = f"{100 * early / steady:.0f} %" if steady else ""
            rates = " | ".join(f"{tokens:.0f}" for tokens in seen.tokens_per_s)
            print(
                f"| {rate:g} | {seed} | {rates} | {share} |"
                f" {seen.num_in_time} of {seen.num_arrivals} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
