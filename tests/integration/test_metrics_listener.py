"""The supervisor's own HTTP server: what it answers, and what it does not let clients do."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import httpx
import pytest

from lightserve.config import ServeConfig
from lightserve.errors import StartupError
from lightserve.messages.metrics import MetricSample, MetricsRequest
from lightserve.messages.supervision import Role
from lightserve.metrics.catalogue import STEPS
from lightserve.supervisor.metrics import MAX_SCRAPES, MetricsListener, ServerMetrics


@contextmanager
def listening(host: str = "127.0.0.1") -> Iterator[tuple[str, ServerMetrics]]:
    config = ServeConfig(metrics_host=host, metrics_port=0, served_model_name="a model")
    metrics = ServerMetrics(config)
    with closing(MetricsListener(config)) as listener:
        listener.start(metrics)
        yield listener.url, metrics


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_scrapes_see_the_present(host: str) -> None:
    with listening(host) as (url, metrics):
        before = httpx.get(url, timeout=60.0)
        assert before.status_code == 200
        assert before.headers["content-type"].startswith("text/plain")
        assert 'lightserve_build_info{engine="0",model_name="a model"' in before.text
        assert "steps_total" not in before.text
        metrics.on_snapshot("router", [MetricSample(STEPS.name, [], [3.0])])
        metrics.on_restart(Role.ROUTER)
        metrics.sample([], 5, now_s=1.0)
        after = httpx.get(url, timeout=60.0).text
        assert 'lightserve_steps_total{engine="0",model_name="a model"} 3.0' in after
        labels = 'engine="0",model_name="a model",role='
        assert f'lightserve_process_restarts_total{{{labels}"router"}} 1.0' in after
        assert f'lightserve_ipc_rejected_total{{{labels}"supervisor"}} 5.0' in after
        assert metrics.answer(MetricsRequest(number=7)).text.decode() == after
        for path in ("", "/", "/metricsx", "/metrics/x"):
            assert httpx.get(url.removesuffix("/metrics") + path, timeout=60.0).status_code == 404


def test_the_config_has_no_paths() -> None:
    with listening() as (url, _):
        text = httpx.get(url, timeout=60.0).text
    info = next(line for line in text.splitlines() if line.startswith("lightserve_config_info"))
    assert "/" not in info
    assert 'policy="unified"' in info


def test_clients_that_say_nothing_are_bounded_and_delay_nobody() -> None:
    with listening() as (url, _):
        parsed = httpx.URL(url)
        assert parsed.port is not None
        silent = [socket.create_connection((parsed.host, parsed.port)) for _ in range(4)]
        try:
            assert httpx.get(url, timeout=60.0).status_code == 200
            silent += [
                socket.create_connection((parsed.host, parsed.port)) for _ in range(MAX_SCRAPES)
            ]
            # The last ones found no place: they are closed at once, not kept waiting.
            silent[-1].settimeout(60.0)
            assert silent[-1].recv(1) == b""
        finally:
            for connection in silent:
                connection.close()


def test_a_taken_port_is_refused_in_words_and_a_closed_one_is_free_again() -> None:
    # An address of the loopback interface that nobody else uses: nobody else takes the port.
    host = "127.83.77.1"
    config = ServeConfig(metrics_host=host, metrics_port=0)
    with closing(MetricsListener(config)) as first:
        first.start(ServerMetrics(config))
        port = httpx.URL(first.url).port
        taken = ServeConfig(metrics_host=host, metrics_port=port)
        with pytest.raises(StartupError, match=rf"--metrics-port {port}: .*in use"):
            MetricsListener(taken)
    again = MetricsListener(taken)
    again.close()


def test_two_that_start_at_the_same_moment_do_not_share_a_port() -> None:
    with closing(MetricsListener(ServeConfig(metrics_port=0))) as first:
        config = ServeConfig(metrics_port=httpx.URL(first.url).port)
        with closing(MetricsListener(config)) as second:  # bound, as nobody listens yet
            first.start(ServerMetrics(config))
            with pytest.raises(StartupError, match="in use"):
                second.start(ServerMetrics(config))


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1"])
def test_an_address_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(StartupError, match=f"--metrics-host {host}"):
        MetricsListener(ServeConfig(metrics_host=host, metrics_port=0))
