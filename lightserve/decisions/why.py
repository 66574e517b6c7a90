"""Why a request was late, or was not: which constraint held it up, and what was served instead.

From a decision log, which is replayed. What counts is the time in which a target was missed: up to
the first token, the largest gap between tokens, all after the first token, or all of it. In that
time every step either moved the request or has the reason for which it did not; the one with the
most time is named, unless the steps that moved it took longer than the target by themselves. A
request that met its targets is explained up to its first token.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from lightserve.decisions.records import (
    COMPUTES,
    Decision,
    MessageReceived,
    RequestName,
    ResultReceived,
)
from lightserve.decisions.replaying import MEANINGS, DecisionLogReader, Replayer, news_of, part_in
from lightserve.errors import DecisionLogError
from lightserve.messages.frontend_router import Submit
from lightserve.router.events import Outgoing
from lightserve.router.step import Reason
from lightserve.types import NO_SLO, SLO, RequestClass, StepId

MAX_OTHERS = 5
"""Requests that are named of those that were served instead."""


class Served(msgspec.Struct, frozen=True):
    """A request that was served while the other one was not."""

    name: str
    """FRONTEND/REQUEST."""
    request_class: RequestClass
    num_tokens: int


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `lightserve why`; times in seconds since the request's frontend had it."""

    request: str
    """FRONTEND/REQUEST."""
    request_class: RequestClass
    missed: list[str]
    """ttft, tpot, mtpot, completion: those of its targets."""
    explains: str
    """The time that is explained: `ttft`, `mtpot`, `tpot` or `completion`."""
    from_s: float
    to_s: float
    constraint: str | None
    """The reason with the most time in it; None: it was not held up, or the steps that moved it
    took longer than the target without that."""
    seconds_of: dict[str, float]
    """All of that time: by reason, and in steps that move it (`computes`)."""
    steps_of: dict[str, int]
    num_tokens: int
    """Tokens of its output in that time: where some were guessed, more than steps that move it."""
    served_instead: list[Served]
    """In steps that left it out, those with the most tokens."""
    num_served_instead: int
    tokens_instead: dict[RequestClass, int]
    predicted_s: float
    """Time of all steps in that time, by the cost model."""
    observed_s: float

    def text(self) -> Iterator[str]:
        """Yield lines for people."""
        late = f"missed {', '.join(self.missed)}" if self.missed else "met every target it had"
        yield f"request {self.request}, class {self.request_class.value}: {late}"
        yield f"{_SPANS[self.explains]}: from {self.from_s:.3f} to {self.to_s:.3f} s"
        for what in sorted(self.seconds_of, key=lambda what: -self.seconds_of[what]):
            meaning = COMPUTES if what == COMPUTES else MEANINGS[Reason(what)]
            made = f", which gave {self.num_tokens} of its tokens" if what == COMPUTES else ""
            yield f"{self.seconds_of[what]:10.3f} s  {meaning}, {self.steps_of[what]} steps{made}"
        if self.constraint is None:
            yield "held up by nothing: the steps that moved it took the time"
        else:
            yield f"held up by {self.constraint}: {MEANINGS[Reason(self.constraint)]}"
        if self.num_served_instead:
            tokens = ", ".join(f"{n} tokens of {c.value}" for c, n in self.tokens_instead.items())
            named = ", ".join(
                f"{other.name} ({other.request_class.value}) {other.num_tokens}"
                for other in self.served_instead
            )
            yield f"served instead: {self.num_served_instead} requests, {tokens}; most: {named}"
        if self.predicted_s > 0.0:
            off = 100 * (self.observed_s / self.predicted_s - 1)
            yield (
                f"steps in that time: predicted {self.predicted_s:.3f} s, took"
                f" {self.observed_s:.3f} s ({off:+.1f} %)"
            )


_SPANS = {
    "ttft": "up to its first token",
    "mtpot": "its largest gap between tokens",
    "tpot": "after its first token",
    "completion": "all of it",
}


