"""Tool calls and reasoning as families of models write them: read however they are cut, written by
grammars, and found by the chat templates of their repositories."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from support.fake_router import frontend, says
from support.grids import choose, more_when_long

from lightserve.bundled import BUNDLED_MODEL_DIR, BUNDLED_MODEL_NAME
from lightserve.config import ServeConfig
from lightserve.frontend.columns import json_object
from lightserve.frontend.openai.output_parser import MessageBuffer, OutputParser, ParserOptions
from lightserve.frontend.openai.tools import Tool, ToolUse
from lightserve.messages.common import GrammarConstraint
from lightserve.model_formats import (
    CALL_FORMATS,
    REASONING_FORMATS,
    ModelFormats,
    choose_formats,
)
from lightserve.structured import byte_vocabulary, compile_matcher, model_vocabulary
from lightserve.tokenization.tokenizer import Tokenizer

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
ADD_ALL = {"type": "function", "function": {"name": "add_all"}}
TOOLS = [Tool.model_validate(ADD), Tool.model_validate(ADD_ALL)]
USE = ToolUse(TOOLS, TOOLS)
BAR, LOW = "\uff5c", "\u2581"


def deepseek(text: str) -> str:
    """Write [[tool calls begin]] as DeepSeek's token."""
    parts = text.split("[[")
    tokens = (part.partition("]]") for part in parts[1:])
    return parts[0] + "".join(f"<{BAR}{w.replace(' ', LOW)}{BAR}>{rest}" for w, _, rest in tokens)


def dsml(text: str) -> str:
    return text.replace("@", f"{BAR}DSML{BAR}")


DEEPSEEK_CALL = deepseek(
    '[[tool call begin]]function[[tool sep]]add\n```json\n{"a": 1, "b": "x}"}\n```[[tool call end]]'
)
# By format: what opens calls, one call as its model writes it, what is between two, what ends them.
ONE = '{"name": "add", "arguments": {"a": 1, "b": "x}"}}'
SHAPES: dict[str, tuple[str, str, str, str]] = {
    "hermes": ("", f"<tool_call>\n{ONE}\n</tool_call>", "\n", ""),
    "mistral": ("[TOOL_CALLS] [", ONE, ", ", "]"),
    "mistral_args": ("", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": "x}"}', "", ""),
    "granite": ("<|tool_call|>[", ONE, ", ", "]"),
    "phi4_mini": ("<|tool_call|>[", ONE, ", ", "]<|/tool_call|>"),
    "internlm": ("", f"<|action_start|><|plugin|>\n{ONE}<|action_end|>", "", ""),
    "deepseek_v3": (
        deepseek("[[tool calls begin]]"),
        DEEPSEEK_CALL,
        "\n",
        deepseek("[[tool calls end]]"),
    ),
    "deepseek_v31": (
        deepseek("[[tool calls begin]]"),
        deepseek('[[tool call begin]]add[[tool sep]]{"a": 1, "b": "x}"}[[tool call end]]'),
        "",
        deepseek("[[tool calls end]]"),
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 1, "b": "x}"}<|tool_call_end|>',
        "",
        "<|tool_calls_section_end|>",
    ),
    "deepseek_v32": (
        dsml("<@function_calls>\n"),
        dsml(
            '<@invoke name="add">\n<@parameter name="a" string="false">1</@parameter>\n'
            '<@parameter name="b" string="true">x}</@parameter>\n</@invoke>'
        ),
        "\n",
        dsml("\n</@function_calls>"),
    ),
    "minimax": (
        "<minimax:tool_call>\n",
        '<invoke name="add">\n<parameter name="a">1</parameter>\n<parameter name="b">x}'
        "</parameter>\n</invoke>",
        "\n",
        "\n</minimax:tool_call>",
    ),
    "gemma4": ("", '<|tool_call>call:add{a:1,b:<|"|>x}<|"|>}<tool_call|>', "", ""),
    "seed_oss": (
        "",
        "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n<parameter=b>x}"
        "</parameter>\n</function>\n</seed:tool_call>",
        "\n",
        "",
    ),
    "glm45": (
        "",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>x}</arg_value>\n</tool_call>",
        "\n",
        "",
    ),
    "qwen3_coder": (
        "",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx}\n"
        "</parameter>\n</function>\n</tool_call>",
        "\n",
        "",
    ),
    "olmo3": ("<function_calls>\n", "add(a=1, b='x}')", "\n", "\n</function_calls>"),
    "lfm2": ("<|tool_call_start|>[", "add(a=1, b='x}')", ", ", "]<|tool_call_end|>"),
    "pythonic": ("[", "add(a=1, b='x}')", ", ", "]"),
    "llama3_json": ("", '{"name": "add", "parameters": {"a": 1, "b": "x}"}}', "; ", ""),
    "glm4": ("", 'add\n{"a": 1, "b": "x}"}', "\n", ""),
}
AT_START = {name for name, form in CALL_FORMATS.items() if form.at_start}
CALLED = ("add", {"a": 1, "b": "x}"})


