"""The device under test and how time is taken on it.

On a GPU: device events, with a delay in front so that the device never waits for the host
between them. On a CPU, for rehearsals: the host's clock.
"""

from __future__ import annotations

import gc
import gzip
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from bench.gpu.table import Bench

DELAY_CYCLES = 40_000_000
"""About 20 ms: while the device spins, the host queues what is to be timed."""
MIN_ROUNDS, MAX_ROUNDS = 5, 30
"""So many that the host has queued them before the delay ends, and the queue has room for them."""
ROUNDS_S = 0.4
"""Device time that one figure takes, about."""
CPU_CACHE_BYTES = 1 << 14
"""What a rehearsal takes for the last cache."""

Work = Callable[[int], object]
"""Does something once; the number of the round says which of the rotated buffers to use."""


@dataclass(frozen=True)
class Machine:
    """A GPU, or the CPU of a rehearsal."""

    device: torch.device

    @property
    def is_gpu(self) -> bool:
        """Whether figures mean anything."""
        return self.device.type == "cuda"

    @property
    def cache_bytes(self) -> int:
        """Size of the last cache: what is read again must be several times this."""
        if not self.is_gpu:
            return CPU_CACHE_BYTES
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Give back device memory that is no longer used."""
        if self.is_gpu:
            gc.collect()
            torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        """Return the device memory that could be allocated now."""
        if not self.is_gpu:
            return 1 << 28
        self.release()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return fresh random numbers of standard deviation 1."""
        return torch.empty(shape, dtype=dtype, device=self.device).normal_()

    def median_s(self, work: Work) -> float:
        """Return the median seconds of a call, after warming up."""
        first_s = self._once(work)
        estimate_s = min(first_s, self._once(work))
        rounds = int(min(MAX_ROUNDS, max(MIN_ROUNDS, ROUNDS_S / max(estimate_s, 1e-9))))
        if not self.is_gpu:
            return statistics.median(self._once(work) for _ in range(2))
        work(0)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
        torch.cuda._sleep(DELAY_CYCLES)
        marks[0].record()
        for number in range(rounds):
            work(number)
            marks[number + 1].record()
        torch.cuda.synchronize(self.device)
        return 1e-3 * statistics.median(float(a.elapsed_time(b)) for a, b in pairwise(marks))

    def _once(self, work: Work) -> float:
        self.synchronize()
        start_s = time.perf_counter()
        work(0)
        self.synchronize()
        return time.perf_counter() - start_s


def this_machine(*, rehearse: bool) -> Machine:
    """Return the first GPU, or the CPU in a rehearsal.

    Raises:
        SystemExit: there is no GPU to measure.
    """
    if rehearse:
        return Machine(torch.device("cpu"))
    if not torch.cuda.is_available():
        raise SystemExit("no GPU: --rehearse runs every part on the CPU, with tiny sizes")
    torch.cuda.set_device(0)
    return Machine(torch.device("cuda", 0))


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


COPY_BYTES, REHEARSED_COPY_BYTES = 4 << 30, 1 << 20
MATRIX, REHEARSED_MATRIX = 8192, 64


def copy_bandwidth(machine: Machine) -> float:
    """Return the bytes per second of a device-to-device copy, read and written."""
    num = (COPY_BYTES if machine.is_gpu else REHEARSED_COPY_BYTES) // 2
    source = machine.random(num)
    target = torch.empty_like(source)
    seconds = machine.median_s(lambda _: target.copy_(source))
    return 2 * source.nbytes / seconds


def matrix_rate(machine: Machine) -> float:
    """Return the operations per second of a bfloat16 matrix product on random data."""
    size = MATRIX if machine.is_gpu else REHEARSED_MATRIX
    pairs = [(machine.random(size, size), machine.random(size, size)) for _ in range(2)]
    out = torch.empty_like(pairs[0][0])
    seconds = machine.median_s(lambda number: torch.mm(*pairs[number % 2], out=out))
    return float(2 * size**3 / seconds)


def ceilings(bench: Bench) -> None:
    """Report both."""
    machine = bench.machine
    if machine.is_gpu:
        properties = torch.cuda.get_device_properties(machine.device)
        note = f"torch {torch.__version__}, {properties.multi_processor_count} multiprocessors"
        bench.rows.figure(properties.name, properties.total_memory / 2**30, "GiB", note=note)
    bench.rows.figure("copy, read + written", copy_bandwidth(machine) / 1e9, "GB/s")
    bench.rows.figure("bf16 matrix product, 8192^3", matrix_rate(machine) / 1e12, "TFLOP/s")
