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
from prometheus_client.parser import text_string_to_metric_families
from support.grids import long_but
from support.live_server import LiveServer, live_server
from support.memory_limits import (
    NO_HOARD,
    MemoryLimit,
    in_a_small_control_group,
    with_no_more_addresses,
)
from support.processes import PATIENCE_S, is_running, wait_for, wait_gone
from support.streams import Outcome, StreamLoad, StreamResult, stream_once

from lightserve.metrics.catalogue import all_families
from lightserve.metrics.recording import Kind, Origin

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


@pytest.mark.parametrize(
    "take_memory",
    long_but([(in_a_small_control_group,), (with_no_more_addresses,)], [(with_no_more_addresses,)]),
)
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
    changed = {role for role in before if before[role] != after[role]}
    assert changed == {"worker-0", "grammars of worker-0"}


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


@pytest.mark.long
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


@pytest.mark.parametrize(
    "signum", long_but([(signal.SIGTERM,), (signal.SIGINT,)], [(signal.SIGTERM,)])
)
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


@pytest.mark.long
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


# A rank that dies while its peer waits for it in an all-reduce (TP=2).


def _story(server: LiveServer) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Tell me a story about Mira and the brass lantern."}]
    return {"model": server.model, "messages": messages, "max_tokens": 400, "temperature": 1.0}


def _is_quiet(process: psutil.Process) -> bool:
    """Whether it computes nothing: it waits for its peer."""
    before = process.cpu_times()
    time.sleep(0.3)
    return process.cpu_times() == before


@pytest.mark.long
def test_the_group_is_replaced(run_parent: Path) -> None:
    """A rank that hangs is test_faults's, and bench/faults/recovery.py's, which measures both."""
    with live_server(run_parent, "--tp=2", "--max-kv-tokens=4096") as server:
        tree = server.tree()
        ranks = [tree[f"worker-{rank}"] for rank in range(2)]
        assert sum(role.startswith("worker-") for role in tree) == 2
        with server.healing(), StreamLoad(server.url, _story(server), 2) as load:
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
        assert stream_once(server.url, _story(server)).outcome is Outcome.WHOLE
        new = {server.tree()[f"worker-{rank}"].pid for rank in range(2)}
        assert new.isdisjoint(rank.pid for rank in ranks)
        assert server.stop() == 0


# Metrics of a real server: what is counted where, and that nothing falls when processes die.

Lines = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def watched(run_parent: Path) -> Iterator[LiveServer]:
    """A server whose processes may die."""
    with live_server(run_parent, "--http-workers=2", "--ttft-slo-ms=60000") as running:
        yield running


def _scrape(url: str) -> tuple[Lines, set[str]]:
    answer = httpx.get(url, timeout=300.0)
    assert answer.status_code == 200
    return _parsed(answer.text)


def _parsed(text: str) -> tuple[Lines, set[str]]:
    lines: Lines = {}
    never_falling = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            lines[sample.name, frozenset(labels.items())] = sample.value
            if family.type in ("counter", "histogram"):
                never_falling.add(sample.name)
    return lines, never_falling


def _total(lines: Lines, name: str, **labels: str) -> float:
    return sum(
        value
        for (line_name, line_labels), value in lines.items()
        if line_name == f"lightserve_{name}" and line_labels >= labels.items()
    )


def _complete(server: LiveServer, count: int) -> None:
    for _ in range(count):
        body = {"model": server.model, "prompt": [5, 6, 7], "max_tokens": 8, "seed": 1}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300.0)
        assert answer.status_code == 200, answer.text


def _wait_total(server: LiveServer, expected: float, name: str, **labels: str) -> Lines:
    """Wait until the processes have reported a sum of at least so much; exactly that then."""

    def probe() -> Lines | None:
        lines, _ = _scrape(server.metrics_url)
        return lines if _total(lines, name, **labels) >= expected else None

    lines = wait_for(probe, f"{name} of {expected}")
    assert _total(lines, name, **labels) == expected
    return lines


