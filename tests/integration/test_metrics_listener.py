"""The supervisor's own HTTP server: what it answers, and what it does not let clients do."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import httpx
import pytest
from prometheus_client.exposition import generate_latest

from lightserve.config import ServeConfig
from lightserve.dashboard import MAX_VIEWERS
from lightserve.errors import ConfigError, StartupError
from lightserve.http_access import ApiKey, digest_of
from lightserve.messages.supervision import MetricSample, MetricsRequest, Role
from lightserve.metrics.catalogue import STEPS
from lightserve.supervisor.metrics import ServerMetrics
from lightserve.supervisor.metrics_listener import MAX_SCRAPES, MetricsListener
from lightserve.supervisor.startup import bind_port


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


def test_slow_clients_hold_up_no_other() -> None:
    """However many there are: where all places are taken, the oldest makes room."""
    with listening() as (url, _):
        parsed = httpx.URL(url)
        assert parsed.port is not None
        slow = []
        try:
            for number in range(2 * MAX_SCRAPES):
                slow.append(socket.create_connection((parsed.host, parsed.port)))
                slow[-1].sendall(b"GET /metrics HTTP/1.1\r\nhost: local")
                if number % 25 == 0:
                    assert httpx.get(url, timeout=60.0).status_code == 200
            assert httpx.get(url, timeout=60.0).status_code == 200
            slow[0].settimeout(60.0)
            with suppress(ConnectionResetError):
                assert slow[0].recv(1) == b""
        finally:
            for connection in slow:
                connection.close()


def test_a_crowd_in_one_turn_of_the_loop_is_bounded_too(capfd: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as crowd, listening() as (url, _):
        parsed = httpx.URL(url)
        assert parsed.port is not None
        address = parsed.host, parsed.port
        clients = [
            crowd.enter_context(socket.create_connection(address)) for _ in range(6 * MAX_SCRAPES)
        ]
        assert httpx.get(url, timeout=60.0).status_code == 200
        num_open = 0
        for client in clients:
            client.setblocking(False)
            with suppress(ConnectionError):
                try:
                    num_open += client.recv(1) != b""
                except BlockingIOError:
                    num_open += 1
        assert 0 < num_open < MAX_SCRAPES
    assert "Traceback" not in capfd.readouterr().err  # of those that were open at the end


def test_a_scrape_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the connection to the last byte, not from one byte to the next."""
    monkeypatch.setattr("lightserve.supervisor.metrics_listener.SCRAPE_TIMEOUT_S", 0.3)
    with listening() as (url, _):
        parsed = httpx.URL(url)
        assert parsed.port is not None
        with socket.create_connection((parsed.host, parsed.port)) as slow:
            slow.settimeout(0.02)
            deadline_s = time.monotonic() + 60.0
            with pytest.raises(ConnectionError):
                while time.monotonic() < deadline_s:
                    slow.sendall(b"x")
                    with suppress(TimeoutError):
                        if slow.recv(1) == b"":
                            raise ConnectionResetError


@pytest.mark.parametrize("host", ["evil.example", "", "10.0.0.1", "127.0.0.1.evil.example"])
def test_a_foreign_host_is_refused(host: str) -> None:
    with listening() as (url, _):
        answer = httpx.get(url, headers={"host": host}, timeout=60.0)
        assert (answer.status_code, answer.text[:15]) == (421, "the Host header")
        assert httpx.get(url, headers={"host": "localhost:9"}, timeout=60.0).status_code == 200


