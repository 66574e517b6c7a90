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

from bench.gpu.machine import Machine

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
COPY_KERNELS = ("_move_kernel", "_rows_kernel")
"""Those of `lightserve.kernels.triton.copies`."""


class Interval(NamedTuple):
    """Something that ran on the device, in microseconds."""

    start: float
    end: float
    stream: int
    is_of_pass: bool
    """Whether it is a kernel, and none that copies KV."""


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
    return sorted(
        Interval(
            event["ts"],
            event["ts"] + event["dur"],
            int(event["args"].get("stream", 0)),
            event["cat"] == "kernel" and not event["name"].startswith(COPY_KERNELS),
        )
        for event in events
        if event.get("ph") == "X" and event.get("cat") in DEVICE_CATEGORIES
    )


def union(intervals: Iterable[Interval]) -> list[tuple[float, float]]:
    """Return disjoint stretches, in order, that cover the intervals."""
    merged: list[tuple[float, float]] = []
    for start, end, *_ in sorted(intervals):
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


def overlapped_pct(path: Path) -> float | None:
    """Return the share of the time of copies in which a forward pass ran as well.

    Copies have streams of their own: those without a kernel of a pass, which has one where kernels
    are launched one by one, and perhaps another for graphs. None: there are no copies.
    """
    intervals = device_intervals(path)
    of_passes = {one.stream for one in intervals if one.is_of_pass}
    passes = [one for one in intervals if one.stream in of_passes]
    copies = [one for one in intervals if one.stream not in of_passes]
    if not passes or not copies:
        return None
    both = length(union(copies)) + length(union(passes)) - length(union(copies + passes))
    return 100 * both / length(union(copies))
