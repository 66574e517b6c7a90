"""The device under test and how time is taken on it.

On a GPU: device events, with a delay in front so that the device never waits for the host
between them. On a CPU, for rehearsals: the host's clock.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

DELAY_CYCLES = 40_000_000
"""About 20 ms: while the device spins, the host queues what is to be timed."""
MIN_ROUNDS, MAX_ROUNDS = 5, 30
"""So many that the host has queued them before the delay ends, and the queue has room for them."""
ROUNDS_S = 0.4
"""Device time that one figure takes, about."""
CPU_CACHE_BYTES = 1 << 14
"""What a rehearsal takes for the last cache."""

Work = Callable[[int], object]
"""Does something once; the number of the round says which of the rotated buffers to use."""


@dataclass(frozen=True)
class Machine:
    """A GPU, or the CPU of a rehearsal."""

    device: torch.device

    @property
    def is_gpu(self) -> bool:
        """Whether figures mean anything."""
        return self.device.type == "cuda"

    @property
    def cache_bytes(self) -> int:
        """Size of the last cache: what is read again must be several times this."""
        if not self.is_gpu:
            return CPU_CACHE_BYTES
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Give back device memory that nobody uses any more."""
        if self.is_gpu:
            gc.collect()
            torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        """Return the device memory that could be allocated now."""
        if not self.is_gpu:
            return 1 << 28
        self.release()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return fresh random numbers of standard deviation 1."""
        return torch.empty(shape, dtype=dtype, device=self.device).normal_()

    def median_s(self, work: Work) -> float:
        """Return the median seconds of a call, after warming up."""
        first_s = self._once(work)
        estimate_s = min(first_s, self._once(work))
        rounds = int(min(MAX_ROUNDS, max(MIN_ROUNDS, ROUNDS_S / max(estimate_s, 1e-9))))
        if not self.is_gpu:
            return statistics.median(self._once(work) for _ in range(2))
        work(0)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
        torch.cuda._sleep(DELAY_CYCLES)
        marks[0].record()
        for number in range(rounds):
            work(number)
            marks[number + 1].record()
        torch.cuda.synchronize(self.device)
        return 1e-3 * statistics.median(float(a.elapsed_time(b)) for a, b in pairwise(marks))

    def _once(self, work: Work) -> float:
        self.synchronize()
        start_s = time.perf_counter()
        work(0)
        self.synchronize()
        return time.perf_counter() - start_s


def this_machine(*, rehearse: bool) -> Machine:
    """Return the first GPU, or the CPU in a rehearsal.

    Raises:
        SystemExit: there is no GPU to measure.
    """
    if rehearse:
        return Machine(torch.device("cpu"))
    if not torch.cuda.is_available():
        raise SystemExit("no GPU: --rehearse runs every part on the CPU, with tiny sizes")
    torch.cuda.set_device(0)
    return Machine(torch.device("cuda", 0))
