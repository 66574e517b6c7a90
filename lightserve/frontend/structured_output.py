"""Fields that ask for structured output, the constraints they become, and their check."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import socket
import subprocess
import threading
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, Field, Tag

from lightserve.errors import GrammarError, InvalidRequest
from lightserve.frontend.errors import RequestFailed, overloaded
from lightserve.frontend.json_body import (
    AN_OBJECT,
    BY_KIND,
    MAX_VALUES,
    OTHERWISE,
    StrictModel,
    count_values,
)
from lightserve.grammar_process import (
    COMMAND,
    ENCODER,
    HEADER,
    OUT_OF_MEMORY,
    Verdict,
    complaint_of_death,
    environment,
)
from lightserve.messages.common import (
    Constraint,
    GrammarConstraint,
    JsonSchemaConstraint,
    RegexConstraint,
)
from lightserve.structured import (
    MAX_SCHEMA_BYTES,
    as_written,
    check_digits,
    check_size,
    closed,
    unforced,
)

log = logging.getLogger(__name__)


# ----------------------------------------------------------------------
# Checks constraints before a request is taken: in a process apart, bounded, each one once.
#
# Requests of a sharer with the same one wait for the same check, however many come before it has
# ended. Who shares the server with others goes first if its checks have taken least; where too much
# waits, the one that has most waiting loses its newest.


MAX_WAITING = 64
"""Constraints, of however many requests each."""
MAX_KNOWN = 1024
MAX_SHARERS = 1024
"""Whose checks' time is remembered, beside those that have some waiting."""
START_TIMEOUT_S = 20.0
"""For a check to begin: later is too much load, which says nothing about the constraint."""
END_TIMEOUT_S = 30.0
"""From then on; `grammar_process` ends what takes too much of a processor long before that."""

_VERDICTS = msgspec.msgpack.Decoder(Verdict)


class GrammarProcess:
    """A process that compiles constraints; started with the first one, and anew where it ended.

    llguidance is loaded there. Grammars are compiled against a vocabulary of bytes: whether they
    are valid does not depend on the model's, which takes a hundred times the memory.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def judge(self, constraint: Constraint) -> Verdict:
        """Return what is found of a constraint; one at a time.

        Raises:
            RequestFailed: nothing was, for reasons that are not the constraint's.
        """
        for _ in range(2):
            watch = asyncio.create_task(self._end_if_asleep())
            try:
                async with asyncio.timeout(END_TIMEOUT_S):
                    return _VERDICTS.decode(await self._ask(ENCODER.encode(constraint)))
            except TimeoutError:
                await self._end()
                raise overloaded() from None
            except (OSError, EOFError, msgspec.MsgspecError):
                was_asleep = watch.done()
                if (code := await self._end()) == 0:
                    continue  # it had worn out
                if complaint := complaint_of_death(OUT_OF_MEMORY if was_asleep else code):
                    return Verdict(complaint=complaint)
                log.error("the process that compiles constraints ended with code %d", code)
                break
            finally:
                watch.cancel()
        raise RequestFailed(
            "constraints cannot be checked at the moment; try again",
            code="constraint_check_unavailable",
            status=503,
        )

    async def _end_if_asleep(self) -> None:
        """End the process when it waits for itself: where memory fails, it may hold a lock."""
        num_asleep = 0
        while num_asleep < _MAX_ASLEEP:
            await asyncio.sleep(_LOOK_EVERY_S)
            num_asleep = num_asleep + 1 if self._is_asleep() else 0
        if self._process is not None:
            self._process.kill()  # the judge, which reads from it, notices

    def _is_asleep(self) -> bool:
        """Whether it neither computes nor waits for a processor or a disk."""
        if self._process is None:
            return False
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
            return state[0] == "S"
        return False

    async def _ask(self, data: bytes) -> bytes:
        if self._writer is None:
            await self._start()
        assert self._writer is not None
        self._writer.write(HEADER.pack(len(data)) + data)
        await self._writer.drain()
        assert self._reader is not None
        (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        return await self._reader.readexactly(length)

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(COMMAND, stdin=theirs.fileno(), env=environment())
        self._reader, self._writer = await asyncio.open_connection(sock=ours)

    async def _end(self) -> int:
        """End it, and return its exit code; 0 if there is none. The event loop does not wait."""
        process = self._let_go()
        return 0 if process is None else await asyncio.to_thread(_exit_code, process)

    def close(self) -> None:
        """End it; a thread waits for its end."""
        if (process := self._let_go()) is not None:
            process.kill()
            threading.Thread(target=process.wait, daemon=True).start()

    def _let_go(self) -> subprocess.Popen[bytes] | None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        process, self._process = self._process, None
        return process


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of a process, which is killed unless it ends at once."""
    # A process that has ended by itself says why: its end of the socket closes a moment before.
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(timeout=_LAST_MOMENT_S)
    process.kill()
    return process.wait()


