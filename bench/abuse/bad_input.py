"""Wrong requests beside streams: how they are answered, and what the streams notice."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

from bench.abuse.client import (
    PROMPT,
    QUIET,
    Address,
    Answer,
    address_of,
    ask,
    get,
    percentile,
    post,
    row,
)
from bench.serving.server import running_server

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


def run(repeats: int = 3) -> bool:
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
