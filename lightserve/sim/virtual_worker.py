"""A worker of virtual hardware: how long its steps and copies take, and what they come to.

A step takes what its `Hardware` says, times lognormal noise of mean one, plus the copies that
it waits for. Copies made ahead run beside the forward pass of their plan, on the link alone, or
follow it: what is left of them then, the next step waits for before it begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from lightserve.cost.shape import StepShape
from lightserve.messages.common import Int32Array, pack_int32, unpack_int32
from lightserve.messages.router_worker import (
    KVCopies,
    StepPlan,
    StepResult,
    plan_columns,
    plan_rows,
    unpack_decodes,
)
from lightserve.sim.hardware import Hardware
from lightserve.sim.simulation import Worker
from lightserve.sim.worker import EOS_TOKEN_ID

_TOKEN = EOS_TOKEN_ID + 1
_RUNS_EVERY = 50
"""Runs of slots are measured in every so many-th step."""


@dataclass
class WorkSums:
    """Sums over a worker's steps."""

    num_steps: int = 0
    busy_s: float = 0.0
    """Execution of all steps, copies that they waited for included."""
    copy_wait_s: float = 0.0
    num_tokens: int = 0
    """Computed, of prompts and decodes."""
    saved_tokens: int = 0
    ahead_tokens: int = 0
    loaded_tokens: int = 0
    """Those that were loaded ahead included."""
    ahead_wait_s: float = 0.0
    """Between steps, for copies made ahead."""
    plan_bytes: int = 0
    max_step_s: float = 0.0


class VirtualWorker:
    """Times plans by a formula and lets `inner` say what tokens they yield."""

    def __init__(
        self,
        hardware: Hardware,
        inner: Worker,
        *,
        noise: float = 0.0,
        rng: np.random.Generator,
    ) -> None:
        """`noise` is the standard deviation of the logarithm of a step's time."""
        self.sums = WorkSums()
        self._hardware = hardware
        self._inner = inner
        self._noise = noise
        self._rng = rng
        self._encoder = msgspec.msgpack.Encoder()
        self._link_left_s = 0.0
        """Copies ahead that are not finished when the next step could begin."""
        self._waited_s = 0.0
        """Before the step whose seconds were asked last, for copies ahead of the one before."""
        self._copy_s = 0.0

    def seconds(self, plan: StepPlan) -> float:
        """Return how long the next step takes, the copies that it waits for included.

        So is the time before it in which copies ahead are finished, if the worker has not idled.
        """
        shape = _shape_of(plan)
        forward_s = self._hardware.step_seconds(shape)
        if self._noise:
            forward_s *= self._rng.lognormal(-0.5 * self._noise**2, self._noise)
        self._copy_s = self._hardware.copy_seconds(
            num_saved=_num_copied(plan.saves), num_loaded=_num_copied(plan.loads)
        )
        self._waited_s = self._link_left_s
        ahead_s = self._hardware.copy_seconds(
            num_saved=_num_copied(plan.ahead_saves), num_loaded=_num_copied(plan.ahead_loads)
        )
        beside_s = forward_s if self._hardware.overlaps_copies else 0.0
        self._link_left_s = max(0.0, ahead_s - beside_s)
        self._add(plan, shape.num_new, forward_s + self._copy_s)
        return self._waited_s + forward_s + self._copy_s

    def _add(self, plan: StepPlan, num_tokens: int, exec_s: float) -> None:
        sums = self.sums
        sums.num_steps += 1
        sums.num_tokens += num_tokens
        sums.busy_s += exec_s
        sums.max_step_s = max(sums.max_step_s, exec_s)
        sums.copy_wait_s += self._copy_s
        sums.saved_tokens += _num_copied(plan.saves)
        sums.ahead_wait_s += self._waited_s
        sums.loaded_tokens += _num_copied(plan.loads) + _num_copied(plan.ahead_loads)
        sums.ahead_tokens += _num_copied(plan.ahead_saves)
        sums.plan_bytes += len(self._encoder.encode(plan))

    def execute(self, plan: StepPlan, *, exec_s: float, idle_s: float) -> StepResult:
        """Run the plan whose seconds were asked last."""
        result = self._inner.execute(plan, exec_s=exec_s - self._waited_s, idle_s=idle_s)
        return msgspec.structs.replace(result, copy_s=self._copy_s)


def _shape_of(plan: StepPlan) -> StepShape:
    starts = unpack_decodes(plan.decodes).start_positions
    shape = StepShape().plus_decodes(len(starts), int(starts.sum()))
    for row in plan.rows:
        shape = shape.plus(row.start_position, row.num_tokens)
    return shape


def _num_copied(copies: KVCopies) -> int:
    return len(copies.slots) // 4


class RunLengths(NamedTuple):
    """How the slots of sequences lie: sums over sampled steps."""

    num_tokens: int = 0
    num_runs: int = 0
    """Stretches of neighbouring slots, ascending or descending."""


class LengthWorker:
    """Yields tokens by number alone: the last one is EOS. Checks nothing, costs little.

    See `SimulatedWorker` for the one that checks every read of KV; both end sequences at the
    length that their seed says.
    """

    def __init__(self, *, max_num_seqs: int, max_model_len: int) -> None:
        self.run_lengths = RunLengths()
        self._total_len = np.zeros(max_num_seqs, dtype=np.int64)
        self._slots: Int32Array = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)

    def execute(self, plan: StepPlan, *, exec_s: float, idle_s: float) -> StepResult:
        """Run one plan."""
        for sequence in plan.sequences:
            self._total_len[sequence.row] = sequence.sampling.seed
        for part in plan.slot_ranges:
            slots = unpack_int32(part.slots)
            self._slots[part.row, part.start_position : part.start_position + len(slots)] = slots
        decodes = unpack_decodes(plan.decodes)
        self._slots[decodes.rows, decodes.start_positions] = decodes.slots
        if plan.step_id % _RUNS_EVERY == 0:
            self._measure_runs(plan)
        columns = plan_columns(plan)
        rows = columns.rows[columns.samples]
        ends = (columns.start_positions + columns.num_tokens)[columns.samples]
        tokens = np.where(ends == self._total_len[rows] - 1, EOS_TOKEN_ID, _TOKEN)
        return StepResult(
            step_id=plan.step_id,
            generation=0,
            token_ids=pack_int32(tokens),
            exec_s=exec_s,
            idle_s=idle_s,
        )

    def _measure_runs(self, plan: StepPlan) -> None:
        num_tokens, num_runs = self.run_lengths
        for row in plan_rows(plan):
            end = row.start_position + row.num_tokens
            num_tokens += end
            jumps = np.abs(np.diff(self._slots[row.row, :end])) != 1
            num_runs += 1 + int(np.count_nonzero(jumps))
        self.run_lengths = RunLengths(num_tokens, num_runs)
