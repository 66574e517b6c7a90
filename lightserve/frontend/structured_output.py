"""Fields that ask for structured output, the constraints they become, and their check."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, Tag

from lightserve.errors import GrammarError, InvalidRequest
from lightserve.frontend.errors import overloaded
from lightserve.frontend.json_body import (
    AN_OBJECT,
    BY_KIND,
    MAX_VALUES,
    OTHERWISE,
    Backlog,
    StrictModel,
    count_values,
)
from lightserve.messages.common import (
    Constraint,
    GrammarConstraint,
    JsonSchemaConstraint,
    RegexConstraint,
)
from lightserve.structured import MAX_SCHEMA_BYTES, closed, is_gbnf, yield_to_others

if TYPE_CHECKING:
    from llguidance import LLTokenizer


# ----------------------------------------------------------------------
# Checks constraints before a request is taken: off the event loop, bounded, each one once.
#
# Requests with the same one wait for the same check, however many come before it has ended.


NUM_THREADS = 2
MAX_WAITING = 64
"""Constraints, of however many requests each."""
MAX_KNOWN = 1024
START_TIMEOUT_S = 5.0
"""For a thread to begin: later is too much load, which says nothing about the constraint."""
COMPILE_TIMEOUT_S = 5.0
"""From then on; compiling by itself is bounded by its work (see `structured`)."""
LARGE_SHARE = 0.5
"""Of that time: who has had less of a processor is held up by others, not by the constraint."""


@dataclass
class _Thread:
    """Which thread works on a constraint, once one does."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    _clock_id: int = 0
    _start_s: float = 0.0

    def begin(self) -> None:
        """Note that it is the calling one."""
        self._clock_id = time.pthread_getcpuclockid(threading.get_ident())
        self._start_s = time.thread_time()

    def cpu_s(self) -> float:
        """Return what CPU time it has spent on the constraint."""
        return time.clock_gettime(self._clock_id) - self._start_s


@dataclass
class _Check:
    """One that has yet to end."""

    thread: _Thread
    work: asyncio.Future[str | None]
    waiting: list[Constraint]
    """It, until the thread takes it: its place among what threads have yet to do may stay."""
    num_waiting: int = 0


class ConstraintChecker:
    """Knows which constraints compile.

    llguidance is loaded with the first one. Grammars are compiled against a vocabulary of bytes:
    whether they are valid does not depend on the model's, which takes a hundred times the memory.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(
            NUM_THREADS, thread_name_prefix="grammar", initializer=yield_to_others
        )
        self._checks: dict[bytes, _Check] = {}
        self._known: OrderedDict[bytes, str | None] = OrderedDict()
        """By digest: what is wrong with a constraint, None if nothing is."""
        self._translations = Backlog(max_items=MAX_WAITING)

    async def in_lark(self, constraint: Constraint, *, param: str) -> Constraint:
        """Return a grammar in Lark's notation, and every other constraint as it is.

        Raises:
            InvalidRequest: it is in another notation, and cannot be translated.
            RequestFailed: too many are waiting.
        """
        if not (isinstance(constraint, GrammarConstraint) and is_gbnf(constraint.grammar)):
            return constraint
        grammar = constraint.grammar
        try:
            lark = await self._translations.in_thread(
                self._threads, functools.partial(_lark_of, grammar), len(grammar)
            )
        except GrammarError as error:
            raise _refusal(param, str(error)) from None
        return GrammarConstraint(grammar=lark)

    async def check(self, constraint: Constraint, *, param: str) -> None:
        """Check that a constraint can be enforced.

        Raises:
            InvalidRequest: it cannot; names the field and says why.
            RequestFailed: too many are waiting.
        """
        key = hashlib.blake2b(repr(constraint).encode(errors="replace"), digest_size=16).digest()
        if key not in self._known:
            self._known[key] = await self._in_thread(key, constraint, param)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        if (complaint := self._known[key]) is not None:
            raise _refusal(param, complaint)

    def close(self) -> None:
        """Let running work end; drop what waits."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, key: bytes, constraint: Constraint, param: str) -> str | None:
        check = self._checks.get(key)
        if check is None:
            if len(self._checks) >= MAX_WAITING:
                raise overloaded()
            self._checks[key] = check = self._begin(constraint)
        check.num_waiting += 1
        try:
            return await _result(check, param)
        finally:
            check.num_waiting -= 1
            if check.num_waiting == 0:
                check.work.cancel()  # no request needs it any more, if it has not ended
                check.waiting.clear()
                del self._checks[key]

    def _begin(self, constraint: Constraint) -> _Check:
        """Hand a constraint to a thread."""
        loop, thread, waiting = asyncio.get_running_loop(), _Thread(), [constraint]

        def work() -> str | None:
            thread.begin()
            loop.call_soon_threadsafe(thread.begun.set)
            return self._complaint(waiting.pop())

        return _Check(thread, loop.run_in_executor(self._threads, work), waiting)

    # ------------------------------------------------------------------ in a thread

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        from lightserve.structured import byte_vocabulary  # noqa: PLC0415

        return byte_vocabulary()

    def _complaint(self, constraint: Constraint) -> str | None:
        """Return what is wrong with a constraint."""
        # Most frontends never see one: llguidance is 10 MB.
        from lightserve.structured import compile_matcher  # noqa: PLC0415

        try:
            compile_matcher(constraint, self._vocabulary)
        except GrammarError as error:
            return str(error)
        return None


