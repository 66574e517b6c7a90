"""What the device can do at best: every part that needs a ceiling measures it itself."""

from __future__ import annotations

import torch

from bench.gpu.context import Bench
from bench.gpu.machine import Machine

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


def run(bench: Bench) -> None:
    """Report both."""
    machine = bench.machine
    if machine.is_gpu:
        properties = torch.cuda.get_device_properties(machine.device)
        note = f"torch {torch.__version__}, {properties.multi_processor_count} multiprocessors"
        bench.rows.figure(properties.name, properties.total_memory / 2**30, "GiB", note=note)
    bench.rows.figure("copy, read + written", copy_bandwidth(machine) / 1e9, "GB/s")
    bench.rows.figure("bf16 matrix product, 8192^3", matrix_rate(machine) / 1e12, "TFLOP/s")
