"""What a worker knows of each row: its tokens, their slots, how to sample. And the step's inputs.

    token_ids[row, position]      known tokens; sampling writes the next one
    req_to_slot[row, position]    where the KV of that position is

Built once per step with vectorised indexing, no loop over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightserve.kernels.interface import AttentionBatch
from lightserve.messages.common import unpack_int32
from lightserve.messages.router_worker import AddSequence, OutputKind, PlanRow, StepPlan
from lightserve.types import RowId, SamplingParams
from lightserve.worker.adjustments import RowHistory, is_adjusted


@dataclass(frozen=True, eq=False)
class PromptSpan:
    """Consecutive tokens of a prompt whose successors' log-probabilities are wanted."""

    row: RowId
    indices: Tensor
    """int64 [n], the tokens among the step's; n may be 0."""
    next_ids: Tensor
    """int64 [n], the prompt's token after each of them."""
    num_top: int
    """Most probable tokens that are wanted at each place."""


@dataclass(frozen=True, eq=False)
class StepInputs:
    """What one forward pass and its sampling need."""

    input_ids: Tensor
    """int64 [T]."""
    batch: AttentionBatch
    logit_rows: Tensor
    """int64 [L]: tokens whose logits are wanted."""
    prompt_spans: list[PromptSpan]
    """Of the rows that want log-probabilities of their prompt, in the plan's order."""
    sampled_rows: list[RowId]
    """Row of each of `logit_rows`."""
    sampled_positions: list[int]
    """Position that each new token will have."""


class SequenceTable:
    """The tables of one rank, on the host (int32 [max_num_seqs, max_model_len + 1])."""

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        # One more position than the model has: the last sampled token is stored, never computed.
        shape = (max_num_seqs, max_model_len + 1)
        self._token_ids = torch.zeros(shape, dtype=torch.int32)
        self._req_to_slot = torch.zeros(shape, dtype=torch.int32)
        self._sampling: list[SamplingParams] = [SamplingParams()] * max_num_seqs
        self._num_prompt = [0] * max_num_seqs
        self._sequences: dict[RowId, AddSequence] = {}
        """Of rows whose options change their logits."""

    def update(self, plan: StepPlan) -> None:
        """Take in a plan's new sequences and slots."""
        for sequence in plan.sequences:
            tokens = np.concatenate([unpack_int32(part.token_ids) for part in sequence.segments])
            self._token_ids[sequence.row, : len(tokens)] = torch.from_numpy(tokens)
            self._sampling[sequence.row] = sequence.sampling
            self._num_prompt[sequence.row] = sequence.num_prompt_tokens
            self._sequences.pop(sequence.row, None)
            if is_adjusted(sequence.sampling):
                self._sequences[sequence.row] = sequence
        if not plan.slot_ranges:
            return
        slots = unpack_int32(b"".join(part.slots for part in plan.slot_ranges)).copy()
        counts = np.array([len(part.slots) // 4 for part in plan.slot_ranges])
        rows = np.array([part.row for part in plan.slot_ranges])
        starts = np.array([part.start_position for part in plan.slot_ranges])
        index = _positions(rows, starts, counts)
        self._req_to_slot[index] = torch.from_numpy(slots)

    def inputs(self, plan: StepPlan) -> StepInputs:
        """Return the tensors of a plan whose updates have been taken in."""
        rows = np.array([row.row for row in plan.rows], dtype=np.int64)
        starts = np.array([row.start_position for row in plan.rows], dtype=np.int64)
        counts = np.array([row.num_tokens for row in plan.rows], dtype=np.int64)
        wants = np.array([bool(row.output & OutputKind.SAMPLE) for row in plan.rows], dtype=bool)
        index = _positions(rows, starts, counts)
        ends = starts + counts
        offsets = np.concatenate([[0], np.cumsum(counts)])
        batch = AttentionBatch(
            positions=index[1],
            slot_mapping=self._req_to_slot[index].long(),
            req_to_slot=self._req_to_slot,
            rows=torch.from_numpy(rows),
            cu_seqlens_q=torch.from_numpy(offsets.astype(np.int32)),
            context_lens=torch.from_numpy(ends.astype(np.int32)),
            host_rows=tuple(rows.tolist()),
            host_q_lens=tuple(counts.tolist()),
            host_context_lens=tuple(ends.tolist()),
        )
        spans = [
            self._prompt_span(row, int(offset))
            for row, offset in zip(plan.rows, offsets, strict=False)
            if row.output & OutputKind.PROMPT_LOGPROBS
        ]
        return StepInputs(
            prompt_spans=spans,
            input_ids=self._token_ids[index].long(),
            batch=batch,
            logit_rows=torch.from_numpy(offsets[1:][wants] - 1),
            sampled_rows=[RowId(row) for row in rows[wants].tolist()],
            sampled_positions=ends[wants].tolist(),
        )

    def _prompt_span(self, row: PlanRow, offset: int) -> PromptSpan:
        """Return the tokens of a plan row, the first of the step's at `offset`, in its prompt."""
        start = row.start_position
        end = min(start + row.num_tokens, self._num_prompt[row.row] - 1)
        num_tokens = max(0, end - start)
        sampling = self._sampling[row.row]
        assert sampling.num_prompt_logprobs is not None
        return PromptSpan(
            row=row.row,
            indices=torch.arange(offset, offset + num_tokens),
            next_ids=self._token_ids[row.row, start + 1 : start + 1 + num_tokens].long(),
            num_top=sampling.num_prompt_logprobs,
        )

    def sampling_of(self, rows: list[RowId]) -> list[SamplingParams]:
        """Return how each row's token is drawn."""
        return [self._sampling[row] for row in rows]

    def histories_of(self, inputs: StepInputs) -> dict[int, RowHistory]:
        """Return what the options of a step's sampled rows refer to, by index; mostly nothing."""
        if not self._sequences:
            return {}
        found: dict[int, RowHistory] = {}
        places = zip(inputs.sampled_rows, inputs.sampled_positions, strict=True)
        for index, (row, position) in enumerate(places):
            if (sequence := self._sequences.get(row)) is not None:
                token_ids = self._token_ids[row, :position].long()
                found[index] = RowHistory(
                    token_ids, sequence.num_prompt_tokens, sequence.eos_token_ids
                )
        return found

    def append(self, inputs: StepInputs, token_ids: Tensor) -> None:
        """Store the sampled tokens, int64 [L], at the positions that the next plan will name."""
        index = (torch.tensor(inputs.sampled_rows), torch.tensor(inputs.sampled_positions))
        self._token_ids[index] = token_ids.int()


def _positions(
    rows: np.ndarray[tuple[int], np.dtype[np.int64]],
    starts: np.ndarray[tuple[int], np.dtype[np.int64]],
    counts: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> tuple[Tensor, Tensor]:
    """Return (row, position) of every token of ranges start … start+count-1, both int64 [T]."""
    offsets = np.repeat(np.cumsum(counts) - counts, counts)
    positions = np.arange(counts.sum()) - offsets + np.repeat(starts, counts)
    return torch.from_numpy(np.repeat(rows, counts)), torch.from_numpy(positions)
