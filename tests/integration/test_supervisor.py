"""The supervisor with scripted children: every death, every message, every exit code.

The rules by themselves are tested without processes (`test_fleet.py`); what only repeats one of
them with processes is for the long run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import scripted_child
from support.grids import long_but
from support.model_files import write_model_files
from support.processes import PATIENCE_S, is_running, wait_for, wait_gone

from lightserve.supervisor.spawn import RunDir, remove_stale

DRIVER = """
import json, sys, time, types
from pathlib import Path
from lightserve.cli import main, serve
from lightserve.supervisor import fleet, loop
folder = Path(sys.argv.pop(1))
real_serve, options = loop.serve, json.loads(sys.argv.pop(1))
options["command"] = (sys.executable, *options["command"])
on_ready = fleet.Fleet._on_ready
def note_ready(self, child):
    on_ready(self, child)
    (folder / f"known-{child.name}-{child.spec.incarnation}").touch()
fleet.Fleet._on_ready = note_ready
later = folder / "later"
clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + 1000.0 * later.exists())
fleet.time = loop.time = clock
loop.serve = lambda config, origins: real_serve(config, origins=origins, **options)
main.main(sys.argv[1:])
"""


class Server:
    """A real supervisor process over scripted children, whose clock can be put forward."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        script: dict[str, str],
        flags: list[str],
        options: dict[str, float],
    ) -> None:
        self.folder = folder
        # Not under `folder`: the path of a socket has 107 bytes at most.
        self.run_parent = Path(tempfile.mkdtemp(prefix="ls-run-"))
        (folder / "script.json").write_text(json.dumps(script))
        command = [scripted_child.__file__, str(folder)]
        driver_options = json.dumps({"command": command, **options})
        arguments = ["serve", "--model", str(model), "--run-dir", str(self.run_parent)]
        arguments += ["--metrics-port", "0", "--batch-store", "none"]
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", DRIVER, str(folder), driver_options),
                *(*arguments, "--port", "0", *flags),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def journal(
        self, event: str, name: str = "", incarnation: int | None = None, boot: int | None = None
    ) -> list[Any]:
        """Return the journal's entries of this kind."""
        return [
            entry
            for entry in scripted_child.read_journal(self.folder)
            if entry["event"] == event
            and name in ("", entry["name"])
            and incarnation in (None, entry["incarnation"])
            and boot in (None, entry["boot"])
        ]

    def wait_event(
        self, event: str, name: str, incarnation: int = 0, boot: int | None = None
    ) -> Any:
        """Wait for the first such entry and return it."""
        probe = lambda: self.journal(event, name, incarnation, boot)  # noqa: E731
        return wait_for(probe, f"{event} of {name}/{incarnation}")[0]

    def wait_message(self, name: str, kind: str, incarnation: int = 0) -> Any:
        """Wait until a child has had a message of this kind and return it."""

        def probe() -> list[Any]:
            entries = self.journal("message", name, incarnation)
            return [e["message"] for e in entries if e["message"]["type"] == kind]

        return wait_for(probe, f"{kind} to {name}/{incarnation}")[0]

    def wait_banner(self) -> str:
        """Wait until the server says that it is ready and return that line."""
        assert self.process.stdout is not None
        line: str = self.process.stdout.readline()
        assert line.startswith("lightserve: ready on http://127.0.0.1:"), self.finish()
        return line

    def wait_known(self, *names: str, incarnation: int = 0) -> None:
        """Wait until the supervisor knows that these children are ready."""
        paths = [self.folder / f"known-{name}-{incarnation}" for name in names]
        wait_for(lambda: all(path.exists() for path in paths), f"{names} at the supervisor")

    def put_clock_forward(self) -> None:
        """Let every time limit of the supervisor pass, once."""
        (self.folder / "later").touch()

    def kill_child(self, name: str, incarnation: int = 0) -> None:
        """Send SIGKILL to a child that is ready."""
        os.kill(self.wait_event("ready", name, incarnation)["pid"], signal.SIGKILL)

    def finish(self, signum: int | None = None) -> tuple[int, str]:
        """Wait for the end, after a signal if one is given; returns exit code and stderr."""
        if signum is not None:
            self.process.send_signal(signum)
        _, stderr = self.process.communicate(timeout=PATIENCE_S)
        wait_gone([entry["pid"] for entry in self.journal("start")])
        return self.process.returncode, stderr


