"""The Makefile's stamps, with commands that only print."""

from __future__ import annotations

import subprocess
from pathlib import Path

import lightserve

ROOT = Path(lightserve.__file__).parents[1]


def _install(venv: Path, torch: str) -> list[str]:
    """Have everything for `make serve` installed; returns what pip would have been given."""
    settings = [f"VENV={venv}", f"TORCH={torch}", "PYTHON=true", "PIP=@echo install"]
    done = subprocess.run(
        ["make", str(venv / ".has-serve"), *settings],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = done.stdout.splitlines()
    return [line.split(" ", 1)[1] for line in lines if line.startswith("install ")]


def test_each_change_of_torch_installs_it_and_no_other_time_does(tmp_path: Path) -> None:
    first = [_install(tmp_path, torch) for torch in ("torch==2", "torch==1", "torch==2")]
    assert first == [["torch==2", "-e ."], ["torch==1", "-e ."], ["torch==2", "-e ."]]
    assert _install(tmp_path, "torch==2") == []
