"""Collects one step's news: one frame per frontend."""

from __future__ import annotations

from lightserve.messages.frontend_router import ErrorCode, RequestDelta, TokenDelta
from lightserve.router.events import Outgoing
from lightserve.router.request import Request
from lightserve.types import FinishReason, FrontendId


class DeltaBatch:
    """News by frontend, in the order in which it was added."""

    def __init__(self) -> None:
        self._by_frontend: dict[FrontendId, list[RequestDelta]] = {}

    def add_token(self, request: Request, token_id: int, reason: FinishReason | None) -> None:
        """A token, perhaps the last one."""
        self._add(request, RequestDelta(request.key.request_id, [token_id], reason))

    def fail(self, request: Request, error: ErrorCode) -> None:
        """The end of a request without its whole answer."""
        self._add(request, RequestDelta(request.key.request_id, [], FinishReason.ERROR, error))

    def _add(self, request: Request, delta: RequestDelta) -> None:
        self._by_frontend.setdefault(request.key.frontend_id, []).append(delta)

    def outgoing(self) -> list[Outgoing]:
        """Return one message per frontend that has news."""
        return [
            Outgoing(frontend_id, TokenDelta(requests=requests))
            for frontend_id, requests in self._by_frontend.items()
        ]
