"""Long answers: how large they may be, what they take of memory, how long the event loop stands."""

from __future__ import annotations

import asyncio
import gc
import json
import selectors
import time
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_router import (
    Setup,
    copy_bundled_model,
    frontend,
    made_logprobs,
    next_delta,
    prepared,
    says,
)

from lightserve.bundled import BUNDLED_MODEL_NAME
from lightserve.frontend.completion import Completion
from lightserve.frontend.connections import Turns
from lightserve.frontend.news import MAX_TOKENS_PER_TURN, Delta
from lightserve.frontend.service import Service
from lightserve.messages.common import unpack_int32
from lightserve.messages.frontend_router import RequestDelta, Submit, TokenDelta
from lightserve.types import FinishReason, SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_ITEMS = 2_000_000
MAX_EXTRA_BYTES = 64 * 1024 * 1024
"""Of memory, for an answer of so many items."""
MAX_TURN_S = 0.1


def spread(submit: Submit) -> Iterator[RequestDelta]:
    """Answer with max_tokens tokens, made when they are sent."""
    num_prompt = sum(len(unpack_int32(segment.token_ids)) for segment in submit.prompt)
    asked = submit.sampling.num_prompt_logprobs
    if asked is not None:
        for start in range(1, num_prompt, 64):
            numbers = range(start, min(start + 64, num_prompt))
            known = [logprob for n in numbers for logprob in made_logprobs(asked, n)]
            yield RequestDelta(submit.request_id, [], prompt_logprobs=known)
    for start in range(0, submit.max_tokens, 4):
        numbers = range(start, min(start + 4, submit.max_tokens))
        yield RequestDelta(
            submit.request_id,
            [300 + number % 1800 for number in numbers],
            FinishReason.LENGTH if numbers.stop == submit.max_tokens else None,
            logprobs=[
                logprob
                for number in numbers
                for logprob in made_logprobs(submit.sampling.num_logprobs, number)
            ],
        )


async def post(
    setup: Setup, path: str, body: bytes, take: Callable[[bytes], None] = lambda _: None
) -> int:
    """Post without a client that keeps the answer; return the status."""
    status = 0
    is_read = False
    forever: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def receive() -> Any:
        nonlocal is_read
        if is_read:
            return await forever
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        take(message.get("body", b""))

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "scheme": "http",
        "root_path": "",
    }
    await setup.app(scope, receive, send)
    return status


def _completion(**fields: Any) -> dict[str, Any]:
    return {"model": BUNDLED_MODEL_NAME, **fields}


def _chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": BUNDLED_MODEL_NAME, "messages": messages, **fields}


# ---------------------------------------------------------------------- size


@pytest.mark.parametrize(
    ("path", "body", "factors"),
    [
        (
            COMPLETIONS,
            _completion(prompt=[[5] * 30] * 2, n=3, echo=True, logprobs=4, max_tokens=10),
            "20 tokens of 2 prompts by max_tokens times n 3 times (1 + 4 log-probabilities),"
            " and 900 of the prompts",
        ),
        (
            CHAT,
            _chat(n=3, max_completion_tokens=70, logprobs=True, top_logprobs=5, stream=True),
            "70 tokens of 1 prompts by max_completion_tokens times n 3 times (1 + 5",
        ),
        (
            "/generate",
            {"inputs": "a" * 9, "parameters": {"max_new_tokens": 300, "top_n_tokens": 3}},
            "300 tokens of 1 prompts by parameters.max_new_tokens times n 1",
        ),
        (
            CHAT,
            _chat("a" * 80, n=2, max_tokens=1, prompt_logprobs=19, return_token_ids=True),
            "1 tokens of 1 prompts by max_tokens times n 2 times (1 + 0 log-probabilities), and ",
        ),
    ],
)
def test_an_answer_of_too_many_items_is_refused_with_its_factors(
    path: str, body: Any, factors: str
) -> None:
    async def scenario() -> None:
        async with frontend(says([300]), max_answer_items=1199) as setup:
            response = await setup.post(path, body)
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["code"] == "answer_too_large"
            assert (
                "at most 1199 tokens and log-probabilities (--max-answer-items)"
                in (error["message"])
            )
            assert factors in error["message"]
            assert setup.router.submits == []
        async with frontend(says([300]), max_answer_items=2000) as setup:
            assert (await setup.post(path, body)).status_code == 200

    asyncio.run(scenario())


