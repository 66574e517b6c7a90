"""Wrong input, long bodies in the parser, data by the server's schema, and too many requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.abuse.arena import (
    PROMPT,
    QUIET,
    Address,
    Answer,
    address_of,
    ask,
    get,
    percentile,
    post,
    raise_file_limit,
    row,
)
from bench.serving.server import Server, running_server
from lightserve.errors import InvalidRequest
from lightserve.frontend.json_body import INLINE_BYTES, BodyReader, StrictModel
from lightserve.frontend.openai.chat import ChatRequest
from lightserve.frontend.openai.completions import CompletionRequest
from lightserve.frontend.process import SWITCH_INTERVAL_S

NUM_STREAMS = 4
MIB = 1024 * 1024
MAX_GAP_MS = 100.0


def cases(model: str) -> dict[str, bytes]:
    """Return requests by name, each to be answered with a 4xx."""
    completion: dict[str, Any] = {"model": model, "prompt": [5], "max_tokens": 1}
    prompt = json.dumps({"model": model, "max_tokens": 1})[:-1].encode() + b', "prompt": ['
    path = "/v1/completions"

    def text(value: str) -> bytes:
        return post(path, {**completion, "prompt": value})

    def chat(content: Any) -> bytes:
        body = {"model": model, "messages": [{"role": "user", "content": content}]}
        return post("/v1/chat/completions", body)

    return {
        "truncated JSON": post(path, json.dumps(completion)[:-2].encode()),
        "4 MiB of [": post(path, b"[" * (4 * MIB - 1)),
        "a million objects": post(path, b"[" + b"{}," * MIB + b"{}]"),
        "100,000 keys": post(path, b"{" + b",".join(b'"%d":1' % n for n in range(100_000)) + b"}"),
        "4,000 unknown fields": post(path, {f"k{n}": 1 for n in range(4000)}),
        "two million token ids": post(path, prompt + b"1," * (2 * MIB - 100) + b"1]}"),
        "a million fractions as ids": post(path, prompt + b"1.5," * (MIB - 100) + b"1]}"),
        "200,000 strings as ids": post(path, prompt + b'"",' * 200_000 + b'""]}'),
        "a 5,000-digit number": post(path, prompt + b"1" * 5000 + b"]}"),
        "NaN": post(path, prompt + b"NaN]}"),
        "duplicate keys": post(path, b'{"model": 1, "model": 1}'),
        "lone surrogate": text("\ud800"),
        "invalid UTF-8": post(path, b'{"prompt": "\xff"}'),
        "10 MB declared": post(path, b"x" * 10_000_000),
        "10 MB in chunks": _chunked(path, 10_000_000),
        "2 MB of one character": text("x" * 2_000_000),
        "2 MB of words": text("The quick brown fox. " * 95_000),
        "2 MB of one character, chat": chat("x" * 2_000_000),
        "2 MB of escapes": text('"' * 1_000_000),
        "2,048 messages of text parts": post(
            "/v1/chat/completions",
            {"model": model, "messages": [{"role": "user", "content": "x" * 1000}] * 2048},
        ),
        "not an object": post(path, b"[]"),
        "64 KiB of header": b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 70_000,
        "1,000 headers": get("/livez")[:-2] + b"x: y\r\n" * 1000 + b"\r\n",
        "grammar of 1 MB": post(
            path, {**completion, "structured_outputs": {"grammar": "root ::= x\n" * 90_000}}
        ),
        "regex that explodes": post(
            path, {**completion, "structured_outputs": {"regex": "(((a{1,500}){1,500}){1,500})"}}
        ),
        "invalid regex": post(path, {**completion, "structured_outputs": {"regex": "(("}}),
        "schema of 5,000 levels of $ref": post(path, {**completion, **_deep_schema()}),
    }


def _chunked(path: str, num_bytes: int) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += "content-type: application/json\r\n"
    chunk = b"%x\r\n" % num_bytes + b"x" * num_bytes + b"\r\n0\r\n\r\n"
    return f"{head}transfer-encoding: chunked\r\n\r\n".encode() + chunk


def _deep_schema() -> dict[str, Any]:
    definitions: dict[str, Any] = {
        f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}, {"$ref": f"#/$defs/a{n + 1}"}]}
        for n in range(2000)
    }
    schema = {"$defs": definitions | {"a2000": {"type": "integer"}}, "$ref": "#/$defs/a0"}
    return {"structured_outputs": {"json": schema}}


class Streams(threading.Thread):
    """Streams that go on for ever, in a thread of their own; notes the gaps between chunks."""

    def __init__(self, address: Address, model: str) -> None:
        super().__init__(daemon=True)
        self._address = address
        body = {"model": model, "prompt": PROMPT, "max_tokens": 2000, "stream": True}
        self._request = post("/v1/completions", {**body, "temperature": 1.0})
        self.answers: list[Answer] = []
        self.is_stopping = False

    def run(self) -> None:
        """Stream until told to stop."""
        asyncio.run(self._all())

    async def _all(self) -> None:
        await asyncio.gather(*(self._one() for _ in range(NUM_STREAMS)))

    async def _one(self) -> None:
        while not self.is_stopping:
            self.answers.append(await ask(self._address, self._request))

    def gaps_ms(self, start_s: float, end_s: float) -> list[float]:
        """Return, after the end, the gaps that ended within this time."""
        return [
            (later - earlier) * 1e3
            for answer in self.answers
            for earlier, later in zip(answer.chunk_times_s, answer.chunk_times_s[1:], strict=False)
            if start_s <= later and earlier <= end_s
        ]


def bad_input(repeats: int = 3) -> bool:
    """Measure everything; returns whether each case had a 4xx and the process lived."""
    with running_server(QUIET) as server:
        address = address_of(server.url)
        pid = {name: child.pid for name, child in server.tree().items()}
        streams = Streams(address, server.model)
        streams.start()
        time.sleep(2.0)
        baseline = (time.monotonic(), time.sleep(6.0), time.monotonic())
        spans: dict[str, tuple[float, float, set[int], list[float]]] = {}
        for name, request in cases(server.model).items():
            start_s, statuses, times_ms = time.monotonic(), set(), []
            for _ in range(repeats):
                answer = asyncio.run(ask(address, request))
                statuses.add(answer.status)
                times_ms.append((answer.end_s - answer.start_s) * 1e3)
            spans[name] = (start_s, time.monotonic(), statuses, times_ms)
            time.sleep(0.3)
        streams.is_stopping = True
        streams.join(60.0)
        is_alive = pid == {name: child.pid for name, child in server.tree().items()}
        before = streams.gaps_ms(baseline[0], baseline[2])
    print(f"bad input beside {NUM_STREAMS} streams, each case {repeats} times")
    row("no abuse: largest gap (p50)", f"{max(before):.0f} ({percentile(before, 0.5):.0f}) ms", "-")
    good = is_alive
    worst = 0.0
    for name, (start_s, end_s, statuses, times_ms) in spans.items():
        gap_ms = max(streams.gaps_ms(start_s, end_s), default=float("nan"))
        worst = max(worst, gap_ms)
        good = good and all(400 <= status < 500 for status in statuses)
        shown = ",".join(map(str, sorted(statuses)))
        row(f"{name}: {shown} in {max(times_ms):.0f} ms", f"gap {gap_ms:.0f} ms", "4xx, < 100 ms")
    row("largest gap of all", f"{worst:.0f} ms", f"< {MAX_GAP_MS:.0f} ms")
    row("processes alive", "yes" if is_alive else "NO", "yes")
    return good


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


def parsing() -> bool:
    """Measure; returns whether the loop was never kept for too long."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    print(f"parsing long bodies: the longest turn of the event loop, best of {REPEATS}")
    worst_s = asyncio.run(_measure())
    row("longest of all", f"{worst_s * 1e3:.1f} ms", f"< {MAX_GAP_MS:.0f} ms")
    return worst_s * 1e3 < MAX_GAP_MS


CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,negative_data_rejection"
)
FLAGS = ["--max-model-len", "96", *QUIET]
"""A short context: many cases are valid and generate to its end."""


def schemathesis(url: str, *, max_examples: int, seed: int = 1) -> list[str]:
    """Return the call of schemathesis."""
    tool = Path(sys.executable).parent / "schemathesis"
    options = ["--mode", "all", "--checks", CHECKS, "--phases", "examples,coverage,fuzzing"]
    options += ["--max-examples", str(max_examples), "--seed", str(seed), "--no-color"]
    options += ["--continue-on-failure", "--suppress-health-check", "all", "--warnings", "off"]
    options += ["--request-timeout", "60", "--generation-database", "none"]
    return [str(tool), "run", f"{url}/openapi.json", *options]


def num_cases(output: str) -> int:
    """Return how many cases schemathesis says that it generated."""
    match = re.search(r"(\d+) generated", output)
    return int(match[1]) if match else 0


def schema(max_examples: int = 200) -> bool:
    """Measure; returns whether there was no server error."""
    print(f"schemathesis, positive and negative, {max_examples} examples per operation at most")
    with running_server(FLAGS) as server:
        with tempfile.TemporaryDirectory() as folder:  # it leaves files where it runs
            done = subprocess.run(
                schemathesis(server.url, max_examples=max_examples),
                capture_output=True,
                text=True,
                check=False,
                cwd=folder,
            )
        is_alive = server.process.poll() is None
    row("cases", f"{num_cases(done.stdout)}", "-")
    row("server errors, answers off schema", "0" if done.returncode == 0 else "SOME", "0")
    row("process alive", "yes" if is_alive else "NO", "yes")
    if done.returncode != 0:
        print(done.stdout[-8000:], done.stderr[-2000:])
    return done.returncode == 0 and is_alive and num_cases(done.stdout) > 0


MAX_TOKENS = 200
MAX_SEQS = 32
RATES = (0.7, 0.9, 1.1, 1.4)
OVERLOAD = 5.0
TARGET_FACTOR = 3.0
REJECT_WITHIN_S = 0.05


@dataclass(frozen=True)
class Targets:
    """What a good answer keeps to, in seconds."""

    ttft_s: float
    tpot_s: float

    def are_met(self, answer: Answer) -> bool:
        """Whether an answer is whole and in time."""
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
