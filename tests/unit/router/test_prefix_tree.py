"""The prefix tree against a dictionary of prefixes, after every operation."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.grids import choose, more_when_long

from lightserve.messages.common import Int32Array
from lightserve.router.kv.block_events import (
    BlockEvents,
    BlockRemoved,
    BlockStored,
    block_hashes,
)
from lightserve.router.kv.prefix_node import (
    MAX_DEPTH,
    EvictionOrder,
    PrefixNode,
    common_len,
    least_recently_used,
    path_of,
    task_aware,
)
from lightserve.router.kv.prefix_tree import MAX_SPARE_NODES, Lease, PrefixTree

Prefix = tuple[int, ...]
KEYS = ("a", "b")
BLOCK_SIZE = 2
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=9)


def array(tokens: Iterable[int]) -> Int32Array:
    return np.array(list(tokens), dtype=np.int32)


class TreeMachine(RuleBasedStateMachine):
    """`model` maps (key, prefix) to the slot of its last token."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[tuple[str, Prefix], int] = {}
        self.leases: list[tuple[str, Prefix, Lease]] = []
        self.waiting: list[tuple[str, Prefix, PrefixNode]] = []
        self.retained: list[tuple[str, Prefix, PrefixNode]] = []
        self.slots = itertools.count()

    @initialize(order=st.sampled_from([task_aware, least_recently_used]))
    def start(self, order: EvictionOrder) -> None:
        self.events = BlockEvents(BLOCK_SIZE)
        self.told: set[int] = set()
        self.tree = PrefixTree(order, events=self.events)

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
        self.waiting.append((key, tuple(tokens), self.tree.expect(key, array(tokens))))

    @rule(index=st.integers(0, 30))
    def forget(self, index: int) -> None:
        if self.waiting:
            _, _, end = self.waiting.pop(index % len(self.waiting))
            self.tree.forget(end)

    @rule(key=st.sampled_from(KEYS), tokens=prompts)
    def retain(self, key: str, tokens: list[int]) -> None:
        before = self.num_retained()
        end, num_more = self.tree.retain(key, array(tokens))
        self.retained.append((key, tuple(tokens), end))
        assert num_more == self.num_retained() - before

    @rule(index=st.integers(0, 30))
    def let_go(self, index: int) -> None:
        if self.retained:
            before = self.num_retained()
            _, _, end = self.retained.pop(index % len(self.retained))
            assert self.tree.let_go(end) == before - self.num_retained()

    def num_retained(self) -> int:
        return len(prefixes_of(self.retained))

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
        expected, retained = prefixes_of(self.waiting), prefixes_of(self.retained)
        num_wanted = sum(expected[place] > 0 for place in free)
        assert self.tree.num_evictable_wanted == num_wanted
        seen: set[tuple[str, Prefix]] = set()
        for key, prefix, node in self.places():
            assert node.num_expected == expected[key, prefix]
            assert node.num_retained == retained[key, prefix]
            assert (node.slots is not None) == ((key, prefix) in self.model)
            seen.add((key, prefix))
        assert seen >= {*expected, *retained, *self.model}
        for key, tokens, end in self.waiting:
            check_known_path(self.tree, key, tokens, end)
        for key, prefix, lease in self.leases:
            check_known_path(self.tree, key, prefix, lease.node)
        if not (self.model or self.waiting or self.retained or self.leases):
            assert not seen, "nodes that stand for nothing"
        check_structure(self.tree)
        self.check_told()

    def check_told(self) -> None:
        """What events say is there is every whole block that is."""
        for event in self.events.take():
            if isinstance(event, BlockStored):
                assert event.parent_block_hash is None or event.parent_block_hash in self.told
                assert len(event.token_ids) == BLOCK_SIZE * len(event.block_hashes)
                assert not self.told & {*event.block_hashes}, "told twice"
                self.told |= {*event.block_hashes}
            else:
                assert isinstance(event, BlockRemoved)
                assert self.told >= {*event.block_hashes}
                self.told -= {*event.block_hashes}
        blocks = [place for place in self.model if len(place[1]) % BLOCK_SIZE == 0]
        expected = {block_hashes(key, array(tokens), BLOCK_SIZE)[-1] for key, tokens in blocks}
        assert self.told == expected and len(expected) == len(blocks)

    def places(self) -> Iterable[tuple[str, Prefix, PrefixNode]]:
        for key, root in self.tree._roots.items():
            stack = [((), child) for child in root.children.values()]
            while stack:
                prefix, node = stack.pop()
                for token in node.tokens.tolist():
                    prefix = (*prefix, token)
                    yield key, prefix, node
                stack.extend((prefix, child) for child in node.children.values())


def prefixes_of(ends: list[tuple[str, Prefix, PrefixNode]]) -> Counter[tuple[str, Prefix]]:
    """How many of these run through each prefix."""
    return Counter((key, tokens[: i + 1]) for key, tokens, _ in ends for i in range(len(tokens)))


