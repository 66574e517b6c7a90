"""Prefixes that requests asked to be kept longer: what is evicted instead, and how much may be."""

from __future__ import annotations

from collections.abc import Iterable, ValuesView

import numpy as np
import pytest
from support.core_scenes import Arrival, make_core, make_simulation, submit

from lightserve.messages.common import Int32Array
from lightserve.router.events import FromFrontend
from lightserve.router.kv.cache import KVOptions, RetainedPrefixes
from lightserve.router.kv.prefix_node import (
    EvictionOrder,
    PrefixNode,
    least_recently_used,
    task_aware,
)
from lightserve.router.kv.prefix_tree import PrefixTree
from lightserve.sim.simulation import Simulation, TimedEvent
from lightserve.types import FrontendId, RequestId, RequestKey

ORDERS = pytest.mark.parametrize("order", [task_aware, least_recently_used])
MAX_TOKENS = 20


class Scene:
    """A tree in which prompts are computed one after the other."""

    def __init__(self, order: EvictionOrder = task_aware) -> None:
        self.tree = PrefixTree(order)
        self.retained = RetainedPrefixes(self.tree, max_tokens=MAX_TOKENS)

    def compute(self, prompt: Int32Array, key: str = "", *, is_real_time: bool = True) -> None:
        lease, found = self.tree.acquire(key, prompt, is_real_time=is_real_time)
        self.tree.extend(lease, prompt[len(found) :], prompt[len(found) :])
        self.tree.release(lease)

    def keep(self, prompt: Int32Array, key: str = "", until_s: float = 100.0) -> None:
        self.retained.keep(key, prompt, until_s=until_s)

    def num_left(self, prompt: Int32Array, key: str = "") -> int:
        return self.tree.look_up(key, prompt).num_tokens


def tokens(start: int, count: int = 10) -> Int32Array:
    return np.arange(100 * start, 100 * start + count, dtype=np.int32)


@ORDERS
def test_others_are_evicted_first_but_it_is_no_pin(order: EvictionOrder) -> None:
    scene = Scene(order)
    for number in range(4):
        scene.compute(tokens(number))
    scene.keep(tokens(0))
    scene.tree.evict(30)
    assert [scene.num_left(tokens(n)) for n in range(4)] == [10, 0, 0, 0]
    scene.tree.evict(4)
    assert scene.num_left(tokens(0)) == 6, "from its end, when there is nothing else"
    scene.compute(tokens(0))
    scene.compute(tokens(5))
    scene.tree.evict(10)
    assert scene.num_left(tokens(0)) == 10, "computed again, it is kept again"


@ORDERS
def test_only_the_prefix_is_kept(order: EvictionOrder) -> None:
    scene = Scene(order)
    scene.compute(tokens(0))
    scene.keep(tokens(0, 7))
    scene.compute(tokens(1))
    scene.tree.evict(13)
    assert (scene.num_left(tokens(0)), scene.num_left(tokens(1))) == (7, 0)


def test_what_a_request_waits_for_stays_longer_still() -> None:
    scene = Scene()
    for number in range(2):
        scene.compute(tokens(number))
    scene.keep(tokens(1))
    scene.tree.expect("", tokens(0))
    scene.tree.evict(10)
    assert (scene.num_left(tokens(0)), scene.num_left(tokens(1))) == (10, 0)


@ORDERS
def test_it_ends_in_time(order: EvictionOrder) -> None:
    scene = Scene(order)
    for number in range(3):
        scene.compute(tokens(number))
    scene.keep(tokens(0), until_s=10.0)
    scene.keep(tokens(1), until_s=20.0)
    scene.keep(tokens(0), until_s=5.0)  # what was said before counts on
    scene.retained.expire(9.0)
    assert scene.retained.num_tokens("") == 20
    scene.retained.expire(10.0)
    assert scene.retained.num_tokens("") == 10
    scene.tree.evict(20)
    assert [scene.num_left(tokens(n)) for n in range(3)] == [0, 10, 0]
    scene.retained.expire(20.0)
    assert scene.retained.num_tokens("") == 0
    assert not scene.retained._until_s


def test_what_follows_a_prefix_is_not_gone_through() -> None:
    """As often as it is asked for, however many others have gone on from it."""
    scene = Scene()
    for number in range(50):
        scene.compute(np.append(tokens(0), np.int32(number)))
    root = scene.tree.root("")
    assert root is not None
    children = root.children[0].children = _Counted(root.children[0].children)
    for _ in range(3):
        scene.keep(tokens(0))
    assert children.num_walks == 0
    assert scene.retained.num_tokens("") == 10


class _Counted(dict[int, PrefixNode]):
    """Counts how often it is gone through."""

    num_walks = 0

    def values(self) -> ValuesView[PrefixNode]:  # type: ignore[override]
        self.num_walks += 1
        return super().values()


