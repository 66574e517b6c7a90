"""huggingface_hub's client of text-generation-inference, as it is, against a frontend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import InferenceClient
from support.fake_router import Setup, frontend, says, sse_data
from support.running_frontend import running_frontend

from lightserve.bundled import BUNDLED_MODEL_NAME

EOS = 2
TOKENS = [300, 301, EOS]


def _ask(tmp_path: Path, call: Callable[[InferenceClient], Any]) -> Any:
    """Return what the client makes of a server's answer; it waits in a thread of its own."""

    async def run() -> Any:
        async with running_frontend(tmp_path) as running:
            await running.router_up(says(TOKENS))
            client = InferenceClient(base_url=f"http://127.0.0.1:{running.port}", timeout=60)
            return await asyncio.to_thread(call, client)

    return asyncio.run(run())


def test_text_as_a_whole(tmp_path: Path) -> None:
    def call(client: InferenceClient) -> tuple[Any, Any]:
        plain = client.text_generation(
            "hi there", max_new_tokens=5, watermark=False, best_of=1, truncate=3, stop=["zzz"]
        )
        full = client.text_generation("hi there", details=True, decoder_input_details=True)
        return plain, full

    plain, full = _ask(tmp_path, call)
    assert plain == full.generated_text != ""
    assert full.details.generated_tokens == len(TOKENS)
    assert len(full.details.prefill) > 1


def test_text_as_a_stream(tmp_path: Path) -> None:
    def call(client: InferenceClient) -> tuple[str, list[str], Any]:
        whole = client.text_generation("hi there")
        texts = list(client.text_generation("hi there", stream=True))
        events = list(client.text_generation("hi there", stream=True, details=True))
        return whole, texts, events

    whole, texts, events = _ask(tmp_path, call)
    assert "".join(texts) == whole
    assert events[-1].generated_text == whole
    assert events[-1].details.finish_reason == "eos_token"


def test_a_chat(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]

    def call(client: InferenceClient) -> tuple[Any, list[Any]]:
        whole = client.chat_completion(messages, max_tokens=5)
        stream = client.chat_completion(messages, max_tokens=5, stream=True)
        return whole, [chunk for chunk in stream if chunk.choices]

    whole, chunks = _ask(tmp_path, call)
    text = whole.choices[0].message.content
    assert text == "".join(chunk.choices[0].delta.content or "" for chunk in chunks) != ""


async def _posted(setup: Setup, path: str, **fields: Any) -> tuple[int, Any]:
    response = await setup.post(path, {"inputs": "hi there, you", **fields})
    is_stream = response.headers["content-type"].startswith("text/event-stream")
    return response.status_code, sse_data(response.text) if is_stream else response.json()


def test_stream_agrees_with_the_route() -> None:
    async def scenario() -> None:
        async with frontend(says(TOKENS)) as setup:
            _, whole = await _posted(setup, "/generate")
            _, events = await _posted(setup, "/generate_stream")
            assert await _posted(setup, "/generate", stream=False) == (200, whole)
            assert await _posted(setup, "/generate_stream", stream=True) == (200, events)
            assert await _posted(setup, "/") == (200, [whole])
            assert await _posted(setup, "/", stream=False) == (200, [whole])
            assert await _posted(setup, "/", stream=True) == (200, events)
            for path, stream in (("/generate", True), ("/generate_stream", False)):
                status, answer = await _posted(setup, path, stream=stream)
                assert (status, answer["error"]["param"]) == (400, "stream")

    asyncio.run(scenario())


def test_truncate_keeps_the_end_of_the_prompt() -> None:
    async def scenario() -> None:
        async with frontend(says(TOKENS)) as setup:
            for truncate in (None, 2.0, 1, 1000):
                await _posted(setup, "/generate", parameters={"truncate": truncate})
            whole, two, one, more = map(setup.router.prompt_of, range(4))
            assert len(whole) > 2
            assert (list(two), list(one)) == (list(whole[-2:]), list(whole[-1:]))
            assert list(more) == list(whole)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"watermark": True}, "watermark"),
        ({"best_of": 2}, "best_of"),
        ({"typical_p": 0}, "typical_p"),
        ({"typical_p": 1.5}, "typical_p"),
        ({"adapter_id": "a"}, "adapter_id"),
        ({"truncate": 0}, "truncate"),
        ({"stop": ["a"], "stop_sequences": ["b"]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 5}, "stop_sequences"),
    ],
)
def test_what_would_change_the_answer_is_refused(parameters: Any, field: str) -> None:
    async def scenario() -> None:
        async with frontend(says(TOKENS)) as setup:
            status, answer = await _posted(setup, "/generate", parameters=parameters)
            assert (status, answer["error"]["param"]) == (400, f"parameters.{field}")

    asyncio.run(scenario())


def test_stop_sequences_are_stop_strings_and_names_of_tgi_are_the_model() -> None:
    async def scenario() -> None:
        async with frontend(says(TOKENS)) as setup:
            _, whole = await _posted(setup, "/generate")
            text = whole["generated_text"]
            stop = {"stop_sequences": [text[1:3]], "typical_p": 1.0}
            _, stopped = await _posted(setup, "/generate", parameters=stop)
            assert stopped["generated_text"] == text[: text.index(text[1:3]) + 2] != text
            for name, status in (("tgi", 200), ("dummy", 200), ("gpt", 404)):
                body = {"model": name, "prompt": [5], "max_tokens": 2}
                assert (await setup.post("/v1/completions", body)).status_code == status
            models = (await setup.http.get("/v1/models")).json()["data"]
            assert [model["id"] for model in models] == [BUNDLED_MODEL_NAME]

    asyncio.run(scenario())


def test_typical_p_is_a_way_to_draw() -> None:
    async def scenario() -> None:
        async with frontend(says(TOKENS)) as setup:
            for parameters in ({}, {"typical_p": 0.9}, {"typical_p": 1, "do_sample": False}):
                await _posted(setup, "/generate", parameters=parameters)
            greedy, typical, none = (submit.sampling for submit in setup.router.submits)
            assert (greedy.typical_p, greedy.temperature) == (1.0, 0.0)
            assert typical.typical_p == 0.9 and typical.temperature > 0
            assert none.typical_p == 1.0 and none.temperature > 0

    asyncio.run(scenario())
