"""Attacks by what requests hold: answers, constraints, prefixes, parameters, memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
import socket
import struct
import time
from typing import Any

import psutil

from bench.abuse.arena import (
    Arena,
    Attack,
    Outcome,
    Setup,
    cpu_s,
    percentile,
)

SECONDS = 8.0


def rest(arena: Arena) -> Outcome:
    """Watch for a while."""
    time.sleep(SECONDS)
    p99_ms = percentile(arena.seen().livez_ms, 0.99)
    return Outcome(f"/livez p99 {p99_ms:.1f} ms", met=p99_ms <= 100)


CALM = [
    Attack("no attack, worker idle", rest, "-", "/livez p99 <= 100 ms", has_victim=False),
    Attack("no attack, one stream", rest, "-", "/livez p99 <= 100 ms"),
]


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOOLS = Setup(("--tool-call-parser", "hermes"))
MAX_EXTRA_MIB = 64


def _livez(arena: Arena) -> tuple[str, bool]:
    """Say how long the uninvolved waited, and whether that is the bound's."""
    worst_ms = max(arena.seen().livez_ms, default=0.0)
    p99_ms = percentile(arena.seen().livez_ms, 0.99) if worst_ms else 0.0
    return f"/livez p99 {p99_ms:.0f}, at worst {worst_ms:.0f} ms", p99_ms <= 100


def _sent(arena: Arena, path: str, fields: dict[str, Any], status: int) -> Outcome:
    body = json.dumps({"model": arena.model, **fields}, separators=(",", ":")).encode()
    answer = arena.ask(arena.post(path, body))
    waited, is_met = _livez(arena)
    return Outcome(f"{answer.status}, {waited}", met=is_met and answer.status == status)


def echoes(arena: Arena) -> Outcome:
    """Ask for the largest answer that may be, and for one beyond."""
    fields: dict[str, Any] = {"model": arena.model, "n": 16, "echo": True, "logprobs": 20}
    prompts = [[300 + number] * 700 for number in range(8)]
    before = arena.resident_mib()["frontend-0"]
    beyond = arena.ask(arena.post(COMPLETIONS, {**fields, "prompt": prompts, "max_tokens": 100}))
    allowed = arena.ask(
        arena.post(COMPLETIONS, {**fields, "prompt": prompts, "max_tokens": 40}), timeout_s=300.0
    )
    grown = arena.seen().peak_mib["frontend-0"] - before
    waited, is_met = _livez(arena)
    size = len(allowed.data) / 2**20
    figures = f"{beyond.status}; {allowed.status} of {size:.0f} MiB, +{grown:.0f} MiB, {waited}"
    is_right = (beyond.status, allowed.status) == (400, 200)
    return Outcome(figures, met=is_met and is_right and grown <= MAX_EXTRA_MIB)


def arguments(arena: Arena) -> Outcome:
    """Send a call whose arguments are a million lists."""
    text = "[" + "[]," * 1_300_000 + "[]]"
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": text}}
    messages = [
        {"role": "user", "content": "Call it."},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "done"},
    ]
    return _sent(arena, CHAT, {"messages": messages, "max_tokens": 1}, 400)


def tool_numbers(arena: Arena) -> Outcome:
    """Offer a tool with two million numbers in its parameters."""
    function = {"name": "f", "parameters": {"enum": [1] * 2_000_000}}
    messages = [{"role": "user", "content": "Call it."}]
    fields = {"messages": messages, "tools": [{"type": "function", "function": function}]}
    return _sent(arena, CHAT, {**fields, "tool_choice": "required"}, 400)


def tokenize(arena: Arena) -> Outcome:
    """Have the tokens of the longest text told, ten times at once."""
    text = "hello wor" * 10_000
    request = arena.post("/tokenize", {"inputs": text})
    answers = arena.ask_all([request] * 10)
    num_answered = sum(answer.status == 200 for answer in answers)
    waited, is_met = _livez(arena)
    return Outcome(f"{num_answered} of 10 answered, {waited}", met=is_met and num_answered == 10)


def many_choices(arena: Arena) -> Outcome:
    """Stream 16 choices with 20 log-probabilities."""
    messages = [{"role": "user", "content": "Tell me a story."}]
    fields = {"n": 16, "max_tokens": 200, "logprobs": True, "top_logprobs": 20, "stream": True}
    return _sent(arena, CHAT, {**fields, "messages": messages, "ignore_eos": True}, 200)


_BOUND = "/livez p99 <= 100 ms"

ANSWERS = [
    Attack(
        "8 prompts x n = 16, echo, 20 log-probabilities",
        echoes,
        before="2.7 GiB, 9 s in one turn, frontend killed",
        bound=f"400 beyond 2,000,000 items; below +{MAX_EXTRA_MIB} MiB, {_BOUND}",
        has_victim=False,
    ),
    Attack(
        "4 MB of lists as a call's arguments",
        arguments,
        before="a turn of 1.0 s",
        bound=_BOUND,
        setup=TOOLS,
        has_victim=False,
    ),
    Attack(
        "4 MB of numbers as a tool's parameters",
        tool_numbers,
        before="a turn of 0.3 s",
        bound=_BOUND,
        setup=TOOLS,
        has_victim=False,
    ),
    Attack(
        "/tokenize of 90 kB, ten at once",
        tokenize,
        before="turns of 0.3 s each",
        bound=_BOUND,
        has_victim=False,
    ),
    Attack(
        "stream of n = 16 with 20 log-probabilities",
        many_choices,
        before="turns of 10 ms, as now",
        bound=_BOUND,
        has_victim=False,
    ),
]


