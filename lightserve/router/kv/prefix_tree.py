"""A radix tree over token prefixes: what KV is there, who uses it, and who will.

    root(salt) ── [12 7 7 3] ─┬─ [9 1]          resident, 1 user
                resident      └─ [4 4 8] ── [5] not resident, 2 expected

A node is a stretch of tokens after its parent's. It is *resident* if it has slots, which then
belong to the tree; a resident node's parent is resident. *Users* are live requests that read its
slots; they hold a `Lease`. *Expected* are requests that wait and whose prompt runs through the
whole node: Echo's reference count of future users (E7), exact because a waiting prompt is
itself inserted, without slots. A user or an expected request of a node is one of its parent too.

Token arrays are kept as views; callers must not change them.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lightserve.messages.common import Int32Array
from lightserve.router.kv.prefix_node import (
    NO_TOKENS,
    EvictionOrder,
    PrefixKey,
    PrefixNode,
    common_len,
    path_of,
    task_aware,
)


class Hit(NamedTuple):
    """How much of a prefix has KV."""

    num_tokens: int
    num_evictable: int
    """Those of them that nobody reads: holding them takes them out of what can be evicted."""
    node: PrefixNode | None
    """Where they end, perhaps in the middle; None: there are none."""


@dataclass(slots=True, eq=False)
class Lease:
    """A live request's hold on resident nodes, from the root to `node`."""

    node: PrefixNode
    num_tokens: int
    """Length of the prefix that is held."""
    is_real_time: bool


