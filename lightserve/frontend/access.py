"""Who may ask what: API keys on every path and method, and the Host header where there are none.

Pure ASGI, around the whole application: a request that does not pass never reaches a route, so
paths that do not exist and methods that are not taken answer strangers like all others.

With keys, GET /livez, /readyz and /health are open; operators' routes want a key marked `admin`;
everything else wants any key. Without keys on a loopback address, the Host header must name one,
or a page on the internet could use a visitor's browser to reach the server (DNS rebinding).
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from lightserve.api_keys import ApiKey, find_key
from lightserve.config import ServeConfig
from lightserve.errors import InvalidRequest
from lightserve.frontend.failures import respond_with_error

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health"})
"""Open to GET without a key."""
ADMIN_PATHS = frozenset({"/metrics", "/load", "/dashboard", "/debug/kv"})
"""They show what all clients together do."""

CALLER_KEY = "lightserve.caller"
"""Key in the ASGI scope: the `Caller`."""


@dataclass(frozen=True)
class Caller:
    """Whose request it is; never the key itself."""

    name: str
    """The name of the key; empty if none was needed."""
    is_admin: bool

    @property
    def prefix_salt(self) -> str:
        """What keeps this caller's prefixes apart from others' in the cache (`Submit`).

        It follows the name, so a key that replaces another keeps its prefixes.
        """
        return hashlib.sha256(f"prefix:{self.name}".encode()).hexdigest()[:16] if self.name else ""


ANYBODY = Caller(name="", is_admin=True)
"""The caller where there are no keys."""
_PROBE = Caller(name="", is_admin=False)


def caller_of(scope: Scope) -> Caller:
    """Return whose request it is."""
    caller = scope.get(CALLER_KEY, ANYBODY)
    assert isinstance(caller, Caller)
    return caller


class KeyRing:
    """The keys that are good at the moment; replaced as a whole."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self.keys = tuple(keys)


class AccessGate:
    """The outermost part of the application; see the module."""

    def __init__(
        self, app: ASGIApp, config: ServeConfig, keys: KeyRing, rejects: Counter[str]
    ) -> None:
        self._app = app
        self._keys = keys if config.api_key_file else None
        self._checks_host = config.is_loopback and self._keys is None
        names = [config.host, "localhost", *config.allowed_hosts.split(",")]
        self._hosts = {name.strip().lower() for name in names} - {""}
        self._rejects = rejects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        try:
            if self._checks_host:
                self._check_host(_values(scope, b"host"))
            scope[CALLER_KEY] = ANYBODY if self._keys is None else self._caller(scope, self._keys)
        except InvalidRequest as refusal:
            self._rejects[refusal.code] += 1
            await respond_with_error(refusal, scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope, ring: KeyRing) -> Caller:
        path = scope["path"]
        if scope["method"] == "GET" and path in OPEN_PATHS:
            given = _values(scope, b"authorization")
            key = find_key(ring.keys, _bearer(given)) if given else None
            return _PROBE if key is None else Caller(key.name, key.is_admin)
        key = find_key(ring.keys, _bearer(_values(scope, b"authorization")))
        if key is None:
            raise InvalidRequest(
                "a valid API key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                status=401,
            )
        if path in ADMIN_PATHS and not key.is_admin:
            raise InvalidRequest(
                "this path needs the key of an operator", code="admin_key_required", status=403
            )
        return Caller(key.name, key.is_admin)

    def _check_host(self, values: list[bytes]) -> None:
        host = values[0].decode("latin-1").lower() if len(values) == 1 else ""
        name, colon, port = host.rpartition(":")
        if not colon or not port.isdecimal():
            name = host
        if name not in self._hosts and not _is_loopback_address(name):
            raise InvalidRequest(
                "the Host header must name this machine", code="invalid_host", status=421
            )


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def _bearer(values: list[bytes]) -> bytes:
    """Return the key in the Authorization header; nothing if there is not exactly one."""
    scheme, _, key = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _is_loopback_address(name: str) -> bool:
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False
