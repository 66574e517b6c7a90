"""Too many requests: what is answered in time, and how fast the rest is refused."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.abuse.arena import (
    PROMPT,
    QUIET,
    Address,
    Answer,
    address_of,
    ask,
    percentile,
    post,
    raise_file_limit,
    row,
)
from bench.serving.server import Server, running_server

MAX_TOKENS = 200
MAX_SEQS = 32
RATES = (0.7, 0.9, 1.1, 1.4)
OVERLOAD = 5.0
TARGET_FACTOR = 3.0
REJECT_WITHIN_S = 0.05


@dataclass(frozen=True)
class Targets:
    """The latencies of a good answer at most, in seconds."""

    ttft_s: float
    tpot_s: float

    def are_met(self, answer: Answer) -> bool:
        """Return whether an answer is whole and keeps to the targets."""
        is_whole = answer.status == 200 and b"[DONE]" in answer.data
        return is_whole and answer.ttft_s <= self.ttft_s and answer.tpot_s <= self.tpot_s


def _request(server: Server) -> bytes:
    body = {"model": server.model, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "stream": True}
    return post("/v1/completions", {**body, "temperature": 0, "ignore_eos": True})


async def _closed_loop(address: Address, request: bytes, seconds: float) -> float:
    """Return the requests per second that 64 clients get through."""
    end_s = time.monotonic() + seconds
    num_done = 0

    async def client() -> None:
        nonlocal num_done
        while time.monotonic() < end_s:
            answer = await ask(address, request)
            assert answer.status in (200, 429), answer.data
            num_done += answer.status == 200

    start_s = time.monotonic()
    await asyncio.gather(*(client() for _ in range(64)))
    return num_done / (time.monotonic() - start_s)


async def _open_loop(
    address: Address, request: bytes, rate: float, seconds: float
) -> Sequence[Answer]:
    """Send at random moments, whatever becomes of the requests before; returns all answers."""
    rng = random.Random(7)
    start_s, at_s = time.monotonic(), 0.0
    tasks: list[asyncio.Task[Answer]] = []
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, start_s + at_s - time.monotonic()))
        tasks.append(asyncio.create_task(ask(address, request, start_s=start_s + at_s)))
    return await asyncio.gather(*tasks)


def _goodput(answers: Sequence[Answer], targets: Targets, seconds: float) -> float:
    return sum(map(targets.are_met, answers)) / seconds


def overload(seconds: float = 10.0) -> bool:
    """Measure; returns whether the targets were met."""
    raise_file_limit()
    with running_server(QUIET) as server:
        address, request = address_of(server.url), _request(server)
        asyncio.run(_closed_loop(address, request, 2.0))
        capacity = asyncio.run(_closed_loop(address, request, seconds / 2))
        half = asyncio.run(_open_loop(address, request, capacity / 2, seconds))
    targets = Targets(
        TARGET_FACTOR * percentile([a.ttft_s for a in half], 0.99),
        TARGET_FACTOR * percentile([a.tpot_s for a in half], 0.99),
    )
    # Who waits longer than the target is not served in time: half of it is left for the rest.
    max_waiting = max(1, int(capacity * targets.ttft_s / 2))
    # More at once would be too slow for the target of each: until the planner knows targets, the
    # operator bounds the batch.
    bounds = ["--rt-max-waiting-requests", str(max_waiting), "--max-num-seqs", str(MAX_SEQS)]
    flags = [*bounds, *QUIET]
    with running_server(flags) as server:
        address, request = address_of(server.url), _request(server)
        asyncio.run(_closed_loop(address, request, 2.0))
        curve = {
            factor: _goodput(
                asyncio.run(_open_loop(address, request, capacity * factor, seconds)),
                targets,
                seconds,
            )
            for factor in RATES
        }
        flood = asyncio.run(_open_loop(address, request, capacity * OVERLOAD, seconds))
    print(
        f"overload: capacity {capacity:.1f} requests/s of {MAX_TOKENS} tokens, {seconds:g} s each"
    )
    row("targets: TTFT", f"{targets.ttft_s * 1e3:.0f} ms", "3x p99 at half load")
    row("targets: TPOT", f"{targets.tpot_s * 1e3:.1f} ms", "3x p99 at half load")
    row("--rt-max-waiting-requests", f"{max_waiting}", "capacity x TTFT / 2")
    for factor, goodput in curve.items():
        row(f"goodput at {factor:g}x", f"{goodput:.1f}/s", "-")
    return _judge(flood, targets, max(curve.values()), seconds)


def _judge(flood: Sequence[Answer], targets: Targets, peak: float, seconds: float) -> bool:
    goodput = _goodput(flood, targets, seconds)
    rejects = [a for a in flood if a.status == 429]
    others = [a for a in flood if a.status not in (200, 429)]
    reject_s = percentile([a.end_s - a.start_s for a in rejects], 0.99)
    has_hint = all(b"retry-after: " in a.data for a in rejects)
    row(f"goodput at {OVERLOAD:g}x", f"{goodput:.1f}/s", "-")
    row("of its peak", f"{goodput / peak * 100:.0f} %", ">= 95 %")
    row(f"rejects ({len(rejects)} of {len(flood)}): p99", f"{reject_s * 1e3:.0f} ms", "< 50 ms")
    row("rejects with Retry-After", "all" if has_hint else "NOT ALL", "all")
    row("neither answered nor rejected", f"{len(others)}", "0")
    return goodput >= 0.95 * peak and reject_s < REJECT_WITHIN_S and has_hint and not others
