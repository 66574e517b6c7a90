"""Deadlines of the next token, from targets.

Trackers behind one interface, pure: times come as arguments, in seconds on one clock.

`TokenDeadlines`, the curve: d1 = arrival + ttft; then, with t_k the time of token k, m1 = t1 and
    m(k+1) = min(max(m_k, t_k - (mtpot - tpot)) + tpot, t_k + mtpot)
    d(k+1) = max(m(k+1), t_k + 0.75 tpot).
Tokens that come early buy slack for later ones, and no gap may exceed mtpot. A late one is
counted once, and what it took too long those behind it make up for, each by a quarter of tpot at
most, up to a stall of mtpot: to forget it is to miss the mean with every error
of a step's prediction, as what is too long counts then and what is too short does not. What the
first token leaves of its own time is not theirs: the mean that clients are promised, and judge
by, counts from it on. Best-effort work keeps to an earlier line, 0.1 tpot more per token: what it
leaves, bursts of prompts and stalls live on, and a last token that is late is no miss. With mtpot =
tpot it is the gap clock: each token is due tpot after the one before, whatever was gained.

`CompletionLedger`, a job with a completion time: what is left of that time is granted to
the tokens to come in equal parts, and under- and over-use are carried forward:
    d(k+1) = d_k + (D - d_k) / (tokens to come)           with D = arrival + completion.
Granted and ungranted time are together completion_s, always. AccelGen grants each step T_max and
a share of the slack; for equal steps that is the same sum.

`LineDeadline`, a line of a batch: it should end by a time that all lines of its batch have in
common, and that is moved while they run.

`lightserve.frontend` judges attainment by what clients asked for; here targets may have been
raised to what an idle server can do (`raise_to_feasible`, which `scheduling_targets` calls).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from lightserve.types import SLO

FEASIBLE_FACTOR = 1.2
"""A raised target, in predicted times on an idle server."""
LEAST_SHARE = 0.75
"""Share of tpot by which tokens after a late one are due one after another, until the mean is
kept again."""
RESERVE_SHARE = 0.1
"""Share of tpot that each token leaves in reserve while only best-effort work would take it."""
MAX_RESERVE_SHARE = 0.5
"""Share of the time by which tokens may be early or late that a reserve may reach."""
PROMOTION_FACTOR = 1.5
"""A best-effort job is urgent once its time left is below so many times of its work left."""


@dataclass(slots=True)
class Kept:
    """How a request has kept its deadlines so far."""

    num_tokens: int = 0
    is_first_met: bool | None = None
    """Whether the first token came in time; None: there is none yet."""
    num_missed: int = 0
    """Tokens that came after their deadlines, the first included."""


class DeadlineTracker(ABC):
    """When the next token of a request is due."""

    def __init__(self) -> None:
        self.kept = Kept()

    @property
    def deadline_of_next_token(self) -> float:
        """When the next token is due, on the router's clock; infinite without a target."""
        return math.inf

    @abstractmethod
    def on_tokens(self, num_tokens: int, now_s: float) -> None:
        """Take note of tokens that came together; at least one, at a time that never falls."""

    def residual(self, now_s: float) -> float:
        """Return the seconds until the next token is due; negative: it is late."""
        return self.deadline_of_next_token - now_s

    def residual_behind(self, num_tokens: int, now_s: float) -> float:
        """Return the seconds until a token is due that so many others come before, just now.

        For a step that is planned while another one yields these: it will be due by when they
        come. As `on_tokens` and `residual` one after the other, but nothing changes.
        """
        return self.residual(now_s)

    def residual_of_late(self, num_tokens: int, now_s: float) -> float:
        """Return the seconds until the same token is due if nothing has to be made up for.

        So many tokens come before it just now; none: it counts from the last one.
        """
        return self.residual_behind(num_tokens, now_s)

    def lent_behind(self, num_tokens: int, now_s: float) -> float:
        """Return the part of `residual_behind` that best-effort work may take.

        So many tokens come before it just now, or none.
        """
        return self.residual_behind(num_tokens, now_s)


