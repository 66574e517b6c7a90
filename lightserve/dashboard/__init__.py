"""The dashboard: one page for browsers, and the events that it is drawn from.

The page holds no data and opens for all. It asks for `EVENTS_PATH` by itself, with an operator's
key where there are keys. Frontends serve both on the HTTP port, the supervisor on the metrics port;
either makes one event a second for all that look at it, and none while there are none.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import lightserve
from lightserve.config import ServeConfig
from lightserve.metrics import catalogue as of
from lightserve.metrics.recording import Kind
from lightserve.types import largest_gap

PAGE_PATH = "/dashboard"
EVENTS_PATH = "/dashboard/events"


# ----------------------------------------------------------------------
# The events of the dashboard: made once a second for all viewers together, while there are any.
#
# `hello` comes first: what does not change. Each `tick` then has `figures`, which are the metrics
# that the page draws, and `picture`: the KV pool, the last steps, batches (docs/operations.md).


MAX_VIEWERS = 8
"""Most viewers of a port."""
INTERVAL_S = 1.0
MAX_VIEW_S = 600.0
"""Then the page asks again, with its key: one that is no longer good ends its view."""

FAMILIES = (
    *(of.NUM_REQUESTS_RUNNING, of.NUM_REQUESTS_WAITING, of.NUM_TOKENS_WAITING, of.PREDICTED_WAIT),
    *(of.GENERATION_TOKENS, of.COMPUTED_TOKENS, of.TIME_TO_FIRST_TOKEN, of.MAX_INTER_TOKEN_LATENCY),
    *(of.SLO_REQUESTS, of.REQUEST_FAILURE, of.PAUSES, of.NUM_PREEMPTIONS),
    *(of.KV_SLOTS, of.KV_SLOTS_USED, of.KV_SLOTS_CACHED, of.KV_SLOTS_PEAK, of.KV_SLOTS_FORECAST),
    *(of.KV_HOST_SLOTS, of.KV_HOST_SLOTS_USED),
    *(of.PREFIX_HOST_SLOTS, of.PREFIX_HOST_SLOTS_USED),
    *(of.STEPS, of.STEP_TIME, of.PREDICTED_STEP_TIME, of.REQUESTS_SKIPPED, of.REQUESTS_UNSEEN),
    *(of.WORKER_BUSY, of.PROCESS_RESTARTS, of.START_TIME),
)
"""Metrics that the page draws."""

Figures = Mapping[str, Mapping[str, Sequence[float]]]
"""By family, then by label values with commas between them, values as in `MetricSample`."""


def encode_figures(figures: Figures) -> bytes:
    """Return what the supervisor tells of its ledger, as JSON."""
    return msgspec.json.encode({"time_s": time.time(), "families": figures})


def encode_tick(figures: bytes | None, picture: bytes | None) -> bytes:
    """Return the data of a tick; None: unavailable now."""
    return b'{"figures":%b,"picture":%b}' % (figures or b"null", picture or b"null")


def greeting(config: ServeConfig) -> dict[str, Any]:
    """Return the data of `hello`."""
    targets = {
        "ttft_s": config.ttft_slo_ms / 1e3,
        "mtpot_s": (largest_gap(config.tpot_slo_ms, config.mtpot_slo_ms or None) or 0.0) / 1e3,
    }
    histograms = [family for family in FAMILIES if family.kind is Kind.HISTOGRAM]
    return {
        "version": lightserve.__version__,
        "model": config.model_name,
        "policy": config.policy,
        "interval_s": INTERVAL_S,
        "targets": {name: value or None for name, value in targets.items()},
        "buckets": {family.name: family.buckets for family in histograms},
    }


class Feed:
    """One listener's viewers. Belongs to an event loop."""

    def __init__(
        self,
        config: ServeConfig,
        make_tick: Callable[[], Awaitable[bytes]],
        *,
        max_viewers: int = MAX_VIEWERS,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """`make_tick` returns `encode_tick`, and never raises; `is_over`: all views are to end."""
        self._hello = _event("hello", msgspec.json.encode(greeting(config)))
        self._make_tick = make_tick
        self._max_viewers = max_viewers
        self._is_over = is_over
        self._num_viewers = 0
        self._next: asyncio.Future[bytes] | None = None
        self._maker: asyncio.Task[None] | None = None
        self._due_s = 0.0

    @property
    def is_full(self) -> bool:
        """Whether there are as many viewers as may be."""
        return self._num_viewers >= self._max_viewers

    @contextmanager
    def viewer(self) -> Iterator[None]:
        """Count one; to be asked `is_full` before."""
        self._num_viewers += 1
        try:
            yield
        finally:
            self._num_viewers -= 1

    async def events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events; a reader that is slow gets fewer."""
        now_s = asyncio.get_running_loop().time
        end_s = now_s() + MAX_VIEW_S
        yield self._hello
        while now_s() < end_s and not self._is_over():
            data = await self._tick()
            if not data:
                return
            yield data

    def close(self) -> None:
        """End all views."""
        self._is_over = lambda: True
        if self._maker is not None:
            self._maker.cancel()
        if self._next is not None and not self._next.done():
            self._next.set_result(b"")

    async def _tick(self) -> bytes:
        """Return the next tick, the same one to all that wait; nothing: there will be none."""
        if self._next is None or self._next.done():
            self._next = asyncio.get_running_loop().create_future()
            self._maker = asyncio.create_task(self._make(self._next))
        return await asyncio.shield(self._next)

    async def _make(self, future: asyncio.Future[bytes]) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._due_s - loop.time()))
        self._due_s = loop.time() + INTERVAL_S
        data = b""
        try:
            data = _event("tick", await self._make_tick())
        finally:
            if not future.done():
                future.set_result(data)


def _event(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


# ----------------------------------------------------------------------
# The page: styles and scripts are in it, so that it needs no other resource.
#
# uPlot (https://github.com/leeoniya/uPlot, MIT, static/uplot.LICENSE) draws the lines.


_STATIC = Path(__file__).parent / "static"
_STYLES = ("uplot.css", "page.css")
_SCRIPTS = ("uplot.js", "page.js")


class Page(NamedTuple):
    """The page, as a browser gets it."""

    body: bytes
    headers: dict[str, str]
    """With the content security policy: nothing runs and nothing is fetched but what is in it."""


@cache
def load_page() -> Page:
    """Return the page; its files are read once."""
    styles = [_read(name) for name in _STYLES]
    scripts = [_read(name) for name in _SCRIPTS]
    body = _read("page.html")
    body = body.replace("<!--styles-->", "".join(f"<style>{text}</style>" for text in styles))
    body = body.replace("<!--scripts-->", "".join(f"<script>{text}</script>" for text in scripts))
    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; script-src {_hashes(scripts)};"
        f" style-src {_hashes(styles)}; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    )
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Page(body.encode(), headers)


def _read(name: str) -> str:
    return (_STATIC / name).read_text(encoding="utf-8")


def _hashes(texts: list[str]) -> str:
    digests = [hashlib.sha256(text.encode()).digest() for text in texts]
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
