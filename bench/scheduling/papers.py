"""The systems of four papers and `unified`, each on the ground where one of them made its claim.

    python -m bench.scheduling.papers --save cells.jsonl

Virtual time, on the virtual A100 with Llama-2-7B where a ground names no other hardware; every
system is the real router core with the options of a preset (`lightserve.config.scheduling`), and
knows step times by one fitted profile.
What is in the file of `--save` is not run again: seeds can be run in turn, tables printed at last.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from bench.scheduling.paper_bounds import best_effort_bound, oracle_goodput
from bench.scheduling.paper_figures import (
    Cell,
    Figure,
    add_cell,
    cell_of,
    over_seeds,
    print_table,
    read_cells,
)
from bench.scheduling.paper_loads import (
    accelgen_load,
    bros_14b_load,
    bros_32b_load,
    bros_load,
    capacity_load,
    chats_load,
    echo_load,
    many_documents_load,
    past_future_load,
    peak_load,
    tight_load,
)
from lightserve.config.scheduling import AUTO_BATCHED_TOKENS, preset_values
from lightserve.sim import HybridConfig
from lightserve.sim.hybrid import HybridRun


class System(NamedTuple):
    """A row of a table."""

    name: str
    preset: str | None = None
    options: Mapping[str, Any] = {}
    """Of the server; they stand over the preset's."""
    load: Mapping[str, Any] = {}
    """Fields of `HybridConfig` that stand over the workload's."""

    def config(self) -> dict[str, Any]:
        """Return fields of `HybridConfig`."""
        values = {"policy": "unified", "admission": "risk"} | dict(self.options)
        values |= preset_values(self.preset, given=self.options.keys(), values=values)
        default = AUTO_BATCHED_TOKENS["cuda"] if values["policy"] == "unified" else 512
        budget = values.pop("max_num_batched_tokens", default)
        chosen = {name: values.pop(name) for name in ("policy", "admission")}
        return chosen | {"budget_tokens": budget, "serve_options": values} | dict(self.load)


UNIFIED = System("**unified**")
PRESETS = tuple(System(name, name) for name in ("bros", "echo", "accelgen", "past-future"))
_VLLM = {"cache_policy": "off", "preemption": "recompute", "admission": "aggressive"}
_FCFS = {**_VLLM, "policy": "fcfs", "max_num_batched_tokens": 4096}
_BE = ("be", "be_tokens", "be_of_bound")
_OF_BOTH = ("ttft", "gaps", "goodput", "latency", "tokens", *_BE, "evicted")
_OF_STEPS = ("ttft", "gaps", "goodput", "latency", "step_tokens", "short", "compute", "held")


@dataclass(frozen=True)
class Ground:
    """A workload, who runs on it, and what the paper says of it."""

    claim: str
    systems: Sequence[System]
    workload: Callable[[Path, int], dict[str, Any]]
    """Fields of `HybridConfig`, of a folder for traces and a seed."""
    columns: Sequence[str] = _OF_BOTH


_ECHO = {"cache_policy": "lru", "rt_kv_deviations": 0.0}
_LADDER = (
    System("base", "echo", {"policy": "priority", "be_order": "arrival", **_ECHO}),
    System("base + estimator", "echo", {"be_order": "arrival", **_ECHO}),
    System("base + estimator + scheduler", "echo", _ECHO),
)
_ROUND_ROBIN = {**_FCFS, "policy": "round-robin", "without": "chunking"}
_WAIT = {**_FCFS, "policy": "bench.scheduling.paper_baselines:LongestWait"}
_CLIENTS = (10, 25, 50, 75, 100)
_POOLS = (6_000, 8_000, 12_000, 20_000)
_QUESTIONS = {"be": "batch:256", "be_lengths": "uniform:512-1024,32-128"}


def _of_clients(number: int) -> Mapping[str, Any]:
    """Return a closed loop of so many chats, with room for some fifty."""
    lengths = {"rt": f"closed:{number}", "rt_lengths": "uniform:32-512,64-512"}
    return lengths | {"capacity_tokens": 20_000, "duration_s": 120.0, "margin_s": 30.0}


