"""What a running server looks like from outside: greeting, processes, sockets, memory."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import zmq
from support.grids import choose, more_when_long
from support.live_server import LiveServer, live_server
from support.processes import wait_for
from support.streams import Outcome, stream_once

from lightserve.channels import VERSION_BYTE
from lightserve.config import ServeConfig
from lightserve.cost.profile import SCHEMA_VERSION, StepProfile, save_profile
from lightserve.kernels.cpu import core
from lightserve.messages.common import StepCoefficients
from lightserve.messages.frontend_router import Abort, Submit
from lightserve.types import RequestId
from lightserve.worker.profiling import profile_key

MAX_LIGHT_RSS_BYTES = 150 * 1024 * 1024
LIGHT = ("supervisor", "frontend-0", "router-0")


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout


def test_the_curl_line_works_as_printed(server: LiveServer) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl on this machine")
    curl = next(line for line in server.stdout.splitlines() if line.startswith("curl "))
    lines = [line for line in _run("bash", "-c", curl).splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    text = "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])
    assert len(events) > 2
    assert len(text.split()) > 3


def test_the_openai_snippet_works_as_printed(server: LiveServer) -> None:
    snippet = server.stdout[server.stdout.index("from openai import") :]
    assert len(_run(sys.executable, "-c", snippet).split()) > 3


def test_the_process_tree_is_the_one_drawn(server: LiveServer) -> None:
    def whole_tree() -> dict[str, psutil.Process] | None:
        tree = server.tree()
        return tree if "grammars of worker-0" in tree else None

    tree = wait_for(whole_tree, "the process of the worker's grammars")
    grammars = tree.pop("grammars of worker-0")
    assert grammars.ppid() == tree["worker-0"].pid
    while grammars.name() != "grammars-work":  # it takes its name when it has begun
        time.sleep(0.05)
    assert sorted(tree) == ["frontend-0", "router-0", "supervisor", "worker-0"]
    names = {role: process.name() for role, process in tree.items() if role != "supervisor"}
    assert all(role == name for role, name in names.items()), names


def test_no_core_dump_is_written_of_any_process(server: LiveServer) -> None:
    """With 1 the kernel gives none to programs that collect them, whatever the files' limit is."""
    limits = {role: process.rlimit(psutil.RLIMIT_CORE) for role, process in server.tree().items()}
    assert {soft for soft, hard in limits.values()} == {1 if limits["supervisor"][1] else 0}, limits


@pytest.mark.parametrize("role", LIGHT)
def test_light_processes_stay_light(server: LiveServer, role: str) -> None:
    process = server.tree()[role]
    libraries = [part.path for part in process.memory_maps() if "torch" in part.path]
    assert libraries == []
    assert process.memory_info().rss <= MAX_LIGHT_RSS_BYTES


def test_torch_is_visible_where_it_is(server: LiveServer) -> None:
    """The check above can fail."""
    assert any("libtorch" in part.path for part in server.tree()["worker-0"].memory_maps())


def test_operators_see_what_the_workers_compute_on(server: LiveServer) -> None:
    device = httpx.get(f"{server.url}/version", timeout=300.0).json()["device"]
    expected = "native" if core.LIBRARY.exists() else "torch"
    assert (device["kind"], device["kernels"]) == ("cpu", expected)
    assert device["name"]
    assert f'device_name="{device["name"]}"' in server.metrics()


def test_only_the_http_and_metrics_ports_listen(server: LiveServer) -> None:
    listening = {
        connection.laddr
        for process in server.tree().values()
        for connection in process.net_connections(kind="inet")
        if connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)  # none: UDP
    }
    ports = {httpx.URL(url).port for url in (server.url, server.metrics_url)}
    assert listening == {("127.0.0.1", port) for port in ports}


def test_sockets_are_private(server: LiveServer) -> None:
    (run_dir,) = server.run_parent.iterdir()
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    sockets = [path for path in run_dir.iterdir() if path.is_socket()]
    assert sorted(path.name for path in sockets) == ["control", "frontends-0", "workers-0"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in sockets} == {0o600}


def test_another_user_cannot_connect(server: LiveServer) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    (path,) = server.run_parent.glob("*/control")
    assert _list_as(os.getuid(), path).returncode == 0
    assert _list_as(65534, server.run_parent).returncode == 0
    assert "Permission denied" in _list_as(65534, path).stderr
    assert "Permission denied" in _list_as(65534, path.parent).stderr


