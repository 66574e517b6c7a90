"""Requests that run, as columns: what every step reads and writes of them.

One row for each sequence that the workers can hold, and one array per field, indexed by row. A
request that gets a row puts its progress here and reads it from here (`Request`'s properties),
until it gives the row back. So what is the same for all decodes of a step, as most are, is done for
all of them at once: which may advance, what is due when, what comes of a result.

Rows are int64 arrays of row numbers, in order of admission.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightserve.router.request import Request
from lightserve.router.slo import (
    MAX_RESERVE_SHARE,
    RESERVE_SHARE,
    CompletionLedger,
    DeadlineTracker,
    LineDeadline,
    SharedDue,
    TokenDeadlines,
)
from lightserve.types import RT, RequestClass, RowId

Rows = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

NO_ROWS: Rows = np.empty(0, dtype=np.int64)
_COUNTS = (
    "next_position",
    "num_prompt",
    "num_output",
    "max_tokens",
    "stop_at",
    "inflight_tokens",
    "inflight_samples",
    "inflight_steps",
    "num_kept",
    "num_missed",
    "request_id",
    "frontend_id",
    "admission_limit",
    "arrival_number",
)
_TIMES = (
    *("due_s", "by_mean_s", "last_s", "tpot_s", "mtpot_s", "soonest_s", "debt_s"),
    *("line_due_s", "num_expected"),
)
_FLAGS = (
    "is_running",
    "is_rt",
    "is_plain",
    "awaits_grammar",
    "has_deadlines",
    "is_timed",
    "is_first_late",
    "wants_logprobs",
)


_FEW_ENDS = 8
"""So many tokens that end outputs are compared one by one: `isin` takes as long for one."""


class Residuals(NamedTuple):
    """Seconds from the start of a step to when tokens are due, per row of the table."""

    due: FloatArray
    """The next token's, behind those in flight; inf: never."""
    lent: FloatArray
    """Seconds of `due` that best-effort work may take."""
    of_late: FloatArray
    """The next token's if nothing had to be made up for."""


