"""Memory too small on a real server, the bundled model on one thread.

python -m bench.memory.live arms [--rounds 2] [--bursts 4]
    the arms of `bench.memory.arms`: bursts of real-time requests over a closed loop of
    best-effort ones, one server after the other, every arm once per round. The targets are
    three times what real-time requests get without any others. Counts are those of /metrics;
    times depend on what else the machine does
python -m bench.memory.live rules [--requests 200] [--max-kv-tokens 1500]
    every admission rule on a server of its own, all up at once; the same chats go to each of
    them in turn, a share at a time, so that whatever else the machine does falls on all alike.
    Answers end by themselves; a client declares more than it will need, as clients do
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field

import aiohttp
import httpx
import numpy as np

from bench.memory.arms import ARMS
from bench.serving.server import Server, running_server
from lightserve.bundled.corpus import draw_exchange

TARGET_FACTOR = 3.0
BURST_SIZE, BURST_EVERY_S = 16, 2.5
NUM_BE_CLIENTS = 24
SETTLE_S = 2.5
"""Until the router's counters are new."""
ARM_COUNTERS = (
    "kv_tokens_saved_total",
    "kv_tokens_saved_ahead_total",
    "kv_tokens_loaded_total",
    "preempted_tokens_total",
    "pauses_total",
    "num_preemptions_total",
)
_SAMPLE = re.compile(r"^lightserve_(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_BUCKET = re.compile(r'le="([^"]+)"')
PORT = ("--num-threads", "1", "--policy", "priority", "--cache-policy", "off")


@dataclass
class Seen:
    """One answer, as its client saw it."""

    ttft_s: float
    tpot_s: float
    largest_gap_s: float
    num_tokens: int


@dataclass
class ArmTally:
    """What came of the requests to one server, or to all of an arm."""

    seconds: float = 0.0
    num_sent: int = 0
    real_time: list[Seen] = field(default_factory=list)
    best_effort_tokens: int = 0
    """That came while real-time requests did, of unfinished answers too."""
    counters: Counter[str] = field(default_factory=Counter)
    largest_step_s: float = 0.0
    """The end of the last bucket of step times that has any."""

    def add(self, other: ArmTally) -> None:
        """Add another round."""
        self.seconds += other.seconds
        self.num_sent += other.num_sent
        self.real_time += other.real_time
        self.best_effort_tokens += other.best_effort_tokens
        self.counters.update(other.counters)
        self.largest_step_s = max(self.largest_step_s, other.largest_step_s)

    def quantile(self, name: str, share: float) -> float:
        """Return a quantile of a field of `Seen` over the real-time requests."""
        return float(np.quantile([getattr(seen, name) for seen in self.real_time], share))

    def attainment(self, name: str, target_s: float) -> float:
        """Return the share of real-time requests within a target; unanswered ones are not."""
        num_met = sum(bool(getattr(seen, name) <= target_s) for seen in self.real_time)
        return num_met / self.num_sent


class Load:
    """Sends both classes to one server."""

    def __init__(self, server: Server, session: aiohttp.ClientSession, seed: int) -> None:
        self._server = server
        self._session = session
        self._rng = random.Random(seed)
        self._best_effort_rng = random.Random(seed + 1)
        self.tally = ArmTally()

    async def run(self, num_bursts: int, *, with_best_effort: bool) -> None:
        """Send bursts over a backlog and wait for their answers."""
        backlog = [
            asyncio.create_task(self._best_effort_client())
            for _ in range(NUM_BE_CLIENTS * with_best_effort)
        ]
        await asyncio.sleep(BURST_EVERY_S)
        start_s, before = time.perf_counter(), self.tally.best_effort_tokens
        bursts = []
        for number in range(num_bursts):
            await asyncio.sleep(start_s + number * BURST_EVERY_S - time.perf_counter())
            bursts += [asyncio.create_task(self._real_time()) for _ in range(BURST_SIZE)]
        await asyncio.gather(*bursts)
        self.tally.seconds = time.perf_counter() - start_s
        self.tally.best_effort_tokens -= before
        for task in backlog:
            task.cancel()
        await asyncio.gather(*backlog, return_exceptions=True)

    async def _real_time(self) -> None:
        self.tally.num_sent += 1
        rng = self._rng
        seen = await self._stream(rng, rng.randint(20, 160), rng.randint(40, 120), "default")
        self.tally.real_time.append(seen)

    async def _best_effort_client(self) -> None:
        rng = self._best_effort_rng
        while True:
            await self._stream(rng, rng.randint(200, 400), rng.randint(32, 128), "flex")

    async def _stream(
        self, rng: random.Random, num_prompt_tokens: int, num_tokens: int, service_tier: str
    ) -> Seen:
        body = {
            "model": self._server.model,
            "prompt": [rng.randint(100, 400) for _ in range(num_prompt_tokens)],
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "service_tier": service_tier,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start_s, times, usage = time.perf_counter(), list[float](), None
        is_best_effort = service_tier == "flex"
        async with self._session.post(f"{self._server.url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                if event["choices"]:
                    times.append(time.perf_counter())
                    self.tally.best_effort_tokens += is_best_effort
        assert usage is not None and usage["completion_tokens"] == num_tokens, usage
        # An event may have several tokens, if the client or the server lags.
        self.tally.best_effort_tokens += is_best_effort * (num_tokens - len(times))
        gaps = np.diff(times) if len(times) > 1 else np.zeros(1)
        return Seen(
            times[0] - start_s,
            (times[-1] - times[0]) / max(1, num_tokens - 1),
            float(gaps.max()),
            num_tokens,
        )


def read_metrics(server: Server) -> tuple[Counter[str], dict[float, float]]:
    """Return the router's counters over both classes, and steps by the end of their bucket."""
    time.sleep(SETTLE_S)
    counters: Counter[str] = Counter()
    buckets: dict[float, float] = {}
    for name, labels, value in _SAMPLE.findall(httpx.get(f"{server.url}/metrics").text):
        if name in ARM_COUNTERS:
            counters[name] += int(float(value))
        elif name == "step_time_seconds_bucket":
            end_s = float(_BUCKET.search(labels)[1])  # type: ignore[index]
            buckets[end_s] = buckets.get(end_s, 0.0) + float(value)
    return counters, buckets


async def drive(server: Server, seed: int, num_bursts: int, *, with_best_effort: bool) -> ArmTally:
    """Load a server and return what its clients saw."""
    timeout = aiohttp.ClientTimeout(total=60)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await Load(server, session, seed + 1000).run(1, with_best_effort=False)  # warm up
        load = Load(server, session, seed)
        await load.run(num_bursts, with_best_effort=with_best_effort)
    return load.tally


def measure(
    args: list[str], seed: int, num_bursts: int, *, with_best_effort: bool = True
) -> ArmTally:
    """Start a server, load it, and read what it counted."""
    with running_server(args) as server:
        tally = asyncio.run(drive(server, seed, num_bursts, with_best_effort=with_best_effort))
        tally.counters, buckets = read_metrics(server)
    most = max(buckets.values(), default=0.0)
    tally.largest_step_s = min((end for end, count in buckets.items() if count == most), default=0)
    return tally


def arms() -> dict[str, list[str]]:
    """Return the options of each arm."""
    options = {
        arm: [
            part
            for name, value in fields.items()
            for part in (f"--{name.replace('_', '-')}", str(value))
        ]
        for arm, fields in ARMS.items()
    }
    first = next(iter(options))
    nothing_ahead = {f"{first}, nothing ahead": list(options[first])}
    for arm in list(options)[:2]:  # those with checkpoints
        options[arm] += ["--clean-ahead-tokens", "-1"]
    return options | nothing_ahead


def arms_main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--bursts", type=int, default=4)
    parser.add_argument("--max-kv-tokens", type=int, default=3000)
    args = parser.parse_args()
    common = [*PORT, "--max-kv-tokens", str(args.max_kv_tokens)]
    start_s = time.perf_counter()
    alone = ArmTally()
    tallies = {arm: ArmTally() for arm in arms()}
    for seed in range(args.rounds):
        alone.add(measure(common, seed, args.bursts, with_best_effort=False))
        for arm, options in arms().items():
            tallies[arm].add(measure([*common, *options], seed, args.bursts))
    ttft_s = TARGET_FACTOR * alone.quantile("ttft_s", 0.5)
    tpot_s = TARGET_FACTOR * alone.quantile("tpot_s", 0.5)
    print(
        f"| arm | TTFT ≤ {ttft_s * 1e3:.0f} ms | p50 / p99 ms | TPOT ≤ {tpot_s * 1e3:.0f} ms"
        " | p50 ms | largest gap ms | largest step under, ms | BE tokens/s | saved | ahead"
        " | loaded | recomputed | pauses | evictions |"
    )
    print("| --- " * 14 + "|")
    for arm, tally in {"no best-effort requests": alone, **tallies}.items():
        figures = [
            f"{tally.attainment('ttft_s', ttft_s):.0%}",
            " / ".join(f"{1e3 * tally.quantile('ttft_s', share):.0f}" for share in (0.5, 0.99)),
            f"{tally.attainment('tpot_s', tpot_s):.0%}",
            f"{1e3 * tally.quantile('tpot_s', 0.5):.1f}",
            f"{1e3 * tally.quantile('largest_gap_s', 1.0):.0f}",
            f"{1e3 * tally.largest_step_s:.0f}",
            f"{tally.best_effort_tokens / tally.seconds:.0f}",
            *(f"{tally.counters[name]:,}" for name in ARM_COUNTERS),
        ]
        print(f"| {arm} | " + " | ".join(figures) + " |")
    print(f"\n{alone.num_sent} real-time requests per line; {time.perf_counter() - start_s:.0f} s")


RULES: dict[str, list[str]] = {
    "risk": [],
    "past-future": [],
    "conservative": [],
    "aggressive": [],
    "ema": [],
}
RULE_COUNTERS = ("num_preemptions_total", "preempted_tokens_total")


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
        for name in RULE_COUNTERS
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


def rules_main() -> None:
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
        evictions, redone = (after[rule][name] - before[rule][name] for name in RULE_COUNTERS)
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


COMMANDS = {"arms": arms_main, "rules": rules_main}

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        COMMANDS[sys.argv.pop(1)]()
    else:
        raise SystemExit(__doc__)
