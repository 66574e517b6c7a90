"""What clients that keep on coming see of a server that ends."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from pathlib import Path

import httpx
from support.live_server import live_server

NUM_CLIENTS = 16
MOST_BROKEN = 3
"""Connections that come in the very moment in which the port is closed."""


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
