"""Input that is wrong on purpose: always a 4xx in OpenAI's shape, never a word of the inside.

The table of numbers is made from the request models' own schemas: fields that are added later are
in it by themselves, and a model that no route here has makes a test fail.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fake_router import Setup, frontend, says
from support.grids import choose, more_when_long

from lightserve.bundled import BUNDLED_MODEL_NAME
from lightserve.errors import InvalidRequest
from lightserve.frontend import admin, completion, dashboard, json_body, openapi
from lightserve.frontend.admin import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenSpan,
)
from lightserve.frontend.anthropic import messages
from lightserve.frontend.anthropic.request import CountTokensRequest, MessagesRequest
from lightserve.frontend.json_body import (
    MAX_CONTAINERS,
    MAX_STRINGS,
    StrictModel,
    parse_json,
    parse_model,
)
from lightserve.frontend.openai import (
    batches,
    embeddings,
    files,
    rerank,
    responses,
    responses_writer,
)
from lightserve.frontend.openai.batches import BatchRequest
from lightserve.frontend.openai.chat import ChatRequest
from lightserve.frontend.openai.completions import CompletionRequest
from lightserve.frontend.openai.embeddings import EmbeddingRequest
from lightserve.frontend.openai.rerank import RerankRequest, ScoreRequest
from lightserve.frontend.openai.responses_request import ResponsesRequest
from lightserve.frontend.openapi import OPERATIONS
from lightserve.frontend.tgi import GenerateRequest

COMPLETION: dict[str, Any] = {"model": BUNDLED_MODEL_NAME, "prompt": [5, 6], "max_tokens": 2}
CHAT: dict[str, Any] = {
    "model": BUNDLED_MODEL_NAME,
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 2,
}
MESSAGES = {name: CHAT[name] for name in ("model", "messages")}
BATCH = {
    "input_file_id": "file-1",
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
}
GENERATE: dict[str, Any] = {"inputs": "hi", "parameters": {}}
ROUTES: dict[str, tuple[type[StrictModel], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, COMPLETION),
    "/v1/chat/completions": (ChatRequest, CHAT),
    "/v1/completions/render": (CompletionRequest, COMPLETION),
    "/v1/chat/completions/render": (ChatRequest, CHAT),
    "/v1/embeddings": (EmbeddingRequest, {"model": BUNDLED_MODEL_NAME, "input": "hi"}),
    "/v1/rerank": (
        RerankRequest,
        {"model": BUNDLED_MODEL_NAME, "query": "hi", "documents": ["ho"]},
    ),
    "/v1/score": (ScoreRequest, {"model": BUNDLED_MODEL_NAME, "text_1": "hi", "text_2": "ho"}),
    "/v1/responses": (ResponsesRequest, {"model": BUNDLED_MODEL_NAME, "input": "hi"}),
    "/v1/messages": (MessagesRequest, CHAT),
    "/v1/messages/count_tokens": (CountTokensRequest, MESSAGES),
    "/v1/batches": (BatchRequest, BATCH),
    "/generate": (GenerateRequest, GENERATE),
    "/tokenize": (TokenizeRequest, {"inputs": "hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
}
GENERATING = ("/v1/completions", "/v1/chat/completions", "/generate")
INTERNAL = ("Traceback", "Error(", "0x", ".py", "pydantic", "lightserve.", "object at", "asyncio")


def assert_clean(response: httpx.Response, status: int | None = None) -> None:
    """Check that an answer is a success or a well-formed 4xx without a word of the inside."""
    assert response.status_code < 500, response.text
    assert status is None or response.status_code == status, response.text
    if response.status_code < 400:
        return
    error = response.json()["error"]
    if response.url.path.startswith("/v1/messages"):
        assert error.keys() == {"message", "type", "details"}
        assert error["details"].keys() == {"error_code", "param"}
    else:
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
    for word in INTERNAL:
        assert word not in error["message"], error


# ---------------------------------------------------------------------- numbers, from the models


@dataclass(frozen=True)
class Number:
    """A place of a request body that holds a number."""

    path: str
    keys: tuple[str | int, ...]
    schema: dict[str, Any]
    other_types: frozenset[str]
    """JSON types that the place takes besides."""

    def body(self, value: Any) -> dict[str, Any]:
        """Return a request with this value there."""
        body: dict[str, Any] = json.loads(json.dumps(ROUTES[self.path][1]))
        place: Any = body
        for key, following in zip(self.keys, self.keys[1:], strict=False):
            if isinstance(following, int):
                place[key] = [None]
            elif isinstance(key, int) and place[key] is None:
                picture = {"type": following, following: {"url": "data:image/png;base64,AA=="}}
                place[key] = {"role": "user"} if following == "content" else picture
            elif isinstance(key, str) and not isinstance(place.get(key), dict | list):
                place[key] = {}
            place = place[key]
        place[self.keys[-1]] = value
        return body

    @property
    def inside(self) -> list[Any]:
        """The limits themselves."""
        return [self.schema[key] for key in ("minimum", "maximum") if key in self.schema]

    @property
    def outside(self) -> list[Any]:
        """What is beyond the limits, or no such number at all."""
        step = 1 if self.schema["type"] == "integer" else 0.001
        values: list[Any] = [10**400] if self.schema["type"] == "number" else [0.5]
        for key, value in self.schema.items():
            match key:
                case "minimum":
                    values.append(value - step)
                case "maximum":
                    values += [value + step, 2**63]
                case "exclusiveMinimum" | "exclusiveMaximum":
                    values.append(value)
        wrong = {"boolean": True, "string": "1", "array": [[]], "object": {"a": {}}, "null": None}
        return values + [wrong[kind] for kind in wrong.keys() - self.other_types]


def _numbers(path: str) -> Iterator[Number]:
    root = ROUTES[path][0].model_json_schema()

    def walk(schema: dict[str, Any], keys: tuple[str | int, ...]) -> Iterator[Number]:
        alternatives = list(_alternatives(root, schema))
        types = {part.get("type", "") for part in alternatives}
        for part in alternatives:
            if part.get("type") in ("integer", "number") and "enum" not in part:
                yield Number(path, keys, part, frozenset(types - {part["type"]}))
            for name, inner in part.get("properties", {}).items():
                yield from walk(_resolve(root, inner), (*keys, name))
            if isinstance(values := part.get("additionalProperties"), dict):
                yield from walk(_resolve(root, values), (*keys, "1"))
        # What an element may be is the sum of what all kinds of lists take.
        items = [part["items"] for part in alternatives if isinstance(part.get("items"), dict)]
        if items:
            yield from walk({"anyOf": items}, (*keys, 0))

    return walk(root, ())


def _alternatives(root: dict[str, Any], schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    schema = _resolve(root, schema)
    if "anyOf" not in schema:
        yield schema
    for part in schema.get("anyOf", []):
        yield from _alternatives(root, part)


def _resolve(root: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        resolved: dict[str, Any] = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
        return resolved
    return schema


NUMBERS = [number for path in ROUTES for number in _numbers(path)]


def _models(model: type[StrictModel]) -> set[str]:
    return {model.__name__, *model.model_json_schema().get("$defs", {})}


def test_every_body_is_of_a_route_here() -> None:
    """Otherwise its numbers would not be in the table."""
    known = {model for model, _ in ROUTES.values()}
    declared = {operation.request for operation in OPERATIONS.values()} - {None}
    assert declared == known

    def leaves(model: type) -> Iterator[type]:
        if not model.__subclasses__():
            yield model
        below: type
        for below in model.__subclasses__():
            yield from leaves(below)

    ours = {m.__name__ for m in leaves(StrictModel) if m.__module__.startswith("lightserve.")}
    reached = set().union(*(_models(model) for model in known))
    answers = {model.__name__ for model in (DetokenizeResponse, TokenSpan)}
    answers.add("SamplingOfMODEL")  # of a file
    for module in (
        openapi,
        completion,
        admin,
        batches,
        embeddings,
        files,
        messages,
        rerank,
        responses,
        responses_writer,
        dashboard,
    ):
        answers |= {name for name, value in vars(module).items() if isinstance(value, type)}
    assert ours <= reached | answers, ours - reached - answers


def test_the_table_has_what_is_known_to_have_limits() -> None:
    names = {(number.path, number.keys[-1]) for number in NUMBERS}
    for path in GENERATING:
        assert {(path, name) for name in ("temperature", "top_p", "top_k", "seed")} <= names
    assert {(path, 0) for path in ("/v1/completions", "/detokenize")} <= names  # token ids
    assert all(number.outside for number in NUMBERS)


@pytest.mark.parametrize("path", ROUTES)
def test_every_number_at_and_beyond_its_limits(path: str) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            for number in (n for n in NUMBERS if n.path == path):
                for value in number.inside:
                    ROUTES[path][0].model_validate(number.body(value))
                    assert_clean(await setup.post(path, number.body(value)))
                for value in (*number.outside, 2**63, -(2**63) - 1):
                    response = await setup.post(path, number.body(value))
                    is_outside = value in number.outside
                    assert_clean(response, 400 if is_outside else None)
                    if is_outside:
                        error = response.json()["error"]
                        named = error.get("details", error)["param"] or ""
                        assert str(number.keys[0]) in named, (number.keys, value)
                for literal in ("NaN", "Infinity", "-Infinity", "1e999", "9" * 5000):
                    text = json.dumps(number.body("@")).replace('"@"', literal)
                    assert_clean(await setup.post(path, text.encode()), 400)

    asyncio.run(scenario())


# ---------------------------------------------------------------------- bodies

MIB = 1024 * 1024
PROMPT = b'{"max_tokens": 2, "model": "%s", "prompt": [' % BUNDLED_MODEL_NAME.encode()
BODIES: dict[str, bytes] = {
    "truncated": json.dumps(COMPLETION)[:-3].encode(),
    "not-json": b"prompt=hi&model=x",
    "brackets": b"[" * (4 * MIB - 1),
    "pairs": b"[" + b"{}," * MIB + b"{}]",
    "lists-in-a-prompt": b'{"model":"x","prompt":[' + b"[]," * MIB + b"[]]}",
    "numbers": PROMPT + b"1," * (MIB // 2) + b"1]}",
    "fractions": PROMPT + b"1.5," * (MIB // 2) + b"1]}",
    "strings": PROMPT + b'"",' * 200_000 + b'""]}',
    "keys": b"{" + b",".join(b'"k%d":1' % n for n in range(100_000)) + b"}",
    "escapes": b'"' + b'\\"' * (2 * MIB - 2),
    "one-character": json.dumps({**COMPLETION, "prompt": "x" * 2 * MIB}).encode(),
    "one-character-chat": json.dumps(
        {**CHAT, "messages": [{"role": "user", "content": "a" * 2 * MIB}]}
    ).encode(),
    "surrogate": json.dumps({**COMPLETION, "prompt": "\ud800"}).encode(),
    "surrogate-key": b'{"\\ud800": 1}',
    "surrogate-user": json.dumps({**COMPLETION, "user": "\udfff"}).encode(),
    "surrogate-model": json.dumps({**COMPLETION, "model": "\udfff"}).encode(),
    "utf8": b'{"prompt": "\xed\xa0\x80"}',
    "overlong-utf8": b'{"prompt": "\xc0\xaf"}',
    "bom": b"\xef\xbb\xbf{}",
    "nul": b'{"model\x00": 1}',
    "twice": b'{"model": "a", "model": "a"}',
    "twice-inside": b'{"model": "a", "stream_options": {"x": 1, "x": 1}}',
    "comment": b"{} // no",
    **{text.decode(): text for text in (b"[]", b"1", b'"x"', b"true", b"null", b"-", b"1e5")},
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies(name: str) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2]), pooling="last") as setup:
            for path in ROUTES:
                response = await setup.post(path, BODIES[name])
                assert_clean(response)
                assert response.status_code in (400, 404)  # 404: no such model
                assert not setup.router.submits

    asyncio.run(scenario())


# ---------------------------------------------------------------------- prompts

CONTEXT = 64
WHOLE: dict[str, str] = {
    "a-space": " ",
    "blanks": " \t\n\r\n  ",
    "one-letter": "a",
    "nul": "a\x00b",
    "right-to-left": "שלום עולם \u202eabc\u202c",
    "combining": "e\u0301\u0327a\u030a",
    "zwj-emoji": "👩‍👩‍👧‍👦🏳️‍🌈",
    "last-of-unicode": "\U0010ffff\ufeff\ufffd",
}
"""Texts that are prompts like any other."""
TOKENS: dict[str, tuple[list[Any], int]] = {
    "none": ([], 400),
    "one": ([5], 200),
    "all-but-one": ([5] * (CONTEXT - 1), 200),
    "the-whole-context": ([5] * CONTEXT, 400),
    "one-too-many": ([5] * (CONTEXT + 1), 400),
    "below-zero": ([5, -1], 400),
    "the-vocabulary": ([5, "vocabulary"], 400),
    "the-last-of-it": ([5, "last"], 200),
    "beyond-32-bits": ([5, 2**31], 400),
    "beyond-64-bits": ([5, 2**64], 400),
    "true": ([5, True], 400),
    "an-empty-list": ([[5], []], 400),
    "an-empty-text": (["a", ""], 400),
    "special-ones-alone": (["special"], 200),
}


@pytest.mark.parametrize("name", WHOLE)
def test_prompts_of_any_text_come_whole(name: str) -> None:
    async def case(setup: Setup) -> None:
        text = WHOLE[name]
        decode = setup.service.model.tokenizer.decode
        for path, field in (("/v1/completions", "prompt"), ("/generate", "inputs")):
            assert_clean(await setup.post(path, {**ROUTES[path][1], field: text}), 200)
            assert decode(setup.router.prompt_of(-1)) == text
        chat = {**CHAT, "messages": [{"role": "user", "content": text}]}
        assert_clean(await setup.post("/v1/chat/completions", chat), 200)
        assert text.strip() in decode(setup.router.prompt_of(-1))

    _run(case)


@pytest.mark.parametrize("name", TOKENS)
def test_prompts_of_tokens(name: str) -> None:
    async def case(setup: Setup) -> None:
        model = setup.service.model
        special = [i for i in range(model.vocab_size) if model.tokenizer.is_special(i)]
        asked, status = TOKENS[name]
        words = {"vocabulary": model.vocab_size, "last": model.vocab_size - 1}
        prompt = (
            special[: CONTEXT - 1]
            if asked == ["special"]
            else [words.get(str(t), t) for t in asked]
        )
        body = {**COMPLETION, "prompt": prompt, "max_tokens": 1}
        assert_clean(await setup.post("/v1/completions", body), status)
        assert len(setup.router.submits) == (status == 200)

    _run(case)


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_depth_is_counted_exactly(opening: str) -> None:
    closing = "]" if opening == "[" else "}"

    def nested(depth: int) -> bytes:
        return (opening * depth + "1" + closing * depth).encode()

    parse_json(nested(7), max_depth=7)
    with pytest.raises(InvalidRequest, match="more than 7 levels"):
        parse_json(nested(8), max_depth=7)
    parse_json(b'{"a": "' + b"[" * 100 + b'", "b": "\\"[[[[[[[[["}', max_depth=2)


@pytest.mark.parametrize(
    "picture", ["data:image/png;base64,", "iVBORw0KGgo", "/9j/", r"\/9j\/", "R0lGOD", "UklGR"]
)
def test_pictures_are_counted_apart(picture: str) -> None:
    def body(text: str, begins: str = picture) -> bytes:
        return f'{{"a":"{text}","b":"{begins}{"A" * 5000}","c":["{begins}{"A" * 5000}"]}}'.encode()

    num_beside = len('{"a":"","b":,"c":[]}')
    parse_json(body("x" * 100), max_bytes=num_beside + 100)
    with pytest.raises(
        InvalidRequest, match=r"at most 119 bytes beside its images \(--max-body-"
    ) as e:
        parse_json(body("x" * 100), max_bytes=num_beside + 99)
    assert e.value.status == 413 and str(e.value).endswith("got 120")
    with pytest.raises(InvalidRequest, match="beside its images"):
        parse_json(body("", begins="x" + picture), max_bytes=num_beside + 100)


@pytest.mark.parametrize("filler", ["A" * 9, r"\/", r"A\\", r"\"", "é"])
@pytest.mark.parametrize("size", [65_530, 65_536, 140_000, 400_001])
def test_long_strings_end_where_they_end(filler: str, size: int) -> None:
    """They are read in pieces, each of which keeps other threads waiting for a moment only."""
    text = (filler * (size // len(filler) + 1))[: size // len(filler) * len(filler)]
    body = f'{{"a": "{text}", "[": ["{text}"], "{text}": 1}}'.encode()
    tokens = [body[start:end] for start, end in json_body._tokens(body)]
    long = f'"{text}"'.encode()
    assert tokens == [b"{", b'"a"', long, b'"["', b"[", long, b"]", long, b"}"]
    assert parse_json(body, max_depth=2) == json.loads(body)
    open_ended = body[: body.index(b'", "[')]
    assert [*json_body._tokens(open_ended)][-1] == (6, len(open_ended))
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        parse_json(open_ended + b"\\")


def test_no_piece_of_a_string_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of the largest size whose characters are all escapes: its regular expressions."""
    longest = 0

    class Noted:
        def __init__(self, pattern: re.Pattern[bytes]) -> None:
            self._pattern = pattern

        def match(self, *arguments: Any) -> re.Match[bytes] | None:
            return self._note(self._pattern.match(*arguments))

        def finditer(self, *arguments: Any) -> Iterator[re.Match[bytes]]:
            return map(self._note, self._pattern.finditer(*arguments))  # type: ignore[arg-type]

        @staticmethod
        def _note(match: re.Match[bytes] | None) -> re.Match[bytes] | None:
            nonlocal longest
            assert match is not None
            longest = max(longest, match.end() - match.start())
            return match

    for name in ("_TOKEN", "_REST"):
        monkeypatch.setattr(json_body, name, Noted(getattr(json_body, name)))
    parse_json(b'{"a":"' + rb"\/" * 1_000_000 + b'"}')
    assert 0 < longest < 150_000


