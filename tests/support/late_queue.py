"""The CPU as a device that is late: what is fetched from it comes when a mark is waited for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightserve.worker.device import Array, HostMark, HostQueue, Mark


class LateMark(HostMark):
    """Past when it was waited for; then everything that was fetched before it is there."""

    def __init__(self, arriving: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._arriving: list[tuple[Tensor, Tensor]] | None = list(arriving)
        arriving.clear()

    def is_past(self) -> bool:
        return self._arriving is None

    @torch.inference_mode()
    def wait(self) -> None:
        for host, tensor in self._arriving or ():
            host.copy_(tensor)
        self._arriving = None


class LateQueue(HostQueue):
    """Host copies hold nonsense until then; an array that was uploaded may be written at once."""

    is_at_once = False

    def __init__(self) -> None:
        self._arriving: list[tuple[Tensor, Tensor]] = []

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        return super().upload([array.copy() for array in arrays])

    def download(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        found = []
        for tensor in tensors:
            host = torch.zeros_like(tensor) if tensor.dtype is torch.bool else tensor * 0 - 77
            self._arriving.append((host, tensor.clone()))
            found.append(host)
        return found

    def mark(self) -> Mark:
        return LateMark(self._arriving)
