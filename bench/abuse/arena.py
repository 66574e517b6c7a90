"""What an attack of bench/abuse is, and the live server that it is tried on.

To add one, write in requests.py or connections.py, by its subject:

    def unfinished_bodies(arena: Arena) -> Outcome:
        before = arena.resident_mib()["frontend-0"]
        ...  # do it, with arena.post(...), arena.ask(...), arena.address
        grown = arena.seen().peak_mib["frontend-0"] - before
        return Outcome(f"+{grown:.0f} MiB", met=grown < 64)

    DOORS = [
        Attack("200 bodies without an end", unfinished_bodies,
               before="+841 MiB, for up to 68 minutes", bound="< 64 MiB"),
    ]

`python -m bench.abuse SUBJECT` (or words of an attack's name) runs yours alone. Attacks with the
same `Setup` share one server, in any order, so leave nothing behind. Around each one the frame
watches from a process of its own (`bench.abuse.arena` itself): an uninvolved client that asks for
/livez, a stream whose gaps are measured (not if `has_victim` is False: then the worker is idle),
memory, restarts, turns of the loops, tracebacks in the log. A row is met if your Outcome is, the
server lives, no process was replaced and the log has no traceback (but with `may_restart`). Report
times, but let `met` depend on one only where the bound is a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import resource
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil

from bench.serving.server import Server, running_server

QUIET = ["--num-threads", "1", "--log-level", "error"]
"""Flags of the servers: beside its clients, two threads of a worker wait for each other."""
GRAMMARS = "grammars"
"""How the names of processes begin that compile constraints, and end where one is too much."""
PROMPT = "Tell me a story about Mira and the brass lantern."


class Address(NamedTuple):
    """Where the server listens."""

    host: str
    port: int


def address_of(url: str) -> Address:
    """Return the address in a URL."""
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    return Address(parts.hostname, parts.port)


def raise_file_limit() -> None:
    """Allow this process as many connections as it may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@dataclass
class Answer:
    """One request as its client saw it; times are monotonic."""

    start_s: float
    status: int = 0
    """0: the connection ended without an answer."""
    chunk_times_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    data: bytes = b""

    @property
    def ttft_s(self) -> float:
        """Time to the first chunk; infinite if there was none."""
        return self.chunk_times_s[0] - self.start_s if self.chunk_times_s else float("inf")

    @property
    def gaps_s(self) -> Iterator[float]:
        """Times between chunks."""
        times = self.chunk_times_s
        return (later - earlier for earlier, later in itertools.pairwise(times))

    @property
    def tpot_s(self) -> float:
        """Mean time between chunks."""
        times = self.chunk_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0


def post(path: str, body: bytes | dict[str, Any], *, key: str = "") -> bytes:
    """Return a request that closes its connection."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\n{_authorization(key)}"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def get(path: str, *, close: bool = True, key: str = "") -> bytes:
    """Return a request without a body."""
    head = f"GET {path} HTTP/1.1\r\nhost: localhost\r\n{_authorization(key)}"
    return f"{head}{'connection: close' if close else 'connection: keep-alive'}\r\n\r\n".encode()


def _authorization(key: str) -> str:
    return f"authorization: Bearer {key}\r\n" if key else ""


async def ask(address: Address, request: bytes, *, start_s: float | None = None) -> Answer:
    """Send one request and read its answer to the end; never raises for the server's behaviour."""
    answer = Answer(time.monotonic() if start_s is None else start_s)
    writer: asyncio.StreamWriter | None = None
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(request)
        while data := await reader.read(65536):
            answer.data += data
            if not answer.status:
                answer.status = int(answer.data.split(maxsplit=2)[1])
            if b"data: {" in data:
                answer.chunk_times_s.append(time.monotonic())
    answer.end_s = time.monotonic()
    if writer is not None:
        writer.transport.abort()
    return answer


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all do not exceed; nan of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def row(name: str, figure: str, target: str) -> None:
    """Print one figure beside its target."""
    print(f"  {name:58} {figure:>16}   {target}", flush=True)


LIVEZ_EVERY_S = 0.02
REPORT_EVERY_S = 0.1
NO_ANSWER_S = 60.0


