"""Rows of the table: a figure, its target, and whether it was met. Torch-free.

A part writes its rows to a file of JSON lines as it goes, so that those before a crash count.

Each part runs in a process of its own, within a time of its own: a kernel that faults takes its
process' whole CUDA context with it, and one that hangs never returns; neither may cost the other
parts their figures.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.gpu.device import Machine


class Verdict(StrEnum):
    """What is said of a row."""

    MET = "met"
    MISSED = "MISSED"
    FAILED = "FAILED"
    """There is no figure: the part raised, hung, or found something wrong."""
    REHEARSED = "rehearsed"
    """A figure of the machinery, not of a GPU: never judged."""
    REPORTED = ""
    """A figure without a target."""
    SKIPPED = "not run"
    """Cannot be had on this machine."""


@dataclass(frozen=True)
class Row:
    """One line."""

    part: str
    name: str
    value: float | None
    unit: str
    target: str
    verdict: Verdict
    note: str = ""


def judged(value: float, *, at_least: float | None, at_most: float | None) -> tuple[str, Verdict]:
    """Return a target in words and whether `value` meets it; NaN meets nothing."""
    if at_least is not None:
        return f">= {at_least:g}", Verdict.MET if value >= at_least else Verdict.MISSED
    if at_most is not None:
        return f"<= {at_most:g}", Verdict.MET if value <= at_most else Verdict.MISSED
    return "", Verdict.REPORTED if math.isfinite(value) else Verdict.FAILED


class RowFile:
    """Appends the rows of one part; every row is on the disk when `add` returns."""

    def __init__(self, path: Path, part: str, *, is_rehearsal: bool) -> None:
        self._path, self._part, self._is_rehearsal = path, part, is_rehearsal

    def figure(
        self,
        name: str,
        value: float,
        unit: str = "",
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        note: str = "",
    ) -> None:
        """Add a measured figure and judge it, unless this is a rehearsal."""
        target, verdict = judged(value, at_least=at_least, at_most=at_most)
        if self._is_rehearsal:
            verdict = Verdict.REHEARSED
        self._add(Row(self._part, name, value, unit, target, verdict, note))

    def claim(self, name: str, is_true: bool, note: str) -> None:
        """Add something that is right or wrong, in a rehearsal as well."""
        verdict = Verdict.MET if is_true else Verdict.FAILED
        self._add(Row(self._part, name, None, "", "holds", verdict, note))

    def skip(self, name: str, why: str) -> None:
        """Add what this machine cannot show."""
        self._add(Row(self._part, name, None, "", "", Verdict.SKIPPED, why))

    def _add(self, row: Row) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        print(markdown_row(row), flush=True)


def read_rows(path: Path) -> list[Row]:
    """Return the whole rows of a part's file; none if it wrote none."""
    if not path.is_file():
        return []
    lines = path.read_text().split("\n")[:-1]  # a killed part may have left half a line
    values = [json.loads(line) for line in lines]
    return [Row(**{**value, "verdict": Verdict(value["verdict"])}) for value in values]


HEAD = "| part | figure | value | target | |\n| --- | --- | --- | --- | --- |"


def markdown_row(row: Row) -> str:
    """Return a row of the table."""
    value = "" if row.value is None else f"{row.value:.4g} {row.unit}".rstrip()
    name = f"{row.name} ({row.note})" if row.note else row.name
    return f"| {row.part} | {name} | {value} | {row.target} | {row.verdict} |"


def summary(rows: Sequence[Row]) -> str:
    """Return how many targets were met, and the rows of those that were not."""
    counts = Counter(row.verdict for row in rows if row.verdict is not Verdict.REPORTED)
    numbers = ", ".join(f"{verdict} {number}" for verdict, number in counts.items())
    bad = [row for row in rows if row.verdict in (Verdict.MISSED, Verdict.FAILED)]
    return "\n".join((f"\n{numbers}", *(markdown_row(row) for row in bad)))


def exit_status(rows: Sequence[Row]) -> int:
    """Return 2 if anything failed, 1 if a target was missed, else 0."""
    verdicts = {row.verdict for row in rows}
    if Verdict.FAILED in verdicts:
        return 2
    return 1 if Verdict.MISSED in verdicts else 0


MIN_PART_S = 5.0
"""With less time left a part is not begun."""
ERROR_CHARS = 300


@dataclass(frozen=True)
class Job:
    """How to start a part: a command line that takes the file for its rows last."""

    part: str
    command: Sequence[str]
    limit_s: float
    env: dict[str, str]
    is_timed: bool = True
    """Whether its figures need the machine for itself."""


def run_jobs(
    jobs: Sequence[Job], out: Path, *, limit_s: float, at_once: int
) -> Iterator[list[Row]]:
    """Run all parts within `limit_s`; yield the rows of each, in order, as soon as they are there.

    Parts that are timed run alone. Those that are not, and follow each other, run beside each
    other, `at_once` of them at a time.
    """
    end_s = time.monotonic() + limit_s

    def run(job: Job) -> list[Row]:
        return run_job(job, out, left_s=end_s - time.monotonic())

    (out / "parts.log").write_bytes(b"")
    for is_timed, group in groupby(jobs, key=lambda job: job.is_timed):
        if is_timed:
            yield from map(run, group)
            continue
        with ThreadPoolExecutor(at_once) as pool:
            yield from pool.map(run, list(group))


def run_job(job: Job, out: Path, *, left_s: float) -> list[Row]:
    """Run one part; return its rows, and one more if it failed.

    Its output goes to the end of `out`/parts.log. Whatever it started ends with it.
    """
    if left_s < MIN_PART_S:
        return [_failure(job.part, "not begun: the time is up")]
    rows_path, log_path = out / f"{job.part}.rows", out / f"{job.part}.log"
    rows_path.unlink(missing_ok=True)
    limit_s, start_s = min(job.limit_s, left_s), time.monotonic()
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*job.command, str(rows_path)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | job.env,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(process)
    output = log_path.read_bytes()
    with (out / "parts.log").open("ab") as parts_log:
        parts_log.write(output)
    log_path.unlink()
    rows = read_rows(rows_path)
    rows_path.unlink(missing_ok=True)
    seconds = time.monotonic() - start_s
    if code is None:
        rows.append(_failure(job.part, f"ended after its {limit_s:.0f} s"))
    elif code != 0:
        rows.append(_failure(job.part, _error_of(output.decode(errors="replace"), code)))
    elif not rows:
        rows.append(_failure(job.part, "gave no figure"))
    return [*rows, Row(job.part, "the part", round(seconds, 1), "s", "", Verdict.REPORTED)]


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the part's own process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _error_of(output: str, code: int) -> str:
    """Return the line of an output that says what went wrong: an exception's, else the last."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if _is_error(line)]
    line = (errors or lines or [""])[-1]
    return f"exit code {code}: {line}"[:ERROR_CHARS].replace("|", "/")


def _is_error(line: str) -> bool:
    name = line.partition(":")[0]
    return name.replace(".", "").isidentifier() and name.endswith(("Error", "Exception", "Exit"))


def _failure(part: str, note: str) -> Row:
    return Row(part, "the part", None, "", "ends well", Verdict.FAILED, note)


@dataclass(frozen=True)
class Bench:
    """The machine, where rows go, and where files may go."""

    machine: Machine
    rows: RowFile
    out: Path
    shared: Path
    """What parts share, of a size that stays on the machine: weights, caches of servers."""
    rehearse: bool
    """Tiny sizes, on the CPU."""
