"""The table of live requests: who may end one, what is merged, what is lost with the router."""

from __future__ import annotations

import asyncio
import functools
import gc
from collections.abc import Coroutine
from typing import Any

import pytest
from support.fake_router import BOOT_ID, FakeRouter, frontend, next_delta, prepared, router_status

from lightserve.errors import InvalidRequest
from lightserve.frontend.completion import Choices
from lightserve.frontend.errors import ClientGone, RequestFailed, draining
from lightserve.frontend.news import LiveRequest
from lightserve.frontend.request_options import Prepared
from lightserve.frontend.router_client import RouterClient
from lightserve.messages.common import TokenLogprob, pack_int32, pack_int64
from lightserve.messages.frontend_router import (
    Acknowledge,
    BatchDue,
    ErrorCode,
    Finish,
    FrontendMessage,
    RequestDelta,
    RouterWelcome,
    TokenDelta,
)
from lightserve.types import FinishReason, RequestId, SamplingParams


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def _request(arrival_s: float = 100.0, **fields: Any) -> Prepared:
    return prepared([5, 6], max_tokens=3, arrival_s=arrival_s, **fields)


def _connected() -> tuple[RouterClient, FakeRouter, Clock]:
    clock = Clock()
    client = RouterClient(clock)
    router = FakeRouter(client)
    client.attach(router, BOOT_ID)
    client.on_message(RouterWelcome(boot_id=BOOT_ID, num_kv_slots=64))
    return client, router, clock


def _news(client: RouterClient, live: LiveRequest, tokens: list[int], **end: Any) -> None:
    client.on_message(TokenDelta(requests=[RequestDelta(live.request_id, tokens, **end)]))


def _run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 30))


def test_age_is_measured_from_the_arrival() -> None:
    client, router, clock = _connected()
    clock.now_s = 100.25
    client.submit(*_request(arrival_s=100.0))
    assert router.submits[0].age_s == 0.25


def test_the_prediction_key_is_passed_on() -> None:
    client, router, _ = _connected()
    client.submit(*_request())
    client.submit(*_request(prediction_key="team-a"))
    assert [submit.prediction_key for submit in router.submits] == ["", "team-a"]


def test_unread_news_are_merged() -> None:
    async def scenario() -> None:
        client, _, _ = _connected()
        live = client.submit(*_request())
        for token in range(100):
            _news(client, live, [token])
        delta = await next_delta(live)
        assert delta.token_ids.tolist() == list(range(100))
        assert delta.finish_reason is None
        _news(client, live, [7])
        _news(client, live, [2], finish_reason=FinishReason.STOP)
        delta = await next_delta(live)
        assert (delta.token_ids.tolist(), delta.finish_reason) == ([7, 2], FinishReason.STOP)
        assert live.is_over
        assert client.num_live == 0

    _run(scenario())


def test_requests_do_not_mix() -> None:
    async def scenario() -> None:
        client, _, _ = _connected()
        first, second = client.submit(*_request()), client.submit(*_request())
        assert first.request_id != second.request_id
        news = [RequestDelta(second.request_id, [9]), RequestDelta(first.request_id, [8])]
        client.on_message(TokenDelta(requests=news))
        assert (await next_delta(first)).token_ids.tolist() == [8]
        assert (await next_delta(second)).token_ids.tolist() == [9]

    _run(scenario())


@pytest.mark.parametrize("error", ErrorCode)
def test_tokens_before_an_error_are_delivered(error: ErrorCode) -> None:
    async def scenario() -> None:
        client, router, _ = _connected()
        live = client.submit(*_request())
        _news(client, live, [7])
        _news(client, live, [], finish_reason=FinishReason.ERROR, error=error)
        assert (await next_delta(live)).token_ids.tolist() == [7]
        with pytest.raises((InvalidRequest, RequestFailed)):
            await next_delta(live)
        live.abort()
        assert router.aborted_ids == []  # the router has ended it itself

    _run(scenario())


def test_abort_wakes_the_reader_and_tells_the_router_once() -> None:
    async def scenario() -> None:
        client, router, _ = _connected()
        live = client.submit(*_request())
        reading = asyncio.create_task(next_delta(live))
        await asyncio.sleep(0)
        live.abort()
        live.abort()
        with pytest.raises(ClientGone):
            await reading
        assert router.aborted_ids == [live.request_id]
        _news(client, live, [7])  # was on its way
        assert client.num_live == 0

    _run(scenario())


def test_aborts_survive_a_full_queue() -> None:
    client, router, _ = _connected()
    live = client.submit(*_request())
    router.is_full = True
    live.abort()
    client.on_message(router_status())
    assert router.aborted_ids == []
    router.is_full = False
    client.on_message(router_status())
    client.on_message(router_status())
    assert router.aborted_ids == [live.request_id]


def test_a_full_queue_refuses_new_requests() -> None:
    client, router, _ = _connected()
    router.is_full = True
    with pytest.raises(RequestFailed) as caught:
        client.submit(*_request())
    assert caught.value.status == 429
    assert client.num_live == 0


