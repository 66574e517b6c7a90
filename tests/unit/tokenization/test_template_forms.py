# ruff: noqa: E501 - templates read best on one line
"""Forms in which chat templates show what they are given: beside transformers, in the same form."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.fake_router import frontend, says
from support.tokenizers_made import write_config
from transformers.utils.chat_template_utils import render_jinja_template

from lightserve.bundled import BUNDLED_MODEL_NAME
from lightserve.errors import InvalidRequest, ModelLoadError
from lightserve.tokenization.chat_template import ChatTemplate, TemplateSource, find_chat_template
from lightserve.tokenization.conversation import ChatMessage, Conversation, Ending, Place

ARGUMENTS = {"city": "Bern", "nights": 2, "quiet": True}
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "book", "arguments": json.dumps(ARGUMENTS)},
}
OTHER = {
    "id": "call00002",
    "type": "function",
    "function": {"name": "pay", "arguments": '{"sum": 3}'},
}
AS_OBJECT = {**CALL, "function": {"name": "book", "arguments": ARGUMENTS}}
TOOL = {
    "type": "function",
    "function": {
        "name": "book",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
HI = ChatMessage("user", "hi")
SAYS = ChatMessage("assistant", "well")
NOTHING = ChatMessage("assistant", "", {"tool_calls": [CALL]}, is_null=True)
EMPTY = ChatMessage("assistant", "", {"tool_calls": [CALL]})
BESIDE = ChatMessage("assistant", "I look.", {"tool_calls": [CALL]})
RESULT = ChatMessage("tool", "done", {"tool_call_id": "call00001"})

TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}"
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + CALLS + "{% endfor %}"
JOINED = PLAIN.replace("c.function.arguments | tojson", "'' + c.function.arguments")
PRINTED = PLAIN.replace(" | tojson", "")
WHERE_NULL = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
    + CALLS.replace(" | tojson", "").replace("{{ c.function.arg", "{{ '' + c.function.arg")
    + "{% elif m.content is not none %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
WHERE_ABSENT = (
    "{% for m in messages %}{% if 'content' in m %}[{{ m.role }}]{{ m.content }}{% else %}"
    + CALLS
    + "{% endif %}{% endfor %}"
)
CONCATENATED = "{% for m in messages %}[{{ m.role }}]{{ m.content + '.' }}" + CALLS + "{% endfor %}"
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for c in m.content %}{{ c.text }}{% endfor %}"
    + CALLS
    + "{% endfor %}"
)
FIRST_PART = "{% for m in messages %}[{{ m.role }}]{{ m.content[0].text }}{% endfor %}"
BOTH = "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %}{% endfor %}"
OF_ROLES = "{% for m in messages %}{% if m.role == 'system' %}{{ m.content[0].text }}{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"


def _template(text: str, tool_use: str | None = None) -> ChatTemplate:
    return ChatTemplate(TemplateSource(text, "template", tool_use), special_tokens={})


def _shown(text: str, *messages: ChatMessage, tools: list[dict[str, Any]] | None = None) -> str:
    conversation = Conversation(messages=messages, tools=tools, ending=Ending.MESSAGE)
    template = _template(text)
    template.check(conversation)
    return template.render(conversation)


def _theirs(text: str, *messages: dict[str, Any], **values: Any) -> str:
    rendered: str = render_jinja_template([list(messages)], chat_template=text, **values)[0][0]
    return rendered


def _user(content: Any = "hi") -> dict[str, Any]:
    return {"role": "user", "content": content}


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    ("text", "messages", "form"),
    [
        (PLAIN, [HI, NOTHING], [{"tool_calls": [AS_OBJECT]}]),
        (PLAIN, [HI, BESIDE], [{"content": "I look.", "tool_calls": [AS_OBJECT]}]),
        (JOINED, [HI, NOTHING], [{"tool_calls": [CALL]}]),
        (JOINED, [HI, BESIDE], [{"content": "I look.", "tool_calls": [CALL]}]),
        (PRINTED, [HI, NOTHING], [{"tool_calls": [CALL]}]),  # of an object it would be Python's
        (WHERE_NULL, [HI, NOTHING], [{"content": None, "tool_calls": [CALL]}]),
        (WHERE_NULL, [HI, EMPTY], [{"content": None, "tool_calls": [CALL]}]),
        (WHERE_NULL, [HI, BESIDE], [{"content": "I look."}, {"content": None, "tool_calls": [CALL]}]),
        (WHERE_ABSENT, [HI, EMPTY], [{"tool_calls": [AS_OBJECT]}]),
        (CONCATENATED, [HI, NOTHING], [{"content": "", "tool_calls": [AS_OBJECT]}]),
        (PARTS, [HI, NOTHING], [{"tool_calls": [AS_OBJECT]}]),
    ],
)  # fmt: skip
def test_calls_are_shown(
    text: str, messages: list[ChatMessage], form: list[dict[str, Any]]
) -> None:
    user = _user(_parts("hi") if text == PARTS else "hi")
    ours = _shown(text, *messages)
    assert ours == _theirs(text, user, *({"role": "assistant", **fields} for fields in form))
    assert "book" in ours and "Bern" in ours and '\\"' not in ours and "True" not in ours


@pytest.mark.parametrize(
    ("text", "content", "parts", "form"),
    [
        (TURNS, "hi", (), "hi"),
        (TURNS, "a\nb", ("a", "b"), "a\nb"),
        (PARTS, "hi", (), _parts("hi")),
        (PARTS, "a\nb", ("a", "b"), _parts("a", "b")),
        (FIRST_PART, "hi", (), _parts("hi")),
        (FIRST_PART, "a\nb", ("a", "b"), _parts("a\nb")),
        (BOTH, "hi", (), "hi"),
        (BOTH, "a\nb", ("a", "b"), _parts("a", "b")),
    ],
)
def test_texts_are_shown(text: str, content: str, parts: tuple[str, ...], form: Any) -> None:
    message = ChatMessage("user", content, parts=parts)
    assert _shown(text, HI, SAYS, message).endswith(_theirs(text, _user(form)))


def test_each_role_has_a_form_of_its_own() -> None:
    ours = _shown(OF_ROLES, ChatMessage("system", "Be kind."), HI)
    assert ours == "Be kind.[user]hi"


@pytest.mark.parametrize("text", [TURNS, BOTH, PARTS])
def test_marks_and_continued_messages_are_found_in_parts(text: str) -> None:
    template = _template(text)
    for message, place, before in (
        (ChatMessage("user", "ab\ncd", parts=("ab", "cd")), 4, "[user]ab{}c"),
        (ChatMessage("user", "ab\ncd", parts=("ab", "cd")), 2, "[user]ab"),
        (ChatMessage("user", "ab"), 1, "[user]a"),
    ):
        conversation = Conversation(messages=[message], mark=Place(0, place))
        rendered = template.render(conversation)
        length = template.marked_length(conversation, rendered)
        assert rendered[:length] == before.format("\n" if text == TURNS else "")
    last = ChatMessage("assistant", "so\nfar", parts=("so", "far"))
    continued = Conversation(messages=[HI, last], ending=Ending.OPEN)
    assert template.render(continued).endswith("far")


# What a template leaves out in every form is refused by name.

SILENT_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
LAST_SYSTEM = (
    "{% set ns = namespace(s='') %}{% for m in messages if m.role == 'system' %}{% set ns.s = m.content %}{% endfor %}{{ ns.s }}"
    + SILENT_SYSTEM
)
ONE_CALL = PLAIN.replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]")
NO_ARGUMENTS = PLAIN.replace("{{ c.function.arguments | tojson }}", "")
ONE_TOOL = "{{ tools[0].function.name if tools }}" + TURNS
NO_USER = "{% for m in messages if m.role != 'user' %}{{ m.content }}{% endfor %}"
LAST_TURN = "{{ messages[-1].content }}"
SYSTEM = ChatMessage("system", "Be kind.")


@pytest.mark.parametrize(
    ("text", "messages", "place", "words"),
    [
        (SILENT_SYSTEM, [SYSTEM, HI], "messages[0]", "a message of the system"),
        (LAST_SYSTEM, [SYSTEM, HI, SYSTEM], "messages[2]", "messages of the system behind others"),
        (TURNS, [HI, NOTHING], "messages[1]", "tool_calls"),
        (ONE_CALL, [HI, ChatMessage("assistant", "", {"tool_calls": [CALL, OTHER]})], "messages[1]", "several tool_calls in one message"),
        (NO_ARGUMENTS, [HI, NOTHING], "messages[1]", "the arguments of tool_calls"),
        (NO_USER, [HI], "messages[0]", "messages of the user"),
        (LAST_TURN, [HI, SAYS, HI], "messages[0]", "messages of the user before the last one"),
        (SILENT_SYSTEM.replace("'system'", "'tool'"), [HI, NOTHING, RESULT], "messages[1]", "tool_calls"),
    ],
)  # fmt: skip
def test_what_is_left_out_is_refused(
    text: str, messages: list[ChatMessage], place: str, words: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _shown(text, *messages)
    assert caught.value.param == "messages"
    assert caught.value.message.startswith(f"{place} cannot be shown")
    assert caught.value.message.endswith(f"leaves out {words}")
    assert words in _template(text).left_out


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (SILENT_SYSTEM, [HI, SAYS, HI]),
        (LAST_SYSTEM, [SYSTEM, HI]),
        (ONE_CALL, [HI, NOTHING]),
        (NO_ARGUMENTS, [HI, ChatMessage("assistant", "", {"tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{}"}}]})]),
        (SILENT_SYSTEM, [ChatMessage("system", " "), HI]),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TURNS, [HI]),
    ],
)  # fmt: skip
def test_what_needs_nothing_of_it_is_answered(text: str, messages: list[ChatMessage]) -> None:
    assert "hi" in _shown(text, *messages)


def test_tools_that_are_not_shown_are_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        _shown(TURNS, HI, tools=[TOOL])
    assert caught.value.param == "tools"
    assert caught.value.message.endswith("leaves out tools")
    with pytest.raises(InvalidRequest, match="leaves out more than one tool"):
        _shown(ONE_TOOL, HI, tools=[TOOL, TOOL])
    assert _shown(ONE_TOOL, HI, tools=[TOOL]) == _theirs(ONE_TOOL, _user(), tools=[TOOL])
    smol = ONE_TOOL.replace("tools", "xml_tools")
    assert _shown(smol, HI, tools=[TOOL]) == _theirs(smol, _user(), xml_tools=[TOOL])
    assert "tools" not in _template(smol).option_names


SYSTEM_TOOLS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'system' %}"
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% endif %}{% endfor %}"
)
NO_SYSTEM_TOOLS = (
    "{% if messages[0].role != 'system' %}{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% endif %}"
    + TURNS
)


@pytest.mark.parametrize(
    ("text", "shown", "refused", "words"),
    [
        (SYSTEM_TOOLS, [SYSTEM, HI], [HI], "tools"),
        (NO_SYSTEM_TOOLS, [HI], [SYSTEM, HI], "tools beside a message of the system"),
    ],
    ids=["beside-system-alone", "without-system-alone"],
)
def test_tools_may_be_shown_with_or_without_a_message_of_the_system_alone(
    text: str, shown: list[ChatMessage], refused: list[ChatMessage], words: str
) -> None:
    other = {**TOOL, "function": {**TOOL["function"], "name": "second"}}
    for tools in ([TOOL], [TOOL, other]):
        theirs = [{"role": m.role, "content": m.content} for m in shown]
        assert _shown(text, *shown, tools=tools) == _theirs(text, *theirs, tools=tools)
        with pytest.raises(InvalidRequest) as caught:
            _shown(text, *refused, tools=tools)
        assert caught.value.message.endswith(f"leaves out {words}")


def test_calls_may_be_shown_beside_tools_alone() -> None:
    text = "{% if tools %}{{ tools | tojson }}" + PLAIN + "{% else %}" + TURNS + "{% endif %}"
    assert "<book" in _shown(text, HI, NOTHING, tools=[TOOL])
    with pytest.raises(InvalidRequest, match="leaves out tool_calls"):
        _shown(text, HI, NOTHING)


def test_thinking_on_and_off_show_the_same() -> None:
    text = (
        "{% if enable_thinking is defined and not enable_thinking %}{{ messages[-1].content }}{% else %}"
        + TURNS
        + "{% endif %}"
    )
    with pytest.raises(InvalidRequest, match="before the last one"):
        _shown(text, HI, SAYS, HI)


# Where templates are found.

TOOL_USE = "T{{ tools[0].function.name }}" + TURNS


@pytest.mark.parametrize("place", ["list", "object", "files", "chat_template.json"])
def test_the_template_for_tools_is_taken_with_tools(tmp_path: Path, place: str) -> None:
    named = {"default": "D" + TURNS, "tool_use": TOOL_USE, "rag": "R"}
    listed = [{"name": name, "template": text} for name, text in named.items()]
    if place == "files":
        (tmp_path / "chat_template.jinja").write_text(named["default"])
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_USE)
    elif place == "chat_template.json":
        write_config(tmp_path, place, {"chat_template": listed})
    else:
        given: Any = listed if place == "list" else named
        write_config(tmp_path, "tokenizer_config.json", {"chat_template": given})
    source = find_chat_template(tmp_path)
    assert source is not None and source.texts == f"{TOOL_USE}\n{named['default']}"
    template = ChatTemplate(source, special_tokens={})
    assert template.render(Conversation(messages=[HI])) == "D[user]hi"
    assert template.render(Conversation(messages=[HI], tools=[TOOL])) == "Tbook[user]hi"


def test_chat_template_json_is_read_last(tmp_path: Path) -> None:
    write_config(tmp_path, "chat_template.json", {"chat_template": "one"})
    source = find_chat_template(tmp_path)
    assert source is not None and source.text == "one"
    assert source.origin.endswith("chat_template.json: key 'chat_template'")
    write_config(tmp_path, "tokenizer_config.json", {"chat_template": "two"})
    source = find_chat_template(tmp_path)
    assert source is not None and source.text == "two"


@pytest.mark.parametrize(
    "value", [{}, {"default": 1}, {"default": "x", "tool_use": 1}, {"tool_use": "x"}]
)
def test_named_templates_of_other_kinds_name_the_key(tmp_path: Path, value: Any) -> None:
    write_config(tmp_path, "chat_template.json", {"chat_template": value})
    with pytest.raises(ModelLoadError, match=r"chat_template\.json: key 'chat_template'"):
        find_chat_template(tmp_path)


# Through the routes.


def test_calls_of_the_history_are_shown_on_all_routes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "template.jinja"
    path.write_text(WHERE_NULL)
    openai = {
        "messages": [
            _user(),
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call00001", "content": "done"},
        ]
    }
    responses = {"input": [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "c", "name": "book", "arguments": json.dumps(ARGUMENTS)},
        {"type": "function_call_output", "call_id": "c", "output": "done"},
    ]}  # fmt: skip
    anthropic = {"max_tokens": 2, "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "book", "input": ARGUMENTS}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "done"}]},
    ]}  # fmt: skip

    async def scenario() -> None:
        flags = {"chat_template": str(path), "tool_call_parser": "hermes"}
        async with frontend(says([5, 2]), **flags) as setup:
            for route, fields in (
                ("/v1/chat/completions", openai),
                ("/v1/responses", responses),
                ("/v1/messages", anthropic),
            ):
                body = {"model": BUNDLED_MODEL_NAME, **fields}
                response = await setup.post(route, body)
                assert response.status_code == 200, response.text
                text = setup.service.model.tokenizer.decode(setup.router.prompt_of(-1))
                assert text == f"[user]hi<book {json.dumps(ARGUMENTS)}>[tool]done", route
                tools = {"tools": [TOOL]}
                if route == "/v1/responses":
                    tools = {"tools": [{"type": "function", **TOOL["function"]}]}
                elif route == "/v1/messages":
                    tools = {"tools": [{"name": "book", "input_schema": {"type": "object"}}]}
                refused = await setup.post(route, {**body, **tools})
                assert refused.status_code == 400
                assert "its chat template leaves out tools" in refused.text

    asyncio.run(scenario())
    assert "leaves out: " in caplog.text
