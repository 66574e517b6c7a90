"""Repeats every decision of a log on a fresh core: the same inputs at the same times."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lightserve.config import ServeConfig
from lightserve.decisions.records import (
    COMPUTES,
    FORMAT_VERSION,
    AnyRecord,
    Decision,
    Header,
    Input,
    MessageReceived,
    RequestName,
    WorkersWereLost,
    decision_of,
    event_of,
    new_hash,
)
from lightserve.errors import ConfigError, DecisionLogError, ProtocolError
from lightserve.messages.frontend_router import Abort, Finish, RequestDelta, Submit
from lightserve.messages.router_worker import StepResult
from lightserve.router.config import make_scheduler_config
from lightserve.router.events import Outgoing
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep, Reason
from lightserve.types import NO_SLO, SLO, FrontendId, RequestClass, RequestId

# Reads decision logs: format, chain of hashes, a last line that was cut off.


class Line(NamedTuple):
    """One record, and where it is."""

    number: int
    """From 1."""
    record: Input | Decision


class _Version(msgspec.Struct):
    """The part that the first line of every version has."""

    kind: str
    format_version: int


class DecisionLogReader:
    """One file; read line by line, as often as wanted."""

    def __init__(self, path: Path) -> None:
        """Read the header. Raises DecisionLogError."""
        self.path = path
        self.is_cut_off = False
        """Whether the last line is not whole: known once all lines were read."""
        self._decoder = msgspec.json.Decoder(AnyRecord)
        self.header = self._read_header()

    def lines(self) -> Iterator[Line]:
        """Yield what follows the header.

        Raises:
            DecisionLogError: a line is none of this format, or what is before it was changed.
        """
        chain = new_hash()
        for number, text in self._texts():
            record = self._decode(number, text)
            if isinstance(record, Decision) and record.chain != chain.hexdigest():
                raise DecisionLogError(
                    f"{self.path}, line {number}: the lines before it were changed"
                )
            chain.update(text)
            if not isinstance(record, Header):
                yield Line(number, record)

    def _texts(self) -> Iterator[tuple[int, bytes]]:
        try:
            with self.path.open("rb") as file:
                for number, text in enumerate(file, start=1):
                    if not text.endswith(b"\n"):
                        self.is_cut_off = True
                        return
                    yield number, text
        except OSError as error:
            raise DecisionLogError(f"{self.path}: {error.strerror}") from error

    def _decode(self, number: int, text: bytes) -> AnyRecord:
        try:
            record: AnyRecord = self._decoder.decode(text)
        except msgspec.MsgspecError as error:
            raise DecisionLogError(f"{self.path}, line {number}: {error}") from error
        if isinstance(record, Header) != (number == 1):
            raise DecisionLogError(f"{self.path}, line {number}: a header, not in the first line")
        return record

    def _read_header(self) -> Header:
        _, text = next(self._texts(), (1, b""))
        try:
            version = msgspec.json.decode(text, type=_Version)
        except msgspec.MsgspecError as error:
            raise DecisionLogError(f"{self.path}: not a decision log: {error}") from error
        if version.kind != "header":
            raise DecisionLogError(f"{self.path}: not a decision log: it has no header")
        if version.format_version != FORMAT_VERSION:
            raise DecisionLogError(
                f"{self.path}: format version {version.format_version}; this lightserve reads"
                f" version {FORMAT_VERSION}"
            )
        header = self._decode(1, text)
        assert isinstance(header, Header)
        return header


@dataclass(frozen=True)
class Difference:
    """The first decision that the core does not repeat."""

    line: int
    step_id: int
    recorded: dict[str, Any]
    """Fields that differ."""
    replayed: dict[str, Any] | None
    """The replay's decision, with the same fields; None: it decided nothing at that time."""


@dataclass(frozen=True)
class Replay:
    """Result of a replay, which ends with the first difference."""

    num_inputs: int
    num_decisions: int
    """That were repeated."""
    decision_hash: str
    """Over the repeated decisions, one after the other."""
    is_cut_off: bool
    """Whether the last line of the log was not whole, and left out."""
    difference: Difference | None


