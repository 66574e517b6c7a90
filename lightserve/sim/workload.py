"""Request lengths for the simulator: the papers' synthetic distributions and trace files.

A trace is a gzip CSV with a header; the columns used are `prompt_tokens`, `output_tokens` and,
where present, `t` (seconds), `client`.
"""

from __future__ import annotations

import csv
import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lightserve.errors import ConfigError

IntArray = npt.NDArray[np.int64]

DISTRIBUTIONS = {
    "dist1": ((32, 4096), (2048, 4096)),
    "dist2": ((3000, 5000), (3000, 5000)),
    "dist3": ((2048, 4096), (32, 4096)),
}
"""Past-Future's Distribution-1/2/3: uniform (prompt, output) lengths, both ends included."""

DISTRIBUTION_MAX_TOKENS = 4096


@dataclass(frozen=True)
class Workload:
    """Rows of requests, in order."""

    prompt_tokens: IntArray
    output_tokens: IntArray
    max_tokens: IntArray
    """What the client declares; outputs are cut there."""
    clients: tuple[str, ...]
    """Prediction keys; empty strings where a trace has none."""

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def rows(self, start: int, stop: int) -> Workload:
        """Return a stretch of the rows."""
        return Workload(
            self.prompt_tokens[start:stop],
            self.output_tokens[start:stop],
            self.max_tokens[start:stop],
            self.clients[start:stop],
        )


def load_workload(
    spec: str, *, num_requests: int, rng: np.random.Generator, cut_outputs: bool = True
) -> Workload:
    """Return the rows of `dist1`, `dist2`, `dist3` or a trace file, joined by + for a drift.

    Args:
        spec: names or paths; each contributes `num_requests` rows (a file at most all it has).
        num_requests: rows per part.
        rng: draws the distributions; files keep their order.
        cut_outputs: whether outputs end at `max_tokens` (the paper's artifact does not cut).

    Raises:
        ConfigError: an unknown name, or a file that is not such a trace.
    """
    parts = [_load_part(name, num_requests, rng) for name in spec.split("+")]
    prompt, output, max_tokens = (
        np.concatenate(columns) for columns in zip(*(part[:3] for part in parts), strict=True)
    )
    if cut_outputs:
        output = np.minimum(output, max_tokens)
    return Workload(prompt, output, max_tokens, tuple(c for part in parts for c in part[3]))


_Part = tuple[IntArray, IntArray, IntArray, list[str]]


def _load_part(name: str, num_requests: int, rng: np.random.Generator) -> _Part:
    if name in DISTRIBUTIONS:
        prompt_range, output_range = DISTRIBUTIONS[name]
        prompt = rng.integers(*prompt_range, size=num_requests, endpoint=True)
        output = rng.integers(*output_range, size=num_requests, endpoint=True)
        limits = np.full(num_requests, DISTRIBUTION_MAX_TOKENS, dtype=np.int64)
        return prompt, output, limits, [""] * num_requests
    prompt, output, clients = read_trace(Path(name))
    # The limit that a careful client of this service would set: it never cuts an answer.
    limit = 1 << int(np.ceil(np.log2(output.max())))
    limits = np.full(len(prompt), limit, dtype=np.int64)
    return (*(column[:num_requests] for column in (prompt, output, limits)), clients[:num_requests])  # type: ignore[return-value]


def read_trace(path: Path) -> tuple[IntArray, IntArray, list[str]]:
    """Read prompt lengths, output lengths and clients of a trace file.

    Raises:
        ConfigError: no such file, or a column is missing or not a positive number.
    """
    try:
        with gzip.open(path, "rt", encoding="ascii", newline="") as stream:
            rows = list(csv.DictReader(stream))
        prompt, output = (
            np.array([int(row[column]) for row in rows], dtype=np.int64)
            for column in ("prompt_tokens", "output_tokens")
        )
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"--workload: {path} cannot be read: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--workload: {path} is not a trace: {error}") from error
    if len(rows) == 0 or prompt.min() < 1 or output.min() < 1:
        raise ConfigError(f"--workload: {path} needs rows of lengths >= 1")
    return prompt, output, [row.get("client") or "" for row in rows]
