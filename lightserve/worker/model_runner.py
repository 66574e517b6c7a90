"""Executes plans: tables, one forward pass, sampling. Decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightserve.messages.common import TokenLogprob
from lightserve.messages.router_worker import (
    PlanRow,
    RowError,
    RowResult,
    StepPlan,
    StepResult,
)
from lightserve.models.base import Model
from lightserve.models.parallel import TensorParallel
from lightserve.types import RowId, SamplingParams
from lightserve.worker.constraints import RowConstraints, StepMasks
from lightserve.worker.host_pool import HostPool
from lightserve.worker.kv_pool import KVPool
from lightserve.worker.logprobs import PROMPT_ROWS, all_finite, token_logprobs
from lightserve.worker.sampler import Sampled, sample
from lightserve.worker.sequence_table import PromptSpan, SequenceTable, StepInputs

_PromptNews = list[TokenLogprob] | None
"""Log-probabilities of a prompt's tokens; None: they are not finite."""


class ModelRunner:
    """One rank's model, pool and tables."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        tp: TensorParallel,
        *,
        host_pool: HostPool,
        max_num_seqs: int,
        generation: int = 0,
        constraints: RowConstraints | None = None,
    ) -> None:
        """`constraints` enforces those of the sequences: rank 0 alone has it."""
        self._model = model
        self._pool = pool
        self._host_pool = host_pool
        self._tp = tp
        self._table = SequenceTable(max_num_seqs, model.context_len)
        self._generation = generation
        self._constraints = constraints
        self._free_since_s = time.perf_counter()

    @property
    def num_kv_slots(self) -> int:
        """Tokens that the pool holds."""
        return self._pool.num_slots

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all layers, on this rank."""
        return self._pool.bytes_per_token

    @property
    def num_host_slots(self) -> int:
        """Tokens that the host pool holds."""
        return self._host_pool.num_slots

    @property
    def overlaps_copies(self) -> bool:
        """Whether copies that nobody in a step waits for run beside its forward pass."""
        return self._host_pool.overlaps_copies

    @property
    def context_len(self) -> int:
        """Longest sequence, in tokens."""
        return self._model.context_len

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan; every rank does, rank 0's result counts."""
        start_s = time.perf_counter()
        self._host_pool.check(plan)
        self._host_pool.save(plan.saves)
        self._host_pool.load(plan.loads)
        copied_s = time.perf_counter()
        self._table.update(plan)
        inputs = self._table.inputs(plan)
        masks = None
        if self._constraints is None:
            free = all(sequence.constraint is None for sequence in plan.sequences)
            assert free or self._tp.rank != 0, "frontends refuse what nobody here enforces"
        else:
            self._constraints.update(plan.sequences)
            masks = self._constraints.begin(inputs.sampled_rows)
        num_sampled = len(inputs.sampled_rows)
        wanted = torch.cat([inputs.logit_rows, *(span.indices for span in inputs.prompt_spans)])
        hidden = self._model.hidden(inputs.input_ids, inputs.batch, self._pool, wanted)
        sampled = self._sample(inputs, self._model.logits(hidden[:num_sampled]), masks)
        prompts = self._prompt_logprobs(inputs.prompt_spans, hidden[num_sampled:])
        rows = [
            _row_result(row, sampled.get(row.row), prompts.get(row.row, []))
            for row in plan.rows
            if row.output
        ]
        end_s = time.perf_counter()
        idle_s = start_s - self._free_since_s
        self._free_since_s = end_s
        return StepResult(
            step_id=plan.step_id,
            generation=self._generation,
            rows=rows,
            exec_s=end_s - start_s,
            idle_s=idle_s,
            copy_s=copied_s - start_s if plan.saves.slots or plan.loads.slots else 0.0,
        )

    @torch.inference_mode()
    def copy_ahead(self, plan: StepPlan) -> None:
        """Make an executed plan's copies that nobody waits for; this is not idle time."""
        if plan.ahead_saves.slots or plan.ahead_loads.slots:
            self._host_pool.save(plan.ahead_saves)
            self._host_pool.load(plan.ahead_loads)
            self._free_since_s = time.perf_counter()

    def _sample(
        self, inputs: StepInputs, logits: Tensor | None, masks: Callable[[], StepMasks] | None
    ) -> dict[RowId, _Drawn]:
        """Draw on rank 0, tell the others, and store what was drawn for the next plan."""
        if not inputs.sampled_rows:
            return {}
        token_ids = torch.empty(len(inputs.sampled_rows), dtype=torch.int64)
        errors: dict[int, RowError] = {}
        logprobs: dict[int, TokenLogprob] = {}
        if logits is not None:
            params = self._table.sampling_of(inputs.sampled_rows)
            histories = self._table.histories_of(inputs)
            allowed = None if masks is None else masks()
            sampled = sample(logits, params, inputs.sampled_positions, histories, allowed)
            token_ids = sampled.token_ids
            errors = _errors(sampled, allowed)
            logprobs = _wanted_logprobs(logits, sampled, params)
        token_ids = self._tp.broadcast(token_ids)
        self._table.append(inputs, token_ids)
        drawn = token_ids.tolist()
        if masks is not None and self._constraints is not None:
            self._constraints.advance(inputs.sampled_rows, drawn)
        return {
            row: _Drawn(token_id, errors.get(index), logprobs.get(index))
            for index, (row, token_id) in enumerate(zip(inputs.sampled_rows, drawn, strict=True))
        }

    def _prompt_logprobs(self, spans: list[PromptSpan], hidden: Tensor) -> dict[RowId, _PromptNews]:
        """Return each span's log-probabilities, None where the model's logits are not finite.

        `hidden` [sum of n, hidden_size] is that of all spans, one after the other.
        """
        found: dict[RowId, _PromptNews] = {}
        for span, own in zip(
            spans, torch.split(hidden, [len(s.indices) for s in spans]), strict=True
        ):
            parts: _PromptNews = []
            for part, next_ids in zip(
                torch.split(own, PROMPT_ROWS), torch.split(span.next_ids, PROMPT_ROWS), strict=True
            ):
                logits = self._model.logits(part) if len(part) else None
                if logits is None or parts is None:
                    continue
                if not all_finite(logits):
                    parts = None
                    continue
                parts.extend(token_logprobs(logits, next_ids, [span.num_top] * len(part)))
            found[span.row] = parts
        return found


