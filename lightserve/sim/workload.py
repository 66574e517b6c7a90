"""Request lengths for the simulator: the papers' synthetic distributions and trace files.

A trace is a CSV, perhaps gzipped, with a header; the columns used are `prompt_tokens`,
`output_tokens` and, where present, `t` (seconds), `client`, `block_ids_512` (what prompts have in
common).
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightserve.errors import ConfigError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_GZIP = b"\x1f\x8b"
"""How such files begin, whatever they are called."""

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
    arrival_s: FloatArray
    """Ascending; all 0: they wait from the start."""

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def rows(self, start: int, stop: int) -> Workload:
        """Return a stretch of the rows."""
        return Workload(
            self.prompt_tokens[start:stop],
            self.output_tokens[start:stop],
            self.max_tokens[start:stop],
            self.clients[start:stop],
            self.arrival_s[start:stop],
        )

    def arriving(self, arrival_s: FloatArray) -> Workload:
        """Return the same rows with other times of arrival."""
        return dataclasses.replace(self, arrival_s=arrival_s)


def load_workload(
    spec: str,
    *,
    num_requests: int,
    rng: np.random.Generator,
    cut_outputs: bool = True,
    arrivals: str = "queued",
) -> Workload:
    """Return the rows of distributions and trace files, joined by + for a drift.

    Args:
        spec: `dist1`, `dist2`, `dist3`, `uniform:P1-P2:O1-O2` (prompts and outputs of P1 to P2 and
            O1 to O2 tokens) or a path; each contributes `num_requests` rows (a file at most all
            it has).
        num_requests: rows per part.
        rng: draws the distributions, then Poisson arrivals; files keep their order.
        cut_outputs: whether outputs end at `max_tokens` (the paper's artifact does not cut).
        arrivals: `queued` (all at 0), `trace` (the file's own times) or `poisson:RATE` (per
            second).

    Raises:
        ConfigError: an unknown name, or a file that is not such a trace.
    """
    parts = [_load_part(name, num_requests, rng) for name in spec.split("+")]
    times = _arrivals(
        arrivals, [part.arrival_s for part in parts], rng, sum(len(part.prompt) for part in parts)
    )
    workload = Workload(
        prompt_tokens=np.concatenate([part.prompt for part in parts]),
        output_tokens=np.concatenate([part.output for part in parts]),
        max_tokens=np.concatenate([part.limits for part in parts]),
        clients=tuple(client for part in parts for client in part.clients),
        arrival_s=times,
    )
    if not cut_outputs:
        return workload
    output = np.minimum(workload.output_tokens, workload.max_tokens)
    return dataclasses.replace(workload, output_tokens=output)


class _Part(NamedTuple):
    prompt: IntArray
    output: IntArray
    limits: IntArray
    clients: list[str]
    arrival_s: FloatArray | None


def _load_part(name: str, num_requests: int, rng: np.random.Generator) -> _Part:
    uniform = re.fullmatch(r"uniform:(\d+)-(\d+):(\d+)-(\d+)", name)
    if name in DISTRIBUTIONS or uniform:
        if uniform:
            p1, p2, o1, o2 = map(int, uniform.groups())
            if not (1 <= p1 <= p2 and 1 <= o1 <= o2):
                raise ConfigError(f"--workload: {name} needs ranges 1 <= low <= high")
            prompt_range, output_range, limit = (p1, p2), (o1, o2), o2
        else:
            (prompt_range, output_range), limit = DISTRIBUTIONS[name], DISTRIBUTION_MAX_TOKENS
        prompt = rng.integers(*prompt_range, size=num_requests, endpoint=True)
        output = rng.integers(*output_range, size=num_requests, endpoint=True)
        limits = np.full(num_requests, limit, dtype=np.int64)
        return _Part(prompt, output, limits, [""] * num_requests, None)
    trace = read_trace(Path(name))
    prompt, output, arrival_s = trace.prompt_tokens, trace.output_tokens, trace.arrival_s
    # The limit that a careful client of this service would set: it never cuts an answer.
    limits = np.full(len(prompt), next_power_of_two(int(output.max())))
    keep = slice(num_requests)
    times = None if arrival_s is None else arrival_s[keep] - arrival_s[0]
    return _Part(prompt[keep], output[keep], limits[keep], trace.clients[keep], times)


def next_power_of_two(number: int) -> int:
    """Return the least power of two that is not below."""
    return 1 << (number - 1).bit_length()


def _arrivals(
    spec: str, parts: Sequence[FloatArray | None], rng: np.random.Generator, num_rows: int
) -> FloatArray:
    """Return times of arrival, float64 [num_rows]. Raises ConfigError."""
    if spec == "queued":
        return np.zeros(num_rows)
    if spec == "trace":
        if len(parts) != 1 or parts[0] is None:
            raise ConfigError("--arrivals trace needs one --workload file with a column t")
        return parts[0]
    poisson = re.fullmatch(r"poisson:(\d+(\.\d+)?)", spec)
    if poisson is None or float(poisson[1]) == 0.0:
        raise ConfigError(
            "--arrivals must be queued, trace, poisson:RATE or closed:CLIENTS, above 0,"
            f" got {spec!r}"
        )
    return rng.exponential(1.0 / float(poisson[1]), num_rows).cumsum()


class Trace(NamedTuple):
    """The columns of a trace."""

    prompt_tokens: IntArray
    output_tokens: IntArray
    clients: list[str]
    """Empty strings where there are none."""
    arrival_s: FloatArray | None
    block_ids: list[str] | None
    """Ids of the prompts' blocks of 512 tokens: numbers and ranges a-b, separated by blanks."""


def read_trace(path: Path, *, flag: str = "--workload") -> Trace:
    """Read a trace; `flag` is the option to be named where it is not one.

    Raises:
        ConfigError: no such file, or a column is missing or not a positive number.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data.startswith(_GZIP) else data).decode("ascii")
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
        prompt, output = (
            np.array([int(row[column]) for row in rows], dtype=np.int64)
            for column in ("prompt_tokens", "output_tokens")
        )
        arrival_s = np.array([float(row["t"]) for row in rows]) if "t" in rows[0] else None
        block_ids = [row["block_ids_512"] for row in rows] if "block_ids_512" in rows[0] else None
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ConfigError(f"{flag}: {path} cannot be read: {error}") from error
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{flag}: {path} is not a trace: {error}") from error
    if prompt.min() < 1 or output.min() < 1:
        raise ConfigError(f"{flag}: {path} needs lengths >= 1")
    if arrival_s is not None and (np.diff(arrival_s) < 0).any():
        raise ConfigError(f"{flag}: {path} needs times in order")
    clients = [row.get("client") or "" for row in rows]
    return Trace(prompt, output, clients, arrival_s, block_ids)
