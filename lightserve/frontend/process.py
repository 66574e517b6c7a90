"""The frontend process: uvicorn, the control link to the supervisor, the link to the router.

Four tasks share the event loop: the HTTP server; `_follow_supervisor`, which learns of routers
and of the end; `_beat`, which shows that the loop turns; and, while there is a router,
`_follow_router`. Whichever of them fails takes the process down: the supervisor starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import secrets
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

import lightserve
from lightserve.channels import AsyncLink, connect_async_link
from lightserve.errors import ChannelFull, InvalidRequest
from lightserve.frontend.admin import (
    LoadReport,
    debug_router,
    operations_router,
    render_router,
    tokens_router,
)
from lightserve.frontend.anthropic.messages import messages_router
from lightserve.frontend.connections import ConnectionTable, connection_table
from lightserve.frontend.dashboard import dashboard_router, picture_of, timeline_router
from lightserve.frontend.errors import ClientGone, RequestFailed, draining, error_response
from lightserve.frontend.http_server import HttpServer
from lightserve.frontend.middleware import CrossOrigin, Gate, KeyRing, RequestLog
from lightserve.frontend.openai.batches import batches_router
from lightserve.frontend.openai.chat import chat_router
from lightserve.frontend.openai.completions import completions_router, models_router
from lightserve.frontend.openai.embeddings import embeddings_router
from lightserve.frontend.openai.files import files_router
from lightserve.frontend.openai.rerank import rerank_router
from lightserve.frontend.openai.responses import responses_router, stored_responses_router
from lightserve.frontend.openapi import describe
from lightserve.frontend.router_client import RouterClient, RouterLink
from lightserve.frontend.service import Service, load_service
from lightserve.frontend.tgi import tgi_router
from lightserve.http_access import server_context
from lightserve.messages.common import PROTOCOL_VERSION
from lightserve.messages.frontend_router import FrontendHello, FrontendMessage, RouterMessage
from lightserve.messages.supervision import (
    HEARTBEAT_INTERVAL_S,
    LATE_TIMEOUT_S,
    ChildMessage,
    ChildReady,
    ChildSpec,
    Drain,
    FrontendServing,
    Heartbeat,
    MetricsSnapshot,
    MetricsText,
    NewApiKeys,
    Picture,
    PictureRequest,
    RouterDown,
    RouterUp,
    SupervisorMessage,
)
from lightserve.metrics.turns import TurnClock, TurnSelector
from lightserve.types import FrontendId

log = logging.getLogger(__name__)

# ----------------------------------------------------------------------
# The ASGI application: routes, what stands before them, and exceptions that become responses.
#
#     RequestLog ─ (CrossOrigin) ─ Gate ─ LoadReport ─ routes
#
# All pure ASGI: the base class of starlette's function middleware delays the news of a client that
# has left by seconds.


OPENAPI_PATH = "/openapi.json"


def create_app(
    service: Service, keys: KeyRing | None = None, table: ConnectionTable | None = None
) -> ASGIApp:
    """Return the application.

    `keys` are those that are good (none: no request passes where keys are needed), `table` is that
    of its connections (none: it gets an empty one).

    Raises:
        ConfigError: there is no table, and none can be made.
    """
    config = service.config
    keys = KeyRing([]) if keys is None else keys
    table = connection_table(config, service.observation.rejects) if table is None else table
    routers = _routers(service)
    application = make_routes(service, routers)
    app: ASGIApp = Gate(
        LoadReport(application, service),
        config,
        keys,
        table,
        max_image_bytes=service.pictures.max_bytes,
    )
    if config.origins:
        app = CrossOrigin(app, config)
    routes = [*itertools.chain.from_iterable(r.routes for r in routers), *application.routes]
    return RequestLog(app, service.observation, [r for r in routes if isinstance(r, Route)])


def _routers(service: Service) -> list[APIRouter]:
    return [
        completions_router(service),
        chat_router(service),
        render_router(service),
        embeddings_router(service),
        rerank_router(service),
        responses_router(service),
        stored_responses_router(service),
        messages_router(service),
        models_router(service),
        files_router(service),
        batches_router(service),
        tgi_router(service),
        tokens_router(service),
        operations_router(service),
        debug_router(service),
        dashboard_router(service),
        timeline_router(service),
    ]


def make_routes(service: Service, routers: Sequence[APIRouter]) -> FastAPI:
    """Return an application of these routes, with what their exceptions become."""
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
    return Response(status_code=400)  # it is not read


async def _on_bug(request: Request, _error: Exception) -> Response:
    """Answer in general terms; the server logs the traceback by itself."""
    failure = RequestFailed("an internal error occurred", code="internal_error", status=500)
    return error_response(failure, request.scope)


Control = AsyncLink[ChildMessage, SupervisorMessage]

FLUSH_S = 0.5
"""Seconds for responses to write their last bytes after the time to drain; with `CLOSE_S` of
`http_server` under the supervisor's grace of 2 s."""
SWITCH_INTERVAL_S = 0.0005
"""How long a thread that parses may keep the event loop from the interpreter; Python's 5 ms would
come before every system call of a stream."""


