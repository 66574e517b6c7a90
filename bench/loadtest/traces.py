"""Reads the trace files of bench/traces (its README has columns and sources), or others like them.

A trace is a CSV, perhaps gzipped, with a header: `prompt_tokens` and `output_tokens` (each at
least 1) and, where known, `t` (seconds, ascending) and `block_ids_512` (ids of the prompt's
512-token blocks, separated by spaces, runs as `a-b`; equal ids at equal places are shared).
"""

from __future__ import annotations

import csv
import gzip
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from .arrivals import FloatArray
from .errors import LoadTestError
from .lengths import IntArray

TRACE_DIR = Path(__file__).resolve().parent.parent / "traces"
BLOCK_TOKENS = 512
_SUFFIX = ".csv.gz"


@dataclass(frozen=True)
class Trace:
    """Rows of a trace, in order."""

    prompt_tokens: IntArray
    output_tokens: IntArray
    times_s: FloatArray | None
    blocks: tuple[tuple[int, ...], ...] | None
    """Ids of each prompt's blocks of `BLOCK_TOKENS` tokens."""

    def __len__(self) -> int:
        return len(self.prompt_tokens)


def trace_names() -> list[str]:
    """Return the traces that can be named without a path."""
    return sorted(path.name.removesuffix(_SUFFIX) for path in TRACE_DIR.glob("*" + _SUFFIX))


def read_trace(name_or_path: str, *, first_row: int = 0, num_rows: int | None = None) -> Trace:
    """Read rows of a trace. Raises LoadTestError: no such file, or not a trace."""
    path = Path(name_or_path)
    if not path.exists() and (named := TRACE_DIR / f"{name_or_path}{_SUFFIX}").exists():
        path = named
    stop = None if num_rows is None else first_row + num_rows
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as stream:
            rows = list(islice(csv.DictReader(stream), first_row, stop))
        trace = _from_rows(rows)
    except (OSError, EOFError) as error:
        known = ", ".join(trace_names())
        raise LoadTestError(f"trace {name_or_path!r}: {error}. Traces here: {known}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise LoadTestError(f"{path} is not a trace: {error!r}") from error
    return trace


def _from_rows(rows: list[dict[str, str]]) -> Trace:
    if not rows:
        raise ValueError("no rows")
    prompt, output = (
        np.array([int(row[column]) for row in rows], dtype=np.int64)
        for column in ("prompt_tokens", "output_tokens")
    )
    if prompt.min() < 1 or output.min() < 1:
        raise ValueError("lengths start at 1")
    times = np.array([float(row["t"]) for row in rows]) if "t" in rows[0] else None
    if times is not None and np.any(np.diff(times) < 0):
        raise ValueError("times go back")
    blocks = None
    if "block_ids_512" in rows[0]:
        blocks = tuple(_block_ids(row["block_ids_512"]) for row in rows)
    return Trace(prompt, output, times, blocks)


def _block_ids(text: str) -> tuple[int, ...]:
    ids: list[int] = []
    for run in text.split():
        first, _, last = run.partition("-")
        ids.extend(range(int(first), int(last or first) + 1))
    return tuple(ids)
