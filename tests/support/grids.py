"""Grids of cases: `make test` has a few that meet every value, `make test-long` has them all."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest

Value = TypeVar("Value")
Test = TypeVar("Test")


class Run:
    """Of which tests this run is."""

    is_long = False


def note_run(marks: str) -> None:
    """Learn from the expression of `pytest -m` which tests are to run, before any is imported."""
    Run.is_long = "long" in marks and "not long" not in marks


def choose(quick: Value, long: Value) -> Value:
    """Return how many examples, seeds or seconds a test of this run takes."""
    return long if Run.is_long else quick


def more_when_long(test: Test) -> Test:
    """Have a test that chooses how much it tries run again in a long run."""
    return pytest.mark.long(test) if Run.is_long else test


def long_unless(is_quick: bool) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of a case; in a long run all are long, as each is tried more often there."""
    return () if is_quick and not Run.is_long else (pytest.mark.long,)


def long_but(cases: Iterable[Any], quick: Iterable[Any]) -> list[Any]:
    """Return cases for `parametrize`, tuples of values, of which some are in `make test`."""
    few = list(quick)
    return [pytest.param(*case, marks=long_unless(case in few)) for case in cases]


def every_value(*axes: Sequence[Any]) -> list[Any]:
    """Return the product of axes, of which so few are in `make test` that each value is in one."""
    few = [
        tuple(axis[(i + i // len(axis) * j) % len(axis)] for j, axis in enumerate(axes))
        for i in range(max(map(len, axes)))
    ]
    return long_but(itertools.product(*axes), few)
