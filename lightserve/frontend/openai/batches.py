"""/v1/batches: create, list, retrieve, cancel; the batches process works them off."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import AfterValidator, Field
from starlette.responses import JSONResponse, Response

from lightserve.batches.contents import Store
from lightserve.batches.lines import LineCheck
from lightserve.batches.records import (
    DEFAULT_TTL_S,
    MAX_TTL_S,
    MAX_WINDOW_S,
    MIN_TTL_S,
    MIN_WINDOW_S,
    BatchRecord,
    Endpoint,
    FileRecord,
    LineSums,
    NewBatch,
    NewLine,
    Status,
)
from lightserve.errors import InvalidRequest
from lightserve.frontend.errors import ClientGone, RequestFailed
from lightserve.frontend.json_body import Integer, StrictModel, show
from lightserve.frontend.middleware import Caller, caller_of, owner_of
from lightserve.frontend.openai.fields import Metadata, StoredId
from lightserve.frontend.openai.files import read_file, read_limit, read_query
from lightserve.frontend.openai.stored import Page, StoredAnswer, in_store, one_page, page_of
from lightserve.frontend.service import Service

MAX_BATCHES_LISTED = 100
DEFAULT_BATCHES_LISTED = 20
MAX_IDEMPOTENCY_KEY_CHARS = 255
LINES_PER_WRITE = 2048
"""Lines of a new batch that one write takes."""
BATCH_QUERY: Mapping[str, Any] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_BATCHES_LISTED},
    "after": {"type": "string"},
}
"""Schemas of what a list is asked with."""
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_WINDOW = re.compile(r"([1-9][0-9]{0,8})([smhd])", re.ASCII)


def window_seconds(text: str) -> int:
    """Return the seconds of a window such as 30m, 24h or 7d. Raises ValueError."""
    match = _WINDOW.fullmatch(text)
    seconds = int(match[1]) * _UNITS_S[match[2]] if match else 0
    if not MIN_WINDOW_S <= seconds <= MAX_WINDOW_S:
        raise ValueError(
            "must be a time such as 30m, 24h or 7d, of at least"
            f" {MIN_WINDOW_S} seconds and at most {MAX_WINDOW_S // 86_400} days, got {show(text)}"
        )
    return seconds


def _window(text: str) -> str:
    window_seconds(text)
    return text


class OutputExpiresAfter(StrictModel):
    """How long output and error files are kept."""

    anchor: Literal["created_at"]
    seconds: Annotated[Integer, Field(ge=MIN_TTL_S, le=MAX_TTL_S)]


class BatchRequest(StrictModel):
    """The body."""

    input_file_id: StoredId
    endpoint: Endpoint
    completion_window: Annotated[str, AfterValidator(_window)]
    metadata: Metadata | None = None
    output_expires_after: OutputExpiresAfter | None = None
    x_accept_late: bool | None = None


class RequestCounts(StrictModel):
    """Lines of a batch."""

    total: Annotated[int, Field(ge=0)]
    completed: Annotated[int, Field(ge=0)]
    failed: Annotated[int, Field(ge=0)]


class ForecastObject(StrictModel):
    """Forecast of a batch in progress."""

    ends_at: int
    in_time: bool
    basis: Literal["pace", "cost_model"]


class BatchObject(StrictModel):
    """A batch."""

    id: str
    object: Literal["batch"]
    endpoint: Endpoint
    errors: None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None
    x_forecast: ForecastObject | None


class BatchPage(Page):
    """A page of batches."""

    data: list[BatchObject]


def batches_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.post("/v1/batches")
    async def create_batch(request: Request) -> JSONResponse:
        """Have every line of a file answered within a window of time."""
        body = await service.bodies.read(request, BatchRequest)
        max_bytes = service.config.batch_max_stored_bytes
        new = _new_batch(body, caller_of(request.scope), _idempotency_key(request), max_bytes)

        def find(store: Store) -> BatchRecord | FileRecord:
            now_s = time.time()
            if (known := store.jobs.find_repeated(new, now_s)) is not None:
                return known
            file = store.files.get(new.key_name, new.input_file_id, now_s)
            if file.purpose != "batch":
                raise InvalidRequest(
                    f"input_file_id must be of a file of purpose batch, got {file.purpose}",
                    param="input_file_id",
                )
            return file

        async with service.checks.taken(owner_of(request.scope)):
            if await request.is_disconnected():
                raise ClientGone
            found = await in_store(service, find)
            if isinstance(found, FileRecord):
                found = await _make(service, found, new)
        return JSONResponse(found.body())

    @router.get("/v1/batches")
    async def list_batches(request: Request) -> Response:
        """List the batches of the key, the newest first."""
        query = read_query(request, ("limit", "after"))
        limit = read_limit(query, default=DEFAULT_BATCHES_LISTED, most=MAX_BATCHES_LISTED)
        key_name, after = caller_of(request.scope).name, query.get("after")

        def page(store: Store) -> bytes:
            batches, has_more = store.jobs.page(key_name, time.time(), limit=limit, after=after)
            return page_of([batch.body() for batch in batches], has_more)

        return StoredAnswer(service, one_page(await in_store(service, page)))

    @router.get("/v1/batches/{batch_id}")
    async def retrieve_batch(request: Request, batch_id: str) -> JSONResponse:
        """Say how far a batch is."""
        key_name = caller_of(request.scope).name
        batch = await in_store(
            service, lambda store: store.jobs.get(key_name, batch_id, time.time())
        )
        return JSONResponse(batch.body())

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(request: Request, batch_id: str) -> JSONResponse:
        """End a batch with what it has."""
        key_name = caller_of(request.scope).name
        batch = await in_store(
            service, lambda store: store.jobs.cancel(key_name, batch_id, time.time())
        )
        return JSONResponse(batch.body())

    return router


async def _make(service: Service, file: FileRecord, new: NewBatch) -> BatchRecord:
    """Make a batch of a file, whose lines are checked and written as they are read, in pieces: what
    others want of the store comes in between.

    Raises:
        InvalidRequest: a line is wrong, or the batch may not be made.
        RequestFailed: the store cannot be used.
    """
    number = await in_store(service, lambda store: store.jobs.prepare(new, time.time()))
    try:
        sums = await _add_lines(service, file, new, number)
        return await in_store(
            service, lambda store: store.jobs.create(new, number, sums, time.time())
        )
    except BaseException:
        with contextlib.suppress(RequestFailed):  # it is dropped later
            await in_store(service, lambda store: store.jobs.drop(number))
        raise


async def _add_lines(service: Service, file: FileRecord, new: NewBatch, number: int) -> LineSums:
    """Check and write the lines of a file. Raises as `_make`."""
    check, sums = LineCheck(new.endpoint, service.check_model), LineSums()
    waiting: list[NewLine] = []

    def take(store: Store, data: bytes | None) -> None:
        waiting.extend(check.finish() if data is None else check.add(data))
        if len(waiting) >= LINES_PER_WRITE or (data is None and waiting):
            store.jobs.add_lines(new, number, waiting, sums.num_lines)
            store.files.sweep(num_rows=len(waiting))
            sums.add(waiting)
            waiting.clear()

    async for data in read_file(service, file):
        await in_store(service, lambda store: take(store, data))  # noqa: B023 (in its thread)
    await in_store(service, lambda store: take(store, None))
    return sums


def _new_batch(
    body: BatchRequest, caller: Caller, idempotency_key: str | None, max_bytes: int
) -> NewBatch:
    said: dict[str, Any] = body.model_dump(mode="json")
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    expiry = body.output_expires_after
    return NewBatch(
        key_name=caller.name,
        max_lines=caller.quota.batch_lines,
        max_bytes=max_bytes,
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        window=body.completion_window,
        window_s=window_seconds(body.completion_window),
        metadata=None if body.metadata is None else json.dumps(body.metadata),
        output_ttl_s=DEFAULT_TTL_S if expiry is None else expiry.seconds,
        idempotency_key=idempotency_key,
        accepts_late=body.x_accept_late or False,
        request_digest=digest,
    )


def _idempotency_key(request: Request) -> str | None:
    """Return the header by which a request that is sent again is known. Raises InvalidRequest."""
    given = request.headers.getlist("idempotency-key")
    if not given:
        return None
    if len(given) > 1 or not 1 <= len(given[0]) <= MAX_IDEMPOTENCY_KEY_CHARS:
        raise InvalidRequest(
            "the header Idempotency-Key must be given once, with 1 to"
            f" {MAX_IDEMPOTENCY_KEY_CHARS} characters",
            param="Idempotency-Key",
        )
    return given[0]
