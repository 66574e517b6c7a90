"""What a chrome trace says of the device: when it was busy, and what ran beside copies."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity

from gpu_parts.machine import Machine

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


class Interval(NamedTuple):
    """Something that ran on the device, in microseconds."""

    start: float
    end: float
    is_copy: bool
    """Between host and device."""


@contextmanager
def profiled(machine: Machine, path: Path) -> Iterator[None]:
    """Write a chrome trace of what happens inside to `path`."""
    activities = [ProfilerActivity.CUDA] if machine.is_gpu else [ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        yield
        machine.synchronize()
    profile.export_chrome_trace(str(path))


def device_intervals(path: Path) -> list[Interval]:
    """Return what ran on the device, by start."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    events = json.loads(data)["traceEvents"]
    found = [
        Interval(
            event["ts"],
            event["ts"] + event["dur"],
            "HtoD" in event["name"] or "DtoH" in event["name"],
        )
        for event in events
        if event.get("ph") == "X" and event.get("cat") in DEVICE_CATEGORIES
    ]
    return sorted(found)


def union(intervals: Iterable[Interval]) -> list[tuple[float, float]]:
    """Return disjoint stretches, in order, that cover the intervals."""
    merged: list[tuple[float, float]] = []
    for start, end, _ in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(stretches: Sequence[tuple[float, float]]) -> float:
    """Return the sum of the stretches' lengths."""
    return sum(end - start for start, end in stretches)


def idle_pct(path: Path) -> float | None:
    """Return the share of a trace in which nothing ran, from the first work to the last.

    None: nothing ran on a device.
    """
    busy = union(device_intervals(path))
    if not busy:
        return None
    return 100 * (1 - length(busy) / (busy[-1][1] - busy[0][0]))


def overlapped_pct(intervals: Sequence[Interval], *, least_us: float) -> float | None:
    """Return the share of the time of long copies in which kernels ran as well.

    `least_us`: shorter copies are those that every step makes. None: there are no such copies.
    """
    copies = [one for one in intervals if one.is_copy and one.end - one.start >= least_us]
    if not copies:
        return None
    kernels = [one for one in intervals if not one.is_copy]
    together = length(union(copies)) + length(union(kernels)) - length(union(copies + kernels))
    return 100 * together / length(union(copies))
