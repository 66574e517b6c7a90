"""Drafts by a layer of the model that is made for it, see `DraftHead`.

Its KV of each position is kept as that of all other layers is: copied, shared and given up with it.
At the end of each pass it takes in the pass's tokens; a draft is made at the beginning of a step,
from the last known token and the model's state before it, and further ones from the head's own.

    positions    1 … L-2        L-1                  L, L+1 …
    tokens       taken in       the last known one   guesses
    state        the model's    the model's          the head's
    guessed                     L                    L+1, L+2 …

The state before a row's first token is known from the row's last pass alone: a row that begins
behind a prefix, or goes on after a pause, begins with zeros. That costs the quality of drafts.

Nothing waits for a GPU: where a row is, the device alone may know (`Begun.too_far`); the host knows
how many of its tokens a pass has, and where it is at most. The head's passes are launched kernel by
kernel, behind those of the model, which are graphs where there are any.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch
from lightserve.messages.router_worker import DecodeColumns, StepPlan
from lightserve.models.base import DraftHead, KVTensors, Model, TensorParallel
from lightserve.types import DraftSource
from lightserve.worker.device import DeviceQueue
from lightserve.worker.drafts import Drafted, Proposal, Rows
from lightserve.worker.tables import StepInputs, ranges

_Int64Array = npt.NDArray[np.int64]


class HeadDrafts:
    """Proposes the head's likeliest tokens; see the module, and `Proposer`."""

    needs_lengths = False
    needs_slots = True

    def __init__(
        self, model: Model, head: DraftHead, kv: KVTensors, tp: TensorParallel, queue: DeviceQueue
    ) -> None:
        self._model, self._head, self._kv, self._tp = model, head, kv, tp
        self._queue = queue
        self._states = torch.empty(0, 0)
        """[rows of the table, hidden_size], the model's state before the last known token."""
        self._pass = torch.empty(0, 0), np.empty(0, dtype=np.int64)
        """States of the last pass's tokens, and which of them is the first of each row."""

    def begin(self, plan: StepPlan, decodes: DecodeColumns, table: Tensor, lengths: Tensor) -> None:
        """See `Proposer.begin`."""
        self._pass = torch.empty(0, 0), np.empty(0, dtype=np.int64)  # memory for the next pass
        if not len(self._states):
            shape = len(table), self._model.config.hidden_size
            self._states = torch.zeros(shape, dtype=self._head.dtype, device=table.device)
        if plan.sequences:
            rows = np.array([sequence.row for sequence in plan.sequences], dtype=np.int64)
            (row_ids,) = self._queue.upload([rows])
            self._states.index_fill_(0, row_ids, 0.0)

    def propose(self, table: Tensor, rows: Rows) -> Proposal:
        """See `Proposer.propose`."""
        shape = len(rows.numbers), int(rows.most.max())
        guesses = torch.zeros(shape, dtype=torch.int64, device=table.device)
        states = self._states.index_select(0, rows.ids)
        tokens = table[rows.ids, rows.lengths - 1].long()
        for step in range(shape[1]):
            some = np.flatnonzero(rows.most > step)
            (own,) = self._queue.upload([some])
            too_far = rows.too_far if rows.too_far is None else rows.too_far.index_select(0, own)
            batch = self._behind_first(
                rows.slots, rows.numbers[some], np.ones_like(some), rows.ends[some] + step, too_far
            )
            found = self._head.states(
                tokens.index_select(0, own), states.index_select(0, own), batch, self._kv
            )
            states.index_copy_(0, own, found)
            logits = self._model.logits(found)
            best = self._tp.broadcast(torch.empty_like(own) if logits is None else logits.argmax(1))
            tokens.index_copy_(0, own, best)
            guesses[:, step].index_copy_(0, own, best)
        (counts,) = self._queue.upload([rows.most])
        return Proposal(guesses, counts, torch.full_like(counts, DraftSource.MTP))

    def take_in(self, inputs: StepInputs, input_ids: Tensor, hidden: Tensor, slots: Tensor) -> None:
        """Take in a pass: its tokens, int64 [T], their states [T, hidden_size], and the slots of
        all rows."""
        rows, q_lens, ends = inputs.rows, inputs.q_lens, inputs.context_lens
        firsts = np.cumsum(q_lens) - q_lens
        own_lens = np.minimum(q_lens, ends - 1)
        some = np.flatnonzero(own_lens)
        starts = (firsts + q_lens - own_lens)[some]
        row_ids, first_ids, last_ids, with_some, tokens = self._queue.upload(
            [
                rows,
                firsts,
                firsts + q_lens - 1,
                some,
                ranges(some, starts, own_lens[some]).positions,
            ]
        )
        before = hidden.roll(1, 0)
        before.index_copy_(0, first_ids, self._states.index_select(0, row_ids))
        self._states.index_copy_(0, row_ids, hidden.index_select(0, last_ids))
        self._pass = hidden, firsts
        if not len(some):
            return
        too_far = inputs.too_far
        batch = self._behind_first(
            slots,
            rows[some],
            own_lens[some],
            ends[some],
            too_far if too_far is None else too_far.index_select(0, with_some),
        )
        own_ids, own_before = input_ids.index_select(0, tokens), before.index_select(0, tokens)
        self._head.states(own_ids, own_before, batch, self._kv, writes_only=True)

    def learn(self, drafted: Drafted, accepted: Tensor) -> None:
        """See `Proposer.learn`."""
        hidden, firsts = self._pass
        (own,) = self._queue.upload([firsts[drafted.decodes]])
        self._states.index_copy_(0, drafted.rows, hidden.index_select(0, own + accepted))

    def _behind_first(
        self,
        slots: Tensor,
        rows: _Int64Array,
        q_lens: _Int64Array,
        ends: _Int64Array,
        too_far: Tensor | None,
    ) -> AttentionBatch:
        """Return the batch of rows without their first token.

        Args:
            slots: of all rows, int32 [rows of the table, positions].
            rows: [R].
            q_lens: new tokens of each, at least one.
            ends: length of each with these and its first token, or more: see `too_far`.
            too_far: int64 [R] on the device, by how much `ends` are more; None: by nothing.
        """
        num_rows, width = len(slots) - 1, slots.shape[1]
        own_rows, own_positions = ranges(rows, ends - q_lens, q_lens)
        row_ids, positions, places, offsets, context_lens = self._queue.upload(
            [
                rows,
                own_positions,
                own_rows * width + own_positions,
                np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32),
                (ends - 1).astype(np.int32),
            ]
        )
        if too_far is not None:
            context_lens = context_lens - too_far.int()
            (counts,) = self._queue.upload([q_lens])
            by_token = too_far.repeat_interleave(counts, output_size=len(own_positions))
            positions, places = positions - by_token, places - by_token
        return AttentionBatch(
            positions=positions,
            slot_mapping=slots.view(-1).index_select(0, places).long(),
            # The same table from its second position on; the rows of all but the spare one fit.
            req_to_slot=slots.as_strided((num_rows, width), (width, 1), slots.storage_offset() + 1),
            rows=row_ids,
            cu_seqlens_q=offsets,
            context_lens=context_lens,
            host_rows=rows.tolist(),
            host_q_lens=q_lens.tolist(),
            host_context_lens=(ends - 1).tolist(),
            is_bounded=too_far is not None,
        )