def test_where_nothing_is_asked_the_limit_cuts_the_length() -> None:
    async def scenario() -> None:
        async with frontend(says([300]), max_answer_items=4210) as setup:
            asked = {"n": 2, "logprobs": True, "top_logprobs": 20}
            assert (await setup.post(CHAT, _chat(**asked))).status_code == 200
            assert [submit.max_tokens for submit in setup.router.submits] == [100, 100]

    asyncio.run(scenario())


# ---------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("path", "body", "num_items"),
    [
        (CHAT, _chat(n=8, max_tokens=300, logprobs=True, top_logprobs=20), 8 * 300 * 21),
        (
            COMPLETIONS,
            _completion(prompt=[[300] * 100] * 2, n=4, max_tokens=150, echo=True, logprobs=20),
            2 * 4 * 250 * 21,
        ),
        (COMPLETIONS, _completion(prompt="hi", n=8, max_tokens=700, logprobs=0), 8 * 700),
    ],
)
def test_an_answer_is_made_in_little_memory(path: str, body: Any, num_items: int) -> None:
    async def scenario() -> int:
        async with frontend(spread) as setup:
            setup.router.turns_between = 1
            await post(setup, path, json.dumps({**body, "max_tokens": 1}).encode())
            tracemalloc.start()
            try:
                assert await post(setup, path, json.dumps(body).encode()) == 200
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

    fixed = 1024 * 1024  # what any request takes, however short
    peak = asyncio.run(scenario())
    assert peak - fixed <= MAX_EXTRA_BYTES * num_items / MAX_ITEMS


# ---------------------------------------------------------------------- time


class _Selector(selectors.DefaultSelector):
    """Knows what the longest turn of the loop has cost its own thread."""

    worst_s = 0.0
    _began_s: float | None = None

    def select(self, timeout: float | None = None) -> Any:
        if self._began_s is not None:
            self.worst_s = max(self.worst_s, time.thread_time() - self._began_s)
        events = super().select(timeout)
        self._began_s = time.thread_time()
        return events

    def begin(self) -> None:
        """Forget what was before."""
        self.worst_s, self._began_s = 0.0, time.thread_time()


def _worst_turn_s(scenario: Callable[[_Selector], Awaitable[None]]) -> float:
    selector = _Selector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:

        async def main() -> None:
            await scenario(selector)

        runner.run(main())
    return selector.worst_s


def _history(arguments: str) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": "a", "content": "x"}
    body = _chat(max_tokens=1)
    return {**body, "messages": [{"role": "assistant", "tool_calls": [call]}, answer]}


