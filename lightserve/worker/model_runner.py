"""Executes plans: tables, one forward pass, sampling. Decides nothing."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from lightserve.messages.common import TokenLogprob
from lightserve.messages.router_worker import RowError, RowResult, StepPlan, StepResult
from lightserve.models.base import Model
from lightserve.models.parallel import TensorParallel
from lightserve.worker.kv_pool import KVPool
from lightserve.worker.logprobs import token_logprobs
from lightserve.worker.sampler import sample
from lightserve.worker.sequence_table import SequenceTable, StepInputs


class ModelRunner:
    """One rank's model, pool and tables."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        tp: TensorParallel,
        *,
        max_num_seqs: int,
        generation: int = 0,
    ) -> None:
        self._model = model
        self._pool = pool
        self._tp = tp
        self._table = SequenceTable(max_num_seqs, model.context_len)
        self._generation = generation
        self._free_since_s = time.perf_counter()

    @property
    def num_kv_slots(self) -> int:
        """Tokens that the pool holds."""
        return self._pool.num_slots

    @property
    def context_len(self) -> int:
        """Longest sequence, in tokens."""
        return self._model.context_len

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan; every rank does, rank 0's result counts."""
        start_s = time.perf_counter()
        self._table.update(plan)
        inputs = self._table.inputs(plan)
        logits = self._model.forward(inputs.input_ids, inputs.batch, self._pool, inputs.logit_rows)
        rows = self._sample(inputs, logits) if inputs.sampled_rows else []
        end_s = time.perf_counter()
        idle_s = start_s - self._free_since_s
        self._free_since_s = end_s
        return StepResult(
            step_id=plan.step_id,
            generation=self._generation,
            rows=rows,
            exec_s=end_s - start_s,
            idle_s=idle_s,
        )

    def _sample(self, inputs: StepInputs, logits: Tensor | None) -> list[RowResult]:
        """Draw on rank 0, tell the others, and store what was drawn for the next plan."""
        token_ids = torch.empty(len(inputs.sampled_rows), dtype=torch.int64)
        is_finite = [True] * len(inputs.sampled_rows)
        logprobs: dict[int, TokenLogprob] = {}
        if logits is not None:
            params = self._table.sampling_of(inputs.sampled_rows)
            sampled = sample(
                logits, params, inputs.sampled_positions, self._table.histories_of(inputs)
            )
            token_ids, is_finite = sampled.token_ids, sampled.is_finite
            wanted = {
                i: p.num_logprobs
                for i, p in enumerate(params)
                if p.num_logprobs is not None and is_finite[i]
            }
            if wanted:
                index = list(wanted)
                found = token_logprobs(logits[index], token_ids[index], list(wanted.values()))
                logprobs = dict(zip(index, found, strict=True))
        token_ids = self._tp.broadcast(token_ids)
        self._table.append(inputs, token_ids)
        return [
            RowResult(row, [token_id], logprobs=[logprobs[index]] if index in logprobs else [])
            if valid
            else RowResult(row, [], RowError.NON_FINITE_LOGITS)
            for index, (row, token_id, valid) in enumerate(
                zip(inputs.sampled_rows, token_ids.tolist(), is_finite, strict=True)
            )
        ]
