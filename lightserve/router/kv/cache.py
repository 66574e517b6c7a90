"""The KV pool of the workers as the router keeps it: free slots, cached prefixes, live requests.

Every slot is free, cached (in the prefix tree, read by no request), or used: read or written by a
running or paused request. A request's KV is

    positions  0 ............ lease.num_tokens ............ num_held_tokens
               └ slots of the tree ──────────┘└ slots of its own ──┘

Its prompt joins the tree when all of it is computed, unless equal tokens of another are there
already; its output when it ends. So what the tree holds is confirmed, and never held twice by
one request. A request in flight never hits a chunk in flight.

Where a model has recurrent layers, requests and prefixes hold states as well (`states`).

What is taken from the end of a paused request goes to the host first (`checkpoints`); a part of
it that was in the tree, with no other as a user, leaves the tree and is private from then on.
Prefixes that are evicted may go to the host as well, and come back from there (`host_tier`).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from lightserve.messages.common import NO_INT32, Int32Array
from lightserve.router.kv.block_events import BlockEvent, BlockEvents
from lightserve.router.kv.host import Checkpoints, PlanCopies
from lightserve.router.kv.host_tier import HostTier, LoadIsCheaper
from lightserve.router.kv.prefix_node import EvictionOrder, Hit, Lease, PrefixNode
from lightserve.router.kv.prefix_tree import PrefixTree
from lightserve.router.kv.retained import RetainedPrefixes
from lightserve.router.kv.slots import BlockSlotPool, IndexArray
from lightserve.router.kv.states import States, all_slots
from lightserve.router.request import Found, Request, progress
from lightserve.types import BE, RT

EVICTION_PORTIONS = 128
"""Parts of the pool. One part is evicted at least, if it is in few nodes: full pools would evict in
every step otherwise, and leave no request room to grow side by side (docs/results/router.md)."""


class Preemption(StrEnum):
    """Fate of the KV of a request whose memory is needed; choices of `--preemption`."""

    CHECKPOINT = "checkpoint"
    """Only the needed tokens at its end are taken, and saved on the host (BROS)."""
    RECOMPUTE = "recompute"
    """All is given up, and computed again."""


@dataclass(frozen=True, kw_only=True)
class KVOptions:
    """Options of a `KVStore`."""

    cache_order: EvictionOrder | None = None
    """In which order cached prefixes go; None: nothing is cached."""
    block_size: int = 1
    """Slots per block of the allocator."""
    is_exclusive: bool = False
    """Whether a block belongs to one request; then nothing is cached."""
    preemption: Preemption = Preemption.RECOMPUTE
    rt_cache_min_tokens: int = 0
    """Cached tokens of real-time requests that best-effort ones may not take."""
    event_block_size: int = 0
    """Tokens of the blocks in which `KVStore.take_events` tells what is cached; 0: it does not."""
    max_retained_tokens: int = 0
    """Tokens of each key that are kept longer where requests ask for it; -1: a tenth of the
    pool."""

    def num_retained(self, num_slots: int) -> int:
        """Return how many tokens of each key may be kept longer in a pool of `num_slots`."""
        return num_slots // 10 if self.max_retained_tokens < 0 else self.max_retained_tokens


class KVStore:
    """Slots of one worker group."""

    def __init__(
        self,
        num_slots: int,
        options: KVOptions,
        *,
        num_host_slots: int = 0,
        num_prefix_slots: int = 0,
        num_state_slots: int = 0,
        load_is_cheaper: LoadIsCheaper = lambda _num_tokens, _start, _num_loaded: True,
    ) -> None:
        assert not (options.is_exclusive and num_state_slots), "states are of no block's sequence"
        if options.is_exclusive:  # without a short block: requests' costs add up to that of all
            num_slots = num_slots // options.block_size * options.block_size or num_slots
        self.num_slots = num_slots
        self.options = options
        self.checkpoints = Checkpoints(num_host_slots, num_prefix_slots)
        self._pool = BlockSlotPool(
            num_slots, block_size=options.block_size, is_exclusive=options.is_exclusive
        )
        order, size = options.cache_order, options.event_block_size
        self._events = BlockEvents(size) if size and order is not None else None
        self._tree: PrefixTree | None = None
        if order is not None:
            self._tree = PrefixTree(order, events=self._events, has_snapshots=num_state_slots > 0)
        self._tier: HostTier | None = None
        """Prefixes on the host; None where none are kept there."""
        if self._tree is not None and num_prefix_slots:
            assert not num_state_slots, "prefixes with states stay in the pool"
            self._tier = HostTier(self.checkpoints, load_is_cheaper, self._tree.tidy)
            self._tree.tier = self._tier
        self._held_ahead: dict[Request, Lease] = {}
        """Prefixes of requests that do not start with the plan that is being made, which brings
        back some of what follows them."""
        self.states = States(
            num_state_slots,
            self._pool,
            self._tree,
            self.checkpoints,
            lambda request, count: self.acquire([(request, count)]),
        )
        self._retained: RetainedPrefixes | None = None
        if self._tree is not None and (most := options.num_retained(num_slots)) > 0:
            self._retained = RetainedPrefixes(self._tree, max_tokens=most)
        self._load_is_cheaper = load_is_cheaper

    # ---------------------------------------------------------------- figures

    @property
    def tree(self) -> PrefixTree | None:
        """The cached prefixes, to be read; None where nothing is cached."""
        return self._tree

    @property
    def num_cached(self) -> int:
        """Slots whose KV is kept, but read by no running or paused request."""
        return 0 if self._tree is None else self._tree.num_evictable

    @property
    def num_wanted(self) -> int:
        """Cached slots that requests wait for."""
        return 0 if self._tree is None else self._tree.num_evictable_wanted

    @property
    def num_available(self) -> int:
        """Slots that can be had without taking any from a running or paused request."""
        return self._pool.num_free + self.num_cached

    @property
    def num_used(self) -> int:
        """Slots that running and paused requests read or write."""
        return self.num_slots - self.num_available

    @property
    def num_reserved_for_rt(self) -> int:
        """Cached slots that best-effort requests may not take."""
        if self._tree is None:
            return 0
        return min(self._tree.num_evictable_rt, self.options.rt_cache_min_tokens)

    # ---------------------------------------------------------------- prefixes

    def look_up(self, request: Request) -> Found:
        """Return how much of a request has KV, and what starting it takes besides.

        The last known token is always computed: its logits are needed. A request that wants the
        log-probabilities or the vector of its prompt computes all of it, once. One that runs is
        where it is.
        """
        if request.row is not None:
            return progress(request)
        if self.states.num_slots:
            return self._look_up_state(request)
        num_held = request.num_held_tokens
        num_there, num_pinned, num_on_host, found = num_held, 0, 0, None
        hit = self._hit(request)
        if hit.num_on_host and request.slots is None:
            n = hit.num_on_host
            num_on_host = n if self._load_is_cheaper(n, hit.num_tokens, n) else 0
        if hit.num_tokens > request.num_shared_tokens or num_on_host:
            num_there, found = max(num_held, hit.num_tokens), hit
            num_twice = max(0, min(num_held, hit.num_tokens) - request.num_shared_tokens)
            num_pinned = max(0, hit.num_evictable - num_twice)  # `_hold_prefix` frees its own
        num_lost = request.num_kept_tokens - num_there
        loads = num_lost > 0 and request.host is not None and request.host.start <= num_there
        loads = loads and self._load_is_cheaper(num_lost, num_there, num_lost)
        num_loaded = num_lost if loads else num_on_host
        start = num_there + num_loaded
        return Found(start, request.num_left_from(start), num_loaded, num_pinned, found)

    def _hit(self, request: Request) -> Hit:
        """Return what the prefix tree has of a request."""
        if self._tree is None or not request.takes_prefixes:
            return Hit(0, 0, None)
        known = request.expected if request.lease is None else request.lease.node
        tokens = request.known_token_ids()[:-1]
        return self._tree.look_up(request.prefix_salt, tokens, known=known)

    def _look_up_state(self, request: Request) -> Found:
        """Return what `look_up` does where a request needs a state: its own, or a snapshot.

        A paused one goes on where it was, or from a snapshot, should all between cost less than to
        load what it lost.
        """
        hit = self._hit(request)
        if request.is_paused:
            end, num_state = request.num_kept_tokens, len(request.recurrent.host_slots)
            num_loaded = end - request.num_held_tokens + num_state
            start = hit.num_tokens
            if not num_loaded or self._load_is_cheaper(max(0, end - start), start, num_loaded):
                num_left = request.num_left_from(end)
                return Found(end, num_left, num_loaded, num_state_slots=num_state)
        num_left = request.num_left_from(hit.num_tokens)
        found = hit if hit.num_tokens else None
        # `start` frees its own.
        num_pinned = max(0, hit.num_evictable - max(0, request.num_own_slots))
        return Found(hit.num_tokens, num_left, num_pinned=num_pinned, hit=found)

    def begin_plan(self, found: Iterable[Found]) -> None:
        """Keep what a plan found on the host until it is brought back: first of all."""
        if self._tier is not None:
            hits = [f.hit for f in found if f.num_loaded and f.hit is not None]
            self._tier.read([hit.host_node for hit in hits if hit.host_node is not None])

    def start(self, request: Request, found: Found) -> None:
        """Give a request that begins or resumes its table of slots, and hold its cached prefix.

        Every newcomer of a plan does so before slots are acquired, which may evict prefixes.
        """
        if self.states.num_slots and found.start < request.num_kept_tokens:
            self.release(request, keep=False)  # a state does not go back
            request.lose_kv()
        if request.slots is None:
            request.slots = np.empty(request.max_known_tokens, dtype=np.int32)
        if request.row is not None:
            self._pool.bind(request.row, request, request.request_class)
        self.hold(request, found)
        self.states.hold(request)
        if not found.num_loaded and request.host and request.host.end > found.start:
            self.checkpoints.drop(request)  # computed anew
        request.is_prompt_shared = request.num_shared_tokens >= request.num_prompt_tokens

    def hold(self, request: Request, found: Found) -> None:
        """Hold a waiting request's cached prefix, before it loads what is behind it.

        One that has no KV yet does not start: its prefix is held until the plan is whole.
        """
        if request.slots is None:
            assert self._tree is not None
            tokens = request.known_token_ids()[: found.num_there]
            is_real_time = request.request_class is RT
            self._held_ahead[request], _ = self._tree.acquire(
                request.prefix_salt, tokens, is_real_time=is_real_time
            )
            return
        if self._tree is not None:
            self._hold_prefix(request, found)
        request.num_computed_tokens = found.start
        request.num_paused_tokens = found.num_there

    def load(
        self, request: Request, num_tokens: int, *, is_ahead: bool = False, left: int = 0
    ) -> int:
        """Bring back from the host some of what `look_up` found, behind what is held.

        `is_ahead`: beside the step of the plan, and the request goes on waiting; otherwise it
        starts, and its state comes as well. `left` were found, too. Returns how much.
        """
        if not is_ahead:
            self.states.start(request)
        if num_tokens and request.host is None:
            return self._load_prefix(request, num_tokens, is_last=not left)
        if num_tokens:
            assert request.slots is not None
            start = request.num_paused_tokens
            end = start + num_tokens
            request.slots[start:end] = self.acquire([(request, num_tokens)])
            self.checkpoints.load(request, start, end, is_ahead=is_ahead)
            request.num_paused_tokens += num_tokens if is_ahead else 0
        return num_tokens

    def _load_prefix(self, request: Request, num_tokens: int, *, is_last: bool) -> int:
        """Bring back as much of a request's prefix; others may read it as well from now on.

        What others have brought back since the plan was made is there already.
        """
        assert self._tree is not None and self._tier is not None
        lease = self._held_ahead.get(request)
        before = request.lease if lease is None else lease
        assert before is not None
        tokens = request.known_token_ids()[: before.num_tokens + num_tokens]
        is_real_time = request.request_class is RT
        after, slots = self._tree.acquire(request.prefix_salt, tokens, is_real_time=is_real_time)
        self._tree.release(before)
        missing = tokens[len(slots) :]
        new = self.acquire([(request, len(missing))])
        copies = self.checkpoints.loads if lease is None else self.checkpoints.ahead_loads
        copies.add(new, self._tier.bring(after.node, missing, is_last=is_last))
        left = self._tree.extend(after, missing, new.copy(), is_found=True)
        assert len(left) == 0, "what is on the host lies no deeper than what is not"
        if lease is None:
            assert request.slots is not None
            request.lease = after
            request.slots[: len(tokens)] = np.concatenate([slots, new])
            request.is_prompt_shared = request.num_shared_tokens >= request.num_prompt_tokens
        else:
            self._held_ahead[request] = after
        return len(missing)

    def _hold_prefix(self, request: Request, found: Found) -> None:
        """Hold what the tree has of the tokens that are there; own copies of it are freed."""
        num_tokens = found.num_there
        assert self._tree is not None and request.slots is not None
        before, num_held = request.lease, request.num_held_tokens
        is_real_time = request.request_class is RT
        num_found = request.num_shared_tokens if found.hit is None else found.hit.num_tokens
        tokens = request.known_token_ids()[: min(num_tokens, num_found)]
        lease, slots = self._tree.acquire(request.prefix_salt, tokens, is_real_time=is_real_time)
        assert len(slots) >= num_tokens or num_held >= num_tokens, "something changed since"
        num_shared = request.num_shared_tokens
        duplicates = request.slots[num_shared : max(num_shared, min(len(slots), num_held))]
        self._pool.release(duplicates)
        request.slots[: len(slots)] = slots
        if before is not None:
            self._tree.release(before)
        request.lease = lease

    def learn_prompt(self, request: Request) -> None:
        """Let others share a running request's prompt, as far as it has been computed."""
        num_tokens = min(request.num_prompt_tokens, request.num_computed_tokens)
        request.is_prompt_shared = num_tokens == request.num_prompt_tokens
        self._learn(request, num_tokens)

    def _learn(self, request: Request, num_tokens: int) -> None:
        """Put the first `num_tokens` into the tree, unless more of them than held are there."""
        if self._tree is None or request.is_whole:
            return
        if self.states.num_slots:
            self.states.learn(request, num_tokens)
            return
        assert request.lease is not None and request.slots is not None
        start = request.lease.num_tokens
        tokens = request.known_token_ids()[:num_tokens]
        hit = self._tree.look_up(request.prefix_salt, tokens, known=request.lease.node)
        if hit.num_tokens == start:
            slots = request.slots[start:num_tokens].copy()
            self._tree.extend(request.lease, tokens[start:], slots)

    def expect(self, request: Request) -> None:
        """Count a request that begins to wait as a future user of its tokens' KV.

        Best-effort ones that never ran may start in any order: `PrefixTree.waiting` tells of them.
        """
        if self._tree is not None:
            is_free = request.request_class is BE and request.num_requeues == 0
            request.expected = self._tree.expect(
                request.prefix_salt, request.known_token_ids(), request if is_free else None
            )

    def forget(self, request: Request) -> None:
        """Take `expect` back: the request waits no longer."""
        if self._tree is not None and request.expected is not None:
            self._tree.forget(request.expected, request)
            request.expected = None

    def retain(self, request: Request, now_s: float) -> None:
        """Keep longer what a request wants kept of its prompt, all of which has been computed."""
        if self._retained is not None and request.num_retained_tokens > 0:
            prefix = request.prompt_token_ids[: request.num_retained_tokens]
            until_s = now_s + request.retention_s
            self._retained.keep(request.prefix_salt, prefix, until_s=until_s)

    def expire(self, now_s: float) -> None:
        """Keep no longer what was to be kept until now."""
        if self._retained is not None:
            self._retained.expire(now_s)

    # ---------------------------------------------------------------- slots

    def cost(self, request: Request, num_tokens: int) -> int:
        """Return how many free slots `num_tokens` more tokens of a request take."""
        return self._pool.cost(request, request.request_class, num_tokens)

    @property
    def costs_are_tokens(self) -> bool:
        """Whether so many tokens always take as many slots."""
        return not self.options.is_exclusive

    def cost_of_all(self, shares: Sequence[tuple[Request, int]]) -> int:
        """Return the sum of the costs of several requests' tokens."""
        if self.costs_are_tokens:
            return sum([num_tokens for _, num_tokens in shares])
        return sum(self.cost(request, num_tokens) for request, num_tokens in shares)

    def acquire(self, shares: Sequence[tuple[Request, int]]) -> Int32Array:
        """Take slots for each share's number of tokens, int32 [their sum], in order.

        Of cached slots as many go as must.

        Raises:
            ValueError: more than `num_available`.
        """
        if not shares:
            return NO_INT32
        wanted = [(request, request.request_class, count) for request, count in shares]
        total = sum([count for _, count in shares])
        if total > self._pool.num_free:
            self._make_free(total, sum([count for _, of, count in wanted if of is RT]))
        return self._pool.acquire_many(wanted)

    def acquire_one_each(self, rows: IndexArray) -> Int32Array:
        """Take one slot for the next token of each request that runs in `rows`, int64 [n].

        As `acquire`, for the decodes of a step, without looking at each request.
        """
        if not len(rows):
            return NO_INT32
        if len(rows) > self._pool.num_free:
            self._make_free(len(rows), self._pool.num_real_time(rows))
        return self._pool.acquire_one_each(rows)

    def _make_free(self, num_slots: int, num_real_time: int) -> None:
        """Evict what is cached until so many slots are free, some of them for real-time."""
        if self._tree is not None:
            num_reserved = self.num_reserved_for_rt if num_real_time < num_slots else 0
            self._evict(num_real_time - self._pool.num_free, 0)
            self._evict(num_slots - self._pool.num_free, num_reserved)

    def _evict(self, num_tokens: int, num_protected_rt: int) -> None:
        """Free cached slots; real-time's cache is protected while there is anything else."""
        assert self._tree is not None
        if num_tokens > 0:
            num_spare = max(0, self.num_slots // EVICTION_PORTIONS - num_tokens)
            if self._tier is not None:
                self._tier.make_room(min(num_tokens + num_spare, self._tier.num_slots))
            gone = self._tree.evict(
                num_tokens, num_spare=num_spare, num_protected_rt=num_protected_rt
            )
            self._pool.release(gone)
            if num_protected_rt and len(gone) < num_tokens:
                self._pool.release(self._tree.evict(num_tokens - len(gone)))

    def step_back(self, parts: Sequence[tuple[Request, int]]) -> None:
        """Forget the last tokens that were to be computed of running requests, so many of each.

        They are to be computed again, or do not exist. Nothing but the request itself reads them,
        and no plan in flight writes them.
        """
        gone = [np.empty(0, dtype=np.int32)]
        for request, num_tokens in parts:
            end = request.next_position
            start = end - num_tokens
            assert request.slots is not None and start >= request.num_shared_tokens
            if request.host is not None and request.host.end > start:
                self.checkpoints.drop(request)
            gone.append(request.slots[start:end])
            request.next_position = start
            self.states.retry(request)
        self._pool.release(np.concatenate(gone))

    def release(self, request: Request, *, keep: bool) -> None:
        """Take a request's KV back; `keep` as cache what was computed and is in the pool."""
        assert request.slots is not None
        if self._tree is not None and request.lease is not None:
            if keep:
                num_final = min(_num_final_tokens(request), request.num_held_tokens)
                self._learn(request, num_final)
                self.states.keep_last(request, num_final)
            own = request.held_slots[request.num_shared_tokens :].copy()
            self._tree.release(request.lease)
        else:
            own = request.held_slots
        self._pool.release(own)
        self.states.release(request)
        self._pool.stop_growing(request)
        self.checkpoints.drop(request)
        request.slots = request.lease = None

    # ---------------------------------------------------------------- taking from requests

    def takeable(self, request: Request, pinned: Container[PrefixNode] = ()) -> int:
        """Return how many slots at the end of a request's KV could be taken after saving them.

        Where it has a state, that is among them, and all are taken or none. `pinned`
        are nodes of the tree that newcomers of the same plan are going to read.
        """
        if self.options.preemption is Preemption.RECOMPUTE or self.checkpoints.num_slots == 0:
            return 0
        num_slots = len(request.recurrent.slots)
        if self._tree is None or request.lease is None or request.num_own_slots < 0:
            return num_slots + request.num_held_tokens
        num_slots += request.num_own_slots
        return num_slots + self._tree.exclusive_tail(request.lease, pinned)

    @property
    def saves(self) -> bool:
        """Whether what is taken from requests is saved, as far as the host has room."""
        return (
            self.options.preemption is not Preemption.RECOMPUTE and self.checkpoints.num_slots > 0
        )

    def num_free_beside(self, request: Request) -> int:
        """Return the free slots of the block that holds the last token of a request's KV."""
        if request.num_held_tokens == 0:
            return 0
        return self._pool.num_free_in_block_of(int(request.held_slots[-1]))

    def gain(self, request: Request, num_tokens: int) -> int:
        """Return how many slots become free by taking the last `num_tokens` of a request."""
        if not self.options.is_exclusive:
            return num_tokens
        return self._pool.gain(request.held_slots[request.num_held_tokens - num_tokens :])

    def take(self, request: Request, num_tokens: int) -> int | None:
        """Take the last `num_tokens` held tokens of a paused request, saved on the host.

        Its state is among them: see `takeable`. Returns how many had to be copied for that; None:
        the host has no room for them, so they are lost, as are those behind them, and where it had
        a state all others.
        """
        assert request.is_paused and request.slots is not None
        num_left = request.num_held_tokens - num_tokens + len(request.recurrent.slots)
        num_saved = self.checkpoints.save(request, num_left)
        if num_saved is None and self.states.num_slots:
            self.release(request, keep=False)
            request.lose_kv()
            self.expect(request)
            return None
        freed = request.slots[max(num_left, request.num_shared_tokens) : request.num_held_tokens]
        self._pool.release(freed)
        if request.num_shared_tokens > num_left:
            assert self._tree is not None and request.lease is not None
            count = request.num_shared_tokens - num_left
            self._pool.release(self._tree.take_tail(request.lease, count))
        if num_left:
            self._pool.go_back(request, request.request_class, int(request.slots[num_left - 1]))
        else:
            self._pool.stop_growing(request)
        self.states.release(request)
        request.num_paused_tokens = num_left
        return num_saved

    def num_freed_by(self, victims: Sequence[Request], pinned: Container[PrefixNode] = ()) -> int:
        """Return how many slots more would be available without these requests."""
        own = sum(
            self.gain(victim, victim.num_own_slots) + len(victim.recurrent.slots)
            for victim in victims
            if victim.slots is not None
        )
        return own + sum(len(node.tokens) for node in self.freed_by(victims, pinned))

    def freed_by(
        self, victims: Sequence[Request], pinned: Container[PrefixNode] = ()
    ) -> set[PrefixNode]:
        """Return what of the tree could be evicted more without these requests."""
        if self._tree is None:
            return set()
        leases = [victim.lease for victim in victims if victim.lease is not None]
        return self._tree.freed_by(leases, pinned)

    def take_events(self) -> list[BlockEvent]:
        """Return what was cached and evicted since the last call."""
        return [] if self._events is None else self._events.take()

    def take_copies(self) -> PlanCopies:
        """Return what the plan that is being made copies; it is whole."""
        for lease in self._held_ahead.values():
            assert self._tree is not None
            self._tree.release(lease)
        self._held_ahead.clear()
        if self._tier is not None:
            self._tier.end_plan()
        return self.checkpoints.take_copies()

    def check_integrity(self, holders: Iterable[Request]) -> None:
        """Assert that every slot is free, in the tree, or of one running or paused request."""
        holders = list(holders)
        nodes = [] if self._tree is None else list(self._tree.nodes())
        cached = [slots for node in nodes for slots in (node.slots, node.snapshot)]
        own = [request.held_slots[request.num_shared_tokens :] for request in holders]
        own += [all_slots(request.recurrent) for request in holders]
        held = np.concatenate([NO_INT32, *(s for s in cached if s is not None), *own])
        assert len(np.unique(held)) == len(held), "a slot has two owners"
        if not self.options.is_exclusive:
            assert len(held) + self._pool.num_free == self.num_slots, "slots leaked"
        copies = [node.host_slots for node in nodes if node.host_slots is not None]
        self.checkpoints.check_integrity(holders, copies)
        assert sum(map(len, copies)) == (0 if self._tier is None else self._tier.num_used)
        for node in nodes:
            below = [child for child in node.children.values() if child.host_slots is not None]
            assert node.num_on_host == len(below) and node.num_readers == 0
            assert node.host_slots is None or len(node.host_slots) == len(node.tokens)
        for request in holders:
            host = request.host
            assert request.num_held_tokens >= request.num_shared_tokens
            places = request.recurrent.slots, request.recurrent.host_slots
            assert sum(map(len, places)) == self.states.num_slots, "a state has one place"
            if request.is_paused and host is not None and host.end > request.num_held_tokens:
                assert host.start <= request.num_held_tokens, "a hole in a paused request's KV"


def _num_final_tokens(request: Request) -> int:
    """Return how many tokens of a request are computed, and certainly belong to it.

    What its frontend has not looked at may yet lie behind a stop string.
    """
    num_output = len(request.output_token_ids)
    if request.num_acknowledged_tokens is not None:
        num_output = min(num_output, request.num_acknowledged_tokens)
    return min(request.num_computed_tokens, request.num_prompt_tokens + num_output)