def test_parts_are_counted() -> None:
    parse_json(b"[" + b"{}," * (MAX_CONTAINERS - 2) + b"{}]")
    with pytest.raises(InvalidRequest, match="objects and lists"):
        parse_json(b"[" + b"{}," * (MAX_CONTAINERS - 1) + b"{}]")
    with pytest.raises(InvalidRequest, match="strings"):
        parse_json(b"[" + b'"",' * MAX_STRINGS + b'""]')


def test_depth_is_configurable() -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2]), max_json_depth=4) as setup:
            deep = {**COMPLETION, "metadata": {"a": {"b": {"c": {}}}}}
            response = await setup.post("/v1/completions", deep)
            assert_clean(response, 400)
            assert "4 levels" in response.json()["error"]["message"]

    asyncio.run(scenario())


# ---------------------------------------------------------------------- chance

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
FIELDS = sorted({name for model, _ in ROUTES.values() for name in model.model_fields})


def _run(case: Any) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2]), max_model_len=CONTEXT, pooling="last") as setup:
            await case(setup)

    asyncio.run(scenario())


@more_when_long
@given(st.lists(st.tuples(st.sampled_from(FIELDS), ANYTHING), min_size=1, max_size=20))
@settings(max_examples=choose(15, 60), deadline=None, suppress_health_check=list(HealthCheck))
def test_any_value_in_any_field(values: list[tuple[str, Any]]) -> None:
    async def case(setup: Setup) -> None:
        for path, (_, body) in ROUTES.items():
            for field, value in values:
                inside = path == "/generate" and field != "inputs"
                changed = {"parameters": {field: value}} if inside else {field: value}
                text = json.dumps(
                    {**body, **changed, "stream": False} if not inside else body | changed
                )
                assert_clean(await setup.post(path, text.encode()))

    _run(case)


