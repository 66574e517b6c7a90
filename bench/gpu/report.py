"""Rows of the table: a figure, its target, and whether it was met. Torch-free.

A part writes its rows to a file of JSON lines as it goes, so that those before a crash count.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path


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


def markdown(rows: Iterable[Row]) -> str:
    """Return the table."""
    return "\n".join((HEAD, *(markdown_row(row) for row in rows)))


def exit_status(rows: Sequence[Row]) -> int:
    """Return 2 if anything failed, 1 if a target was missed, else 0."""
    verdicts = {row.verdict for row in rows}
    if Verdict.FAILED in verdicts:
        return 2
    return 1 if Verdict.MISSED in verdicts else 0
