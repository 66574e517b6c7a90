"""The prefix tree against a dictionary of prefixes, after every operation."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lightserve.messages.common import Int32Array
from lightserve.router.kv.prefix_node import EvictionOrder, least_recently_used, task_aware
from lightserve.router.kv.prefix_tree import Lease, PrefixTree

Prefix = tuple[int, ...]
KEYS = ("a", "b")
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=9)


def array(tokens: Iterable[int]) -> Int32Array:
    return np.array(list(tokens), dtype=np.int32)


class TreeMachine(RuleBasedStateMachine):
    """`model` maps (key, prefix) to the slot of its last token."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[tuple[str, Prefix], int] = {}
        self.leases: list[tuple[str, Prefix, Lease]] = []
        self.waiting: list[tuple[str, Prefix]] = []
        self.slots = itertools.count()

    @initialize(order=st.sampled_from([task_aware, least_recently_used]))
    def start(self, order: EvictionOrder) -> None:
        self.tree = PrefixTree(order)

    @rule(key=st.sampled_from(KEYS), tokens=prompts, is_real_time=st.booleans())
    def acquire(self, key: str, tokens: list[int], is_real_time: bool) -> None:
        prefixes = [(key, tuple(tokens[: i + 1])) for i in range(len(tokens))]
        held = list(itertools.takewhile(lambda prefix: prefix in self.model, prefixes))
        num_evictable = sum(not self.num_users(*prefix) for prefix in held)
        assert self.tree.look_up(key, array(tokens))[:2] == (len(held), num_evictable)
        lease, slots = self.tree.acquire(key, array(tokens), is_real_time=is_real_time)
        assert slots.tolist() == [self.model[prefix] for prefix in held]
        assert lease.num_tokens == len(held)
        self.leases.append((key, tuple(tokens[: len(held)]), lease))

    @rule(index=st.integers(0, 30), tokens=prompts)
    def extend(self, index: int, tokens: list[int]) -> None:
        if not self.leases:
            return
        index %= len(self.leases)
        key, prefix, lease = self.leases[index]
        slots = [next(self.slots) for _ in tokens]
        duplicates = []
        for token, slot in zip(tokens, slots, strict=True):
            prefix = (*prefix, token)
            if (key, prefix) in self.model:
                duplicates.append(slot)
            else:
                self.model[key, prefix] = slot
        returned = self.tree.extend(lease, array(tokens), array(slots))
        assert returned.tolist() == duplicates
        self.leases[index] = (key, prefix, lease)

    @rule(index=st.integers(0, 30))
    def release(self, index: int) -> None:
        if self.leases:
            _, _, lease = self.leases.pop(index % len(self.leases))
            before = self.tree.num_evictable
            freed = sum(len(node.tokens) for node in self.tree.freed_by([lease]))
            self.tree.release(lease)
            assert self.tree.num_evictable == before + freed

    @rule(key=st.sampled_from(KEYS), tokens=prompts)
    def expect(self, key: str, tokens: list[int]) -> None:
        self.tree.expect(key, array(tokens))
        self.waiting.append((key, tuple(tokens)))

    @rule(index=st.integers(0, 30))
    def forget(self, index: int) -> None:
        if self.waiting:
            key, tokens = self.waiting.pop(index % len(self.waiting))
            self.tree.forget(key, array(tokens))

    @rule(count=st.integers(1, 12))
    def evict(self, count: int) -> None:
        evictable = self.tree.num_evictable
        gone = self.tree.evict(count).tolist()
        assert len(gone) == min(count, evictable)
        by_slot = {slot: place for place, slot in self.model.items()}
        for slot in gone:
            place = by_slot[slot]
            assert not self.num_users(*place), "evicted under a reader"
            del self.model[place]
        for key, prefix in self.model:
            assert len(prefix) == 1 or (key, prefix[:-1]) in self.model, "a hole in a prefix"

    @rule(index=st.integers(0, 30), count=st.integers(1, 9))
    def take_tail(self, index: int, count: int) -> None:
        if not self.leases:
            return
        index %= len(self.leases)
        key, prefix, lease = self.leases[index]
        tail = self.tree.exclusive_tail(lease)
        exclusive = [n for n in range(len(prefix), 0, -1) if self.is_exclusive(key, prefix, n)]
        assert tail == len(exclusive)
        count = min(count, tail)
        taken = self.tree.take_tail(lease, count).tolist()
        kept = len(prefix) - count
        expected = [self.model.pop((key, prefix[: n + 1])) for n in range(kept, len(prefix))]
        assert taken == expected
        assert lease.num_tokens == kept
        self.leases[index] = (key, prefix[:kept], lease)

    def is_exclusive(self, key: str, prefix: Prefix, length: int) -> bool:
        """Whether one lease reads the first `length` tokens, and nothing else is behind them."""
        start = prefix[:length]
        behind = [
            p for k, p in self.model if k == key and p[:length] == start and p != prefix[: len(p)]
        ]
        longer = [p for k, p in self.model if k == key and p[: len(prefix)] == prefix != p]
        return self.num_users(key, start) == 1 and not behind and not longer

    @rule(count=st.integers(1, 12), protected=st.integers(0, 6))
    def evict_for_best_effort(self, count: int, protected: int) -> None:
        before = self.tree.num_evictable_rt
        gone = self.tree.evict(count, num_protected_rt=protected).tolist()
        self.model = {place: slot for place, slot in self.model.items() if slot not in gone}
        assert self.tree.num_evictable_rt >= min(before, protected)
        assert len(gone) <= count

    def num_users(self, key: str, prefix: Prefix) -> int:
        return sum(k == key and held[: len(prefix)] == prefix for k, held, _ in self.leases)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "tree"):
            return
        assert self.tree.num_resident == len(self.model)
        free = [place for place in self.model if not self.num_users(*place)]
        assert self.tree.num_evictable == len(free)
        expected = Counter(
            (key, tokens[: i + 1]) for key, tokens in self.waiting for i in range(len(tokens))
        )
        seen: set[tuple[str, Prefix]] = set()
        for key, prefix, node in self.places():
            assert node.num_expected == expected[key, prefix]
            assert (node.slots is not None) == ((key, prefix) in self.model)
            seen.add((key, prefix))
        assert seen >= set(expected) and seen >= set(self.model)
        if not (self.model or self.waiting or self.leases):
            assert not seen, "nodes that stand for nothing"

    def places(self) -> Iterable[tuple[str, Prefix, object]]:
        for key, root in self.tree._roots.items():
            stack = [((), child) for child in root.children.values()]
            while stack:
                prefix, node = stack.pop()
                for token in node.tokens.tolist():
                    prefix = (*prefix, token)
                    yield key, prefix, node
                stack.extend((prefix, child) for child in node.children.values())


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def finished(tree: PrefixTree, tokens: list[int], *, is_real_time: bool) -> None:
    """A request came, computed all its tokens at slots 100*first token …, and went."""
    lease, slots = tree.acquire("", array(tokens), is_real_time=is_real_time)
    rest = tokens[len(slots) :]
    tree.extend(lease, array(rest), array(100 * t + i for i, t in enumerate(rest)))
    tree.release(lease)