class Replayer:
    """A fresh core that is fed a log."""

    def __init__(self, header: Header) -> None:
        """Make the core as the one that the log is of. Raises DecisionLogError."""
        self._core = make_core_of(header)

    def feed(self, record: Input) -> list[Outgoing]:
        """Put an input in; return the news for frontends."""
        event = event_of(record)
        with contextlib.suppress(ProtocolError):  # which the server logged, and went on
            if isinstance(event, StepResult):
                return self._core.on_result(event, record.now_s)
            return self._core.on_message(event, record.now_s)
        return []

    def decide(self, recorded: Decision) -> Decision | None:
        """Let the core decide at the recorded times; None: it would wait."""
        step = self._core.plan(recorded.planned_at_s)
        if not isinstance(step, PlannedStep):
            return None
        plan = self._core.commit(step, recorded.committed_at_s)
        return decision_of(step, plan, recorded.committed_at_s)


def replay(reader: DecisionLogReader) -> Replay:
    """Feed a log to a fresh core and compare all that it decides.

    Raises:
        DecisionLogError: the log cannot be read, or was changed.
    """
    replayer = Replayer(reader.header)
    num_inputs = num_decisions = 0
    chain = new_hash()
    difference: Difference | None = None
    for number, record in reader.lines():
        if not isinstance(record, Decision):
            replayer.feed(record)
            num_inputs += 1
            continue
        recorded = msgspec.structs.replace(record, chain="")
        replayed = replayer.decide(recorded)
        text = None if replayed is None else msgspec.json.encode(replayed)
        if text != msgspec.json.encode(recorded):
            difference = _difference(number, recorded, replayed)
            break
        chain.update(text)
        num_decisions += 1
    return Replay(num_inputs, num_decisions, chain.hexdigest(), reader.is_cut_off, difference)


def make_core_of(header: Header) -> Scheduler:
    """Return a core as the one that a log is of. Raises DecisionLogError."""
    written_by = f"the log is of lightserve {header.lightserve_version}"
    if gone := header.config.keys() - ServeConfig.__dataclass_fields__.keys():
        names = ", ".join(sorted(gone))
        raise DecisionLogError(
            f"{written_by}, with options that are gone ({names}): read it with that release"
        )
    try:
        config = ServeConfig(**header.config)
        return Scheduler(
            make_scheduler_config(
                config,
                max_model_len=header.max_model_len,
                seed=header.seed,
                remembered=header.remembered,
            )
        )
    except (TypeError, ConfigError) as error:
        raise DecisionLogError(f"{written_by}, whose options differ: {error}") from error


def _difference(line: int, recorded: Decision, replayed: Decision | None) -> Difference:
    old = msgspec.to_builtins(recorded)
    if replayed is None:
        return Difference(line, recorded.step_id, old, None)
    new = msgspec.to_builtins(replayed)
    names = [name for name in old if old[name] != new[name]]
    return Difference(
        line,
        recorded.step_id,
        {name: old[name] for name in names},
        {name: new[name] for name in names},
    )


# What became of one request, from a decision log: why did it wait, and was it late?
#
# A story has events (it arrives, its first token is there, it ends) and between them stretches:
# steps in a row in which the same happened to it. Times count from when its frontend had it, as
# targets do.

MAX_LINES = 40
"""Most lines of a story: the shortest stretches are left out of a longer one."""


@dataclass
class _Line:
    """An event, or (with steps) a stretch."""

    at_s: float
    what: str
    first_step: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    """Until the next line."""
    heading: str = ""
    """Heading that a stretch's time is counted under."""

    def __str__(self) -> str:
        if self.num_steps == 0:
            return f"{self.at_s:10.3f} s  {self.what}"
        last_step = self.first_step + self.num_steps - 1
        steps = (
            f"step {last_step}" if self.num_steps == 1 else f"steps {self.first_step}-{last_step}"
        )
        tokens = f" {self.num_tokens} tokens" if self.num_tokens else ""
        return f"{self.at_s:10.3f} s  {steps}: {self.what}{tokens}"


