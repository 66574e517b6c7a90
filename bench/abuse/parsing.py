"""Long bodies in a frontend's parser, without a server: how long the event loop is kept.

The best of several runs each: what other programs do to the machine is mostly left out, unlike in
the gaps of streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time

from bench.abuse.bad_input import MAX_GAP_MS, cases
from bench.abuse.client import row
from lightserve.errors import InvalidRequest
from lightserve.frontend.json_body import INLINE_BYTES, BodyReader, StrictModel
from lightserve.frontend.openai.chat import ChatRequest
from lightserve.frontend.openai.completions import CompletionRequest
from lightserve.frontend.process import SWITCH_INTERVAL_S

REPEATS = 5
TICK_S = 0.0005


async def _longest_tick_s(reader: BodyReader, body: bytes, model: type[StrictModel]) -> float:
    """Return the longest time between two turns of the loop while a body is parsed."""
    parsing = asyncio.ensure_future(reader.parse(body, model))
    longest_s, last_s = 0.0, time.perf_counter()
    while not parsing.done():
        await asyncio.sleep(TICK_S)
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    with contextlib.suppress(InvalidRequest):
        await parsing
    return longest_s


async def _measure() -> float:
    reader, worst_s = BodyReader(max_depth=64), 0.0
    for name, request in cases("lightserve-tiny").items():
        head, _, body = request.partition(b"\r\n\r\n")
        if not INLINE_BYTES < len(body) <= 4 * 1024 * 1024 or b"chunked" in head:
            continue
        model = ChatRequest if b"/chat/" in head else CompletionRequest
        best_s = min([await _longest_tick_s(reader, body, model) for _ in range(REPEATS)])
        worst_s = max(worst_s, best_s)
        row(f"{name} ({len(body) / 1e6:.1f} MB)", f"{best_s * 1e3:.1f} ms", "-")
    return worst_s


def run() -> bool:
    """Measure; returns whether the loop was never kept for too long."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    print(f"parsing long bodies: the longest turn of the event loop, best of {REPEATS}")
    worst_s = asyncio.run(_measure())
    row("longest of all", f"{worst_s * 1e3:.1f} ms", f"< {MAX_GAP_MS:.0f} ms")
    return worst_s * 1e3 < MAX_GAP_MS
