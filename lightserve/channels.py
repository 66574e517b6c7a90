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
import os
import re
import select
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar, get_args

import msgspec
import zmq

from lightserve.errors import ChannelFull, FrameTooLarge, ProtocolError
from lightserve.messages.common import PROTOCOL_VERSION, Message
from lightserve.node_key import Guard, use_key

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

    @property
    def num_rejected(self) -> int:
        """Frames that were refused."""

    def send(self, message: SendT_contra) -> None:
        """Queue a message to the hub. Raises ChannelFull."""

    def receive(self, timeout_s: float | None = 0.0) -> RecvT_co | None:
        """Return the next message, or None after `timeout_s` (None waits for ever)."""

    def close(self) -> None:
        """Release the socket; messages already queued are given a moment to leave."""


class AsyncLink(Protocol, Generic[SendT_contra, RecvT_co]):
    """A link for an asyncio process."""

    @property
    def num_rejected(self) -> int:
        """Frames that were refused."""

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

    @property
    def num_rejected(self) -> int:
        """Frames, and connections, that were refused."""

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


# ----------------------------------------------------------------------
# Channels over ZeroMQ: a ROUTER socket at the hub, a DEALER at each link, over `ipc://`, and from
# other nodes over `tcp://`, encrypted (see `node_key`).
#
# Addresses lie in a private directory (0700), which is what keeps other users out; the socket
# files themselves are 0600. Every channel has its own ZeroMQ context, so that `close` can wait,
# for a moment and no longer, until what was queued has left. Frames that are moderately too large
# are refused and counted like any other bad frame; from `_ZMQ_SPARE_BYTES` more on ZeroMQ cuts the
# peer's connection before the memory is spent.


# Frames: one version byte, then one msgpack-encoded message.
#
# The in-memory channels of the tests use the same codec, so what they show holds here.
# Decoding is typed: unknown tags, unknown fields, wrong types, other versions and frames above
# the `MAX_BYTES` of all messages of the channel are refused with `ProtocolError`.

SendT = TypeVar("SendT")
RecvT = TypeVar("RecvT")

Frame = bytes | bytearray | memoryview
VERSION_BYTE = bytes([PROTOCOL_VERSION])
_PEER_NAME = re.compile(r"[a-z][a-z0-9]{0,31}(-[0-9]{1,9}){0,2}")


class Codec(Generic[SendT, RecvT]):
    """Encodes one message type and decodes another (each usually a union)."""

    def __init__(self, *, send_type: Any, recv_type: Any, version: int = PROTOCOL_VERSION) -> None:
        self._send_type = send_type
        self._version_byte = bytes([version])
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(recv_type)
        recv_types: tuple[type[Message], ...] = get_args(recv_type) or (recv_type,)
        self.max_recv_bytes = max(kind.MAX_BYTES for kind in recv_types)
        """Largest message of any kind that is accepted."""

    def encode(self, message: SendT) -> Frame:
        """Return the frame of `message`.

        Raises:
            TypeError: the message is not of this channel's type.
            FrameTooLarge: no peer would accept it.
        """
        if not isinstance(message, self._send_type):
            raise TypeError(f"{type(message).__name__} does not belong on this channel")
        frame = bytearray(self._version_byte)
        self._encoder.encode_into(message, frame, 1)
        if len(frame) > message.MAX_BYTES:
            raise FrameTooLarge(type(message).__name__, len(frame), message.MAX_BYTES)
        return frame

    def decode(self, frame: Frame) -> RecvT:
        """Return the message in `frame`.

        Raises:
            ProtocolError: whatever is wrong with it.
        """
        if len(frame) > self.max_recv_bytes:
            raise FrameTooLarge("frame", len(frame), self.max_recv_bytes)
        if frame[:1] != self._version_byte:
            raise ProtocolError(f"frame of another protocol version: {frame[:1]!r}")
        try:
            message: RecvT = self._decoder.decode(memoryview(frame)[1:])
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            raise ProtocolError(str(error)) from error
        return message


