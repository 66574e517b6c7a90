"""Targets, priority and timeout through the `openai` client, on a server with one row."""

from __future__ import annotations

import re
import signal
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import trustme
from openai import OpenAI
from support.live_server import LiveServer, live_server
from support.processes import PATIENCE_S, wait_for

LONG = 7000
"""Tokens; takes far longer than anything here."""


@pytest.fixture(scope="module")
def server(run_parent: Path) -> Iterator[LiveServer]:
    flags = ("--max-num-seqs", "1", "--policy", "unified", "--log-level", "debug")
    with live_server(run_parent, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=2) as made:
        yield made


Ask = Callable[..., Any]


@pytest.fixture
def ask(client: OpenAI, server: LiveServer) -> Ask:
    """Completes a prompt to exactly `max_tokens`, with fields that OpenAI does not know."""

    def completion(
        max_tokens: int,
        *,
        stream: bool = False,
        headers: dict[str, str] | None = None,
        **fields: Any,
    ) -> Any:
        return client.completions.create(
            model=server.model,
            prompt="Tell me a story.",
            max_tokens=max_tokens,
            stream=stream,
            extra_headers=headers,
            extra_body={"ignore_eos": True, **fields},
        )

    return completion


def load(server: LiveServer) -> dict[str, int]:
    """Return what of both classes runs and waits."""
    classes = httpx.get(f"{server.url}/load", timeout=300.0).json()["classes"].values()
    return {name: sum(each[name] for each in classes) for name in ("num_waiting", "num_running")}


def wait_load(server: LiveServer, *, num_running: int, num_waiting: int) -> None:
    expected = {"num_waiting": num_waiting, "num_running": num_running}
    wait_for(lambda: load(server) == expected, str(expected))


def metric(server: LiveServer, name: str, *labels: str) -> float:
    """Return the value of the series of a family that has all these label values."""
    for line in server.metrics().splitlines():
        match = re.fullmatch(r"lightserve_(\w+)\{(.*)\} (\S+)", line)
        if match and match[1] == name and all(f'"{label}"' in match[2] for label in labels):
            return float(match[3])
    return 0.0


def wait_metric(server: LiveServer, value: float, name: str, *labels: str) -> None:
    wait_for(lambda: metric(server, name, *labels) >= value, str(labels))
    assert metric(server, name, *labels) == value


def test_own_targets_are_judged(ask: Ask, server: LiveServer) -> None:
    ask(100)  # the router has seen what steps take
    impossible = ask(3, slo={"ttft_ms": 0.001, "tpot_ms": 3_600_000})
    assert impossible.slo["asked"]["ttft_ms"] == 0.001
    assert impossible.slo["scheduled"]["ttft_ms"] > 0.1
    assert impossible.slo["scheduled"]["tpot_ms"] == 3_600_000
    assert not hasattr(ask(3, slo={"tpot_ms": 3_600_000}), "slo")
    wait_metric(server, 1, "raised_targets_total", "rt", "ttft")
    ask(3, headers={"x-slo-ttft-ms": "3600000"})
    ask(3, service_tier="flex", slo={"completion_s": 600})
    ask(3, headers={"x-slo-completion-s": "600"})
    for request_class, target, outcome in (
        ("rt", "ttft", "missed"),
        ("rt", "ttft", "met"),
        ("rt", "completion", "met"),
        ("be", "completion", "met"),
    ):
        wait_metric(server, 1, "slo_requests_total", request_class, target, outcome)
    with pytest.raises(openai.BadRequestError, match="real-time"):
        ask(3, service_tier="flex", headers={"x-slo-tpot-ms": "50"})


