"""Memory and rows of a step that is being planned: what fits, and from where the rest is taken.

Pure, a dry run: slots are counted, and what would have to happen is noted.

Requests that hold KV have a rank: (for class-aware policies) real-time before best-effort, in a
class running before paused, then order of admission and of the queue. One that needs more than
there is free or cached takes it from those of a lower rank, the last first:

    paused ones      lose tokens from the end of their KV, saved on the host
    running ones     are paused first; then the same
    and if that is not enough, or nothing is saved (--preemption recompute), they lose all of it:
    as few as bring what all of the class would, none if that is nothing

Nothing is taken unless it makes the taker fit, so none is paused for nothing, and none can take
back what it lost to one of a higher rank. A newcomer that never ran ranks below all of its class
and takes from other classes alone, unless it is owed a seat (`seats`).
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from lightserve.messages.images import together
from lightserve.router.from_submit import FEW_NEWCOMER_BYTES, MAX_NEWCOMER_BYTES, newcomer_bytes
from lightserve.router.kv.cache import KVStore
from lightserve.router.kv.prefix_node import PrefixNode, path_of
from lightserve.router.request import RUNNING, FoundOf, Request
from lightserve.router.request_table import Decodes, RequestTable, Rows
from lightserve.router.seats import NO_SEATS, Seats
from lightserve.router.step import Checkpointed, Loading, Reason, Scheduled, each_scheduled
from lightserve.types import BE, RT


class MemoryChanges(NamedTuple):
    """Changes to memory that come before a step, as `PlannedStep` lists them."""

    paused: tuple[Request, ...]
    checkpointed: tuple[Checkpointed, ...]
    preempted: tuple[Request, ...]
    loaded: tuple[Loading, ...]


def _runs(request: Request) -> bool:
    """Whether a request has a row, and has not ended."""
    return request.state is RUNNING


def _num_held(request: Request) -> int:
    """Return the slots of a request, with those of its state."""
    return request.num_held_tokens + len(request.recurrent.slots)


class MemoryPlan:
    """The step so far. `num_left` counts slots that are free or cached, less what was placed."""

    def __init__(
        self,
        kv: KVStore,
        table: RequestTable,
        holders: Callable[[], Sequence[Request]],
        found: FoundOf,
        num_reserved: int,
        *,
        is_class_aware: bool,
        seats: Seats = NO_SEATS,
        spared: Iterable[Request] = (),
    ) -> None:
        """Begin with nothing placed.

        `holders` returns those that run and those that are paused, the highest rank first. Of the
        cached slots `num_reserved` are not for best-effort requests, and what `spared` newcomers
        found is not taken. A real-time newcomer may take from best-effort requests, if
        `is_class_aware`.
        """
        self._table = table
        self._num_rows = table.num_free
        self._kv = kv
        self._num_reserved = num_reserved
        self._list_holders = holders
        self._found = found
        self._is_class_aware = is_class_aware
        self._seats = seats
        self._taker: Request | None = None
        self._num_left = kv.num_available
        self._num_kept = kv.states.num_kept if len(table) else 0
        """Slots that best-effort newcomers leave to snapshots of states."""
        self._newcomer_bytes = 0
        """Bytes of the plan that newcomers and loads take."""
        self._whole: list[Decodes | Scheduled] = []
        """Parts that were placed as they are before anything was taken from anything."""
        self._placed: dict[Request, int] = {}
        """Tokens that each of all others computes."""
        self._num_slots_of: dict[Request, int] = {}
        """Slots that they take; also of some that were placed and have been stopped."""
        self._loaded: dict[Request, int] = {}
        """Tokens that come back for those that stay paused."""
        self._paused: dict[Request, Reason] = {}
        """Requests that run and are to be paused, and what for."""
        self._checkpointed: dict[Request, int] = {}
        self._preempted: dict[Request, None] = {}
        self._pinned: frozenset[PrefixNode] = frozenset()
        """Nodes of the prefix tree that newcomers of the step read: they are not taken."""
        self._takeable = functools.cache(kv.takeable)
        self._borders = functools.cache(kv.states.borders)
        self.robbed: list[Request] = []
        """Real-time newcomers that do not start, as what they found is being taken."""
        self._barren_rank: float = math.inf
        """From this rank on there is nothing to take."""
        self._barren_from: dict[int, int] = {}
        """By where ranks end that are taken from: from which on nothing is left of them."""
        self._untaken: tuple[Any, ...] | None = None
        """State before decodes took memory; None: they took none."""
        for newcomer in spared:
            self._pinned = self._pinned.union(self._path_of_hit(newcomer))

    # ---------------------------------------------------------------- what was decided

    @property
    def parts(self) -> list[Decodes | Scheduled]:
        """Parts of the step that have memory."""
        return [*self._whole, *itertools.starmap(Scheduled, self._placed.items())]

    def changes(self) -> MemoryChanges:
        """Return what must happen before."""
        also = filter(_runs, self._preempted)
        return MemoryChanges(
            tuple(dict.fromkeys([*self._paused, *also])),
            tuple(Checkpointed(r, count) for r, count in self._checkpointed.items() if count),
            tuple(self._preempted),
            tuple(itertools.starmap(Loading, self._loaded.items())),
        )

    @property
    def stopped_for(self) -> dict[Request, Reason]:
        """Requests that run and are to be paused: whether for their memory or their row."""
        return self._paused

    @property
    def num_spare(self) -> int:
        """Slots that nothing in the step takes, none where tokens take whole blocks."""
        return self._num_left if self._kv.costs_are_tokens else 0

    @property
    def num_copied(self) -> int:
        """Tokens that the step copies at most, to the host and back."""
        num_loaded = sum([self._found(r).num_loaded for r in self._placed if not _runs(r)])
        return num_loaded + sum(self._checkpointed.values())

    def not_stopped(self, rows: Rows) -> Rows:
        """Return those rows that go on running."""
        if not (self._paused or self._checkpointed or self._preempted):
            return rows
        losers = {request.row for request in (*self._paused, *self._checkpointed, *self._preempted)}
        going_on: Rows = rows[~np.isin(rows, [row for row in losers if row is not None])]
        return going_on

    def real_time(self) -> set[Scheduled]:
        """Return what advances of real-time requests."""
        return {part for part in each_scheduled(self.parts) if part.request.request_class is RT}

    # ---------------------------------------------------------------- placing

    def place_decodes(self, rows: Rows) -> Rows:
        """Add rows that compute one token each; return those that fit."""
        rows = self.not_stopped(rows)
        if not len(rows):
            return rows
        if len(rows) > self._num_left - self._num_reserved:
            if self._untaken is None and not (
                self._paused or self._checkpointed or self._preempted
            ):
                self._untaken = self._save()
            real_time = self._table.of(rows[self._table.is_rt[rows]])
            self._make_room(self._kv.cost_of_all([(request, 1) for request in real_time]))
            rows = self.not_stopped(rows)
        count = 0
        if self._kv.costs_are_tokens:
            count = max(0, min(len(rows), self._num_left - self._num_reserved))
        if count:
            self._whole.append(Decodes(self._table, rows[:count]))
            self._num_left -= count
        if count == len(rows):
            return rows
        for request in self._table.of(rows[count:]):
            if not self._has_stopped(request):  # for one before it
                self._place_running(Scheduled(request, 1))
        is_placed = [request in self._placed for request in self._table.of(rows[count:])]
        fitting = np.concatenate([rows[:count], rows[count:][np.array(is_placed, dtype=np.bool_)]])
        return self.not_stopped(fitting)

    def most_at_once(self, request: Request, num_tokens: int) -> int:
        """Return how many of a request's next tokens one step may compute, memory aside."""
        start = self._found(request).start
        return self._kv.states.cut(request, start, num_tokens, self._borders)

    def place(self, part: Scheduled | Loading) -> Scheduled | Loading | Reason:
        """Add a part; return what of it fits, or why nothing does. Prompts that run may be cut."""
        request = part.request
        self._untaken = None
        if self._has_stopped(request) or request in self._checkpointed:
            return Reason.KV_NOW
        if not _runs(request):
            return self._place_waiting(part) or part
        placed = self._place_running(Scheduled(*part))
        return Reason.KV_NOW if placed is None else placed

    def lacking(self, part: Scheduled) -> Reason | None:
        """Return why a request that waits could not be placed; None: it could. Places nothing."""
        if part.request in self._checkpointed or self._has_stopped(part.request):
            return Reason.KV_NOW
        before = self._save()
        reason = self._place_waiting(part)
        self._restore(before)
        return reason

    def remove_decodes(self, rows: Rows) -> None:
        """Take out rows that were placed, and undo what was taken if nothing but decodes was."""
        if self._untaken is None:
            self._remove(rows)
            return
        placed = [request.row for request, _ in each_scheduled(self.parts)]
        self._restore(self._untaken)
        self._barren_rank, self._untaken = math.inf, None
        self._remove(rows)
        before = [request.row for request, _ in each_scheduled(self.parts)]
        again = np.array([row for row in placed if row not in before], dtype=np.int64)
        self.place_decodes(again[~np.isin(again, rows)])

    def _remove(self, rows: Rows) -> None:
        left: list[Decodes | Scheduled] = []
        for part in self._whole:
            assert isinstance(part, Decodes)
            staying = part.rows[~np.isin(part.rows, rows)]
            self._num_left += len(part.rows) - len(staying)
            if len(staying):
                left.append(Decodes(self._table, staying))
        self._whole = left
        for request in self._table.of(rows):
            if request in self._placed:
                self._num_left += self._num_slots_of[request]
                del self._placed[request]

    def _make_room(self, num_slots: int) -> None:
        """Take what real-time requests that run will miss of so many slots from best-effort ones.

        Decodes would take the same one by one; a prompt alone would be content with less.
        """
        missing = num_slots - self._num_left
        if missing > 0 and self._is_class_aware:
            self._place_one_by_one()
            self._taker = None
            best_effort = range(self._first_best_effort, len(self._holders))
            if not self._take_ends(best_effort, missing, takes_less=False):
                self._take_rest(best_effort, missing, takes_less=True)

    def _place_one_by_one(self) -> None:
        """Look at the requests of whole parts one by one from here on."""
        for request, num_tokens in each_scheduled(self._whole):
            self._placed[request] = num_tokens
            if request not in self._num_slots_of:
                self._num_slots_of[request] = self._kv.cost(request, num_tokens)
        self._whole = []

    @functools.cached_property
    def _holders(self) -> Sequence[Request]:
        return self._list_holders()

    @functools.cached_property
    def _ranks(self) -> dict[Request, int]:
        return {holder: rank for rank, holder in enumerate(self._holders)}

    @functools.cached_property
    def _first_best_effort(self) -> int:
        """The rank of the first best-effort holder; where classes do not count, behind all."""
        if not self._is_class_aware:
            return len(self._holders)
        return bisect.bisect_left(self._holders, True, key=lambda each: each.request_class is BE)

    def _place_waiting(self, part: Scheduled | Loading) -> Reason | None:
        """Add the part of a request that has no row; None, or why it does not fit."""
        request = part.request
        num_bytes = self._bytes_of(request)
        together = self._newcomer_bytes + num_bytes
        if self._newcomer_bytes > FEW_NEWCOMER_BYTES and together > MAX_NEWCOMER_BYTES:
            return Reason.BYTES
        before = self._save()
        if isinstance(part, Loading):
            reason = self._place_newcomer(Scheduled(request, 1))  # is there room for all of it?
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
        self._pinned = self._pinned.union(self._path_of_hit(request))
        num_slots = self._num_pinned_by(request) + self._kv.cost(request, num_tokens)
        missing = num_slots - self._num_usable(request)
        if missing > 0:
            self._take_from_juniors(request, missing)
        if num_slots > self._num_usable(request):
            return Reason.KV_NOW
        self._loaded[request], self._num_slots_of[request] = num_tokens, num_slots
        self._num_left -= num_slots
        return None

    def _place_running(self, part: Scheduled) -> Scheduled | None:
        """Add a part of a request that runs, or as much of it as fits; None: nothing does."""
        request, num_tokens = part
        num_slots = self._num_slots_for(request, num_tokens)
        if request.request_class is RT and self._least_slots(request) == 1:
            self._make_room(num_slots)  # an image takes all it needs or nothing
        missing = num_slots - self._num_usable(request)
        if missing > 0:
            self._take_from_juniors(request, missing)
            num_tokens = self._most_tokens(request, num_tokens)
            fitting = together(request.parameters.images, request.next_position, num_tokens)
            num_tokens = fitting if fitting <= num_tokens else 0
            num_slots = self._num_slots_for(request, num_tokens)
        if num_tokens == 0:
            return None
        self._placed[request], self._num_slots_of[request] = num_tokens, num_slots
        self._num_left -= num_slots
        return Scheduled(request, num_tokens)

    def _place_newcomer(self, part: Scheduled) -> Reason | None:
        """Add a request that has no row; if it does not fit, the state is to be restored."""
        request, num_tokens = part
        if self._found(request).hit is not None:
            if any(self._reads(request, *take) for take in self._checkpointed.items()):
                if request.request_class is RT:
                    self.robbed.append(request)
                return Reason.KV_NOW  # next time it finds less
            self._pinned = self._pinned.union(self._path_of_hit(request))
        if self._num_rows == 0 and not self._take_row(request):
            return Reason.ROWS
        missing = self._num_slots_for(request, num_tokens) - self._num_usable(request)
        if missing > 0:
            self._take_from_juniors(request, missing)
        num_slots = self._num_slots_for(request, num_tokens)
        if num_slots > self._num_usable(request):
            return Reason.KV_NOW
        self._placed[request], self._num_slots_of[request] = num_tokens, num_slots
        self._num_left -= num_slots
        self._num_rows -= 1
        return None

    def _has_stopped(self, request: Request) -> bool:
        return request in self._paused or request in self._preempted

    def _num_usable(self, request: Request) -> int:
        if request.request_class is RT:
            return self._num_left
        return self._num_left - self._num_reserved - (0 if _runs(request) else self._num_kept)

    def _num_slots_for(self, request: Request, num_tokens: int) -> int:
        """Return what a share takes: its new tokens, and what it brings back or holds on to."""
        if _runs(request):
            return self._kv.cost(request, num_tokens)
        found = self._found(request)
        num_new = found.start - found.num_there + num_tokens
        num_slots = self._num_pinned_by(request) + self._kv.cost(request, num_new)
        return num_slots + self._kv.states.num_missing(request)

    def _num_pinned_by(self, request: Request) -> int:
        """Return how much less can be evicted once a newcomer reads what it found."""
        num_pinned = self._found(request).num_pinned
        if self._preempted:
            freed = self._kv.freed_by(list(self._preempted))
            num_pinned += sum(
                len(node.tokens) for node in self._path_of_hit(request) if node in freed
            )
        return num_pinned

    def _path_of_hit(self, request: Request) -> Iterator[PrefixNode]:
        hit = self._found(request).hit
        return path_of(hit.node) if hit and hit.node else iter(())

    def _bytes_of(self, request: Request) -> int:
        return newcomer_bytes(request, self._found(request).num_loaded)

    def _reads(self, request: Request, loser: Request, num_taken: int) -> bool:
        """Whether a newcomer found tokens that are taken from `loser`."""
        num_taken -= len(loser.recurrent.slots)
        if loser.lease is None or num_taken <= loser.num_own_slots:
            return False
        shared = set(path_of(loser.lease.node))
        num_common = sum(len(node.tokens) for node in self._path_of_hit(request) if node in shared)
        return num_common > loser.num_held_tokens - num_taken

    def _most_tokens(self, request: Request, num_tokens: int) -> int:
        """Return how many of a running request's next tokens fit into what is left."""
        usable = self._num_usable(request)
        counts = range(1, num_tokens + 1)
        return bisect.bisect_right(counts, usable, key=lambda n: self._num_slots_for(request, n))

    def _least_slots(self, request: Request) -> int:
        """Return the slots without which a running request computes nothing."""
        num_tokens = together(request.parameters.images, request.next_position, 1)
        return 1 if num_tokens == 1 else self._num_slots_for(request, num_tokens)

    # ---------------------------------------------------------------- taking from others

    def _first_junior(self, request: Request) -> int:
        """Return the rank from which on holders are juniors of a request, of whatever class."""
        if (rank := self._ranks.get(request)) is not None:
            return rank + 1
        return len(self._holders) if request.request_class is BE else self._first_best_effort

    def _takeable_among(self, ranks: range) -> Iterator[tuple[Request, int, int]]:
        """Iterate over the holders of these ranks who have something left to take, the last first.

        With each come the tokens that are taken from it already, and those that are left.
        """
        stop = self._barren_from.get(ranks.stop, ranks.stop)
        is_barren = True
        for rank in range(stop - 1, ranks.start - 1, -1):
            holder = self._holders[rank]
            before = self._checkpointed.get(holder, 0)
            num_left = self._takeable(holder, self._pinned) - before
            if self._seats.keeps(holder, self._taker):
                is_barren = False
            elif num_left > 0 and holder not in self._preempted:
                is_barren = False
                yield holder, before, num_left
            elif is_barren:
                self._barren_from[ranks.stop] = rank

    def _take_row(self, request: Request) -> bool:
        """Pause a running junior for its row; whether there is one."""
        self._place_one_by_one()
        for junior in reversed(self._holders[self._first_junior(request) :]):
            is_left = self._has_stopped(junior) or self._seats.keeps(junior, request)
            if _runs(junior) and not is_left:
                self._stop(junior, Reason.ROWS)
                return True
        return False

    def _take_from_juniors(self, request: Request, missing: int) -> None:
        """Take `missing` slots if juniors have them; a running request also takes less.

        All that a class has goes before anything of a more senior class.
        """
        rank, self._taker = self._first_junior(request), request
        if rank >= self._barren_rank:
            return
        self._place_one_by_one()
        best_effort = range(max(rank, self._first_best_effort), len(self._holders))
        groups = [group for group in (best_effort, range(rank, best_effort.start)) if group]
        if self._take_in_turn(request, groups, missing):
            return
        # What classes share becomes free only once all of them have lost it.
        if len(groups) > 1 and self._take_in_turn(request, groups, missing, drops_all=True):
            return
        if _runs(request) and self._least_slots(request) == 1:
            self._barren_rank = rank

    def _take_in_turn(
        self, request: Request, groups: Sequence[range], missing: int, *, drops_all: bool = False
    ) -> bool:
        """Take from one class after the other; whether that is enough. If not, nothing is taken."""
        before = None
        enough = self._num_usable(request) + missing
        least = self._least_slots(request) if _runs(request) else enough
        for group in groups:
            missing = enough - self._num_usable(request)
            if self._num_usable(request) >= least:
                return True
            if self._take_ends(group, missing, takes_less=False):
                return True  # as a rule: that is enough, and nothing is to be restored
            before = before or self._save()
            self._take_rest(group, missing, takes_less=_runs(request), drops_all=drops_all)
        if self._num_usable(request) >= least:
            return True
        if before is not None:
            self._restore(before)
        return False

    def _num_slots_placed(self, request: Request) -> int:
        is_placed = request in self._placed or request in self._loaded
        return self._num_slots_of[request] if is_placed else 0

    def _take_rest(
        self, ranks: range, missing: int, *, takes_less: bool, drops_all: bool = False
    ) -> None:
        """Take what is missing, or as much as there is, where the ends of KV are not enough.

        None is dropped that brings nothing, unless `drops_all`. One that has nothing left in the
        pool has nothing to give: its copies on the host stay.
        """
        juniors = [
            junior
            for junior in (self._holders[rank] for rank in reversed(ranks))
            if junior not in self._preempted
            and not self._seats.keeps(junior, self._taker)
            and _num_held(junior) > self._checkpointed.get(junior, 0)
        ]
        if self._drop_whole(juniors, missing):
            return
        if takes_less and self._take_ends(ranks, missing, takes_less=True):
            return
        if drops_all:
            self._drop(juniors)
        elif (num_returned := self._num_returned_by(juniors)) > 0:
            self._drop_whole(juniors, num_returned)

    def _save(self) -> tuple[Any, ...]:
        """Return what `_restore` needs to take everything back that happens from here on."""
        state: tuple[dict[Request, Any], ...]
        state = (self._placed, self._loaded, self._paused, self._checkpointed, self._preempted)
        numbers = self._num_left, self._num_rows, self._newcomer_bytes
        return (*numbers, self._pinned, list(self._whole), *(dict(part) for part in state))

    def _restore(self, saved: tuple[Any, ...]) -> None:
        self._num_left, self._num_rows, self._newcomer_bytes, self._pinned, *state = saved
        self._whole, *state = state
        self._placed, self._loaded, self._paused, self._checkpointed, self._preempted = state
        self._barren_from.clear()

    def _take_ends(self, ranks: range, missing: int, *, takes_less: bool) -> bool:
        """Take tokens from the ends of juniors' KV; whether there were (enough) to take."""
        wanted_slots = missing
        taken: list[Checkpointed] = []
        for junior, before, num_left in self._takeable_among(ranks):
            if missing <= 0:
                break
            missing -= self._num_slots_placed(junior)
            wanted = self._kv.states.portion(num_left, missing)
            taken.append(Checkpointed(junior, before + wanted))
            missing -= self._kv.gain(junior, before + wanted) - self._kv.gain(junior, before)
        if missing > 0 and not (takes_less and missing < wanted_slots):
            return False
        for junior, num_tokens in taken:
            self._stop(junior)
            self._num_left -= self._kv.gain(junior, self._checkpointed.get(junior, 0))
            self._num_left += self._kv.gain(junior, num_tokens)
            self._checkpointed[junior] = num_tokens
        return True

    def _drop_whole(self, juniors: Sequence[Request], missing: int) -> bool:
        """Take all KV of as many juniors as must be; whether that is enough: else none is taken."""
        counts = range(1, len(juniors) + 1)
        num_enough = 1 + bisect.bisect_left(
            counts, missing, key=lambda count: self._num_returned_by(juniors[:count])
        )
        if num_enough > len(juniors):
            return False
        self._drop(juniors[:num_enough])
        return True

    def _drop(self, juniors: Iterable[Request]) -> None:
        """Take all KV of these; it has to be computed again."""
        before = self._kv.num_freed_by(list(self._preempted), self._pinned)
        for junior in juniors:
            self._stop(junior)
            self._num_left -= self._kv.gain(junior, self._checkpointed.pop(junior, 0))
            self._preempted[junior] = None
        self._num_left += self._kv.num_freed_by(list(self._preempted), self._pinned) - before

    def _num_returned_by(self, juniors: Sequence[Request]) -> int:
        """Return how many slots more would be left if these lost all KV."""
        before = self._kv.num_freed_by(list(self._preempted), self._pinned)
        after = self._kv.num_freed_by([*self._preempted, *juniors], self._pinned)
        num_placed = sum(map(self._num_slots_placed, juniors))
        num_taken = sum(
            self._kv.gain(junior, self._checkpointed.get(junior, 0)) for junior in juniors
        )
        return after - before + num_placed - num_taken

    def _stop(self, request: Request, reason: Reason = Reason.KV_NOW) -> None:
        """Take back a part that was placed; a request that runs is paused."""
        if request in self._loaded:
            self._num_left += self._num_slots_placed(request)
            self._newcomer_bytes -= self._bytes_of(request)
            del self._loaded[request]
        if request in self._placed:
            self._num_left += self._num_slots_placed(request)
            del self._placed[request]
            if not _runs(request):
                self._num_rows += 1
                self._newcomer_bytes -= self._bytes_of(request)
        if _runs(request) and request not in self._paused:
            self._paused[request] = reason
            self._num_rows += 1
