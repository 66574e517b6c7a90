"""The router's garbage: what lives is set aside, what died in a cycle goes once it is idle."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from lightserve.router.process import IDLE_TICKS, Collector


class Node:
    """Part of a cycle."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collector() -> Iterator[Collector]:
    """Return one whose settings end with the test."""
    threshold = gc.get_threshold()
    yield Collector()
    gc.unfreeze()
    gc.set_threshold(*threshold)


def test_what_lives_is_set_aside(collector: Collector) -> None:
    kept = [Node() for _ in range(1000)]
    num_before = gc.get_freeze_count()
    collector.tick(is_busy=True)
    assert gc.get_freeze_count() >= num_before + len(kept)
    assert not any(isinstance(found, Node) for found in gc.get_objects())


def test_young_cycles_go_at_once(collector: Collector) -> None:
    collector.tick(is_busy=True)
    gone = weakref.ref(Node())
    collector.tick(is_busy=True)
    assert gone() is None


def test_cycles_that_were_set_aside_go_once_there_is_no_work(collector: Collector) -> None:
    kept = Node()
    gone = weakref.ref(kept)
    collector.tick(is_busy=True)
    del kept
    collector.tick(is_busy=True)
    for _ in range(IDLE_TICKS - 1):
        collector.tick(is_busy=False)
    assert gone() is not None
    collector.tick(is_busy=False)
    assert gone() is None
