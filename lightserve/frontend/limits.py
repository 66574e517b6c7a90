"""Limits on what a request may be, before a route sees it. Pure ASGI."""

from __future__ import annotations

from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightserve.config import ServeConfig
from lightserve.errors import InvalidRequest
from lightserve.frontend.failures import error_response

_AMBIGUOUS_LENGTH = "ambiguous_length"


class RequestLimits:
    """Refuses too large heads (431) and bodies (413), counting what arrives."""

    def __init__(self, app: ASGIApp, config: ServeConfig, rejects: Counter[str]) -> None:
        self._app = app
        self._max_header_bytes = config.max_header_bytes
        self._max_body_bytes = config.max_body_bytes
        self._rejects = rejects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it; a body that grows too large ends in `receive`."""
        num_bytes = 0

        async def limited_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_body_bytes:
                    self._rejects["request_too_large"] += 1
                    raise self._too_large()
            return message

        try:
            self._check_head(scope)
        except InvalidRequest as refusal:
            self._rejects[refusal.code] += 1
            response = error_response(refusal, scope)
            if refusal.code == _AMBIGUOUS_LENGTH:
                response.headers["connection"] = "close"
            await response(scope, receive, send)
            return
        await self._app(scope, limited_receive, send)

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
                if int(value[:20]) > self._max_body_bytes:
                    raise self._too_large()
            elif name == b"content-encoding" and value.lower() != b"identity":
                raise InvalidRequest(
                    "the request body must not be compressed",
                    code="unsupported_encoding",
                    status=415,
                )

    def _too_large(self) -> InvalidRequest:
        return InvalidRequest(
            f"the request body must be at most {self._max_body_bytes} bytes",
            code="request_too_large",
            status=413,
        )
