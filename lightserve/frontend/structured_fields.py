"""Fields that ask for structured output, and the constraints that they become.

`response_format` as OpenAI has it, always enforced, whether `strict` or not; `structured_outputs`
as vLLM has it: exactly one of json, regex, grammar (Lark or GBNF) and choice; and other names of
its parts, as SGLang and older versions of vLLM have them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Tag

from lightserve.errors import InvalidRequest
from lightserve.frontend.constraint_check import ConstraintChecker
from lightserve.frontend.json_body import AN_OBJECT, BY_KIND, OTHERWISE, StrictModel
from lightserve.frontend.strict_json import MAX_VALUES, count_values
from lightserve.messages.common import (
    Constraint,
    GrammarConstraint,
    JsonSchemaConstraint,
    RegexConstraint,
)
from lightserve.structured.closing import closed
from lightserve.structured.limits import MAX_SCHEMA_BYTES

MAX_CHOICES = 1024
Choice = Annotated[str, Field(min_length=1, max_length=1024)]


def check_num_values(value: Any) -> None:
    """Raise ValueError for JSON with too many values to be handed on."""
    if count_values(value) > MAX_VALUES:
        raise ValueError(f"must have at most {MAX_VALUES} values, with those inside of them")


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    check_num_values(schema)
    return schema


Schema = Annotated[dict[str, Any], AfterValidator(_bounded)]
SchemaOrText = Annotated[
    Annotated[Schema, Tag(AN_OBJECT)] | Annotated[str, Tag(OTHERWISE)], BY_KIND
]


class JsonSchemaFormat(StrictModel):
    """`response_format.json_schema`; name and description are for people."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: Annotated[str, Field(max_length=4096)] | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


Text = Annotated[str, Field(min_length=1)]
Options = Annotated[list[Choice], Field(min_length=1, max_length=MAX_CHOICES)]


class StructuredOutputs(StrictModel):
    """`structured_outputs`: exactly one of these."""

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    regex: Text | None = None
    grammar: Text | None = None
    choice: Options | None = None


ALIASES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
    "regex": "regex",
    "ebnf": "grammar",
}
"""Fields of a request that mean the same as one of `structured_outputs`."""


class NativeGrammar(StrictModel):
    """`parameters.grammar`, as text-generation-inference has it."""

    type: Literal["json", "regex"]
    value: SchemaOrText


Wish = tuple[Constraint, str]
"""A constraint that has yet to be checked, and the field that it comes from."""


def json_constraint(schema: Any) -> JsonSchemaConstraint:
    """Return the constraint of a JSON schema, as a value or as text."""
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return JsonSchemaConstraint(schema=text)


def wish_of_format(response_format: ResponseFormat | None) -> Wish | None:
    """Return what `response_format` asks for. Raises InvalidRequest."""
    if response_format is None:
        return None
    asked = response_format.json_schema
    if (response_format.type == "json_schema") != (asked is not None):
        raise InvalidRequest(
            "response_format.json_schema must be given exactly with the type json_schema",
            param="response_format.json_schema",
        )
    if response_format.type == "text":
        return None
    schema = None if asked is None else asked.schema_
    if schema is None:
        return json_constraint({"type": "object"}), "response_format"
    return json_constraint(schema), "response_format.json_schema.schema"


def wish_of_outputs(outputs: StructuredOutputs | None) -> Wish | None:
    """Return what `structured_outputs` asks for. Raises InvalidRequest."""
    if outputs is None:
        return None
    given = {
        "json": outputs.json_,
        "regex": outputs.regex,
        "grammar": outputs.grammar,
        "choice": outputs.choice,
    }
    wishes = [
        (_constraint(kind, value), f"structured_outputs.{kind}")
        for kind, value in given.items()
        if value is not None
    ]
    if len(wishes) != 1:
        raise InvalidRequest(
            "structured_outputs must have exactly one of json, regex, grammar and choice, got"
            f" {len(wishes)}",
            param="structured_outputs",
        )
    return wishes[0]


def wishes_of_aliases(fields: Mapping[str, Any]) -> list[Wish | None]:
    """Return what fields of `ALIASES` ask for, those that are null left out."""
    return [
        (_constraint(ALIASES[name], value), name)
        for name, value in fields.items()
        if value is not None
    ]


def _constraint(kind: str, value: Any) -> Constraint:
    """Return the constraint that a field of `structured_outputs` is."""
    if kind == "json":
        return json_constraint(value)
    if kind == "choice":
        return _one_of(value)
    return RegexConstraint(pattern=value) if kind == "regex" else GrammarConstraint(grammar=value)


def wish_of_grammar(grammar: NativeGrammar | None) -> Wish | None:
    """Return what `parameters.grammar` asks for. Raises InvalidRequest."""
    param = "parameters.grammar.value"
    if grammar is None:
        return None
    if grammar.type == "json":
        return json_constraint(grammar.value), param
    if not isinstance(grammar.value, str):
        raise InvalidRequest(f"{param} must be a string for a regex, got an object", param=param)
    return RegexConstraint(pattern=grammar.value), param


async def resolve_constraint(
    wishes: list[Wish | None],
    checker: ConstraintChecker,
    *,
    can_end: bool,
    barred: list[str],
    closes: bool,
) -> Constraint | None:
    """Return the one constraint of a request, checked.

    Args:
        wishes: at most one of them may be there.
        checker: the process's.
        can_end: whether the model has a token that ends an output.
        barred: fields of the request that keep the grammar from deciding over tokens or the end.
        closes: whether objects of JSON schemas are closed, see `closed`.

    Raises:
        InvalidRequest: more than one, one that cannot be enforced, or a barred field beside it.
        RequestFailed: too many are being checked.
    """
    given = [wish for wish in wishes if wish is not None]
    if not given:
        return None
    constraint, param = given[0]
    if len(given) > 1:
        raise InvalidRequest(
            f"{given[1][1]} cannot be combined with {param}: only one can decide over the output",
            param=given[1][1],
        )
    if barred:
        raise InvalidRequest(f"{barred[0]} cannot be combined with {param}", param=barred[0])
    if not can_end:
        raise InvalidRequest(
            f"{param} needs a model with an end-of-sequence token, which this one has not",
            param=param,
        )
    if closes and isinstance(constraint, JsonSchemaConstraint):
        constraint = _closed_constraint(constraint)
    constraint = await checker.in_lark(constraint, param=param)
    await checker.check(constraint, param=param)
    return constraint


def _closed_constraint(constraint: JsonSchemaConstraint) -> JsonSchemaConstraint:
    """Return it closed; what is too long or no JSON stays as it is, to be refused."""
    if len(constraint.schema) > MAX_SCHEMA_BYTES:
        return constraint
    try:
        return json_constraint(closed(json.loads(constraint.schema)))
    except (ValueError, RecursionError):
        return constraint


def _one_of(choices: list[str]) -> GrammarConstraint:
    # A JSON string is a string of this grammar language, too. One terminal: as alternatives of a
    # rule each would be an item of the parser, which has a limit of its own.
    return GrammarConstraint(grammar="start: ONE\nONE: " + " | ".join(map(_quoted, choices)))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
