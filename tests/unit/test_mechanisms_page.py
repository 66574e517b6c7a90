"""The page of the papers' mechanisms names files and tests that are there, one row for each."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from bench.scheduling.papers import GROUNDS
from lightserve.config import ServeConfig
from lightserve.sim.offline import OfflineConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "mechanisms.md").read_text()
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in PAGE.splitlines()
    if line.startswith("|") and not line.startswith(("| mechanism", "| ---"))
]
OPTIONS = {field.name for of in (ServeConfig, OfflineConfig) for field in dataclasses.fields(of)}


def test_every_mechanism_has_a_row() -> None:
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    counts = {text.split("\n")[0]: text.count("\n| ") - 2 for text in sections}
    assert counts == {"BROS": 19, "Echo": 14, "AccelGen": 16, "Past-Future": 13}


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_files_and_tests_are_there(row: tuple[str, ...]) -> None:
    _, where, runs, test = row
    paths = [name for name in re.findall(r"`([^`]+)`", where) if "/" in name or ".py" in name]
    assert paths, "no file is named"
    for path in paths:
        assert (ROOT / path).exists(), path
    assert runs.split(",")[0] in ("live", "simulated", "on traces")
    for flag in re.findall(r"`--([a-z-]+)", where):
        assert flag.replace("-", "_") in OPTIONS, flag
    for ground in re.findall(r"`bench/scheduling/papers.py` \(`([a-z-]+)`\)", where):
        assert ground in GROUNDS, ground
    file, function = re.findall(r"`([^`]+)`", test)
    assert f"def {function}(" in (ROOT / file).read_text(), test
