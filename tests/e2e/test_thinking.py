"""A model that thinks, behind real clients: schemas, tools and budgets; streamed and not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from anthropic import Anthropic
from openai import OpenAI
from support.live_server import LiveServer, live_server

from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.tokenization.tokenizer import Tokenizer

ASK: list[Any] = [{"role": "user", "content": "Tell me a story."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"enum": [3, 14, 15]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def server(run_parent: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The bundled model with a prompt that has begun to think: it goes on with its story.

    It writes no `<` that nothing forces, so that its reasoning never ends by itself.
    """
    path = tmp_path_factory.mktemp("thinks") / "model"
    shutil.copytree(BUNDLED_MODEL_DIR, path)
    config = path / "generation_config.json"
    own = json.loads(config.read_text())
    tokenizer = Tokenizer(BUNDLED_MODEL_DIR)
    suppressed = [n for n in range(4096) if b"<" in tokenizer.bytes_of(n)]
    assert suppressed
    config.write_text(json.dumps({**own, "suppress_tokens": suppressed}))
    template = json.loads((path / "tokenizer_config.json").read_text())["chat_template"]
    (path / "thinks.jinja").write_text(f"{template}<think>\n")
    flags = f"--model={path}", f"--chat-template={path}/thinks.jinja", "--tool-call-parser=hermes"
    with live_server(run_parent, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def whole(client: OpenAI, server: LiveServer, **fields: Any) -> tuple[str, str, int, Any]:
    """Reasoning, content, reasoning tokens and calls of an answer, streamed if it is asked for."""
    extra = {name: fields.pop(name) for name in ("thinking_token_budget",) if name in fields}
    fields = {"max_tokens": 200, **fields}
    asked: Any = {"model": server.model, "messages": ASK, **fields, "extra_body": extra}
    if not fields.get("stream"):
        answer = client.chat.completions.create(**asked)
        message, usage = answer.choices[0].message, answer.usage
        thought, calls = getattr(message, "reasoning_content", ""), message.tool_calls
        content = message.content or ""
    else:
        parts: dict[str, list[str]] = {"reasoning_content": [], "content": [], "arguments": []}
        order: list[str] = []
        for chunk in client.chat.completions.create(
            **asked, stream_options={"include_usage": True}
        ):
            usage = chunk.usage
            for choice in chunk.choices:
                delta = choice.delta.model_dump()
                delta["arguments"] = "".join(
                    call["function"]["arguments"] for call in delta.get("tool_calls") or ()
                )
                for name, part in parts.items():
                    if text := delta.get(name):
                        part.append(text)
                        order.append(name)
        assert order == sorted(order, key=lambda name: name != "reasoning_content")
        thought, content, calls = ("".join(part) for part in parts.values())
    details = usage.completion_tokens_details
    return thought, content, details.reasoning_tokens, calls


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("budget", [0, 16, 64])
def test_a_schema_behind_a_budget(
    client: OpenAI, server: LiveServer, budget: int, stream: bool
) -> None:
    for seed in range(4):
        thought, content, num_reasoning, _ = whole(
            client,
            server,
            thinking_token_budget=budget,
            response_format=FORMAT,
            stream=stream,
            seed=seed,
        )
        jsonschema.validate(json.loads(content), SCHEMA)
        assert bool(thought) == (budget > 0)
        assert num_reasoning == budget
        assert "</think>" not in thought + content


def test_the_same_seed_thinks_the_same_within_any_budget(
    client: OpenAI, server: LiveServer
) -> None:
    short, long = (
        whole(client, server, thinking_token_budget=n, seed=5, temperature=0) for n in (8, 24)
    )
    assert (short[2], long[2]) == (8, 24)
    short, long = short[0], long[0]
    assert long.startswith(short) and len(long) > len(short) > 0


@pytest.mark.parametrize("stream", [False, True])
def test_tools_that_are_required_come_behind_the_reasoning(
    client: OpenAI, server: LiveServer, stream: bool
) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        thought, content, num_reasoning, calls = whole(
            client,
            server,
            tools=[TOOL],
            tool_choice=choice,
            parallel_tool_calls=False,
            thinking_token_budget=12,
            stream=stream,
        )
        assert thought and not content and num_reasoning == 12
        arguments = calls if stream else calls[0].function.arguments
        jsonschema.validate(json.loads(arguments), SCHEMA)


def test_the_other_apis(client: OpenAI, server: LiveServer) -> None:
    response = client.responses.create(
        model=server.model,
        input="Tell me a story.",
        reasoning={"effort": "minimal"},
        max_output_tokens=340,  # of a quarter of 200 some answers that are drawn have not enough
        text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    )
    jsonschema.validate(json.loads(response.output_text), SCHEMA)
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 255, "three quarters"
    thinking: Any = {"type": "enabled", "budget_tokens": 20}
    with (
        Anthropic(base_url=server.url, api_key="none", max_retries=0) as anthropic,
        anthropic.messages.stream(
            model=server.model,
            max_tokens=100,
            thinking=thinking,
            messages=ASK,
            extra_body={"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        ) as stream,
    ):
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert all(getattr(block, block.type) for block in message.content)
