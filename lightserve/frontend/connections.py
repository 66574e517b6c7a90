"""Everything that clients share in a frontend: connections, memory, turns, and who makes room.

A connection is idle while no request is in progress on it: before the first, between two, and
while a head is still arriving. Holding many open is free for an attacker, so a full table never
keeps a newcomer (a health probe, perhaps) out while an idle one can go: of the client with the most
idle ones, the one idle for longest.

Connections that are not idle stay, so a key has a share of them only (`ConnectionTable.request`).
An address alone says little of whose they are: behind a proxy all have the same.

Bodies that have not come to their end are held in memory, and bounded in sum: see `Held`.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from lightserve.config import ServeConfig
from lightserve.config.fields import flag_name
from lightserve.errors import ConfigError
from lightserve.frontend.errors import RequestFailed, draining, overloaded, queue_full

log = logging.getLogger(__name__)

# ----------------------------------------------------------------------
# Memory that is held for clients, bounded in sum: whose share is the largest makes room.
#
# Any rule by age or size alone lets many new or small things of one client push out the one of
# another. Here the client with the most in sum gives something up, and of what is its own that
# which has not come on for longest. A client is an API key, or an address where there are no keys.


HolderT = TypeVar("HolderT")
T = TypeVar("T")


class Held(Generic[HolderT]):
    """See the module."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        """Bytes of all holders."""
        self._max_bytes = max_bytes
        self._owners: dict[HolderT, str] = {}
        self._shares: dict[str, OrderedDict[HolderT, int]] = {}
        """Holders of each client; the one without progress for longest comes first."""
        self._sums: Counter[str] = Counter()

    def hold(self, holder: HolderT, owner: str, num_bytes: int) -> list[HolderT]:
        """Note that a holder has come on and now has so many bytes.

        Returns those that have to go, perhaps this one; they count no more.
        """
        self.release(holder)
        self._owners[holder] = owner
        self._shares.setdefault(owner, OrderedDict())[holder] = num_bytes
        self._sums[owner] += num_bytes
        self.num_bytes += num_bytes
        gone = []
        while self.num_bytes > self._max_bytes and (victim := self.first_to_go()) is not None:
            self.release(victim)
            gone.append(victim)
        return gone

    def first_to_go(self) -> HolderT | None:
        """Return whose turn it is to give something up; None: there are no holders."""
        if not self._sums:
            return None
        largest = max(self._sums, key=self._sums.__getitem__)
        return next(iter(self._shares[largest]))

    def __contains__(self, holder: HolderT) -> bool:
        return holder in self._owners

    def release(self, holder: HolderT) -> None:
        """Forget a holder; no effect on others than those that hold something."""
        owner = self._owners.pop(holder, None)
        if owner is None:
            return
        num_bytes = self._shares[owner].pop(holder)
        self.num_bytes -= num_bytes
        self._sums[owner] -= num_bytes
        if not self._shares[owner]:
            del self._shares[owner], self._sums[owner]


class Shares:
    """Counts items that hold something bounded, in number and in size, for each client.

    A client may have half of what the others leave, and one item whatever its size. A client
    without a name has no share of its own: only the sums bound it.
    """

    def __init__(self, *, max_size: int, max_items: int = sys.maxsize) -> None:
        """`max_size`, `max_items`: of all clients; an item that is alone may be larger."""
        self.count = self.size = 0
        self._max_size, self._max_items = max_size, max_items
        self._counts: Counter[str] = Counter()
        self.sizes: Counter[str] = Counter()
        """Size of each client's items."""

    def most_of(self, owner: str) -> int:
        """Return the size that all items of a client may have now."""
        return (self._max_size - (self.size - self.sizes[owner])) // 2

    def is_full(self, owner: str, size: int) -> bool:
        """Whether one more item of this size is too much."""
        if owner and (num_own := self._counts[owner]):
            most_items = (self._max_items - (self.count - num_own)) // 2
            if num_own >= most_items or self.sizes[owner] + size > self.most_of(owner):
                return True
        is_too_large = self.count > 0 and self.size + size > self._max_size
        return is_too_large or self.count >= self._max_items

    @contextmanager
    def counted(self, owner: str, size: int) -> Iterator[None]:
        """Count an item while the context is open."""
        self._add(owner, 1, size)
        try:
            yield
        finally:
            self._add(owner, -1, -size)

    def _add(self, owner: str, count: int, size: int) -> None:
        self.count += count
        self.size += size
        self._counts[owner] += count
        self.sizes[owner] += size
        if not self._counts[owner]:
            del self._counts[owner], self.sizes[owner]


class Turns:
    """Lets long answers be written in turns: in one turn of the event loop, one of them goes on."""

    def __init__(self) -> None:
        self._gate = asyncio.Lock()

    async def next(self) -> None:
        """Wait for the next turn; others have theirs before."""
        async with self._gate:
            await asyncio.sleep(0)