@more_when_long
@given(
    st.lists(
        st.tuples(st.integers(0, 200), st.binary(max_size=4), st.integers(0, 4)),
        min_size=1,
        max_size=20,
    )
)
@settings(max_examples=choose(15, 60), deadline=None, suppress_health_check=list(HealthCheck))
def test_any_bytes(changes: list[tuple[int, bytes, int]]) -> None:
    async def case(setup: Setup) -> None:
        for path, (_, body) in ROUTES.items():
            good = json.dumps(body).encode()
            for start, data, num_dropped in changes:
                bad = good[: start % len(good)] + data + good[start % len(good) + num_dropped :]
                assert_clean(await setup.post(path, bad))

    _run(case)


def test_what_is_neither_string_nor_bracket_is_passed_over_quickly() -> None:
    """In one go of the regular expression, in which no other thread runs: not 100 ms of 4 MiB."""
    plain = re.compile(rb'["\[{\]}]')

    def cpu_s(pattern: re.Pattern[bytes]) -> float:
        start_s = time.thread_time()
        assert not list(pattern.finditer(b"1, " * 100_000))
        return time.thread_time() - start_s

    pairs = [(cpu_s(json_body._TOKEN), cpu_s(plain)) for _ in range(9)]
    assert min(pair[0] for pair in pairs) < 2 * min(pair[1] for pair in pairs)


# What clients read about a field of a wrong kind: its own name, and all that it may be.

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
            'tool_choice.function.name must match ^[A-Za-z0-9_.-]{1,128}$, got "a b"',
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
