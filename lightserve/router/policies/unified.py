"""Real-time tokens by their deadlines, best-effort ones in all the time that is left.

One time limit per step (BROS, section IV; Echo, section 4.2): the smallest residual among tokens
that this step completes and that can still be in time; token budgets are the inverse of the cost
model at that limit (AccelGen, section 3), so that prompts fill it exactly; only those that have
time to spare leave some of it to what may come (`leaves_room`). Slack that early tokens
bought is what long chunks and best-effort work live on.

    1. real-time decodes: they make the limit
    2. real-time prompts that can still be in time, by residual, one cut where the limit ends;
       of a key one after the other (`_one_long_at_once`); where nothing is due keys take turns
    3. real-time prompts that are late anyway; those that have not started only while memory is
       left for arrivals that can be in time
    4. best-effort decodes, prompts in progress, those that resume, newcomers, the best of the next
       few first (`batch_order`)

Decodes with time to spare give way to requests that would be late beside them, and, where deadlines
limit a step, to 4 if that gains tokens (`_rescued`, `_displaced`). Best-effort jobs with a
completion time go with 1 and 2 while they are urgent (`promote`); in 4 lines of batches that are
behind come first (`urgent_lines`).

In overload this order keeps goodput: sorted by deadline alone, all would be a little late. So that
none waits for ever, 3 goes before 2 in a share of the steps (`is_turn_of_late`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from lightserve.router.accounts import Account
from lightserve.router.arrivals import IDLE_SHARE, Outlook
from lightserve.router.policies.base import MEMORY_REASONS, Step, in_turns, merged
from lightserve.router.policies.batch_order import BatchOrder, promote, urgent_lines
from lightserve.router.policies.pace import EVERY_BEST_EFFORT, Pace
from lightserve.router.policies.step_budget import LOOK_AHEAD, StepBudget
from lightserve.router.queue import MAX_CANDIDATES, MIN_CHUNK
from lightserve.router.request import Request
from lightserve.router.request_table import NO_ROWS, RequestTable, Rows
from lightserve.router.seats import had_of, has_had_less, in_fair_order
from lightserve.router.step import Reason
from lightserve.router.step_cost import StepShape
from lightserve.types import BE, RT

# What `--policy unified` can be told.


@dataclass(frozen=True, kw_only=True)
class UnifiedOptions:
    """Fields are options of `lightserve serve`; defaults are theirs."""

    late_min_share: float = 0.1
    be_min_share: float = 0.0
    best_first: bool = True
    """Whether best-effort requests start by what they gain; otherwise as the queue has them."""
    long_prompt_tokens: int = 4096
    """AccelGen's bound of long prompts."""
    pace: Pace | None = field(default_factory=Pace)
    """The pace of real-time decodes without targets; None: they keep none."""


class UnifiedPolicy:
    """Real-time requests by deadline, best-effort requests in the time that is left."""

    is_class_aware = True
    meets_deadlines = True

    def __init__(self, options: UnifiedOptions = UnifiedOptions()) -> None:
        """`options` are frozen."""
        self._options = options

    def fill(self, step: Step) -> None:
        """Fill a step; `Policy.fill` says how."""
        order = _Order(self._options, step)
        order.decode()
        order.pay_owed()
        order.try_urgent()
        order.fill_rest()
        if self._options.be_min_share > 0 and order.wants_more:
            step.best_effort_s = order.best_effort_s