class Seats:
    """Work of which a frontend does little at once: one piece for each client, clients in turn."""

    def __init__(self, *, num_seats: int, max_waiting: int) -> None:
        """`max_waiting`: pieces of one client, the one that is done included."""
        self._seats = asyncio.Semaphore(num_seats)
        self._max_waiting = max_waiting
        self._turns: dict[str, asyncio.Lock] = {}
        self._counts: Counter[str] = Counter()

    @asynccontextmanager
    async def taken(self, owner: str) -> AsyncIterator[None]:
        """Wait for a seat. Raises RequestFailed (429): too much of the client's waits."""
        if self._counts[owner] >= self._max_waiting:
            raise overloaded()
        self._counts[owner] += 1
        try:
            # Of each client only one waits for a seat, and seats go to those who came first.
            async with self._turns.setdefault(owner, asyncio.Lock()), self._seats:
                yield
        finally:
            self._counts[owner] -= 1
            if not self._counts[owner]:
                del self._counts[owner], self._turns[owner]


class Crowded(Protocol):
    """An answer or a stream that holds memory for a client."""

    def crowd_out(self) -> None:
        """Give the memory back: the client holds more than any other."""


class InFlight:
    """Counts requests between admission and their last byte; knows whether to take more.

    Each keeps what its body said until then, so that the bodies are bounded in sum, see `Shares`:
    none is kept out by one client alone, however much it sends.
    """

    def __init__(self, *, max_bytes: int) -> None:
        """`max_bytes` of bodies; a request that is its client's only one may have a larger one."""
        self.is_draining = False
        self.bodies = Shares(max_size=max_bytes)
        self._max_bytes = max_bytes
        self._preparing: set[asyncio.Future[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def count(self) -> int:
        """Requests in flight."""
        return self.bodies.count

    @contextmanager
    def admitted(self, owner: str, num_bytes: int) -> Iterator[None]:
        """Count one request of a client, which keeps so many bytes.

        Raises:
            RequestFailed: draining, or too much is in flight.
        """
        if self.is_draining:
            raise draining()
        if self.bodies.is_full(owner, num_bytes):
            raise queue_full(
                f"the bodies of requests in progress may take {self._max_bytes} bytes"
                f" ({flag_name('max_held_body_bytes')}), and those of one client half of the bytes"
                f" that others leave: now {self.bodies.most_of(owner)};"
                f" {self.bodies.sizes[owner]} are taken and this one needs {num_bytes}; try again"
            )
        self._idle.clear()
        try:
            with self.bodies.counted(owner, num_bytes):
                yield
        finally:
            if not self.count:
                self._idle.set()

    def prepare(self, work: Awaitable[T]) -> asyncio.Future[T]:
        """Start what a request needs before it can be submitted; see `end_preparing`."""
        task = asyncio.ensure_future(work)
        self._preparing.add(task)
        task.add_done_callback(self._preparing.discard)
        return task

    def end_preparing(self) -> None:
        """Cancel what requests need before they can be submitted: there is no time for it."""
        for task in self._preparing:
            task.cancel()

    async def wait_idle(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()


ACCEPT_BURST = 16
"""Connections taken from the kernel in one turn of the loop. The table knows them a turn or two
later, and what it closes for them is closed in yet another."""
MIN_CONNECTIONS = 16
_RESERVED_FDS = 32
"""For what is still to be opened and is no client: links, queries, what libraries read."""


class Evictable(Protocol):
    """A connection, as far as the table needs it."""

    def evict(self) -> None:
        """Close it: it is idle, and its place is needed."""

    def refuse_body(self) -> None:
        """End the request whose body is arriving: its memory is needed."""


class _Places:
    """Places for connections: all of a frontend, or those that one address may have of them."""

    def __init__(self, most: int, flag: str, why_full: str) -> None:
        """`flag` is that of `most`, `why_full` the code of a refusal where there are so many."""
        self.most = most
        self.flag = flag
        self.why_full = why_full
        self.num_open = 0
        self.idle: Held[Evictable] = Held(most)
        """Each counts one, for its client."""
        self.requests = Shares(max_size=most)
        """Requests in progress; each counts one, for its key."""

    def check_share(self, key: str) -> None:
        """Raise RequestFailed (429) if a key has half of what others leave: one it may have."""
        if not self.requests.is_full(key, 1):
            return
        share = max(1, self.requests.most_of(key))
        raise RequestFailed(
            f"this API key may have {share} requests in progress on this server process now, half"
            f" of what other keys leave of {self.flag} {self.most}; try again",
            code="too_many_requests_of_key",
            status=429,
        )


class ConnectionTable:
    """See the module."""

    def __init__(self, limits: ServeConfig, *, max_connections: int, rejects: Counter[str]) -> None:
        self.limits = limits
        self.rejects = rejects
        self._all = _Places(max_connections, "--max-connections", "too_many_connections")
        self._max_per_ip = limits.max_connections_per_ip
        self._per_ip: dict[str, _Places] = {}
        """Places of each address that has a connection."""
        self._ips: dict[Evictable, str] = {}
        self._bodies: Held[Evictable] = Held(limits.max_pending_body_bytes)
        """Bodies that have not come to their end."""

    @property
    def num_open(self) -> int:
        """Connections in the table."""
        return self._all.num_open

    def add(self, connection: Evictable, ip: str) -> str | None:
        """Take in a new connection; returns the reason if there is no place for it."""
        for places in (self._of_ip(ip), self._all):
            if places.num_open >= places.most and not self._evict_from(places):
                return self._count(places.why_full)
        self._ips[connection] = ip
        for places in (self._per_ip.setdefault(ip, self._of_ip(ip)), self._all):
            places.num_open += 1
            places.idle.hold(connection, ip, 1)
        return None

    def _of_ip(self, ip: str) -> _Places:
        flag, why_full = "--max-connections-per-ip", "too_many_connections_per_ip"
        return self._per_ip.get(ip) or _Places(self._max_per_ip, flag, why_full)

    def _evict_from(self, places: _Places) -> bool:
        """Close an idle connection; returns whether there was one."""
        if (oldest := places.idle.first_to_go()) is None:
            return False
        self.remove(oldest)
        self._count("idle_connection_evicted")
        oldest.evict()
        return True

    def remove(self, connection: Evictable) -> None:
        """Forget a connection; no effect if it is not in the table."""
        self.mark_busy(connection)
        if (ip := self._ips.pop(connection, None)) is None:
            return
        for places in (self._per_ip[ip], self._all):
            places.num_open -= 1
        if not self._per_ip[ip].num_open:
            del self._per_ip[ip]

    def mark_busy(self, connection: Evictable) -> None:
        """Note that a request is in progress."""
        if (ip := self._ips.get(connection)) is not None:
            for places in (self._per_ip[ip], self._all):
                places.idle.release(connection)

    def mark_idle(self, connection: Evictable, owner: str) -> None:
        """Note that none is any more; `owner` is the client of the last one, if there was one."""
        if (ip := self._ips.get(connection)) is not None and connection not in self._all.idle:
            for places in (self._per_ip[ip], self._all):
                places.idle.hold(connection, owner or ip, 1)

    @contextmanager
    def request(self, key: str, ip: str) -> Iterator[None]:
        """Count a request of a key, from its head to the end of its answer.

        Raises:
            RequestFailed: the key has half of what others leave of the connections of all
                addresses, or of this one (429).
        """
        taken = [places for places in (self._per_ip.get(ip), self._all) if places is not None]
        for places in taken:
            places.check_share(key)
        with ExitStack() as counted:
            for places in taken:
                counted.enter_context(places.requests.counted(key, 1))
            yield

    @property
    def num_pending_body_bytes(self) -> int:
        """Bytes of all bodies that have not come to their end."""
        return self._bodies.num_bytes

    def hold_body(self, connection: Evictable, owner: str, num_bytes: int) -> None:
        """Note that an unfinished body now has so many bytes; another may have to go."""
        for crowded_out in self._bodies.hold(connection, owner, num_bytes):
            self._count("pending_body_evicted")
            crowded_out.refuse_body()

    def release_body(self, connection: Evictable) -> None:
        """Note that a body is complete, or no longer held; no effect if none was."""
        self._bodies.release(connection)

    def on_no_files(self) -> None:
        """Count a connection that the kernel has no file for; make room, and say so once."""
        if not self.rejects["no_open_files"]:
            log.error("no more files can be opened: see ulimit -n; connections have to wait")
        self._count("no_open_files")
        self._evict_from(self._all)

    def _count(self, reason: str) -> str:
        self.rejects[reason] += 1
        return reason


def connection_table(config: ServeConfig, rejects: Counter[str]) -> ConnectionTable:
    """Return the table of a frontend, which may open as many files as that takes.

    The process's limit of open files is raised as far as it goes; where that is not far enough,
    fewer connections are kept, as the kernel would refuse the rest without a word.

    Raises:
        ConfigError: that limit leaves too few connections.
    """
    reserved = sum(1 for _ in Path("/proc/self/fd").iterdir()) + 4 * ACCEPT_BURST + _RESERVED_FDS
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.max_connections + reserved
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    soft = max(soft, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    room = soft - reserved
    if room < MIN_CONNECTIONS:
        raise ConfigError(
            f"the limit of open files (ulimit -n) must be at least {reserved + MIN_CONNECTIONS},"
            f" got {soft}"
        )
    if room < config.max_connections:
        log.info("at most %d connections, as the limit of open files is %d", room, soft)
    return ConnectionTable(
        config, max_connections=min(config.max_connections, room), rejects=rejects
    )