class RequestTable:
    """Columns of running requests, as the module describes. The scheduler alone writes to them."""

    next_position: Rows
    """First position that no plan has computed or is computing."""
    num_prompt: Rows
    num_output: Rows
    """Confirmed tokens."""
    max_tokens: Rows
    stop_at: Rows
    """With so many output tokens, those in flight included, a request is not scheduled: it has all
    of its own, or its frontend has too much to look at."""
    inflight_tokens: Rows
    inflight_samples: Rows
    inflight_steps: Rows
    num_kept: Rows
    """Tokens whose deadlines have been counted."""
    num_missed: Rows
    """Counted tokens that were late."""
    request_id: Rows
    frontend_id: Rows
    admission_limit: Rows
    """Output tokens that admission believes it can reach."""
    arrival_number: Rows
    due_s: FloatArray
    """Columns from here to `debt_s` hold `TokenDeadlines`, on the router's clock."""
    by_mean_s: FloatArray
    last_s: FloatArray
    tpot_s: FloatArray
    mtpot_s: FloatArray
    soonest_s: FloatArray
    debt_s: FloatArray
    line_due_s: FloatArray
    """When a line of a batch should have ended; inf: it is none."""
    num_expected: FloatArray
    """Output tokens of such a line, as predicted."""
    is_running: BoolArray
    """Whether the row has a request that has not ended."""
    is_rt: BoolArray
    is_plain: BoolArray
    """Whether a token of it is news to nothing but its frontend: its prompt is in the prefix tree,
    it waits for no grammar, and no job's time depends on it."""
    awaits_grammar: BoolArray
    has_deadlines: BoolArray
    is_timed: BoolArray
    """Whether tokens after the first have a target, be it one that the policy looks at or not."""
    is_first_late: BoolArray
    wants_logprobs: BoolArray

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.requests: list[Request | None] = [None] * num_rows
        self.outputs: list[list[int]] = [[] for _ in range(num_rows)]
        """Confirmed tokens of the request in each row: its own list."""
        self.cells: dict[str, array[Any]] = {}
        """The columns for Python, which reads single numbers of an `array` several times faster."""
        for names, code, dtype in (
            (_COUNTS, "q", np.int64),
            (_TIMES, "d", np.float64),
            (_FLAGS, "b", np.bool_),
        ):
            for name in names:
                cells = self.cells[name] = array(code, bytes(num_rows * array(code).itemsize))
                setattr(self, name, np.frombuffer(cells, dtype=dtype))
        self.line_due_s.fill(np.inf)
        self._free = list(range(num_rows))
        self._order: dict[RowId, Request] = {}
        """Requests by row, in order of admission."""
        self._rows: Rows | None = None
        """Rows that have not ended; None: to be found anew."""
        self._left: set[RowId] = set()
        self._jobs: dict[RowId, CompletionLedger] = {}
        self._ends: Counter[int] = Counter()
        self._end_ids: npt.NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over requests that hold a row, in order of admission."""
        return iter(self._order.values())

    # ---------------------------------------------------------------- rows

    @property
    def num_free(self) -> int:
        """Rows that no request holds."""
        return len(self._free)

    @property
    def rows(self) -> Rows:
        """The rows of requests that have not ended, in order of admission; not to be written to."""
        if self._rows is None:
            rows = np.fromiter(self._order, dtype=np.int64, count=len(self._order))
            self._rows = rows[self.is_running[rows]]
        return self._rows

    def of(self, rows: Rows) -> list[Request]:
        """Return the requests of rows."""
        requests = self.requests
        return [requests[row] for row in rows.tolist()]

    def jobs(self, rows: Rows) -> list[Request]:
        """Return the requests of rows that have a completion time, in order."""
        if not self._jobs:
            return []
        return self.of(rows[np.isin(rows, list(self._jobs))])

    def acquire(self, request: Request) -> RowId:
        """Give the lowest free row to a request, which runs from here on."""
        row = RowId(heapq.heappop(self._free))
        self._order[row] = self.requests[row] = request
        self.outputs[row] = request.output_token_ids
        request.enter(self.cells, row)
        self.track(row, request.deadlines)
        self.is_running[row] = True
        self.is_plain[row] = False
        self._rows = None
        self._ends.update(request.eos_token_ids)
        self._end_ids = None
        return row

    def release(self, request: Request) -> None:
        """Take a request's row back."""
        row = request.row
        assert row is not None
        request.leave()
        del self._order[row]
        self.requests[row] = None
        self.outputs[row] = []
        self.is_running[row] = False
        self._jobs.pop(row, None)
        self.line_due_s[row] = np.inf
        heapq.heappush(self._free, row)
        self._left.add(row)
        self._rows = None
        self._ends.subtract(request.eos_token_ids)
        self._end_ids = None

    def end(self, request: Request) -> None:
        """Let a request that holds a row run no more."""
        assert request.row is not None
        self.is_running[request.row] = False
        self._rows = None

    def take_left(self) -> tuple[RowId, ...]:
        """Return the rows that were taken back since the last call."""
        left, self._left = tuple(sorted(self._left)), set()
        return left

    # ---------------------------------------------------------------- who may advance

    def schedulable(self) -> Rows:
        """Return, per row of the table, how many tokens the next plan may compute, int64.

        0 where there is no request, once the last output token is in flight, and while a frontend
        has too much to look at or a sample in flight may give no token.
        """
        generated = self.num_output + self.inflight_samples
        counts = self.num_prompt + generated - self.next_position
        counts[(generated >= self.stop_at) | ~self.is_running] = 0
        if self.awaits_grammar.any():
            counts[self.awaits_grammar & (self.inflight_samples > 0)] = 0
        return counts

    # ---------------------------------------------------------------- a step's progress

    def send(self, rows: Rows, num_tokens: Rows | int = 1) -> None:
        """Book a plan in which rows compute so many tokens and sample behind each."""
        self.next_position[rows] += num_tokens
        self.inflight_tokens[rows] += num_tokens
        self.inflight_samples[rows] += num_tokens
        self.inflight_steps[rows] += 1

    def receive(self, rows: Rows, num_tokens: Rows | int = 1) -> None:
        """Take such a plan back: it is not in flight any more."""
        self.inflight_tokens[rows] -= num_tokens
        self.inflight_samples[rows] -= num_tokens
        self.inflight_steps[rows] -= 1

    def ends_with(self, rows: Rows, token_ids: npt.NDArray[np.int32]) -> BoolArray:
        """Return which rows may end with one more confirmed token, int32 [n], by it or its number.

        Their samples are in no plan any more, and not confirmed yet.
        """
        if self._end_ids is None:
            self._ends = +self._ends
            self._end_ids = np.fromiter(self._ends, dtype=np.int32, count=len(self._ends))
        ends = self.num_output[rows] + 1 >= self.max_tokens[rows]
        if len(self._end_ids) > _FEW_ENDS:
            ends |= np.isin(token_ids, self._end_ids)
        else:
            for end_id in self._end_ids:
                ends |= token_ids == end_id
        return ends

    def append(self, rows: Rows, token_ids: npt.NDArray[np.int32], now_s: float) -> None:
        """Confirm one more token of each row, none of which ends with it."""
        outputs = self.outputs
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            outputs[row].append(token_id)
        self.num_output[rows] += 1
        if self.has_deadlines[rows].any():
            self._on_tokens(rows[self.has_deadlines[rows]], now_s)

    # ---------------------------------------------------------------- deadlines

    def track(self, row: RowId, deadlines: DeadlineTracker | None) -> None:
        """Keep a request's deadlines in its row; a job keeps its own."""
        self.has_deadlines[row] = isinstance(deadlines, TokenDeadlines)
        self.is_first_late[row] = deadlines is not None and deadlines.kept.is_first_met is False
        if isinstance(deadlines, TokenDeadlines):
            deadlines.store(self.cells, row)
        elif isinstance(deadlines, CompletionLedger):
            self._jobs[row] = deadlines
        elif isinstance(deadlines, LineDeadline):
            self.line_due_s[row] = deadlines.shared.due_s
            self.num_expected[row] = deadlines.num_expected

    def move_batch(self, shared: SharedDue) -> None:
        """Have the lines that share a time be due by what it is now."""
        for row, request in self._order.items():
            deadlines = request.deadlines
            if isinstance(deadlines, LineDeadline) and deadlines.shared is shared:
                self.line_due_s[row] = shared.due_s

    def on_tokens(self, request: Request, num_tokens: int, now_s: float) -> None:
        """Move the deadlines of one request, whatever it is, that got some tokens."""
        row, deadlines = request.row, request.deadlines
        if deadlines is None:
            return
        assert row is not None
        if isinstance(deadlines, TokenDeadlines):
            deadlines.load(self.cells, row)
        deadlines.on_tokens(num_tokens, now_s)
        self.track(row, deadlines)

    def residuals(self, start_s: float) -> Residuals:
        """Return when tokens are due of a step that starts then; see `TokenDeadlines`."""
        none = np.full(self.num_rows, np.inf)
        residuals = Residuals(none, none, none)
        if (rows := np.flatnonzero(self.has_deadlines & self.is_running)).size:
            residuals = Residuals(none.copy(), none.copy(), none.copy())
            self._fill_residuals(residuals, rows, start_s)
        elif self._jobs:
            residuals = Residuals(none.copy(), none.copy(), none.copy())
        for row, ledger in self._jobs.items():
            count = self.cells["inflight_samples"][row]
            residuals.due[row] = (
                ledger.residual_behind(count, start_s) if count else ledger.residual(start_s)
            )
            residuals.lent[row] = ledger.lent_behind(count, start_s)
            residuals.of_late[row] = ledger.residual_of_late(count, start_s)
        return residuals

    def _fill_residuals(self, residuals: Residuals, rows: Rows, start_s: float) -> None:
        # Of several tokens of a step, drafts, one is certain.
        num_inflight = np.minimum(self.inflight_samples[rows], self.inflight_steps[rows])
        num_kept, due_s, last_s = self.num_kept[rows], self.due_s[rows], self.last_s[rows]
        by_mean_s, tpot_s, mtpot_s = self.by_mean_s[rows], self.tpot_s[rows], self.mtpot_s[rows]
        soonest_s = self.soonest_s[rows]
        is_behind = num_inflight > 0
        with np.errstate(invalid="ignore"):  # no token times no target: not read
            mean_s = self._mean_behind(rows, num_inflight, start_s)
            behind_s = np.maximum(mean_s, start_s + soonest_s)
            last_s = np.where(is_behind, start_s, last_s)
            num_before = num_kept + num_inflight
            reserve_s = np.minimum(
                num_before * (RESERVE_SHARE * tpot_s), MAX_RESERVE_SHARE * self.debt_s[rows]
            )
            lent_s = np.maximum(
                np.where(is_behind, mean_s, by_mean_s) - reserve_s, last_s + soonest_s
            )
        residuals.due[rows] = np.where(is_behind, behind_s, due_s) - start_s
        is_first = num_before == 0
        residuals.lent[rows] = np.where(is_first, due_s, lent_s) - start_s
        late_s = last_s + np.minimum(tpot_s, mtpot_s)
        residuals.of_late[rows] = np.where(is_first, due_s, late_s) - start_s

    def _mean_behind(self, rows: Rows, num_tokens: Rows | int, now_s: float) -> FloatArray:
        """Return the deadlines by the mean behind tokens in flight, as `TokenDeadlines` does."""
        by_mean_s = self.by_mean_s[rows]
        counts = (self.num_kept[rows] > 0) & (by_mean_s < np.inf)
        anchor_s = np.where(counts, np.maximum(by_mean_s, now_s - self.debt_s[rows]), now_s)
        mean_s: FloatArray = np.minimum(
            anchor_s + num_tokens * self.tpot_s[rows], now_s + self.mtpot_s[rows]
        )
        return mean_s

    def _on_tokens(self, rows: Rows, now_s: float) -> None:
        """Move the deadlines of rows that got one token each, not their first."""
        by_mean_s = self._mean_behind(rows, 1, now_s)
        self.num_missed[rows] += now_s > self.due_s[rows]
        self.num_kept[rows] += 1
        self.by_mean_s[rows], self.last_s[rows] = by_mean_s, now_s
        self.due_s[rows] = np.maximum(by_mean_s, now_s + self.soonest_s[rows])


