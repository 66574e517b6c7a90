"""Connections of real sockets: slow senders, caps, early answers, TLS, keys that change."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme
from support.fake_router import eventually, says
from support.patient_loop import run_patiently
from support.running_frontend import Client, Running, running_frontend

from lightserve.batches.access import prepare
from lightserve.bundled import BUNDLED_MODEL_NAME
from lightserve.frontend import http_server
from lightserve.frontend.connections import ConnectionTable, connection_table
from lightserve.frontend.http_requests import FREE_CHUNKS
from lightserve.frontend.http_server import HttpProtocol
from lightserve.http_access import ApiKey, digest_of
from lightserve.messages.frontend_router import Submit, TokenDelta
from lightserve.messages.supervision import NewApiKeys

COMPLETION = {"model": BUNDLED_MODEL_NAME, "prompt": "hi", "max_tokens": 5}
HEAD = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def _serve(tmp_path: Path, scenario: Callable[[Running], Awaitable[None]], **flags: Any) -> None:
    async def run() -> None:
        async with running_frontend(tmp_path, **flags) as running:
            await scenario(running)

    run_patiently(run())


async def _error(client: Client, status: int) -> str:
    """Read an answer after which the connection ends; returns the error's code."""
    given, body = await client.rest()
    assert given == status
    assert b"retry-after: 1" in client.data if status in (429, 503) else True
    return str(json.loads(body)["error"]["code"])


async def _rest(client: Client) -> bytes:
    """Wait for the end of a connection."""
    async with asyncio.timeout(60):
        data = await client.reader.read(-1)
    client.hang_up()
    return data


def _tables(monkeypatch: pytest.MonkeyPatch) -> list[ConnectionTable]:
    """Return the tables of the frontends that will be served."""
    tables: list[ConnectionTable] = []

    def make_table(*args: Any) -> ConnectionTable:
        tables.append(connection_table(*args))
        return tables[-1]

    monkeypatch.setattr("lightserve.frontend.process.connection_table", make_table)
    return tables


def _certificate(folder: Path) -> tuple[dict[str, str], ssl.SSLContext]:
    """Write a certificate for localhost; return the flags for it and a context that trusts it."""
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    certfile, keyfile = folder / "cert.pem", folder / "key.pem"
    certfile.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    keyfile.write_bytes(certificate.private_key_pem.bytes())
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return {"ssl_certfile": str(certfile), "ssl_keyfile": str(keyfile)}, context


