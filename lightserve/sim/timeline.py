"""A picture of a run: memory used and forecast over decode steps, evictions marked.

Needs matplotlib, the optional extra `plots`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lightserve.errors import ConfigError
from lightserve.extras import missing_extra
from lightserve.sim.report import TIMELINE_QUANTILE, TimelinePoint


def draw_timeline(points: Sequence[TimelinePoint], capacity_tokens: int, path: Path) -> None:
    """Write a picture in the format that the name ends with.

    Raises:
        ConfigError: matplotlib is missing, the format is unknown, or the file cannot be written.
    """
    try:
        # Imported late: only who draws needs it.
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise missing_extra("matplotlib", "plots") from error
    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
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
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--timeline: {path} cannot be written: {error}") from error