class _Order:
    """The order of one step, from the most urgent requests to the least."""

    def __init__(self, options: UnifiedOptions, step: Step) -> None:
        self.best_effort_s = 0.0
        """Time that best-effort requests add to the step."""
        self.wants_more = False
        """Whether there are some that could do with more time."""
        self._options = options
        self._step, self._budget, self._limits = step, step.budget, step.limits
        self._table = step.running.table
        self._real_time, self._best_effort = step.running.of(RT), step.running.of(BE)
        self._num_held = int(self._table.next_position[self._real_time].sum())
        """Tokens of real-time requests."""
        promoted = promote(step, self._best_effort)
        step.budget.due.of_jobs = promoted.due_s
        step.urgent = set(promoted.waiting)
        self._jobs = promoted.waiting
        """Best-effort requests that wait, and go with real-time ones."""
        self._promoted = promoted.rows
        if len(promoted.rows):
            self._best_effort = self._best_effort[~np.isin(self._best_effort, promoted.rows)]
        self._lines = urgent_lines(step, self._best_effort)
        step.urgent.update(self._lines.waiting)
        if len(rows := self._lines.rows):
            others = self._best_effort[~np.isin(self._best_effort, rows)]
            self._best_effort = np.concatenate([rows, others])
        self._prompts: list[Request] = []
        """In progress, of real-time requests and of such jobs."""
        self._gave_way: Rows = NO_ROWS
        """Decodes left out for a more urgent request."""
        self._is_too_much = False
        """Whether real-time newcomers cannot all be in time."""
        self._is_left = False
        """Whether something urgent that could move or start was left out, or cut."""

    @property
    def _seconds(self) -> float:
        """Predicted time of the step so far, images that it encodes included, copies left out."""
        return self._budget.seconds + self._budget.loads.encodes.seconds

    def decode(self) -> None:
        """Try decodes of real-time requests: they make the limit. Jobs' may not break it."""
        step, budget = self._step, self._budget
        for rows in (self._real_time, self._promoted):
            of_rows = step.sort_out(rows)
            self._prompts += of_rows.prompts
            if len(of_rows.decodes) or rows is self._real_time:
                step.decode(of_rows.decodes)
                budget.limit_by_deadlines()
        newcomers = itertools.islice(step.waiting.of(RT), LOOK_AHEAD)
        self._gave_way, due_s = _rescued(step, itertools.chain(self._prompts, newcomers))
        if len(self._gave_way):
            step.give_way(self._gave_way)
            budget.limit_by_deadlines(due_s)
        heads = itertools.islice(step.waiting.of(RT), MAX_CANDIDATES)
        due = itertools.takewhile(lambda request: budget.due.of(request) < math.inf, heads)
        step.keep_pace(self._options.pace, itertools.chain(self._prompts, due))

    def pay_owed(self) -> None:
        """Try what is missing from the share of best-effort requests, whatever the limit."""
        owed_s = self._limits.best_effort_time.owed_s(self._options.be_min_share)
        if owed_s > 0:
            with self._budget.in_any_case(owed_s):
                self._try_best_effort()

    def try_urgent(self) -> None:
        """Try real-time prompts: those that can be in time, then those that cannot."""
        options, step, budget = self._options, self._step, self._budget
        prompts = sorted(self._prompts, key=lambda r: (budget.due.of(r), had_of(r)))
        late = [r for r in prompts if not budget.can_be_in_time(r)]
        late.sort(key=had_of)
        in_time = [r for r in prompts if r not in late]
        late_goes_first = is_turn_of_late(
            self._table,
            self._real_time,
            options.late_min_share,
            self._limits.outlook.load,
            self._limits.step_number,
        )
        jobs = [r for r in self._jobs if r not in step.started]
        classes = (RT, BE) if jobs else (RT,)
        for prompts in (late, in_time) if late_goes_first else (in_time, late):
            newcomers: Iterator[Request] = iter(())
            if prompts is in_time:
                newcomers = self._newcomers(in_time, late_first=late_goes_first)
                newcomers = self._one_long_at_once(newcomers, in_time)
                if jobs:
                    newcomers = merged(jobs, newcomers, self._goes_before)
            if prompts or prompts is in_time:
                step.take(
                    prompts,
                    newcomers,
                    classes=classes,
                    goes_before=self._goes_before,
                    leaves_room=True,
                )
                if step.has_run_out:
                    self._is_left = True
                    return
        self._is_left = not step.waits_for_memory(RT) and any(
            step.could_start(request)
            and step.skips.reason_of(request) not in (*MEMORY_REASONS, Reason.ENCODING)
            for request in step.waiting.of(RT)
        )

    def fill_rest(self) -> None:
        """Fill the rest of the step, as far as it is lent, if nothing urgent waits."""
        step, budget = self._step, self._budget
        if len(self._gave_way):
            budget.limit_by_returning(self._gave_way)
            step.decode(budget.due.in_order(self._gave_way))
        if self._is_left or budget.is_full:
            self.wants_more = self._options.be_min_share > 0 and (
                bool(len(self._best_effort)) or next(iter(step.waiting.of(BE)), None) is not None
            )
            return
        outlook = self._limits.outlook
        pace_s = budget.pace.best_effort_s
        lent_s = self._lent_until_s()
        until_s = min(lent_s, pace_s)
        ample = 0.0 if outlook.is_tight else max(0.0, 1.0 - outlook.load - MUCH_FREE)
        budget.lend(until_s)
        displaced = _displaced(step)
        step.give_way(displaced)
        if ample > 0 and len(self._best_effort):
            before_s = budget.seconds
            budget.lend(min(max(until_s, before_s * (1.0 + ample)), pace_s))
            step.decode(step.sort_out(self._best_effort).decodes)
            self.best_effort_s += budget.seconds - before_s
            budget.lend(until_s)
        if len(self._lines.rows) or self._lines.waiting:
            self._try_late_lines()
            until_s = min(until_s, budget.seconds)
            budget.lend(until_s)
        self._try_best_effort()
        if self.wants_more and (ample > 0 or self._is_padded()):
            nearly_s = budget.seconds * (1.0 + NEARLY_FREE)
            doubtless_s = nearly_s if self._is_padded() else 0.0
            budget.lend(max(until_s, nearly_s), doubtless_s=doubtless_s)
            self._try_best_effort(has_decodes=False)
            self.wants_more = True
        is_rare = self._limits.step_number % EVERY_BEST_EFFORT == 0
        if pace_s < lent_s and is_rare and self.best_effort_s == 0.0:
            budget.lend(lent_s)
            self._try_best_effort()
        if len(displaced):
            step.decode(displaced)

    def _try_late_lines(self) -> None:
        """Try lines of batches that are behind, and the decodes of other best-effort requests.

        The prompts of these then have what adds nothing to the step: without them steps are short,
        and as more and more of them end, the lines get their memory.
        """
        step, before_s = self._step, self._seconds
        has_memory = not step.waits_for_memory(RT)
        newcomers = (r for r in self._lines.waiting if has_memory and self._may_be_tried(r))
        lines = step.sort_out(self._lines.rows)
        step.take(lines.prompts, newcomers, decodes=lines.decodes, classes=(BE,))
        if not step.has_run_out:
            step.decode(step.sort_out(self._best_effort).decodes)
        self.best_effort_s += self._seconds - before_s

    def _try_best_effort(self, *, has_decodes: bool = True) -> None:
        """Try those that run, then those that start, up to the limit that is set."""
        step, before_s = self._step, self._seconds
        running = step.sort_out(self._best_effort)
        if not has_decodes:
            running = running._replace(decodes=NO_ROWS)
        newcomers: Iterator[Request] = iter(())
        if not step.waits_for_memory(RT):
            newcomers = filter(self._may_be_tried, step.waiting.of(BE))
            if self._options.best_first:
                newcomers = BatchOrder(step).best_first(newcomers)
        in_turns(step, running, newcomers, BE)
        self.wants_more = step.has_run_out or BE in self._budget.loads.encodes.cut
        self.best_effort_s += self._seconds - before_s

    def _may_be_tried(self, request: Request) -> bool:
        """Whether a newcomer is neither in the step nor was left out of it for want of memory."""
        step = self._step
        is_tried = step.skips.reason_of(request) in MEMORY_REASONS
        return request not in step.started and not is_tried

    def _is_padded(self) -> bool:
        """Whether workers fill up the step: tokens up to its size cost their attention alone."""
        return self._limits.cost.num_padding(self._budget.shape) >= MIN_CHUNK

    def _lent_until_s(self) -> float:
        budget, limits = self._budget, self._limits
        floor_s = limits.cost.seconds(StepShape().plus(0, 1))
        held_share = self._num_held / limits.pool.num_slots
        tpot_s = float(self._table.tpot_s[self._real_time].min(initial=math.inf))
        pace = self._options.pace
        return lent_until_s(
            budget.seconds,
            floor_s,
            held_share,
            limits.outlook,
            limits.pool.num_slots,
            tpot_s=tpot_s,
            pace_s=pace.seconds if pace else math.inf,
        )

    # ---------------------------------------------------------------- real-time newcomers

    def _newcomers(self, in_progress: Iterable[Request], *, late_first: bool) -> Iterator[Request]:
        """Return those that may start, by deadline, or where not all can be in time by length.

        By deadlines alone those that cannot be in time would be at the head of the queue in
        overload; and as one is worth as much as another, most are in time if those go first that
        take least, time as well as memory. Those that cannot be in time follow, then those that
        are late: one of these goes before all others, or all of them last or not at all. Those that
        never ran and that nothing is due of are not looked at before it is their turn: they come by
        arrival, as otherwise shorter ones would pass a long one for ever. Where there is too much,
        or has been, accounts take turns by what they have had.

        Args:
            in_progress: prompts that compute as well.
            late_first: whether it is the turn of a late one.
        """
        step, budget, seats = self._step, self._budget, self._limits.seats
        late = next((r for r in step.waiting.queue.late() if r not in seats.owed), None)
        newcomers = step.waiting.of(RT)
        if late_first and late is not None:
            newcomers = itertools.chain([late], (r for r in newcomers if r is not late))
        elif self._num_held >= MAX_SHARE * self._limits.pool.num_slots:
            newcomers = itertools.takewhile(lambda r: r is not late, newcomers)
        weighed: list[Request] = []
        owed: list[Request] = []
        rest: Iterator[Request] = newcomers
        for request in itertools.islice(newcomers, MAX_CANDIDATES):
            residual_s = budget.due.of(request)
            if request in seats.owed and not 0 < residual_s < math.inf:
                owed.append(request)
                continue
            if residual_s <= 0 or (residual_s == math.inf and request.num_requeues == 0):
                rest = itertools.chain([request], newcomers)
                break
            weighed.append(request)
        hopeless = [r for r in weighed if not budget.can_be_in_time(r)]
        in_time = [r for r in weighed if r not in hopeless]
        num_free = MAX_SHARE * self._limits.pool.num_slots - self._num_held
        is_too_much = next(iter(step.waiting.queue.late()), None) is not None
        freed_per_s = 0.0  # of slots, by real-time requests, as recent steps were
        if (average_step_s := self._limits.average_step_s) > 0:
            num_decodes = int(self._table.is_rt[budget.decode_rows].sum())
            freed_per_s = num_decodes * self._limits.outlook.freed_per_decode / average_step_s
        if not _fit_all(in_time, in_progress, budget, num_free, freed_per_s):
            in_time.sort(key=lambda request: step.found(request).num_left)
            is_too_much = True
        self._is_too_much = is_too_much
        if is_too_much:
            untimed: list[Request] = []
            if seats.is_shared:
                untimed, rest = self._untimed(rest)
            in_time = in_fair_order([*in_time, *untimed], step.found)
        return itertools.chain(owed, in_time, in_fair_order(hopeless, step.found), rest)

    def _untimed(self, newcomers: Iterator[Request]) -> tuple[list[Request], Iterator[Request]]:
        """Return the next few newcomers that nothing is due of, and those behind them."""
        found: list[Request] = []
        for request in newcomers:
            if self._budget.due.of(request) < math.inf or len(found) == LOOK_AHEAD:
                return found, itertools.chain([request], newcomers)
            found.append(request)
        return found, iter(())

    def _one_long_at_once(
        self, newcomers: Iterable[Request], in_progress: Iterable[Request]
    ) -> Iterator[Request]:
        """Yield newcomers, those left out that would be an account's second long prompt at once.

        Two long prompts that take turns both end late: each waits for the other's chunks, and both
        hold memory meanwhile (AccelGen's exclusive allocation). So a new one waits until the one in
        progress (that can be in time: a late one may never end) is through, however near its own
        deadline is, unless it is urgent: it could not meet it any more after one more step. Short
        prompts go on, and other accounts: they are not to wait for that either. Best-effort prompts
        need no rule: they follow one another anyway.
        """
        long_tokens = self._options.long_prompt_tokens
        step, num_held = self._step, 0
        most_held = MAX_CANDIDATES if self._limits.seats.is_shared else LOOK_AHEAD
        is_at_it: set[Account | None] = set()
        if long_tokens > 0:
            is_at_it = {
                request.account
                for request in in_progress
                if request.num_known_tokens - (request.num_cached_tokens or 0) >= long_tokens
            }
        for request in newcomers:
            is_long = step.found(request).num_left >= long_tokens
            if not is_long or request.account not in is_at_it or self._budget.is_urgent(request):
                yield request
                continue
            step.skips.note(request, Reason.ORDER)
            num_held += 1
            if num_held == most_held:
                return

    def _goes_before(self, newcomer: Request, request: Request) -> bool:
        """Whether it is due before; where nothing is due, or too much, whether it has had less."""
        budget = self._budget
        due_s, other_due_s = budget.due.of(newcomer), budget.due.of(request)
        if due_s == other_due_s == math.inf:
            return has_had_less(newcomer, request)
        if self._is_too_much and other_due_s == math.inf and has_had_less(request, newcomer):
            return False
        return due_s < other_due_s and budget.can_be_in_time(newcomer)


