# ruff: noqa: E501 - templates read best on one line
"""Fields that say what the prompt is: through the application, looking at what is submitted."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from support.fake_router import Answer, copy_bundled_model, frontend, says
from support.tiny_vision import VOCAB_SIZE, given_image, ids_of, picture, write_vision_model
from support.tokenizers_made import write_sentencepiece
from transformers.utils.chat_template_utils import render_jinja_template

from lightserve.bundled import BUNDLED_MODEL_DIR, BUNDLED_MODEL_NAME
from lightserve.errors import ModelLoadError
from lightserve.frontend.prompts import PromptEncoder
from lightserve.models.config import load_model_config
from lightserve.tokenization.chat_template import ChatTemplate, TemplateSource
from lightserve.tokenization.conversation import ChatMessage, Conversation, Ending
from lightserve.tokenization.tokenizer import Tokenizer

EOS = 2
TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
START = "{% if add_generation_prompt %}[assistant]{% endif %}"
EFFORT = "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}effort {{ reasoning_effort }} {{ verbosity }}:{% for m in messages %}{{ m.content }}{% endfor %}"
THOUGHTS = "{% for m in messages %}{{ m.role }}({{ m.reasoning }}|{{ m.reasoning_content }}){{ m.content }};{% endfor %}"
USER = {"role": "user", "content": "hi"}


def _ask(
    tmp_path: Path,
    template: str,
    fields: dict[str, Any],
    answer: Answer | None = None,
    **flags: Any,
) -> tuple[dict[str, Any], str]:
    """Return the answer, and the text of the prompt that was submitted."""
    path = tmp_path / "template.jinja"
    path.write_text(template)

    async def scenario() -> tuple[dict[str, Any], str]:
        async with frontend(answer or says([5, EOS]), chat_template=str(path), **flags) as setup:
            body = {"model": BUNDLED_MODEL_NAME, "messages": [USER], **fields}
            said: dict[str, Any] = (await setup.post("/v1/chat/completions", body)).json()
            if not setup.router.submits:
                return said, ""
            return said, setup.service.model.tokenizer.decode(setup.router.prompt_of(0))

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "effort medium :"),
        ({"reasoning_effort": None, "verbosity": None}, "effort medium :"),
        ({"reasoning_effort": "high"}, "effort high :"),
        ({"reasoning_effort": "none", "verbosity": "low"}, "effort none low:"),
        ({"verbosity": "high", "chat_template_kwargs": {"reasoning_effort": 5}}, "effort 5 high:"),
    ],
)
def test_effort_and_verbosity_are_variables(
    tmp_path: Path, fields: dict[str, Any], prompt: str
) -> None:
    assert _ask(tmp_path, EFFORT, fields)[1] == prompt + USER["content"]


@pytest.mark.parametrize(
    ("template", "fields", "param", "complaint"),
    [
        (TURNS, {"reasoning_effort": "low"}, "reasoning_effort", "is no variable of the model's"),
        (TURNS, {"verbosity": "low"}, "verbosity", "chat template; it has none"),
        (EFFORT + "{{ x }}", {"chat_template_kwargs": {"y": 1}}, "chat_template_kwargs", "it has reasoning_effort, verbosity, x"),
        (EFFORT, {"reasoning_effort": "most"}, "reasoning_effort", "must be 'none', 'minimal'"),
        (EFFORT, {"verbosity": 1}, "verbosity", "must be 'low', 'medium' or 'high', got 1"),
        (EFFORT, {"verbosity": "low", "chat_template_kwargs": {"verbosity": "low"}}, "verbosity", "give one of them"),
        (TURNS, {"add_generation_prompt": False}, "add_generation_prompt", "it cannot be false"),
        (TURNS, {"continue_final_message": True}, "continue_final_message", "needs a last message of the assistant"),
        (TURNS, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "cannot both be true"),
        ("{% for m in messages if m.content[:1] != 'a' %}{{ m.content }}{% endfor %}", {"continue_final_message": True, "messages": [USER, {"role": "assistant", "content": "a"}]}, "messages", "it leaves out the last one, which is to be continued"),
        (TURNS, {"messages": [{**USER, "reasoning": "x"}]}, "messages[0]", "only if its role is assistant"),
        (TURNS, {"messages": [{"role": "assistant", "reasoning": "x", "reasoning_content": "y"}]}, "messages[0]", "only if they are equal"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(
    tmp_path: Path, template: str, fields: dict[str, Any], param: str, complaint: str
) -> None:
    said, prompt = _ask(tmp_path, template, fields)
    assert said["error"]["param"] == param
    assert complaint in said["error"]["message"]
    assert prompt == ""


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_templates_get_what_the_assistant_thought(tmp_path: Path, name: str) -> None:
    """Under both names, and also without content: an answer may have ended before any."""
    history = [USER, {"role": "assistant", name: "hm", "content": None}]
    assert _ask(tmp_path, THOUGHTS, {"messages": history})[1] == "user(|)hi;assistant(hm|hm);"
    assert _ask(tmp_path, TURNS, {"messages": history})[1] == "[user]hi[end][assistant][end]"


CONTINUED = [USER, {"role": "assistant", "content": "the end"}]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "[user]hi[end][assistant]the end[end][assistant]"),
        ({"add_generation_prompt": False}, "[user]hi[end][assistant]the end[end]"),
        ({"continue_final_message": True}, "[user]hi[end][assistant]the end"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "[user]hi[end][assistant]the end"),
    ],
)  # fmt: skip
def test_where_prompts_end(tmp_path: Path, fields: dict[str, Any], prompt: str) -> None:
    assert _ask(tmp_path, TURNS + START, {"messages": CONTINUED, **fields})[1] == prompt


def _says_text(text: str) -> Answer:
    tokenizer = Tokenizer(BUNDLED_MODEL_DIR)
    return says([*tokenizer.encode(text, add_special_tokens=False), EOS])


def test_an_answer_is_what_follows_the_message(tmp_path: Path) -> None:
    """Its usage counts the message with the prompt; stop strings are looked for behind it."""
    fields = {"messages": CONTINUED, "continue_final_message": True, "stop": "the end"}
    said, _ = _ask(tmp_path, TURNS + START, fields, _says_text(" of the end of it"))
    choice, usage = said["choices"][0], said["usage"]
    assert choice["message"]["content"] == " of "
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "stop"
    plain, _ = _ask(
        tmp_path, TURNS + START, {"messages": CONTINUED, "add_generation_prompt": False}
    )
    assert 0 < plain["usage"]["prompt_tokens"] - usage["prompt_tokens"] <= len("[end]")


@pytest.mark.parametrize(
    ("begun", "message"),
    [
        ("<think>\nOne", {"reasoning_content": " two", "content": "three"}),
        ("<think>\n", {"reasoning_content": "two", "content": "three"}),
        ("<think>One</think>", {"content": " two</think>three"}),
    ],
)
def test_reasoning_goes_on(tmp_path: Path, begun: str, message: dict[str, Any]) -> None:
    history = [USER, {"role": "assistant", "content": begun}]
    fields = {"messages": history, "continue_final_message": True}
    answer = _says_text(" two</think>three")
    said, _ = _ask(tmp_path, TURNS + START, fields, answer, reasoning_parser="think")
    got = said["choices"][0]["message"]
    assert {key: got[key] for key in message} == message
    assert ("reasoning_content" in got) == ("reasoning_content" in message)


@pytest.mark.parametrize(
    "template",
    [
        TURNS,
        "{% for m in messages %}<{{ m.content | trim }}>\n{% endfor %}",
        "{% for m in messages %}{{ m.role }} end {{ m.content.split('</think>')[-1] }} {% endfor %}",
    ],
)
@pytest.mark.parametrize("content", ["end", " The end \n", "two words ", "x[end]x", ""])
def test_messages_are_continued_as_transformers_does_it(template: str, content: str) -> None:
    last = {"role": "assistant", "content": content}
    texts, _ = render_jinja_template(
        [[USER, last]], chat_template=template, continue_final_message=True
    )
    ours = ChatTemplate(TemplateSource(template, "template"), special_tokens={}).render(
        Conversation(
            messages=[ChatMessage("user", "hi"), ChatMessage("assistant", content)],
            ending=Ending.OPEN,
        )
    )
    assert [ours] == texts


async def _prompts_of(path: str, body: dict[str, Any], **flags: Any) -> tuple[Any, list[list[int]]]:
    """Return the answer and the prompts that are submitted."""
    async with frontend(says([5, EOS]), **flags) as setup:
        if path != "/generate":
            body = {"model": BUNDLED_MODEL_NAME, **body}
        said = (await setup.post(path, body)).json()
        return said, [setup.router.prompt_of(n) for n in range(len(setup.router.submits))]


def _prompts(path: str, body: dict[str, Any], **flags: Any) -> tuple[Any, list[list[int]]]:
    return asyncio.run(_prompts_of(path, body, **flags))


LONG = "the cat sat on the mat and the dog on the rug"
COMPLETE, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (COMPLETE, {"prompt": LONG}, "truncate_prompt_tokens"),
        (COMPLETE, {"prompt": [list(range(4, 40)), LONG]}, "truncate_prompt_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "truncate_prompt_tokens"),
        (GENERATE, {"inputs": LONG}, "truncate"),
    ],
)
def test_the_end_of_a_prompt_is_kept(path: str, body: dict[str, Any], name: str) -> None:
    """Also of one that is longer than the context."""

    def cut(most: int) -> dict[str, Any]:
        return {**body, "parameters": {name: most}} if path == GENERATE else {**body, name: most}

    _, whole = _prompts(path, body)
    assert min(map(len, whole)) > 8
    for most in (1, 7, 1000):
        assert _prompts(path, cut(most))[1] == [prompt[-most:] for prompt in whole]
    assert _prompts(path, cut(7), max_model_len=8)[1] == [prompt[-7:] for prompt in whole]
    said, prompts = _prompts(path, cut(8), max_model_len=8)
    assert (said["error"]["code"], prompts) == ("context_length_exceeded", [])
    for wrong in (0, -2, 1.5, "1", True, 2**63):
        error = _prompts(path, cut(wrong))[0]["error"]  # type: ignore[arg-type]
        assert error["param"].endswith(name)


@pytest.mark.parametrize(
    ("path", "fields", "num_kept"),
    [
        (COMPLETE, {"max_tokens": 3}, 6),
        (COMPLETE, {"max_tokens": 100}, 0),
        (CHAT, {"max_tokens": 3}, 6),
        (CHAT, {"max_completion_tokens": 4}, 5),
        (CHAT, {}, 8),
    ],
)
def test_as_much_as_the_context_leaves_is_kept(
    path: str, fields: dict[str, Any], num_kept: int
) -> None:
    """The context is what model and KV pool can hold."""
    prompt = {"prompt": LONG} if path == COMPLETE else {"messages": [{**USER, "content": LONG}]}
    (whole,) = _prompts(path, prompt)[1]
    body = {**prompt, **fields, "truncate_prompt_tokens": -1}
    said, prompts = _prompts(path, body, num_kv_slots=9)
    assert prompts == ([whole[-num_kept:]] if num_kept else [])
    assert ("error" in said) == (num_kept == 0)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": ["Where is Mira?", [5, 6, 7]], "truncate_prompt_tokens": 2}),
        ("/v1/chat/completions", {"messages": [USER], "temperature": 0}),
        ("/v1/chat/completions", {"messages": [USER], "add_generation_prompt": False}),
    ],
)
def test_a_prompt_is_rendered_as_it_would_be_submitted(path: str, fields: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with frontend(says([5, EOS])) as setup:
            body = {"model": BUNDLED_MODEL_NAME, "max_tokens": 2, **fields}
            rendered = await setup.post(f"{path}/render", body)
            assert rendered.status_code == 200 and not setup.router.submits
            assert (await setup.post(path, body)).status_code == 200
            found = rendered.json()
            prompts = found if isinstance(found, list) else [found]
            submitted = [setup.router.prompt_of(n) for n in range(len(setup.router.submits))]
            assert sorted(prompt["token_ids"] for prompt in prompts) == sorted(submitted)

    asyncio.run(scenario())


def test_what_is_echoed_is_what_was_kept() -> None:
    said, (prompt,) = _prompts(
        COMPLETE,
        {"prompt": LONG, "truncate_prompt_tokens": 3, "echo": True, "max_tokens": 0, "logprobs": 0},
    )
    choice = said["choices"][0]
    assert choice["text"] == "".join(choice["logprobs"]["tokens"])
    assert LONG.endswith(choice["text"].strip())
    assert len(prompt) == said["usage"]["prompt_tokens"] == 3


def _model_with(model_dir: Path, names: list[str], *, is_sentencepiece: bool = False) -> str:
    """Write a model's files with more special tokens."""
    copy_bundled_model(model_dir, vocab_size=4096)
    if is_sentencepiece:
        write_sentencepiece(model_dir)
    path = model_dir / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(names)
    tokenizer.save(str(path))
    return str(model_dir)


