"""A server over hours, as `make test-long` runs it: see bench/faults/soak.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lightserve

ROOT = Path(lightserve.__file__).parents[1]
MINUTES = os.environ.get("SOAK_MINUTES", "120")

pytestmark = [pytest.mark.long, pytest.mark.soak, pytest.mark.timeout(0)]


def test_nothing_grows() -> None:
    command = [sys.executable, "-m", "bench.faults.soak", "--minutes", MINUTES]
    subprocess.run(command, cwd=ROOT, check=True)
