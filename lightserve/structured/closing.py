"""Closes the objects of a JSON schema: `additionalProperties: false` where nothing is said of it.

Many clients send schemas without it and expect objects with the named properties alone. Objects
that name none stay open, and so do those over which more than one schema decides, as in `allOf`:
there each would forbid what the other names.
"""

from __future__ import annotations

from typing import Any

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_ELEMENTS = ("items", "prefixItems", "contains", "additionalItems", "additionalProperties")
_ALTERNATIVES = ("anyOf", "oneOf")
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
    shared: set[str] = set()
    while True:
        num_shared = len(shared)
        result = _closed(schema, "#", shared, is_shared=False)
        if len(shared) == num_shared:
            return result


def _closed(schema: Any, place: str, shared: set[str], *, is_shared: bool) -> Any:
    """Return a schema closed, unless others decide beside it.

    `shared` are places of schemas that others decide beside; those that are referred to from here
    are added.
    """
    if not isinstance(schema, dict):
        return schema
    is_shared = is_shared or place in shared
    num_deciding = _num_deciding(schema)
    is_joint = is_shared or num_deciding > 1
    if is_joint and isinstance(schema.get("$ref"), str):
        shared.add(schema["$ref"])
    result: dict[str, Any] = {}
    for key, value in schema.items():
        inside = f"{place}/{key}"
        if key in _MAPS and isinstance(value, dict):
            result[key] = {
                name: _closed(inner, f"{inside}/{_escaped(name)}", shared, is_shared=False)
                for name, inner in value.items()
            }
        elif key in _ELEMENTS or key in ("allOf", *_ALTERNATIVES):
            is_part = is_joint and key not in _ELEMENTS
            result[key] = _each(value, inside, shared, is_shared=is_part)
        else:
            result[key] = value
    says = "properties" in schema and not any(key in schema for key in _DECIDING)
    if says and not is_joint:
        result["additionalProperties"] = False
    return result


def _each(value: Any, place: str, shared: set[str], *, is_shared: bool) -> Any:
    """Return a schema, or each of a list of them, closed."""
    if not isinstance(value, list):
        return _closed(value, place, shared, is_shared=is_shared)
    return [
        _closed(inner, f"{place}/{number}", shared, is_shared=is_shared)
        for number, inner in enumerate(value)
    ]


def _num_deciding(schema: dict[str, Any]) -> int:
    """Return how many schemas decide over the properties of an object, itself included."""
    members = schema.get("allOf")
    num_members = len(members) if isinstance(members, list) else 0
    others = ("properties", "$ref", "$dynamicRef", "if", *_ALTERNATIVES)
    return num_members + sum(key in schema for key in others)


def _escaped(name: str) -> str:
    """Return a name as references have it."""
    return name.replace("~", "~0").replace("/", "~1")
