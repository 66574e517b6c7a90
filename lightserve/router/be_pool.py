"""The pool of waiting best-effort requests (Echo, sections 4.1 and 6; mechanisms E5, E6, C8).

Batch work may run in any order, so that the planner asks for the few that are worth asking: those
whose prompts share most with KV that is resident, and among these the ones about as long as what
runs. The pool keeps buckets of prompts of like length, in each a radix tree per prefix key, and
the order of arrival over all. Nothing here scans all requests that wait.

Who is old has a turn all the same, see `turns`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightserve.messages.common import Int32Array
from lightserve.router.kv.prefix_node import PrefixNode, common_len
from lightserve.router.kv.prefix_tree import PrefixTree
from lightserve.router.lanes import PriorityLanes
from lightserve.router.prompt_tree import PromptNode, PromptTree
from lightserve.router.request import Request
from lightserve.router.turns import OLDEST_EVERY

MAX_CANDIDATES = 64
MAX_VISITS = 512
"""Nodes looked at for one answer: bounds its time, and with it what sharing may be missed."""
MIN_IN_FLIGHT_TOKENS = 32
"""A prefix that is being computed is worth waiting for from here on: one step of waiting costs
about as much as computing so few tokens."""


class _Shared(NamedTuple):
    """Waiting requests whose first tokens are resident."""

    num_tokens: int
    bucket: int
    node: PromptNode


class BEPool:
    """Waiting best-effort requests that have never run."""

    def __init__(self) -> None:
        self._requests = PriorityLanes()
        self._trees: dict[int, dict[str, PromptTree]] = {}
        """By bucket and salt."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterate by priority, then in order of arrival."""
        return iter(self._requests)

    def noted(self) -> Iterator[Request]:
        """The same, noting on each how often it was overtaken."""
        return self._requests.noted()

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def append(self, request: Request) -> None:
        """Add a request."""
        self._requests.append(request)
        trees = self._trees.setdefault(_bucket_of(request.num_prompt_tokens), {})
        if request.prefix_salt not in trees:
            trees[request.prefix_salt] = PromptTree()
        trees[request.prefix_salt].insert(request)

    def remove(self, request: Request) -> None:
        """Take a request out. Raises KeyError if it is not here."""
        self._requests.remove(request)
        self._forget(request)

    def admit(self, request: Request) -> None:
        """Take a request out to run it: those before it are overtaken. Raises KeyError."""
        self._requests.admit(request)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        bucket, salt = _bucket_of(request.num_prompt_tokens), request.prefix_salt
        trees = self._trees[bucket]
        trees[salt].remove(request)
        if not trees[salt]:
            del trees[salt]
        if not trees:
            del self._trees[bucket]

    def candidates(
        self, resident: PrefixTree | None, *, context_len: float, limit: int = MAX_CANDIDATES
    ) -> list[Request]:
        """Return the requests that are worth asking to start, the best first.

        Args:
            resident: the cached prefixes; None: there are none.
            context_len: mean context of what runs; prompts nearest to it go first among those
                that share as much.
            limit: most of them.
        """
        oldest = next(iter(self), None)
        if oldest is None:
            return []
        sharing = self._sharing(resident, context_len, limit) if resident is not None else []
        equals = [request for request in sharing if request.priority == oldest.priority]
        chosen = dict.fromkeys([*equals[: OLDEST_EVERY - 1], oldest])
        for request in itertools.islice(self, limit):
            chosen.setdefault(request)
        return sorted(list(chosen)[:limit], key=lambda request: request.priority)

    def _sharing(self, resident: PrefixTree, context_len: float, limit: int) -> list[Request]:
        """Return those whose prompts begin with resident tokens, most tokens first."""
        wanted_bucket = _bucket_of(round(context_len))
        found: list[_Shared] = []
        # The salts of the oldest stand for all: there may be as many as clients.
        oldest = itertools.islice(self, MAX_CANDIDATES)
        salts = dict.fromkeys(request.prefix_salt for request in oldest)
        for bucket in sorted(self._trees, key=lambda bucket: abs(bucket - wanted_bucket)):
            for salt in salts:
                tree, root = self._trees[bucket].get(salt), resident.root((salt,))
                if tree is not None and root is not None:
                    found += _walk(tree.root, root, bucket, MAX_VISITS - len(found))
        found.sort(key=lambda share: (-share.num_tokens, abs(share.bucket - wanted_bucket)))
        requests: dict[Request, None] = {}
        for share in found:
            for request in share.node.requests():
                requests.setdefault(request)
                if len(requests) == limit:
                    return list(requests)
        return list(requests)


def _walk(prompts: PromptNode, resident: PrefixNode, bucket: int, max_visits: int) -> list[_Shared]:
    """Walk both trees where they agree; return subtrees of prompts with what all of each shares.

    At most `max_visits`, each node before those below it.
    """
    found: list[_Shared] = []
    stack = [(prompts, resident, 0, 0)]  # node and node, tokens into `resident`, shared so far
    while stack and len(found) < max_visits:
        node, cached, offset, shared = stack.pop()
        children = _matching(node, cached, offset)
        for child in itertools.islice(children, max_visits - len(found)):
            length, at, into = _descend(child.tokens, cached, offset)
            found.append(_Shared(shared + length, bucket, child))
            if length == len(child.tokens):
                stack.append((child, at, into, shared + length))
    return found


def _matching(node: PromptNode, cached: PrefixNode, offset: int) -> Iterator[PromptNode]:
    """Iterate over the children of a prompt node whose first token is resident right there."""
    if offset < len(cached.tokens):
        child = node.children.get(int(cached.tokens[offset]))
        return iter(() if child is None else (child,))
    if len(cached.residents) < len(node.children):
        return (node.children[token] for token in cached.residents if token in node.children)
    return (child for token, child in node.children.items() if token in cached.residents)


def _descend(tokens: Int32Array, cached: PrefixNode, offset: int) -> tuple[int, PrefixNode, int]:
    """Return how many of `tokens` follow a place of the prefix tree, and the place they lead to."""
    done = 0
    while done < len(tokens):
        if offset == len(cached.tokens):
            child = cached.residents.get(int(tokens[done]))
            if child is None:
                break
            cached, offset = child, 0
        common = common_len(cached.tokens[offset:], tokens[done:])
        done += common
        offset += common
        if offset < len(cached.tokens):
            break
    return done, cached, offset


def prefix_in_flight(request: Request, prefilling: Sequence[Request]) -> int:
    """Return how many more leading tokens of a waiting request are just being computed.

    Those beyond what it found, in the prompt of a running request that is not shared yet; 0 where
    that is too little to wait for (architecture 6: a best-effort request waits, a real-time one
    does not). A request that wants the log-probabilities of its prompt computes all of it: it has
    nothing to wait for.
    """
    if request.sampling.num_prompt_logprobs is not None:
        return 0
    best = 0
    for other in prefilling:
        if other.prefix_salt == request.prefix_salt:
            common = common_len(request.prompt_token_ids, other.prompt_token_ids)
            best = max(best, common - request.num_computed_tokens)
    return best if best >= MIN_IN_FLIGHT_TOKENS else 0


def _bucket_of(num_tokens: int) -> int:
    """Return the bucket of prompts of a length: powers of two."""
    return max(0, num_tokens).bit_length()
