"""What a server keeps in the long run: memory, descriptors, threads, KV, counters.

    python -m bench.faults.soak [--minutes 120]

Mixed load on a server of its own with the bundled model, with clients that leave at random. Once a
minute the load pauses until nothing is in flight; then all KV is free or cache, descriptors and
threads are as many as before, and no counter has fallen. Ends with code 1 if a bound was missed. A
slope that its own error allows to be below the bound is no miss, nor is growth of less than 2 MB in
all: runs of a few minutes cannot tell 1 MB/h from the steps of an allocator, and say so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import psutil

from bench.abuse.arena import QUIET, Address, address_of, ask, get, post
from bench.serving.server import Server, running_server

MAX_SLOPE_MB_H = 1.0
VOCABULARY = (300, 2300)
"""Token ids that are text."""
MAX_KV_TOKENS = 32_768
NUM_CLIENTS = 24
ROUND_S = 60.0
"""Of mixed load, between two moments without any."""
WARM_UP = 0.25
"""Of the rounds; memory, descriptors and threads are compared with those after it."""
WATCHED = ("supervisor", "frontend", "router", "worker")
_SERIES = re.compile(r"^(lightserve_\w+_(?:total|count|sum|bucket)(?:\{[^}]*\})?) (\S+)$", re.M)


MAX_STEP_MB = 2.0
"""Of an allocator: so much growth in all may be a step or two, whatever a short run's slope."""


class Slope(NamedTuple):
    """Growth of memory, MB per hour, and its standard error."""

    mb_h: float
    error: float
    hours: float

    @property
    def verdict(self) -> str:
        """Whether it is below the bound, as far as can be told."""
        if self.mb_h < MAX_SLOPE_MB_H:
            return "met"
        if self.mb_h - 2 * self.error < MAX_SLOPE_MB_H:
            return "met within the error"
        return "MISSED" if self.mb_h * self.hours > MAX_STEP_MB else "too short to tell"


def slope_of(times_s: Sequence[float], mib: Sequence[float]) -> Slope:
    """Fit a line through medians of 20 spans, which an odd moment does not move."""
    spans = [part for part in np.array_split(np.arange(len(times_s)), 20) if len(part)]
    if len(spans) < 4:
        return Slope(float("nan"), float("inf"), 0.0)
    at_h = np.array([np.median(np.asarray(times_s)[part]) for part in spans]) / 3600
    mb = np.array([np.median(np.asarray(mib)[part]) for part in spans]) * 2**20 / 1e6
    (slope, _), covariance = np.polyfit(at_h, mb, 1, cov=True)
    return Slope(float(slope), float(covariance[0, 0] ** 0.5), at_h[-1] - at_h[0])


@dataclass
class Memory:
    """Resident memory of each process, once a second, MiB."""

    processes: Mapping[str, psutil.Process]
    times_s: list[float] = field(default_factory=list)
    mib: dict[str, list[float]] = field(default_factory=dict)

    def sample(self) -> None:
        """Look once."""
        self.times_s.append(time.monotonic())
        for name, process in self.processes.items():
            mib = float("nan")
            with contextlib.suppress(psutil.NoSuchProcess):
                mib = process.memory_info().rss / 2**20
            self.mib.setdefault(name, []).append(mib)

    def slope(self, name: str, since_s: float) -> Slope:
        """Return the slope of a process since a moment."""
        first = next((i for i, at_s in enumerate(self.times_s) if at_s >= since_s), 0)
        return slope_of(self.times_s[first:], self.mib[name][first:])


@contextmanager
def watched(server: Server) -> Iterator[Memory]:
    """Sample the memory of a server's processes in a thread."""
    tree = server.tree()
    memory = Memory({name: p for name, p in tree.items() if name.startswith(WATCHED)})
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(1.0):
            memory.sample()

    memory.sample()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield memory
    finally:
        is_over.set()
        thread.join()
        memory.sample()