class DueTimes:
    """When tokens of a step are due, in seconds from its start."""

    def __init__(self, table: RequestTable, start_s: float) -> None:
        self._table = table
        self._start_s = start_s
        self._residuals: Residuals | None = None
        """Found when they are first asked for."""
        self.of_jobs: dict[Request, float] = {}
        """Prompts of urgent jobs, which have no deadline for their first token."""

    @property
    def residuals(self) -> Residuals:
        """Residuals of running requests, except `of_jobs`."""
        if self._residuals is None:
            self._residuals = self._table.residuals(self._start_s)
        return self._residuals

    def of(self, request: Request) -> float:
        """Return when a request's next token is due.

        One that is in flight comes when the step starts; the one of this step is due behind it.
        """
        if request in self.of_jobs:
            return self.of_jobs[request]
        if request.row is not None:
            return float(self.residuals.due[request.row])
        deadlines = request.deadlines
        return math.inf if deadlines is None else deadlines.residual(self._start_s)

    def of_rows(self, rows: Rows, residuals: FloatArray) -> FloatArray:
        """Return what a column of `residuals` says of rows, but for `of_jobs`."""
        found: FloatArray = residuals[rows]
        for request, due_s in self.of_jobs.items():
            if request.row is not None:
                found[rows == request.row] = due_s
        return found

    def in_order(self, rows: Rows) -> Rows:
        """Return rows, the most urgent first."""
        in_order: Rows = rows[np.argsort(self.of_rows(rows, self.residuals.due), kind="stable")]
        return in_order