def _lark_of(grammar: str) -> str:
    from lightserve.structured import lark_of_gbnf  # noqa: PLC0415

    return lark_of_gbnf(grammar)


def _refusal(param: str, complaint: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param} cannot be enforced: {complaint}", param=param, code="invalid_constraint"
    )


async def _result(check: _Check, param: str) -> str | None:
    """Return what is wrong with a constraint. Raises what `ConstraintChecker.check` does."""
    try:
        await asyncio.wait_for(check.thread.begun.wait(), START_TIMEOUT_S)
    except TimeoutError:
        raise overloaded() from None
    try:
        return await asyncio.wait_for(asyncio.shield(check.work), COMPILE_TIMEOUT_S)
    except TimeoutError:
        if check.thread.cpu_s() < LARGE_SHARE * COMPILE_TIMEOUT_S:
            raise overloaded() from None
        raise InvalidRequest(
            f"{param} takes more than {COMPILE_TIMEOUT_S:g} s to compile",
            param=param,
            code="invalid_constraint",
        ) from None


# ----------------------------------------------------------------------
# Fields that ask for structured output, and the constraints that they become.
#
# `response_format` as OpenAI has it, always enforced, whether `strict` or not; `structured_outputs`
# as vLLM has it: exactly one of json, regex, grammar (Lark or GBNF) and choice; and other names of
# its parts, as SGLang and older versions of vLLM have them.


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


ConstraintSpec = tuple[Constraint, str]
"""A constraint that has yet to be checked, and the field that it comes from."""


def json_constraint(schema: Any) -> JsonSchemaConstraint:
    """Return the constraint of a JSON schema, as a value or as text."""
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return JsonSchemaConstraint(schema=text)


def spec_of_format(response_format: ResponseFormat | None) -> ConstraintSpec | None:
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


def spec_of_outputs(outputs: StructuredOutputs | None) -> ConstraintSpec | None:
    """Return what `structured_outputs` asks for. Raises InvalidRequest."""
    if outputs is None:
        return None
    given = {
        "json": outputs.json_,
        "regex": outputs.regex,
        "grammar": outputs.grammar,
        "choice": outputs.choice,
    }
    specs = [
        (_constraint(kind, value), f"structured_outputs.{kind}")
        for kind, value in given.items()
        if value is not None
    ]
    if len(specs) != 1:
        raise InvalidRequest(
            "structured_outputs must have exactly one of json, regex, grammar and choice, got"
            f" {len(specs)}",
            param="structured_outputs",
        )
    return specs[0]


def specs_of_aliases(fields: Mapping[str, Any]) -> list[ConstraintSpec | None]:
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


def spec_of_grammar(grammar: NativeGrammar | None) -> ConstraintSpec | None:
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
    specs: list[ConstraintSpec | None],
    checker: ConstraintChecker,
    *,
    can_end: bool,
    barred: list[str],
    closes: bool,
) -> Constraint | None:
    """Return the one constraint of a request, checked.

    Args:
        specs: at most one of them may be there.
        checker: the process's.
        can_end: whether the model has a token that ends an output.
        barred: fields of the request that keep the grammar from deciding over tokens or the end.
        closes: whether objects of JSON schemas are closed, see `closed`.

    Raises:
        InvalidRequest: more than one, one that cannot be enforced, or a barred field beside it.
        RequestFailed: too many are being checked.
    """
    given = [spec for spec in specs if spec is not None]
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
