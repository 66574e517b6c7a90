"""Anthropic's routes, by its own client: prompts as of chats, and the same parts in its words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest
from support.fake_router import Answer, Setup, frontend, says, token_delta
from support.patient_loop import run_patiently

from lightserve.bundled import BUNDLED_MODEL_DIR, BUNDLED_MODEL_NAME
from lightserve.messages.frontend_router import ErrorCode, RequestDelta, Submit
from lightserve.tokenization.tokenizer import Tokenizer
from lightserve.types import FinishReason, RequestClass

TOKENIZER = Tokenizer(BUNDLED_MODEL_DIR)
TEMPLATE = """\
{% for tool in tools or [] %}T:{{ tool.function.name }} {% endfor %}\
{% for m in messages %}[{{ m.role }}] {{ m.content }}\
{% for c in m.tool_calls or [] %}C:{{ c.function.name }}=\
{{ c.function.arguments.values() | join(",") if c.function.arguments is mapping }}{% endfor %}\
{% if m.tool_call_id %}I:{{ m.tool_call_id }}{% endif %} {{ m.reasoning }}{% endfor %}"""
HI: dict[str, Any] = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": BUNDLED_MODEL_NAME, "messages": [HI], "max_tokens": 400}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
NOW = {"name": "now", "input_schema": {"type": "object"}}
CHAT_TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA},
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
EPHEMERAL = {"type": "ephemeral"}
THINKING = "{% if enable_thinking is not defined or enable_thinking %}T{% endif %}" + TEMPLATE


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def writes(text: str) -> Answer:
    """Answer every request with this text."""
    return says(_ids(text))


def _ids(text: str) -> list[int]:
    return [*TOKENIZER.encode(text, add_special_tokens=False), *TOKENIZER.eos_token_ids]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("templates") / "template.jinja"
    path.write_text(TEMPLATE)
    return str(path)


@asynccontextmanager
async def client_of(setup: Setup, **options: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's client, on a frontend's application."""
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=setup.app))
    values: dict[str, Any] = {"api_key": "none", "max_retries": 0} | options
    async with anthropic.AsyncAnthropic(
        base_url="http://localhost", http_client=http, **values
    ) as client:
        yield client


def test_an_answer_and_the_same_streamed(template: str) -> None:
    async def scenario() -> None:
        flags = {"tool_call_parser": "hermes", "reasoning_parser": "think"}
        text = f"<think>Hm.</think>So.\n{CALL}{CALL}Done."
        async with (
            frontend(writes(text), chat_template=template, **flags) as setup,
            client_of(setup) as client,
        ):
            whole = await client.messages.create(**BODY, tools=[ADD, NOW])
            assert [block.type for block in whole.content] == [
                *("thinking", "text", "tool_use", "tool_use", "text")
            ]
            thinking, said, call, other, rest = whole.content
            assert (thinking.thinking, said.text, rest.text) == ("Hm.", "So.", "Done.")
            assert (call.name, call.input) == ("add", {"a": 1}) == (other.name, other.input)
            assert call.id != other.id and call.id.startswith("toolu_")
            assert (whole.stop_reason, whole.stop_sequence) == ("tool_use", None)
            assert whole.usage.input_tokens == len(setup.router.prompt_of(0))
            assert whole.usage.output_tokens == len(_ids(text))
            kinds = []
            async with client.messages.stream(**BODY, tools=[ADD, NOW]) as stream:
                async for event in stream:
                    kinds.append(event.type)
                streamed = await stream.get_final_message()
            assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
            assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 5
            assert streamed.usage == whole.usage
            assert streamed.stop_reason == whole.stop_reason
            plain = [block.model_dump(exclude={"id"}) for block in streamed.content]
            assert plain == [block.model_dump(exclude={"id"}) for block in whole.content]
            # What was answered can be sent back as it is.
            turns = [HI, {"role": "assistant", "content": whole.content}, HI]
            await client.messages.create(**{**BODY, "messages": turns}, tools=[ADD, NOW])

    run(scenario)


