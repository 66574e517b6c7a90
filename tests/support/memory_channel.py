"""Channels inside one process: queues of encoded frames, for tests and the simulator.

Messages pass through the same codec as over ZeroMQ, so whatever cannot be sent there cannot be
sent here either. The two ends may live in different threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Generic

from lightserve.channels import Codec, RecvT, SendT, Turn, check_peer_name, wait_readable
from lightserve.errors import ChannelFull, ProtocolError

DEFAULT_MAX_QUEUED = 4096


def bind_hub(
    *, send_type: Any, recv_type: Any, max_queued: int = DEFAULT_MAX_QUEUED
) -> MemoryHub[Any, Any]:
    """Make a hub; links come from its `connect_link` and `connect_async_link`."""
    return MemoryHub(send_type, recv_type, max_queued)


class FrameQueue:
    """Bounded queue of (peer, frame) whose readability an event descriptor shows."""

    def __init__(self, max_queued: int) -> None:
        self._frames: deque[tuple[str, bytes]] = deque()
        self._max_queued = max_queued
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False

    def put(self, peer: str, frame: bytes) -> None:
        """Append a frame. Raises ChannelFull; a closed queue loses it."""
        if self._closed:
            return
        if len(self._frames) >= self._max_queued:
            raise ChannelFull("queue is full")
        self._frames.append((peer, frame))
        os.eventfd_write(self._event_fd, 1)

    def take(self) -> tuple[str, bytes] | None:
        """Remove and return the oldest frame, None when empty."""
        try:
            return self._frames.popleft()
        except IndexError:
            return None

    def is_readable(self) -> bool:
        """Whether a frame waits; resets the descriptor first, so that no arrival is missed."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event_fd)
        return bool(self._frames)

    def fileno(self) -> int:
        """Return the event descriptor."""
        return self._event_fd

    def close(self) -> None:
        """Drop everything."""
        if not self._closed:
            self._closed = True
            os.close(self._event_fd)


class _End(Generic[SendT, RecvT]):
    """One end: a codec and the queue that it reads."""

    def __init__(self, codec: Codec[SendT, RecvT], inbox: FrameQueue) -> None:
        self._codec = codec
        self._inbox = inbox
        self.num_rejected = 0

    def fileno(self) -> int:
        """Descriptor for `wait_readable`."""
        return self._inbox.fileno()

    def is_readable(self) -> bool:
        """Whether a frame waits."""
        return self._inbox.is_readable()

    def inject(self, frame: bytes, *, peer: str = "router") -> None:
        """Put a raw frame before this end, as if `peer` had sent it (tests)."""
        self._inbox.put(peer, frame)

    def close(self) -> None:
        """Drop what waits; the other end's messages are lost silently from now on."""
        self._inbox.close()

    def _next_message(self) -> tuple[str, RecvT] | None:
        while (item := self._inbox.take()) is not None:
            peer, frame = item
            try:
                return peer, self._codec.decode(frame)
            except ProtocolError:
                self.num_rejected += 1
        return None

    def _receive(self, timeout_s: float | None) -> tuple[str, RecvT] | None:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while (item := self._next_message()) is None:
            remaining_s = None if deadline_s is None else deadline_s - time.monotonic()
            if remaining_s is not None and remaining_s <= 0.0:
                return None
            wait_readable([self], remaining_s)
        return item


class MemoryHub(_End[SendT, RecvT]):
    """A `Hub` in memory."""

    def __init__(self, send_type: Any, recv_type: Any, max_queued: int) -> None:
        codec: Codec[SendT, RecvT] = Codec(send_type=send_type, recv_type=recv_type)
        super().__init__(codec, FrameQueue(max_queued))
        self._link_codec: Codec[RecvT, SendT] = Codec(send_type=recv_type, recv_type=send_type)
        self._max_queued = max_queued
        self._peers: dict[str, FrameQueue] = {}

    def connect_link(self, name: str) -> MemoryLink[RecvT, SendT]:
        """Connect a peer; one of the same name takes over."""
        return MemoryLink(self._link_codec, self._add_peer(name), name, self._inbox)

    def connect_async_link(self, name: str) -> MemoryAsyncLink[RecvT, SendT]:
        """Connect a peer that lives in the running asyncio loop."""
        return MemoryAsyncLink(self._link_codec, self._add_peer(name), name, self._inbox)

    def send(self, peer: str, message: SendT) -> None:
        """Queue a message to a peer. Raises ChannelFull; a vanished peer loses it silently."""
        self.send_to_all([peer], message)

    def send_to_all(self, peers: Iterable[str], message: SendT) -> None:
        """Queue a message to several peers, encoded once; see `Hub.send_to_all`."""
        frame = self._codec.encode(message)
        for peer in peers:
            if peer in self._peers:
                self._peers[peer].put("", frame)

    def receive(self, timeout_s: float | None = 0.0) -> tuple[str, RecvT] | None:
        """Return (peer, message), or None after `timeout_s` (None waits for ever)."""
        return self._receive(timeout_s)

    def _add_peer(self, name: str) -> FrameQueue:
        self._peers[check_peer_name(name)] = queue = FrameQueue(self._max_queued)
        return queue


class _LinkEnd(_End[SendT, RecvT]):
    """What both kinds of link share."""

    def __init__(
        self, codec: Codec[SendT, RecvT], inbox: FrameQueue, name: str, outbox: FrameQueue
    ) -> None:
        super().__init__(codec, inbox)
        self._name = name
        self._outbox = outbox

    def send(self, message: SendT) -> None:
        """Queue a message to the hub. Raises ChannelFull."""
        self._outbox.put(self._name, self._codec.encode(message))


class MemoryLink(_LinkEnd[SendT, RecvT]):
    """A `Link` in memory."""

    def receive(self, timeout_s: float | None = 0.0) -> RecvT | None:
        """Return the next message, or None after `timeout_s` (None waits for ever)."""
        item = self._receive(timeout_s)
        return None if item is None else item[1]


class MemoryAsyncLink(_LinkEnd[SendT, RecvT]):
    """An `AsyncLink` in memory. One task receives at a time."""

    def __init__(
        self, codec: Codec[SendT, RecvT], inbox: FrameQueue, name: str, outbox: FrameQueue
    ) -> None:
        super().__init__(codec, inbox, name, outbox)
        self._arrived = asyncio.Event()
        self._turn = Turn()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(inbox.fileno(), self._on_readable)
        self._is_open = True

    async def receive(self) -> RecvT:
        """Return the next message; safe to cancel without losing one."""
        await self._turn.share()
        while (item := self._next_message()) is None:
            self._arrived.clear()
            if not self.is_readable():
                await self._arrived.wait()
                self._turn.begin()
        return item[1]

    def close(self) -> None:
        """Stop listening and drop what waits."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self.fileno())
        super().close()

    def _on_readable(self) -> None:
        if self.is_readable():
            self._arrived.set()