def test_priority_orders_who_waits(ask: Ask, server: LiveServer) -> None:
    """Sent while the only row is taken; the router's log says in which order they end."""
    running = ask(LONG, stream=True)
    next(running)
    waiting = []

    def wait(tier: str, priority: int | None) -> None:
        headers = {"x-request-id": f"{tier}.{priority}"}
        ask(4, headers=headers, service_tier=tier, priority=priority)

    for terms in (
        ("default", 3),
        ("default", None),
        ("default", -3),
        ("flex", 9),
        ("flex", -1000),
    ):
        thread = threading.Thread(target=wait, args=terms)
        thread.start()
        waiting.append(thread)
    wait_load(server, num_running=1, num_waiting=len(waiting))
    running.close()
    for thread in waiting:
        thread.join(PATIENCE_S)
    ended = wait_for(lambda: ended_in_order(server.stderr, len(waiting)), "the router's words")
    real_time = [name for name in ended if name.startswith("default")]
    best_effort = [name for name in ended if name.startswith("flex")]
    assert real_time == ["default.-3", "default.None", "default.3"]
    assert best_effort == ["flex.-1000", "flex.9"]


def ended_in_order(log: str, count: int) -> list[str]:
    """Return the ids of those with a priority as they end at the router; [] if some do not yet."""
    names = re.findall(r"\[((?:default|flex)\.\S+)\].* is request (\d+) of this frontend", log)
    name_of = {number: name for name, number in names}
    ends = re.findall(r"request 0/(\d+): ends", log)
    ended = [name_of[number] for number in ends if number in name_of]
    return ended if len(ended) == count else []


def test_timeouts_free_what_they_hold(ask: Ask, server: LiveServer) -> None:
    """Of a request that waits, and of ones that run, whole and streamed, with several choices."""
    before = metric(server, "request_failure_total", "rt", "timeout")
    running = ask(LONG, stream=True)
    next(running)
    with pytest.raises(openai.APIStatusError) as waited:
        ask(4, timeout=0.3)
    assert waited.value.status_code == 408
    wait_load(server, num_running=1, num_waiting=0)
    running.close()
    wait_load(server, num_running=0, num_waiting=0)
    with pytest.raises(openai.APIStatusError) as ran:
        ask(LONG, timeout=0.3, n=2)
    assert ran.value.status_code == 408
    texts: list[str] = []
    with pytest.raises(openai.APIError, match="timeout"):
        texts.extend(chunk.choices[0].text for chunk in ask(LONG, timeout=3.0, stream=True))
    assert "".join(texts)
    wait_load(server, num_running=0, num_waiting=0)
    # Not more: clients are told not to try again.
    wait_metric(server, before + 4, "request_failure_total", "rt", "timeout")
    assert ask(4, timeout=60).usage.completion_tokens == 4


# A real server behind keys and TLS: nothing gives a key away, and SIGHUP changes the keys.

OLD, NEW = "old-secret-of-alice", "new-secret-of-alice"


def test_keys_over_tls_from_start_to_reload(run_parent: Path, tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    pem, keys = tmp_path / "server.pem", tmp_path / "keys"
    certificate.private_key_and_cert_chain_pem.write_to_path(str(pem))
    context = ssl.create_default_context()
    authority.configure_trust(context)
    keys.write_text(f"alice {OLD}\n")
    flags = ["--api-key-file", str(keys), "--ssl-certfile", str(pem), "--http-workers", "2"]
    # The server waits for itself with probes, which are open, but not over plain HTTP.
    with (
        live_server(run_parent, *flags, verify=context) as server,
        httpx.Client(base_url=server.url, verify=context, timeout=300.0) as http,
    ):
        assert server.url.startswith("https://127.0.0.1:")
        assert "$OPENAI_API_KEY" in server.stdout

        def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}", "connection": "close"}
            return http.get("/v1/models", headers=headers).status_code

        assert (status(OLD), status(NEW), status("x")) == (200, 401, 401)
        body = {"model": server.model, "prompt": "Once", "max_tokens": 3}
        headers = {"authorization": f"Bearer {OLD}"}
        assert http.post("/v1/completions", json=body, headers=headers).status_code == 200
        keys.write_text("nonsense\n")
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "API keys stay as they were" in server.stderr, "the error")
        assert {status(OLD) for _ in range(8)} == {200}
        keys.write_text(f"alice {NEW}\n")
        server.process.send_signal(signal.SIGHUP)
        # Both frontends, one after the other: requests on fresh connections reach either.
        wait_for(lambda: {status(NEW) for _ in range(8)} == {200}, "the new key")
        wait_for(lambda: {status(OLD) for _ in range(8)} == {401}, "the end of the old key")
        for process in map(psutil.Process, server.pids()):
            assert "secret" not in " ".join(process.cmdline())
        assert server.stop() == 0
        for secret in (OLD, NEW):
            assert secret not in server.stderr + server.stdout
        assert "client=alice" in server.stderr


