"""What became of one request, from a decision log: why did it wait?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightserve.decisions.reading import DecisionLogReader
from lightserve.decisions.records import (
    Decision,
    Input,
    MessageReceived,
    RequestName,
    WorkersWereLost,
)
from lightserve.decisions.replaying import Replayer
from lightserve.errors import DecisionLogError
from lightserve.messages.frontend_router import Abort, Finish, Submit
from lightserve.router.events import Outgoing
from lightserve.router.reasons import Reason
from lightserve.types import RequestClass


@dataclass
class _Stretch:
    """Steps in a row in which the same happened to it."""

    what: str
    first_step: int
    start_s: float
    num_steps: int = 1
    num_tokens: int = 0

    def __str__(self) -> str:
        last_step = self.first_step + self.num_steps - 1
        steps = (
            f"step {last_step}" if self.num_steps == 1 else f"steps {self.first_step}-{last_step}"
        )
        tokens = f" {self.num_tokens} tokens" if self.num_tokens else ""
        return f"{self.start_s:10.3f} s  {steps}: {self.what}{tokens}"


def story_of(reader: DecisionLogReader, name: RequestName) -> Iterator[str]:
    """Yield the story of a request, a line for each change; times count from its arrival.

    The log is replayed: when a request ends is not in it.

    Raises:
        DecisionLogError: the log cannot be read, was changed, does not know the request, or
            its decisions are not repeated.
    """
    replayer, teller = Replayer(reader.header), _Teller(name)
    for number, record in reader.lines():
        if not isinstance(record, Decision):
            yield from teller.on_input(record)
            yield from teller.on_news(replayer.feed(record), record.now_s)
        elif replayer.decide(record) is None:
            raise DecisionLogError(f"{reader.path}, line {number}: this decision is not repeated")
        else:
            yield from teller.on_decision(record)
    yield from teller.end_stretch()
    if not teller.has_arrived:
        raise DecisionLogError(
            f"{reader.path}: there is no request {name.frontend_id}/{name.request_id}"
        )


class _Teller:
    """Knows what has become of the request so far."""

    def __init__(self, name: RequestName) -> None:
        self.has_arrived = False
        self._request_class: RequestClass | None = None
        """While it is alive."""
        self._name = name
        self._arrival_s = 0.0
        self._num_tokens = 0
        self._stretch: _Stretch | None = None

    def on_input(self, record: Input) -> Iterator[str]:
        """Tell of an input, if it is about the request."""
        match record:
            case WorkersWereLost() if self._request_class is not None:
                yield from self.end_stretch()
                yield self._at(record.now_s, "the workers were lost")
            case MessageReceived(message=Submit() | Finish() | Abort() as message):
                if (record.frontend_id, message.request_id) != self._name:
                    return
                yield from self.end_stretch()
                if isinstance(message, Submit):
                    self._request_class, self._arrival_s = message.request_class, record.now_s
                    self.has_arrived = True
                else:
                    self._request_class = None
                yield self._at(record.now_s, _described(message))

    def on_news(self, news: list[Outgoing], now_s: float) -> Iterator[str]:
        """Tell of its first token, and of its end."""
        for outgoing in news:
            for delta in outgoing.message.requests:
                if (outgoing.frontend_id, delta.request_id) != self._name:
                    continue
                if delta.token_ids and self._num_tokens == 0:
                    yield from self.end_stretch()
                    yield self._at(now_s, "its first token is there")
                self._num_tokens += len(delta.token_ids)
                if (end := delta.error or delta.finish_reason) is not None:
                    yield from self.end_stretch()
                    yield self._at(now_s, f"ends: {end.value}, {self._num_tokens} tokens")
                    self._request_class = None

    def _at(self, now_s: float, what: str) -> str:
        return f"{now_s - self._arrival_s:10.3f} s  {what}"

    def on_decision(self, decision: Decision) -> Iterator[str]:
        """Tell of a step, if something else happened in it than in the one before."""
        if self._request_class is None:
            return
        now_s = decision.committed_at_s - self._arrival_s
        what, num_tokens = self._part_in(decision, self._request_class)
        stretch = self._stretch
        if stretch is not None and stretch.what == what:
            stretch.num_steps = decision.step_id - stretch.first_step + 1
            stretch.num_tokens += num_tokens
        else:
            yield from self.end_stretch()
            self._stretch = _Stretch(what, decision.step_id, now_s, num_tokens=num_tokens)

    def _part_in(self, decision: Decision, request_class: RequestClass) -> tuple[str, int]:
        """Return what a step does with the request, and how many tokens it computes."""
        name = self._name
        lost = [take.num_tokens for take in decision.takes if take[:2] == name]
        notes = [f", {lost[0]} tokens of KV go to the host" for _ in lost]
        notes += [", all its KV is given up" for drop in decision.drops if drop == name]
        if name in decision.stops:
            notes.insert(0, ", paused")
        for share in decision.advancing:
            if share[:2] == name:
                return f"computes{''.join(notes)}", share.num_tokens
        for share in decision.loads:
            if share[:2] == name:
                return f"loads from the host{''.join(notes)}", share.num_tokens
        for left in decision.skipped:
            if left[:2] == name:
                return f"left out: {_MEANINGS[left.reason]}{''.join(notes)}", 0
        stopped_by = decision.unseen[request_class].stopped_by
        assert stopped_by is not None, "it is alive, and neither advances nor was considered"
        return f"not considered; the search stopped: {_MEANINGS[stopped_by]}", 0

    def end_stretch(self) -> Iterator[str]:
        """Tell of what has gone on so far."""
        if self._stretch is not None:
            yield str(self._stretch)
        self._stretch = None


def _described(message: Submit | Finish | Abort) -> str:
    match message:
        case Submit():
            num_tokens = sum(len(segment.token_ids) // 4 for segment in message.prompt)
            return (
                f"arrives: class {message.request_class.value}, prompt of {num_tokens} tokens, at"
                f" most {message.max_tokens} more, priority {message.priority}"
            )
        case Finish():
            return f"ends with a stop string after {message.num_tokens} tokens"
    return "is aborted"


_MEANINGS = {
    Reason.TIME: "no time (time)",
    Reason.TOKENS: "the token budget is used up (tokens)",
    Reason.BYTES: "the plan has as much of newcomers as it may hold (bytes)",
    Reason.ROWS: "no row is free (rows)",
    Reason.KV_NOW: "no memory for this step (kv_now)",
    Reason.KV_FUTURE: "memory is expected to run out (kv_future)",
    Reason.ORDER: "others' turn (order)",
    Reason.LOADING: "its KV waits for the link from the host (loading)",
    Reason.BLOCKED: "nothing to compute yet (blocked)",
}
