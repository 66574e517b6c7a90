"""The start of every child process: `python -m lightserve.child NAME PARENT_PID`.

Standard input is a pipe from the supervisor. It brings the `ChildSpec` (four bytes of length,
then msgpack) and stays open as the death pipe: when it ends, so does this process. Together with
PDEATHSIG that leaves no orphans, however the supervisor goes. NAME ("router-0") is what `ps` and
`top` show.

Signals meant for the supervisor often reach its whole process group (Ctrl-C) or control group
(systemd). Children ignore them: the supervisor alone decides when they end.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from typing import NoReturn

import msgspec

from lightserve.channels import LINGER_S, AsyncLink, Link, connect_async_link, connect_link
from lightserve.errors import LightserveError
from lightserve.logs import one_line, setup_logging
from lightserve.messages.supervision import (
    ChildFailed,
    ChildMessage,
    ChildSpec,
    Role,
    SupervisorMessage,
)

log = logging.getLogger(__name__)

ControlLink = Link[ChildMessage, SupervisorMessage]
AsyncControlLink = AsyncLink[ChildMessage, SupervisorMessage]
Runner = Callable[[ChildSpec], int]
"""Runs a role to its end and returns the exit code."""

SPEC_HEADER = struct.Struct(">I")
_MAX_SPEC_BYTES = 1024 * 1024
_STDIN_FD = 0
_LAST_WORDS_S = 5.0
"""A process that fails may wait so long until its reason is on its way; it takes milliseconds."""
_MAX_REASON_CHARS = 4096
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def main(runners: Mapping[Role, Runner] | None = None) -> NoReturn:
    """Be the child that standard input describes; `runners` replaces the real roles (tests)."""
    end_with_parent(int(sys.argv[2]), signal.SIGKILL)
    _prctl(_PR_SET_NAME, sys.argv[1].encode())
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    spec = read_spec(_STDIN_FD)
    setup_logging(f"{spec.role}-{spec.index}", spec.config.log_level, spec.config.log_format)
    threading.Thread(target=_watch_death_pipe, name="death-pipe", daemon=True).start()
    exit_code = _run(spec, (runners or ROLE_RUNNERS)[spec.role])
    # No interpreter shutdown: it may wait for threads of native libraries.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(exit_code)


def read_spec(fd: int) -> ChildSpec:
    """Read the specification from a descriptor, exactly; raises EOFError if it ends early."""
    (length,) = SPEC_HEADER.unpack(_read_exactly(fd, SPEC_HEADER.size))
    if length > _MAX_SPEC_BYTES:
        raise ValueError(f"specification of {length} bytes")
    return msgspec.msgpack.decode(_read_exactly(fd, length), type=ChildSpec)


def control_name(spec: ChildSpec) -> str:
    """Return this child's name at the supervisor's hub; no two children ever share one."""
    return f"{spec.role}{spec.boot_id}-{spec.index}-{spec.incarnation}"


def last_words_name(control_name: str) -> str:
    """Return under which name a child says why it fails.

    Its own may still be on its way: the link that comes second takes the name over, and what the
    other one has sent is lost.
    """
    return f"last{control_name}"


def connect_control(spec: ChildSpec, *, name: str = "", linger_s: float = LINGER_S) -> ControlLink:
    """Connect to the supervisor; `close` waits up to `linger_s` for what was sent to leave."""
    return connect_link(
        spec.control_address,
        name=name or control_name(spec),
        send_type=ChildMessage,
        recv_type=SupervisorMessage,
        linger_s=linger_s,
    )


def connect_async_control(spec: ChildSpec) -> AsyncControlLink:
    """Connect to the supervisor from inside a running asyncio loop."""
    return connect_async_link(
        spec.control_address,
        name=control_name(spec),
        send_type=ChildMessage,
        recv_type=SupervisorMessage,
    )


def _run(spec: ChildSpec, runner: Runner) -> int:
    try:
        return runner(spec)
    except LightserveError as error:
        log.debug("failed", exc_info=True)
        _report_failure(spec, one_line(error))
    except Exception as error:
        log.exception("failed")
        _report_failure(spec, one_line(error))
    return 1


def _report_failure(spec: ChildSpec, reason: str) -> None:
    """Tell the supervisor why, over a link of its own: the role's may be in any state.

    What was logged is written first: where no memory is left, opening a link ends the process.
    """
    for handler in logging.getLogger().handlers:
        handler.flush()
    name = last_words_name(control_name(spec))
    control = connect_control(spec, name=name, linger_s=_LAST_WORDS_S)
    control.send(ChildFailed(reason=reason[:_MAX_REASON_CHARS]))
    control.close()


def _run_frontend(spec: ChildSpec) -> int:
    from lightserve.frontend.process import run  # noqa: PLC0415 - each role imports only itself

    return run(spec, lambda: connect_async_control(spec))


def _run_batches(spec: ChildSpec) -> int:
    from lightserve.batches.process import run  # noqa: PLC0415

    return run(spec, lambda: connect_async_control(spec))


def _run_router(spec: ChildSpec) -> int:
    from lightserve.router.process import run  # noqa: PLC0415

    return run(spec, connect_control(spec))


def _run_worker(spec: ChildSpec) -> int:
    from lightserve.worker.process import run  # noqa: PLC0415

    return run(spec, connect_control(spec))


ROLE_RUNNERS: Mapping[Role, Runner] = {
    Role.FRONTEND: _run_frontend,
    Role.BATCHES: _run_batches,
    Role.ROUTER: _run_router,
    Role.WORKER: _run_worker,
}


def end_with_parent(parent_pid: int, signum: signal.Signals) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)


def _prctl(operation: int, argument: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(operation, argument) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({operation}) failed")


def _watch_death_pipe() -> None:
    while os.read(_STDIN_FD, 1):
        pass
    os._exit(1)


def _read_exactly(fd: int, length: int) -> bytes:
    data = b""
    while len(data) < length:
        chunk = os.read(fd, length - len(data))
        if not chunk:
            raise EOFError("the supervisor is gone")
        data += chunk
    return data


if __name__ == "__main__":
    main()
