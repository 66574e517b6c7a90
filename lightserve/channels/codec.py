"""Frames: one version byte, then one msgpack-encoded message.

Both channel implementations use this codec, so what the tests show for one holds for the other.
Decoding is typed: unknown tags, unknown fields, wrong types, other versions and frames above
the `MAX_BYTES` of all messages of the channel are refused with `ProtocolError`.
"""

from __future__ import annotations

import re
from typing import Any, Generic, TypeVar, get_args

import msgspec

from lightserve.errors import FrameTooLarge, ProtocolError
from lightserve.messages.common import PROTOCOL_VERSION, Message

SendT = TypeVar("SendT")
RecvT = TypeVar("RecvT")

VERSION_BYTE = bytes([PROTOCOL_VERSION])
_PEER_NAME = re.compile(r"[a-z][a-z0-9]{0,31}(-[0-9]{1,9}){0,2}")


class Codec(Generic[SendT, RecvT]):
    """Encodes one message type and decodes another (each usually a union)."""

    def __init__(self, *, send_type: Any, recv_type: Any) -> None:
        self._send_type = send_type
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(recv_type)
        recv_types: tuple[type[Message], ...] = get_args(recv_type) or (recv_type,)
        self.max_recv_bytes = max(kind.MAX_BYTES for kind in recv_types)
        """Of any message that is accepted."""

    def encode(self, message: SendT) -> bytes:
        """Return the frame of `message`.

        Raises:
            TypeError: the message is not of this channel's type.
            FrameTooLarge: no peer would accept it.
        """
        if not isinstance(message, self._send_type):
            raise TypeError(f"{type(message).__name__} does not belong on this channel")
        frame = VERSION_BYTE + self._encoder.encode(message)
        if len(frame) > message.MAX_BYTES:
            raise FrameTooLarge(type(message).__name__, len(frame), message.MAX_BYTES)
        return frame

    def decode(self, frame: bytes) -> RecvT:
        """Return the message in `frame`.

        Raises:
            ProtocolError: whatever is wrong with it.
        """
        if len(frame) > self.max_recv_bytes:
            raise FrameTooLarge("frame", len(frame), self.max_recv_bytes)
        if frame[:1] != VERSION_BYTE:
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
