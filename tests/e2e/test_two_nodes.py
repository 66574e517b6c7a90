"""A server whose two ranks are on two nodes: here two trees of processes on one machine."""

from __future__ import annotations

import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from support.live_server import LiveServer, live_server
from support.processes import PATIENCE_S, is_running, wait_for, wait_gone

from lightserve.node_key import write_node_key
from lightserve.supervisor.node import NODE_READY_PREFIX

PROMPTS = ("Tell me a story about Mira and the brass lantern.", "The road to Foxdale", "Once")
COMMON = ("--tp=2", "--dtype=float32", "--kv-memory=16MiB")


@contextmanager
def _started(run_parent: Path, *flags: str) -> Iterator[LiveServer]:
    """Run a node, which may not be ready yet; nothing of it is left afterwards."""
    node = LiveServer(flags, Path(tempfile.mkdtemp(dir=run_parent)))
    try:
        yield node
    finally:
        pids = node.pids() if node.process.poll() is None else []
        node.process.kill()
        node.process.wait(PATIENCE_S)
        wait_gone(pids)
        node.close()


@pytest.fixture
def flags(tmp_path: Path) -> tuple[str, ...]:
    """What both nodes are given."""
    write_node_key(tmp_path / "key")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return (
        *COMMON,
        *("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}"),
        *(f"--node-key-file={tmp_path / 'key'}", "--node-timeout-s=60"),
    )


def _answers(server: LiveServer) -> list[list[int]]:
    """Return the tokens that follow each prompt."""
    answers = []
    for prompt in PROMPTS:
        asked = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        body = {"model": server.model, "return_token_ids": True, **asked}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        answers.append(answer.json()["choices"][0]["token_ids"])
    return answers


def _wait_node_ready(node: LiveServer) -> None:
    wait_for(lambda: node.stdout or node.process.poll() is not None, "the node")
    assert node.stdout.startswith(NODE_READY_PREFIX + "1 of 2: runs rank 1 for "), node.stderr


def _all_gone(processes: list[psutil.Process]) -> bool:
    return not any(is_running(process.pid) for process in processes)


def test_two_nodes_answer_as_one_and_go_on_when_one_of_them_was_away(
    run_parent: Path, flags: tuple[str, ...]
) -> None:
    with live_server(run_parent, *COMMON) as alone:
        expected = _answers(alone)
    with (
        _started(run_parent, *flags, "--node-rank=1") as first,
        live_server(run_parent, *flags) as server,
    ):
        _wait_node_ready(first)
        assert sorted(first.tree()) == ["supervisor", "worker-1"]
        assert "worker-0" in server.tree() and "worker-1" not in server.tree()
        assert _answers(server) == expected
        worker = server.tree()["worker-0"]

        assert first.stop() == 0, "told to end, a node does"
        wait_gone([worker.pid])
        assert httpx.get(f"{server.url}/readyz", timeout=PATIENCE_S).status_code == 503
        assert "node 1 was told to end" in server.stderr
        with (
            server.healing(),
            _started(run_parent, *flags, "--node-rank=1", "--kv-memory=17MiB") as other,
        ):
            assert other.process.wait(PATIENCE_S) == 1
            other.close()
            assert 'node 0 refuses this node: --kv-memory: node 1 has "17MiB", node 0' in (
                other.stderr
            )
            second = LiveServer((*flags, "--node-rank=1"), Path(tempfile.mkdtemp(dir=run_parent)))
        try:
            assert _answers(server) == expected
            tree = [*second.tree().values(), *server.tree().values()]
            assert server.stop(signal.SIGTERM) == 0
            assert second.process.wait(PATIENCE_S) == 0, "node 0's end is the others'"
            wait_for(lambda: _all_gone(tree), "the end of all processes")
        finally:
            second.process.kill()
            second.process.wait(PATIENCE_S)
            second.close()


@pytest.mark.long
def test_a_rank_or_a_node_that_dies_is_replaced(run_parent: Path, flags: tuple[str, ...]) -> None:
    with (
        _started(run_parent, *flags, "--node-rank=1") as node,
        live_server(run_parent, *flags) as server,
    ):
        expected = _answers(server)
        with server.healing():
            node.tree()["worker-1"].kill()
        assert "node 1: worker-1 was killed by SIGKILL" in server.stderr
        assert _answers(server) == expected

        worker = node.tree()["worker-1"]
        node.process.kill()
        wait_gone([worker.pid])
        with _started(run_parent, *flags, "--node-rank=1") as again:
            _wait_node_ready(again)
            server.wait_readyz()
            assert _answers(server) == expected