_LAST_MOMENT_S = 0.05
_LOOK_EVERY_S, _MAX_ASLEEP = 0.25, 4


@dataclass(eq=False)
class _Check:
    """One that has yet to end."""

    digest: bytes
    constraint: Constraint
    sharer: str
    verdict: asyncio.Future[Verdict]
    patience: asyncio.TimerHandle | None = None
    """Gives it up unless it begins in time."""
    num_waiting: int = 0
    has_begun: bool = False

    @property
    def key(self) -> tuple[str, bytes]:
        """Requests with equal keys share a check; each sharer has a queue of its own."""
        return self.sharer, self.digest


class ConstraintChecker:
    """Knows which constraints compile."""

    def __init__(self) -> None:
        self._process = GrammarProcess()
        self._checks: dict[tuple[str, bytes], _Check] = {}
        self._lines: dict[str, deque[_Check]] = {}
        """Checks that wait, by sharer."""
        self._taken_s: dict[str, float] = {}
        """Seconds of checks so far, by sharer; one that returns starts at the least of them."""
        self._work: asyncio.Task[None] | None = None
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        """By digest."""

    async def check(self, constraint: Constraint, *, param: str, sharer: str = "") -> Constraint:
        """Return a constraint that can be enforced as it is to be handed on: grammars in Lark.

        Raises:
            InvalidRequest: it cannot be enforced; names the field and says why.
            RequestFailed: too many are waiting.
        """
        try:
            check_size(constraint)
        except GrammarError as error:
            raise _refusal(param, str(error)) from None
        digest = hashlib.blake2b(repr(constraint).encode(), digest_size=16).digest()
        verdict = self._known.get(digest)
        if verdict is None:
            verdict = await self._wait(
                self._checks.get((sharer, digest)) or self._enter(digest, constraint, sharer)
            )
        else:
            self._known.move_to_end(digest)
        if verdict.complaint:
            raise _refusal(param, verdict.complaint)
        return verdict.translated or constraint

    def close(self) -> None:
        """End what runs; drop what waits."""
        if self._work is not None:
            self._work.cancel()
        self._process.close()

    async def _wait(self, check: _Check) -> Verdict:
        check.num_waiting += 1
        try:
            return await asyncio.shield(check.verdict)
        finally:
            check.num_waiting -= 1
            if check.num_waiting == 0 and not check.has_begun:
                self._leave(check)  # no request needs it any more

    def _enter(self, digest: bytes, constraint: Constraint, sharer: str) -> _Check:
        """Put a constraint in line. Raises RequestFailed where there is no place for it."""
        num_own = len(self._lines.get(sharer, ())) + 1
        if sum(map(len, self._lines.values())) >= MAX_WAITING:
            longest = max(self._lines.values(), key=len, default=deque())
            if len(longest) <= num_own:
                raise overloaded()
            self._refuse(longest[-1])
        loop = asyncio.get_running_loop()
        check = _Check(digest, constraint, sharer, loop.create_future())
        self._checks[check.key] = check
        if sharer not in self._lines:
            least_s = min((self._taken_s[other] for other in self._lines), default=0.0)
            self._taken_s[sharer] = max(least_s, self._taken_s.get(sharer, 0.0))
        self._lines.setdefault(sharer, deque()).append(check)
        check.patience = loop.call_later(START_TIMEOUT_S, self._refuse, check)
        if self._work is None or self._work.done():
            self._work = loop.create_task(self._check_all())
        return check

    def _refuse(self, check: _Check) -> None:
        """Give up a check that has not begun."""
        if self._checks.get(check.key) is check and not check.has_begun:
            self._leave(check)
            check.verdict.set_exception(overloaded())

    def _leave(self, check: _Check) -> None:
        if self._checks.get(check.key) is check:  # no later one with the same constraint
            del self._checks[check.key]
            _end_patience(check)
            self._lines[check.sharer].remove(check)
            if not self._lines[check.sharer]:
                del self._lines[check.sharer]

    async def _check_all(self) -> None:
        """Check one after the other, until none waits."""
        loop = asyncio.get_running_loop()
        while self._lines:
            sharer = min(self._lines, key=self._taken_s.__getitem__)
            check = self._lines[sharer].popleft()
            check.has_begun = True
            _end_patience(check)
            if not self._lines[sharer]:
                del self._lines[sharer]
            start_s = loop.time()
            try:
                known = self._known.get(check.digest)  # from another sharer's, meanwhile
                self._learn(check, known or await self._process.judge(check.constraint))
            except Exception as error:  # others' checks go on, whatever this one has met
                failure = error if isinstance(error, RequestFailed) else _broken(error)
                if check.num_waiting and not check.verdict.done():
                    check.verdict.set_exception(failure)
            finally:
                del self._checks[check.key]
                self._taken_s[sharer] += loop.time() - start_s
                if len(self._taken_s) > MAX_SHARERS:
                    self._taken_s = {name: self._taken_s[name] for name in {*self._lines, sharer}}

    def _learn(self, check: _Check, verdict: Verdict) -> None:
        check.verdict.set_result(verdict)
        self._known[check.digest] = verdict
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)


