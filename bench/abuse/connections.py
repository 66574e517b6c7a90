"""Attacks by connections: bodies without an end, clients that leave, crowds that want nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from contextlib import AsyncExitStack
from typing import NamedTuple

import httpx
import psutil

from bench.abuse.arena import (
    PROMPT,
    QUIET,
    Address,
    Arena,
    Attack,
    Outcome,
    address_of,
    ask,
    get,
    percentile,
    post,
    raise_file_limit,
    row,
)
from bench.serving.server import Server, running_server


async def _open(arena: Arena, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*arena.address)
    writer.write(data)
    return reader, writer


async def _until_end(reader: asyncio.StreamReader) -> bytes:
    with contextlib.suppress(OSError):
        return await reader.read(-1)
    return b""


NUM_BODIES = 200
BODY_BYTES = 4 * 2**20
GIVE_UP_S = 40.0


def unfinished(arena: Arena, request: bytes, count: int, *, give_up_s: float) -> Outcome:
    """Send a request so many times at once, all but its last three bytes, and wait.

    All must be ended by the server, whose frontend grows by 160 MiB at most.
    """
    before = arena.resident_mib()["frontend-0"]

    async def one() -> bool:
        """Say whether the server ended it."""
        with contextlib.suppress(OSError):
            reader, writer = await _open(arena, request[:-3])
            try:
                async with asyncio.timeout(give_up_s):
                    await _until_end(reader)
            except TimeoutError:
                return False
            finally:
                writer.transport.abort()
        return True

    async def run() -> int:
        return sum(await asyncio.gather(*(one() for _ in range(count))))

    start_s = time.monotonic()
    num_ended = asyncio.run(run())
    seconds = time.monotonic() - start_s
    time.sleep(0.5)
    grown = arena.seen().peak_mib["frontend-0"] - before
    figures = f"+{grown:.0f} MiB, {num_ended} of {count} ended within {seconds:.0f} s"
    return Outcome(figures, met=grown <= 160 and num_ended == count)


def unfinished_bodies(arena: Arena) -> Outcome:
    """Send bodies without their ends."""
    request = arena.post("/v1/completions", b" " * BODY_BYTES)
    return unfinished(arena, request, NUM_BODIES, give_up_s=GIVE_UP_S)


DOORS = [
    Attack(
        "200 bodies of 4 MiB without an end",
        unfinished_bodies,
        before="+841 MiB, for up to 68 minutes",
        bound="+160 MiB, all ended in 40 s",
    ),
]


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


def storm(rounds: int = ROUNDS) -> bool:
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
    row("slots used afterwards", f"{max(used)}", "0")
    row("until /load said so, longest", f"{max(waits):.1f} s", "1 s between reports")
    for name, before_s in cpu_before_s.items():
        row(f"CPU time of {name}", f"{cpu_after_s[name] - before_s:.1f} s", "-")
    print(f"  release p99 by round, in ms: {[round(late * 1e3) for late in lates]}")
    p99 = percentile(lateness, 0.99)
    row("release p50", f"{percentile(lateness, 0.5) * 1e3:.0f} ms", "-")
    row("release p99", f"{p99 * 1e3:.0f} ms", "< 500 ms")
    return max(used) == 0 and p99 < 0.5


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


def crowd() -> bool:
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
