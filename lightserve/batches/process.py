"""The batches process: a frontend to the router, whose clients are the lines in the store.

A line takes the way of an HTTP request without the HTTP: the same routes read its body, and their
answer is its result.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Scope

from lightserve.batches.access import listen, location_of
from lightserve.batches.forecast import Costs
from lightserve.batches.lines import body_of
from lightserve.batches.records import LeasedLine
from lightserve.batches.runner import OWNER, Answer, Room, Runner
from lightserve.config.fields import is_postgres
from lightserve.frontend.errors import REFUSAL_KEY, ErrorDetail, RequestFailed, error_body
from lightserve.frontend.middleware import ARRIVAL_KEY, CALLER_KEY, Caller, KeyRing
from lightserve.frontend.openai.chat import chat_router
from lightserve.frontend.openai.completions import completions_router
from lightserve.frontend.openai.embeddings import embeddings_router
from lightserve.frontend.openai.responses import responses_router
from lightserve.frontend.process import Control, Frontend, make_routes
from lightserve.frontend.request_options import MAX_SECONDS
from lightserve.frontend.router_client import RouterClient
from lightserve.frontend.service import Service, load_service
from lightserve.logs import request_id
from lightserve.messages.frontend_router import ErrorCode
from lightserve.messages.supervision import ChildSpec
from lightserve.metrics import catalogue
from lightserve.structured import yield_to_others

log = logging.getLogger(__name__)

_NICENESS = 5
"""A quarter of a core beside a worker's threads that want all of it: enough to read lines."""


def run(spec: ChildSpec, connect_control: Callable[[], Control]) -> int:
    """Work off batches until told to drain; return the exit code.

    Raises:
        ModelLoadError, ConfigError: the model's files cannot be used.
    """
    yield_to_others(_NICENESS)
    return asyncio.run(_serve(spec, connect_control))


async def _serve(spec: ChildSpec, connect_control: Callable[[], Control]) -> int:
    router = RouterClient(be_interval_s=spec.config.be_stream_interval_ms / 1e3)
    service = load_service(spec.config, router)
    gc.collect()
    gc.freeze()
    control = connect_control()
    location = location_of(spec.config)
    store = service.observation.open_store(spec.config)
    runner = Runner(
        store,
        InnerRoutes(service, room := Room()),
        max_in_flight=spec.config.batch_max_in_flight,
        quota=spec.config.batch_max_stored_bytes,
        room=room,
        owner=spec.batch_owner if is_postgres(location) else OWNER,
    )
    loop = asyncio.get_running_loop()
    listening = listen(location, lambda: loop.call_soon_threadsafe(runner.wake))
    service.observation.before_snapshot = lambda: _note_counts(service, runner)
    frontend = Frontend(spec, service, control, runner, KeyRing([]))
    try:
        await frontend.serve(runner.serve())
    finally:
        listening.close()
        store.close()
        service.close()
        control.close()
    return 0


class InnerRoutes:
    """Answers lines by the routes of a frontend."""

    def __init__(self, service: Service, room: Room) -> None:
        """`room`: the runner's."""
        self._service = service
        self._room = room
        self._app: ASGIApp = make_routes(
            service,
            [
                completions_router(service),
                chat_router(service),
                embeddings_router(service),
                responses_router(service, is_for_lines=True),
            ],
        )

    @property
    def is_ready(self) -> bool:
        """See `runner.Engine`."""
        return self._service.router.is_ready and not self.is_ending

    @property
    def is_ending(self) -> bool:
        """See `runner.Engine`."""
        return self._service.in_flight.is_draining

    @property
    def costs(self) -> Costs:
        """See `runner.Engine`."""
        status = self._service.router.status
        if status is None:
            return Costs(0.0, 0.0)
        return Costs(status.prompt_token_s, status.output_token_s)

    async def answer(self, line: LeasedLine, *, due_in_s: float) -> Answer:
        """See `runner.Engine`."""
        token = request_id.set(line.id)
        try:
            body = body_of(line.line)
            call = _Call(body, partial(self._room.take, (line.batch, line.number)))
            scope = _scope(line, len(body), due_in_s)
            await self._app(scope, call.receive, call.send)
        except Exception:
            log.exception("line %s failed", line.id)
            failure = RequestFailed("an internal error occurred", code="internal_error", status=500)
            return Answer(status=500, body=error_body(failure), request_id=line.id)
        finally:
            request_id.reset(token)
        return Answer(
            status=call.status,
            body=bytes(call.answer),
            request_id=line.id,
            retry_after_s=call.retry_after_s,
            is_lost=call.status == 503 and _code_of(call.answer) == ErrorCode.WORKER_LOST,
            is_own_refusal=call.status == 429 and not _is_queue_full(scope),
        )

    def move_batch(self, batch: int, due_in_s: float) -> bool:
        """See `runner.Engine`."""
        return self._service.router.move_batch(batch, due_in_s)


def _scope(line: LeasedLine, num_bytes: int, due_in_s: float) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": line.endpoint,
        "raw_path": line.endpoint.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(num_bytes).encode()),
            (b"x-slo-completion-s", b"%.3f" % min(max(due_in_s, 0.001), MAX_SECONDS)),
        ],
        ARRIVAL_KEY: time.monotonic(),
        CALLER_KEY: Caller(name=line.key_name, is_admin=False, batch=line.batch),
    }


class _Error(msgspec.Struct):
    error: ErrorDetail


def _code_of(answer: bytearray) -> str | None:
    """Return the code of an answer that is an error."""
    return msgspec.json.decode(answer, type=_Error).error.code


def _is_queue_full(scope: Scope) -> bool:
    """Whether a request was refused because the router has too much work."""
    error = scope.get(REFUSAL_KEY)
    return isinstance(error, RequestFailed) and error.is_queue_full


class _Call:
    """A request to the routes: its body at once, its answer as a whole."""

    def __init__(self, body: bytes, take: Callable[[int], Awaitable[None]]) -> None:
        """`take` waits until so many more bytes may be held."""
        self._take = take
        self.status = 0
        self.retry_after_s = 0.0
        self.answer = bytearray()
        self._body: bytes | None = body

    async def receive(self) -> Message:
        """Return the body; after it, wait: this client does not leave."""
        body, self._body = self._body, None
        if body is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        """Take in a part of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = dict(message.get("headers", ()))
            self.retry_after_s = float(headers.get(b"retry-after", b"0"))
        else:
            part = message.get("body", b"")
            await self._take(len(part))
            self.answer += part


def _note_counts(service: Service, runner: Runner) -> None:
    recorder, counts = service.observation.recorder, runner.counts
    for state, count in counts.lines.items():
        recorder.gauge(catalogue.BATCH_LINES, state).value = count
    for status, count in counts.batches.items():
        recorder.gauge(catalogue.BATCHES, status).value = count
    recorder.gauge(catalogue.BATCHES_LATE).value = len(counts.late_batches)
    recorder.gauge(catalogue.BATCH_OLDEST).value = counts.oldest_age_s
    recorder.gauge(catalogue.BATCH_FORECAST_RATIO).value = counts.forecast_ratio
    recorder.counter(catalogue.BATCH_RESULTS_LATE).value = counts.num_late
    recorder.counter(catalogue.BATCH_LEASES_LOST).value = counts.num_leases_lost
