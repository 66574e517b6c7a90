"""Layers that every request passes before a route, all pure ASGI: see `process` for the order.

The log names each request; the gate decides who may ask what, and how large a request may be.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum

from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightserve.batches.records import MAX_FILE_BYTES
from lightserve.config import ServeConfig
from lightserve.errors import InvalidRequest
from lightserve.frontend.connections import ConnectionTable
from lightserve.frontend.errors import REFUSAL_KEY, RequestFailed, error_response
from lightserve.frontend.json_body import UNKNOWN_PARAMETER
from lightserve.frontend.observation import Observation
from lightserve.http_access import NO_QUOTA, ApiKey, Quota, bearer_key, find_key, names_machine
from lightserve.logs import request_id
from lightserve.messages.frontend_router import NO_CLIENT, Client
from lightserve.metrics.recording import OTHER
from lightserve.turn_threads import WHOSE

log = logging.getLogger(__name__)

# ----------------------------------------------------------------------
# Who may ask what: API keys on every path and method, Host and Origin where there are none.
#
# Pure ASGI, around the whole application: a request that does not pass never reaches a route, so
# paths that do not exist and methods that are not taken answer strangers like all others.
#
# What a key opens is decided by the route that will answer, never by the path's text, which a route
# may match in more than one spelling; a route that `ROUTE_ACCESS` does not name is for operators.
#
# Without keys on a loopback address, the Host header must name one, or a page on the internet could
# use a visitor's browser to reach the server (DNS rebinding); and a request that a browser sends
# for a page of another origin is refused, as a page may send what it may not read.


FAIRNESS_HEADER = "x-gateway-fairness-id"
MAX_FAIRNESS_ID_CHARS = 128
_FAIRNESS_ID = re.compile(rb"[\x21-\x7e]{1,%d}" % MAX_FAIRNESS_ID_CHARS)
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class Access(Enum):
    """Who may ask a route, where keys are needed."""

    OPEN = "open"
    """By GET and HEAD, without a key."""
    CLIENT = "client"
    """Any key."""
    OPERATOR = "operator"
    """A key marked `admin`: it shows what all clients together do."""


ROUTE_ACCESS: Mapping[str, Access] = {
    **dict.fromkeys(("/livez", "/readyz", "/health", "/dashboard"), Access.OPEN),
    **dict.fromkeys(
        (
            *("/", "/version", "/openapi.json", "/docs", "/docs/oauth2-redirect"),
            *("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/models"),
            *("/v1/completions/render", "/v1/chat/completions/render"),
            *("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
            *("/v1/responses", "/v1/responses/{response_id}"),
            *("/v1/responses/{response_id}/cancel", "/v1/responses/{response_id}/input_items"),
            *("/v1/messages", "/v1/messages/count_tokens"),
            *("/v1/models/{model_id:path}", "/generate", "/generate_stream"),
            *("/tokenize", "/detokenize", "/v1/requests/{request_id}/timeline"),
            *("/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content"),
            *("/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel"),
        ),
        Access.CLIENT,
    ),
    **dict.fromkeys(("/metrics", "/load", "/debug/kv", "/dashboard/events"), Access.OPERATOR),
    OTHER: Access.CLIENT,  # there is nothing, which is all that it says
}

ROUTE_KEY = "lightserve.route"
"""Key in the ASGI scope: the template of the route that will answer, OTHER if there is none."""
CALLER_KEY = "lightserve.caller"
"""Key in the ASGI scope: the `Caller`."""


@dataclass(frozen=True)
class Caller:
    """Whose request it is; never the key itself."""

    name: str
    """The name of the key; empty if none was needed."""
    is_admin: bool
    fairness_id: str = ""
    """Behind the key of a gateway, whose request it says that it is."""
    quota: Quota = NO_QUOTA
    is_gateway: bool = False
    batch: int = 0
    """Number of the batch that it is a line of; 0: of none."""

    @property
    def client(self) -> Client:
        """The router's name for the caller: hashes, never a name or an id that was given."""
        if not self.name:
            return NO_CLIENT
        text = f"fairness:{self.fairness_id}"
        return Client(
            key=self.prefix_salt,
            fairness_id=hashlib.sha256(text.encode()).hexdigest()[:32] if self.fairness_id else "",
            requests_per_minute=self.quota.rpm,
            tokens_per_minute=self.quota.tpm,
        )

    @property
    def prefix_salt(self) -> str:
        """Salt that keeps this caller's prefixes apart from others' in the cache (`Submit`).

        It follows the name, so a key that replaces another keeps its prefixes.
        """
        return hashlib.sha256(f"prefix:{self.name}".encode()).hexdigest()[:16] if self.name else ""


