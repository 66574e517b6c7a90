"""Tables of T6 to T10: runs of `unified` beside tuned and stock baselines, means over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.scheduling.hybrid_cells import Cell, Figures, Runner, Setting, mean
from bench.scheduling.hybrid_tuning import (
    ATTAINED_PCT,
    Load,
    by_best_effort,
    tuned,
    tuned_for_goodput,
)

UNIFIED = Setting("unified")
RATES = (16.0, 24.0, 28.0, 32.0)
CAPACITY_RPS = 24.0
OVERLOAD = (1.0, 1.17, 1.3, 1.7)
MAX_WAITING = 4
"""Real-time requests that may wait where refusals are on. Sixteen gained nothing: who is let in
late takes memory and time from the others."""
TIGHT = Load(16.0, 20_000)
COLUMNS = "TTFT % | gaps % | goodput/s | ms/token | best-effort/s | RT evictions (beside BE)"


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
    print(f"{beside:g} of them while a best-effort request had KV {verdict(beside == 0)}")


def t7(bench: Bench) -> None:
    """Print goodput at four rates, and the latency at the lowest."""
    ratios = {16.0: 1.0, 24.0: 1.05, 28.0: 2.0, 32.0: 2.0}
    head("RT/s", "policy, budget/best-effort/admission", COLUMNS)
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
    head("RT/s", "refusals", COLUMNS + " | missed: p99 to the end, s")
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
    head("RT/s", "policy, budget/best-effort/admission", COLUMNS)
    fcfs = bench.figures(Setting("fcfs"), Load(8.0))
    row("8", f"stock {Setting('fcfs')}", fcfs)
    for rate in (8.0, 16.0):
        ours = bench.figures(UNIFIED, Load(rate))
        setting, priority = bench.priority(Load(rate))
        row(f"{rate:g}", f"**{UNIFIED}**", ours)
        row(f"{rate:g}", setting, priority)
        if rate == 8.0:
            ratio = ours.be_rps / fcfs.be_rps
            print(f"| 8 | {ratio:.2f}x stock fcfs, target 0.95 {verdict(ratio >= 0.95)} |")
        if min(priority.ttft_pct, priority.mtpot_pct) >= ATTAINED_PCT:
            ratio = ours.be_rps / priority.be_rps
            note = f"{ratio:.2f}x tuned priority, target 0.95"
            print(f"| {rate:g} | {note} {verdict(ratio >= 0.95)} |")


def t10(bench: Bench) -> None:
    """Print what a pool of 20,000 tokens leaves."""
    head("M", "policy, budget/best-effort/admission", COLUMNS + " | recomputed | link %")
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


def head(*names: str) -> None:
    """Print a table's head."""
    line = " | ".join(names)
    print(f"| {line} |")
    print("| " + " | ".join(["---"] * (line.count("|") + 1)) + " |")


def row(load: str, name: object, found: Figures, *more: str) -> None:
    """Print a row: the figures of COLUMNS, and more."""
    cells: Iterable[str] = (
        load,
        str(name),
        f"{found.ttft_pct:.1f}",
        f"{found.mtpot_pct:.1f}",
        f"{found.goodput:.2f}",
        f"{found.latency_ms:.0f}",
        f"{found.be_rps:.2f}",
        f"{found.evictions:g} ({found.evictions_beside_be:g})",
        *more,
    )
    print("| " + " | ".join(cells) + " |")


def verdict(is_met: bool) -> str:
    """Return the word of a target."""
    return "**met**" if is_met else "**missed**"
