"""OpenAI's responses, by its own client: prompts as of chats, typed events, and nothing kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest
from msgspec.json import encode
from pydantic import BaseModel
from support.fake_router import Answer, Setup, frontend, says

from lightserve.bundled import BUNDLED_MODEL_DIR, BUNDLED_MODEL_NAME
from lightserve.frontend.openai.responses_request import ResponsesRequest
from lightserve.frontend.response import CompletionResponse
from lightserve.messages.common import JsonSchemaConstraint
from lightserve.messages.frontend_router import ErrorCode, RequestDelta, Submit
from lightserve.tokenization.tokenizer import Tokenizer
from lightserve.types import FinishReason, RequestClass

TOKENIZER = Tokenizer(BUNDLED_MODEL_DIR)
TEMPLATE = """\
{% for tool in tools or [] %}T:{{ tool.function.name }} {% endfor %}{{ reasoning_effort }}\
{% for m in messages %}[{{ m.role }}] {{ m.content }}\
{% for c in m.tool_calls or [] %}C:{{ c.function.name }}=\
{{ c.function.arguments.values() | join(",") if c.function.arguments is mapping }}{% endfor %}\
{% if m.tool_call_id %}I:{{ m.tool_call_id }}{% endif %} {{ m.reasoning }}{% endfor %}"""
HI: dict[str, Any] = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": BUNDLED_MODEL_NAME, "input": "hi"}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
ADD = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}
CHAT_ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": SCHEMA, "strict": True},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS_TOO = {"tool_call_parser": "hermes", "reasoning_parser": "think"}


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def _ids(text: str) -> list[int]:
    return [*TOKENIZER.encode(text, add_special_tokens=False), *TOKENIZER.eos_token_ids]


def writes(text: str) -> Answer:
    """Answer every request with this text."""
    return says(_ids(text))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("templates") / "template.jinja"
    path.write_text(TEMPLATE)
    return str(path)


@asynccontextmanager
async def client_of(setup: Setup) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client, on a frontend's application."""
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=setup.app))
    async with openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http
    ) as client:
        yield client


def _plain(output: Any) -> list[dict[str, Any]]:
    """Return items without their random ids, and what a stream's helper adds."""
    random: dict[str, Any] = dict.fromkeys(("id", "call_id", "parsed_arguments"), True)
    return [
        item.model_dump(exclude=random | {"content": {"__all__": {"parsed"}}}) for item in output
    ]


