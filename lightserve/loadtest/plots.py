"""Results as pictures: over time, as CDFs, and attainment and goodput over the rate."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lightserve.loadtest.result import Run
from lightserve.loadtest.statistics import QUANTILES
from lightserve.loadtest.tables import TITLES

# Okabe and Ito's palette, which colour-blind people can tell apart.
COLORS = {"rt": "#d55e00", "be": "#0072b2", "all": "#555555"}
_CDF_FIELDS = (
    ("ttft_ms", "TTFT"),
    ("itl_ms", "ITL"),
    ("tpot_ms", "TPOT"),
    ("mtpot_ms", "MTPOT"),
    ("e2el_ms", "E2EL"),
    ("normalized_ms", "normalized latency per token"),
)
_STYLES = ("-", "--", ":", "-.")


_OVER_TIME = (("ttft_ms", "TTFT, ms"), ("itl_ms", "ITL, ms"))


def plot_over_time(path: Path, runs: list[Run]) -> None:
    """Write TTFT, ITL and goodput over time, per class; a column of pictures per run.

    Raises:
        OSError: it cannot be written.
    """
    mpl.use("Agg")
    figure = Figure(figsize=(2 + 8 * len(runs), 9), layout="constrained")
    rows = figure.subplots(3, len(runs), sharex="col", sharey="row", squeeze=False)
    for run, column in zip(runs, rows.T, strict=True):
        _plot_run(column, run)
    figure.savefig(path, dpi=110)


def _plot_run(column: Sequence[Axes], run: Run) -> None:
    timeline = run.timeline
    for name in timeline.arrivals:
        times = (np.arange(len(timeline.arrivals[name])) + 0.5) * timeline.bin_s
        for axis, (field, _) in zip(column, _OVER_TIME, strict=False):
            points = getattr(timeline, field)[name]
            for quantile, dashes in (("p50", "-"), ("p99", ":")):
                values = [np.nan if p is None else getattr(p, quantile) for p in points]
                label = f"{TITLES[name]}, {quantile}"
                axis.plot(times, values, dashes, color=COLORS[name], marker=".", label=label)
            target = {"ttft_ms": "ttft_ms", "itl_ms": "mtpot_ms"}[field]
            if (limit := getattr(run.classes[name].targets, target)) is not None:
                axis.axhline(limit, color=COLORS[name], linestyle="--", linewidth=0.8)
        goodput = timeline.goodput_requests_per_s[name]
        column[2].plot(times, goodput, color=COLORS[name], marker=".", label=TITLES[name])
    titles = (*(title for _, title in _OVER_TIME), "goodput, requests per second")
    for axis, title in zip(column, titles, strict=True):
        axis.set_ylabel(title)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        for edge in run.window_s:
            axis.axvline(edge, color="#999999", linewidth=0.8)
        axis.legend(loc="upper right", fontsize="small")
    column[0].set_title(f"{run.label} (dashed: targets)")
    column[2].set_xlabel("seconds (counted between the grey lines)")


def plot_scenes(path: Path, runs: list[Run]) -> None:
    """Write the scenes of `bench mixed`: TTFT and ITL of chats, and how long the batch took.

    Raises:
        OSError: it cannot be written.
    """
    mpl.use("Agg")
    figure = Figure(figsize=(13, 1.5 + 0.5 * len(runs)), layout="constrained")
    columns = figure.subplots(1, 3, sharey=True)
    rows = np.arange(len(runs))[::-1]
    for axis, (field, title) in zip(columns, _OVER_TIME, strict=False):
        for point, marker in (("p50", "o"), ("p90", "s"), ("p99", "D")):
            values = [getattr(getattr(run.classes["rt"], field), point) for run in runs]
            known = [np.nan if value is None else value for value in values]
            axis.plot(known, rows, marker, color=COLORS["rt"], label=point, alpha=0.8)
            axis.axvline(known[0], color="#999999", linewidth=0.8)
        axis.set_xlim(left=0)
        axis.set_xlabel(f"{title} of chats (lines: alone)")
        axis.legend(fontsize="small")
    batches = [run.classes.get("be") for run in runs]
    spans = [0.0 if batch is None else batch.makespan_s or 0.0 for batch in batches]
    whole = [batch is None or batch.num_completed == batch.num_arrivals for batch in batches]
    bars = columns[2].barh(rows, spans, color=COLORS["be"])
    for bar, is_whole in zip(bars, whole, strict=True):
        bar.set_hatch("" if is_whole else "//")
    columns[2].set_xlabel("seconds of the batch (hatched: not all completed)")
    columns[0].set_yticks(rows, [run.label for run in runs])
    for axis in columns:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def write_plots(directory: Path, runs: list[Run]) -> list[Path]:
    """Write all pictures that the runs allow; return their paths. Raises OSError."""
    mpl.use("Agg")
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for run in runs:
        name = f"timeline{_suffix(run, runs)}.png"
        written.append(_save(plot_timeline(run), directory / name))
    written.append(_save(plot_cdfs(runs), directory / "cdf.png"))
    if len(runs) > 1:
        written.append(_save(plot_rates(runs), directory / "rates.png"))
    return written


def _suffix(run: Run, runs: list[Run]) -> str:
    if len(runs) == 1:
        return ""
    return f"-{runs.index(run) + 1}-" + re.sub(r"[^\w.=-]+", "_", run.label)[:60]


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=110)
    return path


def plot_timeline(run: Run) -> Figure:
    """Plot arrivals, requests in flight, tokens and failures over time."""
    figure = Figure(figsize=(10, 8), layout="constrained")
    axes = figure.subplots(3, 1, sharex=True)
    timeline = run.timeline
    for name, arrivals in timeline.arrivals.items():
        times = (np.arange(len(arrivals)) + 0.5) * timeline.bin_s
        style = {"color": COLORS[name], "label": TITLES[name], "linewidth": 1.4}
        axes[0].step(times, np.array(arrivals) / timeline.bin_s, where="mid", **style)
        failures = np.array(timeline.failures[name]) / timeline.bin_s
        if failures.any():
            axes[0].step(
                times,
                failures,
                where="mid",
                color=COLORS[name],
                linestyle=":",
                label=f"{TITLES[name]}: failures",
            )
        axes[1].plot(times + timeline.bin_s / 2, timeline.in_flight[name], **style)
        axes[2].plot(times, np.array(timeline.tokens[name]) / timeline.bin_s, **style)
    for axis, title in zip(
        axes, ("arrivals per second", "requests in flight", "output tokens per second"), strict=True
    ):
        axis.set_ylabel(title)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        for edge in run.window_s:
            axis.axvline(edge, color="#999999", linewidth=0.8)
    axes[0].legend(loc="upper right")
    axes[2].set_xlabel("seconds (counted between the grey lines)")
    figure.suptitle(run.label)
    return figure


def plot_cdfs(runs: list[Run]) -> Figure:
    """Plot the CDF of each latency, a line per class and run, with targets."""
    figure = Figure(figsize=(12, 7), layout="constrained")
    for axis, (field, title) in zip(figure.subplots(2, 3).flat, _CDF_FIELDS, strict=True):
        for number, run in enumerate(runs):
            _plot_cdf(axis, run, field, number, names_run=len(runs) > 1)
        if axis.get_xscale() == "linear":
            # A third of the width has room for so many labels of six digits, and no more.
            axis.xaxis.set_major_locator(MaxNLocator(nbins=5))
        axis.set_xlabel(f"{title}, ms")
        axis.set_ylabel("share")
        axis.set_ylim(0, 1.01)
        axis.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def _plot_cdf(axis: Axes, run: Run, field: str, number: int, *, names_run: bool) -> None:
    for name, summary in run.classes.items():
        points = getattr(summary, field).quantiles
        if name == "all" or not points:
            continue
        label = TITLES[name] + (f", {run.label}" if names_run else "")
        color = COLORS[name] if not names_run else f"C{number}"
        style = _STYLES[list(COLORS).index(name) if names_run else 0]
        axis.plot(points, QUANTILES, color=color, linestyle=style, label=label)
        if (limit := getattr(summary.targets, field, None)) is not None:
            axis.axvline(limit, color=color, linestyle=":", linewidth=1)
        if points[0] > 0 and points[-1] > 50 * points[100]:
            axis.set_xscale("log")


def plot_rates(runs: list[Run]) -> Figure:
    """Plot attainment and goodput over the rate of arrivals (or the concurrency), per class."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    is_closed = all(run.traffic[0].concurrency is not None for run in runs)
    loads = [
        float(run.traffic[0].concurrency or 0) if is_closed else run.offered_requests_per_s
        for run in runs
    ]
    for name in (name for name in TITLES if any(name in run.classes for run in runs)):
        points = [
            (load, run.classes[name])
            for load, run in sorted(zip(loads, runs, strict=True), key=lambda pair: pair[0])
            if name in run.classes
        ]
        xs = [load for load, _ in points]
        style = {"color": COLORS[name], "marker": "o", "label": TITLES[name]}
        left.plot(xs, [100 * (summary.attainment or 0.0) for _, summary in points], **style)
        right.plot(xs, [summary.goodput_requests_per_s for _, summary in points], **style)
        right.plot(
            xs,
            [summary.requests_per_s for _, summary in points],
            color=COLORS[name],
            linestyle=":",
            label=f"{TITLES[name]}: all completed",
        )
    left.set_ylabel("attainment, %")
    left.set_ylim(0, 102)
    right.set_ylabel("goodput, requests per second")
    right.set_ylim(bottom=0)
    for axis in (left, right):
        axis.set_xlabel("clients in the closed loop" if is_closed else "arrivals per second")
        axis.grid(alpha=0.3)
        axis.legend()
    return figure
