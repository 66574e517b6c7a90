"""What KV memory left free for bursts brings (Echo, E8): `python -m bench.memory.burst_headroom`.

The real router core on virtual hardware (A100, Llama-2-7B) with a pool of 20,000 tokens: policy
`priority`, an endless backlog of best-effort requests, and real-time ones (lengths of ShareGPT)
that come two per second and in bursts of twenty per second. `--burst-headroom-s` at 0 and above,
for best-effort requests that are checkpointed and for ones that are computed anew, Echo's way.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightserve import sim
from lightserve.sim.workload import read_trace

LENGTHS = Path(__file__).parents[1] / "traces" / "sharegpt_lengths.csv.gz"
CAPACITY_TOKENS = 20_000
DURATION_S, MARGIN_S = 240.0, 30.0
RATE, BURST_RATE = 2.0, 20.0
BURST_S, BETWEEN_BURSTS_S = 4.0, 20.0
"""Of a burst, and on average from the end of one to the start of the next."""
HEADROOMS_S = (0.0, 0.5, 2.0, 10.0)
PREEMPTIONS = ("checkpoint", "recompute")


class Cell(NamedTuple):
    """One run."""

    preemption: str
    headroom_s: float
    seed: int


def write_bursts(path: Path, seed: int) -> None:
    """Write a trace of real-time requests: a steady rate, and bursts at random times."""
    rng = np.random.default_rng(seed)
    lengths = read_trace(LENGTHS)
    times, start_s = _arrivals(rng, 0.0, DURATION_S, RATE), 0.0
    while (start_s := start_s + rng.exponential(BETWEEN_BURSTS_S)) < DURATION_S:
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


def run(cell: Cell) -> sim.HybridReport:
    """Run one cell."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "bursts.csv.gz"
        write_bursts(trace, cell.seed)
        config = sim.HybridConfig(
            rt=str(trace),
            be="closed:400",
            be_lengths="uniform:512-1024,32-128",
            duration_s=DURATION_S,
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


HEADER = (
    "| preemption | headroom s | RT TTFT p99 ms | TTFT ≤ 0.4 s | MTPOT ≤ 0.2 s | BE tokens/s"
    " | BE evicted | recomputed | copied in steps | copied ahead | loaded |"
)


def row_of(cells: Sequence[Cell], reports: Sequence[sim.HybridReport]) -> str:
    """Return a line of the table: means over the seeds, the middle one's p99."""

    def mean(values: Iterable[float | None]) -> float:
        return float(np.mean([value for value in values if value is not None]))

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
    return f"| {cells[0].preemption} | {cells[0].headroom_s:g} | " + " | ".join(figures) + " |"


def main() -> None:
    """Print one line per way to preempt and headroom."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    start_s = time.perf_counter()
    print(HEADER)
    print("| --- " * HEADER.count(" | ") + "| --- |")
    groups = [
        [Cell(preemption, headroom_s, seed) for seed in range(args.seeds)]
        for preemption in PREEMPTIONS
        for headroom_s in HEADROOMS_S
    ]
    with ProcessPoolExecutor(args.processes) as pool:
        pending = [pool.map(run, cells) for cells in groups]
        for cells, reports in zip(groups, pending, strict=True):
            print(row_of(cells, list(reports)), flush=True)
    print(f"\n{time.perf_counter() - start_s:.0f} s")


if __name__ == "__main__":
    main()
