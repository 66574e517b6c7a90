"""Prefixes on the host: KV that left the pool, kept where copying it back is cheaper.

    pool   root ── [12 7 7 3] ── [9 1]
                       ┊           ┊
    host           [12 7 7 3] ── [9 1] ── [4 4 8]     a copy that is spare, and one that is needed

A node of the prefix tree that is evicted is saved if all up to its end is predicted to be copied
there and back sooner than computed, and if it may be wanted: requests wait for it (Echo's counts),
clients asked for it to be kept, or what its key left on the host has come back often enough. Keys
do not see each other's nodes here either. KV is written once, so that the copy of a node that is
back in the pool stays, while there is room, and evicting the node again costs nothing.

Copies are given up from the ends of prefixes: first spare ones, then those that were used longest
ago, then those that are waited for or to be kept. Requests go before all of them (`Checkpoints`).
What a plan saves or brings back, it does not give up.

Sources: Echo for the requests that wait; the second tier of memory as in CachedAttention (Gao and
others, USENIX ATC 2024).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable

import numpy as np

from lightserve.messages.common import NO_INT32, Int32Array
from lightserve.router.kv.host import Checkpoints
from lightserve.router.kv.prefix_node import PrefixNode, path_of

LoadIsCheaper = Callable[[int, int, int], bool]
"""Whether computing n tokens from a position on is predicted to cost more than loading m slots."""

LONG_ODDS = 16
"""A key of whose copies less than one in so many came back saves one in so many nodes; that share
is an exponential mean of as many events."""


class HostTier:
    """Copies on the host of what the prefix tree evicts."""

    def __init__(
        self,
        memory: Checkpoints,
        load_is_cheaper: LoadIsCheaper,
        tidy: Callable[[PrefixNode], None],
    ) -> None:
        """`memory` is shared with requests; `tidy` drops a node that stands for nothing."""
        self._memory = memory
        self._load_is_cheaper = load_is_cheaper
        self._tidy = tidy
        self._heap: list[tuple[tuple[int, int], int, int, PrefixNode]] = []
        self._ticket = itertools.count()
        self._most_entries = 64
        """Size of the heap at which entries that are out of date are dropped."""
        self._pays_from = math.inf
        """Tokens from which on copies pay, as the plan that is being made has found."""
        self._num_doubtful = 0
        """Nodes of keys whose copies hardly ever come back, so far."""
        self._read: list[PrefixNode] = []
        """Ends of what the plan that is being made brings back, and what it saves."""
        self.num_used = 0
        """Host slots that hold copies."""
        self.num_tokens = dict.fromkeys(("saved", "loaded", "given_up"), 0)
        """Tokens so far that were saved, brought back, or given up for others; the tier that
        follows, when workers begin anew, goes on with them."""
        memory.make_room = self.make_room

    @property
    def num_slots(self) -> int:
        """Host slots that prefixes may have now: all but those of requests."""
        return self._memory.host.num_slots - self._memory.num_used

    # ---------------------------------------------------------------- leaving the pool

    def keep(self, node: PrefixNode) -> None:
        """Save the KV of a node that is about to leave the pool, if it is worth that.

        There has to be room: see `make_room`.
        """
        count = len(node.tokens)
        if node.host_slots is None and count <= self._memory.host.num_free and self._pays(node):
            assert node.slots is not None and node.parent is not None
            node.host_slots = self._memory.host.acquire(count)
            self._memory.saves.add(node.slots, node.host_slots)
            node.parent.num_on_host += 1
            self.read([node])
            self.num_used += count
            self.num_tokens["saved"] += count

    def _pays(self, node: PrefixNode) -> bool:
        if node.num_on_host:
            return True  # what follows it is of no use without
        *path, root = path_of(node)
        if not _is_awaited(node) and root.return_share < 1 / LONG_ODDS:
            self._num_doubtful += 1
            if self._num_doubtful % LONG_ODDS:
                return False
        end = sum([len(part.tokens) for part in path])
        if end < self._pays_from and self._load_is_cheaper(end, 0, 2 * end):
            self._pays_from = end
        return end >= self._pays_from

    # ---------------------------------------------------------------- giving up

    def make_room(self, num_slots: int) -> None:
        """Give up copies until so many host slots are free; not if all are not enough."""
        if num_slots > self.num_slots:
            return
        while self._memory.host.num_free < num_slots and (node := self._next_victim()):
            self._give_up(node)

    def offer(self, node: PrefixNode) -> None:
        """Put a node where it belongs in the order of giving up, now that it has changed."""
        if not _is_end(node):
            return
        rank = 0 if node.slots is not None else 1 + _is_awaited(node)
        entry = ((rank, node.last_use), next(self._ticket), node.version, node)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > self._most_entries:
            self._heap = [old for old in self._heap if old[3].version == old[2] and _is_end(old[3])]
            heapq.heapify(self._heap)
            self._most_entries = 2 * len(self._heap) + 64

    def _next_victim(self) -> PrefixNode | None:
        while self._heap:
            _, _, version, node = heapq.heappop(self._heap)
            if node.version == version and _is_end(node):
                return node
        return None

    def _give_up(self, node: PrefixNode) -> None:
        assert node.host_slots is not None and node.parent is not None
        count = len(node.host_slots)
        self._memory.host.release(node.host_slots)
        node.host_slots = None
        node.parent.num_on_host -= 1
        self.num_used -= count
        self.num_tokens["given_up"] += count
        if node.slots is None:
            _learn(node, 0.0)
        self.offer(node.parent)
        self._tidy(node)

    # ---------------------------------------------------------------- coming back

    def read(self, nodes: Iterable[PrefixNode]) -> None:
        """Keep what ends with these nodes until the plan that is being made is whole."""
        for node in nodes:
            node.num_readers += 1
            self._read.append(node)

    def bring(self, node: PrefixNode, tokens: Int32Array, *, is_last: bool) -> Int32Array:
        """Return where the KV of tokens that follow a node is on the host, int32 [len(tokens)].

        `is_last`: nothing else comes back for the request; of its key that says that a copy came
        back, in however many pieces.
        """
        found: list[Int32Array] = [NO_INT32]
        missing = len(tokens)
        while missing:
            node = node.children.get(int(tokens[-missing]), node)
            assert node.host_slots is not None, "something changed since"
            found.append(node.host_slots[:missing])
            missing -= len(found[-1])
        if is_last and len(tokens):
            _learn(node, 1.0)
        self.num_tokens["loaded"] += len(tokens)
        return np.concatenate(found)

    def end_plan(self) -> None:
        """Let go what the plan saved or read that is whole now."""
        read, self._read, self._pays_from = self._read, [], math.inf
        for node in read:
            node.num_readers -= 1
            self.offer(node)
        for node in read:
            if node.parent is not None and node.parent.children.get(node.first_token) is node:
                self._tidy(node)  # otherwise it has become part of another


def _is_awaited(node: PrefixNode) -> bool:
    """Whether requests wait for a node, or clients asked for it to be kept."""
    return node.num_expected > 0 or node.num_retained > 0


def _is_end(node: PrefixNode) -> bool:
    """Whether the copy of a node can be given up."""
    return node.host_slots is not None and node.num_on_host == 0 and node.num_readers == 0


def _learn(node: PrefixNode, has_returned: float) -> None:
    """Note of a node's key that a copy came back, or was given up while it was needed."""
    *_, root = path_of(node)
    root.return_share += (has_returned - root.return_share) / LONG_ODDS
