"""nginx as docker/nginx.conf has it, in front of three replicas that do as they are told."""

from __future__ import annotations

import http.server
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from support.nginx import CONFIG, NGINX, running_nginx
from support.processes import PATIENCE_S

from lightserve.frontend.middleware import MAX_UPLOAD_BYTES

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
BODY = b'{"prompt": "hello"}'


class Replica(http.server.ThreadingHTTPServer):
    """Answers, refuses, breaks off or streams."""

    daemon_threads = True

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.name = name
        self.does = "answer"
        self.paths: list[str] = []
        self.may_go_on = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """A broken connection is what some tests are about."""


class Handler(http.server.BaseHTTPRequestHandler):
    """See `Replica`."""

    protocol_version = "HTTP/1.1"
    server: Replica

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        assert body in (b"", BODY)
        self.server.paths.append(self.path)
        if self.server.does == "break":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.send_response(503 if self.server.does == "refuse" else 200)
        if self.server.does != "stream":
            text = self.server.name.encode()
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"5\r\nfirst\r\n")
        self.wfile.flush()
        assert self.server.may_go_on.wait(PATIENCE_S)
        self.wfile.write(b"4\r\nlast\r\n0\r\n\r\n")

    do_POST = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@dataclass
class Fleet:
    """Replicas, and the address of nginx."""

    url: str = ""
    replicas: list[Replica] = field(default_factory=list)

    def do(self, *what: str) -> None:
        """Tell each what to do, and forget what was asked."""
        for replica, does in zip(self.replicas, what, strict=True):
            replica.does = does
            replica.paths.clear()

    def paths(self) -> list[str]:
        return [path for replica in self.replicas for path in replica.paths]

    def post(self) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", content=BODY, timeout=PATIENCE_S)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(replicas=[Replica(f"replica-{number}") for number in (1, 2, 3)])
    ports = [replica.server_port for replica in fleet.replicas]
    # So that each test sees all replicas, whatever the one before did to them.
    forgets = ("fail_timeout=2s", "fail_timeout=1s")
    try:
        with running_nginx(tmp_path, ports, forgets) as fleet.url:
            yield fleet
    finally:
        for replica in fleet.replicas:
            replica.shutdown()
            replica.server_close()


def test_a_replica_that_cannot_be_reached_is_passed_over(fleet: Fleet) -> None:
    gone = fleet.replicas[0]
    gone.shutdown()
    gone.server_close()
    answers = [fleet.post() for _ in range(12)]
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.text for answer in answers} == {"replica-2", "replica-3"}
    assert len(fleet.paths()) == 12, "a request was sent twice"


def test_what_a_replica_refuses_another_takes(fleet: Fleet) -> None:
    fleet.do("refuse", "answer", "refuse")
    answers = [fleet.post() for _ in range(12)]
    assert {(answer.status_code, answer.text) for answer in answers} == {(200, "replica-2")}
    fleet.do("refuse", "refuse", "refuse")
    assert fleet.post().status_code in (502, 503)  # none is left, or the last one has refused


def test_what_was_sent_is_not_sent_again(fleet: Fleet) -> None:
    fleet.do("break", "break", "break")
    assert fleet.post().status_code == 502
    assert fleet.paths() == ["/v1/completions"]


def test_a_stream_is_passed_on_as_it_comes(fleet: Fleet) -> None:
    fleet.do("stream", "stream", "stream")
    with httpx.stream("POST", f"{fleet.url}/v1/completions", content=BODY) as answer:
        pieces = answer.iter_raw()
        assert next(pieces) == b"first"
        for replica in fleet.replicas:
            replica.may_go_on.set()
        assert b"".join(pieces) == b"last"


def test_what_operators_ask_a_replica_is_not_there(fleet: Fleet) -> None:
    for path in ("/metrics", "/load", "/debug/kv", "/dashboard"):
        assert httpx.get(fleet.url + path).status_code == 404
    assert fleet.paths() == []
    assert httpx.get(f"{fleet.url}/readyz").status_code == 200


def test_uploads_are_as_large_as_the_servers_are() -> None:
    match = re.search(r"client_max_body_size (\d+)m;", CONFIG.read_text())
    assert match is not None
    assert MAX_UPLOAD_BYTES <= int(match[1]) * 2**20 < 1.2 * MAX_UPLOAD_BYTES
