"""Large page-locked host memory: what a GPU reads and writes beside everything else.

torch's own `pin_memory` rounds up to a power of two (33 GiB would take 64) and is silent for as
long as it takes. Here memory is mapped first, in huge pages where the system has them, and locked
as one: a copy may not cross from what was locked by one call to what was by another.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress

import torch
from torch import Tensor

from lightserve.errors import StartupError
from lightserve.progress import progress

_MAPPED_AND_PORTABLE = 0x03
"""cudaHostRegisterPortable | cudaHostRegisterMapped: with an address on the device."""


class _Pages(mmap.mmap):
    """Mapped memory that is unlocked before it is unmapped.

    `weakref.finalize` would come too late: a mapping is gone by then, and CUDA's error about that
    would be raised by whatever is launched next.
    """

    locked_at = 0

    def __del__(self) -> None:
        if self.locked_at and not sys.is_finalizing():
            _unlock(self.locked_at)


def pinned_bytes(num_bytes: int, *, label: str, is_shown: bool = True) -> Tensor:
    """Return page-locked memory, uint8 [num_bytes], unlocked when nobody refers to it any more.

    Args:
        num_bytes: at least 1.
        label: what progress calls it.
        is_shown: whether progress is shown.

    Raises:
        StartupError: the system gives no memory, or locks no more of it.
    """
    try:
        # Private: shared pages are never huge but where the system was told so.
        pages = _Pages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise StartupError(f"no {_gib(num_bytes)} of host memory: {error}") from error
    with suppress(OSError):  # a kernel without them: slower to lock, and nothing else
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    with progress(label, num_bytes, is_shown=is_shown, in_bytes=True) as advance:
        _lock(memory.data_ptr(), num_bytes)
        pages.locked_at = memory.data_ptr()
        advance(num_bytes)
    return memory


def _lock(address: int, num_bytes: int) -> None:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(cudart.cudaHostRegister(address, num_bytes, _MAPPED_AND_PORTABLE))
    if error:
        raise StartupError(
            f"cannot page-lock {_gib(num_bytes)} of host memory (CUDA error {error}):"
            " --host-kv-memory takes less"
        )


def _unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
