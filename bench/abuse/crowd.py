"""Connections that want nothing: half-open and idle ones beside normal requests."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import NamedTuple

import psutil

from bench.abuse.client import (
    QUIET,
    Address,
    address_of,
    ask,
    get,
    percentile,
    post,
    raise_file_limit,
    row,
)
from bench.serving.server import Server, running_server

NUM_HALF_OPEN = 500
NUM_IDLE = 5000
NUM_REQUESTS = 100
LIMITS = ["--max-connections", "8192", "--max-connections-per-ip", "8192", *QUIET]
CLOSED_WITHIN_S = 15.0


class Crowd:
    """Open connections."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.last_closed_s = 0.0
        """When (monotonic) the server last closed one."""

    @property
    def num_open(self) -> int:
        """Those that the server has not closed."""
        return len(self._open)

    async def add(self, num: int, first_words: bytes, *, wants_answer: bool) -> None:
        """Open connections that say this and no more."""
        for start in range(0, num, 100):
            batch = (self._one(first_words, wants_answer) for _ in range(min(100, num - start)))
            await asyncio.gather(*batch)

    async def _one(self, first_words: bytes, wants_answer: bool) -> None:
        reader, writer = await asyncio.open_connection(*self._address)
        writer.write(first_words)
        if wants_answer:
            await reader.readuntil(b"}")
        self._open.add(writer)
        task = asyncio.create_task(self._follow(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(1024):
                pass
        except OSError:
            pass
        self._open.discard(writer)
        self.last_closed_s = time.monotonic()
        writer.transport.abort()

    async def leave(self) -> None:
        """Close all."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()


class Normal(NamedTuple):
    """How normal requests fare, in seconds."""

    p99_s: float
    frontend_cpu_s: float
    """CPU time of the frontend per request: unlike times, hardly changed by other programs."""


async def _normal(address: Address, model: str, frontend: psutil.Process) -> Normal:
    """Send one-token completions, one after the other."""
    request = post("/v1/completions", {"model": model, "prompt": [5, 6, 7], "max_tokens": 1})
    times = []
    before = frontend.cpu_times()
    for _ in range(NUM_REQUESTS):
        answer = await ask(address, request)
        assert answer.status == 200, answer.data
        times.append(answer.end_s - answer.start_s)
    after = frontend.cpu_times()
    cpu_s = after.user + after.system - before.user - before.system
    return Normal(percentile(times, 0.99), cpu_s / NUM_REQUESTS)


def _row(name: str, normal: Normal, target: str) -> None:
    cpu_ms = normal.frontend_cpu_s * 1e3
    row(f"{name} (frontend's CPU {cpu_ms:.1f} ms)", f"{normal.p99_s * 1e3:.1f} ms", target)


async def _measure(server: Server) -> bool:
    good = True
    address, model = address_of(server.url), server.model
    frontend = server.tree()["frontend-0"]
    async with AsyncExitStack() as stack:
        await _normal(address, model, frontend)
        baseline = await _normal(address, model, frontend)
        _row("p99 of one-token completions", baseline, "-")
        half_open = Crowd(address)
        stack.push_async_callback(half_open.leave)
        start_s = time.monotonic()
        await half_open.add(NUM_HALF_OPEN, b"GET /livez HTTP/1.1\r\nhost", wants_answer=False)
        crowded = await _normal(address, model, frontend)
        good = good and crowded.p99_s <= 2 * baseline.p99_s
        _row(f"with {NUM_HALF_OPEN} half-open ones", crowded, "<= 2x baseline")
        while half_open.num_open and time.monotonic() - start_s < 2 * CLOSED_WITHIN_S:
            await asyncio.sleep(0.1)
        closed_s = half_open.last_closed_s - start_s
        good = good and not half_open.num_open and closed_s <= CLOSED_WITHIN_S
        row("all half-open ones closed after", f"{closed_s:.1f} s", f"<= {CLOSED_WITHIN_S:.0f} s")
        idle = Crowd(address)
        stack.push_async_callback(idle.leave)
        await idle.add(NUM_IDLE, get("/livez", close=False), wants_answer=True)
        crowded = await _normal(address, model, frontend)
        good = good and crowded.p99_s <= 2 * baseline.p99_s and idle.num_open == NUM_IDLE
        _row(f"with {idle.num_open} idle ones", crowded, "<= 2x baseline, all kept")
    return good


def run() -> bool:
    """Measure; returns whether the targets were met."""
    raise_file_limit()
    print("connections that want nothing")
    with running_server(LIMITS) as server:
        before = server.tree()["frontend-0"].num_fds()
        good = asyncio.run(_measure(server))
        time.sleep(1.0)
        after = server.tree()["frontend-0"].num_fds()
    row("frontend's open files before and after", f"{before}, {after}", "equal")
    return good and after <= before + 1
