"""The round over sampled futures, which all rules that look into the future share.

A rule says how long outputs will be (one or more futures per request) and by how much the peaks
exceed what it accepts; the round does the rest, lazily: with nothing waiting nothing is sampled.

Tokens in the prefix tree that several requests read stay in memory until the last of them leaves,
so they count once. A forecast counts them for the holder that stays longest, which may be another
in every sampled future. A newcomer brings only what no other holds, and what it will be the last
to hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightserve.router.future_memory import FutureMemory, IntArray, SharedTokens, base_with_shared
from lightserve.router.kv.prefix_node import Hit, PrefixNode, path_of
from lightserve.router.request import FoundOf, Request, progress

OutputSampler = Callable[[Sequence[Request], IntArray], npt.NDArray[np.signedinteger[Any]]]
"""Total output lengths of requests, [n, num_futures], by what they have generated, int64 [n].

They are above it, but where a request has reached its limit.
"""

PeakBound = Callable[[IntArray, Request], int]
"""The peak to reckon with, of these (int64 [num_futures]) that a newcomer leads to."""


def nums_generated(requests: Sequence[Request]) -> IntArray:
    """Return how many output tokens each request has or is about to have, int64 [n]."""
    return _progress(requests)[1]


def _progress(requests: Sequence[Request]) -> tuple[IntArray, IntArray]:
    """Return how many prompt tokens requests have, and how many they have generated, int64 [n]."""
    names = ("num_prompt", "num_output", "inflight_samples")
    if columns := columns_of(requests, names):
        prompts, confirmed, inflight = columns
        return prompts, confirmed + inflight
    prompts = np.array([request.num_prompt_tokens for request in requests], dtype=np.int64)
    numbers = [len(r.output_token_ids) + r.num_inflight_samples for r in requests]
    return prompts, np.array(numbers, dtype=np.int64)


def columns_of(requests: Sequence[Request], names: Sequence[str]) -> list[IntArray]:
    """Return columns of the table, int64 [n] each; none if some have no row."""
    rows = [request.row for request in requests]
    if not rows or None in rows:
        return []
    cells = requests[0].cells
    assert cells is not None
    index = np.array(rows)
    return [np.frombuffer(cells[name], np.int64)[index] for name in names]


def state_slots(requests: Sequence[Request]) -> int:
    """Return the slots that the state of each takes beside its tokens, as long as it lives."""
    return requests[0].recurrent.num_slots if requests else 0


def _most_tokens_of_all(requests: Sequence[Request]) -> int:
    """Return the sum of `_most_tokens`."""
    columns = columns_of(requests, ("num_prompt", "admission_limit", "num_output"))
    if not columns:
        return sum(map(_most_tokens, requests))
    prompts, limits, confirmed = columns
    num_state = len(requests) * state_slots(requests)
    return int(prompts.sum() + np.maximum(limits, confirmed + 1).sum()) + num_state


def _most_tokens(request: Request) -> int:
    """Return how many slots a request can come to hold, by its limit."""
    # One more than it has is the least that is sampled.
    most_output = max(request.admission_limit, len(request.output_token_ids) + 1)
    return request.num_prompt_tokens + most_output + request.recurrent.num_slots


class PeakAdmission:
    """A rule that looks into the future."""

    is_steady = True
    """Whether the total length that a request is expected to have only grows as it generates."""


class PeakRound:
    """An `AdmissionRound` that forecasts the peak of the batch with each newcomer."""

    def __init__(
        self,
        live: Collection[Request],
        sample: OutputSampler,
        bound: PeakBound,
        limit: int,
        *,
        is_capped: bool = False,
        found: FoundOf = progress,
    ) -> None:
        """Begin with those that run, whose peak by a bound may be no more than the limit.

        `is_capped`: `sample` gives no more than the limits of requests: then nothing need be
        sampled where these have room together. `found`: see `PoolView`.
        """
        self._live = list(live)
        self._sample = sample
        self._bound = bound
        self._limit = limit
        self._is_capped = is_capped
        self._memory: FutureMemory | None = None
        """None until the limits of all might not have room together."""
        self._most_of_live: int | None = None
        """Tokens that all can come to hold, by their limits; None: not summed up yet."""
        self._shared = SharedPrefixes(self._live, found)
        self._rest: IntArray = np.empty((0, 0), dtype=np.int64)
        """Tokens that live requests are still to generate, [n, num_futures]."""
        self._rests_of_newcomers: list[IntArray] = []
        """Tokens that admitted newcomers are still to generate, [num_futures] each."""
        self._held_for: dict[PrefixNode, IntArray] = {}
        self.forecast_peak: int | None = None
        self.excess: dict[Request, int] = {}
        """By how many tokens requests that were refused were too much."""

    @property
    def peaks(self) -> IntArray | None:
        """Peaks with all that were admitted so far, int64 [num_futures]; None: not known."""
        return None if self._memory is None else self._memory.peaks

    def admit(self, request: Request) -> bool:
        """Admit if the peak with this request is acceptable, or if it would be alone."""
        if self._memory is None and self._is_capped:
            if self._most_of_live is None:
                self._most_of_live = _most_tokens_of_all(self._live)
            most = self._most_of_live + _most_tokens(request)
            if most <= self._limit:
                self._live.append(request)
                self._shared.add(request)
                self._most_of_live = self.forecast_peak = most
                return True
        if self._memory is None:
            self._memory = self._forecast()
        generated = nums_generated([request])
        rest = self._sample([request], generated)[0] - generated
        shared = self._shared_tokens(request)
        base = request.num_known_tokens + request.recurrent.num_slots
        base -= sum(part.num_tokens for part in shared)
        if self._memory.num_requests > 0:
            peak = self._bound(self._memory.peaks_at_least(base, rest), request)
            if peak > self._limit:
                self.excess[request] = peak - self._limit
                return False
        newcomer = self._memory.with_newcomer(base, rest, shared)
        peak = self._bound(newcomer.peaks, request)
        if peak > self._limit and self._memory.num_requests > 0:
            self.excess[request] = peak - self._limit
            return False
        self._memory.add(newcomer)
        self._shared.add(request)
        self._rests_of_newcomers.append(rest)
        self._held_for.clear()
        self.forecast_peak = peak
        return True

    def _forecast(self) -> FutureMemory:
        prompts, generated = _progress(self._live)
        base = prompts + generated + state_slots(self._live)
        lengths = self._sample(self._live, generated)
        rest = lengths - generated.astype(lengths.dtype)[:, None]
        np.maximum(rest, 0, out=rest)
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


class Held(NamedTuple):
    """Tokens of a node of the prefix tree, and who holds them."""

    node: PrefixNode
    num_tokens: int
    """Tokens, perhaps with those of nodes above it that have the same holders."""
    holders: list[int]
    """Indices of requests, in the order in which they came to count."""


class SharedPrefixes:
    """Who holds which part of the prefix tree, among the requests that count in a round.

    Reads leases and, of requests that do not run yet, what the plan found of them. A newcomer
    that is to hold only a part of a node holds none of it here, until it runs and the tree has
    split the node: another newcomer with the same part is then counted in full. That is never too
    little, and is put right by the next round.
    """

    def __init__(self, counted: Iterable[Request], found: FoundOf = progress) -> None:
        """`found` tells of those without a row; as a rule they hold what their leases say."""
        self._counted = list(counted)
        self._found = found
        self._num_begun = len(self._counted)
        self._has_newcomers = any(r.row is None and found(r).hit for r in self._counted)
        """Whether some that count found a prefix, and are none of its users yet."""
        self._holders: dict[PrefixNode, list[int]] | None = None
        self._several: dict[PrefixNode, list[int]] | None = None

    def add(self, request: Request) -> None:
        """Count one more request, which does not run yet."""
        if self._holders is not None:
            self._note(self._holders, request, len(self._counted))
        self._counted.append(request)
        self._has_newcomers |= self._hit_of(request) is not None

    def held_by_several(self) -> list[Held]:
        """Return what two or more of those who count hold."""
        holders = self._find_several()
        return [Held(node, len(node.tokens), who) for node, who in holders.items() if len(who) > 1]

    @property
    def num_counted_twice(self) -> int:
        """Tokens by which the sum over all requests exceeds what they hold together."""
        return sum((len(held.holders) - 1) * held.num_tokens for held in self.held_by_several())

    def held_of(self, request: Request) -> list[Held]:
        """Return what of a waiting request's prefix is held by requests that count.

        Who holds a node holds those above it: where as many hold both, they are the same.
        """
        if not (prefix := self._prefix_of(request)):
            return []
        # As a rule none or several read what a newcomer found, and those are known already.
        is_known = len(self._counted) == self._num_begun and all(
            node.num_users != 1 for node, _ in prefix
        )
        holders = self._find_several() if is_known else self._find()
        held: list[Held] = []
        for node, count in prefix:
            if (who := holders.get(node)) is None:
                continue
            if held and len(held[-1].holders) == len(who):
                held[-1] = held[-1]._replace(num_tokens=held[-1].num_tokens + count)
            else:
                held.append(Held(node, count, who))
        return held

    def num_held_of(self, request: Request) -> int:
        """Return how many tokens that is."""
        return sum(held.num_tokens for held in self.held_of(request))

    def _find_several(self) -> dict[PrefixNode, list[int]]:
        """Return who holds what is read by two requests at least, whether they count or not.

        A node has all the users of those below it: so the search goes up from the first that has
        several. Newcomers are no users yet.
        """
        if self._has_newcomers:
            return self._find()
        if self._several is None:
            several: defaultdict[PrefixNode, list[int]] = defaultdict(list)
            for index, lease in enumerate([request.lease for request in self._counted]):
                if lease is None:
                    continue
                node = lease.node
                while (parent := node.parent) is not None:
                    if node.num_users > 1:
                        several[node].append(index)
                    node = parent
            self._several = dict(several)
        return self._several

    def _find(self) -> dict[PrefixNode, list[int]]:
        if self._holders is None:
            self._holders = {}
            for index, request in enumerate(self._counted):
                if request.row is None or request.lease is None:
                    self._note(self._holders, request, index)
                    continue
                node = request.lease.node  # as `_note` does: most run
                while (parent := node.parent) is not None:
                    if (known := self._holders.get(node)) is None:
                        self._holders[node] = [index]
                    else:
                        known.append(index)
                    node = parent
        return self._holders

    def _hit_of(self, request: Request) -> Hit | None:
        return self._found(request).hit if request.row is None else None

    def _note(self, holders: dict[PrefixNode, list[int]], request: Request, index: int) -> None:
        """Add a request to the holders of its nodes."""
        if self._hit_of(request) is not None:
            for node, num_tokens in self._prefix_of(request):
                if num_tokens == len(node.tokens):
                    holders.setdefault(node, []).append(index)
        elif request.lease is not None:
            node = request.lease.node
            while (parent := node.parent) is not None:
                holders.setdefault(node, []).append(index)
                node = parent

    def _prefix_of(self, request: Request) -> list[tuple[PrefixNode, int]]:
        """Return the nodes that a waiting request holds or would hold, and how much of each."""
        hold = self._hit_of(request) or request.lease
        if hold is None or hold.node is None or hold.num_tokens == 0:
            return []
        nodes = [node for node in path_of(hold.node) if node.parent is not None]
        counts = [len(node.tokens) for node in nodes]
        counts[0] -= sum(counts) - hold.num_tokens  # of the last one perhaps a part
        return list(zip(nodes, counts, strict=True))
