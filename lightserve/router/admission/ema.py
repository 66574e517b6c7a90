"""EMA: one guessed length per request, from an exponential average (newer LightLLM, P13).

A request is taken to end at max(1.1 x generated, average of finished lengths), at most at its
`max_tokens`; while more than `BUSY_USAGE` of the pool is in use, at its `max_tokens`. The peak
formula is Past-Future's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from lightserve.router.admission.base import PoolView
from lightserve.router.admission.peak import PeakAdmission, PeakRound, nums_generated
from lightserve.router.admission.sharing import SharedPrefixes
from lightserve.router.future_memory import IntArray
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.request import Request
from lightserve.types import StepId

GROWTH = 1.1
BUSY_USAGE = 0.85


class EmaAdmission(PeakAdmission):
    """See the module's docstring; `lengths.average` is the exponential average."""

    def __init__(self, lengths: OutputLengths) -> None:
        self._lengths = lengths

    def begin(self, live: Collection[Request], pool: PoolView, step_id: StepId) -> PeakRound:
        """Start a round; nothing in it is random."""
        del step_id
        num_held = sum(request.next_position for request in live)
        num_held -= SharedPrefixes(live).num_counted_twice
        is_busy = num_held > BUSY_USAGE * pool.num_slots

        def sample(requests: Sequence[Request]) -> IntArray:
            count = len(requests)
            max_tokens = np.fromiter((r.admission_limit for r in requests), np.int64, count)
            if is_busy:
                return max_tokens[:, None]
            generated = nums_generated(requests)
            guess = np.maximum(np.ceil(GROWTH * generated), self._lengths.average)
            lengths: IntArray = np.clip(guess.astype(np.int64), generated + 1, max_tokens)
            return lengths[:, None]

        return PeakRound(live, sample, lambda peaks, _: int(peaks[0]), pool.num_slots, self)
