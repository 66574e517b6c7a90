"""Workers without a model: plain decodes as columns are what they are row by row."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from support.random_plans import PlanMaker, row_by_row

from lightserve.messages.common import TokenSegment, pack_int32
from lightserve.messages.router_worker import (
    AddSequence,
    OutputKind,
    PlanRow,
    SlotRange,
    StepPlan,
    pack_decodes,
    row_results,
    unpack_decodes,
)
from lightserve.sim.worker import LengthWorker, PlanError, SimulatedWorker
from lightserve.types import RowId, SamplingParams, StepId

NUM_SEQS, MAX_LEN = 12, 40


@pytest.mark.parametrize(
    "make",
    [
        lambda: SimulatedWorker(
            num_slots=NUM_SEQS * MAX_LEN, max_num_seqs=NUM_SEQS, max_model_len=MAX_LEN
        ),
        lambda: LengthWorker(max_num_seqs=NUM_SEQS, max_model_len=MAX_LEN),
    ],
)
def test_decodes_as_columns_give_what_rows_give(
    make: Callable[[], SimulatedWorker | LengthWorker],
) -> None:
    maker = PlanMaker(
        3, max_seqs=NUM_SEQS, num_slots=NUM_SEQS * MAX_LEN, max_len=MAX_LEN, vocab_size=99
    )
    worker, other = make(), make()
    num_decodes = 0
    for plan in maker.plans(80):
        seeds = np.random.default_rng(plan.step_id).integers(5, MAX_LEN, len(plan.sequences))
        sequences = [
            msgspec.structs.replace(sequence, sampling=SamplingParams(seed=seed))
            for sequence, seed in zip(plan.sequences, seeds.tolist(), strict=True)
        ]
        rows = [msgspec.structs.replace(r, output=r.output & OutputKind.SAMPLE) for r in plan.rows]
        own = msgspec.structs.replace(plan, sequences=sequences, rows=rows)
        found = worker.execute(own, exec_s=1.0, idle_s=0.0)
        expected = other.execute(row_by_row(own), exec_s=1.0, idle_s=0.0)
        assert row_results(own, found) == row_results(row_by_row(own), expected)
        num_decodes += len(unpack_decodes(plan.decodes).rows)
    assert num_decodes > 200


def begun() -> SimulatedWorker:
    """Return a worker with two sequences of three tokens, which have drawn a fourth."""
    worker = SimulatedWorker(num_slots=20, max_num_seqs=3, max_model_len=10)
    prompts = [[TokenSegment(token_ids=pack_int32([5, 6, last]))] for last in (7, 8)]
    rows = [RowId(0), RowId(1)]
    plan = StepPlan(
        StepId(0),
        [AddSequence(row, prompts[row], SamplingParams(seed=9), 3, []) for row in rows],
        [SlotRange(row, 0, pack_int32(range(10 * row, 10 * row + 3))) for row in rows],
        [PlanRow(row, 0, 3, OutputKind.SAMPLE) for row in rows],
    )
    worker.execute(plan, exec_s=1.0, idle_s=0.0)
    return worker


@pytest.mark.parametrize(
    ("decodes", "said"),
    [
        (([0, 1], [3, 4], [3, 13]), "row 1: .* no token yet"),
        (([0, 1], [3, 3], [3, -1]), "row 1: .* no slot"),
        (([0, 1], [3, 3], [3, 2]), "row 0: KV of position 2 is lost"),
        (([0, 1], [3, 3], [13, 13]), "row 0: KV of position 3 is lost"),
    ],
)
def test_decodes_that_a_real_worker_would_get_wrong(
    decodes: tuple[list[int], list[int], list[int]], said: str
) -> None:
    good = StepPlan(StepId(1), [], [], [], pack_decodes([0, 1], [3, 3], [3, 13]))
    assert len(begun().execute(good, exec_s=1.0, idle_s=0.0).token_ids) == 8
    with pytest.raises(PlanError, match=said):
        begun().execute(
            StepPlan(StepId(1), [], [], [], pack_decodes(*decodes)), exec_s=1.0, idle_s=0.0
        )
