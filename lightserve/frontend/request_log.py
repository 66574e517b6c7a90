"""The outermost part of the application: names each request, counts and logs each response.

The id is the client's own `X-Request-Id` if that is harmless, otherwise a fresh one; it is on
every log line of the request and in the response's header. The log has the route's template,
never the path, which could hold anything; of a refusal the code and the field that it is about.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightserve.frontend.access import ROUTE_KEY
from lightserve.frontend.failures import REFUSAL_KEY
from lightserve.frontend.json_body import UNKNOWN_PARAMETER
from lightserve.frontend.observation import Observation
from lightserve.logs import request_id
from lightserve.metrics.families import OTHER

REQUEST_ID_KEY = "lightserve.request_id"
"""Key in the ASGI scope: the request's id."""

QUIET_ROUTES = frozenset({"/livez", "/readyz", "/health", "/metrics"})
"""Asked every few seconds by machines: logged at debug level only."""

_HEADER = b"x-request-id"
_HARMLESS_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

log = logging.getLogger(__name__)


def request_id_of(scope: Scope) -> str:
    """Return the id of a request that came through `RequestLog`."""
    value = scope[REQUEST_ID_KEY]
    assert isinstance(value, str)
    return value


class RequestLog:
    """See the module."""

    def __init__(
        self, app: ASGIApp, observation: Observation, template_of: Callable[[Scope], str]
    ) -> None:
        """`template_of` finds the route that will answer, OTHER if there is none."""
        self._app = app
        self._observation = observation
        self._template_of = template_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, then count and log."""
        start_s = time.monotonic()
        scope[ROUTE_KEY] = self._template_of(scope)
        current = _choose_id(scope)
        scope[REQUEST_ID_KEY] = current
        token = request_id.set(current)
        status = 0

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (_HEADER, current.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        finally:
            self._note(scope, status, time.monotonic() - start_s)
            request_id.reset(token)

    def _note(self, scope: Scope, status: int, duration_s: float) -> None:
        method = scope["method"] if scope["method"] in _METHODS else OTHER
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