@pytest.mark.parametrize(
    ("names", "form"),
    [
        (["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"], "Pp Ss M"),
        (["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>"], "Pp Ss M"),
        (["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"], "Pp Ss M"),
        (["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], "Pp Ss M"),  # noqa: RUF001
        (["[PREFIX]", "[SUFFIX]", "[MIDDLE]"], "Ss Pp"),
    ],
)
@pytest.mark.parametrize("is_sentencepiece", [False, True])
def test_what_stands_between_two_texts_is_asked_for_as_the_model_knows_it(
    tmp_path: Path, names: list[str], form: str, is_sentencepiece: bool
) -> None:
    model = _model_with(tmp_path, names, is_sentencepiece=is_sentencepiece)
    body = {"prompt": " hello", "suffix": "hello", "max_tokens": 4, "stop_token_ids": [7]}

    async def scenario() -> None:
        async with frontend(says([5, EOS]), model=model, served_model_name="m") as setup:
            tokenizer = setup.service.model.tokenizer
            prefix = tokenizer.encode(" hello", add_special_tokens=False)
            suffix = tokenizer.encode_within("hello")
            if is_sentencepiece:  # the blank in front of a text is none of the suffix
                assert [tokenizer.name_of(i) for i in suffix] == list("hello")
            parts = {"p": prefix, "s": suffix, " ": []}
            parts |= {k: [tokenizer.id_of(n) or 0] for k, n in zip("PSM", names, strict=False)}
            bos = tokenizer.encode("", add_special_tokens=True)
            assert len(bos) == 1
            assert (await setup.post(COMPLETE, {"model": "m", **body})).status_code == 200
            assert setup.router.prompt_of(0) == [*bos, *(i for c in form for i in parts[c])]
            ends = {EOS, 7, *(tokenizer.id_of(name) for name in names)}
            assert set(setup.router.submits[0].eos_token_ids) == ends
            await setup.post(COMPLETE, {"model": "m", **body, "ignore_eos": True})
            assert setup.router.submits[1].eos_token_ids == [7]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({}, "this one's tokenizer has no three tokens of <|fim_prefix|>/<|fim_suffix|>/"),
        ({"prompt": [5]}, "suffix needs prompts that are texts"),
        ({"echo": True}, "suffix cannot be combined with echo"),
        ({"truncate_prompt_tokens": 5}, "cannot be combined with truncate_prompt_tokens"),
    ],
)
def test_suffixes_that_cannot_be_served(fields: dict[str, Any], complaint: str) -> None:
    said, prompts = _prompts(COMPLETE, {"prompt": "a", "suffix": "b", **fields})
    assert said["error"]["param"] == "suffix"
    assert complaint in said["error"]["message"]
    assert not prompts
    assert (
        _prompts(COMPLETE, {"prompt": "a", "suffix": ""})[1]
        == _prompts(COMPLETE, {"prompt": "a"})[1]
    )


