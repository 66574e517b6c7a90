"""Drafts by a layer of the model that is made for it, see `DraftHead`: on CPUs.

Its KV of each position is kept as that of all other layers is: copied, shared and given up with it.
At the end of each pass it takes in the pass's tokens; a draft is made at the beginning of a step,
from the last known token and the model's state before it, and further ones from the head's own.

    positions    1 … L-2        L-1                  L, L+1 …
    tokens       taken in       the last known one   guesses
    state        the model's    the model's          the head's
    guessed                     L                    L+1, L+2 …

The state before a row's first token is known from the row's last pass alone: a row that begins
behind a prefix, or goes on after a pause, begins with zeros. That costs the quality of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch
from lightserve.messages.router_worker import DecodeColumns, StepPlan
from lightserve.models.base import DraftHead, KVTensors, Model, TensorParallel
from lightserve.types import DraftSource
from lightserve.worker.drafts import Drafted, Proposal, Rows
from lightserve.worker.tables import StepInputs, ranges

_Int64Array = npt.NDArray[np.int64]


class HeadDrafts:
    """Proposes the head's likeliest tokens; see the module, and `Proposer`."""

    needs_lengths = False
    needs_slots = True

    def __init__(self, model: Model, head: DraftHead, kv: KVTensors, tp: TensorParallel) -> None:
        self._model, self._head, self._kv, self._tp = model, head, kv, tp
        self._states = torch.empty(0, 0)
        """[rows of the table, hidden_size], the model's state before the last known token."""
        self._pass = torch.empty(0, 0), np.empty(0, dtype=np.int64)
        """States of the last pass's tokens, and which of them is the first of each row."""

    def begin(self, plan: StepPlan, decodes: DecodeColumns, table: Tensor, lengths: Tensor) -> None:
        """See `Proposer.begin`."""
        if not len(self._states):
            shape = len(table), self._model.config.hidden_size
            self._states = torch.zeros(shape, dtype=self._head.dtype)
        self._states[[sequence.row for sequence in plan.sequences]] = 0.0

    def propose(self, table: Tensor, rows: Rows) -> Proposal:
        """See `Proposer.propose`."""
        shape = len(rows.numbers), int(rows.most.max())
        guesses = torch.zeros(shape, dtype=torch.int64)
        states, counts = self._states[rows.ids], torch.from_numpy(rows.most)
        tokens = table[rows.ids, rows.lengths - 1].long()
        for step in range(shape[1]):
            some = np.flatnonzero(rows.most > step)
            ends = rows.lengths.numpy()[some] + step
            batch = _behind_first(rows.slots, rows.numbers[some], np.ones_like(some), ends)
            states[some] = self._head.states(tokens[some], states[some], batch, self._kv)
            logits = self._model.logits(states[some])
            best = torch.empty(len(some), dtype=torch.int64) if logits is None else logits.argmax(1)
            guesses[some, step] = tokens[some] = self._tp.broadcast(best)
        return Proposal(guesses, counts, torch.full_like(counts, DraftSource.MTP))

    def take_in(self, inputs: StepInputs, input_ids: Tensor, hidden: Tensor, slots: Tensor) -> None:
        """Take in a pass: its tokens, int64 [T], their states [T, hidden_size], and the slots of
        all rows."""
        rows, q_lens, ends = inputs.rows, inputs.q_lens, inputs.context_lens
        firsts = np.cumsum(q_lens) - q_lens
        before = hidden.roll(1, 0)
        before[firsts] = self._states[rows]
        self._states[rows] = hidden[firsts + q_lens - 1]
        self._pass = hidden, firsts
        own_lens = np.minimum(q_lens, ends - 1)
        some = np.flatnonzero(own_lens)
        tokens = ranges(rows[some], (firsts + q_lens - own_lens)[some], own_lens[some]).positions
        batch = _behind_first(slots, rows[some], own_lens[some], ends[some])
        self._head.states(input_ids[tokens], before[tokens], batch, self._kv, writes_only=True)

    def learn(self, drafted: Drafted, accepted: Tensor) -> None:
        """See `Proposer.learn`."""
        hidden, firsts = self._pass
        self._states[drafted.rows] = hidden[torch.from_numpy(firsts[drafted.decodes]) + accepted]


def _behind_first(
    slots: Tensor, rows: _Int64Array, q_lens: _Int64Array, ends: _Int64Array
) -> AttentionBatch:
    """Return the batch of rows without their first token.

    Args:
        slots: of all rows, int32 [rows of the table, positions].
        rows: [R].
        q_lens: new tokens of each, at least one.
        ends: length of each with these and its first token.
    """
    num_rows, width = len(slots) - 1, slots.shape[1]
    own_rows, positions = ranges(rows, ends - q_lens, q_lens)
    row_ids = torch.from_numpy(rows)
    lengths: Sequence[int] = (ends - 1).tolist()
    return AttentionBatch(
        positions=torch.from_numpy(positions),
        slot_mapping=slots[torch.from_numpy(own_rows), torch.from_numpy(positions)].long(),
        # The same table from its second position on; the rows of all but the spare one fit.
        req_to_slot=slots.as_strided((num_rows, width), (width, 1), slots.storage_offset() + 1),
        rows=row_ids,
        cu_seqlens_q=torch.from_numpy(np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)),
        context_lens=torch.from_numpy((ends - 1).astype(np.int32)),
        host_rows=rows.tolist(),
        host_q_lens=q_lens.tolist(),
        host_context_lens=lengths,
    )
