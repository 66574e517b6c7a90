"""The lines of a decision log, one JSON object each (docs/decisions.md).

A `Header`, then in the order in which the core was told or asked: one line per input with the
time at which it went in, and one per step that was sent. Every `Decision` has a hash over all
bytes of the file before it, so that a change anywhere is found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import msgspec

import lightserve
from lightserve.config import ServeConfig
from lightserve.config.options import MemoryOptions
from lightserve.config.scheduling import SchedulingOptions
from lightserve.errors import ConfigError
from lightserve.messages.common import GraphSizes, StepCoefficients
from lightserve.messages.frontend_router import Abort, Acknowledge, BatchDue, Finish, Submit
from lightserve.messages.images import EncoderWork, without_pixels
from lightserve.messages.router_worker import StepPlan, StepResult
from lightserve.router.events import (
    FromFrontend,
    FrontendGone,
    Outgoing,
    SchedulerEvent,
    StepTimesKnown,
    WorkersGone,
    WorkersReady,
)
from lightserve.router.output_lengths import RememberedLengths
from lightserve.router.request import Request
from lightserve.router.step import PlannedStep, Reason, Unseen, WaitUntil
from lightserve.types import FrontendId, RequestClass, RequestId, StepId

log = logging.getLogger(__name__)

FORMAT_VERSION = 3
COMPUTES = "computes"
"""Stands in stories of requests where a step moves one, in place of a reason."""
HASH_BYTES = 8
"""Bytes of the hash of a plan, and of all lines so far; written as hexadecimal digits."""

DECIDING_OPTIONS = tuple(
    spec.name for group in (SchedulingOptions, MemoryOptions) for spec in dataclasses.fields(group)
)
"""Fields of `ServeConfig` that a core is made from."""


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=True):
    """One line."""


class Header(Record, frozen=True, tag="header"):
    """The first line: what the core was made from."""

    format_version: int
    lightserve_version: str
    boot_id: str
    """Boot of the router; empty in a simulation."""
    max_model_len: int
    seed: int
    """Seed of admission rules that draw."""
    config: dict[str, Any]
    """`DECIDING_OPTIONS` by name."""
    remembered: RememberedLengths | None = None
    """Output lengths that the core began with."""


class MessageReceived(Record, frozen=True, tag="message"):
    """A message of a frontend."""

    now_s: float
    frontend_id: FrontendId
    message: Submit | Acknowledge | Finish | Abort | BatchDue


class FrontendWasLost(Record, frozen=True, tag="frontend_gone"):
    """A frontend died or was replaced."""

    now_s: float
    frontend_id: FrontendId


class WorkersStarted(Record, frozen=True, tag="workers_ready"):
    """A worker group can execute plans."""

    now_s: float
    num_kv_slots: int
    num_host_slots: int
    step_cost: StepCoefficients | None
    overlaps_copies: bool = False
    max_num_batched_tokens: int | None = None
    mixed_sizes: tuple[int, ...] = ()
    decode_sizes: tuple[int, ...] = ()
    num_state_slots: int = 0
    encoder: EncoderWork | None = None
    num_prefix_slots: int = 0

    @property
    def graph_sizes(self) -> GraphSizes:
        """To which they pad steps."""
        return GraphSizes(self.decode_sizes, self.mixed_sizes)


class StepTimesWereMeasured(Record, frozen=True, tag="step_times"):
    """The workers have measured their steps, being ready and idle."""

    now_s: float
    step_cost: StepCoefficients
    max_num_batched_tokens: int


class WorkersWereLost(Record, frozen=True, tag="workers_gone"):
    """The worker group is gone."""

    now_s: float


class ResultReceived(Record, frozen=True, tag="result"):
    """A result of a step."""

    now_s: float
    result: StepResult


class RequestName(NamedTuple):
    """A request: "FRONTEND/REQUEST" in the server's log."""

    frontend_id: FrontendId
    request_id: RequestId


class Share(NamedTuple):
    """Tokens of a request: to be computed, taken from it, or loaded."""

    frontend_id: FrontendId
    request_id: RequestId
    num_tokens: int


class LeftOut(NamedTuple):
    """A request that was considered and does not advance."""

    frontend_id: FrontendId
    request_id: RequestId
    reason: Reason


class Decision(Record, frozen=True, tag="decision"):
    """A step that was sent."""

    step_id: StepId
    planned_at_s: float
    committed_at_s: float
    predicted_s: float
    limit_s: float | None
    """The time limit that the policy set, if it set one."""
    advancing: list[Share]
    paused: list[RequestName]
    """Running requests that are paused before the step."""
    checkpointed: list[Share]
    """KV that paused requests lose, saved on the host."""
    preempted: list[RequestName]
    """Requests that lose all their KV."""
    loaded: list[Share]
    """KV that comes back from the host beside the step, of requests that stay paused."""
    skipped: list[LeftOut]
    unseen: dict[RequestClass, Unseen]
    plan: str
    """Hash of the message to the workers: rows, slots, copies."""
    chain: str = ""
    """Hash over all bytes of the file before this line; empty before it is written."""


