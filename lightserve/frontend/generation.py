"""From a validated request to text: submit, detokenise, count."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from lightserve.errors import InvalidRequest
from lightserve.frontend.failures import RequestFailed
from lightserve.frontend.router_client import Delta, LiveRequest, NewRequest
from lightserve.frontend.service import Service
from lightserve.metrics.requests import RequestMetrics
from lightserve.types import FinishReason

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """One token and the text that became certain with it."""

    token_id: int
    text: str


@dataclass(frozen=True)
class TextDelta:
    """News of one completion. At least one of the fields is not empty."""

    text: str
    """Valid UTF-8 by itself."""
    pieces: tuple[Piece, ...]
    """The tokens behind it; given only if asked for."""
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Usage:
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int


class Generation:
    """One completion as it comes; made by `start`, read by one task."""

    def __init__(
        self,
        service: Service,
        request: NewRequest,
        live: LiveRequest,
        metrics: RequestMetrics,
        *,
        by_token: bool,
    ) -> None:
        self._live = live
        self._tokenizer = service.model.tokenizer
        self._detokenizer = self._tokenizer.detokenizer(request.prompt_token_ids)
        self._eos_token_ids = frozenset(request.eos_token_ids)
        self._by_token = by_token
        self.request = request
        self._metrics = metrics
        self.num_tokens = 0
        self.first_token_s: float | None = None
        """Monotonic."""
        self.finish_reason: FinishReason | None = None

    @classmethod
    def start(cls, service: Service, request: NewRequest, *, by_token: bool) -> Generation:
        """Submit a request; `by_token` asks for the pieces too. Raises RequestFailed."""
        metrics = service.observation.requests.request(
            request.request_class,
            arrival_s=request.arrival_s,
            num_prompt_tokens=len(request.prompt_token_ids),
        )
        try:
            live = service.router.submit(request)
        except RequestFailed as failure:
            metrics.on_failure(failure.code)
            raise
        log.debug("is request %d of this frontend to the router", live.request_id)
        return cls(service, request, live, metrics, by_token=by_token)

    @property
    def usage(self) -> Usage:
        """Tokens so far, the one that ended it included."""
        return Usage(len(self.request.prompt_token_ids), self.num_tokens)

    def abort(self) -> None:
        """End it; no effect once it is over."""
        self._metrics.on_abort()
        self._live.abort()

    async def next_delta(self) -> TextDelta:
        """Wait for news; the last have the finish reason, after which there are no more.

        Raises:
            InvalidRequest, RequestFailed: it ended without the rest of its answer.
            ClientGone: it was aborted.
        """
        assert self.finish_reason is None, "it is over"
        while True:
            news = await self._next_news()
            if news.token_ids:
                now_s = time.monotonic()
                self._metrics.on_tokens(len(news.token_ids), now_s)
                if self.first_token_s is None:
                    self.first_token_s = now_s
            self.num_tokens += len(news.token_ids)
            self.finish_reason = news.finish_reason
            if news.finish_reason is not None:
                self._metrics.on_finish(news.finish_reason)
            delta = self._detokenise(news.token_ids)
            if delta.text or delta.pieces or delta.finish_reason is not None:
                return delta

    async def _next_news(self) -> Delta:
        try:
            return await self._live.next_delta()
        except (InvalidRequest, RequestFailed) as failure:
            self._metrics.on_failure(failure.code)
            raise

    def _detokenise(self, token_ids: list[int]) -> TextDelta:
        has_eos = self.finish_reason is FinishReason.STOP and self._ends_in_eos(token_ids)
        visible = token_ids[:-1] if has_eos else token_ids
        if not self._by_token:
            text = self._detokenizer.push(visible)
            return TextDelta(text + self._tail(), (), self.finish_reason)
        pieces = [Piece(token_id, self._detokenizer.push((token_id,))) for token_id in visible]
        pieces.extend(Piece(token_id, "") for token_id in token_ids[len(visible) :])
        if pieces:  # what was held back belongs to the last token
            pieces[-1] = Piece(pieces[-1].token_id, pieces[-1].text + self._tail())
        return TextDelta("".join(p.text for p in pieces), tuple(pieces), self.finish_reason)

    def _ends_in_eos(self, token_ids: list[int]) -> bool:
        return bool(token_ids) and token_ids[-1] in self._eos_token_ids

    def _tail(self) -> str:
        return "" if self.finish_reason is None else self._detokenizer.finish()
