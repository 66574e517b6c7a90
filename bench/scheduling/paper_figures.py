"""What runs on the grounds of papers came to: figures, kept in a file, as tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import msgspec

from bench.table import print_head, print_row
from lightserve.sim.hybrid import HybridRun
from lightserve.sim.report import HybridReport

COLUMNS = {
    "ttft": "TTFT %",
    "gaps": "gaps %",
    "goodput": "goodput/s",
    "latency": "ms/token",
    "tokens": "tokens/s",
    "be": "BE/s",
    "be_tokens": "BE tokens/s",
    "be_of_bound": "% of bound",
    "be_bound": "bound",
    "be_cached": "BE cached %",
    "evicted": "evicted %",
    "step_tokens": "tokens/step",
    "short": "steps ≤ 187.5 ms %",
    "compute": "compute %",
    "held": "KV held %",
    "e2e": "late ones' end p99, s",
}
"""Figures by name, and what tables call them: shares are of real-time requests if nothing else is
said; gaps are TPOT or the largest gap, whichever is kept less; evicted: times per request; bound:
see `paper_bounds`."""


class Cell(msgspec.Struct, frozen=True):
    """A run."""

    ground: str
    system: str
    seed: int
    figures: dict[str, float]


def cell_of(ground: str, system: str, seed: int, run: HybridRun) -> Cell:
    """Return what a run came to that has ended."""
    return Cell(ground, system, seed, dict(figures_of(run.report())))


def figures_of(report: HybridReport) -> Iterator[tuple[str, float]]:
    """Yield the figures of `COLUMNS`."""
    rt, be = report.rt, report.be
    gaps = [share for share in (rt.tpot_attainment, rt.mtpot_attainment) if share is not None]
    yield "ttft", 100.0 * (rt.ttft_attainment or 0.0)
    yield "gaps", 100.0 * min(gaps, default=0.0)
    yield "goodput", rt.goodput_rps
    yield "latency", rt.normalized_latency_ms or 0.0
    yield "tokens", rt.throughput_tps
    yield "be", be.throughput_rps
    yield "be_tokens", be.throughput_tps
    yield "be_cached", be.cached_pct or 0.0
    yield "evicted", report.kv.evicted_pct
    yield "step_tokens", report.steps.tokens_mean
    yield "short", report.steps.short_pct
    yield "compute", report.steps.compute_pct
    yield "held", report.kv.consumed_pct
    yield "e2e", rt.missed_e2e_s_p99 or 0.0


# A file of cells, a line each: what is in it is not run again.


def read_cells(path: Path) -> dict[tuple[str, str, int], Cell]:
    """Return the cells of a file by ground, system and seed; none if there is no such file."""
    if not path.exists():
        return {}
    cells = [msgspec.json.decode(line, type=Cell) for line in path.read_bytes().splitlines()]
    return {(cell.ground, cell.system, cell.seed): cell for cell in cells}


def add_cell(path: Path, cell: Cell) -> None:
    """Append a cell to a file."""
    with path.open("a") as file:
        file.write(json.dumps(msgspec.to_builtins(cell)) + "\n")


class Figure(NamedTuple):
    """A figure over seeds."""

    mean: float
    deviation: float
    """Over seeds; 0 for one."""


def over_seeds(cells: Sequence[Cell]) -> dict[str, Figure]:
    """Return the figures of one system."""
    names = [name for name in COLUMNS if name in cells[0].figures]
    values = {name: [cell.figures[name] for cell in cells] for name in names}
    return {
        name: Figure(fmean(of_one), stdev(of_one) if len(of_one) > 1 else 0.0)
        for name, of_one in values.items()
    }


def print_table(rows: Mapping[str, Mapping[str, Figure]], columns: Sequence[str]) -> None:
    """Print the figures of systems as a table; behind ± is the deviation over seeds.

    A dash: cells of a file that is older than the column have no such figure.
    """
    print_head("system", *(COLUMNS[name] for name in columns))
    for system, figures in rows.items():
        shown = (_shown(figures[name]) if name in figures else "-" for name in columns)
        print_row(system, *shown)


def _shown(figure: Figure) -> str:
    value = figure.mean
    digits = 2 if value < 10 else 1 if value < 1000 else 0
    spread = f" ± {figure.deviation:.{digits}f}" if round(figure.deviation, digits) else ""
    return f"{value:.{digits}f}{spread}"
