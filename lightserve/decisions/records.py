"""The lines of a decision log, one JSON object each (docs/decisions.md).

A `Header`, then in the order in which the core was told or asked: one line per input with the
time at which it went in, and one per step that was sent. Every `Decision` has a hash over all
bytes of the file before it, so that a change anywhere is found.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any, NamedTuple

import msgspec

import lightserve
from lightserve.config import ServeConfig
from lightserve.config.memory import MemoryOptions
from lightserve.config.scheduling import SchedulingOptions
from lightserve.messages.frontend_router import Abort, Acknowledge, Finish, Submit
from lightserve.messages.router_worker import StepPlan, StepResult
from lightserve.messages.step_cost import StepCoefficients
from lightserve.router.events import PlannedStep
from lightserve.router.reasons import Reason, Unseen
from lightserve.router.request import Request
from lightserve.types import FrontendId, RequestClass, RequestId, StepId

FORMAT_VERSION = 2
HASH_BYTES = 8
"""Of a plan, and of all lines so far; written as hexadecimal digits."""

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
    """Of the router; empty in a simulation."""
    max_model_len: int
    seed: int
    """Of admission rules that draw."""
    config: dict[str, Any]
    """`DECIDING_OPTIONS` by name."""


class MessageReceived(Record, frozen=True, tag="message"):
    """What a frontend said."""

    now_s: float
    frontend_id: FrontendId
    message: Submit | Acknowledge | Finish | Abort


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


class WorkersWereLost(Record, frozen=True, tag="workers_gone"):
    """The worker group is gone."""

    now_s: float


class ResultReceived(Record, frozen=True, tag="result"):
    """What a step gave."""

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
    stops: list[RequestName]
    """Running requests that are paused before the step."""
    takes: list[Share]
    """KV that paused requests lose, saved on the host."""
    drops: list[RequestName]
    """Requests that lose all their KV."""
    loads: list[Share]
    """KV that comes back from the host beside the step, of requests that stay paused."""
    skipped: list[LeftOut]
    unseen: dict[RequestClass, Unseen]
    plan: str
    """Hash of the message to the workers: rows, slots, copies."""
    chain: str = ""
    """Hash over all bytes of the file before this line; empty before it is written."""


Input = MessageReceived | FrontendWasLost | WorkersStarted | WorkersWereLost | ResultReceived
AnyRecord = Header | Input | Decision


def header_of(config: ServeConfig, *, max_model_len: int, seed: int, boot_id: str = "") -> Header:
    """Return the first line of a log of a core that is made from these."""
    return Header(
        format_version=FORMAT_VERSION,
        lightserve_version=lightserve.__version__,
        boot_id=boot_id,
        max_model_len=max_model_len,
        seed=seed,
        config={name: getattr(config, name) for name in DECIDING_OPTIONS},
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
        advancing=[Share(*request.key, count) for request, count in step.allotments],
        stops=[_name(request) for request in step.stops],
        takes=[Share(*request.key, count) for request, count in step.takes],
        drops=[_name(request) for request in step.drops],
        loads=[Share(*request.key, count) for request, count in step.loads],
        skipped=[LeftOut(*request.key, reason) for request, reason in step.skipped],
        unseen=dict(step.unseen),
        plan=new_hash(msgspec.msgpack.encode(plan)).hexdigest(),
    )


def new_hash(data: bytes = b"") -> hashlib.blake2b:
    """Return the hash that logs use."""
    return hashlib.blake2b(data, digest_size=HASH_BYTES)


def _name(request: Request) -> RequestName:
    return RequestName(*request.key)