def _list_as(uid: int, path: Path) -> subprocess.CompletedProcess[str]:
    """Run ls as another user: to connect needs the same right to reach the path."""
    return subprocess.run(
        ["/bin/ls", str(path)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        user=uid,
        group=uid,
        extra_groups=[],
        env={"LC_ALL": "C"},
    )


def test_descriptors_are_not_shared(server: LiveServer) -> None:
    """Only the frontend holds the listening socket; no process holds another's pipes."""
    tree = server.tree()
    port = int(server.url.rsplit(":", 1)[1])
    holders = {
        role
        for role, process in tree.items()
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr[1] == port
    }
    assert holders == {"supervisor", "frontend-0"}
    death_pipe = {role: _stdin(process) for role, process in tree.items() if role != "supervisor"}
    assert len(set(death_pipe.values())) == len(death_pipe)


def _stdin(process: psutil.Process) -> Path:
    return Path(f"/proc/{process.pid}/fd/0").readlink()


def test_garbage_on_every_socket_changes_nothing(server: LiveServer) -> None:
    """Noise, broken versions of valid frames and strangers' names, on all three hubs."""
    pids = server.pids()
    chance = random.Random(7)
    valid = VERSION_BYTE + msgspec.msgpack.encode(Abort(request_id=RequestId(1)))
    (run_dir,) = server.run_parent.iterdir()
    for path in filter(Path.is_socket, run_dir.iterdir()):
        for name in (b"frontend-9", b"worker-9", b"router", b"\xff\x00"):
            with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
                peer.setsockopt(zmq.IDENTITY, name)
                peer.setsockopt(zmq.LINGER, 5000)
                peer.connect(f"ipc://{path}")
                for _ in range(50):
                    at = chance.randrange(len(valid))
                    peer.send(chance.randbytes(chance.randrange(200)))
                    peer.send(valid[:at] + bytes([valid[at] ^ 0x55]) + valid[at + 1 :])
                    peer.send_multipart([valid, b"two parts"])
                peer.send(bytes(Submit.MAX_BYTES + 1))
    assert server.is_ready()
    body = {"model": server.model, "messages": [{"role": "user", "content": "Hello."}]}
    assert stream_once(server.url, {**body, "max_tokens": 5}).outcome is Outcome.WHOLE
    assert server.pids() == pids


# The KV pool of a running server: what /debug/kv says while a stream runs, and its picture.

PROMPT = "Tell me a story about Mira and the brass lantern. " * 6


def _map(server: LiveServer) -> dict[str, Any]:
    response = httpx.get(f"{server.url}/debug/kv", timeout=300.0)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    total = sum(count for _, count in answer["slots"])
    assert total == answer["num_slots"] == sum(answer["counts"].values())
    return answer


def _num_used(answer: dict[str, Any], request_class: str) -> int:
    num_slots: int = answer["classes"][request_class]["num_slots"]
    return num_slots


@contextmanager
def _stream(server: LiveServer, service_tier: str) -> Iterator[None]:
    """A stream that has begun and goes on until the end of the context."""
    body = {
        **{"model": server.model, "prompt": PROMPT, "max_tokens": 6000, "ignore_eos": True},
        **{"service_tier": service_tier, "stream": True},
    }
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300.0) as response:
        lines = response.iter_lines()  # when it is dropped, the connection is closed
        assert next(lines).startswith("data:")
        yield


def test_a_stream_is_on_the_map_and_its_prompt_stays_as_cache(server: LiveServer) -> None:
    with _stream(server, "default"), _stream(server, "flex"):
        during = _map(server)
    assert during["classes"]["rt"]["num_requests"] == 1
    assert during["classes"]["be"]["num_requests"] == 1
    assert _num_used(during, "rt") > 50
    assert _num_used(during, "be") > 0  # its own tokens; the prompt may be one with the other's
    assert during["mean_run_length"] > 1
    assert 0 < during["num_free_blocks"] < during["num_slots"] // during["block_size"]

    def is_over() -> bool:
        return _num_used(_map(server), "rt") == _num_used(_map(server), "be") == 0

    wait_for(is_over, "the end of both streams")
    after = _map(server)
    assert after["counts"]["cached"] > 50
    assert after["mean_run_length"] == 0


# A server whose standard error is a pipe that is not read: all of its processes go on.

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


# A profile on its way: from a file through the workers' hello into the router's predictions.

FLOOR_S = 3.0


def test_a_profile_is_what_the_first_step_is_predicted_by(run_parent: Path, tmp_path: Path) -> None:
    key = profile_key(ServeConfig())
    key = msgspec.structs.replace(key, num_threads=1)
    path = tmp_path / "profile.json"
    slow = StepCoefficients(FLOOR_S, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    save_profile(StepProfile(SCHEMA_VERSION, "0", "slow", key, slow, 1, 9, 0.0, 0.0), path)
    with live_server(run_parent, "--profile", str(path)) as server:
        body = {"model": server.model, "prompt": "A fox", "max_tokens": 1}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=300.0).is_success
        predicted_s = wait_for(lambda: _predicted_s(server.metrics_url), "a predicted step")
        assert predicted_s == FLOOR_S


