"""Several completions of one request."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.fake_router import (
    Setup,
    copy_bundled_model,
    eventually,
    frontend,
    prepared,
    sse_data,
    token_delta,
)

from lightserve.bundled import BUNDLED_MODEL_NAME
from lightserve.frontend.completion import Choices, News
from lightserve.frontend.errors import ClientGone
from lightserve.frontend.news import QUICK_TOKENS
from lightserve.messages.common import unpack_int32
from lightserve.messages.frontend_router import ErrorCode, RequestDelta, Submit, TokenDelta
from lightserve.types import FinishReason, RequestClass


async def _start(
    setup: Setup,
    count: int,
    request_class: RequestClass = RequestClass.RT,
    stop_strings: tuple[str, ...] = (),
) -> Choices:
    request = prepared(request_class=request_class, stop_strings=stop_strings)
    start = functools.partial(setup.service.start, by_token=False)
    return await Choices.start(start, [request] * count, per_prompt=count)


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


@pytest.mark.parametrize("end", ["a beat", "the last token"])
def test_best_effort_tokens_are_written_together(end: str) -> None:
    """The first one at once, then those of an interval, or all that there are at the end."""

    async def scenario() -> None:
        interval_ms = 50.0 if end == "a beat" else 10_000.0
        async with frontend(be_stream_interval_ms=interval_ms) as setup:
            texts: list[str] = []
            sink = FakeSink("be", [])
            sink.take = lambda news, now_s: texts.extend(delta.text for _, delta in news)
            choices = await _start(setup, 1, RequestClass.BE)
            task = asyncio.create_task(choices.next_news(sink))
            await asyncio.sleep(0)
            for _ in range(4):
                _say(setup, 300)
                await asyncio.sleep(0)
            assert len(texts) == 1
            if end == "a beat":
                await eventually(lambda: len(texts) > 1)
                assert texts[1] == texts[0] * 3
                assert not task.done()
            _say(setup, 300, finish_reason=FinishReason.LENGTH)
            rest = (await asyncio.wait_for(task, 5))[1]
            assert rest.finish_reason is FinishReason.LENGTH
            assert "".join(texts) + rest.text == texts[0] * 5

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fields", "can_wait"),
    [
        ({"request_class": RequestClass.RT}, False),
        ({"request_class": RequestClass.BE}, True),
        ({"request_class": RequestClass.BE, "stop_strings": ("§",)}, False),
    ],
)
def test_only_tokens_that_are_not_waited_for_can_wait(
    fields: dict[str, Any], can_wait: bool
) -> None:
    async def scenario() -> None:
        async with frontend() as setup:
            choices = await _start(setup, 1, **fields)
            assert choices.can_wait is can_wait

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


# n completions of several prompts: which news belong to which, and one failure ends all.

BODY: dict[str, Any] = {"model": BUNDLED_MODEL_NAME, "prompt": [[300], [301, 302]], "n": 3}
NUM_CHOICES = 6


def _tokens(submit: Submit) -> list[int]:
    """An output that tells prompt and choice; the later the choice, the earlier it ends."""
    (first, *_) = unpack_int32(submit.prompt[0].token_ids).tolist()
    return [first + 10, *[320 + submit.sampling.choice] * (4 - submit.sampling.choice)]


def _echoes(submit: Submit) -> list[RequestDelta]:
    tokens = _tokens(submit)
    ends = [None] * (len(tokens) - 1) + [FinishReason.LENGTH]
    return [
        RequestDelta(submit.request_id, [token], end, num_cached_tokens=number == 0)
        for number, (token, end) in enumerate(zip(tokens, ends, strict=True))
    ]


def _fails_in_the_third(submit: Submit) -> list[RequestDelta]:
    if submit.request_id != 2:
        return [RequestDelta(submit.request_id, [300])]
    return [RequestDelta(submit.request_id, [], FinishReason.ERROR, ErrorCode.NON_FINITE_LOGITS)]


@pytest.mark.parametrize("turns_between", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_has_its_own_text(stream: bool, turns_between: int) -> None:
    async def scenario() -> None:
        async with frontend(_echoes) as setup:
            setup.router.turns_between = turns_between
            options = {"include_usage": True} if stream else None
            body = {**BODY, "stream": stream, "stream_options": options}
            response = await setup.post("/v1/completions", body)
            decode = setup.service.model.tokenizer.decode
            expected = {n: decode(_tokens(s)) for n, s in enumerate(setup.router.submits)}
            assert len(expected) == NUM_CHOICES
            assert len(set(expected.values())) == NUM_CHOICES
            if stream:
                *chunks, last, done = sse_data(response.text)
                assert done == "[DONE]"
                choices = [chunk["choices"][0] for chunk in chunks]
                reasons = [c["index"] for c in choices if c["finish_reason"] is not None]
                assert sorted(reasons) == list(range(NUM_CHOICES))
                usage = last["usage"]
            else:
                choices, usage = response.json()["choices"], response.json()["usage"]
                assert [choice["index"] for choice in choices] == list(range(NUM_CHOICES))
            texts = dict.fromkeys(expected, "")
            for choice in choices:
                texts[choice["index"]] += choice["text"]
            assert texts == expected
            assert usage["prompt_tokens"] == 3  # a prompt counts once
            assert usage["completion_tokens"] == sum(map(len, map(_tokens, setup.router.submits)))
            assert usage["prompt_tokens_details"]["cached_tokens"] == 2
            assert setup.service.router.num_live == 0
            assert not setup.router.aborted_ids

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_one_failure_ends_all(stream: bool) -> None:
    async def scenario() -> None:
        async with frontend(_fails_in_the_third) as setup:
            response = await setup.post("/v1/completions", {**BODY, "stream": stream})
            if stream:
                error = sse_data(response.text)[-1]["error"]
            else:
                assert response.status_code == 500
                error = response.json()["error"]
            assert error["code"] == ErrorCode.NON_FINITE_LOGITS
            assert sorted(setup.router.aborted_ids) == [0, 1, 3, 4, 5]
            assert setup.service.router.num_live == 0
            assert setup.service.in_flight.count == 0

    asyncio.run(scenario())


def test_all_are_submitted_or_none() -> None:
    async def scenario() -> None:
        async with frontend() as setup:
            send = setup.router.send

            def full_after_two(message: Any) -> None:
                setup.router.is_full = isinstance(message, Submit) and message.request_id >= 2
                send(message)

            setup.router.send = full_after_two  # type: ignore[method-assign]
            response = await setup.post("/v1/completions", BODY)
            assert response.status_code == 429
            assert "retry-after" in response.headers
            assert setup.router.aborted_ids == [0, 1]
            assert setup.service.router.num_live == 0

    asyncio.run(scenario())


def test_served_names_and_keys() -> None:
    async def scenario() -> None:
        names = ["tiny", "tiny-2"]
        async with frontend(_echoes, served_model_name="tiny, tiny-2") as setup:
            listed = (await setup.http.get("/v1/models")).json()["data"]
            assert [model["id"] for model in listed] == names
            for name in names:
                body = {**BODY, "model": name, "metadata": {"b": "1", "a": "2"}}
                assert (await setup.post("/v1/completions", body)).json()["model"] == name
                assert (await setup.http.get(f"/v1/models/{name}")).json()["id"] == name
            assert (await setup.post("/v1/completions", BODY)).status_code == 404
            assert setup.router.submits[-1].prediction_key == '{"a": "2", "b": "1"}'

    asyncio.run(scenario())


@pytest.mark.parametrize(("choice", "expected"), [("auto", (0.5, 7)), ("none", (1.0, 0))])
def test_defaults_are_the_models_unless_told(
    tmp_path: Path, choice: str, expected: tuple[float, int]
) -> None:
    async def scenario() -> None:
        model = copy_bundled_model(tmp_path)
        path = tmp_path / "generation_config.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | {"temperature": 0.5, "top_k": 7}))
        flags = {"model": model, "served_model_name": BUNDLED_MODEL_NAME}
        async with frontend(_echoes, generation_config=choice, **flags) as setup:
            assert (await setup.post("/v1/completions", BODY)).status_code == 200
            sampling = setup.router.submits[-1].sampling
            assert (sampling.temperature, sampling.top_k) == expected

    asyncio.run(scenario())
