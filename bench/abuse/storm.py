"""Clients that leave: how long until nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

import httpx

from bench.abuse.client import (
    PROMPT,
    QUIET,
    Address,
    address_of,
    get,
    percentile,
    post,
    raise_file_limit,
)
from bench.abuse.client import row as print_row
from bench.serving.server import Server, running_server

ROUNDS = 10
NUM_CLIENTS = 200
"""Of each kind."""
LEAVE_WITHIN_S = 2.0
SETTLE_S = 15.0
"""The router reports once a second, and a step that runs keeps its slots to its end."""


class Watch:
    """Asks for the number of requests in flight as often as it can, over one connection."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self.samples: list[tuple[float, int]] = []

    async def run(self) -> None:
        """Sample until cancelled."""
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            while True:
                writer.write(get("/health", close=False))
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                body = await reader.readexactly(length)
                count = int(body.split(b'"num_in_flight":')[1].split(b",")[0].split(b"}")[0])
                self.samples.append((time.monotonic(), count))
                await asyncio.sleep(0.005)
        finally:
            writer.transport.abort()


async def _leaver(address: Address, request: bytes, leave_after_s: float) -> float:
    """Ask, and hang up after this time at the latest; returns when it was over for this client."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request)
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(leave_after_s):
            while await reader.read(65536):
                pass
    writer.transport.abort()
    return time.monotonic()


async def _round(address: Address, model: str, rng: random.Random) -> tuple[list[float], float]:
    """Return how late the server noticed each end, and when it had noticed the last."""
    watch = Watch(address)
    watching = asyncio.create_task(watch.run())
    body = {"model": model, "prompt": PROMPT, "max_tokens": 1500}
    clients = [
        _leaver(
            address,
            post("/v1/completions", {**body, "stream": number % 2 == 0}),
            rng.uniform(0.0, LEAVE_WITHIN_S),
        )
        for number in range(2 * NUM_CLIENTS)
    ]
    left_s = sorted(await asyncio.gather(*clients))
    deadline_s = time.monotonic() + 30.0
    while watch.samples[-1][1] or watch.samples[-1][0] < left_s[-1]:
        if time.monotonic() > deadline_s:
            break
        await asyncio.sleep(0.005)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    # With c requests in flight after the k-th last departure, at most k may be left.
    lateness = []
    for place, moment_s in enumerate(left_s, 1):
        num_left = len(left_s) - place
        seen_s = next(
            (at_s for at_s, count in watch.samples if at_s >= moment_s and count <= num_left),
            deadline_s,
        )
        lateness.append(seen_s - moment_s)
    return lateness, watch.samples[-1][0]


def _cpu_s(server: Server) -> dict[str, float]:
    """Return the CPU time of each process, in seconds."""
    times = {name: process.cpu_times() for name, process in server.tree().items()}
    return {name: used.user + used.system for name, used in times.items()}


def _until_free(server: Server) -> tuple[float, int]:
    """Wait until no slot is used; returns how long that took, and how many still were."""
    start_s = time.monotonic()
    time.sleep(1.2)
    while True:
        num_used = int(httpx.get(f"{server.url}/load").json()["num_used_slots"])
        waited_s = time.monotonic() - start_s
        if num_used == 0 or waited_s > SETTLE_S:
            return waited_s, num_used
        time.sleep(0.1)


def run(rounds: int = ROUNDS) -> bool:
    """Measure; returns whether the targets were met."""
    raise_file_limit()
    rng = random.Random(1)
    lateness: list[float] = []
    used: list[int] = []
    lates: list[float] = []
    waits: list[float] = []
    with running_server(QUIET) as server:
        address = address_of(server.url)
        cpu_before_s = _cpu_s(server)
        for _ in range(rounds):
            late, _ = asyncio.run(_round(address, server.model, rng))
            lateness += late
            waited_s, num_used = _until_free(server)
            used.append(num_used)
            waits.append(waited_s)
            lates.append(percentile(late, 0.99))
        cpu_after_s = _cpu_s(server)
    print(f"disconnect storm: {rounds} rounds of {NUM_CLIENTS} streaming and as many other clients")
    print_row("slots used afterwards", f"{max(used)}", "0")
    print_row("until /load said so, longest", f"{max(waits):.1f} s", "1 s between reports")
    for name, before_s in cpu_before_s.items():
        print_row(f"CPU time of {name}", f"{cpu_after_s[name] - before_s:.1f} s", "-")
    print(f"  release p99 by round, in ms: {[round(late * 1e3) for late in lates]}")
    p99 = percentile(lateness, 0.99)
    print_row("release p50", f"{percentile(lateness, 0.5) * 1e3:.0f} ms", "-")
    print_row("release p99", f"{p99 * 1e3:.0f} ms", "< 500 ms")
    return max(used) == 0 and p99 < 0.5
