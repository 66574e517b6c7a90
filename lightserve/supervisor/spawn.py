"""One child process: how it is started, addressed, watched and killed."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from lightserve.channels import Hub
from lightserve.child import SPEC_HEADER, control_name, last_words_name
from lightserve.config import ServeConfig
from lightserve.errors import ChannelFull, StartupError
from lightserve.http_access import ApiKey
from lightserve.messages.supervision import ChildMessage, ChildSpec, Role, SupervisorMessage

log = logging.getLogger(__name__)

# The private directory (0700) in which the sockets of one server lie.
#
# Each holds a locked file while its server lives. A server killed by SIGKILL leaves its directory
# behind; the next one to start under the same parent finds the lock free and removes it.

_PREFIX = "lightserve-"
_LOCK_FILE = "lock"
_MAX_SOCKET_PATH_BYTES = 107
_LONGEST_SOCKET_NAME = "workers-999999"


class RunDir:
    """A fresh run directory; removed by `close`."""

    def __init__(self, parent: str) -> None:
        """Make one under `parent` ("" is the system's temporary directory).

        Raises:
            StartupError: the directory cannot be made, or its path is too long for sockets.
        """
        try:
            base = Path(parent or tempfile.gettempdir()).resolve()
        except FileNotFoundError as error:
            raise StartupError(
                "--run-dir: there is no temporary directory that can be written; name a directory"
            ) from error
        remove_stale(base)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        except OSError as error:
            raise StartupError(
                f"--run-dir: cannot make a directory in {base}: {error.strerror}"
            ) from error
        self._lock_fd = _lock_before_visible(self.path)
        length = len(os.fsencode(self.path / _LONGEST_SOCKET_NAME))
        if length > _MAX_SOCKET_PATH_BYTES:
            self.close()
            raise StartupError(
                f"--run-dir: socket paths under {base} would have {length} bytes,"
                f" the limit is {_MAX_SOCKET_PATH_BYTES}"
            )

    def address(self, name: str) -> str:
        """Return the channel address of a socket in this directory."""
        return f"ipc://{self.path / name}"

    def close(self) -> None:
        """Remove the directory and all in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)


def remove_stale(base: Path) -> None:
    """Remove this user's run directories under `base` whose servers no longer live."""
    for path in base.glob(_PREFIX + "*"):
        try:
            if path.lstat().st_uid != os.getuid() or path.is_symlink():
                continue
            lock_fd = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # not one of ours, or it is going away at this moment
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # its server lives
        else:
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock_fd)


def _lock_before_visible(path: Path) -> int:
    """Lock the file under another name first, so that no process ever sees it unlocked."""
    hidden = path / (_LOCK_FILE + ".new")
    lock_fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock_fd, fcntl.LOCK_EX)
    hidden.rename(path / _LOCK_FILE)
    return lock_fd


# The specifications of children: who is told what at birth.

MAX_FRONTENDS_BY_CORES = 8


