"""The systems of four papers and `unified`, each on the ground where one of them made its claim.

    python -m bench.scheduling.papers bros | echo | accelgen | past-future | all [--seeds 5]

Virtual time, on the virtual A100 with Llama-2-7B; every system is the real router core with the
options of a preset (`lightserve.config.scheduling`), and knows step times by one fitted profile.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from bench.table import print_head, print_row
from lightserve.config.scheduling import preset_values
from lightserve.cost.model import StepShape
from lightserve.sim import HybridConfig, HybridReport, Targets, run_hybrid
from lightserve.sim.traffic import TraceLengths, read_trace
from lightserve.sim.worker import A100_LLAMA2_7B

TRACES = Path(__file__).parents[1] / "traces"
SHAREGPT = str(TRACES / "sharegpt_lengths.csv.gz")
ALPACA = str(TRACES / "alpaca_lengths.csv.gz")


class System(NamedTuple):
    """A row of a table."""

    name: str
    preset: str | None = None
    options: Mapping[str, Any] = {}
    """Of the server; they stand over the preset's."""

    def config(self) -> dict[str, Any]:
        """Return fields of `HybridConfig`."""
        values = {"policy": "unified", "admission": "risk"} | dict(self.options)
        values |= preset_values(self.preset, given=self.options.keys(), values=values)
        budget = values.pop("max_num_batched_tokens", 512)
        chosen = {name: values.pop(name) for name in ("policy", "admission")}
        return chosen | {"budget_tokens": budget, "serve_options": values}


UNIFIED = System("**unified**")
PRESETS = tuple(System(name, name) for name in ("bros", "echo", "accelgen", "past-future"))
_VLLM = {"cache_policy": "off", "preemption": "recompute", "admission": "aggressive"}


@dataclass(frozen=True)
class Ground:
    """A workload, who runs on it, and what the paper says of it."""

    claim: str
    systems: Sequence[System]
    workload: Callable[[Path, int], dict[str, Any]]
    """Fields of `HybridConfig`, of a folder for traces and a seed."""
    columns: Sequence[str] = field(default=())


def bros_load(_folder: Path, _seed: int) -> dict[str, Any]:
    """Chats over a loop of batch work, as table II of BROS."""
    return {
        "rt": "poisson:16",
        "rt_lengths": SHAREGPT,
        "be": "closed:256",
        "be_lengths": "uniform:512-1024,32-128",
        "duration_s": 90.0,
        "margin_s": 30.0,
        "capacity_tokens": 60_000,
        "targets": Targets(0.4, 0.2, 0.2),
    }


NUM_DOCUMENTS, NUM_QUESTIONS = 60, 20
ECHO_MARGIN_S = 10.0
BLOCK_TOKENS = 512


def echo_load(folder: Path, seed: int) -> dict[str, Any]:
    """Few chats over questions about documents, all there at the start, in random order."""
    rng = np.random.default_rng(seed)
    num_blocks = rng.integers(12, 20, size=NUM_DOCUMENTS, endpoint=True)
    first = np.cumsum(num_blocks) - num_blocks
    order = rng.permutation(np.repeat(np.arange(NUM_DOCUMENTS), NUM_QUESTIONS))
    rows: list[dict[str, Any]] = [
        {
            "t": ECHO_MARGIN_S if number else 0.0,  # those before the margin are not counted
            "prompt_tokens": int(BLOCK_TOKENS * num_blocks[n] + rng.integers(16, 64)),
            "output_tokens": int(rng.integers(16, 64)),
            "block_ids_512": f"{first[n]}-{first[n] + num_blocks[n] - 1}",
        }
        for number, n in enumerate(order)
    ]
    return {
        "rt": "poisson:4",
        "rt_lengths": SHAREGPT,
        "be": write(folder / f"documents{seed}.csv", rows),
        "duration_s": 90.0,
        "margin_s": ECHO_MARGIN_S,
        "capacity_tokens": 60_000,
        "targets": Targets(1.0, 0.05, None),
    }


LONG_SHARE, LONG_TOKENS = 0.35, (4096, 32_768)
TTFT_SCALE, TBT_S, TBT_SCALE = (2.5, 7.5), 0.1875, (0.75, 1.25)
MIX_RPS, NUM_MIXED = 1.4, 400


def accelgen_load(folder: Path, seed: int) -> dict[str, Any]:
    """Short chats and long documents, each with targets of its own."""
    rng = np.random.default_rng(seed)
    chats = [TraceLengths(read_trace(Path(path))) for path in (ALPACA, SHAREGPT)]
    rows, time_s = [], 0.0
    for _ in range(NUM_MIXED):
        time_s += rng.exponential(1.0 / MIX_RPS)
        prompt, output, _slo = chats[rng.integers(2)].draw(rng)
        if rng.random() < LONG_SHARE:
            prompt = round(np.exp(rng.uniform(*np.log(LONG_TOKENS))))
        idle_s = A100_LLAMA2_7B.step_seconds(StepShape().plus(0, prompt))
        rows.append(
            {
                "t": f"{time_s:.6f}",
                "prompt_tokens": prompt,
                "output_tokens": output,
                "ttft_ms": f"{1e3 * max(TBT_S, idle_s * rng.uniform(*TTFT_SCALE)):.3f}",
                "tpot_ms": f"{1e3 * TBT_S * rng.uniform(*TBT_SCALE):.3f}",
            }
        )
    return {
        "rt": write(folder / f"mix{seed}.csv", rows),
        "duration_s": 240.0,
        "margin_s": 30.0,
        "capacity_tokens": 120_000,
    }