def test_what_else_is_asked() -> None:
    with listening() as (url, _):
        whole = httpx.get(url, timeout=60.0)
        head = httpx.head(url, timeout=60.0)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(whole.content))
        assert not {"server", "date"} & set(whole.headers)
        assert httpx.post(url, timeout=60.0).status_code == 405
        assert httpx.get(url + "?x=1", timeout=60.0).status_code == 200
        parsed = httpx.URL(url)
        assert parsed.port is not None
        for data in (b"\r\n\r\n", b"\xff\xfe\r\n\r\n", b"GET\r\n:\r\n\r\n", b"x" * 100_000):
            with socket.create_connection((parsed.host, parsed.port)) as client:
                client.settimeout(60.0)
                with suppress(ConnectionError):
                    client.sendall(data)
                    assert b" 200 " not in client.recv(4096)
        assert httpx.get(url, timeout=60.0).status_code == 200


def test_an_address_that_others_reach_wants_an_operators_key() -> None:
    keys = [ApiKey("alice", digest_of(b"alices-key")), ApiKey("ops", digest_of(b"ops-key"), True)]
    config = ServeConfig(metrics_host="0.0.0.0", metrics_port=0, api_key_file="keys")
    metrics = ServerMetrics(config, keys)
    with closing(MetricsListener(config)) as listener:
        listener.start(metrics)
        url = listener.url.replace("0.0.0.0", "127.0.0.1")
        for key, status in (("", 401), ("wrong", 401), ("alices-key", 403), ("ops-key", 200)):
            headers = {"authorization": f"Bearer {key}", "host": "any.name"} if key else {}
            answer = httpx.get(url, headers=headers, timeout=60.0)
            assert answer.status_code == status, key
            assert ("lightserve_build_info" in answer.text) == (status == 200)
        metrics.keys = (ApiKey("new", digest_of(b"new-key"), is_admin=True),)
        for key, status in (("ops-key", 401), ("new-key", 200)):
            headers = {"authorization": f"Bearer {key}"}
            assert httpx.get(url, headers=headers, timeout=60.0).status_code == status


def test_an_address_that_others_reach_is_refused_without_keys() -> None:
    with pytest.raises(ConfigError, match=r"--metrics-host '0\.0\.0\.0' can be reached"):
        ServeConfig(metrics_host="0.0.0.0")
    ServeConfig(metrics_host="0.0.0.0", metrics_port=8001, insecure_no_auth=True)


def test_a_storm_of_scrapes_renders_no_more_than_there_is_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rendered: list[bytes] = []

    def counting(registry: Any) -> bytes:
        rendered.append(generate_latest(registry))
        return rendered[-1]

    monkeypatch.setattr("lightserve.supervisor.metrics.generate_latest", counting)
    with listening() as (url, metrics), httpx.Client(timeout=60.0) as client:
        for news in range(3):
            metrics.on_snapshot("router", [MetricSample(STEPS.name, [], [float(news)])])
            for _ in range(20):
                assert f"{float(news)}" in client.get(url).text
                assert metrics.answer(MetricsRequest(number=1)).text == rendered[-1]
        assert len(rendered) == 3


def test_a_taken_port_is_refused_in_words_and_a_closed_one_is_free_again() -> None:
    # An address of the loopback interface that is not used elsewhere: the port stays free.
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
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        config = ServeConfig(metrics_port=free.getsockname()[1])
    with closing(MetricsListener(config)) as first, closing(MetricsListener(config)) as second:
        first.start(ServerMetrics(config))  # both are bound, as no socket listened yet
        with pytest.raises(StartupError, match="in use"):
            second.start(ServerMetrics(config))


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1"])
def test_an_address_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(StartupError, match=f"--metrics-host {host}"):
        MetricsListener(ServeConfig(metrics_host=host, metrics_port=0, insecure_no_auth=True))


# The dashboard on this port.


@contextmanager
def viewer(url: str, **headers: str) -> Iterator[Iterator[str]]:
    """The lines of the dashboard's events."""
    address = url.replace("/metrics", "/dashboard/events")
    with httpx.stream("GET", address, headers=headers, timeout=60.0) as answer:
        assert answer.status_code == 200
        yield answer.iter_lines()


def _until(lines: Iterator[str], start: str) -> str:
    return next(line for line in lines if line.startswith(start))