def num_frontends(config: ServeConfig) -> int:
    """Return how many frontend processes there are."""
    by_cores = min(MAX_FRONTENDS_BY_CORES, len(os.sched_getaffinity(0)) // 4)
    return config.http_workers or max(1, by_cores)


@dataclass(frozen=True)
class RouterBoot:
    """One life of a router: a fresh id, and sockets that no earlier router's peers know."""

    number: int
    boot_id: str
    frontends_address: str
    workers_address: str
    far_workers: socket.socket | None = None
    """With other nodes: bound where their workers connect; the router inherits it."""
    far_address: str = ""
    """Address of that socket."""


@dataclass(frozen=True)
class SpecWriter:
    """Writes the specifications of one server's children."""

    config: ServeConfig
    run_dir: RunDir
    control_address: str
    listen_fd: int
    batch_owner: str = field(
        default_factory=lambda: f"{socket.gethostname()}-{secrets.token_hex(8)}"
    )
    """Owner of leases of lines: the same as long as this server lives, and no other server's."""
    node_key: bytes = b""
    """With other nodes; see `lightserve.node_key`."""
    has_batches: bool = False
    """Whether the batches process starts with the server, and not when a client uses the store."""
    store_problem: str = ""
    """Why the batch store cannot be used; empty: it can, or there is none."""

    def boot(
        self, number: int, far_workers: socket.socket | None = None, far_address: str = ""
    ) -> RouterBoot:
        """Name the `number`-th router boot."""
        return RouterBoot(
            number=number,
            boot_id=secrets.token_hex(8),
            frontends_address=self.run_dir.address(f"frontends-{number}"),
            workers_address=self.run_dir.address(f"workers-{number}"),
            far_workers=far_workers,
            far_address=far_address,
        )

    def frontend(self, index: int, incarnation: int, api_keys: Sequence[ApiKey]) -> ChildSpec:
        """Specify a frontend's `incarnation`-th start; behind them all is the batches process."""
        is_frontend = index < num_frontends(self.config)
        return ChildSpec(
            role=Role.FRONTEND if is_frontend else Role.BATCHES,
            index=index,
            incarnation=incarnation,
            boot_id="",
            config=self.config,
            control_address=self.control_address,
            listen_fd=self.listen_fd if is_frontend else -1,
            api_keys=list(api_keys),
            store_problem=self.store_problem,
            batch_owner="" if is_frontend else self.batch_owner,
        )

    def router(self, boot: RouterBoot) -> ChildSpec:
        """Specify the router of this boot."""
        return ChildSpec(
            role=Role.ROUTER,
            index=0,
            incarnation=boot.number,
            boot_id=boot.boot_id,
            config=self.config,
            control_address=self.control_address,
            frontends_address=boot.frontends_address,
            workers_address=boot.workers_address,
            listen_fd=-1 if boot.far_workers is None else boot.far_workers.fileno(),
            node_key=self.node_key,
        )

    def worker(
        self,
        boot: RouterBoot,
        rank: int,
        incarnation: int,
        *,
        store: str = "",
        store_listener: socket.socket | None = None,
    ) -> ChildSpec:
        """Specify one rank of this boot's `incarnation`-th worker group.

        `store`: tcp://HOST:PORT where ranks of several nodes meet, on the socket `store_listener`,
        which is for rank 0.
        """
        file = self.run_dir.path / f"store-{boot.number}-{incarnation}"
        return ChildSpec(
            role=Role.WORKER,
            index=rank,
            incarnation=incarnation,
            boot_id=boot.boot_id,
            config=self.config,
            control_address=self.control_address,
            workers_address=boot.workers_address,
            collective_store=store or (str(file) if self.config.tp > 1 else ""),
            listen_fd=-1 if store_listener is None or rank else store_listener.fileno(),
            node_key=self.node_key,
        )


_OF_THE_STORE = ("PG", "AWS_")
"""How the names of variables begin that say how to reach it, and with which password."""
_BUSY_SHARE = 0.1
"""Share of the time; a loop that only wakes to look at its clock takes far less."""
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")

CHILD_COMMAND = (sys.executable, "-P", "-m", "lightserve.child")
"""-P: whatever lies in the working directory must not be imported."""

ControlHub = Hub[SupervisorMessage, ChildMessage]


class Child:
    """A running child. `pidfd` becomes readable when it has ended; `reap` then collects it."""

    def __init__(
        self, process: subprocess.Popen[bytes], spec: ChildSpec, hub: ControlHub, *, due_s: float
    ) -> None:
        self.spec = spec
        self.name = f"{spec.role}-{spec.index}"
        self.control_name = control_name(spec)
        self.pid = process.pid
        self.pidfd = os.pidfd_open(process.pid)
        self.is_ready = False
        self.due_s = due_s
        """When (monotonic) it has to be ready, and later to be heard of; infinite for never."""
        self.late_due_s = float("inf")
        """When (monotonic) it has to be heard of, however busy it is."""
        self.is_serving = False
        """Frontend: whether its router has welcomed it since the last loss of router or workers."""
        self.failure = ""
        """The reason it gave by ChildFailed."""
        self.is_doomed = False
        """Whether it was killed as part of something whose failure is known already."""
        self._process = process
        self._hub = hub
        self._outbox: list[SupervisorMessage] = []
        self._cpu_s = self._asked_s = 0.0

    @property
    def control_names(self) -> tuple[str, str]:
        """All names under which it speaks."""
        return self.control_name, last_words_name(self.control_name)

    @property
    def has_reported_failure(self) -> bool:
        """Whether it has ended by itself with the code of a child that said ChildFailed."""
        ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return ended is not None and ended.si_code == os.CLD_EXITED and ended.si_status == 1

    def is_busy(self) -> bool:
        """Whether its main thread has worked since this was asked last, or would if it could.

        One that is stopped, or waits for what never comes, is not busy.
        """
        try:
            stat = Path(f"/proc/{self.pid}/task/{self.pid}/stat").read_text()
        except OSError:  # gone, as its pidfd reports
            return False
        fields = stat.rpartition(")")[2].split()
        cpu_s, now_s = _TICK_S * (int(fields[11]) + int(fields[12])), time.monotonic()
        has_run = cpu_s - self._cpu_s >= _BUSY_SHARE * (now_s - self._asked_s)
        self._cpu_s, self._asked_s = cpu_s, now_s
        return has_run or fields[0] in ("R", "D")

    def send(self, message: SupervisorMessage) -> None:
        """Send a message, as soon as the child is ready; one that stopped reading is killed."""
        self._outbox.append(message)
        if self.is_ready:
            self._flush()

    def mark_ready(self) -> None:
        """Note that the child is ready, and send what waited for that."""
        self.is_ready = True
        self._flush()

    def kill(self, *, is_doomed: bool = True) -> None:
        """End it at once; its pidfd tells when it is gone. `is_doomed`: its end is no news."""
        self.is_doomed = self.is_doomed or is_doomed
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def reap(self) -> str:
        """Collect the ended process and return how it ended, in words."""
        returncode = self._process.wait()
        os.close(self.pidfd)
        if self._process.stdin is not None:
            self._process.stdin.close()
        if returncode < 0:
            return f"was killed by {signal.Signals(-returncode).name}"
        return f"exited with code {returncode}" + (f": {self.failure}" if self.failure else "")

    def _flush(self) -> None:
        try:
            for message in self._outbox:
                self._hub.send(self.control_name, message)
        except ChannelFull:
            log.error("%s does not read its messages: killed", self.name)
            self.kill(is_doomed=False)
        self._outbox.clear()


class Spawner:
    """Starts children that talk to `hub`."""

    def __init__(self, hub: ControlHub, command: Sequence[str] = CHILD_COMMAND) -> None:
        self._hub = hub
        self._command = command

    def spawn(self, spec: ChildSpec, *, due_s: float) -> Child:
        """Start a child; call from the main thread, with which the kernel ties its life."""
        process = subprocess.Popen(
            [*self._command, f"{spec.role}-{spec.index}", str(os.getpid())],
            stdin=subprocess.PIPE,
            pass_fds=[spec.listen_fd] if spec.listen_fd >= 0 else [],
            env=_environment(spec.role),
            bufsize=0,
        )
        assert process.stdin is not None
        payload = msgspec.msgpack.encode(spec)
        with contextlib.suppress(BrokenPipeError):  # dead already, as its pidfd reports
            process.stdin.write(SPEC_HEADER.pack(len(payload)) + payload)
        return Child(process, spec, self._hub, due_s=due_s)


def _environment(role: Role) -> dict[str, str]:
    environment = dict(os.environ)
    if role not in (Role.FRONTEND, Role.BATCHES):  # these alone have a use for the store
        environment = {
            name: value for name, value in environment.items() if not name.startswith(_OF_THE_STORE)
        }
    if role is Role.WORKER:
        # torch's allocator asks for huge pages: about a tenth off a decode of one row.
        environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        # OpenMP's threads would watch for many milliseconds for more of torch's work, on cores
        # that the native core's threads are waiting for; this is half of one.
        environment.setdefault("GOMP_SPINCOUNT", "10000")
    else:  # numpy for book-keeping only
        environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    return environment
