"""The dashboard on the HTTP port, and what frontends know for it: pool, last steps, batches."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import APIRouter
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from lightserve.batches.forecast import Due
from lightserve.dashboard import EVENTS_PATH, PAGE_PATH
from lightserve.dashboard.feed import Feed, encode_tick
from lightserve.dashboard.page import load_page
from lightserve.errors import StoreError
from lightserve.frontend.errors import RequestFailed
from lightserve.frontend.service import Service
from lightserve.messages.frontend_router import KVPool, unpack_kinds
from lightserve.types import SlotKind

MAX_CELLS = 2048
"""Of the picture of the pool: each stands for one block, or for as many as it takes."""
MAX_BATCHES = 12
_FULL = 9
"""A cell's share of a kind is a digit, 0 to this."""


class _View(StreamingResponse):
    """The events, while there is a place for one more viewer."""

    def __init__(self, feed: Feed) -> None:
        super().__init__(
            feed.events(), media_type="text/event-stream", headers={"cache-control": "no-store"}
        )
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them. Raises RequestFailed (503)."""
        if self._feed.is_full:
            raise RequestFailed(
                "as many look at the dashboard as may; close another view of it",
                code="too_many_viewers",
                status=503,
            )
        with self._feed.viewer():
            await super().__call__(scope, receive, send)


def dashboard_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    async def make_tick() -> bytes:
        try:
            figures = (await service.observation.figures.ask()).text
        except RequestFailed:
            figures = None
        return encode_tick(figures, await picture_of(service))

    feed = Feed(service.config, make_tick, is_over=lambda: service.in_flight.is_draining)

    @router.get(PAGE_PATH)
    async def page() -> Response:
        """Return the page, which holds no data."""
        page = load_page()
        return Response(page.body, headers=page.headers)

    @router.get(EVENTS_PATH)
    async def events() -> StreamingResponse:
        """Send what the page draws, once a second."""
        return _View(feed)

    return router


async def picture_of(service: Service) -> bytes | None:
    """Return what the dashboard draws besides metrics, as JSON; None: the router does not say."""
    try:
        now = await service.router.describe_kv()
    except RequestFailed:
        return None
    batches = None
    if service.store is not None:
        now_s = time.time()
        try:
            batches = await service.store.run(
                lambda store: store.forecasts.next_due(MAX_BATCHES, now_s)
            )
        except StoreError:
            batches = None
    return msgspec.json.encode(
        {
            "pool": pool_cells(now.pool),
            "steps": now.steps,
            "batches": None if batches is None else [_batch(each) for each in batches],
        }
    )


def pool_cells(pool: KVPool) -> dict[str, Any]:
    """Return the pool's slots by kind, and for each kind a digit per cell: its share of the cell.

    The last cell may be of fewer blocks than the others. `cells` is None if the router could not
    say (see `KVPool.slots`).
    """
    blocks = -(-pool.num_slots // pool.block_size)
    blocks_per_cell = -(-blocks // MAX_CELLS)
    names = [kind.name.lower() for kind in SlotKind]
    cells = None
    if pool.slots is not None:
        shares = _shares(pool, blocks_per_cell * pool.block_size)
        digits = np.where(shares > 0.0, np.maximum(1, np.rint(_FULL * shares)), 0).astype(np.uint8)
        texts = [(row + ord("0")).tobytes().decode("ascii") for row in digits]
        cells = {name: text for name, text in zip(names, texts, strict=True) if name != "free"}
    return {
        "num_slots": pool.num_slots,
        "block_size": pool.block_size,
        "blocks_per_cell": blocks_per_cell,
        "num_shared_blocks": pool.num_shared_blocks,
        "num_slots_of": dict(zip(names, pool.num_slots_of_kind, strict=True)),
        "cells": cells,
    }


def _shares(pool: KVPool, slots_per_cell: int) -> npt.NDArray[np.float64]:
    """Return each kind's share of each cell, [num_kinds, num_cells], by runs alone."""
    assert pool.slots is not None
    runs = unpack_kinds(pool.slots)
    ends = np.concatenate([[0], np.cumsum(runs.lengths, dtype=np.int64)])
    borders = np.append(np.arange(0, pool.num_slots, slots_per_cell), pool.num_slots)
    shares = []
    for kind in SlotKind:
        before = np.concatenate([[0], np.cumsum(np.where(runs.kinds == kind, runs.lengths, 0))])
        shares.append(np.diff(np.interp(borders, ends, before)) / np.diff(borders))
    return np.array(shares)


def _batch(batch: Due) -> dict[str, Any]:
    forecast = batch.forecast
    return {
        **dict(zip(batch._fields[:-1], batch[:-1], strict=True)),
        "forecast_s": None if forecast is None else forecast.ends_s,
        "is_in_time": None if forecast is None else forecast.is_in_time,
    }
