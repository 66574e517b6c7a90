"""The counts of a frontend, and its questions to the supervisor for the counts of all processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable

from lightserve.batches.access import StoreThread, location_of
from lightserve.config import ServeConfig
from lightserve.errors import ChannelFull
from lightserve.frontend.errors import RequestFailed
from lightserve.logs import num_dropped_lines
from lightserve.messages.supervision import MetricsRequest, MetricsSnapshot, MetricsText, StoreUsed
from lightserve.metrics import catalogue
from lightserve.metrics.recording import Recorder
from lightserve.metrics.requests import FrontendMetrics

SCRAPE_TIMEOUT_S = 2.0


class Scrapes:
    """Asks the supervisor for all metrics; askers at the same time share one answer."""

    def __init__(self, *, is_dashboard: bool = False) -> None:
        """`is_dashboard`: those that the dashboard draws, in its form."""
        self._is_dashboard = is_dashboard
        self._send: Callable[[MetricsRequest], None] | None = None
        self._number = 0
        self._pending: asyncio.Future[MetricsText] | None = None

    def attach(self, send: Callable[[MetricsRequest], None]) -> None:
        """Use this way to the supervisor."""
        self._send = send

    async def ask(self) -> MetricsText:
        """Return all metrics. Raises RequestFailed (503) if the supervisor does not answer."""
        pending = self._pending or self._ask()
        try:
            async with asyncio.timeout(SCRAPE_TIMEOUT_S):
                return await asyncio.shield(pending)
        except TimeoutError:
            if self._pending is pending:
                self._pending = None
            raise _no_answer() from None

    def on_text(self, message: MetricsText) -> None:
        """Take in an answer; one that no request waits for any more is dropped."""
        if self._pending is not None and message.number == self._number:
            self._pending.set_result(message)
            self._pending = None

    def _ask(self) -> asyncio.Future[MetricsText]:
        if self._send is None:
            raise _no_answer()
        self._number += 1
        try:
            self._send(MetricsRequest(number=self._number, is_dashboard=self._is_dashboard))
        except ChannelFull:
            raise _no_answer() from None
        self._pending = asyncio.get_running_loop().create_future()
        return self._pending


def _no_answer() -> RequestFailed:
    return RequestFailed(
        "the supervisor does not answer; try again", code="metrics_unavailable", status=503
    )


class Observation:
    """All that a frontend counts."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.requests = FrontendMetrics(self.recorder)
        self.scrapes = Scrapes()
        self.figures = Scrapes(is_dashboard=True)
        self.before_snapshot: Callable[[], None] | None = None
        """Brings figures up to date."""
        self.rejects: Counter[str] = Counter()
        """Requests and connections refused before any route, by error code."""

        self._say_store_used: Callable[[StoreUsed], None] | None = None

    def attach(self, send: Callable[[MetricsRequest | StoreUsed], None]) -> None:
        """Use this way to the supervisor."""
        self.scrapes.attach(send)
        self.figures.attach(send)
        self._say_store_used = send

    def on_store_use(self) -> None:
        """Tell the supervisor, once, that a client uses the store: it has the batches process run.

        Where the queue to it is full, the next use tells it.
        """
        if self._say_store_used is not None:
            with contextlib.suppress(ChannelFull):
                self._say_store_used(StoreUsed())
                self._say_store_used = None

    def on_text(self, message: MetricsText) -> None:
        """Take in an answer of the supervisor."""
        (self.figures if message.is_dashboard else self.scrapes).on_text(message)

    def open_store(self, config: ServeConfig) -> StoreThread:
        """Return the batch store, whose calls are counted."""
        return StoreThread(
            location_of(config),
            file_store=config.file_store,
            min_free_bytes=config.batch_min_free_bytes,
            observe=self.recorder.histogram(catalogue.BATCH_STORE_TIME).observe,
        )

    def on_response(self, method: str, route: str, status: int) -> None:
        """Count an HTTP response."""
        self.recorder.counter(catalogue.HTTP_RESPONSES, method, route, str(status)).value += 1

    def snapshot(
        self, *, num_in_flight: int, num_rejected_frames: int, num_sessions_lost: int = 0
    ) -> MetricsSnapshot:
        """Return everything as it stands."""
        recorder = self.recorder
        if self.before_snapshot is not None:
            self.before_snapshot()
        for code, count in self.rejects.items():
            recorder.counter(catalogue.HTTP_REJECTIONS, code).value = count
        recorder.gauge(catalogue.REQUESTS_IN_FLIGHT).value = num_in_flight
        recorder.counter(catalogue.IPC_REJECTED, "frontend").value = num_rejected_frames
        recorder.counter(catalogue.IPC_SESSIONS_LOST).value = num_sessions_lost
        recorder.counter(catalogue.LOG_LINES_DROPPED, "frontend").value = num_dropped_lines()
        return MetricsSnapshot(samples=recorder.snapshot())
