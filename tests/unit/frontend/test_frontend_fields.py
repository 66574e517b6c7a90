"""Every field of every route: its limits, wrong types, and that it changes what is submitted."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from support.fake_router import Setup, frontend, says

import lightserve
from lightserve.bundled import BUNDLED_MODEL_DIR, BUNDLED_MODEL_NAME
from lightserve.errors import InvalidRequest
from lightserve.frontend.openai.chat import ChatRequest
from lightserve.frontend.openai.fields import (
    CHAT_NO_EFFECT,
    COMPLETION_NO_EFFECT,
    MESSAGE_NO_EFFECT,
)
from lightserve.messages.frontend_router import Submit
from lightserve.messages.images import MAX_PIXEL_BYTES, Image
from lightserve.models.config import load_model_config

VOCAB_SIZE = load_model_config(BUNDLED_MODEL_DIR).vocab_size
CONTEXT = 100
SLOTS = 80

COMPLETION: dict[str, Any] = {"model": BUNDLED_MODEL_NAME, "prompt": [5, 6, 7]}
CHAT: dict[str, Any] = {
    "model": BUNDLED_MODEL_NAME,
    "messages": [{"role": "user", "content": "hi"}],
}
GENERATE: dict[str, Any] = {"inputs": "hi", "parameters": {}}
BODIES = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT, "/generate": GENERATE}

# Per field: accepted values, refused values. Absent from a list: not this field's business.
WRONG_TYPES: list[Any] = [True, "1", [1], {}]
NOT_INT: list[Any] = [*WRONG_TYPES, 1.5]
FIELDS: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([0, 0.0, 1, 2.0, None], [-0.001, 2.001, 2**63, 10**400, *WRONG_TYPES]),
    "top_p": ([0.001, 1, 1.0, None], [0, -1, 1.001, 2**63, *WRONG_TYPES]),
    "top_k": ([-1, 0, 1, VOCAB_SIZE, None], [-2, VOCAB_SIZE + 1, 2**63, *NOT_INT]),
    "seed": ([-(2**63), 0, 2**63 - 1, None], [-(2**63) - 1, 2**63, *NOT_INT]),
    "max_tokens": ([1, 40, None], [0, -1, SLOTS, 2**31, 2**63, *NOT_INT]),
    "max_completion_tokens": ([1, 40, None], [0, -1, SLOTS, 2**63, *NOT_INT]),
    "max_new_tokens": ([1, 40, None], [0, -1, SLOTS, 2**63, *NOT_INT]),
    **dict.fromkeys(
        ["frequency_penalty", "presence_penalty"],
        ([-2, -2.0, 0, 2, None], [-2.001, 2.001, 2**63, *WRONG_TYPES]),
    ),
    "repetition_penalty": (
        [0.01, 1, 10, None],
        [0, -1, 0.0099, 1e-300, 10.001, 2**63, *WRONG_TYPES],
    ),
    "min_p": ([0, 0.5, 1, None], [-0.001, 1.001, 2**63, *WRONG_TYPES]),
    "min_tokens": ([0, 1, 8, None], [-1, SLOTS, 2**63, *NOT_INT]),
    "n": ([1, 16, None], [0, -1, 17, 2**63, *NOT_INT]),
    "best_of": ([1, None], [0, 2, 17, 2**63, *NOT_INT]),
    "top_n_tokens": ([0, 1, 20, None], [-1, 21, 2**63, *NOT_INT]),
    "logit_bias": (
        [{}, {"0": -100}, {"5": 100.0}, {str(i): 1 for i in range(512)}, None],
        [
            *[{"5": -100.001}, {"5": 100.001}, {"5": None}, {"5": True}, {"5": "1"}],
            *[{str(VOCAB_SIZE): 1}, {"-1": 1}, {"": 1}, {"a": 1}, {"1.0": 1}, {"\u0665": 1}],
            *[{"9" * 5000: 1}, {str(i): 1 for i in range(1025)}, 1, True, [], "x"],
        ],
    ),
    "allowed_token_ids": (
        [[5], [5.0], [0, VOCAB_SIZE - 1], [5, 5], None],
        [[], [-1], [VOCAB_SIZE], [2**63], [True], [1.5], ["5"], [None], 5, "5", True, {}],
    ),
    "bad_words": (
        [["x"], [" é x"], ["xyz"] * 64, [], None],
        [["x"] * 65, [""], [" "], ["x" * 129], ["\ud800"], [1], [None], "x", True, {}],
    ),
    "stop_token_ids": (
        [[], [5], [5, 6.0], [0, VOCAB_SIZE - 1], [5] * 64, None],
        [[5] * 65, [-1], [VOCAB_SIZE], [2**63], [True], [1.5], ["5"], [None], 5, "5", True, {}],
    ),
    "stop": (
        ["x", ["x"], ["x" * 256] * 4, [], None],
        ["", [""], ["x"] * 5, "x" * 257, ["x" * 257], "\ud800", [1], [None], 1, True, {}],
    ),
    "ignore_eos": ([True, False, None], [0, 1, "true", [], {}]),
    "echo": ([True, False, None], [0, 1, "true", [], {}]),
    "return_full_text": ([True, False, None], [0, 1, "true", [], {}]),
    "include_stop_str_in_output": ([False, None], [True, 0, 1, "true", [], {}]),
    "decoder_input_details": ([False, None], [True, 0, 1, "true", [], {}]),
    "service_tier": (
        ["auto", "default", "priority", "flex", None],
        ["", "scale", "Flex", 1, True, [], {}],
    ),
    "metadata": (
        [{}, {"k" * 64: "v" * 512}, {str(i): "" for i in range(16)}, None],
        [
            *[{"k" * 65: "v"}, {"k": "v" * 513}, {str(i): "" for i in range(17)}],
            *[{"k": 1}, {"k": None}, 1, "x", True, []],
        ],
    ),
    "stream": ([False, None], [0, 1, "true", [], {}]),
    "do_sample": ([True, False, None], [0, 1, "true", [], {}]),
    "details": ([True, False, None], [0, 1, "true", [], {}]),
    "stream_options": ([None], [{}, {"include_usage": True}, 1, "x", [], True]),
    **dict.fromkeys(
        ["user", "safety_identifier", "prompt_cache_key"],
        (["", "x", "é" * 512, None], ["x" * 513, "\ud800", 1, True, [], {}]),
    ),
    "model": ([BUNDLED_MODEL_NAME], [None, 1, True, [], {}]),
    "prompt": (
        [
            *["x", [5], [5.0, 6], ["x"], [[5, 6.0]], [VOCAB_SIZE - 1], " ", "\u202e\u0301👩‍👩‍👧"],
            *["<|bos|><|eos|>", ["a", "b"], [[1], [2]], ["a", [5]], ["a"] * 64],
        ],
        [
            *[
                "",
                [],
                [[]],
                [""],
                [-1],
                [VOCAB_SIZE],
                [2**31],
                [2**63],
                [True],
                [1.5],
                [[5, 1.5]],
                [None],
            ],
            *[None, 1, True, {}, [1, "a"], ["a"] * 65, ["a", ""], ["a", []]],
            *["\ud800", [5] * CONTEXT, "x" * 5000],
        ],
    ),
    "inputs": (["x", " ", "é"], ["", None, 1, True, [], ["x"], {}, "\ud800", "x" * 5000]),
    "parameters": ([{}, None], [[], 1, "x", {"nope": 1}]),
    "messages": (
        [
            [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
            [{"role": "user", "content": [{"type": "text", "text": "u"}]}],
            [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}],
        ],
        [
            *[None, 1, True, "x", {}, [], [1], [None], [{}]],
            [{"role": "user"}],
            [{"content": "x"}],
            [{"role": "tool", "content": "x"}],
            [{"role": None, "content": "x"}],
            [{"role": "user", "content": None}],
            [{"role": "user", "content": 1}],
            [{"role": "user", "content": []}],
            [{"role": "user", "content": ["x"]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            [{"role": "user", "content": [{"type": "text", "text": 1}]}],
            [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}],
            [{"role": "user", "content": [{"type": {}, "text": "x"}]}],
            [{"role": "user", "content": "\ud800"}],
            [{"role": "user", "content": "x" * 5000}],
            [{"role": "user", "content": "x", "colour": "y"}],
            [{"role": "user", "content": "x"}] * 2049,
        ],
    ),
}
COMMON = ["temperature", "top_p", "top_k", "seed"]
PENALTIES = ["frequency_penalty", "repetition_penalty"]
OPENAI = [
    *[*PENALTIES, "presence_penalty", "min_p", "min_tokens", "n", "logit_bias"],
    *["allowed_token_ids", "bad_words", "stop_token_ids", "stop", "ignore_eos"],
    *["include_stop_str_in_output", "service_tier", "metadata"],
    *[*COMMON, "max_tokens", "stream", "stream_options", "model"],
    *["user", "safety_identifier", "prompt_cache_key"],
]
ROUTE_FIELDS = {
    "/v1/completions": [*OPENAI, "prompt", "echo", "best_of"],
    "/v1/chat/completions": [*OPENAI, "max_completion_tokens", "messages"],
    "/generate": [
        *[*COMMON, *PENALTIES, "max_new_tokens", "do_sample", "details", "inputs", "parameters"],
        *["top_n_tokens", "return_full_text", "decoder_input_details"],
    ],
}
CASES = [(path, field) for path, fields in ROUTE_FIELDS.items() for field in fields]


def _with(path: str, field: str, value: Any) -> dict[str, Any]:
    body = BODIES[path]
    if path == "/generate" and field not in ("inputs", "parameters"):
        # TGI's own temperatures are the same as everywhere; all of them live in `parameters`.
        return {**body, "parameters": {field: value}}
    return {**body, field: value}


def _assert_error(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    for internal in ("Traceback", "pydantic", "Error(", "0x"):
        assert internal not in error["message"]
    return error


@pytest.mark.parametrize(("path", "field"), CASES)
def test_limits_of_each_field(path: str, field: str) -> None:
    accepted, refused = FIELDS[field]

    async def scenario() -> None:
        async with frontend(says([5, 2]), max_model_len=CONTEXT, num_kv_slots=SLOTS) as setup:
            for value in accepted:
                response = await setup.post(path, _with(path, field, value))
                assert response.status_code == 200, (value, response.text)
            num_submitted = len(setup.router.submits)
            for value in refused:
                error = _assert_error(await setup.post(path, _with(path, field, value)))
                assert error["param"] is not None, value
                assert field in error["param"], (value, error)
                assert field in error["message"], (value, error)
            assert len(setup.router.submits) == num_submitted

    asyncio.run(scenario())


@pytest.mark.parametrize(("path", "field"), [c for c in CASES if c[1] in COMMON])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000])
def test_numbers_that_are_none(path: str, field: str, number: str) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            body = json.dumps(_with(path, field, "@")).replace('"@"', number)
            _assert_error(await setup.post(path, body.encode()))
            assert not setup.router.submits

    asyncio.run(scenario())


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("field", ["x", "slo_ms", "timeout_s", "no_effect", "terms"])
def test_every_other_field_is_named(path: str, field: str) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            error = _assert_error(await setup.post(path, {**BODIES[path], field: 1}))
            assert error["param"] == field
            assert error["code"] == "unknown_parameter"

    asyncio.run(scenario())


NO_EFFECT = {"/v1/completions": COMPLETION_NO_EFFECT, "/v1/chat/completions": CHAT_NO_EFFECT}
OTHER_VALUES: list[Any] = [0, 1, 2, 1.0, 1.5, True, False, "", "none", [], ["a"], {}, {"a": 1}]


def _other_values(accepted: tuple[Any, ...]) -> list[Any]:
    known = {json.dumps(value) for value in accepted}
    return [value for value in OTHER_VALUES if json.dumps(value) not in known]


@pytest.mark.parametrize(
    ("path", "field"), [(path, field) for path, fields in NO_EFFECT.items() for field in fields]
)
def test_values_that_change_nothing_are_all_that_is_accepted(path: str, field: str) -> None:
    accepted = NO_EFFECT[path][field]

    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            for value in (*accepted, None):
                await _submit(setup, path, {field: value})
            refused = _other_values(accepted)
            assert len(refused) > 8
            for value in refused:
                error = _assert_error(await setup.post(path, {**BODIES[path], field: value}))
                assert (error["param"], error["code"]) == (field, "unsupported_value"), value
                assert error["message"].startswith(f"{field} is not supported yet except as ")

    asyncio.run(scenario())


@pytest.mark.parametrize("field", MESSAGE_NO_EFFECT)
def test_messages_take_back_what_answers_hold(field: str) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            plain = {"role": "assistant", "content": "a"}
            accepted = MESSAGE_NO_EFFECT[field]
            accepted = tuple(OTHER_VALUES) if accepted is None else accepted  # None: any
            for value in (*accepted, None):
                messages = [*CHAT["messages"], {**plain, field: value}]
                await _submit(setup, "/v1/chat/completions", {"messages": messages})
            for value in _other_values(accepted):
                body = {**CHAT, "messages": [*CHAT["messages"], {**plain, field: value}]}
                error = _assert_error(await setup.post("/v1/chat/completions", body))
                assert error["param"] == f"messages[1].{field}"

    asyncio.run(scenario())


# What common clients send, written down apart from the tables.
SENT: dict[str, Any] = {
    "n": 1,
    "user": "u",
    "stop": None,
    "logit_bias": {},
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "logprobs": None,
}
SENT_BY_ROUTE = {
    "/v1/completions": SENT | {"echo": False, "best_of": 1},
    "/v1/chat/completions": SENT
    | {
        "store": False,
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "tools": [],
        "logprobs": False,
    },
}


@pytest.mark.parametrize("path", SENT_BY_ROUTE)
def test_what_common_clients_send_changes_nothing(path: str) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            plain = await _submit(setup, path, {"seed": 1, "user": "u"})
            sent = await _submit(setup, path, {"seed": 1, **SENT_BY_ROUTE[path]})
            same = {"request_id": 0, "age_s": 0.0, "names": ()}
            assert msgspec.structs.replace(sent, **same) == msgspec.structs.replace(plain, **same)

    asyncio.run(scenario())


def test_half_a_surrogate_pair_is_no_key() -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            for path in NO_EFFECT:
                body = {**BODIES[path], "user": "\ud800"}
                error = _assert_error(await setup.post(path, body))
                assert error["message"].startswith("user must be Unicode text")

    asyncio.run(scenario())


@pytest.mark.parametrize("path", NO_EFFECT)
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ""),
        ({"user": "a", "safety_identifier": "b", "prompt_cache_key": "c"}, "a"),
        ({"user": None, "safety_identifier": "b", "prompt_cache_key": "c"}, "b"),
        ({"user": "", "prompt_cache_key": "c"}, "c"),
    ],
)
def test_one_prediction_key(path: str, keys: dict[str, Any], expected: str) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            assert (await _submit(setup, path, keys)).prediction_key == expected

    asyncio.run(scenario())


@pytest.mark.parametrize("path", BODIES)
def test_required_fields_are_named(path: str) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            for field in BODIES[path].keys() - {"parameters"}:
                body = {key: value for key, value in BODIES[path].items() if key != field}
                error = _assert_error(await setup.post(path, body))
                assert (error["param"], error["code"]) == (field, "missing_required_parameter")

    asyncio.run(scenario())


BAD_BODIES: dict[str, tuple[bytes, int]] = {
    "empty": (b"", 400),
    "truncated": (b'{"model": "x', 400),
    "not-an-object": (b'"text"', 400),
    "null": (b"null", 400),
    "invalid-utf8": (b'{"model": "\xff"}', 400),
    "utf16": ('{"model": "x"}'.encode("utf-16"), 400),
    "deep": (b"[" * 100_000, 400),
    "deep-object": (b'{"a":' * 100_000, 400),
    "trailing": (b"{} {}", 400),
    "nul": (b"\x00", 400),
    "too-large": (b" " * (4 * 1024 * 1024 + 1), 413),
}


@pytest.mark.parametrize(("body", "status"), BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_bodies_that_are_not_requests(body: bytes, status: int) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            for path in BODIES:
                _assert_error(await setup.post(path, body), status)
            assert (await setup.post("/v1/completions", COMPLETION)).status_code == 200

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "twice"),
    [
        ("/v1/completions", '"prompt": [5]'),
        ("/v1/chat/completions", '"role": "user"'),
        ("/generate", '"inputs": "hi"'),
    ],
)
def test_a_key_given_twice_is_refused(path: str, twice: str) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            body = json.dumps(
                {**BODIES[path], "prompt": [5]} if "prompt" in twice else BODIES[path]
            )
            assert twice in body
            assert (await setup.post(path, body.encode())).status_code == 200
            doubled = body.replace(twice, f"{twice}, {twice}")
            assert "twice" in _assert_error(await setup.post(path, doubled.encode()))["message"]

    asyncio.run(scenario())


def test_a_body_without_a_length_is_limited_too() -> None:
    async def scenario() -> None:
        body = json.dumps(BODIES["/v1/completions"]).encode()

        async def chunks(num_bytes: int) -> Any:
            yield body
            yield b" " * (num_bytes - len(body))

        async with frontend(says([5, 2]), max_body_bytes=100_000) as setup:
            for num_bytes in (100_001, 200_000):
                answer = await setup.http.post("/v1/completions", content=chunks(num_bytes))
                _assert_error(answer, 413)
            whole = await setup.http.post("/v1/completions", content=chunks(100_000))
            assert whole.status_code == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["min_p", "typical_p", "presence_penalty"])
def test_a_sampling_parameter_is_declared_in_one_place(name: str) -> None:
    """Others that name it compute it, or translate the names of GGUF files."""
    package = Path(lightserve.__file__).parent
    naming = [path.relative_to(package) for path in package.rglob("*.py") if name in _words(path)]
    outside = {str(path) for path in naming if path.parts[0] not in ("kernels", "worker")}
    assert outside - {"models/gguf_model.py"} == {"types.py"}


def _words(path: Path) -> set[str]:
    return set(re.findall(r"\w+", path.read_text()))


async def _submit(setup: Setup, path: str, changes: dict[str, Any]) -> Submit:
    response = await setup.post(path, {**BODIES[path], **changes})
    assert response.status_code == 200, response.text
    return setup.router.submits[-1]


def test_openai_fields_change_what_is_submitted() -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            for path in ("/v1/completions", "/v1/chat/completions"):
                submit = await _submit(
                    setup, path, {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "seed": -4}
                )
                sampling = submit.sampling
                assert (sampling.temperature, sampling.top_p) == (0.5, 0.25)
                assert (sampling.top_k, sampling.seed) == (3, -4)
                assert (await _submit(setup, path, {"max_tokens": 7})).max_tokens == 7
                assert (await _submit(setup, path, {"top_k": -1})).sampling.top_k == 0
            submit = await _submit(setup, "/v1/chat/completions", {"max_completion_tokens": 9})
            assert submit.max_tokens == 9

    asyncio.run(scenario())


SAMPLING: list[tuple[str, Any, Any]] = [
    ("min_p", 0.25, 0.25),
    ("frequency_penalty", -1.5, -1.5),
    ("presence_penalty", 0.5, 0.5),
    ("repetition_penalty", 1.25, 1.25),
    ("logit_bias", {"5": -3, "7": 2.5}, ((5, -3.0), (7, 2.5))),
    ("allowed_token_ids", [5, 9, 5], (5, 9)),
    ("min_tokens", 3, 3),
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(("field", "value", "expected"), SAMPLING)
def test_each_sampling_field_is_submitted(path: str, field: str, value: Any, expected: Any) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            plain = await _submit(setup, path, {"seed": 1})
            told = await _submit(setup, path, {"seed": 1, field: value})
            assert getattr(plain.sampling, field) != expected
            assert told.sampling == msgspec.structs.replace(plain.sampling, **{field: expected})

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_ends_an_output_is_submitted(path: str) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            eos = list(setup.service.model.tokenizer.eos_token_ids)
            for changes, ids, needs in [
                ({}, eos, False),
                ({"ignore_eos": True}, [], False),
                ({"stop_token_ids": [9, 8, 9]}, [*eos, 9, 8], False),
                ({"stop_token_ids": [9], "ignore_eos": True}, [9], False),
                ({"stop": "x"}, eos, True),
                ({"stop": []}, eos, False),
            ]:
                submit = await _submit(setup, path, changes)
                assert (submit.eos_token_ids, submit.needs_acknowledgement) == (ids, needs), changes

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_integers_may_have_a_point(path: str) -> None:
    """JSON Schema, as which the fields are described, knows 2.0 as an integer."""
    fields = {"max_tokens": 4, "top_k": 3, "min_tokens": 2, "seed": -7, "priority": 1, "n": 1}

    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            told = await _submit(setup, path, fields)
            pointed = {name: float(value) for name, value in fields.items()}
            also = await _submit(setup, path, pointed)
            assert (also.sampling, also.max_tokens) == (told.sampling, told.max_tokens)
            assert type(also.max_tokens) is int and also.priority == told.priority == 1
            for name, value in fields.items():
                body = {**BODIES[path], name: value + 0.5}
                assert _assert_error(await setup.post(path, body))["param"] == name

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_some_token_must_be_left_to_draw(path: str) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            (eos,) = setup.service.model.tokenizer.eos_token_ids
            allowed: dict[str, Any] = {"allowed_token_ids": [eos, 9], "stop_token_ids": [8, 9]}
            for changes in ({}, {"min_tokens": 1, "allowed_token_ids": [eos, 9, 5]}):
                await _submit(setup, path, {**allowed, **changes})
            await _submit(setup, path, {**allowed, "min_tokens": 1, "stop_token_ids": [8]})
            for changes in (allowed, {"allowed_token_ids": [eos]}):
                body = {**BODIES[path], **changes, "min_tokens": 1}
                response = await setup.post(path, body)
                assert response.status_code == 400
                assert response.json()["error"]["param"] == "allowed_token_ids"
                assert "min_tokens is 1" in response.json()["error"]["message"]

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_tier_is_a_class_and_is_stated(path: str) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            for tier, used, request_class in [
                (None, "default", "rt"),
                ("auto", "default", "rt"),
                ("default", "default", "rt"),
                ("priority", "priority", "rt"),
                ("flex", "flex", "be"),
            ]:
                answer = (await setup.post(path, {**BODIES[path], "service_tier": tier})).json()
                assert answer["service_tier"] == used
                assert setup.router.submits[-1].request_class == request_class

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_choices_are_submits_that_differ_in_their_number(path: str) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            changes: dict[str, Any] = {"n": 3, "seed": 4}
            if path == "/v1/completions":
                changes["prompt"] = [[5, 6], [7]]
            response = await setup.post(path, {**BODIES[path], **changes})
            choices = response.json()["choices"]
            submits = setup.router.submits
            num_prompts = len(submits) // 3
            assert [choice["index"] for choice in choices] == list(range(3 * num_prompts))
            numbers = [submit.sampling.choice for submit in submits]
            assert numbers == [0, 1, 2] * num_prompts
            assert {submit.sampling.seed for submit in submits} == {4}
            if path == "/v1/completions":
                prompts = [setup.router.prompt_of(number) for number in range(6)]
                assert prompts == [[5, 6]] * 3 + [[7]] * 3
                assert response.json()["usage"]["prompt_tokens"] == 3
                error = _assert_error(
                    await setup.post(path, {**COMPLETION, "n": 16, "prompt": [[5]] * 9})
                )
                assert error["param"] == "n"

    asyncio.run(scenario())


def test_generate_is_greedy_unless_told_otherwise() -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            for parameters, temperature in [
                ({}, 0.0),
                ({"do_sample": True}, 1.0),
                ({"temperature": 0.5}, 0.5),
                ({"top_k": 3}, 1.0),
                ({"top_p": 0.5}, 1.0),
                ({"seed": 3}, 0.0),
                (None, 0.0),
                ({"do_sample": None, "details": None, "top_k": None}, 0.0),
            ]:
                submit = await _submit(setup, "/generate", {"parameters": parameters})
                assert submit.sampling.temperature == temperature, parameters
                assert submit.max_tokens == 100
            submit = await _submit(setup, "/generate", {"parameters": {"max_new_tokens": 3}})
            assert submit.max_tokens == 3

    asyncio.run(scenario())


def test_seeds_are_random_unless_given() -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            for path in BODIES:
                for _ in range(5):
                    await _submit(setup, path, {})
            seeds = {submit.sampling.seed for submit in setup.router.submits}
            assert len(seeds) == len(setup.router.submits)

    asyncio.run(scenario())


def test_prompts_become_ids() -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            tokenizer = setup.service.model.tokenizer
            bos = tokenizer.special_tokens.bos_token_id
            forms: list[Any] = ["hi there", ["hi there"], [8, 9], [[8, 9]], "<|bos|>hi there"]
            for form in forms:
                await _submit(setup, "/v1/completions", {"prompt": form})
            prompts = [setup.router.prompt_of(number) for number in range(len(forms))]
            assert prompts[0] == prompts[1] == prompts[4]
            assert prompts[0] == tokenizer.encode("hi there", add_special_tokens=True)
            assert prompts[2] == prompts[3] == [8, 9]
            parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
            for content in ("a\nb", parts):
                messages = [{"role": "user", "content": content}]
                await _submit(setup, "/v1/chat/completions", {"messages": messages})
            assert setup.router.prompt_of(-1) == setup.router.prompt_of(-2)
            assert setup.router.prompt_of(-1).count(bos or 0) == 1
            assert setup.router.submits[-1].eos_token_ids == list(tokenizer.eos_token_ids)

    asyncio.run(scenario())


def test_how_many_tokens_by_default() -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2]), max_model_len=CONTEXT, num_kv_slots=SLOTS) as setup:
            assert (await _submit(setup, "/v1/completions", {})).max_tokens == 16
            submit = await _submit(setup, "/v1/chat/completions", {})
            assert submit.max_tokens == SLOTS - len(setup.router.prompt_of(-1))
            # A default is cut to what fits; a wish that does not fit is refused with numbers.
            prompt = [5] * (SLOTS - 4)
            submit = await _submit(setup, "/v1/completions", {"prompt": prompt})
            assert submit.max_tokens == 4
            submit = await _submit(setup, "/v1/completions", {"prompt": prompt, "max_tokens": 4})
            assert submit.max_tokens == 4
            body = {**COMPLETION, "prompt": prompt, "max_tokens": 5}
            error = _assert_error(await setup.post("/v1/completions", body))
            assert error["code"] == "context_length_exceeded"
            assert f"This model's maximum context length is {SLOTS} tokens" in error["message"]
            for number in (SLOTS - 4, 5):
                assert str(number) in error["message"]
            too_long = {**COMPLETION, "prompt": [5] * CONTEXT}
            error = _assert_error(await setup.post("/v1/completions", too_long))
            assert f"This model's maximum context length is {CONTEXT} tokens" in error["message"]

    asyncio.run(scenario())


def test_text_that_cannot_fit_is_refused_before_tokenising(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2]), max_model_len=CONTEXT) as setup:
            limit = CONTEXT * setup.service.model.tokenizer.longest_piece_bytes

            def must_not_run(*_: Any, **__: Any) -> list[int]:
                raise AssertionError("tokenised")

            monkeypatch.setattr(setup.service.model.tokenizer, "encode", must_not_run)
            body = {**COMPLETION, "prompt": "x" * (limit + 1)}
            error = _assert_error(await setup.post("/v1/completions", body))
            assert f"This model's maximum context length is {CONTEXT} tokens" in error["message"]
            assert str(limit) in error["message"]
            assert str(limit + 1) in error["message"]

    asyncio.run(scenario())


def test_both_names_of_the_token_limit_are_refused() -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            body = {**CHAT, "max_tokens": 3, "max_completion_tokens": 3}
            assert _assert_error(await setup.post("/v1/chat/completions", body))["param"]

    asyncio.run(scenario())


def test_choices_multiply_images() -> None:
    """Each choice is a request of its own, which a message has to hold."""
    image = Image(0, 1, 4000, 1000, b"", b"")
    most = MAX_PIXEL_BYTES // image.num_bytes
    ChatRequest(**{**CHAT, "n": most})._check_pixels([image])
    ChatRequest(**CHAT)._check_pixels([image] * most)
    complaint = f"n times the images must take at most {MAX_PIXEL_BYTES} bytes, .*got 60000000"
    with pytest.raises(InvalidRequest, match=complaint) as caught:
        ChatRequest(**{**CHAT, "n": most + 1})._check_pixels([image])
    assert caught.value.param == "n"


def test_a_wrong_model_is_not_found() -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            for path in ("/v1/completions", "/v1/chat/completions"):
                error = _assert_error(await setup.post(path, {**BODIES[path], "model": "m"}), 404)
                assert (error["param"], error["code"]) == ("model", "model_not_found")
            _assert_error(await setup.http.get("/v1/models/m"), 404)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/none", 404),
        ("GET", "/docs", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/livez", 405),
    ],
)
def test_other_paths_and_methods(method: str, path: str, status: int) -> None:
    async def scenario() -> None:
        async with frontend() as setup:
            _assert_error(await setup.http.request(method, path), status)

    asyncio.run(scenario())
