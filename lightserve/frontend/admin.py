"""Routes besides those that generate: health, load, version, metrics, the KV pool, tokens."""

from __future__ import annotations

import asyncio
import json
import platform
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from msgspec.json import encode
from pydantic import FailFast, Field, WithJsonSchema
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import lightserve
from lightserve.errors import InvalidRequest
from lightserve.frontend.columns import json_list
from lightserve.frontend.errors import error_response, not_ready
from lightserve.frontend.json_body import (
    BODY_BYTES_KEY,
    UNKNOWN_PARAMETER,
    WHOLE_NUMBERS,
    Backlog,
    StrictModel,
    show,
)
from lightserve.frontend.middleware import caller_of
from lightserve.frontend.openai.chat import ChatRequest, encode_chat
from lightserve.frontend.openai.completions import CompletionRequest, encode_prompts
from lightserve.frontend.request_options import check_token_range
from lightserve.frontend.response import new_request_id, prepared_for
from lightserve.frontend.service import Service
from lightserve.messages.common import PROTOCOL_VERSION
from lightserve.messages.frontend_router import KindRuns, KVPool, RouterStatus, unpack_kinds
from lightserve.metrics.recording import ENGINE_ID
from lightserve.tokenization.tokenizer import Spans
from lightserve.types import RequestClass, SlotKind

# ----------------------------------------------------------------------
# Routes for operators: /, /livez, /readyz and /health (what is observed, never constants), /load,
# /metrics and /version.
#
# Live: the event loop turns (it answers), and the router is heard of and makes progress; while
# there is none, the supervisor has the time of a start to bring one. A server that is draining,
# loading or restarting workers is live. Ready: a request sent now would be taken.


MAX_SILENCE_S = 8.0
"""The router says something every second; a pause of a few seconds is latency, not death."""


def not_live_because(service: Service) -> str | None:
    """Return why this server makes no progress, None if it does."""
    router, config = service.router, service.config
    if (disconnected_s := router.disconnected_s) is not None:
        if disconnected_s > config.start_timeout_s:
            return f"no router for {disconnected_s:.1f} s"
        return None
    silent_s = router.silent_s or 0.0
    if silent_s > MAX_SILENCE_S:
        return f"router silent for {silent_s:.1f} s"
    if router.status is not None and router.status.stalled_s > config.step_timeout_s:
        return f"no step finished for {router.status.stalled_s:.1f} s"
    return None


def not_ready_because(service: Service) -> str | None:
    """Return why a request sent now would be refused, None if it would be taken."""
    if service.in_flight.is_draining:
        return "shutting down"
    if service.router.disconnected_s is not None:
        return "no router"
    if not service.router.is_ready:
        return "workers are not ready"
    return not_live_because(service)


def _answer(reason: str | None, details: dict[str, Any] | None = None) -> JSONResponse:
    body = {"status": "ok" if reason is None else "unavailable", "reason": reason}
    return JSONResponse(body | (details or {}), status_code=200 if reason is None else 503)


def _by_class(figures: Mapping[RequestClass, Any]) -> dict[str, dict[str, Any]]:
    """Return the fields of what each class has."""
    return {of.value: msgspec.structs.asdict(each) for of, each in figures.items()}


def current_load(service: Service) -> dict[str, Any]:
    """Return the body of /load, about a second old. Raises RequestFailed without a router."""
    status, config = service.router.status, service.config
    if status is None:
        raise not_ready()
    return {
        "engine_id": ENGINE_ID,
        "model": service.model.names[0],
        "workers_ready": status.workers_ready,
        "num_in_flight": service.in_flight.count,
        "num_used_slots": status.num_used_slots,
        "num_kv_slots": status.num_kv_slots,
        "pace": {"pace_ms": config.pace_ms, "be_stretch": config.be_stretch}
        if config.keeps_pace
        else None,
        "classes": _by_class(status.load),
    }


