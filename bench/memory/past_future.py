"""Admission by future memory, on every trace: `python -m bench.memory.past_future t2|t3|t4|t5|t18`.

Each table is one command: figures beside their targets, and the time it took. `risk` is the
server's default; the optimum is the oracle, which knows every length, with the same order.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from lightserve import sim
from lightserve.types import RequestClass

TRACES = Path(__file__).parents[1] / "traces"
NUM_WARM_UP, NUM_REQUESTS = 1000, 3000


class Load(NamedTuple):
    """A workload, the pool it runs in, and how far over the optimum it may be."""

    name: str
    spec: str
    capacity_tokens: int
    max_steps_pct: float
    max_evicted_pct: float = 2.0


def trace(name: str) -> str:
    """Return the path of a trace."""
    return str(TRACES / f"{name}.csv.gz")


LOADS = {
    load.name: load
    for load in (
        Load("azure_conv 60k", trace("azure2023_conv"), 60_000, 1.5),
        Load("azure_code 40k", trace("azure2023_code"), 40_000, 1.5),
        Load("mooncake 500k", trace("mooncake_conversation"), 500_000, 1.5),
        Load("arxiv 120k", trace("arxiv_summarization_lengths"), 120_000, 1.5),
        Load("azure_conv 20k", trace("azure2023_conv"), 20_000, 3.0),
        Load("mlarge 30k", trace("servegen_mlarge_day3"), 30_000, 3.0),
        Load("dist1 120k", "dist1", 120_000, 4.5, 3.0),
        Load("dist3 120k", "dist3", 120_000, 4.5),
        Load("reason 120k", trace("servegen_reason_0to16h"), 120_000, 4.5),
        Load("sharegpt 30k", trace("sharegpt_lengths"), 30_000, 4.5),
    )
}
RULES: dict[str, tuple[str, dict[str, float]]] = {
    "optimum": ("oracle", {}),
    "risk": ("risk", {}),
    "ema": ("ema", {}),
    "pf 5%": ("past-future", {"reserve": 0.05}),
}


class Job(NamedTuple):
    """One run."""

    load: str
    rule: str
    request_class: RequestClass = RequestClass.RT
    is_warm: bool = True
    options: tuple[tuple[str, float], ...] = ()
    """Instead of the rule's own."""


def run_job(job: Job) -> sim.Report:
    """Run it, without the timeline."""
    load = LOADS.get(job.load) or DRIFT
    admission, options = RULES[job.rule]
    return sim.run(
        sim.SimulationConfig(
            workload=load.spec,
            num_requests=NUM_REQUESTS,
            num_warm_up=NUM_WARM_UP if job.is_warm else 0,
            capacity_tokens=load.capacity_tokens,
            admission=admission,
            admission_options=dict(job.options) or options,
            request_class=job.request_class,
            keeps_timeline=False,
        )
    )


def run_all(jobs: Iterable[Job], num_processes: int) -> dict[Job, sim.Report]:
    """Run jobs, the slow rule first."""
    ordered = sorted(set(jobs), key=lambda job: job.rule != "pf 5%")
    with ProcessPoolExecutor(num_processes) as pool:
        return dict(zip(ordered, pool.map(run_job, ordered), strict=True))


def over(report: sim.Report, optimum: sim.Report) -> float:
    """Return by how many percent its steps exceed another's."""
    return 100.0 * (report.decode_steps / optimum.decode_steps - 1.0)


def verdict(misses: Sequence[str]) -> str:
    """Return a table's last column."""
    return "missed: " + ", ".join(misses) if misses else "met"


def print_rows(*rows: Sequence[str]) -> None:
    """Print lines of a Markdown table."""
    for row in rows:
        print("| " + " | ".join(row) + " |")


def t2(num_processes: int) -> None:
    """Warm, every trace, one setting: steps, evictions, and total work beside two rules."""
    reports = run_all([Job(load, rule) for load in LOADS for rule in RULES], num_processes)
    print_rows(
        ["load", "rule", "steps over optimum %", "evicted %", "redone tokens", "work s", ""],
        ["---"] * 7,
    )
    logs: dict[str, list[float]] = {"ema": [], "pf 5%": []}
    possible: dict[str, list[float]] = {"ema": [], "pf 5%": []}
    for name, load in LOADS.items():
        runs = {rule: reports[Job(name, rule)] for rule in RULES}
        risk, optimum = runs["risk"], runs["optimum"]
        misses = []
        if over(risk, optimum) > load.max_steps_pct:
            misses.append("steps")
        if risk.evicted_pct > load.max_evicted_pct:
            misses.append("evictions")
        for rule, ratios in logs.items():
            ratios.append(math.log(risk.total_work_s / runs[rule].total_work_s))
            possible[rule].append(math.log(optimum.total_work_s / runs[rule].total_work_s))
            if ratios[-1] > math.log(1.005):
                misses.append(f"work against {rule}")
        for rule, run in runs.items():
            is_ours = rule == "risk"
            target = f" (≤{load.max_steps_pct:.1f})" if is_ours else ""
            most = f" (≤{load.max_evicted_pct:.0f})" if is_ours else ""
            print_rows(
                [
                    name,
                    rule,
                    f"{over(run, optimum):+.2f}{target}",
                    f"{run.evicted_pct:.2f}{most}",
                    f"{run.recomputed_tokens:,}",
                    f"{run.total_work_s:.1f}",
                    verdict(misses) if is_ours else "",
                ]
            )
    for rule, ratios in logs.items():
        saved, possibly = saved_pct(ratios), saved_pct(possible[rule])
        print(
            f"\nTotal work, geometric mean: {saved:+.2f} % less than {rule} (≥1.5; the optimum:"
            f" {possibly:+.2f}): {verdict(['geometric mean'] if saved < 1.5 else [])}"
        )


