"""What a running server looks like from outside: greeting, processes, sockets, memory."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
import zmq
from support.live_server import LiveServer, live_server
from support.streams import Outcome, stream_once

from lightserve.channels.zmq import VERSION_BYTE
from lightserve.kernels.cpu import core
from lightserve.messages.common import MAX_FRAME_BYTES
from lightserve.messages.frontend_router import Abort
from lightserve.types import RequestId

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
    tree = server.tree()
    assert sorted(tree) == ["frontend-0", "router-0", "supervisor", "worker-0"]
    names = {role: process.name() for role, process in tree.items() if role != "supervisor"}
    assert all(role == name for role, name in names.items()), names


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


def test_two_ranks_answer_and_stop(run_parent: Path) -> None:
    with live_server(run_parent, "--tp=2", "--max-kv-tokens=2048") as running:
        ranks = {role for role in running.tree() if role.startswith("worker-")}
        assert ranks == {"worker-0", "worker-1"}
        messages = [{"role": "user", "content": "Tell me a story about Mira."}]
        body = {"model": running.model, "messages": messages, "max_tokens": 30, "temperature": 0}
        result = stream_once(running.url, body)
        assert result.outcome is Outcome.WHOLE
        assert result.num_chunks > 5
        assert running.stop() == 0


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
                peer.send(bytes(MAX_FRAME_BYTES + 1))
    assert server.is_ready()
    body = {"model": server.model, "messages": [{"role": "user", "content": "Hello."}]}
    assert stream_once(server.url, {**body, "max_tokens": 5}).outcome is Outcome.WHOLE
    assert server.pids() == pids