def check_peer_name(name: str) -> str:
    """Return `name` if it may name a peer, such as "router" or "worker-0"; else ValueError."""
    if _PEER_NAME.fullmatch(name) is None:
        raise ValueError(f"not a peer name: {name!r}")
    return name


def parse_peer_name(identity: bytes) -> str | None:
    """Return the peer name in a wire identity, or None when it is not one."""
    try:
        return check_peer_name(identity.decode("ascii"))
    except ValueError:
        return None


__all__ = [
    "ZmqAsyncLink",
    "ZmqHub",
    "ZmqLink",
    "bind_hub",
    "connect_async_link",
    "connect_link",
    "wait_readable",
]

DEFAULT_MAX_QUEUED = 4096
"""Messages that may wait on each side of a link."""

LINGER_S = 0.25
_CONNECT_TIMEOUT_MS = 2000
"""For another machine, which may be cut off: the kernel alone would ask ever more rarely."""
_ZMQ_SPARE_BYTES = 64 * 1024


def bind_hub(
    address: str, *, send_type: Any, recv_type: Any, max_queued: int = DEFAULT_MAX_QUEUED
) -> ZmqHub[Any, Any]:
    """Bind the hub of a channel at `address` (`ipc://path`; the path must be free)."""
    hub: ZmqHub[Any, Any] = ZmqHub(Codec(send_type=send_type, recv_type=recv_type), max_queued)
    hub.bind(address)
    return hub


def connect_link(
    address: str,
    *,
    name: str,
    send_type: Any,
    recv_type: Any,
    max_queued: int = DEFAULT_MAX_QUEUED,
    linger_s: float = LINGER_S,
    node_key: bytes = b"",
) -> ZmqLink[Any, Any]:
    """Connect to a hub as `name`; the hub may be bound later.

    `close` waits up to `linger_s` for what was sent to leave. `node_key` is for one over TCP.
    """
    codec: Codec[Any, Any] = Codec(send_type=send_type, recv_type=recv_type)
    return ZmqLink(
        address, name, codec, max_queued=max_queued, linger_s=linger_s, node_key=node_key
    )


def connect_async_link(
    address: str, *, name: str, send_type: Any, recv_type: Any, max_queued: int = DEFAULT_MAX_QUEUED
) -> ZmqAsyncLink[Any, Any]:
    """Connect to a hub as `name`, for use inside the running asyncio loop."""
    return ZmqAsyncLink(address, name, Codec(send_type=send_type, recv_type=recv_type), max_queued)