def test_an_answer_and_the_same_streamed(template: str) -> None:
    text = f"<think>Hm.</think>So.\n{CALL}{CALL}Done."

    async def scenario() -> None:
        async with (
            frontend(writes(text), chat_template=template, **TOOLS_TOO) as setup,
            client_of(setup) as client,
        ):
            asked: dict[str, Any] = {**BODY, "tools": [ADD], "store": False}
            whole = await client.responses.create(**asked)
            kinds = ["reasoning", "message", "function_call", "function_call", "message"]
            assert [item.type for item in whole.output] == kinds
            thought, said, call, other, rest = whole.output
            assert (thought.content[0].text, whole.output_text) == ("Hm.", "So.Done.")
            assert (call.name, call.arguments) == ("add", '{"a": 1}')
            assert call.call_id != other.call_id and said.id != rest.id
            assert (whole.status, whole.incomplete_details) == ("completed", None)
            assert whole.store is False
            assert whole.usage.input_tokens == len(setup.router.prompt_of(0))
            assert whole.usage.output_tokens == len(_ids(text))
            reasoned = whole.usage.output_tokens_details.reasoning_tokens
            assert 0 < reasoned < whole.usage.output_tokens
            events = []
            async with client.responses.stream(**asked) as stream:
                async for event in stream:
                    events.append(event)
                final = await stream.get_final_response()
            assert _plain(final.output) == _plain(whole.output)
            assert final.usage == whole.usage
            assert [event.sequence_number for event in events] == list(range(len(events)))
            names = [event.type.removeprefix("response.") for event in events]
            assert names[:3] == ["created", "in_progress", "output_item.added"]
            assert names[-2:] == ["output_item.done", "completed"]
            assert names.count("output_item.added") == names.count("output_item.done") == 5
            for kind, count in (("output_text", 2), ("reasoning_text", 1)):
                assert names.count(f"{kind}.done") == count < names.count(f"{kind}.delta")
            assert names.count("content_part.added") == names.count("content_part.done") == 3
            assert names.count("function_call_arguments.done") == 2
            done = [event.text for event in events if event.type == "response.output_text.done"]
            assert done == ["So.", "Done."]
            # What was answered can be sent back as it is, with what the calls brought.
            outputs = [
                {"type": "function_call_output", "call_id": c.call_id, "output": "2"}
                for c in (call, other)
            ]
            again = [HI, *whole.output[:4], *outputs]
            await client.responses.create(**{**asked, "input": again})

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        ({}, {}),
        (
            {"instructions": "Be."},
            {"messages": [{"role": "system", "content": "Be."}, HI]},
        ),
        (
            {
                "input": [
                    {"role": "developer", "content": "Be."},
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_text", "text": "One"},
                            {"type": "input_text", "text": "two"},
                        ],
                    },
                    {
                        "type": "reasoning",
                        "id": "rs_1",
                        "summary": [],
                        "content": [{"type": "reasoning_text", "text": "Hm."}],
                    },
                    {
                        "type": "message",
                        "id": "msg_1",
                        "status": "completed",
                        "role": "assistant",
                        "content": [{"type": "output_text", "text": "So.", "annotations": []}],
                    },
                    {
                        "type": "function_call",
                        "call_id": "c1",
                        "name": "add",
                        "arguments": '{"a": 4}',
                    },
                    {"type": "function_call_output", "call_id": "c1", "output": "5"},
                    HI,
                ]
            },
            {
                "messages": [
                    {"role": "system", "content": "Be."},
                    {"role": "user", "content": "One\ntwo"},
                    {
                        "role": "assistant",
                        "content": "So.",
                        "reasoning": "Hm.",
                        "tool_calls": [
                            {
                                "id": "c1",
                                "type": "function",
                                "function": {"name": "add", "arguments": '{"a": 4}'},
                            }
                        ],
                    },
                    {"role": "tool", "tool_call_id": "c1", "content": "5"},
                    HI,
                ]
            },
        ),
        ({"tools": [ADD]}, {"tools": [CHAT_ADD]}),
        (
            {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False},
            {"tools": [CHAT_ADD], "tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "name": "add"}},
            {
                "tools": [CHAT_ADD],
                "tool_choice": {"type": "function", "function": {"name": "add"}},
            },
        ),
        ({"tools": [ADD], "tool_choice": "none"}, {"tools": [CHAT_ADD], "tool_choice": "none"}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"text": {"format": {"type": "json_object"}}},
            {"response_format": {"type": "json_object"}},
        ),
        (
            {
                "text": {
                    "format": {
                        "type": "json_schema",
                        "name": "x",
                        "schema": SCHEMA,
                        "strict": True,
                    }
                }
            },
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA},
                }
            },
        ),
        ({"text": {"format": {"type": "text"}}}, {}),
        (
            {"truncation": "auto", "max_output_tokens": 8188, "input": "hi " * 50},
            {
                "truncate_prompt_tokens": -1,
                "max_tokens": 8188,
                "messages": [{"role": "user", "content": "hi " * 50}],
            },
        ),
    ],
)
def test_items_are_messages(fields: dict[str, Any], chat: dict[str, Any], template: str) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2]), chat_template=template, **TOOLS_TOO) as setup:
            response = await setup.post("/v1/responses", {**BODY, **fields})
            assert response.status_code == 200, response.text
            body = {"model": BUNDLED_MODEL_NAME, "messages": [HI], **chat}
            response = await setup.post("/v1/chat/completions", body)
            assert response.status_code == 200, response.text
            ours, theirs = setup.router.submits
            assert setup.router.prompt_of(0) == setup.router.prompt_of(1)
            assert ours.constraint == theirs.constraint
            assert ours.max_tokens == theirs.max_tokens

    run(scenario)


def test_what_is_asked_for_arrives_and_is_repeated() -> None:
    async def scenario() -> None:
        async with frontend(says([5, 6, 2])) as setup:
            fields = {
                "temperature": 0.5,
                "top_p": 0.9,
                "max_output_tokens": 2,
                "metadata": {"a": "b"},
                "user": "u",
                "service_tier": "flex",
                "priority": 3,
                "slo": {"completion_s": 9},
                "truncation": "disabled",
                "prompt_cache_key": "k",
                "instructions": "Be.",
            }
            response = await setup.post("/v1/responses", {**BODY, **fields})
            answer = response.json()
            for name in fields.keys() - {"slo", "priority"}:
                assert answer[name] == fields[name]
            assert answer["status"] == "incomplete" == answer["output"][-1]["status"]
            assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
            (submit,) = setup.router.submits
            assert (submit.sampling.temperature, submit.sampling.top_p) == (0.5, 0.9)
            assert (submit.max_tokens, submit.prediction_key, submit.priority) == (2, "u", 3)
            assert submit.request_class is RequestClass.BE and submit.slo.completion_s == 9
            kept = {"prompt_cache_retention": "24h"}
            assert (await setup.post("/v1/responses", {**BODY, **kept})).status_code == 200
            assert setup.router.submits[-1].num_retained_tokens > 0

    run(scenario)