def operations_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.get("/")
    async def root() -> JSONResponse:
        """Say what this is, and where its description is."""
        docs = {"docs": "/docs"} if service.config.enable_docs else {}
        return JSONResponse(
            {
                "server": "lightserve",
                "version": lightserve.__version__,
                "model": service.model.names[0],
                "api": "OpenAI's (/v1/chat/completions, /v1/completions, /v1/responses,"
                " /v1/embeddings, /v1/models, /v1/files, /v1/batches), Cohere's (/v1/rerank),"
                " Anthropic's (/v1/messages)"
                " and TGI's (/generate, /generate_stream); docs/api.md describes them",
                "openapi": "/openapi.json",
                **docs,
            }
        )

    @router.get("/livez")
    async def livez() -> JSONResponse:
        """Say whether the server makes progress."""
        return _answer(not_live_because(service))

    @router.get("/readyz")
    async def readyz() -> JSONResponse:
        """Say whether the server takes requests."""
        return _answer(not_ready_because(service))

    @router.get("/health")
    async def health(request: Request) -> JSONResponse:
        """Say the same as /readyz; to operators with the router's figures."""
        if not caller_of(request.scope).is_admin:
            return _answer(not_ready_because(service))
        status = service.router.status
        details: dict[str, Any] = {"num_in_flight": service.in_flight.count}
        if status is not None:
            details |= {
                "num_running": sum(load.num_running for load in status.load.values()),
                "num_waiting": sum(load.num_waiting for load in status.load.values()),
                "num_steps": status.num_steps,
                "worker_busy_s": status.worker_busy_s,
                "worker_idle_s": status.worker_idle_s,
            }
        return _answer(not_ready_because(service), details)

    @router.get("/load")
    async def load() -> JSONResponse:
        """Say how much work there is, for load balancers."""
        return JSONResponse(current_load(service))

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return the whole server's metrics, in Prometheus's text format."""
        answer = await service.observation.scrapes.ask()
        return Response(answer.text, headers={"content-type": answer.content_type})

    @router.get("/version")
    async def version() -> JSONResponse:
        """Say what is running, and on what, which is null until the workers have said it."""
        device = service.router.device
        return JSONResponse(
            {
                "version": lightserve.__version__,
                "protocol": PROTOCOL_VERSION,
                "model": service.model.names[0],
                "engine_id": ENGINE_ID,
                "python": platform.python_version(),
                "device": None if device is None else msgspec.to_builtins(device),
            }
        )

    return router


# ----------------------------------------------------------------------
# GET /debug/kv: what every slot of the KV pool is for, for operators and the dashboard.


RUNS_PER_PIECE = 8192
"""Runs that are written at a time, so that other requests have their turn in between."""
KIND_NAMES = tuple(kind.name.lower() for kind in SlotKind)

_Count = Annotated[int, Field(ge=0)]


class KindCounts(StrictModel):
    """Slots of each kind; together all slots."""

    free: _Count
    rt: _Count
    be: _Count
    cached: _Count
    checkpointed: _Count


class ClassSlotsObject(StrictModel):
    """The pool's slots of one class; a slot of both classes counts as real-time."""

    num_requests: _Count
    num_slots: _Count
    num_checkpointed_slots: _Count


class ClassesObject(StrictModel):
    """Every class."""

    rt: ClassSlotsObject
    be: ClassSlotsObject


class KVMapObject(StrictModel):
    """The answer of /debug/kv."""

    num_slots: int = Field(ge=1)
    block_size: int = Field(ge=1)
    counts: KindCounts
    classes: ClassesObject
    num_free_blocks: _Count
    num_shared_blocks: _Count
    mean_run_length: float = Field(ge=0)
    num_host_slots: _Count
    num_used_host_slots: _Count
    num_prefix_host_slots: _Count
    num_used_prefix_host_slots: _Count
    kinds: list[str]
    slots: list[tuple[Annotated[int, Field(ge=0, le=4)], Annotated[int, Field(ge=1)]]] | None


def debug_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.get("/debug/kv")
    async def kv(request: Request) -> StreamingResponse:
        """Say what every slot of the KV pool is for."""
        if (name := next(iter(request.query_params), None)) is not None:
            raise InvalidRequest(
                f"the query parameter {show(name)} is not supported", code=UNKNOWN_PARAMETER
            )
        pool = (await service.router.describe_kv()).pool
        return StreamingResponse(_json(pool), media_type="application/json")

    return router


def _figures(pool: KVPool) -> dict[str, Any]:
    """Return all but `slots`."""
    figures = msgspec.structs.asdict(pool)
    del figures["slots"]
    counts = dict(zip(KIND_NAMES, figures.pop("num_slots_of_kind"), strict=True))
    classes = _by_class(pool.classes)
    return figures | {"counts": counts, "classes": classes, "kinds": KIND_NAMES}