def past_future_load(_folder: Path, _seed: int) -> dict[str, Any]:
    """Clients that wait for their answers, long outputs, and memory for some of them."""
    return {
        "rt": "closed:24",
        "rt_lengths": "uniform:32-2048,256-2048",
        "rt_max_tokens": 2048,
        "duration_s": 240.0,
        "margin_s": 60.0,
        "capacity_tokens": 40_000,
        "targets": Targets(10.0, None, 1.5),
    }


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Write a trace; return where it is."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


_ECHO = {"cache_policy": "lru", "rt_kv_deviations": 0.0}
GROUNDS: dict[str, Ground] = {
    "bros": Ground(
        "real-time latency per token -74 % of vLLM's and -54 % of round-robin's, best-effort"
        " throughput -11 and -9 %, TTFT attainment up to 36 and 12 times, TPOT's 1.7 and 1.5 times",
        (
            System(
                "vLLM (fcfs)", None, {**_VLLM, "policy": "fcfs", "max_num_batched_tokens": 4096}
            ),
            System(
                "round-robin",
                None,
                {
                    **_VLLM,
                    "policy": "round-robin",
                    "without": "chunking",
                    "max_num_batched_tokens": 4096,
                },
            ),
            System(
                "bros, exclusive blocks",
                "bros",
                {"block_owner": "exclusive", "preemption": "recompute"},
            ),
            *PRESETS,
            UNIFIED,
        ),
        bros_load,
    ),
    "echo": Ground(
        "offline throughput up to 3.3 times the base's, 78.6 % of prompt tokens found as cache;"
        " online targets (90 %) kept by all that have the estimator",
        (
            System("base", "echo", {"policy": "priority", "be_order": "arrival", **_ECHO}),
            System("base + estimator", "echo", {"be_order": "arrival", **_ECHO}),
            System("base + estimator + scheduler", "echo", _ECHO),
            *PRESETS,
            UNIFIED,
        ),
        echo_load,
    ),
    "accelgen": Ground(
        "goodput 1.43 to 13.7 times vLLM's, ORCA's, FastGen's, Sarathi's, FastServe's; attainment"
        " +37 to +90 points; goodput without ordering -52 %, chunking -44 %, batching -27 %",
        (
            System(
                "vLLM (fcfs)", None, {**_VLLM, "policy": "fcfs", "max_num_batched_tokens": 4096}
            ),
            System(
                "ORCA (fcfs, 8 at once)",
                None,
                {
                    **_VLLM,
                    "policy": "fcfs",
                    "admission": "conservative",
                    "max_num_batched_tokens": 4096,
                    "max_num_seqs": 8,
                },
            ),
            System("Sarathi (chunked)", None, {**_VLLM, "policy": "chunked"}),
            System("FastServe (mlfq)", None, {**_VLLM, "policy": "mlfq"}),
            *(
                System(f"accelgen without {part}", "accelgen", {"without": part})
                for part in ("ordering", "chunking", "batching", "exclusive")
            ),
            *PRESETS,
            UNIFIED,
        ),
        accelgen_load,
    ),
    "past-future": Ground(
        "goodput 2 to 3 times that of conservative and aggressive admission under heavy load",
        (
            *(
                System(f"fcfs, {rule}", "past-future", {"admission": rule})
                for rule in ("conservative", "aggressive")
            ),
            *PRESETS,
            UNIFIED,
        ),
        past_future_load,
    ),
}


class Figures(NamedTuple):
    """What a run came to; shares in percent, of real-time requests if nothing else is said."""

    ttft: float
    gaps: float
    """TPOT or largest gap, whichever is kept less."""
    goodput_rps: float
    latency_ms: float
    """Per output token."""
    tokens_per_s: float
    be_rps: float
    be_tokens_per_s: float
    be_cached: float
    evicted: float
    """Times that one lost KV, per request."""


COLUMNS = (
    *("TTFT %", "gaps %", "goodput/s", "ms/token", "tokens/s", "BE/s", "BE tokens/s"),
    *("BE cached %", "evicted %"),
)


def play(ground: str, system: System, seed: int) -> Figures:
    """Run one cell."""
    with tempfile.TemporaryDirectory() as folder:
        load = GROUNDS[ground].workload(Path(folder), seed)
        return _figures(run_hybrid(HybridConfig(**load, **system.config(), seed=seed)))


def _figures(report: HybridReport) -> Figures:
    rt, be = report.rt, report.be
    gaps = [share for share in (rt.tpot_attainment, rt.mtpot_attainment) if share is not None]
    return Figures(
        100.0 * (rt.ttft_attainment or 0.0),
        100.0 * min(gaps, default=0.0),
        rt.goodput_rps,
        rt.normalized_latency_ms or 0.0,
        rt.throughput_tps,
        be.throughput_rps,
        be.throughput_tps,
        be.cached_pct or 0.0,
        report.kv.evicted_pct,
    )


def table(name: str, num_seeds: int, pool: ProcessPoolExecutor) -> None:
    """Print a table, and what its paper claims."""
    ground = GROUNDS[name]
    print(f"\n### {name}\n\nThe paper: {ground.claim}.\n")
    print_head("system", *COLUMNS)
    cells = [
        [pool.submit(play, name, system, seed) for seed in range(num_seeds)]
        for system in ground.systems
    ]
    for system, futures in zip(ground.systems, cells, strict=True):
        means = Figures(*map(fmean, zip(*(future.result() for future in futures), strict=True)))
        print_row(system.name, *_shown(means))


def _shown(means: Figures) -> Iterator[str]:
    for value in means:
        yield f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def main() -> None:
    """Print what the command line names, and its time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ground", choices=(*GROUNDS, "all"))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    started_s = time.monotonic()
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for name in GROUNDS if args.ground == "all" else [args.ground]:
            table(name, args.seeds, pool)
    print(f"\n{args.seeds} seeds, {time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
