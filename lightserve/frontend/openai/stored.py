"""The common part of routes that answer from the batch store: its calls, and pages of answers.

An answer is as large as what a client has stored, and its reader may be slow: so the store is read
as the reader takes it, and what a reader has not taken counts among the kept answers of its client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from msgspec.json import encode
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lightserve.batches.access import StoreThread
from lightserve.batches.contents import Contents, Store
from lightserve.errors import InvalidRequest, StoreError
from lightserve.frontend.errors import RequestFailed, overloaded
from lightserve.frontend.json_body import StrictModel
from lightserve.frontend.middleware import owner_of
from lightserve.frontend.response import CONNECTION_KEY, Connection, client_leaves
from lightserve.frontend.service import Service

T = TypeVar("T")


class Page(StrictModel):
    """A part of a list."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


async def in_store(service: Service, work: Callable[[Store], T]) -> T:
    """Return what `work` does with the store; see `of_store`."""
    return await of_store(service, lambda store: store.run(work))


async def of_contents(service: Service, call: Callable[[Contents], Awaitable[T]]) -> T:
    """Return what a call for what is in files does; see `of_store`."""
    return await of_store(service, lambda store: call(store.contents))


async def of_store(service: Service, call: Callable[[StoreThread], Awaitable[T]]) -> T:
    """Return what a call of the store does.

    Raises:
        InvalidRequest: as `call` does; the server keeps nothing (404).
        RequestFailed: the store cannot be used now (503), or is full (507).
    """
    if service.store_problem:
        raise RequestFailed(
            f"the batch store cannot be used: {service.store_problem}",
            code="batch_store_unavailable",
            status=503,
        )
    if service.store is None:
        raise InvalidRequest(
            "this server keeps no files, batches and responses: it was started with"
            " --batch-store none",
            code="batch_store_off",
            status=404,
        )
    service.observation.on_store_use()
    try:
        return await call(service.store)
    except StoreError as error:
        if error.is_full:
            raise RequestFailed(
                "the batch store is full", code="batch_store_full", status=507
            ) from None
        raise RequestFailed(
            "the batch store cannot be used now; try again",
            code="batch_store_unavailable",
            status=503,
        ) from None


async def one_page(data: bytes) -> AsyncIterator[bytes]:
    """Yield an answer that is there as a whole."""
    yield data


def page_of(items: Sequence[dict[str, Any]], has_more: bool) -> bytes:
    """Return a page of a list, as OpenAI has it."""
    return encode(
        {
            "object": "list",
            "data": items,
            "first_id": items[0]["id"] if items else None,
            "last_id": items[-1]["id"] if items else None,
            "has_more": has_more,
        }
    )


class StoredAnswer(Response):
    """An answer in pages, each of which is made when its reader has taken the one before.

    It is a `Crowded`. A page that cannot be made ends the connection, so that the reader sees that
    it has not got all; the first page may still be an error's status.
    """

    def __init__(
        self,
        service: Service,
        pages: AsyncIterator[bytes],
        *,
        media_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(media_type=media_type, headers=dict(headers or {}))
        if "content-length" not in (headers or {}):  # that of nothing, as it is so far
            del self.headers["content-length"]
        self._service = service
        self._pages = pages
        self._connection: Connection | None = None
        self._is_crowded_out = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all pages, or as many as the client stays for."""
        self._connection = scope.get(CONNECTION_KEY)
        owner = owner_of(scope)
        client_gone = asyncio.create_task(client_leaves(receive))
        has_begun = False
        try:
            async for page in self._pages:
                self._hold(owner, len(page))
                if self._is_crowded_out and not has_begun:
                    raise overloaded()
                if self._is_crowded_out:
                    break
                if not has_begun:
                    has_begun = True
                    start = {"status": self.status_code, "headers": self.raw_headers}
                    await send({"type": "http.response.start", **start})
                await send({"type": "http.response.body", "body": page, "more_body": True})
                if self._connection is not None:
                    await self._connection.drained()
                self._service.kept.release(self)
                if self._is_crowded_out or client_gone.done():
                    break
            else:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (InvalidRequest, RequestFailed):
            if not has_begun or self._connection is None:
                raise
            self._connection.cut_off()
        finally:
            self._service.kept.release(self)
            if has_begun and self._connection is not None and self._connection.is_cut_off:
                await client_gone  # then its end is known to be no fault
            client_gone.cancel()

    def _hold(self, owner: str, num_bytes: int) -> None:
        for response in self._service.kept.hold(self, owner, num_bytes):
            self._service.observation.rejects["kept_answer_evicted"] += 1
            response.crowd_out()

    def crowd_out(self) -> None:
        """Give up the page: what is kept has become too much, and its client has the most."""
        self._is_crowded_out = True
        if self._connection is not None:
            self._connection.cut_off()
