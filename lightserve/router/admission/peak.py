"""What the rules that look into the future share: a round over sampled futures.

A rule says how long outputs will be (one or more futures per request) and which peaks it
accepts; the round does the rest, lazily: with nobody waiting nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from lightserve.router.future_memory import FutureMemory, IntArray
from lightserve.router.request import Request

OutputSampler = Callable[[Sequence[Request]], IntArray]
"""Total output lengths of requests, int64 [n, num_futures], each above what is generated."""

PeakTest = Callable[[IntArray, Request], bool]
"""Whether a newcomer that leads to these peaks (int64 [num_futures]) may start."""


def num_generated(request: Request) -> int:
    """Output tokens a request has or is about to have."""
    return len(request.output_token_ids) + request.num_inflight_samples


class PeakRound:
    """An `AdmissionRound` that forecasts the peak of the batch with each newcomer."""

    def __init__(self, live: Collection[Request], sample: OutputSampler, fits: PeakTest) -> None:
        self._live = list(live)
        self._sample = sample
        self._fits = fits
        self._memory: FutureMemory | None = None

    def admit(self, request: Request) -> bool:
        """Admit if the peak with this request is acceptable, or if it would be alone."""
        if self._memory is None:
            self._memory = self._forecast()
        base = request.num_known_tokens
        rest = self._sample([request])[0] - num_generated(request)
        is_alone = self._memory.num_requests == 0
        if not is_alone and not self._fits(self._memory.peaks_with(base, rest), request):
            return False
        self._memory.add(base, rest)
        return True

    def _forecast(self) -> FutureMemory:
        count = len(self._live)
        base = np.fromiter((request.num_known_tokens for request in self._live), np.int64, count)
        generated = np.fromiter(map(num_generated, self._live), np.int64, count)
        rest = self._sample(self._live) - generated[:, None]
        return FutureMemory(base, np.maximum(rest, 0).T)