def _fit_all(
    newcomers: Sequence[Request],
    in_progress: Iterable[Request],
    budget: StepBudget,
    num_free: float,
    freed_per_s: float,
) -> bool:
    """Return whether newcomers, one after the other, have memory in time, and are all in time."""
    done_s = sum(budget.seconds_to_end_beside_others(request) for request in in_progress)
    for request in newcomers:
        num_free -= request.num_known_tokens + request.recurrent.num_slots
        wait_s = 0.0
        if num_free < 0:
            wait_s = -num_free / freed_per_s if freed_per_s > 0 else math.inf
        done_s += budget.seconds_to_end_beside_others(request)
        if done_s + wait_s > budget.due.of(request):
            return False
    return True


# In which steps late requests go before those that can be in time.
#
# In its turn a late prompt in progress goes first, or else one more late request starts, while
# fewer requests whose first token was late run than are the share of those that are late.
# Otherwise late ones go last, and start only while memory is left for arrivals that can be in time.
#
# Beyond capacity more become late than any share could serve, and all that it does is that none
# waits for ever; but what it takes is goodput. So it is halved until it is the part of the time
# that it could serve of what is too much.


def is_turn_of_late(
    table: RequestTable, real_time: Rows, min_share: float, load: float, step_number: int
) -> bool:
    """Return whether late requests go before all others in a step.

    `real_time`: those that run. They get `min_share` of the steps where all could be served;
    `load`: share of the time that real-time requests ask for, above 1 in overload.
    """
    if min_share <= 0:
        return False
    num_halvings = max(0, math.ceil(math.log2(max(1.0, (load - 1.0) / min_share))))
    every = round(1 / min_share) << num_halvings
    num_late = int(np.count_nonzero(table.is_first_late[real_time]))
    return step_number % every == 0 and num_late * every < len(real_time)


