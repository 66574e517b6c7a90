"""What the rules that look into the future share: a round over sampled futures.

A rule says how long outputs will be (one or more futures per request) and by how much the peaks
exceed what it accepts; the round does the rest, lazily: with nobody waiting nothing is sampled.

Refusals last. Let outputs be forecast steadily: the forecast total length of a request only
grows as it generates. Let d steps pass in which nobody leaves. Whoever was alive at the old peak
holds as much at that moment or more, except for the newcomer, who starts d steps later and has
grown d tokens less. So no peak falls by more than 1 per step, and a newcomer that was e tokens
too much will still be too much after e - 1 steps. That holds as long as nobody comes to share
what it did not share before (`PoolView.lease_version`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightserve.router.admission.sharing import SharedPrefixes
from lightserve.router.future_memory import (
    FutureMemory,
    IntArray,
    SharedTokens,
    base_with_shared,
)
from lightserve.router.kv.prefix_node import PrefixNode
from lightserve.router.request import Request

OutputSampler = Callable[[Sequence[Request]], npt.NDArray[np.signedinteger[Any]]]
"""Total output lengths of requests, [n, num_futures], each above what is generated."""

PeakBound = Callable[[IntArray, Request], int]
"""The peak to reckon with, of these (int64 [num_futures]) that a newcomer leads to."""


def num_generated(request: Request) -> int:
    """Output tokens a request has or is about to have."""
    return len(request.output_token_ids) + request.num_inflight_samples


def list_generated(requests: Sequence[Request]) -> list[int]:
    """Return that of each request."""
    # Spelt out: a call for each is most of the time that a small forecast takes.
    return [len(r.output_token_ids) + r.num_inflight_samples for r in requests]


def nums_generated(requests: Sequence[Request]) -> IntArray:
    """Return that of each request, int64 [n]."""
    return np.array(list_generated(requests), dtype=np.int64)


class PeakAdmission:
    """What such a rule tells others."""

    forecast_peak: int | None = None


class PeakRound:
    """An `AdmissionRound` that forecasts the peak of the batch with each newcomer."""

    def __init__(
        self,
        live: Collection[Request],
        sample: OutputSampler,
        bound: PeakBound,
        limit: int,
        rule: PeakAdmission,
        *,
        is_steady: bool = True,
    ) -> None:
        self._live = list(live)
        self._sample = sample
        self._bound = bound
        self._limit = limit
        self._rule = rule
        self._is_steady = is_steady
        self._memory: FutureMemory | None = None
        self._shared = SharedPrefixes(self._live)
        self._rest: IntArray = np.empty((0, 0), dtype=np.int64)
        """What those who were live are still to generate, [n, num_futures]."""
        self._rests_of_newcomers: list[IntArray] = []
        """The same of those admitted, [num_futures] each."""
        self._held_for: dict[PrefixNode, IntArray] = {}
        self._refused: dict[Request, int] = {}

    @property
    def peaks(self) -> IntArray | None:
        """Peaks of the batch with everybody admitted so far, int64 [num_futures]; None: unknown."""
        return None if self._memory is None else self._memory.peaks

    def admit(self, request: Request) -> bool:
        """Admit if the peak with this request is acceptable, or if it would be alone."""
        if self._memory is None:
            self._memory = self._forecast()
        rest = self._sample([request])[0] - num_generated(request)
        shared = self._shared_tokens(request)
        base = request.num_known_tokens - sum(part.num_tokens for part in shared)
        if self._memory.num_requests > 0:
            peak = self._bound(self._memory.peaks_at_least(base, rest), request)
            if peak > self._limit:
                self._refused[request] = peak - self._limit
                return False
        newcomer = self._memory.with_newcomer(base, rest, shared)
        peak = self._bound(newcomer.peaks, request)
        if peak > self._limit and self._memory.num_requests > 0:
            self._refused[request] = peak - self._limit
            return False
        self._memory.add(newcomer)
        self._shared.add(request)
        self._rests_of_newcomers.append(rest)
        self._held_for.clear()
        self._rule.forecast_peak = peak
        return True

    def excess(self, request: Request) -> int:
        """Return by how many tokens a request refused in this round was too much."""
        return self._refused[request]

    def steps_refused(self, request: Request) -> int:
        """See the module's docstring."""
        return self._refused.get(request, 1) - 1 if self._is_steady else 0

    def _forecast(self) -> FutureMemory:
        generated = nums_generated(self._live)
        prompts = np.array([request.num_prompt_tokens for request in self._live], dtype=np.int64)
        base = prompts + generated
        lengths = self._sample(self._live)
        rest = np.maximum(lengths - generated.astype(lengths.dtype)[:, None], 0)
        self._rest = rest
        if held := self._shared.held_by_several():
            shared = [(part.num_tokens, part.holders) for part in held]
            base = base_with_shared(base, rest.T, shared)
        return FutureMemory(base, rest.T)

    def _shared_tokens(self, request: Request) -> list[SharedTokens]:
        """Return what a newcomer would hold together with others, and for how long they do."""
        held = self._shared.held_of(request)
        for node, _, holders in held:
            if node not in self._held_for:
                self._held_for[node] = self._longest_of(holders)
        return [SharedTokens(count, self._held_for[node]) for node, count, _ in held]

    def _longest_of(self, holders: Sequence[int]) -> IntArray:
        """Return how long the last of some who count stays, [num_futures]."""
        num_live = len(self._rest)
        running = [index for index in holders if index < num_live]
        rests = [self._rest[running].max(axis=0)] if running else []
        rests += [self._rests_of_newcomers[i - num_live] for i in holders if i >= num_live]
        longest: IntArray = rests[0] if len(rests) == 1 else np.max(rests, axis=0)
        return longest
