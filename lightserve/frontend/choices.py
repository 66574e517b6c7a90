"""Several completions of one HTTP request, read as one sequence of news."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lightserve.frontend.failures import ClientGone, RequestFailed
from lightserve.frontend.generation import Generation, TextDelta, Usage
from lightserve.frontend.router_client import NewRequest
from lightserve.frontend.service import Service

LONG_PROMPT_TOKENS = 4096

_News = tuple[int, TextDelta] | BaseException


class Choices:
    """All completions of a request, in the order of their indices; made by `start`."""

    def __init__(self, generations: Sequence[Generation], *, per_prompt: int) -> None:
        self.generations = tuple(generations)
        self._per_prompt = per_prompt
        self._num_open = len(generations)
        self._is_aborted = False
        self._pumps: list[asyncio.Task[None]] = []
        self._news: asyncio.Queue[_News] = asyncio.Queue(maxsize=len(generations))

    @classmethod
    async def start(
        cls, service: Service, requests: Sequence[NewRequest], *, per_prompt: int, by_token: bool
    ) -> Choices:
        """Submit all or none; `per_prompt` of them share a prompt. Raises RequestFailed."""
        started: list[Generation] = []
        try:
            for request in requests:
                started.append(Generation.start(service, request, by_token=by_token))
                if len(request.prompt_token_ids) > LONG_PROMPT_TOKENS:
                    await asyncio.sleep(0)  # each is copied: others have their turn
        except BaseException:
            for generation in started:
                generation.abort()
            raise
        return cls(started, per_prompt=per_prompt)

    @property
    def is_over(self) -> bool:
        """Whether every completion has its finish reason, and it has been read."""
        return self._num_open == 0

    @property
    def first(self) -> Generation:
        """The completion with index 0."""
        return self.generations[0]

    @property
    def usage(self) -> Usage:
        """Tokens of all completions; a prompt counts once, however many completions it has."""
        usages = [generation.usage for generation in self.generations]
        prompts = usages[:: self._per_prompt]
        return Usage(
            sum(usage.prompt_tokens for usage in prompts),
            sum(usage.completion_tokens for usage in usages),
            sum(usage.cached_tokens for usage in prompts),
        )

    @property
    def num_bytes(self) -> int:
        """About as many as the answer, if it is kept, has in memory."""
        return sum(generation.num_bytes for generation in self.generations)

    @property
    def num_unread_bytes(self) -> int:
        """Of news that have not been read."""
        return sum(generation.num_unread_bytes for generation in self.generations)

    async def next_news(self) -> tuple[int, TextDelta]:
        """Wait for news of any completion; return its index and the news.

        Raises:
            InvalidRequest, RequestFailed: one of them failed.
            ClientGone: they were aborted.
        """
        if len(self.generations) == 1:
            index, delta = 0, await self.first.next_delta()
        else:
            if not self._pumps:
                self._pumps = [asyncio.create_task(self._pump(i)) for i in self._indices()]
            news = await self._news.get()
            if isinstance(news, BaseException):
                raise news
            index, delta = news
        self._num_open -= delta.finish_reason is not None
        return index, delta

    def check_wanted(self) -> None:
        """Raise ClientGone if they were aborted."""
        if self._is_aborted:
            raise ClientGone

    def abort(self) -> None:
        """End all of them, and whoever waits for news; no effect on those that are over."""
        self._is_aborted = True
        for generation in self.generations:
            generation.abort()
        for pump in self._pumps:
            pump.cancel()
        while not self._news.empty():  # so that there is room
            self._news.get_nowait()
        self._news.put_nowait(ClientGone())

    def end(self, failure: RequestFailed) -> None:
        """End with a failure those that are not over; `next_news` raises it."""
        for generation in self.generations:
            generation.end(failure)

    def _indices(self) -> range:
        return range(len(self.generations))

    async def _pump(self, index: int) -> None:
        generation = self.generations[index]
        try:
            while generation.finish_reason is None:
                await self._news.put((index, await generation.next_delta()))
        except Exception as failure:
            await self._news.put(failure)