async def _json(pool: KVPool) -> AsyncIterator[bytes]:
    """Write a `KVMapObject` piece by piece: millions of runs are neither held nor waited for."""
    yield msgspec.json.encode(_figures(pool)).removesuffix(b"}") + b',"slots":'
    if pool.slots is None:
        yield b"null}"
        return
    runs = unpack_kinds(pool.slots)
    yield b"["
    for start in range(0, len(runs.kinds), RUNS_PER_PIECE):
        yield (b"," if start else b"") + _pairs(runs, slice(start, start + RUNS_PER_PIECE))
        await asyncio.sleep(0)
    yield b"]}"


def _pairs(runs: KindRuns, part: slice) -> bytes:
    """Return `[kind, length],[kind, length]…` of some runs."""
    pairs = np.column_stack([runs.kinds[part], runs.lengths[part]])
    return msgspec.json.encode(pairs.tolist())[1:-1]


# ----------------------------------------------------------------------
# POST /tokenize (TGI's shape) and /detokenize: the served model's tokeniser, without the model.


_JSON = "application/json"
SPANS_PER_PIECE = 256
"""Written in one turn of the event loop: 1 ms or so."""


class TokenizeRequest(StrictModel):
    """The body: a text, and whether the model's BOS is put in front (as it is unless told)."""

    inputs: str
    add_special_tokens: bool | None = None


_TOKENS_SCHEMA = {
    "title": "Tokens",
    "type": "array",
    "items": {"type": "integer", "minimum": 0},
    "description": "Ids below the size of the vocabulary, at most `max_model_len` of the model.",
}
"""The route checks the ids itself: pydantic would take a multiple of the time for each."""


class DetokenizeRequest(StrictModel):
    """The body: token ids. Those of special tokens have no text."""

    tokens: Annotated[list[int], FailFast(), WHOLE_NUMBERS, WithJsonSchema(_TOKENS_SCHEMA)]


class TokenSpan(StrictModel):
    """A token, and the part of the text that it stands for, in characters."""

    id: int
    text: str
    """A special token's name; the whole character for each token that is part of one."""
    start: int
    stop: int


class DetokenizeResponse(StrictModel):
    """The text."""

    text: str


class SpansResponse(StreamingResponse):
    """The answer of /tokenize. Text and spans are held until its client has read it.

    So what is held for all of them together is bounded.
    """

    def __init__(self, service: Service, text: str, spans: Spans, answers: Backlog) -> None:
        super().__init__(_pieces(service, text, spans), media_type=_JSON)
        self._answers = answers
        self._size = sys.getsizeof(text) + sum(map(sys.getsizeof, spans))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. Raises RequestFailed (429)."""
        with self._answers.admitted(self._size):
            await super().__call__(scope, receive, send)


def tokens_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()
    answers = Backlog()
    tokenizer = service.model.tokenizer

    @router.post("/tokenize")
    async def tokenize(request: Request) -> SpansResponse:
        """Split a text into tokens."""
        body = await service.bodies.read(request, TokenizeRequest)
        spans = await service.encoder.spans(
            body.inputs, param="inputs", add_special_tokens=body.add_special_tokens is not False
        )
        return SpansResponse(service, body.inputs, spans, answers)

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """Join tokens to a text."""
        body = await service.bodies.read(request, DetokenizeRequest)
        limit = service.model.max_model_len
        if len(body.tokens) > limit:
            raise InvalidRequest(
                f"tokens must have at most {limit} entries, this model's context, got"
                f" {len(body.tokens)}",
                param="tokens",
            )

        def decode() -> bytes:
            check_token_range(body.tokens, vocab_size=service.model.vocab_size, param="tokens")
            return msgspec.json.encode({"text": tokenizer.decode(body.tokens)})

        return Response(await service.encoder.run(decode, size=len(body.tokens)), media_type=_JSON)

    return router


async def _pieces(service: Service, text: str, spans: Spans) -> AsyncIterator[bytes]:
    """Write a list of `TokenSpan` piece by piece: other requests have their turn in between."""
    name_of = service.model.tokenizer.name_of
    tokens = (
        {"id": i, "text": text[start:stop] or name_of(i), "start": start, "stop": stop}
        for i, start, stop in zip(*spans, strict=True)
    )
    for piece in json_list(tokens, SPANS_PER_PIECE):
        yield piece
        await service.turns.next()


# ----------------------------------------------------------------------
# The server's load in the head of an answer, for load balancers that ask for it.
#
# Open Request Cost Aggregation (ORCA): a request with `endpoint-load-metrics-format: JSON` or
# `TEXT` is answered with `endpoint-load-metrics: JSON {"named_metrics": {...}}` or `TEXT
# named_metrics.NAME=VALUE, ...`, under the names that vLLM has in the same place. It shows the work
# of all clients together, so it needs the key of an operator or of a gateway where there are keys.


FORMAT_HEADER = b"endpoint-load-metrics-format"
REPORT_HEADER = b"endpoint-load-metrics"
FORMATS = ("JSON", "TEXT")


class LoadReport:
    """Adds the report to answers of requests that ask for it."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; its answer has the load as it is when the head is sent."""
        values = [value for name, value in scope["headers"] if name == FORMAT_HEADER]
        if not values:
            await self._app(scope, receive, send)
            return
        try:
            style = _format_of(values)
            _check_caller(scope)
        except InvalidRequest as refusal:
            await error_response(refusal, scope)(scope, receive, send)
            return

        async def reporting_send(message: Message) -> None:
            status = self._service.router.status
            if message["type"] == "http.response.start" and status is not None:
                report = (REPORT_HEADER, load_report(status, style).encode())
                message = {**message, "headers": [*message.get("headers", ()), report]}
            await send(message)

        await self._app(scope, receive, reporting_send)


