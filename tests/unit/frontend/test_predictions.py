"""`prediction` of chats: what the router is told, what answers say of it, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.fake_router import frontend, says, sse_data

from lightserve.bundled import BUNDLED_MODEL_DIR, BUNDLED_MODEL_NAME
from lightserve.messages.common import unpack_int32
from lightserve.messages.frontend_router import RequestDelta, Submit
from lightserve.tokenization.tokenizer import Tokenizer
from lightserve.types import FinishReason

CHAT = "/v1/chat/completions"
TEXT = "class User:\n    name: str\n"
BODY: dict[str, Any] = {
    "model": BUNDLED_MODEL_NAME,
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 100,
    "prediction": {"type": "content", "content": TEXT},
}


async def refused(fields: dict[str, Any], **flags: Any) -> dict[str, Any]:
    async with frontend(says([5, 2]), **flags) as setup:
        response = await setup.post(CHAT, BODY | fields)
        assert response.status_code == 400, response.text
        assert not setup.router.submits
        error: dict[str, Any] = response.json()["error"]
        return error


@pytest.mark.parametrize(
    "content", [TEXT, [{"type": "text", "text": TEXT[:9]}, {"type": "text", "text": TEXT[9:]}]]
)
def test_the_router_gets_its_tokens(content: Any) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2]), speculation="ngram") as setup:
            body = BODY | {"prediction": {"type": "content", "content": content}}
            assert (await setup.post(CHAT, body)).status_code == 200
            found = unpack_int32(setup.router.submits[-1].prediction).tolist()
            tokenizer = Tokenizer(BUNDLED_MODEL_DIR)
            assert found == list(tokenizer.encode(TEXT, add_special_tokens=False))
            assert (await setup.post(CHAT, BODY | {"prediction": None})).status_code == 200
            assert setup.router.submits[-1].prediction == b""

    asyncio.run(scenario())


def test_usage_counts_right_and_wrong_ones() -> None:
    """Over all news, streamed or not; without a prediction both are 0."""

    def news(submit: Submit) -> list[RequestDelta]:
        parts = [(3, 1), (0, 8), (0, 0), (5, 0)] if submit.prediction else [(0, 0)] * 4
        return [
            RequestDelta(
                submit.request_id,
                [5] if number < 3 else [2],
                None if number < 3 else FinishReason.STOP,
                predicted=part,
            )
            for number, part in enumerate(parts)
        ]

    async def scenario() -> None:
        async with frontend(news, speculation="ngram") as setup:
            for prediction, counts in ((BODY["prediction"], (8, 9)), (None, (0, 0))):
                body = BODY | {"prediction": prediction}
                whole = (await setup.post(CHAT, body)).json()
                options = {"stream": True, "stream_options": {"include_usage": True}}
                streamed = sse_data((await setup.post(CHAT, body | options)).text)
                for usage in (whole["usage"], streamed[-2]["usage"]):
                    details = usage["completion_tokens_details"]
                    assert usage["completion_tokens"] == 4
                    assert details["accepted_prediction_tokens"] == counts[0]
                    assert details["rejected_prediction_tokens"] == counts[1]

    asyncio.run(scenario())


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"tools": [TOOL]}, "tools"),
        ({"max_tokens": None, "max_completion_tokens": 9}, "max_completion_tokens"),
        ({"response_format": {"type": "json_object"}}, "prediction"),
        ({"structured_outputs": {"regex": "a+"}}, "prediction"),
        ({"prediction": {"type": "content", "content": ""}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": "a b " * 40_000}}, "prediction.content"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": {"type": "text", "content": "a"}}, "prediction.type"),
        ({"prediction": {"type": "content", "content": []}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "prediction"),
        ({"prediction": "a"}, "prediction"),
    ],
    ids=str,
)
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    error = asyncio.run(refused(fields, speculation="suffix"))
    assert error["param"].startswith(param)
    assert "prediction" in error["message"]


def test_what_openai_takes_beside_it() -> None:
    async def scenario() -> None:
        fields = {"n": 1, "logprobs": False, "presence_penalty": -0.1, "frequency_penalty": 0}
        async with frontend(says([5, 2]), speculation="ngram") as setup:
            response = await setup.post(CHAT, BODY | fields | {"tools": []})
            assert response.status_code == 200, response.text

    asyncio.run(scenario())


@pytest.mark.parametrize("speculation", ["off", "mtp"])
def test_a_server_that_looks_in_no_text_says_so(speculation: str) -> None:
    error = asyncio.run(refused({}, speculation=speculation))
    assert error["param"] == "prediction" and f"--speculation {speculation}" in error["message"]