def test_structured_output_is_parsed() -> None:
    class Sum(BaseModel):
        a: int

    async def scenario() -> None:
        async with frontend(writes('{"a": 7}')) as setup, client_of(setup) as client:
            response = await client.responses.parse(
                model=BUNDLED_MODEL_NAME, input="hi", text_format=Sum, store=False
            )
            assert response.output_parsed == Sum(a=7)
            constraint = setup.router.submits[0].constraint
            assert isinstance(constraint, JsonSchemaConstraint)
            assert json.loads(constraint.schema)["properties"]["a"]["type"] == "integer"

    run(scenario)


PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"previous_response_id": ""}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
    (
        {
            "instructions": "Be brief.",
            "input": [
                *({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}),
                {"role": "user", "content": [{"type": "input_text", "text": "c"}, PICTURE]},
            ],
        },
        "input[2].content[1].image_url",
    ),
    (
        {
            "input": [
                {
                    "type": "reasoning",
                    "summary": [{"type": "summary_text", "text": "x"}],
                }
            ]
        },
        "input[0].summary",
    ),
    ({"input": "\ud800"}, "input"),
    ({"previous_response_id": "a\0"}, "previous_response_id"),
    ({"tools": [{"type": "web_search", "search_context_size": "low"}]}, "tools[0].type"),
    ({"tools": [{**ADD, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [ADD, ADD]}, "tools"),
    ({"tools": [ADD], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
    ({"tools": [ADD], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tools": [ADD], "tool_choice": "maybe"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "x"}}}},
        "text.format.schema",
    ),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"max_tool_calls": 3}, "max_tool_calls"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
    ({"messages": [HI]}, "messages"),
    ({"max_tokens": 5}, "max_tokens"),
]


def test_what_cannot_be_served_is_refused_by_name() -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2]), tool_call_parser="hermes") as setup:
            for fields, param in REFUSED:
                response = await setup.post("/v1/responses", {**BODY, **fields})
                assert response.status_code == 400, (fields, response.text)
                error = response.json()["error"]
                assert error["param"].startswith(param), (fields, error)
                assert param in error["message"]
            assert not setup.router.submits
            for method, path in (("GET", "resp_1"), ("DELETE", "resp_1"), ("POST", "x/cancel")):
                response = await setup.http.request(method, f"/v1/responses/{path}")
                assert response.status_code == 404

    run(scenario)


def test_failures_are_statuses_or_the_last_event() -> None:
    def lost(submit: Submit) -> list[RequestDelta]:
        error: dict[str, Any] = {"finish_reason": FinishReason.ERROR}
        error["error"] = ErrorCode.WORKER_LOST
        return [
            RequestDelta(submit.request_id, [300]),
            RequestDelta(submit.request_id, [], **error),
        ]

    async def scenario() -> None:
        async with frontend(lost) as setup, client_of(setup) as client:
            with pytest.raises(openai.InternalServerError) as failed:
                await client.responses.create(**BODY)
            assert failed.value.status_code == 503
            with pytest.raises(openai.NotFoundError):
                await client.responses.create(**{**BODY, "model": "none"})
            events = [event async for event in await client.responses.create(**BODY, stream=True)]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            last = events[-1]
            assert last.type == "response.failed" and last.response.status == "failed"
            assert last.response.error.code == "server_error"
            assert last.response.error.message == failed.value.body["message"]
            assert last.response.output[0].status == "incomplete"

    run(scenario)


def test_what_a_stream_keeps_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said again at the end, so it counts as a whole answer does; a chat's is gone."""
    most: dict[str, int] = {}
    count = CompletionResponse._count

    def noting(self: CompletionResponse, num_bytes: int) -> None:
        path = self._writer.request_id[:4]
        most[path] = max(most.get(path, 0), num_bytes)
        count(self, num_bytes)

    monkeypatch.setattr(CompletionResponse, "_count", noting)
    text = "Hello, you! " * 20

    async def scenario() -> None:
        async with frontend(writes(text)) as setup:
            await setup.post("/v1/responses", {**BODY, "stream": True})
            chat = {"model": BUNDLED_MODEL_NAME, "messages": [HI], "stream": True}
            await setup.post("/v1/chat/completions", chat)

    run(scenario)
    assert most["resp"] >= len(text)
    assert most.get("chat", 0) < len(text)


def test_errors_tell_pictures_of_this_request_from_those_of_earlier_ones() -> None:
    picture = {"role": "user", "content": [PICTURE]}
    asked = ResponsesRequest.model_validate({"model": "m", "input": [picture]})
    body, _ = asked.continuing([encode([{"role": "user", "content": "a"}, picture])])
    names = body.names_in(body.as_chat(), len(body.input) - len(asked.input))
    assert names["messages[1].content[0].image_url"] == "previous_response_id"
    assert names["messages[2].content[0].image_url"] == "input[0].content[0].image_url"
