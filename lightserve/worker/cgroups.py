"""Linux control groups: where the limits of this process's container are, and those of CPU time.

Version 2 has one hierarchy, version 1 one per controller; the limits of the own group and of all
above it hold. In a container the own group is the root of what is mounted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def group_folders(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, int]]:
    """Yield every control group this process is in, from its own up, with its version, 1 or 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base, version = root / "sys/fs/cgroup", 2
        elif controller in controllers.split(","):
            base, version = root / "sys/fs/cgroup" / controller, 1
        else:
            continue
        own = Path(path.lstrip("/"))
        for folder in (own, *own.parents):
            yield base / folder, version


def read_number(path: Path) -> int | None:
    """Return the number in a file; None if there is no such file or it says `max`."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def usable_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may keep busy: those that it may run on, or fewer where
    a container limits its CPU time (`docker --cpus`, limits of Kubernetes).

    More threads than that would be stopped for most of each period, all in the middle of a step.
    """
    cores = float(len(os.sched_getaffinity(0)))
    for folder, version in group_folders("cpu", root):
        quota, period = _quota_v2(folder) if version == 2 else _quota_v1(folder)
        if quota is not None and period:
            cores = min(cores, quota / period)
    return max(1, int(cores))


def _quota_v2(folder: Path) -> tuple[int | None, int | None]:
    try:
        quota, _, period = (folder / "cpu.max").read_text().strip().partition(" ")
    except OSError:
        return None, None
    return (int(quota), int(period)) if quota.isdigit() and period.isdigit() else (None, None)


def _quota_v1(folder: Path) -> tuple[int | None, int | None]:
    """A quota of -1 is none."""
    return read_number(folder / "cpu.cfs_quota_us"), read_number(folder / "cpu.cfs_period_us")
