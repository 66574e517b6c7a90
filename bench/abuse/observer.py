"""What an uninvolved client notices of a server, as a process of its own: one JSON line per 0.1 s.

    python -m bench.abuse.observer '{"host": …, "port": …, "pid": …, "model": …, "key": …}'

It asks for /livez all the time over one connection, keeps one stream running while standard input
last said "victim on", and reads the resident memory of the server's processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from typing import Any

import psutil

from bench.abuse.client import PROMPT, Address, get, post

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
                self._processes = {child.name(): child for child in parent.children()}
                self._processes["supervisor"] = parent
        memory = {}
        for name, process in self._processes.items():
            with contextlib.suppress(psutil.Error):
                memory[name] = round(process.memory_info().rss / 2**20, 2)
        return memory


async def _main() -> None:
    observer = Observer(json.loads(sys.argv[1]))
    tasks = [asyncio.create_task(c) for c in (observer.poll(), observer.stream())]
    tasks.append(asyncio.create_task(observer.report()))
    await observer.listen()
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    asyncio.run(_main())
