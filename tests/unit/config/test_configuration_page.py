"""docs/configuration.md is what the declaration says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import lightserve
from lightserve.config import ServeConfig
from lightserve.config.fields import flag_name
from tools.config_page import document


def test_the_page_is_up_to_date() -> None:
    page = Path(lightserve.__file__).parents[1] / "docs" / "configuration.md"
    assert page.read_text() == document(), "python -m tools.config_page > docs/configuration.md"


def test_the_page_has_a_whole_row_for_every_option() -> None:
    rows = [line for line in document().splitlines() if line.startswith("| `--")]
    for row, spec in zip(rows, dataclasses.fields(ServeConfig), strict=True):
        assert row.startswith(f"| `{flag_name(spec.name)}` |")
        assert row.replace(r"\|", "").count("|") == 6
        assert str(Path(lightserve.__file__).parent) not in row
