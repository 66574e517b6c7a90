"""Servers that benchmarks start, with a program in their place that does nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.processes import PATIENCE_S

ROOT = Path(__file__).parents[3]
STAND_IN = "print('lightserve: ready on http://127.0.0.1:1 (model m)', flush=True); input()"
PROGRAM = f"""
import sys, time
from bench.serving.server import running_server
with running_server(prefix=[sys.executable, "-c", {STAND_IN!r}]) as server:
    print(server.process.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_the_benchmark_that_is_killed(signum: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stdin=subprocess.PIPE, cwd=ROOT
    ) as program:
        assert program.stdout is not None
        server = psutil.Process(int(program.stdout.readline()))
        program.send_signal(signum)
        assert program.wait(PATIENCE_S) == -signum
        server.wait(PATIENCE_S)