def test_each_key_has_a_bound_of_its_own() -> None:
    """Beyond it, what was asked for longest ago is like all others; of one prefix, its end."""
    scene = Scene()
    for number in range(4):
        for key in ("a", "b"):
            scene.compute(tokens(number), key)
    scene.keep(tokens(0), "b")
    for number in (0, 1, 0, 2):  # 0 anew, so that 1 is the oldest
        scene.keep(tokens(number), "a")
    assert scene.retained.num_tokens("a") == 20
    assert scene.retained.num_tokens("b") == 10
    scene.tree.evict(50)
    assert [scene.num_left(tokens(n), "a") for n in range(4)] == [10, 0, 10, 0]
    assert [scene.num_left(tokens(n), "b") for n in range(4)] == [10, 0, 0, 0]
    long = tokens(7, 50)
    scene.compute(long, "b")
    scene.keep(long, "b")
    assert scene.retained.num_tokens("b") == MAX_TOKENS
    scene.tree.evict(40)
    assert scene.num_left(long, "b") == MAX_TOKENS
    assert scene.num_left(tokens(0), "b") == 0


def test_turns_of_a_conversation_count_once() -> None:
    """And what two prefixes have in common."""
    scene = Scene()
    for count in (4, 8, 12):
        scene.keep(tokens(0, count))
    assert scene.retained.num_tokens("") == 12
    assert len(scene.retained._until_s[""]) == 1
    other = np.concatenate([tokens(0, 10), tokens(3, 5)])
    scene.keep(other)
    assert scene.retained.num_tokens("") == 17
    scene.keep(tokens(0, 4), until_s=200.0)  # as does one of those that it begins
    assert scene.retained.num_tokens("") == 17
    scene.retained.expire(100.0)
    assert scene.retained.num_tokens("") == 12


@pytest.mark.parametrize("lengths", [range(1, 20), range(19, 0, -1), [9, 3, 15, 3, 9, 12]])
def test_prefixes_of_prefixes_leave_no_boundaries(lengths: Iterable[int]) -> None:
    """Paths of the tree must not become deep, whatever is asked for in which order."""
    scene = Scene()
    for second, count in enumerate(lengths):
        scene.keep(tokens(0, count), until_s=100.0 + second)
    assert len(list(scene.tree.nodes())) == 1
    assert scene.retained.num_tokens("") == max(lengths)
    scene.retained.expire(99.0 + len(list(lengths)))
    assert not list(scene.tree.nodes())


def test_asking_again_and_again_takes_no_memory() -> None:
    scene = Scene()
    for second in range(2000):
        scene.keep(tokens(second % 3, 5), until_s=1e6 + second)
    assert len(scene.retained._heap) < 100
    assert len(scene.retained._until_s[""]) == 3
    scene.retained.expire(1e9)
    assert not scene.retained._heap
    assert not list(scene.tree.nodes())


def _ask(simulation: Simulation, number: int, num_prompt: int, token: int, **fields: object) -> int:
    """Serve a request alone; return how much of its prompt was found."""
    message = submit(number, Arrival(0.0, num_prompt, 2, 2), prompt=[token] * num_prompt, **fields)
    event = FromFrontend(FrontendId(0), message)
    simulation.run([TimedEvent(simulation.now_s, event)])
    return simulation.outcomes[RequestKey(FrontendId(0), RequestId(number))].num_cached_tokens


@ORDERS
@pytest.mark.parametrize(
    ("fields", "max_tokens", "num_found"),
    [
        ({}, 100, 0),
        ({"num_retained_tokens": 29, "retention_s": 300.0}, 100, 29),
        ({"num_retained_tokens": 12, "retention_s": 300.0}, 100, 12),
        ({"num_retained_tokens": 29, "retention_s": 300.0}, -1, 12),
        ({"num_retained_tokens": 29, "retention_s": 300.0}, 0, 0),
        ({"num_retained_tokens": 29, "retention_s": 0.01}, 100, 0),
    ],
)
def test_a_prompt_is_found_after_many_others(
    order: EvictionOrder, fields: dict[str, float], max_tokens: int, num_found: int
) -> None:
    """Through the core: a pool of 120 slots, in which six prompts of 40 tokens follow."""
    core = make_core("unified", kv=KVOptions(cache_order=order, max_retained_tokens=max_tokens))
    simulation = make_simulation(core)
    assert _ask(simulation, 0, 30, 7, **fields) == 0
    for number in range(1, 7):
        assert _ask(simulation, number, 40, 100 + number) == 0
    core.check_integrity()
    assert _ask(simulation, 7, 30, 7) == num_found
