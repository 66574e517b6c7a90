"""`tools` and `tool_choice`, calls in the history, and the grammars that enforce calls."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple
from urllib.parse import unquote

from pydantic import AfterValidator, Field, Tag

from lightserve.config import ServeConfig
from lightserve.errors import InvalidRequest
from lightserve.frontend.json_body import AN_OBJECT, BY_KIND, OTHERWISE, StrictModel, show
from lightserve.frontend.openai.fields import NoEffect, NoEffectModel
from lightserve.frontend.structured_output import ConstraintSpec, check_num_values
from lightserve.messages.common import GrammarConstraint
from lightserve.model_formats import CALL_FORMATS, NONE
from lightserve.structured import MAX_GRAMMAR_BYTES, WHITESPACE, as_written, closed

MAX_CALLS = 16
"""Calls of one answer where calls are required."""
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
"""At most 128 characters, like Anthropic's; OpenAI's have at most 64."""


class ToolFunction(StrictModel):
    """`tools[].function`; arguments are as `parameters` has them where a call is required."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """`tools[]`."""

    type: Literal["function"]
    function: ToolFunction

    def described(self) -> dict[str, Any]:
        """Return it as chat templates know it."""
        fields = {name: getattr(self.function, name) for name in ToolFunction.model_fields}
        function = {name: value for name, value in fields.items() if value is not None}
        return {"type": self.type, "function": function}


class NamedFunction(StrictModel):
    """`tool_choice.function`."""

    name: FunctionName


class NamedTool(StrictModel):
    """`tool_choice` as an object."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(NoEffectModel):
    """`messages[].tool_calls[].function`."""

    no_effect: ClassVar[NoEffect] = {"parsed_arguments": None}

    name: FunctionName
    arguments: str


class ToolCall(NoEffectModel):
    """`messages[].tool_calls[]`."""

    no_effect: ClassVar[NoEffect] = {"index": None}

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"]
    function: CalledFunction

    def rendered(self) -> dict[str, Any]:
        """Return it as chat templates know it, but for the form of the arguments."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}


def _bounded(tools: list[Tool]) -> list[Tool]:
    check_num_values([tool.function.parameters for tool in tools])
    return tools


Tools = Annotated[list[Tool], Field(fail_fast=True), AfterValidator(_bounded)]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(OTHERWISE)]
    | Annotated[NamedTool, Tag(AN_OBJECT)],
    BY_KIND,
]


class ToolUse(NamedTuple):
    """The use that a request makes of its tools."""

    offered: Sequence[Tool] = ()
    """Tools that the model is told of; empty: no calls are looked for."""
    required: Sequence[Tool] = ()
    """One of these must be called."""
    is_parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        """Names of the tools that may be called."""
        return frozenset(tool.function.name for tool in self.required or self.offered)

    @property
    def descriptions(self) -> list[dict[str, Any]] | None:
        """The tools as chat templates know them."""
        return [tool.described() for tool in self.offered] or None

    @property
    def text_arguments(self) -> dict[tuple[str, str], bool | None]:
        """Whether a tool's argument is a string, whatever it looks like; True: or null; None: no.

        Arguments that the schema does not name have the name "", if it says that they are strings.
        """
        return dict(itertools.chain.from_iterable(map(_text_arguments, self.offered)))

    def spec(self, config: ServeConfig, tool_format: str) -> ConstraintSpec | None:
        """Return the grammar of the calls that are required, as this format writes them."""
        if not self.required:
            return None
        schemas = [_object_schema(tool) for tool in self.required]
        # What is too long stays as it is, to be refused: closing takes a multiple of its size.
        if config.closed_schemas and len(json.dumps(schemas)) <= MAX_GRAMMAR_BYTES:
            schemas = [closed(schema) for schema in schemas]
        most = MAX_CALLS if self.is_parallel else 1
        names = [tool.function.name for tool in self.required]
        calls = list(zip(names, schemas, strict=True))
        return _grammar_of_calls(calls, tool_format, most), "tools"


def resolve_tools(
    tools: Sequence[Tool] | None, choice: ToolChoice | None, *, is_parallel: bool, tool_format: str
) -> ToolUse:
    """Return what is to be done with a request's tools.

    Raises:
        InvalidRequest: a choice without tools or of an unknown one, a name given twice, or a
            server that does not look for calls.
    """
    tools = tools or ()
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools must have different names", param="tools")
    chosen = choice.function.name if isinstance(choice, NamedTool) else None
    if not tools and choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice needs tools", param="tool_choice")
    if chosen is not None and chosen not in names:
        raise InvalidRequest(
            f"tool_choice.function.name must be one of the tools, got {show(chosen)}",
            param="tool_choice.function.name",
        )
    if not tools or choice == "none":
        return ToolUse()
    if tool_format == NONE:
        raise InvalidRequest(
            "tools need a server with --tool-call-parser; this one has none, and the model's chat"
            " template shows none",
            param="tools",
            code="unsupported_value",
        )
    required = tools if choice == "required" else [t for t in tools if t.function.name == chosen]
    # A tool that is named is called once.
    return ToolUse(tools, required, is_parallel and chosen is None)


def _grammar_of_calls(
    calls: Sequence[tuple[str, dict[str, Any]]], tool_format: str, most: int
) -> GrammarConstraint:
    """Return the grammar of 1 to `most` calls of functions with these names and schemas.

    Each schema is the root of its own: $ref works.
    """
    written = CALL_FORMATS[tool_format].written
    assert written is not None, tool_format
    further = f"({_quoted(written.separator)} call){{0,{most - 1}}}" if most > 1 else ""
    parts = (_quoted(written.start), "call", further, _quoted(written.end))
    lines = ["start: " + " ".join(part for part in parts if part not in ("", '""'))]
    lines.append("call: " + " | ".join(f"call_{number}" for number in range(len(calls))))
    for number, (name, schema) in enumerate(calls):
        before = _quoted(f"{written.before}{name}{written.between}")
        after = _quoted(written.after) if written.after else ""
        lines.append(f"call_{number}: {before} arguments_{number} {after}")
        lines.append(f"arguments_{number}: %json {as_written(schema)}")
    return GrammarConstraint(grammar="\n".join(lines))


_Arguments = dict[str, frozenset[str] | None]
"""Kinds of JSON by name; None: every kind."""


class _Kinds:
    """The kinds of JSON that schemas of one tool allow; None: every kind."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._of_reference: dict[str, frozenset[str] | None] = {}
        """Kinds of the references that have been looked up; every kind while that is under way."""
        self._of_arguments: set[str] = set()
        """References to objects whose properties have been looked up."""

    def of(self, schema: object) -> frozenset[str] | None:
        """Return the kinds of one schema, with those that it refers to."""
        if not isinstance(schema, dict):
            return None
        parts = [_own_kinds(schema)]
        if isinstance(reference := schema.get("$ref"), str):
            parts.append(self._referred(reference))
        for key in ("anyOf", "oneOf"):
            if isinstance(choices := schema.get(key), list):
                kinds = [self.of(choice) for choice in choices]
                parts.append(None if None in kinds else frozenset().union(*filter(None, kinds)))
        if isinstance(every := schema.get("allOf"), list):
            parts += map(self.of, every)
        known = [part for part in parts if part is not None]
        if known:
            return frozenset.intersection(*known)
        return frozenset({"string"}) if _OF_STRINGS & schema.keys() else None

    def arguments(self, schema: object) -> _Arguments:
        """Return the kinds of each property of an object, "" for those without a name.

        That of one which several choices have is any of theirs.
        """
        if not isinstance(schema, dict):
            return {}
        properties = schema.get("properties")
        named = {**properties} if isinstance(properties, dict) else {}
        named[""] = schema.get("additionalProperties")
        parts = [{name: self.of(one) for name, one in named.items()}]
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in self._of_arguments:
            self._of_arguments.add(reference)
            if len(self._of_arguments) <= _MAX_REFERENCES:
                parts.append(self.arguments(_pointed(self._root, reference)))
        for key, joins in (("allOf", False), ("anyOf", True), ("oneOf", True)):
            if isinstance(choices := schema.get(key), list):
                each = [self.arguments(choice) for choice in choices]
                parts += [_joined(each)] if joins else each
        return _met(parts)

    def _referred(self, reference: str) -> frozenset[str] | None:
        if reference not in self._of_reference:
            if len(self._of_reference) == _MAX_REFERENCES:
                return None
            self._of_reference[reference] = None
            self._of_reference[reference] = self.of(_pointed(self._root, reference))
        return self._of_reference[reference]


