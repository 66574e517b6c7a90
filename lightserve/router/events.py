"""What goes into `RouterCore` besides step results, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass

from lightserve.messages.common import StepCoefficients
from lightserve.messages.frontend_router import Abort, Acknowledge, Finish, Submit, TokenDelta
from lightserve.types import FrontendId


@dataclass(frozen=True, slots=True)
class FromFrontend:
    """What a frontend says of its requests, with its id."""

    frontend_id: FrontendId
    message: Submit | Acknowledge | Finish | Abort


@dataclass(frozen=True, slots=True)
class FrontendGone:
    """A frontend died or was replaced: all its requests are to be forgotten."""

    frontend_id: FrontendId


@dataclass(frozen=True, slots=True)
class WorkersReady:
    """A fresh worker group can execute plans; its pool is empty."""

    num_kv_slots: int
    num_host_slots: int = 0
    """Tokens that the host pool of each rank holds."""
    step_cost: StepCoefficients | None = None
    """What a profile says of their steps."""
    overlaps_copies: bool = False
    """See `WorkerHello`."""
    max_num_batched_tokens: int | None = None
    """Of a step; None: as configured."""


@dataclass(frozen=True, slots=True)
class WorkersGone:
    """The worker group is lost with all its KV; plans in flight will never be answered."""


CoreEvent = FromFrontend | FrontendGone | WorkersReady | WorkersGone


@dataclass(frozen=True, slots=True)
class Outgoing:
    """News for one frontend."""

    frontend_id: FrontendId
    message: TokenDelta
