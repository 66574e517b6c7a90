"""kill -9 of each process, and every way to stop, while clients stream."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.live_server import LiveServer, live_server
from support.memory_limits import (
    NO_HOARD,
    MemoryLimit,
    in_a_small_control_group,
    with_no_more_addresses,
)
from support.processes import PATIENCE_S, is_running, wait_for, wait_gone
from support.streams import Outcome, StreamLoad, StreamResult, stream_once

NUM_STREAMS = 8
LONG = "Tell me a story about Mira and the brass lantern."


@pytest.fixture(scope="module")
def sturdy(run_parent: Path) -> Iterator[LiveServer]:
    """A server with two frontends that may be killed often."""
    flags = "--http-workers=2", "--max-restarts=50"
    with live_server(run_parent, *flags, environment=NO_HOARD) as running:
        yield running


def _body(server: LiveServer) -> dict[str, Any]:
    """What every client asks: an answer that is never short."""
    messages = [{"role": "user", "content": LONG}]
    asked = {"messages": messages, "max_tokens": 400, "temperature": 1.0, "ignore_eos": True}
    return {"model": server.model, **asked}


def _kill_under_load(
    server: LiveServer, choose: Callable[[LiveServer], psutil.Process]
) -> list[StreamResult]:
    """Kill a process, chosen then, while clients stream; returns what each of them saw.

    When the server is whole again.
    """
    with server.healing(), StreamLoad(server.url, _body(server), NUM_STREAMS) as load:
        load.wait_all_streaming()
        victim = choose(server)
        killed_s = time.monotonic()
        victim.kill()
        wait_gone([victim.pid])
        load.stop()
    return load.fates_of(killed_s)


@pytest.mark.parametrize("role", ["worker-0", "router-0"])
def test_clients_learn_of_a_dead_worker_or_router(sturdy: LiveServer, role: str) -> None:
    roles = sorted(sturdy.tree())
    frontends = [sturdy.tree()[f"frontend-{index}"].pid for index in (0, 1)]
    for result in _kill_under_load(sturdy, lambda server: server.tree()[role]):
        assert result.outcome in (Outcome.WHOLE, Outcome.ERROR_EVENT, Outcome.STATUS), result
        if result.outcome is Outcome.STATUS:
            assert result.detail.startswith("503"), result
    assert stream_once(sturdy.url, _body(sturdy)).outcome is Outcome.WHOLE
    assert sorted(sturdy.tree()) == roles
    assert [sturdy.tree()[f"frontend-{index}"].pid for index in (0, 1)] == frontends


@pytest.mark.parametrize("take_memory", [in_a_small_control_group, with_no_more_addresses])
def test_a_worker_without_memory_is_replaced_and_nothing_else(
    sturdy: LiveServer, take_memory: MemoryLimit
) -> None:
    before = {role: process.pid for role, process in sturdy.tree().items()}
    with sturdy.healing(), StreamLoad(sturdy.url, _body(sturdy), NUM_STREAMS) as load:
        load.wait_all_streaming()
        limited_s = time.monotonic()
        with take_memory(sturdy.tree()["worker-0"]):
            wait_for(lambda: _is_gone_after_a_prompt(sturdy, before["worker-0"]), "its end")
        load.stop()
    for result in load.fates_of(limited_s):
        assert result.outcome in (Outcome.WHOLE, Outcome.ERROR_EVENT, Outcome.STATUS), result
        if result.outcome is Outcome.STATUS:
            assert result.detail.startswith("503"), result
    assert stream_once(sturdy.url, _body(sturdy)).outcome is Outcome.WHOLE
    after = {role: process.pid for role, process in sturdy.tree().items()}
    assert {role for role in before if before[role] != after[role]} == {"worker-0"}


def _is_gone_after_a_prompt(server: LiveServer, pid: int) -> bool:
    """Have a long prompt computed that is new to the cache, which takes memory."""
    prompt = [random.randrange(300, 2000) for _ in range(1500)]
    body = {"model": server.model, "prompt": prompt, "max_tokens": 1}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=300.0)
    return not is_running(pid)


def test_a_dead_frontend_breaks_its_own_connections_only(sturdy: LiveServer) -> None:
    roles = sorted(sturdy.tree())
    before = {role: process.pid for role, process in sturdy.tree().items()}
    outcomes = {result.outcome for result in _kill_under_load(sturdy, _busiest_frontend)}
    assert Outcome.BROKEN in outcomes
    assert outcomes <= {Outcome.WHOLE, Outcome.BROKEN}
    assert sorted(sturdy.tree()) == roles
    after = {role: process.pid for role, process in sturdy.tree().items()}
    (lost,) = {role for role in before if before[role] != after[role]}
    assert lost.startswith("frontend-")
    _wait_idle(sturdy)  # the router has forgotten the lost requests


def _busiest_frontend(server: LiveServer) -> psutil.Process:
    """Return the frontend with most connections: it holds streams, whichever accepted them."""
    frontends = [process for role, process in server.tree().items() if role.startswith("frontend")]
    return max(frontends, key=_num_connections)


def _num_connections(process: psutil.Process) -> int:
    connections = process.net_connections(kind="tcp")
    return sum(connection.status == psutil.CONN_ESTABLISHED for connection in connections)


def _wait_idle(server: LiveServer) -> None:
    """Wait until a status of the router that is newer than this call says that nothing runs."""
    num_steps = _health(server)["num_steps"]
    assert stream_once(server.url, {**_body(server), "max_tokens": 8}).outcome is Outcome.WHOLE

    def is_idle() -> bool:
        health = _health(server)
        return health["num_steps"] > num_steps and health["num_running"] == 0

    wait_for(is_idle, "an idle router")


def _health(server: LiveServer) -> dict[str, Any]:
    health: dict[str, Any] = httpx.get(f"{server.url}/health", timeout=300.0).json()
    return health


def test_a_router_that_hangs_is_replaced(sturdy: LiveServer) -> None:
    """SIGSTOP for ever: /livez says so first, then the supervisor kills it."""
    before = {role: process.pid for role, process in sturdy.tree().items()}
    statuses: list[int] = []

    def is_gone() -> bool:
        statuses.append(httpx.get(f"{sturdy.url}/livez", timeout=300.0).status_code)
        return not is_running(before["router-0"])

    with sturdy.healing():
        sturdy.tree()["router-0"].suspend()
        wait_for(is_gone, "the end of the router")
    assert set(statuses) == {200, 503}
    assert stream_once(sturdy.url, _body(sturdy)).outcome is Outcome.WHOLE
    after = {role: process.pid for role, process in sturdy.tree().items()}
    assert {role for role in before if before[role] != after[role]} == {"router-0", "worker-0"}
    assert "router-0 was silent for 10 s: killed" in sturdy.stderr


def test_a_dead_supervisor_leaves_no_process(run_parent: Path) -> None:
    with live_server(run_parent) as server:
        pids = server.pids()
        with StreamLoad(server.url, _body(server), NUM_STREAMS) as load:
            load.wait_all_streaming()
            killed_s = time.monotonic()
            os.kill(server.process.pid, signal.SIGKILL)
            server.process.wait(PATIENCE_S)
            wait_gone(pids)
            load.stop()
        outcomes = {result.outcome for result in load.fates_of(killed_s)}
        assert outcomes <= {Outcome.WHOLE, Outcome.BROKEN}
        assert Outcome.BROKEN in outcomes


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_drains(run_parent: Path, signum: int) -> None:
    """Streams in flight are completed, new requests refused, the exit code is 0."""
    with live_server(run_parent, "--shutdown-timeout-s=100") as server:
        with StreamLoad(server.url, _body(server), NUM_STREAMS) as load:
            load.wait_all_streaming()
            signalled_s = time.monotonic()
            server.process.send_signal(signum)
            wait_for(lambda: not server.is_ready(), "draining")
            late = stream_once(server.url, _body(server))
            load.stop()
        assert late.outcome in (Outcome.STATUS, Outcome.BROKEN)  # broken: all had ended already
        if late.outcome is Outcome.STATUS:
            assert late.detail.startswith("503"), late
        outcomes = {result.outcome for result in load.streaming_at(signalled_s)}
        assert outcomes == {Outcome.WHOLE}
        assert server.stop(signal.SIGCONT) == 0
        assert list(server.run_parent.iterdir()) == []


def test_a_drain_that_takes_too_long_ends_streams_with_an_error(run_parent: Path) -> None:
    with live_server(run_parent, "--shutdown-timeout-s=0") as server:
        with StreamLoad(server.url, _body(server), NUM_STREAMS) as load:
            load.wait_all_streaming()
            signalled_s = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            load.stop()
        assert server.stop(signal.SIGCONT) == 0
        outcomes = {result.outcome for result in load.streaming_at(signalled_s)}
        assert Outcome.ERROR_EVENT in outcomes
        assert outcomes <= {Outcome.WHOLE, Outcome.ERROR_EVENT}


def test_a_second_signal_ends_at_once(run_parent: Path) -> None:
    with live_server(run_parent) as server:
        body = {**_body(server), "max_tokens": 6000}  # no drain is faster than the second signal
        with StreamLoad(server.url, body, NUM_STREAMS) as load:
            load.wait_all_streaming()
            server.process.send_signal(signal.SIGINT)
            wait_for(lambda: not server.is_ready(), "draining")
            server.process.send_signal(signal.SIGINT)
            exit_code = server.process.wait(PATIENCE_S)
            load.stop()
        assert exit_code == 130


def test_workers_that_hang_are_replaced(run_parent: Path) -> None:
    """SIGSTOP for ever: noticed by --step-timeout-s, replaced, clients answered."""
    with live_server(run_parent, "--step-timeout-s=4") as server:
        worker = server.tree()["worker-0"]
        with server.healing(), StreamLoad(server.url, _body(server), NUM_STREAMS) as load:
            load.wait_all_streaming()
            stopped_s = time.monotonic()
            worker.suspend()
            wait_gone([worker.pid])
            load.stop()
        for result in load.fates_of(stopped_s):
            assert result.outcome in (Outcome.WHOLE, Outcome.ERROR_EVENT, Outcome.STATUS), result
        assert stream_once(server.url, _body(server)).outcome is Outcome.WHOLE


def test_a_short_pause_is_only_latency(sturdy: LiveServer) -> None:
    worker = sturdy.tree()["worker-0"]
    with StreamLoad(sturdy.url, _body(sturdy), NUM_STREAMS) as load:
        load.wait_all_streaming()
        worker.suspend()
        resume = threading.Timer(2.0, worker.resume)
        resume.start()
        results = load.stop()
        resume.join()
    assert {result.outcome for result in results} == {Outcome.WHOLE}
    assert sturdy.tree()["worker-0"].pid == worker.pid