_EXCLUSIVE = {"block_owner": "exclusive", "preemption": "recompute"}
_OF_BROS = (
    System("vLLM (fcfs)", None, _FCFS),
    System("round-robin", None, _ROUND_ROBIN),
    System("bros, exclusive blocks", "bros", _EXCLUSIVE),
)
_CHUNKED = {**_VLLM, "policy": "chunked"}
_RATES = (4, 8, 12, 16, 20, 24)
_BROS_OVER_RATES = tuple(
    System(f"{name}, {rate}/s", preset, options, {"rt": f"poisson:{rate}"})
    for rate in _RATES
    for name, preset, options in (
        ("vLLM (fcfs)", None, _FCFS),
        ("round-robin", None, _ROUND_ROBIN),
        ("bros", "bros", {}),
        ("unified", None, {}),
    )
)

GROUNDS: dict[str, Ground] = {
    "bros": Ground(
        "real-time latency per token -74 % of vLLM's and -54 % of round-robin's, best-effort"
        " throughput -11 and -9 %, TTFT attainment up to 36 and 12 times, TPOT's 1.7 and 1.5 times",
        (*_OF_BROS, *PRESETS, UNIFIED),
        bros_load,
    ),
    "bros-14b": Ground(
        "the same on Qwen2.5-14B over two A100-40G, 10 chats a second",
        (*_OF_BROS, System("bros", "bros"), UNIFIED),
        bros_14b_load,
    ),
    "bros-32b": Ground(
        "the same on Qwen2.5-32B over four A100-40G",
        (*_OF_BROS, System("bros", "bros"), UNIFIED),
        bros_32b_load,
    ),
    "bros-14b-rates": Ground(
        "over rates, 14B: latency -74 and -54 %, best-effort throughput -11 and -9 %; TTFT kept by"
        " vLLM in 1.28, by round-robin in 10.6 % (figures 9a, 10a)",
        _BROS_OVER_RATES,
        bros_14b_load,
        ("ttft", "gaps", "goodput", "latency", "be"),
    ),
    "bros-32b-rates": Ground(
        "the same of 32B (figures 9b, 10b)",
        _BROS_OVER_RATES,
        bros_32b_load,
        ("ttft", "gaps", "goodput", "latency", "be"),
    ),
    "bros-chats": Ground(
        "real-time requests alone: latency -29 % of vLLM's, throughput 1.08 times (figure 11);"
        " already going on with what has waited longest lowers latency (figure 2)",
        (
            System("vLLM (fcfs)", None, _FCFS),
            System("longest wait first", None, _WAIT),
            System("bros", "bros"),
            UNIFIED,
        ),
        chats_load,
        ("ttft", "gaps", "goodput", "latency", "tokens", "evicted"),
    ),
    "echo": Ground(
        "offline throughput up to 3.3 times the base's, 78.6 % of prompt tokens found as cache;"
        " online targets (90 %) kept by all that have the estimator",
        (*_LADDER, *PRESETS, UNIFIED),
        echo_load,
        ("ttft", "gaps", "goodput", "latency", *_BE, "be_cached", "evicted"),
    ),
    "echo-documents": Ground(
        "each rung adds to offline throughput, and what is found as cache stays",
        (*_LADDER, System("echo", "echo"), UNIFIED),
        many_documents_load,
        ("ttft", "gaps", "goodput", "latency", *_BE, "be_cached", "evicted"),
    ),
    "echo-peak": Ground(
        "what is found as cache stays stable through peaks of online requests",
        (*_LADDER, System("echo", "echo"), UNIFIED),
        peak_load,
        ("ttft", "gaps", "goodput", "latency", *_BE, "be_cached", "evicted"),
    ),
    "echo-capacity": Ground(
        "the least resource that keeps online targets in a peak of five minutes, then the offline"
        " throughput that it has besides",
        (
            *(System(f"{slots:,} slots", load={"capacity_tokens": slots}) for slots in _POOLS),
            *(
                System(f"{slots:,} slots, offline", load={"capacity_tokens": slots} | _QUESTIONS)
                for slots in _POOLS
            ),
        ),
        capacity_load,
        ("ttft", "gaps", "goodput", "latency", *_BE, "evicted", "held"),
    ),
    "accelgen": Ground(
        "goodput 1.43 to 13.7 times vLLM's, ORCA's, FastGen's, Sarathi's, FastServe's; attainment"
        " +37 to +90 points; goodput without ordering -52 %, chunking -44 %, batching -27 %; 6 %"
        " below an oracle's",
        (
            System("vLLM (fcfs)", None, _FCFS),
            System(
                "ORCA (fcfs, 8 at once)",
                None,
                {**_FCFS, "admission": "conservative", "max_num_seqs": 8},
            ),
            System("FastGen (chunked, 2048)", None, {**_CHUNKED, "max_num_batched_tokens": 2048}),
            System("Sarathi (chunked, 512)", None, _CHUNKED),
            *(
                System(f"chunked, {budget}", None, {**_CHUNKED, "max_num_batched_tokens": budget})
                for budget in (256, 1024)
            ),
            System("FastServe (mlfq)", None, {**_VLLM, "policy": "mlfq"}),
            *(
                System(f"accelgen without {part}", "accelgen", {"without": part})
                for part in ("ordering", "chunking", "batching", "exclusive")
            ),
            *PRESETS,
            UNIFIED,
            System("accelgen, lengths known", "accelgen", {"admission": "oracle"}),
            System("unified, lengths known", None, {"admission": "oracle"}),
        ),
        accelgen_load,
        _OF_STEPS,
    ),
    "accelgen-tight": Ground(
        "exclusive allocation lowers completion times, of long prompts and of all, as fewer of them"
        " hold memory at once (figure 6); batching by two resources +27 % of goodput",
        (
            *(
                System(f"accelgen without {part}", "accelgen", {"without": part})
                for part in ("batching", "exclusive")
            ),
            System("accelgen", "accelgen"),
            UNIFIED,
        ),
        tight_load,
        ("ttft", "gaps", "goodput", "latency", "e2e", "compute", "held", "evicted"),
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
            *(
                System(f"{rule}, {number} clients", preset, options, _of_clients(number))
                for number in _CLIENTS
                for rule, preset, options in (
                    ("conservative", "past-future", {"admission": "conservative"}),
                    ("aggressive", "past-future", {"admission": "aggressive"}),
                    ("past-future", "past-future", {}),
                    ("unified", None, {}),
                )
            ),
        ),
        past_future_load,
        ("ttft", "gaps", "goodput", "latency", "tokens", "evicted", "held"),
    ),
}


