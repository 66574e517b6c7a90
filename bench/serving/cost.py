"""What everything but the model costs, with the bundled model.

python -m bench.serving.cost [--streams 64 256] [--tokens 200] [--rounds 3]
    CPU seconds of the frontend and of the router, as the kernel counts them, per token sent;
    and how long, and in what share of the steps' time, the worker stood idle although requests
    could have gone on. The clients are one process of asyncio that reads bytes without parsing
    them, so that they take little of the cores that all share
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from typing import Any

import httpx

from bench.serving.server import Server, running_server

ROLES = ("frontend", "router", "worker")


def cpu_seconds(server: Server) -> dict[str, float]:
    """Return user and system time by role so far."""
    totals = dict.fromkeys(ROLES, 0.0)
    for name, process in server.tree().items():
        role = next((role for role in ROLES if role in name), None)
        if role is not None:
            totals[role] += sum(process.cpu_times()[:2])
    return totals


async def _stream(client: httpx.AsyncClient, body: dict[str, Any]) -> int:
    """Read one stream to its end; return its number of events."""
    num_events = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for data in response.aiter_raw():
            num_events += data.count(b"data: ")
    return num_events - 1  # [DONE] is one


async def _round(server: Server, num_streams: int, options: dict[str, Any]) -> int:
    limits = httpx.Limits(max_connections=num_streams)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        body = {"model": server.model, "prompt": "Tell me a story.", "stream": True, **options}
        streams = [_stream(client, body | {"seed": seed}) for seed in range(num_streams)]
        return sum(await asyncio.gather(*streams))


def measure_streams(
    server: Server, num_streams: int, max_tokens: int, rounds: int, extra: dict[str, Any]
) -> dict[str, float]:
    """Return figures of some rounds, after one that is not counted."""
    options = {"max_tokens": max_tokens, "ignore_eos": True, **extra}
    asyncio.run(_round(server, num_streams, options))
    health, cpu = server.health(), cpu_seconds(server)
    start_s = time.perf_counter()
    num_events = sum(asyncio.run(_round(server, num_streams, options)) for _ in range(rounds))
    wall_s = time.perf_counter() - start_s
    after = cpu_seconds(server)
    latest = server.health()
    figures = ("worker_busy_s", "worker_idle_s", "num_steps")
    busy_s, idle_s, num_steps = (latest[key] - health[key] for key in figures)
    num_tokens = rounds * num_streams * max_tokens
    used_us = {role: 1e6 * (after[role] - cpu[role]) / num_tokens for role in ROLES}
    return {
        "tokens_per_s": num_tokens / wall_s,
        "tokens_per_event": num_tokens / num_events,
        **{f"{role}_cpu_us_per_token": value for role, value in used_us.items()},
        "http_router_messages_cpu_us_per_token": used_us["frontend"] + used_us["router"],
        "steps": num_steps,
        "worker_idle_us_per_step": 1e6 * idle_s / num_steps,
        "share_of_step_time_delayed_pct": 100 * idle_s / (busy_s + idle_s),
    }


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop string": {"stop": "§§§"},
    "5 logprobs": {"logprobs": 5},
}


def main() -> None:
    """Measure what the command line names; print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, nargs="+", default=[64])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    start_s = time.perf_counter()
    # One thread: two of them, the other processes and the clients do not share two cores well.
    with running_server(["--log-level", "warning", "--num-threads", "1"]) as server:
        for count, kind in itertools.product(args.streams, args.kinds):
            figures = measure_streams(server, count, args.tokens, args.rounds, KINDS[kind])
            print(json.dumps({f"{count} {kind}": figures}, indent=2), flush=True)
    print(f"took {time.perf_counter() - start_s:.0f} s")


if __name__ == "__main__":
    main()
