"""Templates that write text and check it: one set of tables for both directions.

A *template* is a sentence with three kinds of mark:

    {fruit}          a free slot: any entry of table `fruit`, uniformly
    <hero=name>      a binding: any entry of table `name`, remembered as `hero`
    <hero>           a reference: the remembered value again

A *script* is a sequence of steps; a step is a tuple of alternative templates, one of which is
taken uniformly; the empty template skips the step. Sentences are joined by one space.

`expand` draws from that distribution and counts its entropy; `match` parses with it. Because both
walk the same parts, the acceptor cannot drift from the generator. Pure: no state, no clock.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from random import Random
from typing import NamedTuple

Env = Mapping[str, str]
"""Remembered values by variable name."""
Tables = Mapping[str, Sequence[str]]
"""Entries by table name; entries of a table are distinct."""
Script = tuple[tuple[str, ...], ...]
"""Steps of alternative templates."""


class Literal(NamedTuple):
    """Text that stands for itself."""

    text: str


class Slot(NamedTuple):
    """Any entry of a table; remembered as `variable` unless that is empty."""

    table: str
    variable: str


class Reference(NamedTuple):
    """A value that an earlier slot remembered."""

    variable: str


Part = Literal | Slot | Reference

_MARK = re.compile(r"\{(?P<free>\w+)\}|<(?P<var>\w+)(?:=(?P<table>\w+))?>")


@cache
def parse_template(template: str) -> tuple[Part, ...]:
    """Split a template into its parts."""
    parts: list[Part] = []
    end = 0
    for mark in _MARK.finditer(template):
        if mark.start() > end:
            parts.append(Literal(template[end : mark.start()]))
        end = mark.end()
        if mark["free"]:
            parts.append(Slot(mark["free"], ""))
        elif mark["table"]:
            parts.append(Slot(mark["table"], mark["var"]))
        else:
            parts.append(Reference(mark["var"]))
    if end < len(template):
        parts.append(Literal(template[end:]))
    return tuple(parts)


class Expansion(NamedTuple):
    """A drawn text, what it remembered, and minus the log of its probability."""

    text: str
    env: Env
    nats: float


class Grammar:
    """Draws and parses templates over one set of tables.

    `derive` maps a binding (variable, value) to all values it brings along, itself included
    (a name brings its pronouns).
    """

    def __init__(self, tables: Tables, derive: Callable[[str, str], dict[str, str]]) -> None:
        self._tables = tables
        self._derive = derive

    def expand(self, template: str, *, env: Env, rng: Random) -> Expansion:
        """Draw one text from a template; advances `rng`."""
        words: list[str] = []
        nats = 0.0
        for part in parse_template(template):
            match part:
                case Literal(text):
                    words.append(text)
                case Reference(variable):
                    words.append(env[variable])
                case Slot(table, variable):
                    entries = self._tables[table]
                    value = rng.choice(entries)
                    nats += math.log(len(entries))
                    words.append(value)
                    env = self._bind(env, variable, value)
        return Expansion("".join(words), env, nats)

    def expand_script(self, script: Script, *, env: Env, rng: Random) -> Expansion:
        """Draw one text from a script; advances `rng`."""
        sentences: list[str] = []
        nats = 0.0
        for step in script:
            drawn = self.expand(rng.choice(step), env=env, rng=rng)
            nats += math.log(len(step)) + drawn.nats
            env = drawn.env
            if drawn.text:
                sentences.append(drawn.text)
        return Expansion(" ".join(sentences), env, nats)

    def match(self, template: str, text: str) -> Iterator[Env]:
        """Yield the remembered values of each parse of the whole text by a template."""
        for end, env in self._match_parts(parse_template(template), text, 0, {}):
            if end == len(text):
                yield env

    def match_script(self, script: Script, text: str, *, env: Env) -> bool:
        """Say whether a script can write exactly this text, given remembered values."""
        states: list[tuple[int, Env]] = [(0, env)]
        for step in script:
            reached: list[tuple[int, Env]] = []
            for start, bound in states:
                for template in step:
                    if not template:
                        reached.append((start, bound))
                        continue
                    begin = start + 1 if start else 0
                    if start and text[start:begin] != " ":
                        continue
                    reached.extend(self._match_parts(parse_template(template), text, begin, bound))
            states = reached
        return any(end == len(text) for end, _ in states)

    def _match_parts(
        self, parts: tuple[Part, ...], text: str, start: int, env: Env
    ) -> Iterator[tuple[int, Env]]:
        """Yield (end, values) for each way the parts write text[start:end]."""
        if not parts:
            yield start, env
            return
        head, rest = parts[0], parts[1:]
        match head:
            case Literal(literal):
                if text.startswith(literal, start):
                    yield from self._match_parts(rest, text, start + len(literal), env)
            case Reference(variable):
                if text.startswith(env[variable], start):
                    yield from self._match_parts(rest, text, start + len(env[variable]), env)
            case Slot(table, variable):
                for value in self._tables[table]:
                    if text.startswith(value, start):
                        bound = self._bind(env, variable, value)
                        yield from self._match_parts(rest, text, start + len(value), bound)

    def _bind(self, env: Env, variable: str, value: str) -> Env:
        return {**env, **self._derive(variable, value)} if variable else env
