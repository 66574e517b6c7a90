"""CUDA graphs without a GPU: recorders for tests.

`TapeRecorder` is the faithful one. It takes down every torch operation of a function with the very
tensors that went in and came out, and repeats these operations on these tensors: scalars are those
of the recording, whatever Python did in between is not done again, and a value that was read from
a tensor is an error, as in a capture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from lightserve.worker.graphs import MemoryUse

_READ_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Of operations for which the host waits for the device."""
_READS = {torch.ops.aten.item.default, torch.ops.aten.is_nonzero.default}
_INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default}
"""Whose results have a size that is not known only if there is a mask."""


class _Operation(NamedTuple):
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]


class Tape(TorchDispatchMode):
    """Takes down the operations of one run."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        if _waits(func, inputs):
            raise RuntimeError(f"{func} waits for the device: not permitted in a capture")
        result = func(*args, **kwargs)
        outputs = [value for value in tree_flatten(result)[0] if isinstance(value, Tensor)]
        _check_devices(func, inputs, outputs)
        self.operations.append(_Operation(func, args, kwargs, outputs))
        return result

    def play(self) -> None:
        """Repeat the operations on the same tensors."""
        for function, args, kwargs, outputs in self.operations:
            result = function(*args, **kwargs)
            again = [value for value in tree_flatten(result)[0] if isinstance(value, Tensor)]
            for old, new in zip(outputs, again, strict=True):
                if old.data_ptr() != new.data_ptr():  # neither a view nor written in place
                    old.copy_(new)


def _waits(func: Any, inputs: list[Tensor]) -> bool:
    if func in _INDEXING:
        return any(tensor.dtype is torch.bool for tensor in inputs[1:])
    return func in _READS or not _READ_TAGS.isdisjoint(func.tags)


def _check_devices(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    devices = {tensor.device for tensor in (*inputs, *outputs) if tensor.dim() > 0}
    if len(devices) > 1:
        raise RuntimeError(f"{func} copies between {devices}: a replay would read freed memory")


class TapeRecorder:
    """Repeats the operations that were taken down."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.tapes: list[Tape] = []

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        function()
        with Tape() as tape:
            function()
        self.tapes.append(tape)
        self.num_recorded += 1
        return tape.play

    def memory(self) -> MemoryUse:
        """Pretend that every recording takes a MiB, half of it of the driver's."""
        return MemoryUse(self.num_recorded * 2**19, self.num_recorded * 2**20)


class RerunRecorder:
    """Runs the whole function again, for what is no torch operation: Triton's launches.

    What torch does in it is looked at as in `TapeRecorder`.
    """

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        with Tape():
            function()
        return function

    def memory(self) -> MemoryUse:
        return MemoryUse(0, 0)