class PrefixTree:
    """See the module. Slots that it holds are neither free nor a request's own."""

    def __init__(self, order: EvictionOrder = task_aware) -> None:
        self._order = order
        self._roots: dict[PrefixKey, PrefixNode] = {}
        self._keys: dict[int, PrefixKey] = {}
        """Of each root, by its id."""
        self._heap: list[tuple[tuple[float, ...], int, int, PrefixNode]] = []
        self._ticket = itertools.count()
        self._num_nodes = 0
        self._clock = 0
        self.num_resident = 0
        """Tokens whose KV the tree holds."""
        self.num_evictable = 0
        """Those of them that no live request reads."""
        self.num_evictable_rt = 0
        """Those of these that a real-time request read last."""

    @property
    def lease_version(self) -> int:
        """Another one whenever a lease begins, ends, or comes to hold something else."""
        return self._clock

    # ---------------------------------------------------------------- reading

    def look_up(self, key: PrefixKey, tokens: Int32Array) -> Hit:
        """Return what `acquire` would hold. Changes nothing."""
        node = self._roots.get(key)
        last: PrefixNode | None = None
        num_matched = num_evictable = 0
        while node is not None and num_matched < len(tokens):
            node = node.residents.get(int(tokens[num_matched]))
            if node is None or node.slots is None:
                break
            last = node
            common = common_len(node.tokens, tokens[num_matched:])
            num_matched += common
            num_evictable += common if node.num_users == 0 else 0
            if common < len(node.tokens):
                break
        return Hit(num_matched, num_evictable, last)

    def freed_by(
        self, leases: Iterable[Lease], pinned: Container[PrefixNode] = ()
    ) -> set[PrefixNode]:
        """Return what could be evicted more if these leases were released, but for `pinned`."""
        releases = Counter(node for lease in leases for node in path_of(lease.node))
        return {
            node
            for node, count in releases.items()
            if count == node.num_users and node not in pinned
        }

    def root(self, key: PrefixKey) -> PrefixNode | None:
        """Return where the prefixes of a key begin, to be read; None: it has none."""
        return self._roots.get(key)

    def nodes(self) -> Iterator[PrefixNode]:
        """Iterate over all nodes but the roots, parents first."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    # ---------------------------------------------------------------- live requests

    def acquire(
        self, key: PrefixKey, tokens: Int32Array, *, is_real_time: bool
    ) -> tuple[Lease, Int32Array]:
        """Hold the longest resident prefix of `tokens`; return it with its slots, int32 [matched].

        Nobody takes these slots before `release`.
        """
        node = self._root(key)
        slots: list[Int32Array] = []
        num_matched = 0
        while num_matched < len(tokens):
            child = node.children.get(int(tokens[num_matched]))
            if child is None or child.slots is None:
                break
            common = common_len(child.tokens, tokens[num_matched:])
            child = self._split(child, common)
            assert child.slots is not None
            slots.append(child.slots)
            num_matched += common
            node = child
        lease = Lease(node, num_matched, is_real_time)
        self._clock += 1
        for part in path_of(node):
            self._pin(part, lease)
        return lease, np.concatenate(slots) if slots else NO_TOKENS

    def extend(self, lease: Lease, tokens: Int32Array, slots: Int32Array) -> Int32Array:
        """Put computed tokens that follow a lease's prefix into the tree, and hold them too.

        Args:
            lease: ends further on afterwards.
            tokens: int32 [n], what follows.
            slots: int32 [n], where their KV is; the tree takes them.

        Returns:
            Those of `slots` whose tokens were here already, int32: they stay the caller's.
        """
        self._clock += 1
        node, done = lease.node, 0
        duplicates: list[Int32Array] = []
        while done < len(tokens):
            child = node.children.get(int(tokens[done]))
            if child is None:
                child = self._add_child(node, tokens[done:])
            common = common_len(child.tokens, tokens[done:])
            child = self._split(child, common)
            if child.slots is None:
                child.slots = slots[done : done + common]
                node.residents[int(child.tokens[0])] = child
                self.num_resident += common
                self._count_evictable(child, 1)  # until it has its user, below
            else:
                duplicates.append(slots[done : done + common])
            done += common
            self._pin(child, lease)
            node = child
        lease.node = node
        lease.num_tokens += done
        return np.concatenate(duplicates) if duplicates else NO_TOKENS

    def release(self, lease: Lease) -> None:
        """End a hold; what nobody else holds can be evicted from now on."""
        self._clock += 1
        for node in path_of(lease.node):
            node.num_users -= 1
            self._touch(node, lease)
            if node.num_users == 0 and node.slots is not None:
                self._count_evictable(node, 1)
            self._offer(node)
        self._prune(lease.node)

    def _pin(self, node: PrefixNode, lease: Lease) -> None:
        if node.num_users == 0 and node.slots is not None:
            self._count_evictable(node, -1)
        node.num_users += 1
        self._touch(node, lease)

    def _count_evictable(self, node: PrefixNode, sign: int) -> None:
        self.num_evictable += sign * len(node.tokens)
        self.num_evictable_rt += sign * len(node.tokens) * node.was_real_time

    def _touch(self, node: PrefixNode, lease: Lease) -> None:
        node.last_use = self._clock
        node.was_real_time = lease.is_real_time

    # ---------------------------------------------------------------- waiting requests

    def expect(self, key: PrefixKey, prompt: Int32Array) -> None:
        """Count a waiting request as a future user of its prompt's prefixes."""
        node, done = self._root(key), 0
        while done < len(prompt):
            child = node.children.get(int(prompt[done])) or self._add_child(node, prompt[done:])
            child = self._split(child, common_len(child.tokens, prompt[done:]))
            child.num_expected += 1
            self._offer(child)
            done += len(child.tokens)
            node = child

    def forget(self, key: PrefixKey, prompt: Int32Array) -> None:
        """Take back one `expect` of the same prompt."""
        node, done = self._roots[key], 0
        while done < len(prompt):
            node = node.children[int(prompt[done])]
            done += len(node.tokens)
            node.num_expected -= 1
            self._offer(node)
        self._prune(node)

    # ---------------------------------------------------------------- eviction

    def evict(self, num_tokens: int, *, num_protected_rt: int = 0) -> Int32Array:
        """Give up at least `num_tokens` slots if that many can be; return them, int32 [n].

        Nodes go in the order of eviction, from the end of their prefix; of the last one only as
        much as is needed. Of what a real-time request read last, `num_protected_rt` tokens stay.
        """
        pieces: list[Int32Array] = []
        passed: list[PrefixNode] = []
        missing = num_tokens
        while missing > 0 and (node := self._next_victim()) is not None:
            wanted = missing
            if node.was_real_time:
                wanted = min(missing, self.num_evictable_rt - num_protected_rt)
            if wanted <= 0:
                passed.append(node)
                continue
            if len(node.tokens) > wanted:
                self._split(node, len(node.tokens) - wanted)
            assert node.slots is not None and node.parent is not None
            pieces.append(node.slots)
            missing -= len(node.slots)
            self._count_evictable(node, -1)
            self._drop_slots(node)
        for node in passed:
            self._offer(node)
        assert missing <= 0 or self.num_evictable == 0 or num_protected_rt, "not all was offered"
        return np.concatenate(pieces) if pieces else NO_TOKENS

    def exclusive_tail(self, lease: Lease, pinned: Container[PrefixNode] = ()) -> int:
        """Return how many tokens at the end of a lease's prefix nobody else reads or builds on.

        Nodes in `pinned` are about to have one more reader.
        """
        num_tokens = 0
        node, below = lease.node, None
        while node.parent is not None and node.num_users == 1 and node not in pinned:
            if len(node.residents) > (below is not None):
                break
            num_tokens += len(node.tokens)
            node, below = node.parent, node
        return num_tokens

    def take_tail(self, lease: Lease, num_tokens: int) -> Int32Array:
        """Take the last tokens of a lease's prefix, at most its `exclusive_tail`, out of the tree.

        The lease ends before them. Returns their slots, int32 [num_tokens], in order: they belong
        to the caller now.
        """
        self._clock += 1
        pieces: list[Int32Array] = []
        missing = num_tokens
        while missing > 0:
            node = lease.node
            if len(node.tokens) > missing:
                self._split(node, len(node.tokens) - missing)
            assert node.slots is not None and node.parent is not None and node.num_users == 1
            pieces.append(node.slots)
            missing -= len(node.slots)
            lease.num_tokens -= len(node.slots)
            node.num_users = 0
            lease.node = node.parent
            self._drop_slots(node)
        return np.concatenate(pieces[::-1]) if pieces else NO_TOKENS

    def _drop_slots(self, node: PrefixNode) -> None:
        """Make a node non-resident; its parent may have become takeable."""
        assert node.slots is not None and node.parent is not None
        self.num_resident -= len(node.slots)
        node.slots = None
        del node.parent.residents[int(node.tokens[0])]
        self._offer(node.parent)
        self._prune(node)

    def _next_victim(self) -> PrefixNode | None:
        while self._heap:
            _, _, version, node = heapq.heappop(self._heap)
            if node.version == version and node.is_takeable:
                return node
        return None

    def _offer(self, node: PrefixNode) -> None:
        """Put a node where it belongs in the order of eviction, now that it has changed."""
        node.version += 1
        if not node.is_takeable:
            return
        entry = (self._order(node), next(self._ticket), node.version, node)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * self._num_nodes + 64:
            self._heap = [old for old in self._heap if old[3].version == old[2]]
            heapq.heapify(self._heap)

    # ---------------------------------------------------------------- structure

    def _root(self, key: PrefixKey) -> PrefixNode:
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = PrefixNode(NO_TOKENS, None)
            self._keys[id(root)] = key
        return root

    def _add_child(self, parent: PrefixNode, tokens: Int32Array) -> PrefixNode:
        child = PrefixNode(tokens, parent)
        parent.children[int(tokens[0])] = child
        self._num_nodes += 1
        return child

    def _split(self, node: PrefixNode, length: int) -> PrefixNode:
        """Return a node of the first `length` tokens of `node`, which keeps the rest.

        So leases go on pointing to where they end. Both have the same users and expected requests.
        """
        if length == len(node.tokens):
            return node
        assert node.parent is not None
        first = PrefixNode(
            node.tokens[:length],
            node.parent,
            None if node.slots is None else node.slots[:length],
            num_users=node.num_users,
            num_expected=node.num_expected,
            last_use=node.last_use,
            was_real_time=node.was_real_time,
        )
        node.parent.children[int(first.tokens[0])] = first
        if node.slots is not None:
            node.parent.residents[int(first.tokens[0])] = first
            first.residents[int(node.tokens[length])] = node
        node.parent = first
        node.tokens = node.tokens[length:]
        node.slots = None if node.slots is None else node.slots[length:]
        first.children[int(node.tokens[0])] = node
        self._num_nodes += 1
        self._offer(node)
        return first

    def _prune(self, node: PrefixNode) -> None:
        """Drop a node that stands for nothing any more, and parents that stood for it alone."""
        while node.slots is None and not (node.children or node.num_users or node.num_expected):
            if node.parent is None:
                del self._roots[self._keys.pop(id(node))]
                return
            del node.parent.children[int(node.tokens[0])]
            self._num_nodes -= 1
            node = node.parent