KEYLESS = Caller(name="", is_admin=True)
"""The caller where there are no keys."""
_PROBE = Caller(name="", is_admin=False)


def caller_of(scope: Scope) -> Caller:
    """Return whose request it is."""
    caller = scope.get(CALLER_KEY, KEYLESS)
    assert isinstance(caller, Caller)
    return caller


def owner_of(scope: Scope) -> str:
    """Return which client a request's memory is held for: its key, or its address."""
    caller = scope.get(CALLER_KEY, KEYLESS)
    client = scope.get("client")
    return f"key {caller.name}" if caller.name else str(client[0] if client else "")


def sharer_of(scope: Scope) -> str:
    """Return whose share of the work in a frontend a request uses: its key's, or its address's.

    Those behind the key of a gateway have shares of their own.
    """
    fairness_id = caller_of(scope).fairness_id
    return f"{owner_of(scope)} {fairness_id}" if fairness_id else owner_of(scope)


class KeyRing:
    """The keys that are good at the moment; replaced as a whole."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self.keys = tuple(keys)


def access_to(template: str) -> Access:
    """Return who may ask a route."""
    return ROUTE_ACCESS.get(template, Access.OPERATOR)


def _is_open(scope: Scope) -> bool:
    """Whether a request needs no key: it is answered at once, whatever else its key asks for."""
    return access_to(scope[ROUTE_KEY]) is Access.OPEN and scope["method"] == "GET"


_IMAGE_ROUTES = frozenset(
    (
        *("/v1/chat/completions", "/v1/chat/completions/render", "/v1/responses"),
        *("/v1/messages", "/v1/messages/count_tokens"),
    )
)
MAX_UPLOAD_BYTES = MAX_FILE_BYTES + 65_536
"""Largest form with a file in it."""


def is_upload(scope: Scope) -> bool:
    """Whether a request's body is a file that is written to disk as it arrives."""
    return (scope["method"], scope["path"]) == ("POST", "/v1/files")


_AMBIGUOUS_LENGTH = "ambiguous_length"


