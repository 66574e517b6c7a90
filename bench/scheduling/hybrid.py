"""The unified planner beside tuned baselines on the hybrid workload.

    python -m bench.scheduling.hybrid t6 | t7 | t8 | t9 | t10
    python -m bench.scheduling.hybrid all        everything

Real-time lengths from ShareGPT, Poisson arrivals, a closed loop of 256 best-effort requests, on
virtual hardware that the router knows by a profile fitted to noisy samples; every policy is the
real router core's. Each run is kept in a file of JSON lines, `--runs`: who is interrupted goes on.
The file knows nothing of the code: a changed policy needs a new one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from bench.table import print_head, print_row
from lightserve.config.scheduling import CLASS_BLIND_POLICIES
from lightserve.sim import HybridConfig, HybridReport, run_hybrid

LENGTHS = str(Path(__file__).parents[1] / "traces/sharegpt_lengths.csv.gz")
LINK_TOKENS_PER_S = 1 / 21e-6
"""What the virtual hardware copies, one way at a time."""


class Setting(NamedTuple):
    """What is tuned."""

    policy: str
    budget: int = 512
    """New tokens in a step at most."""
    max_be: int = 0
    """Best-effort requests that run at once at most; 0: no limit."""
    admission: str = "risk"
    be_order: str = "auto"
    """Of best-effort requests that wait."""

    def __str__(self) -> str:
        limit = self.max_be or "any"
        order = "" if self.be_order == "auto" else f"/{self.be_order}"
        return f"{self.policy} {self.budget}/{limit}/{self.admission}{order}"


@dataclass(frozen=True)
class Cell:
    """One run."""

    setting: Setting
    rate: float
    """Real-time arrivals per second."""
    seed: int = 0
    duration_s: float = 90.0
    margin_s: float = 30.0
    capacity_tokens: int = 60_000
    max_waiting: int = 0
    """Real-time requests that may wait; more are refused. 0: as many as come."""
    host_kv_tokens: int = -1

    @property
    def key(self) -> str:
        """All of it, as text."""
        return json.dumps(dataclasses.astuple(self))


class Figures(NamedTuple):
    """What a run came to: of real-time requests if nothing else is said."""

    ttft_pct: float
    mtpot_pct: float
    goodput: float
    """Requests per second that met all targets."""
    latency_ms: float
    """Normalised: per token."""
    be_rps: float
    be_tps: float
    evictions: float
    evictions_beside_be: float
    recomputed: float
    """Tokens of both classes whose KV was given up, in the whole run."""
    link_pct: float
    """Of the time, the link was copying."""
    missed_e2e_s: float
    """p99 over requests that missed a target."""
    ttft_ms_p99: float
    arrivals: float
    """Within the margins."""
    early_ttft_pct: float = math.nan
    """Before the first margin's end, which nothing above counts."""
    early_be_rps: float = math.nan


def play(cell: Cell) -> Figures:
    """Run one cell."""
    policy, budget, max_be, admission, be_order = cell.setting
    options: dict[str, float | str] = {"max_be_seqs": max_be, "be_order": be_order}
    if admission.startswith("aggressive"):
        options["watermark"] = float(admission.split()[1])
    if cell.max_waiting:
        options["rt_max_waiting_requests"] = cell.max_waiting
    report = run_hybrid(
        HybridConfig(
            rt=f"poisson:{cell.rate}",
            rt_lengths=LENGTHS,
            be="closed:256",
            be_lengths="uniform:512-1024,32-128",
            duration_s=cell.duration_s,
            margin_s=cell.margin_s,
            capacity_tokens=cell.capacity_tokens,
            host_kv_tokens=cell.host_kv_tokens,
            policy=policy,
            budget_tokens=budget,
            admission=admission.split()[0],
            serve_options=options,
            seed=cell.seed,
        )
    )
    return _figures(report, cell.duration_s)


def _figures(report: HybridReport, duration_s: float) -> Figures:
    rt, be, kv = report.rt, report.be, report.kv
    return Figures(
        100.0 * (rt.ttft_attainment or 0.0),
        100.0 * (rt.mtpot_attainment or 0.0),
        rt.goodput_rps,
        rt.normalized_latency_ms or 0.0,
        be.throughput_rps,
        be.throughput_tps,
        rt.evictions,
        kv.rt_evictions_beside_be,
        report.kv.recomputed_tokens,
        100.0 * kv.copied_tokens / LINK_TOKENS_PER_S / duration_s,
        rt.missed_e2e_s_p99 or 0.0,
        rt.ttft_ms_p99 or 0.0,
        rt.arrivals,
        100.0 * (report.warm_up.rt_ttft_attainment or 0.0),
        report.warm_up.be_throughput_rps or 0.0,
    )


