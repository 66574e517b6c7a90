"""--closed-schemas: objects that say nothing of additionalProperties have no others."""

from __future__ import annotations

import asyncio
import copy
import json
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
from support.fake_router import frontend, says

from lightserve.bundled import BUNDLED_MODEL_NAME
from lightserve.structured import byte_vocabulary, closed, compile_matcher

INT = {"type": "integer"}
A, B = {"properties": {"a": INT}}, {"properties": {"b": INT}}
REF = {"$ref": "#/$defs/x"}
MORE = {"a": 1, "b": 2}
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "an object": (A, [{}, {"a": 1}], [MORE]),
    "one without any property": ({"properties": {}}, [{}], [MORE]),
    "inside a property": ({"properties": {"o": A}}, [{"o": {"a": 1}}], [{"o": MORE}]),
    "inside of lists": ({"items": A}, [[{"a": 1}]], [[MORE]]),
    "places of lists": ({"prefixItems": [INT, A]}, [[1, {"a": 1}]], [[1, MORE]]),
    "values of a map": ({"additionalProperties": A}, [{"k": {"a": 1}}], [{"k": MORE}]),
    "alternatives": ({"anyOf": [A, {"type": "null"}]}, [{"a": 1}, None], [MORE]),
    "a reference": ({**REF, "$defs": {"x": A}}, [{"a": 1}], [MORE]),
    "a name with signs": (
        {"$ref": "#/$defs/x~1~0y", "$defs": {"x/~y": A}},
        [{"a": 1}],
        [MORE],
    ),
    "a tree": (
        {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"a": INT, "next": REF}}}},
        [{"a": 1, "next": {"a": 2}}],
        [{"next": MORE}],
    ),
    "one part of allOf": ({"allOf": [REF], "$defs": {"x": A}}, [{"a": 1}], [MORE]),
}
OPEN: dict[str, tuple[Any, Any]] = {
    "no properties": ({"type": "object"}, MORE),
    "it says so": ({**A, "additionalProperties": True}, MORE),
    "it says which": ({**A, "patternProperties": {"^b": INT}}, MORE),
    "parts of allOf": ({"allOf": [A, B]}, MORE),
    "alternatives beside properties": ({**A, "anyOf": [B, {"required": ["a"]}]}, MORE),
    "a reference beside properties": ({**A, **REF, "$defs": {"x": B}}, MORE),
    "references in allOf": ({"allOf": [REF, A], "$defs": {"x": B}}, MORE),
    "a reference of a reference": (
        {"allOf": [REF, A], "$defs": {"x": {"$ref": "#/$defs/y"}, "y": B}},
        MORE,
    ),
    "a condition": ({**A, "if": A, "then": B}, MORE),
    "a name that is a keyword's": ({"properties": {"properties": True}}, {"properties": MORE}),
}


@pytest.mark.parametrize("name", CASES)
def test_closed_ones_have_no_other_properties(name: str) -> None:
    schema, good, bad = CASES[name]
    before = copy.deepcopy(schema)
    made = jsonschema.Draft202012Validator(closed(schema))
    assert schema == before
    assert all(made.is_valid(value) for value in good)
    assert not any(made.is_valid(value) for value in bad)
    assert all(jsonschema.Draft202012Validator(schema).is_valid(value) for value in bad)


@pytest.mark.parametrize("name", OPEN)
def test_what_others_decide_too_stays_open(name: str) -> None:
    schema, value = OPEN[name]
    jsonschema.Draft202012Validator(closed(schema)).validate(value)


class Counted(dict[str, Any]):
    """An object that counts how often it is gone through."""

    num_reads = 0

    def items(self) -> Any:
        Counted.num_reads += 1
        return super().items()


def test_each_object_is_read_twice_however_long_the_chains_of_references() -> None:
    names = [str(number) for number in range(300)]
    chain = {after: Counted({"$ref": f"#/$defs/{name}"}) for name, after in pairwise(names)}
    schema = Counted({"allOf": [REF, {"$ref": f"#/$defs/{names[-1]}"}], "$defs": {**chain}})
    schema["$defs"]["0"] = Counted(A)
    Counted.num_reads = 0
    assert closed(schema) == schema  # the first of them stays open, as the last one is shared
    assert Counted.num_reads <= 2 * len(names) + 2


CHAT = {"messages": [{"role": "user", "content": "hi"}]}
NATIVE = {"type": "json", "value": A}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": A}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": A}}
ASKED: dict[str, tuple[str, dict[str, Any], str]] = {
    "response_format": ("/v1/chat/completions", {**CHAT, "response_format": FORMAT}, "{}"),
    "structured_outputs": (
        "/v1/completions",
        {"prompt": "hi", "structured_outputs": {"json": json.dumps(A)}},
        "{}",
    ),
    "grammar": ("/generate", {"inputs": "hi", "parameters": {"grammar": NATIVE}}, "{}"),
    "tools": (
        "/v1/chat/completions",
        {**CHAT, "tools": [TOOL], "tool_choice": "required"},
        '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>',
    ),
}


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("name", ASKED)
def test_every_field_with_a_schema_follows_the_option(name: str, closes: bool) -> None:
    path, fields, text = ASKED[name]

    async def scenario() -> Any:
        flags = {"closed_schemas": closes, "tool_call_parser": "hermes"}
        async with frontend(says([5, 2]), **flags) as setup:
            own = {} if path == "/generate" else {"model": BUNDLED_MODEL_NAME}
            response = await setup.post(path, own | fields)
            assert response.status_code == 200, response.text
            return setup.router.submits[-1].constraint

    matcher = compile_matcher(asyncio.run(scenario()), byte_vocabulary())
    for value, is_good in (({"a": 1}, True), (MORE, not closes)):
        own = matcher.deep_copy()
        data = list(
            (text.format(json.dumps(value)) if "call" in text else json.dumps(value)).encode()
        )
        assert (own.try_consume_tokens(data) == len(data) and own.is_accepting()) is is_good
