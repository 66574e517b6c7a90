"""/v1/responses: create; with a store also retrieve, cancel, delete, and list what was asked."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, Literal

from fastapi import APIRouter, Request
from msgspec.json import decode, encode
from starlette.responses import JSONResponse, Response

from lightserve.batches.contents import Store
from lightserve.batches.records import NewResponse
from lightserve.errors import InvalidRequest
from lightserve.frontend.completion import Choices
from lightserve.frontend.errors import RequestFailed, renamed
from lightserve.frontend.json_body import BODY_BYTES_KEY, KEPT_BYTES_KEY, StrictModel, show
from lightserve.frontend.middleware import caller_of
from lightserve.frontend.openai.chat import ChatRequest, answer_chat
from lightserve.frontend.openai.files import check_choice, read_limit, read_query
from lightserve.frontend.openai.responses_request import CHAT_NAMES, ResponsesRequest
from lightserve.frontend.openai.responses_writer import ResponsesWriter
from lightserve.frontend.openai.stored import Page, StoredAnswer, in_store, one_page, page_of
from lightserve.frontend.request_options import with_objective
from lightserve.frontend.response import BeforeEnd
from lightserve.frontend.service import Service
from lightserve.types import NO_SLO

log = logging.getLogger(__name__)

MAX_ITEMS_LISTED = 100
DEFAULT_ITEMS_LISTED = 20


def responses_router(service: Service, *, is_for_lines: bool = False) -> APIRouter:
    """Return the route that answers; what lines of batches are answered is not kept."""
    router = APIRouter()
    has_store = service.config.batch_store != "none"
    keeps = has_store and not is_for_lines
    keeps_all = service.config.names_store

    @router.post("/v1/responses")
    async def create_response(request: Request) -> Response:
        """Answer a conversation, as a list of items."""
        asked = await service.bodies.read(request, ResponsesRequest)
        asked = with_objective(asked, request.headers, service.config.objectives)
        asked.check(keeps=keeps, has_store=has_store)
        body = await _continued(service, request, asked)
        size: int = request.scope[BODY_BYTES_KEY]
        with renamed(CHAT_NAMES):
            chat = await service.encoder.run(body.as_chat, size=size)
        is_kept = keeps and (keeps_all if body.store is None else body.store)
        writer = ResponsesWriter(service, body, chat, is_kept=is_kept)
        if asked.background:
            return await _begin_in_background(service, request, asked, chat, writer)
        keep = _keeper(service, request, asked, writer) if is_kept else None
        names = body.names_in(chat, len(body.input) - len(asked.input))
        return answer_chat(service, request, chat, writer, names=names, before_end=keep)

    return router


async def _continued(
    service: Service, request: Request, asked: ResponsesRequest
) -> ResponsesRequest:
    """Return a request with the conversation that it goes on from.

    Raises:
        InvalidRequest: that is not there, or too long.
        RequestFailed: the store cannot be read.
    """
    previous_id = asked.previous_response_id
    if previous_id is None:
        return asked
    key_name = caller_of(request.scope).name
    most = service.config.max_body_bytes + service.pictures.max_bytes
    before = await in_store(
        service,
        lambda store: store.responses.conversation(
            key_name, previous_id, time.time(), max_bytes=most
        ),
    )
    num_bytes = sum(map(len, before))
    request.scope[BODY_BYTES_KEY] += num_bytes
    continued, kept_bytes = await service.encoder.run(
        lambda: asked.continuing(before), size=num_bytes
    )
    request.scope[KEPT_BYTES_KEY] += kept_bytes
    return continued


async def _begin_in_background(
    service: Service,
    request: Request,
    asked: ResponsesRequest,
    chat: ChatRequest,
    writer: ResponsesWriter,
) -> Response:
    """Have a response come as the one line of a batch; return it as it stands.

    Raises:
        InvalidRequest: it could not be answered, or not in the background, or its key has too many.
        RequestFailed: the store cannot take it.
    """
    with renamed(CHAT_NAMES):
        chat.check(service)
        level = chat.service_level(service, request)
        chat.tool_use(service)
    if level.slo != NO_SLO:
        raise InvalidRequest("headers must not set targets with background", param="slo")
    config = service.config
    ttl_s, quota = config.responses_ttl_s, config.batch_max_stored_bytes
    caller = caller_of(request.scope)
    new = NewResponse(
        id=writer.request_id,
        key_name=caller.name,
        max_lines=caller.quota.batch_lines,
        previous_id=asked.previous_response_id,
        input=encode(asked.own_items()),
        response=writer.queued(),
        request=asked.as_line(writer.request_id),
    )
    await in_store(service, lambda s: s.jobs.respond(new, time.time(), ttl_s=ttl_s, quota=quota))
    return Response(new.response, media_type="application/json")


def _keeper(
    service: Service, request: Request, asked: ResponsesRequest, writer: ResponsesWriter
) -> BeforeEnd:
    """Return what keeps a response that has come to its end.

    Where the request did not say that it has to be kept, one that cannot be says so, and is
    answered all the same.
    """
    key_name, config = caller_of(request.scope).name, service.config

    async def keep(choices: Choices) -> None:
        def add(store: Store) -> None:
            new = NewResponse(
                id=writer.request_id,
                key_name=key_name,
                previous_id=asked.previous_response_id,
                input=encode(asked.own_items()),
                response=b"".join(writer.whole(choices)),
            )
            ttl_s, quota = config.responses_ttl_s, config.batch_max_stored_bytes
            store.responses.add(new, time.time(), ttl_s=ttl_s, quota=quota)

        try:
            await in_store(service, add)
        except (InvalidRequest, RequestFailed) as failure:
            if asked.store:
                raise
            writer.is_kept = False
            log.warning("response %s was not kept: %s", writer.request_id, failure.code)

    return keep


ITEMS_QUERY: Mapping[str, Any] = {
    "order": {"enum": ["asc", "desc"]},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS_LISTED},
    "after": {"type": "string"},
}
"""Schemas of what a list of items is asked with."""


def stored_responses_router(service: Service) -> APIRouter:
    """Return the routes of responses that were kept."""
    router = APIRouter()

    @router.get("/v1/responses/{response_id}")
    async def retrieve_response(request: Request, response_id: str) -> Response:
        """Return a response as it was answered."""
        read_query(request, ())
        key_name = caller_of(request.scope).name
        body = await in_store(
            service, lambda store: store.responses.get(key_name, response_id, time.time())
        )
        return StoredAnswer(service, one_page(body))

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> Response:
        """Delete a response."""
        key_name = caller_of(request.scope).name
        await in_store(
            service, lambda store: store.jobs.delete_response(key_name, response_id, time.time())
        )
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(request: Request, response_id: str) -> Response:
        """Cancel a response in the background."""
        key_name = caller_of(request.scope).name
        body = await in_store(
            service, lambda store: store.jobs.cancel_response(key_name, response_id, time.time())
        )
        return StoredAnswer(service, one_page(body))

    @router.get("/v1/responses/{response_id}/input_items")
    async def list_input_items(request: Request, response_id: str) -> Response:
        """List what was asked, the last first, without what came before."""
        query = read_query(request, ("limit", "order", "after"))
        limit = read_limit(query, default=DEFAULT_ITEMS_LISTED, most=MAX_ITEMS_LISTED)
        check_choice(query, "order", ("desc", "asc"))
        key_name = caller_of(request.scope).name

        def page(store: Store) -> bytes:
            items: list[dict[str, Any]] = decode(
                store.responses.input(key_name, response_id, time.time())
            )
            if query.get("order") != "asc":
                items.reverse()
            if (after := query.get("after")) is not None:
                ids = [item["id"] for item in items]
                if after not in ids:
                    raise InvalidRequest(f"after: there is no item {show(after)}", param="after")
                items = items[ids.index(after) + 1 :]
            return page_of(items[:limit], len(items) > limit)

        return StoredAnswer(service, one_page(await in_store(service, page)))

    return router


class DeletedResponse(StrictModel):
    """The answer to a deletion of a response."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemPage(Page):
    """A page of the items of a request's input."""

    data: list[dict[str, Any]]