class _Drawn(NamedTuple):
    token_id: int
    error: RowError | None
    """Why the token means nothing."""
    logprob: TokenLogprob | None


def _errors(sampled: Sampled, masks: StepMasks | None) -> dict[int, RowError]:
    """Return what kept rows from a token, by index."""
    failed = frozenset() if masks is None else masks.failed
    return {
        index: RowError.CONSTRAINT_FAILED if index in failed else RowError.NON_FINITE_LOGITS
        for index, is_finite in enumerate(sampled.is_finite)
        if not is_finite
    }


def _wanted_logprobs(
    logits: Tensor, sampled: Sampled, params: Sequence[SamplingParams]
) -> dict[int, TokenLogprob]:
    """Return the log-probabilities of the rows that want any, by index."""
    wanted = {
        index: p.num_logprobs
        for index, p in enumerate(params)
        if p.num_logprobs is not None and sampled.is_finite[index]
    }
    if not wanted:
        return {}
    rows = list(wanted)
    found = token_logprobs(logits[rows], sampled.token_ids[rows], list(wanted.values()))
    return dict(zip(rows, found, strict=True))


def _row_result(plan_row: PlanRow, drawn: _Drawn | None, prompt: _PromptNews) -> RowResult:
    """Return a row's share of the result; `drawn` None: no token was wanted."""
    if prompt is None:
        return RowResult(plan_row.row, [], RowError.NON_FINITE_LOGITS)
    if drawn is not None and drawn.error is not None:
        return RowResult(plan_row.row, [], drawn.error)
    if drawn is None:
        return RowResult(plan_row.row, [], prompt_logprobs=prompt)
    logprobs = [] if drawn.logprob is None else [drawn.logprob]
    return RowResult(plan_row.row, [drawn.token_id], logprobs=logprobs, prompt_logprobs=prompt)
