"""The ASGI application: routes, what stands before them, and exceptions that become responses.

    RequestLog ─ (CrossOrigin) ─ AccessGate ─ RequestLimits ─ RequestStamp ─ HeadAsGet ─ routes

All pure ASGI: the base class of starlette's function middleware delays the news of a client that
has left by seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

import lightserve
from lightserve.config import ServeConfig
from lightserve.errors import InvalidRequest
from lightserve.frontend.access import AccessGate, CrossOrigin, KeyRing
from lightserve.frontend.debug import debug_router
from lightserve.frontend.failures import REFUSAL_KEY, ClientGone, RequestFailed, error_response
from lightserve.frontend.json_body import BODY_READER_KEY, BodyReader
from lightserve.frontend.limits import RequestLimits
from lightserve.frontend.native import native_router
from lightserve.frontend.openai.chat import chat_router
from lightserve.frontend.openai.completions import completions_router
from lightserve.frontend.openai.models import models_router
from lightserve.frontend.openapi import describe
from lightserve.frontend.operations import operations_router
from lightserve.frontend.request_log import RequestLog
from lightserve.frontend.responses import ARRIVAL_KEY
from lightserve.frontend.service import Service
from lightserve.frontend.tokens import tokens_router
from lightserve.metrics.families import OTHER

OPENAPI_PATH = "/openapi.json"


class RequestStamp:
    """Notes what a request brings along: when its headers were there, who reads its body."""

    def __init__(self, app: ASGIApp, config: ServeConfig) -> None:
        self._app = app
        self._reader = BodyReader(max_depth=config.max_json_depth)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stamp and pass on."""
        scope[ARRIVAL_KEY] = time.monotonic()
        scope[BODY_READER_KEY] = self._reader
        await self._app(scope, receive, send)


def create_app(service: Service, keys: KeyRing | None = None) -> ASGIApp:
    """Return the application.

    `keys` are those that are good (none: nobody passes where keys are needed).
    """
    config = service.config
    keys = KeyRing([]) if keys is None else keys
    rejects = service.observation.rejects
    routers = _routers(service)
    routes = _routes(service, routers)
    app: ASGIApp = HeadAsGet(routes)
    app = RequestStamp(app, config)
    app = RequestLimits(app, config, rejects)
    app = AccessGate(app, config, keys, rejects)
    if config.origins:
        app = CrossOrigin(app, config)
    return RequestLog(app, service.observation, _template_of([*routers, routes]))


def _routers(service: Service) -> list[APIRouter]:
    return [
        completions_router(service),
        chat_router(service),
        models_router(service),
        native_router(service),
        tokens_router(service),
        operations_router(service),
        debug_router(service),
    ]


def _template_of(routers: Sequence[APIRouter | FastAPI]) -> Callable[[Scope], str]:
    """Return what finds the template of the route that a request will reach."""
    routes = [route for router in routers for route in router.routes if isinstance(route, Route)]

    def find(scope: Scope) -> str:
        for route in routes:
            if route.matches(scope)[0] is not Match.NONE:
                return route.path
        return OTHER

    return find


class HeadAsGet:
    """Answers HEAD as GET; the connection leaves the body out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""
        if scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        asked = {**scope, "method": "GET"}
        try:
            await self._app(asked, receive, send)
        finally:
            if REFUSAL_KEY in asked:
                scope[REFUSAL_KEY] = asked[REFUSAL_KEY]


def _routes(service: Service, routers: Sequence[APIRouter]) -> FastAPI:
    app = FastAPI(
        title="lightserve",
        version=lightserve.__version__,
        openapi_url=OPENAPI_PATH,
        docs_url="/docs" if service.config.enable_docs else None,
        redoc_url=None,
        redirect_slashes=False,
    )
    for router in routers:
        app.include_router(router)
    describe(app, needs_keys=bool(service.config.api_key_file))
    app.add_exception_handler(InvalidRequest, _on_failure)
    app.add_exception_handler(RequestFailed, _on_failure)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)
    return app


async def _on_failure(request: Request, error: Exception) -> Response:
    assert isinstance(error, InvalidRequest | RequestFailed)
    return error_response(error, request.scope)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answer for the framework: paths and methods that do not exist."""
    assert isinstance(error, HTTPException)
    code, message = "invalid_request", "the request cannot be handled"
    if error.status_code == 404:
        code, message = "not_found", "there is nothing at this path"
    elif error.status_code == 405:
        code, message = "method_not_allowed", f"this path does not take {request.method}"
    failure = InvalidRequest(message, code=code, status=error.status_code)
    response = error_response(failure, request.scope)
    response.headers.update(error.headers or {})
    return response


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it


async def _on_bug(request: Request, _error: Exception) -> Response:
    """Answer in general terms; the server logs the traceback by itself."""
    failure = RequestFailed("an internal error occurred", code="internal_error", status=500)
    return error_response(failure, request.scope)
