"""Errors as clients see them: OpenAI's error shape, and Anthropic's on one route.

Two exceptions end a request: `InvalidRequest` (the client must change it) and `RequestFailed`
(the server cannot serve it now). Both become `{"error": {message, type, param, code}}`, or what
Anthropic's clients read on `/v1/messages`, as a response with a status, or as an SSE event once a
stream has begun. Anything else is a bug: it is
logged with its traceback, and the client learns only that it happened.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from lightserve.errors import InvalidRequest, LightserveError
from lightserve.messages.frontend_router import NO_CLIENT, Client, ErrorCode

RETRY_AFTER_S = 1

REFUSAL_KEY = "lightserve.refusal"
"""Key in the ASGI scope: the error that a request is answered with, if it is, for the log."""


class RequestFailed(LightserveError):
    """A valid request that is not answered, or not to its end.

    `status` is the HTTP status; `retry_after_s` is when trying again makes sense (429 and 503).
    """

    is_queue_full = False
    """With 429: whether no more is taken now, whatever a request says."""

    def __init__(
        self, message: str, *, code: str, status: int, retry_after_s: float = RETRY_AFTER_S
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.message = message
        self.code = code
        self.status = status


class ClientGone(LightserveError):
    """The client has hung up: no answer would be read."""


def not_ready() -> RequestFailed:
    """Return the refusal while router or workers are starting or being replaced."""
    return RequestFailed("the server is not ready; try again", code="not_ready", status=503)


def draining() -> RequestFailed:
    """Return the refusal of new requests, and the end of old ones, when shutting down."""
    return RequestFailed("the server is shutting down", code="shutting_down", status=503)


_MANY_WAIT = "too many requests are waiting; try again"


def overloaded(message: str = _MANY_WAIT, *, retry_after_s: float = RETRY_AFTER_S) -> RequestFailed:
    """Return the refusal when a queue is full."""
    return RequestFailed(
        message,
        code="overloaded",
        status=429,
        retry_after_s=retry_after_s,
    )


def queue_full(message: str = _MANY_WAIT, *, retry_after_s: float = RETRY_AFTER_S) -> RequestFailed:
    """Return the same where it says nothing of the request: the next one would be refused, too."""
    failure = overloaded(message, retry_after_s=retry_after_s)
    failure.is_queue_full = True
    return failure


def _over_quota(quota: str, retry_after_s: float) -> RequestFailed:
    return RequestFailed(
        f"this API key may have {quota} per minute, which are used up; try again in"
        f" {math.ceil(retry_after_s)} s",
        code="rate_limit_exceeded",
        status=429,
        retry_after_s=retry_after_s,
    )


def router_lost() -> RequestFailed:
    """Return the end of all requests in flight when the router is gone."""
    return RequestFailed(
        "the server lost this request while restarting a part of itself; try again",
        code="router_lost",
        status=503,
    )


TIMEOUT = "timeout"
"""Code of a request that took longer than its own `timeout`."""


def timed_out(timeout_s: float) -> RequestFailed:
    """Return the end of a request that is not done after the time that it gave itself."""
    return RequestFailed(
        f"the request was not done after its timeout of {timeout_s:g} seconds",
        code=TIMEOUT,
        status=408,
    )


def from_router(
    error: ErrorCode,
    *,
    retry_after_s: float = 0.0,
    max_tokens: int = 0,
    client: Client = NO_CLIENT,
) -> InvalidRequest | RequestFailed:
    """Return what a client is told about an error of the router; numbers as in `RequestDelta`."""
    match error:
        case ErrorCode.QUEUE_FULL:
            return queue_full(retry_after_s=retry_after_s)
        case ErrorCode.REQUEST_QUOTA:
            return _over_quota(f"{client.requests_per_minute} requests", retry_after_s)
        case ErrorCode.TOKEN_QUOTA:
            return _over_quota(f"{client.tokens_per_minute} tokens", retry_after_s)
        case ErrorCode.WORKER_LOST:
            return RequestFailed(
                "the server lost this request while restarting its workers; try again",
                code=error.value,
                status=503,
            )
        case ErrorCode.NON_FINITE_LOGITS:
            return RequestFailed(
                "the model computed values that are not finite for this request",
                code=error.value,
                status=500,
            )
        case ErrorCode.CONSTRAINT_FAILED:
            return InvalidRequest(
                "the schema, pattern or grammar became too complex in the middle of the output",
                code=error.value,
            )
        case ErrorCode.INVALID:
            return RequestFailed(
                "the server could not process this request", code="internal_error", status=500
            )
        case ErrorCode.TOO_LARGE:
            return InvalidRequest(
                f"This model's maximum context length is {max_tokens} tokens, for prompt and"
                " output together, on the workers that it has now; this request needs more",
                param="max_tokens",
                code="context_length_exceeded",
            )


def too_large_to_submit(num_bytes: int, max_bytes: int) -> InvalidRequest:
    """Return the refusal of a request that does not fit into a message to the router."""
    return InvalidRequest(
        "prompt, constraint and sampling parameters together must be at most"
        f" {max_bytes} bytes as the server holds them, got {num_bytes}",
        code="request_too_large",
        status=413,
    )


class ErrorDetail(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


def error_body(error: InvalidRequest | RequestFailed) -> bytes:
    """Return the JSON body of an error."""
    detail = ErrorDetail(error.message, _error_type(error.status), _param_of(error), error.code)
    return msgspec.json.encode({"error": detail})


def _param_of(error: InvalidRequest | RequestFailed) -> str | None:
    return error.param if isinstance(error, InvalidRequest) else None


ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_body(error: InvalidRequest | RequestFailed) -> bytes:
    """Return the JSON body of an error on Anthropic's routes."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    details = {"error_code": error.code, "param": _param_of(error)}
    detail = {"type": kind, "message": error.message, "details": details}
    return msgspec.json.encode({"type": "error", "error": detail})


def _is_anthropic(path: str) -> bool:
    return path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")


OWN_NAMES: Mapping[str, str] = {}
"""Names of fields on a route that uses the API's own."""


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Have errors about fields, and what is in them, call them what a route does, by `names`."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is None:
            raise
        field = re.split(r"[.\[]", error.param, maxsplit=1)[0]
        if (name := names.get(error.param) or names.get(field)) is None:
            raise
        message = error.message.replace(error.param, name)
        raise InvalidRequest(message, param=name, code=error.code, status=error.status) from None


def error_response(error: InvalidRequest | RequestFailed, scope: Scope) -> Response:
    """Return the response that an error is, while it can still be one; notes it in the scope."""
    scope[REFUSAL_KEY] = error
    headers = {}
    if error.status in (429, 503) and error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.code == TIMEOUT:
        headers["x-should-retry"] = "false"  # OpenAI's clients would, and double the time
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(
        anthropic_body(error) if _is_anthropic(scope["path"]) else error_body(error),
        status_code=error.status,
        headers=headers,
        media_type="application/json",
    )


def _error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