def find_request(reader: DecisionLogReader, text: str) -> list[RequestName]:
    """Return the requests that are called so: FRONTEND/REQUEST, or a name that the client has.

    Completions of one request share its names.

    Raises:
        DecisionLogError: the log cannot be read, was changed, or has none.
    """
    frontend_id, _, request_id = text.partition("/")
    number = None
    if frontend_id.isdecimal() and request_id.isdecimal():
        number = RequestName(FrontendId(int(frontend_id)), RequestId(int(request_id)))
    found = []
    for _, record in reader.lines():
        if isinstance(record, MessageReceived) and isinstance(submit := record.message, Submit):
            name = RequestName(record.frontend_id, submit.request_id)
            if name == number or text in submit.names:
                found.append(name)
    if not found:
        raise DecisionLogError(
            f"{reader.path}: there is no request {text}; it is named by the id of its answer"
            " (chatcmpl-…), by its X-Request-Id, or as FRONTEND/REQUEST"
        )
    return found


def story_of(
    reader: DecisionLogReader, name: RequestName, *, max_lines: int | None = MAX_LINES
) -> list[str]:
    """Return the story of a request: its lines in order, then what was late and what it waited for.

    The log is replayed: when a request ends is not in it. `max_lines` None: all of it.

    Raises:
        DecisionLogError: the log cannot be read, was changed, or its decisions are not repeated.
    """
    replayer, teller = Replayer(reader.header), _Teller(name)
    for number, record in reader.lines():
        if not isinstance(record, Decision):
            teller.on_input(record)
            teller.on_news(replayer.feed(record), record.now_s)
        elif replayer.decide(record) is None:
            raise DecisionLogError(f"{reader.path}, line {number}: this decision is not repeated")
        else:
            teller.on_decision(record)
    summary = [*teller.judgement(), *teller.totals()]
    room = None if max_lines is None else max_lines - len(summary)
    return [*_shortened(teller.lines, room), *summary]


def _shortened(lines: list[_Line], max_lines: int | None) -> Iterator[str]:
    """Yield lines in order, without the shortest stretches where there are too many."""
    left_out: list[_Line] = []
    if max_lines is not None and len(lines) > max_lines:
        num_events = sum(line.num_steps == 0 for line in lines)
        stretches = sorted((line for line in lines if line.num_steps), key=lambda x: -x.seconds)
        left_out = stretches[max(0, max_lines - num_events - 1) :]
    dropped = {id(line) for line in left_out}
    yield from (str(line) for line in lines if id(line) not in dropped)
    if left_out:
        seconds = sum(line.seconds for line in left_out)
        yield f"              {len(left_out)} shorter stretches, {seconds:.3f} s in all: --all"


@dataclass
class _Delivered:
    """When its tokens were there, in seconds since it came."""

    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0
    max_gap_s: float = 0.0

    def add(self, num_tokens: int, at_s: float) -> None:
        if self.num_tokens == 0:
            self.first_s = at_s
        else:
            self.max_gap_s = max(self.max_gap_s, at_s - self.last_s)
        self.last_s = at_s
        self.num_tokens += num_tokens


