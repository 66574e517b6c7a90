"""The ASGI application: routes, and the one place where exceptions become responses."""

from __future__ import annotations

import time

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from lightserve.errors import InvalidRequest
from lightserve.frontend.failures import RETRY_AFTER_S, ClientGone, RequestFailed, error_body
from lightserve.frontend.native import native_router
from lightserve.frontend.openai.chat import chat_router
from lightserve.frontend.openai.completions import completions_router
from lightserve.frontend.openai.models import models_router
from lightserve.frontend.operations import operations_router
from lightserve.frontend.responses import ARRIVAL_KEY
from lightserve.frontend.service import Service


class ArrivalStamp:
    """Notes when a request's headers were there. Pure ASGI, as every middleware here must be."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stamp and pass on."""
        scope[ARRIVAL_KEY] = time.monotonic()
        await self._app(scope, receive, send)


def create_app(service: Service) -> ASGIApp:
    """Return the application."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    for router in (
        completions_router(service),
        chat_router(service),
        models_router(service),
        native_router(service),
        operations_router(service),
    ):
        app.include_router(router)
    app.add_exception_handler(InvalidRequest, _on_failure)
    app.add_exception_handler(RequestFailed, _on_failure)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)
    return ArrivalStamp(app)


async def _on_failure(_request: Request, error: Exception) -> Response:
    assert isinstance(error, InvalidRequest | RequestFailed)
    headers = {"retry-after": str(RETRY_AFTER_S)} if error.status in (429, 503) else {}
    if error.status == 413:
        headers["connection"] = "close"  # the rest of the body is not going to be read
    return _error_response(error, headers)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answer for the framework: paths and methods that do not exist."""
    assert isinstance(error, HTTPException)
    code, message = "invalid_request", "the request cannot be handled"
    if error.status_code == 404:
        code, message = "not_found", "there is nothing at this path"
    elif error.status_code == 405:
        code, message = "method_not_allowed", f"this path does not take {request.method}"
    failure = InvalidRequest(message, code=code, status=error.status_code)
    return _error_response(failure, dict(error.headers or {}))


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it


async def _on_bug(_request: Request, _error: Exception) -> Response:
    """Answer in general terms; the server logs the traceback by itself."""
    failure = RequestFailed("an internal error occurred", code="internal_error", status=500)
    return _error_response(failure, {})


def _error_response(error: InvalidRequest | RequestFailed, headers: dict[str, str]) -> Response:
    return Response(
        error_body(error),
        status_code=error.status,
        headers=headers,
        media_type="application/json",
    )