class Runner:
    """Plays cells that the file does not know yet, several at a time, and adds them to it."""

    def __init__(self, path: Path, *, num_jobs: int) -> None:
        """`path` is a file of JSON lines, made at the first run."""
        self._path = path
        self._num_jobs = num_jobs
        self._known: dict[str, Figures] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                key, values = json.loads(line)
                self._known[key] = Figures(*values)

    def play(self, cells: Sequence[Cell]) -> list[Figures]:
        """Return the figures of cells, in order."""
        missing = {cell.key: cell for cell in cells if cell.key not in self._known}
        if missing:
            with ProcessPoolExecutor(self._num_jobs, mp_context=get_context("spawn")) as pool:
                futures = {pool.submit(play, cell): key for key, cell in missing.items()}
                for future in as_completed(futures):
                    self._remember(futures[future], future.result())
        return [self._known[cell.key] for cell in cells]

    def everything(self) -> dict[Cell, Figures]:
        """Return all that the file knows."""
        return {_cell(json.loads(key)): figures for key, figures in self._known.items()}

    def _remember(self, key: str, figures: Figures) -> None:
        self._known[key] = figures
        with self._path.open("a") as file:
            file.write(json.dumps([key, figures]) + "\n")


def _cell(values: list[Any]) -> Cell:
    setting, *others = values
    return Cell(Setting(*setting), *others)


def mean(figures: Sequence[Figures]) -> Figures:
    """Return the means over runs; evictions are summed, the p99 of misses is the largest."""
    means = Figures(*(fmean(column) for column in zip(*figures, strict=True)))
    return means._replace(
        evictions=sum(run.evictions for run in figures),
        evictions_beside_be=sum(run.evictions_beside_be for run in figures),
        missed_e2e_s=max(run.missed_e2e_s for run in figures),
    )


BASELINES = ("fcfs", "chunked", "round-robin", "mlfq", "priority", "sjf")
BUDGETS = (256, 512, 1024, 2048)
MAX_BE = (16, 64, 256)
ADMISSIONS = ("risk", "aggressive 0.95")
ORDERS = ("auto", "sharing")
"""That of these policies is by arrival unless told otherwise; those that know no classes have no
other."""
TUNING_S, TUNING_MARGIN_S = 50.0, 15.0
BLIND_RPS = 24.0
LIGHT_RPS = 16.0
"""Up to this rate a setting is judged by a run as long as those of the tables."""
ATTAINED_PCT = 99.0

Score = Callable[[Figures], tuple[float, ...]]


def by_goodput(figures: Figures) -> tuple[float, ...]:
    """Most real-time requests that met their targets; between equals, the lower latency."""
    return figures.goodput, -figures.latency_ms


def by_best_effort(figures: Figures) -> tuple[float, ...]:
    """Throughput: most best-effort work where 99 % is attained, else at the highest attainment."""
    attained = min(figures.ttft_pct, figures.mtpot_pct)
    return min(attained, ATTAINED_PCT), figures.be_rps


@dataclass(frozen=True)
class Load:
    """Where a setting is tuned."""

    rate: float
    capacity_tokens: int = 60_000


def tuned(runner: Runner, policy: str, load: Load, score: Score) -> Setting:
    """Return the best setting that the search sees."""
    # Class-blind policies serve real-time best with little beside it, priority anyhow.
    best = Setting(policy, max_be=64 if policy in ("priority", "sjf") else 16)
    best = _best(runner, [best._replace(budget=value) for value in BUDGETS], load, score)
    best = _best(runner, [best._replace(max_be=value) for value in MAX_BE], load, score)
    best = _best(runner, [best._replace(admission=rule) for rule in ADMISSIONS], load, score)
    orders = ORDERS[:1] if policy in CLASS_BLIND_POLICIES else ORDERS
    return _best(runner, [best._replace(be_order=order) for order in orders], load, score)


def tuned_for_goodput(runner: Runner, policy: str, load: Load) -> Setting:
    """Return the setting for goodput; that of class-blind policies is sought at 24/s alone.

    Each of them is far below `priority` beyond, and at 16/s `unified` leaves nothing to gain.
    """
    sought = load if policy in ("priority", "sjf") else Load(BLIND_RPS, load.capacity_tokens)
    return tuned(runner, policy, sought, by_goodput)


