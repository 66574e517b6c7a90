"""Images by http and https, from the hosts that --allow-image-hosts names.

A URL is a stranger's word, and this machine may reach servers that the stranger may not. So a host
has to be named, its addresses are looked up once and checked, and the connection goes to a checked
address: a second look-up could have another answer (DNS rebinding). TLS still checks the name.
Each redirect is checked like the first URL. Time and size are bounded while the answer comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import socket
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address

import httpx

from lightserve.config.fields import parse_hosts
from lightserve.config.options import split_names
from lightserve.frontend.json_body import Backlog
from lightserve.turn_threads import TurnThreads

FETCHES_AT_ONCE = 32
"""Fetches of a frontend; a client may have half of those that others leave."""
MAX_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_CONNECT_S = 3.0
"""For each of a host's addresses."""
_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        # Addresses of IPv4 in old forms, a site's own NAT64, site-local ones, two ranges for
        # documents and segments, and the host of Azure's machines.
        (
            *("::/96", "::ffff:0:0:0/96", "64:ff9b:1::/48", "fec0::/10", "3fff::/20", "5f00::/16"),
            "168.63.129.16/32",
        ),
    )
)
"""Beside those that Python knows."""
_HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "lightserve"}


class FetchError(Exception):
    """An image cannot be fetched; the text is for the client and begins with a verb."""


class ImageHosts:
    """Fetches images from named hosts."""

    def __init__(self, names: str) -> None:
        """`names`: as --allow-image-hosts has them."""
        self._hosts = parse_hosts(split_names(names), "--allow-image-hosts")
        self._named: set[IPv4Address | IPv6Address] = set()
        """Addresses that are hosts themselves: these alone need not be public."""
        for host, _ in self._hosts:
            with contextlib.suppress(ValueError):  # a name
                self._named.add(ipaddress.ip_address(host))
        self._tls = httpx.create_ssl_context()
        self._backlog = Backlog(max_items=FETCHES_AT_ONCE)
        self._threads = TurnThreads(FETCHES_AT_ONCE // 8, "hosts")

    def close(self) -> None:
        """Drop look-ups that wait."""
        self._threads.close()

    async def fetch(
        self, url: str, *, most: int, timeout_s: float, reserve: Callable[[int], None]
    ) -> bytes:
        """Return the file behind a URL, of at most `most` bytes.

        `reserve` is told how many may come before the first of them does.

        Raises:
            FetchError: it is not allowed, or not to be had within its limits.
            RequestFailed: too many are being fetched; what `reserve` raises is passed on.
        """
        with self._backlog.admitted(0):
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._follow(httpx.URL(url), most, reserve)
            except TimeoutError:
                raise FetchError("did not arrive in time") from None
            except (httpx.InvalidURL, UnicodeError):
                raise FetchError("must be a valid URL") from None
            except (httpx.HTTPError, httpx.StreamError):
                raise FetchError("could not be fetched: its host does not answer") from None

    async def _follow(self, url: httpx.URL, most: int, reserve: Callable[[int], None]) -> bytes:
        for _ in range(1 + MAX_REDIRECTS):
            answer = await self._ask(url, await self._addresses(url), most, reserve)
            if isinstance(answer, bytes):
                return answer
            if url.scheme == "https" and answer.scheme == "http":
                raise FetchError("leads from https to http")
            url = answer
        raise FetchError(f"leads on more than {MAX_REDIRECTS} times")

    async def _addresses(self, url: httpx.URL) -> list[str]:
        """Return the addresses of a URL's host, all of them checked."""
        host = url.raw_host.decode("ascii").lower()
        port = url.port or _PORTS.get(url.scheme, 0)
        if url.scheme not in _PORTS or url.userinfo:
            raise FetchError("must lead to http or https URLs without a user")
        if not self._hosts & {(host, port), (host, None if url.port is None else port)}:
            raise FetchError("must have a host that --allow-image-hosts names")
        look_up = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        try:
            found = await self._threads.run(look_up)
        except (OSError, UnicodeError):
            raise FetchError("has a host that cannot be found") from None
        addresses = [str(sockaddr[0]) for *_, sockaddr in found]
        for address in map(ipaddress.ip_address, addresses):
            if not is_public(address) and address not in self._named:
                raise FetchError("has a host whose address is not public")
        return addresses

    async def _ask(
        self, url: httpx.URL, addresses: list[str], most: int, reserve: Callable[[int], None]
    ) -> bytes | httpx.URL:
        """Return the file, or where it is said to be."""
        host = url.raw_host.decode("ascii")
        headers = {**_HEADERS, "Host": url.netloc.decode("ascii")}
        for address in addresses:
            transport = httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False)
            timeout = httpx.Timeout(None, connect=_CONNECT_S)
            request = httpx.Request(
                "GET",
                url.copy_with(host=address),
                headers=headers,
                extensions={"sni_hostname": host, "timeout": timeout.as_dict()},
            )
            async with transport:
                try:
                    response = await transport.handle_async_request(request)
                except (httpx.ConnectTimeout, httpx.ConnectError):
                    if address == addresses[-1]:
                        raise
                    continue
                try:
                    return await _read(url, response, most, reserve)
                finally:
                    await response.aclose()
        raise FetchError("has a host that cannot be found")


async def _read(
    url: httpx.URL, response: httpx.Response, most: int, reserve: Callable[[int], None]
) -> bytes | httpx.URL:
    if response.status_code in _REDIRECTS and (to := response.headers.get("location")):
        return url.join(to)
    if response.status_code != 200:
        raise FetchError(f"could not be fetched: its host answers {response.status_code}")
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise FetchError("must not be sent compressed by its host")
    too_large = FetchError(f"must leave all images at most --max-image-bytes, and has over {most}")
    length = response.headers.get("content-length", "")
    num_bytes = int(length[:20]) if length.isdigit() else most
    if num_bytes > most:
        raise too_large
    reserve(num_bytes)
    data = bytearray()
    async for piece in response.aiter_raw():
        data += piece
        if len(data) > num_bytes:
            raise too_large
    return bytes(data)


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return whether an address is that of a host on the internet, and of no neighbour."""
    if any(address in network for network in _NOT_PUBLIC):
        return False
    if isinstance(address, IPv6Address):
        if address.sixtofour or address.teredo:
            return False
        if address in _NAT64:  # stands for an address of IPv4 where there are none of these
            return is_public(IPv4Address(int(address) & 0xFFFF_FFFF))
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
    return address.is_global and not address.is_multicast
