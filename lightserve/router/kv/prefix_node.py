"""A stretch of tokens in the prefix tree, and the orders in which stretches are evicted."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lightserve.messages.common import Int32Array

PrefixKey = str
"""Salt that two requests must have in common, besides tokens, to share KV."""

_BEGINNING = 64
"""Tokens that are compared first."""
MAX_DEPTH = 64
"""Nodes on a path that are looked at: bounds the work for a request, whatever others sent before.

Where a path is so deep, prefixes are found up to the end of a node, and nothing is added below.
"""


@dataclass(slots=True, eq=False, repr=False)  # its text would be that of the whole tree
class PrefixNode:
    """One stretch of tokens. Only the tree writes to it."""

    tokens: Int32Array
    parent: PrefixNode | None
    slots: Int32Array | None = None
    """int32 [len(tokens)]; None: not resident."""
    snapshot: Int32Array | None = None
    """int32 [n]: slots with the state of recurrent layers behind its last token, see `states`."""
    host_slots: Int32Array | None = None
    """int32 [len(tokens)]: where its KV is on the host, see `host_tier`; None: nowhere."""
    num_on_host: int = 0
    """Children with KV on the host."""
    num_readers: int = 0
    """Requests that the plan which is being made copies its snapshot to, or its KV on the host."""
    children: dict[int, PrefixNode] = field(default_factory=dict)
    """By their first token."""
    residents: dict[int, PrefixNode] = field(default_factory=dict)
    """Children that are resident."""
    awaited: dict[int, PrefixNode] = field(default_factory=dict)
    """Children that requests are expected in."""
    waiting: dict[Hashable, None] = field(default_factory=dict)
    """Requests whose expected prefixes end here, those that may start in any order; the tree hands
    them back as it got them."""
    height: int = 1
    """Nodes on the longest path from here down."""
    heights: dict[int, int] = field(default_factory=dict)
    """How many children have which height."""
    num_users: int = 0
    num_expected: int = 0
    num_retained: int = 0
    """Prefixes through it that are to be kept longer than others."""
    last_use: int = 0
    """When it was last acquired, extended or released, counted in such events."""
    was_real_time: bool = False
    """Whether its last user was a real-time request."""
    version: int = 0
    """Raised whenever its place in the order of eviction may have changed."""
    return_share: float = 1.0
    """Share of a root's copies of late that came back from the host rather than being given up."""

    @property
    def first_token(self) -> int:
        """By which its parent knows it."""
        return int(self.tokens[0])

    @property
    def is_wanted(self) -> bool:
        """Whether it stands for something although it may hold no KV."""
        return self.num_users > 0 or self.num_expected > 0 or self.num_retained > 0

    def is_like(self, below: PrefixNode) -> bool:
        """Whether nothing tells this node from its child but where they end."""
        return (
            self.parent is not None
            and self.snapshot is None
            and len(self.children) == 1
            and self.num_users == below.num_users
            and self.num_expected == below.num_expected
            and self.num_retained == below.num_retained
            and self.num_readers == below.num_readers
            and (self.slots is None) == (below.slots is None)
            and (self.host_slots is None) == (below.host_slots is None)
            and (
                (self.slots is None and self.host_slots is None)
                or (self.last_use == below.last_use and self.was_real_time == below.was_real_time)
            )
        )

    @property
    def is_offered(self) -> bool:
        """Whether something of it can be evicted: its snapshot first, then its KV."""
        return self.is_takeable if self.snapshot is None else self.num_readers == 0

    @property
    def is_takeable(self) -> bool:
        """Whether its slots can be evicted: no request reads them, no resident child needs them."""
        return (
            self.slots is not None
            and self.parent is not None
            and self.num_users == 0
            and not self.residents
        )


class Hit(NamedTuple):
    """How much of a prefix has KV."""

    num_tokens: int
    num_evictable: int
    """Tokens of the hit that no request reads: holding them ends that they can be evicted."""
    node: PrefixNode | None
    """Where they end, perhaps in the middle; None: there are none."""
    num_on_host: int = 0
    """Tokens that follow, with KV on the host."""
    host_node: PrefixNode | None = None
    """Where these end."""


