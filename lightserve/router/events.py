"""What goes into `RouterCore` besides step results, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightserve.cost.model import StepShape
from lightserve.messages.common import StepCoefficients
from lightserve.messages.frontend_router import Abort, Acknowledge, Finish, Submit, TokenDelta
from lightserve.router.request import Request
from lightserve.router.request_table import Decodes
from lightserve.router.shares import (
    NOTHING_LEFT_OUT,
    Allotment,
    LeftOut,
    Loading,
    Skipped,
    Take,
    Unseen,
    each_allotment,
    shape_of,
)
from lightserve.types import FrontendId, RequestClass, StepId


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


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step that could be sent now: whom it moves by how much. `commit` makes the message."""

    step_id: StepId
    decodes: Decodes
    """Rows that compute one token and sample the next."""
    chunks: tuple[Allotment, ...]
    """All others: prompts, those that begin or resume."""
    num_samples: tuple[int, ...]
    """Tokens that each of `chunks` can yield at most."""
    stops: tuple[Request, ...]
    """Running requests to pause before the plan is sent; only ever with nothing in flight."""
    takes: tuple[Take, ...]
    """KV to take from requests that are paused then."""
    drops: tuple[Request, ...]
    """Requests, paused then, that lose all their KV."""
    planned_at_s: float
    predicted_s: float
    """Predicted execution time."""
    loads: tuple[Loading, ...] = ()
    """KV of paused requests that comes back beside the step."""
    left_out: LeftOut = NOTHING_LEFT_OUT
    """Requests that were considered and do not advance."""
    unseen: Mapping[RequestClass, Unseen] = field(default_factory=dict)
    """Per class, who waits and was not considered; with `allotments` and `skipped` they are all
    live requests."""
    limit_s: float | None = None
    """The time limit that the policy set."""
    best_effort_s: float | None = None
    """What best-effort requests add to its time, where a share is theirs and they want more."""
    forecast_peak: int | None = None
    """Slots that the batch is expected to need at its peak, if the step starts a request."""

    @property
    def allotments(self) -> list[Allotment]:
        """Every request that advances, one by one: for logs and tests."""
        return list(each_allotment([self.decodes, *self.chunks]))

    @property
    def all_samples(self) -> tuple[int, ...]:
        """Tokens that each of `allotments` can yield at most."""
        return (1,) * len(self.decodes) + self.num_samples

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """`left_out`, one by one: for logs and tests."""
        return self.left_out.each()

    def shape(self) -> StepShape:
        """Return its shape, before its requests have moved."""
        return shape_of([self.decodes, *self.chunks])


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Nothing to send now; ask again at `at_s`, or (None) after the next event or result."""

    at_s: float | None
