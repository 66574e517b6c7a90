"""From allotments to the message that workers execute."""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np

from lightserve.messages.common import Int32Array, TokenSegment, pack_int32
from lightserve.messages.router_worker import (
    NO_DECODES,
    AddSequence,
    DecodeRows,
    OutputKind,
    PlanRow,
    SlotRange,
    StepPlan,
    pack_decodes,
)
from lightserve.router.events import PlannedStep
from lightserve.router.kv.host import PlanCopies
from lightserve.router.request import Request
from lightserve.router.request_table import Decodes
from lightserve.router.shares import Allotment
from lightserve.types import RT, RowId

_NONE, _SAMPLE = OutputKind.NONE, OutputKind.SAMPLE
_WITH_PROMPT = (OutputKind.PROMPT_LOGPROBS, OutputKind.PROMPT_LOGPROBS | OutputKind.SAMPLE)


def nums_of_samples(allotments: Sequence[Allotment]) -> tuple[int, ...]:
    """Return how many new tokens the next tokens of each request yield.

    None before its last known token, one with it, and one more for each step that it runs on
    by itself (simulated workers only).
    """
    ends = [r.next_position + count for r, count in allotments]
    known = [
        r.num_prompt_tokens + len(r.output_token_ids) + r.num_inflight_samples
        for r, _ in allotments
    ]
    return tuple(
        [
            end - num_known + 1 if end >= num_known else 0
            for end, num_known in zip(ends, known, strict=True)
        ]
    )


def _wanted_output(request: Request, samples: int) -> OutputKind:
    if request.wants_prompt_logprobs:
        return _WITH_PROMPT[samples > 0]
    return OutputKind.SAMPLE if samples else OutputKind.NONE


def build_plan(
    step: PlannedStep,
    *,
    decode_slots: Int32Array,
    chunk_slots: Int32Array,
    newcomers: Container[Request],
    copies: PlanCopies,
    left_rows: tuple[RowId, ...],
) -> StepPlan:
    """Return the plan that moves each request by its part of a step.

    Args:
        step: requests, with their rows and slots, how many tokens they compute and yield.
        decode_slots: what its decodes write to, int32 [n].
        chunk_slots: what its chunks write to, one after the other, int32 [sum of num_tokens].
        newcomers: those that the workers do not know yet.
        copies: what is copied for them, and for others.
        left_rows: those that were given up since the last plan.
    """
    offset = 0
    sequences: list[AddSequence] = []
    slot_ranges: list[SlotRange] = []
    plan_rows: list[PlanRow] = []
    for (request, num_tokens), num_wanted in zip(step.chunks, step.num_samples, strict=True):
        row, start = request.row, request.next_position
        assert row is not None and request.slots is not None
        if request in newcomers:
            sequences.append(_sequence(request, row))
            if start > 0:
                slot_ranges.append(SlotRange(row, 0, pack_int32(request.slots[:start])))
        end = offset + num_tokens
        slot_ranges.append(SlotRange(row, start, pack_int32(chunk_slots[offset:end])))
        offset = end
        if request.sampling.num_prompt_logprobs is None:
            output = _SAMPLE if num_wanted else _NONE
        else:
            output = _wanted_output(request, num_wanted)
        plan_rows.append(PlanRow(row, start, num_tokens, output))
    return StepPlan(
        step_id=step.step_id,
        sequences=sequences,
        slot_ranges=slot_ranges,
        rows=plan_rows,
        decodes=_decode_rows(step.decodes, decode_slots),
        saves=copies.saves,
        loads=copies.loads,
        ahead_saves=copies.ahead_saves,
        ahead_loads=copies.ahead_loads,
        left_rows=left_rows,
    )


def _decode_rows(decodes: Decodes, slots: Int32Array) -> DecodeRows:
    if not len(decodes):
        return NO_DECODES
    starts = decodes.table.next_position[decodes.rows]
    return pack_decodes(decodes.rows.astype(np.int32), starts.astype(np.int32), slots)


def _sequence(request: Request, row: RowId) -> AddSequence:
    return AddSequence(
        row,
        [TokenSegment(token_ids=pack_int32(request.known_token_ids()))],
        request.sampling,
        request.num_prompt_tokens,
        sorted(request.eos_token_ids),
        request.constraint,
        is_real_time=request.request_class is RT,
    )