def test_the_dashboard_is_here_too() -> None:
    with listening() as (url, metrics):
        page = httpx.get(url.replace("/metrics", "/dashboard"), timeout=60.0)
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert "content-security-policy" in page.headers
        assert "a model" not in page.text
        metrics.on_snapshot("router", [MetricSample(STEPS.name, [], [3.0])])
        now_s = time.monotonic()
        assert not metrics.wants_picture(now_s)
        with viewer(url) as lines:
            assert '"model":"a model"' in _until(lines, "data: ")
            tick = json.loads(_until(lines, 'data: {"figures"').removeprefix("data: "))
            assert tick["figures"]["families"]["lightserve_steps_total"] == {"": [3.0]}
            assert tick["picture"] is None
            assert metrics.wants_picture(time.monotonic())
            assert not metrics.wants_picture(time.monotonic()), "one a second"
            metrics.on_picture(b'{"pool":null}')
            tick = json.loads(_until(lines, 'data: {"figures"').removeprefix("data: "))
            assert tick["picture"] == {"pool": None}
        head = httpx.head(url.replace("/metrics", "/dashboard/events"), timeout=60.0)
        assert head.status_code == 200


def test_viewers_are_bounded_and_delay_no_scrape() -> None:
    """Whether they read or not; nor do scrapes make room by ending views."""
    with ExitStack() as stack, listening() as (url, _):
        address = url.replace("/metrics", "/dashboard/events")
        first = stack.enter_context(viewer(url))
        _until(first, "event: tick")
        parsed = httpx.URL(url)
        assert parsed.port is not None
        for _ in range(MAX_VIEWERS - 1):
            deaf = stack.enter_context(socket.create_connection((parsed.host, parsed.port)))
            deaf.sendall(b"GET /dashboard/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
            deaf.settimeout(60.0)
            assert deaf.recv(12) == b"HTTP/1.1 200"
        answer = httpx.get(address, timeout=60.0)
        assert (answer.status_code, answer.text[:14]) == (503, "too many views")
        for _ in range(2 * MAX_SCRAPES):
            assert httpx.get(url, timeout=60.0).status_code == 200
        _until(first, "event: tick")


def test_who_may_look() -> None:
    keys = [ApiKey("alice", digest_of(b"alices-key")), ApiKey("ops", digest_of(b"ops-key"), True)]
    config = ServeConfig(metrics_port=0, api_key_file="keys")
    with closing(MetricsListener(config)) as listener:
        listener.start(ServerMetrics(config, keys))
        url = listener.url
        page, address = (
            url.replace("/metrics", path) for path in ("/dashboard", "/dashboard/events")
        )
        assert httpx.get(page, timeout=60.0).status_code == 200
        assert httpx.get(url, timeout=60.0).status_code == 200, "as before, on a loopback address"
        for key, status in (("", 401), ("wrong", 401), ("alices-key", 403)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            assert httpx.get(address, headers=headers, timeout=60.0).status_code == status
        good = {"authorization": "Bearer ops-key"}
        for site, status in (("cross-site", 403), ("same-site", 403)):
            answer = httpx.get(address, headers=good | {"sec-fetch-site": site}, timeout=60.0)
            assert answer.status_code == status
        with viewer(url, **good, **{"sec-fetch-site": "same-origin"}) as lines:
            _until(lines, "event: tick")
        foreign = httpx.get(page, headers={"host": "evil.example"}, timeout=60.0)
        assert foreign.status_code == 421


def test_viewers_end_with_the_server() -> None:
    with ExitStack() as stack:
        with listening() as (url, _):
            lines = stack.enter_context(viewer(url))
            _until(lines, "event: tick")
        with suppress(httpx.HTTPError):
            for _ in lines:
                pass


def test_a_port_that_the_system_has_chosen_is_taken_by_no_other() -> None:
    with bind_port("127.0.0.1", 0) as bound, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(bound.getsockname())
