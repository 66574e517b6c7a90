"""gpt-oss's channels: reasoning, content and calls, however the text is cut."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_router import frontend, says, sse_data
from support.grids import choose, more_when_long

from lightserve.bundled import BUNDLED_MODEL_DIR, BUNDLED_MODEL_NAME
from lightserve.config import ServeConfig
from lightserve.errors import ConfigError
from lightserve.frontend.columns import json_object
from lightserve.frontend.harmony import MARKS
from lightserve.frontend.openai.output_parser import MessageBuffer, OutputParser, ParserOptions
from lightserve.tokenization.tokenizer import Tokenizer

ANALYSIS = "<|channel|>analysis<|message|>Hm, <b>.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
ANSWERS: list[tuple[str, dict[str, Any]]] = [
    (
        f"{ANALYSIS}<|channel|>final<|message|>Yes.<|return|>",
        {"reasoning_content": "Hm, <b>.", "content": "Yes."},
    ),
    (
        f"{ANALYSIS}<|channel|>commentary<|message|>So.<|end|><|start|>assistant{CALL}",
        {"reasoning_content": "Hm, <b>.", "content": "So.", "calls": [("add", '{"a": 1}')]},
    ),
    # The recipient beside the role, as a model may write it, too.
    (
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 2}',
        {"content": None, "calls": [("add", '{"a": 2}')]},
    ),
    (CALL + "<|start|>assistant" + CALL, {"content": None, "calls": [("add", '{"a": 1}')] * 2}),
    # A function that is not offered, what is on no channel, and what is cut off.
    ("<|channel|>commentary to=functions.rm json<|message|>{}<|call|>", {"content": "{}"}),
    ("<|channel|>analysis to=python code<|message|>1+1<|call|>", {"reasoning_content": "1+1"}),
    ("Yes <|", {"content": "Yes <|"}),
    *(
        (f"<|channel|>commentary to=functions.add json<|message|>{text}", {"content": text})
        for text in ('{"a": 1', '{"a"', "[1]", '{"a": Infinity}', "no")
    ),
    (
        '<|channel|>commentary to=functions.add json<|message|>{"a": 1}',
        {"content": None, "calls": [("add", '{"a": 1}')]},
    ),
    (
        "<|channel|>commentary to=functions.add json<|message|><|call|>",
        {"content": None, "calls": [("add", "{}")]},
    ),
    ("<|channel|>ana", {"content": ""}),
    # Marks that are spelled in ordinary tokens: in a string of arguments they are text, elsewhere
    # what is no header goes on with the message before it.
    *(
        (
            f"{ANALYSIS}<|channel|>commentary to=functions.add json<|message|>"
            f'{{"a": "x{mark} \\\\"}}<|call|>',
            {
                "reasoning_content": "Hm, <b>.",
                "content": None,
                "calls": [("add", f'{{"a": "x{mark} \\\\"}}')],
            },
        )
        for mark in MARKS
    ),
    *((f"<|channel|>final<|message|>a {mark} b", {"content": f"a {mark} b"}) for mark in MARKS),
    (
        "<|channel|>analysis<|message|>a<|end|> b<|end|><|start|>assistant"
        "<|channel|>final<|message|>c",
        {"reasoning_content": "a<|end|> b", "content": "c"},
    ),
    (f"{CALL} more", {"content": "<|call|> more", "calls": [("add", '{"a": 1}')]}),
    (
        '<|channel|>commentary to=functions.add<|message|>{"a": "x<|call|> y',
        {"content": '{"a": "x<|call|> y'},
    ),
    # At the very end, too; only an end of a message is one there.
    *(
        (f"<|channel|>final<|message|>a {spelled}{end}", {"content": f"a {spelled}"})
        for spelled in (
            *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
            *("<|start|>assistant", "<|start|><|start|>", "<|channel|>analysis", "<|end|>"),
            *("<|start|>{role}<|message|>{content}", "<|end|> and <|message|>b", "<|start|>user"),
            *("<|end|><|start|><|end|>", "<|start|><|message|>", "<|end|> x <|start|>"),
        )
        for end in ("<|return|>", "<|end|>", "<|call|>" if spelled.endswith("<|end|>") else "")
    ),
    ("<|channel|>analysis<|message|>a<|start|>", {"reasoning_content": "a<|start|>"}),
    (f"{CALL}<|start|>", {"content": None, "calls": [("add", '{"a": 1}')]}),
    (
        f"{CALL}<|start|>assistant x",
        {"content": "<|call|><|start|>assistant x", "calls": [("add", '{"a": 1}')]},
    ),
    # A model that forgets the end of a message.
    (
        "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b",
        {"reasoning_content": "a", "content": "b"},
    ),
    (
        "<|channel|>analysis<|message|>a<|channel|>final <|constrain|>json<|message|>b",
        {"reasoning_content": "a", "content": "b"},
    ),
    ("Yes.<|end|>", {"content": "Yes."}),
    ("<|channel|>final<|message|>a<|end|><|start|>assis", {"content": "a"}),
]
TOOL = {"type": "function", "function": {"name": "add"}}
TEMPLATE = """\
{{ tools | tojson if tools }}{% for m in messages %}{{ m.thinking }}{{ m.content }}\
{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}<|start|>assistant"""
BODY = {
    "model": BUNDLED_MODEL_NAME,
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [TOOL],
}


def message_of(text: str, cuts: list[int], **options: Any) -> dict[str, Any]:
    given = {"tool_format": "harmony", "tool_names": frozenset({"add"}), **options}
    parser, message, start = OutputParser(ParserOptions("harmony", **given)), MessageBuffer(), 0
    for end in [*sorted(cut % (len(text) + 1) for cut in cuts), len(text)]:
        message.extend(parser.push(text[start:end]))
        start = end
    message.extend(parser.finish())
    fields: dict[str, Any] = json.loads(b"".join(json_object(message.fields())))
    if calls := fields.pop("tool_calls", None):
        functions = [call["function"] for call in calls]
        fields["calls"] = [(function["name"], function["arguments"]) for function in functions]
    return fields


@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 300), max_size=12))
def test_how_a_text_is_cut_changes_nothing(
    answer: tuple[str, dict[str, Any]], cuts: list[int]
) -> None:
    text, fields = answer
    assert message_of(text, cuts) == {"content": "", **fields}


def test_a_message_that_goes_on_and_calls_that_are_not_looked_for() -> None:
    assert message_of("more.<|return|>", [], continues=True) == {"content": "more."}
    assert message_of(CALL, [], tool_format="none") == {"content": '{"a": 1}'}
    first = message_of(CALL + "<|start|>assistant" + CALL, [], max_calls=1)
    assert first["calls"] == [("add", '{"a": 1}')]


def test_through_the_chat_route(tmp_path: Path) -> None:
    tokenizer = Tokenizer(BUNDLED_MODEL_DIR)
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    flags = {
        "reasoning_parser": "harmony",
        "tool_call_parser": "harmony",
        "chat_template": str(path),
    }
    ids = tokenizer.encode(ANSWERS[1][0], add_special_tokens=False)

    async def scenario() -> None:
        async with frontend(says([*ids, *tokenizer.eos_token_ids]), **flags) as setup:
            choice = (await setup.post("/v1/chat/completions", BODY)).json()["choices"][0]
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["reasoning_content"] == "Hm, <b>."
            assert choice["message"]["content"] == "So."
            call = choice["message"]["tool_calls"][0]
            assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
            streamed = await setup.post("/v1/chat/completions", {**BODY, "stream": True})
            deltas = [chunk["choices"][0]["delta"] for chunk in sse_data(streamed.text)[:-1]]
            told = "".join(delta.get("reasoning_content", "") for delta in deltas)
            assert told == "Hm, <b>."
            # What it thought before a call, the template sees by gpt-oss's name.
            turn = {"role": "assistant", "reasoning": "thought", "tool_calls": [call]}
            result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
            again = {**BODY, "messages": [*BODY["messages"], turn, result]}
            assert (await setup.post("/v1/chat/completions", again)).status_code == 200
            assert "thought" in tokenizer.decode(setup.router.prompt_of(-1))

    asyncio.run(scenario())


def test_required_calls_are_json(tmp_path: Path) -> None:
    """A grammar writes them, without channels."""
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    tokenizer = Tokenizer(BUNDLED_MODEL_DIR)
    text = '{"name": "add", "parameters": {"a": 1}}'
    ids = [*tokenizer.encode(text, add_special_tokens=False), *tokenizer.eos_token_ids]
    flags = {"reasoning_parser": "harmony", "tool_call_parser": "harmony"}
    flags["chat_template"] = str(path)

    async def scenario() -> None:
        async with frontend(says(ids), **flags) as setup:
            body = {**BODY, "tool_choice": "required"}
            choice = (await setup.post("/v1/chat/completions", body)).json()["choices"][0]
            function = choice["message"]["tool_calls"][0]["function"]
            assert function == {"name": "add", "arguments": '{"a": 1}'}

    asyncio.run(scenario())


def test_marks_are_special_tokens_that_are_part_of_a_text(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((BUNDLED_MODEL_DIR / name).read_bytes())
    file = tmp_path / "tokenizer.json"
    described = json.loads(file.read_text())
    token = described["added_tokens"][-1]
    assert token["special"]
    shown = Tokenizer(tmp_path, shown=[token["content"]])
    assert shown.decode([token["id"]]) == token["content"]
    assert not Tokenizer(tmp_path, shown=MARKS).decode([token["id"]])


def test_calls_need_the_channels() -> None:
    with pytest.raises(ConfigError, match="--tool-call-parser harmony needs"):
        ServeConfig(
            model=str(BUNDLED_MODEL_DIR), tool_call_parser="harmony", reasoning_parser="think"
        )


WORDS = (
    *MARKS,
    "<|",
    "<|cal",
    "|>",
    "<",
    "}",
    "{",
    '"',
    "'",
    "\\",
    "\n",
    " ",
    "[",
    "]",
    ",",
    "ö",
    "🚪",
    "null",
)


@more_when_long
def test_random_calls_cut_everywhere() -> None:
    """500 calls with marks in their strings, whole and broken off, in the long form at every place:
    arguments are JSON, no text of a message is lost.
    """
    chance = random.Random(5)

    def value() -> Any:
        text = "".join(chance.choices(WORDS, k=chance.randrange(9)))
        return chance.choice([chance.randrange(-(10**20), 10**20), 1.5, None, text, [text], {}])

    for _ in range(500):
        said = {key: value() for key in chance.sample("abc", chance.randrange(4))}
        ascii_only, indent = chance.random() < 0.5, chance.choice([None, 1])
        body = json.dumps(said, ensure_ascii=ascii_only, indent=indent)
        kind = chance.choice(["", " <|constrain|>json"])
        call = f"<|channel|>commentary to=functions.add{kind}<|message|>{body}<|call|>"
        whole = message_of(call, [])
        assert whole == message_of(call, list(range(len(call))))
        ((name, arguments),) = whole["calls"]
        assert name == "add" and json.loads(arguments) == said and not whole["content"]
        places = {chance.randrange(len(call)) for _ in range(12)}
        for length in choose(sorted(places), range(len(call))):
            broken = message_of(call[:length], [])
            for _, arguments in broken.get("calls", ()):
                assert json.loads(arguments) == said
            text = call[:length].partition("<|message|>")[2]
            is_head = length < call.index("<|message|>") + len("<|message|>")
            assert is_head or broken.get("calls") or broken["content"] == text, call[:length]
