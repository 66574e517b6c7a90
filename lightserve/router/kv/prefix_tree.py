"""A radix tree over token prefixes: what KV is there, what uses it, and what will.

    root(salt) ── [12 7 7 3] ─┬─ [9 1]          resident, 1 user
                resident      └─ [4 4 8] ── [5] not resident, 2 expected

A node is a stretch of tokens after its parent's. It is *resident* if it has slots, which then
belong to the tree; a resident node's parent is resident. Its KV may be on the host, as well or
instead (`host_tier`). *Users* are live requests that read its
slots; they hold a `Lease`. *Expected* are requests that wait and whose prompt runs through the
whole node: Echo's reference count of future users, exact because a waiting prompt is
itself inserted, without slots. A user or an expected request of a node is one of its parent too.

What a client sends may end or branch off after each token, so that paths could become as deep as
prompts are long, and all that is done for a request costs time for each node of its path. Two
rules bound that. A node and its only child become one once nothing tells them apart: the requests
whose ends parted them are gone, and both were used last by the same one. And no path gets much
deeper than `MAX_DEPTH`: where a node would have to be split for that, its tokens are not found.

Callers must not change token arrays, which may be kept as views; of an array of which a node
needs less than half it keeps a copy.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Container, Hashable, Iterable, Iterator
from typing import Any

import numpy as np

from lightserve.messages.common import NO_INT32, Int32Array
from lightserve.router.kv.block_events import BlockEvents
from lightserve.router.kv.host_tier import HostTier
from lightserve.router.kv.prefix_node import (
    MAX_DEPTH,
    EvictionOrder,
    Hit,
    Lease,
    PrefixKey,
    PrefixNode,
    awaited_residents,
    by_worth,
    change_height,
    common_len,
    num_unread,
    part_of,
    path_of,
    task_aware,
    waiting_from,
)

MAX_VISITS = 512
"""Resident nodes at which is looked for those that wait: bounds the time of an answer, and with it
what sharing may be missed."""
MAX_SPARE_NODES = 256
"""After so many an eviction gives up no more than it has to: each takes more than ten microseconds,
and nodes may be as short as one token."""


class PrefixTree:
    """Cached prefixes. Slots that the tree holds are neither free nor a request's own."""

    def __init__(
        self,
        order: EvictionOrder = task_aware,
        *,
        max_depth: int = MAX_DEPTH,
        events: BlockEvents | None = None,
        has_snapshots: bool = False,
    ) -> None:
        """`events` is told of all KV that comes and goes.

        `has_snapshots`: a prefix is found up to the end of a node that has one.
        """
        self._order = functools.partial(by_worth, order=order) if has_snapshots else order
        self._has_snapshots = has_snapshots
        self._events = events
        self._max_depth = max_depth
        self.tier: HostTier | None = None
        """Keeps KV on the host that is evicted; None: it is lost."""
        self._roots: dict[PrefixKey, PrefixNode] = {}
        self._keys: dict[int, PrefixKey] = {}
        """Key of each root, by its id."""
        self._heap: list[tuple[tuple[float, ...], int, int, PrefixNode]] = []
        self._ticket = itertools.count()
        self._num_nodes = 0
        self._clock = 0
        self.num_resident = 0
        """Tokens whose KV the tree holds."""
        self.num_evictable = 0
        """Slots of resident tokens that no live request reads, and of snapshots."""
        self.num_evictable_rt = 0
        """Evictable tokens that a real-time request read last."""
        self.num_evictable_wanted = 0
        """Evictable slots that requests are expected to read."""
        self.num_in_snapshots = 0
        """Slots that hold snapshots."""
        self.num_awaited = 0
        """Evictable slots of snapshots that requests are expected to go on from."""

    # ---------------------------------------------------------------- reading

    def look_up(
        self, key: PrefixKey, tokens: Int32Array, *, known: PrefixNode | None = None
    ) -> Hit:
        """Return how much of a prefix `acquire` can hold. Changes nothing.

        `known` ends a path of this key that has the same tokens, as far as either goes: a lease or
        an expected request of the caller. Those are not compared again: that takes most time.
        """
        at = node = self._roots.get(key)
        path = [] if known is None else [part for part in path_of(known) if part.parent is not None]
        compared = [] if self.tier is None else path[:]
        last: PrefixNode | None = None
        num_matched = num_evictable = depth = 0
        found = Hit(0, 0, None)
        while node is not None and num_matched < len(tokens) and depth < self._max_depth:
            if path:
                node = path.pop()
                common = min(len(node.tokens), len(tokens) - num_matched)
            elif node := node.residents.get(int(tokens[num_matched])):
                common = common_len(node.tokens, tokens[num_matched:])
            if node is None or node.slots is None:
                break
            depth += 1
            if common < len(node.tokens) and not self._can_split(node, depth):
                break
            last = node
            num_matched += common
            num_evictable += common if node.num_users == 0 else 0
            if common < len(node.tokens):
                break
            at = node
            if node.snapshot is not None:
                num_slots = 0 if node.num_readers else len(node.snapshot)
                found = Hit(num_matched, num_evictable + num_slots, node)
        if self._has_snapshots:
            return found
        hit = Hit(num_matched, num_evictable, last)
        if self.tier is None or at is None or at.num_on_host == 0 or (last and last is not at):
            return hit
        return self._with_host(hit, at, tokens, compared, depth)

    def _with_host(
        self,
        hit: Hit,
        at: PrefixNode,
        tokens: Int32Array,
        compared: Container[PrefixNode],
        depth: int,
    ) -> Hit:
        """Return a hit that ends with a node, with the KV on the host that follows."""
        start, num_matched, last = hit.num_tokens, hit.num_tokens, hit.host_node
        while num_matched < len(tokens) and depth < self._max_depth:
            child = at.children.get(int(tokens[num_matched]))
            if child is None or child.slots is not None or child.host_slots is None:
                break
            common = min(len(child.tokens), len(tokens) - num_matched)
            if child not in compared:
                common = common_len(child.tokens, tokens[num_matched:])
            depth += 1
            is_part = common < len(child.tokens)
            if common == 0 or (is_part and not self._can_split(child, depth)):
                break
            at = last = child
            num_matched += common
            if is_part:
                break
        return hit._replace(num_on_host=num_matched - start, host_node=last)

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

        These slots are not taken before `release`. Ask for no more than `look_up` found: here
        nothing is too deep.
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
        return lease, np.concatenate(slots) if slots else NO_INT32

    def extend(
        self, lease: Lease, tokens: Int32Array, slots: Int32Array, *, is_found: bool = False
    ) -> Int32Array:
        """Put computed tokens that follow a lease's prefix into the tree, and hold them too.

        Args:
            lease: ends further on afterwards.
            tokens: int32 [n], what follows.
            slots: int32 [n], where their KV is; the tree takes them.
            is_found: the tree knows them already, without KV: nothing is too deep then.

        Returns:
            Those of `slots` that stay the caller's, int32: their tokens were here already, or would
            lie too deep; the lease ends before the latter.
        """
        self._clock += 1
        node, done = lease.node, 0
        depth = -math.inf if is_found else sum(1 for _ in path_of(node)) - 1
        left: list[Int32Array] = []
        while done < len(tokens):
            depth += 1
            child = self._child_for(node, tokens[done:], depth)
            if child is None:
                left.append(slots[done:])
                break
            end = done + len(child.tokens)
            if child.slots is None:
                child.slots = part_of(slots, done, end)
                node.residents[child.first_token] = child
                self.num_resident += len(child.tokens)
                self._count_evictable(child, 1)  # until it has its user, below
                if self._events is not None:
                    self._events.stored(self._key_of(child), child)
            else:
                left.append(slots[done:end])
            done = end
            self._pin(child, lease)
            if child.host_slots is not None:
                self._offer(child)
            node = child
        lease.node = node
        lease.num_tokens += done
        return np.concatenate(left) if left else NO_INT32

    def release(self, lease: Lease) -> None:
        """End a hold; what no other holds can be evicted from now on."""
        self._clock += 1
        for node in path_of(lease.node):
            node.num_users -= 1
            self._touch(node, lease)
            if node.num_users == 0 and node.slots is not None:
                self._count_evictable(node, 1)
            self._offer(node)
        self.tidy(lease.node)

    def _pin(self, node: PrefixNode, lease: Lease) -> None:
        if node.num_users == 0 and node.slots is not None:
            self._count_evictable(node, -1)
        node.num_users += 1
        self._touch(node, lease)

    def _count_evictable(self, node: PrefixNode, sign: int) -> None:
        self.num_evictable += sign * len(node.tokens)
        self.num_evictable_rt += sign * len(node.tokens) * node.was_real_time
        self.num_evictable_wanted += sign * len(node.tokens) * (node.num_expected > 0)

    def _touch(self, node: PrefixNode, lease: Lease) -> None:
        node.last_use = self._clock
        node.was_real_time = lease.is_real_time

    # ---------------------------------------------------------------- snapshots

    def put_snapshot(self, node: PrefixNode, slots: Int32Array) -> bool:
        """Let a resident node have the snapshot in these slots, int32 [n]; not if it has one."""
        if node.snapshot is not None or node.slots is None:
            return False
        node.snapshot = slots
        self._count_snapshot(node, len(slots))
        self.num_in_snapshots += len(slots)
        self._offer(node)
        return True

    def read(self, node: PrefixNode, sign: int) -> None:
        """Keep a node's snapshot for a reader more, or (-1) let it go again."""
        assert node.snapshot is not None
        was_read, node.num_readers = node.num_readers > 0, node.num_readers + sign
        if was_read != (node.num_readers > 0):
            self._count_snapshot(node, -sign * len(node.snapshot))
        self._offer(node)

    def _drop_snapshot(self, node: PrefixNode) -> Int32Array:
        """Take a node's snapshot; its KV may have become takeable."""
        assert node.snapshot is not None and node.num_readers == 0
        slots, node.snapshot = node.snapshot, None
        self._count_snapshot(node, -len(slots))
        self.num_in_snapshots -= len(slots)
        self._offer(node)
        return slots

    def _count_snapshot(self, node: PrefixNode, num_slots: int) -> None:
        self.num_evictable += num_slots
        self.num_evictable_wanted += num_slots * (node.num_expected > 0)
        self.num_awaited += num_slots * (node.num_expected > 0)

    def _count_wanted(self, node: PrefixNode, sign: int) -> None:
        self.num_evictable_wanted += sign * num_unread(node)
        if node.snapshot is not None and node.num_readers == 0:
            self.num_awaited += sign * len(node.snapshot)

    # ---------------------------------------------------------------- waiting requests

    def expect(
        self, key: PrefixKey, prompt: Int32Array, request: Hashable | None = None
    ) -> PrefixNode:
        """Count a waiting request as a future user of its prompt's prefixes.

        Args:
            key: whose prefixes.
            prompt: its tokens.
            request: to be found by `waiting`; None: it is not.

        Returns where they end, for `forget`: perhaps early, so as not to lie too deep.
        """
        end = self._reach(key, prompt)
        for part in path_of(end):
            part.num_expected += 1
            if part.num_expected == 1 and part.parent is not None:
                part.parent.awaited[part.first_token] = part
                self._count_wanted(part, 1)
            self._offer(part)
        if request is not None:
            end.waiting[request] = None
        return end

    def forget(self, end: PrefixNode, request: Hashable | None = None) -> None:
        """Take back the `expect` that returned this."""
        for node in path_of(end):
            node.num_expected -= 1
            if node.num_expected == 0 and node.parent is not None:
                del node.parent.awaited[node.first_token]
                self._count_wanted(node, -1)
            self._offer(node)
        if request is not None:
            end.waiting.pop(request, None)
        self.tidy(end)

    def waiting(self, key: PrefixKey) -> Iterator[tuple[int, Any]]:
        """Iterate over requests whose prompts begin with resident tokens, and how many these are.

        Those that share most come first. Nothing may change meanwhile.
        """
        if (root := self._roots.get(key)) is None:
            return
        found: list[tuple[int, int, PrefixNode]] = []
        ticket = itertools.count()
        ahead = [(0, next(ticket), root)]
        while ahead and len(found) < MAX_VISITS:
            num_tokens, _, node = entry = heapq.heappop(ahead)
            found.append(entry)
            for child in itertools.islice(awaited_residents(node), MAX_VISITS):
                heapq.heappush(ahead, (num_tokens - len(child.tokens), next(ticket), child))
        found.sort()
        for num_tokens, _, node in found:
            if num_tokens < 0:
                yield from ((-num_tokens, request) for request in waiting_from(node))

    # ---------------------------------------------------------------- prefixes to be kept longer

    def retain(self, key: PrefixKey, prefix: Int32Array) -> tuple[PrefixNode, int]:
        """Let what there is of a prefix, now or later, be evicted after what is not retained.

        Returns where it ends, for `let_go`: perhaps early, as with `expect`; and how many of its
        tokens were not retained before.
        """
        end = self._reach(key, prefix)
        num_more = 0
        for part in path_of(end):
            num_more += len(part.tokens) if part.num_retained == 0 else 0
            part.num_retained += 1
            self._offer(part)
        return end, num_more

    def let_go(self, end: PrefixNode) -> int:
        """Take back the `retain` that returned this; return how many tokens are so no longer."""
        num_fewer = 0
        for part in path_of(end):
            part.num_retained -= 1
            num_fewer += len(part.tokens) if part.num_retained == 0 else 0
            self._offer(part)
        self.tidy(end)
        return num_fewer

    # ---------------------------------------------------------------- eviction

    def evict(
        self, num_tokens: int, *, num_spare: int = 0, num_protected_rt: int = 0
    ) -> Int32Array:
        """Give up at least `num_tokens` slots if that many can be; return them, int32 [n].

        Nodes go in the order of eviction, from the end of their prefix; of the last one only as
        much as is needed. `num_spare` more go as well, as far as they are in the first
        MAX_SPARE_NODES. Of what a real-time request read last, `num_protected_rt` tokens stay.
        """
        pieces: list[Int32Array] = []
        passed: list[PrefixNode] = []
        missing = num_tokens + num_spare
        while missing > 0 and self.num_evictable > min(self.num_evictable_rt, num_protected_rt):
            if missing <= num_spare and len(pieces) >= MAX_SPARE_NODES:
                break
            if (node := self._next_victim()) is None:
                break
            if node.snapshot is not None:
                if missing <= num_spare and node.num_expected:
                    passed.append(node)
                    break
                pieces.append(self._drop_snapshot(node))
                missing -= len(pieces[-1])
                self._merge(node)
                continue
            wanted = missing
            if node.was_real_time:
                wanted = min(missing, self.num_evictable_rt - num_protected_rt)
            if wanted <= 0:
                passed.append(node)
                continue
            if len(node.tokens) > wanted:
                self._split(node, len(node.tokens) - wanted)
            assert node.slots is not None and node.parent is not None
            if self.tier is not None:
                self.tier.keep(node)
            pieces.append(node.slots)
            missing -= len(node.slots)
            self._count_evictable(node, -1)
            self._drop_slots(node)
        for node in passed:
            self._offer(node)
        is_enough = missing <= num_spare or self.num_evictable == 0
        assert is_enough or num_protected_rt, "not all was offered"
        return np.concatenate(pieces) if pieces else NO_INT32

    def exclusive_tail(self, lease: Lease, pinned: Container[PrefixNode] = ()) -> int:
        """Return how many tokens at the end of a lease's prefix no other reads or builds on.

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

        The lease ends before them. Returns their slots, int32 [num_tokens], in order, and those of
        snapshots among them: they belong to the caller now.
        """
        self._clock += 1
        pieces: list[Int32Array] = []
        others: list[Int32Array] = []
        missing = num_tokens
        while missing > 0:
            node = lease.node
            if len(node.tokens) > missing:
                self._split(node, len(node.tokens) - missing)
            assert node.slots is not None and node.parent is not None and node.num_users == 1
            pieces.append(node.slots)
            missing -= len(node.slots)
            if node.snapshot is not None:
                others.append(self._drop_snapshot(node))
            lease.num_tokens -= len(node.slots)
            node.num_users = 0
            lease.node = node.parent
            self._drop_slots(node)
        return np.concatenate([*pieces[::-1], *others]) if pieces else NO_INT32

    def _drop_slots(self, node: PrefixNode) -> None:
        """Make a node non-resident; its parent may have become takeable."""
        assert node.slots is not None and node.parent is not None
        if self._events is not None:
            self._events.removed(self._key_of(node), node)
        self.num_resident -= len(node.slots)
        node.slots = None
        del node.parent.residents[node.first_token]
        self._offer(node.parent)
        if node.host_slots is not None:
            self._offer(node)
        if (at := self._prune(node)) is not None:
            self._merge(at)

    def _key_of(self, node: PrefixNode) -> PrefixKey:
        *_, root = path_of(node)
        return self._keys[id(root)]

    def _next_victim(self) -> PrefixNode | None:
        while self._heap:
            _, _, version, node = heapq.heappop(self._heap)
            if node.version == version and node.is_offered:
                return node
        return None

    def _offer(self, node: PrefixNode) -> None:
        """Put a node where it belongs in the order of eviction, now that it has changed."""
        node.version += 1
        if self.tier is not None:
            self.tier.offer(node)
        if not node.is_offered:
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
            root = self._roots[key] = PrefixNode(NO_INT32, None)
            self._keys[id(root)] = key
        return root

    def _reach(self, key: PrefixKey, tokens: Int32Array) -> PrefixNode:
        """Return the node at which these tokens end, or one above where it would lie too deep."""
        node, done, depth = self._root(key), 0, 1
        while done < len(tokens):
            child = self._child_for(node, tokens[done:], depth)
            if child is None:
                break
            done += len(child.tokens)
            depth += 1
            node = child
        return node

    def _child_for(self, parent: PrefixNode, tokens: Int32Array, depth: float) -> PrefixNode | None:
        """Return a child whose tokens begin `tokens`, made for that; None: it would lie too deep.

        `depth` is that of the child, 1 below the root; less: no child is too deep.
        """
        if depth > self._max_depth:
            return None
        child = parent.children.get(int(tokens[0]))
        if child is None:
            return self._add_child(parent, tokens)
        common = common_len(child.tokens, tokens)
        if common < len(child.tokens) and not self._can_split(child, depth):
            return None
        return self._split(child, common)

    def _add_child(self, parent: PrefixNode, tokens: Int32Array) -> PrefixNode:
        child = PrefixNode(part_of(tokens, 0, len(tokens)), parent)
        parent.children[child.first_token] = child
        change_height(parent, 0, child.height)
        self._num_nodes += 1
        return child

    def _split(self, node: PrefixNode, length: int) -> PrefixNode:
        """Return a node of the first `length` tokens of `node`, which keeps the rest.

        So leases go on pointing to where they end. Both have the same users, expected requests, and
        prefixes to be kept.
        """
        if length == len(node.tokens):
            return node
        parent, tokens, slots, host_slots = node.parent, node.tokens, node.slots, node.host_slots
        assert parent is not None
        first = PrefixNode(
            part_of(tokens, 0, length),
            parent,
            None if slots is None else part_of(slots, 0, length),
            height=node.height + 1,
            heights={node.height: 1},
            num_users=node.num_users,
            num_expected=node.num_expected,
            num_retained=node.num_retained,
            last_use=node.last_use,
            was_real_time=node.was_real_time,
        )
        parent.children[first.first_token] = first
        change_height(parent, node.height, first.height)
        node.parent = first
        node.tokens = part_of(tokens, length, len(tokens))
        first.children[node.first_token] = node
        if node.num_expected:
            parent.awaited[first.first_token] = first
            first.awaited[node.first_token] = node
        if slots is not None:
            node.slots = part_of(slots, length, len(slots))
            parent.residents[first.first_token] = first
            first.residents[node.first_token] = node
        if host_slots is not None:
            first.host_slots, first.num_on_host = part_of(host_slots, 0, length), 1
            node.host_slots = part_of(host_slots, length, len(host_slots))
        self._num_nodes += 1
        self._offer(node)
        return first

    def _can_split(self, node: PrefixNode, depth: float) -> bool:
        """Whether the paths through a node that lies so deep may become longer by one."""
        return depth + node.height <= self._max_depth

    def _merge(self, node: PrefixNode) -> PrefixNode | None:
        """Make one of a node, its only child, and those above it, as far as they are alike.

        Returns the next one above; None: there is none. Leases and what else ends in one of them
        ends in the last, which stays.
        """
        if len(node.children) == 1:
            (below,) = node.children.values()
            if node.is_like(below):
                node = below
        above: list[PrefixNode] = []
        at = node.parent
        while at is not None and at.is_like(node):
            above.append(at)
            at = at.parent
        if at is None or not above:
            return at
        first = above[-1]
        parts = [*above[::-1], node]
        node.tokens = np.concatenate([part.tokens for part in parts])
        at.children[first.first_token] = node
        if node.num_expected:
            at.awaited[first.first_token] = node
        if node.slots is not None:
            node.slots = np.concatenate([part.slots for part in parts if part.slots is not None])
            at.residents[first.first_token] = node
        if node.host_slots is not None:
            found = [part.host_slots for part in parts if part.host_slots is not None]
            node.host_slots = np.concatenate(found)
        change_height(at, first.height, node.height)
        node.parent = at
        for part in above:  # the order of eviction may yet name them; what dies is no cycle
            part.slots = part.host_slots = None
            part.children.clear()
            part.residents.clear()
            part.awaited.clear()
        self._num_nodes -= len(above)
        return at

    def tidy(self, node: PrefixNode) -> None:
        """Drop and join what nothing holds apart any more, from a node up."""
        at = self._prune(node)
        while at is not None:
            at = self._merge(at)

    def _prune(self, node: PrefixNode) -> PrefixNode | None:
        """Drop a node that stands for nothing any more, and parents that stood for it alone.

        Returns the lowest one that stays; None: not even the root does.
        """
        while node.slots is node.host_slots is None and not (node.children or node.is_wanted):
            if node.parent is None:
                del self._roots[self._keys.pop(id(node))]
                return None
            del node.parent.children[node.first_token]
            change_height(node.parent, node.height, 0)
            self._num_nodes -= 1
            node = node.parent
        return node