def parse(
    text: str, tools: str = "none", *, cut: bool = False, **options: Any
) -> tuple[Any, str | None, list[tuple[str, str]]]:
    parser = OutputParser(
        ParserOptions(
            tool_format=tools,
            tool_names=USE.names,
            text_arguments=USE.text_arguments,
            **options,
        )
    )
    message = MessageBuffer()
    for piece in text if cut else [text]:
        message.extend(parser.push(piece))
    message.extend(parser.finish())
    fields: dict[str, Any] = json.loads(b"".join(json_object(message.fields())))
    calls = [call["function"] for call in fields.get("tool_calls", ())]
    pairs = [(call["name"], call["arguments"]) for call in calls]
    return fields.get("reasoning_content"), fields["content"], pairs


def read(text: str, tools: str, **options: Any) -> tuple[str | None, list[Any]]:
    """Content and calls; the same however the text is cut."""
    whole, cut = (parse(text, tools, cut=cut, **options) for cut in (False, True))
    assert whole == cut
    return whole[1], [(name, json.loads(arguments or "null")) for name, arguments in whole[2]]


@pytest.mark.parametrize("name", SHAPES)
def test_calls_are_read(name: str) -> None:
    start, call, separator, end = SHAPES[name]
    one = f"{start}{call}{end}"
    assert read(one, name) == (None, [CALLED])
    assert read(f"{start}{call}{separator}{call}{end}\n", name) == (None, [CALLED] * 2)
    if name not in AT_START:
        assert read(f"So.\n{one}\nDone.", name) == ("So.Done.", [CALLED])
        assert read(f"So {one[:3]} and", name) == (f"So {one[:3]} and", [])
    elif name != "glm4":
        assert read(f"So.\n{one}", name) == (f"So.\n{one}", [])
    # Of a call that is cut off, what came stays told; all else is content.
    for length in range(1, len(one)):
        content, calls = parse(one[:length], name, cut=True)[1:]
        assert calls or one[:length].strip() == (content or "").strip()
        assert calls == [] or calls[0][0] == "add"


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_no_call_of_a_known_tool_is_content(name: str) -> None:
    start, call, _, end = SHAPES[name]
    for wrong in (call.replace("add", "rm"), call.replace("add", "ad"), call.replace("add", "")):
        assert read(f"{start}{wrong}{end}", name) == (f"{start}{wrong}{end}", [])
    longer = call.replace("add", "add_all")
    assert [name for name, _ in read(f"{start}{longer}{end}", name)[1]] == ["add_all"]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("mistral", f"[TOOL_CALLS][{ONE}]", None, [CALLED]),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]a1b2[ARGS]{"a": 1}', None, [("add", {"a": 1})]),
        ("mistral_args", f"[TOOL_CALLS] [{ONE}]", None, [CALLED]),
        ("mistral", "[TOOL_CALLS] [1, 2]", "[TOOL_CALLS] [1, 2]", []),
        ("granite", f"<tool_call>[{ONE}]", None, [CALLED]),
        ("phi4_mini", f"functools[{ONE}]", None, [CALLED]),
        ("glm45", "<tool_call>add\n</tool_call>", None, [("add", {})]),
        # As the schema says, or as it looks: a string of digits, an object, a word.
        (
            "glm45",
            "<tool_call>add_all<arg_key>b</arg_key><arg_value>7</arg_value></tool_call>",
            None,
            [("add_all", {"b": 7})],
        ),
        (
            "glm45",
            "<tool_call>add<arg_key>b</arg_key><arg_value>7</arg_value><arg_key>a</arg_key>"
            '<arg_value>{"x": [1]}</arg_value></tool_call>',
            None,
            [("add", {"b": "7", "a": {"x": [1]}})],
        ),
        (
            "qwen3_coder",
            "<tool_call><function=add><parameter=a>True</parameter><parameter=b>\n1\n\n2\n"
            "</parameter></function></tool_call>",
            None,
            [("add", {"a": True, "b": "1\n\n2"})],
        ),
        (
            "glm45",
            "<tool_call>add\n<b>no</b></tool_call>",
            "<tool_call>add\n<b>no</b></tool_call>",
            [],
        ),
        (
            "pythonic",
            '[add(a=[1, -2.5, (3,)], b="it\'s \\"so\\"\\n", c={"k": None, "l": true,}), add()]',
            None,
            [
                ("add", {"a": [1, -2.5, [3]], "b": 'it\'s "so"\n', "c": {"k": None, "l": True}}),
                ("add", {}),
            ],
        ),
        ("pythonic", "[add(1)]", "[add(1)]", []),
        ("pythonic", "[add(a=b)]", "[add(a=b)]", []),
        ("pythonic", "[1, 2]", "[1, 2]", []),
        ("olmo3", "<function_calls>\nopen('x')\n", "<function_calls>\nopen('x')\n", []),
        ("glm4", 'I see.<|assistant|>add\n{"a": 1}', "I see.", [("add", {"a": 1})]),
        ("glm4", "add\nmore", "add\nmore", []),
        ("llama3_json", f"<|python_tag|>{ONE}", None, [CALLED]),
        (
            "deepseek_v31",
            deepseek("[[tool calls begin]][[tool call begin]]add[[tool sep]]no"),
            deepseek("[[tool calls begin]][[tool call begin]]add[[tool sep]]no"),
            [],
        ),
        # As GLM-4.7 writes it, on one line.
        (
            "glm45",
            "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key>"
            "<arg_value>x}</arg_value></tool_call>",
            None,
            [CALLED],
        ),
        (
            "kimi_k2",
            SHAPES["kimi_k2"][0] + "<|tool_call_begin|>add:12<|tool_call_argument_begin|>{}",
            None,
            [("add", {})],
        ),
        # The call itself says which value is a string.
        *(
            (
                "deepseek_v32",
                dsml(
                    '<@tool_calls>\n<@invoke name="add_all">\n<@parameter name="b"'
                    f' string="{kind}">\n7\n</@parameter></@invoke></@tool_calls>'
                ),
                None,
                [("add_all", {"b": value})],
            )
            for kind, value in (("true", "\n7\n"), ("false", 7))
        ),
        (
            "deepseek_v32",
            dsml(
                '<@function_calls><@invoke name="add"><@parameter name="b" string="false">7'
                "</@parameter></@invoke></@function_calls>"
            ),
            None,
            [("add", {"b": 7})],
        ),
        (
            "minimax",
            '<minimax:tool_call><invoke name="add"><parameter name="b">7</parameter>'
            "</minimax:tool_call>",
            None,
            [("add", {"b": "7"})],
        ),
        (
            "gemma4",
            '<|tool_call>call:add{a:[{x:None,<|"|>y z<|"|>:true},-1.5],b:<|"|>{"c": [}\n<|"|> }'
            "<tool_call|>Done.",
            "Done.",
            [("add", {"a": [{"x": None, "y z": True}, -1.5], "b": '{"c": [}\n'})],
        ),
        ("gemma4", "<|tool_call>call:add{}", None, [("add", {})]),
        *(
            ("gemma4", text, text, [])
            for text in (
                "<|tool_call>call:add{a:[1}<tool_call|>",
                "<|tool_call>call:add{a:x}<tool_call|>",
                '<|tool_call>call:add{a:<|"|>x}<tool_call|>',
                "<|tool_call>add{a:1}<tool_call|>",
            )
        ),
        ("llama3_json", f"<|python_start|>{ONE}<|python_end|>", None, [CALLED]),
        # A call behind what was none.
        ("hermes", f"<tool_call><tool_call>{ONE}</tool_call>", None, [CALLED]),
        ("hermes", f'<tool_call>{{"x"<tool_call>{ONE}</tool_call>', '<tool_call>{"x"', [CALLED]),
    ],
)
def test_variants(name: str, text: str, content: str | None, calls: list[Any]) -> None:
    assert read(text, name) == (content, calls)