class _StderrReader:
    """Reads a server's log while it runs; instead of `Server.finish`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._lines: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def text(self) -> str:
        """What has been logged so far."""
        return "".join(self._lines)

    def finish(self) -> int:
        """Wait for the end and return the exit code."""
        exit_code = self._server.process.wait(PATIENCE_S)
        self._thread.join(PATIENCE_S)
        wait_gone([entry["pid"] for entry in self._server.journal("start")])
        return exit_code

    def _read(self) -> None:
        assert self._server.process.stderr is not None
        for line in self._server.process.stderr:
            self._lines.append(line)


StartServer = Callable[..., Server]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_files(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[StartServer]:
    servers: list[Server] = []

    def start(script: dict[str, str] | None = None, *flags: str, **options: float) -> Server:
        server = Server(tmp_path, model, script or {}, list(flags), options)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.process.kill()
        server.process.communicate(timeout=PATIENCE_S)
        wait_gone([entry["pid"] for entry in server.journal("start")])
        shutil.rmtree(server.run_parent)


def test_a_whole_life(start: StartServer) -> None:
    """Specifications, readiness, the banner, RouterUp, Drain, exit code 0, nothing left."""
    names = ("--served-model-name", "Tom's, other,*")
    server = start(None, "--http-workers", "2", "--tp", "2", *names)
    assert server.wait_banner().endswith("(model Tom's)\n")
    specs = {entry["name"]: entry["spec"] for entry in server.journal("start")}
    assert sorted(specs) == ["frontend-0", "frontend-1", "router-0", "worker-0", "worker-1"]
    router = specs["router-0"]
    for name, spec in specs.items():
        assert spec["config"]["served_model_name"] == "Tom's,other,*", name
    for rank in (0, 1):
        worker = specs[f"worker-{rank}"]
        assert worker["workers_address"] == router["workers_address"]
        assert worker["boot_id"] == router["boot_id"]
        assert worker["collective_store"].startswith(str(server.run_parent))
    for index in (0, 1):
        message = server.wait_message(f"frontend-{index}", "RouterUp")
        assert message["address"] == router["frontends_address"]
        assert message["boot_id"] == router["boot_id"]
    (run_dir,) = server.run_parent.iterdir()
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((run_dir / "control").stat().st_mode) == 0o600
    exit_code, stderr = server.finish(signal.SIGTERM)
    assert exit_code == 0
    assert len(server.journal("drained")) == 2
    assert "error" not in stderr.lower()
    assert list(server.run_parent.iterdir()) == []


def test_the_listening_socket_reaches_the_frontend(start: StartServer) -> None:
    server = start()
    port = int(server.wait_banner().split(" (")[0].rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=10):
        pass
    frontend = server.journal("start", "frontend-0")[0]
    listener = Path(f"/proc/{frontend['pid']}/fd/{frontend['spec']['listen_fd']}").readlink()
    assert str(listener).startswith("socket:")
    for name in ("router-0", "worker-0"):
        fds = Path(f"/proc/{server.journal('start', name)[0]['pid']}/fd")
        assert listener not in [fd.readlink() for fd in fds.iterdir()]


def test_a_dead_worker_takes_its_group_and_is_replaced(start: StartServer) -> None:
    server = start(None, "--tp", "2")
    server.wait_banner()
    server.kill_child("worker-1")
    assert server.wait_message("router-0", "WorkersLost")["incarnation"] == 0
    for rank in (0, 1):
        server.wait_event("ready", f"worker-{rank}", 1)
        assert not is_running(server.journal("start", f"worker-{rank}", 0)[0]["pid"])
    first, second = (server.journal("start", "worker-0", n)[0]["spec"] for n in (0, 1))
    assert first["collective_store"] != second["collective_store"]
    assert first["boot_id"] == second["boot_id"]
    assert len(server.journal("start", "router-0")) == 1
    assert server.finish(signal.SIGTERM)[0] == 0


def test_a_dead_router_takes_the_workers_and_gets_a_new_boot(start: StartServer) -> None:
    server = start(None, "--http-workers", "2")
    server.wait_banner()
    server.kill_child("router-0")
    specs = [server.wait_event("start", "router-0", n)["spec"] for n in (0, 1)]
    for field in ("boot_id", "frontends_address", "workers_address"):
        assert specs[0][field] != specs[1][field]
    server.wait_event("ready", "worker-0", 0, boot=1)
    old, new = server.journal("start", "worker-0")
    assert new["spec"]["boot_id"] == specs[1]["boot_id"] != old["spec"]["boot_id"]
    assert not is_running(old["pid"])
    for index in (0, 1):
        name = f"frontend-{index}"
        wait_for(lambda name=name: len(server.journal("message", name)) == 3, "three messages")
        messages = [entry["message"] for entry in server.journal("message", name)]
        assert [m["type"] for m in messages] == ["RouterUp", "RouterDown", "RouterUp"]
        assert messages[2]["boot_id"] == specs[1]["boot_id"]
    assert server.finish(signal.SIGTERM)[0] == 0


def test_a_dead_frontend_is_replaced_on_the_same_socket(start: StartServer) -> None:
    server = start(None, "--http-workers", "2")
    server.wait_banner()
    first = server.wait_message("frontend-1", "RouterUp", 0)
    server.kill_child("frontend-1")
    lost = server.wait_message("router-0", "FrontendLost")
    assert (lost["frontend_id"], lost["incarnation"]) == (1, 0)
    assert server.wait_message("frontend-1", "RouterUp", 1) == first
    fds = {entry["spec"]["listen_fd"] for entry in server.journal("start", "frontend-1")}
    assert len(fds) == 1
    assert len(server.journal("start", "worker-0")) == 1
    assert server.finish(signal.SIGTERM)[0] == 0


def test_stalled_workers_are_replaced(start: StartServer) -> None:
    server = start({"router-0": "stall"})
    server.wait_banner()
    (server.folder / "stall").touch()
    assert server.wait_message("router-0", "WorkersLost")["incarnation"] == 0
    server.wait_event("ready", "worker-0", 1)
    assert "made no step for 1.5 s" in server.finish(signal.SIGTERM)[1]
    assert server.journal("start", "worker-0", 2) == []


@pytest.mark.long
def test_a_router_that_dies_while_the_workers_are_replaced(start: StartServer) -> None:
    server = start({"worker-0/1": "hang"})
    server.wait_banner()
    server.kill_child("worker-0")
    server.wait_event("start", "worker-0", 1)
    server.kill_child("router-0")
    server.wait_event("ready", "router-0", 1)
    server.wait_event("ready", "worker-0", 0, boot=1)
    assert not is_running(server.journal("start", "worker-0", 1, boot=0)[0]["pid"])
    assert server.finish(signal.SIGTERM)[0] == 0


@pytest.mark.long
def test_a_replacement_that_is_never_ready_is_replaced_too(start: StartServer) -> None:
    server = start({"worker-0/1": "hang"}, "--start-timeout-s", "300")
    server.wait_banner()
    server.kill_child("worker-0")
    server.wait_event("start", "worker-0", 1)
    server.put_clock_forward()
    server.wait_event("ready", "worker-0", 2)
    assert "worker-0 was not ready after 300 s" in server.finish(signal.SIGTERM)[1]


def _ready_times_s(stderr: str) -> list[float]:
    return [float(text) for text in re.findall(r"all processes ready after ([\d.]+) s", stderr)]


@pytest.mark.long
def test_ready_is_said_once_and_not_before_every_frontend_serves(start: StartServer) -> None:
    server = start({"frontend-1": "serve-late"}, "--http-workers", "2", "--tp", "2")
    server.wait_banner()
    server.kill_child("worker-1")
    lost_s = wait_for(
        lambda: [e["time_s"] for e in server.journal("message", "router-0")], "WorkersLost"
    )[0]
    for rank in (0, 1):
        server.wait_event("ready", f"worker-{rank}", 1)
    time.sleep(1.0)
    served_s = time.monotonic()
    (server.folder / "serve").touch()
    log = _StderrReader(server)
    wait_for(lambda: len(_ready_times_s(log.text)) > 1, "the second ready")
    server.process.send_signal(signal.SIGTERM)
    assert log.finish() == 0
    times_s = _ready_times_s(log.text)
    assert len(times_s) == 2
    assert times_s[1] >= served_s - lost_s - 0.02


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "killed", "reason"),
    [
        (
            {"frontend-1/1": "never-serve"},
            "frontend-1",
            "frontend-1 was not welcomed by the router after 300 s: killed",
        ),
        (
            dict.fromkeys(("frontend-0", "frontend-1"), "serve-first-group"),
            "worker-0",
            "router-0 welcomed no frontend after 300 s: killed",
        ),
    ],
)
def test_a_welcome_that_never_comes_is_not_waited_for(
    start: StartServer, script: dict[str, str], killed: str, reason: str
) -> None:
    server = start(script, "--http-workers", "2", "--start-timeout-s", "300")
    server.wait_banner()
    server.kill_child(killed)
    server.wait_known(killed, incarnation=1)
    server.put_clock_forward()
    log = _StderrReader(server)
    wait_for(lambda: len(_ready_times_s(log.text)) > 1, "the second ready")
    assert reason in log.text
    server.process.send_signal(signal.SIGTERM)
    assert log.finish() == 0
    assert len(_ready_times_s(log.text)) == 2
    assert _ready_times_s(log.text)[1] >= 300.0


@pytest.mark.long
@pytest.mark.parametrize("name", ["router-0", "frontend-1"])
def test_a_silent_router_or_frontend_is_replaced(start: StartServer, name: str) -> None:
    server = start({f"{name}/0": "fall-silent"}, "--http-workers", "2", silence_timeout_s=8.0)
    server.wait_banner()
    first = server.wait_event("ready", name, 0)
    server.wait_event("ready", name, 1)
    assert not is_running(first["pid"])
    log = _StderrReader(server)
    wait_for(lambda: len(_ready_times_s(log.text)) > 1, "the second ready")
    server.process.send_signal(signal.SIGTERM)
    assert log.finish() == 0
    assert re.findall(r"(\S+) was silent for 8 s: killed", log.text) == [name]
    others = {"router-0", "frontend-0", "frontend-1"} - {name}
    assert [len(server.journal("start", other)) for other in others] == [1, 1]


def test_a_busy_router_is_late_not_dead(start: StartServer) -> None:
    """Its loop does not turn, but it works; then it goes on as if nothing had been."""
    server = start({"router-0": "compute 3"}, silence_timeout_s=1.0, late_timeout_s=300.0)
    server.wait_banner()
    (server.folder / "compute").touch()
    server.wait_event("computed", "router-0")
    exit_code, stderr = server.finish(signal.SIGTERM)
    assert exit_code == 0
    assert "router-0 is late: silent, but busy" in stderr and "killed" not in stderr
    assert len(server.journal("start", "router-0")) == 1


@pytest.mark.long
def test_a_router_that_is_busy_for_ever_is_replaced(start: StartServer) -> None:
    server = start({"router-0/0": "compute inf"}, silence_timeout_s=1.0, late_timeout_s=3.0)
    server.wait_banner()
    (server.folder / "compute").touch()
    server.wait_event("ready", "router-0", 1)
    exit_code, stderr = server.finish(signal.SIGTERM)
    assert exit_code == 0
    assert "router-0 was busy for 3 s: killed" in stderr


@pytest.mark.long
def test_silence_while_everything_was_stopped_proves_nothing(start: StartServer) -> None:
    server = start(None, silence_timeout_s=5.0)
    server.wait_banner()
    children = [entry["pid"] for entry in server.journal("start")]
    for pid in [server.process.pid, *children]:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(6.5)  # the supervisor goes on before the others do
    server.process.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    for pid in children:
        os.kill(pid, signal.SIGCONT)
    exit_code, stderr = server.finish(signal.SIGTERM)
    assert exit_code == 0
    assert "silent" not in stderr
    assert len(server.journal("start")) == len(children)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "behaviour"), [("worker-0", "crash-when-ready"), ("frontend-0", "crash-when-ready")]
)
def test_the_restart_budget_ends_a_crash_loop(
    start: StartServer, name: str, behaviour: str
) -> None:
    script = {name: behaviour, f"{name}/0": "serve"}
    server = start(script, "--max-restarts", "2")
    server.wait_banner()
    server.kill_child(name)
    exit_code, stderr = server.finish()
    assert exit_code == 1
    last = stderr.splitlines()[-1]
    assert last == (
        f"lightserve: error: gave up after 2 restarts within 60 s: {name} exited with code 9"
    )
    assert len(server.journal("start", name)) == 3
    assert list(server.run_parent.iterdir()) == []


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ({"worker-0": "refuse"}, "worker-0: config.json: key 'x' is wrong in two lines"),
        ({"frontend-0": "bug"}, "frontend-0: ZeroDivisionError: oops"),
        ({"router-0": "crash"}, "router-0 exited with code 7"),
        ({"worker-0": "hang"}, "worker-0 was not ready after 300 s (--start-timeout-s)"),
        (
            {"frontend-0": "never-serve"},
            "frontend-0 was not welcomed by the router after 300 s (--start-timeout-s)",
        ),
    ],
)
def test_a_child_that_cannot_start_ends_the_server(
    start: StartServer, script: dict[str, str], expected: str
) -> None:
    server = start(script, "--start-timeout-s", "300")
    if {"hang", "never-serve"} & set(script.values()):
        names = ("frontend-0", "router-0", "worker-0")
        server.wait_known(*(name for name in names if script.get(name) != "hang"))
        server.put_clock_forward()
    exit_code, stderr = server.finish()
    assert exit_code == 1
    assert stderr.splitlines()[-1] == f"lightserve: error: {expected}"
    assert ("Traceback" in stderr) == ("bug" in script.values())


@pytest.mark.parametrize(
    ("signum", "exit_code"),
    long_but(
        [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 0)], [(signal.SIGINT, 130)]
    ),
)
def test_a_signal_while_starting_ends_at_once(
    start: StartServer, signum: int, exit_code: int
) -> None:
    server = start({"worker-0": "hang"})
    server.wait_event("ready", "router-0")
    assert server.finish(signum)[0] == exit_code
    assert list(server.run_parent.iterdir()) == []


def test_drain_waits_for_slow_frontends_and_ctrl_c_drains_too(start: StartServer) -> None:
    server = start({"frontend-1": "drain-slowly"}, "--http-workers", "2")
    server.wait_banner()
    assert server.finish(signal.SIGINT)[0] == 0
    assert len(server.journal("drained")) == 2
    assert server.wait_message("frontend-0", "Drain")["timeout_s"] == 30.0


def test_frontends_that_do_not_drain_are_killed(start: StartServer) -> None:
    server = start({"frontend-0": "never-drain"}, "--shutdown-timeout-s", "0")
    server.wait_banner()
    exit_code, stderr = server.finish(signal.SIGTERM)
    assert exit_code == 0
    assert "SIGTERM: requests in flight have 0 s to finish" in stderr
    assert "frontends did not end in time" in stderr
    assert stderr.rstrip().endswith("stopped")


@pytest.mark.parametrize(
    ("second", "code"),
    long_but([(signal.SIGINT, 130), (signal.SIGTERM, 143)], [(signal.SIGTERM, 143)]),
)
def test_a_second_signal_kills_everything_at_once(
    start: StartServer, second: int, code: int
) -> None:
    server = start({"frontend-0": "never-drain"})
    server.wait_banner()
    server.process.send_signal(signal.SIGTERM)
    server.wait_message("frontend-0", "Drain")
    exit_code, stderr = server.finish(second)
    assert exit_code == code
    assert "once more: everything ends now" in stderr


@pytest.mark.long
def test_a_router_that_dies_while_draining_is_not_replaced(start: StartServer) -> None:
    server = start({"frontend-0": "never-drain"}, "--shutdown-timeout-s", "300")
    server.wait_banner()
    server.process.send_signal(signal.SIGTERM)
    server.wait_message("frontend-0", "Drain")
    server.kill_child("router-0")
    server.wait_message("frontend-0", "RouterDown")
    server.put_clock_forward()
    assert server.finish()[0] == 0
    assert len(server.journal("start", "router-0")) == 1


def test_no_orphans_when_the_supervisor_is_killed(start: StartServer) -> None:
    server = start(None, "--http-workers", "2", "--tp", "2")
    server.wait_banner()
    (left_behind,) = server.run_parent.iterdir()
    server.finish(signal.SIGKILL)  # waits until every child has gone
    live = RunDir(str(server.run_parent))  # as the next server does
    assert not left_behind.exists()
    remove_stale(server.run_parent)
    assert live.path.exists()
    live.close()
    assert not live.path.exists()


def test_children_ignore_the_signals_of_the_process_group(start: StartServer) -> None:
    server = start()
    server.wait_banner()
    pids = [entry["pid"] for entry in server.journal("start")]
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        for pid in pids:
            os.kill(pid, signum)
    assert server.finish(signal.SIGTERM)[0] == 0
    assert len(server.journal("start")) == 3
    assert len(server.journal("drained")) == 1


def test_keys_are_read_again_on_sighup(start: StartServer, tmp_path: Path) -> None:
    """A bad file changes nothing and is one error; replaced frontends are born with the keys."""
    file = tmp_path / "keys"
    file.write_text("alice aaaaaaaaaaaaaaaa\n")
    server = start({}, "--api-key-file", str(file))
    server.wait_banner()
    stderr = _StderrReader(server)
    born = server.wait_event("start", "frontend-0")["spec"]["api_keys"]
    assert [key["name"] for key in born] == ["alice"]

    file.write_text("alice short\n")
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "API keys stay as they were" in stderr.text, "the error")
    assert "short" not in stderr.text
    file.write_text("bob bbbbbbbbbbbbbbbb admin\n")
    server.process.send_signal(signal.SIGHUP)
    message = server.wait_message("frontend-0", "NewApiKeys")
    assert [(key["name"], key["is_admin"]) for key in message["keys"]] == [("bob", True)]
    server.kill_child("frontend-0")
    born = server.wait_event("start", "frontend-0", 1)["spec"]["api_keys"]
    assert [key["name"] for key in born] == ["bob"]
    server.process.send_signal(signal.SIGTERM)
    assert stderr.finish() == 0
    assert stderr.text.count("API keys stay as they were") == 1
    assert "bbbb" not in stderr.text


@pytest.mark.parametrize("flag", ["--api-key-file", "--ssl-certfile"])
@pytest.mark.parametrize("content", [None, "alice short"])
def test_bad_files_of_keys_and_certificates_end_the_start(
    start: StartServer, tmp_path: Path, flag: str, content: str | None
) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_text(content)
    server = start({}, flag, str(file))
    exit_code, stderr = server.finish()
    assert exit_code == 2
    assert stderr.splitlines()[-1].startswith(f"lightserve: error: {flag}")
    assert "short" not in stderr
    assert not server.journal("start")
