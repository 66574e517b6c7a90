"""The picture of the README: chats that come and go beside a batch, under four policies.

    python -m tools.day_picture

Chats come at the rates of `DAY`, one after the other, beside the batch of `bench.scheduling.h200`,
on the same virtual H200. Above are the shares of chats in time, by when they came, below the
batch's tokens that were delivered, both for each `BIN_S`.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from bench.scheduling.h200 import POLICIES, TARGETS, Cell
from bench.table import print_head, print_row
from lightserve.sim.hybrid import HybridRun
from lightserve.sim.report import is_in_time
from lightserve.types import RequestClass

PICTURE = Path(__file__).parents[1] / "docs/mixed_day.svg"
LINES = {
    "unified": ("lightserve: unified", "#2da44e"),
    "echo": ("echo", "#bf8700"),
    "priority": ("priority: chats first", "#cf222e"),
    "chunked": ("chunked: in order of arrival", "#6f7fd9"),
}
DAY = (10, 30, 50, 30, 10)
"""Chats a second, for `HOUR_S` each."""
HOUR_S, BIN_S = 20.0, 2.0
_MADE = ("Date", "Creator", "Format", "Type")
FIRST_S = 6.0
"""What comes before is left out: 256 prompts that come at once."""


class Course(NamedTuple):
    """What a run was like over time, a value for each `BIN_S`."""

    in_time_pct: list[float]
    """Of the chats that came then."""
    best_effort_per_s: list[float]
    """Tokens."""


def course_of(policy: str, day: Sequence[float] = DAY, hour_s: float = HOUR_S) -> Course:
    """Run a day of chats, and return its course."""
    rng = np.random.default_rng(0)
    targets = ",".join(str(1e3 * each) for each in TARGETS if each is not None)
    rows = ["t,prompt_tokens,output_tokens,ttft_ms,tpot_ms,mtpot_ms"]
    for hour, rate in enumerate(day):
        times = np.sort(rng.uniform(0.0, hour_s, rng.poisson(rate * hour_s)))
        prompts = rng.integers(53, 1127, len(times), endpoint=True)
        rows += [
            f"{FIRST_S + hour * hour_s + t},{p},80,{targets}"
            for t, p in zip(times, prompts, strict=True)
        ]
    end_s = FIRST_S + len(day) * hour_s
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "day.csv"
        # Times count from the first row.
        path.write_text("\n".join([rows[0], f"0,53,80,{targets}", *rows[1:]]) + "\n")
        # The last chats have time to end.
        config = Cell(policy, duration_s=end_s + 20.0).config()
        run = HybridRun(replace(config, rt=str(path), rt_lengths=None, rt_max_tokens=80))
    with contextlib.closing(run):
        run.advance(run.config.duration_s)
    seen = run.seen()
    bins = np.arange(FIRST_S, end_s + 1e-9, BIN_S)
    chats = seen[RequestClass.RT]
    came = np.histogram([chat.arrival_s for chat in chats], bins)[0]
    kept = np.histogram([chat.arrival_s for chat in chats if is_in_time(chat)], bins)[0]
    delivered = [time_s for job in seen[RequestClass.BE] for time_s in job.token_times_s]
    tokens = np.histogram(delivered, bins)[0] / BIN_S
    return Course((100.0 * kept / np.maximum(came, 1)).tolist(), tokens.tolist())


def draw_day(courses: Mapping[str, Course], path: Path) -> None:
    """Write an SVG that can be read on white and on black, the same for the same courses."""
    grey = "#7d8590"
    styles: dict[Any, Any] = {
        "text.color": grey,
        "axes.labelcolor": grey,
        "axes.edgecolor": grey,
        "xtick.color": grey,
        "ytick.color": grey,
        "svg.fonttype": "none",
        "svg.hashsalt": "day",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(styles):
        figure = Figure(figsize=(8.4, 4.0), layout="constrained")
        FigureCanvasSVG(figure)
        panels = figure.subplots(2, 1, sharex=True)
        for policy, course in courses.items():
            name, color = LINES[policy]
            width, order = (2.2, 3) if policy == "unified" else (1.2, 2)
            for panel, values in zip(panels, course, strict=True):
                times = BIN_S * (0.5 + np.arange(len(values)))
                panel.plot(times, values, color=color, linewidth=width, zorder=order, label=name)
        for hour, rate in enumerate(DAY):
            for panel in panels:
                panel.axvspan(
                    hour * HOUR_S, (hour + 1) * HOUR_S, color=grey, alpha=rate / 250, linewidth=0
                )
            panels[0].text((hour + 0.5) * HOUR_S, 106, f"{rate} chats/s", ha="center")
        panels[0].set(ylabel="chats in time, %", ylim=(-4, 104), xlim=(0, len(DAY) * HOUR_S))
        panels[1].set(ylabel="batch tokens/s", xlabel="seconds", ylim=(0, None))
        panels[1].yaxis.set_major_formatter("{x:,.0f}")
        handles, names = panels[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
        figure.savefig(path, transparent=True, metadata=dict.fromkeys(_MADE))


def main() -> None:
    """Draw the picture, and print its means by rate."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        courses = dict(zip(POLICIES, pool.map(course_of, POLICIES), strict=True))
    draw_day(courses, PICTURE)
    print_head("policy", "chats in time, %, by rate", "best effort, tokens/s, by rate")
    for policy, course in courses.items():
        hours = [np.array(values).reshape(len(DAY), -1).mean(axis=1) for values in course]
        print_row(f"`{policy}`", *(", ".join(f"{value:,.0f}" for value in each) for each in hours))


if __name__ == "__main__":
    main()
