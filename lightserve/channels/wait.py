"""Wait for several channels and file descriptors at once, for loops without asyncio.

`select` rather than `zmq_poll`: its time-out has microseconds, and a step that leaves one
millisecond late is a millisecond on every token.
"""

from __future__ import annotations

import asyncio
import select
import time
from collections.abc import Sequence
from typing import Protocol, TypeVar


class Waitable(Protocol):
    """A channel end whose arrival of messages can be waited for."""

    def fileno(self) -> int:
        """Descriptor that becomes readable, at the latest, when a message arrives."""

    def is_readable(self) -> bool:
        """Whether `receive` has something to look at now."""


MAX_TURN_S = 0.01
"""How long an asyncio task may take messages in, one after the other, before others have a turn."""


class Turn:
    """A task's turn of the event loop: it goes on until the task waits, or its time is up."""

    def __init__(self) -> None:
        self._end_s = 0.0

    async def share(self) -> None:
        """Let other tasks go on if the time is up."""
        if time.monotonic() >= self._end_s:
            await asyncio.sleep(0)
            self.begin()

    def begin(self) -> None:
        """Begin anew: others had their turn."""
        self._end_s = time.monotonic() + MAX_TURN_S


_LONGEST_WAIT_S = 86400.0
"""Far below what select's time value can hold; longer waits are made of several."""

SourceT = TypeVar("SourceT", bound=Waitable | int)


def wait_readable(channels: Sequence[SourceT], timeout_s: float | None) -> list[SourceT]:
    """Return those of `channels` that can be read, [] after `timeout_s` (None waits for ever).

    A source is a link, a hub, or a raw file descriptor below 1024. What is returned is readable,
    but a channel's frame may still be refused: `receive(0.0)` then gives None.
    """
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        # A socket's descriptor is edge-triggered, so the sockets are asked before every wait.
        ready = [source for source in channels if _has_message(source)]
        wait_s = _LONGEST_WAIT_S if deadline_s is None else deadline_s - time.monotonic()
        wait_s = 0.0 if ready else min(max(0.0, wait_s), _LONGEST_WAIT_S)
        readable, _, _ = select.select(channels, [], [], wait_s)
        ready.extend(source for source in readable if isinstance(source, int))
        if ready or wait_s == 0.0:
            return ready


def _has_message(source: Waitable | int) -> bool:
    return not isinstance(source, int) and source.is_readable()