# Cached prefixes: found by who computed them, invisible to others, and not seen in the text.

PROMPT = "Once upon a time a fox went to the market. " * 12


def test_a_key_finds_its_own_prefixes_only(run_parent: Path, tmp_path: Path) -> None:
    """Another key is not even told by the time or the usage that a prompt was there."""
    keys = tmp_path / "keys"
    keys.write_text("alice the-key-of-alice\nbob the-key-of-bob-too\n")
    flags = ["--api-key-file", str(keys), "--batch-invariant", "--dtype", "float32"]
    with (
        live_server(run_parent, *flags) as server,
        httpx.Client(base_url=server.url, timeout=300.0) as http,
    ):

        def complete(key: str) -> dict[str, Any]:
            body = {"model": server.model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
            headers = {"authorization": f"Bearer {key}"}
            answer: dict[str, Any] = http.post("/v1/completions", json=body, headers=headers).json()
            return answer

        answers = [
            complete(key) for key in ("the-key-of-alice", "the-key-of-alice", "the-key-of-bob-too")
        ]
        usages = [answer["usage"] for answer in answers]
        num_prompt_tokens = usages[0]["prompt_tokens"]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        assert cached == [0, num_prompt_tokens - 1, 0]
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1


# Seats: rows that one key holds all of.

NUM_HELD = 1000
OPERATOR = {"authorization": "Bearer the-key-of-the-operator"}


def test_a_key_that_holds_all_rows_gives_one_up(run_parent: Path, tmp_path: Path) -> None:
    """Another key is answered before any of them ends, and each comes to its end all the same."""
    keys = tmp_path / "keys"
    lines = ("alice the-key-of-alice", "bob the-key-of-bob-too", "op the-key-of-the-operator admin")
    keys.write_text("\n".join(lines))
    flags = ["--api-key-file", str(keys), "--max-num-seqs", "3"]
    with live_server(run_parent, *flags) as server:
        url = f"{server.url}/v1"
        with (
            OpenAI(base_url=url, api_key="the-key-of-alice") as alice,
            OpenAI(base_url=url, api_key="the-key-of-bob-too") as bob,
        ):
            ask = {"model": server.model, "prompt": "Once", "extra_body": {"ignore_eos": True}}
            wanted: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
            held = [
                iter(alice.completions.create(max_tokens=NUM_HELD, **wanted, **ask))
                for _ in range(3)
            ]
            for stream in held:  # all rows are theirs
                next(stream)
            ended: list[int] = []

            def read(stream: Iterator[Any]) -> None:
                *_, last = stream
                ended.append(last.usage.completion_tokens)

            with ThreadPoolExecutor(3) as threads:
                reads = [threads.submit(read, stream) for stream in held]
                answer = bob.completions.create(max_tokens=2, **ask)
                assert answer.usage.completion_tokens == 2 and not ended
                for done in reads:
                    done.result(PATIENCE_S)
            assert ended == [NUM_HELD] * 3
            pattern = re.compile(r'lightserve_pauses_total\{[^}]*class="rt"[^}]*\} 1\b')
            wait_for(lambda: pattern.search(server.metrics(OPERATOR)), "the pause to be counted")
