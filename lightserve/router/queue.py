"""The router's queue: requests that wait, in the order in which they should start.

Of each class come first those that were put back, in the order in which that was asked for; then
those that never ran, by priority, by when their first token is due, and by arrival; and at last,
of real-time requests, those whose first token is late.

Batch work may run in any order (Echo, sections 4.1 and 6), so that of best-effort requests only
those are gone through that are worth asking: those whose prompts share most with KV that is
resident, and among these the ones about as long as what runs. They hang on the nodes of the prefix
tree. Nothing here goes through all that wait; every sixteenth to start is the oldest all the same
(see `Turn`).

Where requests of several accounts wait, best-effort ones come account by account, the one first
that has had least (`accounts`); of real-time ones so many come first of each that all are among
those that a policy weighs.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from lightserve.messages.images import ImageSums
from lightserve.router.accounts import Account, QueueBounds, share_of_queue
from lightserve.router.kv.prefix_node import common_len
from lightserve.router.kv.prefix_tree import PrefixTree
from lightserve.router.request import Request
from lightserve.router.seats import NO_SEATS, Seats, in_fair_order, in_turn
from lightserve.router.slo import CompletionLedger, LineDeadline, SharedDue
from lightserve.types import BE, RT, RequestClass, RequestKey

# No best-effort request waits for ever: every sixteenth to start is the oldest that waits.
#
# Whatever the order in which the others start (by shared prefixes, by what fits), of any
# OLDEST_EVERY best-effort requests that start one after the other at least one was the oldest of
# those that could: first by priority, then by arrival, those that were paused among them. Where it
# does not fit, the others wait with it. So one that has n before it starts within OLDEST_EVERY * (n
# + 1) starts, and n never grows, as newcomers are younger. (Those before it that are paused and
# start again count again: each time they have computed something, and what they have to compute is
# finite.)
#
# Not in this order are jobs that are urgent by their completion time, and requests of one priority
# wait for those of a smaller number for as long as these come.

OLDEST_EVERY = 16


class Turn:
    """Whose turn it is, in a step that is being planned."""

    def __init__(self, in_order: Iterable[Request] = (), num_since: int = 0) -> None:
        """Begin where the step before ended.

        `in_order`: best-effort requests that wait, the oldest first; read as far as needed. So many
        others have started since the oldest did.
        """
        self._rest: Iterator[Request] = (r for r in in_order if r.num_schedulable_tokens > 0)
        self._oldest: Request | None = None
        self._is_known = False
        self._num_since = num_since
        self._started: set[Request] = set()

    @property
    def is_of_oldest(self) -> bool:
        """Whether no other may start."""
        return self._num_since >= OLDEST_EVERY - 1

    @property
    def oldest(self) -> Request | None:
        """The oldest of those that wait and could start; None: there is none."""
        if not self._is_known:
            self._oldest = next((r for r in self._rest if r not in self._started), None)
            self._is_known = True
        return self._oldest

    @property
    def next_if_oldest(self) -> Request | None:
        """The oldest, if no other may start."""
        return self.oldest if self.is_of_oldest else None

    def allows(self, request: Request) -> bool:
        """Whether a request may start now."""
        return not self.is_of_oldest or self.oldest in (None, request)

    def note(self, request: Request) -> None:
        """Take in that a request starts in this step."""
        self._started.add(request)
        if request is self.oldest:
            self._num_since, self._is_known = 0, False
        else:
            self._num_since += 1


MAX_CANDIDATES = 64
"""Requests of a class that are looked at in one step, or told when others overtake them; real-time
ones at the head come as many of each account."""
MIN_CHUNK = 16
"""Under deadlines, fewer tokens of a prompt are not worth a row, unless they end it; nor is a
prefix that is being computed worth a step of waiting for fewer."""


class Backlog(NamedTuple):
    """How much waits."""

    num_requests: int
    num_tokens: int
    """Tokens to compute before the first new one."""
    num_output_tokens: int = 0
    """Most that may come yet."""
    images: ImageSums = ImageSums()
    """Sums over the images of all prompts."""


class WaitingQueue:
    """Requests that wait, in order. Reading changes nothing."""

    def __init__(self) -> None:
        self._put_back: dict[RequestClass, OrderedDict[RequestKey, Request]] = {
            request_class: OrderedDict() for request_class in RequestClass
        }
        self._fresh = {request_class: _ByAccount() for request_class in RequestClass}
        """Requests that never ran."""
        self._late: dict[Account | None, dict[RequestKey, Request]] = {}
        """Real-time ones that never ran, and whose first token is late."""
        self._jobs = _Sorted()
        """Best-effort requests with a completion time, those that are to end first before others;
        they wait where all of their class do as well."""
        self._lines: dict[SharedDue, _Sorted] = {}
        """Lines of batches, likewise, in the order in which they came."""
        self.num_since_oldest = 0
        """Best-effort requests that have started since the oldest of them did."""
        self._backlogs = dict.fromkeys(RequestClass, Backlog(0, 0))

    def __len__(self) -> int:
        return sum(backlog.num_requests for backlog in self._backlogs.values())

    # ---------------------------------------------------------------- reading

    def __iter__(self) -> Iterator[Request]:
        """Iterate over both classes; those that never ran by priority and arrival of their heads.

        The oldest best-effort request is the first of its class where it is its turn.
        """
        oldest = self.turn().next_if_oldest
        yield from self._put_back[RT].values()
        if oldest is not None:
            yield oldest
        yield from (r for r in self._put_back[BE].values() if r is not oldest)
        yield from self.late()
        fresh = heapq.merge(*self._fresh.values(), key=_by_arrival)
        yield from (r for r in fresh if r is not oldest)

    def real_time(self, seats: Seats = NO_SEATS) -> Iterator[Request]:
        """Iterate over real-time requests, those first that are owed a seat."""
        if not seats.is_shared:
            yield from self._of(RT)
            return
        owed = in_fair_order(seats.owed_of(RT))
        yield from owed
        others = itertools.chain(
            self._put_back[RT].values(), self._fresh[RT].in_turns(MAX_CANDIDATES), self.late()
        )
        yield from (request for request in others if request not in owed)

    def late(self) -> Iterator[Request]:
        """Iterate over the real-time requests that never ran and are late; accounts take turns.

        `real_time` has them at its end.
        """
        return in_turn({account: late.values() for account, late in self._late.items()})

    def heads(self, request_class: RequestClass) -> list[Request]:
        """Return the first request of each account that waits."""
        put_back = {r.account: r for r in reversed(self._put_back[request_class].values())}
        fresh, late = self._fresh[request_class], self._late if request_class is RT else {}
        found = dict(put_back)
        for account in fresh.accounts():
            if (first := fresh.first_of(account)) is not None:
                found.setdefault(account, first)
        for account, of_account in late.items():
            found.setdefault(account, next(iter(of_account.values())))
        return list(found.values())

    def crowding(self, request: Request, *, max_requests: int, max_tokens: int) -> Request | None:
        """Return a request that never ran, of the account that has most of a full queue.

        None: with `request`, which is to join it, its own account would have as much.
        """
        if (own := request.account) is None:
            return None
        fresh = self._fresh[request.request_class]
        late = self._late if request.request_class is RT else {}
        bounds = QueueBounds(max_requests, max_tokens)
        waiting = [account for account in (*fresh.accounts(), *late) if account is not None]
        account = max(waiting, key=lambda each: share_of_queue(each, bounds), default=own)
        theirs = share_of_queue(account, bounds)
        mine = share_of_queue(own, bounds, joining=request.num_prompt_tokens)
        has_more = theirs.own > mine.own
        if account.key is not own.key:
            has_more = theirs.of_key > mine.of_key
        if account is own or not has_more:
            return None
        if account in late:
            return next(reversed(late[account].values()))
        (last,) = fresh.last_of(account, 1)
        return last

    def last_to_start(
        self, request: Request, has_room: Callable[[Backlog, int], bool], *, by_length: bool
    ) -> Request | None:
        """Return one whose place in a full queue a request has that is to join it, as it goes last.

        Both are real-time requests of one account: one is late already, or has a longer prompt. It
        is enough, or none is returned, so that no request is refused for another that has no room
        either. Nor is one of more importance, or a choice of an answer of which others may have
        begun, or for its length one of which no first token is due.

        Args:
            request: has not joined yet.
            has_room: whether a prompt of so many tokens may wait behind a backlog.
            by_length: whether more is asked for than there is time: then the shortest go first.
        """
        if request.request_class is not RT:
            return None
        before = self._backlogs[RT]

        def may_leave(other: Request) -> bool:
            num_tokens = before.num_tokens - other.num_known_tokens
            backlog = before._replace(num_requests=before.num_requests - 1, num_tokens=num_tokens)
            is_spared = other.priority < request.priority or not other.is_first
            return not is_spared and has_room(backlog, request.num_prompt_tokens)

        late = reversed(self._late.get(request.account, {}).values())
        for other in filter(may_leave, itertools.islice(late, MAX_CANDIDATES)):
            return other
        if not by_length or request.slo.ttft_ms is None:
            return None
        longer = [
            other
            for other in self._fresh[RT].last_of(request.account, MAX_CANDIDATES)
            if other.num_prompt_tokens > request.num_prompt_tokens
            and other.slo.ttft_ms is not None
            and may_leave(other)
        ]
        return max(longer, key=operator.attrgetter("num_prompt_tokens"), default=None)

    def best_effort(
        self, turn: Turn, resident: PrefixTree | None, context_len: float, seats: Seats = NO_SEATS
    ) -> Iterator[Request]:
        """Iterate over the best-effort requests that are worth asking (see `candidates`).

        The first is the oldest where it is its turn; then come those that are owed a seat.
        """
        oldest = turn.next_if_oldest
        first = [] if oldest is None else [oldest]
        if seats.owed:
            first += [r for r in in_fair_order(seats.owed_of(BE)) if r is not oldest]
        yield from first
        yield from (r for r in self._put_back[BE].values() if r not in first)
        candidates = self.candidates(resident, context_len=context_len)
        yield from (r for r in candidates if r not in first)

    def candidates(
        self, resident: PrefixTree | None, *, context_len: float, limit: int = MAX_CANDIDATES
    ) -> list[Request]:
        """Return the best-effort requests that never ran and are worth asking, the best first.

        Args:
            resident: the cached prefixes, where those that wait are expected; None: there are none.
            context_len: mean context of what runs; prompts nearest to it go first among those
                that share as much.
            limit: most of them.
        """
        found: list[Request] = []
        for fresh in self._fresh[BE].in_turn():
            found += _candidates_of(fresh, resident, context_len, limit - len(found))
            if len(found) >= limit:
                break
        return found

    def turn(self) -> Turn:
        """Return whose turn it is among best-effort requests."""
        return Turn(self._oldest_first(), self.num_since_oldest)

    def _oldest_first(self) -> Iterator[Request]:
        put_back = sorted(self._put_back[BE].values(), key=_by_arrival)
        yield from heapq.merge(put_back, self._fresh[BE], key=_by_arrival)

    def jobs(self) -> Iterator[Request]:
        """Iterate over the best-effort requests with a completion time, the earliest first."""
        return iter(self._jobs)

    def lines(self) -> Iterator[Request]:
        """Iterate over lines of batches, those that are due first before others."""
        batches = sorted(self._lines.items(), key=lambda item: item[0].due_s)
        return itertools.chain.from_iterable(lines for _, lines in batches)

    def paused(self, request_class: RequestClass) -> Iterator[Request]:
        """Iterate over those of a class that keep KV, from the head."""
        return (r for r in self._put_back[request_class].values() if r.is_paused)

    def backlog(self, request_class: RequestClass) -> Backlog:
        """Return how much of a class waits."""
        return self._backlogs[request_class]

    def _of(self, request_class: RequestClass) -> Iterator[Request]:
        """Iterate over one class."""
        yield from self._put_back[request_class].values()
        fresh = self._fresh[request_class]
        yield from fresh.heads_first(MAX_CANDIDATES) if request_class is RT else fresh
        if request_class is RT:
            yield from self.late()

    # ---------------------------------------------------------------- changes

    def append(self, request: Request) -> None:
        """Add a request that never ran; its place stays, whatever becomes due."""
        due_s = 0.0
        if request.request_class is RT and request.deadlines is not None:
            due_s = request.deadlines.deadline_of_next_token
        place = request.priority, due_s, request.arrival_number
        self._fresh[request.request_class].add(request, place)
        if request.account is not None:
            request.account.wait(request.num_prompt_tokens)
        self._count(request, 1)

    def requeue(self, requests: Sequence[Request]) -> None:
        """Put requests back before all others of their class, in the given order."""
        for request in reversed(requests):
            put_back = self._put_back[request.request_class]
            put_back[request.key] = request
            put_back.move_to_end(request.key, last=False)
            self._count(request, 1)

    def sink_late(self, now_s: float) -> None:
        """Put real-time requests that are late behind all others of their class.

        Those of the first priority are late in the order in which they wait, so that the head is
        all there is to look at; those of others are found late when they come to the head.
        """
        fresh = self._fresh[RT]
        for account in fresh.accounts():
            while (head := fresh.first_of(account)) is not None:
                if head.deadlines is None or head.deadlines.residual(now_s) > 0:
                    break
                fresh.remove(head)
                self._late.setdefault(account, {})[head.key] = head

    def admit(self, request: Request, *, in_turn: bool = True) -> None:
        """Take a request out to run it; those of its class that were before it are overtaken.

        `in_turn`: whether it starts as others do, not as an urgent job.
        """
        if request.request_class is BE and in_turn:
            is_oldest = request is self.turn().oldest
            self.num_since_oldest = 0 if is_oldest else self.num_since_oldest + 1
        for other in itertools.islice(self._of(request.request_class), MAX_CANDIDATES):
            if other is request:
                break
            other.num_overtaken += 1
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Take a request out. Raises KeyError if it is not waiting."""
        put_back = self._put_back[request.request_class].pop(request.key, None)
        if put_back is None:
            late = self._late.get(request.account, {})
            if late.pop(request.key, None) is None:
                self._fresh[request.request_class].remove(request)
            elif not late:
                del self._late[request.account]
            if request.account is not None:
                request.account.leave(request.num_prompt_tokens)
        self._count(request, -1)

    def _count(self, request: Request, sign: int) -> None:
        """Add or take off a request; while it waits, its known tokens do not change."""
        ledger = request.deadlines
        if isinstance(ledger, CompletionLedger) and request.request_class is BE:
            if sign > 0:
                self._jobs.add(request, (ledger.end_s, request.arrival_number))
            else:
                self._jobs.remove(request)
        elif isinstance(ledger, LineDeadline):
            self._count_line(request, ledger.shared, sign)
        before = self._backlogs[request.request_class]
        num_left = request.max_tokens - len(request.output_token_ids)
        self._backlogs[request.request_class] = Backlog(
            before.num_requests + sign,
            before.num_tokens + sign * request.num_known_tokens,
            before.num_output_tokens + sign * num_left,
            ImageSums(
                before.images.num_tokens + sign * request.parameters.image_sums.num_tokens,
                before.images.num_pairs + sign * request.parameters.image_sums.num_pairs,
            ),
        )

    def _count_line(self, request: Request, shared: SharedDue, sign: int) -> None:
        if sign > 0:
            self._lines.setdefault(shared, _Sorted()).add(request, (request.arrival_number,))
            return
        self._lines[shared].remove(request)
        if not len(self._lines[shared]):
            del self._lines[shared]


