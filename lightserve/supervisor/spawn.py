"""One child process: how it is started, addressed, watched and killed."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from lightserve.channels.base import Hub
from lightserve.child import SPEC_HEADER, control_name
from lightserve.errors import ChannelFull
from lightserve.messages.supervision import ChildMessage, ChildSpec, Role, SupervisorMessage

_BUSY_SHARE = 0.1
"""Of the time; a loop that only wakes to look at its clock takes far less."""
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")

CHILD_COMMAND = (sys.executable, "-P", "-m", "lightserve.child")
"""-P: whatever lies in the working directory must not be imported."""

log = logging.getLogger(__name__)

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
    if role is Role.WORKER:
        # torch's allocator asks for huge pages: about a tenth off a decode of one row.
        environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        # OpenMP's threads would watch for many milliseconds for more of torch's work, on cores
        # that the native core's threads are waiting for; this is half of one.
        environment.setdefault("GOMP_SPINCOUNT", "10000")
    else:  # numpy for book-keeping only
        environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    return environment
