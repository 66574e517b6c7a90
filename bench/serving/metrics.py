"""What metrics cost: CPU time of each piece, and their share of a frontend's time per token.

    python -m bench.serving.metrics [--skip-server]

The pieces are timed in this process. Then a server with the bundled model answers 64 streams, and
its own /metrics tells how much CPU time its processes took per token.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
from support.streams import stream_once

from bench.serving.server import Server, running_server
from lightserve.config import ServeConfig
from lightserve.frontend.middleware import RequestLog
from lightserve.frontend.service import Observation
from lightserve.metrics.catalogue import INTER_TOKEN_LATENCY
from lightserve.metrics.exposition import make_registry, render
from lightserve.metrics.ledger import Ledger
from lightserve.metrics.recording import Recorder
from lightserve.metrics.turns import TurnClock
from lightserve.types import FinishReason, RequestClass

NUM_STREAMS = 64
MAX_TOKENS = 100
ROUNDS = 5


def cpu_s(work: Callable[[int], None], count: int) -> float:
    """Return the CPU seconds of one of `count` repetitions: the best of some rounds."""
    best_s = float("inf")
    for _ in range(ROUNDS):
        start_s = time.process_time()
        work(count)
        best_s = min(best_s, time.process_time() - start_s)
    return best_s / count


def _observe(count: int) -> None:
    histogram = Recorder().histogram(INTER_TOKEN_LATENCY, "rt")
    for _ in range(count):
        histogram.observe(0.021)


def _turns(count: int) -> None:
    clock = TurnClock(Recorder(), "router-0")
    for _ in range(count):
        clock.begin()
        clock.end()


def _nothing(count: int) -> None:
    for _ in range(count):
        pass


def _tokens(count: int) -> None:
    metrics = Observation(ServeConfig()).requests
    request = metrics.request(RequestClass.RT, arrival_s=0.0, num_prompt_tokens=9)
    for number in range(count):
        request.on_tokens(1, number * 0.02)


def _requests(count: int) -> None:
    metrics = Observation(ServeConfig(ttft_slo_ms=100, tpot_slo_ms=10)).requests
    for _ in range(count):
        request = metrics.request(RequestClass.RT, arrival_s=0.0, num_prompt_tokens=9)
        request.on_tokens(1, 0.1)
        request.on_finish(FinishReason.STOP)


def _events(app: Any, count: int) -> None:
    """Send `count` events of a stream through an ASGI application."""

    async def drop(_message: Any) -> None:
        pass

    async def nothing() -> Any:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "count": count}
    asyncio.run(app(scope, nothing, drop))


async def _stream(scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    event = {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}
    for _ in range(scope["count"]):
        await send(event)


def measure_pieces() -> dict[str, float]:
    """Return the CPU seconds of each piece."""
    loop_s = cpu_s(_nothing, 200_000)
    observation = Observation(ServeConfig())
    logged = RequestLog(_stream, observation, frozenset())
    snapshot = observation.snapshot(num_in_flight=0, num_rejected_frames=0)
    encoder, ledger = msgspec.msgpack.Encoder(), Ledger()
    ledger.update("a", snapshot.samples)
    registry = make_registry(ledger, "tiny")

    def take_snapshot(count: int) -> None:
        for _ in range(count):
            encoder.encode(observation.snapshot(num_in_flight=0, num_rejected_frames=0))

    def update(count: int) -> None:
        for _ in range(count):
            ledger.update("a", snapshot.samples)

    def scrape(count: int) -> None:
        for _ in range(count):
            render(registry)

    return {
        "histogram.observe": cpu_s(_observe, 200_000) - loop_s,
        "turn of a loop": cpu_s(_turns, 100_000) - loop_s,
        "delivery of a token": cpu_s(_tokens, 200_000) - loop_s,
        "event of a stream through RequestLog": cpu_s(lambda n: _events(logged, n), 100_000)
        - cpu_s(lambda n: _events(_stream, n), 100_000),
        "request, begin to end": cpu_s(_requests, 20_000),
        "snapshot of a frontend, encoded": cpu_s(take_snapshot, 300),
        "snapshot taken in by the supervisor": cpu_s(update, 300),
        "scrape of a frontend's families": cpu_s(scrape, 20),
    }


def _read(text: str, name: str, labels: str = "") -> float:
    pattern = re.compile(rf"^lightserve_{name}{{[^}}]*{re.escape(labels)}[^}}]*}} (\S+)$", re.M)
    return sum(float(match[1]) for match in pattern.finditer(text))


def measure_server(server: Server) -> tuple[float, dict[str, float]]:
    """Return the tokens per second of 64 streams, and each process's CPU seconds per token."""

    def scrape() -> str:
        time.sleep(1.5)  # every process reports once a second
        return httpx.get(f"{server.url}/metrics", timeout=10.0).text

    def talk(number: int) -> None:
        messages = [{"role": "user", "content": f"Tell me a story of day {number}."}]
        body = {"model": server.model, "messages": messages, "max_tokens": MAX_TOKENS}
        stream_once(server.url, {**body, "stream": True, "seed": number})

    talk(0)
    before, start_s = scrape(), time.monotonic()
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        list(threads.map(talk, range(NUM_STREAMS)))
    elapsed_s = time.monotonic() - start_s
    after = scrape()

    def gained(name: str, labels: str = "") -> float:
        return _read(after, name, labels) - _read(before, name, labels)

    num_tokens = gained("generation_tokens_total")
    per_token_s = {
        process: gained("process_cpu_seconds_total", f'process="{process}"') / num_tokens
        for process in ("frontend-0", "router-0", "supervisor", "worker-0")
    }
    return num_tokens / elapsed_s, per_token_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--skip-server", action="store_true")
    args = parser.parse_args()
    start_s = time.monotonic()
    pieces = measure_pieces()
    for name, seconds in pieces.items():
        print(f"{name:40s} {seconds * 1e6:10.2f} µs")
    if not args.skip_server:
        with running_server(["--log-level", "warning"]) as server:
            rate, per_token_s = measure_server(server)
        print(f"{NUM_STREAMS} streams: {rate:.0f} tokens/s; CPU per token:")
        for process, seconds in per_token_s.items():
            print(f"  {process:38s} {seconds * 1e6:10.2f} µs")
        ours_s = pieces["delivery of a token"] + pieces["event of a stream through RequestLog"]
        ours_s += pieces["snapshot of a frontend, encoded"] / rate
        share = ours_s / per_token_s["frontend-0"]
        print(f"metrics: {ours_s * 1e6:.2f} µs per token, {share:.1%} of the frontend's time")
    print(f"took {time.monotonic() - start_s:.0f} s")


if __name__ == "__main__":
    main()
