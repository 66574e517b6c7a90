"""A radix tree of prompts that wait: who begins like whom. Knows nothing of KV.

root ── [12 7 7 3] ─┬─ [9 1]      members: A
                    └─ [4 4 8]    members: B, C

A request is put no more than `MAX_DEPTH` nodes down, so that there may be more of its prompt than
the node where it is a member says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from lightserve.messages.common import Int32Array
from lightserve.router.kv.prefix_node import MAX_DEPTH, NO_TOKENS, common_len, part_of
from lightserve.router.request import Request


@dataclass(slots=True, eq=False)
class PromptNode:
    """A stretch of tokens. Only the tree writes to it.

    All but the root have a member or two children at least.
    """

    tokens: Int32Array
    parent: PromptNode | None
    children: dict[int, PromptNode] = field(default_factory=dict)
    """By their first token."""
    members: dict[Request, None] = field(default_factory=dict)
    """Requests whose prompt ends here, or is not followed further, in order of arrival."""

    def requests(self) -> Iterator[Request]:
        """Iterate over the requests whose prompts run through this node, shortest first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield from node.members
            stack.extend(reversed(node.children.values()))


class PromptTree:
    """Inserts and removes in O(length of the prompt)."""

    def __init__(self) -> None:
        self.root = PromptNode(NO_TOKENS, None)
        self._ends: dict[Request, PromptNode] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def insert(self, request: Request) -> None:
        """Add a request by its prompt."""
        tokens, node, done = request.prompt_token_ids, self.root, 0
        for _ in range(MAX_DEPTH):
            if done == len(tokens):
                break
            child = node.children.get(int(tokens[done]))
            if child is None:
                child = PromptNode(part_of(tokens, done, len(tokens)), node)
                node.children[int(tokens[done])] = child
            else:
                child = _split(child, common_len(child.tokens, tokens[done:]))
            done += len(child.tokens)
            node = child
        node.members[request] = None
        self._ends[request] = node

    def remove(self, request: Request) -> None:
        """Take a request out. Raises KeyError if it is not here."""
        node = self._ends.pop(request)
        del node.members[request]
        parent = node.parent
        if parent is None or node.members:
            return
        if not node.children:
            del parent.children[int(node.tokens[0])]
            node = parent
        if len(node.children) == 1 and not node.members:
            _join_child(node)


def _split(node: PromptNode, length: int) -> PromptNode:
    """Return a node of the first `length` tokens of `node`, which keeps the rest."""
    if length == len(node.tokens):
        return node
    tokens, parent = node.tokens, node.parent
    assert parent is not None
    first = PromptNode(part_of(tokens, 0, length), parent)
    parent.children[int(tokens[0])] = first
    node.parent = first
    node.tokens = part_of(tokens, length, len(tokens))
    first.children[int(node.tokens[0])] = node
    return first


def _join_child(node: PromptNode) -> None:
    """Let the only child of a node without members take its place, unless it is the root."""
    if (parent := node.parent) is None:
        return
    (child,) = node.children.values()
    child.tokens = np.concatenate([node.tokens, child.tokens])
    child.parent = parent
    parent.children[int(child.tokens[0])] = child
    node.children.clear()