def _predicted_s(metrics_url: str) -> float:
    text = httpx.get(metrics_url, timeout=300.0).text
    found = re.search(r"^lightserve_predicted_step_time_seconds_sum\S* (\S+)$", text, re.M)
    assert found is not None
    return float(found[1])


# The log of a real server at debug level: JSON, requests that can be followed, no secrets.

SECRET = "xyzzy-plugh"
KEY = "sk-" + "hollowvoice" * 4


def test_a_request_can_be_followed_and_its_words_cannot(run_parent: Path, tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text(f"tester {KEY} admin\n")
    key_file.chmod(0o600)
    flags = ["--log-level=debug", "--log-format=json", f"--api-key-file={key_file}"]
    with live_server(run_parent, *flags) as server:
        body = {
            "model": server.model,
            "messages": [{"role": "user", "content": f"Say {SECRET}."}],
            "user": SECRET,
            "max_tokens": 6,
        }
        headers = {"authorization": f"Bearer {KEY}", "x-request-id": "followed-1"}
        url = f"{server.url}/v1/chat/completions"
        answer = httpx.post(url, json=body, headers=headers, timeout=300.0)
        assert answer.status_code == 200, answer.text
        wrong = {"authorization": f"Bearer {KEY}x"}
        assert (
            httpx.post(f"{url}?{SECRET}", json=body, headers=wrong, timeout=300.0).status_code
            == 401
        )
        metrics = server.metrics(headers)
        wait_for(lambda: "followed-1" in server.stderr, "the request's lines")
        server.stop()
        log = server.stderr
    lines: list[dict[str, Any]] = [json.loads(line) for line in log.splitlines()]
    assert {"supervisor", "frontend-0", "router-0", "worker-0"} <= {x["process"] for x in lines}
    assert not any("uvicorn" in line["logger"] for line in lines)
    assert SECRET not in log
    assert KEY not in log
    for shown in (answer.json()["choices"][0]["message"]["content"].strip(), SECRET, KEY):
        assert shown not in metrics

    mine = [line for line in lines if line.get("request_id") == "followed-1"]
    responses = [line for line in mine if line.get("route") == "/v1/chat/completions"]
    assert [(line["method"], line["status"]) for line in responses] == [("POST", 200)]
    number = next(
        match[1]
        for line in mine
        if (match := re.search(r"is request (\d+) of this frontend", line["message"]))
    )
    of_router = [
        line["message"]
        for line in lines
        if line["process"] == "router-0" and f"request 0/{number}:" in line["message"]
    ]
    assert len(of_router) == 2
    assert "submitted" in of_router[0] and "ends" in of_router[1]


# `lightserve chat` as people run it in a pipe, against the real server.

_QUESTION = "Tell me a story about Mira and the brass lantern."


def _chat(server: LiveServer, *flags: str, question: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lightserve.cli.main", "chat", "--url", server.url, *flags],
        input=question,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_a_piped_question_is_answered(server: LiveServer) -> None:
    flags = ("--temperature", "0", "--max-tokens", "20")
    first, second = (_chat(server, *flags, question=_QUESTION) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert len(first.stdout.split()) > 5
    assert first.stdout == second.stdout


def test_a_refusal_is_one_line(server: LiveServer) -> None:
    result = _chat(server, "--max-tokens", "-1", question=_QUESTION)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("lightserve: error: HTTP 400: ")
    assert result.stderr.count("\n") == 1


# schemathesis over the running server's own schema.

TOOL = Path(sys.executable).parent / "schemathesis"
MAX_EXAMPLES, PHASES = choose(("2", "fuzzing"), ("40", "examples,coverage,fuzzing"))
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,negative_data_rejection"
)
"""No 5xx; every answer is one that the schema names; what does not fit the schema is refused."""


@more_when_long
def test_no_data_makes_the_server_fail(server: LiveServer, tmp_path: Path) -> None:
    """Data that fit the schema and data that do not: no 5xx, and the schema is true."""
    done = subprocess.run(
        [
            *[str(TOOL), "run", f"{server.url}/openapi.json", "--checks", CHECKS],
            *["--mode", "all", "--phases", PHASES, "--max-examples", MAX_EXAMPLES],
            *["--seed", "1", "--suppress-health-check", "all", "--generation-database", "none"],
            *["--request-timeout", "300", "--no-color", "--warnings", "off"],
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    generated = re.search(r"(\d+) generated", done.stdout)
    assert generated is not None, done.stdout[-2000:]
    assert int(generated[1]) >= 20
    assert server.is_ready()
