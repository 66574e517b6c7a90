"""A stretch of tokens in the prefix tree, and the orders in which stretches are evicted."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np

from lightserve.messages.common import Int32Array

PrefixKey = Hashable
"""What besides equal tokens two requests must have in common to share KV: the salt, the adapter."""

NO_TOKENS: Int32Array = np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One stretch of tokens. Only the tree writes to it."""

    tokens: Int32Array
    parent: PrefixNode | None
    slots: Int32Array | None = None
    """int32 [len(tokens)]; None: not resident."""
    children: dict[int, PrefixNode] = field(default_factory=dict)
    """By their first token."""
    residents: dict[int, PrefixNode] = field(default_factory=dict)
    """Those of the children that are resident."""
    num_users: int = 0
    num_expected: int = 0
    last_use: int = 0
    """When it was last acquired, extended or released, counted in such events."""
    was_real_time: bool = False
    """Whether its last user was a real-time request."""
    version: int = 0
    """Raised whenever its place in the order of eviction may have changed."""

    @property
    def is_takeable(self) -> bool:
        """Whether its slots can be evicted: nobody reads them, and no resident child needs them."""
        return (
            self.slots is not None
            and self.parent is not None
            and self.num_users == 0
            and not self.residents
        )


EvictionOrder = Callable[[PrefixNode], tuple[float, ...]]
"""Sort key of a takeable node; the smallest goes first."""


def least_recently_used(node: PrefixNode) -> tuple[float, ...]:
    """Evict what was used longest ago, whatever it is."""
    return (node.last_use,)


def task_aware(node: PrefixNode) -> tuple[float, ...]:
    """Echo's priorities (E7): what nobody waits for goes first, best-effort before real-time;
    then what the fewest wait for; ties by last use."""
    if node.num_expected == 0:
        return (0.5 if node.was_real_time else 0.0, node.last_use)
    return (float(node.num_expected), node.last_use)


def path_of(node: PrefixNode) -> Iterator[PrefixNode]:
    """Iterate from a node up to its root."""
    at: PrefixNode | None = node
    while at is not None:
        yield at
        at = at.parent


def common_len(first: Int32Array, second: Int32Array) -> int:
    """Return how many leading tokens are equal."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    at = int(differs.argmax()) if length else 0
    return at if length and differs[at] else length
