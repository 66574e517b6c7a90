"""Runs each part in a process of its own, within a time of its own. Torch-free.

A kernel that faults takes its process' whole CUDA context with it, and a kernel that hangs never
returns: neither may cost the other parts their figures.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.report import Row, Verdict, read_rows

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

    Those that are not timed come first, `at_once` of them at a time; then the others, one by one.
    """
    end_s = time.monotonic() + limit_s

    def run(job: Job) -> list[Row]:
        return run_job(job, out, left_s=end_s - time.monotonic())

    (out / "parts.log").write_bytes(b"")
    with ThreadPoolExecutor(at_once) as checks, ThreadPoolExecutor(1) as measurements:
        checked = {job.part: checks.submit(run, job) for job in jobs if not job.is_timed}
        measurements.submit(wait, checked.values())
        measured = {job.part: measurements.submit(run, job) for job in jobs if job.is_timed}
        found = checked | measured
        for job in jobs:
            yield found[job.part].result()


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
    if code is None:
        rows.append(_failure(job.part, f"ended after its {limit_s:.0f} s"))
    elif code != 0:
        rows.append(_failure(job.part, _error_of(output.decode(errors="replace"), code)))
    elif not rows:
        rows.append(_failure(job.part, "gave no figure"))
    print(f"{job.part}: {time.monotonic() - start_s:.0f} s", file=sys.stderr, flush=True)
    return rows


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
