"""Repeats every decision of a log on a fresh core: the same inputs at the same times."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import msgspec

from lightserve.config import ServeConfig
from lightserve.decisions.reading import DecisionLogReader
from lightserve.decisions.recording import event_of
from lightserve.decisions.records import Decision, Header, Input, decision_of, new_hash
from lightserve.errors import ConfigError, DecisionLogError, ProtocolError
from lightserve.messages.router_worker import StepResult
from lightserve.router.core import RouterCore
from lightserve.router.events import Outgoing, PlannedStep
from lightserve.router.factory import make_core


@dataclass(frozen=True)
class Difference:
    """The first decision that the core does not repeat."""

    line: int
    step_id: int
    recorded: dict[str, Any]
    """Fields that differ."""
    replayed: dict[str, Any] | None
    """The same fields; None: it decided nothing at that time."""


@dataclass(frozen=True)
class Replay:
    """What a replay came to; it ends with the first difference."""

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


def make_core_of(header: Header) -> RouterCore:
    """Return a core as the one that a log is of. Raises DecisionLogError."""
    try:
        config = ServeConfig(**header.config)
        return make_core(config, max_model_len=header.max_model_len, seed=header.seed)
    except (TypeError, ConfigError) as error:
        raise DecisionLogError(
            f"the log is of lightserve {header.lightserve_version}, whose options differ: {error}"
        ) from error


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
