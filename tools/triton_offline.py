"""Compile kernels for a GPU that is not there, and read what the compiler made of them.

Inside `compiling(capability)` every launch of a Triton kernel compiles it for that GPU, with the
very constants and alignments of the launch, and runs nothing: call the functions that launch, with
tensors on the device "meta". Then `read` tells registers, spills, shared memory and instructions.

Inside `loading(capability)` launches go all the way to the driver, which does nothing: it notes
what it would launch.

Not under TRITON_INTERPRET=1: there kernels are Python functions. Used by
bench/engine/kernels_offline.py and tests.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_SM_REGISTERS = 65536
_SM_SHARED_BYTES = {80: 164 << 10, 89: 100 << 10, 90: 228 << 10, 100: 228 << 10, 120: 100 << 10}
"""Shared memory of a multiprocessor by compute capability; a block can have 1 KiB less."""
_BLOCK_RESERVED_BYTES = 1 << 10
_SM_THREADS = {80: 2048, 89: 1536, 90: 2048, 100: 2048, 120: 1536}
_SM_BLOCKS = {80: 32, 89: 24, 90: 32, 100: 32, 120: 24}
_WARP = 32


@dataclass(frozen=True)
class Launch:
    """A kernel as compiled for one launch."""

    name: str
    capability: int
    grid: tuple[int, ...]
    cubin: bytes = field(repr=False)
    num_warps: int
    num_stages: int
    shared_bytes: int
    is_fused: bool
    """Whether a product and a sum may be one instruction, which rounds once."""


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes, and which instructions that matter it has."""

    num_registers: int
    """Per thread."""
    num_local: int
    """Loads and stores of local memory: spilled registers."""
    num_wgmma: int
    """Matrix products of warp groups (HGMMA, of integers IGMMA, of FP8 QGMMA; sm_90)."""
    num_tensor_memory: int
    """Matrix products whose sums are in tensor memory (UTCHMMA, …; sm_100)."""
    num_mma: int
    """Matrix products of single warps (HMMA, of integers IMMA, of FP8 QMMA)."""
    num_wide_loads: int
    """Loads of 16 bytes per thread, to registers (LDG.128) or shared memory (LDGSTS.128)."""
    num_async_copies: int
    """Copies from global to shared memory (LDGSTS), of any width."""
    shared_bytes: int
    blocks_per_sm: int
    """That fit into registers, shared memory and threads of a multiprocessor."""


@contextmanager
def compiling(capability: int) -> Iterator[list[Launch]]:
    """Compile what is launched meanwhile for a compute capability (80, 90, …); yields launches."""
    found: list[Launch] = []
    before, run = driver._active, JITFunction.run  # there is no getter

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found.append(_launch(kernel, capability, grid))
        return kernel

    driver.set_active(_NoGpu(capability))
    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = run
        driver._active = before


class _NoGpu(SimpleNamespace):
    """What Triton asks of a driver in order to compile."""

    def __init__(self, capability: int) -> None:
        super().__init__(
            get_current_target=lambda: GPUTarget("cuda", capability, _WARP),
            # Kernels are cached per device: one device for each capability.
            get_current_device=lambda: capability,
            get_current_stream=lambda device: 0,
        )


class Loaded(NamedTuple):
    """A launch as a driver gets it."""

    name: str
    function: int
    """The compiled kernel, on one device."""
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]


class _NoteTaker(_NoGpu):
    """A driver that loads kernels and notes their launches. `device` is the current one."""

    def __init__(self, capability: int) -> None:
        super().__init__(capability)
        self.device = 0
        self.launches: list[Loaded] = []
        numbers = itertools.count(1)

        def launcher(source, metadata):
            def launch(x, y, z, stream, function, *arguments):
                # Before a kernel's arguments come what Triton knows of it, and two hooks.
                self.launches.append(Loaded(metadata.name, function, (x, y, z), arguments[4:]))

            return launch

        def load(name, binary, shared, device):
            return next(numbers), next(numbers), 1, 0, 1024

        self.get_current_device = lambda: self.device
        self.launcher_cls = launcher
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": max_shared_bytes(capability)},
            load_binary=load,
            unload_module=lambda module: None,
        )


@contextmanager
def loading(capability: int) -> Iterator[_NoteTaker]:
    """Compile and load what is launched meanwhile; yields the driver."""
    before = driver._active
    taker = _NoteTaker(capability)
    driver.set_active(taker)
    try:
        yield taker
    finally:
        driver._active = before


def _launch(kernel, capability: int, grid) -> Launch:
    return Launch(
        name=kernel.metadata.name,
        capability=capability,
        grid=tuple(grid),
        cubin=kernel.asm["cubin"],
        num_warps=kernel.metadata.num_warps,
        num_stages=kernel.metadata.num_stages,
        shared_bytes=kernel.metadata.shared,
        is_fused=kernel.metadata.enable_fp_fusion,
    )


def max_shared_bytes(capability: int) -> int:
    """Return the most shared memory that a block may have."""
    return _SM_SHARED_BYTES[capability] - _BLOCK_RESERVED_BYTES


def read(launch: Launch) -> Resources:
    """Return what a kernel takes, from its machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(launch.cubin)
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        code = _tool("nvdisasm", "-c", file.name)
    num_registers = int(re.findall(r"REG:(\d+)", usage)[-1])
    return Resources(
        num_registers=num_registers,
        num_local=len(re.findall(r"\b(?:LDL|STL)\b", code)),
        num_wgmma=len(re.findall(r"\b[HIQ]GMMA\b", code)),
        num_tensor_memory=len(re.findall(r"\bUTC\w+MMA\b", code)),
        num_mma=len(re.findall(r"\b[HIQ]MMA\b", code)),
        num_wide_loads=len(re.findall(r"\b(?:LDG|LDGSTS)\S*\.128\b", code)),
        num_async_copies=len(re.findall(r"\bLDGSTS\b", code)),
        shared_bytes=launch.shared_bytes,
        blocks_per_sm=_blocks_per_sm(launch, num_registers),
    )


def _blocks_per_sm(launch: Launch, num_registers: int) -> int:
    threads = launch.num_warps * _WARP
    # Registers are given to warps in units of 256.
    warp_registers = -(-num_registers * _WARP // 256) * 256
    shared = launch.shared_bytes + _BLOCK_RESERVED_BYTES
    return min(
        _SM_REGISTERS // (warp_registers * launch.num_warps),
        _SM_SHARED_BYTES[launch.capability] // shared,
        _SM_THREADS[launch.capability] // threads,
        _SM_BLOCKS[launch.capability],
    )


def _tool(name: str, *arguments: str) -> str:
    command = [str(_TOOLS / name), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