class Running:
    """The requests that may advance in a step that is being planned, in order of admission."""

    def __init__(self, table: RequestTable, rows: Rows | None = None) -> None:
        self.table = table
        self.rows = table.rows if rows is None else rows
        self.schedulable = table.schedulable()
        """Per row of the table."""

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.table.of(self.rows))

    def of(self, request_class: RequestClass) -> Rows:
        """Return the rows of a class."""
        is_rt = self.table.is_rt[self.rows]
        return self.rows[is_rt if request_class is RT else ~is_rt]

    def sort_out(self, rows: Rows) -> SortedOut:
        """Return which of some rows decode, compute prompts, or have nothing to compute."""
        counts = self.schedulable[rows]
        is_decode = counts == 1
        if is_decode.all():
            return SortedOut(rows, [], NO_ROWS)
        prompts = self.table.of(rows[counts > 1])
        return SortedOut(rows[is_decode], prompts, rows[counts == 0])


class SortedOut(NamedTuple):
    """Rows by what they can do."""

    decodes: Rows
    prompts: list[Request]
    blocked: Rows


@dataclass(frozen=True, slots=True)
class Decodes:
    """A part of a step: rows that compute one token each and sample the next, or drafts as well."""

    table: RequestTable
    rows: Rows
    _requests: list[Request] | None = None
    drafts: Rows = field(default_factory=lambda: NO_ROWS)
    """Drafts of each; empty: none has any."""

    @property
    def num_tokens(self) -> Rows:
        """Tokens that each computes, and can yield at most, int64 [n]."""
        return self.drafts + 1 if len(self.drafts) else np.ones_like(self.rows)

    @property
    def requests(self) -> list[Request]:
        """Requests of the rows, in order."""
        return self.table.of(self.rows) if self._requests is None else self._requests

    def kept(self) -> Decodes:
        """Return the same for a step that is sent: rows may be others' once it has ended."""
        return Decodes(self.table, self.rows, self.requests)

    def __len__(self) -> int:
        return len(self.rows)

    def count(self, request_class: RequestClass) -> int:
        """Return how many are of a class."""
        num_rt = int(np.count_nonzero(self.table.is_rt[self.rows]))
        return num_rt if request_class is RT else len(self.rows) - num_rt

    @property
    def num_context_tokens(self) -> int:
        """Tokens that they read, summed."""
        return int(self.table.next_position[self.rows].sum())
