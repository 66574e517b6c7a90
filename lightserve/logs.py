"""Logging of every process: one line per record on stderr, with the process's name.

Lines that belong to a request carry its id, which `request_id` holds while the request's task
runs; tasks that it starts inherit it. Prompts, outputs and keys are never logged.
"""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

import msgspec

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the HTTP request that the current task works for; empty outside of any."""


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
    handler = logging.StreamHandler(sys.stderr)
    formatter = JsonFormatter if log_format == "json" else TextFormatter
    handler.setFormatter(formatter(process_name))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())


def prints_text() -> bool:
    """Whether this process logs lines for people, and not for machines."""
    return any(isinstance(h.formatter, TextFormatter) for h in logging.getLogger().handlers)


def one_line(error: BaseException) -> str:
    """Return an exception's text on one line, led by its type unless lightserve raised it."""
    text = " ".join(str(error).split())
    if type(error).__module__ == "lightserve.errors":
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
