"""A radix tree of prompts that wait: who begins like whom. Knows nothing of KV.

root ── [12 7 7 3] ─┬─ [9 1]      members: A
        count 3     └─ [4 4 8]    members: B, C
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from lightserve.messages.common import Int32Array
from lightserve.router.kv.prefix_node import common_len
from lightserve.router.request import Request

_NO_TOKENS: Int32Array = np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class PromptNode:
    """A stretch of tokens. Only the tree writes to it."""

    tokens: Int32Array
    parent: PromptNode | None
    children: dict[int, PromptNode] = field(default_factory=dict)
    """By their first token."""
    members: dict[Request, None] = field(default_factory=dict)
    """Requests whose prompt ends here, in order of arrival."""
    count: int = 0
    """Prompts that run through the whole node."""

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
        self.root = PromptNode(_NO_TOKENS, None)
        self._ends: dict[Request, PromptNode] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def insert(self, request: Request) -> None:
        """Add a request by its prompt."""
        tokens, node, done = request.prompt_token_ids, self.root, 0
        node.count += 1
        while done < len(tokens):
            child = node.children.get(int(tokens[done]))
            if child is None:
                child = PromptNode(tokens[done:], node)
                node.children[int(tokens[done])] = child
            else:
                child = self._split(child, common_len(child.tokens, tokens[done:]))
            child.count += 1
            done += len(child.tokens)
            node = child
        node.members[request] = None
        self._ends[request] = node

    def remove(self, request: Request) -> None:
        """Take a request out. Raises KeyError if it is not here."""
        node: PromptNode | None = self._ends.pop(request)
        assert node is not None
        del node.members[request]
        while node is not None:
            node.count -= 1
            parent = node.parent
            if node.count == 0 and parent is not None:
                del parent.children[int(node.tokens[0])]
            node = parent

    def count(self, tokens: Int32Array) -> int:
        """Return how many prompts begin with `tokens`, int32 [n]."""
        node, done = self.root, 0
        while done < len(tokens):
            child = node.children.get(int(tokens[done]))
            if child is None:
                return 0
            common = common_len(child.tokens, tokens[done:])
            if common < min(len(child.tokens), len(tokens) - done):
                return 0
            done += common
            node = child
        return node.count

    def _split(self, node: PromptNode, length: int) -> PromptNode:
        """Return a node of the first `length` tokens of `node`, which keeps the rest."""
        if length == len(node.tokens):
            return node
        assert node.parent is not None
        first = PromptNode(node.tokens[:length], node.parent, count=node.count)
        node.parent.children[int(first.tokens[0])] = first
        node.parent = first
        node.tokens = node.tokens[length:]
        first.children[int(node.tokens[0])] = node
        return first
