"""Fields that ask for structured output: what they become, and what is refused, and how fast."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from support.fake_router import Setup, frontend, says

from lightserve.bundled import BUNDLED_MODEL_NAME
from lightserve.errors import GrammarError
from lightserve.frontend import structured_output
from lightserve.frontend.structured_output import MAX_CHOICES
from lightserve.messages.common import (
    Constraint,
    GrammarConstraint,
    JsonSchemaConstraint,
    RegexConstraint,
)
from lightserve.structured import FORMATS, byte_vocabulary, compile_matcher, lark_of_gbnf, unforced

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": BUNDLED_MODEL_NAME, "prompt": [5, 6]},
    "/v1/chat/completions": {
        "model": BUNDLED_MODEL_NAME,
        "messages": [{"role": "user", "content": "hi"}],
    },
}
OPENAI = list(BODIES)


def schema_format(schema: Any, **others: Any) -> dict[str, Any]:
    named = {"name": "x", "schema": schema, **others}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def outputs(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


GBNF = """# dates
root ::= date ("," date)*
date ::= [0-9]{4} "-" month-name
month-name ::= "jan" | "feb"
"""
TRANSLATED = unforced(lark_of_gbnf(GBNF))
LARK = 'start: "root ::= " /[ab]/'
ALL_GBNF = [outputs(grammar=GBNF), {"ebnf": GBNF}, {"guided_grammar": GBNF}]
ACCEPTED: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "structured_outputs": None}, None),
    (
        {"response_format": {"type": "json_object"}},
        JsonSchemaConstraint(schema='{"type": "object"}'),
    ),
    (schema_format(SCHEMA), JsonSchemaConstraint(schema=json.dumps(SCHEMA))),
    (
        schema_format(SCHEMA, strict=True, description="d"),
        JsonSchemaConstraint(schema=json.dumps(SCHEMA)),
    ),
    (outputs(json=SCHEMA), JsonSchemaConstraint(schema=json.dumps(SCHEMA))),
    (outputs(json='{"type":"null"}'), JsonSchemaConstraint(schema='{"type":"null"}')),
    (outputs(regex="[ab]+"), RegexConstraint(pattern="[ab]+")),
    (outputs(grammar='start: "a" | "b"'), GrammarConstraint(grammar=unforced('start: "a" | "b"'))),
    (
        outputs(choice=["yes", 'n"\n\\o', "é☃"]),
        GrammarConstraint(grammar='start: ONE\nONE: "yes" | "n\\"\\n\\\\o" | "é☃"'),
    ),
    ({"guided_json": SCHEMA}, JsonSchemaConstraint(schema=json.dumps(SCHEMA))),
    ({"guided_json": '{"type":"null"}'}, JsonSchemaConstraint(schema='{"type":"null"}')),
    ({"guided_regex": "[ab]+"}, RegexConstraint(pattern="[ab]+")),
    ({"regex": "[ab]+", "guided_regex": None}, RegexConstraint(pattern="[ab]+")),
    ({"guided_choice": ["a", "b"]}, GrammarConstraint(grammar='start: ONE\nONE: "a" | "b"')),
    ({"guided_grammar": 'start: "a"'}, GrammarConstraint(grammar=unforced('start: "a"'))),
    ({"ebnf": LARK}, GrammarConstraint(grammar=unforced(LARK))),
    *((fields, GrammarConstraint(grammar=TRANSLATED)) for fields in ALL_GBNF),
]


ROUNDED: list[tuple[dict[str, Any], str]] = [
    ({"enum": [1234567890123456789]}, "enum"),
    ({"properties": {"a": {"items": {"maximum": 2**63 + 1}}}}, "maximum"),
    ({"anyOf": [{"exclusiveMinimum": -(2**53)}]}, "exclusiveMinimum"),
    ({"const": {"a": [2**60]}}, "const"),
    ({"multipleOf": 10**100}, "multipleOf"),
]


@pytest.mark.parametrize(("schema", "key"), ROUNDED, ids=str)
def test_integers_that_would_be_rounded_are_refused(schema: dict[str, Any], key: str) -> None:
    text = json.dumps(schema)
    for constraint in (
        JsonSchemaConstraint(schema=text),
        GrammarConstraint(grammar=f"start: %json {text}"),
    ):
        with pytest.raises(
            GrammarError, match=f"an integer under {key} must be from -9007199254740991"
        ):
            compile_matcher(constraint, byte_vocabulary())


def test_integers_that_are_exact_are_enforced() -> None:
    largest = 2**53 - 1
    constraint = JsonSchemaConstraint(schema=json.dumps({"enum": [largest, -largest]}))
    for number, is_valid in ((largest, True), (-largest, True), (largest - 1, False)):
        matcher, data = compile_matcher(constraint, byte_vocabulary()), str(number).encode()
        assert (matcher.validate_tokens([*data]) == len(data)) is is_valid
    names = {"minimum": {"type": "integer"}, "default": {"default": 2**70}}
    compile_matcher(
        JsonSchemaConstraint(schema=json.dumps({"properties": names})), byte_vocabulary()
    )


LONG = "0.1234567890123456789"
DIGITS: list[tuple[str, str, str]] = [
    ('{"enum":[%s]}', "enum", LONG),
    ('{"properties":{"a":{"const":{"b":[1,%s]}}}}', "const", LONG),
    ('{"multipleOf":%s}', "multipleOf", "0.10000000000000000001"),
    ('{"anyOf":[{"minimum":%s}]}', "minimum", "-3.14159265358979323846"),
    ('{"exclusiveMaximum":%s}', "exclusiveMaximum", "9007199254740993.0"),
    ('{"enum":["a",%s]}', "enum", "1e-400"),
    ('{"maximum":%s}', "maximum", "1234567890123456789e-18"),
]


@pytest.mark.parametrize(("schema", "key", "number"), DIGITS)
def test_numbers_that_lose_digits_are_refused(schema: str, key: str, number: str) -> None:
    """By name, from objects, from texts and from tools, whether objects are closed or not."""
    text = schema % number
    chat, user = "/v1/chat/completions", BODIES["/v1/chat/completions"]
    tool = '{"type":"function","function":{"name":"f","parameters":%s}}'
    named = '{"type":"json_schema","json_schema":{"name":"x","schema":%s}}'
    fields = {
        "response_format.json_schema.schema": f'"response_format":{named % text}',
        "structured_outputs.json": f'"structured_outputs":{{"json":{text}}}',
        "guided_json": f'"guided_json":{json.dumps(text)}',
        "guided_grammar": f'"guided_grammar":{json.dumps(f"start: %json {text}")}',
        "tools": f'"tools":[{tool % text}],"tool_choice":"required"',
    }

    async def answer(setup: Setup, field: str) -> Any:
        body = f"{json.dumps(user)[:-1]},{field}}}"
        headers = {"content-type": "application/json"}
        return await setup.http.post(chat, content=body, headers=headers)

    async def scenario(closes: bool) -> None:
        async with frontend(
            says([5, 2]), closed_schemas=closes, tool_call_parser="hermes"
        ) as setup:
            for param, field in fields.items():
                error = (await answer(setup, field)).json()["error"]
                assert error["param"] == param and "float64 keeps" in error["message"], error
                assert f"under {key} must" in error["message"] and number in error["message"]
            # Where nothing is enforced, such numbers are as good as any.
            allowed = f'"tools":[{tool % text}],"temperature":0.69999999999999995559'
            assert (await answer(setup, allowed)).status_code == 200

    for closes in (True, False):
        asyncio.run(scenario(closes))


PRICE = "0.10000000000000000555"


@pytest.mark.parametrize(
    "fields",
    [
        f'"temperature":{PRICE}',
        f'"chat_template_kwargs":null,"top_p":{PRICE},"logit_bias":{{"5":{PRICE}}}',
        f'"tools":[{{"type":"function","function":{{"name":"f","parameters":{{"const":{PRICE}}}}}}}],'
        '"tool_choice":"none"',
    ],
)
def test_a_number_in_another_place_says_nothing_about_a_schema(fields: str) -> None:
    """0.1 is enforced beside one that is read as 0.1 and has more digits, in any order; of a schema
    itself, too, where it enforces nothing.
    """
    schema = f'{{"enum":[0.1],"default":{PRICE}}}'
    named = (
        f'"response_format":{{"type":"json_schema","json_schema":{{"name":"x","schema":{schema}}}}}'
    )
    user = json.dumps(BODIES["/v1/chat/completions"])[:-1]

    async def scenario() -> None:
        async with frontend(says([5, 2]), tool_call_parser="hermes") as setup:
            for body in (f"{user},{fields},{named}}}", f"{user},{named},{fields}}}"):
                response = await setup.http.post(
                    "/v1/chat/completions",
                    content=body,
                    headers={"content-type": "application/json"},
                )
                assert response.status_code == 200, response.text
                constraint = setup.router.submits[-1].constraint
                assert isinstance(constraint, JsonSchemaConstraint)
                matcher = compile_matcher(constraint, byte_vocabulary())
                assert matcher.validate_tokens([*b"0.1"]) == 3

    asyncio.run(scenario())


VALID = {
    "date": "2024-02-29",
    "time": "10:00:00Z",
    "date-time": "2024-02-29T10:00:00Z",
    "duration": "P1D",
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
    "uri": "https://example.com/a",
    "email": "a@example.com",
    "hostname": "example.com",
    "ipv4": "127.0.0.1",
    "ipv6": "2001:db8::1",
}


def fits(constraint: Constraint, value: Any) -> bool:
    data = json.dumps(value, ensure_ascii=False).encode()
    matcher = compile_matcher(constraint, byte_vocabulary())
    return (
        matcher.validate_tokens([*data]) == len(data)
        and matcher.consume_tokens([*data])
        and (matcher.is_accepting())
    )


def test_formats_are_enforced_or_annotations() -> None:
    """Those of `FORMATS` choose, every other one changes nothing, wherever a schema has it."""
    assert VALID.keys() == FORMATS
    for name, text in VALID.items():
        constraint = JsonSchemaConstraint(schema=json.dumps({"type": "string", "format": name}))
        assert fits(constraint, text) and not fits(constraint, "§ no")
    secret = {"type": "string", "format": "password"}
    cases: list[tuple[Any, Any, Any]] = [
        *(({"format": name}, "§ any", None) for name in ("password", "binary", "path", "color")),
        ({"format": "regex", "type": "string", "maxLength": 3}, "abc", "abcd"),
        ({"anyOf": [secret, {"type": "null"}]}, "x", 1),
        ({"items": {"$ref": "#/$defs/s"}, "$defs": {"s": secret}, "type": "array"}, ["x"], [1]),
        ({"type": "object", "properties": {"format": secret}}, {"format": "x"}, {"format": 1}),
        ({"type": "object", "properties": {"const": secret}}, {"const": "x"}, {"const": 1}),
        ({"components": {"a": secret}, "$ref": "#/components/a"}, "x", 1),
        # Values are no schemas.
        ({"const": {"format": "password"}}, {"format": "password"}, {}),
        ({"enum": [{"format": "password"}]}, {"format": "password"}, {}),
        # Of others than strings it says nothing.
        ({"type": "integer", "format": "int64"}, 5, "5"),
    ]
    for schema, good, bad in cases:
        text = json.dumps(schema)
        for constraint in (
            JsonSchemaConstraint(schema=text),
            GrammarConstraint(grammar=f'start: %json {text} | "<" other\nother: %json {text}'),
        ):
            assert fits(constraint, good), schema
            assert bad is None or not fits(constraint, bad), schema


def test_a_format_that_is_an_annotation_is_taken_on_every_route() -> None:
    schema = {"type": "object", "properties": {"key": {"type": "string", "format": "password"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    fields: list[dict[str, Any]] = [
        schema_format(schema),
        outputs(json=json.dumps(schema)),
        {"tools": [tool], "tool_choice": "required"},
    ]

    async def scenario() -> None:
        for closes in (False, True):
            async with frontend(
                says([5, 2]), tool_call_parser="hermes", closed_schemas=closes
            ) as setup:
                chat = "/v1/chat/completions"
                for given in fields:
                    response = await setup.post(chat, {**BODIES[chat], **given})
                    assert response.status_code == 200, response.text

    asyncio.run(scenario())


def test_numbers_that_keep_their_digits_are_enforced() -> None:
    for number in ("0.1", "0.12345678901234568", "1.50000000000000000000", "2.5e-3"):
        constraint = JsonSchemaConstraint(schema=f'{{"enum":[{number}]}}')
        matcher, data = compile_matcher(constraint, byte_vocabulary()), repr(float(number)).encode()
        assert matcher.validate_tokens([*data]) == len(data)
    for bound in ("1e20", "-9007199254740994.0"):
        with pytest.raises(GrammarError, match="an integer under minimum must be from"):
            schema = JsonSchemaConstraint(schema=f'{{"minimum":{bound}}}')
            compile_matcher(schema, byte_vocabulary())


@pytest.mark.parametrize("path", OPENAI)
def test_fields_become_constraints(path: str) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            for fields, constraint in ACCEPTED:
                response = await setup.post(path, {**BODIES[path], **fields})
                assert response.status_code == 200, response.text
                assert setup.router.submits[-1].constraint == constraint

    asyncio.run(scenario())


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "text", "json_schema": {"name": "x"}}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    (schema_format("x"), "response_format.json_schema.schema"),
    (schema_format({"type": "foo"}), "response_format.json_schema.schema"),
    (schema_format({"$ref": "http://localhost/x.json"}), "response_format.json_schema.schema"),
    (schema_format({"$ref": "#"}), "response_format.json_schema.schema"),
    (schema_format({"not": {"type": "string"}}), "response_format.json_schema.schema"),
    (schema_format({"enum": ["x" * 70_000]}), "response_format.json_schema.schema"),
    (
        schema_format({"properties": {f"p{i}": {} for i in range(300)}}),
        "response_format.json_schema.schema",
    ),
    (schema_format({"type": "string", "pattern": "(("}), "response_format.json_schema.schema"),
    (schema_format({"type": "string", "x": "\ud800"}), "response_format.json_schema.schema"),
    (outputs(), "structured_outputs"),
    (outputs(regex="a", choice=["a"]), "structured_outputs"),
    (outputs(json="{"), "structured_outputs.json"),
    (outputs(json="[]"), "structured_outputs.json"),
    (outputs(regex=""), "structured_outputs.regex"),
    (outputs(regex="(("), "structured_outputs.regex"),
    (outputs(regex="(?=a)b"), "structured_outputs.regex"),
    (outputs(regex="a" * 9000), "structured_outputs.regex"),
    (outputs(regex="(" * 3000 + "a" + ")" * 3000), "structured_outputs.regex"),
    (outputs(grammar="start: nothing"), "structured_outputs.grammar"),
    (outputs(grammar="start: start"), "structured_outputs.grammar"),
    (outputs(grammar="no grammar"), "structured_outputs.grammar"),
    (
        outputs(grammar="start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
        "structured_outputs.grammar",
    ),
    (outputs(grammar='start: "a"\n' + "#" * 70_000), "structured_outputs.grammar"),
    (outputs(choice=[]), "structured_outputs.choice"),
    (outputs(choice=[""]), "structured_outputs.choice"),
    (outputs(choice=[1]), "structured_outputs.choice"),
    (outputs(choice=["a"] * 1025), "structured_outputs.choice"),
    (outputs(xml="a"), "structured_outputs.xml"),
    ({**schema_format(SCHEMA), **outputs(regex="a")}, "structured_outputs.regex"),
    ({**outputs(regex="a"), "ignore_eos": True}, "ignore_eos"),
    ({**outputs(regex="a"), "min_tokens": 2}, "min_tokens"),
    ({**outputs(regex="a"), "allowed_token_ids": [5]}, "allowed_token_ids"),
    ({**outputs(regex="a"), "bad_words": ["b"]}, "bad_words"),
    *(({name: {1: "a"}}, name) for name in ("regex", "ebnf", "guided_regex", "guided_grammar")),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_regex": "(("}, "guided_regex"),
    ({"regex": "a", "guided_regex": "a"}, "regex"),
    ({"regex": "a", **outputs(regex="a")}, "regex"),
    ({"ebnf": GBNF, **schema_format(SCHEMA)}, "ebnf"),
    ({"guided_choice": ["a"], "ebnf": GBNF}, "ebnf"),
    ({"guided_json": SCHEMA, "min_tokens": 1}, "min_tokens"),
    ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend"),
    ({"guided_whitespace_pattern": " *"}, "guided_whitespace_pattern"),
    ({"ebnf": "root ::= nothing"}, "ebnf"),
    ({"ebnf": 'root ::= "a'}, "ebnf"),
    ({"ebnf": 'root ::= "\\'}, "ebnf"),
    ({"ebnf": 'root ::= "a"{' + "9" * 5000 + "}"}, "ebnf"),
    ({"ebnf": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}, "ebnf"),
    ({"ebnf": 'root ::= "a"' + "\n" * 40_000}, "ebnf"),
    ({"ebnf": 'x ::= "a"'}, "ebnf"),
]


def test_a_translated_grammar_is_the_same() -> None:
    matcher = compile_matcher(GrammarConstraint(grammar=TRANSLATED), byte_vocabulary())
    assert matcher.consume_tokens(list(b"2024-jan,1999-feb"))
    assert matcher.is_accepting()
    assert not matcher.consume_tokens(list(b"-"))


def test_grammars_that_wait_to_be_translated_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_output, "MAX_WAITING", 0)

    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            body = {**BODIES["/v1/completions"], "ebnf": GBNF}
            assert (await setup.post("/v1/completions", body)).status_code == 429

    asyncio.run(scenario())


@pytest.mark.parametrize("path", OPENAI)
def test_what_cannot_be_enforced_is_refused(path: str) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            for _ in range(2):  # the second time from memory
                for fields, param in REFUSED:
                    response = await setup.post(path, {**BODIES[path], **fields})
                    assert response.status_code == 400, (fields, response.text)
                    error = response.json()["error"]
                    assert error["param"].startswith(param), (fields, error)
                    assert error["param"] in error["message"]
                    assert len(error["message"]) < 500
            assert not setup.router.submits

    asyncio.run(scenario())


def test_as_many_choices_as_are_promised_can_be_enforced() -> None:
    words = [f"choice number {number:04}" for number in range(MAX_CHOICES)]

    async def scenario() -> Constraint | None:
        async with frontend(says([5, 2])) as setup:
            body = {**BODIES["/v1/completions"], **outputs(choice=words)}
            response = await setup.post("/v1/completions", body)
            assert response.status_code == 200, response.text
            return setup.router.submits[-1].constraint

    constraint = asyncio.run(scenario())
    assert constraint is not None
    matcher = compile_matcher(constraint, byte_vocabulary())
    for text, is_one in (*((word, True) for word in words[::200]), ("choice number 9999", False)):
        asked = matcher.deep_copy()
        assert asked.consume_tokens(list(text.encode())) == is_one
        assert asked.is_accepting() == is_one


def optional(count: int, required: str = "") -> Any:
    """An object with optional properties behind one that is required, if any is."""
    properties: dict[str, Any] = {
        name: {} for name in (required, *(f"p{i}" for i in range(count))) if name
    }
    return {"type": "object", "properties": properties, "required": [required] if required else []}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (optional(240), '{"p0": 1, "p239": 2, "other": 3}'),
        (optional(900, "r"), '{"r": 1, "p0": 2, "p899": 3}'),
        ({"type": "array", "items": optional(240)}, '[{"p0": 1, "p239": 2}, {"p3": 1}]'),
        ({"allOf": [optional(120), {"properties": {"x": {}}}]}, '{"p0": 1, "p119": 2, "x": 3}'),
    ],
)
@pytest.mark.parametrize("form", [JsonSchemaConstraint, GrammarConstraint])
def test_as_many_optional_properties_as_are_promised_can_be_written(
    form: type[Constraint], schema: Any, text: str
) -> None:
    matcher = compile_matcher(constrained(form, schema), byte_vocabulary())
    assert matcher.consume_tokens(list(text.encode()))
    assert matcher.is_accepting()


@pytest.mark.parametrize(
    "schema",
    [
        optional(241),
        optional(901, "r"),
        {"type": "array", "items": {"anyOf": [{"type": "null"}, optional(300)]}},
        {"$ref": "#/$defs/a", "$defs": {"a": optional(300)}},
        {"allOf": [optional(200), {"properties": {f"q{i}": {} for i in range(200)}}]},
    ],
)
@pytest.mark.parametrize("form", [JsonSchemaConstraint, GrammarConstraint])
def test_too_many_optional_properties_are_refused_before_the_first_token(
    form: type[Constraint], schema: Any
) -> None:
    with pytest.raises(GrammarError, match=r"at most \d+ optional properties.*, got \d+$"):
        compile_matcher(constrained(form, schema), byte_vocabulary())


def constrained(form: type[Constraint], schema: Any) -> Constraint:
    if form is JsonSchemaConstraint:
        return JsonSchemaConstraint(schema=json.dumps(schema))
    return GrammarConstraint(grammar=f"start: a\na: %json {json.dumps(schema)}\n")


HUGE: dict[str, dict[str, Any]] = {
    "properties": schema_format(
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1000)}}
    ),
    "enum": schema_format({"enum": [f"v{i * 7919}" for i in range(2500)]}),
    "any-of": schema_format(
        {"anyOf": [{"type": "string", "pattern": f".*{i}.*{i}.{{50}}"} for i in range(500)]}
    ),
    "nested": schema_format(nested(60)),
    "repeated": outputs(regex="(((((x{50}){50}){50}){50}){50})"),
    "ambiguous": outputs(regex="(.*a.{300})(.*b.{300})(.*c.{300})"),
    "left-recursive": outputs(grammar='start: start start start | "a"'),
}


async def _largest_gap_s(setup: Setup, fields: dict[str, Any]) -> tuple[int, float]:
    gaps = [0.0]

    async def tick() -> None:
        last_s = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now_s = time.perf_counter()
            gaps.append(now_s - last_s)
            last_s = now_s

    ticking = asyncio.create_task(tick())
    response = await setup.post("/v1/completions", {**BODIES["/v1/completions"], **fields})
    ticking.cancel()
    return response.status_code, max(gaps)


@pytest.mark.parametrize("name", HUGE)
def test_huge_grammars_never_hold_up_the_event_loop(name: str) -> None:
    """Accepted or refused, other streams go on; the gap is reported, not asserted."""

    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            status, gap_s = await _largest_gap_s(setup, HUGE[name])
            print(f"{name}: {status}, largest gap {1e3 * gap_s:.1f} ms")
            assert status in (200, 400)
            plain = await setup.post("/v1/completions", BODIES["/v1/completions"])
            assert plain.status_code == 200

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ({"type": "json", "value": SCHEMA}, JsonSchemaConstraint(schema=json.dumps(SCHEMA))),
        ({"type": "regex", "value": "a+"}, RegexConstraint(pattern="a+")),
        ({"type": "regex", "value": SCHEMA}, "parameters.grammar.value"),
        ({"type": "regex", "value": "(("}, "parameters.grammar.value"),
        ({"type": "lark", "value": "x"}, "parameters.grammar.type"),
    ],
)
def test_the_native_route_takes_a_grammar(grammar: Any, expected: Any) -> None:
    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            body = {"inputs": "hi", "parameters": {"grammar": grammar}}
            response = await setup.post("/generate", body)
            if isinstance(expected, str):
                assert response.status_code == 400
                assert response.json()["error"]["param"] == expected
            else:
                assert response.status_code == 200
                assert setup.router.submits[-1].constraint == expected

    asyncio.run(scenario())
