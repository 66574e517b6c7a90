"""`tools` and `tool_choice`, calls in the history, and the grammars that enforce calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, Tag

from lightserve.config import ServeConfig
from lightserve.errors import InvalidRequest
from lightserve.frontend.json_body import AN_OBJECT, BY_KIND, OTHERWISE, StrictModel, show
from lightserve.frontend.structured_output import ConstraintSpec, check_num_values
from lightserve.messages.common import GrammarConstraint
from lightserve.model_formats import CALL_FORMATS, NONE
from lightserve.structured import MAX_GRAMMAR_BYTES, WHITESPACE, closed

MAX_TOOLS = 128
MAX_CALLS = 16
"""Calls of one answer where calls are required."""
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class ToolFunction(StrictModel):
    """`tools[].function`; arguments are as `parameters` has them where a call is required."""

    name: FunctionName
    description: Annotated[str, Field(max_length=16384)] | None = None
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


class CalledFunction(StrictModel):
    """`messages[].tool_calls[].function`."""

    name: FunctionName
    arguments: str


class ToolCall(StrictModel):
    """`messages[].tool_calls[]`."""

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


Tools = Annotated[
    list[Tool],
    Field(max_length=MAX_TOOLS, fail_fast=True),
    AfterValidator(_bounded),
]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(OTHERWISE)]
    | Annotated[NamedTool, Tag(AN_OBJECT)],
    BY_KIND,
]


class ToolUse(NamedTuple):
    """What a request does with its tools."""

    offered: Sequence[Tool] = ()
    """What the model is told of; empty: no calls are looked for."""
    required: Sequence[Tool] = ()
    """One of these must be called."""
    is_parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        """Of the tools that may be called."""
        return frozenset(tool.function.name for tool in self.required or self.offered)

    @property
    def descriptions(self) -> list[dict[str, Any]] | None:
        """The tools as chat templates know them."""
        return [tool.described() for tool in self.offered] or None

    @property
    def text_arguments(self) -> frozenset[tuple[str, str]]:
        """Tool and argument of those that are strings, whatever they look like."""
        return frozenset(
            (tool.function.name, name)
            for tool in self.offered
            for name, schema in _properties(tool.function.parameters)
            if _is_text(schema)
        )

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
    tools: Sequence[Tool] | None,
    choice: ToolChoice | None,
    *,
    is_parallel: bool,
    tool_format: str,
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
        lines.append(f"arguments_{number}: %json {json.dumps(schema)}")
    return GrammarConstraint(grammar="\n".join(lines))


def _properties(schema: dict[str, Any] | None) -> Iterable[tuple[str, Any]]:
    properties = (schema or {}).get("properties")
    return properties.items() if isinstance(properties, dict) else ()


def _is_text(schema: object) -> bool:
    """Whether nothing but strings, and perhaps null, is of a schema."""
    if not isinstance(schema, dict):
        return False
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return "string" in kinds and set(map(str, kinds)) <= {"string", "null"}
    choices = schema.get("enum")
    is_choice = isinstance(choices, list) and all(isinstance(one, str) for one in choices)
    return kinds == "string" or (kinds is None and is_choice)


def _object_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which are an object whatever it says."""
    schema = tool.function.parameters or {}
    if "type" not in schema and "$ref" not in schema:
        schema = {**schema, "type": "object"}
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
