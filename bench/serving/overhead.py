"""What the processes around the engine cost, with the bundled model on an idle machine.

    python -m bench.serving.overhead [--skip-invariant]

Time to first token through HTTP minus inside the worker; idle CPU; resident memory; 64 streams
through the openai client; the worker's idle share, with the bundled model and with the 153 M one
of the engine benchmark; and, under --batch-invariant, each stream against its solo run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from bench.engine.throughput import write_model
from bench.serving.server import Server, loaded_libraries, running_server
from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.bundled.corpus import draw_exchange

NUM_STREAMS = 64
MAX_TOKENS = 300


def ttft_overhead(server: Server, num_requests: int = 100) -> dict[str, float]:
    """One request at a time, one token each: what HTTP, router and links add."""
    body = {"model": server.model, "prompt": "Tell me a story.", "max_tokens": 1, "stream": True}
    before = server.health()
    times_ms = []
    with httpx.Client(base_url=server.url) as client:
        for _ in range(num_requests):
            start_s = time.perf_counter()
            with client.stream("POST", "/v1/completions", json=body) as response:
                chunks = response.iter_bytes()
                next(chunks)
                times_ms.append(1e3 * (time.perf_counter() - start_s))
                for _ in chunks:
                    pass
    busy_s = server.health()["worker_busy_s"] - before["worker_busy_s"]
    in_worker_ms = 1e3 * busy_s / num_requests
    median_ms = statistics.median(times_ms)
    return {
        "http_ttft_ms": median_ms,
        "worker_ttft_ms": in_worker_ms,
        "overhead_ms": median_ms - in_worker_ms,
    }


def idle_cpu(server: Server, seconds: float = 20.0) -> dict[str, float]:
    """CPU seconds per second of each process while nothing happens, in percent of a core."""
    processes = server.tree()
    before = {role: sum(process.cpu_times()[:2]) for role, process in processes.items()}
    time.sleep(seconds)
    shares = {
        role: 100 * (sum(process.cpu_times()[:2]) - before[role]) / seconds
        for role, process in processes.items()
    }
    return shares | {"all": sum(shares.values())}


def memory(server: Server) -> dict[str, Any]:
    """Resident MiB of each process, and whether it has torch."""
    return {
        role: {
            "rss_mib": process.memory_info().rss / 2**20,
            "torch": any("torch" in name for name in loaded_libraries(process)),
        }
        for role, process in server.tree().items()
    }


async def _complete(client: Any, server: Server, prompt: str, seed: int) -> str:
    stream = await client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=MAX_TOKENS,
        seed=seed,
        stream=True,
    )
    return "".join(
        [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    )


async def _streams(server: Server, width: int) -> list[str]:
    rng = random.Random(5)
    prompts = [draw_exchange(rng).prompt for _ in range(NUM_STREAMS)]
    gate = asyncio.Semaphore(width)
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

        async def one(number: int, prompt: str) -> str:
            async with gate:
                return await _complete(client, server, prompt, seed=number)

        return await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))


def concurrent_streams(server: Server) -> dict[str, float]:
    """64 chats at once: all complete; how long the worker waited for plans meanwhile."""
    before = server.health()
    start_s = time.perf_counter()
    texts = asyncio.run(_streams(server, NUM_STREAMS))
    wall_s = time.perf_counter() - start_s
    after = server.health()
    busy_s, idle_s = (after[key] - before[key] for key in ("worker_busy_s", "worker_idle_s"))
    return {
        "completed": sum(bool(text) for text in texts),
        "wall_s": wall_s,
        "steps": after["num_steps"] - before["num_steps"],
        "worker_idle_pct": 100 * idle_s / (busy_s + idle_s),
    }


async def _complete_many(server: Server, count: int) -> int:
    body = {"model": server.model, "prompt": "Tell me a story " * 20, "max_tokens": 48}
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        answers = [client.post("/v1/completions", json=body | {"seed": i}) for i in range(count)]
        return sum(
            answer.json()["usage"]["completion_tokens"] for answer in await asyncio.gather(*answers)
        )


def idle_share() -> dict[str, float]:
    """The engine benchmark's model behind HTTP, 16 requests at once: how long the worker waits."""
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(BUNDLED_MODEL_DIR / name, directory)
        with running_server(["--model", directory, "--max-kv-tokens", "40000"]) as server:
            asyncio.run(_complete_many(server, 16))
            before, start_s = server.health(), time.perf_counter()
            num_tokens = asyncio.run(_complete_many(server, 16))
            wall_s = time.perf_counter() - start_s
            after = server.health()
    busy_s, idle_s = (after[key] - before[key] for key in ("worker_busy_s", "worker_idle_s"))
    return {
        "tokens_per_s": num_tokens / wall_s,
        "worker_idle_pct": 100 * idle_s / (busy_s + idle_s),
    }


def solo_against_batched(server: Server) -> dict[str, int]:
    """The same chats one by one and 64 at once: texts that differ."""
    solo = asyncio.run(_streams(server, 1))
    batched = asyncio.run(_streams(server, NUM_STREAMS))
    return {
        "compared": len(solo),
        "different": sum(a != b for a, b in zip(solo, batched, strict=True)),
    }


def main() -> None:
    """Run everything and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--skip-invariant", action="store_true", help="leave out the last part")
    args = parser.parse_args()
    report: dict[str, Any] = {}
    with running_server() as server:
        report["ttft"] = ttft_overhead(server)
        report["streams"] = concurrent_streams(server)
        report["memory"] = memory(server)
        report["idle_cpu_pct"] = idle_cpu(server)
    report["larger_model"] = idle_share()
    if not args.skip_invariant:
        # One thread: two of them and the clients do not share two cores well.
        flags = ["--batch-invariant", "--dtype", "float32", "--num-threads", "1"]
        with running_server(flags) as server:
            report["batch_invariant"] = solo_against_batched(server)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
