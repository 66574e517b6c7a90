"""Waiting for, and looking at, processes that tests start."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psutil

ResultT = TypeVar("ResultT")


PATIENCE_S = 300.0
"""For what takes milliseconds on a machine that is not busy, and ends as soon as it has come."""


def wait_for(
    probe: Callable[[], ResultT | None], what: str, timeout_s: float = PATIENCE_S
) -> ResultT:
    """Return the first truthy result of `probe`; fails the test after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if result := probe():
            return result
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {timeout_s:g} s")


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_gone(pids: list[int], timeout_s: float = PATIENCE_S) -> None:
    """Wait until none of these processes runs."""
    wait_for(lambda: not any(map(is_running, pids)), f"end of {pids}", timeout_s)
