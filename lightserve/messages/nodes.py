"""The link between node 0's supervisor and those of the other nodes.

Each says how things stand, every second and whenever that changes, and never only what is new: a
message that is lost, or comes from before a cable was cut, does no harm. The link has a version of
its own, so that different releases can still tell each other that they differ.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from lightserve.messages.common import Message

NODE_LINK_VERSION = 1
"""Of these messages; raised when one changes."""
BEAT_S = 1.0


class NodeGroup(msgspec.Struct, frozen=True):
    """One group of workers: which it is, and where its ranks meet."""

    boot_id: str
    boot_number: int
    incarnation: int
    workers_address: str
    """Of the router, for workers of other nodes."""
    store_address: str
    """Of the ranks' rendezvous, tcp://HOST:PORT."""

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
    """What all ranks must agree on: options by name, as JSON, and the model."""
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