def play(ground: str, system: System, seed: int) -> Cell:
    """Run one cell."""
    with tempfile.TemporaryDirectory() as folder:
        load = GROUNDS[ground].workload(Path(folder), seed)
        run = HybridRun(HybridConfig(**load | system.config(), seed=seed))
        run.advance(run.config.duration_s)
        return cell_of(ground, system.name, seed, run)


def with_bounds(name: str, cells: Mapping[str, Sequence[Cell]]) -> dict[str, list[Cell]]:
    """Return the cells with what share of the best-effort bound of its scene each has reached."""
    known: dict[tuple[int, str], float | None] = {}
    found: dict[str, list[Cell]] = {}
    for system in GROUNDS[name].systems:
        for cell in cells[system.name]:
            key = cell.seed, repr(system.load)
            if key not in known:
                with tempfile.TemporaryDirectory() as folder:
                    load = GROUNDS[name].workload(Path(folder), cell.seed)
                    config = HybridConfig(**load | UNIFIED.config() | dict(system.load))
                    known[key] = best_effort_bound(dataclasses.replace(config, seed=cell.seed))
            bound = known[key]
            figures = {"be_bound": bound or 0.0, "be_of_bound": 0.0}
            if bound:
                figures["be_of_bound"] = 100.0 * cell.figures["be_tokens"] / bound
            bounded = msgspec.structs.replace(cell, figures=cell.figures | figures)
            found.setdefault(system.name, []).append(bounded)
    return found