def check_structure(tree: PrefixTree) -> None:
    """What nodes note of each other is true, and arrays keep nothing else in memory."""
    roots = list(tree._roots.values())
    nodes = list(tree.nodes())
    assert tree._num_nodes == len(nodes)
    for node in [*roots, *nodes]:
        heights = Counter(child.height for child in node.children.values())
        assert node.heights == heights and node.height == 1 + max(heights, default=0)
        assert node.residents == {
            token: child for token, child in node.children.items() if child.slots is not None
        }
        assert node.awaited == {
            token: child for token, child in node.children.items() if child.num_expected
        }
        for array_ in (node.tokens, node.slots):
            if array_ is not None and array_.base is not None:
                assert array_.base.nbytes <= 2 * array_.nbytes


def check_known_path(tree: PrefixTree, key: str, tokens: Prefix, end: PrefixNode) -> None:
    """What is found does not depend on whether tokens are compared that are known to be there."""
    for asked in (tokens, tokens[:-1], (*tokens, 0), (*tokens, 1, 2)):
        found = tree.look_up(key, array(asked))
        assert tree.look_up(key, array(asked), known=end) == found


def depth_of(tree: PrefixTree) -> int:
    return max((root.height - 1 for root in tree._roots.values()), default=0)


TestTree = more_when_long(TreeMachine.TestCase)
TestTree.settings = settings(max_examples=choose(50, 150), stateful_step_count=40, deadline=None)


class DeepMachine(RuleBasedStateMachine):
    """A tree that may hardly become deep, with prompts that want it to: nothing gets lost."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree(max_depth=3)
        self.leases: list[tuple[Prefix, Lease]] = []
        self.waiting: list[tuple[Prefix, PrefixNode]] = []
        self.in_tree: set[int] = set()
        self.slots = itertools.count()

    @rule(tokens=prompts)
    def serve(self, tokens: list[int]) -> None:
        """A request begins; all of its tokens that are not found are computed, and learned."""
        found = self.tree.look_up("", array(tokens)).num_tokens
        lease, slots = self.tree.acquire("", array(tokens[:found]), is_real_time=True)
        assert len(slots) == len(set(slots.tolist())) == found == lease.num_tokens
        if self.tree.look_up("", array(tokens)).num_tokens == found:
            new = [next(self.slots) for _ in tokens[found:]]
            left = self.tree.extend(lease, array(tokens[found:]), array(new)).tolist()
            assert left == new[lease.num_tokens - found :], "two times the same tokens"
            self.in_tree.update(new[: lease.num_tokens - found])
        self.leases.append((tuple(tokens[: lease.num_tokens]), lease))

    @rule(index=st.integers(0, 30))
    def release(self, index: int) -> None:
        if self.leases:
            self.tree.release(self.leases.pop(index % len(self.leases))[1])

    @rule(tokens=prompts)
    def expect(self, tokens: list[int]) -> None:
        self.waiting.append((tuple(tokens), self.tree.expect("", array(tokens))))

    @rule(index=st.integers(0, 30))
    def forget(self, index: int) -> None:
        if self.waiting:
            self.tree.forget(self.waiting.pop(index % len(self.waiting))[1])

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        self.in_tree -= set(self.tree.evict(count).tolist())

    @rule(index=st.integers(0, 30))
    def take_tail(self, index: int) -> None:
        if not self.leases:
            return
        index %= len(self.leases)
        prefix, lease = self.leases[index]
        count = min(2, self.tree.exclusive_tail(lease))
        self.in_tree -= set(self.tree.take_tail(lease, count).tolist())
        self.leases[index] = (prefix[: len(prefix) - count], lease)

    @invariant()
    def agrees(self) -> None:
        check_structure(self.tree)
        assert depth_of(self.tree) <= 3 + 1, "beyond it, only where the end of KV was taken"
        held = [node.slots.tolist() for node in self.tree.nodes() if node.slots is not None]
        assert sorted(itertools.chain(*held)) == sorted(self.in_tree)
        for prefix, lease in self.leases:
            path = [part.tokens.tolist() for part in path_of(lease.node)]
            assert tuple(itertools.chain(*path[::-1])) == prefix
            check_known_path(self.tree, "", prefix, lease.node)
        for tokens, end in self.waiting:
            check_known_path(self.tree, "", tokens, end)
        users = Counter(part for _, lease in self.leases for part in path_of(lease.node))
        expected = Counter(part for _, end in self.waiting for part in path_of(end))
        for node in self.tree.nodes():
            assert (node.num_users, node.num_expected) == (users[node], expected[node])

    def teardown(self) -> None:
        for _, lease in self.leases:
            self.tree.release(lease)
        for _, end in self.waiting:
            self.tree.forget(end)
        self.tree.evict(self.tree.num_evictable)
        assert not list(self.tree.nodes()) and not self.tree._roots


TestDeepTree = more_when_long(DeepMachine.TestCase)
TestDeepTree.settings = settings(
    max_examples=choose(50, 150), stateful_step_count=40, deadline=None
)


def finished(tree: PrefixTree, tokens: list[int], *, is_real_time: bool) -> None:
    """A request came, computed all its tokens at slots 100*first token …, and went."""
    lease, slots = tree.acquire("", array(tokens), is_real_time=is_real_time)
    rest = tokens[len(slots) :]
    tree.extend(lease, array(rest), array(100 * t + i for i, t in enumerate(rest)))
    tree.release(lease)


def test_order_of_eviction() -> None:
    """Echo's order: finished best-effort, finished real-time, then what fewest wait for."""
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


