"""Plots of the load client: labels that can be read, colours that mean the same everywhere."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from lightserve.kv_map import COLOURS
from lightserve.loadtest import plots
from lightserve.loadtest.statistics import QUANTILES
from lightserve.types import SlotKind

FIELDS = [field for field, _ in plots._CDF_FIELDS]


def run_with(lowest_ms: float, highest_ms: float) -> Any:
    """A run whose latencies lie between two values, most of them near the lower one."""
    shares = np.linspace(0.0, 1.0, len(QUANTILES))
    values = lowest_ms + (highest_ms - lowest_ms) * shares**8
    spread = SimpleNamespace(quantiles=list(values))
    summary = SimpleNamespace(targets=SimpleNamespace(), **dict.fromkeys(FIELDS, spread))
    return SimpleNamespace(label="a run", classes={"rt": summary, "be": summary})


@pytest.mark.parametrize(
    ("lowest_ms", "highest_ms"), [(0.02, 0.036), (99_990, 100_030), (3, 9), (1, 50_000)]
)
def test_labels_of_axes_do_not_overlap(lowest_ms: float, highest_ms: float) -> None:
    figure = plots.plot_cdfs([run_with(lowest_ms, highest_ms)])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()  # type: ignore[no-untyped-call]
    for axis in figure.axes:
        low, high = axis.get_xlim()
        labels = [
            (tick, text)
            for tick, text in zip(
                [*axis.get_xticks(), *axis.get_xticks(minor=True)],
                [*axis.get_xticklabels(), *axis.get_xticklabels(minor=True)],
                strict=True,
            )
            if text.get_text() and low <= tick <= high
        ]
        boxes = sorted(
            (text.get_window_extent(renderer) for _, text in labels), key=lambda box: box.x0
        )
        assert len(boxes) >= 2, axis.get_xlabel()
        for left, right in itertools.pairwise(boxes):
            assert left.x1 + 2 < right.x0, [text.get_text() for _, text in labels]


def test_classes_have_the_colours_of_the_kv_map() -> None:
    for name, kind in (("rt", SlotKind.RT), ("be", SlotKind.BE)):
        assert plots.COLORS[name] == "#{:02x}{:02x}{:02x}".format(*COLOURS[kind])
