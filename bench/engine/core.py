"""How fast the native core multiplies, beside torch's packed products, in turns.

    python -m bench.engine.core [--threads 2] [--rows 1,8,32] [--rounds 7] [--cpu-time]

Weights are four layers of a model of 0.5 B parameters (hidden 896, intermediate 4864), more than
caches hold. Per number of rows: GB/s of weights, TFLOP/s, and torch's time over the core's, from
the best round and from the medians. On a machine with other work, `--cpu-time` with one thread
takes that thread's CPU time instead.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightserve.kernels.cpu.core import Level
from lightserve.kernels.cpu.default import TorchKernels
from lightserve.kernels.cpu.native import NativeKernels
from lightserve.kernels.interface import Kernels

SHAPES = ((1152, 896), (896, 896), (9728, 896), (896, 4864))
"""(outputs, inputs) of a layer's products."""
LAYERS = 4


class Product(NamedTuple):
    """One weight, packed by some kernels."""

    kernels: Kernels
    weight: Tensor


def packed(kernels: Kernels, dtype: torch.dtype) -> list[Product]:
    """Return the weights of all layers."""
    return [
        Product(kernels, kernels.pack_weight(torch.randn(shape).to(dtype) * shape[1] ** -0.5))
        for _ in range(LAYERS)
        for shape in SHAPES
    ]


def run(products: list[Product], inputs: dict[int, Tensor]) -> None:
    """Multiply by all of them."""
    for kernels, weight in products:
        kernels.linear(inputs[weight.shape[1]], weight, None)


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,256,512,2048")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--level", choices=[level.name.lower() for level in Level][1:])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock: Callable[[], float] = time.thread_time if options.cpu_time else time.perf_counter
    dtype: torch.dtype = getattr(torch, options.dtype)
    level = Level[options.level.upper()] if options.level else None
    both = {
        "core": packed(NativeKernels(level=level), dtype),
        "torch": packed(TorchKernels(), dtype),
    }
    numbers = LAYERS * sum(outputs * inputs for outputs, inputs in SHAPES)
    for rows in map(int, options.rows.split(",")):
        inputs = {size: torch.randn(rows, size).to(dtype) for size in {k for _, k in SHAPES}}
        seconds: dict[str, list[float]] = {name: [] for name in both}
        for _ in range(options.rounds + 1):
            for name, products in both.items():
                start_s = clock()
                run(products, inputs)
                seconds[name].append(clock() - start_s)
        best = {name: min(times[1:]) for name, times in seconds.items()}
        median = {name: statistics.median(times[1:]) for name, times in seconds.items()}
        figures = " | ".join(
            f"{name} {numbers * dtype.itemsize / s / 1e9:5.1f} GB/s"
            f" {2 * numbers * rows / s / 1e12:5.2f} TFLOP/s"
            for name, s in best.items()
        )
        print(
            f"{rows:5d} rows: {figures} | torch / core: best {best['torch'] / best['core']:.2f},"
            f" median {median['torch'] / median['core']:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
