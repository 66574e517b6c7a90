"""Memory that is held for clients, bounded in sum: whose share is the largest makes room.

Any rule by age or size alone lets many new or small things of one client push out the one of
another. Here the client with the most in sum gives something up, and of what is its own that which
has not come on for longest. A client is an API key, or an address where there are no keys.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Generic, TypeVar

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
