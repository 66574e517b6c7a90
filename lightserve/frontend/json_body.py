"""Request bodies: bytes to strict JSON to a pydantic model, every complaint naming the field.

Refused beyond what RFC 8259 refuses: NaN and Infinity, numbers too large for a float, duplicate
keys, bodies over MAX_BODY_BYTES, nesting beyond what the parser can hold.
"""

from __future__ import annotations

import json
import math
from typing import Any, TypeVar

import pydantic
from starlette.requests import ClientDisconnect, Request

from lightserve.errors import InvalidRequest
from lightserve.frontend.failures import ClientGone

MAX_BODY_BYTES = 4 * 1024 * 1024
_MAX_SHOWN_CHARS = 64

ModelT = TypeVar("ModelT", bound=pydantic.BaseModel)


class StrictModel(pydantic.BaseModel):
    """Base of all request bodies: no unknown fields, no conversions between types."""

    model_config = pydantic.ConfigDict(
        extra="forbid", strict=True, frozen=True, hide_input_in_errors=True, protected_namespaces=()
    )


async def read_model(request: Request, model: type[ModelT]) -> ModelT:
    """Return the request's body as a `model`.

    Raises:
        InvalidRequest: too large (413), not strict JSON, or not what the model wants.
        ClientGone: the client hung up while sending.
    """
    value = parse_json(await _read_body(request))
    try:
        return model.model_validate(value)
    except pydantic.ValidationError as error:
        raise _complaint(error) from None


async def _read_body(request: Request) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise _too_large()
    except ClientDisconnect as error:
        raise ClientGone from error
    return bytes(body)


def parse_json(body: bytes) -> Any:
    """Parse strict JSON. Raises InvalidRequest."""
    try:
        return json.loads(
            body.decode("utf-8"),
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            object_pairs_hook=_unique_keys,
        )
    except UnicodeDecodeError:
        message = "the request body is not valid UTF-8"
    except RecursionError:
        message = "the request body is nested too deeply"
    except ValueError as error:
        known = isinstance(error, json.JSONDecodeError | _StrictJsonError)
        detail = str(error) if known else "a number is too long"
        message = f"the request body is not valid JSON: {detail}"
    raise InvalidRequest(message, code="invalid_json")


class _StrictJsonError(ValueError):
    """JSON that Python's parser would take."""


def _refuse_constant(name: str) -> float:
    raise _StrictJsonError(f"{name} is not a number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _StrictJsonError("a number is too large")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _StrictJsonError("an object has the same key twice")
    return value


def _too_large() -> InvalidRequest:
    return InvalidRequest(
        f"the request body must be at most {MAX_BODY_BYTES} bytes",
        code="request_too_large",
        status=413,
    )


UNSUPPORTED_VALUE = "unsupported_value"
"""Type of validation errors with their own words, in a context of `field` and `complaint`."""

_TYPE_NAMES = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "string_unicode": "Unicode text",  # half of a surrogate pair is not
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}

_BOUNDS: dict[str, tuple[str, str]] = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("greater than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}

_LENGTHS: dict[str, tuple[str, str, str]] = {
    "too_short": ("at least", "min_length", "entries"),
    "too_long": ("at most", "max_length", "entries"),
    "string_too_short": ("at least", "min_length", "characters"),
    "string_too_long": ("at most", "max_length", "characters"),
}


def _complaint(error: pydantic.ValidationError) -> InvalidRequest:
    """Return the first thing that is wrong, in words; unknown fields before all others."""
    errors = error.errors(include_url=False)
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    kind, context, given = first["type"], first.get("ctx", {}), first["input"]
    location = first["loc"]
    if kind == UNSUPPORTED_VALUE:  # found in the object that has the field
        location = (*location, context["field"])
    param = _path(location)
    code = "invalid_value"
    if kind == "extra_forbidden":
        complaint, code = "is not supported", "unknown_parameter"
    elif kind == UNSUPPORTED_VALUE:
        complaint, code = f"{context['complaint']}, got {show(given[location[-1]])}", kind
    elif kind == "missing":
        complaint, code = "is required", "missing_required_parameter"
    elif kind in _TYPE_NAMES:
        complaint, code = f"must be {_TYPE_NAMES[kind]}, got {show(given)}", "invalid_type"
    elif kind in _BOUNDS:
        word, key = _BOUNDS[kind]
        complaint = f"must be {word} {context[key]}, got {show(given)}"
    elif kind in _LENGTHS:
        word, key, unit = _LENGTHS[kind]
        complaint = f"must have {word} {context[key]} {unit}, got {len(given)}"
    elif kind == "literal_error":
        complaint = f"must be {context['expected']}, got {show(given)}"
    elif kind == "value_error":
        complaint = str(context["error"])
    else:
        complaint = "is not valid"
    return InvalidRequest(f"{param or 'the request body'} {complaint}", param=param, code=code)


def _path(location: tuple[int | str, ...]) -> str | None:
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text[:_MAX_SHOWN_CHARS] or None


def show(value: Any) -> str:
    """Return a given value for an error message, shortened; containers by their kind alone."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    try:
        text = json.dumps(value)
    except ValueError:  # an integer of thousands of digits
        return "a very long number"
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"