# Time that is lent to best-effort requests in a step.
#
# Deadlines alone lend too much. Longer steps keep real-time requests, and their KV, for longer: at
# the same rate of arrival memory grows with the time of a step (Little's law), until newcomers wait
# for it; and near capacity there is no time left in which it would fall again. So steps are kept to
# the time at which real-time requests come to hold a share of the pool, the smaller, the less time
# is free; and nothing is lent while they hold more than that.
#
# Where first tokens are tight, decodes do not use up their time either: what they save is what
# chunks of the next long prompt take them, which would be cut short otherwise.
#
# Where much time is free (beyond MUCH_FREE) and little is lent, it is memory that is short. Decodes
# of best-effort requests go beyond what is lent, as one that waits keeps its memory from others,
# and prompts get what adds next to nothing to a step (NEARLY_FREE), and in any case where workers
# pad a step with a chunk.

IDLE_FLOORS = 2.0
"""Beyond the idle limit, so many times the shortest step: on slow machines that may be longer."""
MAX_SHARE = 0.75
"""Share of the pool that real-time requests may come to hold where most time is free, and up to
which late ones may start."""
SHARE_PER_FREE = 3.0
"""Where less is, so many times the share of time that is free."""
TIGHT_PACE = 0.85
"""Where first tokens are tight, share of the tightest mean time of a token that a step may take."""
MUCH_FREE = 0.25
"""More than this share of time that is free is ample: best-effort decodes may stretch a step by the
share that is."""
NEARLY_FREE = 0.01
"""Share of a step by which tokens that are all but free may."""


