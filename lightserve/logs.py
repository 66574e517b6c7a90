"""Logging of every process: one line per record on stderr, with the process's name.

Logging never waits: a thread writes the lines. What it cannot write fast enough, because standard
error is a pipe that is not read or a disk that is full, is dropped, counted and told of.

Lines that belong to a request carry its id, which `request_id` holds while the request's task
runs; tasks that it starts inherit it. Prompts, outputs and keys are never logged.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

import msgspec

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the HTTP request that the current task works for; empty outside of any."""

MAX_QUEUED_BYTES = 1024 * 1024
"""Bytes of lines that wait to be written."""
_MAX_WRITE_BYTES = 4096
"""Written at once, a longer line excepted: a pipe keeps so much together among its writers."""
FLUSH_S = 2.0
"""Longest wait for the last lines of a process that ends; with a reader it takes milliseconds."""


class LineWriter:
    """Writes lines to a descriptor, in order, from a thread of its own; `write` never waits."""

    def __init__(self, fd: int, tell: Callable[[int], str] | None = None) -> None:
        """`tell` makes the line that says how many were dropped, once there is room for it."""
        self._fd = fd
        self._tell = tell
        self.num_dropped = 0
        self._num_told = 0
        self._news = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0
        """Bytes of the lines that wait or are being written."""
        self._ends_inside_line = False
        threading.Thread(target=self._run, name="lines", daemon=True).start()

    def write(self, line: str) -> None:
        """Have a line written, or drop it if too much waits already."""
        data = line.encode(errors="backslashreplace") + b"\n"
        with self._news:
            if self._num_bytes and self._num_bytes + len(data) > MAX_QUEUED_BYTES:
                self.num_dropped += 1
                return
            self._lines.append(data)
            self._num_bytes += len(data)
            self._news.notify_all()

    def flush(self) -> None:
        """Wait until everything is written, but no longer than `FLUSH_S`."""
        with self._news:
            self._news.wait_for(lambda: self._num_bytes == 0, FLUSH_S)

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._lines)
                lines = [self._lines.popleft()]
                size = len(lines[0])
                while self._lines and size + len(self._lines[0]) <= _MAX_WRITE_BYTES:
                    size += len(self._lines[0])
                    lines.append(self._lines.popleft())
            is_written = self._put(b"".join(lines))
            with self._news:
                self._num_bytes -= size
                self.num_dropped += 0 if is_written else len(lines)
                num_new = self.num_dropped - self._num_told
                if is_written and num_new and not self._lines and self._tell is not None:
                    self._num_told = self.num_dropped
                    self.write(self._tell(num_new))
                self._news.notify_all()

    def _put(self, data: bytes) -> bool:
        """Write all of it, however long that takes; returns whether that was possible."""
        rest = b"\n" + data if self._ends_inside_line else data
        try:
            while rest:
                try:
                    rest = rest[os.write(self._fd, rest) :]
                except BlockingIOError:  # another process has made what they share so
                    select.select([], [self._fd], [])
                self._ends_inside_line = 0 < len(rest) < len(data)
        except OSError:  # a full disk, a reader that is gone
            return False
        return True


class QueuedHandler(logging.Handler):
    """Hands lines to a `LineWriter`."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._writer = LineWriter(fd, self._told)

    @property
    def num_dropped(self) -> int:
        """Lines that could not be written."""
        return self._writer.num_dropped

    def emit(self, record: logging.LogRecord) -> None:
        """Format here, where the request is known, and have it written."""
        try:
            line = self.format(record)
        except Exception as error:
            # Not to standard error, as logging would: that may wait for ever.
            what = record.name, record.lineno, type(error).__name__
            line = self._about("a record of %s, line %d, cannot be written: %s", *what)
        self._writer.write(line)

    def write(self, line: str) -> None:
        """Have a line written as it is."""
        self._writer.write(line)

    def flush(self) -> None:
        """Wait a moment until everything is written; `logging.shutdown` does so."""
        self._writer.flush()

    def _told(self, count: int) -> str:
        return self._about("%d log lines could not be written", count)

    def _about(self, message: str, *args: object) -> str:
        """Return a line about the log itself."""
        record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, args, None)
        return self.format(record)


class TextFormatter(logging.Formatter):
    """For people: time, level, process, module, perhaps the request in brackets, message."""

    def __init__(self, process_name: str) -> None:
        super().__init__(
            f"%(asctime)s %(levelname)s {process_name} %(name)s:%(request)s %(message)s"
        )

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; an exception's traceback follows on lines of its own."""
        current = request_id.get()
        record.request = f" [{current}]" if current else ""
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """For machines: one JSON object per line, tracebacks included.

    A record may bring values of its own: `log.info(..., extra={"fields": {...}})`.
    """

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process_name,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if current := request_id.get():
            line["request_id"] = current
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def setup_logging(process_name: str, level: str, log_format: str) -> None:
    """Send this process's records to stderr; the arguments are choices of --log-level and
    --log-format."""
    # Closed, it is the number of whatever file is opened next.
    fd = os.open(os.devnull, os.O_WRONLY) if sys.stderr is None else sys.stderr.fileno()
    handler = QueuedHandler(fd)
    formatter = JsonFormatter if log_format == "json" else TextFormatter
    handler.setFormatter(formatter(process_name))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())


def prints_text() -> bool:
    """Whether this process logs lines for people, and not for machines."""
    return any(isinstance(h.formatter, TextFormatter) for h in logging.getLogger().handlers)


def num_dropped_lines() -> int:
    """Return how many lines this process could not write to its log."""
    return sum(handler.num_dropped for handler in _handlers())


def say_last(line: str) -> None:
    """Write a line for people to standard error before this process ends, behind its log.

    Like the log it waits only a moment where standard error is not read.
    """
    handlers = _handlers()
    if not handlers:
        print(line, file=sys.stderr)
    for handler in handlers:
        handler.write(line)
        handler.flush()


def _handlers() -> list[QueuedHandler]:
    return [h for h in logging.getLogger().handlers if isinstance(h, QueuedHandler)]


def one_line(error: BaseException) -> str:
    """Return an exception's text on one line, led by its type unless lightserve raised it."""
    text = " ".join(str(error).split())
    if type(error).__module__ == "lightserve.errors":
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
