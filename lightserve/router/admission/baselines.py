"""The rules to measure others against: those of published systems, and the oracle.

The first two are baselines of the Past-Future paper (section 2.3). `conservative` leaves every
request room for `max_tokens`, so that memory never runs out; it wastes what is not generated,
unless `overcommit` promises more than there is, and then memory can run out. `aggressive` counts
what is held now, up to a watermark, as vLLM and SGLang do, and preempts when that has grown too
much. `ema` guesses one length per request, from an exponential average, as newer versions of
LightLLM do. `past-future` (Algorithm 1) admits while the peak of freshly sampled futures fits:
every round draws new lengths for all requests, for small batches several, of which the largest peak
decides; that works as a hidden margin, and `reserve` is the open one. The oracle knows the true
lengths (in simulations only): the optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from lightserve.router.admission.base import PoolView
from lightserve.router.admission.peak import OutputSampler, PeakAdmission, PeakRound, SharedPrefixes
from lightserve.router.future_memory import IntArray
from lightserve.router.output_lengths import LengthArray, OutputLengths
from lightserve.router.request import FoundOf, Request

EMA_GROWTH = 1.1
EMA_BUSY_USAGE = 0.85


class FlatRound:
    """Counts a number of tokens for each request; what several hold counts once."""

    forecast_peak = None

    def __init__(
        self,
        live: Collection[Request],
        count: Callable[[Request], int],
        limit: float,
        found: FoundOf,
    ) -> None:
        self._shared = SharedPrefixes(live, found)
        self._count = count
        self._num_counted = sum(map(count, live)) - self._shared.num_counted_twice
        self._limit = limit

    def admit(self, request: Request) -> bool:
        """Admit if all counts together stay within the limit, or it is alone."""
        num_new = self._count(request) - self._shared.num_held_of(request)
        if self._num_counted > 0 and self._num_counted + num_new > self._limit:
            return False
        self._shared.add(request)
        self._num_counted += num_new
        return True


class ConservativeAdmission:
    """Reserves prompt + max_tokens for every live request, out of `overcommit` times the pool."""

    def __init__(self, *, overcommit: float = 1.0) -> None:
        self._overcommit = overcommit

    def begin(self, live: Collection[Request], pool: PoolView) -> FlatRound:
        """Start a round from the reservations of all requests that hold rows."""
        return FlatRound(live, _worst_case, int(pool.num_slots * self._overcommit), pool.found)


class AggressiveAdmission:
    """Counts the tokens that exist; `watermark` is a share of the pool."""

    def __init__(self, *, watermark: float) -> None:
        self._watermark = watermark

    def begin(self, live: Collection[Request], pool: PoolView) -> FlatRound:
        """Start a round from what is held now."""
        return FlatRound(live, _known, pool.num_slots * self._watermark, pool.found)


def _worst_case(request: Request) -> int:
    """Return the slots it can come to hold; the last output token's KV is never written."""
    num_tokens = request.num_prompt_tokens + request.admission_limit - 1
    return num_tokens + request.recurrent.num_slots


def _known(request: Request) -> int:
    return request.num_known_tokens + request.recurrent.num_slots


class EmaAdmission(PeakAdmission):
    """Takes a request to end at max(1.1 x generated, average of finished lengths).

    At most at its `max_tokens`; and at its `max_tokens` while more than `EMA_BUSY_USAGE` of the
    pool is in use. The peak formula is Past-Future's.
    """

    def __init__(self, lengths: OutputLengths) -> None:
        self._lengths = lengths

    def begin(self, live: Collection[Request], pool: PoolView) -> PeakRound:
        """Start a round; nothing in it is random."""
        num_held = sum(pool.found(r).start + r.recurrent.num_slots for r in live)
        num_held -= SharedPrefixes(live, pool.found).num_counted_twice
        is_busy = num_held > EMA_BUSY_USAGE * pool.num_slots

        def sample(requests: Sequence[Request], generated: IntArray) -> IntArray:
            count = len(requests)
            max_tokens = np.fromiter((r.admission_limit for r in requests), np.int64, count)
            if is_busy:
                return max_tokens[:, None]
            guess = np.maximum(np.ceil(EMA_GROWTH * generated), self._lengths.average)
            lengths: IntArray = np.clip(guess.astype(np.int64), generated + 1, max_tokens)
            return lengths[:, None]

        return _one_future(live, sample, pool)


def _one_future(live: Collection[Request], sample: OutputSampler, pool: PoolView) -> PeakRound:
    return PeakRound(live, sample, lambda peaks, _: int(peaks[0]), pool.num_slots, found=pool.found)


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


class OracleAdmission(PeakAdmission):
    """`true_length` tells how many tokens a request will output."""

    def __init__(self, true_length: Callable[[Request], int]) -> None:
        self._true_length = true_length

    def begin(self, live: Collection[Request], pool: PoolView) -> PeakRound:
        """Start a round; nothing in it is random."""

        def sample(requests: Sequence[Request], generated: IntArray) -> IntArray:
            del generated
            lengths = np.fromiter(map(self._true_length, requests), np.int64, len(requests))
            return lengths[:, None]

        return _one_future(live, sample, pool)
