"""Risk: admit while the chance that the peak exceeds the pool stays below a bound.

Our own rule, beyond Past-Future: many futures, whose quantile decides, instead of a flat
reserve. The uniform numbers behind a request's futures are the same in every round (common
random numbers) and stratified, so that decisions do not flicker and few futures suffice.
Real-time and best-effort requests have bounds of their own.

A history is not the truth: it is short at first, and lengths come in waves. In a large batch the
errors of single requests cancel out, but not those of the history, which all of them share. So
each future also draws how much longer or shorter all outputs get than the history says.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import NormalDist

import numpy as np

from lightserve.router.admission.base import PoolView
from lightserve.router.admission.peak import PeakAdmission, PeakRound
from lightserve.router.future_memory import IntArray
from lightserve.router.output_lengths import LengthArray, OutputLengths, UniformArray
from lightserve.router.request import Request
from lightserve.types import RequestClass

MIN_FUTURES, MAX_FUTURES = 32, 1024
FUTURES_IN_TAIL = 3.2
WAVES = 0.03
"""Variance of a history's mean rank beyond that of as many independent lengths, in units of one
length's: lengths come in waves. Chosen by measurement; see docs/results/admission.md."""
_MIN_HISTORY = 20
_HISTORY_STEP = 1.1
"""By how much a history has to grow until it is trusted more."""
_RANK_TILT = 2.0 / np.sqrt(3.0)
"""An exponent of 1 + e on the chance to be longer moves the mean rank by e / 4; the mean of n is
off by 1 / sqrt(12 n)."""
_LARGEST = np.float32(1 - 1e-7)
_NUM_ROWS = 4096
"""Rows of random numbers: requests whose numbers of arrival differ by a multiple share theirs."""
_DRAW_STRIDE = 1367
"""Rows between a request's draw and its next one."""
_SPARE = 256
"""Requests that have left and still have samples, before all are drawn anew."""


def num_futures_for(smallest_risk: float) -> int:
    """Return how many futures a quantile needs: more than three in the tail, where affordable."""
    if smallest_risk <= 0.0:
        return MAX_FUTURES
    return int(np.clip(np.ceil(FUTURES_IN_TAIL / smallest_risk), MIN_FUTURES, MAX_FUTURES))


class RiskAdmission(PeakAdmission):
    """Bounds the probability of running out, per class; see the module's docstring."""

    def __init__(
        self, lengths: OutputLengths, *, seed: int, rt_risk: float, be_risk: float
    ) -> None:
        self._risk = {RequestClass.RT: rt_risk, RequestClass.BE: be_risk}
        rng = np.random.default_rng(seed)
        self._samples = KeptSamples(lengths, rng, num_futures_for(min(rt_risk, be_risk)))

    def begin(self, live: Collection[Request], pool: PoolView) -> PeakRound:
        """Start a round: the same requests at the same tokens have the same futures."""

        def quantile(peaks: IntArray, request: Request) -> int:
            rank = len(peaks) - 1 - int(self._risk[request.request_class] * len(peaks))
            return int(np.partition(peaks, rank)[rank])

        return PeakRound(live, self._samples.totals, quantile, pool.num_slots)