def test_a_servers_work_is_counted_once_and_never_lost(watched: LiveServer) -> None:
    _complete(watched, 5)
    lines = _wait_total(watched, 5, "request_success_total")
    generated = _total(lines, "generation_tokens_total", request_class="rt")
    assert generated == _total(lines, "request_generation_tokens_sum") > 5
    assert _total(lines, "prompt_tokens_total", request_class="rt") == 15
    assert _total(lines, "time_to_first_token_seconds_count") == 5
    assert _total(lines, "slo_requests_total", target="ttft", outcome="met") == 5
    lines = _wait_total(watched, 5, "request_queue_time_seconds_count")
    assert _total(lines, "step_time_seconds_count") == _total(lines, "steps_total") > 0
    assert 0 < _total(lines, "step_time_ratio_count") <= _total(lines, "steps_total")
    assert _total(lines, "computed_tokens_total", request_class="rt", kind="prompt") >= 3
    assert _total(lines, "computed_tokens_total", request_class="be") == 0
    assert _total(lines, "kv_slots") > 0
    assert _total(lines, "process_resident_memory_bytes", process="worker-0") > 2**24
    assert _total(lines, "process_cpu_seconds_total", process="router-0") > 0
    for process in ("frontend-0", "frontend-1", "router-0"):
        turn_s = _total(lines, "loop_turn_max_seconds", process=process, clock="cpu")
        assert 0 < turn_s <= _total(lines, "loop_turn_max_seconds", process=process, clock="wall")
    names = {name for name, _ in lines}
    quiet = {"lightserve_request_failure_total", "lightserve_http_rejections_total"}
    quiet.add("lightserve_trace_spans_total")  # no traces are sent
    quiet.add("lightserve_images_total")  # nor pictures
    of_batches = (
        "batches",
        "batches_late",
        "batch_lines",
        "batch_results_late_total",
        "batch_oldest_seconds",
        "batch_forecast_ratio",
        "batch_leases_lost_total",
        "batch_store_seconds",
    )  # they need a store
    quiet |= {f"lightserve_{name}" for name in of_batches}
    for family in all_families():
        suffix = "_count" if family.kind is Kind.HISTOGRAM else ""
        assert family.name + suffix in names or family.name in quiet, family.name
    assert len([f for f in all_families() if f.origin is Origin.ROUTER]) > 10


def test_the_main_port_shows_the_same(watched: LiveServer) -> None:
    watched.metrics()  # a request like others: from now on it is counted itself

    def is_same() -> bool:
        through_main, _ = _parsed(watched.metrics())
        direct, _ = _scrape(watched.metrics_url)
        return set(through_main) == set(direct)

    wait_for(is_same, "the same metrics on both ports")
    assert httpx.get(watched.metrics_url + "x", timeout=300.0).status_code == 404


@pytest.mark.parametrize(
    "role",
    long_but([("frontend-0",), ("worker-0",), ("router-0",)], [("frontend-0",), ("router-0",)]),
)
def test_nothing_falls_when_a_process_dies(watched: LiveServer, role: str) -> None:
    num_done = _total(_scrape(watched.metrics_url)[0], "request_success_total")
    _complete(watched, 1)
    before = _wait_total(watched, num_done + 1, "request_success_total")
    kind = role.partition("-")[0]
    num_restarts = _total(before, "process_restarts_total", role=kind)
    with watched.healing():
        watched.tree()[role].kill()
        _wait_total(watched, num_restarts + 1, "process_restarts_total", role=kind)
        after, never_falling = _scrape(watched.metrics_url)
    assert ("lightserve_steps_total", frozenset()) in after
    kept = {key: value for key, value in before.items() if key[0] in never_falling}
    assert len(kept) > 100
    assert not {key for key, value in kept.items() if after.get(key, 0.0) < value}
    _complete(watched, 1)
    _wait_total(watched, num_done + 2, "request_success_total")


def test_metrics_are_answered_while_the_router_stands_still(watched: LiveServer) -> None:
    router = watched.tree()["router-0"]
    router.suspend()
    try:
        assert "lightserve_steps_total" in watched.metrics()
        assert "lightserve_steps_total" in httpx.get(watched.metrics_url, timeout=300.0).text
    finally:
        router.resume()