class _Sorted:
    """Requests by a place that each is given; both changes take O(log n) comparisons."""

    def __init__(self) -> None:
        self._places: list[tuple[float, ...]] = []
        self._requests: list[Request] = []
        self._place_of: dict[Request, tuple[float, ...]] = {}

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def items(self) -> Iterator[tuple[tuple[float, ...], Request]]:
        """Iterate over places and requests."""
        return zip(self._places, self._requests, strict=True)

    def add(self, request: Request, place: tuple[float, ...]) -> None:
        """Add a request behind those of its place."""
        at = bisect.bisect_right(self._places, place)
        self._places.insert(at, place)
        self._requests.insert(at, request)
        self._place_of[request] = place

    def remove(self, request: Request) -> None:
        """Take a request out. Raises KeyError if it is not here."""
        at = bisect.bisect_left(self._places, self._place_of.pop(request))
        at = self._requests.index(request, at)
        del self._places[at], self._requests[at]

    def last(self, most: int) -> list[Request]:
        """Return the last of them."""
        return self._requests[-most:]


class _ByAccount:
    """Sorted requests by account; one account is as none."""

    def __init__(self) -> None:
        self._of: dict[Account | None, _Sorted] = {}

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all, by place."""
        if len(self._of) == 1:
            (only,) = self._of.values()
            return iter(only)
        return _merged([each.items() for each in self._of.values()])

    def accounts(self) -> list[Account | None]:
        """Return those that have some."""
        return list(self._of)

    def in_turn(self) -> list[_Sorted]:
        """Return what each account has, of the one that has had least first."""
        if len(self._of) < 2:
            return list(self._of.values())
        return [each for _, each in sorted(self._of.items(), key=_by_rank)]

    def heads_first(self, num_heads: int) -> Iterator[Request]:
        """Iterate over all by place, but so that as many of each account are among the first."""
        if len(self._of) < 2 or sum(map(len, self._of.values())) <= num_heads:
            yield from self
            return
        yield from _heads_first([each.items() for each in self._of.values()], num_heads)

    def in_turns(self, num_heads: int) -> Iterator[Request]:
        """Iterate likewise over those that have deadlines, then over others: accounts take turns.

        Of each account only those have their deadlines count that are before any without one.
        """
        timed = [itertools.takewhile(_is_timed, each.items()) for each in self._of.values()]
        yield from _heads_first(timed, num_heads)
        yield from in_turn(
            {
                account: (r for _, r in itertools.dropwhile(_is_timed, each.items()))
                for account, each in self._of.items()
            }
        )

    def first_of(self, account: Account | None) -> Request | None:
        """Return the first that an account has."""
        return next(iter(self._of.get(account, ())), None)

    def last_of(self, account: Account | None, most: int) -> list[Request]:
        """Return the last that an account has."""
        of = self._of.get(account)
        return [] if of is None else of.last(most)

    def add(self, request: Request, place: tuple[float, ...]) -> None:
        """Add a request behind those of its place."""
        self._of.setdefault(request.account, _Sorted()).add(request, place)

    def remove(self, request: Request) -> None:
        """Take a request out. Raises KeyError if it is not here."""
        own = self._of[request.account]
        own.remove(request)
        if not len(own):
            del self._of[request.account]


def _is_timed(item: tuple[tuple[float, ...], Request]) -> bool:
    """Return whether a first token is due."""
    (_, due_s, _), request = item
    return request.deadlines is not None and math.isfinite(due_s)


def _heads_first(
    parts: Sequence[Iterator[tuple[tuple[float, ...], Request]]], num_heads: int
) -> Iterator[Request]:
    """Yield requests of parts that are sorted by place, as many of each part among the first."""
    most = max(1, num_heads // max(1, len(parts)))
    yield from _merged([itertools.islice(part, most) for part in parts])
    yield from _merged(parts)


def _merged(parts: Sequence[Iterable[tuple[tuple[float, ...], Request]]]) -> Iterator[Request]:
    """Yield requests of parts that are sorted by place."""
    in_order: Iterable[tuple[tuple[float, ...], Request]]
    in_order = parts[0] if len(parts) == 1 else heapq.merge(*parts, key=operator.itemgetter(0))
    return (request for _, request in in_order)


def _candidates_of(
    fresh: _Sorted, resident: PrefixTree | None, context_len: float, limit: int
) -> list[Request]:
    """Return those of an account, of which there are some; see `WaitingQueue.candidates`."""
    oldest = next(iter(fresh))
    sharing = _sharing(fresh, resident, context_len) if resident is not None else []
    equals = [request for request in sharing if request.priority == oldest.priority]
    chosen = dict.fromkeys([*equals[: OLDEST_EVERY - 1], oldest])
    for request in itertools.islice(fresh, limit):
        chosen.setdefault(request)
    return sorted(list(chosen)[:limit], key=lambda request: request.priority)


def _sharing(fresh: _Sorted, resident: PrefixTree, context_len: float) -> list[Request]:
    """Return those whose prompts begin with resident tokens, most tokens first."""
    wanted = max(0, round(context_len)).bit_length()  # lengths in steps of powers of two
    found: list[tuple[int, int, Request]] = []
    account = next(iter(fresh)).account
    # The salts of the oldest stand for all: there may be as many as clients.
    oldest = itertools.islice(fresh, MAX_CANDIDATES)
    for salt in dict.fromkeys(request.prefix_salt for request in oldest):
        sharing = resident.waiting(salt)
        for num_tokens, request in itertools.islice(sharing, MAX_CANDIDATES - len(found)):
            if request.account is account:
                distance = abs(request.num_prompt_tokens.bit_length() - wanted)
                found.append((-num_tokens, distance, request))
    return [request for _, _, request in sorted(found, key=operator.itemgetter(0, 1))]


def _by_rank(item: tuple[Account | None, object]) -> tuple[float, float]:
    account, _ = item
    return (0.0, 0.0) if account is None else account.rank


def prefix_in_flight(request: Request, start: int, prefilling: Sequence[Request]) -> int:
    """Return how many more leading tokens of a waiting request are just being computed.

    Those from `start` on, in the prompt of a running request that is not shared yet; 0 where
    that is too little to wait for: a best-effort request waits, a real-time one does not. A request
    that has to compute all of its prompt has nothing to wait for.
    """
    if not request.takes_prefixes:
        return 0
    best = 0
    for other in prefilling:
        if other.prefix_salt == request.prefix_salt:
            common = common_len(request.prompt_token_ids, other.prompt_token_ids)
            best = max(best, common - start)
    return best if best >= MIN_CHUNK else 0


def _by_arrival(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival_number