def test_ends_that_nothing_tells_apart_go() -> None:
    """A client that sends every prefix of a prompt leaves one node, whichever way it goes."""
    prompt = list(range(1, 300))
    for lengths in (range(1, 300), range(299, 0, -1)):
        tree = PrefixTree()
        for length in lengths:
            finished(tree, prompt[:length], is_real_time=True)
        finished(tree, prompt, is_real_time=True)
        assert [len(node.tokens) for node in tree.nodes()] == [299]
        assert len(tree.evict(10)) == 10 and tree.look_up("", array(prompt)).num_tokens == 289


def test_spare_slots_come_from_few_nodes() -> None:
    """A cache of ends of one token each costs an eviction no more than it needs."""
    tree = PrefixTree()
    for number in range(1000):
        finished(tree, [7, 7, 100 + number], is_real_time=True)
    assert len(tree.evict(10, num_spare=20)) == 30
    assert len(tree.evict(10, num_spare=500)) == MAX_SPARE_NODES
    assert len(tree.evict(300, num_spare=500)) == 300
    assert len(tree.evict(10_000, num_spare=500)) == 1002 - 30 - MAX_SPARE_NODES - 300


def test_waiting_ends_go_with_those_who_wait() -> None:
    tree = PrefixTree()
    ends = [tree.expect("", array(range(length))) for length in range(1, 50)]
    assert depth_of(tree) == 49
    whole = tree.expect("", array(range(100)))
    for end in ends:
        tree.forget(end)
    assert [len(node.tokens) for node in tree.nodes()] == [100]
    tree.forget(whole)
    assert not tree._roots


@pytest.mark.parametrize("step", [1, -1])
def test_a_path_does_not_get_deep(step: int) -> None:
    """A client branches off after every token: each request looks at a few nodes, whatever was."""
    prompt = list(range(1, 400))
    tree = PrefixTree()
    for length in list(range(1, 400))[::step]:
        own = [*prompt[:length], 1000 + length]
        found = tree.look_up("", array(own)).num_tokens
        lease, _ = tree.acquire("", array(own[:found]), is_real_time=True)
        tree.extend(
            lease, array(own[found:]), array(range(1000 * length, 1000 * length + len(own) - found))
        )
        tree.release(lease)
        assert depth_of(tree) <= MAX_DEPTH
    check_structure(tree)
    assert tree.look_up("", array(prompt)).num_tokens >= MAX_DEPTH - 2


def test_a_short_end_does_not_keep_a_long_prompt() -> None:
    """Memory per cached token, with prompts that share all but a few tokens."""
    tree = PrefixTree()
    shared = list(range(8000))
    finished(tree, shared, is_real_time=True)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(200):
            finished(tree, [*shared, 9000 + number, 1, 2], is_real_time=True)
        per_node = (tracemalloc.get_traced_memory()[0] - before) / 200
    finally:
        tracemalloc.stop()
    assert per_node < 2500


def test_what_is_protected_is_not_gone_through_for_each_eviction() -> None:
    looks: list[PrefixNode] = []

    def order(node: PrefixNode) -> tuple[float, ...]:
        looks.append(node)
        return task_aware(node)

    tree = PrefixTree(order)
    for number in range(100):
        lease, _ = tree.acquire("a", array([number]), is_real_time=number > 0)
        tree.extend(lease, array([number]), array([number]))
        tree.release(lease)
    looks.clear()
    assert tree.evict(50, num_protected_rt=99).tolist() == [0]
    assert len(tree.evict(50, num_protected_rt=99)) == 0
    assert not looks
    assert len(tree.evict(50, num_protected_rt=90)) == 9


@pytest.mark.parametrize("num_expected", [0, 4])
def test_what_real_time_read_stays_to_the_token(num_expected: int) -> None:
    """Of one node, or of two where a waiting request has cut it."""
    tree, tokens = PrefixTree(), array(range(10))
    lease, _ = tree.acquire("a", tokens, is_real_time=True)
    tree.extend(lease, tokens, tokens)
    tree.release(lease)
    tree.expect("a", array(range(num_expected)))
    assert len(tree.evict(9, num_protected_rt=3)) == 7
    assert tree.num_evictable_rt == 3


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("differs_at", [0, 1, 63, 64, 65, 199, 200])
def test_how_many_leading_tokens_are_equal(length: int, differs_at: int) -> None:
    first, second = np.arange(length, dtype=np.int32), np.arange(200, dtype=np.int32)
    second[differs_at : differs_at + 1] = -1
    expected = min(length, differs_at)
    assert common_len(first, second) == common_len(second, first) == expected
