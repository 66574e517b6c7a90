"""States of recurrent layers in steps with drafts: moved on when it is known how far.

Nothing brings a state back to an earlier token. So a pass leaves the states of rows with drafts as
they are, and keeps the inputs that move them on; when the drafts are judged, those of the tokens
that count do. What is kept of a token are its channels of the convolutions and its rates, a small
part of a state: in the place of one state for each draft.

    pass      state behind L-1 tokens ─► results of L-1, L … L+k-1; inputs are kept
    judged    a of k drafts are accepted
    replay    state behind L-1 tokens, inputs of L-1 … L-1+a ─► state behind L+a tokens

The room for inputs is made once, for as many tokens as rows with drafts can have in a step: it is
part of what memory is planned for, and passes that are recorded know its address. How many drafts
are accepted a GPU alone knows: there a replay has as many tokens as the pass, of which those behind
the last accepted one belong to no row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch, MostTokens, UnknownValues
from lightserve.kernels.weights import KeptInputs
from lightserve.models.base import KeepsStates, KVTensors, Model
from lightserve.worker.device import DeviceQueue
from lightserve.worker.drafts import Drafted
from lightserve.worker.memory import StateTable
from lightserve.worker.tables import StepInputs, ranges


def kept_bytes(layers: Sequence[KeepsStates], num_tokens: int) -> int:
    """Return the memory of the inputs of so many tokens, of all recurrent layers of a rank."""
    each = sum(4 * layer.num_rates + layer.dtype.itemsize * layer.num_channels for layer in layers)
    return each * num_tokens


class DraftStates:
    """The states of rows with drafts between a pass and its draws."""

    def __init__(
        self, model: Model, kv: KVTensors, states: StateTable, queue: DeviceQueue, *, most: int
    ) -> None:
        """`most`: tokens that rows with drafts have in a step."""
        self._layers, self._kv, self._queue = model.recurrent, kv, queue
        self._slots = states.slots
        self.room: KeptInputs | None = None
        """Room for the inputs of `most` tokens; None: the model has no states, or no row drafts."""
        if self._layers and most:
            num_channels = sum(layer.num_channels for layer in self._layers)
            num_rates = sum(layer.num_rates for layer in self._layers)
            device = queue.device
            self.room = KeptInputs(
                torch.zeros(len(states.slots), dtype=torch.uint8, device=device),
                torch.empty(most, num_channels, dtype=self._layers[0].dtype, device=device),
                torch.empty(most, num_rates, dtype=torch.float32, device=device),
                torch.zeros(most, dtype=torch.int64, device=device),
            )
        self._kept: KeptInputs | None = None
        """The part of the room that the step has whose rows are held."""
        self._firsts = torch.empty(0)
        """int64 [D], which of these inputs is the first of each row."""

    def hold(self, inputs: StepInputs) -> KeptInputs | None:
        """Hold the rows with drafts of a step, and return room for the inputs of their tokens.

        None: no row has drafts, or the model has no states.
        """
        if inputs.draws is None or not self._layers:
            return None
        assert self.room is not None, "the start was told of no drafts"
        drafted = inputs.draws.drafted
        counts = inputs.q_lens[drafted.decodes]
        firsts = np.cumsum(inputs.q_lens)[drafted.decodes] - counts
        own = ranges(drafted.decodes, firsts, counts).positions
        tokens, self._firsts = self._queue.upload([own, np.cumsum(counts) - counts])
        assert len(tokens) <= len(self.room.tokens), "more tokens than steps with drafts have"
        self.room.is_held.index_fill_(0, drafted.rows, 1)
        self._kept = self.room.first(len(tokens))
        self._kept.tokens.copy_(tokens)
        return self._kept

    def move_on(self, drafted: Drafted, accepted: Tensor) -> None:
        """Move the states of the rows that are held to behind their last accepted draft.

        Args:
            drafted: the rows.
            accepted: int64 [D], drafts of each row that are.
        """
        if (kept := self._kept) is None:
            return
        self._kept = None
        rows, is_at_once = drafted.rows, self._queue.is_at_once
        kept.is_held.index_fill_(0, rows, 0)
        counts = accepted + 1
        ends = counts.cumsum(0)
        size = int(ends[-1]) if is_at_once else len(kept.tokens)
        steps = torch.arange(size, device=accepted.device)
        owners = torch.searchsorted(ends, steps, right=True).clamp(max=len(rows) - 1)
        places = steps + (self._firsts - ends + counts).index_select(0, owners)
        lengths, names = drafted.lengths + accepted, ("rows", "q_lens", "context_lens")
        host: list[Sequence[int]] = [UnknownValues(f"host_{name}", len(rows)) for name in names]
        if is_at_once:
            host = [part.tolist() for part in (rows, counts, lengths)]
        batch = AttentionBatch(
            positions=steps,
            slot_mapping=steps[:0],
            req_to_slot=self._slots,
            rows=rows,
            cu_seqlens_q=torch.nn.functional.pad(ends, (1, 0)).int(),
            context_lens=lengths.int(),
            host_rows=host[0],
            host_q_lens=host[1],
            host_context_lens=host[2],
            most=None if is_at_once else MostTokens(size, size),
            state_slots=self._slots,
        )
        places = places.clamp(max=len(kept.tokens) - 1)
        for layer in self._layers:
            layer.replay(kept, places, batch, self._kv)
        kept.tokens.zero_()  # a graph reads all of the room's: they must be tokens of any pass
