"""What runs on the grounds of papers came to: figures, kept in a file, as tables and pictures."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from bench.table import print_head, print_row
from lightserve.sim.hybrid import HybridRun
from lightserve.sim.report import HybridReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Picture

BIN_S = 10.0
"""Of the course of what is found as cache."""

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
    cached: list[float]
    """Share of best-effort prompt tokens that were found, by first token, every `BIN_S`."""


def cell_of(ground: str, system: str, seed: int, run: HybridRun) -> Cell:
    """Return what a run came to that has ended."""
    return Cell(ground, system, seed, dict(figures_of(run.report())), list(_cached(run)))


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


def _cached(run: HybridRun) -> Iterator[float]:
    """Yield what share of best-effort prompts was found, of those with a first token in a bin."""
    bins: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for key, outcome in run.simulation.outcomes.items():
        if key.frontend_id == 1 and outcome.token_times_s:
            clients = next(c for c in run.clients.values() if c.request_class == "be")
            num_prompt = clients.num_prompt_tokens[key.request_id]
            number = int(outcome.token_times_s[0] // BIN_S)
            bins[number].append((outcome.num_cached_tokens, num_prompt))
    for number in range(max(bins, default=-1) + 1):
        found = np.array(bins[number] or [(0, 0)]).sum(axis=0)
        yield float(100.0 * found[0] / found[1]) if found[1] else 0.0


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


# Pictures: a panel per ground in one file, and in another BROS's figures over rates.


def draw(cells: Mapping[str, Mapping[str, Sequence[Cell]]], path: Path) -> None:
    """Draw what the papers draw, of cells by ground and system, as far as they are there.

    Grounds over rates go into a file of their own: `papers.svg` has `papers_rates.svg` beside it.
    """
    if _OVER_RATES.keys() & cells.keys():
        _draw_rates(cells, path.with_stem(f"{path.stem}_rates"))
    if not cells.keys() - _OVER_RATES.keys():
        return
    picture, axes = _picture((11, 10), 3, 2)
    for (ground, name, title), panel in zip(_BARS, axes, strict=False):
        _draw_bars(panel, cells.get(ground, {}), name)
        panel.set_title(title, fontsize=9)
    courses = {
        system: _course(of) for system, of in cells.get("echo-peak", {}).items() if of[0].cached
    }
    _draw_lines(axes[4], courses, marker="")
    axes[4].set_title("Echo: % of prompts found as cache; chats peak at 40 to 60 s", fontsize=9)
    clients = _curves(cells.get("past-future", {}), " clients", "goodput")
    _draw_lines(axes[5], clients, marker="o")
    axes[5].set_title("Past-Future: goodput/s by number of clients", fontsize=9)
    _write(picture, path)


def _draw_rates(cells: Mapping[str, Mapping[str, Sequence[Cell]]], path: Path) -> None:
    """Draw a row of panels for each hardware: latency and throughput, then what is kept."""
    picture, axes = _picture((14, 6), len(_OVER_RATES), len(_BY_RATE))
    panels = itertools.product(_OVER_RATES.items(), _BY_RATE.items())
    for ((ground, model), (name, title)), panel in zip(panels, axes, strict=True):
        _draw_lines(panel, _curves(cells.get(ground, {}), "/s", name), marker="o")
        panel.set_title(f"{model}: {title}", fontsize=9)
        panel.set_xlabel("real-time requests/s", fontsize=8)
        if name == "latency":
            panel.set_yscale("log")
    _write(picture, path)


def _picture(size: tuple[float, float], rows: int, columns: int) -> tuple[Picture, list[Axes]]:
    """Return a picture and its panels, row by row."""
    from matplotlib.figure import Figure as New  # noqa: PLC0415 - of the extra `plots`

    picture = New(figsize=size, layout="constrained")
    return picture, list(picture.subplots(rows, columns).flat)


def _write(picture: Picture, path: Path) -> None:
    """Write an SVG that is the same for the same picture."""
    import matplotlib  # noqa: PLC0415
    from matplotlib.backends.backend_svg import FigureCanvasSVG  # noqa: PLC0415

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "papers"}):
        FigureCanvasSVG(picture)
        picture.savefig(path, metadata={"Date": None})


_BARS = (
    ("bros", "latency", "BROS's ground: real-time ms per token"),
    ("bros", "be_tokens", "the same: best-effort tokens/s"),
    ("echo", "be", "Echo's ground: best-effort requests/s"),
    ("accelgen", "goodput", "AccelGen's ground: goodput/s"),
)
"""Ground, figure and title of the panels with a bar per system."""
_OVER_RATES = {"bros-14b-rates": "Qwen2.5-14B", "bros-32b-rates": "Qwen2.5-32B"}
_BY_RATE = {
    "latency": "ms per token",
    "be": "best-effort requests/s",
    "ttft": "first tokens in time, %",
    "gaps": "gaps in time, %",
}


def _draw_bars(axes: Axes, cells: Mapping[str, Sequence[Cell]], name: str) -> None:
    figures = {system.strip("*"): over_seeds(of)[name] for system, of in cells.items()}
    means = [figure.mean for figure in figures.values()]
    axes.barh(list(figures), means, xerr=[figure.deviation for figure in figures.values()])
    axes.tick_params(labelsize=7)
    axes.invert_yaxis()


def _draw_lines(
    axes: Axes, lines: Mapping[str, Sequence[tuple[float, float]]], *, marker: str
) -> None:
    for name, points in lines.items():
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(xs, ys, marker=marker, label=name.strip("*"), linewidth=1)
    if lines:
        axes.legend(fontsize=7)


def _course(cells: Sequence[Cell]) -> list[tuple[float, float]]:
    """Return the mean course of what is found as cache, up to where the shortest run ends."""
    length = min(len(cell.cached) for cell in cells)
    course = np.mean([cell.cached[:length] for cell in cells], axis=0)
    return [(BIN_S * number, float(share)) for number, share in enumerate(course)]


def _curves(
    cells: Mapping[str, Sequence[Cell]], unit: str, figure: str
) -> dict[str, list[tuple[float, float]]]:
    """Return a figure by a number, of systems named "RULE, NUMBERunit"."""
    curves: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for system, of in cells.items():
        rule, _, number = system.strip("*").rpartition(", ")
        if number.endswith(unit):
            curves[rule].append((float(number.removesuffix(unit)), over_seeds(of)[figure].mean))
    return curves
