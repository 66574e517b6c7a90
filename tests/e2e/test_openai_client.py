"""The `openai` client against a real server, call by call and option by option."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI
from support.live_server import LiveServer, live_server
from support.processes import wait_for

from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.tokenization.tokenizer import Tokenizer

ASK: list[Any] = [{"role": "user", "content": "Tell me a story."}]
PROMPT = "Tell me a story."
EOS = 2


@pytest.fixture(scope="module")
def server(run_parent: Path) -> Iterator[LiveServer]:
    """Answers that are compared must not depend on what runs beside them."""
    flags = ("--batch-invariant", "--dtype=float32", "--tool-call-parser=hermes")
    flags = (*flags, "--speculation=suffix")  # which changes none
    with live_server(run_parent, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


Ask = Callable[..., Any]


@pytest.fixture(params=["completions", "chat"])
def ask(request: pytest.FixtureRequest, client: OpenAI, server: LiveServer) -> Ask:
    """Either call, with a few tokens and a seed; returns the answer."""

    def of_chat(**options: Any) -> Any:
        defaults = {"model": server.model, "messages": ASK, "max_tokens": 12, "seed": 3}
        return client.chat.completions.create(**(defaults | options))

    def of_completions(**options: Any) -> Any:
        defaults = {"model": server.model, "prompt": PROMPT, "max_tokens": 12, "seed": 3}
        return client.completions.create(**(defaults | options))

    return of_chat if request.param == "chat" else of_completions


def text_of(answer: Any, index: int = 0) -> str:
    choice = answer.choices[index]
    text = choice.text if hasattr(choice, "text") else choice.message.content
    assert isinstance(text, str)
    return text


def joined(stream: Any, index: int = 0) -> str:
    """Return the text of one choice of a stream."""
    choices = [c for chunk in stream for c in chunk.choices if c.index == index]
    return "".join(c.text if hasattr(c, "text") else c.delta.content or "" for c in choices)


def test_a_prediction_changes_no_answer(client: OpenAI, server: LiveServer) -> None:
    """Right or wrong; and usage tells of what was guessed, in a stream as well."""
    options: dict[str, Any] = {"model": server.model, "messages": ASK, "max_tokens": 60, "seed": 5}
    text = text_of(client.chat.completions.create(**options))

    def predicted(content: str, **more: Any) -> Any:
        return client.chat.completions.create(
            **options, prediction={"type": "content", "content": content}, **more
        )

    for _ in range(20):  # what pays is decided by measured times
        answer = predicted(text)
        assert text_of(answer) == text
        right = answer.usage.completion_tokens_details.accepted_prediction_tokens
        assert 0 <= right <= answer.usage.completion_tokens
        if right > 0:
            break
    assert right > 0
    answer = predicted(text[: len(text) // 2] + " and no more of that. " * 3)
    assert text_of(answer) == text
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens >= 0
    *chunks, last = predicted(text, stream=True, stream_options={"include_usage": True})
    assert joined(chunks) == text
    assert last.usage.completion_tokens_details.accepted_prediction_tokens >= 0
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        predicted(text, logprobs=True)


def test_models(client: OpenAI, server: LiveServer) -> None:
    assert [model.id for model in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).id == server.model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_plain(ask: Ask) -> None:
    answer = ask()
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert (answer.choices[0].finish_reason, answer.service_tier) == ("length", "default")
    assert answer._request_id  # the x-request-id of the response


def test_stream_joins_to_the_whole(ask: Ask) -> None:
    whole = ask(n=2, temperature=1.5)
    for index in range(2):
        assert joined(ask(n=2, temperature=1.5, stream=True), index) == text_of(whole, index)


def test_stream_usage(ask: Ask) -> None:
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage == ask().usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert all(chunk.usage is None for chunk in ask(stream=True))


def test_cached_tokens_are_counted(ask: Ask) -> None:
    ask()
    usage = ask().usage
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_seed_and_temperature(ask: Ask) -> None:
    hot = {"temperature": 2.0, "max_tokens": 30}
    assert text_of(ask(**hot, seed=1)) == text_of(ask(**hot, seed=1))
    assert len({text_of(ask(**hot, seed=seed)) for seed in range(4)}) > 1
    assert len({text_of(ask(temperature=0, seed=seed)) for seed in range(4)}) == 1


@pytest.mark.parametrize("narrow", [{"top_p": 1e-6}, {"top_k": 1}, {"min_p": 1.0}], ids=str)
def test_truncation_leaves_the_most_probable(
    client: OpenAI, server: LiveServer, narrow: dict[str, Any]
) -> None:
    """Not compared with greedy texts: bfloat16 has ties."""

    def surprises(**options: Any) -> list[float]:
        answer = client.chat.completions.create(
            model=server.model,
            messages=ASK,
            max_tokens=12,
            seed=3,
            temperature=2.0,
            logprobs=True,
            top_logprobs=1,
            **options,
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        content = logprobs.content or []
        return [token.top_logprobs[0].logprob - token.logprob for token in content]

    assert surprises(extra_body=narrow) == [0.0] * 12
    assert max(surprises()) > 0.0


def test_logit_bias_forces_a_token(ask: Ask) -> None:
    words = [text_of(ask(logit_bias={str(token): 100}, max_tokens=1)) for token in (603, 441)]
    assert words[0].strip() == "Tell"
    assert words[1].strip() == "me"


def test_allowed_token_ids(ask: Ask) -> None:
    text = text_of(ask(temperature=2.0, extra_body={"allowed_token_ids": [603]}))
    assert text == "Tell" * 12


@pytest.mark.parametrize(
    "options",
    [
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0},
        {"extra_body": {"repetition_penalty": 10.0}},
    ],
    ids=str,
)
def test_penalties_end_a_repetition(ask: Ask, options: dict[str, Any]) -> None:
    extra: dict[str, Any] = {"allowed_token_ids": list(range(600, 620)), "ignore_eos": True}
    assert text_of(ask(temperature=0, extra_body=extra)) == " story" * 12
    told = options | {"extra_body": extra | options.get("extra_body", {})}
    assert len(set(text_of(ask(temperature=0, **told)).split())) > 1


def test_min_tokens_and_ignore_eos(ask: Ask) -> None:
    ends = {"logit_bias": {str(EOS): 100}, "temperature": 0}
    answer = ask(**ends)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (1, "stop")
    answer = ask(**ends, extra_body={"min_tokens": 5})
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (6, "stop")
    answer = ask(**ends, extra_body={"ignore_eos": True})
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (12, "length")


def test_stop_strings(ask: Ask) -> None:
    whole = text_of(ask(temperature=0, max_tokens=40))
    for stop in (whole[10:13], whole[7:20]):
        before = whole[: whole.index(stop)]
        for stream in (False, True):
            answer = ask(temperature=0, max_tokens=40, stop=[stop, "§§"], stream=stream)
            assert (joined(answer) if stream else text_of(answer)) == before
        answer = ask(
            temperature=0,
            max_tokens=40,
            stop=stop,
            extra_body={"include_stop_str_in_output": True},
        )
        assert text_of(answer) == before + stop
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens < 40


def test_stop_token_ids(ask: Ask) -> None:
    answer = ask(logit_bias={"603": 100}, extra_body={"stop_token_ids": [603]})
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (1, "stop")


@pytest.mark.parametrize("tier", ["auto", "default", "priority", "flex"])
def test_service_tier(ask: Ask, tier: str) -> None:
    answer = ask(extra_body={"service_tier": tier})
    assert answer.service_tier == ("default" if tier == "auto" else tier)


@pytest.mark.parametrize("key", ["user", "safety_identifier", "prompt_cache_key"])
def test_keys_of_prediction(ask: Ask, key: str) -> None:
    assert text_of(ask(extra_body={key: "jane"})) == text_of(ask())
    assert text_of(ask(extra_body={"metadata": {"k": "v"}})) == text_of(ask())


def test_chat_logprobs(client: OpenAI, server: LiveServer) -> None:
    answer = client.chat.completions.create(
        model=server.model,
        messages=ASK,
        max_tokens=12,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 12
    for token in choice.logprobs.content:
        assert token.logprob <= 0.0
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob)
        assert math.fsum(math.exp(top.logprob) for top in token.top_logprobs) <= 1.001
        if not token.token.startswith("bytes:"):
            assert bytes(token.bytes or []).decode() == token.token
    data = b"".join(bytes(token.bytes or []) for token in choice.logprobs.content)
    assert data.decode(errors="replace") == choice.message.content


def test_completion_logprobs_and_echo(client: OpenAI, server: LiveServer) -> None:
    common: dict[str, Any] = {"model": server.model, "prompt": PROMPT, "temperature": 0}
    plain = client.completions.create(**common, max_tokens=8, logprobs=2)
    echoed = client.completions.create(**common, max_tokens=8, logprobs=2, echo=True)
    alone = client.completions.create(**common, max_tokens=0, logprobs=2, echo=True)
    assert echoed.choices[0].text == PROMPT + plain.choices[0].text
    assert alone.choices[0].text == PROMPT
    assert alone.usage is not None
    assert alone.usage.completion_tokens == 0
    own, both, only = (answer.choices[0].logprobs for answer in (plain, echoed, alone))
    assert own is not None
    assert both is not None
    assert only is not None
    assert both.tokens == (only.tokens or []) + (own.tokens or [])
    assert only.token_logprobs is not None
    assert only.token_logprobs[0] is None
    assert all(value <= 0.0 for value in only.token_logprobs[1:])
    num = len(only.tokens or [])
    assert both.token_logprobs is not None
    assert both.token_logprobs[num:] == pytest.approx(own.token_logprobs, abs=0.05)
    assert both.text_offset is not None
    assert both.text_offset[num] == len(PROMPT)


def test_ids_of_tokens_and_what_ended_an_answer(ask: Ask) -> None:
    told = {"return_token_ids": True, "ignore_eos": True}
    whole = ask(temperature=0, extra_body=told).choices[0]
    assert (len(whole.token_ids), whole.stop_reason) == (12, None)
    end = whole.token_ids[5]
    ended = ask(temperature=0, extra_body=told | {"stop_token_ids": [float(end)]}).choices[0]
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(end) + 1]
    assert ended.stop_reason == ended.matched_stop == end
    chunks = list(ask(temperature=0, stream=True, extra_body=told))
    ids = [getattr(chunk.choices[0], "token_ids", []) for chunk in chunks]
    assert list(itertools.chain(*ids)) == whole.token_ids


def test_prompt_logprobs(ask: Ask) -> None:
    answer = ask(temperature=0, extra_body={"prompt_logprobs": 2, "return_token_ids": True})
    of_prompt = answer if hasattr(answer, "prompt_logprobs") else answer.choices[0]
    first, *others = of_prompt.prompt_logprobs
    assert first is None
    for token_id, known in zip(of_prompt.prompt_token_ids[1:], others, strict=True):
        values = [entry["logprob"] for entry in known.values() if entry["rank"] is not None]
        own = known[str(token_id)]
        assert len(values) == 2
        assert own["rank"] is not None or own["logprob"] <= min(values)


def test_bad_words_are_not_written(ask: Ask) -> None:
    plain = ask(temperature=0)
    word = next(part for part in text_of(plain).split()[1:] if len(part) > 1)
    told = {"bad_words": [word], "return_token_ids": True, "ignore_eos": True}
    written = ask(temperature=0, max_tokens=40, extra_body=told).choices[0].token_ids
    barred = Tokenizer(BUNDLED_MODEL_DIR).encode(f" {word}", add_special_tokens=False)
    places = range(len(written) - len(barred) + 1)
    assert not any(written[place : place + len(barred)] == barred for place in places)


@pytest.mark.parametrize(
    "field",
    [
        {"guided_choice": ["yes", "no"]},
        {"guided_regex": "yes|no"},
        {"regex": "yes|no"},
        {"ebnf": 'root ::= "yes" | "no"'},
    ],
)
def test_other_names_of_structured_outputs(ask: Ask, field: dict[str, Any]) -> None:
    assert text_of(ask(extra_body=field)) in {"yes", "no"}


def test_responses_and_messages_say_what_chats_say(client: OpenAI, server: LiveServer) -> None:
    options: dict[str, Any] = {"model": server.model, "temperature": 0.0}
    chat = client.chat.completions.create(messages=ASK, max_tokens=40, **options)
    said, end = text_of(chat), chat.choices[0].finish_reason
    asked: dict[str, Any] = {"input": PROMPT, "max_output_tokens": 40, "store": False, **options}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    final = events[-1].response
    assert whole.output_text == final.output_text == "".join(deltas) == said
    assert whole.status == final.status == {"length": "incomplete", "stop": "completed"}[end]
    assert whole.usage.output_tokens == final.usage.output_tokens == chat.usage.completion_tokens
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as other:
        body: dict[str, Any] = {"model": server.model, "messages": ASK, "max_tokens": 40}
        greedy = {"extra_body": {"temperature": 0.0}}
        message = other.messages.create(**body, **greedy)
        with other.messages.stream(**body, **greedy) as told:
            texts = list(told.text_stream)
            streamed = told.get_final_message()
        count = other.messages.count_tokens(model=server.model, messages=ASK).input_tokens
    assert message.content[0].text == streamed.content[0].text == "".join(texts) == said
    assert message.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[end]
    assert len(texts) > 1 and len(deltas) > 1
    usage = streamed.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == count == chat.usage.prompt_tokens
    assert usage.cache_read_input_tokens > 0


def test_several_prompts(client: OpenAI, server: LiveServer) -> None:
    prompts: list[Any] = [PROMPT, "Where is it?"]
    common: dict[str, Any] = {"model": server.model, "max_tokens": 6, "temperature": 0}
    answer = client.completions.create(**common, prompt=prompts, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    singles = [client.completions.create(**common, prompt=prompt) for prompt in prompts]
    texts = [single.choices[0].text for single in singles]
    assert [choice.text for choice in answer.choices] == [texts[0]] * 2 + [texts[1]] * 2
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(s.usage.prompt_tokens for s in singles if s.usage)
    assert answer.usage.completion_tokens == 24
    ids: Any = [[603, 441], [603]]
    assert len(client.completions.create(**common, prompt=ids).choices) == 2
    assert len(client.completions.create(**common, prompt=ids[0]).choices) == 1


def test_limits_of_tokens(client: OpenAI, server: LiveServer) -> None:
    answer = client.completions.create(
        model=server.model, prompt=PROMPT, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    chat = client.chat.completions.create(
        model=server.model, messages=ASK, max_completion_tokens=5, seed=1
    )
    assert chat.usage is not None
    assert chat.usage.completion_tokens <= 5


def test_request_ids_go_in_and_out(client: OpenAI, server: LiveServer) -> None:
    raw = client.completions.with_raw_response.create(
        model=server.model, prompt=PROMPT, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temperature": 3}, openai.BadRequestError),
        ({"model": "other"}, openai.NotFoundError),
        ({"max_tokens": 10**6}, openai.BadRequestError),
        ({"extra_body": {"slo": {"ttft": 1}}}, openai.BadRequestError),
        ({"stop": ["a"] * 5}, openai.BadRequestError),
    ],
    ids=str,
)
def test_errors_are_the_clients_own(
    ask: Ask, options: dict[str, Any], error: type[openai.APIStatusError]
) -> None:
    with pytest.raises(error) as caught:
        ask(**options)
    named = next(iter(options.get("extra_body", options)))
    assert caught.value.body is not None
    assert (caught.value.param or "").startswith(named)


def test_leaving_a_stream_frees_everything(client: OpenAI, server: LiveServer, ask: Ask) -> None:
    with ask(n=4, max_tokens=400, stream=True, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))

    def is_free() -> bool:
        ask(max_tokens=1)
        load = httpx.get(f"{server.url}/health", timeout=300.0).json()
        return bool(load["num_in_flight"] == load["num_running"] == 0)

    wait_for(is_free, "the end of all choices")


# Structured output and required tool calls of a real server, as the `openai` client reads them.

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


def test_schemas_and_tools_hold_for_clients(client: OpenAI, server: LiveServer) -> None:
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