class Gate:
    """Refuses what may not be asked, too large heads (431) and bodies (413), and of a key what is
    too much at once (429)."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServeConfig,
        keys: KeyRing,
        table: ConnectionTable,
        *,
        max_image_bytes: int,
    ) -> None:
        """`max_image_bytes`: bodies of the routes that take images may be larger by so much."""
        self._app = app
        self._table = table
        self._keys = keys if config.api_key_file else None
        self._checks_origin = config.is_loopback and self._keys is None
        names = [config.host, *config.allowed_hosts.split(",")]
        self._hosts = {name.strip().lower() for name in names} - {""}
        self._origins = config.origins
        self._max_header_bytes = config.max_header_bytes
        self._max_body_bytes = config.max_body_bytes
        self._max_image_bytes = max_image_bytes
        self._rejects = table.rejects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it; a body that grows too large ends in `receive`."""
        num_bytes, most = 0, self._most_bytes(scope)

        async def limited_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > most:
                    self._rejects["request_too_large"] += 1
                    raise _too_large(most)
            return message

        with ExitStack() as counted:
            try:
                self._check(scope)
                if (caller := caller_of(scope)).name and not _is_open(scope):
                    WHOSE.set(f"key {caller.name}")
                    client = scope.get("client") or ("",)
                    counted.enter_context(self._table.request(f"key {caller.name}", client[0]))
            except (InvalidRequest, RequestFailed) as refusal:
                self._rejects[refusal.code] += 1
                response = error_response(refusal, scope)
                if refusal.code == _AMBIGUOUS_LENGTH:
                    response.headers["connection"] = "close"
                await response(scope, receive, send)
                return
            await self._app(scope, limited_receive, send)

    def _check(self, scope: Scope) -> None:
        """Note whose request it is. Raises InvalidRequest."""
        if self._checks_origin:
            host = _only(_values(scope, b"host"))
            self._check_host(host)
            self._check_origin(scope, host)
        scope[CALLER_KEY] = self._caller(scope)
        if _CONTROL_CHARACTERS.search(scope["path"]):
            raise InvalidRequest("a path must not have control characters", code="invalid_path")
        self._check_head(scope)

    def _caller(self, scope: Scope) -> Caller:
        key = None if self._keys is None else self._key(scope, self._keys)
        fairness_id = _fairness_id(scope, is_gateway=key is not None and key.is_gateway)
        if self._keys is None:
            return KEYLESS
        if key is None:
            return _PROBE
        return Caller(key.name, key.is_admin, fairness_id, key.quota, key.is_gateway)

    @staticmethod
    def _key(scope: Scope, ring: KeyRing) -> ApiKey | None:
        """Return the key of a request; None: it has none and needs none. Raises InvalidRequest."""
        access = access_to(scope[ROUTE_KEY])
        given = _key_of(scope)
        key = find_key(ring.keys, given) if given else None
        if _is_open(scope):
            return key
        if key is None:
            raise InvalidRequest(
                "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
                code="invalid_api_key",
                status=401,
            )
        if access is Access.OPERATOR and not key.is_admin:
            raise InvalidRequest(
                "this path needs the key of an operator", code="admin_key_required", status=403
            )
        return key

    def _check_host(self, host: bytes) -> None:
        if not names_machine(host, self._hosts):
            raise InvalidRequest(
                "the Host header must name this machine; --allowed-hosts adds names",
                code="invalid_host",
                status=421,
            )

    def _check_origin(self, scope: Scope, host: bytes) -> None:
        """Refuse what a browser sends for a page of another origin."""
        origins = _values(scope, b"origin")
        if len(origins) == 1:
            origin = origins[0].decode("latin-1")
            if origin in self._origins:
                return
            is_foreign = origin.partition("://")[2].lower() != host.decode("latin-1").lower()
        else:
            is_foreign = bool(origins)
        site = _values(scope, b"sec-fetch-site")
        if is_foreign or any(value not in (b"same-origin", b"none") for value in site):
            raise InvalidRequest(
                "web pages of other origins may not use this server; --allowed-origins names"
                " those that may",
                code="foreign_origin",
                status=403,
            )

    def _check_head(self, scope: Scope) -> None:
        headers = scope["headers"]
        num_bytes = len(scope["raw_path"]) + len(scope["query_string"])
        num_bytes += sum(len(name) + len(value) + 4 for name, value in headers)
        if num_bytes > self._max_header_bytes:
            raise InvalidRequest(
                f"the head of a request must be at most {self._max_header_bytes} bytes,"
                f" got {num_bytes}",
                code="headers_too_large",
                status=431,
            )
        names = {name for name, _ in headers}
        if {b"content-length", b"transfer-encoding"} <= names:
            # RFC 9112, 6.1: two servers may see different ends, and so different next requests.
            raise InvalidRequest(
                "a request must not have both Content-Length and Transfer-Encoding",
                code=_AMBIGUOUS_LENGTH,
            )
        for name, value in headers:
            if name == b"content-length" and value.isdigit():
                if int(value[:20]) > (most := self._most_bytes(scope)):
                    raise _too_large(most)
            elif name == b"content-encoding" and value.lower() != b"identity":
                raise InvalidRequest(
                    "the request body must not be compressed",
                    code="unsupported_encoding",
                    status=415,
                )

    def _most_bytes(self, scope: Scope) -> int:
        """Return how large the body may be; files have a limit of their own."""
        if is_upload(scope):
            return MAX_UPLOAD_BYTES
        extra = self._max_image_bytes if scope[ROUTE_KEY] in _IMAGE_ROUTES else 0
        return self._max_body_bytes + extra


def _too_large(most: int) -> InvalidRequest:
    return InvalidRequest(
        f"the request body must be at most {most} bytes", code="request_too_large", status=413
    )


class CrossOrigin:
    """Tells browsers which origins' pages may read answers (CORS): those of --allowed-origins.

    Browsers ask first, without a key (a preflight), so this stands before the gate. It admits
    no request: what a page then sends needs a key like any other.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig) -> None:
        self._app = app
        self._origins = config.origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a preflight, add headers to other answers."""
        origin = _only(_values(scope, b"origin"))
        is_allowed = "*" in self._origins or origin.decode("latin-1") in self._origins
        headers = [(b"vary", b"Origin")]
        if origin and is_allowed:
            headers += [
                (b"access-control-allow-origin", origin),
                (b"access-control-expose-headers", b"x-request-id, retry-after"),
            ]
            if scope["method"] == "OPTIONS" and _values(scope, b"access-control-request-method"):
                await self._answer_preflight(scope, headers, send)
                return

        async def adding_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        await self._app(scope, receive, adding_send)

    @staticmethod
    async def _answer_preflight(
        scope: Scope, headers: list[tuple[bytes, bytes]], send: Send
    ) -> None:
        headers += [
            (b"access-control-allow-methods", b"GET, HEAD, POST, DELETE"),
            (b"access-control-max-age", b"600"),
        ]
        if wanted := _only(_values(scope, b"access-control-request-headers")):
            headers.append((b"access-control-allow-headers", wanted))
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def _key_of(scope: Scope) -> bytes:
    """Return the key that a request brings; what Anthropic's clients send counts alone."""
    if authorization := _values(scope, b"authorization"):
        return bearer_key(_only(authorization))
    return _only(_values(scope, b"x-api-key"))