def explain(reader: DecisionLogReader, name: RequestName) -> Why:
    """Return why a request was late, or was not. Raises as `explain_all`."""
    return explain_all(reader, [name])[0]


def explain_all(reader: DecisionLogReader, names: Sequence[RequestName]) -> list[Why]:
    """Return why each of these was late, or was not.

    Raises:
        DecisionLogError: the log cannot be read, was changed, its decisions are not repeated, or
            one of the requests is in no step of it.
    """
    replayer, witnesses = Replayer(reader.header), [_Witness(name) for name in names]
    for number, record in reader.lines():
        if isinstance(record, Decision):
            if replayer.decide(record) is None:
                message = f"{reader.path}, line {number}: this decision is not repeated"
                raise DecisionLogError(message)
            for witness in witnesses:
                witness.on_decision(record)
            continue
        news = replayer.feed(record)
        for witness in witnesses:
            if isinstance(record, MessageReceived) and isinstance(record.message, Submit):
                witness.on_submit(record, record.message)
            if isinstance(record, ResultReceived):
                witness.exec_s[record.result.step_id] = record.result.exec_s
            witness.on_news(news, record.now_s)
    if not all(witness.steps for witness in witnesses):
        raise DecisionLogError(f"{reader.path}: the log ends before a step could move the request")
    return [witness.verdict() for witness in witnesses]


class _Step(NamedTuple):
    """A step while the request lived."""

    step_id: StepId
    at_s: float
    """When it was sent."""
    what: str
    """COMPUTES or a reason."""
    decision: Decision


