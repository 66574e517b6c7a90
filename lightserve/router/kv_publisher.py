"""Publishes what comes and goes in the prefix cache over ZeroMQ, in vLLM's format.

Each message has three parts: an empty topic, a number that counts messages (8 bytes, big-endian),
and MessagePack of `[time, events, null]`. A subscriber that is slow or comes late misses some, as
it sees by the numbers; nothing waits for it. What is unsent is bounded in bytes for each: messages
are of MAX_MESSAGE_BYTES at most, but for an event that is longer alone, and one that takes nothing
for so long that it answers no heartbeat is disconnected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.auth
from msgspec.structs import replace
from zmq.auth.thread import ThreadAuthenticator

from lightserve.errors import ConfigError
from lightserve.router.kv.block_events import AllBlocksCleared, BlockEvent, BlockRemoved

SERVER_KEY = "server.key_secret"
CLIENT_KEYS = "clients"
MAX_UNSENT = 4096
"""Messages for each subscriber; later ones are dropped."""
MAX_MESSAGE_BYTES = 16 * 1024
"""So 64 MiB for each subscriber."""
HEARTBEAT_S, SILENCE_S = 5, 15
"""How often subscribers are asked for a sign of life, and how long one may owe it."""
TOPIC = b""


class EventBatch(msgspec.Struct, array_like=True, frozen=True):
    """Events of one message."""

    ts: float
    """Unix time, seconds."""
    events: Sequence[BlockEvent]
    data_parallel_rank: int | None = None


class KVPublisher:
    """A socket to which any number of subscribers connect."""

    def __init__(self, address: str, keys_dir: str = "") -> None:
        """Bind `address`, such as tcp://127.0.0.1:5557 or ipc:///run/kv-events.

        `keys_dir`: has `server.key_secret` and a directory `clients` of the public keys that may
        subscribe, all of them ZeroMQ certificates (CURVE); empty: anything that reaches the address
        may.

        Raises:
            ConfigError: the address cannot be bound, or there are no such keys.
        """
        self._context = zmq.Context(io_threads=1)
        self._authenticator: ThreadAuthenticator | None = None
        self._socket = self._context.socket(zmq.PUB)
        self._socket.sndhwm = MAX_UNSENT
        self._socket.linger = 0
        self._socket.heartbeat_ivl = int(HEARTBEAT_S * 1000)
        self._socket.heartbeat_timeout = int(SILENCE_S * 1000)
        self._number = 0
        try:
            if keys_dir:
                self._use_keys(Path(keys_dir))
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"--kv-events: cannot bind {address!r}: {error.strerror}") from None
        except (OSError, ValueError) as error:
            self.close()
            raise ConfigError(f"--kv-events-keys: {error}") from None

    @property
    def address(self) -> str:
        """Where it listens."""
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.rstrip(b"\0").decode()

    def publish(self, events: Sequence[BlockEvent], *, now_s: float) -> None:
        """Send events of the Unix time `now_s`; without any nothing."""
        if not events:
            return
        for payload in _payloads(events, now_s):
            self._socket.send_multipart([TOPIC, self._number.to_bytes(8, "big"), payload])
            self._number += 1

    def close(self) -> None:
        """Give up the address."""
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def _use_keys(self, directory: Path) -> None:
        public, secret = zmq.auth.load_certificate(directory / SERVER_KEY)
        if secret is None:
            raise ValueError(f"{directory / SERVER_KEY} has no secret key")
        clients = directory / CLIENT_KEYS
        if not any(clients.glob("*.key")):
            raise ValueError(f"{clients} has no client's public key (*.key)")
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve(domain="*", location=str(clients))
        self._socket.curve_server = True
        self._socket.curve_publickey = public
        self._socket.curve_secretkey = secret


def _payloads(events: Sequence[BlockEvent], now_s: float) -> Iterator[bytes]:
    """Yield messages of these events, in their order, halved until none is too long."""
    payload = msgspec.msgpack.encode(EventBatch(now_s, events))
    parts = _halves(events) if len(payload) > MAX_MESSAGE_BYTES else ()
    if not parts:
        yield payload
    for part in parts:
        yield from _payloads(part, now_s)


def _halves(events: Sequence[BlockEvent]) -> Sequence[Sequence[BlockEvent]]:
    """Return events in two parts; one event by its blocks; nothing where there is one block."""
    if len(events) > 1:
        middle = len(events) // 2
        return events[:middle], events[middle:]
    (event,) = events
    if isinstance(event, AllBlocksCleared) or len(event.block_hashes) < 2:
        return ()
    middle = len(event.block_hashes) // 2
    first, last = event.block_hashes[:middle], event.block_hashes[middle:]
    if isinstance(event, BlockRemoved):
        return [replace(event, block_hashes=first)], [replace(event, block_hashes=last)]
    num_tokens, keys = middle * event.block_size, event.extra_keys
    before = replace(
        event,
        block_hashes=first,
        token_ids=event.token_ids[:num_tokens],
        extra_keys=None if keys is None else keys[:middle],
    )
    after = replace(
        event,
        block_hashes=last,
        parent_block_hash=first[-1],
        token_ids=event.token_ids[num_tokens:],
        extra_keys=keys[middle:] if keys is not None and any(keys[middle:]) else None,
    )
    return [before], [after]
