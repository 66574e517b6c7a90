"""A worker without a model: executes plans on book-keeping alone, and checks them as it goes.

It keeps what a real worker keeps (`req_to_slot`) and, instead of keys and values, whose token
each slot holds. Every read of a slot that was not written for that row and position is an
error, so whatever drives it also tests the router's KV book-keeping.
"""

from __future__ import annotations

import numpy as np

from lightserve.messages.common import TokenLogprob, unpack_int32
from lightserve.messages.router_worker import OutputKind, PlanRow, RowResult, StepPlan, StepResult

EOS_TOKEN_ID = 0


class PlanError(AssertionError):
    """A plan that a real worker would have executed wrongly."""


class SimulatedWorker:
    """Runs plans. A sequence's `seed` says how long it gets: prompt and output, EOS included."""

    def __init__(self, *, num_slots: int, max_num_seqs: int, max_model_len: int) -> None:
        self._req_to_slot = np.full((max_num_seqs, max_model_len), -1, dtype=np.int32)
        self._owner = np.zeros(num_slots, dtype=np.int64)
        self._position = np.full(num_slots, -1, dtype=np.int64)
        self._row_owner = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_known = np.zeros(max_num_seqs, dtype=np.int64)
        self._total_len = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_prompt = np.zeros(max_num_seqs, dtype=np.int64)
        self._next_owner = 1

    def execute(self, plan: StepPlan, *, exec_s: float, idle_s: float) -> StepResult:
        """Run one plan. Raises PlanError."""
        for sequence in plan.sequences:
            row = sequence.row
            self._row_owner[row] = self._next_owner
            self._next_owner += 1
            self._req_to_slot[row] = -1
            self._num_known[row] = sum(len(part.token_ids) // 4 for part in sequence.segments)
            self._total_len[row] = sequence.sampling.seed
            self._num_prompt[row] = sequence.num_prompt_tokens
        for part in plan.slot_ranges:
            slots = unpack_int32(part.slots)
            end = part.start_position + len(slots)
            self._req_to_slot[part.row, part.start_position : end] = slots
        rows = [result for row in plan.rows if (result := self._run(row)) is not None]
        return StepResult(
            step_id=plan.step_id, generation=0, rows=rows, exec_s=exec_s, idle_s=idle_s
        )

    def _run(self, row: PlanRow) -> RowResult | None:
        end = row.start_position + row.num_tokens
        slots = self._req_to_slot[row.row, :end]
        if end > self._num_known[row.row]:
            raise PlanError(f"row {row.row}: position {end - 1} has no token yet")
        if (slots < 0).any():
            raise PlanError(f"row {row.row}: a position below {end} has no slot")
        owner = self._row_owner[row.row]
        self._owner[slots[row.start_position :]] = owner
        self._position[slots[row.start_position :]] = np.arange(row.start_position, end)
        whole = (self._owner[slots] == owner) & (self._position[slots] == np.arange(end))
        if not whole.all():
            raise PlanError(f"row {row.row}: KV of position {int(np.argmin(whole))} is lost")
        if row.output is OutputKind.NONE:
            return None
        total_len = int(self._total_len[row.row])
        token_ids: list[int] = []
        if OutputKind.SAMPLE in row.output:
            self._num_known[row.row] = end + 1
            token_ids = [sampled_token(total_len, end)]
        prompt_logprobs: list[TokenLogprob] = []
        if OutputKind.PROMPT_LOGPROBS in row.output:
            last = min(end + 1, int(self._num_prompt[row.row]))
            positions = range(row.start_position + 1, last)
            prompt_logprobs = [position_logprob(position) for position in positions]
        return RowResult(row.row, token_ids, prompt_logprobs=prompt_logprobs)


def position_logprob(position: int) -> TokenLogprob:
    """Return what the prompt's token at a position is given: its position, as a mark."""
    return TokenLogprob(-float(position), [], [])


def sampled_token(total_len: int, position: int) -> int:
    """Return the token that a sequence of `total_len` tokens has at a sampled position."""
    if position == total_len - 1:
        return EOS_TOKEN_ID
    return 1 + (total_len * 31 + position * 7) % 997
