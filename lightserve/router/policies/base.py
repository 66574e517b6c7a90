"""Policies, and the step that a policy fills: it tries requests in order, and all that fit join.

`StepBudget` bounds time, tokens and rows, `MemoryPlan` today's slots, and admission's forecast the
slots of later steps. Every request that does not join has a reason.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from lightserve.messages.images import Image, together
from lightserve.messages.router_worker import MAX_PROMPT_LOGPROB_POSITIONS
from lightserve.router.admission.base import AdmissionRound
from lightserve.router.encoding import StepEncodes
from lightserve.router.kv.prefix_tree import PrefixTree
from lightserve.router.memory_plan import MemoryPlan
from lightserve.router.policies.pace import EVERY_BEST_EFFORT, Pace, kept_pace
from lightserve.router.policies.step_budget import (
    LOOK_AHEAD,
    StepBudget,
    StepLimits,
    idle_limit_s,
)
from lightserve.router.queue import MAX_CANDIDATES, MIN_CHUNK, WaitingQueue, prefix_in_flight
from lightserve.router.request import WAITING, FoundOf, Request
from lightserve.router.request_table import NO_ROWS, Rows, Running, SortedOut
from lightserve.router.seats import NO_SEATS, Seats, had_of, has_had_less
from lightserve.router.step import ALL_CLASSES, Loading, Reason, Scheduled, Skips
from lightserve.types import BE, RT, RequestClass


class Policy(Protocol):
    """Says in which order requests are tried for a step."""

    @property
    def is_class_aware(self) -> bool:
        """Whether real-time requests may take the memory of best-effort ones."""

    @property
    def meets_deadlines(self) -> bool:
        """Whether it looks at requests' deadlines."""

    def fill(self, step: Step) -> None:
        """Try requests that run and wait, the most urgent first (`Step.take`)."""


