"""The state of each row that a worker keeps, its tokens and their slots, and the step's inputs.

    token_ids[row, position]      known tokens; sampling writes the next one
    req_to_slot[row, position]    where the KV of that position is

Both tables are on the device. What a plan changes and what its step needs is worked out on the
host with vectorised indexing, no loop over tokens, and goes there in one upload. A *place* is
row * width + position: an index into a flat table.

The tables have a row more than there are sequences: the padding row, of position 0 in the KV
pool's scratch slot, which rows stand for that a CUDA graph has too many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch
from lightserve.kernels.weights import KeptInputs
from lightserve.messages.common import Int32Array, unpack_int32
from lightserve.messages.images import without_image_ids
from lightserve.messages.router_worker import (
    AddSequence,
    DecodeColumns,
    OutputKind,
    PlanRow,
    StepPlan,
    plan_columns,
    unpack_decodes,
)
from lightserve.types import RowId
from lightserve.worker.device import Array, DeviceQueue
from lightserve.worker.drafts import Begun, Drafted, Drafts, Proposer

Int64Array = npt.NDArray[np.int64]
_NO_PLACES: Int64Array = np.empty(0, dtype=np.int64)
_NO_TOKENS: Int32Array = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class PromptSpan:
    """Consecutive tokens of a prompt whose successors' log-probabilities are wanted."""

    row: RowId
    next_ids: Tensor
    """int64 [n], the prompt's token after each of them, on the device; n may be 0."""
    num_top: int
    """Most probable tokens that are wanted at each place."""


class StepTensors(NamedTuple):
    """The numbers that a step needs on the device, however its pass runs."""

    logit_rows: Tensor
    """int64 [L + sum of n]: tokens whose logits are wanted: those behind which is drawn, then those
    of `prompt_spans`, one span after the other."""
    sampled_places: Tensor
    """int64 [L], where each new token will be stored."""
    sampled_positions: Tensor
    """int64 [L], position that each new token will have."""


@dataclass(frozen=True, eq=False)
class StepInputs:
    """The inputs of one forward pass and its sampling."""

    tensors: StepTensors
    prompt_spans: list[PromptSpan]
    """Spans of the rows that want log-probabilities of their prompt, in the plan's order."""
    sampled_rows: list[RowId]
    """Row of each of the first L of `logit_rows`."""
    rows: Int64Array
    """[R], the plan's rows, …"""
    q_lens: Int64Array
    """… the new tokens of each, …"""
    context_lens: Int64Array
    """… and its length with them, or more: see `too_far`."""
    too_far: Tensor | None = None
    """int64 [R] on the device, by how much `context_lens` are more than that; None: by nothing."""
    draws: Draws | None = None
    """The draws of each row that samples; None: one each."""
    num_verified: int = 0
    """Tokens of drafts, proposed or not."""

    @property
    def lengths(self) -> dict[RowId, int]:
        """Return how many tokens of each row are known before the one that it samples."""
        rows = zip(self.rows.tolist(), self.context_lens.tolist(), strict=True)
        return {RowId(row): length for row, length in rows}

    @property
    def is_decode(self) -> bool:
        """Whether every row has one new token."""
        return bool((self.q_lens == 1).all())

    @property
    def is_plain_decode(self) -> bool:
        """Whether that is so, and every row samples the next token and wants nothing else."""
        num_rows = len(self.rows)
        return self.is_decode and num_rows == len(self.sampled_rows) == len(self.tensors.logit_rows)


class Draws(NamedTuple):
    """Where the draws of rows are in a step some of whose rows have drafts."""

    drafted: Drafted
    firsts: Int64Array
    """[rows that sample], the first draw of each; the others follow it."""
    of_drafted: Tensor
    """int64 [D], the same of those with drafts, on the device."""


