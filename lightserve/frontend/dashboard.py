"""Routes that show the work: a dashboard with pool, steps and batches; timelines of requests."""

from __future__ import annotations

import re
import time
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request
from msgspec import to_builtins
from pydantic import Field
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from lightserve.batches.forecast import Due
from lightserve.dashboard import EVENTS_PATH, PAGE_PATH, Feed, encode_tick, load_page
from lightserve.errors import InvalidRequest, StoreError
from lightserve.frontend.errors import RequestFailed
from lightserve.frontend.json_body import StrictModel, show
from lightserve.frontend.middleware import caller_of
from lightserve.frontend.service import Service
from lightserve.messages.frontend_router import KVPool, RequestLife, unpack_kinds
from lightserve.types import SlotKind

MAX_CELLS = 2048
"""Most cells in the picture of the pool: each stands for one block, or for as many as it takes."""
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
                "too many views of the dashboard are open; close one of them",
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


# ----------------------------------------------------------------------
# GET /v1/requests/ID/timeline: what became of a request, for its own key.


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_COMPUTES = "computes"

Class = Literal["rt", "be"]


class TimelineTargets(StrictModel):
    """Targets of the request."""

    ttft_ms: float | None
    tpot_ms: float | None
    mtpot_ms: float | None
    completion_s: float | None


class StretchObject(StrictModel):
    """Steps in a row in which the same happened to it."""

    what: str
    at_s: float
    seconds: float = Field(ge=0)
    num_steps: int
    num_tokens: int
    tokens_of_others: dict[Class, int]
    predicted_s: float
    observed_s: float


class DecisionObject(StrictModel):
    """Something that a step did with it once."""

    what: Literal["starts", "paused", "checkpointed", "preempted", "resumes", "loads"]
    at_s: float
    num_tokens: int


class CompletionTimeline(StrictModel):
    """One completion."""

    request_class: Class
    state: Literal["alive", "ended"]
    end: str | None
    age_s: float
    targets: TimelineTargets
    missed: list[Literal["ttft", "tpot", "mtpot", "completion"]]
    first_token_s: float | None
    mean_gap_s: float | None
    max_gap_s: float | None
    num_output_tokens: int
    held_up_by: str | None
    before_first_token: dict[str, float]
    after_first_token: dict[str, float]
    stretches: list[StretchObject]
    decisions: list[DecisionObject]


class TimelineObject(StrictModel):
    """The answer."""

    id: str
    object: Literal["request.timeline"]
    completions: list[CompletionTimeline]


def timeline_router(service: Service) -> APIRouter:
    """Return the route."""
    router = APIRouter()

    @router.get("/v1/requests/{request_id}/timeline")
    async def timeline(request: Request, request_id: str) -> TimelineObject:
        """Say what a request waited for, and what was served meanwhile."""
        if not service.config.request_timelines:
            raise InvalidRequest(
                "this server keeps no timelines (--request-timelines)",
                code="timelines_off",
                status=404,
            )
        caller = caller_of(request.scope)
        lives = []
        if _NAME.fullmatch(request_id):
            client_key = None if caller.is_admin else caller.client.key
            lives = await service.router.describe_request(request_id, client_key)
        if not lives:
            raise InvalidRequest(
                f"there is no request {show(request_id)} among the last"
                f" {service.config.request_timelines} (--request-timelines)",
                param="request_id",
                code="request_not_found",
                status=404,
            )
        completions = [_completion(life) for life in lives]
        return TimelineObject(id=request_id, object="request.timeline", completions=completions)

    return router


def _completion(life: RequestLife) -> CompletionTimeline:
    missed = _missed(life)
    is_late_later = bool(missed) and "ttft" not in missed
    sums = life.after_first_token if is_late_later else life.before_first_token
    waits = {what: seconds for what, seconds in sums.items() if what != _COMPUTES}
    has_gaps = life.num_output_tokens > 1
    return CompletionTimeline(
        request_class=life.request_class.value,
        state="alive" if life.end is None else "ended",
        end=life.end,
        age_s=life.age_s,
        targets=TimelineTargets(
            ttft_ms=life.slo.ttft_ms,
            tpot_ms=life.slo.tpot_ms,
            mtpot_ms=life.slo.mtpot_ms,
            completion_s=life.slo.completion_s,
        ),
        missed=missed,
        first_token_s=life.first_token_s,
        mean_gap_s=life.token_span_s / (life.num_output_tokens - 1) if has_gaps else None,
        max_gap_s=life.max_gap_s if has_gaps else None,
        num_output_tokens=life.num_output_tokens,
        held_up_by=max(waits, key=lambda what: waits[what]) if waits else None,
        before_first_token=life.before_first_token,
        after_first_token=life.after_first_token,
        stretches=[
            StretchObject(
                what=each.what,
                at_s=each.at_s,
                seconds=each.seconds,
                num_steps=each.num_steps,
                num_tokens=each.num_tokens,
                tokens_of_others={c.value: n for c, n in each.tokens_of_others.items()},
                predicted_s=each.predicted_s,
                observed_s=each.observed_s,
            )
            for each in life.stretches
        ],
        decisions=[DecisionObject.model_validate(to_builtins(each)) for each in life.moments],
    )


def _missed(life: RequestLife) -> list[Literal["ttft", "tpot", "mtpot", "completion"]]:
    """Return which targets it has missed so far."""
    slo = life.slo
    found: list[Literal["ttft", "tpot", "mtpot", "completion"]] = []
    first_s = life.age_s if life.first_token_s is None else life.first_token_s
    if slo.ttft_ms is not None and 1e3 * first_s > slo.ttft_ms:
        found.append("ttft")
    num_gaps = life.num_output_tokens - 1
    if (
        slo.tpot_ms is not None
        and num_gaps > 0
        and 1e3 * life.token_span_s / num_gaps > slo.tpot_ms
    ):
        found.append("tpot")
    if slo.mtpot_ms is not None and 1e3 * life.max_gap_s > slo.mtpot_ms:
        found.append("mtpot")
    if slo.completion_s is not None and life.age_s > slo.completion_s:
        found.append("completion")
    return found