def lent_until_s(
    base_s: float,
    floor_s: float,
    held_share: float,
    outlook: Outlook,
    num_slots: int,
    *,
    tpot_s: float = math.inf,
    pace_s: float = math.inf,
) -> float:
    """Return how long a step may take, best-effort requests included, in seconds.

    `base_s`: its real-time requests, 0 without any; `floor_s`: a step of one token. `held_share`
    of the pool's slots is held by real-time requests, of which `tpot_s` is the tightest mean time
    of a token; those without targets keep `pace_s`.
    """
    share = min(MAX_SHARE, SHARE_PER_FREE * max(0.0, 1.0 - outlook.load))
    shortest_s = IDLE_FLOORS * floor_s
    idle_limit_s = outlook.idle_limit_s
    if outlook.has_untimed:  # as though their first token were due in two paces
        idle_limit_s = min(idle_limit_s, IDLE_SHARE * 2.0 * pace_s)
    limit_s = max(idle_limit_s, shortest_s)
    if outlook.kv_per_step_s > 0:
        limit_s = min(limit_s, share * num_slots / outlook.kv_per_step_s)
    if held_share > share:
        limit_s = 0.0
    if outlook.is_tight:
        limit_s = min(limit_s, TIGHT_PACE * tpot_s)
    return max(limit_s, base_s if base_s > 0 else shortest_s)


