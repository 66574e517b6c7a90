"""Past-Future (Algorithm 1): admit while the peak of freshly sampled futures fits.

Every round draws new lengths for all requests. Small batches draw several futures and the largest
peak decides, which works as a hidden margin; `reserve` is the open one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from lightserve.router.admission.base import PoolView
from lightserve.router.admission.peak import PeakAdmission, PeakRound
from lightserve.router.future_memory import IntArray
from lightserve.router.output_lengths import LengthArray, OutputLengths
from lightserve.router.request import Request

SMALL_BATCH = 200
"""A batch of k draws min(samples, SMALL_BATCH / k + 1) futures (from the authors' artifact)."""


class PastFutureAdmission(PeakAdmission):
    """`reserve` is a share of the pool, `samples` the most futures drawn."""

    is_steady = False

    def __init__(self, lengths: OutputLengths, *, seed: int, reserve: float, samples: int) -> None:
        self._lengths = lengths
        self._seed = seed
        self._reserve = reserve
        self._samples = samples

    def begin(self, live: Collection[Request], pool: PoolView) -> PeakRound:
        """Start a round with fresh random numbers, the same ones if it is started again.

        They depend on what is held, which changes with every step, and not on how many steps
        the plans before had.
        """
        num_held = sum(request.num_known_tokens for request in live)
        rng = np.random.Generator(np.random.Philox(key=[self._seed, num_held]))
        limit = int(pool.num_slots * (1.0 - self._reserve))
        num_futures = min(self._samples, SMALL_BATCH // max(1, len(live)) + 1)

        def sample(requests: Sequence[Request], generated: IntArray) -> LengthArray:
            count = len(requests)
            max_tokens = np.fromiter((r.admission_limit for r in requests), np.int64, count)
            uniforms = rng.random((count, num_futures))
            keys = [request.prediction_key for request in requests]
            return self._lengths.sample(generated, max_tokens, uniforms, keys)

        return PeakRound(live, sample, lambda peaks, _: int(peaks.max()), limit, found=pool.found)