def test_order_of_eviction() -> None:
    """E7: finished best-effort, finished real-time, then what fewest wait for."""
    tree = PrefixTree(task_aware)
    for first, is_real_time in ((1, True), (2, False), (3, False), (4, True), (5, False)):
        finished(tree, [first] * 4, is_real_time=is_real_time)
    for _ in range(2):
        tree.expect("", array([3, 3, 3, 3, 9]))
    tree.expect("", array([2, 2, 2, 2, 9]))
    order = [int(tree.evict(4)[0]) // 100 for _ in range(5)]
    assert order == [5, 1, 4, 2, 3]


def test_least_recently_used() -> None:
    tree = PrefixTree(least_recently_used)
    for first in (1, 2, 3, 1):
        finished(tree, [first] * 4, is_real_time=first == 2)
    assert [int(tree.evict(4)[0]) // 100 for _ in range(3)] == [2, 3, 1]


def test_a_prefix_loses_its_end_first() -> None:
    tree = PrefixTree()
    finished(tree, [1, 2, 3, 4, 5, 6], is_real_time=False)
    assert len(tree.evict(2)) == 2
    assert tree.look_up("", array([1, 2, 3, 4, 5, 6])).num_tokens == 4


def test_a_prefix_outlives_what_is_built_on_it() -> None:
    """Though by its own priority it would go first."""
    tree = PrefixTree(task_aware)
    finished(tree, [1, 2, 3, 4], is_real_time=True)
    finished(tree, [1, 2], is_real_time=False)
    assert tree.evict(2).tolist() == [302, 403]
    assert tree.look_up("", array([1, 2, 3, 4])).num_tokens == 2


@pytest.mark.parametrize("other", ["salt", ""])
def test_salts_keep_apart(other: str) -> None:
    tree = PrefixTree()
    finished(tree, [1, 2, 3], is_real_time=True)
    assert tree.look_up(other, array([1, 2, 3])).num_tokens == (3 if other == "" else 0)
