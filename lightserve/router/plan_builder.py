"""From allotments to the message that workers execute."""

from __future__ import annotations

from collections.abc import Container, Sequence

from lightserve.messages.common import TokenSegment, pack_int32
from lightserve.messages.router_worker import AddSequence, OutputKind, PlanRow, SlotRange, StepPlan
from lightserve.router.policies.base import Allotment
from lightserve.router.request import Request
from lightserve.types import RowId, StepId


def num_samples(request: Request, num_tokens: int) -> int:
    """Return how many new tokens a request's next `num_tokens` tokens yield.

    None before its last known token, one with it, and one more for each step that it runs on
    by itself (simulated workers only).
    """
    return max(0, request.next_position + num_tokens - request.num_known_tokens + 1)


def wanted_output(request: Request, num_tokens: int) -> OutputKind:
    """Return what a request's next `num_tokens` tokens are to give back."""
    wanted = OutputKind.NONE
    if num_samples(request, num_tokens):
        wanted |= OutputKind.SAMPLE
    if request.wants_prompt_logprobs:
        wanted |= OutputKind.PROMPT_LOGPROBS
    return wanted


def build_plan(
    step_id: StepId, allotments: Sequence[Allotment], newcomers: Container[Request]
) -> StepPlan:
    """Return the plan that moves each request by its allotment.

    All have their rows, and the slots that they are about to write; `newcomers` are not known to
    the workers yet.
    """
    sequences: list[AddSequence] = []
    slot_ranges: list[SlotRange] = []
    plan_rows: list[PlanRow] = []
    for request, num_tokens in allotments:
        assert request.row is not None and request.slots is not None
        start = request.next_position
        if request in newcomers:
            sequences.append(_sequence(request, request.row))
        first = 0 if request in newcomers else start
        slots = pack_int32(request.slots[first : start + num_tokens])
        slot_ranges.append(SlotRange(request.row, first, slots))
        output = wanted_output(request, num_tokens)
        plan_rows.append(PlanRow(request.row, start, num_tokens, output))
    return StepPlan(step_id=step_id, sequences=sequences, slot_ranges=slot_ranges, rows=plan_rows)


def _sequence(request: Request, row: RowId) -> AddSequence:
    return AddSequence(
        row,
        [TokenSegment(token_ids=pack_int32(request.known_token_ids()))],
        request.sampling,
        request.num_prompt_tokens,
        sorted(request.eos_token_ids),
        request.constraint,
    )
