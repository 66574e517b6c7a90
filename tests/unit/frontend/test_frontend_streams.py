"""What answers look like, streamed and whole, and how they end when something goes wrong."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, example, given, settings
from support.fake_router import Answer, eventually, frontend, made_logprobs, says, sse_data
from support.forced_streams import ForcedCase, ForcedFrontend, expected_text, forced_cases
from support.grids import choose, more_when_long

from lightserve.bundled import BUNDLED_MODEL_DIR, BUNDLED_MODEL_NAME
from lightserve.messages.frontend_router import (
    MAX_UNACKNOWLEDGED_TOKENS,
    ErrorCode,
    RequestDelta,
    Submit,
)
from lightserve.models.config import load_model_config
from lightserve.tokenization.tokenizer import Tokenizer
from lightserve.types import FinishReason

TEXT = "Grüße 😀 日本!"
COMPLETION: dict[str, Any] = {"model": BUNDLED_MODEL_NAME, "prompt": "hi", "max_tokens": 500}
CHAT: dict[str, Any] = {
    "model": BUNDLED_MODEL_NAME,
    "messages": [{"role": "user", "content": "hi"}],
}
GENERATE: dict[str, Any] = {"inputs": "hi"}
EOS = Tokenizer(BUNDLED_MODEL_DIR).eos_token_ids[0]
STREAMS = [
    ("/v1/completions", {**COMPLETION, "stream": True}),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/generate_stream", GENERATE),
]


def _tokens_of(text: str) -> list[int]:
    async def scenario() -> list[int]:
        async with frontend() as setup:
            return setup.service.model.tokenizer.encode(text, add_special_tokens=False)

    return asyncio.run(scenario())


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return _tokens_of(TEXT)


async def _post(answer: Answer, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
    async with frontend(answer) as setup:
        setup.router.turns_between = options.get("turns_between", 10)
        response = await setup.post(path, body)
        assert setup.service.in_flight.count == 0
        assert setup.service.router.num_live == 0
        return response


@pytest.mark.parametrize("turns_between", [0, 10], ids=["merged", "one-by-one"])
@pytest.mark.parametrize("usage", [False, True, None])
def test_completion_stream(tokens: list[int], usage: bool | None, turns_between: int) -> None:
    body = {**COMPLETION, "stream": True, "stream_options": {"include_usage": usage}}
    response = asyncio.run(
        _post(says([*tokens, EOS]), "/v1/completions", body, turns_between=turns_between)
    )
    assert response.headers["content-type"] == "text/event-stream"
    *chunks, done = sse_data(response.text)
    assert done == "[DONE]"
    if usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == len(tokens) + 1
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert (len(chunks) > 3) == (turns_between > 0)


def test_chat_stream_begins_with_the_role_and_ends_with_the_reason(tokens: list[int]) -> None:
    response = asyncio.run(
        _post(says([*tokens, EOS]), "/v1/chat/completions", {**CHAT, "stream": True})
    )
    *chunks, done = sse_data(response.text)
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == TEXT
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices][-2:] == [None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_whole_answers(tokens: list[int]) -> None:
    answer = says([*tokens, EOS])
    completion = asyncio.run(_post(answer, "/v1/completions", COMPLETION)).json()
    assert completion["choices"][0]["text"] == TEXT
    assert completion["choices"][0]["finish_reason"] == "stop"
    usage = completion["usage"]
    assert usage["completion_tokens"] == len(tokens) + 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    chat = asyncio.run(_post(answer, "/v1/chat/completions", CHAT)).json()
    assert chat["choices"][0]["message"] == {
        "role": "assistant",
        "content": TEXT,
        "refusal": None,
    }
    assert chat["object"] == "chat.completion"
    assert asyncio.run(_post(answer, "/generate", GENERATE)).json() == {"generated_text": TEXT}


@pytest.mark.parametrize("cut", range(1, 9))
def test_an_answer_cut_inside_a_character_is_the_same_streamed_and_whole(
    tokens: list[int], cut: int
) -> None:
    answer = says(tokens[-8:])
    whole = asyncio.run(_post(answer, "/v1/completions", {**COMPLETION, "max_tokens": cut})).json()
    body = {**COMPLETION, "max_tokens": cut, "stream": True}
    response = asyncio.run(_post(answer, "/v1/completions", body))
    chunks = sse_data(response.text)[:-1]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == whole["choices"][0]["text"]
    assert text.rstrip("\ufffd") in TEXT


def test_eos_is_not_text_even_if_it_is_no_special_token(tokens: list[int]) -> None:
    async def scenario() -> None:
        async with frontend() as setup:
            plain = tokens[0]
            object.__setattr__(setup.service.model.tokenizer, "eos_token_ids", (plain,))
            setup.router.answer = says([tokens[1], plain])
            text = (await setup.post("/v1/completions", COMPLETION)).json()["choices"][0]["text"]
            assert text == setup.service.model.tokenizer.decode([tokens[1]])
            setup.router.answer = says([tokens[1], plain], FinishReason.LENGTH)
            text = (await setup.post("/v1/completions", COMPLETION)).json()["choices"][0]["text"]
            assert text == setup.service.model.tokenizer.decode([tokens[1], plain])

    asyncio.run(scenario())


@pytest.mark.parametrize("turns_between", [0, 10])
@pytest.mark.parametrize("details", [False, True])
def test_generate_stream_has_one_event_per_token(
    tokens: list[int], details: bool, turns_between: int
) -> None:
    body = {"inputs": "hi", "parameters": {"details": details, "seed": 5}}
    answer = says([*tokens, EOS])
    response = asyncio.run(_post(answer, "/generate_stream", body, turns_between=turns_between))
    events = sse_data(response.text)
    assert [event["token"]["id"] for event in events] == [*tokens, EOS]
    assert [event["index"] for event in events] == list(range(1, len(tokens) + 2))
    assert "".join(event["token"]["text"] for event in events) == TEXT
    assert [event["token"]["special"] for event in events] == [False] * len(tokens) + [True]
    assert [event["generated_text"] for event in events] == [None] * len(tokens) + [TEXT]
    assert all(event["details"] is None for event in events[:-1])
    expected = {
        "finish_reason": "eos_token",
        "generated_tokens": len(tokens) + 1,
        "seed": 5,
        "input_length": len(_tokens_of("hi")) + 1,
    }
    assert events[-1]["details"] == (expected if details else None)


def test_generate_details(tokens: list[int]) -> None:
    body = {"inputs": "hi", "parameters": {"details": True, "max_new_tokens": 2}}
    details = asyncio.run(_post(says(tokens), "/generate", body)).json()["details"]
    assert details["finish_reason"] == "length"
    assert details["generated_tokens"] == 2
    assert [token["id"] for token in details["tokens"]] == tokens[:2]


def _fails(error: ErrorCode, *, after: list[int]) -> Answer:
    def answer(submit: Submit) -> list[RequestDelta]:
        num_top = submit.sampling.num_logprobs
        news = [
            RequestDelta(submit.request_id, [token], logprobs=made_logprobs(num_top, number))
            for number, token in enumerate(after)
        ]
        return [*news, RequestDelta(submit.request_id, [], FinishReason.ERROR, error)]

    return answer


STATUS = {
    ErrorCode.QUEUE_FULL: 429,
    ErrorCode.REQUEST_QUOTA: 429,
    ErrorCode.TOKEN_QUOTA: 429,
    ErrorCode.WORKER_LOST: 503,
    ErrorCode.NON_FINITE_LOGITS: 500,
    ErrorCode.TOO_LARGE: 400,
    ErrorCode.CONSTRAINT_FAILED: 400,
    ErrorCode.INVALID: 500,
}
TYPES = {
    400: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


@pytest.mark.parametrize("error", ErrorCode)
@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_an_error_before_the_first_text_is_a_status(
    tokens: list[int], path: str, body: dict[str, Any], error: ErrorCode
) -> None:
    response = asyncio.run(_post(_fails(error, after=[]), path, body))
    assert response.status_code == STATUS[error]
    assert response.json()["error"]["message"]
    assert response.json()["error"]["type"] == TYPES[STATUS[error]]
    assert ("retry-after" in response.headers) == (STATUS[error] in (429, 503))


def test_what_the_router_finds_too_large_names_the_context() -> None:
    def answer(submit: Submit) -> list[RequestDelta]:
        ends = FinishReason.ERROR, ErrorCode.TOO_LARGE
        return [RequestDelta(submit.request_id, [], *ends, max_tokens=77)]

    error = asyncio.run(_post(answer, *STREAMS[0])).json()["error"]
    assert error["message"].startswith("This model's maximum context length is 77 tokens")
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("error", ErrorCode)
@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_an_error_in_the_middle_is_an_event(
    tokens: list[int], path: str, body: dict[str, Any], error: ErrorCode
) -> None:
    response = asyncio.run(_post(_fails(error, after=tokens[:3]), path, body))
    assert response.status_code == 200
    *chunks, last = sse_data(response.text)
    assert chunks
    assert last.keys() == {"error"}
    assert "[DONE]" not in chunks


def test_an_error_after_half_a_character_is_still_a_status(tokens: list[int]) -> None:
    async def scenario() -> None:
        async with frontend() as setup:
            tokenizer = setup.service.model.tokenizer
            half = next(token for token in tokens if not tokenizer.detokenizer([5]).push([token]))
            setup.router.answer = _fails(ErrorCode.WORKER_LOST, after=[half])
            response = await setup.post("/v1/completions", {**COMPLETION, "stream": True})
            assert response.status_code == 503

    asyncio.run(scenario())


def test_an_error_ends_a_whole_answer_with_a_status(tokens: list[int]) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/generate", GENERATE)):
        answer = _fails(ErrorCode.WORKER_LOST, after=tokens[:3])
        assert asyncio.run(_post(answer, path, body)).status_code == 503


def test_a_bug_says_nothing_about_itself(
    monkeypatch: pytest.MonkeyPatch, tokens: list[int]
) -> None:
    async def scenario() -> None:
        async with frontend(says(tokens)) as setup:

            def fail(*_: Any) -> None:
                raise ZeroDivisionError("/secret/path at 0xdeadbeef")

            monkeypatch.setattr(setup.service.router, "submit", fail)
            response = await setup.post("/v1/completions", COMPLETION)
            assert response.status_code == 500
            assert response.json()["error"]["message"] == "an internal error occurred"
            assert setup.service.in_flight.count == 0

    asyncio.run(scenario())


def test_losing_the_router_in_the_middle_of_a_stream(tokens: list[int]) -> None:
    async def scenario() -> None:
        async with frontend(lambda submit: [RequestDelta(submit.request_id, tokens[:3])]) as setup:
            task = asyncio.create_task(setup.post("/v1/chat/completions", {**CHAT, "stream": True}))
            await setup.router.submitted()
            await asyncio.sleep(0.05)
            setup.service.router.detach()
            *chunks, last = sse_data((await task).text)
            assert chunks
            assert last["error"]["code"] == "router_lost"
            refused = await setup.post("/v1/chat/completions", CHAT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")

    asyncio.run(scenario())


def test_the_openai_client_understands_everything(tokens: list[int]) -> None:
    async def scenario() -> None:
        async with frontend(says([*tokens, EOS])) as setup:
            client = openai.AsyncOpenAI(
                api_key="none",
                base_url="http://localhost/v1",
                http_client=setup.http,
                max_retries=0,
            )
            models = await client.models.list()
            assert [model.id for model in models.data] == [BUNDLED_MODEL_NAME]
            card = await client.models.retrieve(BUNDLED_MODEL_NAME)
            assert card.owned_by == "lightserve"
            assert card.model_extra is not None and card.model_extra["root"] == BUNDLED_MODEL_NAME
            whole = await client.chat.completions.create(**CHAT)
            assert whole.choices[0].message.content == TEXT
            # A conversation goes on with the very message that came.
            turn: Any = {"role": "user", "content": "more"}
            messages = [*CHAT["messages"], whole.choices[0].message, turn]
            await client.chat.completions.create(**{**CHAT, "messages": messages})
            stream = await client.chat.completions.create(
                **CHAT, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
            assert "".join(texts) == TEXT
            assert chunks[-1].usage is not None
            completion = await client.completions.create(**COMPLETION)
            assert completion.choices[0].text == TEXT
            pieces = await client.completions.create(**COMPLETION, stream=True)
            assert "".join([piece.choices[0].text async for piece in pieces]) == TEXT
            with pytest.raises(openai.BadRequestError) as bad:
                await client.completions.create(**COMPLETION, n=17)
            assert (bad.value.param, bad.value.code) == ("n", "invalid_value")
            with pytest.raises(openai.NotFoundError) as missing:
                await client.completions.create(model="m", prompt="x")
            assert missing.value.code == "model_not_found"
            setup.router.answer = _fails(ErrorCode.WORKER_LOST, after=tokens[:3])
            broken = await client.completions.create(**COMPLETION, stream=True)
            with pytest.raises(openai.APIError, match="restarting its workers"):
                [piece async for piece in broken]

    asyncio.run(scenario())


def test_logs_name_the_request_and_never_its_text(
    tokens: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> str:
        async with frontend(says([*tokens, EOS])) as setup:
            body = {**COMPLETION, "prompt": "a secret", "user": "jane@example.org"}
            response = await setup.post("/v1/completions", body)
            await eventually(lambda: setup.service.in_flight.count == 0)
            return str(response.json()["id"])

    with caplog.at_level("DEBUG", logger="lightserve"):
        request_id = asyncio.run(scenario())
    key = hashlib.sha256(b"jane@example.org").hexdigest()[:12]
    line = f"request={request_id} class=rt outcome=stop client=- prediction_key={key} "
    assert line in caplog.text
    assert "jane" not in caplog.text
    assert "secret" not in caplog.text
    assert "Grüße" not in caplog.text


@pytest.mark.parametrize("sent", [{"X-Request-Id": "trace-7"}, {}], ids=["sent", "made"])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", COMPLETION | {"n": 2}), ("/v1/chat/completions", CHAT)],
)
def test_the_router_learns_what_the_client_calls_a_request(
    path: str, body: dict[str, Any], sent: dict[str, str]
) -> None:
    """For the decision log: the id in the answer, and the X-Request-Id."""

    async def scenario() -> None:
        async with frontend(says([EOS])) as setup:
            response = await setup.http.post(path, json=body, headers=sent)
            names = (response.json()["id"], response.headers["x-request-id"])
            found = [submit.names for submit in setup.router.submits]
            assert found == [names] * body.get("n", 1)
            assert not sent or names[1] == "trace-7"

    asyncio.run(scenario())


# Forced tokens that cut characters and stop strings: the same answer whatever the frontend's lag.

TOKENIZER = Tokenizer(BUNDLED_MODEL_DIR)
VOCAB_SIZE = load_model_config(BUNDLED_MODEL_DIR).vocab_size
NUM_CASES = choose(100, 10_000)


@pytest.fixture(scope="module")
def forced() -> Iterator[ForcedFrontend]:
    with ForcedFrontend() as running:
        yield running


def _by_bytes(text: str, stops: tuple[str, ...], *, includes_stop: bool = False) -> ForcedCase:
    """One token for each byte, and no end by itself."""
    ids = {TOKENIZER.bytes_of(i): i for i in range(VOCAB_SIZE)}
    token_ids = tuple(ids[bytes([byte])] for byte in text.encode(errors="surrogateescape"))
    return ForcedCase(token_ids, stops, includes_stop, None, (1,))


@more_when_long
@given(case=forced_cases(TOKENIZER, vocab_size=VOCAB_SIZE))
@example(case=_by_bytes("aa😀b", ("😀b",)))
@example(case=_by_bytes("a" * 60 + "é" + "b" * 60, ("éb",)))
@example(case=_by_bytes("a\udcf0\udc9f", ()))  # ends inside a character
@example(case=_by_bytes("a\udcf0\udc9f", ("\ufffd",)))
@settings(
    max_examples=NUM_CASES, deadline=None, suppress_health_check=[*HealthCheck], database=None
)
def test_answers_are_exact_with_any_lag(forced: ForcedFrontend, case: ForcedCase) -> None:
    forced.check(case)


@pytest.mark.parametrize(
    ("case", "expected", "num_tokens"),
    [
        (_by_bytes("one END two", ("END",)), "one ", 7),
        (_by_bytes("one END two", ("END",), includes_stop=True), "one END", 7),
        (_by_bytes("abc", ("abc", "b")), "a", 2),  # complete first, though it begins later
        (_by_bytes("EEND", ("END",)), "E", 4),
        (_by_bytes("EN EN", ("END",)), "EN EN", 5),  # held back, and never complete
        (_by_bytes("日本", ("本",)), "日", 6),
        (_by_bytes("日本", ("日本",)), "", 6),
    ],
)
def test_where_outputs_end(
    forced: ForcedFrontend, case: ForcedCase, expected: str, num_tokens: int
) -> None:
    answer, *_ = forced.answers(case, (0.0,))
    assert (answer.text, answer.usage["completion_tokens"]) == (expected, num_tokens)
    assert expected_text(TOKENIZER, case)[::2] == (expected, num_tokens)
    assert answer.num_finished == num_tokens  # also where the router ended it itself


def test_a_slow_frontend_stops_the_router_at_the_limit(forced: ForcedFrontend) -> None:
    """And at no lag it goes on: otherwise the limit would not be what stopped it."""
    for lag_s, furthest in ((0.0, 2), (0.05, MAX_UNACKNOWLEDGED_TOKENS)):
        forced.router.num_ahead = 0
        (answer, _) = forced.answers(_by_bytes("a" * 100, ("never",)), (lag_s,))
        assert answer.text == "a" * 100
        assert forced.router.num_ahead <= furthest
    assert forced.router.num_ahead == MAX_UNACKNOWLEDGED_TOKENS


# `stream_options`: usage in the last chunk, in every chunk, in none.

TOKENS = [300, 301, 302, 303]
COMPLETIONS, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": [5, 6, 7]},
    CHAT_PATH: {"messages": [{"role": "user", "content": "hi"}]},
}


def _stream(path: str, options: dict[str, Any] | None, **fields: Any) -> list[Any]:
    async def scenario() -> list[Any]:
        async with frontend(says([*TOKENS, 2])) as setup:
            body = BODIES[path] | {"model": BUNDLED_MODEL_NAME, "stream": True, "max_tokens": 50}
            body |= {"stream_options": options, **fields}
            response = await setup.post(path, body)
            assert response.status_code == 200, response.text
            *chunks, end = sse_data(response.text)
            assert end == "[DONE]"
            return chunks

    return asyncio.run(scenario())


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", BODIES)
def test_every_chunk_says_what_its_choice_has_used_so_far(path: str, n: int) -> None:
    *chunks, last = _stream(path, {"include_usage": True, "continuous_usage_stats": True}, n=n)
    for index in range(n):
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        used = [chunk["usage"]["completion_tokens"] for chunk in own]
        assert used == sorted(used)
        assert used[-1] == len(TOKENS) + 1
        assert len(set(used)) > 2  # not all at the end
        for chunk in own:
            usage = chunk["usage"]
            assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == n * (len(TOKENS) + 1)


@pytest.mark.parametrize("path", BODIES)
def test_the_last_chunk_with_text_has_the_finish_reason_and_all_usage(path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = _stream(path, options, max_tokens=len(TOKENS))
    (choice,) = chunks[-1]["choices"]
    assert choice["finish_reason"] == "length"
    assert choice.get("text") or choice["delta"]["content"]
    used = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    begun = list(itertools.dropwhile(lambda number: number == 0, used))
    assert begun == sorted(set(begun)), "each chunk with text counts more than those before"
    assert begun[-1] == last["usage"]["completion_tokens"] == len(TOKENS)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks if _begins(chunk)] == (
        [0] if path == CHAT_PATH else []
    )


def _begins(chunk: dict[str, Any]) -> bool:
    return "role" in chunk["choices"][0].get("delta", {})


@pytest.mark.parametrize("path", BODIES)
def test_usage_that_is_not_wanted_at_all_is_in_no_chunk(path: str) -> None:
    chunks = _stream(path, {"include_usage": False, "continuous_usage_stats": True})
    assert not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("path", BODIES)
def test_otherwise_the_last_chunk_has_it_or_none(path: str) -> None:
    *chunks, last = _stream(path, {"include_usage": True, "continuous_usage_stats": False})
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert last["usage"]["completion_tokens"] == len(TOKENS) + 1
    for options in ({}, None, {"include_usage": False}):
        assert not any("usage" in chunk for chunk in _stream(path, options))


@pytest.mark.parametrize("path", BODIES)
def test_chunks_are_not_padded_and_may_be_said_not_to_be(path: str) -> None:
    plain = _stream(path, None, seed=1)
    told = _stream(path, {"include_obfuscation": False}, seed=1)
    assert [chunk["choices"] for chunk in told] == [chunk["choices"] for chunk in plain]
    assert not any("obfuscation" in chunk for chunk in told)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"include_obfuscation": True}, "stream_options.include_obfuscation"),
        ({"continuous_usage_stats": True}, "stream_options.continuous_usage_stats"),
    ],
)
def test_what_is_not_done_is_refused(path: str, options: dict[str, Any], param: str) -> None:
    async def scenario() -> None:
        async with frontend() as setup:
            body = BODIES[path] | {"model": BUNDLED_MODEL_NAME, "stream": True}
            response = await setup.post(path, body | {"stream_options": options})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param

    asyncio.run(scenario())
