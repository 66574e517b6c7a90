"""Constraints compiled by llguidance, within limits of size and work.

The limits are counts of work, not of time: the same grammar is accepted or refused everywhere,
and what a frontend has compiled compiles on rank 0 too. Measured on one core, what they let
through compiles within a tenth of a second, most schemas within a millisecond; llguidance lets
other threads run meanwhile. Numbers in a constraint can stand for work that these counts do not
see: `grammar_process` bounds that.

Optional properties are counted here: llguidance compiles a thousand, and fails when the object
begins. (Its limit is 1,000 items; with a higher one the mask of a comma behind 1,000 takes 30 ms,
of 250 it takes 2.)
"""

from __future__ import annotations

import decimal
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from lightserve.errors import GrammarError
from lightserve.messages.common import (
    Constraint,
    GrammarConstraint,
    JsonSchemaConstraint,
    RegexConstraint,
)
from lightserve.tokenization.tokenizer import Tokenizer

# What llguidance knows of a vocabulary: the bytes of each token, and which ones end an output.


class _Tokens:
    """The form in which llguidance wants a vocabulary."""

    bos_token_id: int | None = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_ids: Sequence[int],
        eos_token_id: int,
        encode: Callable[[str], list[int]],
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_token_id
        self._encode = encode
        self._ids: dict[bytes, int] = {}
        self._longest_token = 0

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens of a text: where a grammar leaves but one, its usual tokens are drawn.

        Some tokenizers put a space in front, as if the output began here: then the longest tokens
        that fit will do.
        """
        text = text if isinstance(text, str) else text.decode()
        token_ids = self._encode(text)
        data = text.encode()
        if b"".join(self.tokens[token_id] for token_id in token_ids) == data:
            return token_ids
        return self._longest(data)

    def _longest(self, data: bytes) -> list[int]:
        if not self._ids:
            special = set(self.special_token_ids)
            self._ids = {t: i for i, t in enumerate(self.tokens) if i not in special}
            self._longest_token = max(map(len, self._ids))
        found: list[int] = []
        while data:
            lengths = range(min(len(data), self._longest_token), 0, -1)
            length = next((n for n in lengths if data[:n] in self._ids), 0)
            if length == 0:
                break  # the vocabulary has no token for this byte: what follows stays free
            found.append(self._ids[data[:length]])
            data = data[length:]
        return found


def byte_vocabulary() -> LLTokenizer:
    """Return a vocabulary of the 256 bytes and an end: enough to check a grammar, in no memory."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]
    source = _Tokens(tokens, [256], 256, lambda text: list(text.encode()))
    return LLTokenizer(TokenizerWrapper(source), slices=[])


