"""A core whose inputs and decisions are recorded: the same four calls, in front of it."""

from __future__ import annotations

from typing import Protocol

from lightserve.decisions.records import (
    Decision,
    FrontendWasLost,
    Input,
    MessageReceived,
    ResultReceived,
    WorkersStarted,
    WorkersWereLost,
    decision_of,
)
from lightserve.messages.router_worker import StepPlan, StepResult
from lightserve.router.events import (
    CoreEvent,
    FromFrontend,
    FrontendGone,
    Outgoing,
    PlannedStep,
    WaitUntil,
    WorkersGone,
    WorkersReady,
)


class CoreCalls(Protocol):
    """The seam of `RouterCore`; see there."""

    def on_message(self, event: CoreEvent, now_s: float) -> list[Outgoing]:
        """Take in what happened outside."""

    def plan(self, now_s: float) -> PlannedStep | WaitUntil:
        """Return the step to send now, or when to ask again."""

    def commit(self, planned: PlannedStep, now_s: float) -> StepPlan:
        """Book a step."""

    def on_result(self, result: StepResult, now_s: float) -> list[Outgoing]:
        """Take in a step's result."""


class Log(Protocol):
    """Where records go."""

    def append(self, record: Input | Decision) -> None:
        """Write a line, now or later; never raises."""


class RecordedCore:
    """Says what goes into a core before it goes in, and what the core decided."""

    def __init__(self, core: CoreCalls, log: Log) -> None:
        self._core = core
        self._log = log

    def on_message(self, event: CoreEvent, now_s: float) -> list[Outgoing]:
        """See `RouterCore.on_message`."""
        self._log.append(input_of(event, now_s))
        return self._core.on_message(event, now_s)

    def plan(self, now_s: float) -> PlannedStep | WaitUntil:
        """See `RouterCore.plan`, which changes nothing: a plan not committed is no decision."""
        return self._core.plan(now_s)

    def commit(self, planned: PlannedStep, now_s: float) -> StepPlan:
        """See `RouterCore.commit`."""
        plan = self._core.commit(planned, now_s)
        self._log.append(decision_of(planned, plan, now_s))
        return plan

    def on_result(self, result: StepResult, now_s: float) -> list[Outgoing]:
        """See `RouterCore.on_result`."""
        self._log.append(ResultReceived(now_s=now_s, result=result))
        return self._core.on_result(result, now_s)


def input_of(event: CoreEvent, now_s: float) -> Input:
    """Return the line of what the core was told."""
    match event:
        case FromFrontend(frontend_id, message):
            return MessageReceived(now_s=now_s, frontend_id=frontend_id, message=message)
        case FrontendGone(frontend_id):
            return FrontendWasLost(now_s=now_s, frontend_id=frontend_id)
        case WorkersReady():
            return WorkersStarted(
                now_s=now_s,
                num_kv_slots=event.num_kv_slots,
                num_host_slots=event.num_host_slots,
                step_cost=event.step_cost,
                overlaps_copies=event.overlaps_copies,
                max_num_batched_tokens=event.max_num_batched_tokens,
            )
    return WorkersWereLost(now_s=now_s)


def event_of(record: Input) -> CoreEvent | StepResult:
    """Return what a recorded input told the core."""
    match record:
        case MessageReceived(frontend_id=frontend_id, message=message):
            return FromFrontend(frontend_id, message)
        case FrontendWasLost(frontend_id=frontend_id):
            return FrontendGone(frontend_id)
        case WorkersStarted():
            return WorkersReady(
                record.num_kv_slots,
                record.num_host_slots,
                record.step_cost,
                record.overlaps_copies,
                record.max_num_batched_tokens,
            )
        case ResultReceived(result=result):
            return result
    return WorkersGone()
