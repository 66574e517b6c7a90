"""Pictures of the tables, from the runs that the file knows."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from bench.scheduling.hybrid_cells import Cell, Figures, mean
from bench.scheduling.hybrid_tables import UNIFIED, Bench
from bench.scheduling.hybrid_tuning import TUNING_S

PLOTS = Path(__file__).parents[1] / "plots"


def draw(bench: Bench) -> None:
    """Write goodput and best-effort throughput over the real-time rate, each policy at its best."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasSVG(figure)
    goodput, best_effort = figure.subplots(1, 2)
    runs = bench.runner.everything()
    for policy in ("unified", *bench.baselines):
        curve = _best_of(policy, runs)
        style = {"linewidth": 2.5} if policy == UNIFIED.policy else {"linewidth": 1.0}
        rates = sorted(curve)
        goodput.plot(rates, [curve[r].goodput for r in rates], marker="o", label=policy, **style)
        best_effort.plot(rates, [curve[r].be_rps for r in rates], marker="o", **style)
    _finish(goodput, "real-time goodput, requests/s")
    _finish(best_effort, "best-effort throughput, requests/s")
    low, high = goodput.get_xlim()
    goodput.plot([low, high], [low, high], "k:", linewidth=1, label="all that come")
    goodput.legend()
    PLOTS.mkdir(exist_ok=True)
    path = PLOTS / "hybrid.svg"
    figure.savefig(path, metadata={"Date": None})
    print(path)


def _finish(axes: Axes, label: str) -> None:
    axes.set(xlabel="real-time arrivals per s", ylabel=label, ylim=(0, None))
    axes.grid(alpha=0.3)


def _best_of(policy: str, runs: dict[Cell, Figures]) -> dict[float, Figures]:
    """Return the means of the setting of highest goodput at each rate, M = 60k, no refusals."""
    found: dict[float, dict[object, list[Figures]]] = defaultdict(lambda: defaultdict(list))
    for cell, figures in runs.items():
        plain = Cell(cell.setting, cell.rate, cell.seed)
        if cell == plain and cell.setting.policy == policy and cell.duration_s > TUNING_S:
            found[cell.rate][cell.setting].append(figures)
    return {
        rate: max(map(mean, settings.values()), key=lambda figures: figures.goodput)
        for rate, settings in found.items()
    }
