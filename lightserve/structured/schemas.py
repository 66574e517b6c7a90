"""Closes the objects of a JSON schema: `additionalProperties: false` where nothing is said of it.

Many clients send schemas without it and expect objects with the named properties alone. Objects
that name none stay open, and so do those over which more than one schema decides, as in `allOf`:
there each would forbid what the other names.
"""

from __future__ import annotations

import os
import re
import threading
from typing import Any

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_ELEMENTS = ("items", "prefixItems", "contains", "additionalItems", "additionalProperties")
_ALTERNATIVES = ("anyOf", "oneOf")
_PARTS = ("allOf", *_ALTERNATIVES)
_DECIDING = (
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "dependentSchemas",
)
"""What says which other properties there may be."""


def closed(schema: Any) -> Any:
    """Return a schema, which stays as it is, with its objects closed.

    Raises:
        RecursionError: it is nested too deeply.
    """
    places: dict[str, _Place] = {}
    joint: list[str] = []
    _read(schema, "#", places, joint)
    shared: set[str] = set()
    while joint:
        place = joint.pop()
        if place in places and place not in shared:
            shared.add(place)
            joint += places[place]
    return _closed(schema, "#", shared)


_Place = list[str]
"""Where schemas are that decide beside others if this one does: its parts, what it refers to."""


def _read(schema: Any, place: str, places: dict[str, _Place], joint: list[str]) -> None:
    """Note what is where, and which objects have more than one schema that decides over them."""
    if not isinstance(schema, dict):
        return
    linked = places[place] = []
    if _num_deciding(schema) > 1:
        joint.append(place)
    if isinstance(schema.get("$ref"), str):
        linked.append(schema["$ref"])
    for key, value in schema.items():
        inner = dict(_schemas_in(key, value, f"{place}/{key}"))
        if key in _PARTS:
            linked += inner
        for inner_place, inner_schema in inner.items():
            _read(inner_schema, inner_place, places, joint)


def _closed(schema: Any, place: str, shared: set[str]) -> Any:
    """Return a schema closed, unless others decide beside it, as they do at the places `shared`."""
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        inner = [_closed(s, at, shared) for at, s in _schemas_in(key, value, f"{place}/{key}")]
        if not inner:
            result[key] = value
        elif isinstance(value, list):
            result[key] = inner
        else:
            result[key] = dict(zip(value, inner, strict=True)) if key in _MAPS else inner[0]
    says = "properties" in schema and not any(key in schema for key in _DECIDING)
    if says and place not in shared:
        result["additionalProperties"] = False
    return result


def _schemas_in(key: str, value: Any, place: str) -> list[tuple[str, Any]]:
    """Return the schemas in what a schema says under a key, with their places."""
    if key in _MAPS:
        named = value.items() if isinstance(value, dict) else ()
        return [(f"{place}/{_escaped(name)}", schema) for name, schema in named]
    if key not in (*_ELEMENTS, *_PARTS):
        return []
    if isinstance(value, list):
        return [(f"{place}/{number}", schema) for number, schema in enumerate(value)]
    return [(place, value)]


def _num_deciding(schema: dict[str, Any]) -> int:
    """Return how many schemas decide over the properties of an object, itself included."""
    members = schema.get("allOf")
    num_members = len(members) if isinstance(members, list) else 0
    others = ("properties", "$ref", "$dynamicRef", "if", *_ALTERNATIVES)
    return num_members + sum(key in schema for key in others)


def _escaped(name: str) -> str:
    """Return a name as references have it."""
    return name.replace("~", "~0").replace("/", "~1")


# How large constraints may be, what they leave free, who compiles them; without llguidance.

MAX_SCHEMA_BYTES = 32 * 1024
MAX_REGEX_BYTES = 8 * 1024
MAX_GRAMMAR_BYTES = 32 * 1024
MAX_GBNF_CHARS = 8 * 1024
"""Of a grammar that has to be translated: a tenth of a second."""

_GBNF_ROOT = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)

WHITESPACE = r" |\r?\n[ \t]{0,16}"
"""What JSON may have between its tokens: a space, or a new line and its indentation. Without a
bound a model that is lost writes blanks until its tokens are used up."""

_NICENESS = 10


def is_gbnf(grammar: str) -> bool:
    """Return whether a grammar is in llama.cpp's notation, as xgrammar has it; else it is Lark."""
    return _GBNF_ROOT.search(grammar) is not None


def yield_to_others() -> None:
    """Lower the calling thread's priority: compiling must not slow down what is served already."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