@dataclass(slots=True, eq=False)
class Lease:
    """A live request's hold on resident nodes, from the root to `node`."""

    node: PrefixNode
    num_tokens: int
    """Length of the prefix that is held."""
    is_real_time: bool


EvictionOrder = Callable[[PrefixNode], tuple[float, ...]]
"""Sort key of a takeable node; the smallest goes first."""


def least_recently_used(node: PrefixNode) -> tuple[float, ...]:
    """Evict what was used longest ago; what is to be kept longer after all else."""
    return (float(node.num_retained > 0), node.last_use)


def task_aware(node: PrefixNode) -> tuple[float, ...]:
    """Echo's priorities: what no request waits for goes first, best-effort before real-time, and
    then what is to be kept longer; then what the fewest wait for; ties by last use."""
    if node.num_expected == 0:
        if node.num_retained > 0:
            return (0.75, node.last_use)
        return (0.5 if node.was_real_time else 0.0, node.last_use)
    return (float(node.num_expected), node.last_use)


def by_worth(node: PrefixNode, order: EvictionOrder) -> tuple[float, ...]:
    """Return the sort key of a node in a tree with snapshots, by an order of KV alone.

    KV below the last snapshot of a path helps no request and goes first; then a snapshot that the
    next of its path has replaced; and where requests wait for one, the tokens count that it saves.
    """
    if node.snapshot is None:
        return (-2.0, node.last_use)
    if len(node.children) == 1 and not (node.num_expected or node.num_retained):
        return (-1.0, node.last_use)
    first, *rest = order(node)
    if first >= 1.0:
        num_saved, at = len(node.tokens), node.parent
        while at is not None and at.snapshot is None:
            num_saved, at = num_saved + len(at.tokens), at.parent
        first *= num_saved
    return (first, *rest)


def path_of(node: PrefixNode) -> Iterator[PrefixNode]:
    """Iterate from a node up to its root."""
    at: PrefixNode | None = node
    while at is not None:
        yield at
        at = at.parent


def change_height(parent: PrefixNode | None, before: int, after: int) -> None:
    """Note that a child of a node has another height; 0: it is, or was, not there."""
    while parent is not None and before != after:
        if after:
            parent.heights[after] = parent.heights.get(after, 0) + 1
        if before:
            parent.heights[before] -= 1
            if not parent.heights[before]:
                del parent.heights[before]
        before, after = parent.height, 1 + max(parent.heights, default=0)
        parent.height = after
        parent = parent.parent


def part_of(whole: Int32Array, start: int, end: int) -> Int32Array:
    """Return a part of an array that does not keep much more than itself in memory."""
    part = whole[start:end]
    base = part.base
    if isinstance(base, np.ndarray) and base.nbytes <= 2 * part.nbytes:
        return part
    return part.copy()


def common_len(first: Int32Array, second: Int32Array) -> int:
    """Return how many leading tokens are equal; quickly where few are, however long both are."""
    length = min(len(first), len(second))
    if length <= _BEGINNING and first[:length].tobytes() == second[:length].tobytes():
        return length  # as most short stretches on a path are; faster than numpy tells
    start = 0
    for end in (min(_BEGINNING, length), length):
        differs = first[start:end] != second[start:end]
        if end > start and differs[at := int(differs.argmax())]:
            return start + at
        start = end
    return length


def num_unread(node: PrefixNode) -> int:
    """Return the slots of a node, with KV or a snapshot, that no live request reads."""
    num_slots = len(node.tokens) if node.slots is not None and node.num_users == 0 else 0
    return num_slots + (0 if node.snapshot is None or node.num_readers else len(node.snapshot))


def awaited_residents(node: PrefixNode) -> Iterator[PrefixNode]:
    """Iterate over the resident children of a node that requests are expected in."""
    if len(node.residents) < len(node.awaited):
        return (child for child in node.residents.values() if child.num_expected)
    return (child for child in node.awaited.values() if child.slots is not None)


def waiting_from(node: PrefixNode) -> Iterator[Any]:
    """Iterate over the requests whose prompts are resident up to the end of a node."""
    ahead = [iter((node,))]
    while ahead:
        if (below := next(ahead[-1], None)) is None:
            ahead.pop()
            continue
        yield from below.waiting
        if below.awaited:
            ahead.append(child for child in below.awaited.values() if child.slots is None)