async def _prompts(setup: Setup, message: dict[str, Any], chat: dict[str, Any]) -> None:
    """Check that a request has the prompt and the constraint of a chat completion."""
    response = await setup.post("/v1/messages", {**BODY, **message})
    assert response.status_code == 200, response.text
    body = {"model": BUNDLED_MODEL_NAME, "max_tokens": 400, "messages": [HI], **chat}
    response = await setup.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    ours, theirs = setup.router.submits[-2:]
    assert setup.router.prompt_of(-2) == setup.router.prompt_of(-1)
    assert ours.constraint == theirs.constraint
    assert ours.max_tokens == theirs.max_tokens


def _text(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


def test_turns_are_messages(template: str) -> None:
    async def scenario() -> None:
        async with frontend(
            says([5, 2]), chat_template=template, tool_call_parser="hermes"
        ) as setup:
            call = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 4}}
            result = {"type": "tool_result", "tool_use_id": "t1"}
            chat_call = {"id": "t1", "type": "function"}
            chat_call["function"] = {"name": "add", "arguments": '{"a": 4}'}  # type: ignore[assignment]
            turns = [
                {"role": "user", "content": [_text("One"), _text("two")]},
                {"role": "user", "content": "three"},
                {
                    "role": "assistant",
                    "content": [{"type": "thinking", "thinking": "Hm."}, _text("So."), call],
                },
                {
                    "role": "user",
                    "content": [
                        {**result, "content": [_text("5"), _text("6")]},
                        {**result, "content": "no", "is_error": True},
                        result,
                        _text("and?"),
                    ],
                },
                {"role": "system", "content": "Short."},
                HI,
            ]
            messages = [
                {"role": "system", "content": "Be.\nKind."},
                {"role": "user", "content": "One\ntwo\nthree"},
                {
                    "role": "assistant",
                    "content": "So.",
                    "reasoning": "Hm.",
                    "tool_calls": [chat_call],
                },
                {"role": "tool", "tool_call_id": "t1", "content": "5\n6"},
                {"role": "tool", "tool_call_id": "t1", "content": "Error: no"},
                {"role": "tool", "tool_call_id": "t1", "content": ""},
                {"role": "user", "content": "and?"},
                {"role": "system", "content": "Short."},
                HI,
            ]
            system = [_text("Be."), _text("Kind.")]
            await _prompts(setup, {"system": system, "messages": turns}, {"messages": messages})
            turns = [HI, {"role": "assistant", "content": "The answer"}]
            await _prompts(
                setup, {"messages": turns}, {"messages": turns, "continue_final_message": True}
            )
            plain = [{"role": "system", "content": "Be."}, HI]
            await _prompts(setup, {"system": "Be."}, {"messages": plain})

    run(scenario)