DEPTH = 1500
NUM_REQUESTS, NUM_SHARED_CHOICES = 6, 16
PROMPTS_PER_REQUEST = 8
AT_ONCE = 32
NUM_ENDS = 1500
NUM_SHARED = 3000
MAX_MS_PER_COMPLETION = 10.0
"""CPU time of the router; about three times what a completion of a shallow tree takes here."""
MAX_KIB_PER_REQUEST = 8.0


def _prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, 2300) for _ in range(length)]


def _shared(arena: Arena, prompt: object, max_tokens: int, **fields: object) -> bytes:
    body = {"model": arena.model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    return arena.post("/v1/completions", {**body, **fields})


def deep_tree(arena: Arena) -> Outcome:
    """Send every prefix of a prompt, each with an output of its own, then many that read it."""
    prompt = _prompt(DEPTH, seed=1)
    prefixes = [
        _shared(arena, prompt[:length], 3, temperature=1, seed=length)
        for length in range(1, DEPTH + 1)
    ]
    sent = arena.ask_all(prefixes, at_once=AT_ONCE)
    router = arena.server.tree()["router-0"]
    before_s = cpu_s(router)
    crowd = _shared(arena, [prompt] * PROMPTS_PER_REQUEST, 2, n=NUM_SHARED_CHOICES)
    answers = arena.ask_all([crowd] * NUM_REQUESTS, timeout_s=300.0)
    num_good = sum(answer.status == 200 for answer in answers)
    num_completions = NUM_REQUESTS * NUM_SHARED_CHOICES * PROMPTS_PER_REQUEST
    each_ms = (cpu_s(router) - before_s) / num_completions * 1e3
    figures = (
        f"{sum(a.status == 200 for a in sent)} prefixes, {num_good} of {NUM_REQUESTS} answered,"
        f" {each_ms:.1f} ms of the router's CPU per completion"
    )
    return Outcome(figures, met=num_good == NUM_REQUESTS and each_ms <= MAX_MS_PER_COMPLETION)


def short_ends(arena: Arena) -> Outcome:
    """Send prompts that share all but their last tokens: what does each leave in the router?"""
    prompt = _prompt(NUM_SHARED, seed=2)
    requests = [
        _shared(arena, [*prompt, *_prompt(4, seed=number)], 2) for number in range(NUM_ENDS + 200)
    ]
    arena.ask_all(requests[:200], at_once=AT_ONCE)
    before = arena.resident_mib()["router-0"]
    answers = arena.ask_all(requests[200:], at_once=AT_ONCE)
    grown = (arena.resident_mib()["router-0"] - before) * 1024 / NUM_ENDS
    num_good = sum(answer.status == 200 for answer in answers)
    figures = f"{grown:.1f} KiB per request, {num_good} of {NUM_ENDS} answered"
    return Outcome(figures, met=grown <= MAX_KIB_PER_REQUEST and num_good == NUM_ENDS)


SETUP = Setup(("--max-model-len", "4096"))

PREFIXES = [
    Attack(
        "every prefix of a prompt, then 768 completions of it",
        deep_tree,
        before="router silent for 10 s and killed; 13 us per node and completion",
        bound=f"<= {MAX_MS_PER_COMPLETION:g} ms of the router's CPU each",
        setup=SETUP,
    ),
    Attack(
        "long prompts that differ in their last tokens",
        short_ends,
        before="the whole prompt kept for each: 65 KiB at 8,000 tokens, without end",
        bound=f"<= {MAX_KIB_PER_REQUEST:g} KiB each",
        setup=SETUP,
    ),
]


LARGE_STEPS = Setup(flags=("--max-num-seqs", "400", "--max-num-batched-tokens", "8192"))
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


ROUTER_LOAD = [
    Attack(
        "320 newcomers on one cached prefix",
        newcomers,
        before="a plan of over 16 MiB killed the router",
        bound="all answered, no restart",
        setup=LARGE_STEPS,
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


WITHIN_S = 120.0


def no_more_addresses(arena: Arena) -> Outcome:
    """Forbid the worker to map anything new, and send what needs memory until it ends.

    A step of a whole long prompt takes more at once than the C library keeps of what is free. So
    no stream may run beside: it would have prompts cut into small steps.
    """
    before = arena.pids()
    worker = psutil.Process(before["worker-0"])
    size = worker.memory_info().vms
    unlimited = worker.rlimit(resource.RLIMIT_AS)
    worker.rlimit(resource.RLIMIT_AS, (size, unlimited[1]))
    deadline_s = time.monotonic() + WITHIN_S
    rng = random.Random(1)
    while worker.is_running() and time.monotonic() < deadline_s:
        prompt = [rng.randrange(300, 2000) for _ in range(SHARED_LEN)]
        arena.ask(_completion(arena, prompt=prompt, max_tokens=1), timeout_s=5.0)
        with contextlib.suppress(psutil.NoSuchProcess):
            if worker.status() == psutil.STATUS_ZOMBIE:
                break
    with contextlib.suppress(psutil.NoSuchProcess):
        worker.rlimit(resource.RLIMIT_AS, unlimited)  # it lives: not the next attack's to find
    died_s = time.monotonic()
    while arena.ask(arena.get("/readyz")).status != 200 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    recovery_s = time.monotonic() - died_s
    after = arena.pids()
    replaced = sorted(name for name, pid in before.items() if after.get(name) != pid)
    return Outcome(
        f"replaced: {', '.join(replaced)}; ready again after {recovery_s:.1f} s",
        met=replaced == ["worker-0"],
    )


MEMORY = [
    Attack(
        "a worker that gets no more memory",
        no_more_addresses,
        before="not tried",
        bound="the worker alone is replaced",
        setup=LARGE_STEPS,
        has_victim=False,
        may_restart=True,
    )
]
