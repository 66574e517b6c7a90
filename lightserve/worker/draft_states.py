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
the last accepted one belong to no row. It is recorded, too: behind the draws, which are not, all
layers are one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch, MostTokens, UnknownValues
from lightserve.kernels.weights import KeptInputs
from lightserve.messages.common import size_within
from lightserve.models.base import KeepsStates, KVTensors, Model
from lightserve.worker.device import DeviceQueue
from lightserve.worker.drafts import Drafted
from lightserve.worker.graphs import Graphs
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
                torch.zeros(most, num_channels, dtype=self._layers[0].dtype, device=device),
                torch.zeros(most, num_rates, dtype=torch.float32, device=device),
                torch.zeros(most, dtype=torch.int64, device=device),
            )
        self.graphs: StateGraphs | None = None
        """Recorded ways of states; None: kernels are launched one by one."""
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
        lengths = drafted.lengths + accepted
        held = torch.stack([drafted.rows, self._firsts, accepted + 1, lengths])
        if self.graphs is not None:
            self.graphs.move_on(held, len(kept.tokens))
            return
        host = held.tolist() if self._queue.is_at_once else None
        size = len(kept.tokens) if host is None else sum(host[2])
        _move_on(self._layers, self._kv, self._slots, kept, held, size=size, host=host)


def _move_on(
    layers: Sequence[KeepsStates],
    kv: KVTensors,
    slots: Tensor,
    kept: KeptInputs,
    held: Tensor,
    *,
    size: int,
    host: list[list[int]] | None = None,
) -> None:
    """Move the states of rows on by the inputs that a pass has kept, and let go of both.

    Args:
        layers: all that keep states.
        kv: where those are.
        slots: of each row's states, see `StateTable`.
        kept: the inputs.
        held: int64 [4, D]: rows, which input is the first of each, how many count, and the length
            of each row with the tokens of these.
        size: how many count in all, or more.
        host: `held` on the host; None: it is not known there.
    """
    rows, firsts, counts, lengths = held
    kept.is_held.index_fill_(0, rows, 0)
    ends = counts.cumsum(0)
    steps = torch.arange(size, device=held.device)
    owners = torch.searchsorted(ends, steps, right=True).clamp(max=len(rows) - 1)
    places = steps + (firsts - ends + counts).index_select(0, owners)
    places = places.clamp(max=len(kept.tokens) - 1)
    names = ("rows", "q_lens", "context_lens")
    known: list[Sequence[int]] = [UnknownValues(f"host_{name}", len(rows)) for name in names]
    if host is not None:
        known = [host[0], *host[2:]]
    batch = AttentionBatch(
        positions=steps,
        slot_mapping=steps[:0],
        req_to_slot=slots,
        rows=rows,
        cu_seqlens_q=torch.nn.functional.pad(ends, (1, 0)).int(),
        context_lens=lengths.int(),
        host_rows=known[0],
        host_q_lens=known[1],
        host_context_lens=known[2],
        most=MostTokens(size, size) if host is None else None,
        state_slots=slots,
    )
    for layer in layers:
        layer.replay(kept, places, batch, kv)
    kept.tokens.zero_()  # a graph reads all of the room's: they must be tokens of any pass


class StateGraphs(Graphs):
    """Recorded ways of states to behind the last accepted drafts, all layers in one launch.

    A size is a number of inputs, whatever rows they belong to. What `_move_on` is told of the rows
    is static, filled behind the draws on the device, and padded by the tables' last row, of which
    no input counts.
    """

    unit = "inputs of guesses"

    def _begin(self) -> None:
        """See `Graphs._begin`."""
        assert self._tables.kept is not None and self._tables.state_slots is not None
        self._kept, self._slots = self._tables.kept, self._tables.state_slots
        self._padding = (torch.arange(4, device=self._device) == 0)[:, None] * self._max_rows
        self._held = self._padding.repeat(1, self._max_rows)
        """int64 [4, max_num_seqs], see `_move_on`."""
        self._static = [self._held]

    def move_on(self, held: Tensor, num_inputs: int) -> None:
        """Move the states of rows on, all of whose inputs, not only those that count, are so many;
        `held` as in `_move_on`."""
        size = size_within(self._sizes, num_inputs)
        assert size is not None, "more inputs than there is room for"
        self._held.copy_(self._padding)
        self._held[:, : held.shape[1]].copy_(held)
        self._replays[size]()

    @torch.inference_mode()
    def check(self) -> None:
        """Compare the states that every graph leaves with those of kernels launched without one.

        Rows begin, and then go on from there twice; of the inputs of each all count, or the first
        alone, or half. Every rank does the same. Tables are as before afterwards, what is in the
        pool and in the room for inputs is not.

        Raises:
            StartupError: a graph leaves other bits.
        """
        generator = torch.Generator(self._device).manual_seed(0)
        for part in (self._kept.inputs, self._kept.rates):
            part.normal_(generator=generator)
        for size in self._sizes:
            most = (len(self._pool.k[0]) - 1) // (1 + self._tables.num_state_slots)
            # Few: the pool has the memory already, and of large models a state has 60 MB and more.
            num_rows = max(1, min(4, size, self._max_rows, most))
            with self._tables.with_rows(torch.zeros(num_rows, 1, dtype=torch.int32)):
                replayed = [*self._left_by(self.move_on, size, num_rows)]
                if not all(map(torch.equal, replayed, self._left_by(self._alone, size, num_rows))):
                    self._refuse(size, "leaves other states than its kernels do one by one")

    def _left_by(
        self, move_on: Callable[[Tensor, int], None], size: int, num_rows: int
    ) -> Iterator[Tensor]:
        """Move rows, which are empty, on three times; yield what is left of each state tensor, and
        of rows and tokens that are held."""
        rows = torch.arange(num_rows, device=self._device)
        slots = self._slots[:num_rows].long()
        banks = [bank for layer in self._pool.states for bank in layer]
        own = [slots[:, bank.first : bank.first + bank.num_slots].flatten() for bank in banks]
        for bank, places in zip(banks, own, strict=True):
            bank.pieces.index_fill_(2, places, 0)
        each, lengths = size // num_rows, torch.zeros_like(rows)
        for step in range(3):
            counts = 1 + (each - 1) * ((rows + step) % 3) // 2
            lengths = lengths + counts
            self._kept.is_held.index_fill_(0, rows, 1)
            self._kept.tokens[:size].fill_(1)
            move_on(torch.stack([rows, rows * each, counts, lengths]), size)
        for bank, places in zip(banks, own, strict=True):
            yield bank.pieces.index_select(2, places)
        yield self._kept.is_held.clone()
        yield self._kept.tokens[:size].clone()

    def _alone(self, held: Tensor, num_inputs: int) -> None:
        """Do as `move_on` does, without a graph and padding."""
        kept, layers = self._kept.first(num_inputs), self._model.recurrent
        _move_on(layers, self._pool, self._slots, kept, held, size=num_inputs)

    def _run(self, size: int) -> None:
        """See `Graphs._run`: at most `size` inputs."""
        self._alone(self._held[:, :size], size)