@pytest.mark.parametrize(
    ("choice", "chat"),
    [
        ({}, {}),
        ({"tool_choice": {"type": "auto"}}, {"tool_choice": "auto"}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
        (
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tool_choice": {"type": "tool", "name": "add"}},
            {"tool_choice": {"type": "function", "function": {"name": "add"}}},
        ),
    ],
)
def test_tools_are_chosen_as_in_chats(
    choice: dict[str, Any], chat: dict[str, Any], template: str
) -> None:
    async def scenario() -> None:
        flags = {"tool_call_parser": "hermes", "chat_template": template}
        async with frontend(says([5, 2]), **flags) as setup:
            tools = {"tools": [{**ADD, "type": "custom"}, NOW]}
            await _prompts(setup, {**tools, **choice}, {"tools": CHAT_TOOLS, **chat})

    run(scenario)


def test_a_schema_of_the_output_is_that_of_chats() -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            output = {"format": {"type": "json_schema", "schema": SCHEMA}}
            schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
            await _prompts(setup, {"output_config": output}, {"response_format": schema})
            assert setup.router.submits[-1].constraint is not None

    run(scenario)


def test_at_most_one_call_where_parallel_ones_are_disabled(template: str) -> None:
    async def scenario() -> None:
        flags = {"tool_call_parser": "hermes", "chat_template": template}
        async with frontend(writes(CALL * 2), **flags) as setup, client_of(setup) as client:
            one: Any = {"type": "auto", "disable_parallel_tool_use": True}
            for choice, count in (({"type": "auto"}, 2), (one, 1)):
                answer = await client.messages.create(**BODY, tools=[ADD, NOW], tool_choice=choice)
                assert [block.type for block in answer.content] == ["tool_use"] * count

    run(scenario)


@pytest.mark.parametrize(
    "arguments", ['{"a": }', '{"a": 1, "b', "[1]", '{"a": NaN}'], ids=lambda text: text
)
def test_a_call_without_an_object_of_arguments_is_text(arguments: str, template: str) -> None:
    async def scenario() -> None:
        text = f'<tool_call>{{"name": "add", "arguments": {arguments}'
        flags = {"tool_call_parser": "hermes", "chat_template": template}
        async with frontend(writes(text), **flags) as setup, client_of(setup) as client:
            (block,) = (await client.messages.create(**BODY, tools=[ADD])).content
            assert (block.type, block.text) == ("text", text)

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "flags", "reason", "sequence"),
    [
        ({}, {}, "end_turn", None),
        ({"max_tokens": 2}, {}, "max_tokens", None),
        ({"stop_sequences": ["never", "llo"]}, {}, "stop_sequence", "llo"),
        ({}, {"num_kv_slots": 9}, "model_context_window_exceeded", None),
    ],
)
def test_why_an_answer_ended(
    fields: dict[str, Any], flags: dict[str, Any], reason: str, sequence: str | None
) -> None:
    async def scenario() -> None:
        async with frontend(writes("Hello, you!"), **flags) as setup, client_of(setup) as client:
            body = {**BODY, **fields}
            whole = await client.messages.create(**body)
            async with client.messages.stream(**body) as stream:
                streamed = await stream.get_final_message()
            for message in (whole, streamed):
                assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
            assert whole.content[0].text == streamed.content[0].text
            if sequence:
                assert whole.content[0].text == "He"

    run(scenario)


def test_what_is_asked_for_arrives() -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            fields = {
                "temperature": 0.5,
                "top_p": 0.9,
                "top_k": 7,
                "metadata": {"user_id": "u"},
                "priority": 3,
                "service_tier": "flex",
                "slo": {"completion_s": 9},
            }
            response = await setup.post("/v1/messages", {**BODY, **fields})
            assert response.json()["usage"]["service_tier"] == "batch"
            (submit,) = setup.router.submits
            sampling = submit.sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
            assert (submit.prediction_key, submit.priority) == ("u", 3)
            assert submit.request_class is RequestClass.BE and submit.slo.completion_s == 9
            assert submit.num_retained_tokens == 0
            for tier in ("auto", "standard_only"):
                response = await setup.post("/v1/messages", {**BODY, "service_tier": tier})
                assert response.json()["usage"]["service_tier"] == "standard"
                assert setup.router.submits[-1].request_class is RequestClass.RT

    run(scenario)