def _best(runner: Runner, settings: Sequence[Setting], load: Load, score: Score) -> Setting:
    scores = [score(figures) for figures in runner.play([trial(s, load) for s in settings])]
    return settings[max(range(len(settings)), key=scores.__getitem__)]


def trial(setting: Setting, load: Load) -> Cell:
    """Return the run by which a setting is judged."""
    if load.rate <= LIGHT_RPS:
        return Cell(setting, load.rate, 0, capacity_tokens=load.capacity_tokens)
    return Cell(setting, load.rate, 0, TUNING_S, TUNING_MARGIN_S, load.capacity_tokens)


UNIFIED = Setting("unified")
RATES = (16.0, 24.0, 28.0, 32.0)
CAPACITY_RPS = 24.0
OVERLOAD = (1.0, 1.17, 1.3, 1.7)
MAX_WAITING = 4
"""Real-time requests that may wait where refusals are on. Sixteen gained nothing: who is let in
late takes memory and time from the others."""
TIGHT = Load(16.0, 20_000)
COLUMNS = (
    *("TTFT %", "gaps %", "goodput/s", "ms/token", "best-effort/s"),
    *("first 30 s: TTFT %, best-effort/s", "RT evictions (beside BE)"),
)


@dataclass(frozen=True)
class Bench:
    """Who plays the cells, and which."""

    runner: Runner
    num_seeds: int
    baselines: Sequence[str]

    def figures(self, setting: Setting, load: Load, *, max_waiting: int = 0) -> Figures:
        """Return the means over seeds."""
        cells = [
            Cell(
                setting,
                load.rate,
                seed,
                capacity_tokens=load.capacity_tokens,
                max_waiting=max_waiting,
            )
            for seed in range(self.num_seeds)
        ]
        return mean(self.runner.play(cells))

    def priority(self, load: Load) -> tuple[Setting, Figures]:
        """Return the setting of `priority` with most best-effort work, and what it came to."""
        setting = tuned(self.runner, "priority", load, by_best_effort)
        return setting, self.figures(setting, load)


def t6(bench: Bench) -> None:
    """Print evictions of real-time requests in all runs of `unified` that the file knows."""
    runs = {
        cell: figures
        for cell, figures in bench.runner.everything().items()
        if cell.setting.policy == "unified"
    }
    evictions = sum(figures.evictions for figures in runs.values())
    beside = sum(figures.evictions_beside_be for figures in runs.values())
    print(f"{len(runs)} runs of unified: {evictions:g} real-time evictions,")
    is_met = bool(runs) and beside == 0
    print(f"{beside:g} of them while a best-effort request had KV {verdict(is_met)}")


def t7(bench: Bench) -> None:
    """Print goodput at four rates, and the latency at the lowest."""
    ratios = {16.0: 1.0, 24.0: 1.05, 28.0: 2.0, 32.0: 2.0}
    print_head("RT/s", "policy, budget/best-effort/admission", *COLUMNS)
    for rate in RATES:
        load = Load(rate)
        ours = bench.figures(UNIFIED, load)
        row(f"{rate:g}", f"**{UNIFIED}**", ours)
        others = []
        for policy in bench.baselines:
            setting = tuned_for_goodput(bench.runner, policy, load)
            found = bench.figures(setting, load)
            others.append(found.goodput)
            row(f"{rate:g}", setting, found)
        ratio = ours.goodput / max(*others, 1e-9)
        is_met = ratio >= ratios[rate]
        note = f"goodput {ratio:.2f}x the best baseline's, target {ratios[rate]:g}"
        if rate <= CAPACITY_RPS:
            attained = min(ours.ttft_pct, ours.mtpot_pct)
            is_met &= attained >= ATTAINED_PCT
            note += f"; attained {attained:.1f} %, target 99"
        print(f"| {rate:g} | {note} {verdict(is_met)} |")
    _latency(bench)


def _latency(bench: Bench) -> None:
    load = Load(RATES[0])
    ours = bench.figures(UNIFIED, load).latency_ms
    for policy, target in (("fcfs", 0.30), ("round-robin", 0.75)):
        stock = bench.figures(Setting(policy), load)
        row(f"{load.rate:g}", f"stock {Setting(policy)}", stock)
        ratio = ours / stock.latency_ms
        print(
            f"| {load.rate:g} | latency {ratio:.2f}x, target {target} {verdict(ratio <= target)} |"
        )


