"""KV that several requests of a forecast read together: it counts once (mechanisms C7).

Tokens in the prefix tree stay in memory until the last of their users leaves. So a forecast
counts them for one of those who hold them, the one that stays longest, which may be another in
every sampled future. A newcomer brings only what nobody else holds, and what it will be the last
to hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from lightserve.router.kv.prefix_node import PrefixNode, path_of
from lightserve.router.request import Request


class Held(NamedTuple):
    """Tokens of a node of the prefix tree, and who holds them."""

    node: PrefixNode
    num_tokens: int
    """Those of nodes above it that are held by the same may be among them."""
    holders: list[int]
    """Indices of requests, in the order in which they came to count."""


class SharedPrefixes:
    """Who holds which part of the prefix tree, among the requests that count in a round.

    Reads leases and, of requests that do not run yet, what `KVStore.look_up` noted. A newcomer
    that is to hold only a part of a node holds none of it here, until it runs and the tree has
    split the node: another newcomer with the same part is then counted in full. That is never too
    little, and is put right by the next round.
    """

    def __init__(self, counted: Iterable[Request]) -> None:
        self._counted = list(counted)
        self._num_begun = len(self._counted)
        self._has_newcomers = bool([r for r in self._counted if r.hit is not None])
        """Whether some that count found a prefix, and are none of its users yet."""
        self._holders: dict[PrefixNode, list[int]] | None = None
        self._several: dict[PrefixNode, list[int]] | None = None

    def add(self, request: Request) -> None:
        """Count one more request, which does not run yet."""
        if self._holders is not None:
            _note(self._holders, request, len(self._counted))
        self._counted.append(request)
        self._has_newcomers |= request.hit is not None

    def held_by_several(self) -> list[Held]:
        """Return what two or more of those who count hold."""
        holders = self._find_several()
        return [Held(node, len(node.tokens), who) for node, who in holders.items() if len(who) > 1]

    @property
    def num_counted_twice(self) -> int:
        """Tokens by which the sum over all requests exceeds what they hold together."""
        return sum((len(held.holders) - 1) * held.num_tokens for held in self.held_by_several())

    def held_of(self, request: Request) -> list[Held]:
        """Return what of a waiting request's prefix is held by requests that count.

        Who holds a node holds those above it: where as many hold both, they are the same.
        """
        if not (prefix := _prefix_of(request)):
            return []
        # As a rule nobody or several read what a newcomer found, and those are known already.
        is_known = len(self._counted) == self._num_begun and all(
            node.num_users != 1 for node, _ in prefix
        )
        holders = self._find_several() if is_known else self._find()
        held: list[Held] = []
        for node, count in prefix:
            if (who := holders.get(node)) is None:
                continue
            if held and len(held[-1].holders) == len(who):
                held[-1] = held[-1]._replace(num_tokens=held[-1].num_tokens + count)
            else:
                held.append(Held(node, count, who))
        return held

    def num_held_of(self, request: Request) -> int:
        """Return how many tokens that is."""
        return sum(held.num_tokens for held in self.held_of(request))

    def _find_several(self) -> dict[PrefixNode, list[int]]:
        """Return who holds what is read by two requests at least, whether they count or not.

        A node has all the users of those below it: so the search goes up from the first that has
        several. Newcomers are no users yet.
        """
        if self._has_newcomers:
            return self._find()
        if self._several is None:
            several: defaultdict[PrefixNode, list[int]] = defaultdict(list)
            for index, lease in enumerate([request.lease for request in self._counted]):
                if lease is None:
                    continue
                node = lease.node
                while (parent := node.parent) is not None:
                    if node.num_users > 1:
                        several[node].append(index)
                    node = parent
            self._several = dict(several)
        return self._several

    def _find(self) -> dict[PrefixNode, list[int]]:
        if self._holders is None:
            self._holders = {}
            for index, request in enumerate(self._counted):
                if request.hit is not None or request.lease is None:
                    _note(self._holders, request, index)
                    continue
                node = request.lease.node  # as `_note` does: most are such
                while (parent := node.parent) is not None:
                    if (known := self._holders.get(node)) is None:
                        self._holders[node] = [index]
                    else:
                        known.append(index)
                    node = parent
        return self._holders


def _note(holders: dict[PrefixNode, list[int]], request: Request, index: int) -> None:
    """Add a request to the holders of its nodes."""
    if request.hit is not None:
        for node, num_tokens in _prefix_of(request):
            if num_tokens == len(node.tokens):
                holders.setdefault(node, []).append(index)
    elif request.lease is not None:
        node = request.lease.node
        while (parent := node.parent) is not None:
            holders.setdefault(node, []).append(index)
            node = parent


def _prefix_of(request: Request) -> list[tuple[PrefixNode, int]]:
    """Return the nodes that a waiting request holds or would hold, and how much of each."""
    hold = request.hit or request.lease
    if hold is None or hold.node is None or hold.num_tokens == 0:
        return []
    nodes = [node for node in path_of(hold.node) if node.parent is not None]
    counts = [len(node.tokens) for node in nodes]
    counts[0] -= sum(counts) - hold.num_tokens  # of the last one perhaps a part
    return list(zip(nodes, counts, strict=True))
