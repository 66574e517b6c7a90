"""The contract of a channel.

A *hub* is the bound end with many peers; a *link* is one peer's end. Both are typed: they carry
msgspec messages of one link module, msgpack on the wire. A frame that does not decode, or is
too large, is dropped and counted in `num_rejected`, never raised to the loop. Sending never
blocks: a full queue raises `ChannelFull`. Bugs are raised at the sender: TypeError for a message
of another channel, FrameTooLarge for one above its `MAX_BYTES`. Order is kept per peer. One
thread uses a channel at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from lightserve.channels.wait import Waitable

SendT_contra = TypeVar("SendT_contra", contravariant=True)
RecvT_co = TypeVar("RecvT_co", covariant=True)


class Link(Waitable, Protocol, Generic[SendT_contra, RecvT_co]):
    """One peer's end of a channel."""

    num_rejected: int

    def send(self, message: SendT_contra) -> None:
        """Queue a message to the hub. Raises ChannelFull."""

    def receive(self, timeout_s: float | None = 0.0) -> RecvT_co | None:
        """Return the next message, or None after `timeout_s` (None waits for ever)."""

    def close(self) -> None:
        """Release the socket; messages already queued are given a moment to leave."""


class AsyncLink(Protocol, Generic[SendT_contra, RecvT_co]):
    """A link for an asyncio process."""

    num_rejected: int

    def send(self, message: SendT_contra) -> None:
        """Queue a message to the hub without waiting. Raises ChannelFull."""

    async def receive(self) -> RecvT_co:
        """Return the next message; safe to cancel without losing one.

        However many wait, other tasks have their turn from time to time.
        """

    def close(self) -> None:
        """Release the socket; messages already queued are given a moment to leave."""


class Hub(Waitable, Protocol, Generic[SendT_contra, RecvT_co]):
    """The bound end of a channel; peers are known by the name under which they connected."""

    num_rejected: int

    def send(self, peer: str, message: SendT_contra) -> None:
        """Queue a message to a peer. Raises ChannelFull; a vanished peer loses it silently."""

    def send_to_all(self, peers: Iterable[str], message: SendT_contra) -> None:
        """Queue a message to each of several peers as `send` does, encoded once.

        Raises:
            ChannelFull: a peer's queue is full; those before it have the message.
        """

    def receive(self, timeout_s: float | None = 0.0) -> tuple[str, RecvT_co] | None:
        """Return (peer, message), or None after `timeout_s` (None waits for ever)."""

    def close(self) -> None:
        """Release the socket; messages already queued are given a moment to leave."""