class Observer:
    """Collects until it reports."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._address = Address(told["host"], told["port"])
        self._pid: int = told["pid"]
        body = {"model": told["model"], "prompt": PROMPT, "max_tokens": 1500, "stream": True}
        body |= {"ignore_eos": True, "temperature": 1.0}
        self._request = post("/v1/completions", body, key=told["key"])
        self._wants_victim = asyncio.Event()
        self._processes: dict[str, psutil.Process] = {}
        self._rescan_s = 0.0
        self.livez: list[tuple[float, float, bool]] = []
        """When it was asked, seconds until the answer, whether that was a 200."""
        self.gaps: list[tuple[float, float]] = []
        """When a chunk of the stream came, seconds since the one before."""
        self.num_broken = 0
        """Streams that were refused or did not come to their end."""

    async def poll(self) -> None:
        """Ask for /livez, one request after the other, over one connection while it holds."""
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                await self._poll_connection()
            await asyncio.sleep(LIVEZ_EVERY_S)

    async def _poll_connection(self) -> None:
        asked_s, is_good = time.monotonic(), False
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(NO_ANSWER_S):
                reader, writer = await asyncio.open_connection(*self._address)
            while True:
                asked_s, is_good = time.monotonic(), False
                writer.write(get("/livez", close=False))
                async with asyncio.timeout(NO_ANSWER_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    fields = head.lower()
                    if b"content-length:" in fields:
                        length = int(fields.split(b"content-length:")[1].split(b"\r\n")[0])
                        await reader.readexactly(length)
                is_good = head.split(maxsplit=2)[1] == b"200"
                self.livez.append((asked_s, time.monotonic() - asked_s, is_good))
                await asyncio.sleep(LIVEZ_EVERY_S)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            self.livez.append((asked_s, time.monotonic() - asked_s, False))
            raise
        finally:
            if writer is not None:
                writer.transport.abort()

    async def stream(self) -> None:
        """Keep a stream running while one is wanted."""
        while True:
            await self._wants_victim.wait()
            data = b""
            with contextlib.suppress(OSError):
                data = await self._one_stream()
            if not data.endswith(b"data: [DONE]\n\n") and self._wants_victim.is_set():
                self.num_broken += 1
                await asyncio.sleep(0.1)

    async def _one_stream(self) -> bytes:
        reader, writer = await asyncio.open_connection(*self._address)
        last, last_s = b"", 0.0
        try:
            writer.write(self._request)
            while self._wants_victim.is_set() and (data := await reader.read(65536)):
                now_s = time.monotonic()
                if b"data: {" in data:
                    if last_s:
                        self.gaps.append((now_s, now_s - last_s))
                    last_s = now_s
                last = (last + data)[-64:].removesuffix(b"\r\n0\r\n\r\n")
            return last
        finally:
            writer.transport.abort()

    async def listen(self) -> None:
        """Do as standard input says, until its end."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            if line == b"victim on\n":
                self._wants_victim.set()
            else:
                self._wants_victim.clear()

    async def report(self) -> None:
        """Write a line every 0.1 s."""
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            memory = self._resident_mib()
            line = {"at_s": time.monotonic(), "livez": self.livez, "gaps": self.gaps}
            print(json.dumps({**line, "memory": memory, "broken": self.num_broken}), flush=True)
            self.livez, self.gaps, self.num_broken = [], [], 0

    def _resident_mib(self) -> dict[str, float]:
        now_s = time.monotonic()
        with contextlib.suppress(psutil.Error):
            if now_s >= self._rescan_s:
                self._rescan_s = now_s + 1.0
                parent = psutil.Process(self._pid)
                children = parent.children(recursive=True)
                # One of a role is in the place of another perhaps, or beside it, as compilers are.
                self._processes = {f"{child.name()}/{child.pid}": child for child in children}
                self._processes["supervisor/"] = parent
        memory: dict[str, float] = {}
        for key, process in self._processes.items():
            name = key.partition("/")[0]
            with contextlib.suppress(psutil.Error):
                mib = memory.get(name, 0.0) + process.memory_info().rss / 2**20
                memory[name] = round(mib, 2)
        return memory


async def _main() -> None:
    observer = Observer(json.loads(sys.argv[1]))
    tasks = [asyncio.create_task(c) for c in (observer.poll(), observer.stream())]
    tasks.append(asyncio.create_task(observer.report()))
    await observer.listen()
    for task in tasks:
        task.cancel()


