"""Admission by future memory, on every trace.

python -m bench.memory.past_future t1 [--seeds 5] [--num-requests 3000] [--workload dist1]
    Past-Future's Table 1 from the real router core: every cell is the median of several seeds,
    with the options of the authors' published simulation; steps as ratios to their optimum
python -m bench.memory.past_future t2|t3|t4|t5|t18|halves
    figures beside their targets; halves: the second half of each trace, and a trace that was never
    opened while anything was tuned. `risk` is the server's default; the optimum is the oracle,
    which knows every length, with the same order
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.table import print_head, print_row
from lightserve import sim
from lightserve.sim.offline import OfflineConfig, run_offline
from lightserve.sim.report import Report
from lightserve.sim.traffic import Workload, load_workload, next_power_of_two
from lightserve.types import RequestClass

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


def t1() -> None:
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
    paper = [f"{name} (paper)" for name in ("steps/optimum", "memory %", "evicted %")]
    print_head("workload", "rule", *paper, "±", "")
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
        print_row(
            cell.workload,
            cell.label,
            f"{ratio:.3f} ({paper_ratio:.3f})",
            f"{consumed:.1f} ({cell.paper_consumed_pct:.1f})",
            f"{evicted:.2f} ({cell.paper_evicted_pct:.2f})",
            f"±{(max(ratios) - min(ratios)) / 2:.3f}",
            judge(cell, ratio, paper_ratio, consumed, evicted),
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
UNOPENED = Load("msmall 12k", trace("servegen_msmall_day3"), 12_000, 3.0)
"""Of a trace that nothing was ever tuned on."""
HELD_BACK = {load.name: load for load in (UNOPENED,)}
REASONING = {"mlarge 30k", "reason 120k", "sharegpt 30k", UNOPENED.name}
"""Loads where outputs decide."""
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
    is_second_half: bool = False
    """Of the trace; otherwise its first rows."""
    options: tuple[tuple[str, float], ...] = ()
    """Instead of the rule's own."""
    seed: int = 0


def run_job(job: Job) -> sim.Report:
    """Run it, without the timeline."""
    load = LOADS.get(job.load) or HELD_BACK.get(job.load) or DRIFT
    admission, options = RULES[job.rule]
    config = sim.SimulationConfig(
        workload=load.spec,
        num_requests=NUM_REQUESTS,
        num_warm_up=NUM_WARM_UP if job.is_warm else 0,
        capacity_tokens=load.capacity_tokens,
        admission=admission,
        admission_options=dict(job.options) or options,
        request_class=job.request_class,
        keeps_timeline=False,
        seed=job.seed,
    )
    return run_offline(second_half(load), config) if job.is_second_half else sim.run(config)


