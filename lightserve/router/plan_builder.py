"""From allotments to the message that workers execute. Pure: peeks at rows and slots."""

from __future__ import annotations

from collections.abc import Sequence

from lightserve.messages.common import Int32Array, TokenSegment, pack_int32
from lightserve.messages.router_worker import AddSequence, OutputKind, PlanRow, SlotRange, StepPlan
from lightserve.router.policies.base import Allotment
from lightserve.router.queues import RowTable
from lightserve.router.request import Request
from lightserve.types import StepId


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
    step_id: StepId, allotments: Sequence[Allotment], rows: RowTable, slots: Int32Array
) -> StepPlan:
    """Return the plan that moves each request by its allotment.

    New requests get the rows that `RowTable.acquire` will give when called in the order of
    `allotments`; all requests get the next ones of `slots`, int32 [sum of num_tokens].
    """
    num_new = sum(request.row is None for request, _ in allotments)
    new_rows = iter(rows.peek(num_new))
    all_slots = pack_int32(slots)
    sequences: list[AddSequence] = []
    slot_ranges: list[SlotRange] = []
    plan_rows: list[PlanRow] = []
    offset = 0
    for request, num_tokens in allotments:
        row = request.row
        if row is None:
            row = next(new_rows)
            segment = TokenSegment(token_ids=pack_int32(request.known_token_ids()))
            sequences.append(
                AddSequence(
                    row,
                    [segment],
                    request.sampling,
                    request.num_prompt_tokens,
                    sorted(request.eos_token_ids),
                    request.constraint,
                )
            )
        start = request.next_position
        end = offset + 4 * num_tokens
        slot_ranges.append(SlotRange(row, start, all_slots[offset:end]))
        offset = end
        plan_rows.append(PlanRow(row, start, num_tokens, wanted_output(request, num_tokens)))
    return StepPlan(step_id=step_id, sequences=sequences, slot_ranges=slot_ranges, rows=plan_rows)
