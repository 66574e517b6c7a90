"""The OpenAPI schema: every route is in it, and real bodies and answers fit it."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from support.fake_router import frontend, says

import lightserve
from lightserve.frontend.request_options import OBJECTIVE_HEADER, TARGET_HEADERS

EOS = 2


def _ask(path: str, body: Any = None, **flags: Any) -> tuple[int, Any, Any]:
    """Return status, answer and schema."""

    async def scenario() -> tuple[int, Any, Any]:
        async with frontend(says([300, EOS]), **flags) as setup:
            schema = (await setup.http.get("/openapi.json")).json()
            if body is None:
                response = await setup.http.get(path)
            else:
                values = body | ({"model": setup.service.model.names[0]} if "/v1" in path else {})
                response = await setup.post(path, values)
            return response.status_code, response.json(), schema

    return asyncio.run(scenario())


def _validator(schema: Any, part: Any) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator({**part, "components": schema["components"]})


ANSWERS: list[tuple[str, Any]] = [
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/completions", {"prompt": ["hi", [5, 6]], "n": 2, "best_of": 2, "echo": True}),
    ("/v1/completions", {"prompt": "hi there", "echo": True, "logprobs": 3}),
    ("/v1/completions", {"prompt": "hi", "logit_bias": {"5": -1}, "stop": "x", "suffix": None}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "logprobs": True,
            "top_logprobs": 2,
            "service_tier": "flex",
            "stop": ["a", "b"],
            "store": False,
            "modalities": ["text"],
        },
    ),
    ("/v1/responses", {"input": "hi", "store": False, "metadata": {"a": "b"}}),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "id": "r", "summary": [], "content": []},
                {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
                {"type": "message", "role": "user", "content": "and?", "status": "completed"},
            ],
            "instructions": "Be.",
            "max_output_tokens": 5,
            "text": {"format": {"type": "json_object"}},
            "tool_choice": "auto",
            "include": [],
            "temperature": 0,
        },
    ),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}),
    (
        "/v1/messages",
        {
            "max_tokens": 9,
            "system": [{"type": "text", "text": "Be.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi", "citations": []}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "So.", "signature": ""},
                        {"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}},
                    ],
                },
                {"role": "user", "content": "and?"},
            ],
            "stop_sequences": ["x"],
            "metadata": {"user_id": "u"},
        },
    ),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/completions/render", {"prompt": ["hi", [5, 6]]}),
    ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/generate", {"inputs": "hi"}),
    ("/", {"inputs": "hi", "stream": False, "parameters": {"watermark": False, "truncate": 1}}),
    (
        "/generate",
        {
            "inputs": "hi you",
            "parameters": {"details": True, "decoder_input_details": True, "top_n_tokens": 2},
        },
    ),
    ("/tokenize", {"inputs": "hi"}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/v1/models", None),
    ("/", None),
    ("/version", None),
    ("/load", None),
    ("/health", None),
    ("/debug/kv", None),
]


@pytest.mark.parametrize(("path", "body"), ANSWERS)
def test_bodies_and_answers_fit(path: str, body: Any) -> None:
    status, answer, schema = _ask(path, body)
    assert status == 200, answer
    operation = schema["paths"][path]["get" if body is None else "post"]
    if body is not None:
        part = operation["requestBody"]["content"]["application/json"]["schema"]
        values = body | ({"model": "m"} if "/v1" in path else {})
        _validator(schema, part).validate(values)
        assert not _validator(schema, part).is_valid(values | {"unknown": 1})
    part = operation["responses"]["200"]["content"]["application/json"]["schema"]
    _validator(schema, part).validate(answer)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi", "stop": 5}),
        ("/v1/completions", {"prompt": {"a": 1}}),
        ("/v1/completions", {"prompt": [["a"]]}),
        ("/v1/completions", {"prompt": "hi", "suffix": 5}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": []}]}),
        ("/v1/chat/completions", {"messages": [], "store": False}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "store": True},
        ),
        ("/v1/responses", {"input": 5}),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": 5}], "max_tokens": 9}),
        (
            "/v1/messages/count_tokens",
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        ),
        ("/generate", {"inputs": "hi", "parameters": {"top_p": 0}}),
        ("/detokenize", {"tokens": ["a"]}),
    ],
)
def test_what_does_not_fit_is_refused(path: str, body: Any) -> None:
    status, answer, schema = _ask(path, body)
    assert status == 400
    operation = schema["paths"][path]["post"]
    part = operation["requestBody"]["content"]["application/json"]["schema"]
    assert not _validator(schema, part).is_valid(body | ({"model": "m"} if "/v1" in path else {}))
    part = operation["responses"]["400"]["content"]["application/json"]["schema"]
    _validator(schema, part).validate(answer)


def test_every_reference_leads_somewhere() -> None:
    _, _, schema = _ask("/version")
    names = {text.split('"')[0] for text in json.dumps(schema).split("#/components/schemas/")[1:]}
    assert names == set(schema["components"]["schemas"])
    assert "$defs" not in json.dumps(schema)


def test_every_name_in_a_path_is_a_parameter() -> None:
    _, _, schema = _ask("/version")
    for path, methods in schema["paths"].items():
        for described in methods.values():
            parameters = described.get("parameters", ())
            names = {each["name"] for each in parameters if each["in"] == "path"}
            assert names == set(re.findall(r"\{(\w+)\}", path)), path


def test_a_path_that_takes_text_says_that_it_may_be_refused() -> None:
    """Control characters in a model's name, or in any other."""
    status, answer, schema = _ask("/v1/models/a%0Ab")
    assert status == 400 and answer["error"]["code"] == "invalid_path"
    taking = [methods for path, methods in schema["paths"].items() if "{" in path]
    assert taking
    for methods in taking:
        assert all("400" in operation["responses"] for operation in methods.values()), methods


