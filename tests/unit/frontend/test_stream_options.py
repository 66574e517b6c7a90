"""`stream_options`: usage in the last chunk, in every chunk, in none."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from support.fake_router import frontend, says, sse_data

from lightserve.bundled import BUNDLED_MODEL_NAME

TOKENS = [300, 301, 302, 303]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": [5, 6, 7]},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
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
        [0] if path == CHAT else []
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