@dataclass
class _Teller:
    """Knows what has become of the request so far."""

    name: RequestName
    lines: list[_Line] = field(default_factory=list)
    request_class: RequestClass | None = None
    """While it is alive."""
    came_s: float = 0.0
    """When its frontend had it."""
    slo: SLO = NO_SLO
    delivered: _Delivered = field(default_factory=_Delivered)

    def _add(self, line: _Line) -> None:
        """Append a line, which ends the stretch before it."""
        if self.lines:
            self.lines[-1].seconds = max(0.0, line.at_s - self.lines[-1].at_s)
        self.lines.append(line)

    def _tell(self, now_s: float, what: str) -> None:
        self._add(_Line(now_s - self.came_s, what))

    def on_input(self, record: Input) -> None:
        """Tell of an input, if it is about the request."""
        match record:
            case WorkersWereLost() if self.request_class is not None:
                self._tell(record.now_s, "the workers were lost")
            case MessageReceived(message=Submit() | Finish() | Abort() as message):
                if (record.frontend_id, message.request_id) != self.name:
                    return
                if isinstance(message, Submit):
                    self.request_class, self.slo = message.request_class, message.slo
                    self.came_s = record.now_s - message.age_s
                else:
                    self.request_class = None
                self._tell(record.now_s, _described(message))
                if isinstance(message, Submit):
                    self._tell(record.now_s, _targets(message.slo))

    def on_news(self, news: list[Outgoing], now_s: float) -> None:
        """Tell of its first token, and of its end."""
        for delta in news_of(self.name, news):
            self._on_delta(delta, now_s)

    def _on_delta(self, delta: RequestDelta, now_s: float) -> None:
        at_s = now_s - self.came_s
        if delta.token_ids:
            if self.delivered.num_tokens == 0:
                due = _late(at_s, _seconds(self.slo.ttft_ms))
                self._tell(now_s, f"its first token is there{due}")
                if delta.scheduled_slo is not None:
                    raised = _named(delta.scheduled_slo)
                    self._tell(
                        now_s, f"targets that even an idle server misses: raised to {raised}"
                    )
            self.delivered.add(len(delta.token_ids), at_s)
        if (end := delta.error or delta.finish_reason) is not None:
            due = _late(at_s, self.slo.completion_s)
            self._tell(now_s, f"ends: {end.value}, {self.delivered.num_tokens} tokens{due}")
            self.request_class = None

    def on_decision(self, decision: Decision) -> None:
        """Tell of a step, if something else happened in it than in the one before."""
        if self.request_class is None:
            return
        what, heading, num_tokens = self._part_in(decision, self.request_class)
        at_s = decision.committed_at_s - self.came_s
        last = self.lines[-1]
        if last.num_steps and last.what == what:
            last.num_steps = decision.step_id - last.first_step + 1
            last.num_tokens += num_tokens
            last.seconds = at_s - last.at_s
        else:
            self._add(_Line(at_s, what, decision.step_id, 1, num_tokens, heading=heading))

    def _part_in(self, decision: Decision, request_class: RequestClass) -> tuple[str, str, int]:
        """Return what a step does with the request, its heading, and the tokens it computes."""
        name = self.name
        lost = [take.num_tokens for take in decision.checkpointed if take[:2] == name]
        notes = [f", {lost[0]} tokens of KV go to the host" for _ in lost]
        notes += [", all its KV is given up" for request in decision.preempted if request == name]
        if name in decision.paused:
            notes.insert(0, ", paused")
        more = "".join(notes)
        part = part_in(decision, name, request_class)
        if part.reason is None:
            return f"{COMPUTES}{more}", COMPUTES, part.num_tokens
        meaning = MEANINGS[part.reason]
        if part.num_tokens:
            return f"loads from the host{more}", meaning, part.num_tokens
        if part.was_considered:
            return f"left out: {meaning}{more}", meaning, 0
        return f"not considered; the search stopped: {meaning}", meaning, 0

    def judgement(self) -> Iterator[str]:
        """Yield how it kept its targets for tokens after the first."""
        slo, got = self.slo, self.delivered
        if got.num_tokens > 1 and slo.tpot_ms is not None:
            mean_s = (got.last_s - got.first_s) / (got.num_tokens - 1)
            late = _late(mean_s, slo.tpot_ms / 1e3)
            yield f"mean time per token after the first {1e3 * mean_s:.1f} ms{late}"
        if got.num_tokens > 1 and slo.mtpot_ms is not None:
            late = _late(got.max_gap_s, slo.mtpot_ms / 1e3)
            yield f"largest gap between tokens {1e3 * got.max_gap_s:.1f} ms{late}"

    def totals(self) -> Iterator[str]:
        """Yield the time of all stretches by what they were, the longest first."""
        spent: dict[str, list[_Line]] = defaultdict(list)
        for line in self.lines:
            if line.num_steps:
                spent[line.heading].append(line)
        seconds = {heading: sum(x.seconds for x in lines) for heading, lines in spent.items()}
        if seconds:
            yield "in all:"
        for heading in sorted(seconds, key=lambda heading: -seconds[heading]):
            num_steps = sum(line.num_steps for line in spent[heading])
            steps = "1 step" if num_steps == 1 else f"{num_steps} steps"
            yield f"{seconds[heading]:10.3f} s  {heading}, {steps}"