QWEN, QWEN_END = "<tool_call>\n<function=add>\n", "</function>\n</tool_call>"
TAGGED: list[tuple[str, str, str | None, list[Any]]] = [
    # A value ends where the next tag begins, and may have the tag that ends values in it.
    (
        "qwen3_coder",
        f"{QWEN}<parameter=a>\n1\n<parameter=b>\nx\n</parameter>\n{QWEN_END}",
        None,
        [("add", {"a": 1, "b": "x"})],
    ),
    ("qwen3_coder", f"{QWEN}<parameter=b>\nx{QWEN_END}", None, [("add", {"b": "x"})]),
    (
        "qwen3_coder",
        f"{QWEN}<parameter=b>\nx</parameter> y\n</parameter>\n{QWEN_END}",
        None,
        [("add", {"b": "x</parameter> y"})],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=add><parameter=a>1</parameter>\n</tool_call>"
        f"{QWEN}<parameter=a>2</parameter>{QWEN_END}",
        None,
        [("add", {"a": 1}), ("add", {"a": 2})],
    ),
    (
        "glm45",
        "<tool_call>add<arg_key>a</arg_key><arg_value>1<arg_key>b</arg_key><arg_value>x"
        "</arg_value> y</arg_value></tool_call>",
        None,
        [("add", {"a": 1, "b": "x</arg_value> y"})],
    ),
    # What breaks off, or has a name without a value, is content.
    *(
        (name, text, text, [])
        for name, text in (
            ("qwen3_coder", f"So {QWEN}<parameter=b>\nx</parameter>"),
            ("qwen3_coder", f"{QWEN}<parameter=b\n</function>"),
            ("glm45", "<tool_call>add<arg_key>a</arg_key></tool_call>"),
            ("glm45", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>"),
        )
    ),
    # Without the opening, and what only looks like one.
    (
        "qwen3_coder",
        "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>",
        None,
        [("add", {"a": 1})],
    ),
    (
        "qwen3_coder",
        f"So.\n{QWEN.removeprefix('<tool_call>')}{QWEN_END} Done.",
        "So.Done.",
        [("add", {})],
    ),
    ("qwen3_coder", "a <function=rm> b <function=", "a <function=rm> b <function=", []),
    ("phi4_mini", "import functools\nfunctools.cache", "import functools\nfunctools.cache", []),
    ("phi4_mini", "x functools[1]", "x functools[1]", []),
    ("mistral", "a [TOOL_CALLS] b", "a [TOOL_CALLS] b", []),
    # An answer that only looks like a call: nothing opens it, and it has no arguments.
    ("llama3_json", '{"name": "add", "note": 1}', '{"name": "add", "note": 1}', []),
    ("llama3_json", '{"name": "add"}', '{"name": "add"}', []),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', None, [("add", {})]),
    # Values of Python, and halves of characters, which are escaped.
    *(
        ("pythonic", f"[add(a={written})]", None, [("add", {"a": item})])
        for written, item in (
            (r"'\ud83d\ude00'", "\U0001f600"),
            (r"'\ud83d'", "\ud83d"),
            (r"'\U0001F600 \101\0\x41'", "\U0001f600 A\0A"),
            (r"'\d+\.\\'", "\\d+\\.\\"),
            (r"'\Uffffffff'", "\\Uffffffff"),
            ("(1)", 1),
            ("('x')", "x"),
            ("((1), [2])", [1, [2]]),
            ("(1,)", [1]),
            ("()", []),
            ("1_000", 1000),
            ("0x10", 16),
            ("[.5, +5, 1.]", [0.5, 5, 1.0]),
        )
    ),
    *(
        ("pythonic", f"[add(a={written})]", f"[add(a={written})]", [])
        for written in ("inf", "nan", "0x", "7__7", "{1}", "(1")
    ),
    (
        "hermes",
        r'<tool_call>{"name": "add", "arguments": "{\"b\": \"\ud800\"}"}</tool_call>',
        None,
        [("add", {"b": "\ud800"})],
    ),
    ("olmo3", "a\n\n<function_calls>\n b", "a\n\n<function_calls>\n b", []),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), TAGGED)
