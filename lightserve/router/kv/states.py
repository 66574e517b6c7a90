"""States of recurrent layers: those of requests, and snapshots of them that prefixes keep.

A recurrent layer has no KV that grows: its state behind a token takes the place of all tokens
before. The states of one sequence in all such layers are the bytes of n slots of the pool, so that
one budget holds both. A request that runs has n slots of its own, whose content every step moves
on. Nothing brings a state back to an earlier position, hence these rules beside those of KV:

    - a *snapshot*, n slots that a node of the prefix tree owns, is the state behind its last token;
      a request goes on from the longest prefix that has KV and a snapshot
    - what is taken from a paused request is all of it, its state included, or it loses all of it
    - a draw that has to be made again begins with a copy of the state from before

Snapshots are made where a step ends a chunk, so chunks end where one is wanted (`cut`): where the
prompts of others, those that wait and those in the tree, part from this one's. It is worth its
slots where the tokens that are not computed again, by all that part there, are as many. The end of
a chunk or of a prompt has one where slots are free. When a request ends, its own slots become the
snapshot of its last token, for the next turn of a conversation.

Sources: Marconi (Pan and others, MLSys 2025) for snapshots where prefixes part, and for an eviction
that weighs both kinds of memory; Echo for the requests that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from lightserve.messages.common import NO_INT32, Int32Array, pack_int32
from lightserve.messages.router_worker import NO_STATE_COPIES, SlotRange, StateCopies
from lightserve.router.kv.host import Checkpoints
from lightserve.router.kv.prefix_node import PrefixNode, common_len, path_of
from lightserve.router.kv.prefix_tree import PrefixTree
from lightserve.router.kv.slots import BlockSlotPool
from lightserve.router.request import WAITING, Recurrent, Request


class CopiesInside:
    """Copies of states inside the pool, merged into one list."""

    def __init__(self) -> None:
        self._from: list[Int32Array] = []
        self._to: list[Int32Array] = []

    def add(self, from_slots: Int32Array, to_slots: Int32Array) -> None:
        """Add a state: its place, and where it is to be as well, int32 [n] each."""
        self._from.append(from_slots)
        self._to.append(to_slots)

    def take(self) -> StateCopies:
        """Return them as part of a message, and begin anew."""
        if not self._from:
            return NO_STATE_COPIES
        copies = StateCopies(*(pack_int32(np.concatenate(p)) for p in (self._from, self._to)))
        self._from, self._to = [], []
        return copies


class StateChanges(NamedTuple):
    """Parts of a plan that are about states, as `StepPlan` names them."""

    slot_ranges: list[SlotRange]
    state_loads: StateCopies
    state_saves: StateCopies


NO_STATE_CHANGES = StateChanges([], NO_STATE_COPIES, NO_STATE_COPIES)


class States:
    """States of the requests of one worker group; nothing at all where a model has none."""

    def __init__(
        self,
        num_slots: int,
        pool: BlockSlotPool,
        tree: PrefixTree | None,
        checkpoints: Checkpoints,
        acquire: Callable[[Request, int], Int32Array],
    ) -> None:
        """`num_slots` of a state; `acquire` takes slots for a request, cached ones if need be."""
        self.num_slots = num_slots
        self._pool = pool
        self._tree = tree
        self._checkpoints = checkpoints
        self._acquire = acquire
        self._loads, self._saves = CopiesInside(), CopiesInside()
        self._read: list[PrefixNode] = []
        """Nodes whose snapshots the plan that is being made reads."""
        self._sources: dict[Request, Int32Array] = {}
        """Slots inside the pool that states of its newcomers come from."""
        self._to_come: dict[Request, int] = {}
        """Requests that run, and will come to a border that is wanted: where."""
        self._moved: list[tuple[Request, int, int]] = []
        """Positions of requests that are in other slots than the workers know: first, and end."""

    # ---------------------------------------------------------------- what requests hold

    def num_missing(self, request: Request) -> int:
        """Return the slots beside those of its tokens that a request takes when it starts."""
        own = request.recurrent
        if request.constraint is not None:
            return 2 * self.num_slots - len(own.slots) - len(own.spare)
        return self.num_slots - len(own.slots)

    def portion(self, num_takeable: int, num_missing: int) -> int:
        """Return how many of a request's takeable slots are taken where some are missing.

        With a state they are all taken, or none.
        """
        if self.num_slots and num_missing > 0:
            return num_takeable
        return max(0, min(num_takeable, num_missing))

    @property
    def num_in_snapshots(self) -> int:
        """Slots that hold snapshots of prefixes."""
        return 0 if self._tree is None else self._tree.num_in_snapshots

    @property
    def num_kept(self) -> int:
        """Slots that best-effort newcomers leave to snapshots, made or to come, that others await.

        At most half of what is free or cached; what one takes of it costs the next ones more.
        """
        if self._tree is None:
            return 0
        num_slots = self._tree.num_awaited + self.num_slots * len(self._to_come)
        return min(num_slots, (self._pool.num_free + self._tree.num_evictable) // 2)

    def hold(self, request: Request) -> None:
        """Keep the snapshot at the end of a request's cached prefix until its plan is whole."""
        if self.num_slots and request.lease is not None and len(request.recurrent.slots) == 0:
            node = request.lease.node
            if node.snapshot is not None and request.next_position == request.lease.num_tokens:
                assert self._tree is not None
                self._tree.read(node, 1)
                self._read.append(node)
                self._sources[request] = node.snapshot

    def start(self, request: Request) -> None:
        """Give a request that starts slots for its state, with the state that it goes on from."""
        if self.num_slots == 0:
            return
        own = request.recurrent
        if request.constraint is not None and not len(own.spare):
            own.spare = self._acquire(request, self.num_slots)
        if not len(own.slots):
            own.slots = self._acquire(request, self.num_slots)
            if len(own.host_slots):
                self._checkpoints.load_state(request)
            elif request in self._sources:
                self._loads.add(self._sources[request], own.slots)
        self._moved.append((request, -self.num_slots, 0))
        if borders := [at for at in self.borders(request) if at > request.next_position]:
            self._to_come[request] = borders[-1]

    def keep_for_retry(self, request: Request) -> None:
        """Copy a state to the spare slots before a step whose draw may yield no token."""
        own = request.recurrent
        if len(own.spare) and request.next_position > 0:
            self._loads.add(self._sources.get(request, own.slots), own.spare)

    def retry(self, request: Request) -> None:
        """Go back to the state before the last token, whose draw yielded none."""
        own = request.recurrent
        if len(own.spare) and request.next_position > 0:
            own.slots, own.spare = own.spare, own.slots
            self._moved.append((request, -self.num_slots, 0))

    def settle(self, request: Request) -> None:
        """Free the spare slots of a request that has a token: no draw of it is made again."""
        own = request.recurrent
        if len(own.spare):
            self._pool.release(own.spare)
            own.spare = NO_INT32

    def release(self, request: Request) -> None:
        """Free all that a request holds in the pool beside the slots of its tokens."""
        if self.num_slots:
            self._to_come.pop(request, None)
            own = request.recurrent
            request.recurrent = Recurrent(self.num_slots, host_slots=own.host_slots)
            self._pool.release(all_slots(own))

    def take_changes(self) -> StateChanges:
        """Return what the plan that is being made says of states; the next one begins."""
        if self.num_slots == 0:
            return NO_STATE_CHANGES
        assert self._tree is not None or not self._read
        for node in self._read:
            self._tree.read(node, -1)  # type: ignore[union-attr]
        ranges = [
            SlotRange(request.row, start, pack_int32(_slots_of(request, start, end)))
            for request, start, end in self._moved
            if request.row is not None
        ]
        self._read, self._moved, self._sources = [], [], {}
        return StateChanges(ranges, self._loads.take(), self._saves.take())

    # ---------------------------------------------------------------- snapshots

    def cut(
        self,
        request: Request,
        start: int,
        num_tokens: int,
        borders: Callable[[Request], Sequence[int]],
    ) -> int:
        """Return how many of a request's next tokens one step may compute, at least one.

        So a chunk ends where a snapshot is wanted, one of `borders`, and before a token whose draw
        may have to be made again.
        """
        if self.num_slots == 0 or request.is_whole or num_tokens == 1:
            return num_tokens
        end = start + num_tokens
        last = request.num_prompt_tokens + len(request.output_token_ids) - 1
        is_starting = request.row is None and request.constraint is not None
        if (request.awaits_grammar or is_starting) and start < last < end:
            end = last
        if start < request.num_prompt_tokens:
            end = min([end, *[at for at in borders(request) if start < at < end]])
        return end - start

    def end_chunk(self, request: Request, num_tokens: int) -> bool:
        """Make a snapshot where a chunk of a prompt ends, if it is wanted and there is room.

        Returns whether it did.
        """
        end = request.next_position + num_tokens
        is_awaited = request in self._to_come
        if is_awaited and end >= self._to_come[request]:
            del self._to_come[request]
        if self._tree is None or request.is_whole or end > request.num_prompt_tokens:
            return False
        needed = self.num_slots * (1 if is_awaited else 2)  # the next steps need some as well
        if self._pool.num_free < needed:
            is_wanted = end in self.borders(request)
            if not is_wanted or self._pool.num_free + self._tree.num_evictable < needed:
                return False
        slots = self._acquire(request, self.num_slots)
        self._saves.add(request.recurrent.slots, slots)
        request.recurrent.snapshots.append((end, slots))
        return True

    def are_due(self, request: Request) -> bool:
        """Whether tokens have been computed of which a snapshot is not in the tree yet."""
        snapshots = request.recurrent.snapshots
        return bool(snapshots) and snapshots[0][0] <= request.num_computed_tokens

    def learn(self, request: Request, num_tokens: int) -> None:
        """Put a request's first tokens into the tree, with the snapshots that it has of them.

        Some may be there already: it had to compute them again, as their state was gone. Then it
        goes on with the tree's slots. Plans run in order, so those in flight may yet read its own.
        """
        own, lease = request.recurrent, request.lease
        assert self._tree is not None and lease is not None and request.slots is not None
        tokens = request.known_token_ids()[:num_tokens]
        due = [(at, slots) for at, slots in own.snapshots if at <= num_tokens]
        own.snapshots = own.snapshots[len(due) :]
        for end, slots in [*due, (num_tokens, NO_INT32)]:
            if (start := lease.num_tokens) < end:
                table = request.slots[start:end]
                left = self._tree.extend(lease, tokens[start:end], table.copy())
                if num_twice := len(left) - (end - lease.num_tokens):
                    self._pool.release(left[:num_twice])
                    parts = [n.slots for n in path_of(lease.node) if n.slots is not None]
                    table[: lease.num_tokens - start] = np.concatenate(parts[::-1])[start:]
                    self._moved.append((request, start, lease.num_tokens))
            if len(slots):
                self._put(request, end, slots)

    def keep_last(self, request: Request, num_tokens: int) -> None:
        """Leave the state of a request that ends to the tree, if it is that of its known tokens."""
        own = request.recurrent
        if len(own.slots) and num_tokens == request.next_position:
            slots, own.slots = own.slots, NO_INT32
            self._put(request, num_tokens, slots)

    def _put(self, request: Request, position: int, slots: Int32Array) -> None:
        """Let the tree have a snapshot at the end of a request's lease, or free its slots."""
        assert self._tree is not None and request.lease is not None
        node = request.lease.node
        is_there = request.lease.num_tokens == position and node.parent is not None
        if not (is_there and self._tree.put_snapshot(node, slots)):
            self._pool.release(slots)

    def borders(self, request: Request) -> list[int]:
        """Return the positions in a request's prompt at which snapshots are worth their slots.

        Walks the tree: a plan asks once for each request.
        """
        root = None if self._tree is None else self._tree.root(request.prefix_salt)
        if root is None:
            return []
        tokens = request.prompt_token_ids[:-1]
        is_counted = request.state is WAITING and request.expected is not None
        return wanted_borders(root, tokens, int(is_counted), self.num_slots)


