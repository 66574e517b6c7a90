"""What of a step fits into memory and rows, and what must happen before it is sent."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from lightserve.router.kv.cache import KVStore
from lightserve.router.kv.prefix_node import PrefixNode
from lightserve.router.reasons import Reason
from lightserve.router.request import RUNNING, Request
from lightserve.router.request_table import Decodes
from lightserve.router.shares import Allotment, Loading, Share, each_allotment


class Take(NamedTuple):
    """The last tokens that a paused request holds, to be taken from it."""

    request: Request
    num_tokens: int


@dataclass(frozen=True)
class Fit:
    """What of a step fits, and what must happen before."""

    parts: tuple[Decodes | Allotment, ...]
    """What advances."""
    pauses: tuple[Request, ...] = ()
    """Running requests that give up their rows."""
    takes: tuple[Take, ...] = ()
    drops: tuple[Request, ...] = ()
    """Requests that lose all their KV."""
    refused: Mapping[Request, Reason] = field(default_factory=dict)
    """Whom the policy chose in vain."""
    stopped_for: Mapping[Request, Reason] = field(default_factory=dict)
    """Of those who run and stop: whether memory or their row is needed."""
    loads: tuple[Loading, ...] = ()
    """What comes back from the host beside the step, for requests that stay paused."""
    forecast_peak: int | None = None
    """See `AdmissionRound`."""

    def __bool__(self) -> bool:
        """Whether any request advances."""
        return bool(self.parts)

    @property
    def allotments(self) -> list[Allotment]:
        """`parts`, one by one: for tests."""
        return list(each_allotment(self.parts))

    @property
    def newcomers(self) -> list[Request]:
        """Requests among `parts` that have no row yet."""
        chunks = [part for part in self.parts if isinstance(part, Allotment)]
        return [request for request, _ in chunks if request.state is not RUNNING]

    @property
    def num_copied(self) -> int:
        """Tokens that the step copies at most, to the host and back."""
        num_loaded = sum(request.num_loaded_by_start for request in self.newcomers)
        return num_loaded + sum(count for _, count in self.takes)

    @property
    def stops(self) -> tuple[Request, ...]:
        """Those who run now, and stop: this must not be decided while their steps are in flight."""
        return tuple(dict.fromkeys([*self.pauses, *filter(runs, self.drops)]))


class Tails:
    """How much could be taken from whom, remembered while nothing but a plan of it changes."""

    def __init__(self, kv: KVStore) -> None:
        self._kv = kv
        self._pinned: Container[PrefixNode] = ()
        self._found: dict[Request, int] = {}

    def takeable(self, request: Request, pinned: Container[PrefixNode]) -> int:
        """See `KVStore.takeable`; another `pinned` is another object."""
        if pinned is not self._pinned:
            self._pinned, self._found = pinned, {}
        if (found := self._found.get(request)) is None:
            found = self._found[request] = self._kv.takeable(request, pinned)
        return found


def runs(request: Request) -> bool:
    """Whether a request has a row, and has not ended."""
    return request.state is RUNNING


def of_running(part: Share) -> bool:
    """Whether that is so of the requests of a part."""
    return isinstance(part, Decodes) or part.request.state is RUNNING