def test_ends_and_beginnings(name: str, text: str, content: str | None, calls: list[Any]) -> None:
    assert read(text, name) == (content, calls)


ANY = {"$defs": {"t": {"type": "string"}, "u": {"$ref": "#/$defs/t"}, "o": {"$ref": "#/$defs/o"}}}
SCHEMAS: list[tuple[dict[str, Any], str, Any]] = [
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "123", "123"),
    # The word null, as vLLM reads it, where the schema allows null.
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
    ({"type": ["string", "null"]}, "NULL", None),
    ({"enum": ["null", None]}, "null", None),
    ({"type": ["string", "null"]}, "null.", "null."),
    ({"type": "string"}, "null", "null"),
    ({"oneOf": [{"type": "string"}, {"const": "x"}]}, "true", "true"),
    ({"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]}, "1.50", "1.50"),
    ({"allOf": [{"minLength": 1}, {"pattern": "^1"}]}, "123", "123"),
    ({"$ref": "#/$defs/u"}, "[1]", "[1]"),
    ({"const": "123"}, "123", "123"),
    ({"enum": ["1", None]}, "1", "1"),
    ({"pattern": "^[0-9]+$"}, "123", "123"),
    ({"format": "date"}, "2024", "2024"),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "123", 123),
    ({"anyOf": [{"type": "string"}, {}]}, "123", 123),
    ({"type": "integer"}, "123", 123),
    ({"$ref": "#/$defs/o"}, "123", 123),
    ({"$ref": "#/$defs/none"}, "123", 123),
    ({"$ref": "https://example.com"}, "123", 123),
    ({}, "123", 123),
]


