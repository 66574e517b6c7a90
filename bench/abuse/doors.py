"""What a client does to connections, heads, bodies and doors that are not its own."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
import urllib.error
import urllib.request

import psutil

from bench.abuse.arena import Arena, Attack, Outcome, Setup
from bench.abuse.client import post

OPERATORS = ("/metrics", "/load", "/debug/kv")
SPELLINGS = ("", "%0A", "%0D", "%00", "%0A%0A")


def spellings(arena: Arena) -> Outcome:
    """Ask for operators' routes with a user's key, in more than one spelling."""
    paths = [path + more for path in OPERATORS for more in SPELLINGS]
    answers = arena.ask_all([arena.get(path) for path in paths])
    num_answered = sum(answer.status not in (400, 403) for answer in answers)
    return Outcome(f"{num_answered} of {len(paths)} answered", met=num_answered == 0)


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


def unfinished_bodies(arena: Arena) -> Outcome:
    """Send all of a body but its last three bytes, and wait."""
    before = arena.resident_mib()["frontend-0"]
    request = arena.post("/v1/completions", b" " * BODY_BYTES)[:-3]

    async def one() -> bool:
        """Say whether the server ended it."""
        with contextlib.suppress(OSError):
            reader, writer = await _open(arena, request)
            try:
                async with asyncio.timeout(GIVE_UP_S):
                    await _until_end(reader)
            except TimeoutError:
                return False
            finally:
                writer.transport.abort()
        return True

    async def run() -> int:
        return sum(await asyncio.gather(*(one() for _ in range(NUM_BODIES))))

    start_s = time.monotonic()
    num_ended = asyncio.run(run())
    seconds = time.monotonic() - start_s
    time.sleep(0.5)
    grown = arena.seen().peak_mib["frontend-0"] - before
    figures = f"+{grown:.0f} MiB, {num_ended} of {NUM_BODIES} ended within {seconds:.0f} s"
    return Outcome(figures, met=grown <= 160 and num_ended == NUM_BODIES)


NUM_CROWD = 600


def crowd(arena: Arena) -> Outcome:
    """Open more connections than the server may have files."""

    async def run() -> int:
        found = await asyncio.gather(
            *(_open(arena, b"") for _ in range(NUM_CROWD)), return_exceptions=True
        )
        await asyncio.sleep(5.0)
        for pair in found:
            if not isinstance(pair, BaseException):
                pair[1].transport.abort()
        return sum(not isinstance(pair, BaseException) for pair in found)

    num_open = asyncio.run(run())
    time.sleep(1.5)
    log = arena.log()
    num_lines, num_failed = log.count("\n"), arena.seen().num_livez_failed
    figures = f"{num_open} opened, {num_lines} log lines, {num_failed} /livez failed"
    return Outcome(figures, met=num_lines <= 20)


def two_lengths(arena: Arena) -> Outcome:
    """Hide a second request in a body whose end two servers see in two places."""
    hidden = arena.get("/livez")
    request = re.sub(
        rb"content-length: \d+",
        b"content-length: 5\r\ntransfer-encoding: chunked",
        post("/v1/completions", b"", key=arena.user_key),
    ).replace(b"connection: close\r\n", b"")

    async def run() -> bytes:
        reader, writer = await _open(arena, request + b"0\r\n\r\n" + hidden)
        try:
            async with asyncio.timeout(10):
                return await _until_end(reader)
        except TimeoutError:
            return b"left open"
        finally:
            writer.transport.abort()

    data = asyncio.run(run())
    num_answers = data.count(b"HTTP/1.1 ")
    return Outcome(f"{num_answers} answers, then {data[-9:]!r}"[:40], met=num_answers == 1)


def half_a_head(arena: Arena) -> Outcome:
    """Send a request and half of the next head, and wait."""
    request = arena.get("/livez").replace(b"connection: close\r\n", b"")

    async def run() -> float:
        start_s = time.monotonic()
        reader, writer = await _open(arena, request + request[:-6])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(100):
                await _until_end(reader)
        writer.transport.abort()
        return time.monotonic() - start_s

    seconds = asyncio.run(run())
    return Outcome(f"open for {seconds:.0f} s", met=seconds <= 15)


def foreign_pages(arena: Arena) -> Outcome:
    """Send what a browser sends for a page of another origin, to a server without keys."""
    body = b'{"model": "%s", "prompt": [5], "max_tokens": 1}' % arena.model.encode()
    plain = arena.post("/v1/completions", body)
    json_type = b"content-type: application/json\r\n"
    sent = {
        "text/plain": plain.replace(json_type, b"content-type: text/plain\r\n"),
        "no type": plain.replace(json_type, b""),
        "origin": plain.replace(json_type, json_type + b"origin: http://evil.example\r\n"),
        "site": plain.replace(json_type, json_type + b"sec-fetch-site: cross-site\r\n"),
    }
    answers = arena.ask_all(list(sent.values()))
    passed = [
        name for name, answer in zip(sent, answers, strict=True) if answer.status not in (403, 415)
    ]
    return Outcome(f"passed: {', '.join(passed) or 'none'}", met=not passed)


def _metrics_port(arena: Arena) -> int:
    """Return the port of the supervisor's own listener."""
    main = arena.address.port
    supervisor = psutil.Process(arena.server.process.pid)
    ports = {c.laddr.port for c in supervisor.net_connections("tcp") if c.status == "LISTEN"}
    return next(port for port in ports if port != main)