def _part(text: str, **control: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **({"cache_control": control} if control else {})}


EPHEMERAL = {"type": "ephemeral"}
SYSTEM = {
    "role": "system",
    "content": [_part("You are"), _part("helpful", **EPHEMERAL), _part("x")],
}


def _retained(
    tmp_path: Path, fields: dict[str, Any], template: str = TURNS + START, path: str = CHAT
) -> tuple[str, float]:
    """Return the text of what is to be kept longer, and for how long."""
    file = tmp_path / "template.jinja"
    file.write_text(template)

    async def scenario() -> tuple[str, float]:
        async with frontend(says([5, EOS]), chat_template=str(file)) as setup:
            response = await setup.post(path, {"model": BUNDLED_MODEL_NAME, **fields})
            assert response.status_code == 200, response.text
            submit, prompt = setup.router.submits[-1], setup.router.prompt_of(-1)
            kept = prompt[: submit.num_retained_tokens]
            return setup.service.model.tokenizer.decode(kept), submit.retention_s

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fields", "kept", "seconds"),
    [
        ({"messages": [USER]}, "", 0.0),
        ({"messages": [USER], "prompt_cache_retention": "in-memory"}, "", 0.0),
        ({"messages": [USER], "prompt_cache_retention": "24h"}, "[user]hi[end][assistant]", 86400.0),
        ({"messages": [SYSTEM, USER]}, "[system]You are\nhelpful", 300.0),
        ({"messages": [SYSTEM, USER], "prompt_cache_retention": "24h", "n": 2}, "[system]You are\nhelpful\nx[end][user]hi[end][assistant]", 86400.0),
        ({"messages": [SYSTEM, {"role": "user", "content": [_part("hi", **EPHEMERAL, ttl="1h")]}]}, "[system]You are\nhelpful\nx[end][user]hi", 3600.0),
        ({"messages": [{**SYSTEM, "content": [_part("a", **EPHEMERAL, ttl="1h"), _part("b", **EPHEMERAL, ttl=None)]}]}, "[system]a\nb", 3600.0),
        ({"messages": [SYSTEM, USER], "truncate_prompt_tokens": 5}, "", 300.0),
    ],
)  # fmt: skip
def test_what_is_to_be_kept_longer(
    tmp_path: Path, fields: dict[str, Any], kept: str, seconds: float
) -> None:
    assert _retained(tmp_path, fields) == (kept, seconds)


