"""What must be so before any test module is imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

# One thread each for torch, also in what tests start: their models are so small that two threads
# cost more than they bring, and beside another process (pytest -n 2) four times as much.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from support import grids

if not torch.cuda.is_available():
    # Triton's kernels run in its interpreter, which must be known before triton is imported.
    os.environ["TRITON_INTERPRET"] = "1"

# Servers that are told of no batch store have theirs there, and not where the user's own ones lie.
_STATE = tempfile.TemporaryDirectory(prefix="ls-state-")
os.environ["XDG_STATE_HOME"] = _STATE.name

# The native core as its sources are now: at once where `pip install` has built it.
_BUILD = "import setup; setup.build_core(setup.CPU)"
subprocess.run([sys.executable, "-c", _BUILD], cwd=Path(__file__).parents[1], check=True)

# Under nohup and in background jobs these are ignored, and servers that tests start would inherit
# that and, as they should, go on ignoring them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The same examples in every run, so that a change is judged by what it changed; others on demand:
# HYPOTHESIS_PROFILE=random. How fast the machine is at the moment proves nothing.
_ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", _ANY_SPEED, derandomize=True)
settings.register_profile("random", _ANY_SPEED, derandomize=False)
_PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "same")
settings.load_profile(_PROFILE)
if _PROFILE == "same":
    # Hypothesis would draw constants of all code that is imported by then, too: other examples
    # after any change of it, or in another order of tests.
    providers.is_local_module_file = lambda path: False


def pytest_configure(config: pytest.Config) -> None:
    """Let grids of cases know how long this run may be."""
    grids.note_run(config.option.markexpr)


def pytest_runtest_setup() -> None:
    """Have each test draw the same tensors, whatever ran before it."""
    torch.manual_seed(0)