def _broken(error: Exception) -> RequestFailed:
    """Return what clients learn of an error that is none of their constraint's."""
    log.error("the check of a constraint broke down", exc_info=error)
    return RequestFailed("an internal error occurred", code="internal_error", status=500)


def _end_patience(check: _Check) -> None:
    """Forget the time by which a check must begin: its constraint may be large."""
    if check.patience is not None:
        check.patience.cancel()


def _refusal(param: str, complaint: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param} cannot be enforced: {complaint}", param=param, code="invalid_constraint"
    )


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
    text = schema if isinstance(schema, str) else as_written(schema)
    return JsonSchemaConstraint(schema=text)


def spec_of_format(response_format: ResponseFormat | None) -> ConstraintSpec | None:
    """Return what `response_format` asks for. Raises InvalidRequest."""
    if response_format is None:
        return None
    asked = response_format.json_schema
    if (response_format.type == "json_schema") != (asked is not None):
        raise InvalidRequest(
            "response_format.json_schema must be given with the type json_schema, and no other",
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
    if kind == "regex":
        return RegexConstraint(pattern=value)
    return GrammarConstraint(grammar=unforced(value))


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
    sharer: str,
    can_end: bool,
    barred: list[str],
    closes: bool,
) -> Constraint | None:
    """Return the one constraint of a request, checked.

    Args:
        specs: at most one of them may be there.
        checker: the process's.
        sharer: whose turn its check is, see `sharer_of`.
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
    try:  # while numbers are as they were written: closing rounds them
        check_size(constraint)
        check_digits(constraint)
    except GrammarError as error:
        raise _refusal(param, str(error)) from None
    if closes and isinstance(constraint, JsonSchemaConstraint):
        constraint = _closed_constraint(constraint)
    return await checker.check(constraint, param=param, sharer=sharer)


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
