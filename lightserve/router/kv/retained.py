"""Prefixes that requests asked to be kept longer than others."""

from __future__ import annotations

import heapq
import itertools

from lightserve.messages.common import Int32Array
from lightserve.router.kv.prefix_node import PrefixKey, PrefixNode, path_of
from lightserve.router.kv.prefix_tree import PrefixTree


class RetainedPrefixes:
    """Prefixes that requests asked to be kept longer: a preference, never a pin.

    They are evicted after what no request waits for, but before what one does, and like all else
    when memory is needed. Of each key only so many tokens are preferred: beyond them, those that
    were asked for longest ago are again like all others. Times are the router's.
    """

    def __init__(self, tree: PrefixTree, *, max_tokens: int) -> None:
        """`max_tokens` of each key."""
        self._tree = tree
        self._max_tokens = max_tokens
        self._until_s: dict[PrefixKey, dict[PrefixNode, float]] = {}
        """Ends of each key's prefixes and how long they are kept, the newest last."""
        self._num_tokens: dict[PrefixKey, int] = {}
        self._num_prefixes = 0
        self._heap: list[tuple[float, int, PrefixKey, PrefixNode]] = []
        """Which expire next; those that are kept for another time by now are passed over."""
        self._ticket = itertools.count()

    def num_tokens(self, key: PrefixKey) -> int:
        """Return how many tokens of a key are preferred, shared ones counted once."""
        return self._num_tokens.get(key, 0)

    def keep(self, key: PrefixKey, prefix: Int32Array, *, until_s: float) -> None:
        """Prefer a prefix, or as much of it as a key may have, until then.

        No prefix begins another: both are one, the longer, until the later time. So what clients
        ask for leaves few boundaries on a path of the tree.
        """
        end, num_more = self._tree.retain(key, prefix[: self._max_tokens])
        self._num_tokens[key] = self.num_tokens(key) + num_more
        prefixes = self._until_s.setdefault(key, {})
        is_longest = end in prefixes or end.num_retained == 1  # then it may have many children
        longest = end if is_longest else _longest_through(end)
        covered = [node for node in path_of(longest) if node in prefixes]
        until_s = max(until_s, *(prefixes[node] for node in covered), 0.0)
        if longest in prefixes:  # counted already, to its end or beyond this one's
            self._tree.let_go(end)
        else:
            self._num_prefixes += 1
        prefixes.pop(longest, None)
        prefixes[longest] = until_s
        heapq.heappush(self._heap, (until_s, next(self._ticket), key, longest))
        for node in covered:
            if node is not longest:
                self._drop(key, node)
        while self._num_tokens[key] > self._max_tokens:
            self._drop(key, next(iter(prefixes)))
        if len(self._heap) > 2 * self._num_prefixes + 64:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def expire(self, now_s: float) -> None:
        """Treat those like all others whose time is over."""
        while self._heap and self._heap[0][0] <= now_s:
            entry = heapq.heappop(self._heap)
            if self._is_current(entry):
                self._drop(entry[2], entry[3])

    def _is_current(self, entry: tuple[float, int, PrefixKey, PrefixNode]) -> bool:
        until_s, _, key, node = entry
        return self._until_s.get(key, {}).get(node) == until_s

    def _drop(self, key: PrefixKey, node: PrefixNode) -> None:
        del self._until_s[key][node]
        self._num_prefixes -= 1
        self._num_tokens[key] -= self._tree.let_go(node)
        if not self._until_s[key]:
            del self._until_s[key], self._num_tokens[key]


def _longest_through(node: PrefixNode) -> PrefixNode:
    """Return where a retained prefix ends that begins as the one that ends here; perhaps here."""
    at = node
    while below := next((child for child in at.children.values() if child.num_retained), None):
        at = below
    return at