def load_report(status: RouterStatus, style: str) -> str:
    """Return the header's value; `style` is one of FORMATS."""
    slots = status.num_kv_slots
    metrics = {
        "kv_cache_usage_perc": status.num_used_slots / slots if slots else 0.0,
        "num_requests_waiting": float(sum(load.num_waiting for load in status.load.values())),
        "num_requests_running": float(sum(load.num_running for load in status.load.values())),
    }
    if style == "JSON":
        return "JSON " + json.dumps({"named_metrics": metrics})
    return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())


def _format_of(values: list[bytes]) -> str:
    text = b", ".join(values).decode("latin-1")
    if text.upper() not in FORMATS:
        name = FORMAT_HEADER.decode()
        raise InvalidRequest(
            f"the header {name} must be {' or '.join(FORMATS)}, got {show(text)}", param=name
        )
    return text.upper()


def _check_caller(scope: Scope) -> None:
    caller = caller_of(scope)
    if not (caller.is_admin or caller.is_gateway):
        name = FORMAT_HEADER.decode()
        raise InvalidRequest(
            f"the header {name} needs the key of an operator or of a gateway",
            param=name,
            code="gateway_key_required",
            status=403,
        )


# ----------------------------------------------------------------------
# POST /v1/chat/completions/render and /v1/completions/render, as vLLM has them: the prompt.


class PromptObject(StrictModel):
    """The prompt of a body."""

    request_id: str
    token_ids: list[int]


def render_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.post("/v1/chat/completions/render")
    async def render_chat(request: Request) -> Response:
        """Return the prompt that the same body would have at /v1/chat/completions."""
        body = await service.bodies.read(request, ChatRequest)
        body.check(service)
        size: int = request.scope[BODY_BYTES_KEY]
        tools = body.tool_use(service)
        prompt = await prepared_for(
            service, request, lambda: encode_chat(service, body, tools, size)
        )
        return _encoded(_object("chatcmpl", prompt.token_ids))

    @router.post("/v1/completions/render")
    async def render_completion(request: Request) -> Response:
        """Return the prompts that the same body would have at /v1/completions."""
        body = await service.bodies.read(request, CompletionRequest)
        body.check(service)
        prompts = await prepared_for(service, request, lambda: encode_prompts(service, body))
        return _encoded([_object("cmpl", token_ids) for token_ids in prompts])

    return router


def _object(prefix: str, token_ids: Sequence[int]) -> dict[str, Any]:
    return {"request_id": new_request_id(prefix), "token_ids": list(token_ids)}


def _encoded(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")
