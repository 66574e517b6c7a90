"""Compile every Triton kernel for GPUs that need not be there and print what the compiler made.

    python bench/kernels_offline.py [--name PART] [--capability 80 90] [--json FILE]

Exits with 1 if a kernel spills registers, does not fit, or lacks the instructions that it is built
on: 16-byte loads, and warp-group products for prefill on sm_90. A new kernel is one more `Case`:
call the function that launches it, with tensors made by `meta`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from lightserve.kernels.triton import elementwise
from lightserve.kernels.triton.offline import (
    Launch,
    Resources,
    compiling,
    max_shared_bytes,
    read,
)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a tensor that has no memory: launches on it are compiled."""
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True)
class Case:
    """One call whose launches are compiled."""

    name: str
    call: Callable[[], object]
    has_wide_loads: bool = True
    """Whether each of its kernels must have loads of 16 bytes per thread."""


@dataclass(frozen=True)
class Line:
    """One launch of a case."""

    case: Case
    launch: Launch
    resources: Resources

    @property
    def faults(self) -> list[str]:
        """What may not be."""
        found = []
        resources = self.resources
        if resources.num_local:
            found.append(f"{resources.num_local} accesses to local memory: registers spilled")
        if resources.shared_bytes > max_shared_bytes(self.launch.capability):
            found.append(f"{resources.shared_bytes} bytes of shared memory")
        if self.case.has_wide_loads and not resources.num_wide_loads:
            found.append("no loads of 16 bytes")
        return found


CASES: list[Case] = [
    Case("rms_norm 4096", lambda: elementwise.rms_norm(meta(256, 4096), meta(4096), 1e-5)),
    Case(
        "add_rms_norm 4096",
        lambda: elementwise.add_rms_norm(meta(256, 4096), meta(256, 4096), meta(4096), 1e-5),
    ),
    Case("silu_and_mul 14336", lambda: elementwise.silu_and_mul(meta(256, 28672))),
]


def compile_cases(cases: list[Case], capability: int) -> Iterator[Line]:
    """Compile each case's launches for a compute capability."""
    for case in cases:
        with compiling(capability) as launches:
            case.call()
        assert launches, f"{case.name} launches nothing"
        for launch in launches:
            yield Line(case, launch, read(launch))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="", help="only cases whose name contains this")
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--json", type=Path, help="also write the table here")
    options = parser.parse_args()
    cases = [case for case in CASES if options.name in case.name]
    table, num_faults = [], 0
    print(f"{'case':40} {'kernel':24} sm warps stages regs local  shared blocks wgmma  mma 16B")
    for capability in options.capability:
        for line in compile_cases(cases, capability):
            launch, r = line.launch, line.resources
            print(
                f"{line.case.name:40} {launch.name:24} {capability} {launch.num_warps:5}"
                f" {launch.num_stages:6} {r.num_registers:4} {r.num_local:5} {r.shared_bytes:7}"
                f" {r.blocks_per_sm:6} {r.num_wgmma:5} {r.num_mma:4} {r.num_wide_loads:3}"
                + "".join(f"  FAULT: {fault}" for fault in line.faults),
                flush=True,
            )
            num_faults += len(line.faults)
            row = {"case": line.case.name, "kernel": launch.name, "capability": capability}
            table.append({**row, **asdict(r), "faults": line.faults})
    if options.json:
        options.json.write_text(json.dumps(table, indent=1) + "\n")
    print(f"{len(table)} kernels, {num_faults} faults")
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
