"""Risk: admit so that the share of requests that memory is taken from is the one that is accepted.

Our own rule, beyond Past-Future: many futures, of whose peaks a quantile decides instead of a flat
reserve. Which one, is learnt from evictions (`AcceptedRisk`). The uniform numbers behind a
request's futures are the same in every round (common random numbers) and stratified, so that
decisions do not flicker and few futures suffice. Real-time and best-effort requests have quantiles
of their own.

A history is not the truth: it is short at first, and lengths come in waves. In a large batch the
errors of single requests cancel out, but not those of the history, which all of them share. So
each future also draws how much longer or shorter all outputs get than the history says.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import NormalDist

import numpy as np

from lightserve.router.admission.base import PoolView
from lightserve.router.admission.peak import PeakAdmission, PeakRound, columns_of
from lightserve.router.future_memory import IntArray
from lightserve.router.output_lengths import (
    NUM_PRIOR_LENGTHS,
    LengthArray,
    OutputLengths,
    UniformArray,
)
from lightserve.router.request import Request
from lightserve.types import RequestClass

NUM_FUTURES = 64
WAVES = 0.015
"""Variance of a history's mean rank beyond that of as many independent lengths, in units of one
length's: lengths come in waves. Chosen by measurement; see docs/results/admission.md."""
_HISTORY_STEP = 1.1
"""By how much a history has to grow until it is trusted more."""
_RANK_TILT = 2.0 / np.sqrt(3.0)
"""An exponent of 1 + e moves the mean of uniform numbers by e / 4; the mean of n is off by
1 / sqrt(12 n)."""
_LARGEST = np.float32(1 - 1e-7)
_NUM_ROWS = 4096
"""Rows of random numbers: requests whose numbers of arrival differ by a multiple share theirs."""


class RiskAdmission(PeakAdmission):
    """Admission by the risk that memory runs out."""

    def __init__(self, lengths: OutputLengths, accepted: AcceptedRisk, *, seed: int) -> None:
        self._lengths = lengths
        self._accepted = accepted
        rng = np.random.default_rng(seed)
        self._uniforms = _stratified(rng, NUM_FUTURES)
        ranks = (np.arange(NUM_FUTURES) + 0.5) / NUM_FUTURES
        self._errors = rng.permutation([NormalDist().inv_cdf(rank) for rank in ranks])
        """Error of the history in each future, in standard errors."""
        self._tilted = self._uniforms
        self._tilted_for = -1

    def begin(self, live: Collection[Request], pool: PoolView) -> PeakRound:
        """Start a round: the same requests at the same tokens have the same futures."""

        def bound(peaks: IntArray, request: Request) -> int:
            return peak_at(peaks, self._accepted.level(request.request_class))

        return PeakRound(live, self.totals, bound, pool.num_slots, is_capped=True, found=pool.found)

    def totals(self, requests: Sequence[Request], generated: IntArray) -> LengthArray:
        """Return the total length of each request in each future, int32 [n, num_futures].

        Drawn from P(l | l > generated), int64 [n]; a request that has reached its limit gets that.
        Depends on the seed, the requests' numbers of arrival and the tables of the history alone.
        """
        if columns := columns_of(requests, ("admission_limit", "arrival_number")):
            limits, numbers = columns
        else:
            limits = np.array([request.admission_limit for request in requests], dtype=np.int64)
            numbers = np.array([request.arrival_number for request in requests], dtype=np.int64)
        uniforms = self._tilt()[numbers % _NUM_ROWS]
        keys = [request.prediction_key for request in requests]
        return self._lengths.sample(np.minimum(generated, limits - 1), limits, uniforms, keys)

    def _tilt(self) -> UniformArray:
        """Return the uniform numbers, in each future shifted by the history's error in it."""
        size = max(NUM_PRIOR_LENGTHS, self._lengths.num_known)
        steps = int(math.log(size / NUM_PRIOR_LENGTHS, _HISTORY_STEP))
        if self._tilted_for != steps:
            self._tilted_for = steps
            scale = _RANK_TILT * np.sqrt(1.0 / (NUM_PRIOR_LENGTHS * _HISTORY_STEP**steps) + WAVES)
            exponents = np.exp(scale * self._errors).astype(np.float32)
            self._tilted = np.minimum(self._uniforms**exponents, _LARGEST)
        return self._tilted


