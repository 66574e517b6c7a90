"""Images come from the hosts that are named, from checked addresses, within their limits."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError
from lightserve.frontend.errors import RequestFailed
from lightserve.frontend.image_hosts import FETCHES_AT_ONCE, FetchError, ImageHosts, is_public

FILE = b"a picture" * 100
NAME = "images.example"
LONG_S = 60.0
LIMITS: dict[str, Any] = {"most": 10**9, "timeout_s": LONG_S, "reserve": lambda _num_bytes: None}
Answers = dict[str, bytes]


def answer(body: bytes = FILE, *fields: str, status: str = "200 OK", length: int = -1) -> bytes:
    """Return an answer with its length unless `length` is 0."""
    lines = [f"HTTP/1.1 {status}", *fields]
    if length:
        lines.append(f"content-length: {len(body) if length < 0 else length}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def leading_to(url: str) -> bytes:
    return answer(b"", f"location: {url}", status="302 Found")


class Host:
    """A server of answers by path; one without an answer never ends."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.heads: list[str] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._answer(reader, writer)
                writer.close()
                await writer.wait_closed()
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        path = head.split()[1]
        if path in self.answers:
            writer.write(self.answers[path])
            await writer.drain()
            return
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:  # a byte now and then, without an end
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        """End all connections."""
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)
        await asyncio.sleep(0.01)  # transports end in turns of the loop that follow


@asynccontextmanager
async def host(answers: Answers, tls: ssl.SSLContext | None = None) -> AsyncIterator[Host]:
    made = Host(answers)
    server = await asyncio.start_server(made.take, "127.0.0.1", 0, ssl=tls)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        await made.close()


