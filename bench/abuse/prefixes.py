"""What a client does to the cache of prefixes: deep trees, and many short ends of long prompts."""

from __future__ import annotations

import random

from bench.abuse.arena import Arena, Attack, Outcome, Setup, cpu_s

DEPTH = 1500
NUM_REQUESTS, NUM_CHOICES = 6, 16
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


def _completion(arena: Arena, prompt: object, max_tokens: int, **fields: object) -> bytes:
    body = {"model": arena.model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    return arena.post("/v1/completions", {**body, **fields})


def deep_tree(arena: Arena) -> Outcome:
    """Send every prefix of a prompt, each with an output of its own, then many that read it."""
    prompt = _prompt(DEPTH, seed=1)
    prefixes = [
        _completion(arena, prompt[:length], 3, temperature=1, seed=length)
        for length in range(1, DEPTH + 1)
    ]
    sent = arena.ask_all(prefixes, at_once=AT_ONCE)
    router = arena.server.tree()["router-0"]
    before_s = cpu_s(router)
    crowd = _completion(arena, [prompt] * PROMPTS_PER_REQUEST, 2, n=NUM_CHOICES)
    answers = arena.ask_all([crowd] * NUM_REQUESTS, timeout_s=300.0)
    num_good = sum(answer.status == 200 for answer in answers)
    num_completions = NUM_REQUESTS * NUM_CHOICES * PROMPTS_PER_REQUEST
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
        _completion(arena, [*prompt, *_prompt(4, seed=number)], 2)
        for number in range(NUM_ENDS + 200)
    ]
    arena.ask_all(requests[:200], at_once=AT_ONCE)
    before = arena.resident_mib()["router-0"]
    answers = arena.ask_all(requests[200:], at_once=AT_ONCE)
    grown = (arena.resident_mib()["router-0"] - before) * 1024 / NUM_ENDS
    num_good = sum(answer.status == 200 for answer in answers)
    figures = f"{grown:.1f} KiB per request, {num_good} of {NUM_ENDS} answered"
    return Outcome(figures, met=grown <= MAX_KIB_PER_REQUEST and num_good == NUM_ENDS)


SETUP = Setup(("--max-model-len", "4096"))

ATTACKS = [
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
