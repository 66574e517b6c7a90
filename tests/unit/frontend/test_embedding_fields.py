"""/v1/embeddings through the application: what is submitted, and what is made of vectors."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import httpx
import numpy as np
import pytest
from support.fake_router import VECTOR, Setup, frontend, says

from lightserve.bundled import BUNDLED_MODEL_NAME
from lightserve.messages.common import unpack_int32
from lightserve.messages.frontend_router import RequestDelta, Submit
from lightserve.types import FinishReason, RequestClass, RequestOutput


def ask(answer: Any = None, **fields: Any) -> tuple[httpx.Response, list[Submit]]:
    async def scenario() -> tuple[httpx.Response, list[Submit]]:
        async with frontend(answer or says([5]), pooling="last", max_answer_items=640) as setup:
            return await _ask(setup, fields), setup.router.submits

    return asyncio.run(scenario())


async def _ask(setup: Setup, fields: dict[str, Any]) -> httpx.Response:
    body = {"model": BUNDLED_MODEL_NAME, "input": "hi", **fields}
    return await setup.post("/v1/embeddings", body)


@pytest.mark.parametrize(
    ("tier", "of", "used"),
    [
        (None, RequestClass.BE, "flex"),
        ("auto", RequestClass.BE, "flex"),
        ("flex", RequestClass.BE, "flex"),
        ("default", RequestClass.RT, "default"),
        ("priority", RequestClass.RT, "priority"),
    ],
)
def test_it_is_best_effort_unless_it_says_otherwise(
    tier: str | None, of: RequestClass, used: str
) -> None:
    answer, (submit,) = ask(service_tier=tier, priority=3, timeout=60, user="u")
    assert answer.status_code == 200, answer.text
    assert answer.json()["service_tier"] == used
    assert (submit.request_class, submit.priority, submit.prediction_key) == (of, 3, "u")
    assert (submit.output, submit.max_tokens) == (RequestOutput.VECTOR, 1)


def test_targets_are_taken() -> None:
    _, (submit,) = ask(service_tier="default", slo={"ttft_ms": 250})
    assert submit.slo.ttft_ms == 250


def test_numbers_and_bytes_are_the_same_vector() -> None:
    plain, _ = ask()
    coded, _ = ask(encoding_format="base64")
    vector = plain.json()["data"][0]["embedding"]
    assert base64.b64decode(coded.json()["data"][0]["embedding"]) == VECTOR
    assert np.array(vector, np.float32).tobytes() == VECTOR


def test_ids_are_what_is_submitted() -> None:
    answer, submits = ask(input=[[5, 6], [7]])
    ids = [unpack_int32(s.prompt[0].token_ids).tolist() for s in submits]
    assert ids == [[5, 6], [7]]
    assert answer.json()["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


def test_ids_are_cut_at_their_end() -> None:
    _, (submit,) = ask(input=[5, 6, 7], truncate_prompt_tokens=2)
    assert unpack_int32(submit.prompt[0].token_ids).tolist() == [5, 6]


def test_a_list_of_vectors_is_bounded() -> None:
    """640 items are 2,560 numbers, ten vectors of 256."""
    assert ask(input=["a"] * 10)[0].status_code == 200
    answer, submits = ask(input=["a"] * 11)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "answer_too_large"
    assert not submits


@pytest.mark.parametrize("vector", [b"", VECTOR])
def test_a_vector_comes_where_it_was_asked_for(vector: bytes) -> None:
    """Anything else is a fault of the router, which the client is not told."""

    def odd(submit: Submit) -> list[RequestDelta]:
        end = FinishReason.LENGTH
        return [RequestDelta(submit.request_id, [5], end, vector=vector)]

    answer, _ = ask(odd)
    assert answer.status_code == (200 if vector else 500)
    assert "vector" not in answer.text