def peak_at(peaks: IntArray, level: float) -> int:
    """Return a quantile of sampled peaks, int64 [num_futures].

    `level` says which, in standard deviations of a normal distribution. Between two peaks it is
    interpolated; beyond the highest one it goes on by their standard deviation.
    """
    last = len(peaks) - 1
    rank = max(0.0, NormalDist().cdf(level) * len(peaks) - 0.5)
    if rank >= last:
        highest = NormalDist().inv_cdf((last + 0.5) / len(peaks))
        return int(peaks.max() + max(0.0, level - highest) * peaks.std())
    low = int(rank)
    below, above = np.partition(peaks, (low, low + 1))[low : low + 2].tolist()
    return int(below + (rank - low) * (above - below))


def _stratified(rng: np.random.Generator, num_futures: int) -> UniformArray:
    """Return rows that each hold one number per stratum, in random order (Latin hypercube)."""
    strata = np.tile(np.arange(num_futures, dtype=np.float32), (_NUM_ROWS, 1))
    rng.permuted(strata, axis=1, out=strata)
    jitter = rng.random(strata.shape, dtype=np.float32)
    result: UniformArray = np.minimum((strata + jitter) / num_futures, _LARGEST)
    return result


# The accepted risk, and how cautious forecasts have to be for it: learnt from evictions.
#
# The accepted risk is that of a request: the chance that memory is taken from it at some time of
# its life. A forecast has no such number. It is asked again in every step while a request waits,
# until it says yes; overflows come in waves; and a history is not the truth. So the quantile of the
# peak that a forecast reckons with is no setting. It starts at the accepted risk and moves with
# what is seen, as in adaptive conformal inference (Gibbs and Candès, 2021, section 2):
#
#     level <- level + LEVEL_STEP (evicted - accepted)     for each request, evicted = 0 or 1
#
# so that over many requests the share that is evicted is the accepted one, whatever the forecast is
# wrong by: the sum of all moves is bounded by the range of the level. The level is in standard
# deviations of a normal distribution, not a probability: the same move then means the same for
# small risks and large ones, and there is a level for every caution (as in the quantile tracking of
# Angelopoulos, Candès and Tibshirani, 2023, section 2.1).
#
# It only falls while requests of the class wait for memory to come: without these less caution buys
# nothing, and a quiet night would leave none for the morning.

LEVEL_STEP = 0.1
"""By how much an eviction raises the level."""
LEAST_LEVEL, MOST_LEVEL = -1.0, 6.0
"""The level that accepting anything, and nothing, stands for; it stays in between."""


class AcceptedRisk:
    """The level of each class. Pure; O(1) per call."""

    def __init__(self, accepted: Mapping[RequestClass, float]) -> None:
        """`accepted` is the share of each class that may be evicted, 0 to 1."""
        self._accepted = dict(accepted)
        self._levels = {of: _level(share) for of, share in accepted.items()}

    def level(self, request_class: RequestClass) -> float:
        """Return the quantile of the peak to reckon with, in standard deviations."""
        return self._levels[request_class]

    def note_evicted(self, request_class: RequestClass) -> None:
        """Learn that memory was taken from a request for the first time in its life."""
        self._move(request_class, LEVEL_STEP)

    def note_ended(self, request_class: RequestClass, *, others_wait: bool) -> None:
        """Learn that a request that had started is no more, evicted or not.

        `others_wait`: some of its class wait for memory to come.
        """
        if others_wait:
            self._move(request_class, -LEVEL_STEP * self._accepted[request_class])

    def _move(self, request_class: RequestClass, by: float) -> None:
        level = self._levels[request_class] + by
        self._levels[request_class] = min(MOST_LEVEL, max(LEAST_LEVEL, level))


def _level(share: float) -> float:
    if not 0.0 < share < 1.0:
        return LEAST_LEVEL if share > 0.0 else MOST_LEVEL
    return min(MOST_LEVEL, max(LEAST_LEVEL, NormalDist().inv_cdf(1.0 - share)))
