"""What a worker knows of each row: its tokens and their slots. And the step's inputs.

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
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch
from lightserve.messages.common import Int32Array, unpack_int32
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
from lightserve.worker.device_queue import Array, DeviceQueue

_Int64Array = npt.NDArray[np.int64]
_NO_PLACES: _Int64Array = np.empty(0, dtype=np.int64)
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
    """What a step is about, on the device."""

    rows: Tensor
    """int64 [R], of the plan's rows."""
    positions: Tensor
    """int64 [T], of the new tokens."""
    places: Tensor
    """int64 [T], of the new tokens."""
    cu_seqlens_q: Tensor
    """int32 [R+1]."""
    context_lens: Tensor
    """int32 [R]."""
    logit_rows: Tensor
    """int64 [L + sum of n]: tokens whose logits are wanted: those that sample, then those of
    `prompt_spans`, one span after the other."""
    sampled_places: Tensor
    """int64 [L], where each new token will be stored."""
    sampled_positions: Tensor
    """int64 [L], position that each new token will have."""


@dataclass(frozen=True, eq=False)
class StepInputs:
    """What one forward pass and its sampling need."""

    tensors: StepTensors
    prompt_spans: list[PromptSpan]
    """Of the rows that want log-probabilities of their prompt, in the plan's order."""
    sampled_rows: list[RowId]
    """Row of each of the first L of `logit_rows`."""
    host_rows: Sequence[int]
    host_q_lens: Sequence[int]
    host_context_lens: Sequence[int]

    @property
    def is_plain_decode(self) -> bool:
        """Whether every row has one new token and samples the next one, and nothing else."""
        num_rows, tensors = len(self.host_rows), self.tensors
        return (
            num_rows == len(self.sampled_rows) == len(tensors.positions) == len(tensors.logit_rows)
        )


