"""The key of a server's nodes, and what it does for their links: CURVE, ZeroMQ's encryption.

All nodes have the same key, in a file each; its secret half never leaves these files and the
processes' memory. A link over TCP is encrypted, and each end proves to the other that it has the
secret half: nothing without it gets a single message through, or an answer.
"""

from __future__ import annotations

import os
from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from lightserve.errors import ConfigError, read_named_file

_KEY_CHARS = 40
"""Length of 32 bytes, as ZeroMQ writes them."""
_REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def write_node_key(path: Path) -> None:
    """Make a key and write it to a new file, for its owner alone.

    Raises:
        ConfigError: there is a file already, or none can be written.
    """
    _, secret = zmq.curve_keypair()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    with os.fdopen(fd, "wb") as file:
        file.write(secret + b"\n")


def read_node_key(path: Path) -> bytes:
    """Return the secret half in the file, as text.

    Raises:
        ConfigError: it cannot be read, or is no key.
    """
    secret = read_named_file("--node-key-file", path).strip().encode()
    try:
        if len(secret) != _KEY_CHARS:
            raise ValueError
        zmq.curve_public(secret)
    except (ValueError, zmq.ZMQError) as error:
        raise ConfigError(
            f"--node-key-file {path} has no key: lightserve node-key FILE writes one"
        ) from error
    return secret


def use_key(socket: zmq.Socket[bytes], secret: bytes) -> None:
    """Have a socket that is not connected yet prove that it has the key, and ask for that."""
    public = zmq.curve_public(secret)
    socket.curve_serverkey = public
    socket.curve_publickey = public
    socket.curve_secretkey = secret


class Guard:
    """Stands at a socket's further addresses: only what has the key comes in."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], secret: bytes
    ) -> None:
        """Addresses that `socket` has been bound to so far stay as they are."""
        self._public = zmq.curve_public(secret)
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self)
        self._socket = socket
        self._events = socket.get_monitor_socket(_REFUSALS)
        self._num_refused = 0
        socket.curve_server = True
        socket.curve_publickey = self._public
        socket.curve_secretkey = secret

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a peer that has proved to have this public key's secret may come in."""
        del domain
        return key == self._public

    @property
    def num_refused(self) -> int:
        """Connections that were refused: without encryption, or with another key."""
        while self._events.poll(0):
            self._events.recv_multipart()
            self._num_refused += 1
        return self._num_refused

    def close(self) -> None:
        """Stop; before the socket is closed."""
        self._socket.disable_monitor()
        self._events.close(linger=0)
        self._authenticator.stop()