class _Socket:
    """A ZeroMQ socket with its own context and every limit set."""

    def __init__(self, kind: int, max_queued: int, linger_s: float, max_recv_bytes: int) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.raw = self.context.socket(kind)
        self.raw.setsockopt(zmq.LINGER, round(1e3 * linger_s))
        self.raw.setsockopt(zmq.SNDHWM, max_queued)
        self.raw.setsockopt(zmq.RCVHWM, max_queued)
        self.raw.setsockopt(zmq.MAXMSGSIZE, max_recv_bytes + _ZMQ_SPARE_BYTES)

    def open(self, bind_or_connect: Callable[[str], object], address: str) -> None:
        """Bind or connect; a socket that cannot is closed again, and its error raised."""
        try:
            bind_or_connect(address)
        except zmq.ZMQError:
            self.close()
            raise

    def watch(self, silence_s: float) -> None:
        """Have further connections ask for a sign of life, and end without one; 0: not so."""
        if silence_s > 0.0:
            self.raw.setsockopt(zmq.HEARTBEAT_IVL, round(250 * silence_s))
            self.raw.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(1e3 * silence_s))

    def is_readable(self) -> bool:
        """Whether a frame waits; asking also makes ZeroMQ re-arm the descriptor's edge."""
        return bool(int(self.raw.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def receive(self) -> list[Frame] | None:
        """Return the parts of the next message if there is one; those of images are not copied."""
        try:
            parts = self.raw.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return [p.bytes if len(p) < 1 << 20 else p.buffer.toreadonly() for p in parts]

    def close(self) -> None:
        """Close the socket and wait at most the linger time for queued messages to leave."""
        if not self.raw.closed:
            self.raw.close()
            self.context.term()


class _Channel(Generic[SendT, RecvT]):
    """The common part of hub and links."""

    def __init__(
        self, kind: int, codec: Codec[SendT, RecvT], max_queued: int, linger_s: float = LINGER_S
    ) -> None:
        self._socket = _Socket(kind, max_queued, linger_s, codec.max_recv_bytes)
        self._codec = codec
        self._num_bad_frames = 0

    @property
    def num_rejected(self) -> int:
        """Frames that were refused."""
        return self._num_bad_frames

    def fileno(self) -> int:
        """Descriptor for `wait_readable`; edge-triggered, see ZMQ_FD."""
        return int(self._socket.raw.getsockopt(zmq.FD))

    def is_readable(self) -> bool:
        """Whether a frame waits."""
        return self._socket.is_readable()

    def close(self) -> None:
        """Release the socket; messages already queued are given a moment to leave."""
        self._socket.close()

    def _wait(self, deadline_s: float | None) -> bool:
        """Wait for a frame; False once the deadline (monotonic; None is never) has passed."""
        remaining_s = None if deadline_s is None else deadline_s - time.monotonic()
        if remaining_s is not None and remaining_s <= 0.0:
            return False
        return bool(wait_readable([self], remaining_s))


class ZmqHub(_Channel[SendT, RecvT]):
    """A `Hub` over a ROUTER socket."""

    def __init__(self, codec: Codec[SendT, RecvT], max_queued: int = DEFAULT_MAX_QUEUED) -> None:
        """Reached by nothing before `bind` or `listen`."""
        super().__init__(zmq.ROUTER, codec, max_queued)
        # Mandatory: a full peer raises instead of losing messages silently. Handover: a
        # restarted peer takes over its predecessor's name.
        self._socket.raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.raw.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._guard: Guard | None = None

    @property
    def num_rejected(self) -> int:
        """Frames, and connections from other machines, that were refused."""
        return self._num_bad_frames + (0 if self._guard is None else self._guard.num_refused)

    def bind(self, address: str) -> None:
        """Be reached at `address`, for instance `ipc://path`."""
        self._socket.open(self._socket.raw.bind, address)
        if address.startswith("ipc://"):
            os.chmod(address.removeprefix("ipc://"), 0o600)  # noqa: PTH101 - address, not Path

    def listen(self, listener: socket.socket, node_key: bytes, *, silence_s: float = 0.0) -> None:
        """Be reached at a TCP socket that is bound and becomes the hub's; call after all `bind`.

        `node_key` is what peers there have to have. One that is silent for `silence_s` is
        disconnected, 0: never.
        """
        self._guard = Guard(self._socket.context, self._socket.raw, node_key)
        host, port = listener.getsockname()
        listener.listen()
        self._socket.watch(silence_s)
        self._socket.raw.setsockopt(zmq.USE_FD, listener.detach())
        self._socket.open(self._socket.raw.bind, f"tcp://{host}:{port}")

    def close(self) -> None:
        """Release the socket; messages already queued are given a moment to leave."""
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        super().close()

    def send(self, peer: str, message: SendT) -> None:
        """Queue a message to a peer. Raises ChannelFull; a vanished peer loses it silently."""
        self.send_to_all([peer], message)

    def send_to_all(self, peers: Iterable[str], message: SendT) -> None:
        """Queue a message to several peers, encoded once; see `Hub.send_to_all`."""
        frame = self._codec.encode(message)
        for peer in peers:
            self._send_frame(peer, frame)

    def _send_frame(self, peer: str, frame: Frame) -> None:
        try:
            self._socket.raw.send_multipart([peer.encode("ascii"), frame], zmq.NOBLOCK)
        except zmq.Again as error:
            raise ChannelFull(f"queue to {peer} is full") from error
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def receive(self, timeout_s: float | None = 0.0) -> tuple[str, RecvT] | None:
        """Return (peer, message), or None after `timeout_s` (None waits for ever)."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            parts = self._socket.receive()
            if parts is None:
                if not self._wait(deadline_s):
                    return None
                continue
            try:
                return self._decode(parts)
            except ProtocolError:
                self._num_bad_frames += 1

    def _decode(self, parts: list[Frame]) -> tuple[str, RecvT]:
        peer = parse_peer_name(bytes(parts[0]))
        if peer is None or len(parts) != 2:
            raise ProtocolError("frame without a valid peer name, or in several parts")
        return peer, self._codec.decode(parts[1])


class _DealerChannel(_Channel[SendT, RecvT]):
    """The common part of both kinds of link."""

    def __init__(
        self,
        address: str,
        name: str,
        codec: Codec[SendT, RecvT],
        *,
        max_queued: int = DEFAULT_MAX_QUEUED,
        linger_s: float = LINGER_S,
        node_key: bytes = b"",
        silence_s: float = 0.0,
    ) -> None:
        """One that is silent for `silence_s` is connected anew; 0: never."""
        identity = check_peer_name(name).encode("ascii")
        super().__init__(zmq.DEALER, codec, max_queued, linger_s)
        self._socket.raw.setsockopt(zmq.IDENTITY, identity)
        if node_key:
            use_key(self._socket.raw, node_key)
            self._socket.raw.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
        self._socket.watch(silence_s)
        self._socket.open(self._socket.raw.connect, address)

    def send(self, message: SendT) -> None:
        """Queue a message to the hub without waiting. Raises ChannelFull."""
        frame = self._codec.encode(message)
        try:
            self._socket.raw.send(frame, zmq.NOBLOCK)
        except zmq.Again as error:
            raise ChannelFull("queue to the hub is full") from error

    def _next_message(self) -> RecvT | None:
        """Return the next valid message that has arrived; bad frames are dropped and counted."""
        while (parts := self._socket.receive()) is not None:
            try:
                if len(parts) != 1:
                    raise ProtocolError("frame in several parts")
                return self._codec.decode(parts[0])
            except ProtocolError:
                self._num_bad_frames += 1
        return None


class ZmqLink(_DealerChannel[SendT, RecvT]):
    """A `Link` over a DEALER socket."""

    def receive(self, timeout_s: float | None = 0.0) -> RecvT | None:
        """Return the next message, or None after `timeout_s` (None waits for ever)."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while (message := self._next_message()) is None:
            if not self._wait(deadline_s):
                return None
        return message


class ZmqAsyncLink(_DealerChannel[SendT, RecvT]):
    """An `AsyncLink` over a DEALER socket, driven by the loop's own reader call-backs.

    A message is taken from the socket only in the very step of the task that returns it, so
    cancelling `receive` never loses one. One task receives at a time.
    """

    def __init__(
        self, address: str, name: str, codec: Codec[SendT, RecvT], max_queued: int
    ) -> None:
        super().__init__(address, name, codec, max_queued=max_queued)
        self._arrived = asyncio.Event()
        self._turn = Turn()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.fileno(), self._on_edge)

    def send(self, message: SendT) -> None:
        """Queue a message to the hub without waiting. Raises ChannelFull."""
        super().send(message)
        self._on_edge()  # sending may have swallowed the edge that announced an arrival

    async def receive(self) -> RecvT:
        """Return the next message; safe to cancel without losing one."""
        await self._turn.share()
        while (message := self._next_message()) is None:
            self._arrived.clear()
            if not self.is_readable():
                await self._arrived.wait()
                self._turn.begin()
        return message

    def close(self) -> None:
        """Release the socket; messages already queued are given a moment to leave."""
        if not self._socket.raw.closed:
            self._loop.remove_reader(self.fileno())
        super().close()

    def _on_edge(self) -> None:
        if self.is_readable():
            self._arrived.set()
