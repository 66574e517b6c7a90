"""Memory and CPU time of a process, from /proc."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_UTIME, _STIME, _RSS = 11, 12, 21
"""Fields of /proc/PID/stat, counted from the one behind the name in parentheses."""


class ProcessUsage(NamedTuple):
    """What a process has used."""

    resident_bytes: int
    cpu_s: float


def read_usage(pid: int) -> ProcessUsage | None:
    """Return what a process has used so far, None if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    ticks = int(fields[_UTIME]) + int(fields[_STIME])
    return ProcessUsage(int(fields[_RSS]) * _PAGE_BYTES, ticks / _TICKS_PER_S)
