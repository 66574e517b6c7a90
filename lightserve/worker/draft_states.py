"""States of recurrent layers in steps with drafts: moved on when it is known how far.

Nothing brings a state back to an earlier token. So a pass leaves the states of rows with drafts as
they are, and keeps the inputs that move them on; when the drafts are judged, those of the tokens
that count do. What is kept of a token are its channels of the convolutions and its rates, a small
part of a state: in the place of one state for each draft.

    pass      state behind L-1 tokens ─► results of L-1, L … L+k-1; inputs are kept
    judged    a of k drafts are accepted
    replay    state behind L-1 tokens, inputs of L-1 … L-1+a ─► state behind L+a tokens
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch, MostTokens, UnknownValues
from lightserve.kernels.weights import KeptInputs
from lightserve.models.base import KVTensors, Model
from lightserve.worker.device import DeviceQueue
from lightserve.worker.memory import StateTable
from lightserve.worker.tables import Draws, StepInputs


class DraftStates:
    """The states of rows with drafts between a pass and its draws."""

    def __init__(self, model: Model, kv: KVTensors, states: StateTable, queue: DeviceQueue) -> None:
        self._layers, self._kv, self._queue = model.recurrent, kv, queue
        self._slots = states.slots
        self._is_held = torch.zeros(len(states.slots), dtype=torch.uint8, device=queue.device)
        self._kept: KeptInputs | None = None
        """Inputs of the step whose rows are held."""

    def hold(self, inputs: StepInputs) -> KeptInputs | None:
        """Hold the rows with drafts of a step, and return room for the inputs of its draws.

        None: no row has drafts, or the model has no states.
        """
        if inputs.draws is None or not self._layers:
            return None
        self._is_held.index_fill_(0, inputs.draws.drafted.rows, 1)
        tokens = inputs.tensors.logit_rows
        num_channels = sum(layer.num_channels for layer in self._layers)
        num_rates = sum(layer.num_rates for layer in self._layers)
        dtype, device = self._layers[0].dtype, tokens.device
        room = torch.empty(len(tokens), num_channels, dtype=dtype, device=device)
        rates = torch.empty(len(tokens), num_rates, dtype=torch.float32, device=device)
        self._kept = KeptInputs(self._is_held, room, rates, tokens)
        return self._kept

    def move_on(self, draws: Draws, accepted: Tensor) -> None:
        """Move the states of the rows that are held to behind their last accepted draft.

        Args:
            draws: where the draws of each row are.
            accepted: int64 [D], drafts of each row that are.
        """
        if (kept := self._kept) is None:
            return
        self._kept = None
        rows = draws.drafted.rows
        self._is_held.index_fill_(0, rows, 0)
        counts = accepted + 1
        ends = counts.cumsum(0)
        size = int(ends[-1]) if self._queue.is_at_once else draws.num_drafted_tokens
        steps = torch.arange(size, device=accepted.device)
        owners = torch.searchsorted(ends, steps, right=True).clamp(max=len(rows) - 1)
        places = steps + (draws.of_drafted - ends + counts).index_select(0, owners)
        lengths, names = draws.drafted.lengths + accepted, ("rows", "q_lens", "context_lens")
        host: list[Sequence[int]] = [UnknownValues(f"host_{name}", len(rows)) for name in names]
        if self._queue.is_at_once:
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
            most=None if self._queue.is_at_once else MostTokens(size, size),
            state_slots=self._slots,
        )
        for layer in self._layers:
            layer.replay(kept, places.clamp(max=len(kept.inputs) - 1), batch, self._kv)
