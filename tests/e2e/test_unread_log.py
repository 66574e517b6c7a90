"""A server whose standard error is a pipe that is not read: all of its processes go on."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
from support.live_server import live_server
from support.processes import wait_for

NUM_REQUESTS = 100
"""Their lines are several times what the pipe holds."""


def test_a_log_that_is_not_read_holds_up_nothing(run_parent: Path) -> None:
    with live_server(run_parent, "--log-level=debug") as server:
        server.stop_reading_log()
        for number in range(NUM_REQUESTS):
            headers = {"x-request-id": f"unread-{number}"}
            answer = httpx.get(f"{server.url}/v1/models", headers=headers, timeout=60.0)
            assert answer.status_code == 200
        server.tree()["router-0"].send_signal(signal.SIGKILL)  # which the supervisor has to log
        wait_for(lambda: not server.is_ready(), "the loss")
        server.wait_readyz()
        assert 'lightserve_process_restarts_total{engine="0"' in server.metrics()
        assert f"unread-{NUM_REQUESTS - 1}" not in server.stderr
        server.go_on_reading_log()
        assert server.stop() == 0
        for number in range(NUM_REQUESTS):
            assert f"[unread-{number}]" in server.stderr
        assert "lines could not be written" not in server.stderr