@dataclass
class _Witness:
    """Sees the log go by."""

    name: RequestName
    classes: dict[RequestName, RequestClass] = field(default_factory=dict)
    exec_s: dict[StepId, float] = field(default_factory=dict)
    steps: list[_Step] = field(default_factory=list)
    delivered: list[tuple[float, int]] = field(default_factory=list)
    """When tokens came, and how many."""
    slo: SLO = NO_SLO
    came_s: float = 0.0
    ended_s: float | None = None
    last_s: float = 0.0

    @property
    def _is_alive(self) -> bool:
        return self.name in self.classes and self.ended_s is None

    def on_submit(self, record: MessageReceived, submit: Submit) -> None:
        """Note whose request it is, and if it is this one, what it asks for."""
        name = RequestName(record.frontend_id, submit.request_id)
        self.classes[name] = submit.request_class
        if name == self.name:
            self.slo, self.came_s = submit.slo, record.now_s - submit.age_s

    def on_news(self, news: Sequence[Outgoing], now_s: float) -> None:
        """Note its tokens and its end."""
        self.last_s = now_s
        for delta in news_of(self.name, news):
            if delta.token_ids:
                self.delivered.append((now_s, len(delta.token_ids)))
            if delta.error is not None or delta.finish_reason is not None:
                self.ended_s = now_s

    def on_decision(self, decision: Decision) -> None:
        """Note what a step does with it."""
        if self._is_alive:
            reason = part_in(decision, self.name, self.classes[self.name]).reason
            what = COMPUTES if reason is None else reason.value
            step = _Step(decision.step_id, decision.committed_at_s, what, decision)
            self.steps.append(step)

    def verdict(self) -> Why:
        """Return what it all came to."""
        missed = self._missed()
        explains = missed[0] if missed else "ttft"
        start_s, end_s = self._span(explains)
        seconds: defaultdict[str, float] = defaultdict(float)
        steps = Counter[str]()
        tokens = Counter[RequestName]()
        predicted_s = observed_s = 0.0
        for step, until_s in self._steps_with_ends(end_s):
            if until_s <= start_s or step.at_s >= end_s:
                continue
            seconds[step.what] += min(until_s, end_s) - max(step.at_s, start_s)
            steps[step.what] += 1
            if step.step_id in self.exec_s:
                predicted_s += step.decision.predicted_s
                observed_s += self.exec_s[step.step_id]
            if step.what != COMPUTES:
                for share in step.decision.advancing:
                    tokens[RequestName(share.frontend_id, share.request_id)] += share.num_tokens
        reasons = {what: value for what, value in seconds.items() if what != COMPUTES}
        by_class = Counter[RequestClass]()
        for other, count in tokens.items():
            by_class[self.classes[other]] += count
        return Why(
            request=_written(self.name),
            request_class=self.classes[self.name],
            missed=missed,
            explains=explains,
            from_s=start_s - self.came_s,
            to_s=end_s - self.came_s,
            constraint=(
                None
                if not reasons or (missed and seconds[COMPUTES] > self._target_s(explains))
                else max(reasons, key=lambda what: reasons[what])
            ),
            seconds_of=dict(seconds),
            steps_of=dict(steps),
            num_tokens=sum(count for at_s, count in self.delivered if start_s < at_s <= end_s),
            served_instead=[
                Served(_written(other), self.classes[other], count)
                for other, count in tokens.most_common(MAX_OTHERS)
            ],
            num_served_instead=len(tokens),
            tokens_instead=dict(by_class),
            predicted_s=predicted_s,
            observed_s=observed_s,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of its output."""
        return sum(count for _, count in self.delivered)

    @property
    def delivered_s(self) -> list[float]:
        """Times at which tokens came, together ones once."""
        return [at_s for at_s, _ in self.delivered]

    def _missed(self) -> list[str]:
        """Return the targets that it has missed so far."""
        slo, times = self.slo, self.delivered_s
        end_s = self.last_s if self.ended_s is None else self.ended_s
        first_s = (times[0] if times else end_s) - self.came_s
        found = []
        if slo.ttft_ms is not None and 1e3 * first_s > slo.ttft_ms:
            found.append("ttft")
        gaps = [after - before for before, after in itertools.pairwise(times)]
        if slo.mtpot_ms is not None and gaps and 1e3 * max(gaps) > slo.mtpot_ms:
            found.append("mtpot")
        if slo.tpot_ms is not None and self.num_tokens > 1:
            mean_s = (times[-1] - times[0]) / (self.num_tokens - 1)
            if 1e3 * mean_s > slo.tpot_ms:
                found.append("tpot")
        if slo.completion_s is not None and end_s - self.came_s > slo.completion_s:
            found.append("completion")
        return found

    def _target_s(self, explains: str) -> float:
        """Return how long the time that is explained should have been at most."""
        slo = self.slo
        target_s = {
            "ttft": slo.ttft_ms and slo.ttft_ms / 1e3,
            "mtpot": slo.mtpot_ms and slo.mtpot_ms / 1e3,
            "tpot": slo.tpot_ms and slo.tpot_ms / 1e3 * (self.num_tokens - 1),
            "completion": slo.completion_s,
        }[explains]
        assert target_s is not None, "it was missed"
        return target_s

    def _span(self, explains: str) -> tuple[float, float]:
        """Return the time that is explained, on the router's clock."""
        times = self.delivered_s
        end_s = self.last_s if self.ended_s is None else self.ended_s
        if explains == "completion" or not times:
            return self.came_s, end_s
        if explains == "ttft":
            return self.came_s, times[0]
        if explains == "tpot":
            return times[0], times[-1]
        pairs = list(itertools.pairwise(times))
        return max(pairs, key=lambda pair: pair[1] - pair[0])

    def _steps_with_ends(self, end_s: float) -> Iterator[tuple[_Step, float]]:
        """Yield each step with when the next one was sent; the first begins with the request."""
        for index, step in enumerate(self.steps):
            is_last = index + 1 == len(self.steps)
            start = step if index else step._replace(at_s=self.came_s)
            yield start, max(step.at_s, end_s) if is_last else self.steps[index + 1].at_s


def _written(name: RequestName) -> str:
    return f"{name.frontend_id}/{name.request_id}"