def test_when_a_batch_is_due_is_said_or_it_is_known_that_it_was_not() -> None:
    client, router, _ = _connected()
    assert client.move_batch(7, 1.5) and router.sent[-1] == BatchDue(7, 1.5)
    router.is_full = True
    assert not client.move_batch(7, 2.5) and router.sent[-1] == BatchDue(7, 1.5)
    client.detach()
    assert not client.move_batch(7, 3.5)


def test_losing_the_router_fails_everything() -> None:
    async def scenario() -> None:
        client, router, clock = _connected()
        live = [client.submit(*_request()) for _ in range(3)]
        _news(client, live[0], [7])
        client.detach()
        assert (await next_delta(live[0])).token_ids.tolist() == [7]
        for request in live:
            with pytest.raises(RequestFailed) as caught:
                await next_delta(request)
            assert caught.value.status == 503
        assert client.num_live == 0
        clock.now_s += 3.0
        assert client.disconnected_s == 3.0
        with pytest.raises(RequestFailed):
            client.submit(*_request())
        with pytest.raises(RequestFailed):
            _ = client.num_kv_slots
        client.attach(router, "second")
        client.on_message(RouterWelcome(boot_id=BOOT_ID, num_kv_slots=64))  # of the old boot
        assert not client.is_ready
        client.on_message(RouterWelcome(boot_id="second", num_kv_slots=32))
        assert client.is_ready
        assert client.num_kv_slots == 32

    _run(scenario())


def test_failing_all_aborts_in_the_router() -> None:
    async def scenario() -> None:
        client, router, _ = _connected()
        live = client.submit(*_request())
        client.fail_all(draining())
        with pytest.raises(RequestFailed):
            await next_delta(live)
        assert router.aborted_ids == [live.request_id]

    _run(scenario())


def test_after_the_end_nothing_is_submitted() -> None:
    async def scenario() -> None:
        client, router, _ = _connected()
        live = client.submit(*_request())
        client.end(draining())
        with pytest.raises(RequestFailed, match="shutting down"):
            await next_delta(live)
        num_sent = len(router.sent)
        with pytest.raises(RequestFailed, match="shutting down"):
            client.submit(*_request())
        assert len(router.sent) == num_sent

    _run(scenario())


def test_a_question_whose_asker_left_fails_without_a_word() -> None:
    async def scenario() -> None:
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        client, router, _ = _connected()
        router.ignores_kv = True
        for question in (client.describe_kv(), client.describe_request("name", None)):
            asker = asyncio.ensure_future(question)
            await asyncio.sleep(0)
            asker.cancel()
            await asyncio.wait({asker})
        client.detach()
        gc.collect()  # what was never looked at is told of when it is collected
        assert not told

    _run(scenario())


def test_readiness_follows_the_workers() -> None:
    client = RouterClient(Clock())
    assert not client.is_ready
    client.attach(FakeRouter(client), BOOT_ID)
    client.on_message(router_status(workers_ready=True))
    assert not client.is_ready  # the pool's size is not known yet
    client.on_message(RouterWelcome(boot_id=BOOT_ID, num_kv_slots=64))
    assert client.is_ready
    client.on_message(router_status(workers_ready=False))
    assert not client.is_ready
    with pytest.raises(RequestFailed):
        client.submit(*_request())
    client.on_message(RouterWelcome(boot_id=BOOT_ID, num_kv_slots=128))
    assert client.num_kv_slots == 128


def _columns(live: list[LiveRequest], tokens: list[int]) -> TokenDelta:
    ids = pack_int64([request.request_id for request in live])
    return TokenDelta(request_ids=ids, token_ids=pack_int32(tokens))


def test_tokens_come_in_columns_too() -> None:
    async def scenario() -> None:
        client, _, _ = _connected()
        live = [client.submit(*_request()) for _ in range(3)]
        client.on_message(_columns(live, [7, 8, 9]))
        _news(client, live[1], [10, 11])
        client.on_message(_columns(live[:2], [12, 13]))
        tokens = [(await next_delta(request)).token_ids.tolist() for request in live]
        assert tokens == [[7, 12], [8, 10, 11, 13], [9]]
        live[0].abort()
        client.on_message(_columns(live, [1, 2, 3]))  # was on its way
        assert (await next_delta(live[2])).token_ids.tolist() == [3]
        assert not client.is_out_of_step

    _run(scenario())


def test_a_column_may_not_say_what_readers_do_not_expect() -> None:
    """A negative token, and one without the log-probabilities that were asked for."""

    async def scenario() -> None:
        client, router, _ = _connected()
        asking = SamplingParams(num_logprobs=1)
        live = [client.submit(*_request()), client.submit(*_request(sampling=asking))]
        other = client.submit(*_request())
        client.on_message(_columns([*live, other], [-1, 7, 9]))
        for request in live:
            with pytest.raises(RequestFailed) as caught:
                await next_delta(request)
            assert caught.value.code == "internal_error"
        assert (await next_delta(other)).token_ids.tolist() == [9]
        assert client.num_rejected == 2
        assert router.aborted_ids == [request.request_id for request in live]

    _run(scenario())


