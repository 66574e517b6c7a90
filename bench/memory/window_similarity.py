"""How alike output lengths of neighbouring windows are (Past-Future, section 3.2, figures 3 and 4).

    python -m bench.memory.window_similarity [TRACE.csv.gz …]

A trace's outputs, in order, are cut into windows of W requests; each is a histogram of lengths
(bins of equal ratio), and two are compared by the cosine between them. *Neighbours*: each window
with the next one, which is what a history of W lengths is used for. *Any two*: of all pairs, as a
trace that drifts has windows far apart that are not alike. *Keys*: neighbours among the requests of
one client, for traces that name them, each with at least two windows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.table import print_head, print_row
from lightserve.sim.traffic import FloatArray, IntArray, Trace, read_trace

TRACES = Path(__file__).parents[1] / "traces"
WINDOWS = (100, 300, 1000, 3000)
NUM_BINS = 48
"""Over lengths from 1 to `MOST_TOKENS`, each as many times as wide as the one before."""
MOST_TOKENS = 65_536
_EDGES = np.geomspace(1, MOST_TOKENS, NUM_BINS + 1)


class Similarity(NamedTuple):
    """Cosines, 0 … 1; nan where there are no two windows."""

    neighbours: float
    """Mean."""
    worst: float
    """Least of them."""
    any_two: float
    """Mean over all pairs."""


def histograms(lengths: IntArray, window: int) -> FloatArray:
    """Return histograms of unit length of whole windows, float64 [num_windows, NUM_BINS]."""
    num_windows = len(lengths) // window
    rows = lengths[: num_windows * window].reshape(num_windows, window)
    bins = np.clip(np.searchsorted(_EDGES, rows, side="right") - 1, 0, NUM_BINS - 1)
    counts = np.array([np.bincount(row, minlength=NUM_BINS) for row in bins], dtype=np.float64)
    counts = counts.reshape(num_windows, NUM_BINS)
    result: FloatArray = counts / np.maximum(1e-12, np.linalg.norm(counts, axis=1))[:, None]
    return result


def similarity(lengths: IntArray, window: int) -> Similarity:
    """Return how alike the windows of lengths, int64 [n], are."""
    rows = histograms(lengths, window)
    if len(rows) < 2:
        return Similarity(float("nan"), float("nan"), float("nan"))
    neighbours = [float(first @ second) for first, second in pairwise(rows)]
    cosines = rows @ rows.T
    any_two = cosines[np.triu_indices(len(rows), k=1)]
    return Similarity(float(np.mean(neighbours)), min(neighbours), float(any_two.mean()))


def of_keys(trace: Trace, window: int) -> float:
    """Return the mean over neighbours among the requests of one client; nan: there are none."""
    clients = np.array(trace.clients)
    cosines = [
        float(first @ second)
        for client in np.unique(clients[clients != ""])
        for first, second in pairwise(histograms(trace.output_tokens[clients == client], window))
    ]
    return float(np.mean(cosines)) if cosines else float("nan")


def rows_of(path: Path, windows: Sequence[int]) -> Iterator[tuple[int, Similarity, float]]:
    """Yield the figures of a trace for each size of windows that it has two of."""
    trace = read_trace(path)
    for window in windows:
        if len(trace.output_tokens) >= 2 * window:
            yield window, similarity(trace.output_tokens, window), of_keys(trace, window)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", type=Path, help="all of bench/traces by default")
    args = parser.parse_args()
    print_head("trace", "window", "neighbours", "least", "any two", "keys")
    for path in args.traces or sorted(TRACES.glob("*.csv.gz")):
        for window, cosines, keys in rows_of(path, WINDOWS):
            print_row(path.name.split(".")[0], window, *map(_shown, (*cosines, keys)))


def _shown(cosine: float) -> str:
    return "" if np.isnan(cosine) else f"{cosine:.3f}"


if __name__ == "__main__":
    main()
