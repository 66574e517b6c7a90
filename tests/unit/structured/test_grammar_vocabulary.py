"""What llguidance is told of the vocabularies of the families that are served."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher
from support.fake_router import frontend, says
from support.tokenizers_made import write_byte_level, write_metaspace, write_sentencepiece

from lightserve.bundled import BUNDLED_MODEL_NAME
from lightserve.errors import GrammarError
from lightserve.messages.common import GrammarConstraint, JsonSchemaConstraint, RegexConstraint
from lightserve.structured import (
    MAX_GRAMMAR_BYTES,
    MAX_REGEX_BYTES,
    MAX_SCHEMA_BYTES,
    byte_vocabulary,
    closed,
    compile_matcher,
    model_vocabulary,
)
from lightserve.tokenization.tokenizer import Tokenizer

PADDING = 7
"""Ids of the model that the tokenizer does not know."""
WRITERS = [write_sentencepiece, write_byte_level, write_metaspace]


def allowed(matcher: LLMatcher) -> list[int]:
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return [int(i) for i in np.unpackbits(mask, bitorder="little").nonzero()[0]]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("text", ["hello the hello", "hello", " a", "oleh"])
def test_every_way_through_a_grammar_spells_the_text(
    write: Callable[[Path], Path], text: str, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(write(tmp_path))
    vocab_size = max(tokenizer.largest_ids.values()) + 1 + PADDING
    vocabulary = model_vocabulary(tokenizer, vocab_size)
    assert vocabulary.vocab_size == vocab_size
    for first_choice in (0, -1):  # both ends of what is allowed, all the way
        matcher = compile_matcher(RegexConstraint(pattern=text), vocabulary)
        data = b""
        for _ in range(len(text.encode()) + 1):
            token_ids = allowed(matcher)
            assert token_ids and max(token_ids) < vocab_size - PADDING
            is_end = data == text.encode()
            assert (set(token_ids) == set(tokenizer.eos_token_ids)) is is_end
            if is_end:
                break
            token_id = token_ids[first_choice]
            assert not tokenizer.is_special(token_id)
            assert matcher.consume_token(token_id)
            data += tokenizer.bytes_of(token_id)
        assert data == text.encode()


@pytest.mark.parametrize("write", WRITERS[:2])
def test_single_bytes_spell_any_character(write: Callable[[Path], Path], tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path))
    vocab_size = max(tokenizer.largest_ids.values()) + 1
    vocabulary = model_vocabulary(tokenizer, vocab_size)
    matcher = compile_matcher(GrammarConstraint(grammar='start: "☃" | "♥"'), vocabulary)
    data = b""
    while (token_ids := allowed(matcher)) and token_ids[-1] not in tokenizer.eos_token_ids:
        data += tokenizer.bytes_of(token_ids[-1])
        assert matcher.consume_token(token_ids[-1])
    assert data.decode() in "☃♥"


@pytest.mark.parametrize(
    ("limit", "make"),
    [
        (MAX_SCHEMA_BYTES, lambda n: JsonSchemaConstraint(schema='{"const":"%s"}' % ("x" * n))),
        (MAX_REGEX_BYTES, lambda n: RegexConstraint(pattern="x" * (n + 12))),
        (MAX_GRAMMAR_BYTES, lambda n: GrammarConstraint(grammar='start: "a"#' + "x" * (n + 1))),
    ],
)
def test_limits_of_size(limit: int, make: Callable[[int], JsonSchemaConstraint]) -> None:
    vocabulary = byte_vocabulary()
    compile_matcher(make(limit - 12), vocabulary)
    with pytest.raises(GrammarError, match=f"at most {limit} bytes long, got {limit + 1}"):
        compile_matcher(make(limit - 11), vocabulary)


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ('{"a":1}', True),
        ('{ "a": 1 }', True),
        ('{\n    "a": 1\n}', True),
        ('{\r\n\t"a" : 1\r\n}', True),
        ('{  "a": 1}', False),
        ("{\n" + " " * 17 + '"a": 1}', False),
        ('\n{"a":1}', False),
    ],
)
def test_blanks_in_json_are_bounded(text: str, is_valid: bool) -> None:
    schema = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
    matcher = compile_matcher(JsonSchemaConstraint(schema=schema), byte_vocabulary())
    data = list(text.encode())
    assert (matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()) is is_valid


# --closed-schemas: objects that say nothing of additionalProperties have no others.

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