@pytest.mark.parametrize(("ids", "tokens"), [(16, 4), (8, 0), (0, 4), (7, 4), (8, 3)])
def test_columns_that_do_not_fit_together_end_the_session(ids: int, tokens: int) -> None:
    client, _, _ = _connected()
    client.submit(*_request())
    assert not client.is_out_of_step
    client.on_message(TokenDelta(request_ids=bytes(ids), token_ids=bytes(tokens)))
    assert client.is_out_of_step
    assert client.num_rejected == 1


TOP = TokenLogprob(-0.5, [7], [-0.5])


@pytest.mark.parametrize(
    "news",
    [
        {"token_ids": [2**31]},
        {"token_ids": [-1]},
        {"token_ids": [1], "finish_reason": FinishReason.ERROR},
        {"token_ids": [], "finish_reason": FinishReason.STOP},
        {"token_ids": [], "error": ErrorCode.INVALID},
        {"token_ids": [1, 2], "logprobs": [TOP]},
        {"token_ids": [1], "logprobs": []},
        {"token_ids": [1], "logprobs": [TokenLogprob(-0.5, [], [])]},
        {"token_ids": [1], "logprobs": [TokenLogprob(-0.5, [7, 8], [-0.5, -0.6])]},
        {"token_ids": [1], "logprobs": [TokenLogprob(-0.5, [7], [])]},
        {"token_ids": [1], "logprobs": [TokenLogprob(-0.5, [2**40], [-0.5])]},
        {"token_ids": [1], "prompt_logprobs": []},
        {"token_ids": [1], "prompt_logprobs": [TOP, TOP]},
        {"token_ids": [], "prompt_logprobs": [TokenLogprob(-0.5, [], [])]},
    ],
    ids=str,
)
@pytest.mark.parametrize("stop_strings", [(), ("x",)])
def test_what_may_not_be_said_of_a_request_ends_it_alone(
    news: dict[str, Any], stop_strings: tuple[str, ...]
) -> None:
    async def scenario() -> None:
        client, router, _ = _connected()
        asking = SamplingParams(num_logprobs=1, num_prompt_logprobs=1)
        struck = client.submit(*_request(sampling=asking, stop_strings=stop_strings))
        other = client.submit(*_request(sampling=asking))
        given = {"logprobs": [TOP] * len(news["token_ids"]), "prompt_logprobs": [TOP]} | news
        illegal = RequestDelta(struck.request_id, **given)
        legal = RequestDelta(other.request_id, [9], logprobs=[TOP], prompt_logprobs=[TOP])
        client.on_message(TokenDelta(requests=[illegal, legal]))
        with pytest.raises(RequestFailed) as caught:
            await next_delta(struck)
        assert (caught.value.code, caught.value.status) == ("internal_error", 500)
        assert (client.num_rejected, router.aborted_ids) == (1, [struck.request_id])
        delta = await next_delta(other)
        assert list(delta.token_ids) == [9]
        assert client.num_live == 1

    _run(scenario())


def test_a_welcome_without_room_is_none() -> None:
    client = RouterClient(Clock())
    client.attach(FakeRouter(client), BOOT_ID)
    client.on_message(RouterWelcome(boot_id=BOOT_ID, num_kv_slots=0))
    assert not client.is_ready


def test_unknown_requests_are_ignored() -> None:
    client, _, _ = _connected()
    client.on_message(TokenDelta(requests=[RequestDelta(RequestId(99), [1])]))
    assert client.num_live == 0


# What the router is told of outputs with stop strings: progress, and where they end.

REQUEST = prepared(max_tokens=50, stop_strings=("x",))


def _attached() -> tuple[RouterClient, FakeRouter]:
    client = RouterClient()
    router = FakeRouter(client)
    client.attach(router, BOOT_ID)
    client.on_message(RouterWelcome(boot_id=BOOT_ID, num_kv_slots=64))
    return client, router


def _said(router: FakeRouter) -> list[FrontendMessage]:
    return [message for message in router.sent if isinstance(message, Acknowledge | Finish)]


def test_one_frame_for_all_progress_of_a_turn() -> None:
    async def scenario() -> None:
        client, router = _attached()
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
        client, router = _attached()
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
        client, router = _attached()
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
        client, router = _attached()
        live = client.submit(*REQUEST)
        news = RequestDelta(live.request_id, [7, 2], FinishReason.STOP)
        client.on_message(TokenDelta(requests=[news]))
        assert live.is_over
        live.finish(1)
        assert _said(router) == [Finish(request_id=live.request_id, num_tokens=1)]

    _run(scenario())


def test_an_unread_end_is_aborted_in_the_router() -> None:
    async def scenario() -> None:
        client, router = _attached()
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
        client, _ = _attached()
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
            start = functools.partial(setup.service.start, by_token=False)
            choices = await Choices.start(start, requests, per_prompt=8)
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
        client, router = _attached()
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
