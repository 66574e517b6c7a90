"""Attacks by constraints: their compilation and their number."""

from __future__ import annotations

import itertools
import random
import string
import time
from typing import Any

from bench.abuse.arena import GRAMMARS, Arena, Attack, Outcome

MAX_EXTRA_MIB = 64

NUM_REGEXES = 150
NUM_TERMS = 2500
NUM_AT_ONCE = 60
NUM_SLOW_TERMS = 2000
MAX_GAP_MS = 1000.0


def _constrained(arena: Arena, **fields: Any) -> bytes:
    body = {"model": arena.model, "prompt": "Hello", "max_tokens": 4, **fields}
    return arena.post("/v1/completions", body)


def large_regexes(arena: Arena) -> Outcome:
    """Have many regular expressions compiled, each of them once."""
    pairs = ["".join(pair) for pair in itertools.product(string.ascii_letters, repeat=2)]
    before = arena.resident_mib()["worker-0"]
    requests = [
        _constrained(
            arena,
            structured_outputs={"regex": "|".join(random.Random(n).sample(pairs, NUM_TERMS))},
        )
        for n in range(NUM_REGEXES)
    ]
    statuses = [answer.status for answer in arena.ask_all(requests, at_once=8)]
    time.sleep(1.0)
    grown = arena.resident_mib()["worker-0"] - before
    return Outcome(
        f"worker {grown:+.0f} MiB, {statuses.count(200)} of {NUM_REGEXES} answered",
        met=grown <= 200 and set(statuses) <= {200, 429},
    )


def compilations_at_once(arena: Arena) -> Outcome:
    """Have regular expressions that take long compiled beside a stream that has none."""
    requests = [
        _constrained(
            arena,
            structured_outputs={
                "regex": "|".join(
                    f"w{random.Random(n * NUM_TERMS + number).randrange(100):02}"
                    for number in range(NUM_SLOW_TERMS)
                )
            },
        )
        for n in range(NUM_AT_ONCE)
    ]
    statuses = [answer.status for answer in arena.ask_all(requests)]
    gap_ms = max(arena.seen().gaps_ms, default=0.0)
    counts = {status: statuses.count(status) for status in sorted(set(statuses))}
    figures = ", ".join(f"{count} x {status}" for status, count in counts.items())
    return Outcome(
        f"longest gap {gap_ms:.0f} ms; {figures}",
        met=gap_ms <= MAX_GAP_MS and set(statuses) <= {200, 429},
    )


HUGE_MULTIPLES = (9_999_991, 9_999_973)
NUM_MULTIPLES, NUM_CHECKED_AT_ONCE = 60, 70
MAX_GRAMMAR_MIB = 512
"""Memory of a process that compiles, beside the memory that it has at its start."""


def _grammar_mib(arena: Arena) -> float:
    """Return the most that a process which compiles constraints takes now."""
    memory = arena.resident_mib().items()
    return max((mib for name, mib in memory if name.startswith(GRAMMARS)), default=0.0)


def _with_schema(arena: Arena, schema: dict[str, Any]) -> bytes:
    return _constrained(arena, structured_outputs={"json": schema})


def huge_multiples(arena: Arena) -> Outcome:
    """Send numbers that stand for gigabytes, and others that compilers find harder to see."""
    before = arena.resident_mib()["frontend-0"]
    schemas: list[dict[str, Any]] = [{"type": "integer", "multipleOf": n} for n in HUGE_MULTIPLES]
    many = [{"type": "integer", "multipleOf": 9_000 + n} for n in range(600)]
    schemas += [{"prefixItems": many, "minItems": 600}]
    terms = " & ".join(f"/(.*a.{{{n}}})/" for n in range(100, 300))
    requests = [_with_schema(arena, schema) for schema in schemas]
    requests += [_constrained(arena, structured_outputs={"grammar": f"start: A\nA: {terms}"})]
    statuses = [answer.status for answer in arena.ask_all(requests)]
    most = _grammar_mib(arena)
    after = arena.ask(_with_schema(arena, {"type": "boolean"})).status
    grown = arena.seen().peak_mib["frontend-0"] - before
    figures = f"{statuses}, frontend +{grown:.0f} MiB, compilers {most:.0f} MiB, then {after}"
    is_met = set(statuses) <= {400, 429} and after == 200 and grown <= MAX_EXTRA_MIB
    return Outcome(figures, met=is_met and most <= MAX_GRAMMAR_MIB)