KEPT = 99.0
"""Percent of the requests of a system that keeps its targets."""
LEAD, NEAR_BOUND = 1.15, 97.0
"""What `unified` is to have of the best other's best-effort tokens, or percent of the bound."""


def verdict(rows: Mapping[str, Mapping[str, Figure]], *, kept: float = KEPT) -> str:
    """Return how `unified` stands beside the best other, of those that keep as much as it does."""
    ours = rows[UNIFIED.name]
    others = {name: row for name, row in rows.items() if "unified" not in name}
    best = max(others, key=lambda name: others[name]["goodput"].mean)
    ratio = ours["goodput"].mean / max(1e-9, others[best]["goodput"].mean)
    text = f"`unified` has {ratio:.2f} times the goodput of the best other ({best})"
    if not ours["be_bound"].mean:
        return text + "."
    least = min(kept, ours["ttft"].mean, ours["gaps"].mean)
    keep = [n for n, row in others.items() if min(row["ttft"].mean, row["gaps"].mean) >= least]
    text += f", {ours['be_of_bound'].mean:.1f} % of the bound on best-effort tokens"
    if keep:
        best = max(keep, key=lambda name: others[name]["be_tokens"].mean)
        ratio = ours["be_tokens"].mean / max(1e-9, others[best]["be_tokens"].mean)
        text += f", {ratio:.2f} times those of the best that keeps {least:.1f} % ({best})"
    return text + f" (asked: {LEAD} times, or {NEAR_BOUND:.0f} % of the bound)."


def table(name: str, cells: Mapping[str, Sequence[Cell]]) -> None:
    """Print a table, what its paper claims, and how `unified` stands."""
    ground = GROUNDS[name]
    num_seeds = min(map(len, cells.values()))
    print(f"\n### {name}, {num_seeds} seeds\n\nThe paper: {ground.claim}.\n")
    rows = {system: over_seeds(of) for system, of in with_bounds(name, cells).items()}
    print_table(rows, ground.columns)
    if UNIFIED.name in rows:
        alike = {system.name for system in ground.systems if not system.load}
        print("\n" + verdict({name: row for name, row in rows.items() if name in alike}))
    if name.startswith("accelgen"):
        goodput = fmean(_oracle_goodput(name, seed) for seed in range(num_seeds))
        print(f"An oracle's schedule has {goodput:.2f} requests/s in time.")


def _oracle_goodput(name: str, seed: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        load = GROUNDS[name].workload(Path(folder), seed)
        return oracle_goodput(HybridConfig(**load | UNIFIED.config(), seed=seed))


def main() -> None:
    """Run what the command line names and is not there yet, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ground", choices=(*GROUNDS, "all"), nargs="?", default="all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--save", type=Path, help="file of runs, read and added to")
    args = parser.parse_args()
    started_s = time.monotonic()
    names = list(GROUNDS) if args.ground == "all" else [args.ground]
    wanted = [
        (name, system, seed)
        for seed in range(args.seeds)
        for name in names
        for system in GROUNDS[name].systems
    ]
    done = read_cells(args.save) if args.save else {}
    missing = [cell for cell in wanted if (cell[0], cell[1].name, cell[2]) not in done]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(play, *cell) for cell in missing]):
            cell = future.result()
            done[cell.ground, cell.system, cell.seed] = cell
            if args.save:
                add_cell(args.save, cell)
    found: dict[str, dict[str, list[Cell]]] = {}
    for name, system, seed in wanted:
        of_system = found.setdefault(name, {}).setdefault(system.name, [])
        of_system.append(done[name, system.name, seed])
    for name, cells in found.items():
        table(name, cells)
    print(f"\n{args.seeds} seeds, {time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
