"""Metrics of a real server: what is counted where, and that nothing falls when processes die."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.live_server import LiveServer, live_server
from support.processes import wait_for

from lightserve.metrics.catalogue import all_families
from lightserve.metrics.recording import Kind, Origin

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
    for family in all_families():
        suffix = "_count" if family.kind is Kind.HISTOGRAM else ""
        assert family.name + suffix in names | quiet, family.name
    assert len([f for f in all_families() if f.origin is Origin.ROUTER]) > 10


def test_the_main_port_shows_the_same(watched: LiveServer) -> None:
    watched.metrics()  # a request like others: from now on it is counted itself

    def is_same() -> bool:
        through_main, _ = _parsed(watched.metrics())
        direct, _ = _scrape(watched.metrics_url)
        return set(through_main) == set(direct)

    wait_for(is_same, "the same metrics on both ports")
    assert httpx.get(watched.metrics_url + "x", timeout=300.0).status_code == 404


@pytest.mark.parametrize("role", ["frontend-0", "worker-0", "router-0"])
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
