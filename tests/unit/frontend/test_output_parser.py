"""Reasoning and tool calls in a text, whole and however it is cut."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightserve.frontend.columns import json_object
from lightserve.frontend.openai.output_parser import MessageBuffer, OutputParser, ParserOptions

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
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
CASES: list[tuple[ParserOptions, str, Any]] = [
    (HERMES, "plain <tool text < <tool_cal", (None, "plain <tool text < <tool_cal", [])),
    (HERMES, "", (None, "", [])),
    (HERMES, "tail  \n", (None, "tail  \n", [])),
    (HERMES, CALL, (None, None, [("weather", ARGUMENTS)])),
    (HERMES, f"Let me see.\n{CALL}\n", (None, "Let me see.", [("weather", ARGUMENTS)])),
    (
        HERMES,
        f'{CALL}\n{CALL}<tool_call>{{"arguments":{{"a":1}},"name":"add"}}</tool_call> done',
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
    # Cut by max_tokens.
    (HERMES, '<tool_call>{"name": "add", "argum', (None, None, [("add", "")])),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a', (None, None, [("add", '{"a')])),
    (HERMES, '<tool_call>{"name": "ad', (None, '<tool_call>{"name": "ad', [])),
    (HERMES, f"{CALL[:-4]}", (None, None, [("weather", ARGUMENTS)])),
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
        f"<think>or {CALL}?</think>{CALL}",
        (f"or {CALL}?", None, [("weather", ARGUMENTS)]),
    ),
]


@pytest.mark.parametrize(("options", "text", "expected"), CASES)
def test_parts_of_a_text(options: ParserOptions, text: str, expected: Any) -> None:
    assert simple(parse(options, text)[1]) == expected
    assert simple(parse(options, *text)[1]) == expected


def test_a_call_is_streamed_as_clients_expect() -> None:
    deltas, _ = parse(HERMES, *f"Hi{CALL}{CALL}")
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert len(calls) > 20  # as they come, not at the end
    for index in (0, 1):
        own = [call for call in calls if call["index"] == index]
        assert own[0].keys() == {"index", "id", "type", "function"}
        assert own[0]["function"] == {"name": "weather", "arguments": ""}
        assert all(call.keys() == {"index", "function"} for call in own[1:])
        assert json.loads("".join(call["function"]["arguments"] for call in own))["n"] == [1, {}]
    assert calls[0]["id"] != calls[-1].get("id") and calls[0]["id"].startswith("call_")


PIECES = st.sampled_from(
    [
        *["<tool_call>", "</tool_call>", "<think>", "</think>", "<", "tool", "_call>", "\n", " "],
        *['{"name": "add", "arguments": {"a": "}"}}', '{"name": "rm"}', '{"name":"weather",'],
        *['"arguments": {"x": [1, "\\""]}', "}", "{", '"', "\\", ";", ":", ",", "text", "é☃", CALL],
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
