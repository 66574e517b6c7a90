"""Request bodies: bytes to strict JSON to a pydantic model, every complaint naming the field."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import Discriminator
from pydantic_core import PydanticCustomError
from starlette.requests import ClientDisconnect, Request

from lightserve.config.fields import flag_name
from lightserve.errors import InvalidRequest
from lightserve.frontend.connections import Shares
from lightserve.frontend.errors import ClientGone, overloaded
from lightserve.structured import number_of
from lightserve.turn_threads import WHOSE, TurnThreads

# ----------------------------------------------------------------------
# Strict JSON from bytes that a stranger wrote.
#
# Refused beyond what RFC 8259 refuses: NaN and Infinity, numbers too large for a float, integers of
# thousands of digits, duplicate keys, deep nesting, more objects and lists than any request needs.


DEFAULT_MAX_DEPTH = 64
MAX_CONTAINERS = 65_536
MAX_STRINGS = 262_144
MAX_KEYS = 4096
"""Most keys of one object. Each unknown one costs the validation of models a complaint."""
MAX_VALUES = 65_536
"""Most values of JSON that is handed on and written again in one go: schemas, tools, arguments."""
_MAX_DIGITS = 4000
_LONG_STRING = 4096
# How pictures begin: as data URLs, or in base64 alone (PNG, JPEG, GIF, WebP).
_PICTURES = (b'"data:image', b'"iVBORw0KGgo', b'"/9j/', rb'"\/9j\/', b'"R0lGOD', b'"UklGR')
_NUMBER_BYTES = 32

# A string, though its end may be missing, or a bracket. Possessive: linear whatever comes; but for
# the last groups, which never go back anyhow, and which Python before 3.11.5 gets wrong. What they
# begin with comes first: so all else is passed over in a third of the time, in which no other
# thread runs. Nor does one run while a string is read, so that a longer one has its end found in
# pieces (`_end_of_string`); group 1 is the end of a string.
_TOKEN = re.compile(
    rb'["\[{\]}](?:(?<=")[^"\\]{0,65536}+(?:\\.[^"\\]{0,16}+){0,4096}+(")?)?', re.DOTALL
)
_REST = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+(")?', re.DOTALL)
_MARK = re.compile(r'["\[{,](?:(?<=")[^"\\]*+(?:\\.[^"\\]*+)*+"?)?', re.DOTALL)
_OPEN, _CLOSE = frozenset((b"[", b"{")), frozenset((b"]", b"}"))


class _StrictJsonError(ValueError):
    """JSON that Python's parser would take."""


def parse_json(
    body: bytes, *, max_depth: int = DEFAULT_MAX_DEPTH, max_bytes: int = sys.maxsize
) -> Any:
    """Parse strict JSON; numbers are as `number_of` has them. Raises InvalidRequest.

    `max_bytes` are those beside pictures, which are long strings that begin like one.

    Takes about a quarter of a second for 4 MiB at worst, nearly all of it in Python code, so that
    other threads get their turns.
    """
    try:
        _check_shape(body, max_depth, max_bytes)
        return json.loads(
            body.decode("utf-8"),
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            parse_int=_integer,
            object_pairs_hook=_unique_keys,
        )
    except UnicodeDecodeError:
        message = "the request body is not valid UTF-8"
    except (json.JSONDecodeError, _StrictJsonError) as error:
        message = f"the request body is not valid JSON: {error}"
    raise InvalidRequest(message, code="invalid_json")


def _check_shape(body: bytes, max_depth: int, max_bytes: int) -> None:
    """Look at brackets and strings alone, before anything is built from them."""
    depth = num_containers = num_strings = 0
    num_bytes = len(body)
    for start, end in _tokens(body):
        length = end - start
        token = body[start:end] if length == 1 else b""
        if length > _LONG_STRING and body.startswith(_PICTURES, start):
            num_bytes -= length
        if token in _OPEN:
            depth += 1
            num_containers += 1
            if depth > max_depth:
                raise _StrictJsonError(f"it is nested more than {max_depth} levels deep")
            if num_containers > MAX_CONTAINERS:
                raise _StrictJsonError(f"it has more than {MAX_CONTAINERS} objects and lists")
        elif token in _CLOSE:
            depth -= 1
        else:
            num_strings += 1
            if num_strings > MAX_STRINGS:
                raise _StrictJsonError(f"it has more than {MAX_STRINGS} strings")
    if num_bytes > max_bytes:
        raise InvalidRequest(
            f"the request body must be at most {max_bytes} bytes beside its images"
            f" ({flag_name('max_body_bytes')}), got {num_bytes}",
            code="request_too_large",
            status=413,
        )


