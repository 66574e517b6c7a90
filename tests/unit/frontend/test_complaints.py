"""What clients read about a field of a wrong kind: its own name, and all that it may be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightserve.errors import InvalidRequest
from lightserve.frontend.json_body import parse_model
from lightserve.frontend.openai.chat import ChatRequest

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tool_choice", "x", "tool_choice must be 'none', 'auto' or 'required' or an object"),
        ("tool_choice", 3, "tool_choice must be 'none', 'auto' or 'required' or an object, got 3"),
        ("tool_choice", {}, "tool_choice.type is required"),
        ("tool_choice", {"type": "x"}, "tool_choice.type must be 'function', got \"x\""),
        (
            "tool_choice",
            {"type": "function", "function": {"name": "a b"}},
            'tool_choice.function.name must match ^[A-Za-z0-9_.-]{1,64}$, got "a b"',
        ),
        (
            "structured_outputs",
            {"json": 1},
            "structured_outputs.json must be a string or an object, got 1",
        ),
        ("stop", 3, "stop must be a string or a list of strings, got 3"),
        ("stop", "", "stop[0] must have at least 1 character, got 0"),
        ("logit_bias", {"a": "x" * 99}, 'logit_bias.a must be a number, got "' + "x" * 63 + '…"'),
    ],
)
def test_complaints(field: str, value: object, message: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_model(json.dumps({**BODY, field: value}).encode(), ChatRequest, max_depth=64)
    assert raised.value.message.startswith(message)
    assert raised.value.param == message.partition(" ")[0]
