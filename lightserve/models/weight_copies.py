"""Copies weights from mapped files into the final parameters, and checks that they are finite.

On the CPU a parameter is copied and looked at. To a GPU the bytes go through two small
page-locked buffers in turn: while one is on its way to the device, the host fills the other from
the mapping, converting the type. Nothing waits for a check: the bounds of every tensor stay on
the device, and are looked at once, at the end.

    mapping ──fill──► buffer 0 ──copy──► parameter rows 0 …
            ──fill──► buffer 1 ──copy──► parameter rows n …     beside the fill of buffer 0 again
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

BUFFER_BYTES = 32 * 2**20
"""Bytes of each of the two: half a millisecond of the bus, far above the cost of starting a
copy."""


class WeightCopies(Protocol):
    """Copies tensors and remembers which of them were not finite."""

    def copy(self, target: Tensor, source: Tensor, name: str) -> None:
        """Copy `source`, on the host, into a parameter of its shape, converting the type."""

    def not_finite(self) -> list[str]:
        """Return the names of parameters that have got NaN or infinity, since the last call."""


class DirectCopies:
    """Parameters on the CPU; see `WeightCopies`."""

    def __init__(self) -> None:
        self._not_finite: list[str] = []

    def copy(self, target: Tensor, source: Tensor, name: str) -> None:
        """See `WeightCopies.copy`."""
        target.copy_(source)
        if not is_finite(target):
            self._not_finite.append(name)

    def not_finite(self) -> list[str]:
        """See `WeightCopies.not_finite`."""
        names, self._not_finite = self._not_finite, []
        return names


class Fence(Protocol):
    """A point behind the copies to the device that have been started."""

    def record(self) -> None:
        """Be that point, from now on."""

    def wait(self) -> None:
        """Let the host wait until it is reached; at once if it was never recorded."""


class _Buffer(NamedTuple):
    memory: Tensor
    """uint8 [BUFFER_BYTES], page-locked."""
    fence: Fence
    """Behind the last copy out of it."""


class StagedCopies:
    """Parameters on a device; see `WeightCopies`."""

    def __init__(self, memory: Tensor, make_fence: Callable[[], Fence]) -> None:
        """Stage in `memory`, uint8 [2, bytes of each buffer]."""
        self._buffers = [_Buffer(part, make_fence()) for part in memory]
        self._names: list[str] = []
        self._bounds: list[Tensor] = []
        """Least and largest value of each parameter, [2] on the device."""

    def copy(self, target: Tensor, source: Tensor, name: str) -> None:
        """See `WeightCopies.copy`; `source` may be unmapped afterwards, `target` is not yet whole.

        Rows must fit into a buffer each.
        """
        row_bytes = max(1, target[0].numel()) * target.itemsize
        num_rows = len(self._buffers[0].memory) // row_bytes
        assert num_rows > 0, f"{name}: a row of {row_bytes} bytes"
        for start in range(0, len(target), num_rows):
            self._stage(target[start : start + num_rows], source[start : start + num_rows])
        self._names.append(name)
        self._bounds.append(torch.stack(torch.aminmax(target)))

    def not_finite(self) -> list[str]:
        """See `WeightCopies.not_finite`: the only time that the host waits for the device."""
        if not self._names:
            return []
        good = torch.stack(self._bounds).isfinite().all(dim=1).tolist()
        names = [name for name, is_good in zip(self._names, good, strict=True) if not is_good]
        self._names, self._bounds = [], []
        return names

    def _stage(self, target: Tensor, source: Tensor) -> None:
        """Copy some rows; the host waits for the copy before the last one."""
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        buffer.fence.wait()
        staged = buffer.memory[: target.nbytes].view(target.dtype).view(target.shape)
        staged.copy_(source)
        target.copy_(staged, non_blocking=True)
        buffer.fence.record()


class CudaFence:
    """See `Fence`."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """See `Fence.record`."""
        self._event.record()

    def wait(self) -> None:
        """See `Fence.wait`."""
        self._event.synchronize()


def weight_copies(device: torch.device) -> WeightCopies:
    """Return the copies to parameters on `device`."""
    if device.type != "cuda":
        return DirectCopies()
    memory = torch.empty(2, BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
    return StagedCopies(memory, CudaFence)


def not_finite(tensor: Tensor) -> str:
    """Return words about the values of a tensor that has some that are no numbers."""
    return f"has values that are not finite, such as {tensor[~tensor.isfinite()][0].item()}"


def is_finite(tensor: Tensor) -> bool:
    """Return whether every value of a tensor that is not empty is finite; waits for it."""
    return all(bool(torch.isfinite(bound)) for bound in torch.aminmax(tensor))
