"""Structured output and required tool calls of a real server, as the `openai` client reads them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import openai
from support.live_server import live_server

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "level": {"enum": ["low", "high", None]},
        "sizes": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "level", "sizes"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "note", "parameters": SCHEMA}}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 300}


def test_schemas_and_tools_hold_for_clients(run_parent: Path) -> None:
    with live_server(run_parent, "--tool-call-parser=hermes") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with client:
            _check_schema(client, server.model)
            _check_choice(client, server.model)
            _check_tool(client, server.model)
            _check_streamed_tool(client, server.model)


def _check_schema(client: openai.OpenAI, model: str) -> None:
    response_format: Any = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
    }
    answer = client.chat.completions.create(
        model=model, response_format=response_format, n=4, seed=1, **ASKED
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)


def _check_choice(client: openai.OpenAI, model: str) -> None:
    for fields, pattern in (
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"regex": "[0-9]{3}-[0-9]{2}"}, "[0-9]{3}-[0-9]{2}"),
        ({"grammar": 'start: "a" start | "b"'}, "a*b"),
    ):
        body = {"structured_outputs": fields}
        completion = client.completions.create(
            model=model, prompt="Hello", max_tokens=200, seed=2, extra_body=body
        )
        assert completion.choices[0].finish_reason == "stop"
        assert re.fullmatch(pattern, completion.choices[0].text)


def _check_tool(client: openai.OpenAI, model: str) -> None:
    tools: Any = [TOOL]
    answer = client.chat.completions.create(
        model=model,
        tools=tools,
        tool_choice={"type": "function", "function": {"name": "note"}},
        parallel_tool_calls=False,
        seed=3,
        **ASKED,
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert call.type == "function" and call.function.name == "note"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


def _check_streamed_tool(client: openai.OpenAI, model: str) -> None:
    """The client's own accumulator puts the deltas together."""
    tools: Any = [TOOL]
    with client.chat.completions.stream(
        model=model,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        seed=4,
        **ASKED,
    ) as stream:
        kinds = {event.type for event in stream}
        (choice,) = stream.get_final_completion().choices
    assert "tool_calls.function.arguments.delta" in kinds
    (call,) = choice.message.tool_calls or []
    assert call.function.name == "note"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