@pytest.mark.parametrize(("schema", "text", "expected"), SCHEMAS, ids=str)
def test_types_between_tags(schema: dict[str, Any], text: str, expected: Any) -> None:
    """A string where the schema, with all that it refers to, allows nothing else; or null."""
    described = {"name": "add", "parameters": {**ANY, "properties": {"a": schema}}}
    use = ToolUse([Tool.model_validate({"type": "function", "function": described})])
    options = ParserOptions(
        tool_format="qwen3_coder", tool_names=use.names, text_arguments=use.text_arguments
    )
    parser = OutputParser(options)
    deltas = parser.push(f"{QWEN}<parameter=a>\n{text}\n</parameter>\n{QWEN_END}")
    call = deltas[-1]["tool_calls"][0]["function"]
    assert json.loads(call["arguments"]) == {"a": expected}


TEXT = {"type": "string"}
TEXT_OR_NULL = {"type": ["string", "null"]}
NUMBER = {"type": "integer"}
OBJECTS: list[tuple[dict[str, Any], str, Any]] = [
    ({"$ref": "#/$defs/p", "$defs": {"p": {"properties": {"a": TEXT}}}}, "123", "123"),
    ({"allOf": [{"required": ["a"]}, {"properties": {"a": TEXT}}]}, "123", "123"),
    ({"allOf": [{"properties": {"a": TEXT_OR_NULL}}, {"properties": {"a": TEXT}}]}, "null", "null"),
    ({"anyOf": [{"properties": {"a": TEXT}}, {"properties": {"b": {}}}]}, "123", "123"),
    ({"anyOf": [{"properties": {"a": TEXT}}, {"properties": {"a": NUMBER}}]}, "123", 123),
    ({"oneOf": [{"properties": {"a": TEXT}}, {"properties": {"a": {}}}]}, "123", 123),
    ({"additionalProperties": TEXT}, "123", "123"),
    ({"additionalProperties": TEXT, "properties": {"a": NUMBER}}, "123", 123),
    ({"additionalProperties": TEXT_OR_NULL}, "null", None),
    ({"additionalProperties": True}, "123", 123),
    ({"$ref": "#", "properties": {"a": TEXT}}, "123", "123"),
]


@pytest.mark.parametrize(("schema", "text", "expected"), OBJECTS, ids=str)
def test_types_of_arguments_in_all_parts_of_a_schema(
    schema: dict[str, Any], text: str, expected: Any
) -> None:
    described = {"name": "add", "parameters": schema}
    use = ToolUse([Tool.model_validate({"type": "function", "function": described})])
    options = ParserOptions(
        tool_format="qwen3_coder", tool_names=use.names, text_arguments=use.text_arguments
    )
    deltas = OutputParser(options).push(f"{QWEN}<parameter=a>\n{text}\n</parameter>\n{QWEN_END}")
    assert json.loads(deltas[-1]["tool_calls"][0]["function"]["arguments"]) == {"a": expected}


def test_many_references_of_a_schema() -> None:
    definitions = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(2000)}
    parameters = {"$defs": definitions, "properties": {"a": {"$ref": "#/$defs/d0"}}}
    described = {"name": "add", "parameters": parameters}
    use = ToolUse([Tool.model_validate({"type": "function", "function": described})])
    assert use.text_arguments == {}


