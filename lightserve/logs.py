"""Logging of every process: one line per record on stderr, with the process's name."""

from __future__ import annotations

import logging
import sys


def setup_logging(process_name: str, level: str) -> None:
    """Send this process's records to stderr; `level` is one of --log-level's choices."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname)s {process_name} %(name)s: %(message)s")
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())


def one_line(error: BaseException) -> str:
    """Return an exception's text on one line, led by its type unless lightserve raised it."""
    text = " ".join(str(error).split())
    if type(error).__module__ == "lightserve.errors":
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
