"""A rank that dies while its peer waits for it in an all-reduce (TP=2)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
from support.live_server import LiveServer, live_server
from support.processes import wait_for, wait_gone
from support.streams import Outcome, StreamLoad, stream_once


def _body(server: LiveServer) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Tell me a story about Mira and the brass lantern."}]
    return {"model": server.model, "messages": messages, "max_tokens": 400, "temperature": 1.0}


def _is_quiet(process: psutil.Process) -> bool:
    """Whether it computes nothing: it waits for its peer."""
    before = process.cpu_times()
    time.sleep(0.3)
    return process.cpu_times() == before


def test_the_group_is_replaced(run_parent: Path) -> None:
    """A rank that hangs is test_faults's, and bench/faults/recovery.py's, which measures both."""
    with live_server(run_parent, "--tp=2", "--max-kv-tokens=4096") as server:
        ranks = [server.tree()[f"worker-{rank}"] for rank in range(2)]
        with server.healing(), StreamLoad(server.url, _body(server), 2) as load:
            load.wait_all_streaming()
            stopped_s = time.monotonic()
            ranks[1].suspend()
            wait_for(lambda: _is_quiet(ranks[0]), "the all-reduce")
            assert ranks[0].is_running()
            ranks[1].kill()
            wait_gone([rank.pid for rank in ranks])
            load.stop()
        assert "worker-1 was killed by SIGKILL" in server.stderr
        for result in load.fates_of(stopped_s):
            assert result.outcome in (Outcome.WHOLE, Outcome.ERROR_EVENT, Outcome.STATUS)
        assert stream_once(server.url, _body(server)).outcome is Outcome.WHOLE
        new = {server.tree()[f"worker-{rank}"].pid for rank in range(2)}
        assert new.isdisjoint(rank.pid for rank in ranks)
