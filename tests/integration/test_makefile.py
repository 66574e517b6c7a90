"""The Makefile's stamps, with commands that only print."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import lightserve

ROOT = Path(lightserve.__file__).parents[1]
OF_OUTER_MAKE = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}
"""What `make test` would hand on."""


def _install(venv: Path, torch: str) -> list[str]:
    """Have everything for `make serve` installed; returns what pip would have been given."""
    settings = [f"VENV={venv}", f"TORCH={torch}", "PYTHON=true", "PIP=@echo install"]
    done = subprocess.run(
        ["make", str(venv / ".has-serve"), *settings],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    lines = done.stdout.splitlines()
    return [line.split(" ", 1)[1] for line in lines if line.startswith("install ")]


def test_each_change_of_torch_installs_it_and_no_other_time_does(tmp_path: Path) -> None:
    first = [_install(tmp_path, torch) for torch in ("torch==2", "torch==1", "torch==2")]
    assert first == [["torch==2", "-e ."], ["torch==1", "-e ."], ["torch==2", "-e ."]]
    assert _install(tmp_path, "torch==2") == []


def _dry_run(*arguments: str) -> str:
    done = subprocess.run(
        ["make", "--dry-run", "PYTHON=python-of-it", *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in OF_OUTER_MAKE},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    return done.stdout


def test_the_gpu_check_with_wheels_fetches_nothing() -> None:
    commands = _dry_run("gpu-check", "WHEELS=some-wheels", "GPU_OUT=there", "ARGS=ceilings")
    assert "python-of-it -m pip install" in commands and "some-wheels/*.whl" in commands
    assert "--no-index" in commands and "--no-deps" in commands and "venv" not in commands
    assert commands.rstrip().endswith("python-of-it bench/gpu.py --out there ceilings")


def test_wheels_for_the_gpu_check_are_downloaded_for_its_python() -> None:
    commands = _dry_run("gpu-wheels", "WHEELS_FOR=3.13")
    assert "pip download" in commands and "--python-version 3.13" in commands
    assert "--dest .whl --requirement bench/gpu_wheels.txt" in commands
