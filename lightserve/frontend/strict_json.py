"""Strict JSON from bytes that a stranger wrote.

Refused beyond what RFC 8259 refuses: NaN and Infinity, numbers too large for a float, integers of
thousands of digits, duplicate keys, deep nesting, more objects and lists than any request needs.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from lightserve.errors import InvalidRequest

DEFAULT_MAX_DEPTH = 64
MAX_CONTAINERS = 65_536
MAX_STRINGS = 262_144
MAX_KEYS = 4096
"""Of one object. Each unknown one costs the validation of models a complaint."""
MAX_VALUES = 65_536
"""Of JSON that is handed on, to be written down again in one go: schemas, tools, arguments."""
_MAX_DIGITS = 4000

# A string, though its end may be missing, or a bracket. Possessive: linear whatever comes. What
# they begin with comes first: so all else is passed over in a third of the time, in which no
# other thread runs.
_TOKEN = re.compile(rb'["\[{\]}](?:(?<=")[^"\\]*+(?:\\.[^"\\]*+)*+"?)?+', re.DOTALL)
_MARK = re.compile(r'["\[{,](?:(?<=")[^"\\]*+(?:\\.[^"\\]*+)*+"?)?+', re.DOTALL)
_OPEN, _CLOSE = frozenset((b"[", b"{")), frozenset((b"]", b"}"))


class _StrictJsonError(ValueError):
    """JSON that Python's parser would take."""


def parse_json(body: bytes, *, max_depth: int = DEFAULT_MAX_DEPTH) -> Any:
    """Parse strict JSON. Raises InvalidRequest.

    Takes about a quarter of a second for 4 MiB at worst, nearly all of it in Python code, so that
    other threads get their turns.
    """
    try:
        _check_shape(body, max_depth)
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


def _check_shape(body: bytes, max_depth: int) -> None:
    """Look at brackets and strings alone, before anything is built from them."""
    depth = num_containers = num_strings = 0
    for match in _TOKEN.finditer(body):
        token = match.group() if match.end() - match.start() == 1 else b""
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


def _refuse_constant(name: str) -> float:
    raise _StrictJsonError(f"{name} is not a number")


def _finite_float(text: str) -> float:
    value = float(text)
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
