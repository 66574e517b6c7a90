"""Every admission rule on a live server, memory too small: `python -m bench.memory.admission_live`.

One server with the bundled model per rule, all up at once; the same chats go to each of them in
turn, a share at a time, so that whatever else the machine does falls on all alike. Answers end by
themselves; a client declares more than it will need, as clients do.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import time
from contextlib import ExitStack
from dataclasses import dataclass

import httpx

from bench.serving.server import Server, running_server
from lightserve.bundled.corpus import draw_exchange

RULES: dict[str, list[str]] = {
    "risk": [],
    "past-future": [],
    "conservative": [],
    "aggressive": [],
    "ema": [],
}
COUNTERS = ("num_preemptions_total", "preempted_tokens_total")


@dataclass
class Tally:
    """What came of one rule's requests."""

    seconds: float = 0.0
    num_finished: int = 0
    num_tokens: int = 0
    latency_s: float = 0.0


def counters(server: Server) -> dict[str, float]:
    """Read the router's counters, once they are new."""
    time.sleep(2.5)
    text = httpx.get(f"{server.url}/metrics").text
    return {
        name: float(found[1])
        for name in COUNTERS
        if (found := re.search(rf"^lightserve_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))
    }


async def send(server: Server, prompts: list[str], max_tokens: int, tally: Tally) -> None:
    """Send chats all at once and wait for all answers."""
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:

        async def one(number: int, prompt: str) -> None:
            start_s = time.perf_counter()
            answer = await client.post(
                "/v1/chat/completions",
                json={
                    "model": server.model,
                    "messages": [{"role": "user", "content": prompt}],
                    "max_tokens": max_tokens,
                    "seed": number,
                },
            )
            tally.num_tokens += answer.raise_for_status().json()["usage"]["completion_tokens"]
            tally.num_finished += 1
            tally.latency_s += time.perf_counter() - start_s

        start_s = time.perf_counter()
        await asyncio.gather(*(one(*item) for item in enumerate(prompts)))
        tally.seconds += time.perf_counter() - start_s


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--shares", type=int, default=4)
    parser.add_argument("--warm-up", type=int, default=40)
    parser.add_argument("--max-kv-tokens", type=int, default=1500)
    parser.add_argument("--max-tokens", type=int, default=512)
    args = parser.parse_args()
    rng = random.Random(0)
    prompts = [draw_exchange(rng).prompt for _ in range(args.warm_up + args.requests)]
    warm_up, prompts = prompts[: args.warm_up], prompts[args.warm_up :]
    size = -(-len(prompts) // args.shares)
    start_s = time.perf_counter()
    with ExitStack() as stack:
        servers = {
            rule: stack.enter_context(
                running_server(
                    [
                        *("--admission", rule, *options),
                        *("--max-kv-tokens", str(args.max_kv_tokens), "--num-threads", "1"),
                    ]
                )
            )
            for rule, options in RULES.items()
        }
        for server in servers.values():
            asyncio.run(send(server, warm_up, args.max_tokens, Tally()))
        before = {rule: counters(server) for rule, server in servers.items()}
        tallies = {rule: Tally() for rule in servers}
        for first in range(0, len(prompts), size):
            for rule, server in servers.items():
                share = prompts[first : first + size]
                asyncio.run(send(server, share, args.max_tokens, tallies[rule]))
        after = {rule: counters(server) for rule, server in servers.items()}
    print(
        "| rule | finished | evictions | recomputed tokens | total s | mean latency s | tokens/s |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for rule, tally in tallies.items():
        evictions, redone = (after[rule][name] - before[rule][name] for name in COUNTERS)
        print(
            f"| {rule} | {tally.num_finished} | {evictions:.0f} | {redone:.0f}"
            f" | {tally.seconds:.1f} | {tally.latency_s / tally.num_finished:.2f}"
            f" | {tally.num_tokens / tally.seconds:.0f} |"
        )
    tokens = tallies["risk"].num_tokens / len(prompts)
    print(
        f"\nPool of {args.max_kv_tokens} tokens, {tokens:.0f} tokens per answer of"
        f" {args.max_tokens} declared, {size} requests at a time;"
        f" {time.perf_counter() - start_s:.0f} s"
    )


if __name__ == "__main__":
    main()
