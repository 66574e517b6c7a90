"""What headers of a request say about who asks, for every HTTP server of the project."""

from __future__ import annotations

import ipaddress
from collections.abc import Set


def bearer_key(authorization: bytes) -> bytes:
    """Return the key in an Authorization header; nothing if there is none."""
    scheme, _, key = authorization.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def is_loopback(name: str) -> bool:
    """Whether a name or an address, perhaps in brackets, can be reached from this machine only."""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def names_machine(host: bytes, names: Set[str]) -> bool:
    """Whether a Host header has one of the names, in small letters, or a loopback one.

    A web page whose own name has been pointed at this machine (DNS rebinding) sends that name.
    """
    given = host.decode("latin-1").lower()
    name, colon, port = given.rpartition(":")
    if not colon or not port.isdecimal():
        name = given
    return name in names or is_loopback(name)