def t8(bench: Bench) -> None:
    """Print what overload leaves, without and with refusals."""
    print_head("RT/s", "refusals", *COLUMNS, "missed: p99 to the end, s")
    goodput: dict[tuple[float, int], float] = {}
    for max_waiting in (0, MAX_WAITING):
        for factor in OVERLOAD:
            load = Load(round(factor * CAPACITY_RPS, 1))
            found = bench.figures(UNIFIED, load, max_waiting=max_waiting)
            goodput[factor, max_waiting] = found.goodput
            refusals = f"above {max_waiting} waiting" if max_waiting else "none"
            row(f"{load.rate:g}", refusals, found, f"{found.missed_e2e_s:.1f}")
    peak = max(goodput.values())
    for factor, max_waiting, target in (
        (1.3, 0, 0.80),
        (1.7, 0, 0.65),
        (1.3, MAX_WAITING, 0.95),
        (1.7, MAX_WAITING, 0.95),
    ):
        share = goodput[factor, max_waiting] / peak
        how = "with" if max_waiting else "without"
        note = f"{share:.2f} of peak ({peak:.2f}/s) {how} refusals, target {target}"
        print(f"| {factor:g}x | {note} {verdict(share >= target)} |")


def t9(bench: Bench) -> None:
    """Print best-effort throughput where real-time load is light."""
    print_head("RT/s", "policy, budget/best-effort/admission", *COLUMNS)
    fcfs = bench.figures(Setting("fcfs"), Load(8.0))
    row("8", f"stock {Setting('fcfs')}", fcfs)
    for rate in (8.0, 16.0):
        ours = bench.figures(UNIFIED, Load(rate))
        setting, priority = bench.priority(Load(rate))
        row(f"{rate:g}", f"**{UNIFIED}**", ours)
        row(f"{rate:g}", setting, priority)
        if rate == 8.0:
            ratio = ours.be_rps / max(fcfs.be_rps, 1e-9)
            print(f"| 8 | {ratio:.2f}x stock fcfs, target 0.95 {verdict(ratio >= 0.95)} |")
        if min(priority.ttft_pct, priority.mtpot_pct) >= ATTAINED_PCT:
            ratio = ours.be_rps / max(priority.be_rps, 1e-9)
            note = f"{ratio:.2f}x tuned priority, target 0.95"
            print(f"| {rate:g} | {note} {verdict(ratio >= 0.95)} |")


def t10(bench: Bench) -> None:
    """Print what a pool of 20,000 tokens leaves."""
    print_head("M", "policy, budget/best-effort/admission", *COLUMNS, "recomputed", "link %")
    ours = bench.figures(UNIFIED, TIGHT)
    setting, priority = bench.priority(TIGHT)
    for name, found in ((f"**{UNIFIED}**", ours), (str(setting), priority)):
        row("20k", name, found, f"{found.recomputed:.0f}", f"{found.link_pct:.1f}")
    attained_note = f"TTFT attained {ours.ttft_pct:.1f} %, target 99"
    print(f"| 20k | {attained_note} {verdict(ours.ttft_pct >= ATTAINED_PCT)} |")
    ratio = ours.be_rps / max(priority.be_rps, 1e-9)
    print(f"| 20k | best-effort {ratio:.2f}x, target 1.2 {verdict(ratio >= 1.2)} |")
    share = ours.recomputed / max(priority.recomputed, 1.0)
    print(f"| 20k | recomputed {share:.1%} of its, target 5 % {verdict(share <= 0.05)} |")
    link = f"copies {ours.link_pct:.1f} % of the link, target 50"
    print(f"| 20k | {link} {verdict(ours.link_pct <= 50.0)} |")


def row(load: str, name: object, found: Figures, *more: str) -> None:
    """Print a row: the figures of COLUMNS, and more."""
    print_row(
        *(load, name, f"{found.ttft_pct:.1f}", f"{found.mtpot_pct:.1f}", f"{found.goodput:.2f}"),
        *(f"{found.latency_ms:.0f}", f"{found.be_rps:.2f}"),
        f"{found.early_ttft_pct:.1f}, {found.early_be_rps:.2f}",
        *(f"{found.evictions:g} ({found.evictions_beside_be:g})", *more),
    )


def verdict(is_met: bool) -> str:
    """Return the word of a target."""
    return "**met**" if is_met else "**missed**"


TABLES: Mapping[str, Callable[[Bench], None]] = {
    "t7": t7,
    "t8": t8,
    "t9": t9,
    "t10": t10,
    "t6": t6,
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
