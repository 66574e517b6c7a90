"""`chat_template_kwargs` and `messages[].name`: what chat templates make of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.fake_router import frontend, says

from lightserve.bundled import BUNDLED_MODEL_NAME

EOS = 2
TEMPLATE = (
    "{%- set own = 1 %}{% if enable_thinking is defined and not enable_thinking %}quiet{% endif %}"
    "{% for m in messages %}{{ m.name or m.role }}{{ suffix }}{{ m.content }}{% endfor %}"
)


async def _answer(
    tmp_path: Path, message: dict[str, Any], options: Any, prompts: list[str]
) -> dict[str, Any]:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    async with frontend(says([5, EOS]), chat_template=str(template)) as setup:
        body = {
            "model": BUNDLED_MODEL_NAME,
            "messages": [{"role": "user", "content": "hi", **message}],
            "chat_template_kwargs": options,
        }
        answer: dict[str, Any] = (await setup.post("/v1/chat/completions", body)).json()
        decode = setup.service.model.tokenizer.decode
        prompts.extend(decode(setup.router.prompt_of(n)) for n in range(len(setup.router.submits)))
        return answer


@pytest.mark.parametrize(
    ("message", "options", "prompt"),
    [
        ({}, None, "userhi"),
        ({"name": "Ann"}, {}, "Annhi"),
        ({}, {"enable_thinking": False}, "quietuserhi"),
        ({}, {"enable_thinking": True, "suffix": ": "}, "user: hi"),
    ],
)
def test_templates_get_them(
    tmp_path: Path, message: dict[str, Any], options: Any, prompt: str
) -> None:
    prompts: list[str] = []
    answer = asyncio.run(_answer(tmp_path, message, options, prompts))
    assert "error" not in answer
    assert prompts == [prompt]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"enable_thinkin": False}, "enable_thinkin is no variable of the model's chat template"),
        ({"messages": "x"}, "messages is no variable"),
        ({"bos_token": "x"}, "bos_token is no variable"),
        ({"raise_exception": "x"}, "raise_exception is no variable"),
        ({"own": 2}, "own is no variable"),
        ({"suffix": ["x"]}, "suffix must be a string, a number, true, false or null, got a list"),
        ({"suffix": 2**64}, "suffix must be a number of at most 64 bits"),
        ({str(i): i for i in range(17)}, "must have at most 16 entries, got 17"),
        ([1], "must be an object, got a list"),
    ],
)
def test_what_the_template_does_not_have_is_refused(
    tmp_path: Path, options: Any, complaint: str
) -> None:
    prompts: list[str] = []
    error = asyncio.run(_answer(tmp_path, {}, options, prompts))["error"]
    assert error["param"].startswith("chat_template_kwargs")
    assert complaint in error["message"]
    assert not prompts
