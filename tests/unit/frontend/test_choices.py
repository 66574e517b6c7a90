"""Several completions of one request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from support.fake_router import Setup, frontend, prepared, token_delta

from lightserve.frontend.completion import Choices, News
from lightserve.frontend.errors import ClientGone
from lightserve.frontend.news import QUICK_TOKENS
from lightserve.messages.frontend_router import RequestDelta, TokenDelta
from lightserve.types import FinishReason, RequestClass


async def _start(
    setup: Setup,
    count: int,
    request_class: RequestClass = RequestClass.RT,
    stop_strings: tuple[str, ...] = (),
) -> Choices:
    request = prepared(request_class=request_class, stop_strings=stop_strings)
    return await Choices.start(setup.service, [request] * count, per_prompt=count, by_token=False)


async def _deliver(setup: Setup) -> None:
    news = [RequestDelta(submit.request_id, [300]) for submit in setup.router.submits]
    setup.service.router.on_message(TokenDelta(requests=news))
    for _ in range(5):
        await asyncio.sleep(0)


class FakeSink:
    """Notes what it is given."""

    def __init__(self, name: str, log: list[tuple[str, list[int]]]) -> None:
        self.name, self.log, self.is_open = name, log, True

    def take(self, news: Sequence[News], now_s: float) -> None:
        assert all(delta.text and delta.finish_reason is None for _, delta in news)
        self.log.append((self.name, [index for index, _ in news]))


def _say(setup: Setup, *tokens: int, **end: Any) -> None:
    """Send every request these tokens in one message."""
    news = [RequestDelta(submit.request_id, [*tokens], **end) for submit in setup.router.submits]
    setup.service.router.on_message(token_delta(news))


def test_what_comes_in_one_message_is_written_at_once_real_time_first() -> None:
    async def scenario() -> None:
        async with frontend() as setup:
            log: list[tuple[str, list[int]]] = []
            waiting = []
            for name, request_class in (("be", RequestClass.BE), ("rt", RequestClass.RT)):
                choices = await _start(setup, 2, request_class)
                sink = FakeSink(name, log)
                waiting.append(asyncio.create_task(choices.next_news(sink)))
            await asyncio.sleep(0)
            _say(setup, 300)
            assert log == [("rt", [0, 1])]  # at once; the other one after all that has arrived
            _say(setup, 301)
            assert log == [("rt", [0, 1])] * 2
            await asyncio.sleep(0)
            assert log == [("rt", [0, 1]), ("rt", [0, 1]), ("be", [0, 1])]
            assert not any(task.done() for task in waiting)  # no task had a turn for them
            _say(setup, 300, finish_reason=FinishReason.LENGTH)
            for task in waiting:
                index, delta = await asyncio.wait_for(task, 5)
                assert (index, delta.finish_reason) == (0, FinishReason.LENGTH)
            assert len(log) == 3

    asyncio.run(scenario())


def test_what_does_not_leave_at_once_is_the_tasks() -> None:
    """A closed sink, more than a few tokens, and an output that ends by its stop string."""

    async def scenario() -> None:
        async with frontend() as setup:
            log: list[tuple[str, list[int]]] = []
            sink = FakeSink("only", log)
            choices = await _start(setup, 1, stop_strings=("§",))
            waiting = asyncio.create_task(choices.next_news(sink))
            await asyncio.sleep(0)
            sink.is_open = False
            _say(setup, 300)
            text = (await asyncio.wait_for(waiting, 5))[1].text
            sink.is_open = True
            waiting = asyncio.create_task(choices.next_news(sink))
            await asyncio.sleep(0)
            _say(setup, *[300] * (QUICK_TOKENS + 1))
            assert (await asyncio.wait_for(waiting, 5))[1].text == text * (QUICK_TOKENS + 1)
            waiting = asyncio.create_task(choices.next_news(sink))
            await asyncio.sleep(0)
            _say(setup, 300)
            assert log == [("only", [0])]
            for token_id in setup.service.model.tokenizer.encode("§", add_special_tokens=False):
                _say(setup, token_id)
            assert (await asyncio.wait_for(waiting, 5))[1].finish_reason is FinishReason.STOP
            assert choices.is_over
            assert len(log) == 1

    asyncio.run(scenario())


def test_a_bug_ends_its_own_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with frontend() as setup:
            log: list[tuple[str, list[int]]] = []
            broken, sound = FakeSink("broken", log), FakeSink("sound", log)
            monkeypatch.setattr(broken, "take", lambda *_: 1 / 0)
            choices = [await _start(setup, 1), await _start(setup, 1)]
            tasks = [
                asyncio.create_task(one.next_news(sink))
                for one, sink in zip(choices, (broken, sound), strict=True)
            ]
            await asyncio.sleep(0)
            _say(setup, 300)
            assert log == [("sound", [0])]
            with pytest.raises(ZeroDivisionError):
                await asyncio.wait_for(tasks[0], 5)
            choices[1].abort()
            with pytest.raises(ClientGone):
                await asyncio.wait_for(tasks[1], 5)

    asyncio.run(scenario())


@pytest.mark.parametrize("count", [1, 2, 5])
def test_an_abort_wakes_what_waits(count: int) -> None:
    async def scenario() -> None:
        async with frontend() as setup:
            choices = await _start(setup, count)
            waiting = asyncio.create_task(choices.next_news())
            await asyncio.sleep(0)
            choices.abort()
            with pytest.raises(ClientGone):
                await asyncio.wait_for(waiting, 5)
            assert len(setup.router.aborted_ids) == count

    asyncio.run(scenario())


@pytest.mark.parametrize("count", [2, 5])
def test_an_abort_comes_through_news_that_are_not_read(count: int) -> None:
    async def scenario() -> None:
        async with frontend() as setup:
            choices = await _start(setup, count)
            waiting = asyncio.create_task(choices.next_news())
            for _ in range(4):
                await _deliver(setup)
            assert (await waiting)[1].text
            choices.abort()
            with pytest.raises(ClientGone):
                await asyncio.wait_for(choices.next_news(), 5)
            assert len(setup.router.aborted_ids) == count

    asyncio.run(scenario())
