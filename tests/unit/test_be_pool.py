"""The pool of best-effort requests against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lightserve.messages.common import Int32Array
from lightserve.router.be_pool import (
    MAX_VISITS,
    MIN_IN_FLIGHT_TOKENS,
    BEPool,
    _descend,
    prefix_in_flight,
)
from lightserve.router.kv.prefix_node import MAX_DEPTH, PrefixNode
from lightserve.router.kv.prefix_tree import PrefixTree
from lightserve.router.prompt_tree import PromptNode, PromptTree
from lightserve.router.queues import WaitingQueue
from lightserve.router.request import Request
from lightserve.router.turns import OLDEST_EVERY
from lightserve.types import FrontendId, RequestClass, RequestId, RequestKey, SamplingParams

SALTS = ("", "s")
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def make_request(number: int, tokens: list[int], salt: str = "") -> Request:
    return Request(
        key=RequestKey(FrontendId(0), RequestId(number)),
        prompt_token_ids=np.array(tokens, dtype=np.int32),
        max_tokens=4,
        eos_token_ids=frozenset(),
        sampling=SamplingParams(),
        request_class=RequestClass.BE,
        arrival_s=0.0,
        arrival_number=number,
        prefix_salt=salt,
    )


def resident(tree: PrefixTree, tokens: list[int], salt: str = "") -> None:
    """Somebody computed these tokens, and went."""
    array = np.array(tokens, dtype=np.int32)
    lease, slots = tree.acquire((salt,), array, is_real_time=False)
    rest = array[len(slots) :]
    tree.extend(lease, rest, np.arange(len(rest), dtype=np.int32) + 1000 * len(tokens))
    tree.release(lease)


class PoolMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.pool, self.tree = BEPool(), PrefixTree()
        self.model: list[Request] = []
        self.numbers = itertools.count()

    @rule(tokens=prompts, salt=st.sampled_from(SALTS))
    def append(self, tokens: list[int], salt: str) -> None:
        request = make_request(next(self.numbers), tokens, salt)
        self.pool.append(request)
        self.model.append(request)

    @precondition(lambda self: self.model)
    @rule(index=st.integers(0, 50))
    def remove(self, index: int) -> None:
        request = self.model.pop(index % len(self.model))
        self.pool.remove(request)
        assert request not in self.pool
        with pytest.raises(KeyError):
            self.pool.remove(request)

    @rule(tokens=prompts, salt=st.sampled_from(SALTS))
    def compute(self, tokens: list[int], salt: str) -> None:
        resident(self.tree, tokens, salt)

    @rule(count=st.integers(1, 8))
    def evict(self, count: int) -> None:
        self.tree.evict(count)

    def num_shared(self, request: Request) -> int:
        return self.tree.look_up((request.prefix_salt,), request.prompt_token_ids).num_tokens

    @rule(limit=st.integers(1, 40))
    def candidates(self, limit: int) -> None:
        found = self.pool.candidates(self.tree, context_len=4.0, limit=limit)
        assert len(found) == len(set(found)) == min(limit, len(self.model))
        assert set(found) <= set(self.model)
        if not self.model:
            return
        shared = [self.num_shared(request) for request in self.model]
        if max(shared) > 0 and limit > 1:
            assert self.num_shared(found[0]) == max(shared)
        elif max(shared) == 0:
            assert found == self.model[:limit]
        sharing = [self.num_shared(request) for request in found]
        end = found.index(self.model[0]) if self.model[0] in found else len(found)
        assert sharing[:end] == sorted(sharing[:end], reverse=True)

    @invariant()
    def keeps_order(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert list(self.pool) == self.model and len(self.pool) == len(self.model)
        trees = [tree for trees in self.pool._trees.values() for tree in trees.values()]
        found = [request for tree in trees for request in tree.root.requests()]
        assert sorted(found, key=lambda r: r.arrival_number) == self.model
        for tree in trees:
            check_prompts(tree.root, [])


def check_prompts(node: PromptNode, before: list[int]) -> None:
    """Everything below a node begins like it; none is there for nothing."""
    before = before + node.tokens.tolist()
    assert all(r.prompt_token_ids[: len(before)].tolist() == before for r in node.requests())
    assert node.parent is None or node.members or len(node.children) > 1
    for token, child in node.children.items():
        assert child.parent is node and child.tokens[0] == token
        check_prompts(child, before)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_prompts_as_long_as_what_runs_go_first() -> None:
    """Among those that share as much (E6: regular batches)."""
    pool, tree = BEPool(), PrefixTree()
    resident(tree, [7, 7, 7, 7])
    pool.append(make_request(0, [1]))
    for number, length in enumerate((4, 40, 400), start=1):
        pool.append(make_request(number, [7, 7, 7, 7, *[number] * length]))
    by_context = {
        context_len: pool.candidates(tree, context_len=context_len)[0].arrival_number
        for context_len in (8.0, 44.0, 404.0)
    }
    assert by_context == {8.0: 1, 44.0: 2, 404.0: 3}


def test_every_sixteenth_is_the_oldest() -> None:
    """A stream of requests that all share what is resident, and one that shares nothing."""
    queue, tree = WaitingQueue(), PrefixTree()
    resident(tree, [7] * 8)
    numbers = itertools.count()
    queue.append(make_request(next(numbers), [1, 2, 3]))
    order: list[int] = []
    for _ in range(200):
        queue.append(make_request(next(numbers), [7] * 8 + [9]))
        request = next(queue.best_effort(queue.turn(), tree, 8.0))
        queue.admit(request)
        order.append(request.arrival_number)
    assert order.index(0) == OLDEST_EVERY - 1
    assert order[0] == 1, "sharing goes first"


def test_an_answer_looks_at_few_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many prompts share something, however many buckets there are."""
    pool, tree = BEPool(), PrefixTree()
    for number in range(2 * MAX_VISITS):
        tokens = [number] * (1 + number % 40)
        pool.append(make_request(number, tokens))
        resident(tree, tokens)
    num_visits = 0

    def descend(tokens: Int32Array, cached: PrefixNode, offset: int) -> tuple[int, PrefixNode, int]:
        nonlocal num_visits
        num_visits += 1
        return _descend(tokens, cached, offset)

    monkeypatch.setattr("lightserve.router.be_pool._descend", descend)
    found = pool.candidates(tree, context_len=30.0, limit=8)
    assert num_visits == MAX_VISITS
    assert found[0].num_prompt_tokens == 31, "the longest of the bucket nearest to the context"