def saved_pct(log_ratios: Sequence[float]) -> float:
    """Return by how many percent the geometric mean of ratios is below 1."""
    return 100.0 * (1.0 - math.exp(sum(log_ratios) / len(log_ratios)))


def t3(num_processes: int) -> None:
    """Best effort only, looking ahead with ageing."""
    names = ("azure_conv 20k", "mooncake 500k")
    jobs = [
        Job(name, rule, request_class)
        for name in names
        for rule, request_class in (
            ("optimum", RequestClass.RT),
            ("risk", RequestClass.BE),
            ("optimum", RequestClass.BE),
        )
    ]
    reports = run_all(jobs, num_processes)
    print_rows(
        ["load", "rule", "steps over FCFS optimum %", "evicted %", "overtaken at most", ""],
        ["---"] * 6,
    )
    for name in names:
        fcfs = reports[Job(name, "optimum", RequestClass.RT)]
        for rule in ("risk", "optimum"):
            run = reports[Job(name, rule, RequestClass.BE)]
            misses = ["steps"] if over(run, fcfs) > -1.0 else []
            print_rows(
                [
                    name,
                    f"{rule}, looking ahead",
                    f"{over(run, fcfs):+.2f} (≤-1)",
                    f"{run.evicted_pct:.2f}",
                    f"{run.max_overtaken}",
                    verdict(misses) if rule == "risk" else "",
                ]
            )


def t4(num_processes: int) -> None:
    """From an empty history."""
    limits = {"reason 120k": 12.0, "dist1 120k": 4.0}
    jobs = [Job(name, rule, is_warm=False) for name in limits for rule in RULES]
    reports = run_all(jobs, num_processes)
    print_rows(
        ["load", "rule", "redone, % of prompt tokens", "evicted %", "steps over optimum %", ""],
        ["---"] * 6,
    )
    for name, limit in limits.items():
        optimum = reports[Job(name, "optimum", is_warm=False)]
        prompt_tokens = num_prompt_tokens(name)
        for rule in RULES:
            run = reports[Job(name, rule, is_warm=False)]
            redone_pct = 100.0 * run.recomputed_tokens / prompt_tokens
            misses = ["redone"] if redone_pct > limit else []
            misses += ["steps"] if over(run, optimum) > 6.0 else []
            is_ours = rule == "risk"
            print_rows(
                [
                    name,
                    rule,
                    f"{redone_pct:.2f}" + (f" (≤{limit:.0f})" if is_ours else ""),
                    f"{run.evicted_pct:.2f}",
                    f"{over(run, optimum):+.2f}" + (" (≤6)" if is_ours else ""),
                    verdict(misses) if is_ours else "",
                ]
            )


def num_prompt_tokens(name: str) -> int:
    """Return how many prompt tokens a cold run has."""
    load = LOADS[name]
    config = sim.SimulationConfig(
        workload=load.spec, capacity_tokens=load.capacity_tokens, admission="risk"
    )
    return int(sim.make_workload(config, "queued").prompt_tokens.sum())


DRIFT = Load(
    "drift 120k", f"{trace('servegen_reason_0to16h')}+dist1+dist2+dist3", 120_000, math.inf
)


def t5(num_processes: int) -> None:
    """Four workloads one after the other."""
    jobs = {rule: Job(DRIFT.name, rule, is_warm=False) for rule in RULES}
    reports = run_all(jobs.values(), num_processes)
    runs = {rule: reports[job] for rule, job in jobs.items()}
    theirs = runs["pf 5%"]
    print_rows(["rule", "steps", "evicted %", "redone tokens", "work s", ""], ["---"] * 6)
    for rule, run in runs.items():
        misses = ["steps"] if run.decode_steps >= theirs.decode_steps else []
        misses += ["evictions"] if run.evicted_pct > 0.7 * theirs.evicted_pct else []
        is_ours = rule == "risk"
        print_rows(
            [
                rule,
                f"{run.decode_steps:,}" + (f" (<{theirs.decode_steps:,})" if is_ours else ""),
                f"{run.evicted_pct:.2f}"
                + (f" (≤{0.7 * theirs.evicted_pct:.2f})" if is_ours else ""),
                f"{run.recomputed_tokens:,}",
                f"{run.total_work_s:.0f}",
                verdict(misses) if is_ours else "",
            ]
        )


def t18(num_processes: int) -> None:
    """How often the peak that was reached lay above the forecast's quantile."""
    ranges = {0.5: (40.0, 60.0), 0.9: (5.0, 15.0), 0.99: (0.0, 3.0)}
    reports = run_all([Job(name, "risk") for name in LOADS], num_processes)
    print_rows(
        ["load", "q 0.5 (40 to 60 %)", "q 0.9 (5 to 15 %)", "q 0.99 (≤3 %)", ""],
        ["---"] * 5,
    )
    for name in LOADS:
        exceeded = reports[Job(name, "risk")].exceeded_pct
        misses = [f"{q}" for q, (low, high) in ranges.items() if not low <= exceeded[q] <= high]
        print_rows([name, *(f"{exceeded[q]:.1f}" for q in ranges), verdict(misses)])


TABLES = {"t2": t2, "t3": t3, "t4": t4, "t5": t5, "t18": t18}


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    start_s = time.perf_counter()
    TABLES[args.table](args.jobs)
    print(f"\n{args.table}: {time.perf_counter() - start_s:.0f} s with --jobs {args.jobs}")


if __name__ == "__main__":
    main()