def run(spec: ChildSpec, connect_control: Callable[[], Control]) -> int:
    """Serve HTTP until told to drain; return the exit code.

    Raises:
        ModelLoadError, ConfigError: the model's files cannot be used.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    selector = TurnSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        return runner.run(_serve(spec, connect_control, selector))


async def _serve(
    spec: ChildSpec, connect_control: Callable[[], Control], selector: TurnSelector
) -> int:
    router = RouterClient(be_interval_s=spec.config.be_stream_interval_ms / 1e3)
    service = load_service(spec.config, router, store_problem=spec.store_problem)
    selector.clock = TurnClock(service.observation.recorder, f"{spec.role}-{spec.index}")
    keys = KeyRing(spec.api_keys)
    table = connection_table(spec.config, service.observation.rejects)
    tls = None
    if spec.config.ssl_certfile:
        tls = server_context(spec.config.ssl_certfile, spec.config.ssl_keyfile)
    control = connect_control()
    service.observation.attach(control.send)
    with socket.socket(fileno=spec.listen_fd) as listener:
        server = HttpServer(create_app(service, keys, table), table, tls)
        gc.collect()
        gc.freeze()  # what is there stays: no collection need walk it in the middle of a step
        frontend = Frontend(spec, service, control, server, keys)
        try:
            await frontend.serve(server.serve(sockets=[listener]))
        finally:
            service.close()
            control.close()
    return 0


class Server(Protocol):
    """The part of a process that takes requests from the outside."""

    listening: asyncio.Event
    """Set once it does."""
    should_exit: bool
    """Set to end it."""

    async def stop_listening(self) -> None:
        """Take no new connections; return when requests on those just taken are answered."""


class Frontend:
    """The part of the process beside HTTP, or beside batches."""

    def __init__(
        self, spec: ChildSpec, service: Service, control: Control, server: Server, keys: KeyRing
    ) -> None:
        self._spec = spec
        self._service = service
        self._control = control
        self._server = server
        self._keys = keys
        self._router_link: RouterLink | None = None
        self._num_rejected = 0
        """Frames that did not decode, on links to earlier routers."""
        self._num_sessions_lost = 0
        self._is_serving_unsaid = False
        self._router_task: asyncio.Task[None] | None = None
        self._drain_task: asyncio.Task[None] | None = None
        self._picture_task: asyncio.Task[None] | None = None
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(self, server: Coroutine[None, None, None]) -> None:
        """Run the server until drained."""
        serving = asyncio.create_task(server)
        following = asyncio.create_task(self._follow_supervisor())
        beating = asyncio.create_task(self._beat())
        try:
            done, _ = await asyncio.wait(
                {serving, following, beating, self._broken}, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()  # raises what took the task down
        finally:
            await _cancel(following)
            await _cancel(beating)
            await _cancel(self._drain_task)
            await _cancel(self._picture_task)
            await self._leave_router()

    # ------------------------------------------------------------------ supervisor

    async def _follow_supervisor(self) -> None:
        await self._server.listening.wait()
        self._control.send(ChildReady())
        while True:
            message = await self._control.receive()
            if isinstance(message, RouterUp):
                await self._leave_router()
                self._router_task = asyncio.create_task(self._follow_router(message))
                self._router_task.add_done_callback(self._note_failure)
            elif isinstance(message, RouterDown):
                log.warning("the router is gone; %d requests failed", self._service.router.num_live)
                await self._leave_router()
            elif isinstance(message, NewApiKeys):
                self._keys.keys = tuple(message.keys)
            elif isinstance(message, MetricsText):
                self._service.observation.on_text(message)
            elif isinstance(message, PictureRequest):
                if self._picture_task is None or self._picture_task.done():
                    self._picture_task = asyncio.create_task(self._send_picture())
                    self._picture_task.add_done_callback(self._note_failure)
            elif isinstance(message, Drain) and self._drain_task is None:
                self._drain_task = asyncio.create_task(self._drain(message.timeout_s))
                self._drain_task.add_done_callback(self._note_failure)

    async def _beat(self) -> None:
        await self._server.listening.wait()
        while True:
            with contextlib.suppress(ChannelFull):  # the supervisor is stopped, and may go on
                self._say_serving()
                self._control.send(Heartbeat())
                self._control.send(self._snapshot())
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    def _say_serving(self) -> None:
        """Say that requests are taken, if it has not been said; a full queue is tried again."""
        if self._is_serving_unsaid:
            with contextlib.suppress(ChannelFull):
                self._control.send(FrontendServing())
                self._is_serving_unsaid = False

    def _snapshot(self) -> MetricsSnapshot:
        num_rejected = self._control.num_rejected + self._num_rejected
        num_rejected += self._service.router.num_rejected
        if self._router_link is not None:
            num_rejected += self._router_link.num_rejected
        return self._service.observation.snapshot(
            num_in_flight=self._service.in_flight.count,
            num_rejected_frames=num_rejected,
            num_sessions_lost=self._num_sessions_lost,
        )

    async def _send_picture(self) -> None:
        """Tell the supervisor what its dashboard draws besides metrics."""
        if (picture := await picture_of(self._service)) is not None:
            with contextlib.suppress(ChannelFull):
                self._control.send(Picture(text=picture))

    async def _drain(self, timeout_s: float) -> None:
        """Take nothing new, let requests in flight end, then end the process."""
        in_flight = self._service.in_flight
        in_flight.is_draining = True
        log.info("draining, %d requests in flight", in_flight.count)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(in_flight.wait_idle(), timeout_s)
        if in_flight.count > 0:
            log.warning("%d requests did not end in time", in_flight.count)
            in_flight.end_preparing()
            self._service.router.end(draining())
            with contextlib.suppress(TimeoutError):  # readers so slow are cut off
                await asyncio.wait_for(in_flight.wait_idle(), FLUSH_S)
        await self._server.stop_listening()
        self._server.should_exit = True

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        """End the process when a task fails in a way that is not foreseen."""
        if task.cancelled() or self._broken.done():
            return
        if (error := task.exception()) is not None:
            self._broken.set_exception(error)

    # ------------------------------------------------------------------ router

    async def _leave_router(self) -> None:
        await _cancel(self._router_task)
        self._router_task = None

    async def _follow_router(self, router: RouterUp) -> None:
        """Take in what one boot of the router says, until cancelled."""
        link: RouterLink = connect_async_link(
            router.address,
            name=f"frontend-{self._spec.index}",
            send_type=FrontendMessage,
            recv_type=RouterMessage,
        )
        self._router_link = link
        client = self._service.router
        try:
            while True:
                session = secrets.randbits(62)
                hello = FrontendHello(
                    protocol_version=PROTOCOL_VERSION,
                    boot_id=router.boot_id,
                    config_hash=self._spec.config.digest,
                    frontend_id=FrontendId(self._spec.index),
                    incarnation=self._spec.incarnation,
                    session=session,
                )
                # The queue to a router that is stopped may be full: it gets the next one, when
                # this session is found to be lost.
                with contextlib.suppress(ChannelFull):
                    link.send(hello)
                client.attach(link, router.boot_id, session)
                await self._listen(link)
                # A router that dropped this frontend says nothing more; a new hello, which
                # makes it forget the old requests, brings both back together. So it does where
                # messages were lost, or another process had this frontend's name for a while.
                what = "out of step" if client.is_out_of_step else "silent"
                self._num_sessions_lost += 1
                log.error("the router is %s; %d requests failed", what, client.num_live)
                client.detach()
        finally:
            client.detach()
            self._num_rejected += link.num_rejected
            self._router_link = None
            link.close()

    async def _listen(self, link: RouterLink) -> None:
        """Pass messages on until the two ends have lost each other.

        Then none has come for so long that the router cannot be only late, or some did not come.
        """
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(LATE_TIMEOUT_S):
                    message = await link.receive()
                client = self._service.router
                was_ready = client.is_ready
                client.on_message(message)
                if client.is_out_of_step:
                    return
                if client.is_ready and not was_ready:
                    self._is_serving_unsaid = True
                    self._say_serving()


async def _cancel(task: asyncio.Task[None] | None) -> None:
    """Cancel a task and wait for its end."""
    if task is not None and not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