def _fairness_id(scope: Scope, *, is_gateway: bool) -> str:
    """Return whose request a gateway says that it is; nothing if it does not. Raises
    InvalidRequest."""
    values = _values(scope, FAIRNESS_HEADER.encode())
    if not values:
        return ""
    if not is_gateway:
        raise InvalidRequest(
            f"the header {FAIRNESS_HEADER} needs the key of a gateway: one that the server's key"
            " file marks so",
            param=FAIRNESS_HEADER,
            code="gateway_key_required",
        )
    if len(values) != 1 or _FAIRNESS_ID.fullmatch(values[0]) is None:
        raise InvalidRequest(
            f"the header {FAIRNESS_HEADER} must be given once, as 1 to {MAX_FAIRNESS_ID_CHARS}"
            f" printable ASCII characters without blanks, got {len(values)} of"
            f" {len(values[0])} characters",
            param=FAIRNESS_HEADER,
        )
    return values[0].decode("ascii")


def _only(values: list[bytes]) -> bytes:
    """Return the one value; nothing if there is not exactly one."""
    return values[0] if len(values) == 1 else b""


# ----------------------------------------------------------------------
# The outermost part of the application: names each request, counts and logs each response.
#
# The id is the client's own `X-Request-Id` if that is harmless, otherwise a fresh one; it is on
# every log line of the request and in the response's header. The log has the route's template,
# never the path, which could hold anything; of a refusal the code and the field that it is about.


ARRIVAL_KEY = "lightserve.arrival_s"
"""Key in the ASGI scope: monotonic time at which the headers were there."""

QUIET_ROUTES = frozenset({"/livez", "/readyz", "/health", "/metrics"})
"""Asked every few seconds by machines: logged at debug level only."""

_HEADER = b"x-request-id"
_HARMLESS_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class RequestLog:
    """Stamps each request with what others ask of it, and notes how it was answered."""

    def __init__(self, app: ASGIApp, observation: Observation, routes: Sequence[Route]) -> None:
        """`routes`: those of the application, in its order."""
        self._app = app
        self._observation = observation
        self._routes = tuple(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, HEAD as GET, then count and log."""
        start_s, method, outer_scope = time.monotonic(), scope["method"], scope
        if method == "HEAD":  # the connection leaves the body out
            scope = {**scope, "method": "GET"}
        scope[ARRIVAL_KEY] = start_s
        scope[ROUTE_KEY] = self._template_of(scope)
        current = _choose_id(scope)
        token = request_id.set(current)
        status = 0

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                outer_scope[CALLER_KEY] = caller_of(scope)  # of HEAD, the connection has another
                headers = [*message.get("headers", ()), (_HEADER, current.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        finally:
            self._note(method, scope, status, time.monotonic() - start_s)
            request_id.reset(token)

    def _template_of(self, scope: Scope) -> str:
        for route in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                return route.path
        return OTHER

    def _note(self, method: str, scope: Scope, status: int, duration_s: float) -> None:
        method = method if method in _METHODS else OTHER
        route = scope[ROUTE_KEY]
        self._observation.on_response(method, route, status)
        duration_ms = round(duration_s * 1e3, 1)
        level = logging.DEBUG if route in QUIET_ROUTES else logging.INFO
        fields = {"method": method, "route": route, "status": status, "duration_ms": duration_ms}
        why = _why(scope)
        log.log(
            *(level, "%s in %.1f ms", " ".join([method, route, str(status), *why.values()])),
            duration_ms,
            extra={"fields": fields | why},
        )


def _why(scope: Scope) -> dict[str, str]:
    """Return code and field of the error that answers a request; nothing without one.

    The field is the API's own, never one that the client made up: of `metadata.name` that is
    `metadata`, of an unknown one nothing.
    """
    error = scope.get(REFUSAL_KEY)
    if error is None:
        return {}
    param = getattr(error, "param", None)
    if param is None or error.code == UNKNOWN_PARAMETER:
        return {"code": error.code}
    return {"code": error.code, "param": re.split(r"[.\[]", param, maxsplit=1)[0]}


def _choose_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == _HEADER and _HARMLESS_ID.fullmatch(value):
            return bytes(value).decode("ascii")
    return uuid.uuid4().hex