def test_a_waiting_prompt_is_followed_for_a_few_nodes() -> None:
    """However many others end on its way, before or after it came."""
    tree = PromptTree()
    requests = [make_request(n, list(range(1, length))) for n, length in enumerate(range(2, 200))]
    requests += [make_request(1000 + n, list(range(1, n))) for n in range(400, 200, -1)]
    for request in requests:
        tree.insert(request)
        node, depth = tree._ends[request], 0
        while node.parent is not None:
            node, depth = node.parent, depth + 1
        assert depth <= MAX_DEPTH
    assert set(tree.root.requests()) == set(requests)
    for request in requests:
        tree.remove(request)
    assert not tree.root.children and not tree.root.members


@pytest.mark.parametrize(
    ("num_common", "num_found", "salt", "expected"),
    [
        (100, 0, "", 100),
        (100, 60, "", 40),
        (100, 100 - MIN_IN_FLIGHT_TOKENS + 1, "", 0),
        (MIN_IN_FLIGHT_TOKENS - 1, 0, "", 0),
        (100, 0, "s", 0),
    ],
)
def test_prefixes_in_flight(num_common: int, num_found: int, salt: str, expected: int) -> None:
    waiting = make_request(0, [5] * num_common + [1] * 50)
    waiting.num_computed_tokens = num_found
    running = [make_request(1, [9] * 200), make_request(2, [5] * num_common + [2] * 50, salt)]
    assert prefix_in_flight(waiting, running) == expected


def test_who_computes_its_whole_prompt_waits_for_no_prefix() -> None:
    """Others with its prefix may be on their way all the time."""
    waiting = make_request(0, [5] * 100)
    waiting.sampling = SamplingParams(num_prompt_logprobs=0)
    assert prefix_in_flight(waiting, [make_request(1, [5] * 100)]) == 0
