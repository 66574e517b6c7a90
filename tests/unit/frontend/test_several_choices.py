"""n completions of several prompts: which news belong to which, and one failure ends all."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.fake_router import copy_bundled_model, frontend, sse_data

from lightserve.bundled import BUNDLED_MODEL_NAME
from lightserve.messages.common import unpack_int32
from lightserve.messages.frontend_router import ErrorCode, RequestDelta, Submit
from lightserve.types import FinishReason

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