def found(monkeypatch: pytest.MonkeyPatch, **addresses: str) -> list[str]:
    """Have names resolve to addresses; the list gets each name that is looked up."""
    asked: list[str] = []
    plain = socket.getaddrinfo

    def look_up(name: str, port: int, **options: Any) -> Any:
        asked.append(name)
        return plain(addresses.get(name.partition(".")[0], name), port, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return asked


async def fetched(names: str, url: str, *, most: int = 10_000, timeout_s: float = LONG_S) -> bytes:
    hosts = ImageHosts(names)
    try:
        reserved: list[int] = []
        data = await hosts.fetch(url, most=most, timeout_s=timeout_s, reserve=reserved.append)
        assert reserved in ([len(data)], [most]), "what its host says, or as much as may come"
        return data
    finally:
        hosts.close()


def run(scenario: Callable[[Host], Awaitable[None]], **answers: bytes) -> None:
    async def whole() -> None:
        async with host({f"/{path}": data for path, data in answers.items()}) as made:
            await scenario(made)

    asyncio.run(whole())


async def refused(names: str, url: str, **limits: Any) -> str:
    with pytest.raises(FetchError) as caught:
        await fetched(names, url, **limits)
    return str(caught.value)


def test_a_file_of_a_named_host(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = found(monkeypatch, images="127.0.0.1")

    async def scenario(made: Host) -> None:
        own = f"127.0.0.1:{made.port}"
        assert await fetched(own, f"http://{own}/file") == FILE
        # A name's address may be one of these if it is named itself, with whatever port.
        names = f"{NAME}:{made.port},127.0.0.1"
        assert await fetched(names, f"HTTP://Images.Example:{made.port}/file#part") == FILE
        assert asked[-1:] == [NAME] and asked.count(NAME) == 1
        assert f"\r\nHost: {NAME}:{made.port}\r\n" in made.heads[-1]
        assert made.heads[-1].startswith("GET /file HTTP/1.1")
        assert "cookie" not in made.heads[-1].lower()

    run(scenario, file=answer())


def test_hosts_that_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = found(monkeypatch)

    async def scenario(made: Host) -> None:
        named = f"127.0.0.1:{made.port},{NAME}"
        for url in (
            "http://other.example/file",
            f"http://{NAME}:{made.port}/file",  # another port
            f"http://127.0.0.1:{made.port + 1}/file",
            "http://127.0.0.1/file",
            f"http://127.1:{made.port}/file",
            f"http://0x7f000001:{made.port}/file",
            f"http://{NAME}.:80/file",
            f"https://[::ffff:127.0.0.1]:{made.port}/file",
        ):
            assert "that --allow-image-hosts names" in await refused(named, url)
        assert "without a user" in await refused(named, f"http://me:key@127.0.0.1:{made.port}/file")
        for url in ("http://[::1/file", "http://" + "a" * 70_000):
            assert "must be a valid URL" in await refused(named, url)
        assert not made.heads and not asked

    run(scenario, file=answer())


def test_addresses_that_are_not_public(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, images="127.0.0.1", meta="169.254.169.254", none="no.such.name.invalid")

    async def scenario(made: Host) -> None:
        names = f"{NAME}:{made.port},meta.example,none.example"
        for url in (f"http://{NAME}:{made.port}/file", "http://meta.example/file"):
            assert await refused(names, url) == "has a host whose address is not public"
        assert "cannot be found" in await refused(names, "http://none.example/file")
        assert not made.heads

    run(scenario, file=answer())


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        ("64:ff9b::5db8:d70e", True),
        *(
            (address, False)
            for address in (
                *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
                *("0.0.0.0", "100.64.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
                *("::", "::1", "fe80::1", "fe80::1%1", "fc00::1", "ff02::1", "::ffff:10.0.0.1"),
                *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001:0:1::1"),
            )
        ),
        ("64:ff9b:1::a9fe:a9fe", False),
        ("::127.0.0.1", False),
        ("::ffff:0:127.0.0.1", False),
        ("fec0::1", False),
        ("168.63.129.16", False),
    ],
)
def test_public_addresses(address: str, expected: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is expected


def test_redirects(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, images="127.0.0.1")

    async def scenario(made: Host) -> None:
        own = f"127.0.0.1:{made.port}"
        names = f"{own},{NAME}:{made.port}"
        made.answers["/on"] = leading_to("/file")
        assert await fetched(own, f"http://{own}/on") == FILE
        made.answers["/out"] = leading_to("http://169.254.169.254/latest")
        assert "that --allow-image-hosts names" in await refused(names, f"http://{own}/out")
        made.answers["/name"] = leading_to(f"http://{NAME}:{made.port}/file")
        assert await fetched(names, f"http://{own}/name") == FILE  # its address is named
        made.answers["/user"] = leading_to(f"http://a:b@{own}/file")
        assert "without a user" in await refused(names, f"http://{own}/user")
        made.answers["/ftp"] = leading_to(f"ftp://{own}/file")
        assert "must lead to http or https" in await refused(names, f"http://{own}/ftp")
        made.answers["/round"] = leading_to("/round")
        num_before = len(made.heads)
        assert "more than 3 times" in await refused(names, f"http://{own}/round")
        assert len(made.heads) == num_before + 4
        made.answers["/lost"] = answer(b"", status="302 Found")
        assert "its host answers 302" in await refused(names, f"http://{own}/lost")

    run(scenario, file=answer())


def test_limits() -> None:
    async def scenario(made: Host) -> None:
        own = f"127.0.0.1:{made.port}"

        async def complaint(path: str, **limits: Any) -> str:
            return await refused(own, f"http://{own}/{path}", **limits)

        assert await fetched(own, f"http://{own}/file", most=len(FILE)) == FILE
        assert "--max-image-bytes, and has over 899" in await complaint("file", most=899)
        assert "--max-image-bytes" in await complaint("said", most=899)
        assert "--max-image-bytes" in await complaint("endless", most=9)
        assert "its host answers 404" in await complaint("gone")
        assert "must not be sent compressed" in await complaint("gzip")
        assert "its host does not answer" in await complaint("nonsense")
        assert "its host does not answer" in await complaint("torn")
        assert "did not arrive in time" in await complaint("endless", timeout_s=0.2)
        assert "did not arrive in time" in await complaint("file", timeout_s=0.0)

    run(
        scenario,
        file=answer(length=0),
        said=answer(b"", length=10**9),
        gone=answer(status="404 Not Found"),
        gzip=answer(FILE, "content-encoding: gzip"),
        nonsense=b"\x00" * 200_000,
        torn=answer(length=2000),
    )


def test_what_cannot_be_reserved_is_not_read() -> None:
    """A host that says how much comes is taken at its word; of others it may be all."""

    async def scenario(made: Host) -> None:
        reserved: list[int] = []

        def reserve(num_bytes: int) -> None:
            reserved.append(num_bytes)
            raise RequestFailed("too much", code="overloaded", status=429)

        hosts = ImageHosts(f"127.0.0.1:{made.port}")
        for path in ("said", "endless"):
            with pytest.raises(RequestFailed):
                await hosts.fetch(
                    f"http://127.0.0.1:{made.port}/{path}",
                    most=5000,
                    timeout_s=LONG_S,
                    reserve=reserve,
                )
        assert reserved == [4000, 5000]
        hosts.close()

    run(scenario, said=answer(b"", length=4000))


def test_tls_checks_the_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found(monkeypatch, images="127.0.0.1", other="127.0.0.1")
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    authority.issue_cert(NAME).configure_cert(context)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))

    async def scenario() -> None:
        async with host(
            {"/file": answer(), "/down": leading_to("http://127.0.0.1/")}, context
        ) as h:
            names = f"{NAME}:{h.port},other.example:{h.port},127.0.0.1"
            assert await fetched(names, f"https://{NAME}:{h.port}/file") == FILE
            other = await refused(names, f"https://other.example:{h.port}/file")
            assert "its host does not answer" in other
            assert "from https to http" in await refused(names, f"https://{NAME}:{h.port}/down")
            monkeypatch.delenv("SSL_CERT_FILE")
            assert "does not answer" in await refused(names, f"https://{NAME}:{h.port}/file")

    asyncio.run(scenario())


def test_a_host_that_never_ends_holds_its_places_alone() -> None:
    async def scenario(made: Host) -> None:
        own = f"127.0.0.1:{made.port}"
        hosts = ImageHosts(own)
        slow = [
            asyncio.create_task(hosts.fetch(f"http://{own}/endless", **LIMITS))
            for _ in range(FETCHES_AT_ONCE)
        ]
        while len(made.heads) < FETCHES_AT_ONCE:
            await asyncio.sleep(0.01)
        with pytest.raises(RequestFailed) as caught:
            await hosts.fetch(f"http://{own}/file", **LIMITS)
        assert caught.value.status == 429
        for task in slow:  # their clients have left
            task.cancel()
        await asyncio.wait(slow)
        assert await hosts.fetch(f"http://{own}/file", **LIMITS) == FILE
        hosts.close()

    run(scenario, file=answer())


@pytest.mark.parametrize(
    "names", ["http://a.example", "a.example/x", "a b", "me@a.example", "a:port", "*", "ä.example"]
)
def test_names_that_are_none(names: str) -> None:
    with pytest.raises(ConfigError, match="--allow-image-hosts must have hosts such as"):
        ServeConfig(allow_image_hosts=names)


def test_names() -> None:
    ServeConfig(allow_image_hosts="a.example, b.example:8080 ,10.0.0.5,[::1]:80")
    with pytest.raises(ConfigError, match="at least one name"):
        ServeConfig(allow_image_hosts=",")


def test_half_a_character_is_no_url() -> None:
    assert asyncio.run(refused(NAME, f"http://{NAME}/\ud800")) == "must be a valid URL"
