"""A client of few instructions: raw HTTP over asyncio, so that it measures the server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

QUIET = ["--num-threads", "1", "--log-level", "error"]
"""Flags of the servers: beside its clients, two threads of a worker wait for each other."""
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