READY_WITHIN_S = 120.0
ANSWER_WITHIN_S = 120.0
SETTLE_S = 1.5
"""Processes report their metrics once a second."""
_LINE = re.compile(r"^(lightserve_\w+)\{([^}]*)\} (\S+)$", re.M)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Outcome(NamedTuple):
    """What an attack found."""

    figures: str
    met: bool


@dataclass(frozen=True)
class Setup:
    """How a server is started: `lightserve serve` with the bundled model and these."""

    flags: tuple[str, ...] = ()
    has_keys: bool = True
    """With a key for users and one for operators; else a loopback server without any."""
    has_store: bool = False
    """With a store of batches."""
    prefix: tuple[str, ...] = ()
    """A command that becomes the server, such as ("prlimit", "--nofile=256")."""


@dataclass(frozen=True)
class Attack:
    """One row of the table."""

    name: str
    run: Callable[[Arena], Outcome]
    before: str
    """What it did to the server before it was repaired, in one phrase with figures."""
    bound: str
    setup: Setup = Setup()
    has_victim: bool = True
    """Whether a stream runs beside it."""
    may_restart: bool = False
    """Whether processes may end, with a traceback in the log: the attack kills some itself."""


@dataclass
class Seen:
    """What was noticed in a span of time by what has nothing to do with the attack."""

    livez_ms: list[float] = field(default_factory=list)
    num_livez_failed: int = 0
    gaps_ms: list[float] = field(default_factory=list)
    num_broken_streams: int = 0
    first_mib: dict[str, float] = field(default_factory=dict)
    """Resident memory by process, such as "router-0": at the start, the most, at the end."""
    peak_mib: dict[str, float] = field(default_factory=dict)
    last_mib: dict[str, float] = field(default_factory=dict)


