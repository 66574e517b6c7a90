"""`bad_words`: what a request says becomes sequences of tokens, and these are not drawn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.fake_router import frontend, says

from lightserve.bundled import BUNDLED_MODEL_DIR, BUNDLED_MODEL_NAME
from lightserve.tokenization.tokenizer import Tokenizer

TOKENIZER = Tokenizer(BUNDLED_MODEL_DIR)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": BUNDLED_MODEL_NAME, "prompt": [5, 6, 7]},
    "/v1/chat/completions": {
        "model": BUNDLED_MODEL_NAME,
        "messages": [{"role": "user", "content": "hi"}],
    },
}
ID = TOKENIZER.encode("a", add_special_tokens=False)[0]


def _ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("path", BODIES)
def test_words_are_barred_at_the_beginning_and_behind_a_blank(path: str) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            asked = BODIES[path] | {"bad_words": ["cat", " cat", "the dog"], "n": 2}
            response = await setup.post(path, asked)
            assert response.status_code == 200, response.text
            expected = {_ids(text) for text in ("cat", " cat", "the dog", " the dog")}
            for submit in setup.router.submits:
                assert set(submit.sampling.bad_words) == expected
                assert len(submit.sampling.bad_words) == len(expected)

    asyncio.run(scenario())


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bad_words": ["a" * 100]}, "words of at most 32 tokens"),
        ({"bad_words": ["a"], "allowed_token_ids": [ID]}, "must leave a token"),
        ({"bad_words": ["a"], "allowed_token_ids": [ID, 2], "min_tokens": 1}, "must leave a token"),
    ],
)
def test_words_that_are_too_long_or_leave_nothing_are_refused(
    path: str, fields: dict[str, Any], message: str
) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            response = await setup.post(path, BODIES[path] | {"max_tokens": 9} | fields)
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["param"] == "bad_words"
            assert message in error["message"]
            assert setup.router.submits == []

    asyncio.run(scenario())