class Waiting:
    """The waiting requests, those that were paused or preempted before those that never ran."""

    def __init__(
        self,
        queue: WaitingQueue,
        running: Running,
        seats: Seats = NO_SEATS,
        tree: PrefixTree | None = None,
    ) -> None:
        """Read a queue beside what runs; it is not changed.

        `tree`: best-effort requests come by what is cached of them there; None: by arrival.
        """
        self.queue = queue
        self._running = running
        self._seats = seats
        self._tree = tree
        self._found_prefilling: list[Request] | None = None

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all of them in the order of the queue."""
        return iter(self.queue)

    def of(self, request_class: RequestClass) -> Iterator[Request]:
        """Iterate over those of one class, in the order in which they should start.

        Best-effort ones are not all of them: the few that are worth asking.
        """
        if request_class is RT:
            return self.queue.real_time(self._seats)
        table, rows = self._running.table, self._running.rows
        context_len = float(table.next_position[rows].sum()) / max(1, len(rows))
        return self.queue.best_effort(self.queue.turn(), self._tree, context_len, self._seats)

    def is_prefix_in_flight(self, request: Request, start: int) -> bool:
        """Whether it should wait for a prefix that another is just computing.

        A best-effort request does where these come by what they share; a real-time one does not.
        """
        if self._tree is None:
            return False
        if self._found_prefilling is None:
            table, rows = self._running.table, self._running.rows
            prefilling = table.of(rows[~table.is_plain[rows]])
            self._found_prefilling = [r for r in prefilling if not r.is_prompt_shared]
        return bool(prefix_in_flight(request, start, self._found_prefilling))


MEMORY_REASONS = {Reason.KV_NOW, Reason.KV_FUTURE, Reason.BYTES}
"""Reasons that stop newcomers but no running requests: memory is short, not time."""

GoesBefore = Callable[[Request, Request], bool]
"""Whether a newcomer is tried before a prompt in progress."""


class Step:
    """A step that is being filled.

    Each request is tried once at most, unless it was left out for want of time. A policy reads all
    of it, and calls `take`, `run`, `decode`, `give_way`; it changes nothing else but time limits
    (`StepBudget`), `urgent`, `hits_limit` and `best_effort_s`.
    """

    def __init__(
        self,
        running: Running,
        waiting: Waiting,
        limits: StepLimits,
        memory: MemoryPlan,
        admission: AdmissionRound,
        *,
        found: FoundOf,
        is_class_aware: bool,
        meets_deadlines: bool,
    ) -> None:
        """Begin with an empty step, and memory of which nothing is placed yet."""
        self.running = running
        self.waiting = waiting
        self.limits = limits
        self.found = found
        self.budget = StepBudget(running.table, limits, found, meets_deadlines=meets_deadlines)
        self.budget.loads.encodes = StepEncodes(limits.encoding)
        self.skips = Skips(running.table)
        """Requests that the step leaves out, and why."""
        self.started: dict[Request, None] = {}
        """Newcomers in it, those that load to start later included."""
        self.urgent: set[Request] = set()
        """Best-effort newcomers that start whatever the turn."""
        self._short_of: Reason | None = None
        """The resource that the last that were tried found too little of: tokens, pace or time."""
        self.hits_limit = False
        """Whether a policy had to leave out a real-time request for want of time."""
        self.best_effort_s: float | None = None
        """Time that best-effort requests add to it, where they are owed a share and want more."""
        self.memory = memory
        self.admission = admission
        self._is_class_aware = is_class_aware
        self._meets_deadlines = meets_deadlines
        self._closed: set[RequestClass] = set()
        """Classes of which no more newcomers are tried for now."""
        self._num_passed = 0
        """Newcomers that were passed over for want of memory since the last call."""
        self._num_positions_left = MAX_PROMPT_LOGPROB_POSITIONS
        """Positions left for prompts whose log-probabilities are wanted."""
        self._beyond: Scheduled | None = None
        """The last part that was offered more than there is time or tokens for: all of an image."""
        self._ahead: _Encode | None = None
        """The image that stops the request that is being tried: its tokens before it go first."""
        self._num_be_left = limits.starts.most_be
        """Best-effort requests that may start."""

    # ---------------------------------------------------------------- filling

    def decode(self, rows: Rows) -> None:
        """Try rows that compute one token."""
        self.take(decodes=rows, classes=())

    def run(self, running: SortedOut, *, is_whole: bool = False) -> None:
        """Try requests that run: decodes, then prompts in progress."""
        self.take(running.prompts, decodes=running.decodes, is_whole=is_whole)

    def take(
        self,
        prompts: Sequence[Request] = (),
        newcomers: Iterable[Request] = (),
        *,
        decodes: Rows = NO_ROWS,
        classes: tuple[RequestClass, ...] = ALL_CLASSES,
        goes_before: GoesBefore | None = None,
        is_whole: bool = False,
        leaves_room: bool = False,
        num_tokens: int = 0,
    ) -> None:
        """Try requests in order: all decodes, prompts in progress, newcomers.

        A prompt is cut where time or tokens end, and then no other is tried. A newcomer that may
        not start ends the search for newcomers (of its class, where the policy knows classes); a
        best-effort one may be passed for want of memory, `LOOK_AHEAD` of them.

        Args:
            prompts: requests that run and compute more than a token.
            newcomers: requests that wait; read as far as needed.
            decodes: rows that compute one token, tried together.
            classes: of `newcomers`.
            goes_before: whether a newcomer is tried before a prompt; None: after all of them.
            is_whole: whether prompts are not cut; one that is longer than the budget is a step of
                its own.
            leaves_room: whether prompts of real-time requests that have time leave some of it to
                arrivals.
            num_tokens: where not 0, each gets so many tokens, whatever time and budget are left
                (simulated workers decode on by themselves).
        """
        self._short_of = Reason.TOKENS if self.budget.is_full else None
        self._closed.clear()
        self._num_passed = 0
        if len(decodes):
            self._add_decodes(decodes)
        how = _How(is_whole, leaves_room, num_tokens)
        waiting = self._open(newcomers, classes)
        in_order: Iterator[Request] = itertools.chain(prompts, waiting)
        if goes_before is not None:
            in_order = merged(prompts, waiting, goes_before)
        while num_tokens or not self.has_run_out:
            if (request := next(in_order, None)) is None:
                break
            self._try(request, how, classes)
        if self._short_of is not None:
            for request in prompts:
                if request not in self.budget.chunks:
                    self.skips.note(request, self._short_of)
            for request_class in classes:
                self._close(request_class, self._short_of)

    def give_way(self, rows: Rows) -> None:
        """Take decodes out of the step; they may be tried again."""
        if len(rows):
            self.budget.remove_decodes(rows)
            self.memory.remove_decodes(rows)

    def keep_pace(self, pace: Pace | None, prompts: Iterable[Request]) -> None:
        """Have others leave real-time decodes without a target their pace.

        Called once, with the real-time decodes in the step and nothing else; `prompts` may be tried
        next. None: they keep none.
        """
        if pace is not None:
            budget = self.budget
            budget.pace = kept_pace(
                pace,
                self.running,
                prompts,
                decodes=budget.decode_rows,
                due=budget.due,
                found=self.found,
                cost=self.limits.cost,
                encoding=self.limits.encoding,
            )

    def note_rest(self) -> None:
        """Say of requests that were not tried why: it was not their turn."""
        reason = Reason.TOKENS if self.budget.is_full else Reason.ORDER
        table = self.running.table
        for request in self.started:
            self.skips.note(request, Reason.KV_NOW)  # unless it is in the step after all
        if self.budget.shape.num_requests - len(self.started) < len(table.rows):
            others = self._not_in_it(table.rows)
            is_blocked = self.running.schedulable[others] == 0
            self.skips.note_rows(others[is_blocked], Reason.BLOCKED)
            self.skips.note_rows(others[~is_blocked], reason)
        for request_class in ALL_CLASSES:
            self.skips.stop(request_class, reason)

    # ---------------------------------------------------------------- what policies ask

    @property
    def has_run_out(self) -> bool:
        """Whether the last that were tried found too little time, or too few tokens."""
        return self._short_of is not None

    def of(self, request_class: RequestClass | None = None) -> SortedOut:
        """Return the requests of a class, or of all, that run and are not in it yet."""
        rows = self.running.rows if request_class is None else self.running.of(request_class)
        return self.sort_out(rows)

    def sort_out(self, rows: Rows) -> SortedOut:
        """Return requests that run by what they can do, those left out that are in it already."""
        found = self.running.sort_out(self._not_in_it(rows))
        self.skips.note_rows(found.blocked, Reason.BLOCKED)
        return found

    def waits_for_memory(self, request_class: RequestClass) -> bool:
        """Whether memory ended the search for newcomers of a class."""
        return self.skips.stopped_by.get(request_class) in MEMORY_REASONS

    def leaves_waiting(self, request_class: RequestClass) -> bool:
        """Return whether a request of a class could have started by now, and is left out."""
        if self.skips.stopped_by.get(request_class) in (Reason.KV_NOW, Reason.BYTES):
            return False
        return any(
            self.could_start(request) and self.skips.reason_of(request) is not Reason.ENCODING
            for request in self.waiting.of(request_class)
        )

    def could_start(self, request: Request) -> bool:
        """Whether a request that waits is not in it, though it has something to compute."""
        return request not in self.started and self.found(request).num_left > 0

    def is_open(self, request_class: RequestClass) -> bool:
        """Whether more newcomers of a class may be tried for now."""
        starts, is_real_time = self.limits.starts, request_class is RT
        has_row = (starts.rt if is_real_time else starts.be) > len(self.started)
        has_row &= is_real_time or self._num_be_left > 0
        if request_class not in self._closed and not has_row:
            self._close(request_class, Reason.ROWS)
        return request_class not in self._closed

    # ---------------------------------------------------------------- trying

    def _open(
        self, newcomers: Iterable[Request], classes: tuple[RequestClass, ...]
    ) -> Iterator[Request]:
        """Yield newcomers of open classes, as long as there are any."""
        waiting = iter(newcomers)
        while any(map(self.is_open, classes)) and (request := next(waiting, None)) is not None:
            if self.is_open(request.request_class):
                yield request

    def _not_in_it(self, rows: Rows) -> Rows:
        """Return those rows of which nothing is in the step."""
        if self.budget.is_empty or not len(rows):
            return rows
        is_in = np.zeros(self.running.table.num_rows, dtype=np.bool_)
        is_in[self.budget.decode_rows] = True
        is_in[[r.row for r in self.budget.chunks if r.row is not None]] = True
        others: Rows = rows[~is_in[rows]]
        return others

    def _add_decodes(self, rows: Rows) -> None:
        wanted = self.memory.not_stopped(rows)
        in_time = self.budget.decodes_in_time(wanted)
        fitting = self.memory.place_decodes(in_time)
        self.budget.add_decodes(fitting)
        self._short_of = Reason.TOKENS if self.budget.is_full else None
        if len(in_time) < len(wanted):
            self._short_of = reason = self._lacking()
            self.skips.note_rows(np.setdiff1d(wanted, in_time, assume_unique=True), reason)
        if len(fitting) < len(rows):
            self.skips.note_rows(np.setdiff1d(rows, fitting), Reason.KV_NOW)

    def _try(self, request: Request, how: _How, classes: tuple[RequestClass, ...]) -> None:
        """Add as much of a request as fits, or note what it lacks."""
        is_newcomer = request.state is WAITING
        lacking = self._refuses_to_start(request) if is_newcomer else None
        if lacking is None and is_newcomer and not self.admission.admit(request):
            is_owed = request in self.limits.seats.owed
            lacking = None if is_owed else Reason.KV_FUTURE
        self._ahead = None
        part = lacking or self._offer(request, how)
        if self._is_class_aware:
            classes = (request.request_class,)
        if not isinstance(part, Reason):
            part = self._encode(part, how) if isinstance(part, _Encode) else self.memory.place(part)
            if isinstance(part, Reason) and part is not Reason.ENCODING:
                # Time and tokens are left for others.
                self._short_of = Reason.TOKENS if self.budget.is_full else None
                classes = (request.request_class,)
        if isinstance(part, Reason):
            self._skip(request, part, classes)
            return
        self._add(part)
        if (ahead := self._ahead) is not None:
            end = self.found(request).start + part.num_tokens
            if end == ahead.image.start:
                self._order(request, ahead.image, how)

    def _refuses_to_start(self, request: Request) -> Reason | None:
        """Return why a request that waits may not start, memory aside; None if it may."""
        if self.found(request).num_left == 0:  # its frontend has not caught up with it yet
            return Reason.BLOCKED
        if request.request_class is BE and request not in self.urgent:
            if not self.limits.turn.allows(request):
                return Reason.ORDER
            if self.waiting.is_prefix_in_flight(request, self.found(request).start):
                return Reason.BLOCKED
        return None

    def _offer(self, request: Request, how: _How) -> Scheduled | Loading | _Encode | Reason:
        """Return as much of a request as there is time and budget for, or what is short.

        An empty step takes something, however little time there is. One that resumes and has too
        much to bring back loads it beside the step; then others may still join it.
        """
        budget, found = self.budget, self.found(request)
        start, rest, num_loaded, *_ = found
        if rest == 0:
            return Reason.BLOCKED
        most = self._num_positions_left if request.wants_prompt_logprobs(start) else rest
        if most <= 0:
            return Reason.TOKENS
        is_part = how.num_tokens > 0 and not request.is_whole
        rest = self.memory.most_at_once(request, how.num_tokens if is_part else min(rest, most))
        rest = together(request.parameters.images, start, rest)
        if is_part:
            return Scheduled(request, rest)
        if most < min(rest, MAX_PROMPT_LOGPROB_POSITIONS):  # others have taken those of an image
            return Reason.TOKENS
        has_images = bool(request.parameters.images)
        if has_images and (image := self._image_before(request, start, rest, how)) is not None:
            part = _Encode(request, image, min(rest, self.limits.max_num_batched_tokens))
            if image.start <= start:
                return part
            rest, self._ahead = image.start - start, part
        if how.is_whole or request.is_whole:
            is_in = budget.is_empty or budget.num_tokens_in_time(request, rest) == rest
            if is_in:
                return Scheduled(request, rest)
            self._short_of = self._lacking(request)
            return self._short_of
        num_loaded -= found.num_state_slots  # a state comes when it runs
        can_go_beside = num_loaded > 0 and budget.loads.can_go_beside(num_loaded, budget.seconds)
        if can_go_beside and budget.loads.is_free_for(
            num_loaded, budget.seconds, self._due_for(request)
        ):
            return self._offer_loading(request)
        num_tokens = budget.num_tokens_in_time(request, rest, leaves_room=how.leaves_room)
        is_small = request.request_class is BE and budget.pace.sets(budget.limit_for(request))
        least = min(rest, MIN_CHUNK) if self._meets_deadlines and not is_small else 1
        if num_tokens <= 0 or (num_tokens < least and not budget.is_empty):
            if can_go_beside and not budget.is_full:
                return self._offer_loading(request)
            self._short_of = self._lacking(request)
            return self._short_of
        self._short_of = self._lacking(request) if num_tokens < rest else None
        return self._with_whole_image(Scheduled(request, num_tokens), start)

    def _image_before(self, request: Request, start: int, rest: int, how: _How) -> Image | None:
        """Return the first image for which there is no time with its tokens; None: there is none.

        An empty step takes all of them where prompts are not cut.
        """
        budget, cost, room_s = self.budget, self.limits.cost, math.inf
        if how.is_whole and budget.is_empty:
            return None
        for image in budget.loads.encodes.missing(request, start, rest):
            if room_s == math.inf:
                least = cost.seconds(budget.shape.plus(start, min(rest, MIN_CHUNK)))
                room_s = self._room_to_encode(request, how) - (least - budget.seconds)
            image_s = budget.loads.encodes.seconds_of(image)
            room_s -= image_s
            if image_s == 0.0 or room_s < 0.0:
                return image
        return None

    def _room_to_encode(self, request: Request, how: _How) -> float:
        """Return the time that the step has left for images of a request.

        Where nothing limits it, that of a step with all the tokens that it may have.
        """
        budget, limits, start = self.budget, self.limits, self.found(request).start
        limit_s = budget.limit_for(request)
        if how.leaves_room and budget.is_empty:
            idle_s = idle_limit_s(budget.shape, limits, request, start, MIN_CHUNK)
            if idle_s < limit_s and not budget.is_urgent(request, idle_s * limits.cost.guard):
                limit_s = idle_s
        if limit_s == math.inf and limits.cost.is_known:
            num_left = limits.max_num_batched_tokens - budget.shape.num_new
            limit_s = limits.cost.seconds(budget.shape.plus(start, num_left))
        return limit_s - budget.seconds - budget.loads.seconds()

    def _with_whole_image(self, part: Scheduled, start: int) -> Scheduled | Reason:
        """Return a part that ends within no image; beside others, one goes beyond the limits."""
        request, num_tokens = part
        count = together(request.parameters.images, start, num_tokens)
        if count > num_tokens and not self.budget.is_empty:
            if self._beyond in self.memory.parts:
                self._short_of = self._lacking(request)
                return self._short_of
            self._beyond = Scheduled(request, count)
        return Scheduled(request, count)

    def _encode(self, part: _Encode, how: _How) -> Reason:
        """Encode an image within the time that its tokens would have; return why these wait.

        One that waits and would not have the memory for them waits for that first.
        """
        request, image, num_tokens = part
        if request.state is WAITING and (
            lacking := self.memory.lacking(Scheduled(request, num_tokens))
        ):
            return lacking
        self._order(request, image, how)
        return Reason.ENCODING

    def _order(self, request: Request, image: Image, how: _How) -> None:
        """Have as many layers of an image encoded as there is time for.

        One at least for a real-time request, or in an empty step; for a best-effort one, which is
        to hold up no token of others, in some steps.
        """
        of, room_s = request.request_class, self._room_to_encode(request, how)
        is_empty, is_rare = self.budget.is_empty, self.limits.step_number % EVERY_BEST_EFFORT == 0
        least = int(of is RT or is_empty or is_rare)
        self.budget.loads.encodes.order(image, room_s, of, least=least, is_empty=is_empty)

    def _due_for(self, request: Request) -> float:
        """Return the time that a request has to load its KV beside steps."""
        if request.request_class is RT and not self._meets_deadlines:
            return 0.0
        return self.budget.due.of(request) / self.limits.cost.guard

    def _offer_loading(self, request: Request) -> Loading | Reason:
        budget = self.budget
        found = self.found(request)
        num_loaded = found.num_loaded - found.num_state_slots
        num_tokens = budget.loads.tokens_beside(num_loaded, budget.seconds, budget.limit_for())
        return Loading(request, num_tokens) if num_tokens else Reason.LOADING

    def _lacking(self, request: Request | None = None) -> Reason:
        """Return the resource that is too little for all of a prompt, or (None) for decodes."""
        if self.budget.is_full:
            return Reason.TOKENS
        if self.budget.pace.sets(self.budget.limit_for(request)):
            return Reason.PACE
        return Reason.TIME if self._meets_deadlines else Reason.TOKENS

    def _add(self, part: Scheduled | Loading) -> None:
        """Add a part that was offered, or less of it."""
        request = part.request
        if request.state is WAITING:
            self.started[request] = None
            self._num_be_left -= request.request_class is BE
            if request.request_class is BE and request not in self.urgent:
                self.limits.turn.note(request)
        self.budget.add(part)
        if isinstance(part, Loading):
            self.skips.note(request, Reason.LOADING)
            return
        if request.wants_prompt_logprobs(self.found(request).start):
            self._num_positions_left -= part.num_tokens
        if self.budget.is_full:
            self._short_of = Reason.TOKENS

    def _skip(self, request: Request, reason: Reason, classes: tuple[RequestClass, ...]) -> None:
        """Leave a request out; no more newcomers of `classes` are tried if it may not be passed."""
        self.skips.note(request, reason)
        if request.state is not WAITING or reason is Reason.BLOCKED:
            return
        is_best_effort = request.request_class is BE
        has_no_positions = self._num_positions_left <= 0 and request.wants_prompt_logprobs(
            self.found(request).start
        )
        if (
            reason in (Reason.LOADING, Reason.ENCODING)
            or (reason is Reason.KV_FUTURE and is_best_effort)
            or (reason is Reason.TOKENS and has_no_positions)
        ):
            self._num_passed += 1
            if self._num_passed <= LOOK_AHEAD:
                return
        for request_class in classes:
            self._close(request_class, reason)

    def _close(self, request_class: RequestClass, reason: Reason) -> None:
        self._closed.add(request_class)
        self.skips.stop(request_class, reason)


class _Encode(NamedTuple):
    """An image of a request, whose tokens are the next ones."""

    request: Request
    image: Image
    num_tokens: int
    """Most of the next tokens that a step computes once there is the image."""


class _How(NamedTuple):
    """How `Step.take` tries each request."""

    is_whole: bool
    leaves_room: bool
    num_tokens: int


def merged(
    first: Iterable[Request], second: Iterator[Request], goes_before: GoesBefore
) -> Iterator[Request]:
    """Yield both in their own orders, one of `second` before one of `first` where that is said.

    Each is asked for once the one before was tried.
    """
    other = next(second, None)
    for request in first:
        while other is not None and goes_before(other, request):
            yield other
            other = next(second, None)
        yield request
    if other is not None:
        yield other
    yield from second


# Orders that several policies have.


def in_turns(
    step: Step, running: SortedOut, newcomers: Iterable[Request], request_class: RequestClass
) -> None:
    """Try requests of a class that run, then those that start.

    Where several accounts have some, prompts of the account that has had least come first, be they
    in progress or not: one that starts does not wait for the ends of others' prompts.
    """
    prompts, goes_before = running.prompts, None
    if step.limits.seats.is_shared and prompts:
        step.run(running._replace(prompts=[]))
        prompts, goes_before = sorted(prompts, key=had_of), has_had_less
    else:
        step.run(running)
        prompts = []
    if not step.has_run_out:
        step.take(prompts, newcomers, classes=(request_class,), goes_before=goes_before)


def heads_of_real_time(waiting: Waiting) -> list[Request]:
    """Return the real-time requests that wait and come into question, late ones first."""
    heads = (waiting.queue.late(), waiting.of(RT))
    return list(dict.fromkeys(r for head in heads for r in itertools.islice(head, MAX_CANDIDATES)))


def one_by_one(
    step: Step,
    requests: Iterable[Request],
    *,
    is_whole: Callable[[Request], bool] = lambda _request: False,
) -> None:
    """Try requests, those that run and those that wait in one order, until time runs out.

    The next is asked for once the one before is in the step or left out, and may be chosen by that.
    Those that wait are left out once one of their class may not start, or too many are short of
    memory.
    """
    num_refused = dict.fromkeys(ALL_CLASSES, 0)
    for request in requests:
        of = request.request_class
        if request.state is not WAITING:
            step.take((request,), classes=(), is_whole=is_whole(request))
        elif of not in step.skips.stopped_by and num_refused[of] <= LOOK_AHEAD:
            step.take(newcomers=(request,), classes=(of,), is_whole=is_whole(request))
            num_refused[of] += step.could_start(request)
        if step.has_run_out:
            return