Input = (
    MessageReceived
    | FrontendWasLost
    | WorkersStarted
    | StepTimesWereMeasured
    | WorkersWereLost
    | ResultReceived
)
AnyRecord = Header | Input | Decision


def header_of(
    config: ServeConfig,
    *,
    max_model_len: int,
    seed: int,
    boot_id: str = "",
    remembered: RememberedLengths | None = None,
) -> Header:
    """Return the first line of a log of a core that is made from these."""
    return Header(
        format_version=FORMAT_VERSION,
        lightserve_version=lightserve.__version__,
        boot_id=boot_id,
        max_model_len=max_model_len,
        seed=seed,
        config={name: getattr(config, name) for name in DECIDING_OPTIONS},
        remembered=remembered,
    )


def decision_of(step: PlannedStep, plan: StepPlan, committed_at_s: float) -> Decision:
    """Return the line of a step, not chained yet."""
    limit_s = step.limit_s
    return Decision(
        step_id=step.step_id,
        planned_at_s=step.planned_at_s,
        committed_at_s=committed_at_s,
        predicted_s=float(step.predicted_s),
        limit_s=None if limit_s is None or limit_s == float("inf") else float(limit_s),
        advancing=[Share(*request.key, count) for request, count in step.scheduled],
        paused=[_name(request) for request in step.paused],
        checkpointed=[Share(*request.key, count) for request, count in step.checkpointed],
        preempted=[_name(request) for request in step.preempted],
        loaded=[Share(*request.key, count) for request, count in step.loaded],
        skipped=[LeftOut(*request.key, reason) for request, reason in step.left_out.each()],
        unseen=dict(step.unseen),
        plan=new_hash(msgspec.msgpack.encode(_without_pixels(plan))).hexdigest(),
    )


def _without_pixels(plan: StepPlan) -> StepPlan:
    """Return a plan with images as a log has them: their digests say the same."""
    if not plan.encodes and not any(sequence.images for sequence in plan.sequences):
        return plan
    sequences = [
        msgspec.structs.replace(sequence, images=tuple(map(without_pixels, sequence.images)))
        for sequence in plan.sequences
    ]
    encodes = tuple(
        msgspec.structs.replace(order, image=without_pixels(order.image)) for order in plan.encodes
    )
    return msgspec.structs.replace(plan, sequences=sequences, encodes=encodes)


def new_hash(data: bytes = b"") -> hashlib.blake2b:
    """Return the hash that logs use."""
    return hashlib.blake2b(data, digest_size=HASH_BYTES)


def _name(request: Request) -> RequestName:
    return RequestName(*request.key)


# A core whose inputs and decisions are recorded: the same four calls, in front of it.


class CoreCalls(Protocol):
    """The seam of `Scheduler`; see there."""

    def on_message(self, event: SchedulerEvent, now_s: float) -> list[Outgoing]:
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

    def on_message(self, event: SchedulerEvent, now_s: float) -> list[Outgoing]:
        """See `Scheduler.on_message`."""
        self._log.append(input_of(event, now_s))
        return self._core.on_message(event, now_s)

    def plan(self, now_s: float) -> PlannedStep | WaitUntil:
        """See `Scheduler.plan`, which changes nothing: a plan not committed is no decision."""
        return self._core.plan(now_s)

    def commit(self, planned: PlannedStep, now_s: float) -> StepPlan:
        """See `Scheduler.commit`."""
        plan = self._core.commit(planned, now_s)
        self._log.append(decision_of(planned, plan, now_s))
        return plan

    def on_result(self, result: StepResult, now_s: float) -> list[Outgoing]:
        """See `Scheduler.on_result`."""
        self._log.append(ResultReceived(now_s=now_s, result=result))
        return self._core.on_result(result, now_s)


_OF_WORKERS = [spec.name for spec in dataclasses.fields(WorkersReady) if spec.name != "graph_sizes"]
"""Fields of the event that the line has under the same names."""


