"""What the router is told of outputs with stop strings: progress, and where they end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from support.fake_router import BOOT_ID, FakeRouter, frontend, next_delta, prepared, router_status

from lightserve.frontend.completion import Choices
from lightserve.frontend.router_client import RouterClient
from lightserve.messages.frontend_router import (
    Acknowledge,
    Finish,
    FrontendMessage,
    RequestDelta,
    RouterWelcome,
    TokenDelta,
)
from lightserve.types import FinishReason

REQUEST = prepared(max_tokens=50, stop_strings=("x",))


def _connected() -> tuple[RouterClient, FakeRouter]:
    client = RouterClient()
    router = FakeRouter(client)
    client.attach(router, BOOT_ID)
    client.on_message(RouterWelcome(boot_id=BOOT_ID, num_kv_slots=64))
    return client, router


def _said(router: FakeRouter) -> list[FrontendMessage]:
    return [message for message in router.sent if isinstance(message, Acknowledge | Finish)]


def _run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 30))


def test_one_frame_for_all_progress_of_a_turn() -> None:
    async def scenario() -> None:
        client, router = _connected()
        first, second = client.submit(*REQUEST), client.submit(*REQUEST)
        first.acknowledge(1)
        second.acknowledge(4)
        first.acknowledge(3)
        assert not _said(router)
        await asyncio.sleep(0)
        progress = [(first.request_id, 3), (second.request_id, 4)]
        assert _said(router) == [Acknowledge(progress=progress)]  # type: ignore[arg-type]
        await asyncio.sleep(0)
        second.acknowledge(5)
        await asyncio.sleep(0)
        assert len(_said(router)) == 2

    _run(scenario())


def test_progress_that_finds_the_channel_full_goes_with_the_next_message() -> None:
    async def scenario() -> None:
        client, router = _connected()
        live = client.submit(*REQUEST)
        router.is_full = True
        live.acknowledge(1)
        await asyncio.sleep(0)
        client.on_message(router_status())
        live.acknowledge(2)
        await asyncio.sleep(0)
        assert not _said(router)
        router.is_full = False
        client.on_message(router_status())
        progress = [(live.request_id, 2)]
        assert _said(router) == [Acknowledge(progress=progress)]  # type: ignore[arg-type]
        client.on_message(router_status())
        live.acknowledge(3)
        await asyncio.sleep(0)
        assert len(_said(router)) == 2  # later progress still finds its way

    _run(scenario())


def test_an_end_replaces_progress_and_survives_a_full_channel() -> None:
    async def scenario() -> None:
        client, router = _connected()
        live = client.submit(*REQUEST)
        router.is_full = True
        live.acknowledge(1)
        live.finish(2)
        await asyncio.sleep(0)
        router.is_full = False
        client.on_message(router_status())
        client.on_message(router_status())
        assert _said(router) == [Finish(request_id=live.request_id, num_tokens=2)]
        assert client.num_live == 0
        live.abort()  # it is over
        assert not router.aborted_ids

    _run(scenario())


def test_an_end_is_told_even_if_the_router_ended_it_itself() -> None:
    async def scenario() -> None:
        client, router = _connected()
        live = client.submit(*REQUEST)
        news = RequestDelta(live.request_id, [7, 2], FinishReason.STOP)
        client.on_message(TokenDelta(requests=[news]))
        assert live.is_over
        live.finish(1)
        assert _said(router) == [Finish(request_id=live.request_id, num_tokens=1)]

    _run(scenario())


def test_an_unread_end_is_aborted_in_the_router() -> None:
    async def scenario() -> None:
        client, router = _connected()
        live = client.submit(*REQUEST)
        news = RequestDelta(live.request_id, [7, 2], FinishReason.STOP)
        client.on_message(TokenDelta(requests=[news]))
        live.abort()  # the client left before the end was read
        assert router.aborted_ids == [live.request_id]
        live.abort()
        assert router.aborted_ids == [live.request_id]
        assert client.num_live == 0

    _run(scenario())


def test_an_unread_end_is_still_read_when_the_router_is_lost() -> None:
    async def scenario() -> None:
        client, _ = _connected()
        live = client.submit(*REQUEST)
        news = RequestDelta(live.request_id, [7, 2], FinishReason.STOP)
        client.on_message(TokenDelta(requests=[news]))
        client.detach()
        assert (await next_delta(live)).finish_reason is FinishReason.STOP
        assert client.num_live == 0

    _run(scenario())


@pytest.mark.parametrize("num_read", range(9))
def test_no_choice_stays_in_the_router_whenever_the_client_leaves(num_read: int) -> None:
    """Eight choices end while nothing is read; then the client leaves."""

    async def scenario() -> None:
        async with frontend() as setup:
            requests = [REQUEST] * 8
            choices = await Choices.start(setup.service, requests, per_prompt=8, by_token=False)
            reading = asyncio.create_task(choices.next_news())
            await asyncio.sleep(0)  # every choice is waited for
            for submit in setup.router.submits:
                for end in (None, FinishReason.STOP):
                    news = RequestDelta(submit.request_id, [7], end)
                    setup.service.router.on_message(TokenDelta(requests=[news]))
                    await asyncio.sleep(0)
            for _ in range(num_read):
                await reading
                reading = asyncio.create_task(choices.next_news())
                await asyncio.sleep(0)
            choices.abort()
            await asyncio.gather(reading, return_exceptions=True)
            finished = {m.request_id for m in setup.router.sent if isinstance(m, Finish)}
            submitted = {submit.request_id for submit in setup.router.submits}
            assert finished | set(setup.router.aborted_ids) == submitted
            assert setup.service.router.num_live == 0

    _run(scenario())


def test_a_new_router_hears_nothing_of_the_old_ones_outputs() -> None:
    async def scenario() -> None:
        client, router = _connected()
        live = client.submit(*REQUEST)
        router.is_full = True
        live.acknowledge(1)
        await asyncio.sleep(0)
        client.detach()
        new = FakeRouter(client)
        client.attach(new, "new")
        client.on_message(RouterWelcome(boot_id="new", num_kv_slots=64))
        await asyncio.sleep(0)
        assert not new.sent

    _run(scenario())