def _tokens(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield where strings and brackets begin and end."""
    place = 0
    while place < len(body):
        place, before = len(body), place
        for match in _TOKEN.finditer(body, before):
            start, end = match.span()
            if match.lastindex is None and body.startswith(b'"', start):
                place = _end_of_string(body, end)
                yield start, place
                break
            yield start, end


def _end_of_string(body: bytes, place: int) -> int:
    """Return where a string ends that goes on at `place`."""
    while place < len(body):
        match = _REST.match(body, place, place + _PIECE_BYTES)
        assert match is not None
        if match.lastindex is not None or match.end() == place:
            return match.end()
        place = match.end()
    return place


def count_values_in_texts(texts: Sequence[str]) -> int:
    """Return about how many values there are in JSON texts; beyond MAX_VALUES not all."""
    num_values = sum(1 + text.count(",") + text.count("[") + text.count("{") for text in texts)
    if num_values <= MAX_VALUES:
        return num_values
    # Many commas may well be those of strings.
    marks = (match.group()[0] for text in texts for match in _MARK.finditer(text))
    values = itertools.islice((mark for mark in marks if mark != '"'), MAX_VALUES + 1)
    return len(texts) + sum(1 for _ in values)


def count_values(value: Any) -> int:
    """Return how many values there are in parsed JSON, with itself; beyond MAX_VALUES not all."""
    num_values, waiting = 1, [value]
    while waiting and num_values <= MAX_VALUES:
        inner = waiting.pop()
        if isinstance(inner, dict | list):
            num_values += len(inner)
            waiting.extend(inner.values() if isinstance(inner, dict) else inner)
    return num_values


def memory_of(value: Any) -> int:
    """Return about how many bytes of memory parsed JSON takes, blanks between values left out."""
    num_bytes, waiting = 0, [value]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, dict):
            num_bytes += sum(map(sys.getsizeof, inner))
            waiting.extend(inner.values())
        elif isinstance(inner, list):
            if set(map(type, inner)) <= {int, float}:  # as a rule, and seen ten times as fast
                num_bytes += _NUMBER_BYTES * len(inner)
            else:
                waiting.extend(inner)
        num_bytes += sys.getsizeof(inner)
    return num_bytes


def _refuse_constant(name: str) -> float:
    raise _StrictJsonError(f"{name} is not a number")


def _finite_float(text: str) -> float:
    value = number_of(text)
    if not math.isfinite(value):
        raise _StrictJsonError("a number is too large")
    return value


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise _StrictJsonError("a number is too long")
    return int(text)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise _StrictJsonError(f"an object has more than {MAX_KEYS} keys")
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _StrictJsonError("an object has the same key twice")
    return value


# ----------------------------------------------------------------------
# What waits for a thread: bounded in number and in size, refused beyond.


MAX_ITEMS = 8192
"""Twice as many requests as may wait in the router by default: half of it is one key's, and a burst
that fits there gets there."""
MAX_SIZE = 64 * 1024 * 1024
"""Characters of texts or bytes of bodies, of all together."""


T = TypeVar("T")


class Backlog:
    """Counts work that waits, see `Shares`: a single item may be of any size, as that has limits of
    its own.
    """

    def __init__(self, *, max_items: int = MAX_ITEMS, max_size: int = MAX_SIZE) -> None:
        self._shares = Shares(max_items=max_items, max_size=max_size)

    @contextmanager
    def admitted(self, size: int) -> Iterator[None]:
        """Count one more of this size while the context is open. Raises RequestFailed (429)."""
        whose = WHOSE.get()
        if self._shares.is_full(whose, size):
            raise overloaded()
        with self._shares.counted(whose, size):
            yield

    async def in_thread(self, threads: TurnThreads, work: Callable[[], T], size: int) -> T:
        """Return the result of work of this size, done in a thread. Raises RequestFailed (429)."""
        with self.admitted(size):
            return await threads.run(work)


BODY_BYTES_KEY = "lightserve.body_bytes"
"""Key in the ASGI scope: the size of a body that was read as a whole."""
KEPT_BYTES_KEY = "lightserve.kept_bytes"
"""Key in the ASGI scope: the memory of what such a body said."""

INLINE_BYTES = 16 * 1024
"""Bodies up to this take a few milliseconds at worst and are parsed where they are."""
_PIECE_BYTES = 64 * 1024
_MAX_SHOWN_CHARS = 64

ModelT = TypeVar("ModelT", bound=pydantic.BaseModel)


class StrictModel(pydantic.BaseModel):
    """Base of all request bodies: no unknown fields, no conversions between types."""

    model_config = pydantic.ConfigDict(
        extra="forbid", strict=True, frozen=True, hide_input_in_errors=True, protected_namespaces=()
    )


def _whole(value: Any) -> Any:
    """Return a number without a fraction as an integer, as which JSON Schema knows it."""
    return int(value) if type(value) is float and value.is_integer() else value


Integer = Annotated[int, pydantic.BeforeValidator(_whole)]
"""An integer, also one that is written as 2.0."""


def whole_numbers(value: Any) -> Any:
    """Return a list of which the numbers without a fraction are integers, as `_whole` does."""
    # As a rule all are integers: that is seen ten times as fast as each one is looked at.
    is_plain = not isinstance(value, list) or float not in set(map(type, value))
    return value if is_plain else [_whole(item) for item in value]


WHOLE_NUMBERS = pydantic.BeforeValidator(whole_numbers)
"""Makes a list of integers one of `Integer`s."""


class BodyReader:
    """Parses bodies; long ones in a thread, as they can take longer than streams may wait."""

    def __init__(self, *, max_depth: int, max_bytes: int) -> None:
        """`max_bytes` of a body that is read, beside its pictures; what is parsed has others."""
        self._max_depth, self._max_bytes = max_depth, max_bytes
        self._backlog = Backlog()
        # One: with more, they would only take the interpreter from the event loop more often.
        self._threads = TurnThreads(1, "json")

    async def read(self, request: Request, model: type[ModelT]) -> ModelT:
        """Return the request's body as a `model`.

        Raises:
            InvalidRequest: too large (413), of another type (415), not strict JSON, or not what the
                model wants.
            RequestFailed: too many bodies are waiting.
            ClientGone: the client hung up while sending.
        """
        _check_content_type(request.headers.getlist("content-type"))
        # Joined at the end: bodies that grow side by side in one piece would take twice the memory.
        pieces: list[bytearray] = []
        try:
            async for chunk in request.stream():  # its size is limited: see `middleware`
                if not pieces or len(pieces[-1]) >= _PIECE_BYTES:
                    pieces.append(bytearray())
                pieces[-1] += chunk
        except ClientDisconnect as error:
            raise ClientGone from error
        request.scope[BODY_BYTES_KEY] = sum(map(len, pieces))
        parsed, kept_bytes = await self._parse(b"".join(pieces), model, self._max_bytes)
        request.scope[KEPT_BYTES_KEY] = kept_bytes
        return parsed

    async def parse(self, body: bytes, model: type[ModelT]) -> ModelT:
        """Return a body as a `model`.

        Raises:
            InvalidRequest: not strict JSON, or not what the model wants.
            RequestFailed: too many bodies are waiting.
        """
        parsed, _ = await self._parse(body, model, sys.maxsize)
        return parsed

    async def _parse(self, body: bytes, model: type[ModelT], max_bytes: int) -> tuple[ModelT, int]:
        """Do the same; return how much memory that takes, too."""
        parse = functools.partial(
            parse_model, body, model, max_depth=self._max_depth, max_bytes=max_bytes
        )
        if len(body) <= INLINE_BYTES:
            return parse()
        return await self._backlog.in_thread(self._threads, parse, len(body))

    def close(self) -> None:
        """Let running work end; drop what waits."""
        self._threads.close()


def _check_content_type(given: list[str]) -> None:
    """Refuse a body that does not say that it is JSON: any web page can have a browser send it."""
    if len(given) != 1 or given[0].partition(";")[0].strip().lower() != "application/json":
        shown = show(", ".join(given)) if given else "none"
        raise InvalidRequest(
            f"the body must come with the header Content-Type: application/json, got {shown}"
            " (curl: -H 'Content-Type: application/json')",
            code="unsupported_media_type",
            status=415,
        )


def parse_model(
    body: bytes, model: type[ModelT], *, max_depth: int, max_bytes: int = sys.maxsize
) -> tuple[ModelT, int]:
    """Return a body as a `model`, and how many bytes that takes; limits as those of `parse_json`.

    Raises:
        InvalidRequest: not strict JSON, or not what the model wants.
    """
    value = parse_json(body, max_depth=max_depth, max_bytes=max_bytes)
    return validated(value, model), memory_of(value)


def validated(value: Any, model: type[ModelT]) -> ModelT:
    """Return parsed JSON as a `model`. Raises InvalidRequest."""
    try:
        return model.model_validate(value)
    except pydantic.ValidationError as error:
        raise _complaint(error) from None


AN_OBJECT, OTHERWISE = "(object)", "(otherwise)"
"""Tags of the branches of a union of which one is an object, for `BY_KIND`. Without them pydantic
complains of each branch in turn, and calls them what Python does."""
BY_KIND = Discriminator(
    lambda value: AN_OBJECT if isinstance(value, dict | pydantic.BaseModel) else OTHERWISE
)


_TAG = re.compile(r"\(\w*\)")

UNKNOWN_PARAMETER = "unknown_parameter"
"""Code of errors about a field that there is not: the name is the client's own word."""
UNSUPPORTED_VALUE = "unsupported_value"
"""Type of validation errors with their own words, in a context of `field` and `complaint`."""


def by_type(names: Sequence[str], *, field: str = "type", default: str = "") -> Discriminator:
    """Tell the branches of a union of objects apart by a field: `type_tag` of its value is the tag.

    `default`: what an object without the field is.
    """

    def tag_of(value: Any) -> str:
        given = value.get(field, default) if isinstance(value, dict) else names[0]
        return type_tag(given) if isinstance(given, str) else type_tag("")

    known = f"{', '.join(names[:-1])} or {names[-1]}"
    return Discriminator(
        tag_of,
        custom_error_type=UNSUPPORTED_VALUE,
        custom_error_message="{complaint}",
        custom_error_context={"field": field, "complaint": f"must be {known}"},
    )


def only_type(name: str, *others: str | None) -> Any:
    """Return a validator of models whose `type` is `name`: of others no field is looked at."""

    def check(body: Any) -> Any:
        if isinstance(body, dict) and body.get("type", name) not in (name, *others):
            context = {"field": "type", "complaint": f"must be {name}"}
            raise PydanticCustomError(UNSUPPORTED_VALUE, "{complaint}", context)
        return body

    return pydantic.model_validator(mode="before")(check)


def type_tag(name: str) -> str:
    """Return the tag of the objects of a type; no field of ours is called like that."""
    return f"({name})"


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

_LENGTHS: dict[str, tuple[str, str, tuple[str, str]]] = {
    "too_short": ("at least", "min_length", ("entry", "entries")),
    "too_long": ("at most", "max_length", ("entry", "entries")),
    "string_too_short": ("at least", "min_length", ("character", "characters")),
    "string_too_long": ("at most", "max_length", ("character", "characters")),
}


def _complaint(error: pydantic.ValidationError) -> InvalidRequest:
    """Return the first thing that is wrong, in words; unknown fields before all others."""
    errors = error.errors(include_url=False)
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    kind, context, given = first["type"], first.get("ctx", {}), first["input"]
    num_own = len(first["loc"]) - (kind == "extra_forbidden")  # that name is the client's
    location = tuple(p for p in first["loc"][:num_own] if not _TAG.fullmatch(str(p)))
    location += first["loc"][num_own:]
    or_object = " or an object" if first["loc"][-1:] == (OTHERWISE,) else ""
    if kind == UNSUPPORTED_VALUE:  # found in the object that has the field
        location = (*location, context["field"])
    code = "invalid_value"
    if kind == "extra_forbidden":
        complaint, code = "is not supported", UNKNOWN_PARAMETER
    elif kind == UNSUPPORTED_VALUE:
        complaint, code = f"{context['complaint']}, got {show(given.get(location[-1]))}", kind
    elif kind == "missing":
        complaint, code = "is required", "missing_required_parameter"
    elif kind in _TYPE_NAMES:
        complaint = f"must be {_TYPE_NAMES[kind]}{or_object}, got {show(given)}"
        code = "invalid_type"
    elif kind in _BOUNDS:
        word, key = _BOUNDS[kind]
        complaint = f"must be {word} {context[key]}, got {show(given)}"
    elif kind in _LENGTHS:
        word, key, units = _LENGTHS[kind]
        unit = units[context[key] != 1]
        complaint = f"must have {word} {context[key]} {unit}, got {len(given)}"
    elif kind == "literal_error":
        complaint = f"must be {context['expected']}{or_object}, got {show(given)}"
    elif kind == "string_pattern_mismatch":
        complaint = f"must match {context['pattern']}, got {show(given)}"
    elif kind == "value_error":
        complaint = str(context["error"])
    else:
        complaint = "is not valid"
    param = _path(location)
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
        text = json.dumps(value[: _MAX_SHOWN_CHARS + 1] if isinstance(value, str) else value)
    except ValueError:  # an integer of thousands of digits
        return "a very long number"
    if len(text) <= _MAX_SHOWN_CHARS:
        return text
    return text[:_MAX_SHOWN_CHARS] + ('…"' if isinstance(value, str) else "…")


def printable(text: str) -> str:
    """Return a text that is to be found again or shown. Raises ValueError: control characters."""
    if not text.isprintable():
        raise ValueError(f"must not have control characters, got {show(text)}")
    return text
