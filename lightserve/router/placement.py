"""The state of a step that is being fitted into memory and rows; see `fit_into_memory`.

Nothing is done here: slots are counted, and what would have to happen is noted.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from lightserve.router.intake import FEW_NEWCOMER_BYTES, MAX_NEWCOMER_BYTES, newcomer_bytes
from lightserve.router.kv.cache import KVStore
from lightserve.router.kv.prefix_node import PrefixNode, path_of
from lightserve.router.request import Request
from lightserve.router.request_table import Decodes
from lightserve.router.shares import (
    Allotment,
    Fit,
    Loading,
    Reason,
    Share,
    Tails,
    Take,
    each_allotment,
    of_running,
    runs,
)
from lightserve.types import BE, RT, RequestClass


def _path_of_hit(request: Request) -> Iterator[PrefixNode]:
    return path_of(request.hit.node) if request.hit and request.hit.node else iter(())


class Placement:
    """The step so far. `num_left` counts slots that are free or cached, less what was placed."""

    def __init__(
        self,
        kv: KVStore,
        holders: Callable[[], Sequence[Request]],
        num_rows: int,
        num_reserved: int,
        *,
        is_class_aware: bool,
    ) -> None:
        """`num_reserved` cached slots are none of best-effort requests'."""
        self._kv, self._tails = kv, Tails(kv)
        self._num_reserved = num_reserved
        self._list_holders = holders
        self._ranks: dict[Request, int] | None = None
        self._num_rows = num_rows
        self._is_class_aware = is_class_aware
        self._num_left = kv.num_available
        self._newcomer_bytes = 0
        """What those who begin or load take in the plan."""
        self._whole: list[Decodes | Allotment] = []
        """Parts that were placed as they are before anything was taken from anything."""
        self._placed: dict[Request, int] = {}
        """Tokens that each of all others computes."""
        self._num_slots_of: dict[Request, int] = {}
        """Slots that they take; also of some who were placed and have been stopped."""
        self._loads: dict[Request, int] = {}
        """Tokens that come back for those that stay paused."""
        self._stops: dict[Request, Reason] = {}
        """Those who run now and are to stop, and what for."""
        self._takes: dict[Request, int] = {}
        self._drops: dict[Request, None] = {}
        self._pinned: set[PrefixNode] = set()
        """What newcomers of the step found in the prefix tree: nobody takes it now."""
        self.robbed: list[Request] = []
        """Real-time newcomers that do not start, as what they found is being taken."""
        self._barren_rank: float = math.inf
        """Nobody finds anything to take whose juniors begin at this rank or behind it."""
        self._barren_from: dict[int, int] = {}
        """By where ranks end that are taken from: from which on nothing is left of them."""

    def pin(self, newcomers: Iterable[Request]) -> None:
        """Let nobody take what these found in the prefix tree."""
        for request in newcomers:
            self._pinned |= set(_path_of_hit(request))

    def result(self, refused: dict[Request, Reason]) -> Fit:
        """Return what has been decided; `refused` were not placed."""
        return Fit(
            (*self._whole, *itertools.starmap(Allotment, self._placed.items())),
            tuple(request for request in self._stops if request not in self._drops),
            tuple(Take(request, count) for request, count in self._takes.items() if count),
            tuple(self._drops),
            refused,
            self._stops,
            tuple(itertools.starmap(Loading, self._loads.items())),
        )

    def make_room_for(self, parts: Sequence[Decodes | Allotment]) -> None:
        """Take from best-effort requests at once what real-time ones among `parts` will miss.

        One by one they would take the same.
        """
        if self._kv.costs_are_tokens and self._num_tokens(parts) <= self._num_left:
            return
        real_time = [a for a in each_allotment(parts) if a.request.request_class is RT]
        missing = self._kv.cost_of_all(real_time) - self._num_left
        if missing > 0:
            best_effort = range(self._first_best_effort, len(self._holders))
            if not self._take_ends(best_effort, missing, takes_less=False):
                self._take_rest(best_effort, missing, takes_less=True)

    @staticmethod
    def _num_tokens(parts: Iterable[Decodes | Allotment]) -> int:
        return sum([len(p) if isinstance(p, Decodes) else p.num_tokens for p in parts])

    def _place_one_by_one(self) -> None:
        """Look at the requests of whole parts one by one from here on."""
        for request, num_tokens in each_allotment(self._whole):
            self._placed[request] = num_tokens
            if request not in self._num_slots_of:
                self._num_slots_of[request] = self._kv.cost(request, num_tokens)
        self._whole = []

    @functools.cached_property
    def _holders(self) -> Sequence[Request]:
        return self._list_holders()

    @functools.cached_property
    def _first_best_effort(self) -> int:
        """Where classes count, the rank of the first best-effort holder."""
        if not self._is_class_aware:
            return len(self._holders)
        return bisect.bisect_left(
            self._holders, True, key=lambda holder: holder.request_class is BE
        )

    def place_running(
        self, wanted: Sequence[Decodes | Allotment], refused: dict[Request, Reason]
    ) -> None:
        """Add parts of requests that run, prompts perhaps shorter; say who does not fit."""
        num_tokens = self._num_tokens(wanted)
        if (
            not (self._stops or self._takes or self._drops)
            and self._kv.costs_are_tokens
            and num_tokens <= self._num_left - self._num_reserved
        ):
            self._whole += wanted
            self._num_left -= num_tokens
            return
        self._place_one_by_one()
        parts = list(each_allotment(wanted))
        num_fitting = self._num_fitting(parts)
        first = parts[:num_fitting]
        self._placed.update(first)
        self._num_slots_of.update(
            first if self._kv.costs_are_tokens else {r: self._kv.cost(r, n) for r, n in first}
        )
        self._num_left -= self._kv.cost_of_all(first)
        for part in parts[num_fitting:]:
            request = part.request
            if self._has_stopped(request) or request in self._takes:
                refused[request] = Reason.KV_NOW
            elif (reason := self._place_running(part)) is not None:
                refused[request] = reason

    def _num_fitting(self, parts: Sequence[Allotment]) -> int:
        """Return how many of these, from the first on, certainly fit as they are.

        One by one they would find the same: nothing is taken from them, and none has to take.
        """
        num_left = self._num_left - self._num_reserved
        losers = {*self._stops, *self._takes, *self._drops}
        if not losers and self._kv.cost_of_all(parts) <= num_left:
            return len(parts)
        if not self._kv.costs_are_tokens:
            return 0
        for index, (request, num_tokens) in enumerate(parts):
            num_left -= num_tokens
            if num_left < 0 or request in losers:
                return index
        return len(parts)

    def place_waiting(self, part: Allotment | Loading) -> Reason | None:
        """Add the share of a request that has no row; None, or why it does not fit."""
        request = part.request
        if self._has_stopped(request) or request in self._takes:
            return Reason.KV_NOW
        num_bytes = newcomer_bytes(request)
        together = self._newcomer_bytes + num_bytes
        if self._newcomer_bytes > FEW_NEWCOMER_BYTES and together > MAX_NEWCOMER_BYTES:
            return Reason.BYTES
        before = self._save()
        if isinstance(part, Loading):
            reason = self._place_newcomer(Allotment(request, 1))  # is there room for all of it?
            self._restore(before)
            before = self._save()
            reason = reason or self._place_loading(part)
        else:
            reason = self._place_newcomer(part)
        if reason is not None:
            self._restore(before)
        else:
            self._newcomer_bytes += num_bytes
        return reason

    def _place_loading(self, part: Loading) -> Reason | None:
        """Add what a request that stays paused loads; if it does not fit, restore the state."""
        request, num_tokens = part
        self._pinned = self._pinned | set(_path_of_hit(request))
        num_slots = self._num_pinned_by(request) + self._kv.cost(request, num_tokens)
        missing = num_slots - self._num_usable(request)
        if missing > 0:
            self._take_from_juniors(request, missing)
        if num_slots > self._num_usable(request):
            return Reason.KV_NOW
        self._loads[request], self._num_slots_of[request] = num_tokens, num_slots
        self._num_left -= num_slots
        return None

    def _place_running(self, part: Allotment) -> Reason | None:
        request, num_tokens = part
        num_slots = self._num_slots_for(request, num_tokens)
        missing = num_slots - self._num_usable(request)
        if missing > 0:
            self._take_from_juniors(request, missing)
            num_tokens = self._most_tokens(request, num_tokens)
            num_slots = self._num_slots_for(request, num_tokens)
        if num_tokens == 0:
            return Reason.KV_NOW
        self._placed[request], self._num_slots_of[request] = num_tokens, num_slots
        self._num_left -= num_slots
        return None

    def _place_newcomer(self, part: Allotment) -> Reason | None:
        """Add a request that has no row; if it does not fit, the state is to be restored."""
        request, num_tokens = part
        if request.hit is not None:
            if any(self._reads(request, *take) for take in self._takes.items()):
                if request.request_class is RT:
                    self.robbed.append(request)
                return Reason.KV_NOW  # next time it finds less
            self._pinned = self._pinned | set(_path_of_hit(request))
        if self._num_rows == 0 and not self._take_row(request):
            return Reason.ROWS
        missing = self._num_slots_for(request, num_tokens) - self._num_usable(request)
        if missing > 0:
            self._take_from_juniors(request, missing)
        if self._num_slots_for(request, num_tokens) > self._num_usable(request):
            return Reason.KV_NOW
        num_slots = self._num_slots_for(request, num_tokens)
        self._placed[request], self._num_slots_of[request] = num_tokens, num_slots
        self._num_left -= num_slots
        self._num_rows -= 1
        return None

    def _has_stopped(self, request: Request) -> bool:
        return request in self._stops or request in self._drops

    def _num_usable(self, request: Request) -> int:
        if request.request_class is RT:
            return self._num_left
        return self._num_left - self._num_reserved

    def _num_slots_for(self, request: Request, num_tokens: int) -> int:
        """Return what a share takes: its new tokens, and what it brings back or holds on to."""
        if runs(request):
            return self._kv.cost(request, num_tokens)
        num_new = request.num_loaded_by_start + num_tokens
        return self._num_pinned_by(request) + self._kv.cost(request, num_new)

    def _num_pinned_by(self, request: Request) -> int:
        """Return how much less can be evicted once a newcomer reads what it found."""
        if request.hit is None or not self._drops:
            return request.num_pinned_by_start
        freed = self._kv.freed_by(list(self._drops))
        return request.num_pinned_by_start + sum(
            len(node.tokens) for node in _path_of_hit(request) if node in freed
        )

    def _reads(self, request: Request, loser: Request, num_taken: int) -> bool:
        """Whether a newcomer found tokens that are taken from `loser`."""
        if loser.lease is None or num_taken <= loser.num_own_slots:
            return False
        shared = set(path_of(loser.lease.node))
        num_common = sum(len(node.tokens) for node in _path_of_hit(request) if node in shared)
        return num_common > loser.num_held_tokens - num_taken

    def _most_tokens(self, request: Request, num_tokens: int) -> int:
        """Return how many of a running request's next tokens fit into what is left."""
        usable = self._num_usable(request)
        counts = range(1, num_tokens + 1)
        return bisect.bisect_right(counts, usable, key=lambda n: self._num_slots_for(request, n))

    # ---------------------------------------------------------------- taking from others

    def _first_junior(self, request: Request) -> int:
        """Return the rank from which on holders are juniors of a request, of whatever class."""
        if self._ranks is None:
            self._ranks = {holder: rank for rank, holder in enumerate(self._holders)}
        if (rank := self._ranks.get(request)) is not None:
            return rank + 1
        if not self._is_class_aware or request.request_class is BE:
            return len(self._holders)
        return self._first_best_effort

    def _takeable_among(self, ranks: range) -> Iterator[tuple[Request, int, int]]:
        """Iterate over the holders of these ranks who have something left to take, the last first.

        With each come the tokens that are taken from it already, and those that are left.
        """
        stop = self._barren_from.get(ranks.stop, ranks.stop)
        is_barren = True
        for rank in range(stop - 1, ranks.start - 1, -1):
            holder = self._holders[rank]
            before = self._takes.get(holder, 0)
            num_left = self._tails.takeable(holder, self._pinned) - before
            if num_left > 0 and holder not in self._drops:
                is_barren = False
                yield holder, before, num_left
            elif is_barren:
                self._barren_from[ranks.stop] = rank

    def _groups_from(self, rank: int) -> Iterator[range]:
        """Iterate over the ranks of each class from a rank on, the junior one first."""
        num_holders, first_best_effort = len(self._holders), self._first_best_effort
        if not self._is_class_aware:
            yield range(rank, num_holders)
            return
        yield range(max(rank, first_best_effort), num_holders)
        yield range(rank, first_best_effort)

    def _take_row(self, request: Request) -> bool:
        """Pause a running junior for its row; whether there is one."""
        self._place_one_by_one()
        for junior in reversed(self._holders[self._first_junior(request) :]):
            if runs(junior) and not self._has_stopped(junior):
                self._stop(junior, Reason.ROWS)
                return True
        return False

    def _take_from_juniors(self, request: Request, missing: int) -> None:
        """Take `missing` slots if juniors have them; a running request also takes less.

        All that a class has goes before anything of a more senior class.
        """
        rank = self._first_junior(request)
        if rank >= self._barren_rank:
            return
        self._place_one_by_one()
        before = None
        enough = self._num_usable(request) + missing
        for group in self._groups_from(rank):
            missing = enough - self._num_usable(request)
            if missing <= 0 or (runs(request) and self._num_usable(request) > 0):
                return
            if self._take_ends(group, missing, takes_less=False):
                return  # as a rule: that is enough, and nothing is to be restored
            before = before or self._save()
            self._take_rest(group, missing, takes_less=runs(request))
        if self._num_usable(request) < (1 if runs(request) else enough):
            if before is not None:
                self._restore(before)
            if runs(request):
                self._barren_rank = rank

    def _num_slots_placed(self, request: Request) -> int:
        is_placed = request in self._placed or request in self._loads
        return self._num_slots_of[request] if is_placed else 0

    def _take_rest(self, ranks: range, missing: int, *, takes_less: bool) -> None:
        """Take what is missing, or as much as there is, where the ends of KV are not enough."""
        juniors = [self._holders[rank] for rank in reversed(ranks)]
        if self._drops:
            juniors = [junior for junior in juniors if junior not in self._drops]
        if self._drop_whole(juniors, missing):
            return
        if not (takes_less and self._take_ends(ranks, missing, takes_less=True)):
            self._drop_whole(juniors, missing, takes_less=True)

    def _save(self) -> tuple[Any, ...]:
        """Return what `_restore` needs to take everything back that happens from here on."""
        state: tuple[dict[Request, Any], ...]
        state = (self._placed, self._loads, self._stops, self._takes, self._drops)
        numbers = self._num_left, self._num_rows, self._newcomer_bytes
        return (*numbers, self._pinned, list(self._whole), *(dict(part) for part in state))

    def _restore(self, saved: tuple[Any, ...]) -> None:
        self._num_left, self._num_rows, self._newcomer_bytes, self._pinned, *state = saved
        self._whole, *state = state
        self._placed, self._loads, self._stops, self._takes, self._drops = state
        self._barren_from.clear()

    def _take_ends(self, ranks: range, missing: int, *, takes_less: bool) -> bool:
        """Take tokens from the ends of juniors' KV; whether there were (enough) to take."""
        wanted_slots = missing
        takes: list[Take] = []
        for junior, before, num_left in self._takeable_among(ranks):
            if missing <= 0:
                break
            missing -= self._num_slots_placed(junior)
            wanted = num_left if self._kv.takes_all else max(0, min(num_left, missing))
            takes.append(Take(junior, before + wanted))
            missing -= self._gain(junior, before + wanted) - self._gain(junior, before)
        if missing > 0 and not (takes_less and missing < wanted_slots):
            return False
        for junior, num_tokens in takes:
            self._stop(junior)
            self._num_left -= self._gain(junior, self._takes.get(junior, 0))
            self._num_left += self._gain(junior, num_tokens)
            self._takes[junior] = num_tokens
        return True

    def _gain(self, request: Request, num_tokens: int) -> int:
        return self._kv.gain(request, num_tokens) if num_tokens else 0

    def _drop_whole(
        self, juniors: Sequence[Request], missing: int, *, takes_less: bool = False
    ) -> bool:
        """Take all KV of as many juniors as must be; it has to be computed again.

        Whoever has nothing left in the pool has nothing to give: its copies on the host stay.
        """
        juniors = [j for j in juniors if j.num_held_tokens > self._takes.get(j, 0)]
        counts = range(1, len(juniors) + 1)
        num_enough = 1 + bisect.bisect_left(
            counts, missing, key=lambda count: self._num_returned_by(juniors[:count])
        )
        if num_enough > len(juniors) and not takes_less:
            return False
        before = self._kv.num_freed_by(list(self._drops), self._pinned)
        for junior in juniors[:num_enough]:
            self._stop(junior)
            self._num_left -= self._gain(junior, self._takes.pop(junior, 0))
            self._drops[junior] = None
        self._num_left += self._kv.num_freed_by(list(self._drops), self._pinned) - before
        return True

    def _num_returned_by(self, juniors: Sequence[Request]) -> int:
        """Return how many slots more would be left if these lost all KV."""
        before = self._kv.num_freed_by(list(self._drops), self._pinned)
        after = self._kv.num_freed_by([*self._drops, *juniors], self._pinned)
        num_placed = sum(map(self._num_slots_placed, juniors))
        num_taken = sum(self._gain(junior, self._takes.get(junior, 0)) for junior in juniors)
        return after - before + num_placed - num_taken

    def _stop(self, request: Request, reason: Reason = Reason.KV_NOW) -> None:
        """Take back a share that was placed; whoever runs is paused."""
        if request in self._loads:
            self._num_left += self._num_slots_placed(request)
            self._newcomer_bytes -= newcomer_bytes(request)
            del self._loads[request]
        if request in self._placed:
            self._num_left += self._num_slots_placed(request)
            del self._placed[request]
            if not runs(request):
                self._num_rows += 1
                self._newcomer_bytes -= newcomer_bytes(request)
        if runs(request) and request not in self._stops:
            self._stops[request] = reason
            self._num_rows += 1