def many_multiples(arena: Arena) -> Outcome:
    """Have many constraints compiled that are short and large, each of them once."""
    before = arena.resident_mib()["worker-0"]
    texts = [{"type": "integer", "multipleOf": 9_900 + n} for n in range(NUM_MULTIPLES)]
    requests = [_with_schema(arena, schema) for schema in texts]
    requests += [
        _constrained(arena, structured_outputs={"regex": f"a{{19{n:03}}}"})
        for n in range(NUM_MULTIPLES)
    ]
    statuses = [answer.status for answer in arena.ask_all(requests, at_once=8)]
    time.sleep(1.0)
    grown, kept = arena.resident_mib()["worker-0"] - before, _grammar_mib(arena)
    return Outcome(
        f"worker {grown:+.0f} MiB, its grammars' process {kept:.0f} MiB;"
        f" {statuses.count(200)} of {len(requests)} answered",
        met=grown <= MAX_EXTRA_MIB and kept <= MAX_GRAMMAR_MIB and set(statuses) <= {200, 429},
    )


def crowd_of_checks(arena: Arena) -> Outcome:
    """Fill all places of checks with one key, and ask with another."""
    many = [{"type": "integer", "multipleOf": 9_000 + n} for n in range(40)]
    crowd = [
        _with_schema(arena, {"prefixItems": many, "title": str(n)})
        for n in range(NUM_CHECKED_AT_ONCE)
    ]
    body = {"model": arena.model, "prompt": "Hello", "max_tokens": 4}
    others = [
        arena.post(
            "/v1/completions", {**body, "structured_outputs": {"regex": f"[ab]{n}"}}, admin=True
        )
        for n in range(8)
    ]
    answers = arena.ask_all([*crowd, *others])
    own = answers[len(crowd) :]
    waited_s = max(answer.end_s - answer.start_s for answer in own)
    num_answered = sum(answer.status == 200 for answer in own)
    refused = sum(answer.status == 429 for answer in answers[: len(crowd)])
    return Outcome(
        f"{num_answered} of 8 of another key answered, after {waited_s:.1f} s at most;"
        f" {refused} of {len(crowd)} refused",
        met=num_answered == len(own),
    )


CONSTRAINTS = [
    Attack(
        "numbers that stand for gigabytes",
        huge_multiples,
        before="frontend +5.9 GiB, and no new schema for 113 s",
        bound=f"400; +{MAX_EXTRA_MIB} MiB, and {MAX_GRAMMAR_MIB} MiB for a process that compiles",
        has_victim=False,
    ),
    Attack(
        "120 short constraints that are large",
        many_multiples,
        before="worker +4.5 GiB for good",
        bound=f"+{MAX_EXTRA_MIB} MiB, and {MAX_GRAMMAR_MIB} MiB for the process that has them",
        has_victim=False,
    ),
    Attack(
        "70 new schemas of one key at once",
        crowd_of_checks,
        before="all new schemas of other keys 429",
        bound="those of another key are answered",
        has_victim=False,
    ),
    Attack(
        "150 regexes of 2,500 terms",
        large_regexes,
        before="worker +1.7 GiB for good",
        bound="+200 MiB",
        has_victim=False,
    ),
    Attack(
        "60 slow regexes at once",
        compilations_at_once,
        before="a stream without any stood still for 3.4 s",
        bound="1 s, 200 or 429",
    ),
]