def test_marks_keep_prefixes(template: str) -> None:
    async def scenario() -> None:
        flags = {"tool_call_parser": "hermes", "chat_template": template}
        async with frontend(says([5, 2]), **flags) as setup:
            turns = [
                {"role": "user", "content": [_text("One"), _text("two")]},
                {"role": "assistant", "content": "So."},
                {"role": "user", "content": "and?"},
            ]
            body = {**BODY, "system": [_text("Be.")], "messages": turns, "tools": [ADD]}

            async def kept(changes: dict[str, Any]) -> tuple[str, float]:
                response = await setup.post("/v1/messages", {**body, **changes})
                assert response.status_code == 200, response.text
                submit = setup.router.submits[-1]
                tokens = setup.router.prompt_of(-1)[: submit.num_retained_tokens]
                return TOKENIZER.decode(tokens), submit.retention_s

            first = {"role": "user", "content": [_text("One", cache_control=EPHEMERAL)]}
            hour = {**EPHEMERAL, "ttl": "1h"}
            prefix = "T:add [system] Be."
            assert await kept({}) == ("", 0.0)
            assert await kept({"system": [_text("Be.", cache_control=EPHEMERAL)]}) == (prefix, 300)
            assert await kept({"messages": [first, *turns[1:]]}) == (f"{prefix} [user] One", 300)
            tool = {**ADD, "cache_control": hour}
            assert await kept({"tools": [tool]}) == (f"{prefix} [user] One\ntwo", 3600)
            text, seconds = await kept({"cache_control": EPHEMERAL})
            assert text.endswith("[user] and?") and seconds == 300
            result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "t", "content": "4"}
            result["cache_control"] = hour
            more = [*turns[:2], {"role": "user", "content": [result, _text("so?")]}]
            text, seconds = await kept({"messages": more})
            assert text.endswith("[tool] 4") and seconds == 3600
        async with frontend(says([5, 2]), max_retained_tokens=0) as setup:
            response = await setup.post("/v1/messages", {**BODY, "cache_control": EPHEMERAL})
            assert response.status_code == 400

    run(scenario)


def test_thinking_is_turned_on_and_off_where_the_template_can(tmp_path: Path) -> None:
    path = tmp_path / "thinking.jinja"
    path.write_text(THINKING)

    async def scenario() -> None:
        async with frontend(says([5, 2]), chat_template=str(path)) as setup:
            for fields, begins in (
                ({}, True),
                ({"thinking": {"type": "adaptive"}}, True),
                ({"thinking": {"type": "disabled"}}, False),
            ):
                assert (await setup.post("/v1/messages", {**BODY, **fields})).status_code == 200
                text = TOKENIZER.decode(setup.router.prompt_of(-1))
                assert text.startswith("T") is begins
        for parser, status in (("none", 200), ("think", 400)):
            async with frontend(says([5, 2]), reasoning_parser=parser) as setup:
                response = await setup.post(
                    "/v1/messages", {**BODY, "thinking": {"type": "disabled"}}
                )
                assert response.status_code == status

    run(scenario)


def test_tokens_are_counted_as_they_are_read(template: str) -> None:
    async def scenario() -> None:
        flags = {"tool_call_parser": "hermes", "chat_template": template}
        async with frontend(says([5, 2]), **flags) as setup, client_of(setup) as client:
            counts = []
            for fields in (
                {},
                {"system": "Be."},
                {"system": "Be.", "tools": [ADD]},
                {"system": "Be.", "tools": [ADD], "tool_choice": {"type": "none"}},
            ):
                body: Any = {"model": BUNDLED_MODEL_NAME, "messages": [HI], **fields}
                count = await client.messages.count_tokens(**body)
                answer = await client.messages.create(**body, max_tokens=9)
                assert count.input_tokens == answer.usage.input_tokens
                counts.append(count.input_tokens)
            assert counts[0] < counts[1] == counts[3] < counts[2]
            for fields in ({"max_tokens": 5}, {"stream": True}, {"metadata": {}}):
                body = {"model": BUNDLED_MODEL_NAME, "messages": [HI], **fields}
                response = await setup.post("/v1/messages/count_tokens", body)
                assert response.status_code == 400

    run(scenario)