_MAX_REFERENCES = 64
"""Looked up in one schema; of further ones every kind is allowed."""
_OF_STRINGS = {"pattern", "minLength", "maxLength", "format", "contentEncoding"}


def _met(parts: Sequence[_Arguments]) -> _Arguments:
    """Return what all parts of a schema together allow."""
    found: _Arguments = {}
    for name, kinds in itertools.chain.from_iterable(part.items() for part in parts):
        known = found.get(name)
        found[name] = kinds if known is None else known if kinds is None else known & kinds
    return found


def _joined(choices: Sequence[_Arguments]) -> _Arguments:
    """Return what any of several schemas allows."""
    found: _Arguments = {}
    for name, kinds in itertools.chain.from_iterable(part.items() for part in choices):
        known = found.get(name, kinds)
        found[name] = None if known is None or kinds is None else known | kinds
    return found


def _own_kinds(schema: dict[str, Any]) -> frozenset[str] | None:
    """Return the kinds that a schema's own keywords allow."""
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return frozenset({kinds})
    if isinstance(kinds, list):
        return frozenset(map(str, kinds))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(
            "string" if isinstance(value, str) else "null" if value is None else "other"
            for value in values
        )
    return None


def _pointed(root: dict[str, Any], reference: str) -> object:
    """Return where a reference within a schema leads; None: nowhere."""
    if not reference.startswith("#"):
        return None
    found: Any = root
    for part in reference[1:].split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _text_arguments(tool: Tool) -> Iterable[tuple[tuple[str, str], bool | None]]:
    schema = tool.function.parameters or {}
    arguments = _Kinds(schema).arguments(schema)
    texts = {
        name: "null" in kinds
        for name, kinds in arguments.items()
        if kinds is not None and "string" in kinds and kinds <= {"string", "null"}
    }
    for name in arguments if "" in texts else texts:
        yield (tool.function.name, name), texts.get(name)


def _object_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which are an object whatever it says."""
    schema = tool.function.parameters or {}
    if "type" not in schema and "$ref" not in schema:
        schema = {**schema, "type": "object"}
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