# Real-time decodes that can wait for a step give way.
#
#     _rescued      to a real-time token that would be late beside them, and is in time without
#     _displaced    to best-effort prompts, if these gain more tokens in their time
#
# A decode can wait if it is still in time after this step and one more like the recent ones, for
# best-effort prompts two. What gave way comes back if the step has time left for it.
# Until then the step ends by the time the rescued token is due, even if others go before it.


def _rescued(step: Step, prompts: Iterable[Request]) -> tuple[Rows, float]:
    """Return decodes that give way to the most urgent request they make late; its due time in s."""
    budget, average_step_s = step.budget, step.limits.average_step_s
    if average_step_s <= 0:
        return NO_ROWS, math.inf
    in_danger = [r for r in budget.in_danger if budget.due.of(r) > 0]
    in_danger += [r for r in prompts if budget.due.of(r) > 0 and not budget.can_be_in_time(r)]
    for request in sorted(in_danger, key=budget.due.of):
        others = budget.decodes_due_after(budget.due.of(request) + average_step_s)
        if len(others) and budget.can_be_in_time(request, without=others):
            return others, budget.due.of(request)
    return NO_ROWS, math.inf


def _displaced(step: Step) -> Rows:
    """Return decodes that give way to best-effort prompts.

    Only where deadlines are what limits the step: time that is not lent is no gain.
    """
    average_step_s = step.limits.average_step_s
    return step.budget.decodes_worth_less(2 * average_step_s) if average_step_s > 0 else NO_ROWS