class SequenceTable:
    """The tables of one rank, int32 [max_num_seqs + 1, max_model_len + 1]."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        queue: DeviceQueue,
        *,
        scratch_slot: int = 0,
        state_slots: Tensor | None = None,
        proposer: Proposer | None = None,
        placeholder: int = 0,
    ) -> None:
        """Make the tables.

        `scratch_slot` is the padding row's; `state_slots`: see `AttentionBatch`; `proposer`
        guesses drafts, None: no plan has any. `placeholder` is written for each token of an image.
        """
        self._placeholder = placeholder
        # One more position: the last sampled token is stored, never computed.
        self._width = max_model_len + 1
        self.max_num_seqs = max_num_seqs
        shape = (max_num_seqs + 1, self._width)
        self._queue = queue
        self._token_ids = torch.zeros(shape, dtype=torch.int32, device=queue.device)
        self._req_to_slot = torch.zeros(shape, dtype=torch.int32, device=queue.device)
        self._req_to_slot[max_num_seqs, :1].fill_(scratch_slot)
        self._flat_tokens, self._flat_slots = self._token_ids.view(-1), self._req_to_slot.view(-1)
        self.state_slots = state_slots
        self._drafts: Drafts | None = None
        if proposer is not None:
            self._drafts = Drafts(self._token_ids, self._req_to_slot, queue, proposer)
        self._indices = torch.arange(max_num_seqs, device=queue.device)
        """The logits that a step of decodes alone wants."""
        self._num_prompt = np.zeros(max_num_seqs + 1, dtype=np.int64)
        self._num_top = [0] * max_num_seqs
        """Most probable tokens that are wanted at each place of the prompt."""

    @property
    def token_ids(self) -> Tensor:
        """Known tokens, int32 [max_num_seqs + 1, max_model_len + 1]; the last row is padding."""
        return self._token_ids

    @property
    def req_to_slot(self) -> Tensor:
        """The slot of each position's KV, of the same shape."""
        return self._req_to_slot

    def begin(self, plan: StepPlan) -> StepInputs:
        """Take in a plan's new sequences and slots and return the inputs of its step."""
        decodes, begun = unpack_decodes(plan.decodes), None
        if self._drafts is not None:
            if self._drafts.needs_slots and len(decodes.num_drafts):
                own = decodes.rows, decodes.start_positions, decodes.num_tokens
                early: list[Array] = [self._places(*own), decodes.slots.copy()]
                self._flat_slots.index_copy_(0, *self._queue.upload(early))
            begun = self._drafts.begin(plan, decodes)
        if begun is None and not (plan.rows or plan.sequences or plan.slot_ranges):
            return self._begin_decodes(decodes)
        columns = plan_columns(plan, decodes)
        rows, starts, counts = (
            part.astype(np.int64)
            for part in (columns.rows, columns.start_positions, columns.num_tokens)
        )
        if begun is not None:
            starts[: len(decodes.rows)] = begun.starts
            counts[: len(decodes.rows)] = 1 + begun.num_drafts
        wants, ends, offsets = columns.samples, starts + counts, np.cumsum(counts)
        draws = _Draws(rows[wants], ends[wants], offsets[wants] - 1)
        if begun is not None:
            draws, *more = _with_drafts(draws, wants, begun)
        news = self._take_in(plan, decodes)
        firsts = (offsets - counts)[len(rows) - len(plan.rows) :]
        spans = self._prompt_spans(list(zip(plan.rows, firsts.tolist(), strict=True)))
        arrays: list[Array] = [
            np.concatenate([draws.logit_rows, spans.indices]),
            draws.rows * self._width + draws.positions,
            draws.positions,
            spans.next_places,
            *news,
        ]
        uploaded = self._queue.upload(arrays)
        if news:
            token_places, tokens, slot_places, slots = uploaded[4:]
            self._flat_tokens.index_copy_(0, token_places, tokens)
            self._flat_slots.index_copy_(0, slot_places, slots)
        inputs = StepInputs(
            StepTensors._make(uploaded[:3]),
            self._with_next_ids(spans, uploaded[3]),
            cast("list[RowId]", draws.rows.tolist()),
            rows,
            counts,
            ends,
        )
        return inputs if begun is None else self._with_begun(inputs, begun, *more)

    def _with_begun(
        self, inputs: StepInputs, begun: Begun, owners: Int64Array, firsts: Int64Array
    ) -> StepInputs:
        """Return inputs with what is known of drafts and positions on the device alone.

        `owners` [L]: the row of the plan of each draw. `firsts` [rows that sample]: see `Draws`.
        """
        tensors, draws, drafted = inputs.tensors, None, begun.drafted
        chosen = _NO_PLACES if drafted is None else drafted.decodes
        owner_ids, of_drafted = self._queue.upload([owners, firsts[chosen]])
        if begun.too_far is not None:
            by_draw = begun.too_far.index_select(0, owner_ids)
            places, positions = tensors.sampled_places, tensors.sampled_positions
            tensors = StepTensors(tensors.logit_rows, places - by_draw, positions - by_draw)
        if drafted is not None:
            draws = Draws(drafted, firsts, of_drafted)
        return replace(
            inputs,
            tensors=tensors,
            too_far=begun.too_far,
            draws=draws,
            num_verified=int(begun.num_drafts.sum()),
        )

    def _begin_decodes(self, decodes: DecodeColumns) -> StepInputs:
        """Take in a plan of plain decodes; most of its inputs are known beforehand."""
        rows, starts = decodes.rows.astype(np.int64), decodes.start_positions.astype(np.int64)
        places, ends = rows * self._width + starts, starts + 1
        # A copy: what was read from a message may not be written, and torch warns of that.
        arrays = [places, places + 1, ends, decodes.slots.copy()]
        token_places, next_places, positions, slots = self._queue.upload(arrays)
        self._flat_slots.index_copy_(0, token_places, slots)
        tensors = StepTensors(self._indices[: len(rows)], next_places, positions)
        sampled_rows = cast("list[RowId]", rows.tolist())
        return StepInputs(tensors, [], sampled_rows, rows, np.ones_like(rows), ends)

    def unrecorded(
        self,
        inputs: StepInputs,
        turned: Int64Array | None = None,
        kept: KeptInputs | None = None,
    ) -> tuple[Tensor, AttentionBatch]:
        """Return a step's new tokens, int64 [T], and attention's inputs, for a pass launched
        kernel by kernel.

        `turned`: positions, see `RowImages.turned`; `kept`: see `AttentionBatch`.
        """
        rows, counts, ends = inputs.rows, inputs.q_lens, inputs.context_lens
        token_rows, positions = ranges(rows, ends - counts, counts)
        row_ids, own_positions, places, offsets, context_lens, *turns = self._queue.upload(
            [
                rows,
                positions,
                token_rows * self._width + positions,
                np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
                ends.astype(np.int32),
                *(() if turned is None else turned.reshape(-1, len(positions))),
            ]
        )
        if inputs.too_far is not None:
            context_lens = context_lens - inputs.too_far.int()
            by_token = inputs.too_far.repeat_interleave(
                self._queue.upload([counts])[0], output_size=int(counts.sum())
            )
            own_positions, places = own_positions - by_token, places - by_token
            turns = [own - by_token for own in turns]
        batch = AttentionBatch(
            positions=own_positions,
            slot_mapping=self._flat_slots.index_select(0, places).long(),
            req_to_slot=self._req_to_slot,
            rows=row_ids,
            cu_seqlens_q=offsets,
            context_lens=context_lens,
            host_rows=rows.tolist(),
            host_q_lens=counts.tolist(),
            host_context_lens=ends.tolist(),
            is_bounded=inputs.too_far is not None,
            state_slots=self.state_slots,
            kept=kept,
            turned=turns[0] if len(turns) == 1 else torch.stack(turns) if turns else None,
            host_prompt_lens=(self._num_prompt[rows] - ends + counts).clip(0, counts).tolist(),
        )
        return self._flat_tokens.index_select(0, places).long(), batch

    def tokens_of(self, row: RowId, start: int, stop: int) -> list[int]:
        """Return a row's tokens at positions start … stop-1; waits for the steps before."""
        token_ids: list[int] = self._token_ids[row, start:stop].tolist()
        return token_ids

    def append(self, inputs: StepInputs, token_ids: Tensor) -> Tensor | None:
        """Store the draws, int64 [L], at the positions that the next plan will name.

        Returns how many drafts of each row with drafts are accepted, int64 [D]; None: no row has.
        """
        draws, accepted, (_, places, positions) = inputs.draws, None, inputs.tensors
        if self._drafts is not None:
            self._drafts.note_draws(places, positions)
            if draws is not None:
                accepted = self._drafts.accept(draws.drafted, draws.of_drafted, token_ids)
        self._flat_tokens.index_copy_(0, places, token_ids.int())
        return accepted

    def _take_in(self, plan: StepPlan, decodes: DecodeColumns) -> list[Array]:
        """Note new tokens and slots; return their places and contents, or nothing."""
        if not plan.sequences and not plan.slot_ranges and not len(decodes.rows):
            return []
        tokens = [_tokens_of(sequence, self._placeholder) for sequence in plan.sequences]
        for sequence in plan.sequences:
            self._num_prompt[sequence.row] = sequence.num_prompt_tokens
            self._num_top[sequence.row] = sequence.sampling.num_prompt_logprobs or 0
        ranges = [part for part in plan.slot_ranges if part.start_position >= 0]
        slots = [part.slots for part in ranges]
        own_places = decodes.rows.astype(np.int64) * self._width + decodes.start_positions
        if len(decodes.num_drafts):
            own_places = self._places(decodes.rows, decodes.start_positions, decodes.num_tokens)
        return [
            self._places(
                [sequence.row for sequence in plan.sequences],
                [0] * len(tokens),
                [len(part) for part in tokens],
            ),
            np.concatenate([_NO_TOKENS, *tokens]),
            np.concatenate(
                [
                    own_places,
                    self._places(
                        [part.row for part in ranges],
                        [part.start_position for part in ranges],
                        [len(part) // _NO_TOKENS.itemsize for part in slots],
                    ),
                ]
            ),
            # A copy: what was read from a message may not be written, and torch warns of that.
            unpack_int32(b"".join([plan.decodes.slots, *slots])).copy(),
        ]

    def _places(
        self,
        rows: Sequence[int] | Int32Array,
        starts: Sequence[int] | Int32Array,
        counts: Sequence[int] | Int32Array,
    ) -> Int64Array:
        """Return the places of ranges of positions, int64 [sum of counts]."""
        index = ranges(*(np.array(part, dtype=np.int64) for part in (rows, starts, counts)))
        return index.rows * self._width + index.positions

    def _prompt_spans(self, rows: Sequence[tuple[PlanRow, int]]) -> _Spans:
        """Return the spans of a plan's rows, given with the places of their first tokens."""
        found = _Spans([], _NO_PLACES, _NO_PLACES)
        for row, offset in rows:
            if not row.output & OutputKind.PROMPT_LOGPROBS:
                continue
            start = row.start_position
            end = min(start + row.num_tokens, int(self._num_prompt[row.row]) - 1)
            num_tokens = max(0, end - start)
            steps = np.arange(num_tokens, dtype=np.int64)
            found = _Spans(
                [*found.rows, (row.row, num_tokens)],
                np.concatenate([found.indices, offset + steps]),
                np.concatenate([found.next_places, row.row * self._width + start + 1 + steps]),
            )
        return found

    def _with_next_ids(self, spans: _Spans, next_places: Tensor) -> list[PromptSpan]:
        if not spans.rows:
            return []
        next_ids = self._flat_tokens.index_select(0, next_places).long()
        parts = next_ids.split_with_sizes([num_tokens for _, num_tokens in spans.rows])
        return [
            PromptSpan(row, own, self._num_top[row])
            for (row, _), own in zip(spans.rows, parts, strict=True)
        ]


class _Spans(NamedTuple):
    """The parts that `PromptSpan`s are made of."""

    rows: list[tuple[RowId, int]]
    """And their numbers of tokens."""
    indices: Int64Array
    """Indices of all their tokens among the step's."""
    next_places: Int64Array
    """Places of the tokens after them."""


class Index(NamedTuple):
    """Row and position of tokens."""

    rows: Int64Array
    positions: Int64Array


def ranges(rows: Int64Array, starts: Int64Array, counts: Int64Array) -> Index:
    """Return row and position of every token of ranges start … start+count-1, int64 [T] both."""
    if counts.size == counts.sum() and counts.all():  # one token each: decodes
        return Index(rows, starts)
    offsets = np.repeat(np.cumsum(counts) - counts, counts)
    positions = np.arange(counts.sum()) - offsets + np.repeat(starts, counts)
    return Index(np.repeat(rows, counts), positions)


class _Draws(NamedTuple):
    """The draws of a step, [L] each."""

    rows: Int64Array
    positions: Int64Array
    """Positions of the tokens that are drawn."""
    logit_rows: Int64Array
    """Tokens behind which they are drawn, among the step's."""


def _with_drafts(
    draws: _Draws, wants: npt.NDArray[np.bool_], begun: Begun
) -> tuple[_Draws, Int64Array, Int64Array]:
    """Return all draws of rows that sample, given the last of each; `wants` [rows of the plan].

    And for each of them which row of the plan it is of; and the first of each row that samples.
    """
    before = np.zeros_like(draws.rows)
    before[: len(begun.num_drafts)] = begun.num_drafts
    rows, positions = ranges(draws.rows, draws.positions - before, 1 + before)
    logit_rows = ranges(draws.rows, draws.logit_rows - before, 1 + before).positions
    owners = np.repeat(np.flatnonzero(wants), 1 + before)
    return _Draws(rows, positions, logit_rows), owners, np.cumsum(1 + before) - 1 - before


def _tokens_of(sequence: AddSequence, placeholder: int) -> Int32Array:
    known = np.concatenate([unpack_int32(part.token_ids) for part in sequence.segments])
    return without_image_ids(known, placeholder)