def _scrape(port: int, host: str = "localhost") -> float | None:
    """Return the seconds that a scrape took, None if it failed."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Host": host})
    start_s = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            answer.read()
    except (OSError, urllib.error.URLError):
        return None
    return time.monotonic() - start_s


def trickled_scrapes(arena: Arena) -> Outcome:
    """Send the heads of scrapes byte by byte, on more connections than are answered at once."""
    port = _metrics_port(arena)

    async def trickle() -> None:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                for byte in b"GET /metrics HTTP/1.1\r\nx: " + b"y" * 1000:
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(1.0)

    async def run() -> list[float | None]:
        tasks = [asyncio.create_task(trickle()) for _ in range(12)]
        await asyncio.sleep(1.0)
        times = []
        for _ in range(10):
            times.append(await asyncio.to_thread(_scrape, port))
            await asyncio.sleep(0.8)
        for task in tasks:
            task.cancel()
        return times

    num_failed = sum(seconds is None for seconds in asyncio.run(run()))
    rebound = _scrape(port, host="evil.example") is not None
    figures = f"{num_failed} of 10 scrapes failed; a foreign Host is {'' if rebound else 'not '}"
    return Outcome(figures + "answered", met=num_failed == 0 and not rebound)


STORM_S = 5.0


def scrape_storm(arena: Arena) -> Outcome:
    """Scrape both ports without a pause, by several clients."""
    port = _metrics_port(arena)
    end_s = time.monotonic() + STORM_S
    times: list[float | None] = []

    def scrape() -> None:
        while time.monotonic() < end_s:
            times.append(_scrape(port))

    threads = [threading.Thread(target=scrape) for _ in range(6)]
    for thread in threads:
        thread.start()
    statuses: list[int] = []
    while time.monotonic() < end_s:
        answers = arena.ask_all([arena.get("/metrics", admin=True)] * 10)
        statuses += [answer.status for answer in answers]
    for thread in threads:
        thread.join()
    num_bad = sum(seconds is None for seconds in times) + sum(s != 200 for s in statuses)
    figures = f"{len(times)} + {len(statuses)} scrapes, {num_bad} failed"
    return Outcome(figures, met=num_bad == 0)


ATTACKS = [
    Attack(
        "operators' routes in other spellings",
        spellings,
        before="/metrics%0A, /load%0A, /debug/kv%0A answered any key",
        bound="none answered",
    ),
    Attack(
        "200 bodies of 4 MiB without an end",
        unfinished_bodies,
        before="+841 MiB, for up to 68 minutes",
        bound="+160 MiB, all ended in 40 s",
    ),
    Attack(
        "600 connections, 256 files",
        crowd,
        before="39,056 tracebacks in the log",
        bound="20 log lines",
        setup=Setup(prefix=("prlimit", "--nofile=256")),
    ),
    Attack(
        "Content-Length and Transfer-Encoding",
        two_lengths,
        before="the connection stayed open, the hidden request was answered",
        bound="one answer, then the end",
    ),
    Attack("half a head behind a request", half_a_head, before="75 s", bound="15 s"),
    Attack(
        "a web page of another origin",
        foreign_pages,
        before="answered, whatever the type",
        bound="403 or 415",
        setup=Setup(has_keys=False),
    ),
    Attack(
        "trickled scrapes",
        trickled_scrapes,
        before="8 of them blocked all scrapes",
        bound="no scrape fails",
    ),
    Attack(
        "scrapes without a pause",
        scrape_storm,
        before="each one was rendered anew",
        bound="all answered",
    ),
]
