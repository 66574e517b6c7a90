"""SIGTERM, SIGINT and SIGHUP: first as exceptions, then as events of the loop."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType, TracebackType
from typing import Self


class Stopped(BaseException):
    """A stop signal arrived before the loop ran; whatever was under way is given up."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class StopSignals:
    """Context in which stop signals are caught; a signal that was ignored stays ignored.

    Until `defer` they raise `Stopped` at once, even out of a blocking download. After it they
    only make `fileno()` readable, and `take` returns them. With `reloads`, SIGHUP is no stop
    signal: it is never ignored, never raises, and one that comes early waits for `defer`.
    """

    def __init__(self, *, reloads: bool = False) -> None:
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_deferred = False
        self._reloads = reloads
        self._has_early_reload = False
        self._old_handlers: dict[int, signal._HANDLER] = {}
        self._old_wakeup_fd = -1

    def __enter__(self) -> Self:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            is_wanted = signum == signal.SIGTERM or (signum == signal.SIGHUP and self._reloads)
            if is_wanted or signal.getsignal(signum) is not signal.SIG_IGN:
                self._old_handlers[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_deferred:
            signal.set_wakeup_fd(self._old_wakeup_fd)
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)
        os.close(self._read_fd)
        os.close(self._write_fd)

    def fileno(self) -> int:
        """Return the descriptor that is readable when a signal has arrived."""
        return self._read_fd

    def defer(self) -> None:
        """From now on, signals are events."""
        self._old_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._is_deferred = True
        if self._has_early_reload:
            os.write(self._write_fd, bytes([signal.SIGHUP]))

    def take(self) -> list[int]:
        """Return the signals that have arrived since the last call."""
        with contextlib.suppress(BlockingIOError):
            return [number for number in os.read(self._read_fd, 64) if number in self._old_handlers]
        return []

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self._is_deferred:
            return
        if signum == signal.SIGHUP and self._reloads:
            self._has_early_reload = True
            return
        raise Stopped(signum)
