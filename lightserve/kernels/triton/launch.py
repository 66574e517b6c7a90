"""Launches of kernels: sizes of grids, and a short way to a kernel that is compiled already.

At each launch Triton works out in Python for which kinds of arguments a kernel is to be compiled,
and looks up whether it is; that takes the host several times as long as the launch itself. Within
a model few kinds ever come. So the first launch of each goes Triton's way, and the kernel that it
compiled serves all later ones, called as Triton calls it:

    launch ─ kinds of arguments ─┬─ known ──► compiled kernel ─────────────────► device
                                 └─ new ────► Triton: specialise, compile ─► keep ─┘

Hooks into Triton's launches are not called. How a compiled kernel is called is no public interface:
with a Triton that has not been tried all launches are its own.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lightserve.kernels.triton import NEWEST_TRITON


# Triton's own `cdiv` and `next_power_of_2` are decorated: they take ten times as long.
def cdiv(number: int, size: int) -> int:
    """Return number / size, rounded up."""
    return -(-number // size)


def next_power_of_2(number: int) -> int:
    """Return the least power of 2 that is not below `number`, at least 1."""
    return 1 << max(0, number - 1).bit_length()


ALIGNMENT = 16
"""Bytes: a kernel knows whether a tensor's address, or an integer, is a multiple of it."""


def launched(function):
    """Return a kernel, `triton.jit` of a function, whose launches are short: a decorator.

    Under TRITON_INTERPRET=1, and with a Triton newer than those tried, it is returned as it is.
    """
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    is_compiled = isinstance(function, JITFunction)
    return Kernel(function) if is_compiled and version <= NEWEST_TRITON else function


class Kernel:
    """Launches a kernel as `kernel[grid](*arguments, **constants)`."""

    def __init__(self, function: JITFunction) -> None:
        """Take a function whose parameters are arguments first and constants behind them."""
        self.function = function
        parameters = inspect.signature(function.fn).parameters
        self._constants = [
            name for name, part in parameters.items() if "constexpr" in str(part.annotation)
        ]
        self._num_arguments = len(parameters) - len(self._constants)
        assert [*parameters][self._num_arguments :] == self._constants, function.fn
        self._compiled: dict[tuple[Any, ...], tuple[CompiledKernel, list[Any]]] = {}
        """Kernels by kinds of arguments; with the constants, in the order of the parameters."""

    def __getitem__(self, grid):
        """Return a function that launches on a grid of one to three dimensions."""
        return partial(self._launch, grid)

    def _launch(self, grid, *arguments, **options):
        """Launch; `options` are the constants, and those of the compiler."""
        if not self._compiled:
            return self._launch_anew(grid, arguments, options)
        active = driver.active
        device = active.get_current_device()
        found = self._compiled.get(kinds_of(device, arguments, options))
        if found is None:
            return self._launch_anew(grid, arguments, options)
        compiled, constants = found
        # Behind what Triton packs of a kernel come facts for hooks, and two hooks.
        compiled.run(
            *grid,
            *(1,) * (3 - len(grid)),
            active.get_current_stream(device),
            compiled.function,
            compiled.packed_metadata,
            None,
            None,
            None,
            *arguments,
            *constants,
        )
        return compiled

    def _launch_anew(self, grid, arguments, options):
        """Launch by way of Triton, and keep the kernel if it is on the device now."""
        compiled = self.function[grid](*arguments, **options)
        # Programs that only compile, or do not even that, have nothing to launch again.
        is_loaded = isinstance(compiled, CompiledKernel) and compiled.module is not None
        if is_loaded and len(arguments) == self._num_arguments:
            key = kinds_of(driver.active.get_current_device(), arguments, options)
            if key is not None:
                constants = [options[name] for name in self._constants]
                self._compiled[key] = (compiled, constants)
        return compiled


def kinds_of(device, arguments, options):
    """Return all that decides which compiled kernel a launch takes; None: ask Triton.

    Triton compiles for types and the alignment of tensors, and for integers whether they are 1,
    multiples of 16 and within 32 bits. Equal keys are of one kernel; some kernels have several.
    """
    key = [device, *options, *options.values()]
    for value in arguments:
        if type(value) is int:
            if not 0 <= value < 2**63:
                return None
            kind = value if value == 1 else 0 if value % ALIGNMENT else ALIGNMENT
            key.append(kind if value < 2**31 else (kind,))  # of 64 bits
        elif isinstance(value, Tensor):
            key.append((value.dtype,) if value.data_ptr() % ALIGNMENT else value.dtype)
        elif value is None or type(value) is float or type(value) is bool:
            key.append(type(value))
        else:
            return None
    return tuple(key)