def input_of(event: SchedulerEvent, now_s: float) -> Input:
    """Return the line of what the core was told."""
    match event:
        case FromFrontend(frontend_id, message):
            if isinstance(message, Submit) and message.images:
                images = tuple(map(without_pixels, message.images))
                message = msgspec.structs.replace(message, images=images)
            return MessageReceived(now_s=now_s, frontend_id=frontend_id, message=message)
        case FrontendGone(frontend_id):
            return FrontendWasLost(now_s=now_s, frontend_id=frontend_id)
        case WorkersReady():
            return WorkersStarted(
                now_s=now_s,
                mixed_sizes=event.graph_sizes.mixed,
                decode_sizes=event.graph_sizes.decodes,
                **{name: getattr(event, name) for name in _OF_WORKERS},
            )
        case StepTimesKnown(step_cost, max_num_batched_tokens):
            return StepTimesWereMeasured(
                now_s=now_s, step_cost=step_cost, max_num_batched_tokens=max_num_batched_tokens
            )
    return WorkersWereLost(now_s=now_s)


def event_of(record: Input) -> SchedulerEvent | StepResult:
    """Return what a recorded input told the core."""
    match record:
        case MessageReceived(frontend_id=frontend_id, message=message):
            return FromFrontend(frontend_id, message)
        case FrontendWasLost(frontend_id=frontend_id):
            return FrontendGone(frontend_id)
        case WorkersStarted():
            fields = {name: getattr(record, name) for name in _OF_WORKERS}
            return WorkersReady(graph_sizes=record.graph_sizes, **fields)
        case StepTimesWereMeasured():
            return StepTimesKnown(record.step_cost, record.max_num_batched_tokens)
        case ResultReceived(result=result):
            return result
    return WorkersGone()


# Writes a decision log without ever holding up what it records.
#
# Lines are made at once, and written by a thread, in portions. What waits for the disk is bounded,
# and so is the file: a router that would go over either bound, or cannot write, ends the log, says
# so once, and goes on serving. A log is not rotated: its start is what makes the rest replayable,
# and all of it up to where it ends stays so. A file that is there already becomes PATH.1.

PORTION_BYTES = 64 * 1024
MAX_PENDING_BYTES = 32 * 1024 * 1024


class DecisionLogFile:
    """One log; `append` and `flush` belong to one thread."""

    def __init__(self, path: Path, header: Header, *, max_bytes: int) -> None:
        """Create the file, for its owner alone. Raises ConfigError if that is not possible."""
        self._path = path
        self._max_bytes = max_bytes
        self._descriptor = _create(path)
        self._encoder = msgspec.json.Encoder()
        self._hash = new_hash()
        self._num_bytes = 0
        """Bytes of all lines so far."""
        self._lines = bytearray()
        """Not handed to the thread yet."""
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._num_written = 0
        """By the thread, as `error` is."""
        self._error: OSError | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._write_all, name="decision-log", daemon=True)
        self._thread.start()
        self.append(header)

    def append(self, record: AnyRecord) -> None:
        """Write a line, now or later; never raises."""
        if self._is_over:
            return
        if isinstance(record, Decision):
            record = msgspec.structs.replace(record, chain=self._hash.hexdigest())
        line = self._encoder.encode(record) + b"\n"
        self._num_bytes += len(line)
        if self._num_bytes > self._max_bytes:
            self._end(f"it has reached its limit of {self._max_bytes} bytes")
        elif self._num_bytes - self._num_written > MAX_PENDING_BYTES:
            self._end("the disk is too slow for it")
        else:
            self._hash.update(line)
            self._lines += line
            if len(self._lines) >= PORTION_BYTES:
                self.flush()

    def flush(self) -> None:
        """Hand all lines to the thread."""
        if self._error is not None and not self._is_over:
            self._end(f"{self._error.strerror}")
        if self._lines:
            self._queue.put(bytes(self._lines))
            self._lines.clear()

    def close(self) -> None:
        """Write what is left, and end."""
        self.flush()
        was_over, self._is_over = self._is_over, True
        self._queue.put(None)
        self._thread.join()
        if self._error is not None and not was_over:
            self._end(f"{self._error.strerror}")

    def _end(self, why: str) -> None:
        self._is_over = True
        log.error("decision log %s ends here, serving goes on: %s", self._path, why)
        self.flush()

    def _write_all(self) -> None:
        """Write portions until told to end; after an error, drop them."""
        while (portion := self._queue.get()) is not None:
            try:
                while portion and self._error is None:
                    count = os.write(self._descriptor, portion)
                    self._num_written += count
                    portion = portion[count:]
            except OSError as error:
                self._error = error
        os.close(self._descriptor)


def _create(path: Path) -> int:
    try:
        if path.exists():
            if not path.is_file() or path.is_symlink():
                raise ConfigError(f"--decision-log {path}: not a regular file")
            with contextlib.suppress(FileNotFoundError):
                path.replace(f"{path}.1")
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"--decision-log {path}: {error.strerror}") from error