class SequenceTable:
    """The tables of one rank, int32 [max_num_seqs + 1, max_model_len + 1]."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, queue: DeviceQueue, *, scratch_slot: int = 0
    ) -> None:
        """`scratch_slot` is the padding row's."""
        # One more position than the model has: the last sampled token is stored, never computed.
        self._width = max_model_len + 1
        self.max_num_seqs = max_num_seqs
        shape = (max_num_seqs + 1, self._width)
        self._queue = queue
        self._token_ids = torch.zeros(shape, dtype=torch.int32, device=queue.device)
        self._req_to_slot = torch.zeros(shape, dtype=torch.int32, device=queue.device)
        self._req_to_slot[max_num_seqs, :1].fill_(scratch_slot)
        self._flat_tokens, self._flat_slots = self._token_ids.view(-1), self._req_to_slot.view(-1)
        self._offsets = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=queue.device)
        self._indices = torch.arange(max_num_seqs, device=queue.device)
        """These two are the same in every step of one token each."""
        self._num_prompt = [0] * max_num_seqs
        self._num_top = [0] * max_num_seqs
        """Most probable tokens that are wanted at each place of the prompt."""

    @property
    def token_ids(self) -> Tensor:
        """Known tokens, int32 [max_num_seqs + 1, max_model_len + 1]; the last row is padding."""
        return self._token_ids

    @property
    def req_to_slot(self) -> Tensor:
        """Where the KV of each position is, of the same shape."""
        return self._req_to_slot

    def begin(self, plan: StepPlan) -> StepInputs:
        """Take in a plan's new sequences and slots and return what its step needs."""
        if not (plan.rows or plan.sequences or plan.slot_ranges):
            return self._begin_decodes(unpack_decodes(plan.decodes))
        columns = plan_columns(plan)
        rows, starts, counts = (
            part.astype(np.int64)
            for part in (columns.rows, columns.start_positions, columns.num_tokens)
        )
        wants, ends = columns.samples, starts + counts
        offsets = np.concatenate([[0], np.cumsum(counts)])
        token_rows, positions = _ranges(rows, starts, counts)
        news = self._take_in(plan)
        first_other = len(rows) - len(plan.rows)
        spans = self._prompt_spans(
            list(zip(plan.rows, offsets[first_other:-1].tolist(), strict=True))
        )
        arrays: list[Array] = [
            rows,
            positions,
            token_rows * self._width + positions,
            offsets.astype(np.int32),
            ends.astype(np.int32),
            np.concatenate([offsets[1:][wants] - 1, spans.indices]),
            rows[wants] * self._width + ends[wants],
            ends[wants],
            spans.next_places,
            *news,
        ]
        uploaded = self._queue.upload(arrays)
        if news:
            token_places, tokens, slot_places, slots = uploaded[9:]
            self._flat_tokens.index_copy_(0, token_places, tokens)
            self._flat_slots.index_copy_(0, slot_places, slots)
        return StepInputs(
            tensors=StepTensors._make(uploaded[:8]),
            prompt_spans=self._with_next_ids(spans, uploaded[8]),
            sampled_rows=cast("list[RowId]", rows[wants].tolist()),
            host_rows=rows.tolist(),
            host_q_lens=counts.tolist(),
            host_context_lens=ends.tolist(),
        )

    def _begin_decodes(self, decodes: DecodeColumns) -> StepInputs:
        """Do the same for a plan of plain decodes, most of which is known beforehand."""
        num_rows = len(decodes.rows)
        rows, starts = decodes.rows.astype(np.int64), decodes.start_positions.astype(np.int64)
        places, ends = rows * self._width + starts, starts + 1
        arrays: list[Array] = [rows, starts, places, places + 1, ends]
        # A copy: what was read from a message may not be written, and torch warns of that.
        arrays += [ends.astype(np.int32), decodes.slots.copy()]
        uploaded = self._queue.upload(arrays)
        row_ids, positions, token_places, next_places, next_positions, lengths, slots = uploaded
        self._flat_slots.index_copy_(0, token_places, slots)
        host_rows = rows.tolist()
        return StepInputs(
            tensors=StepTensors(
                rows=row_ids,
                positions=positions,
                places=token_places,
                cu_seqlens_q=self._offsets[: num_rows + 1],
                context_lens=lengths,
                logit_rows=self._indices[:num_rows],
                sampled_places=next_places,
                sampled_positions=next_positions,
            ),
            prompt_spans=[],
            sampled_rows=host_rows,
            host_rows=host_rows,
            host_q_lens=[1] * num_rows,
            host_context_lens=ends.tolist(),
        )

    def input_ids(self, inputs: StepInputs) -> Tensor:
        """Return the new tokens, int64 [T]."""
        return self._flat_tokens.index_select(0, inputs.tensors.places).long()

    def batch(self, inputs: StepInputs) -> AttentionBatch:
        """Return what attention needs of a step."""
        tensors = inputs.tensors
        return AttentionBatch(
            positions=tensors.positions,
            slot_mapping=self._flat_slots.index_select(0, tensors.places).long(),
            req_to_slot=self._req_to_slot,
            rows=tensors.rows,
            cu_seqlens_q=tensors.cu_seqlens_q,
            context_lens=tensors.context_lens,
            host_rows=inputs.host_rows,
            host_q_lens=inputs.host_q_lens,
            host_context_lens=inputs.host_context_lens,
        )

    def append(self, inputs: StepInputs, token_ids: Tensor) -> None:
        """Store the sampled tokens, int64 [L], at the positions that the next plan will name."""
        self._flat_tokens.index_copy_(0, inputs.tensors.sampled_places, token_ids.int())

    def _take_in(self, plan: StepPlan) -> list[Array]:
        """Note what is new; return places and contents of tokens, and of slots, or nothing."""
        decodes = unpack_decodes(plan.decodes)
        if not plan.sequences and not plan.slot_ranges and not len(decodes.rows):
            return []
        tokens = [_tokens_of(sequence) for sequence in plan.sequences]
        for sequence in plan.sequences:
            self._num_prompt[sequence.row] = sequence.num_prompt_tokens
            self._num_top[sequence.row] = sequence.sampling.num_prompt_logprobs or 0
        slots = [part.slots for part in plan.slot_ranges]
        return [
            self._places(
                [sequence.row for sequence in plan.sequences],
                [0] * len(tokens),
                [len(part) for part in tokens],
            ),
            np.concatenate([_NO_TOKENS, *tokens]),
            np.concatenate(
                [
                    decodes.rows.astype(np.int64) * self._width + decodes.start_positions,
                    self._places(
                        [part.row for part in plan.slot_ranges],
                        [part.start_position for part in plan.slot_ranges],
                        [len(part) // _NO_TOKENS.itemsize for part in slots],
                    ),
                ]
            ),
            # A copy: what was read from a message may not be written, and torch warns of that.
            unpack_int32(b"".join([plan.decodes.slots, *slots])).copy(),
        ]

    def _places(
        self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int]
    ) -> _Int64Array:
        """Return the places of ranges of positions, int64 [sum of counts]."""
        index = _ranges(*(np.array(part, dtype=np.int64) for part in (rows, starts, counts)))
        return index.rows * self._width + index.positions

    def _prompt_spans(self, rows: Sequence[tuple[PlanRow, int]]) -> _Spans:
        """Return those of a plan's rows, given with the places of their first tokens."""
        found = _Spans([], _NO_PLACES, _NO_PLACES)
        for row, offset in rows:
            if not row.output & OutputKind.PROMPT_LOGPROBS:
                continue
            start = row.start_position
            end = min(start + row.num_tokens, self._num_prompt[row.row] - 1)
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
    """What `PromptSpan`s are made of."""

    rows: list[tuple[RowId, int]]
    """And their numbers of tokens."""
    indices: _Int64Array
    """Of all their tokens among the step's."""
    next_places: _Int64Array
    """Of the tokens after them."""


class _Index(NamedTuple):
    rows: _Int64Array
    positions: _Int64Array


def _ranges(rows: _Int64Array, starts: _Int64Array, counts: _Int64Array) -> _Index:
    """Return row and position of every token of ranges start … start+count-1, int64 [T] both."""
    if counts.size == counts.sum() and counts.all():  # one token each: decodes
        return _Index(rows, starts)
    offsets = np.repeat(np.cumsum(counts) - counts, counts)
    positions = np.arange(counts.sum()) - offsets + np.repeat(starts, counts)
    return _Index(np.repeat(rows, counts), positions)


def _tokens_of(sequence: AddSequence) -> Int32Array:
    return np.concatenate([unpack_int32(part.token_ids) for part in sequence.segments])
