"""/v1/batches: create, list, retrieve, cancel; the batches process works them off."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import AfterValidator, Field
from starlette.responses import JSONResponse

from lightserve.batches.access import Store
from lightserve.batches.files import START, Cursor
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
    NewBatch,
    NewLine,
    Status,
)
from lightserve.errors import InvalidRequest
from lightserve.frontend.json_body import Integer, StrictModel, show
from lightserve.frontend.middleware import Caller, caller_of
from lightserve.frontend.openai.common import Metadata, StoredId
from lightserve.frontend.openai.files import (
    Page,
    in_store,
    of_contents,
    page_object,
    read_limit,
    read_query,
)
from lightserve.frontend.service import Service

MAX_BATCHES_LISTED = 100
DEFAULT_BATCHES_LISTED = 20
MAX_IDEMPOTENCY_KEY_CHARS = 255
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
    """What is to be expected of a batch in progress."""

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
    """Of batches."""

    data: list[BatchObject]


def batches_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    @router.post("/v1/batches")
    async def create_batch(request: Request) -> JSONResponse:
        """Have every line of a file answered within a window of time."""
        body = await service.bodies.read(request, BatchRequest)
        new = _new_batch(body, caller_of(request.scope), _idempotency_key(request))

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
            store.jobs.check_active(new.key_name)
            return file

        found = await in_store(service, find)
        if isinstance(found, FileRecord):
            lines = await _check_lines(service, found, new.endpoint)
            found = await in_store(service, lambda s: s.jobs.create(new, lines, time.time()))
        return JSONResponse(found.body())

    @router.get("/v1/batches")
    async def list_batches(request: Request) -> JSONResponse:
        """List the batches of the key, the newest first."""
        query = read_query(request, ("limit", "after"))
        limit = read_limit(query, default=DEFAULT_BATCHES_LISTED, most=MAX_BATCHES_LISTED)
        key_name, after = caller_of(request.scope).name, query.get("after")
        batches, has_more = await in_store(
            service, lambda store: store.jobs.page(key_name, time.time(), limit=limit, after=after)
        )
        return page_object([batch.body() for batch in batches], has_more)

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


async def _check_lines(service: Service, file: FileRecord, endpoint: str) -> list[NewLine]:
    """Return the lines of a file, read in pieces: what others want of the store comes in between.

    Raises:
        InvalidRequest: one is wrong.
        RequestFailed: the store cannot be read.
    """
    check = LineCheck(endpoint, service.check_model)
    cursor: Cursor | None = START
    while cursor is not None:
        start = cursor
        data, cursor = await of_contents(service, lambda contents: contents.read(file, start))  # noqa: B023
        await in_store(service, lambda _store: check.add(data))  # noqa: B023 (in its thread)
    return check.finish()


def _new_batch(body: BatchRequest, caller: Caller, idempotency_key: str | None) -> NewBatch:
    said: dict[str, Any] = body.model_dump(mode="json")
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    expiry = body.output_expires_after
    return NewBatch(
        key_name=caller.name,
        max_lines=caller.quota.batch_lines,
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
