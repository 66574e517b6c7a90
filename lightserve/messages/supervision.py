"""The link between the supervisor and each of its children.

A child connects, says `ChildReady` once it can work, and `ChildFailed` (then exits 1) when it
cannot start. The supervisor sees deaths by itself (process handles), never by a time-out.
"""

from __future__ import annotations

from enum import StrEnum

from lightserve.messages.common import Message
from lightserve.types import FrontendId


class Role(StrEnum):
    """What a child process is."""

    FRONTEND = "frontend"
    ROUTER = "router"
    WORKER = "worker"


class ChildReady(Message, frozen=True):
    """This child can work: a frontend listens, a router has bound its links, a worker is loaded."""


class ChildFailed(Message, frozen=True):
    """This child cannot start; `reason` is one line for the operator."""

    reason: str


class WorkersStalled(Message, frozen=True):
    """From the router: work is in flight and no step has finished for --step-timeout-s."""

    generation: int
    stalled_s: float


ChildMessage = ChildReady | ChildFailed | WorkersStalled


class RouterUp(Message, frozen=True):
    """To frontends: a router is there; connect, and say hello with this boot id."""

    address: str
    boot_id: str


class RouterDown(Message, frozen=True):
    """To frontends: the router died; all requests in flight have failed."""


class Drain(Message, frozen=True):
    """To frontends: refuse new requests, exit 0 when the last is done or after `timeout_s`."""

    timeout_s: float


class FrontendLost(Message, frozen=True):
    """To the router: this frontend died; abort all its requests."""

    frontend_id: FrontendId


class WorkersLost(Message, frozen=True):
    """To the router: the worker group of this generation is gone; a new one is being started."""

    generation: int


SupervisorMessage = RouterUp | RouterDown | Drain | FrontendLost | WorkersLost
