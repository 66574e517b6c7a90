"""A real `lightserve serve` with the bundled model, as a subprocess."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

import httpx
import psutil

from support.processes import PATIENCE_S, wait_for, wait_gone

_READY_LINE = re.compile(r"lightserve: ready on (?P<url>\S+) \(model (?P<model>\S+)\)\n")
_METRICS_LINE = re.compile(r"metrics on (http\S+)\n")
_ROLE = re.compile(r"(frontend|batches|router|worker)-\d+")
_GRAMMARS = re.compile(r"lightserve\.(worker\.matchers|grammar_process)")


_SERVE = (
    *(sys.executable, "-m", "lightserve.cli.main", "serve"),
    *("--port=0", "--metrics-port=0", "--num-threads=1", "--profile=off", "--batch-store=none"),
)


class LiveServer:
    """A server that has been started; `wait_ready` before anything else."""

    def __init__(
        self,
        flags: Sequence[str],
        run_parent: Path,
        verify: ssl.SSLContext | bool = True,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._verify = verify
        self.run_parent = run_parent
        self._may_read = threading.Event()
        self._may_read.set()
        self._out: list[str] = []
        self._err: list[str] = []
        self.process = subprocess.Popen(
            [*_SERVE, "--run-dir", str(run_parent), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        self._readers = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in ((self.process.stdout, self._out), (self.process.stderr, self._err))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def stdout(self) -> str:
        """What has been printed so far."""
        return "".join(self._out)

    @property
    def stderr(self) -> str:
        """What has been logged so far."""
        return "".join(self._err)

    def stop_reading_log(self) -> None:
        """Leave what is logged from now on in its pipe, which becomes as small as can be."""
        assert self.process.stderr is not None
        self._may_read.clear()
        fcntl.fcntl(self.process.stderr, fcntl.F_SETPIPE_SZ, 4096)

    def go_on_reading_log(self) -> None:
        """Read again."""
        self._may_read.set()

    @property
    def url(self) -> str:
        """The address in the ready line."""
        return self._ready_line["url"]

    @property
    def model(self) -> str:
        """The model name in the ready line."""
        return self._ready_line["model"]

    @property
    def metrics_url(self) -> str:
        """Where the supervisor serves metrics, as it logs."""
        match = _METRICS_LINE.search(self.stderr)
        assert match is not None, self.stderr
        return match[1]

    @property
    def _ready_line(self) -> re.Match[str]:
        match = _READY_LINE.match(self.stdout)
        assert match is not None, self.stdout + self.stderr
        return match

    def wait_ready(self) -> None:
        """Wait for the banner, and until requests are taken."""
        wait_for(
            lambda: self.stdout.count("\n\n") >= 2 or self.process.poll() is not None,
            "the banner",
        )
        assert self.process.poll() is None, self.stderr
        self.wait_readyz()

    def wait_readyz(self) -> None:
        """Wait until /readyz says yes; with several frontends, some one's."""
        wait_for(self.is_ready, "ready")

    @contextmanager
    def healing(self) -> Iterator[None]:
        """Within it a process is lost; at its end, wait until every frontend takes requests again.

        A frontend's own word would not do: it may not have heard of the loss, nor be the only one.
        """
        num_times = self._num_times_whole
        yield
        wait_for(lambda: self._num_times_whole > num_times, "all processes")

    @property
    def _num_times_whole(self) -> int:
        return self.stderr.count("all processes ready after")

    def is_ready(self) -> bool:
        """Whether /readyz says yes."""
        try:
            url = f"{self.url}/readyz"
            return httpx.get(url, timeout=300.0, verify=self._verify).status_code == 200
        except httpx.HTTPError:
            return False

    def metrics(self, headers: Mapping[str, str] = MappingProxyType({})) -> str:
        """Return what the main port says at /metrics, as soon as the supervisor is not too busy."""

        def probe() -> str:
            url = f"{self.url}/metrics"
            answer = httpx.get(url, headers=headers, timeout=300.0, verify=self._verify)
            assert answer.status_code in (200, 503), answer.text
            return answer.text if answer.status_code == 200 else ""

        return wait_for(probe, "metrics")

    def tree(self) -> dict[str, psutil.Process]:
        """Return the processes by role: "supervisor", "router-0", "worker-0", …

        What compiles constraints for another is named by that one: "grammars of worker-0".
        """
        supervisor = psutil.Process(self.process.pid)
        roles = {"supervisor": supervisor}
        for child in supervisor.children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # gone meanwhile
                command = " ".join(child.cmdline())
                match = _ROLE.search(command)
                if match is None and _GRAMMARS.search(command):
                    parent = _ROLE.search(" ".join(psutil.Process(child.ppid()).cmdline()))
                    roles[f"grammars of {parent and parent.group()}"] = child
                else:  # a child that is about to be another program has its parent's command
                    roles.setdefault(match.group() if match else f"unknown-{child.pid}", child)
        return roles

    def pids(self) -> list[int]:
        """Return the ids of all processes."""
        return [process.pid for process in self.tree().values()]

    def stop(self, signum: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end of everything and its output; return the exit code."""
        pids = self.pids() if self.process.poll() is None else []
        self.process.send_signal(signum)
        exit_code = self.process.wait(PATIENCE_S)
        wait_gone(pids)
        self._read_rest()
        return exit_code

    def close(self) -> None:
        """Read what is left of the output of an ended server."""
        self._read_rest()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def _read_rest(self) -> None:
        for reader in self._readers:
            reader.join(PATIENCE_S)
            assert not reader.is_alive(), "a process has the server's output open"

    def _read(self, stream: Iterable[str], lines: list[str]) -> None:
        for line in stream:  # not extend: others look at the lines meanwhile
            lines.append(line)
            if lines is self._err:
                self._may_read.wait()


@contextmanager
def live_server(
    run_parent: Path,
    *flags: str,
    verify: ssl.SSLContext | bool = True,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[LiveServer]:
    """Run a server that is ready; whatever happens, nothing of it is left afterwards.

    Its run directory lies alone in a new directory under `run_parent`.
    """
    own_parent = Path(tempfile.mkdtemp(dir=run_parent))
    own_parent.chmod(0o755)
    server = LiveServer(flags, own_parent, verify, environment)
    try:
        server.wait_ready()
        yield server
    finally:
        pids = server.pids() if server.process.poll() is None else []
        server.process.kill()
        server.go_on_reading_log()
        server.process.wait(PATIENCE_S)
        wait_gone(pids)
        server.close()
