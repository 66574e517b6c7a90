"""What clients that keep on coming see of a server that ends."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.live_server import live_server

NUM_CLIENTS = 16
MOST_BROKEN = 3
"""Connections that come in the very moment in which the port is closed."""


SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}}


@pytest.mark.parametrize("flags", [(), ("--http-workers=2",)])
def test_an_ordinary_life_has_no_line_above_info(run_parent: Path, flags: tuple[str, ...]) -> None:
    """Start, load of each kind, clients that leave, views of the dashboard, and an end amid it."""
    with live_server(run_parent, *flags) as server:

        async def life() -> list[int]:
            async with httpx.AsyncClient(base_url=server.url, timeout=300.0) as client:

                async def chat(number: int, **fields: Any) -> int:
                    body = {
                        "model": server.model,
                        "messages": [{"role": "user", "content": f"hello {number}"}],
                        "max_tokens": 200,
                        **fields,
                    }
                    return (await client.post("/v1/chat/completions", json=body)).status_code

                async def view() -> None:
                    async with client.stream("GET", "/dashboard/events") as events:
                        with suppress(httpx.TransportError):
                            await events.aread()

                def load() -> list[asyncio.Task[int]]:
                    schema = {"name": "it", "schema": SCHEMA}
                    form = {"type": "json_schema", "json_schema": schema}
                    return [
                        *(asyncio.create_task(chat(n, ignore_eos=True)) for n in range(8)),
                        *(asyncio.create_task(chat(n, stream=True)) for n in range(8)),
                        *(asyncio.create_task(chat(n, response_format=form)) for n in range(4)),
                    ]

                views = [asyncio.create_task(view()) for _ in range(2)]
                statuses = await asyncio.gather(*load())
                leaving = load()
                await asyncio.sleep(0.1)
                for task in leaving:
                    task.cancel()
                last = load()
                asking = "lightserve_http_requests_in_flight"
                while not any(
                    line.startswith(asking) and float(line.split()[-1]) >= 1.0
                    for line in (await client.get("/metrics")).text.splitlines()
                ):
                    await asyncio.sleep(0.05)
                assert await asyncio.to_thread(server.stop, signal.SIGTERM) == 0
                statuses += await asyncio.gather(*last)
                await asyncio.wait(views)
                return statuses

        assert set(asyncio.run(life())) <= {200, 503}
    assert "requests in flight have" in server.stderr
    assert [line for line in server.stderr.splitlines() if line.split()[2:3] != ["INFO"]] == []


def test_late_clients_are_refused_and_not_left_waiting(run_parent: Path) -> None:
    seen: Counter[str] = Counter()
    with live_server(run_parent, "--log-level", "warning") as server:
        url = f"{server.url}/v1/completions"
        body = {"model": server.model, "prompt": "hello", "max_tokens": 2}

        def keep_coming() -> None:
            while True:
                try:
                    status = httpx.post(url, json=body, timeout=300.0).status_code
                except httpx.ConnectError:
                    seen["refused"] += 1
                    return
                except httpx.TransportError:
                    seen["broken"] += 1
                else:
                    seen[str(status)] += 1

        clients = [threading.Thread(target=keep_coming) for _ in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        assert server.stop(signal.SIGTERM) == 0
        for client in clients:
            client.join()
    assert seen["refused"] == NUM_CLIENTS
    assert set(seen) <= {"200", "503", "refused", "broken"}
    assert seen["broken"] <= MOST_BROKEN, seen
