"""Pictures of runs: memory used and forecast over decode steps with evictions; policies compared.

Needs matplotlib, the optional extra `plots`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightserve.errors import ConfigError
from lightserve.extras import missing_extra
from lightserve.sim.report import TIMELINE_QUANTILE, TimelinePoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightserve.sim.capacity import Trial


def check_picture(path: Path, flag: str) -> None:
    """Find out before a run whether its picture can be drawn after it.

    Raises:
        ConfigError: matplotlib is missing, the format is unknown, or the directory is not there.
    """
    formats = _figure(1, 1).canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ConfigError(f"{flag}: {path} must end with one of .{', .'.join(sorted(formats))}")
    if not path.parent.is_dir():
        raise ConfigError(f"{flag}: {path} cannot be written: {path.parent} is no directory")


def draw_timeline(points: Sequence[TimelinePoint], capacity_tokens: int, path: Path) -> None:
    """Write a picture in the format that the name ends with.

    Raises:
        ConfigError: matplotlib is missing, the format is unknown, or the file cannot be written.
    """
    figure = _figure(12, 5)
    axes = figure.add_subplot()
    steps = np.array([point.decode_step for point in points])
    used = np.array([point.used_tokens for point in points])
    axes.plot(steps, used, label="used", linewidth=1)
    foreseen = [
        (point.decode_step, point.forecast_tokens)
        for point in points
        if point.forecast_tokens is not None
    ]
    if foreseen:
        axes.step(
            *np.array(foreseen).T,
            where="post",
            linewidth=1,
            label=f"peak expected at the last admission, {TIMELINE_QUANTILE:.0%} quantile",
        )
    evicting = np.array([point.num_evicted > 0 for point in points], dtype=bool)
    if evicting.any():
        count = sum(point.num_evicted for point in points)
        axes.plot(steps[evicting], used[evicting], "rx", label=f"evictions ({count})")
    axes.axhline(capacity_tokens, color="black", linestyle="--", linewidth=1, label="capacity")
    axes.set(xlabel="decode step", ylabel="tokens of KV memory", ylim=(0, None))
    axes.legend(loc="lower right")
    _save(figure, path, "--timeline")


_COMPARED = (
    ("rt", "goodput_rps", "RT goodput, requests/s"),
    ("rt", "ttft_attainment", "RT share in time: first token"),
    ("rt", "tpot_attainment", "RT share in time: mean per token"),
    ("rt", "throughput_tps", "RT tokens/s"),
    ("be", "throughput_tps", "BE tokens/s"),
    ("kv", "recomputed_tokens", "tokens computed again"),
)


def draw_comparison(reports: Mapping[str, Mapping[str, Mapping[str, Any]]], path: Path) -> None:
    """Write a picture of figures of reports, by section and name, for each policy.

    Raises:
        ConfigError: matplotlib is missing, the format is unknown, or the file cannot be written.
    """
    figure = _figure(12, 6)
    policies = list(reports)
    for axes, (section, name, title) in zip(figure.subplots(2, 3).flat, _COMPARED, strict=True):
        values = [reports[policy][section][name] or 0.0 for policy in policies]
        axes.barh(policies, values, color=[f"C{number}" for number in range(len(policies))])
        axes.set_title(title, fontsize=10)
        axes.invert_yaxis()
    _save(figure, path, "--plot")


def draw_plan(trials: Sequence[Trial], attainment: float, path: Path) -> None:
    """Write a picture of what `lightserve plan` tried: attainment by replicas, and by pool.

    Raises:
        ConfigError: matplotlib is missing, the format is unknown, or the file cannot be written.
    """
    figure = _figure(11, 4)
    pool = max(trial.kv_tokens for trial in trials)
    by_replicas = sorted((t.num_replicas, t.attainment) for t in trials if t.kv_tokens == pool)
    # Where the largest pool is the smallest as well, the fewest replicas that are enough have it.
    enough = [num for num, attained in by_replicas if attained >= attainment]
    num_replicas = min(enough, default=by_replicas[-1][0])
    by_pool = sorted((t.kv_tokens, t.attainment) for t in trials if t.num_replicas == num_replicas)
    parts = ((by_replicas, "replicas"), (by_pool, f"KV slots of each of {num_replicas} replicas"))
    for number, (points, label) in enumerate(parts, start=1):
        axes = figure.add_subplot(1, 2, number)
        if points:
            axes.plot(*np.array(points).T * np.array([[1], [100]]), marker="o")
        axes.axhline(100 * attainment, linestyle=":", color="tab:red")
        axes.locator_params(axis="x", integer=True)
        axes.set_xlabel(label)
        axes.set_ylabel("answered in time, %")
        axes.set_ylim(-3, 103)
    _save(figure, path, "--plot")


def _figure(width: float, height: float) -> Figure:
    try:
        # Imported late: only who draws needs it.
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise missing_extra("matplotlib", "plots") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path, flag: str) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag}: {path} cannot be written: {error}") from error
