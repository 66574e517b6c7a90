"""Take a running process's memory away: by a control group, or by its address space."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest

LIMIT_BYTES = 1024 * 1024
"""Of pages that come after the limit: less than a step of a model takes."""
NO_HOARD = MappingProxyType({"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"})
"""Environment of a process that is to run out of memory. The C library then gives back what is
freed, and maps each larger block anew: else a process that has been through its largest step needs
no memory that it has not got."""
_ROOT = Path("/sys/fs/cgroup")


@contextmanager
def in_a_small_control_group(process: psutil.Process) -> Iterator[None]:
    """Put a process into a control group whose memory is used up at once: the kernel kills it.

    Skips the test where no such group can be made.
    """
    group, limit = _make_group()
    try:
        (group / limit).write_text(str(LIMIT_BYTES))
        with contextlib.suppress(OSError):  # else swap would be used
            (group / "memory.swap.max").write_text("0")
        (group / "cgroup.procs").write_text(str(process.pid))
        yield
    finally:
        _remove(group)


def _make_group() -> tuple[Path, str]:
    name = f"lightserve-test-{os.getpid()}"
    for parent, limit in (
        (_ROOT / "memory", "memory.limit_in_bytes"),
        (_ROOT, "memory.max"),
    ):
        group = parent / name
        with contextlib.suppress(OSError):
            if limit == "memory.max":
                (parent / "cgroup.subtree_control").write_text("+memory")
            elif not (parent / limit).exists():
                continue
            group.mkdir()
            if (group / limit).exists():
                return group, limit
            group.rmdir()
    pytest.skip("no control group with a memory limit can be made here (needs root)")


def _remove(group: Path) -> None:
    """Remove a group; the kernel may take a moment until it has no process left."""
    for pid in (group / "cgroup.procs").read_text().split():
        (group.parent / "cgroup.procs").write_text(pid)
    for _ in range(100):
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)


@contextmanager
def with_no_more_addresses(process: psutil.Process) -> Iterator[None]:
    """Let a process have no more address space, whatever it gives back: each new mapping fails."""
    process.rlimit(resource.RLIMIT_AS, (0, 0))
    yield


MemoryLimit = Callable[[psutil.Process], AbstractContextManager[None]]