def model_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    """Return a model's vocabulary; ids that the tokenizer does not know are never allowed.

    The tokenizer must have ids that end an output.
    """
    special = {token_id for token_id in range(vocab_size) if tokenizer.is_special(token_id)}
    special |= set(tokenizer.eos_token_ids)
    tokens = [_token_bytes(tokenizer, token_id) for token_id in range(vocab_size)]
    eos_token_ids = list(tokenizer.eos_token_ids)
    source = _Tokens(
        tokens,
        sorted(special),
        eos_token_ids[0],
        lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
    return LLTokenizer(TokenizerWrapper(source), n_vocab=vocab_size, eos_token=eos_token_ids)


def _token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    # A name of its own for each id without one: equal names would be one token.
    return tokenizer.bytes_of(token_id) or b"<|unused %d|>" % token_id


_MAX_COMPLAINT_CHARS = 300
_MAX_FIRST_OPTIONAL = 240
"""Optional properties of an object before the first required one: four items each of `_limits`."""
_MAX_OPTIONAL = 900
"""Optional properties of an object."""
_MAX_MULTIPLE = 10_000
"""Largest `multipleOf`, in units of its last decimal place: each remainder is a lexer state, of
which there may be 20,000."""


def text_of(constraint: Constraint) -> str:
    """Return the schema, pattern or grammar."""
    if isinstance(constraint, JsonSchemaConstraint):
        return constraint.schema
    return constraint.pattern if isinstance(constraint, RegexConstraint) else constraint.grammar


def compile_matcher(constraint: Constraint, vocabulary: LLTokenizer) -> LLMatcher:
    """Return a matcher at the start of an output; at least one token may come first.

    Raises:
        GrammarError: too large, not valid, not supported, beyond the limits, or nothing fits it.
    """
    check_size(constraint)
    for schema, _, _ in _constraint_schemas(constraint):
        _check_properties(schema)
    try:
        matcher = LLMatcher(vocabulary, _source(constraint), log_level=0, limits=_limits())
    except ValueError as error:
        raise GrammarError(_one_line(str(error))) from error
    if matcher.is_error():
        raise GrammarError(_one_line(matcher.get_error()))
    mask = matcher.compute_bitmask()
    if matcher.is_error() or not any(mask):
        too_much = "TooComplex" in matcher.get_error()
        raise GrammarError("it is too complex" if too_much else "no output can satisfy it")
    return matcher


def in_lark(constraint: Constraint) -> Constraint:
    """Return a grammar in Lark's notation, and every other constraint as it is.

    Raises:
        GrammarError: it is in another notation, and cannot be translated.
    """
    if not isinstance(constraint, GrammarConstraint):
        return constraint
    grammar = constraint.grammar.removesuffix(UNFORCED)
    if not is_gbnf(grammar):
        return constraint
    return GrammarConstraint(grammar=unforced(lark_of_gbnf(grammar)))


def lark_of_gbnf(grammar: str) -> str:
    """Return a grammar in llama.cpp's notation in Lark's.

    Raises:
        GrammarError: too large, or not valid.
    """
    if len(grammar) > MAX_GBNF_CHARS:
        raise GrammarError(
            f"a grammar with root ::= must be at most {MAX_GBNF_CHARS} characters long, got"
            f" {len(grammar)}"
        )
    try:
        return gbnf_to_lark(grammar)
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None
    except Exception as error:  # it has no kind of its own for what is not valid
        raise GrammarError(_one_line(str(error))) from error


def _source(constraint: Constraint) -> str:
    """Return the constraint in llguidance's own form. Raises ValueError for what is not JSON."""
    text = _without_annotations(constraint)
    if isinstance(constraint, JsonSchemaConstraint):
        return LLMatcher.grammar_from_json_schema(
            text, overrides={"whitespace_pattern": WHITESPACE}
        )
    if isinstance(constraint, RegexConstraint):
        return LLMatcher.grammar_from_regex(text)
    return LLMatcher.grammar_from_lark(text)


FORMATS = frozenset(
    "date time date-time duration email hostname ipv4 ipv6 uuid uri".split()  # noqa: SIM905
)
"""Formats of strings in JSON schemas that llguidance enforces. It refuses most others, which are
annotations, as JSON Schema has it (2020-12, Validation, section 7.2.1)."""


def _without_annotations(constraint: Constraint) -> str:
    """Return the text of a constraint, its schemas without formats that are not enforced."""
    text = text_of(constraint)
    if '"format"' not in text:
        return text
    parts, done = list[str](), 0
    for schema, start, end in _constraint_schemas(constraint):
        with suppress(RecursionError):
            if (enforced := _enforced(schema)) != schema:
                parts += (text[done:start], as_written(enforced))
                done = end
    return "".join(parts) + text[done:]


def _enforced(schema: Any, *, is_map: bool = False) -> Any:
    """Return a schema without formats that are not enforced. Raises RecursionError.

    `is_map`: it is an object of schemas by name.
    """
    if isinstance(schema, list):
        return [_enforced(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if is_map or key not in ("const", "enum", "format"):
            kept[key] = _enforced(value, is_map=not is_map and key in _MAPS)
        elif key != "format" or not isinstance(value, str) or value in FORMATS:
            kept[key] = value
    return kept


def check_size(constraint: Constraint) -> None:
    """Raise GrammarError for a text that is too long, or none."""
    limit, text = MAX_GRAMMAR_BYTES, text_of(constraint).removesuffix(UNFORCED)
    if isinstance(constraint, JsonSchemaConstraint):
        limit = MAX_SCHEMA_BYTES
    elif isinstance(constraint, RegexConstraint):
        limit = MAX_REGEX_BYTES
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise GrammarError("it holds half of a surrogate pair, which is not Unicode text") from None
    if size > limit:
        raise GrammarError(f"it must be at most {limit} bytes long, got {size}")


class RoundedNumber(float):
    """A number of which a float64 does not keep every digit."""

    def __init__(self, text: str) -> None:
        """`text`: as it is written."""
        self.text = text


_MAX_SHOWN_DIGITS = 40


def is_rounded(text: str) -> bool:
    """Return whether a float64 does not keep every digit of a number in JSON with a fraction or an
    exponent.

    Short numbers, which nearly all are, cost two comparisons: 15 digits are always kept.
    """
    value = float(text)
    if len(text) <= 16 and (abs(value) >= sys.float_info.min or "-" not in text[1:]):
        return False
    try:
        return decimal.Decimal(repr(value)) != decimal.Decimal(text)
    except decimal.InvalidOperation:  # an exponent beyond all bounds
        return True


def number_of(text: str) -> float:
    """Return a number in JSON with a fraction or an exponent, with its text if it is rounded."""
    return RoundedNumber(text) if is_rounded(text) else float(text)


def as_written(value: Any) -> str:
    """Return parsed JSON as text, with every digit of numbers of `number_of`.

    Raises:
        RecursionError: it is nested too deeply.
    """
    return _write(value) if _has_rounded(value) else _plain_json(value)


_plain_json = json.JSONEncoder(ensure_ascii=False).encode


def _write(value: Any) -> str:
    if isinstance(value, RoundedNumber):
        return value.text
    if isinstance(value, dict):
        pairs = (f"{_plain_json(key)}: {_write(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_write, value)) + "]"
    return _plain_json(value)


def _has_rounded(value: Any) -> bool:
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, RoundedNumber):
            return True
        if isinstance(inner, dict | list):
            waiting.extend(inner.values() if isinstance(inner, dict) else inner)
    return False


def check_digits(constraint: Constraint) -> None:
    """Raise GrammarError for numbers in schemas that would not be enforced as they are written."""
    if _LONG_NUMBER.search(text_of(constraint)) is not None:
        for schema, _, _ in _constraint_schemas(constraint):
            _check_properties(schema)


# 16 digits, a point among them or not, or an exponent of three.
_LONG_NUMBER = re.compile(r"[0-9.]{16}|[eE]-[0-9]{3}")


def _constraint_schemas(constraint: Constraint) -> Iterator[tuple[Any, int, int]]:
    """Yield its JSON schemas, and where each begins and ends; llguidance says what is wrong with
    those that are no JSON.
    """
    text, starts = text_of(constraint), [0]
    if isinstance(constraint, RegexConstraint):
        return
    if isinstance(constraint, GrammarConstraint):
        starts = [found.end() for found in re.finditer(r"%json\s*", text)]
    for start in starts:
        with suppress(ValueError, RecursionError):
            schema, end = json.JSONDecoder(parse_float=number_of).raw_decode(text, start)
            yield schema, start, end


def _check_properties(schema: Any) -> None:
    """Refuse objects, wherever they stand, whose properties or numbers cannot be enforced."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            waiting += node.values()
            _check_object(node)
            _check_numbers(node)
            _check_multiple(node.get("multipleOf"))


def _check_multiple(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return
    with suppress(ArithmeticError):
        digits, places = decimal.Decimal(str(value)).as_tuple()[1:]
        units = int("".join(map(str, digits))) * 10 ** max(0, min(int(places), 32))
        if units > _MAX_MULTIPLE:
            raise GrammarError(
                f"multipleOf may be at most {_MAX_MULTIPLE} units of its last decimal place, got"
                f" {value}"
            )


def _check_object(schema: dict[str, Any]) -> None:
    parts = schema.get("allOf")
    names, required = list[str](), set[str]()
    for part in (schema, *(parts if isinstance(parts, list) else ())):
        if not isinstance(part, dict):
            continue
        if isinstance(properties := part.get("properties"), dict):
            names += properties
        if isinstance(listed := part.get("required"), list):
            required.update(name for name in listed if isinstance(name, str))
    is_optional = [name not in required for name in names]
    if (count := sum(is_optional)) > _MAX_OPTIONAL:
        raise GrammarError(
            f"an object may have at most {_MAX_OPTIONAL} optional properties, got {count}"
        )
    first = is_optional.index(False) if False in is_optional else len(is_optional)
    if first > _MAX_FIRST_OPTIONAL:
        raise GrammarError(
            f"an object may have at most {_MAX_FIRST_OPTIONAL} optional properties before its first"
            f" required one, got {first}"
        )


_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAX_EXACT = 2**53 - 1
"""Largest integer: llguidance has numbers of schemas as float64, and would write a rounded one."""


def _check_numbers(schema: dict[str, Any]) -> None:
    """Refuse numbers that would be rounded where they choose or bound values."""
    waiting = [(key, schema[key]) for key in (*_BOUNDS, "const") if key in schema]
    values = schema.get("enum")
    waiting += [("enum", value) for value in values] if isinstance(values, list) else []
    while waiting:
        key, value = waiting.pop()
        if key in ("const", "enum") and isinstance(value, list):
            waiting += [(key, item) for item in value]
        elif key in ("const", "enum") and isinstance(value, dict):
            waiting += [(key, item) for item in value.values()]
        elif isinstance(value, RoundedNumber):
            raise GrammarError(
                f"a number under {key} must have no more digits than a float64 keeps, got"
                f" {_shown(value.text)}, which would be read as {float(value)!r}"
            )
        elif _is_whole(value, key) and abs(value) > _MAX_EXACT:
            shown = _shown(str(value)) if abs(value) < 10**40 else _TOO_LONG
            raise GrammarError(
                f"an integer under {key} must be from -{_MAX_EXACT} to {_MAX_EXACT}, got {shown}"
            )


_TOO_LONG = f"one of more than {_MAX_SHOWN_DIGITS} digits"


def _shown(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_DIGITS + 1 else _TOO_LONG


def _is_whole(value: Any, key: str) -> bool:
    """Whether it is an integer to llguidance: bounds like 1e20 are, and would be cut off."""
    is_bound = key in _BOUNDS and isinstance(value, float) and math.isfinite(value)
    return isinstance(value, int) or (is_bound and value.is_integer())


def _limits() -> LLParserLimits:
    return LLParserLimits(
        max_items_in_row=1000,
        initial_lexer_fuel=100_000,
        step_lexer_fuel=50_000,
        step_max_items=5_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def _one_line(text: str) -> str:
    text = " ".join(text.replace("<non-verbose/>", "").split())
    return text if len(text) <= _MAX_COMPLAINT_CHARS else text[:_MAX_COMPLAINT_CHARS] + "…"


# ----------------------------------------------------------------------
# Closes the objects of a JSON schema: `additionalProperties: false` where nothing is said of it.
#
# Many clients send schemas without it and expect objects with the named properties alone. Objects
# that name none stay open, and so do those over which more than one schema decides, as in `allOf`:
# there each would forbid what the other names.


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
"""Keywords that say which other properties there may be."""


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
"""Longest grammar that is translated: a tenth of a second."""

MiB = 1024 * 1024
MAX_COMPILED_BYTES = 32 * MiB
"""Memory that a compiled constraint may take at the start of an output."""

UNFORCED = '\n%llguidance {"no_forcing": true}\n'
"""At the end of a client's grammar, as the last such line decides: where a grammar leaves one text,
llguidance would spell all of it ahead, and a few repetitions in each other make gigabytes of it."""

_GBNF_ROOT = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)

WHITESPACE = r" |\r?\n[ \t]{0,16}"
"""Blanks between JSON's tokens: a space, or a new line and its indentation. Without a
bound a model that is lost writes blanks until its tokens are used up."""


def is_gbnf(grammar: str) -> bool:
    """Return whether a grammar is in llama.cpp's notation, as xgrammar has it; else it is Lark."""
    return _GBNF_ROOT.search(grammar) is not None


def unforced(grammar: str) -> str:
    """Return a client's grammar with `UNFORCED`."""
    return grammar + UNFORCED


def yield_to_others(niceness: int = 10) -> None:
    """Lower the priority of the calling thread, and of what it will start, by so much.

    Its work must not slow down what is served already.
    """
    os.nice(niceness)