LARGE: dict[str, tuple[str, Any, int]] = {
    "lists in arguments": (CHAT, _history("[" + "[]," * 1_300_000 + "[]]"), 400),
    "numbers in arguments": (CHAT, _history("[" + "1," * 2_000_000 + "1]"), 400),
    "a string in arguments": (CHAT, _history(json.dumps({"a": "x," * 2_000_000})), 400),
    "tokens of a text": ("/tokenize", {"inputs": "hello wor" * 40_000}, 200),
    "text of tokens": ("/detokenize", {"tokens": [300] * 130_000}, 200),
    "prompts of ids": (COMPLETIONS, _completion(prompt=[[300] * 120_000] * 4, n=16), 200),
    "prompts without text": (COMPLETIONS, _completion(prompt=[[1] * 120_000] * 4, n=16), 200),
    "ids echoed": (COMPLETIONS, _completion(prompt=[[300] * 120_000] * 4, echo=True), 200),
    "a prompt echoed with log-probabilities": (
        COMPLETIONS,
        _completion(prompt=[300] * 20_000, echo=True, logprobs=5, max_tokens=1),
        200,
    ),
    "the same as a stream": (
        COMPLETIONS,
        _completion(prompt=[300] * 20_000, echo=True, logprobs=5, max_tokens=1, stream=True),
        200,
    ),
    "many log-probabilities": (
        CHAT,
        _chat(n=16, max_tokens=150, logprobs=True, top_logprobs=20),
        200,
    ),
    "many log-probabilities as a stream": (
        CHAT,
        _chat(n=16, max_tokens=150, logprobs=True, top_logprobs=20, stream=True),
        200,
    ),
    "numbers in a schema": (
        CHAT,
        _chat(structured_outputs={"json": {"enum": [1] * 2_000_000}}),
        400,
    ),
    "numbers in a tool": (
        CHAT,
        _chat(
            tools=[
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"a": [1] * 2_000_000}},
                }
            ]
        ),
        400,
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_nothing_that_a_client_sends_stops_the_loop(name: str, tmp_path: Path) -> None:
    path, fields, status = LARGE[name]
    body = json.dumps(fields, separators=(",", ":")).encode()
    assert len(body) <= 4 * 1024 * 1024

    async def scenario(selector: _Selector) -> None:
        model = copy_bundled_model(tmp_path, max_position_embeddings=131_072)
        flags = {"model": model, "served_model_name": BUNDLED_MODEL_NAME}
        async with frontend(spread, tool_call_parser="hermes", **flags) as setup:
            setup.router.turns_between = 1
            await asyncio.sleep(0)
            gc.freeze()  # as the process does: what other tests left is no part of this
            selector.begin()
            try:
                assert await post(setup, path, body) == status
            finally:
                gc.unfreeze()
            worst_s = selector.worst_s
        selector.worst_s = worst_s

    assert _worst_turn_s(scenario) <= MAX_TURN_S


def test_a_backlog_is_taken_in_parts() -> None:
    """A client that has not read for a while has much to catch up with, a part in each turn."""
    known = [logprob for number in range(1000) for logprob in made_logprobs(3, number)]

    async def scenario() -> list[Delta]:
        async with frontend() as setup:
            asking = prepared(max_tokens=1000, sampling=SamplingParams(num_logprobs=3))
            live = setup.service.router.submit(*asking)
            tokens, end = list(range(1000)), FinishReason.LENGTH
            news = RequestDelta(live.request_id, tokens, end, logprobs=known, num_cached_tokens=1)
            setup.service.router.on_message(TokenDelta(requests=[news]))
            deltas = [await next_delta(live)]
            while deltas[-1].finish_reason is None:
                deltas.append(await next_delta(live))
            return deltas

    deltas = asyncio.run(scenario())
    assert [token for delta in deltas for token in delta.token_ids] == list(range(1000))
    assert [logprob for delta in deltas for logprob in delta.logprobs or ()] == known
    assert max(len(delta.token_ids) for delta in deltas) <= MAX_TOKENS_PER_TURN
    assert sum(delta.num_cached_tokens for delta in deltas) == 1


def test_long_answers_are_written_in_turns() -> None:
    """However many there are, one turn of the event loop is for one of them."""

    async def scenario() -> list[int]:
        turns, worked = Turns(), [0]

        async def write() -> None:
            for _ in range(5):
                await turns.next()
                worked[-1] += 1

        writing = [asyncio.create_task(write()) for _ in range(50)]
        while not all(task.done() for task in writing):
            worked.append(0)
            await asyncio.sleep(0)
        return worked

    worked = asyncio.run(scenario())
    assert sum(worked) == 250
    assert max(worked) == 1


def test_many_completions_are_submitted_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []
    turn, start = 0, Service.start

    def noting(*args: Any, **kwargs: Any) -> Completion:
        turns.append(turn)
        return start(*args, **kwargs)

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def scenario() -> None:
        async with frontend(says([300])) as setup:
            counting = asyncio.create_task(count())
            body = {"model": BUNDLED_MODEL_NAME, "prompt": [[5]] * 8, "n": 16, "max_tokens": 1}
            assert (await setup.post(COMPLETIONS, body)).status_code == 200
            counting.cancel()

    monkeypatch.setattr(Service, "start", noting)
    asyncio.run(scenario())
    assert len(turns) == 128 and max(Counter(turns).values()) <= 8
