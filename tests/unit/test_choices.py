"""Several completions of one request."""

from __future__ import annotations

import asyncio

import pytest
from support.fake_router import Setup, frontend

from lightserve.frontend.completion import Choices
from lightserve.frontend.errors import ClientGone
from lightserve.frontend.news import NewRequest
from lightserve.messages.frontend_router import RequestDelta, TokenDelta
from lightserve.types import RequestClass, SamplingParams


async def _start(setup: Setup, count: int) -> Choices:
    request = NewRequest(
        prompt_token_ids=[5],
        max_tokens=9,
        eos_token_ids=(2,),
        sampling=SamplingParams(),
        request_class=RequestClass.RT,
        arrival_s=0.0,
    )
    return await Choices.start(setup.service, [request] * count, per_prompt=count, by_token=False)


async def _deliver(setup: Setup) -> None:
    news = [RequestDelta(submit.request_id, [300]) for submit in setup.router.submits]
    setup.service.router.on_message(TokenDelta(requests=news))
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_an_abort_wakes_whoever_waits(count: int) -> None:
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
def test_an_abort_comes_through_news_that_nobody_reads(count: int) -> None:
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