IMAGE = {"type": "image", "source": {"type": "file", "file_id": "x"}}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "1"}
USES = {"type": "tool_use", "id": "t", "name": "add", "input": {}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].source.type"),
    (
        {
            "system": "Be brief.",
            "messages": [
                *(HI, HI, {"role": "assistant", "content": [USES]}),
                {"role": "user", "content": [RESULT, PICTURE, RESULT]},
            ],
        },
        "messages[3].content[1].source",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [USES]}]}, "messages[0].content[0].type"),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}],
                }
            ]
        },
        "messages[0].content[0].content",
    ),
    (
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
                HI,
            ]
        },
        "messages[0].content[0].type",
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": [{"type": "thinking", "thinking": "x", "signature": "abc"}],
                },
                HI,
            ]
        },
        "messages[0].content[0].signature",
    ),
    ({"messages": [HI, {"role": "assistant", "content": [USES]}]}, "messages"),
    ({"system": [IMAGE]}, "system"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{**ADD, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**ADD, "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [ADD, ADD]}, "tools"),
    ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [ADD], "tool_choice": {"type": "any", "name": "add"}}, "tool_choice.name"),
    ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "budget_tokens": 9}}, "thinking.budget_tokens"),
    ({"output_config": {"effort": "low"}}, "output_config.effort"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
        "output_config.format.schema",
    ),
    ({"stop_sequences": ["a", "b", "c", "d", "e"]}, "stop_sequences"),
    ({"temperature": 3}, "temperature"),
    ({"top_k": 10**9}, "top_k"),
    ({"metadata": {"name": "x"}}, "metadata.name"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"container": "x"}, "container"),
    ({"context_management": {}}, "context_management"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"n": 2}, "n"),
]


def test_what_cannot_be_served_is_refused_by_name() -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2]), tool_call_parser="hermes") as setup:
            for fields, param in REFUSED:
                body = {name: v for name, v in {**BODY, **fields}.items() if v is not None}
                response = await setup.post("/v1/messages", body)
                assert response.status_code == 400, (fields, response.text)
                answer = response.json()
                assert answer["type"] == "error"
                assert answer["error"]["type"] == "invalid_request_error"
                assert answer["error"]["details"]["param"].startswith(param), (fields, answer)
                assert param in answer["error"]["message"]
            assert not setup.router.submits

    run(scenario)


def test_errors_are_those_that_the_client_knows(tmp_path: Path) -> None:
    def lost(submit: Submit) -> list[RequestDelta]:
        error = {"finish_reason": FinishReason.ERROR, "error": ErrorCode.WORKER_LOST}
        return [RequestDelta(submit.request_id, [50]), RequestDelta(submit.request_id, [], **error)]

    async def scenario() -> None:
        async with frontend(lost) as setup, client_of(setup) as client:
            with pytest.raises(anthropic.NotFoundError) as missing:
                await client.messages.create(**{**BODY, "model": "none"})
            assert missing.value.type == "not_found_error"
            with pytest.raises(anthropic.BadRequestError, match="2023-06-01"):
                await client.messages.create(
                    **BODY, extra_headers={"anthropic-version": "2023-01-01"}
                )
            with pytest.raises(anthropic.APIStatusError) as failed:
                await client.messages.create(**BODY)
            assert (failed.value.status_code, failed.value.type) == (503, "overloaded_error")
            texts = []
            with pytest.raises(anthropic.APIStatusError) as broken:
                async with client.messages.stream(**BODY) as stream:
                    async for text in stream.text_stream:
                        texts.append(text)
            assert texts and broken.value.body == failed.value.body
            response = await setup.post("/v1/messages/batches", BODY)
            assert (response.status_code, response.json()["error"]["type"]) == (
                *(404, "not_found_error"),
            )
        keys = tmp_path / "keys"
        keys.write_text(f"alice {'a' * 32}\n")
        async with frontend(says([5, 2]), api_key_file=str(keys)) as setup:
            async with client_of(setup, api_key="b" * 32) as client:
                with pytest.raises(anthropic.AuthenticationError) as refused:
                    await client.messages.create(**BODY)
            assert refused.value.type == "authentication_error"

    run(scenario)


def test_a_stream_that_waits_sends_pings() -> None:
    async def scenario() -> None:
        async with frontend(sse_keepalive_s=0.05) as setup:
            asking = asyncio.create_task(setup.post("/v1/messages", {**BODY, "stream": True}))
            await setup.router.submitted()
            await asyncio.sleep(0.1)
            submit = setup.router.submits[0]
            for delta in writes("Hello")(submit):
                setup.router.client.on_message(token_delta([delta]))
            text = (await asking).text
            assert text.startswith('event: ping\ndata: {"type":"ping"}\n\n')
            assert json.loads(text.split("data: ")[-1]) == {"type": "message_stop"}

    run_patiently(scenario())