def test_prompts_of_completions_are_kept_as_a_whole(tmp_path: Path) -> None:
    fields = {"prompt": "hello you", "prompt_cache_retention": "24h"}
    assert _retained(tmp_path, fields, path=COMPLETE) == ("hello you", 86400.0)


@pytest.mark.parametrize(
    ("template", "kept"),
    [
        ("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}", "<a"),
        ("{% for m in messages if m.content[:1] != 'a' %}{{ m.content }}{% endfor %}", ""),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", ""),
        (
            "{{ messages[0].content | length }}:{% for m in messages %}{{ m.content }}{% endfor %}",
            "3",
        ),
    ],
)
def test_marks_change_no_prompt(tmp_path: Path, template: str, kept: str) -> None:
    """Whatever a template makes of the text; what is kept is never more than there is of it."""
    marked = [{"role": "user", "content": [_part("a \n", **EPHEMERAL)]}, USER]
    plain = [{"role": "user", "content": "a \n"}, USER]
    assert _retained(tmp_path, {"messages": marked}, template)[0] == kept
    _, prompt = _ask(tmp_path, template, {"messages": plain})
    assert _ask(tmp_path, template, {"messages": marked})[1] == prompt


@pytest.mark.parametrize(
    ("control", "complaint"),
    [
        ({"type": "persistent"}, 'must have cache_control only as {"type": "ephemeral"'),
        ({"type": "ephemeral", "scope": 1}, 'must have cache_control only as {"type": "ephemeral"'),
        ({"type": "ephemeral", "ttl": "2h"}, 'must have cache_control.ttl 5m or 1h, got "2h"'),
        ({"type": "ephemeral", "ttl": [1]}, "must have cache_control.ttl 5m or 1h, got a list"),
        ("ephemeral", "must have cache_control only as"),
    ],
)
def test_marks_of_other_kinds_are_refused(tmp_path: Path, control: Any, complaint: str) -> None:
    content = [{"type": "text", "text": "a", "cache_control": control}]
    said, _ = _ask(tmp_path, TURNS, {"messages": [{"role": "user", "content": content}]})
    assert said["error"]["param"] == "messages[0].content"
    assert complaint in said["error"]["message"]