class TokenDeadlines(DeadlineTracker):
    """Deadlines from a time to the first token, a mean and a largest gap; see the module."""

    def __init__(self, slo: SLO, arrival_s: float) -> None:
        assert slo.completion_s is None, "a CompletionLedger keeps it"
        super().__init__()
        self._tpot_s = _seconds(slo.tpot_ms)
        self._mtpot_s = _seconds(slo.mtpot_ms)
        self._last_s = arrival_s
        self._deadline_s = self._by_mean_s = arrival_s + _seconds(slo.ttft_ms)
        self._most_debt_s = max(0.0, self._mtpot_s - self._tpot_s) if slo.tpot_ms else 0.0
        self._reserve_s = RESERVE_SHARE * self._tpot_s if slo.tpot_ms else 0.0

    def store(self, cells: Mapping[str, array[Any]], row: int) -> None:
        """Put the state into a row of columns, where it then moves; see `RequestTable`."""
        cells["due_s"][row], cells["by_mean_s"][row] = self._deadline_s, self._by_mean_s
        cells["last_s"][row], cells["num_kept"][row] = self._last_s, self.kept.num_tokens
        cells["num_missed"][row] = self.kept.num_missed
        cells["tpot_s"][row], cells["mtpot_s"][row] = self._tpot_s, self._mtpot_s
        cells["soonest_s"][row] = min(self._mtpot_s, LEAST_SHARE * self._tpot_s)
        cells["debt_s"][row] = self._most_debt_s

    def load(self, cells: Mapping[str, array[Any]], row: int) -> None:
        """Take the state back from there."""
        self._deadline_s, self._by_mean_s = cells["due_s"][row], cells["by_mean_s"][row]
        self._last_s, self.kept.num_tokens = cells["last_s"][row], cells["num_kept"][row]
        self.kept.num_missed = cells["num_missed"][row]

    @property
    def deadline_of_next_token(self) -> float:
        """When the next token is due."""
        return self._deadline_s

    def on_tokens(self, num_tokens: int, now_s: float) -> None:
        """Move the deadline; tokens that came together are each in time if the first was."""
        by_mean_s = self._mean_behind(num_tokens, now_s)
        _count(self.kept, num_tokens, now_s, self._deadline_s)
        self._by_mean_s, self._last_s = by_mean_s, now_s
        self._deadline_s = self._due(by_mean_s, now_s)

    def residual_behind(self, num_tokens: int, now_s: float) -> float:
        """Return the residual of the token behind those in flight."""
        return self._due(self._mean_behind(num_tokens, now_s), now_s) - now_s

    def residual_of_late(self, num_tokens: int, now_s: float) -> float:
        """Return the residual of a token that is late in any case."""
        if self.kept.num_tokens == 0 and num_tokens == 0:
            return self.residual(now_s)
        last_s = now_s if num_tokens else self._last_s
        return last_s + min(self._tpot_s, self._mtpot_s) - now_s

    def lent_behind(self, num_tokens: int, now_s: float) -> float:
        """Return the time that best-effort work may take.

        Tokens leave a reserve to bursts, and to the last tokens, which nothing behind them can
        make up for.
        """
        num_before = self.kept.num_tokens + num_tokens
        if num_before == 0:
            return self.residual(now_s)
        reserve_s = min(num_before * self._reserve_s, MAX_RESERVE_SHARE * self._most_debt_s)
        last_s, by_mean_s = self._last_s, self._by_mean_s
        if num_tokens:
            last_s, by_mean_s = now_s, self._mean_behind(num_tokens, now_s)
        return self._due(by_mean_s - reserve_s, last_s) - now_s

    def _mean_behind(self, num_tokens: int, now_s: float) -> float:
        """Return until when the next token keeps the mean; that may have passed."""
        anchor_s = now_s  # of the first token's time nothing counts for others
        if self.kept.num_tokens > 0 and self._by_mean_s < math.inf:
            anchor_s = max(self._by_mean_s, now_s - self._most_debt_s)
        return min(anchor_s + num_tokens * self._tpot_s, now_s + self._mtpot_s)

    def _due(self, by_mean_s: float, now_s: float) -> float:
        """Return when the next token is due after one that has come now."""
        soonest_s = now_s + min(self._mtpot_s, LEAST_SHARE * self._tpot_s)
        return max(by_mean_s, soonest_s)


