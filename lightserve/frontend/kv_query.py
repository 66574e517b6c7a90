"""A frontend's question to the router for a map of the KV pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lightserve.errors import ChannelFull
from lightserve.frontend.errors import RequestFailed, not_ready, overloaded
from lightserve.messages.kv_map import DescribeKV, KVMap, KVPool

ANSWER_TIMEOUT_S = 5.0


class KVQuery:
    """Asks; askers at the same time share one answer, so that they cost the router one map."""

    def __init__(self) -> None:
        self._number = 0
        self._pending: asyncio.Future[KVPool] | None = None

    async def ask(self, send: Callable[[DescribeKV], None]) -> KVPool:
        """Return the pool as it is now.

        Raises:
            RequestFailed: no answer within ANSWER_TIMEOUT_S (504), a full queue to the router
                (429), no workers, or the router was lost meanwhile (503).
        """
        pending = self._pending or self._send(send)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await asyncio.shield(pending)
        except TimeoutError:
            if self._pending is pending:
                self._pending = None
            raise RequestFailed(
                f"the router did not answer within {ANSWER_TIMEOUT_S:g} s; try again",
                code="router_timeout",
                status=504,
            ) from None

    def on_map(self, message: KVMap) -> None:
        """Take in an answer; one that nobody waits for any more is dropped."""
        if self._pending is None or message.query_id != self._number:
            return
        if message.pool is None:
            self.fail(not_ready())
        else:
            self._pending.set_result(message.pool)
            self._pending = None

    def fail(self, failure: RequestFailed) -> None:
        """End a question that is waiting for its answer."""
        if self._pending is not None:
            self._pending.set_exception(failure)
            self._pending = None

    def _send(self, send: Callable[[DescribeKV], None]) -> asyncio.Future[KVPool]:
        self._number += 1
        try:
            send(DescribeKV(query_id=self._number))
        except ChannelFull:
            raise overloaded() from None
        self._pending = asyncio.get_running_loop().create_future()
        return self._pending
