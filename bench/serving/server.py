"""Starts a real server for a benchmark and looks at its processes from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
import psutil

READY_PREFIX = "lightserve: ready on "


@dataclass(frozen=True)
class Server:
    """A running `lightserve serve`."""

    url: str
    model: str
    process: subprocess.Popen[str]

    def tree(self) -> dict[str, psutil.Process]:
        """Return the server's processes by role, such as "router" or "worker-0"."""
        roles = {"supervisor": psutil.Process(self.process.pid)}
        for child in roles["supervisor"].children(recursive=True):
            roles[child.name() if child.name() not in roles else f"{child.name()}-{child.pid}"] = (
                child
            )
        return roles

    def health(self) -> dict[str, float]:
        """Return /health once the router has reported anew (it does so once a second)."""
        time.sleep(1.2)
        answer: dict[str, float] = httpx.get(f"{self.url}/health").json()
        return answer


@contextmanager
def running_server(
    args: Sequence[str] = (), *, prefix: Sequence[str] = (), log: IO[str] | None = None
) -> Iterator[Server]:
    """Start a server with the bundled model on a free port; end it with SIGTERM.

    `prefix` is a command that becomes the server, such as `prlimit`; `log` gets its stderr.
    """
    ports = ["--port", "0", "--metrics-port", "0"]
    command = [*prefix, sys.executable, "-m", "lightserve.cli.main", "serve", *ports, *args]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ.copy()
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(READY_PREFIX):
                url, model = (
                    line.removeprefix(READY_PREFIX).strip().removesuffix(")").split(" (model ")
                )
                yield Server(url, model, process)
                return
        raise SystemExit(f"the server did not start: exit code {process.wait()}")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def loaded_libraries(process: psutil.Process) -> set[str]:
    """Return the names of the shared libraries that a process has mapped."""
    return {Path(part.path).name for part in process.memory_maps()}