def wanted_borders(root: PrefixNode, tokens: Int32Array, num_own: int, worth: int) -> list[int]:
    """Return the positions at which others part from a prefix, where that saves enough.

    Args:
        root: of the tree.
        tokens: int32 [n], the prefix.
        num_own: how often the tree counts the prefix's own request among those that wait.
        worth: tokens that all which part there have to save together.
    """
    borders: list[int] = []
    at = last = 0
    node = root
    while at < len(tokens) and (below := node.children.get(int(tokens[at]))) is not None:
        common = common_len(below.tokens, tokens[at:])
        at += common
        num_here, is_end = below.num_expected - num_own, common < len(below.tokens)
        if is_end or at == len(tokens):  # all that others have in common with it
            num_parting = max(num_here, int(below.slots is not None))
        else:
            beyond = below.children.get(int(tokens[at]))
            num_beyond = 0 if beyond is None else beyond.num_expected - num_own
            num_parting = max(num_here - num_beyond, len(below.children) - (beyond is not None))
        if not is_end and below.snapshot is not None:
            last = at
        elif num_parting * (at - last) >= worth:
            borders.append(at)
            last = at
        node = below
        if is_end:
            break
    return borders


def _slots_of(request: Request, start: int, end: int) -> Int32Array:
    """Return the slots of positions of a request; those of its state where they are negative."""
    if start < 0:
        return request.recurrent.slots
    assert request.slots is not None
    return request.slots[start:end]


def all_slots(own: Recurrent) -> Int32Array:
    """Return the slots in the pool that a request holds beside those of its tokens, int32 [n]."""
    snapshots = [slots for _, slots in own.snapshots]
    return np.concatenate([own.slots, own.spare, *snapshots])
