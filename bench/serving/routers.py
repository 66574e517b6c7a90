"""Three servers behind a public router: how much of prompts is cached, and times to first tokens.

python -m bench.serving.routers NAME=COMMAND ... [--seeds 1] [--clients 6] [--json]
    Questions about documents, in any order, to three servers whose pools hold a part of these each.
    COMMAND starts a router; {workers} in it becomes the servers' URLs, {port} the port that it is
    to listen on. Each one gets other documents, so that nothing is cached before
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

import httpx

from bench.serving.server import ONE_THREAD, QUIET, running_server
from bench.table import print_head, print_row

NUM_SERVERS = 3
NUM_DOCUMENTS = 12
NUM_QUESTIONS = 8
NUM_WORDS = 700
MAX_KV_TOKENS = 6144
"""Of each server: seven documents of about 840 tokens, their questions and answers."""
WORDS = "the old road to Foxdale was long and a brass lantern shone".split()  # noqa: SIM905
FLAGS = (*ONE_THREAD, *QUIET, "--profile=off", "--http-workers=1")
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Sums:
    """What one router led to, over all requests of a seed."""

    router: str
    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    ttft_p50_s: float
    ttft_p90_s: float


def questions(seed: str) -> list[str]:
    """Return every question about every document, in an order of its own."""
    rng = random.Random(seed)
    documents = [
        f"{seed}, document {number}: " + " ".join(rng.choices(WORDS, k=NUM_WORDS))
        for number in range(NUM_DOCUMENTS)
    ]
    prompts = [f"{text} Question {n}:" for text in documents for n in range(NUM_QUESTIONS)]
    rng.shuffle(prompts)
    return prompts


@contextmanager
def running_router(command: str, workers: Sequence[str]) -> Iterator[str]:
    """Run a router in front of the servers; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = command.replace("{workers}", " ".join(workers)).replace("{port}", str(port))
    process = subprocess.Popen(shlex.split(words), stdout=subprocess.DEVNULL)
    url, deadline_s = f"http://127.0.0.1:{port}", time.monotonic() + 60.0
    try:
        while not _is_healthy(url):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"{words}: not there")
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=TIMEOUT_S).status_code == 200
    except httpx.HTTPError:
        return False


async def ask_all(
    url: str, model: str, prompts: Sequence[str], num_clients: int
) -> list[tuple[float, int, int]]:
    """Ask in order; returns seconds to the first token, prompt tokens, cached tokens of each."""
    gate = asyncio.Semaphore(num_clients)

    async def ask(client: httpx.AsyncClient, prompt: str) -> tuple[float, int, int]:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            **{"max_tokens": 8, "temperature": 0, "ignore_eos": True},
            **{"stream": True, "stream_options": {"include_usage": True}},
        }
        async with gate:
            start_s, first_s, usage = time.monotonic(), float("inf"), None
            async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    raise SystemExit(f"{answer.status_code}: {(await answer.aread())[:500]!r}")
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        first_s = min(first_s, time.monotonic() - start_s)
                        usage = event.get("usage") or usage
        assert usage is not None
        return first_s, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        return await asyncio.gather(*(ask(client, prompt) for prompt in prompts))


def measure(routers: dict[str, str], seeds: int, num_clients: int) -> list[Sums]:
    """Run all routers in turn, before the same servers."""
    found = []
    with ExitStack() as stack:
        flags = (*FLAGS, f"--max-kv-tokens={MAX_KV_TOKENS}")
        servers = [stack.enter_context(running_server(flags)) for _ in range(NUM_SERVERS)]
        for seed in range(seeds):
            for name, command in routers.items():
                with running_router(command, [server.url for server in servers]) as url:
                    prompts = questions(f"{name} {seed}")
                    rows = asyncio.run(ask_all(url, servers[0].model, prompts, num_clients))
                first_s, prompt_tokens, cached = (
                    list(column) for column in zip(*rows, strict=True)
                )
                tenths = statistics.quantiles(first_s, n=10)
                found.append(
                    Sums(name, len(rows), sum(prompt_tokens), sum(cached), tenths[4], tenths[8])
                )
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("routers", nargs="+", metavar="NAME=COMMAND")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    pairs = (text.partition("=") for text in arguments.routers)
    found = measure(
        {name: command for name, _, command in pairs}, arguments.seeds, arguments.clients
    )
    if arguments.json:
        print(json.dumps([asdict(sums) for sums in found], indent=2))
        return
    print_head("router", "requests", "prompt tokens", "cached", "share", "TTFT p50 (s)", "p90 (s)")
    for sums in found:
        share = f"{sums.cached_tokens / sums.prompt_tokens:.3f}"
        times = f"{sums.ttft_p50_s:.2f}", f"{sums.ttft_p90_s:.2f}"
        print_row(
            sums.router, sums.num_requests, sums.prompt_tokens, sums.cached_tokens, share, *times
        )


if __name__ == "__main__":
    main()
