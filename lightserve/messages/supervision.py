"""The link between the supervisor and each of its children.

A child connects, says `ChildReady` once it can work, and `ChildFailed` (then exits 1) when it
cannot start. The supervisor sees deaths by itself (process handles), never by a time-out.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

import msgspec

from lightserve.config import ServeConfig
from lightserve.http_access import ApiKey
from lightserve.messages.common import Message
from lightserve.types import FrontendId

# What processes tell the supervisor of their metrics, and how a frontend asks for all of them.
#
# Part of the supervision link. Values are cumulative since the process began, so a lost or late
# snapshot costs nothing.


class MetricSample(msgspec.Struct, frozen=True, array_like=True):
    """One series of `lightserve.metrics.catalogue`."""

    family: str
    labels: list[str]
    """Values of the family's labels, in its order."""
    values: list[float]
    """A counter's or gauge's value; a histogram's sum, then the count of each bucket alone."""


class MetricsSnapshot(Message, frozen=True):
    """From the router and each frontend, about once a second: all their series as they stand."""

    samples: list[MetricSample]


class MetricsRequest(Message, frozen=True):
    """From a frontend: answer with `MetricsText`."""

    number: int
    is_dashboard: bool = False


class MetricsText(Message, frozen=True):
    """To the frontend that asked: all metrics of the server in Prometheus's text format, or those
    that the dashboard draws in JSON."""

    number: int
    text: bytes
    content_type: str
    is_dashboard: bool = False


class PictureRequest(Message, frozen=True):
    """To a frontend: answer with `Picture`."""


class Picture(Message, frozen=True):
    """From a frontend: what the dashboard draws besides metrics, in JSON."""

    text: bytes


class Role(StrEnum):
    """Role of a child process."""

    FRONTEND = "frontend"
    BATCHES = "batches"
    """To all others a frontend: the one with the last index."""
    ROUTER = "router"
    WORKER = "worker"


class ChildReady(Message, frozen=True):
    """This child can work: a frontend listens, a router has bound its links, a worker is loaded."""


class ChildFailed(Message, frozen=True):
    """This child cannot start; `reason` is one line for the operator."""

    reason: str


class FrontendServing(Message, frozen=True):
    """From a frontend, each time it begins to take requests: the router has welcomed it."""


class StoreUsed(Message, frozen=True):
    """From a frontend, once: a client uses the batch store, so that the batches process has to be
    there."""


class WorkersStalled(Message, frozen=True):
    """From the router: work is in flight and no step has finished for --step-timeout-s."""

    incarnation: int
    stalled_s: float


class Heartbeat(Message, frozen=True):
    """From the router and each frontend, every HEARTBEAT_INTERVAL_S: its loop turns."""


HEARTBEAT_INTERVAL_S = 1.0
LATE_TIMEOUT_S = 60.0
"""A process that is silent but busy is late, not dead, for so long."""

ChildMessage = (
    ChildReady
    | ChildFailed
    | FrontendServing
    | StoreUsed
    | WorkersStalled
    | Heartbeat
    | MetricsSnapshot
    | MetricsRequest
    | Picture
)


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
    incarnation: int
    """Which one died: a younger child, which has said hello already, is another."""


class WorkersLost(Message, frozen=True):
    """To the router: the worker group of this incarnation is gone; a new one is being started."""

    incarnation: int


class NewApiKeys(Message, frozen=True):
    """To frontends: from now on these keys are good, and no others."""

    keys: list[ApiKey]


SupervisorMessage = (
    RouterUp
    | RouterDown
    | Drain
    | FrontendLost
    | WorkersLost
    | NewApiKeys
    | MetricsText
    | PictureRequest
)


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a child process is told at birth (msgpack over an inherited descriptor)."""

    role: Role
    index: int
    """Frontend id or tensor-parallel rank; 0 for the router."""
    incarnation: int
    """How often this child has been started, from 0; for workers: the group, in this boot."""
    boot_id: str
    """The router boot this child belongs to; empty for frontends, which learn it by RouterUp."""
    config: ServeConfig
    """`config.model` is a local directory here, already checked."""
    control_address: str
    """The supervisor's hub."""
    frontends_address: str = ""
    """Router: the hub to bind for frontends."""
    workers_address: str = ""
    """Router: the hub to bind for workers. Worker: the same, to connect to."""
    collective_store: str = ""
    """Worker with tp > 1: the rendezvous of this incarnation, a file or tcp://HOST:PORT."""
    listen_fd: int = -1
    """An inherited socket. Frontend: that for clients. With nodes: the router's for workers of
    others, rank 0's for the rendezvous."""
    node_key: bytes = b""
    """With nodes, router and workers: see `lightserve.node_key`."""
    api_keys: list[ApiKey] = []
    """Frontend: the keys that are good; with --api-key-file there is at least one."""
    store_problem: str = ""
    """Frontend: why the batch store cannot be used; empty: it can, or there is none."""
    batch_owner: str = ""
    """Batches: whose the leases of lines are."""


# ----------------------------------------------------------------------
# The link between node 0's supervisor and those of the other nodes.
#
# Each says how things stand, every second and whenever that changes, and never only what is new: a
# message that is lost, or comes from before a cable was cut, does no harm. The link has a version
# of its own, so that different releases can still tell each other that they differ.


NODE_LINK_VERSION = 1
"""Version of these messages; raised when one changes."""
BEAT_S = 1.0


class NodeGroup(msgspec.Struct, frozen=True):
    """One group of workers: which it is, and where its ranks meet."""

    boot_id: str
    boot_number: int
    incarnation: int
    workers_address: str
    """Address of the router, for workers of other nodes."""
    store_address: str
    """Address of the ranks' rendezvous, tcp://HOST:PORT."""

    @property
    def name(self) -> str:
        """No two groups ever share one."""
        return f"{self.boot_id}-{self.incarnation}"


class NodeReport(Message, frozen=True):
    """From a node: what it is, and what it runs."""

    MAX_BYTES: ClassVar[int] = 256 * 1024

    protocol_version: int
    node_rank: int
    session: int
    """One life of the node's supervisor."""
    terms: dict[str, str]
    """Terms that all ranks must agree on: options by name, as JSON, and the model."""
    group: str = ""
    """Name of the group that its workers are part of; empty: there are none, nor remains."""
    is_ready: bool = False
    """Whether all of them are."""
    failure: str = ""
    """Why that group cannot go on."""
    is_leaving: bool = False
    """Its last word."""


class NodeOrder(Message, frozen=True):
    """To a node: what it is to run."""

    MAX_BYTES: ClassVar[int] = 64 * 1024

    group: NodeGroup | None = None
    """None: nothing; what there is has to end."""
    refusal: str = ""
    """Why it is not taken; it ends then."""
    end: str = ""
    """Node 0 ends, and so must the others: the reason, `STOPPED` if it was told to."""


STOPPED = "stopped"