class PartIn(NamedTuple):
    """Part of a step in a request that lives."""

    reason: Reason | None
    """The reason for which it does not move it; None: it does."""
    num_tokens: int = 0
    """Tokens of it that are computed, or come back from the host."""
    was_considered: bool = True


def part_in(decision: Decision, name: RequestName, request_class: RequestClass) -> PartIn:
    """Return what a step does with a request that lives."""
    for share in decision.advancing:
        if share[:2] == name:
            return PartIn(None, share.num_tokens)
    for share in decision.loaded:
        if share[:2] == name:
            return PartIn(Reason.LOADING, share.num_tokens)
    for left in decision.skipped:
        if left[:2] == name:
            return PartIn(left.reason)
    stopped_by = decision.unseen[request_class].stopped_by
    assert stopped_by is not None, "it is alive, and neither advances nor was considered"
    return PartIn(stopped_by, was_considered=False)


def news_of(name: RequestName, news: Sequence[Outgoing]) -> Iterator[RequestDelta]:
    """Yield what frontends are told of a request."""
    for outgoing in news:
        for delta in outgoing.message.each():
            if (outgoing.frontend_id, delta.request_id) == name:
                yield delta


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


def _targets(slo: SLO) -> str:
    """Return its targets, and when the first one is due."""
    if slo == NO_SLO:
        return "has no targets"
    due = [f"first token due at {slo.ttft_ms / 1e3:.3f} s"] if slo.ttft_ms is not None else []
    due += [f"due at {slo.completion_s:.3f} s"] if slo.completion_s is not None else []
    return f"targets: {', '.join([_named(slo), *due])}"


def _named(slo: SLO) -> str:
    parts = [
        f"{name} {value:g} ms"
        for name, value in (("ttft", slo.ttft_ms), ("tpot", slo.tpot_ms), ("mtpot", slo.mtpot_ms))
        if value is not None
    ]
    parts += [] if slo.completion_s is None else [f"completion {slo.completion_s:g} s"]
    return ", ".join(parts)


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3


def _late(seconds: float, target_s: float | None) -> str:
    """Return by how much a time missed its target, or that it did not; nothing without one."""
    if target_s is None:
        return ""
    if seconds <= target_s:
        return f", in time by {target_s - seconds:.3f} s"
    return f", late by {seconds - target_s:.3f} s"


MEANINGS = {
    Reason.TIME: "no time (time)",
    Reason.PACE: "the pace of others' tokens leaves no time (pace)",
    Reason.TOKENS: "the token budget is used up (tokens)",
    Reason.BYTES: "the plan has as much of newcomers as it may hold (bytes)",
    Reason.ROWS: "no row is free (rows)",
    Reason.KV_NOW: "no memory for this step (kv_now)",
    Reason.KV_FUTURE: "memory is expected to run out (kv_future)",
    Reason.ORDER: "others' turn (order)",
    Reason.ENCODING: "an image of its prompt is being encoded (encoding)",
    Reason.LOADING: "its KV waits for the link from the host (loading)",
    Reason.BLOCKED: "nothing to compute yet (blocked)",
}
