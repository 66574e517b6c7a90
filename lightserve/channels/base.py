"""The contract of a channel.

A *hub* is the bound end with many peers; a *link* is one peer's end. Both are typed: they carry
msgspec messages of one link module, msgpack on the wire. A frame that does not decode, or is
too large, is dropped and counted in `num_rejected`, never raised to the loop. Sending never
blocks: a full queue raises `ChannelFull`. Bugs are raised at the sender: TypeError for a message
of another channel, FrameTooLarge for one above its `MAX_BYTES`. Order is kept per peer. One
thread uses a channel at a time.
"""

from __future__ import annotations

import asyncio
import select
import time
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

# Wait for several channels and file descriptors at once, for loops without asyncio.
#
# `select` rather than `zmq_poll`: its time-out has microseconds, and a step that leaves one
# millisecond late is a millisecond on every token.


class Waitable(Protocol):
    """A channel end whose arrival of messages can be waited for."""

    def fileno(self) -> int:
        """Descriptor that becomes readable, at the latest, when a message arrives."""

    def is_readable(self) -> bool:
        """Whether `receive` has something to look at now."""


MAX_TURN_S = 0.01
"""How long an asyncio task may take messages in, one after the other, before others have a turn."""


class Turn:
    """A task's turn of the event loop: it goes on until the task waits, or its time is up."""

    def __init__(self) -> None:
        self._end_s = 0.0

    async def share(self) -> None:
        """Let other tasks go on if the time is up."""
        if time.monotonic() >= self._end_s:
            await asyncio.sleep(0)
            self.begin()

    def begin(self) -> None:
        """Begin anew: others had their turn."""
        self._end_s = time.monotonic() + MAX_TURN_S


_LONGEST_WAIT_S = 86400.0
"""Far below what select's time value can hold; longer waits are made of several."""

SourceT = TypeVar("SourceT", bound=Waitable | int)


def wait_readable(channels: Sequence[SourceT], timeout_s: float | None) -> list[SourceT]:
    """Return those of `channels` that can be read, [] after `timeout_s` (None waits for ever).

    A source is a link, a hub, or a raw file descriptor below 1024. What is returned is readable,
    but a channel's frame may still be refused: `receive(0.0)` then gives None.
    """
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        # A socket's descriptor is edge-triggered, so the sockets are asked before every wait.
        ready = [source for source in channels if _has_message(source)]
        wait_s = _LONGEST_WAIT_S if deadline_s is None else deadline_s - time.monotonic()
        wait_s = 0.0 if ready else min(max(0.0, wait_s), _LONGEST_WAIT_S)
        readable, _, _ = select.select(channels, [], [], wait_s)
        ready.extend(source for source in readable if isinstance(source, int))
        if ready or wait_s == 0.0:
            return ready


def _has_message(source: Waitable | int) -> bool:
    return not isinstance(source, int) and source.is_readable()


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
