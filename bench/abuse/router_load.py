"""What requests bring to the router: newcomers of one step, parameters, ends that are not read."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import time
from typing import Any

from bench.abuse.arena import Arena, Attack, Outcome, Setup

NUM_CHOICES = 16
SHARED_LEN = 7_900
VOCABULARY = range(300, 2_300)
SETTLED_WITHIN_S = 30.0


def _completion(arena: Arena, **fields: Any) -> bytes:
    body = {"model": arena.model, "max_tokens": 8, "ignore_eos": True, **fields}
    return arena.post("/v1/completions", body)


def newcomers(arena: Arena) -> Outcome:
    """Let 320 completions on one long cached prefix arrive while a step is long."""
    shared = [300 + n % 2_000 for n in range(SHARED_LEN)]
    arena.ask(_completion(arena, prompt=shared, max_tokens=1))
    long_steps = [_completion(arena, prompt=[400 + n] * 8_000, max_tokens=1, n=1) for n in range(3)]
    fields = {"n": NUM_CHOICES, "allowed_token_ids": list(VOCABULARY)}
    joining = [
        _completion(arena, prompt=[*shared, 300 + n], max_tokens=4, **fields) for n in range(20)
    ]
    pids = arena.pids()
    answers = arena.ask_all(long_steps + joining)
    num_whole = sum(answer.status == 200 for answer in answers)
    is_same = arena.pids() == pids
    figures = f"{num_whole} of {len(answers)} answered, router {'lives' if is_same else 'DIED'}"
    return Outcome(figures, met=is_same and num_whole == len(answers))


def parameters(arena: Arena) -> Outcome:
    """Send 16 requests of 128 completions, with all biases and allowed ids that one may have."""
    before = arena.resident_mib()["router-0"]
    fields = {
        "prompt": [[300 + n] for n in range(8)],
        "n": NUM_CHOICES,
        "logit_bias": {str(300 + n): 0.5 for n in range(1024)},
        "allowed_token_ids": list(VOCABULARY),
        "service_tier": "flex",
    }
    requests = [_completion(arena, **fields) for _ in range(16)]
    answers = arena.ask_all(requests)
    grown = arena.seen().peak_mib["router-0"] - before
    held = arena.metric("request_parameter_bytes")
    statuses = sorted({answer.status for answer in answers})
    sent_kib = sum(map(len, requests)) / 1024
    figures = f"{sent_kib:.0f} KiB sent: +{grown:.0f} MiB, {held:.0f} bytes held after, {statuses}"
    return Outcome(figures, met=grown <= 64 and held == 0 and set(statuses) <= {200, 429})


NUM_LEAVERS = 120


def leavers(arena: Arena) -> Outcome:
    """Ask for eight choices with a stop string, read nothing, and reset at any moment."""
    rng = random.Random(0)
    fields = {"n": 8, "stop": ["\x00"], "stream": True, "allowed_token_ids": list(VOCABULARY)}
    request = _completion(arena, prompt="Tell me", max_tokens=6, **fields)

    async def one() -> None:
        with contextlib.suppress(OSError):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            linger = struct.pack("ii", 1, 0)  # closing resets
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(connection, tuple(arena.address))
            await loop.sock_sendall(connection, request)
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            connection.close()

    async def run() -> None:
        gate = asyncio.Semaphore(6)

        async def gated() -> None:
            async with gate:
                await one()

        await asyncio.gather(*(gated() for _ in range(NUM_LEAVERS)))

    asyncio.run(run())
    deadline_s = time.monotonic() + SETTLED_WITHIN_S
    while (held := arena.metric("requests_unfinished")) and time.monotonic() < deadline_s:
        pass
    figures = f"{NUM_LEAVERS} clients x 8: {held:.0f} requests stay in the router"
    return Outcome(figures, met=held == 0)


ATTACKS = [
    Attack(
        "320 newcomers on one cached prefix",
        newcomers,
        before="a plan of over 16 MiB killed the router",
        bound="all answered, no restart",
        setup=Setup(flags=("--max-num-seqs", "400", "--max-num-batched-tokens", "8192")),
    ),
    Attack(
        "16 requests x 128, every bias and allowed id",
        parameters,
        before="392 KiB sent: +455 MiB",
        bound="<= 64 MiB, nothing kept",
    ),
    Attack(
        "stop strings, n = 8, unread, reset",
        leavers,
        before="210 of 217 never forgotten",
        bound="0 stay",
    ),
]
