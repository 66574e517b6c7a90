"""Tools through the chat route: into the template, into a grammar, and out of the text again."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_router import Setup, frontend, says, sse_data

from lightserve.bundled import BUNDLED_MODEL_DIR, BUNDLED_MODEL_NAME
from lightserve.config import ServeConfig
from lightserve.frontend.columns import json_object
from lightserve.frontend.openai.output_parser import MessageBuffer, OutputParser, ParserOptions
from lightserve.frontend.openai.tools import ToolUse
from lightserve.frontend.structured_output import ConstraintSpec
from lightserve.messages.common import GrammarConstraint
from lightserve.structured import byte_vocabulary, compile_matcher
from lightserve.tokenization.tokenizer import Tokenizer

PATH = "/v1/chat/completions"
TEMPLATE = """\
{% for tool in tools or [] %}T:{{ tool.function.name }} {% endfor %}\
{% for m in messages %}[{{ m.role }}] {{ m.content }}\
{% for c in m.tool_calls or [] %}C:{{ c.function.name }}=\
{{ c.function.arguments.values() | join(",") if c.function.arguments is mapping }}{% endfor %}\
{% if m.tool_call_id %}I:{{ m.tool_call_id }}{% endif %} {% endfor %}"""
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}},
            "required": ["a", "b"],
            "additionalProperties": False,
            "$defs": {"n": {"type": "integer"}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
USER = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": BUNDLED_MODEL_NAME, "messages": [USER]}
NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(BUNDLED_MODEL_DIR)


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return str(path)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return [*tokenizer.encode(text, add_special_tokens=False), *tokenizer.eos_token_ids]


async def _post(setup: Setup, **changes: Any) -> dict[str, Any]:
    response = await setup.post(PATH, {**BODY, **changes})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_calls_are_told_whole_and_streamed(tokenizer: Tokenizer, template: str) -> None:
    async def scenario() -> None:
        answer = says(ids(tokenizer, f"So.\n{CALL}\n{CALL}"))
        async with frontend(answer, tool_call_parser="hermes", chat_template=template) as setup:
            body: dict[str, Any] = {"tools": [ADD, NOW], "n": 2}
            for choice in (await _post(setup, **body))["choices"]:
                message = choice["message"]
                assert choice["finish_reason"] == "tool_calls"
                assert message["content"] == "So."
                assert len({call["id"] for call in message["tool_calls"]}) == 2
                for call in message["tool_calls"]:
                    assert call["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
            response = await setup.post(PATH, {**BODY, **body, "stream": True})
            chunks = sse_data(response.text)[:-1]
            for index in (0, 1):
                own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
                assert own[-1]["finish_reason"] == "tool_calls"
                deltas = [choice["delta"] for choice in own]
                assert "".join(delta.get("content", "") for delta in deltas) == "So."
                calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
                assert [c["function"]["name"] for c in calls if "id" in c] == ["add", "add"]
                for number in (0, 1):
                    pieces = [c["function"]["arguments"] for c in calls if c["index"] == number]
                    assert "".join(pieces) == '{"a": 1, "b": 2}'

    asyncio.run(scenario())


def test_without_tools_the_same_text_is_content(tokenizer: Tokenizer, template: str) -> None:
    async def scenario() -> None:
        answer = says(ids(tokenizer, CALL))
        async with frontend(answer, tool_call_parser="hermes", chat_template=template) as setup:
            for fields in ({}, {"tools": []}, {"tools": [ADD], "tool_choice": "none"}):
                (choice,) = (await _post(setup, **fields))["choices"]
                assert choice["message"]["content"] == CALL
                assert choice["finish_reason"] == "stop"
                assert "T:" not in tokenizer.decode(setup.router.prompt_of(-1))

    asyncio.run(scenario())


def test_templates_see_tools_and_calls(tokenizer: Tokenizer, template: str) -> None:
    async def scenario() -> None:
        async with frontend(
            says([5, 2]), tool_call_parser="hermes", chat_template=template
        ) as setup:
            call = {"id": "c1", "type": "function"}
            calls = [
                {**call, "function": {"name": "add", "arguments": '{"a": 41}'}},
                {**call, "function": {"name": "add", "arguments": "broken"}},
            ]
            messages = [
                USER,
                {"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "tool", "tool_call_id": "c1", "content": "42"},
            ]
            await _post(setup, tools=[ADD, NOW], messages=messages)
            text = tokenizer.decode(setup.router.prompt_of(-1))
            expected = "T:add T:now [user] hi [assistant] C:add=41C:add= [tool] 42I:c1"
            assert text.split() == expected.split()
            assert setup.router.submits[-1].constraint is None

    asyncio.run(scenario())


ADDED = {
    "parsed": {"a": [1]},
    "parsed_arguments": {"a": 1.5},
    "index": 0,
    "parsed_output": {"a": 1},
}
"""What clients of OpenAI and Anthropic add to answers that they have read."""


def _sent_back(route: str, *, with_added: bool) -> dict[str, Any]:
    """Return a conversation with an answer of text and a call, perhaps with what clients add."""

    def added(*names: str) -> dict[str, Any]:
        return {name: ADDED[name] for name in names} if with_added else {}

    body: dict[str, Any] = {"model": BUNDLED_MODEL_NAME, "max_tokens": 400}
    if route == "/v1/messages":
        said = {"type": "text", "text": "So.", **added("parsed_output")}
        used = {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}
        result = {"type": "tool_result", "tool_use_id": "c", "content": "2"}
        turns = [
            {"role": "assistant", "content": [said, used]},
            {"role": "user", "content": [result]},
        ]
        return {**body, "messages": [{"role": "user", "content": "hi"}, *turns]}
    if route == "/v1/responses":
        text = {"type": "output_text", "text": "So.", "annotations": [], **added("parsed")}
        items = [
            {"role": "user", "content": "hi"},
            {"type": "message", "role": "assistant", "content": [text]},
            {
                **{"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
                **added("parsed_arguments"),
            },
            {"type": "function_call_output", "call_id": "c", "output": "2"},
        ]
        return {"model": BUNDLED_MODEL_NAME, "input": items}
    function = {"name": "add", "arguments": "{}", **added("parsed_arguments")}
    call = {"id": "c", "type": "function", "function": function, **added("index")}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "So.", "tool_calls": [call], **added("parsed")},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    return {**body, "messages": messages}


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_what_clients_add_to_an_answer_may_be_sent_back(route: str, template: str) -> None:
    async def scenario() -> None:
        async with frontend(
            says([5, 2]), chat_template=template, tool_call_parser="hermes"
        ) as setup:
            for with_added in (False, True):
                response = await setup.post(route, _sent_back(route, with_added=with_added))
                assert response.status_code == 200, response.text
            assert setup.router.prompt_of(-1) == setup.router.prompt_of(-2)

    asyncio.run(scenario())


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_tools_are_bounded_by_the_body_alone(
    route: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """300 of them with names of 128 characters and a description of 20,000, and 200 calls."""
    path = tmp_path / "template.jinja"
    path.write_text(
        "{% for t in tools or [] %}{% if loop.first or loop.last %}{{ t.function.name }} "
        "{% set d = t.function.description or '' %}{{ d[:9] }}{{ d | length }} "
        "{{ t.function.parameters }}{% endif %}{% endfor %}{{ (tools or []) | length }}="
        "{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function }}{% endfor %}{% endfor %}"
    )
    names = [f"{n:a>128}" for n in range(300)]
    described: list[dict[str, Any]] = [
        {"name": name, "description": "d" * 20_000} for name in names
    ]
    schema = {"type": "object", "properties": {}}
    if route == "/v1/messages":
        tools = [{"name": t["name"], "input_schema": schema} for t in described[1:]]
        tools.append({**described[0], "input_schema": schema})
    elif route == "/v1/responses":
        tools = [{"type": "function", "name": t["name"]} for t in described[1:]]
        tools.append({"type": "function", **described[0]})
    else:
        tools = [{"type": "function", "function": {"name": t["name"]}} for t in described[1:]]
        tools.append({"type": "function", "function": described[0]})
    body = _sent_back(route, with_added=False)
    if route == "/v1/chat/completions":
        call = body["messages"][1]["tool_calls"][0]
        body["messages"][1]["tool_calls"] = [{**call, "id": f"<{n}>"} for n in range(200)]

    async def scenario() -> None:
        async with frontend(
            says([5, 2]), chat_template=str(path), tool_call_parser="hermes"
        ) as setup:
            response = await setup.post(route, {**body, "tools": tools})
            assert response.status_code == 200, response.text
            prompt = tokenizer.decode(setup.router.prompt_of(-1))
            assert f"{names[0]} ddddddddd20000 " in prompt and "300=" in prompt
            assert route != "/v1/chat/completions" or "<199>" in prompt
            wrong = json.loads(json.dumps(tools).replace(names[7], names[7] + "a"))
            error = (await setup.post(route, {**body, "tools": wrong})).json()["error"]
            assert "must match ^[A-Za-z0-9_.-]{1,128}$" in error["message"]

    asyncio.run(scenario())


def test_digits_of_a_tool_that_only_the_answer_repeats(template: str) -> None:
    """A number with more digits than a float64 keeps, where nothing enforces it."""
    number = "0.10000000000000000555"
    tool = f'{{"type":"function","name":"add","parameters":{{"default":{number}}}}}'
    body = f'{{"model":"{BUNDLED_MODEL_NAME}","input":"hi","tools":[{tool}]}}'

    async def scenario() -> None:
        async with frontend(
            says([5, 2]), chat_template=template, tool_call_parser="hermes"
        ) as setup:
            headers = {"content-type": "application/json"}
            response = await setup.http.post("/v1/responses", content=body, headers=headers)
            assert response.status_code == 200, response.text
            assert response.json()["tools"][0]["parameters"] == {"default": 0.1}

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": 12345678901234567890123}', "12345678901234567890123"),
        ('{"a": -9223372036854775809}', "-9223372036854775809"),
        ('{"a": 1.5e300}', "1.5e+300"),
        (r'{"a": "\ud83d\ude00"}', "\U0001f600"),
        (r'{"a": "\ud83d"}', ""),  # half of a character
        *((f'{{"a": {number}}}', "") for number in ("1e400", "NaN", "-Infinity", "9" * 5000)),
    ],
    ids=lambda text: text[:32],
)
def test_numbers_that_a_model_wrote_itself(
    arguments: str, shown: str, tokenizer: Tokenizer, template: str
) -> None:
    """In the history or a schema; one that JSON cannot have again is shown as it was written."""

    async def scenario() -> None:
        flags = {"tool_call_parser": "hermes", "chat_template": template}
        async with frontend(says([5, 2]), **flags) as setup:
            function = {"name": "add", "arguments": arguments}
            calls = [{"id": "c1", "type": "function", "function": function}]
            messages = [USER, {"role": "assistant", "content": None, "tool_calls": calls}]
            schema = {"properties": {"a": {"maximum": 10**30}}}
            tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
            await _post(setup, tools=[tool], messages=messages)
            text = tokenizer.decode(setup.router.prompt_of(-1))
            assert text.split()[-1] == f"C:add={shown}"

    asyncio.run(scenario())


ONE = CALL
JSON_ONE = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
NOW_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("parser", "fields", "accepted", "refused"),
    [
        (
            "hermes",
            {"tool_choice": "required"},
            [ONE, NOW_CALL, f"{ONE}\n{NOW_CALL}", "\n".join([ONE] * 16)],
            ["", "So.", ONE.replace('"b": 2', '"c": 2'), "\n".join([ONE] * 17), f"{ONE} so"],
        ),
        (
            "hermes",
            {"tool_choice": "required", "parallel_tool_calls": False},
            [ONE, NOW_CALL],
            [f"{ONE}\n{NOW_CALL}"],
        ),
        ("hermes", {"tool_choice": NAMED}, [ONE], [NOW_CALL, f"{ONE}\n{ONE}"]),
        (
            "llama3_json",
            {"tool_choice": NAMED, "parallel_tool_calls": True},
            [JSON_ONE],
            [f"{JSON_ONE}; {JSON_ONE}"],
        ),
        (
            "llama3_json",
            {"tool_choice": "required"},
            [JSON_ONE, f"{JSON_ONE}; {JSON_ONE}"],
            [ONE, JSON_ONE.replace("2", '"2"')],
        ),
    ],
)
def test_required_calls_become_a_grammar(
    parser: str, fields: dict[str, Any], accepted: list[str], refused: list[str], template: str
) -> None:
    async def scenario() -> Any:
        flags = {"tool_call_parser": parser, "chat_template": template}
        async with frontend(says([5, 2]), **flags) as setup:
            await _post(setup, tools=[ADD, NOW], **fields)
            return setup.router.submits[-1].constraint

    constraint = asyncio.run(scenario())
    assert isinstance(constraint, GrammarConstraint)
    matcher = compile_matcher(constraint, byte_vocabulary())
    for text, expected in [*((t, True) for t in accepted), *((t, False) for t in refused)]:
        own, data = matcher.deep_copy(), list(text.encode())
        is_whole = own.try_consume_tokens(data) == len(data) and own.is_accepting()
        assert is_whole is expected, text


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "x"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "x": 1}}]}, "tools[0].function.x"),
    ({"tools": [NOW, NOW]}, "tools"),
    ({"tools": [NOW], "tool_choice": NAMED}, "tool_choice.function.name"),
    ({"tools": [NOW], "tool_choice": "maybe"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice"),
    ({"parallel_tool_calls": True}, "parallel_tool_calls"),
    ({"tools": [NOW], "response_format": {"type": "json_object"}}, "tools"),
    (
        {
            "tools": [NOW],
            "tool_choice": "required",
            "response_format": {"type": "json_object"},
        },
        "response_format",
    ),
    (
        {
            "tools": [{**NOW, "function": {"name": "f", "parameters": {"type": "foo"}}}],
            "tool_choice": "required",
        },
        "tools",
    ),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1]"),
    ({"messages": [{**USER, "tool_call_id": "x"}]}, "messages[0]"),
    ({"messages": [{**USER, "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0]"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0]"),
]


def test_what_makes_no_sense_is_refused(template: str) -> None:
    async def scenario() -> None:
        async with frontend(
            says([5, 2]), tool_call_parser="hermes", chat_template=template
        ) as setup:
            for fields, param in REFUSED:
                response = await setup.post(PATH, {**BODY, **fields})
                assert response.status_code == 400, (fields, response.text)
                error = response.json()["error"]
                assert error["param"].startswith(param), (fields, error)
                assert error["param"] in error["message"]
            assert not setup.router.submits
        async with frontend(says([5, 2])) as setup:
            response = await setup.post(PATH, {**BODY, "tools": [NOW]})
            assert response.status_code == 400
            assert "--tool-call-parser" in response.json()["error"]["message"]

    asyncio.run(scenario())


def test_reasoning_is_told_apart(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async def scenario(template: str, text: str) -> dict[str, Any]:
        path = tmp_path / "thinking.jinja"
        path.write_text(template)
        async with frontend(
            says(ids(tokenizer, text)), reasoning_parser="think", chat_template=str(path)
        ) as setup:
            answer = (await _post(setup))["choices"][0]["message"]
            constrained = {"structured_outputs": {"regex": ".*"}}
            plain = (await _post(setup, **constrained))["choices"][0]["message"]
            assert (plain["reasoning_content"], plain["content"]) == ("Hm.", "\n\nYes.")
            message: dict[str, Any] = answer
            return message

    for template, text in (
        ("{{ messages[-1].content }}", "<think>\nHm.\n</think>\n\nYes."),
        ("{{ messages[-1].content }}<think>\n", "Hm.\n</think>\n\nYes."),
    ):
        message = asyncio.run(scenario(template, text))
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


def test_what_a_user_writes_last_begins_no_reasoning(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Before a generation prompt that is one special token, which has no text."""
    end = tokenizer.name_of(tokenizer.eos_token_ids[0])

    async def scenario(template: str) -> dict[str, Any]:
        path = tmp_path / "special.jinja"
        path.write_text(template)
        body = {**BODY, "messages": [{"role": "user", "content": "What is <think>"}]}
        flags = {"reasoning_parser": "think", "chat_template": str(path)}
        async with frontend(says(ids(tokenizer, "A tag.")), **flags) as setup:
            response = await setup.post("/v1/chat/completions", body)
            message: dict[str, Any] = response.json()["choices"][0]["message"]
            return message

    plain = asyncio.run(scenario("{{ messages[-1].content }}" + end))
    assert (plain["content"], "reasoning_content" in plain) == ("A tag.", False)
    thinking = asyncio.run(scenario("{{ messages[-1].content }}" + end + "\n<think>\n"))
    assert (thinking["content"], thinking["reasoning_content"]) == ("", "A tag.")