def second_half(load: Load) -> Workload:
    """Return as many rows as a run has from the middle of a trace on, or what there is.

    Without the few that would not have room in the pool alone.
    """
    rows = load_workload(load.spec, num_requests=10**9, rng=np.random.default_rng(0))
    middle = len(rows) // 2
    half = rows.rows(middle, middle + NUM_WARM_UP + NUM_REQUESTS)
    limit = next_power_of_two(int(half.output_tokens.max()))
    fits = half.prompt_tokens + limit - 1 <= load.capacity_tokens
    return Workload(
        half.prompt_tokens[fits],
        half.output_tokens[fits],
        np.full(np.count_nonzero(fits), limit, dtype=np.int64),
        tuple(itertools.compress(half.clients, fits)),
        half.arrival_s[fits],
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


def t2(num_processes: int) -> None:
    """Warm, every trace, one setting: steps, evictions, and total work beside two rules."""
    reports = run_all([Job(load, rule) for load in LOADS for rule in RULES], num_processes)
    print_head("load", "rule", "steps over optimum %", "evicted %", "redone tokens", "work s", "")
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
            print_row(
                name,
                rule,
                f"{over(run, optimum):+.2f}{target}",
                f"{run.evicted_pct:.2f}{most}",
                f"{run.recomputed_tokens:,}",
                f"{run.total_work_s:.1f}",
                verdict(misses) if is_ours else "",
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
    print_head(
        *("load", "rule", "steps over FCFS optimum %", "evicted %", "work over it %"),
        *("overtaken at most", ""),
    )
    for name in names:
        fcfs = reports[Job(name, "optimum", RequestClass.RT)]
        for rule in ("risk", "optimum"):
            run = reports[Job(name, rule, RequestClass.BE)]
            misses = ["steps"] if over(run, fcfs) > -1.0 else []
            print_row(
                name,
                f"{rule}, looking ahead",
                f"{over(run, fcfs):+.2f} (≤-1)",
                f"{run.evicted_pct:.2f}",
                f"{100.0 * (run.total_work_s / fcfs.total_work_s - 1.0):+.2f}",
                f"{run.max_overtaken}",
                verdict(misses) if rule == "risk" else "",
            )


def t4(num_processes: int) -> None:
    """From an empty history."""
    limits = {"reason 120k": 12.0, "dist1 120k": 4.0}
    jobs = [Job(name, rule, is_warm=False) for name in limits for rule in RULES]
    reports = run_all(jobs, num_processes)
    print_head(
        "load", "rule", "redone, % of prompt tokens", "evicted %", "steps over optimum %", ""
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
            print_row(
                name,
                rule,
                f"{redone_pct:.2f}" + (f" (≤{limit:.0f})" if is_ours else ""),
                f"{run.evicted_pct:.2f}",
                f"{over(run, optimum):+.2f}" + (" (≤6)" if is_ours else ""),
                verdict(misses) if is_ours else "",
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
    print_head("rule", "steps", "evicted %", "redone tokens", "work s", "")
    for rule, run in runs.items():
        misses = ["steps"] if run.decode_steps >= theirs.decode_steps else []
        misses += ["evictions"] if run.evicted_pct > 0.7 * theirs.evicted_pct else []
        is_ours = rule == "risk"
        print_row(
            rule,
            f"{run.decode_steps:,}" + (f" (<{theirs.decode_steps:,})" if is_ours else ""),
            f"{run.evicted_pct:.2f}" + (f" (≤{0.7 * theirs.evicted_pct:.2f})" if is_ours else ""),
            f"{run.recomputed_tokens:,}",
            f"{run.total_work_s:.0f}",
            verdict(misses) if is_ours else "",
        )


def halves(num_processes: int) -> None:
    """The second half of each trace, and one that was never opened: steps and evictions."""
    traces = {name: load for name, load in LOADS.items() if not name.startswith("dist")} | HELD_BACK
    rules = ("optimum", "risk")
    jobs = {
        (name, rule): Job(name, rule, is_second_half=name not in HELD_BACK)
        for name in traces
        for rule in rules
    }
    reports = run_all(jobs.values(), num_processes)
    print_head("load", "rows", "steps over optimum %", "evicted %", "")
    for name in traces:
        optimum, risk = (reports[jobs[name, rule]] for rule in rules)
        most = 3.0 if name in REASONING else 1.5
        misses = ["steps"] * (over(risk, optimum) > most) + ["evictions"] * (risk.evicted_pct > 2)
        rows = "first 4,000" if name in HELD_BACK else "second half"
        print_row(
            *(name, rows, f"{over(risk, optimum):+.2f} (≤{most})"),
            *(f"{risk.evicted_pct:.2f} (≤2)", verdict(misses)),
        )


def t18(num_processes: int) -> None:
    """How often the peak that was reached lay above the forecast's quantile."""
    ranges = {0.5: (40.0, 60.0), 0.9: (5.0, 15.0), 0.99: (0.0, 3.0)}
    reports = run_all([Job(name, "risk") for name in LOADS], num_processes)
    print_head("load", "q 0.5 (40 to 60 %)", "q 0.9 (5 to 15 %)", "q 0.99 (≤3 %)", "")
    for name in LOADS:
        exceeded = reports[Job(name, "risk")].exceeded_pct
        misses = [f"{q}" for q, (low, high) in ranges.items() if not low <= exceeded[q] <= high]
        print_row(name, *(f"{exceeded[q]:.1f}" for q in ranges), verdict(misses))


TABLES = {
    "t2": t2,
    "t3": t3,
    "t4": t4,
    "t5": t5,
    "t18": t18,
    "halves": halves,
}


def main() -> None:
    """Print one table."""
    if sys.argv[1:2] == ["t1"]:
        del sys.argv[1]
        t1()
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=TABLES, help="or t1")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    start_s = time.perf_counter()
    TABLES[args.table](args.jobs)
    print(f"\n{args.table}: {time.perf_counter() - start_s:.0f} s with --jobs {args.jobs}")


if __name__ == "__main__":
    main()
