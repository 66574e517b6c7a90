"""Rows of the table of margins name numbers that the router has, and leave them as they were."""

from __future__ import annotations

import pytest

from bench.scheduling.margins import NEUTRAL, neutral
from lightserve.router.policies import unified


def test_rows_name_numbers_that_there_are() -> None:
    for numbers in NEUTRAL.values():
        with neutral(numbers):
            pass


def test_a_number_is_changed_where_it_is_read_and_given_back() -> None:
    before = unified.MAX_SHARE
    with neutral({"unified.MAX_SHARE": 7.0}):
        changed = unified.MAX_SHARE
    assert (changed, unified.MAX_SHARE) == (7.0, before)
    with pytest.raises(KeyError), neutral({"nowhere.MAX_SHARE": 7.0}):
        pass