# Memory and rows for a step: what of it fits, and where the rest is taken. Pure, a dry run.
#
# Requests that hold KV have an order of seniority: (for class-aware policies) real-time before
# best-effort, in a class running before paused, then order of admission and of the queue. One that
# needs more than there is free or cached takes it from those strictly behind, the last first:
#
#     paused ones      lose tokens from the end of their KV, saved on the host
#     running ones     are paused first; then the same
#     and if that is not enough, or nothing is saved (--preemption recompute), they lose all of it
#
# Nothing is taken unless it makes the taker fit, so none is paused for nothing, and none can
# take back what it lost to a senior (no ping-pong). A newcomer that
# never ran is junior to all of its class and takes from other classes alone.


def fit_into_memory(
    shares: Sequence[Share],
    kv: KVStore,
    holders: Callable[[], Sequence[Request]],
    num_free_rows: int,
    *,
    is_class_aware: bool,
) -> Fit:
    """Return the part of a step that fits.

    Args:
        shares: what the policy chose, in its order of preference.
        kv: the pool as it is.
        holders: returns the running and paused requests, the most senior first.
        num_free_rows: rows that newcomers get though nothing stops.
        is_class_aware: whether a real-time newcomer may take from best-effort requests.

    What is reserved for real-time's cache gives way where nobody could ever advance otherwise: a
    best-effort request may need more than the rest of the pool.
    """
    num_reserved = kv.num_reserved_for_rt
    holders = functools.cache(holders)

    def attempt(num_reserved: int, pinned: Iterable[Request] = ()) -> tuple[Fit, list[Request]]:
        plan = Placement(kv, holders, num_free_rows, num_reserved, is_class_aware=is_class_aware)
        plan.pin(pinned)
        return _fit(shares, plan, is_class_aware=is_class_aware), plan.robbed

    fit, robbed = attempt(num_reserved)
    if robbed:
        spared, _ = attempt(num_reserved, robbed)
        if _real_time(fit) < _real_time(spared):
            return spared
    if fit or num_reserved == 0 or any(holder.num_inflight_steps for holder in holders()):
        return fit
    return attempt(0)[0]


def _real_time(fit: Fit) -> set[Allotment]:
    return {part for part in each_allotment(fit.parts) if part.request.request_class is RT}


def _fit(shares: Sequence[Share], plan: Placement, *, is_class_aware: bool) -> Fit:
    """Place what fits, in order."""
    if is_class_aware:
        running = [part for part in shares if of_running(part)]
        plan.make_room_for([part for part in running if not isinstance(part, Loading)])
    refused: dict[Request, Reason] = {}
    shut: set[RequestClass] = set()
    for is_running, parts in itertools.groupby(shares, key=of_running):
        if is_running:
            plan.place_running([part for part in parts if not isinstance(part, Loading)], refused)
            continue
        for part in parts:
            assert not isinstance(part, Decodes)
            request = part.request
            if request.request_class in shut:
                refused[request] = Reason.ORDER
            elif (reason := plan.place_waiting(part)) is not None:
                refused[request] = reason
                shut.add(request.request_class)  # nobody of a class passes another here
    return plan.result(refused)