class KeptSamples:
    """Sampled output lengths of requests, each kept until its request reaches it.

    In each future a request has a chain of lengths: the first is drawn from P(l), each further one
    from P(l | l > the one before). What counts is the first that is longer than what the request
    has generated. It is distributed as P(l | l > generated), as a fresh sample is: the chain are
    the records of a sequence of independent lengths, and the first record above g is the first
    length above g. But a token more makes it another one only where it was reached.

    The chain depends on the seed, the future, the request's number of arrival and the tables of
    the history, and on nothing else: keeping it saves time and changes no sample. Requests are
    known by their numbers, so that nothing of them is kept alive, such as their prompts.
    """

    def __init__(self, lengths: OutputLengths, rng: np.random.Generator, num_futures: int) -> None:
        self._lengths = lengths
        self._uniforms = _stratified(rng, num_futures)
        ranks = (np.arange(num_futures) + 0.5) / num_futures
        self._errors = rng.permutation([NormalDist().inv_cdf(rank) for rank in ranks])
        """Of the history in each future, in standard errors."""
        self._tilted = self._uniforms
        self._tilted_for = -1
        self._num_futures = num_futures
        self._version = -1
        self._places: dict[int, int] = {}
        """By number of arrival; the arrays below have a row for each place."""
        self._numbers, self._limits, self._tables, self._generated = np.zeros((4, 0), np.int64)
        self._totals: LengthArray = np.zeros((0, num_futures), np.int32)
        self._num_drawn = np.zeros((0, num_futures), np.int32)
        """How many lengths of the chain were passed."""

    def totals(self, requests: Sequence[Request], generated: IntArray) -> LengthArray:
        """Return the total length of each request in each future, int32 [n, num_futures].

        `generated` is int64 [n]; a request that has reached its limit gets that.
        """
        if self._version != self._lengths.version:
            self._version = self._lengths.version
            self._tilt()
            self._places.clear()
        if len(requests) == 1 and requests[0].arrival_number not in self._places:
            newcomer = requests[0]  # perhaps one of thousands that are asked about
            if generated[0] == 0:
                return self._first(
                    np.array([newcomer.arrival_number]),
                    np.array([newcomer.admission_limit]),
                    self._lengths.tables([newcomer.prediction_key]),
                )
        places = self._places_of(requests)
        restarted = places[generated < self._generated[places]]
        if len(restarted):  # results of plans in flight were given up
            self._start(restarted)
        self._generated[places] = generated
        totals: LengthArray = self._totals[places]
        last = np.minimum(generated, self._limits[places] - 1).astype(np.int32)
        passed = np.flatnonzero(totals <= last[:, None])
        if len(passed):
            self._draw_on(places[passed // self._num_futures], passed % self._num_futures)
            totals = self._totals[places]
        return totals

    def _places_of(self, requests: Sequence[Request]) -> IntArray:
        """Return where the samples of requests are, int64 [n]."""
        numbers = [request.arrival_number for request in requests]
        if not self._places.keys() >= set(numbers):
            unknown = [r for r in requests if r.arrival_number not in self._places]
            if len(self._places) + len(unknown) > 2 * len(requests) + _SPARE:
                self._places.clear()
                unknown = list(requests)
            self._read(unknown)
        return np.fromiter(map(self._places.__getitem__, numbers), np.int64, len(numbers))

    def _read(self, requests: Sequence[Request]) -> None:
        """Draw the first lengths of requests that are not known."""
        first = len(self._places)
        size = first + len(requests)
        if size > len(self._totals):
            num_more = max(size, 64)
            columns = (self._numbers, self._limits, self._tables, self._generated)
            self._numbers, self._limits, self._tables, self._generated = (
                np.concatenate([column, np.zeros(num_more, np.int64)]) for column in columns
            )
            more = np.zeros((num_more, self._num_futures), np.int32)
            self._totals = np.concatenate([self._totals, more])
            self._num_drawn = np.concatenate([self._num_drawn, more])
        places = np.arange(first, size)
        self._numbers[places] = [request.arrival_number for request in requests]
        self._limits[places] = [request.admission_limit for request in requests]
        self._tables[places] = self._lengths.tables([r.prediction_key for r in requests])
        self._start(places)
        for request in requests:
            self._places[request.arrival_number] = len(self._places)

    def _start(self, places: IntArray) -> None:
        """Go back to the first lengths."""
        self._generated[places] = 0
        self._num_drawn[places] = 0
        self._totals[places] = self._first(
            self._numbers[places], self._limits[places], self._tables[places]
        )

    def _first(self, numbers: IntArray, limits: IntArray, tables: IntArray) -> LengthArray:
        uniforms = self._tilted[numbers % _NUM_ROWS]
        return self._lengths.draw(np.zeros_like(numbers), limits, uniforms, tables)

    def _draw_on(self, places: IntArray, futures: IntArray) -> None:
        """Draw the next lengths of pairs of a request and a future until all exceed its tokens."""
        while len(places):
            self._num_drawn[places, futures] += 1
            rows = self._numbers[places] + self._num_drawn[places, futures] * _DRAW_STRIDE
            uniforms = self._tilted[rows % _NUM_ROWS, futures][:, None]
            limits = self._limits[places]
            before = self._totals[places, futures].astype(np.int64)
            totals = self._lengths.draw(before, limits, uniforms, self._tables[places])[:, 0]
            self._totals[places, futures] = totals
            passed = totals <= np.minimum(self._generated[places], limits - 1)
            places, futures = places[passed], futures[passed]

    def _tilt(self) -> None:
        """Shift the uniform numbers in each future by the history's error in it.

        The chance to be longer than l is raised to a power. So is P(longer than l, if longer than
        g) then, for every g: how much longer outputs get does not fade as requests outlive samples.
        """
        size = max(_MIN_HISTORY, self._lengths.num_known)
        steps = int(math.log(size / _MIN_HISTORY, _HISTORY_STEP))
        if self._tilted_for == steps:
            return
        self._tilted_for = steps
        scale = _RANK_TILT * np.sqrt(1.0 / (_MIN_HISTORY * _HISTORY_STEP**steps) + WAVES)
        exponents = np.exp(scale * self._errors).astype(np.float32)
        self._tilted = np.minimum(1 - (1 - self._uniforms) ** exponents, _LARGEST)


def _stratified(rng: np.random.Generator, num_futures: int) -> UniformArray:
    """Return rows that each hold one number per stratum, in random order (Latin hypercube)."""
    strata = np.tile(np.arange(num_futures, dtype=np.float32), (_NUM_ROWS, 1))
    rng.permuted(strata, axis=1, out=strata)
    jitter = rng.random(strata.shape, dtype=np.float32)
    result: UniformArray = np.minimum((strata + jitter) / num_futures, _LARGEST)
    return result
