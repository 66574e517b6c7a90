"""The steps of a warm-up stay within what a server of any size can run."""

from __future__ import annotations

import pytest
import torch

from lightserve.messages.common import unpack_int32
from lightserve.messages.router_worker import (
    OutputKind,
    StepPlan,
    plan_rows,
)
from lightserve.worker.memory import MIN_SLOTS
from lightserve.worker.warm_up import warm_up


class NotingRunner:
    """Takes down the plans."""

    def __init__(self, device: str, context_len: int, max_num_seqs: int, *, rank: int) -> None:
        self.device = torch.device(device)
        self.context_len = context_len
        self.max_num_seqs = max_num_seqs
        self.has_constraints = rank == 0
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> None:
        self.plans.append(plan)


def plans_of(
    device: str, context_len: int, max_num_seqs: int, max_tokens: int, *, rank: int = 0
) -> list[StepPlan]:
    runner = NotingRunner(device, context_len, max_num_seqs, rank=rank)
    warm_up(runner, max_num_batched_tokens=max_tokens)  # type: ignore[arg-type]
    return runner.plans


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("context_len", [2, 3, 5, 8, 4096])
@pytest.mark.parametrize(("max_num_seqs", "max_tokens"), [(1, 64), (2, 64), (256, 2048)])
def test_within_limits(device: str, context_len: int, max_num_seqs: int, max_tokens: int) -> None:
    plans = plans_of(device, context_len, max_num_seqs, max_tokens)
    assert plans
    for plan in plans:
        assert 0 < sum(row.num_tokens for row in plan_rows(plan)) <= max_tokens
        for row in plan_rows(plan):
            assert row.num_tokens > 0 and row.row < max_num_seqs
            assert row.start_position + row.num_tokens <= context_len
        for part in plan.slot_ranges:
            assert unpack_int32(part.slots).max() < MIN_SLOTS
        assert unpack_int32(plan.decodes.slots).max(initial=0) < MIN_SLOTS
        for sequence in plan.sequences:
            assert sequence.num_prompt_tokens < context_len


def test_every_rank_runs_the_same_steps() -> None:
    """Though rank 0 alone knows constraints."""
    first, other = (plans_of("cuda", 4096, 256, 2048, rank=rank) for rank in (0, 1))
    assert [plan_rows(plan) for plan in first] == [plan_rows(plan) for plan in other]
    constrained = [plan for plan in first if any(s.constraint for s in plan.sequences)]
    assert constrained and not any(s.constraint for plan in other for s in plan.sequences)


def test_kinds_of_steps() -> None:
    plans = plans_of("cuda", 4096, 256, 2048)
    kinds = {frozenset(row.num_tokens > 1 for row in plan_rows(plan)) for plan in plans}
    assert kinds == {frozenset({True}), frozenset({False}), frozenset({True, False})}
    outputs = {row.output for plan in plans for row in plan_rows(plan)}
    assert {OutputKind.NONE, OutputKind.SAMPLE} < outputs
    assert max(row.num_tokens for plan in plans for row in plan_rows(plan)) == 4095 // 3
    assert any(len(unpack_int32(plan.decodes.rows)) == 2 for plan in plans)
    # On the CPU, where nothing is compiled, a start is not to take longer.
    assert len(plans_of("cpu", 4096, 256, 2048)) == 2