def test_heads_that_do_not_come(tmp_path: Path) -> None:
    """Nothing, half a head, a trickle; after a request as well as before the first."""

    async def scenario(running: Running) -> None:
        silent = await running.send("")
        assert await _rest(silent) == b""
        half = await running.send("GET /livez HTTP/1.1\r\nhost: local")
        assert await _error(half, 408) == "request_timeout"

        trickle = await running.send("GET /livez HTTP/1.1\r\nhost: localhost\r\n")
        answer = asyncio.create_task(_error(trickle, 408))
        while not answer.done():
            trickle.writer.write(b"x-more: y\r\n")
            await asyncio.sleep(0.02)
        assert await answer == "request_timeout"

        second = await running.send("GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await second.until(b"}")
        await asyncio.sleep(0.4)  # longer than a head may take: keep-alive is no head
        second.writer.write(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\nGET /")
        await second.until(b"}", 2)
        second.writer.write(b"livez")
        assert b" 408 " in await _rest(second)

    _serve(tmp_path, scenario, header_timeout_s=0.2)


def test_bodies_that_do_not_come(tmp_path: Path) -> None:
    async def scenario(running: Running) -> None:
        await running.router_up(says([50, 2]))
        body = json.dumps(COMPLETION)
        started = await running.send(f"{HEAD}content-length: {len(body)}\r\n\r\n{body[:-1]}")
        assert await _error(started, 408) == "request_timeout"
        none = await running.send(f"{HEAD}content-length: 5\r\n\r\n")
        assert await _error(none, 408) == "request_timeout"
        chunked = await running.send(f"{HEAD}transfer-encoding: chunked\r\n\r\n1\r\n{{\r\n")
        assert await _error(chunked, 408) == "request_timeout"

    _serve(tmp_path, scenario, body_timeout_s=0.2)


def test_a_body_needs_a_rate_all_the_time_and_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has come does not excuse a client that stops; nor does a trickle go on for ever."""
    monkeypatch.setattr(HttpProtocol, "rate_window_s", 0.2)

    async def scenario(running: Running) -> None:
        await running.router_up(says([50, 2]))
        body = (json.dumps(COMPLETION) + " " * 4000).encode()
        head = f"{HEAD}connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        client = await running.send(head)
        for start in range(0, len(body), 1000):  # four windows or so, each with more than enough
            client.writer.write(body[start : start + 1000])
            await asyncio.sleep(0.15)
        assert (await client.rest())[0] == 200

        stopped = await running.send(f"{HEAD}content-length: 4000000\r\n\r\n{' ' * 3_000_000}")
        assert await _error(stopped, 408) == "request_timeout"

        trickle = await running.send(f"{HEAD}content-length: 4000000\r\n\r\n")
        answer = asyncio.create_task(_error(trickle, 408))
        num_sent = 0
        while not answer.done():
            trickle.writer.write(b" " * 200)
            num_sent += 200
            await asyncio.sleep(0.02)
        assert await answer == "request_timeout"
        assert num_sent > 3_000  # it was fast enough until its time was over

    _serve(tmp_path, scenario, body_timeout_s=1.5, min_body_bytes_per_s=1000)


def test_unfinished_bodies_are_bounded_in_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that began first makes room, and its memory is given back; others are served."""
    num_bytes, num_clients, num_left = 200_000, 30, 4
    tables = _tables(monkeypatch)

    async def scenario(running: Running) -> None:
        await running.router_up(says([50, 2]))
        half = f"{HEAD}content-length: {2 * num_bytes}\r\n\r\n{' ' * num_bytes}"
        (table,) = tables
        clients = []
        for number in range(num_clients):
            clients.append(await running.send(half))
            num_held = min(number + 1, num_left) * num_bytes
            await eventually(lambda wanted=num_held: table.num_pending_body_bytes > wanted)
            assert table.num_pending_body_bytes <= 1_000_000
            if number >= num_left:
                assert await _error(clients[number - num_left], 429) == "overloaded"
        answer = await running.post("/v1/completions", json.dumps(COMPLETION), close=True)
        assert (await answer.rest())[0] == 200
        for client in clients[-num_left:]:
            client.hang_up()
        await eventually(lambda: table.num_pending_body_bytes == 0)

    _serve(tmp_path, scenario, max_body_bytes=500_000, max_pending_body_bytes=1_000_000)


UPLOAD = (
    "POST /v1/files HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    "content-type: multipart/form-data; boundary=b\r\ncontent-length: 4000000\r\n\r\n"
    '--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
)


def _serve_with_store(
    tmp_path: Path, scenario: Callable[[Running], Awaitable[None]], **flags: Any
) -> None:
    store = tmp_path / "store"
    prepare(str(store)).close()
    _serve(tmp_path, scenario, batch_store=str(store), **flags)


def test_an_upload_counts_with_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much of a file has come, it takes its part of what all bodies together may."""
    num_held = 100_000
    monkeypatch.setattr(http_server, "UPLOAD_BYTES_HELD", num_held)
    tables = _tables(monkeypatch)

    async def scenario(running: Running) -> None:
        await running.router_up(says([50, 2]))
        (table,) = tables
        clients = []
        for number in range(2):
            clients.append(await running.send(f"{UPLOAD}{' ' * 600_000}"))
            wanted = (number + 1) * num_held
            await eventually(lambda wanted=wanted: table.num_pending_body_bytes == wanted)
        # Which of the first two has not come on for longest is a matter of what was read last.
        answers = {asyncio.create_task(_error(client, 429)) for client in clients}
        clients.append(await running.send(f"{UPLOAD}{' ' * 600_000}"))
        ended, others = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        assert [answer.result() for answer in ended] == ["overloaded"]
        for answer in others:
            answer.cancel()
        for client in clients:
            client.hang_up()
        await eventually(lambda: table.num_pending_body_bytes == 0)

    limits = {"max_body_bytes": 200_000, "max_pending_body_bytes": 2 * num_held + 1}
    _serve_with_store(tmp_path, scenario, **limits)


def test_an_upload_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpProtocol, "rate_window_s", 0.2)
    monkeypatch.setattr(http_server, "UPLOAD_TIMEOUT_S", 0.7)

    async def scenario(running: Running) -> None:
        await running.router_up(says([50, 2]))
        client = await running.send(f"{UPLOAD}{' ' * 6_000}")
        answer = asyncio.create_task(_error(client, 408))
        while not answer.done():  # fast enough, until its time is over
            client.writer.write(b" " * 200)
            await asyncio.sleep(0.02)
        assert await answer == "request_timeout"

    _serve_with_store(tmp_path, scenario, min_body_bytes_per_s=1000, body_timeout_s=0.1)


def test_two_lengths_of_one_body_are_refused(tmp_path: Path) -> None:
    """A proxy in between may see another end, and so another next request."""

    async def scenario(running: Running) -> None:
        for lengths in (
            "content-length: 5\r\ntransfer-encoding: chunked\r\n",
            "transfer-encoding: chunked\r\ncontent-length: 5\r\n",
        ):
            client = await running.send(
                f"{HEAD}{lengths}\r\n0\r\n\r\nGET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
            )
            assert await _error(client, 400) == "ambiguous_length"
            assert client.data.count(b"HTTP/1.1") == 1  # nothing behind it was answered
            assert b"connection: close" in client.data

    _serve(tmp_path, scenario)


def test_a_body_in_tiny_chunks_is_refused(tmp_path: Path) -> None:
    """Half a second of the event loop for each 256 KiB, key or no key."""
    chunks = "1\r\n \r\n"
    head = f"{HEAD}transfer-encoding: chunked\r\n\r\n"

    async def scenario(running: Running) -> None:
        await running.router_up(says([50, 2]))
        status, body = await (await running.send(head + chunks * (FREE_CHUNKS + 64))).rest()
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (400, "invalid_http")
        assert f"more than {FREE_CHUNKS} chunks must have at least 128 bytes" in error["message"]
        # A few are welcome, and however many that are large enough.
        text = json.dumps(COMPLETION)
        large = f"80\r\n{' ' * 128}\r\n" * 3000
        few = f"{len(text):x}\r\n{text}\r\n{large}{chunks * (FREE_CHUNKS - 9)}0\r\n\r\n"
        client = await running.send(head + few + head + few)  # each request anew
        await client.until(b"usage", 2)
        assert client.data.count(b" 200 ") == 2
        client.hang_up()

    _serve(tmp_path, scenario)


def test_half_a_head_behind_a_request_is_a_head(tmp_path: Path) -> None:
    """It has a head's time, not that of a connection between two requests."""

    async def scenario(running: Running) -> None:
        await running.router_up(says([50, 2]))
        body = json.dumps(COMPLETION)
        for first in (
            "GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n",
            f"{HEAD}content-length: {len(body)}\r\n\r\n{body}",
        ):
            client = await running.send(first + "GET /livez HTTP/1.1\r\nhost: lo")
            assert b" 408 " in await _rest(client)

    _serve(tmp_path, scenario, header_timeout_s=0.3)


def test_a_streaming_answer_has_no_deadline_for_reading(tmp_path: Path) -> None:
    async def scenario(running: Running) -> None:
        hub = await running.router_up()
        client = await running.post("/v1/completions", json.dumps(COMPLETION))
        await eventually(lambda: len(hub.of(Submit)) == 1)
        await asyncio.sleep(0.5)
        for delta in says([50, 2])(hub.of(Submit)[0]):
            hub.say(TokenDelta(requests=[delta]))
        await client.until(b'"usage"')
        client.hang_up()

    _serve(tmp_path, scenario, header_timeout_s=0.2, body_timeout_s=0.2)


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_large_is_answered_although_it_keeps_coming(
    tmp_path: Path, declared: bool
) -> None:
    """Ten megabytes: the answer must survive them, and the connection takes the next request."""
    num_bytes = 10_000_000

    async def scenario(running: Running) -> None:
        if declared:
            client = await running.send(f"{HEAD}content-length: {num_bytes}\r\n\r\n")
            client.writer.write(b"x" * num_bytes)
        else:
            client = await running.send(f"{HEAD}transfer-encoding: chunked\r\n\r\n")
            client.writer.write(b"%x\r\n" % num_bytes + b"x" * num_bytes + b"\r\n0\r\n\r\n")
        await client.writer.drain()
        await client.until(b"request_too_large")
        assert b" 413 " in client.data
        client.writer.write(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await client.until(b" 200 ")
        client.hang_up()

    _serve(tmp_path, scenario)


CHUNKED = f"{HEAD}transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ("GET /livez HTTP/1.1\r\nhost: localhost\r\nx: ", 408),
        (f"{HEAD}content-length: 4000000\r\n\r\n", 408),
        (f"{HEAD}connection: close\r\ncontent-length: 40000000\r\n\r\n", 413),
        (f"GET /livez HTTP/1.1\r\n{'x: y' + chr(13) + chr(10)}" * 300, 431),
        (CHUNKED + "1\r\n \r\n" * (FREE_CHUNKS + 64), 400),
        (f"{HEAD}content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n", 400),
    ],
)
@pytest.mark.parametrize("has_tls", [False, True])
def test_the_last_answer_reaches_a_client_that_still_sends(
    tmp_path: Path, sent: str, status: int, has_tls: bool
) -> None:
    """A socket that is closed under a client resets it: the answer may be lost unread."""
    files, context = _certificate(tmp_path) if has_tls else ({}, None)

    def ask(port: int) -> bytes:
        connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        if context is not None:
            connection = context.wrap_socket(connection, server_hostname="localhost")
        with connection:
            connection.sendall(sent.encode())
            data = connection.recv(1)
            for _ in range(20):
                connection.sendall(b"x" * 50_000)  # the second would fail after a reset
                time.sleep(0.002)
            while b"}" not in data:
                data += connection.recv(1000)
            if context is None:
                assert connection.recv(1000) == b""  # the server has closed its half
            return data

    async def scenario(running: Running) -> None:
        answer = await asyncio.to_thread(ask, running.port)
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        assert answer.count(b"HTTP/1.1") == 1

    _serve(tmp_path, scenario, **files, header_timeout_s=0.5, body_timeout_s=0.5, max_headers=99)


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
def test_a_body_that_has_no_reader_is_not_taken_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connection: str
) -> None:
    monkeypatch.setattr(HttpProtocol, "rest_timeout_s", 0.2)
    tables = _tables(monkeypatch)

    async def scenario(running: Running) -> None:
        head = f"{HEAD}connection: {connection}\r\ncontent-length: 10000000000\r\n\r\n"
        client = await running.send(head)
        await client.until(b" 413 ")
        assert tables[0].num_open == 1
        await eventually(lambda: tables[0].num_open == 0)
        client.hang_up()

    _serve(tmp_path, scenario)


