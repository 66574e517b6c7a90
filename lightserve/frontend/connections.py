"""All connections of a frontend: how many there may be, and which one makes room.

A connection is idle while no request is in progress on it: before the first, between two, and
while a head is still arriving. Holding many open is free for an attacker, so a full table never
keeps a newcomer (a health probe, perhaps) out while an idle one can go: the one idle for longest.

Bodies that have not come to their end are held in memory, and bounded in sum: see `Held`.
"""

from __future__ import annotations

import logging
import resource
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from lightserve.config import ServeConfig
from lightserve.errors import ConfigError

# ----------------------------------------------------------------------
# Memory that is held for clients, bounded in sum: whose share is the largest makes room.
#
# Any rule by age or size alone lets many new or small things of one client push out the one of
# another. Here the client with the most in sum gives something up, and of what is its own that
# which has not come on for longest. A client is an API key, or an address where there are no keys.


HolderT = TypeVar("HolderT")


class Held(Generic[HolderT]):
    """See the module."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        """Of all holders."""
        self._max_bytes = max_bytes
        self._owners: dict[HolderT, str] = {}
        self._shares: dict[str, OrderedDict[HolderT, int]] = {}
        """Of each client, the holder that has not come on for longest first."""
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
        while self.num_bytes > self._max_bytes:
            largest = max(self._sums, key=self._sums.__getitem__)
            victim = next(iter(self._shares[largest]))
            self.release(victim)
            gone.append(victim)
        return gone

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


ACCEPT_BURST = 16
"""Connections taken from the kernel in one turn of the loop. The table knows them a turn or two
later, and what it closes for them is closed in yet another."""
MIN_CONNECTIONS = 16
_RESERVED_FDS = 32
"""For what is still to be opened and is no client: links, queries, what libraries read."""


log = logging.getLogger(__name__)


class Evictable(Protocol):
    """A connection, as far as the table needs it."""

    def evict(self) -> None:
        """Close it: it is idle, and its place is needed."""

    def refuse_body(self) -> None:
        """End the request whose body is arriving: its memory is needed."""


@dataclass(frozen=True)
class ConnectionLimits:
    """What one connection is measured by; see the flags of the same names."""

    max_headers: int
    max_header_bytes: int
    header_timeout_s: float
    body_timeout_s: float
    min_body_bytes_per_s: int
    max_pending_body_bytes: int

    @classmethod
    def of(cls, config: ServeConfig) -> ConnectionLimits:
        """Return what the configuration says."""
        return cls(
            max_headers=config.max_headers,
            max_header_bytes=config.max_header_bytes,
            header_timeout_s=config.header_timeout_s,
            body_timeout_s=config.body_timeout_s,
            min_body_bytes_per_s=config.min_body_bytes_per_s,
            max_pending_body_bytes=config.max_pending_body_bytes,
        )


class ConnectionTable:
    """See the module."""

    def __init__(
        self,
        limits: ConnectionLimits,
        *,
        max_connections: int,
        max_connections_per_ip: int,
        rejects: Counter[str],
    ) -> None:
        self.limits = limits
        self.rejects = rejects
        self._max_connections = max_connections
        self._max_per_ip = max_connections_per_ip
        self._ips: dict[Evictable, str] = {}
        self._num_per_ip: Counter[str] = Counter()
        self._idle: OrderedDict[Evictable, None] = OrderedDict()
        self._bodies: Held[Evictable] = Held(limits.max_pending_body_bytes)
        """Those that have not come to their end."""

    @property
    def num_open(self) -> int:
        """Connections in the table."""
        return len(self._ips)

    def add(self, connection: Evictable, ip: str) -> str | None:
        """Take in a new connection; returns the reason if there is no place for it."""
        if self._num_per_ip[ip] >= self._max_per_ip:
            return self._count("too_many_connections_per_ip")
        if len(self._ips) >= self._max_connections:
            if not self._idle:
                return self._count("too_many_connections")
            oldest = next(iter(self._idle))
            self.remove(oldest)
            self._count("idle_connection_evicted")
            oldest.evict()
        self._ips[connection] = ip
        self._num_per_ip[ip] += 1
        self._idle[connection] = None
        return None

    def remove(self, connection: Evictable) -> None:
        """Forget a connection; no effect if it is not in the table."""
        ip = self._ips.pop(connection, None)
        if ip is None:
            return
        self._idle.pop(connection, None)
        self._num_per_ip[ip] -= 1
        if not self._num_per_ip[ip]:
            del self._num_per_ip[ip]

    def mark_busy(self, connection: Evictable) -> None:
        """Note that a request is in progress."""
        self._idle.pop(connection, None)

    def mark_idle(self, connection: Evictable) -> None:
        """Note that none is any more."""
        if connection in self._ips:
            self._idle[connection] = None

    @property
    def num_pending_body_bytes(self) -> int:
        """Of all bodies that have not come to their end."""
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
        if self._idle:
            oldest = next(iter(self._idle))
            self.remove(oldest)
            oldest.evict()

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
        ConnectionLimits.of(config),
        max_connections=min(config.max_connections, room),
        max_connections_per_ip=config.max_connections_per_ip,
        rejects=rejects,
    )
