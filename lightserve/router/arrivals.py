"""Demand of real-time requests as a rate: share of time, and memory per second of step time.

The core tells of arrivals, of the decodes that were done for them, and of ends. From the rate of
arrivals (an exponential average over MEMORY_S), the mean length of prompts and the decodes of an
average life follow

    load             time that all of it takes in large steps, per second: 1 is all there is
    kv_per_step_s    KV slots held per second of step time, by Little's law: what needs n steps
                     stays for n step times, so that memory grows with the time of a step

Arrivals say it at once; steps and memory themselves would only show it when it is too late.

How much an average life decodes is measured, from the first second on: decodes of all lives, those
that go on included, per end. A mean of those that have ended would be too short: among the first to
end are the shortest, and long steps put off the ends of the others, so that the load would seem the
lower, the more is lent. It begins with NUM_PRIOR lives of a length that is assumed, which soon
weigh nothing; later on the last thousand ends count most (NEWEST_WEIGHT).

Arrivals also say how soon the next ones may have to be answered, hence how long a step may be at
most while nothing else limits it: what comes waits for the rest of it. Where prompts leave little
of their time to a first token, what they leave counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from lightserve.cost.model import StepShape
from lightserve.router.output_lengths import PRIOR_MOST, expected_output

HELD_MEMORY_S = 900.0
"""Time constant of what real-time requests held (Echo's window: a quarter of an hour)."""
POOL_STEPS = 100
"""The slots that stay free are rounded up to such a part of the pool: so they seldom change, and
what admission remembers about refusals lasts."""


class HeldByRealTime:
    """KV that real-time requests held of late, for a threshold of mean + deviations (Echo, 5.3).

    Averages over time, the recent counting most (HELD_MEMORY_S). Pure, O(1) per call.
    """

    def __init__(self, num_deviations: float) -> None:
        """`num_deviations` 0 leaves nothing free."""
        self._num_deviations = num_deviations
        self._now_s: float | None = None
        self._held = 0
        self._weight = self._mean = self._mean_of_squares = 0.0

    def note(self, held: int, now_s: float) -> None:
        """Learn how many tokens they hold from now on."""
        if self._num_deviations == 0:
            return
        if self._now_s is not None and now_s > self._now_s:
            keep = math.exp((self._now_s - now_s) / HELD_MEMORY_S)
            self._weight = keep * self._weight + 1.0 - keep
            share = (1.0 - keep) / self._weight
            self._mean += share * (self._held - self._mean)
            self._mean_of_squares += share * (self._held**2 - self._mean_of_squares)
        self._now_s, self._held = now_s, held

    def headroom(self, num_slots: int) -> int:
        """Return the slots of a pool that they may yet come to hold, and others must leave."""
        if self._num_deviations == 0:
            return 0
        deviation = math.sqrt(max(0.0, self._mean_of_squares - self._mean**2))
        most = self._mean + self._num_deviations * deviation
        step = max(1, num_slots // POOL_STEPS)
        return min(num_slots, math.ceil(max(0.0, most - self._held) / step) * step)


# What share of the time of recent steps some requests got while they wanted more. Pure.
#
# `Pipeline` tells it of every step that is sent; a policy that owes a least share asks it.

MEMORY_S = 15.0
"""Time constant of rates and shares; also the window of the tightest target and of the most memory,
which are those of this time at least, and of twice as much at most. What is owed of a share of time
is never more than the share of this."""


@dataclass(slots=True)
class TimeShare:
    """Sums over steps, the recent ones counting most."""

    total_s: float = 0.0
    given_s: float = 0.0

    def observe(self, step_s: float, given_s: float | None) -> None:
        """Note a step that was planned to take so long.

        `given_s`: what it takes longer because of them; None: they had all that they wanted, and
        nothing is owed to them any more.
        """
        if given_s is None:
            self.total_s = self.given_s = 0.0
            return
        keep = math.exp(-step_s / MEMORY_S)
        self.total_s = keep * self.total_s + step_s
        self.given_s = keep * self.given_s + given_s

    def owed_s(self, min_share: float) -> float:
        """Return the seconds that are missing from a share of the time; 0: none."""
        return max(0.0, min_share * self.total_s - self.given_s)


MIN_SEEN_S = 0.5
"""A shorter time says nothing about a rate."""
NUM_PRIOR = 4
"""Lives that an assumed length stands for: the first to end after a burst are the short ones."""
NEWEST_WEIGHT = 0.001
"""Least weight of the newest in a mean."""
IDLE_LIMIT_S = 0.1
"""Most time of a step with best-effort requests while no targets are known."""
IDLE_SHARE = 0.3
"""Otherwise so much of the tightest time to a first token, also where it is a real-time prompt that
can wait: it waits for the rest of one such step, runs in the next one, and has as much again in
reserve."""
TIGHT_SHARE = 0.5
"""Targets are tight where a prompt leaves less than this share of the time to a first token."""
SLACK_SHARE = 0.1
"""Then a step takes so much of what it leaves at most. Its first token waits for the rest of one
step, for prompts that have waited likewise, and for more decodes, as slow ones stay for longer."""
GAP_SHARE = 0.4
"""And so much of the tightest largest gap of requests without a target for the mean of their gaps:
of steps as long as the gap, each that takes longer than predicted makes a token late."""
MAX_IDLE_LIMIT_S = 0.5
"""Never more: a step cannot be taken back if a client hangs up."""


def is_tight(slack_s: float, ttft_s: float) -> bool:
    """Whether a first token can hardly wait for anything: see TIGHT_SHARE; infinite: no target."""
    return slack_s < TIGHT_SHARE * ttft_s


class Outlook(NamedTuple):
    """Demand of real-time requests at one moment."""

    load: float = 0.0
    kv_per_step_s: float = 0.0
    ttft_s: float = math.inf
    """Tightest target of those that came lately; infinite: they had none."""
    slack_s: float = math.inf
    """Least that one of these left of its target beyond what its prompt takes an idle server."""
    freed_per_decode: float = 0.0
    """Slots that requests give back at their end, per decode of their life."""
    has_untimed: bool = False
    """Whether any came lately without a target for its first token."""
    gap_s: float = math.inf
    """Tightest largest gap that those allow that came lately without a mean; infinite: none did."""

    @property
    def is_tight(self) -> bool:
        """Whether first tokens can hardly wait for anything."""
        return self.slack_s < TIGHT_SHARE * self.ttft_s

    @property
    def idle_limit_s(self) -> float:
        """Most time of a step with best-effort requests, or with real-time prompts that can wait.

        An arrival waits for the rest of it.
        """
        if self.ttft_s == math.inf:
            return min(IDLE_LIMIT_S, GAP_SHARE * self.gap_s)
        limit_s = min(IDLE_SHARE * self.ttft_s, GAP_SHARE * self.gap_s, MAX_IDLE_LIMIT_S)
        return min(limit_s, SLACK_SHARE * self.slack_s) if self.is_tight else limit_s


NO_OUTLOOK = Outlook()


class ArrivalStats:
    """Pure; O(1) per call."""

    def __init__(self) -> None:
        self._output = 0.0
        """Mean of those that have ended."""
        self._held = 0.0
        """Mean of slots times steps of lives that have ended."""
        self._num_ends = 0
        self._assumed_share = 1.0
        """Share of assumed lives in both means."""
        self._going_on = 0.0
        """Decodes of requests that have not ended."""
        self._held_going_on = 0.0
        self._prompt = 0.0
        self._prompt_squared = 0.0
        self._encode_s = 0.0
        self._max_output = 0.0
        self._num_arrivals = 0
        self._recent = 0.0
        """Arrivals, each weighted by how long ago it was."""
        self._seen_s = 0.0
        """Time, weighted likewise."""
        self._now_s: float | None = None
        self._window = 0
        self._tightest_s = self._tightest_before_s = math.inf
        """To first tokens, in this window and in the one before in which any came."""
        self._gap_s = self._gap_before_s = math.inf
        """Tightest largest gap, likewise."""
        self._slack_s = self._slack_before_s = math.inf
        """Least slack, in this window and in the one before."""
        self._most_held = self._most_held_before = 0
        self._has_untimed = self._had_untimed = False
        """Whether any came without a target, in this window and in the one before."""

    def note_arrival(
        self,
        now_s: float,
        num_prompt_tokens: int,
        *,
        max_output_tokens: int,
        encode_s: float = 0.0,
        ttft_s: float = math.inf,
        gap_s: float = math.inf,
        slack_s: float = math.inf,
        is_untimed: bool = False,
    ) -> None:
        """Learn that a request has come.

        Args:
            now_s: the time.
            num_prompt_tokens: its length.
            max_output_tokens: how many it can have.
            encode_s: what its images take the encoder, as predicted.
            ttft_s: its target, infinite without one.
            gap_s: largest gap that it allows, where it has no target for their mean; infinite: any.
            slack_s: what its prompt leaves of that on an idle server.
            is_untimed: whether it has no target that its first token is due by.
        """
        self._note_window(now_s)
        self._tightest_s = min(self._tightest_s, ttft_s)
        self._gap_s = min(self._gap_s, gap_s)
        self._slack_s = min(self._slack_s, slack_s)
        self._has_untimed |= is_untimed
        self._recent, self._seen_s = self._at(now_s)
        self._now_s = now_s if self._now_s is None else max(now_s, self._now_s)
        self._recent += 1.0
        self._num_arrivals += 1
        weight = max(1.0 / self._num_arrivals, NEWEST_WEIGHT)
        self._prompt += weight * (num_prompt_tokens - self._prompt)
        self._prompt_squared += weight * (num_prompt_tokens**2 - self._prompt_squared)
        self._max_output += weight * (max_output_tokens - self._max_output)
        self._encode_s += weight * (encode_s - self._encode_s)

    def note_decodes(self, num_decodes: int, held: int, now_s: float) -> None:
        """Learn how many decodes a step has done, and how many tokens they read together."""
        self._going_on += num_decodes
        self._held_going_on += held
        self._note_window(now_s)
        self._most_held = max(self._most_held, held)

    def most_held(self, kv_per_step_s: float, step_s: float) -> float:
        """Return the KV slots that decodes hold, at most of late or by Little's law if more."""
        return max(self._most_held, self._most_held_before, kv_per_step_s * step_s)

    def note_end(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Learn that a request that had begun has ended, by whatever."""
        count = max(0, num_output_tokens - 1)  # the first token is its prompt's
        held = count * (num_prompt_tokens + 0.5 * num_output_tokens)
        self._going_on = max(0.0, self._going_on - count)
        self._held_going_on = max(0.0, self._held_going_on - held)
        self._num_ends += 1
        weight = self._weight_of_end
        self._assumed_share *= 1.0 - weight
        self._output += weight * (count - self._output)
        self._held += weight * (held - self._held)

    def outlook(self, work_s: Callable[[StepShape], float], now_s: float) -> Outlook:
        """Return what is being asked for now; zeros while little is known. Changes nothing.

        `work_s` tells how many seconds a shape takes in large steps.
        """
        recent, seen_s = self._at(now_s)
        ttft_s = min(self._tightest_s, self._tightest_before_s)
        gap_s = min(self._gap_s, self._gap_before_s)
        slack_s = min(self._slack_s, self._slack_before_s)
        has_untimed = self._has_untimed or self._had_untimed
        if seen_s < MIN_SEEN_S:
            return Outlook(ttft_s=ttft_s, slack_s=slack_s, has_untimed=has_untimed, gap_s=gap_s)
        rate = recent / seen_s
        assumed = expected_output(min(self._max_output, PRIOR_MOST))
        output = self._assumed_share * assumed + self._output
        held = self._assumed_share * assumed * (self._prompt + assumed) + self._held
        output += self._weight_of_end * self._going_on
        held += self._weight_of_end * self._held_going_on
        life = StepShape(
            num_new=round(self._prompt + output),
            decode_context=round(held),
            chunk_pairs=round(0.5 * self._prompt_squared),
            num_decodes=round(output),
            num_chunks=1,
        )
        freed = (self._prompt + output) / output if output > 0 else 0.0
        load = rate * (work_s(life) + self._encode_s)
        return Outlook(load, rate * held, ttft_s, slack_s, freed, has_untimed, gap_s)

    @property
    def _weight_of_end(self) -> float:
        return max(1.0 / (NUM_PRIOR + self._num_ends), NEWEST_WEIGHT)

    def _note_window(self, now_s: float) -> None:
        window = int(now_s // MEMORY_S)
        if window != self._window:
            self._tightest_before_s, self._tightest_s = self._tightest_s, math.inf
            self._gap_before_s, self._gap_s = self._gap_s, math.inf
            self._slack_before_s, self._slack_s = self._slack_s, math.inf
            self._most_held_before, self._most_held = self._most_held, 0
            self._had_untimed, self._has_untimed = self._has_untimed, False
            self._window = window

    def _at(self, now_s: float) -> tuple[float, float]:
        """Return the weighted arrivals and time as they are then."""
        if self._now_s is None or now_s <= self._now_s:
            return self._recent, self._seen_s
        keep = math.exp((self._now_s - now_s) / MEMORY_S)
        return keep * self._recent, keep * self._seen_s + (1.0 - keep) * MEMORY_S
