"""The KV pool of the workers as the router keeps it: free slots, cached prefixes, live requests.

Every slot is free, cached (in the prefix tree, read by nobody), or used: read or written by a
live request. A request's KV is

    positions  0 ............ lease.num_tokens ............ next_position
               └ slots of the tree ──────────┘└ slots of its own ──┘

Its prompt joins the tree when all of it is computed, unless somebody's equal tokens are there
already; its output when it ends. So what the tree holds is confirmed, and never held twice by
one request. A request in flight never hits a chunk in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from lightserve.messages.common import Int32Array
from lightserve.router.kv.prefix_node import EvictionOrder
from lightserve.router.kv.prefix_tree import PrefixTree
from lightserve.router.kv.slots import SlotPool
from lightserve.router.request import Request
from lightserve.types import RequestClass

PrefixKey = tuple[str]
"""The salt; an adapter and content ids may join it."""


class KVStore:
    """Slots of one worker group. `order` None: nothing is cached."""

    def __init__(self, num_slots: int, *, order: EvictionOrder | None) -> None:
        self.num_slots = num_slots
        self._pool = SlotPool(num_slots)
        self._tree = PrefixTree(order) if order is not None else None

    # ---------------------------------------------------------------- figures

    @property
    def num_cached(self) -> int:
        """Slots whose KV is kept, but read by no live request."""
        return 0 if self._tree is None else self._tree.num_evictable

    @property
    def num_available(self) -> int:
        """Slots that can be had without taking any from a live request."""
        return self._pool.num_free + self.num_cached

    @property
    def num_used(self) -> int:
        """Slots that live requests read or write."""
        return self.num_slots - self.num_available

    @property
    def num_shared(self) -> int:
        """Slots of the tree that live requests read."""
        return 0 if self._tree is None else self._tree.num_resident - self._tree.num_evictable

    # ---------------------------------------------------------------- prefixes

    def look_up(self, request: Request) -> Request:
        """Note on a waiting request how much of it has KV here, and what holding that takes.

        The last known token is always computed: its logits are needed. A request that wants the
        log-probabilities of its prompt computes all of it. Returns the request.
        """
        if self._tree is None or request.sampling.num_prompt_logprobs is not None:
            return request
        hit = self._tree.look_up(_key(request), request.known_token_ids()[:-1])
        request.num_computed_tokens, request.num_pinned_by_start = hit
        return request

    def start(self, request: Request) -> None:
        """Give a request its table of slots, with those of its cached prefix."""
        request.slots = np.empty(request.max_kv_tokens, dtype=np.int32)
        if self._tree is None:
            return
        tokens = request.known_token_ids()[: request.num_computed_tokens]
        request.lease, slots = self._tree.acquire(
            _key(request), tokens, is_real_time=request.request_class is RequestClass.RT
        )
        assert len(slots) == request.num_computed_tokens, "looked up before something changed"
        request.slots[: len(slots)] = slots

    def learn_prompt(self, request: Request) -> None:
        """Let others share a live request's prompt, all of which has been computed."""
        self._learn(request, request.num_prompt_tokens)

    def _learn(self, request: Request, num_tokens: int) -> None:
        """Put the first `num_tokens` into the tree, unless more of them than held are there."""
        if self._tree is None:
            return
        assert request.lease is not None and request.slots is not None
        start = request.lease.num_tokens
        tokens = request.known_token_ids()[:num_tokens]
        if self._tree.look_up(_key(request), tokens).num_tokens == start:
            slots = request.slots[start:num_tokens].copy()
            self._tree.extend(request.lease, tokens[start:], slots)

    def expect(self, request: Request) -> None:
        """Count a request that begins to wait as a future user of its tokens' KV (E7)."""
        if self._tree is not None:
            self._tree.expect(_key(request), request.known_token_ids())

    def forget(self, request: Request) -> None:
        """Take `expect` back: the request waits no longer, its tokens are the same."""
        if self._tree is not None:
            self._tree.forget(_key(request), request.known_token_ids())

    # ---------------------------------------------------------------- slots

    def acquire(self, count: int) -> Int32Array:
        """Take `count` slots, int32 [count], of cached ones as many as must be.

        Raises:
            ValueError: more than `num_available`.
        """
        missing = count - self._pool.num_free
        if missing > 0 and self._tree is not None:
            self._pool.release(self._tree.evict(missing))
        return self._pool.acquire(count)

    def release(self, request: Request, *, keep: bool) -> None:
        """Take a request's KV back; `keep` what was computed as cache."""
        assert request.slots is not None
        if self._tree is not None and request.lease is not None:
            if keep:
                self._learn(request, _num_final_tokens(request))
            self._tree.release(request.lease)
        self._pool.release(request.held_slots[request.num_shared_tokens :])
        request.slots = request.lease = None

    def num_freed_by(self, victims: Sequence[Request]) -> int:
        """Return how many slots more would be available without these requests."""
        own = sum(victim.num_own_slots for victim in victims)
        if self._tree is None:
            return own
        leases = [victim.lease for victim in victims if victim.lease is not None]
        return own + self._tree.num_freed_by(leases)

    def check_integrity(self, live: Iterable[Request]) -> None:
        """Assert that every slot is free, in the tree, or of one live request."""
        cached = [] if self._tree is None else [n.slots for n in self._tree.nodes()]
        own = [request.held_slots[request.num_shared_tokens :] for request in live]
        held = np.concatenate([_NONE, *(s for s in cached if s is not None), *own])
        assert len(np.unique(held)) == len(held), "a slot has two owners"
        assert len(held) + self._pool.num_free == self.num_slots, "slots leaked"


_NONE: Int32Array = np.empty(0, dtype=np.int32)


def _num_final_tokens(request: Request) -> int:
    """Return how many tokens of a request are computed, and certainly belong to it.

    What its frontend has not looked at may yet lie behind a stop string.
    """
    num_output = len(request.output_token_ids)
    if request.num_acknowledged_tokens is not None:
        num_output = min(num_output, request.num_acknowledged_tokens)
    return min(request.num_computed_tokens, request.num_prompt_tokens + num_output)


def _key(request: Request) -> PrefixKey:
    return (request.prefix_salt,)
