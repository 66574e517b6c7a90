"""Attacks of one key on what others get: of the engine, of connections, of memory for bodies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Awaitable, Callable

from bench.abuse.arena import Answer, Arena, Attack, Outcome, Setup, ask, post

COMPLETIONS = "/v1/completions"
FLOOD_S = 12.0
"""How long a flood runs before another key asks for anything."""
NUM_ASKED = 3
GIVEN_UP_S = 60.0
MAX_WAIT_S = 5.0


def _body(arena: Arena, prompt: list[int], max_tokens: int, **fields: object) -> bytes:
    body = {"model": arena.model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    return json.dumps({**body, **fields}).encode()


def _waits_beside(
    arena: Arena, flood: Callable[[], Awaitable[None]], *, num_blanks: int = 0, **fields: object
) -> Outcome:
    """Return how long another key's requests of two tokens take while a flood goes on.

    `num_blanks`: at the end of their bodies.
    """

    async def run() -> list[Answer]:
        answers = []
        flooding = asyncio.ensure_future(flood())
        try:
            await asyncio.sleep(FLOOD_S)
            for number in range(NUM_ASKED):
                body = _body(arena, [300 + number] * 8, 2, **fields)
                request = post(COMPLETIONS, body + b" " * num_blanks, key=arena.admin_key)
                answer = Answer(time.monotonic())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GIVEN_UP_S):
                        answer = await ask(arena.address, request)
                answers.append(answer)
        finally:
            flooding.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await flooding
        return answers

    answers = asyncio.run(run())
    is_met = all(each.status == 200 and _waited_s(each) <= MAX_WAIT_S for each in answers)
    return Outcome(", ".join(map(_in_words, answers)), met=is_met)


def _waited_s(answer: Answer) -> float:
    return answer.end_s - answer.start_s


def _in_words(answer: Answer) -> str:
    if not answer.status:
        return f"none in {GIVEN_UP_S:.0f} s"
    return f"{answer.status} after {_waited_s(answer):.1f} s"


def _flood_of_answers(arena: Arena, **fields: object) -> Outcome:
    body = _body(arena, [300] * 8, 8_000, n=16, stream=True, **fields)
    request = arena.post(COMPLETIONS, body)

    async def flood() -> None:
        await asyncio.gather(*(ask(arena.address, request) for _ in range(17)))

    return _waits_beside(arena, flood, **fields)


def _flood_of_prompts(arena: Arena, **fields: object) -> Outcome:
    numbers = itertools.count()

    async def one_client() -> None:
        while True:
            body = _body(arena, [300 + next(numbers) % 2_000] * 8_000, 1, **fields)
            await ask(arena.address, arena.post(COMPLETIONS, body))

    async def flood() -> None:
        await asyncio.gather(*(one_client() for _ in range(24)))

    return _waits_beside(arena, flood, **fields)


def long_answers(arena: Arena) -> Outcome:
    """Ask for more answers of 8,000 tokens than may run at once."""
    return _flood_of_answers(arena)


def long_prompts(arena: Arena) -> Outcome:
    """Send prompts of 8,000 tokens over 24 connections, one after the other."""
    return _flood_of_prompts(arena)


def long_answers_of_batches(arena: Arena) -> Outcome:
    """Ask for the answers as best-effort requests, the other key as well."""
    return _flood_of_answers(arena, service_tier="flex")


def long_prompts_of_batches(arena: Arena) -> Outcome:
    """Send the prompts as best-effort requests, the other key as well."""
    return _flood_of_prompts(arena, service_tier="flex")


NUM_PLACES = 64
NUM_OPENED = 80


def many_streams(arena: Arena) -> Outcome:
    """Ask for more answers at once than there may be connections of one address, by one key.

    Behind a proxy that is every client's address.
    """
    request = arena.post(COMPLETIONS, _body(arena, [300] * 8, 8_000, stream=True))

    async def flood() -> None:
        await asyncio.gather(*(ask(arena.address, request) for _ in range(NUM_OPENED)))

    return _waits_beside(arena, flood)


NUM_BLANK_BODIES, BODY_BYTES = 64, 4 * 2**20
"""All that --max-held-body-bytes has room for, were blanks kept."""


def bodies_of_blanks(arena: Arena) -> Outcome:
    """Send bodies that are as large as may be and say little, for answers that take long."""
    body = _body(arena, [300] * 8, 8_000, stream=True)
    request = arena.post(COMPLETIONS, body + b" " * (BODY_BYTES - len(body)))

    async def flood() -> None:
        await asyncio.gather(*(ask(arena.address, request) for _ in range(NUM_BLANK_BODIES)))

    return _waits_beside(arena, flood)


NUM_SLOW_BODIES = 16
MAX_INLINE_BYTES = 16 * 1024
"""Bodies beyond it wait for a thread that parses them."""


def slow_bodies(arena: Arena) -> Outcome:
    """Send bodies that take long to parse, as many at a time as all that wait may have bytes.

    Another key's bodies wait for the same thread.
    """
    head = _body(arena, [300] * 8, 2)[:-1] + b', "logit_bias": {"300": '
    request = arena.post(COMPLETIONS, head + b"[" + b"1.5," * (BODY_BYTES // 4 - 100) + b"1.5]}}")

    async def one_client() -> None:
        while True:
            await ask(arena.address, request)

    async def flood() -> None:
        await asyncio.gather(*(one_client() for _ in range(NUM_SLOW_BODIES)))

    return _waits_beside(arena, flood, num_blanks=2 * MAX_INLINE_BYTES)


_BOUND = f"another key's request of two tokens within {MAX_WAIT_S:g} s, three times"

SHARES = [
    Attack(
        "17 requests, n = 16, 8,000 tokens, without targets",
        long_answers,
        before="none in 60 s, three times",
        bound=_BOUND,
        has_victim=False,
    ),
    Attack(
        "24 connections, prompts of 8,000, without targets",
        long_prompts,
        before="12 to 21 s each",
        bound=_BOUND,
        has_victim=False,
    ),
    Attack(
        "17 requests, n = 16, 8,000 tokens, best effort",
        long_answers_of_batches,
        before="none in 60 s, three times",
        bound=_BOUND,
        has_victim=False,
    ),
    Attack(
        "24 connections, prompts of 8,000, best effort",
        long_prompts_of_batches,
        before="0.2 to 0.9 s",
        bound=_BOUND,
        has_victim=False,
    ),
    Attack(
        f"{NUM_OPENED} streams of one key, {NUM_PLACES} connections of one address",
        many_streams,
        before="429, three times",
        bound=_BOUND,
        setup=Setup(("--max-connections-per-ip", str(NUM_PLACES))),
        has_victim=False,
    ),
    Attack(
        f"{NUM_BLANK_BODIES} bodies of 4 MiB of blanks",
        bodies_of_blanks,
        before="429, three times",
        bound=_BOUND,
        has_victim=False,
    ),
    Attack(
        f"{NUM_SLOW_BODIES} bodies of 4 MiB that wait for a thread, without a pause",
        slow_bodies,
        before="429, three times",
        bound=_BOUND,
        has_victim=False,
    ),
]
