"""Watches the KV that a real model runner's attention reads, and what its copies are good for.

Before every forward pass, all that the pass is going to read of what was computed earlier is
hashed, token by token, as attention finds it: through `req_to_slot`, all layers, keys and values.
It must be what it was when it was computed, wherever it has been since: paused, on
the host, moved to other slots. What a request reads of a cached prefix must be what a request with
the same tokens computed.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch
from lightserve.messages.common import Int32Array, unpack_int32
from lightserve.messages.router_worker import KVCopies, StepPlan
from lightserve.models.base import Model, Replaced
from lightserve.worker.memory import KVPool
from lightserve.worker.model_runner import ModelRunner

Hashes = npt.NDArray[np.int64]


class KVChanged(AssertionError):
    """Attention was about to read other KV than was computed."""


@dataclass
class Seen:
    """What the workers did, in tokens."""

    num_saved: int = 0
    num_loaded: int = 0
    num_loaded_ahead: int = 0
    """Of them, those that no step waited for."""
    num_overwritten: int = 0
    """Saved in the step that took them, and then written by another request."""
    num_own_again: int = 0
    """Saved, and then written or loaded by their owner before any other wrote there."""
    num_never_overwritten: int = 0
    """Saved, and not written until the end."""
    num_checked: int = 0
    """Read by attention and compared with what was computed."""
    num_checked_resumed: int = 0
    """Those of them that a request found again when it resumed."""
    num_replaced: int = 0
    """Own KV that gave way to what another request with the same tokens had computed."""
    num_variants: int = 0
    """Tokens that were computed again with another result; 0 where batches do not matter."""


class WatchedModel:
    """The model of a runner. Requests are told apart by `SamplingParams.seed`."""

    def __init__(self, runner: ModelRunner, *, checks: bool = True) -> None:
        self._model: Model = runner._model
        self._table = runner._table
        config = self._model.config
        # What a draft head keeps is written behind the pass, where this does not look.
        self._num_layers = len(config.kv_layers) - config.has_draft_head
        self._checks = checks
        self.seen = Seen()
        self._seed_of_row: dict[int, int] = {}
        self._known_of_row: dict[int, Int32Array] = {}
        """Tokens that came with a row's sequence."""
        self._resumed: set[int] = set()
        self._hashes: dict[int, list[int]] = {}
        """Of each request's positions, when they were last computed or replaced."""
        self._computed: defaultdict[bytes, set[int]] = defaultdict(set)
        """By tokens up to and with a position: what its KV came out as."""
        self._writers: dict[int, int] = {}
        self._unwritten: dict[int, int] = {}
        """Slots that were saved and not written since: whose KV was saved."""
        self._origins: dict[int, tuple[int, int]] = {}
        """By host slot: whose KV, and the slot it was in."""

    @property
    def context_len(self) -> int:
        return self._model.context_len

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor | None:
        return self._model.logits(hidden, out)

    def hidden(
        self,
        input_ids: Tensor,
        batch: AttentionBatch,
        pool: KVPool,
        wanted: Tensor,
        replaced: Replaced | None = None,
    ) -> Tensor:
        if self._checks:
            self._check(batch, pool)
        hidden = self._model.hidden(input_ids, batch, pool, wanted, replaced)
        self._record(batch, pool)
        return hidden

    # ---------------------------------------------------------------- copies

    def note_plan(self, plan: StepPlan) -> None:
        """Take in a plan that is about to be executed."""
        self._resumed.clear()
        for sequence in plan.sequences:
            seed = sequence.sampling.seed
            assert seed is not None
            self._seed_of_row[sequence.row] = seed
            known = b"".join(part.token_ids for part in sequence.segments)
            self._known_of_row[sequence.row] = unpack_int32(known)
            if seed in self._hashes:
                self._resumed.add(seed)
        slots, host_slots = unpack_int32(plan.saves.slots), unpack_int32(plan.saves.host_slots)
        self.seen.num_saved += len(slots)
        for slot, host_slot in zip(slots.tolist(), host_slots.tolist(), strict=True):
            owner = self._writers.get(slot, -1)  # -1: a state, which no token is
            self._unwritten[slot], self._origins[host_slot] = owner, (owner, slot)
        self._note_loads(plan.loads)
        self._note_loads(plan.ahead_loads)
        self.seen.num_loaded_ahead += len(plan.ahead_loads.slots) // 4

    def _note_loads(self, copies: KVCopies) -> None:
        slots, host_slots = unpack_int32(copies.slots), unpack_int32(copies.host_slots)
        self.seen.num_loaded += len(slots)
        for slot, host_slot in zip(slots.tolist(), host_slots.tolist(), strict=True):
            owner, origin = self._origins.get(host_slot, (-1, -1))
            if self._unwritten.get(origin) == owner:
                del self._unwritten[origin]
                self.seen.num_own_again += 1
            self._note_write(slot, owner)

    def _note_write(self, slot: int, seed: int) -> None:
        saved = self._unwritten.pop(slot, None)
        if saved is not None:
            self.seen.num_overwritten += saved != seed
            self.seen.num_own_again += saved == seed
        self._writers[slot] = seed

    def end(self) -> Seen:
        """Return what was seen, once nothing runs any more."""
        self.seen.num_never_overwritten += len(self._unwritten)
        self._unwritten.clear()
        return self.seen

    # ---------------------------------------------------------------- contents

    def _check(self, batch: AttentionBatch, pool: KVPool) -> None:
        rows = list(zip(batch.host_rows, batch.host_q_lens, batch.host_context_lens, strict=True))
        slots = [batch.req_to_slot[row, : end - count] for row, count, end in rows]
        found = np.split(
            self._hashes_of(pool, torch.cat(slots)), np.cumsum([len(part) for part in slots])[:-1]
        )
        for (row, _, _), hashes in zip(rows, found, strict=True):
            seed = self._seed_of_row[row]
            before = self._hashes.setdefault(seed, [])
            self.seen.num_checked += len(hashes)
            if seed in self._resumed:
                self.seen.num_checked_resumed += min(len(hashes), len(before))
            del before[len(hashes) :]
            if before == hashes.tolist():
                continue
            for position, now in enumerate(hashes.tolist()):
                if position < len(before) and before[position] == now:
                    continue
                if now not in self._computed.get(self._prefix(row, position), ()):
                    raise KVChanged(f"request {seed}: KV of position {position} is another")
                self.seen.num_replaced += position < len(before)
                before[position : position + 1] = [now]

    def _record(self, batch: AttentionBatch, pool: KVPool) -> None:
        hashes = iter(self._hashes_of(pool, batch.slot_mapping).tolist())
        slots = iter(batch.slot_mapping.tolist())
        rows = zip(batch.host_rows, batch.host_q_lens, batch.host_context_lens, strict=True)
        for row, count, end in rows:
            seed = self._seed_of_row[row]
            own = self._hashes.setdefault(seed, [])
            del own[end - count :]
            for position in range(end - count, end):
                own.append(next(hashes))
                variants = self._computed[self._prefix(row, position)]
                self.seen.num_variants += bool(variants) and own[-1] not in variants
                variants.add(own[-1])
                self._note_write(next(slots), seed)

    def _hashes_of(self, pool: KVPool, slots: Tensor) -> Hashes:
        return _hashes([tensor[:, : self._num_layers] for tensor in pool.tensors], slots)

    def _prefix(self, row: int, position: int) -> bytes:
        known = self._known_of_row[row][: position + 1]  # with ids of images, which the table lacks
        behind = self._table._token_ids[row, len(known) : position + 1].numpy()
        return known.tobytes() + behind.tobytes()


def _hashes(tensors: Sequence[Tensor], slots: Tensor) -> Hashes:
    """Return a number for each slot's bytes, all layers, int64 [n]: a product with odd numbers."""
    total = torch.zeros(len(slots), dtype=torch.int64)
    for index, tensor in enumerate(tensors):
        kv = tensor.index_select(3, slots.long()).permute(3, 0, 1, 2, 4).flatten(1)
        bits = kv.view(torch.int32 if kv.dtype == torch.float32 else torch.int16).long()
        total += ((bits + 1) * _odd_numbers(index, bits.shape[1])).sum(dim=1)
    return total.numpy()


@functools.cache
def _odd_numbers(seed: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 62), 1 << 62, (count,), generator=generator) * 2 + 1