WORDS = (
    *("</parameter>", "</function>", "<parameter=", "<arg_key>", "</arg_value>", "<tool_call>"),
    *("}", "{", '"', "'", "\\", "\n", " ", "[", "]", ",", "ö", "🚪", "123", "null", "x", "= ", ")"),
)
MARKED = (
    *("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)


def random_call(chance: random.Random, name: str) -> str:
    """Return a call of a known tool with random arguments, as a format's models write it."""

    def text(size: int = 6) -> str:
        found = "".join(chance.choices(WORDS, k=chance.randrange(size)))
        for mark in MARKED if CALL_FORMATS[name].tags is not None else ():
            found = found.replace(mark, "")
        return found

    def value() -> Any:
        return chance.choice(
            [chance.randrange(-(10**20), 10**20), 1.5, None, True, text(), [text()], {}]
        )

    arguments = {"a": value(), "b": text(9), "c": value()}
    keys = chance.sample(sorted(arguments), chance.randrange(4))
    said = {key: arguments[key] for key in keys}
    start, _, _, end = SHAPES[name]
    form = CALL_FORMATS[name]
    if form.body.name == "PYTHON":
        return f"{start}add({', '.join(f'{key}={item!r}' for key, item in said.items())}){end}"
    if form.body.name == "BARE":
        return f"<|tool_call>call:add{{{bare(said)[1:-1]}}}<tool_call|>"
    if form.tags is None:
        written = form.written
        assert written is not None
        ascii_only = chance.random() < 0.5
        body = json.dumps(said, ensure_ascii=ascii_only, indent=chance.choice([None, 1]))
        return (
            f"{written.start}{written.before}add{written.between}{body}{written.after}{written.end}"
        )
    tags = form.tags
    shown = {key: item if isinstance(item, str) else json.dumps(item) for key, item in said.items()}
    kinds = {key: str(isinstance(said[key], str)).lower() for key in said}
    parts = [
        f"{tags.key}{key}{tags.kind}{kinds[key] if tags.kind else ''}{tags.key_end}{tags.value}"
        f"{item}{tags.value_end}\n"
        for key, item in shown.items()
    ]
    return (
        f"{form.openings[0]}{form.name_start}add{form.name_ends[0]}{''.join(parts)}{tags.end}"
        + "".join(f"\n{mark}" for mark in form.behind[:1])
    )


def bare(value: Any) -> str:
    """Write a value as Gemma 4 does."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{bare(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(bare, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


@more_when_long
@pytest.mark.parametrize("name", SHAPES)
def test_random_calls_cut_everywhere(name: str) -> None:
    """500 calls, whole and broken off, in the long form at every place: arguments are JSON, no text
    is lost.
    """
    chance = random.Random(5)
    for _ in range(500):
        call = random_call(chance, name)
        whole, pieces = parse(call, name), parse(call, name, cut=True)
        assert whole == pieces
        assert whole[1] is None and len(whole[2]) == 1, call
        assert isinstance(json.loads(whole[2][0][1]), dict), call
        before = "" if name in AT_START else "So "
        places = {chance.randrange(len(call)) for _ in range(12)}
        for length in choose(sorted(places), range(len(call))):
            broken = before + call[:length]
            _, content, calls = parse(broken, name)
            for _, arguments in calls:
                assert isinstance(json.loads(arguments), dict), broken
            assert calls or content == broken


def test_ids_are_as_templates_take_them() -> None:
    for name, length in (("mistral", 9), ("hermes", 29)):
        start, call, _, end = SHAPES[name]
        parser = OutputParser(ParserOptions(tool_format=name, tool_names=USE.names))
        deltas = parser.push(start + call + end) + parser.finish()
        assert len(deltas[0]["tool_calls"][0]["id"]) == length
    start, call, _, end = SHAPES["kimi_k2"]
    options = ParserOptions(tool_format="kimi_k2", tool_names=USE.names, num_earlier_calls=3)
    deltas = OutputParser(options).push(start + call + call + end)
    ids = [piece["id"] for delta in deltas for piece in delta["tool_calls"] if "id" in piece]
    assert ids == ["functions.add:3", "functions.add:4"]


@pytest.mark.parametrize("name", [name for name, form in CALL_FORMATS.items() if form.written])
def test_grammars_write_what_is_read(name: str) -> None:
    config = ServeConfig(model=str(BUNDLED_MODEL_DIR))
    spec = USE.spec(config, name)
    assert spec is not None and isinstance(spec[0], GrammarConstraint)
    matcher = compile_matcher(spec[0], byte_vocabulary())

    def accepts(text: str) -> bool:
        own, data = matcher.deep_copy(), list(text.encode())
        return own.try_consume_tokens(data) == len(data) and own.is_accepting()

    start, call, separator, end = SHAPES[name]
    many = separator.join([call] * 16)
    assert accepts(f"{start}{call}{end}") and accepts(f"{start}{many}{end}")
    assert not accepts(f"{start}{many}{separator}{call}{end}")
    for wrong in ("", "So.", call.replace("1", '"1"'), call.replace("add", "rm")):
        assert not accepts(f"{start}{wrong}{end}" if wrong else "")
    single = compile_matcher(spec_of_one(config, name), byte_vocabulary())
    data = list(f"{start}{call}{end}".encode())
    assert single.try_consume_tokens(data) == len(data) and single.is_stopped()


def spec_of_one(config: ServeConfig, name: str) -> GrammarConstraint:
    spec = ToolUse(TOOLS, TOOLS[:1], is_parallel=False).spec(config, name)
    assert spec is not None and isinstance(spec[0], GrammarConstraint)
    return spec[0]


def test_other_formats_are_written_as_json() -> None:
    for name, form in CALL_FORMATS.items():
        assert ModelFormats(name).enforced_tools == (name if form.written else "llama3_json")


def test_a_grammar_begins_with_the_model_s_own_token(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((BUNDLED_MODEL_DIR / name).read_bytes())
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    token_id = len(described["model"]["vocab"]) + len(described["added_tokens"])
    like = described["added_tokens"][-1]
    described["added_tokens"].append({**like, "id": token_id, "content": "[TOOL_CALLS]"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    grammar = spec_of_one(ServeConfig(model=str(BUNDLED_MODEL_DIR)), "mistral")
    for marks, is_allowed in ((ModelFormats("mistral").marks, True), ((), False)):
        tokenizer = Tokenizer(tmp_path, shown=marks)
        token_id = tokenizer.id_of("[TOOL_CALLS]") or 0
        matcher = compile_matcher(grammar, model_vocabulary(tokenizer, token_id + 1))
        assert (matcher.try_consume_tokens([token_id]) == 1) is is_allowed
        assert (tokenizer.decode([token_id]) == "[TOOL_CALLS]") is is_allowed


REASONED = [
    ("mistral", "[THINK]Hm. [b]\n[/THINK]\nYes.", "Hm. [b]", "Yes."),
    (
        "granite",
        "Here is my thought process:\n\nHm.\n\nHere is my response:\n\nYes.",
        "Hm.",
        "Yes.",
    ),
    ("granite", "<think>Hm.</think>\n\n<response>Yes.</response>", "Hm.", "Yes."),
    ("granite", "<think>Hm.</think><resp", "Hm.", "<resp"),
    ("granite", "<think>Hm.</think>Yes <b>.</respo", "Hm.", "Yes <b>.</respo"),
    ("granite", "Here it is.", None, "Here it is."),
    ("gemma4", "<|channel>thought\nHm.<channel|>Yes.", "Hm.", "Yes."),
    ("gemma4", "<|channel>thought\n<channel|>Yes.", None, "Yes."),
    ("gemma4", "<|channel>other", None, "<|channel>other"),
    ("kimi", "◁think▷Hm.◁/think▷Yes.", "Hm.", "Yes."),
    ("seed_oss", "\n<seed:think>Hm.</seed:think>\nYes.", "Hm.", "Yes."),
    ("think", "\n<think>Hm.</think>\nYes. <response>", "Hm.", "Yes. <response>"),
]


@pytest.mark.parametrize(("name", "text", "reasoning", "content"), REASONED)
def test_reasoning(name: str, text: str, reasoning: str | None, content: str) -> None:
    for cut in (False, True):
        assert parse(text, reasoning=name, cut=cut)[:2] == (reasoning, content)


HARMONY_TEMPLATE = "<|start|>assistant<|channel|>analysis<|message|>"
# What the chat templates of some repositories have, by what it is found as.
TEMPLATES = [
    ("{{ messages[0].content }}", "none", "none"),
    ("<|im_start|>…<tool_call>…</tool_call>", "hermes", "none"),
    ("…<tool_call>…<think>\n\n</think>", "hermes", "think"),
    ("<tool_call>\n<function=example>\n<parameter=a>", "qwen3_coder", "none"),
    ("[gMASK]<sop>…<|observation|><tool_call>{name}\n<arg_key>…<think></think>", "glm45", "think"),
    ("[gMASK]<sop>…<|observation|>", "glm4", "none"),
    ("[AVAILABLE_TOOLS]…[TOOL_CALLS] [", "mistral", "none"),
    ("[THINK]…[TOOL_CALLS]…[ARGS]", "mistral_args", "mistral"),
    (deepseek("[[tool calls begin]]…```json…</think>"), "deepseek_v3", "think"),
    (deepseek("[[tool calls begin]]…[[tool sep]]…</think>"), "deepseek_v31", "think"),
    ("<|start_of_role|>…<|tool_call|>…Here is my thought process:", "granite", "granite"),
    ("<|start_of_role|>…<|tool_call|>…<think></think><response>", "granite", "granite"),
    ("<|system|>…<|tool|>…<|/tool|>", "phi4_mini", "none"),
    ("<|action_start|><|plugin|>", "internlm", "none"),
    ("<function_calls>…<think>", "olmo3", "think"),
    ("<|tool_list_start|>[…]<|tool_list_end|>", "lfm2", "none"),
    ("<|tool_call_start|>[' + … + ']<|tool_call_end|>…</think>", "lfm2", "think"),
    ('ipython … {"name": function name, "parameters": …', "llama3_json", "none"),
    ("[func_name1(params_name1=params_value1…", "pythonic", "none"),
    (HARMONY_TEMPLATE, "harmony", "harmony"),
    ("<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}", "kimi_k2", "none"),
    ("…<|im_middle|><think></think>…<|tool_calls_section_begin|>…", "kimi_k2", "think"),
    ("<|im_assistant|>assistant<|im_middle|>◁think▷", "none", "kimi"),
    (
        dsml("dsml_token = '@' … <{{ dsml_token }}function_calls> … </think>"),
        "deepseek_v32",
        "think",
    ),
    ("<minimax:tool_call>\n<invoke name=…\n<response>…<think></think>", "minimax", "think"),
    ("<|tool_call>call:' + function['name'] … <|channel>thought\n<channel|>", "gemma4", "gemma4"),
    (
        "{%- set ns_token = ']<]minimax[>[' %} … <tool_call>\n<invoke name=… <think>",
        "none",
        "think",
    ),
    ("<seed:tool_call>\n<function=…<parameter=… <seed:think>", "seed_oss", "seed_oss"),
    ("<start_of_turn>model", "none", "none"),
]


def test_formats_are_those_of_the_chat_template() -> None:
    assert choose_formats(None) == ModelFormats()
    for template, tools, reasoning in TEMPLATES:
        assert choose_formats(template) == (tools, reasoning), template
    told = choose_formats("…<tool_call>…</think>", tools="none", reasoning="granite")
    assert told == ("none", "granite")
    assert choose_formats(HARMONY_TEMPLATE, reasoning="none") == ("none", "none")
    assert choose_formats(None, tools="harmony") == ("harmony", "harmony")
    found = {name for _, *names in TEMPLATES for name in names}
    assert found == {*CALL_FORMATS, *REASONING_FORMATS, "none"}


def test_a_server_reads_what_its_template_shows(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(
        "{# [TOOL_CALLS] [ARGS] [THINK] #}{{ tools | tojson }}{{ messages[-1].content }}"
    )
    tokenizer = Tokenizer(BUNDLED_MODEL_DIR)
    text = '[THINK]Hm.[/THINK][TOOL_CALLS]add[ARGS]{"a": 1}'
    ids = [*tokenizer.encode(text, add_special_tokens=False), *tokenizer.eos_token_ids]
    user = {"role": "user", "content": "hi"}
    body = {"model": BUNDLED_MODEL_NAME, "messages": [user], "tools": [ADD]}

    async def scenario() -> None:
        async with frontend(says(ids), chat_template=str(path)) as setup:
            answer = (await setup.post("/v1/chat/completions", body)).json()["choices"][0]
            message = answer["message"]
            assert message["reasoning_content"] == "Hm."
            function = message["tool_calls"][0]["function"]
            assert function == {"name": "add", "arguments": '{"a": 1}'}
            required = {**body, "tool_choice": "required"}
            await setup.post("/v1/chat/completions", required)
            constraint = setup.router.submits[-1].constraint
            assert isinstance(constraint, GrammarConstraint)
            assert "[TOOL_CALLS]add[ARGS]" in constraint.grammar

    asyncio.run(scenario())