def test_a_client_that_was_answered_for_good_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place is that of an idle connection, however much it sends."""
    monkeypatch.setattr(HttpProtocol, "rest_timeout_s", 300.0)

    async def scenario(running: Running) -> None:
        head = f"{HEAD}connection: close\r\ncontent-length: 10000000000\r\n\r\n"
        client = await running.send(head)
        await client.until(b" 413 ")
        assert (await running.get("/livez"))[0] == 200
        async with asyncio.timeout(60):
            with pytest.raises(ConnectionError):
                while True:
                    client.writer.write(b"x" * 1000)
                    await client.writer.drain()

    _serve(tmp_path, scenario, max_connections=1)


def test_a_client_that_asks_before_it_sends_is_refused_at_once(tmp_path: Path) -> None:
    async def scenario(running: Running) -> None:
        head = f"{HEAD}expect: 100-continue\r\n"
        client = await running.send(f"{head}content-length: 5000000\r\n\r\n")
        await client.until(b" 413 ")
        assert b" 100 " not in client.data
        client.hang_up()
        client = await running.send(f"{head}content-length: 2\r\n\r\n")
        await client.until(b" 100 ")
        client.writer.write(b"{}")
        await client.until(b" 400 ")
        client.hang_up()

    _serve(tmp_path, scenario)


def test_too_many_headers_and_compressed_bodies(tmp_path: Path) -> None:
    async def scenario(running: Running) -> None:
        head = "GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        for num_more, status in ((18, 200), (19, 431)):
            more = "".join(f"x-{n}: y\r\n" for n in range(num_more))
            client = await running.send(f"{head}{more}\r\n")
            given, answer = await client.rest()
            assert given == status
        wanted = "a request must have at most 20 headers, got 21"
        assert json.loads(answer)["error"]["message"] == wanted
        unfinished = await running.send(head + "x: y\r\n" * 20)
        assert await _error(unfinished, 431) == "too_many_headers"
        trailer = await running.send(
            f"{HEAD}transfer-encoding: chunked\r\n\r\n0\r\n{'x: y' + chr(13) + chr(10)}\r\n"
        )
        await trailer.until(b" 400 ")  # no JSON
        trailer.hang_up()
        trailer = await running.send(
            f"{HEAD}transfer-encoding: chunked\r\n\r\n0\r\n" + "x: y\r\n" * 30 + "\r\n"
        )
        assert await _error(trailer, 431) == "too_many_headers"
        compressed = (
            f"{HEAD}connection: close\r\ncontent-encoding: gzip\r\ncontent-length: 1\r\n\r\nx"
        )
        assert await _error(await running.send(compressed), 415) == "unsupported_encoding"
        long = f"{head}x: {'y' * 3000}\r\n\r\n"
        assert await _error(await running.send(long), 431) == "headers_too_large"
        endless = f"{head}x: {'y' * 3000}"
        assert await _error(await running.send(endless), 400) == "invalid_http"

    _serve(tmp_path, scenario, max_headers=20, max_header_bytes=2048)


def test_a_full_table_drops_who_has_been_idle_longest(tmp_path: Path) -> None:
    """And never who is being served."""

    async def scenario(running: Running) -> None:
        hub = await running.router_up()
        served = await running.post("/v1/completions", json.dumps(COMPLETION))
        await eventually(lambda: len(hub.of(Submit)) == 1)
        idle = [await running.send("") for _ in range(2)]
        for number in range(3):  # each needs a place
            assert (await running.get("/livez"))[0] == 200, number
        assert await _rest(idle[0]) == b""
        idle[1].hang_up()
        for delta in says([50, 2])(hub.of(Submit)[0]):
            hub.say(TokenDelta(requests=[delta]))
        await served.until(b'"usage"')
        served.hang_up()

    _serve(tmp_path, scenario, max_connections=3)


def test_a_table_full_of_work_refuses(tmp_path: Path) -> None:
    async def scenario(running: Running) -> None:
        hub = await running.router_up()
        served = [await running.post("/v1/completions", json.dumps(COMPLETION)) for _ in range(2)]
        await eventually(lambda: len(hub.of(Submit)) == 2)
        assert await _error(await running.send(""), 503) == "too_many_connections"
        served[0].hang_up()
        await running.until_status("/livez", 200)
        served[1].hang_up()

    _serve(tmp_path, scenario, max_connections=2)


CROWD = """
import resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
crowd = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(400)]
last = crowd[-1]
last.settimeout(60)
last.sendall(b"GET /livez HTTP/1.1\\r\\nhost: localhost\\r\\nconnection: close\\r\\n\\r\\n")
print(last.recv(100).split()[1].decode())
"""


def test_a_crowd_beyond_the_limit_of_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The table keeps away from the limit, however fast connections come: no accept fails."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Beside what other tests of this process have open.
    limit = 256 + max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    fake = SimpleNamespace(**vars(resource))
    fake.getrlimit, fake.setrlimit = lambda _: (limit, limit), lambda *_: None
    monkeypatch.setattr("lightserve.frontend.connections.resource", fake)

    async def scenario(running: Running) -> None:
        crowd = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CROWD, str(running.port)), stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(60):
            output, _ = await crowd.communicate()
        assert output.split() == [b"200"]

    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
        with caplog.at_level("ERROR"):
            _serve(tmp_path, scenario)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not caplog.records


def test_one_address_has_its_own_cap(tmp_path: Path) -> None:
    """Of its connections an idle one makes room; one that is served stays."""

    async def scenario(running: Running) -> None:
        hub = await running.router_up()
        first, second = await running.send(""), await running.send("GET")
        third = await running.post("/v1/completions", json.dumps(COMPLETION))
        await eventually(lambda: len(hub.of(Submit)) == 1)
        assert await _rest(first) == b""
        fourth = await running.post("/v1/completions", json.dumps(COMPLETION))
        await eventually(lambda: len(hub.of(Submit)) == 2)
        assert await _rest(second) == b""
        assert await _error(await running.send(""), 429) == "too_many_connections_per_ip"
        third.hang_up()
        await running.until_status("/livez", 200)
        fourth.hang_up()

    _serve(tmp_path, scenario, max_connections_per_ip=2)


KEYS = [ApiKey(name, digest_of(f"key of {name}".encode())) for name in ("alice", "bob")]


async def _ask(running: Running, name: str) -> Client:
    body = json.dumps(COMPLETION)
    return await running.send(
        f"{HEAD}authorization: Bearer key of {name}\r\nconnection: close\r\n"
        f"content-length: {len(body)}\r\n\r\n{body}"
    )


@pytest.mark.parametrize("flag", ["max_connections", "max_connections_per_ip"])
def test_a_key_leaves_connections_of_its_address_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    """Half of what they leave; what ends by the client's leaving or an answer counts no more."""
    tables = _tables(monkeypatch)

    async def scenario(running: Running) -> None:
        hub = await running.router_up()
        await running.control.orders.put(NewApiKeys(keys=KEYS))
        await eventually(running.control.orders.empty)
        alices = [await _ask(running, "alice") for _ in range(4)]
        await eventually(lambda: len(hub.of(Submit)) == 4)
        refused = await _ask(running, "alice")
        assert await _error(refused, 429) == "too_many_requests_of_key"
        wanted = "may have 4 requests in progress on this server process now, half of what other"
        wanted += f" keys leave of --{flag.replace('_', '-')} 8"
        assert wanted in refused.data.decode()
        bobs = [await _ask(running, "bob") for _ in range(2)]
        await eventually(lambda: len(hub.of(Submit)) == 6)
        assert await _error(await _ask(running, "bob"), 429) == "too_many_requests_of_key"
        assert (await running.get("/livez"))[0] == 200
        alices[0].hang_up()
        for delta in says([50, 2])(hub.of(Submit)[1]):
            hub.say(TokenDelta(requests=[delta]))
        assert (await alices[1].rest())[0] == 200
        for client in (*alices[2:], *bobs):
            client.hang_up()
        await eventually(lambda: not tables[0]._all.requests.count)
        alices = [await _ask(running, "alice") for _ in range(4)]
        await eventually(lambda: len(hub.of(Submit)) == 10)
        for client in alices:
            client.hang_up()

    _serve(tmp_path, scenario, api_key_file="keys", **{flag: 8})


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_idle_connections_of_who_has_most_make_room(tmp_path: Path, method: str) -> None:
    """By the key of their last request: behind a proxy all have one address."""

    async def scenario(running: Running) -> None:
        await running.control.orders.put(NewApiKeys(keys=KEYS))
        await eventually(running.control.orders.empty)

        async def idle(name: str) -> Client:
            client = await running.send(
                f"{method} /v1/models HTTP/1.1\r\nhost: localhost\r\n"
                f"authorization: Bearer key of {name}\r\n\r\n"
            )
            await client.until(b" 200 ")
            return client

        bob = await idle("bob")
        alices = [await idle("alice") for _ in range(5)]
        newcomers = [await running.send("") for _ in range(3)]
        for client in alices[:3]:
            await _rest(client)
        bob.writer.write(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await bob.until(b" 200 ", 2)
        for client in (bob, *alices[3:], *newcomers):
            client.hang_up()

    _serve(tmp_path, scenario, api_key_file="keys", max_connections_per_ip=6)


def test_https_with_a_key_that_changes(tmp_path: Path) -> None:
    files, context = _certificate(tmp_path)

    async def models(running: Running, key: str) -> int:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", running.port, ssl=context, server_hostname="localhost"
        )
        writer.write(
            b"GET /v1/models HTTP/1.1\r\nhost: example.org\r\nconnection: close\r\n"
            b"authorization: Bearer " + key.encode() + b"\r\n\r\n"
        )
        status = int((await reader.read(-1)).split()[1])
        writer.transport.abort()
        return status

    async def scenario(running: Running) -> None:
        assert await models(running, "first-key") == 401
        for key in ("first-key", "second-key"):
            keys = [ApiKey("alice", digest_of(key.encode()))]
            await running.control.orders.put(NewApiKeys(keys=keys))
            async with asyncio.timeout(60):
                while await models(running, key) != 200:
                    await asyncio.sleep(0.005)
        assert await models(running, "first-key") == 401
        plain = await running.send("GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"HTTP" not in await _rest(plain)
        # A handshake that does not come is not waited for either.
        silent = await running.send("")
        assert await _rest(silent) == b""

    _serve(
        tmp_path,
        scenario,
        api_key_file="keys",
        **files,
        header_timeout_s=0.5,
    )


@pytest.mark.parametrize(
    "limits", [{"max_connections": 20}, {"max_connections": 40, "max_connections_per_ip": 20}]
)
def test_tls_handshakes_that_do_not_come_stand_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int]
) -> None:
    """From the first moment, so there are no more of them than of other connections."""
    files, context = _certificate(tmp_path)
    tables = _tables(monkeypatch)

    async def scenario(running: Running) -> None:
        crowd = [await running.send("") for _ in range(60)]
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", running.port, ssl=context, server_hostname="localhost"
        )
        writer.write(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b" 200 " in await reader.readline()
        for client in crowd[:-19]:  # one made room for the request
            assert await _rest(client) == b""
        assert tables[0].num_open == 20
        for client in crowd[-19:]:
            client.hang_up()
        await eventually(lambda: tables[0].num_open == 1)
        writer.transport.abort()
        await eventually(lambda: tables[0].num_open == 0)

    _serve(tmp_path, scenario, **limits, **files, header_timeout_s=300.0)
