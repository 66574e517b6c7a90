"""Writes a decision log without ever holding up what it records.

Lines are made at once, and written by a thread, in portions. What waits for the disk is bounded,
and so is the file: a router that would go over either bound, or cannot write, ends the log, says
so once, and goes on serving. A log is not rotated: its start is what makes the rest replayable,
and all of it up to where it ends stays so. A file that is there already becomes PATH.1.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path
from queue import SimpleQueue

import msgspec

from lightserve.decisions.records import AnyRecord, Decision, Header, new_hash
from lightserve.errors import ConfigError

PORTION_BYTES = 64 * 1024
MAX_PENDING_BYTES = 32 * 1024 * 1024

log = logging.getLogger(__name__)


class DecisionLogFile:
    """One log; `append` and `flush` belong to one thread."""

    def __init__(self, path: Path, header: Header, *, max_bytes: int) -> None:
        """Create the file, for its owner alone. Raises ConfigError if that is not possible."""
        self._path = path
        self._max_bytes = max_bytes
        self._descriptor = _create(path)
        self._encoder = msgspec.json.Encoder()
        self._hash = new_hash()
        self._num_bytes = 0
        """Of all lines so far."""
        self._lines = bytearray()
        """Not handed to the thread yet."""
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._num_written = 0
        """By the thread, as `error` is."""
        self._error: OSError | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._write_all, name="decision-log", daemon=True)
        self._thread.start()
        self.append(header)

    def append(self, record: AnyRecord) -> None:
        """Write a line, now or later; never raises."""
        if self._is_over:
            return
        if isinstance(record, Decision):
            record = msgspec.structs.replace(record, chain=self._hash.hexdigest())
        line = self._encoder.encode(record) + b"\n"
        self._num_bytes += len(line)
        if self._num_bytes > self._max_bytes:
            self._end(f"it has reached its limit of {self._max_bytes} bytes")
        elif self._num_bytes - self._num_written > MAX_PENDING_BYTES:
            self._end("the disk is too slow for it")
        else:
            self._hash.update(line)
            self._lines += line
            if len(self._lines) >= PORTION_BYTES:
                self.flush()

    def flush(self) -> None:
        """Hand all lines to the thread."""
        if self._error is not None and not self._is_over:
            self._end(f"{self._error.strerror}")
        if self._lines:
            self._queue.put(bytes(self._lines))
            self._lines.clear()

    def close(self) -> None:
        """Write what is left, and end."""
        self.flush()
        was_over, self._is_over = self._is_over, True
        self._queue.put(None)
        self._thread.join()
        if self._error is not None and not was_over:
            self._end(f"{self._error.strerror}")

    def _end(self, why: str) -> None:
        self._is_over = True
        log.error("decision log %s ends here, serving goes on: %s", self._path, why)
        self.flush()

    def _write_all(self) -> None:
        """Write portions until told to end; after an error, drop them."""
        while (portion := self._queue.get()) is not None:
            try:
                while portion and self._error is None:
                    count = os.write(self._descriptor, portion)
                    self._num_written += count
                    portion = portion[count:]
            except OSError as error:
                self._error = error
        os.close(self._descriptor)


def _create(path: Path) -> int:
    try:
        if path.exists():
            if not path.is_file() or path.is_symlink():
                raise ConfigError(f"--decision-log {path}: not a regular file")
            with contextlib.suppress(FileNotFoundError):
                path.replace(f"{path}.1")
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"--decision-log {path}: {error.strerror}") from error