class Watcher:
    """Runs an `Observer` in a process and keeps its lines."""

    def __init__(self, server: Server, key: str) -> None:
        told = {**address_of(server.url)._asdict(), "pid": server.process.pid}
        told |= {"model": server.model, "key": key}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.abuse.arena", json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(json.loads(line))

    def set_victim(self, is_on: bool) -> None:
        """Start the stream or end it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"victim {'on' if is_on else 'off'}\n")
        self._process.stdin.flush()

    def wait_until_answered(self, since_s: float) -> None:
        """Wait until a /livez that was asked after this moment is over."""
        deadline_s = time.monotonic() + ANSWER_WITHIN_S
        while time.monotonic() < deadline_s:
            if any(
                asked_s >= since_s for line in self._lines[-50:] for asked_s, *_ in line["livez"]
            ):
                return
            time.sleep(0.05)

    def seen(self, start_s: float, end_s: float) -> Seen:
        """Return what was noticed between two moments."""
        seen = Seen()
        for line in list(self._lines):
            for asked_s, took_s, is_good in line["livez"]:
                if asked_s <= end_s and asked_s + took_s >= start_s:
                    seen.livez_ms.append(took_s * 1e3)
                    seen.num_livez_failed += not is_good
            for at_s, gap_s in line["gaps"]:
                if at_s >= start_s and at_s - gap_s <= end_s:
                    seen.gaps_ms.append(gap_s * 1e3)
            if start_s <= line["at_s"] <= end_s:
                seen.num_broken_streams += line["broken"]
                seen.last_mib = line["memory"]
                seen.first_mib = seen.first_mib or line["memory"]
                for name, mib in line["memory"].items():
                    seen.peak_mib[name] = max(seen.peak_mib.get(name, 0.0), mib)
        return seen

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Arena:
    """A live server, its keys, and what is seen of it."""

    def __init__(self, server: Server, keys: tuple[str, str], log: Path) -> None:
        self.server = server
        self.model = server.model
        self.address: Address = address_of(server.url)
        self.user_key, self.admin_key = keys
        """Empty on a server without keys."""
        self._log_path = log
        self._log_start = 0
        self._start_s = time.monotonic()
        self.watcher = Watcher(server, self.user_key)

    # ------------------------------------------------------------------ for attacks

    def post(self, path: str, body: bytes | dict[str, Any], *, admin: bool = False) -> bytes:
        """Return a POST as bytes, with the user's or the operator's key."""
        return post(path, body, key=self.admin_key if admin else self.user_key)

    def get(self, path: str, *, admin: bool = False) -> bytes:
        """Return a GET as bytes, with the user's or the operator's key."""
        return get(path, key=self.admin_key if admin else self.user_key)

    def ask(self, request: bytes, *, timeout_s: float = ANSWER_WITHIN_S) -> Answer:
        """Send one request and return its answer; status 0 if none came in time."""
        return self.ask_all([request], timeout_s=timeout_s)[0]

    def ask_all(
        self,
        requests: Sequence[bytes],
        *,
        at_once: int | None = None,
        timeout_s: float = ANSWER_WITHIN_S,
    ) -> list[Answer]:
        """Send requests, all of them or `at_once` at a time, and return the answers in order."""

        async def run() -> list[Answer]:
            gate = asyncio.Semaphore(at_once or max(1, len(requests)))

            async def one(request: bytes) -> Answer:
                async with gate:
                    start_s = time.monotonic()
                    try:
                        async with asyncio.timeout(timeout_s):
                            return await ask(self.address, request)
                    except TimeoutError:
                        return Answer(start_s, end_s=time.monotonic())

            return list(await asyncio.gather(*map(one, requests)))

        return asyncio.run(run())

    def seen(self) -> Seen:
        """Return what the uninvolved have noticed since this attack began."""
        return self.watcher.seen(self._start_s, time.monotonic())

    def resident_mib(self) -> dict[str, float]:
        """Return the resident memory of each process now."""
        return {name: p.memory_info().rss / 2**20 for name, p in self.server.tree().items()}

    def pids(self) -> dict[str, int]:
        """Return the process ids by name, such as "router-0", of those that must stay."""
        tree = self.server.tree().items()
        return {name: process.pid for name, process in tree if not name.startswith(GRAMMARS)}

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's series with these labels, after every process's report."""
        time.sleep(SETTLE_S)
        wanted = labels.items()
        return sum(
            value
            for series, at, value in self._metrics()
            if series == f"lightserve_{name}" and at.items() >= wanted
        )

    def log(self) -> str:
        """Return what the server has logged since this attack began."""
        with self._log_path.open(errors="replace") as file:
            file.seek(self._log_start)
            return file.read()

    # ------------------------------------------------------------------ for the frame

    def begin(self) -> None:
        """Begin an attack: from here on things are counted."""
        self._log_start = self._log_path.stat().st_size
        self._start_s = time.monotonic()

    @property
    def is_alive(self) -> bool:
        """Whether the supervisor runs."""
        return self.server.process.poll() is None

    def settle(self) -> bool:
        """Wait until requests are served again and everything has been reported."""
        self.watcher.wait_until_answered(time.monotonic())
        deadline_s = time.monotonic() + READY_WITHIN_S
        while self.is_alive and time.monotonic() < deadline_s:
            if self.ask(get("/readyz"), timeout_s=10.0).status == 200:
                time.sleep(SETTLE_S)
                return True
            time.sleep(0.2)
        return False

    def worst_turns_s(self) -> dict[tuple[str, str], float]:
        """Return the longest turn of a loop so far, by role and clock."""
        worst: dict[tuple[str, str], float] = {}
        for series, labels, value in self._metrics():
            if series == "lightserve_loop_turn_max_seconds":
                key = (labels["process"].partition("-")[0], labels["clock"])
                worst[key] = max(worst.get(key, 0.0), value)
        return worst

    def _metrics(self) -> list[tuple[str, dict[str, str], float]]:
        answer = self.ask(self.get("/metrics", admin=True), timeout_s=30.0)
        return [
            (match[1], dict(_LABEL.findall(match[2])), float(match[3]))
            for match in _LINE.finditer(answer.data.decode(errors="replace"))
        ]


@contextmanager
def running_arena(setup: Setup) -> Iterator[Arena]:
    """Start a server with this setup and watch it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="abuse-")))
        keys = ("", "")
        flags = [*QUIET, "--profile", "off", *setup.flags]
        if setup.has_keys:
            keys = (secrets.token_hex(16), secrets.token_hex(16))
            file = folder / "keys"
            file.write_text(f"user {keys[0]}\noperator {keys[1]} admin\n")
            file.chmod(0o600)
            flags += ["--api-key-file", str(file)]
        if setup.has_store:
            flags += ["--batch-store", str(folder / "store")]
        log = folder / "log"
        stream = stack.enter_context(log.open("w"))
        server = stack.enter_context(running_server(flags, prefix=setup.prefix, log=stream))
        arena = Arena(server, keys, log)
        stack.callback(arena.watcher.close)
        yield arena


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU time that a process has used."""
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    asyncio.run(_main())