@pytest.mark.parametrize(
    "flags", [{"max_retained_tokens": 0}, {"cache_policy": "off"}], ids=["none", "no cache"]
)
def test_servers_that_keep_nothing_longer_say_so(tmp_path: Path, flags: dict[str, Any]) -> None:
    for fields, param in (
        ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        ({"messages": [SYSTEM]}, "messages"),
    ):
        said, _ = _ask(tmp_path, TURNS, fields, **flags)
        assert said["error"]["param"] == param
        assert "this server keeps no prefixes longer than others" in said["error"]["message"]
    assert "error" not in _ask(tmp_path, TURNS, {"prompt_cache_retention": "in_memory"}, **flags)[0]


# `chat_template_kwargs` and `messages[].name`: what chat templates make of them.

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


@pytest.mark.parametrize(
    ("family", "written", "expected"),
    [
        (
            "mistral3",
            "[IMG]",
            [*(["[IMG]"] * 3 + ["[IMG_BREAK]"]) * 2, *["[IMG]"] * 3, "[IMG_END]"],
        ),
        ("internvl", "<IMG_CONTEXT>", ["<img>", *["<IMG_CONTEXT>"] * 4, "</img>"]),
        (
            "gemma3",
            "<start_of_image>",
            [
                "Ċ",
                "Ċ",
                "<start_of_image>",
                *["<image_soft_token>"] * 16,
                "<end_of_image>",
                "Ċ",
                "Ċ",
            ],
        ),
        ("gemma4", "<|image|>", ["<|image>", *["<|image|>"] * 12, "<image|>"]),
    ],
)
def test_tokens_around_and_within_images(
    tmp_path: Path, family: str, written: str, expected: list[str]
) -> None:
    """As the families' processors write them in the place of a template's text."""
    vision = load_model_config(write_vision_model(tmp_path, family)).vision
    assert vision is not None
    tokenizer = Tokenizer(tmp_path)
    sizes = {"vocab_size": VOCAB_SIZE, "max_model_len": 256}
    encoder = PromptEncoder(tokenizer, None, vision=vision, **sizes)
    ids = encoder._encode_shown(f"a{written}b", adds_bos=False)
    image = given_image(tmp_path, picture(1), 0)
    whole, (placed,) = encoder._with_images(ids, [image])
    assert [tokenizer.name_of(i) for i in whole] == ["a", *expected, "b"]
    assert whole[placed.start] == whole[placed.end - 1] == vision.placeholder
    assert vision.placeholder not in (*whole[: placed.start], *whole[placed.end :])
    other = msgspec.structs.replace(image, start=0)
    assert ids_of(tmp_path, other) == list(whole[placed.start : placed.end])


@pytest.mark.parametrize(
    ("family", "lost", "tokens"),
    [
        ("mistral3", "[IMG]", "[IMG][IMG_END][IMG_BREAK]"),
        ("mistral3", "[IMG_BREAK]", "[IMG][IMG_END][IMG_BREAK]"),
        ("mistral3", "[IMG_END]", "[IMG][IMG_END][IMG_BREAK]"),
        ("internvl", "</img>", "<img><IMG_CONTEXT></img>"),
        ("gemma3", "<end_of_image>", "<start_of_image><image_soft_token><end_of_image>"),
        ("gemma4", "<|image>", "<|image><|image|><image|>"),
    ],
)
def test_a_tokenizer_without_the_tokens_of_images(
    tmp_path: Path, family: str, lost: str, tokens: str
) -> None:
    vision = load_model_config(write_vision_model(tmp_path, family)).vision
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace(f'"{lost}"', '"[OTHER]"'))
    with pytest.raises(ModelLoadError, match=re.escape(f"must have the tokens {tokens}")):
        PromptEncoder(
            Tokenizer(tmp_path), None, vocab_size=VOCAB_SIZE, max_model_len=256, vision=vision
        )