def test_long_schemas_of_tools_take_little_memory_and_no_time_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    """Long keys inside of each other: closing notes where each schema is, by all keys above it."""
    schema: dict[str, Any] = {"type": "object", "properties": {f"k{i}": {} for i in range(1000)}}
    for _ in range(10):
        schema = {"type": "object", "properties": {"x" * 10_000: schema}}
    spec, peaks, threads = ToolUse.spec, [], []

    def measured_spec(use: ToolUse, config: ServeConfig, name: str) -> ConstraintSpec | None:
        threads.append(threading.current_thread())
        tracemalloc.start()
        try:
            return spec(use, config, name)
        finally:
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()

    monkeypatch.setattr(ToolUse, "spec", measured_spec)

    flags: dict[str, Any] = {"closed_schemas": True, "tool_call_parser": "hermes"}
    flags["chat_template"] = template

    async def scenario() -> None:
        async with frontend(says([50, 2]), **flags) as setup:
            tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
            body = {
                "model": BUNDLED_MODEL_NAME,
                "messages": [{"role": "user", "content": "hi"}],
                "tools": [tool],
                "tool_choice": "required",
                "max_tokens": 2,
            }
            response = await setup.post("/v1/chat/completions", body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "tools"

    asyncio.run(scenario())
    assert peaks[0] < 4 * 2**20
    assert threads[0] is not threading.main_thread()


# Reasoning and tool calls in a text, whole and however it is cut.

NAMES = frozenset({"weather", "add"})
HERMES = ParserOptions(tool_format="hermes", tool_names=NAMES)
LLAMA = ParserOptions(tool_format="llama3_json", tool_names=NAMES)
THINK = ParserOptions(reasoning="think")
INSIDE = ParserOptions(reasoning="think", starts_in_reasoning=True)
BOTH = HERMES._replace(reasoning="think")


def parse(options: ParserOptions, *pieces: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    parser = OutputParser(options)
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    message = MessageBuffer()
    message.extend(deltas)
    return deltas, json.loads(b"".join(json_object(message.fields())))


def simple(message: dict[str, Any]) -> tuple[Any, Any, list[tuple[str, str]]]:
    """Reasoning, content, and calls without their random ids."""
    calls = [
        (c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])
    ]
    return message.get("reasoning_content"), message["content"], calls


ARGUMENTS = '{"city": "Os}l\\"o", "n": [1, {}]}'
SAID = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
CASES: list[tuple[ParserOptions, str, Any]] = [
    (HERMES, "plain <tool text < <tool_cal", (None, "plain <tool text < <tool_cal", [])),
    (HERMES, "", (None, "", [])),
    (HERMES, "tail  \n", (None, "tail  \n", [])),
    (HERMES, SAID, (None, None, [("weather", ARGUMENTS)])),
    (HERMES, f"Let me see.\n{SAID}\n", (None, "Let me see.", [("weather", ARGUMENTS)])),
    (
        HERMES,
        f'{SAID}\n{SAID}<tool_call>{{"arguments":{{"a":1}},"name":"add"}}</tool_call> done',
        (None, "done", [("weather", ARGUMENTS)] * 2 + [("add", '{"a":1}')]),
    ),
    (HERMES, '<tool_call>{"name": "add"}</tool_call>', (None, None, [("add", "{}")])),
    (
        HERMES,
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        (None, None, [("add", '{"a": 1}')]),
    ),
    (
        HERMES,
        '<tool_call>{"name": "add", "x": 1.5, "arguments": {"a": 1}, "y": null}</tool_call>',
        (None, None, [("add", '{"a": 1}')]),
    ),
    # One at most.
    (
        HERMES._replace(max_calls=1),
        f'So. {SAID}\n{SAID}<tool_call>{{"arguments":{{"a":1}},"name":"add"}}</tool_call> done',
        (None, "So.done", [("weather", ARGUMENTS)]),
    ),
    # Cut by max_tokens.
    *(
        (HERMES, text, (None, text, []))
        for text in (
            '<tool_call>{"name": "add", "argum',
            '<tool_call>{"name": "add", "arguments": {"a',
            'So <tool_call>{"name": "add", "arguments": {"a": "x}}</tool_call>',
            '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>',
            '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
            '<tool_call>{"name": "add", "arguments": "no"}</tool_call>',
            '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        )
    ),
    # What has its end missing alone, or no arguments, or line breaks in strings.
    (
        HERMES,
        '<tool_call>{"name": "add", "arguments": {"a": 1}',
        (None, None, [("add", '{"a": 1}')]),
    ),
    *(
        (
            HERMES,
            f'<tool_call>{{"name": "add", "arguments": {nothing}}}</tool_call>',
            (None, None, [("add", "{}")]),
        )
        for nothing in ("null", '""', "[]", "{}", '"{}"', '"null"')
    ),
    (
        HERMES,
        '<tool_call>{"name": "add", "arguments": {"a": "x\n\ty", "n": 12345678901234567890.50}}',
        (None, None, [("add", '{"a": "x\\n\\ty", "n": 12345678901234567890.50}')]),
    ),
    # Blanks belong to content where no call follows.
    (HERMES, "a <tool_call>b", (None, "a <tool_call>b", [])),
    (HERMES, "a \n <tool_call> {} b", (None, "a \n <tool_call> {} b", [])),
    (HERMES, '<tool_call>{"name": "ad', (None, '<tool_call>{"name": "ad', [])),
    (HERMES, f"{SAID[:-4]}", (None, None, [("weather", ARGUMENTS)])),
    # What is no call of a known tool is content.
    (
        HERMES,
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        (None, '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', []),
    ),
    (HERMES, "<tool_call>nothing</tool_call>", (None, "<tool_call>nothing</tool_call>", [])),
    (HERMES, '<tool_call>{"a" 1}', (None, '<tool_call>{"a" 1}', [])),
    (LLAMA, "plain", (None, "plain", [])),
    (LLAMA, " \n{", (None, " \n{", [])),
    (LLAMA, " \n", (None, " \n", [])),
    (LLAMA, '{"answer": 42} and more', (None, '{"answer": 42} and more', [])),
    (LLAMA, '{"name": "Bob"}', (None, '{"name": "Bob"}', [])),
    (LLAMA, '\n{"name": "add", "parameters": {"a": 1}}', (None, None, [("add", '{"a": 1}')])),
    (
        LLAMA,
        '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {}}\n',
        (None, None, [("add", '{"a": 1}'), ("add", "{}")]),
    ),
    (
        LLAMA,
        '{"name": "add", "parameters": {}} so',
        (None, "so", [("add", "{}")]),
    ),
    (THINK, "no tags", (None, "no tags", [])),
    (THINK, "<thi", (None, "<thi", [])),
    (THINK, "<think>\nHm. <b>\n</think>\n\nYes.", ("Hm. <b>", "Yes.", [])),
    (THINK, " <think>a</think>", ("a", "", [])),
    (THINK, "<think>cut </thi", ("cut </thi", "", [])),
    (THINK, "x <think>a</think>", (None, "x <think>a</think>", [])),
    (INSIDE, "Hm.</think> Yes. </think>", ("Hm.", "Yes. </think>", [])),
    (
        BOTH,
        f"<think>or {SAID}?</think>{SAID}",
        (f"or {SAID}?", None, [("weather", ARGUMENTS)]),
    ),
]


@pytest.mark.parametrize(("options", "text", "expected"), CASES)
def test_parts_of_a_text(options: ParserOptions, text: str, expected: Any) -> None:
    assert simple(parse(options, text)[1]) == expected
    assert simple(parse(options, *text)[1]) == expected


def test_a_call_is_streamed_as_clients_expect() -> None:
    """Once it is whole: its name, then its arguments."""
    deltas, _ = parse(HERMES, *f"Hi{SAID}{SAID}")
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert [call["index"] for call in calls] == [0, 0, 1, 1]
    for first, second in (calls[:2], calls[2:]):
        assert first.keys() == {"index", "id", "type", "function"}
        assert first["function"] == {"name": "weather", "arguments": ""}
        assert second.keys() == {"index", "function"}
        assert json.loads(second["function"]["arguments"])["n"] == [1, {}]
    assert calls[0]["id"] != calls[2]["id"] and calls[0]["id"].startswith("call_")


PIECES = st.sampled_from(
    [
        *["<tool_call>", "</tool_call>", "<think>", "</think>", "<", "tool", "_call>", "\n", " "],
        *['{"name": "add", "arguments": {"a": "}"}}', '{"name": "rm"}', '{"name":"weather",'],
        *['"arguments": {"x": [1, "\\""]}', "}", "{", '"', "\\", ";", ":", ",", "text", "é☃", SAID],
    ]
)


@given(
    options=st.sampled_from([HERMES, LLAMA, THINK, INSIDE, BOTH]),
    text=st.lists(PIECES, max_size=12).map("".join),
    data=st.data(),
)
def test_how_a_text_is_cut_changes_nothing(
    options: ParserOptions, text: str, data: st.DataObject
) -> None:
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    ends = zip([0, *places], [*places, len(text)], strict=True)
    cut = parse(options, *(text[start:end] for start, end in ends))[1]
    assert simple(cut) == simple(parse(options, text)[1])


@pytest.mark.parametrize("options", [HERMES, LLAMA, THINK, INSIDE, BOTH])
def test_blanks_without_end_are_not_looked_at_again_and_again(options: ParserOptions) -> None:
    """Any client can have a model write them; they are held back until something follows."""

    def cpu_s(num_blanks: int) -> float:
        start_s = time.thread_time()
        parse(options, *["   \n" * 16] * num_blanks, "end")
        return time.thread_time() - start_s

    pairs = [(cpu_s(8 * 500), cpu_s(500)) for _ in range(3)]
    assert min(pair[0] for pair in pairs) < 24 * min(pair[1] for pair in pairs)  # not 64 times


def test_a_value_of_any_depth_is_no_call() -> None:
    for name in ("name", "arguments"):
        text = f'{{"{name}": {"[" * 100_000}{"]" * 100_000}, '
        assert simple(parse(LLAMA, text)[1])[2] == []
