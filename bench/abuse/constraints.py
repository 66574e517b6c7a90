"""What grammars, sampling fields and an unread log do to those who have nothing to do with them."""

from __future__ import annotations

import itertools
import random
import string
import sys
import time
from typing import Any

from bench.abuse.arena import Arena, Attack, Outcome, Setup

NUM_REGEXES = 150
NUM_TERMS = 2500
NUM_AT_ONCE = 60
NUM_SLOW_TERMS = 2000
MAX_GAP_MS = 1000.0


def _completion(arena: Arena, **fields: Any) -> bytes:
    body = {"model": arena.model, "prompt": "Hello", "max_tokens": 4, **fields}
    return arena.post("/v1/completions", body)


def large_regexes(arena: Arena) -> Outcome:
    """Have many regular expressions compiled, each of them once."""
    pairs = ["".join(pair) for pair in itertools.product(string.ascii_letters, repeat=2)]
    before = arena.resident_mib()["worker-0"]
    requests = [
        _completion(
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
        _completion(
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


def many_choices(arena: Arena) -> Outcome:
    """Ask for one of as many choices as there may be."""
    words = [f"choice {number:04}" for number in range(1024)]
    answer = arena.ask(_completion(arena, structured_outputs={"choice": words}, max_tokens=20))
    return Outcome(f"status {answer.status}", met=answer.status == 200)


def no_token_left(arena: Arena) -> Outcome:
    """Send sampling fields that would leave nothing to draw from, and legal extremes."""
    everything = list(range(100))
    bad: list[dict[str, Any]] = [
        {"repetition_penalty": 1e-300},
        {"allowed_token_ids": [5, 6], "stop_token_ids": [5, 6], "min_tokens": 2},
    ]
    good: list[dict[str, Any]] = [
        {"repetition_penalty": penalty, "temperature": temperature, "top_p": top_p}
        for penalty in (0.01, 10.0)
        for temperature in (0, 5e-324, 2.0)
        for top_p in (5e-324, 1.0)
    ]
    good += [{"allowed_token_ids": everything, "min_tokens": 2, "logit_bias": {"5": -100.0}}]
    requests = [_completion(arena, **fields) for fields in (*bad, *good)]
    statuses = [answer.status for answer in arena.ask_all(requests, at_once=4)]
    wanted = [400] * len(bad) + [200] * len(good)
    num_500 = sum(status >= 500 for status in statuses)
    return Outcome(
        f"{num_500} x 500; impossible ones {sorted(set(statuses[: len(bad)]))}",
        met=statuses == wanted,
    )


UNREAD_LOG = (
    "import os, sys; r, w = os.pipe(); os.set_inheritable(r, True); os.dup2(w, 2);"
    " os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Becomes a server whose standard error is a pipe that is never read."""
NUM_LOGGED = 1000


def unread_log(arena: Arena) -> Outcome:
    """Send requests that are logged to a pipe which has long been full."""
    requests = [arena.get("/v1/models")] * NUM_LOGGED + [_completion(arena)] * 20
    answers = arena.ask_all(requests, at_once=8, timeout_s=20.0)
    num_answered = sum(answer.status == 200 for answer in answers)
    num_dropped = arena.metric("log_lines_dropped_total")
    return Outcome(
        f"{num_answered} of {len(requests)} answered, {num_dropped:.0f} lines dropped",
        met=num_answered == len(requests),
    )


ATTACKS = [
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
    Attack(
        "1,024 choices", many_choices, before="400 from 1,000 on", bound="200", has_victim=False
    ),
    Attack(
        "sampling fields that leave no token",
        no_token_left,
        before="500 non_finite_logits",
        bound="400, and no 500",
        has_victim=False,
    ),
    Attack(
        "a log that is not read",
        unread_log,
        before="no answer after 146 requests",
        bound="all answered",
        setup=Setup(flags=("--log-level", "debug"), prefix=(sys.executable, "-c", UNREAD_LOG)),
        has_victim=False,
    ),
]
