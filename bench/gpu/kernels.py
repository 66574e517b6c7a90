"""The large grid of kernels against the float32 reference; a wrong kernel must not pass it.

The cases of one head shape share their compiled kernels, so shapes are shared out among processes.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import torch
from support.kernel_grid import (
    LIMITS,
    AttentionCase,
    GridReport,
    attention_cases,
    attention_error,
    dense_comparisons,
    relative_error,
)

from bench.gpu.context import Bench
from bench.gpu.self_check import WrongScale
from lightserve.kernels.triton.kernels import TritonKernels

PROCESSES = 6
"""Each compiles and has the device to itself for moments."""
REHEARSED_EVERY = 30
"""A rehearsal takes one case of so many of the small grid."""
TEETH = AttentionCase("mixed", "scattered", (4, 2, 32), 24, torch.float32)


def run(bench: Bench) -> None:
    """Run the grid; a part of the small one in a rehearsal."""
    device = bench.machine.device
    cases = attention_cases(large=not bench.rehearse)
    found = in_processes(cases[::REHEARSED_EVERY] if bench.rehearse else cases, str(device))
    report = merged([found, *(dense(dtype, device) for dtype in LIMITS)])
    for dtype, limit in LIMITS.items():
        name = str(dtype).removeprefix("torch.")
        worst = {
            key.rpartition(" ")[0]: error
            for key, error in sorted(report.worst.items())
            if key.rpartition(" ")[2] == name
        }
        errors = ", ".join(f"{operation} {error:.2g}" for operation, error in worst.items())
        is_right = all(error <= limit for error in worst.values())
        bench.rows.claim(f"{name}, relative errors below {limit:g}", is_right, errors)
    note = "; ".join(report.failures[:3]).replace("|", "/")
    bench.rows.claim(f"{report.num_cases} comparisons", not report.failures, note)
    error = attention_error(WrongScale(), TEETH, device)
    bench.rows.claim("a wrong scale is noticed", error > LIMITS[TEETH.dtype], f"{error:.2g}")


def attention(cases: Sequence[AttentionCase], device: str) -> GridReport:
    """Compare attention on some cases."""
    report, kernels = GridReport(), TritonKernels()
    for case in cases:
        error = attention_error(kernels, case, torch.device(device))
        report.add("attention", case, error, case.dtype)
    return report


def dense(dtype: torch.dtype, device: torch.device) -> GridReport:
    """Compare everything else in one type."""
    report = GridReport()
    for operation, case, result, truth in dense_comparisons(TritonKernels(), dtype, device):
        report.add(operation, case, relative_error(result, truth), dtype)
    return report


def in_processes(cases: Sequence[AttentionCase], device: str) -> GridReport:
    """Compare attention on a device in several processes."""
    shares: dict[tuple[object, ...], list[AttentionCase]] = {}
    for case in cases:
        shares.setdefault((case.heads, case.dtype), []).append(case)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, mp_context=spawn) as pool:
        return merged(list(pool.map(attention, shares.values(), [device] * len(shares))))


def merged(reports: Sequence[GridReport]) -> GridReport:
    """Return what several reports say together."""
    whole = GridReport()
    for report in reports:
        whole.num_cases += report.num_cases
        whole.failures += report.failures
        for name, error in report.worst.items():
            whole.worst[name] = max(error, whole.worst.get(name, 0.0))
    return whole