def test_keys_are_in_the_schema_where_they_are_needed(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"alice {'a' * 32} admin\n")
    path.chmod(0o600)

    async def scenario() -> Any:
        async with frontend(says([5, EOS]), api_key_file=str(path)) as setup:
            return setup.app  # the gate is in front: the schema is asked of the routes

    app = asyncio.run(scenario())
    while not hasattr(app, "openapi"):
        app = app._app
    schema = app.openapi()
    assert schema["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for route, methods in schema["paths"].items():
        for operation in methods.values():
            is_open = route in ("/livez", "/readyz", "/health", "/dashboard")
            assert ("security" in operation) == ("401" in operation["responses"]) != is_open


def test_targets_are_headers_of_what_is_computed() -> None:
    _, _, schema = _ask("/version")
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            headers = [p["name"] for p in operation.get("parameters", []) if p["in"] == "header"]
            generates = (
                path.endswith("completions")
                or "generate" in path
                or path in ("/v1/messages", "/v1/responses", "/v1/embeddings")
                or path.endswith(("/rerank", "/score"))
                or (method, path) == ("post", "/")
            )
            expected = [*TARGET_HEADERS, OBJECTIVE_HEADER] if generates else []
            assert headers == expected, path


def test_every_route_is_called_stable_or_experimental() -> None:
    section = (
        (Path(lightserve.__file__).parents[1] / "docs" / "stable.md")
        .read_text()
        .partition("## Routes\n")[2]
    )
    stable, _, experimental = section.partition("\n## ")[0].partition("**Experimental**")
    names = [re.findall(r"`([A-Z]+ /[^`]*)`", text) for text in (stable, experimental)]
    _, _, schema = _ask("/livez")
    paths = schema["paths"].items()
    routes = [f"{method.upper()} {path}" for path, methods in paths for method in methods]
    assert sorted(names[0] + names[1]) == sorted(routes)