def print_memory(memory: Memory, since_s: float) -> bool:
    """Print a line for each process; return whether none is known to grow too fast."""
    print(
        "\n| process | before | after each quarter | most | after (MiB) |"
        " slope after a quarter, MB/h | < 1 MB/h |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    verdicts = []
    for name, mib in memory.mib.items():
        slope = memory.slope(name, since_s)
        verdicts.append(slope.verdict)
        quarters = " ".join(f"{mib[len(mib) * part // 4]:.1f}" for part in (1, 2, 3))
        print(
            f"| {name} | {mib[0]:.1f} | {quarters} | {max(mib):.1f} | {mib[-1]:.1f} |"
            f" {slope.mb_h:+.2f} ± {slope.error:.2f} | {slope.verdict} |"
        )
    return "MISSED" not in verdicts


async def _json(address: Address, path: str) -> Any:
    return json.loads((await ask(address, get(path))).data.partition(b"\r\n\r\n")[2])


async def _kv_counts(address: Address) -> dict[str, int]:
    """Return how many slots there are of each kind."""
    answer = await ask(address, get("/debug/kv"))
    found = re.search(rb'"counts":(\{[^}]*\})', answer.data)
    assert found is not None, answer.data[:200]
    counts: dict[str, int] = json.loads(found[1])
    return counts


async def _counters(address: Address) -> dict[str, float]:
    while (answer := await ask(address, get("/metrics"))).status == 503:
        await asyncio.sleep(1.0)  # what a supervisor does not say in time is no counter that fell
    return {name: float(value) for name, value in _SERIES.findall(answer.data.decode())}


@dataclass
class Client:
    """Sends one request after the other, of every kind, and leaves some before their end."""

    address: Address
    model: str
    rng: random.Random
    statuses: dict[int, int]
    is_over: asyncio.Event
    has_left: int = 0

    def request(self) -> bytes:
        """Return a request of a random kind."""
        rng, model = self.rng, self.model
        shared = [VOCABULARY[0] + i % 1900 for i in range(rng.choice((10, 200, 1500)))]
        own = [rng.randrange(*VOCABULARY) for _ in range(rng.randrange(1, 60))]
        body: dict[str, Any] = {"model": model, "max_tokens": rng.randrange(1, 80)}
        body |= {"stream": rng.random() < 0.6, "temperature": rng.choice((0, 1))}
        kind = rng.randrange(8)
        if kind <= 2:
            body |= {"prompt": shared + own}
        elif kind == 3:
            body |= {"prompt": shared + own, "n": rng.randrange(1, 5), "logprobs": 3}
        elif kind == 4:
            body |= {"prompt": shared, "service_tier": "flex", "stop": ["the"]}
        elif kind == 5:
            body |= {"prompt": shared[:200], "echo": True, "logprobs": 1}
        elif kind == 6:
            body |= {"messages": [{"role": "user", "content": "Tell me of Mira. " * 5}]}
            schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
            if rng.random() < 0.5:
                form = {"name": "a", "schema": schema}
                body["response_format"] = {"type": "json_schema", "json_schema": form}
        else:
            body |= {"prompt": shared, "max_tokens": -1}
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        return post(path, body)

    async def run(self) -> None:
        """Go on until `is_over`."""
        while not self.is_over.is_set():
            asking = asyncio.create_task(ask(self.address, self.request()))
            patience_s = self.rng.expovariate(1 / 1.5) if self.rng.random() < 0.3 else None
            done, _ = await asyncio.wait([asking], timeout=patience_s)
            if not done:
                self.has_left += 1
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                continue
            status = asking.result().status
            self.statuses[status] = self.statuses.get(status, 0) + 1


@dataclass
class Tick:
    """What was found at a moment without load."""

    at_s: float
    seconds_until_idle: float
    counts: dict[str, int]
    num_fds: dict[str, int]
    num_threads: dict[str, int]
    fallen: list[str]
    """Counters that are lower than at the moment before."""


@asynccontextmanager
async def _load(clients: Sequence[Client]) -> AsyncIterator[None]:
    over = clients[0].is_over
    over.clear()
    tasks = [asyncio.create_task(client.run()) for client in clients]
    try:
        yield
    finally:
        over.set()
        await asyncio.gather(*tasks)


async def _look(
    address: Address, processes: Mapping[str, psutil.Process], counters: dict[str, float]
) -> Tick:
    start_s = time.monotonic()
    while True:
        counts = await _kv_counts(address)
        if counts["rt"] + counts["be"] + counts["checkpointed"] == 0:
            break
        if time.monotonic() - start_s > 30.0:
            break
        await asyncio.sleep(0.1)
    idle_s = time.monotonic() - start_s
    await asyncio.sleep(2.0)
    now = await _counters(address)
    fallen = [name for name, value in counters.items() if now.get(name, -1.0) < value]
    counters.clear()
    counters.update(now)
    return Tick(
        time.monotonic(),
        idle_s,
        counts,
        {name: process.num_fds() for name, process in processes.items()},
        {name: process.num_threads() for name, process in processes.items()},
        fallen,
    )


async def _run_rounds(
    address: Address, server: Server, memory: Memory, minutes: float, seed: int
) -> tuple[list[Tick], list[Client]]:
    statuses: dict[int, int] = {}
    over = asyncio.Event()
    clients = [
        Client(address, server.model, random.Random(seed + i), statuses, over)
        for i in range(NUM_CLIENTS)
    ]
    ticks: list[Tick] = []
    counters: dict[str, float] = {}
    end_s = time.monotonic() + 60 * minutes
    round_s = min(ROUND_S, 60 * minutes / 8)
    while time.monotonic() < end_s:
        async with _load(clients):
            await asyncio.sleep(round_s)
        ticks.append(await _look(address, memory.processes, counters))
        print(".", end="", flush=True)
    print()
    return ticks, clients


def run_mixed(minutes: float, seed: int = 1) -> bool:
    """Print what is left after mixed load; return whether all bounds were kept."""
    flags = [*QUIET, "--max-kv-tokens", str(MAX_KV_TOKENS), "--host-kv-memory", "16MiB"]
    with running_server(flags) as server:
        before = {name: process.pid for name, process in server.tree().items()}
        with watched(server) as memory:
            ticks, clients = asyncio.run(
                _run_rounds(address_of(server.url), server, memory, minutes, seed)
            )
        after = {name: process.pid for name, process in server.tree().items()}
    warm = ticks[int(WARM_UP * len(ticks))]
    num_left = sum(client.has_left for client in clients)
    print(f"{minutes:g} minutes of mixed load, {len(ticks)} moments without")
    print(f"answers {dict(sorted(clients[0].statuses.items()))}; {num_left} left before the end")
    last = ticks[-1]
    held = [t.counts for t in ticks if t.counts["rt"] + t.counts["be"] + t.counts["checkpointed"]]
    odd = [t.counts for t in ticks if sum(t.counts.values()) != sum(warm.counts.values())]
    fallen = [name for tick in ticks for name in tick.fallen]
    more_fds = {n: (warm.num_fds[n], last.num_fds[n]) for n in warm.num_fds}
    more_threads = {n: (warm.num_threads[n], last.num_threads[n]) for n in warm.num_threads}
    lines = [
        ("processes replaced", "none" if before == after else "SOME", before == after),
        ("KV in use at a moment without load", str(held or "never"), not held),
        ("slots in all", str(odd or "always the same"), not odd),
        ("longest until idle", f"{max(t.seconds_until_idle for t in ticks):.1f} s", True),
        ("counters that fell", str(fallen or "none"), not fallen),
        ("descriptors, warm and last", str(more_fds), _is_flat(more_fds)),
        ("threads, warm and last", str(more_threads), _is_flat(more_threads)),
    ]
    for name, figure, is_met in lines:
        print(f"  {name:38} {figure}   {'met' if is_met else 'MISSED'}")
    is_flat = print_memory(memory, warm.at_s)
    return is_flat and all(is_met for *_, is_met in lines)


def _is_flat(pairs: Mapping[str, tuple[int, int]]) -> bool:
    return all(last <= warm + 2 for warm, last in pairs.values())


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=120.0)
    return 0 if run_mixed(parser.parse_args().minutes) else 1


if __name__ == "__main__":
    sys.exit(main())