class CompletionLedger(DeadlineTracker):
    """Deadlines from a completion time, shared out over the tokens to come; see the module."""

    def __init__(self, completion_s: float, arrival_s: float, *, num_tokens_to_come: float) -> None:
        """`num_tokens_to_come`: as predicted, until `expect` says otherwise."""
        super().__init__()
        self._end_s = arrival_s + completion_s
        self._arrival_s = arrival_s
        self._granted_until_s = arrival_s
        self._num_to_come = num_tokens_to_come

    def expect(self, num_tokens_to_come: float) -> None:
        """Replace the prediction; time granted before stays granted."""
        self._num_to_come = num_tokens_to_come

    @property
    def end_s(self) -> float:
        """When the job is to have ended."""
        return self._end_s

    @property
    def num_tokens_to_come(self) -> float:
        """Predicted tokens to come; 0 or fewer once the prediction is exceeded."""
        return self._num_to_come

    @property
    def granted_s(self) -> float:
        """Time granted to the tokens that have come."""
        return self._granted_until_s - self._arrival_s

    @property
    def ungranted_s(self) -> float:
        """Time left for the tokens to come."""
        return self._end_s - self._granted_until_s

    @property
    def deadline_of_next_token(self) -> float:
        """When the next token is due, by what the tokens before it have left."""
        return self._granted_until_s + self._grant(1)

    def on_tokens(self, num_tokens: int, now_s: float) -> None:
        """Grant their time to tokens that came."""
        deadline_s = self.deadline_of_next_token
        _count(self.kept, num_tokens, now_s, deadline_s)
        self._granted_until_s += self._grant(num_tokens)
        self._num_to_come -= num_tokens

    def residual_behind(self, num_tokens: int, now_s: float) -> float:
        """Return the residual of the token behind those in flight."""
        granted_s = self._grant(num_tokens)
        share = min(1.0, 1.0 / max(1.0, self._num_to_come - num_tokens))
        return self._granted_until_s + granted_s + share * (self.ungranted_s - granted_s) - now_s

    def is_urgent(self, now_s: float, *, work_left_s: float) -> bool:
        """Whether it must run as if real-time to end in time, and still can, by the work left."""
        left_s = self._end_s - now_s
        return work_left_s <= left_s < PROMOTION_FACTOR * work_left_s

    def _grant(self, num_tokens: int) -> float:
        """Return what so many tokens get; more of them than were predicted get all."""
        return self.ungranted_s * min(1.0, num_tokens / max(1.0, self._num_to_come))


@dataclass(slots=True, weakref_slot=True, eq=False)
class SharedDue:
    """When all lines of a batch that are here should have ended; moved as the batch gets on."""

    due_s: float


class LineDeadline(DeadlineTracker):
    """A line of a batch: nothing is due of single tokens. See `policies.batch_order`."""

    def __init__(self, shared: SharedDue, *, num_tokens_to_come: float) -> None:
        """`num_tokens_to_come`: of its output, as predicted."""
        super().__init__()
        self.shared = shared
        self.num_expected = num_tokens_to_come

    def on_tokens(self, num_tokens: int, now_s: float) -> None:
        """Count tokens that have come."""
        _count(self.kept, num_tokens, now_s, math.inf)


def track(slo: SLO, arrival_s: float, *, num_tokens_to_come: float) -> DeadlineTracker:
    """Return what keeps the deadlines of a request; `num_tokens_to_come` is a prediction."""
    if slo.completion_s is None:
        return TokenDeadlines(slo, arrival_s)
    return CompletionLedger(slo.completion_s, arrival_s, num_tokens_to_come=num_tokens_to_come)


SLOClock = Callable[[SLO], SLO]
"""Which deadlines targets mean, said as targets of the curve."""


def curve_clock(slo: SLO) -> SLO:
    """Return the targets as they are: tokens that come early buy slack for later ones."""
    return slo


def gap_clock(slo: SLO) -> SLO:
    """Return the targets by which each token is due `tpot_ms` after the one before."""
    if slo.tpot_ms is None:
        return slo
    return msgspec.structs.replace(slo, mtpot_ms=slo.tpot_ms)


SLO_CLOCKS: dict[str, SLOClock] = {"curve": curve_clock, "gap": gap_clock}
"""By `--slo-clock`."""


class IdleTimes(NamedTuple):
    """Predicted times of a request on an idle server, seconds."""

    ttft_s: float
    tpot_s: float
    completion_s: float


class FeasibleSLO(NamedTuple):
    """Targets to schedule by."""

    slo: SLO
    raised: tuple[str, ...]
    """Names of the targets that an idle server could not have met."""


def raise_to_feasible(slo: SLO, idle: IdleTimes) -> FeasibleSLO:
    """Replace targets that an idle server would miss by 1.2 times what it would need.

    Attainment is judged by the targets that were asked for all the same.
    """
    needed = SLO(idle.ttft_s * 1e3, idle.tpot_s * 1e3, idle.tpot_s * 1e3, idle.completion_s)
    raised: dict[str, float] = {}
    for name in SLO.__struct_fields__:
        asked, least = getattr(slo, name), getattr(needed, name)
        if asked is not None and asked < least:
            raised[name] = FEASIBLE_FACTOR * least
    if slo.mtpot_ms is not None and slo.mtpot_ms < raised.get("tpot_ms", 0.0):
        raised["mtpot_ms"] = raised["tpot_ms"]  # no gap may be below the mean
    return FeasibleSLO(msgspec.structs.replace(slo, **raised), tuple(raised))


def _seconds(milliseconds: float | None) -> float:
    return math.inf if milliseconds is None else milliseconds / 1e3


def _count(kept: Kept, num_tokens: int, now_s: float, deadline_s: float) -> None:
    """Count a delivery whose first token was due at `deadline_s`."""
    assert num_tokens >= 1
    if kept.num_tokens == 0:
        kept.is_first_met = now_s <= deadline_s
    if now_s > deadline_s:
        kept.num_missed += 1
    kept.num_tokens += num_tokens
