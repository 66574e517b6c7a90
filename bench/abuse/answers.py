"""Requests whose answers are huge, or whose bodies are much work before there is an answer."""

from __future__ import annotations

import json
from typing import Any

from bench.abuse.arena import Arena, Attack, Outcome, Setup
from bench.abuse.client import percentile

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

ATTACKS = [
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
