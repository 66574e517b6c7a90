"""What a plan tells the workers and when it leaves; rows, queue and admission in small."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from lightserve.errors import ProtocolError
from lightserve.messages.common import pack_int32
from lightserve.messages.router_worker import (
    KVCopies,
    OutputKind,
    PlanRow,
    StepPlan,
    StepResult,
    pack_decodes,
    unpack_decodes,
)
from lightserve.router.admission.base import PoolView
from lightserve.router.admission.baselines import ConservativeAdmission
from lightserve.router.commit import build_plan
from lightserve.router.kv.host import PlanCopies
from lightserve.router.pipeline import Pipeline
from lightserve.router.queue import WaitingQueue
from lightserve.router.request import Request
from lightserve.router.request_table import NO_ROWS, Decodes, RequestTable
from lightserve.router.step import PlannedStep, Scheduled, shape_of
from lightserve.router.step_cost import StepShape
from lightserve.types import (
    FrontendId,
    RequestClass,
    RequestId,
    RequestKey,
    RowId,
    SamplingParams,
    StepId,
)

CHUNK = PlanRow(RowId(0), 0, 4, OutputKind.NONE)


def make_request(
    number: int, *, prompt: int = 8, max_tokens: int = 4, computed: int = 0
) -> Request:
    request = Request(
        key=RequestKey(FrontendId(0), RequestId(number)),
        prompt_token_ids=np.zeros(prompt, dtype=np.int32),
        max_tokens=max_tokens,
        eos_token_ids=frozenset(),
        sampling=SamplingParams(),
        request_class=RequestClass.RT,
        arrival_s=0.0,
    )
    request.num_computed_tokens = computed
    if computed >= prompt:
        request.output_token_ids = [1] * (computed - prompt + 1)
    return request


def test_row_table_gives_the_lowest_row() -> None:
    rows = RequestTable(3)
    requests = [make_request(i) for i in range(3)]
    assert [rows.acquire(request) for request in requests] == [0, 1, 2]
    rows.release(requests[1])
    assert rows.num_free == 1 and rows.acquire(requests[1]) == 1
    rows.release(requests[0])
    assert (rows.take_left(), rows.take_left()) == ((0, 1), ()), "since the last call"
    assert rows.acquire(requests[0]) == 0
    assert [request.key.request_id for request in rows] == [2, 1, 0], "in order of admission"


def test_waiting_queue_keeps_order() -> None:
    queue = WaitingQueue()
    requests = [make_request(i) for i in range(5)]
    for request in requests[2:]:
        queue.append(request)
    queue.requeue(requests[:2])
    queue.remove(requests[3])
    assert [request.key.request_id for request in queue] == [0, 1, 2, 4]


def test_conservative_admission_reserves_the_worst_case() -> None:
    live = [make_request(0, prompt=10, max_tokens=11)]
    admission = ConservativeAdmission().begin(live, PoolView(45))
    assert admission.admit(make_request(1, prompt=10, max_tokens=6))
    assert not admission.admit(make_request(2, prompt=10, max_tokens=2))
    assert admission.admit(make_request(3, prompt=10, max_tokens=1))


def test_build_plan_splits_slots_and_samples_at_the_end() -> None:
    rows = RequestTable(4)
    rows.acquire(before := make_request(3))
    rows.release(before)
    requests = [make_request(0, computed=8), make_request(1), make_request(2)]
    for request in requests:
        rows.acquire(request)
        request.slots = np.arange(100, dtype=np.int32) + 100 * request.key.request_id
    requests[2].num_computed_tokens = 3  # found in the cache
    chunks = tuple(Scheduled(*pair) for pair in zip(requests[1:], (3, 5), strict=True))
    decodes = Decodes(rows, np.array([0])).kept()
    step = PlannedStep(StepId(7), decodes, chunks, (0, 1), (), (), (), 0.0, StepShape(), 0.0)
    copies = PlanCopies(saves=KVCopies(b"1234", b"5678"), ahead_loads=KVCopies(b"abcd", b"efgh"))
    slots = np.arange(9, dtype=np.int32)
    plan = build_plan(
        step,
        decode_slots=slots[:1],
        chunk_slots=slots[1:],
        newcomers=requests[1:],
        copies=copies,
        left_rows=rows.take_left(),
    )
    assert plan.left_rows == (0,)
    assert (plan.saves, plan.loads, plan.ahead_loads) == copies
    assert [(sequence.row, len(sequence.segments[0].token_ids)) for sequence in plan.sequences] == [
        (1, 32),
        (2, 32),
    ]
    starts = [
        (r.row, r.start_position, np.frombuffer(r.slots, "<i4").tolist()) for r in plan.slot_ranges
    ]
    found = (2, 0, [200, 201, 202])
    assert starts == [(1, 0, [1, 2, 3]), found, (2, 3, [4, 5, 6, 7, 8])]
    assert [part.tolist() for part in unpack_decodes(plan.decodes)] == [[0], [8], [0], []]
    assert plan.rows == [
        PlanRow(RowId(1), 0, 3, OutputKind.NONE),
        PlanRow(RowId(2), 3, 5, OutputKind.SAMPLE),
    ]


class TestPipeline:
    def step(self, pipeline: Pipeline, now_s: float, num_tokens: int = 4) -> PlannedStep:
        request = make_request(0, prompt=64)
        table = RequestTable(CHUNK.row + 1)
        while table.acquire(request) != CHUNK.row:
            request.leave()
        chunks, decodes = (Scheduled(request, num_tokens),), Decodes(table, NO_ROWS)
        shape = shape_of(chunks)
        predicted_s = pipeline.predict(shape, 0)
        return PlannedStep(
            *(pipeline.next_step_id, decodes, chunks, (1,), (), (), (), now_s, shape, predicted_s)
        )

    def push(self, pipeline: Pipeline, planned_s: float, now_s: float) -> None:
        plan = StepPlan(step_id=pipeline.next_step_id, sequences=[], slot_ranges=[], rows=[CHUNK])
        pipeline.push(self.step(pipeline, planned_s), plan, now_s)

    def result(self, step_id: int, exec_s: float = 0.02, idle_s: float = 0.0) -> StepResult:
        return StepResult(
            step_id=StepId(step_id), incarnation=0, token_ids=b"", exec_s=exec_s, idle_s=idle_s
        )

    def test_the_next_plan_leaves_just_before_the_end(self) -> None:
        pipeline = Pipeline()
        now_s = 0.0
        for step_id in range(30):
            assert pipeline.next_plan_due_s() == float("-inf")
            self.push(pipeline, now_s, now_s)
            now_s += 0.02
            pipeline.pop(self.result(step_id), now_s)
        self.push(pipeline, now_s, now_s)
        due_s = pipeline.next_plan_due_s()
        assert due_s is not None and now_s + 0.018 <= due_s <= now_s + 0.0191
        self.push(pipeline, now_s, now_s)
        assert pipeline.next_plan_due_s() is None, "one plan ahead, not two"

    def test_slow_routers_send_earlier(self) -> None:
        pipeline = Pipeline()
        for step_id in range(60):
            self.push(pipeline, 0.0, 0.003)
            pipeline.pop(self.result(step_id), 0.0)
        self.push(pipeline, 0.0, 0.0)
        due_s = pipeline.next_plan_due_s()
        assert due_s is not None and due_s <= 0.0125

    def test_slow_launches_are_allowed_for(self) -> None:
        """The longest of late: most steps may be launched in no time."""
        pipeline = Pipeline()
        due_s = []
        for step_id, launch_s in enumerate([0.0] * 30 + [0.004, 0.0, 0.0]):
            self.push(pipeline, 0.0, 0.0)
            result = msgspec.structs.replace(self.result(step_id), launch_s=launch_s)
            pipeline.pop(result, 0.0)
            self.push(pipeline, 0.0, 0.0)
            due_s.append(pipeline.next_plan_due_s() or 0.0)
            pipeline.clear()
            pipeline.next_step_id = StepId(step_id + 1)
        earlier = [due_s[29] - due for due in due_s[30:]]
        assert earlier == pytest.approx([0.004, 0.0036, 0.00324], abs=1e-4)

    @pytest.mark.parametrize("overlaps", [False, True])
    def test_saves_of_prefixes_take_time(self, overlaps: bool) -> None:
        """A plan's slots say which prefixes leave the pool, when it has been planned."""
        pipeline = Pipeline()
        pipeline.overlaps_copies = overlaps
        for number in range(30):
            pipeline._copy_cost.observe(100 * (number % 3), 0.01 * (number % 3))
        ends_s = []
        for num_saved, num_prefix in ((0, 0), (100, 0), (300, 200)):
            slots = bytes(4 * num_saved)
            plan = StepPlan(
                step_id=pipeline.next_step_id,
                sequences=[],
                slot_ranges=[],
                rows=[CHUNK],
                saves=KVCopies(slots, slots),
                ahead_loads=KVCopies(bytes(4000), bytes(4000)),
            )
            pipeline.push(self.step(pipeline, 0.0), plan, 0.0, num_prefix_saves=num_prefix)
            (sent,) = pipeline._in_flight
            extra_s = pipeline.copy_seconds(num_saved)
            extra_s -= pipeline.copy_seconds(num_saved - num_prefix)
            assert sent.predicted_s - sent.planned.predicted_s == pytest.approx(extra_s)
            ends_s.append(pipeline.next_start_s(0.0))
            pipeline.clear()
        assert ends_s[0] == ends_s[1], "what was planned is in the plan's own prediction"
        later_s = 0.0 if overlaps else extra_s
        assert extra_s == pytest.approx(0.02, rel=0.2)
        assert ends_s[2] - ends_s[0] == pytest.approx(later_s), "copies beside it take longer"

    def push_drafts(self, pipeline: Pipeline, contexts: list[int], drafts: list[int]) -> None:
        """Send a step of decodes with drafts."""
        requests = [make_request(n, computed=length) for n, length in enumerate(contexts)]
        table = RequestTable(len(requests))
        for request in requests:
            table.acquire(request)
        step, counts = self.step(pipeline, 0.0), np.array(drafts)
        decodes = replace(Decodes(table, table.rows).kept(), drafts=counts)
        shape = StepShape().plus_decodes(len(contexts), sum(contexts))
        shape = shape.plus_drafts(sum(drafts), int((counts * contexts).sum()))
        step = replace(step, decodes=decodes, chunks=(), num_samples=(), shape=shape)
        slots = range(len(contexts) + sum(drafts))
        columns = pack_decodes(table.rows.astype(np.int32), contexts, slots, drafts)
        plan = StepPlan(
            step_id=step.step_id, sequences=[], slot_ranges=[], rows=[], decodes=columns
        )
        pipeline.push(step, plan, 0.0)

    def drafted(self, drafted: list[int], num_verified: int) -> StepResult:
        tokens = pack_int32([5] * len(drafted))
        found = pack_int32([*drafted, *[0] * len(drafted)])
        return msgspec.structs.replace(
            self.result(0), token_ids=tokens, drafted=found, num_verified=num_verified
        )

    @pytest.mark.parametrize(
        ("drafted", "num_verified", "pairs"),
        [([4, 0], 4, 4 * 10), ([0, 3], 3, 3 * 1000), ([4, 0], 7, 4 * 10 + 3 * 1000)],
    )
    def test_drafts_that_were_not_proposed_have_the_context_of_their_rows(
        self, drafted: list[int], num_verified: int, pairs: int
    ) -> None:
        """Those that were not found, which a GPU computes all the same."""
        pipeline = Pipeline()
        self.push_drafts(pipeline, [10, 1000], [4, 3])
        pipeline.pop(self.drafted(drafted, num_verified), 0.02)
        assert (pipeline._shape.num_drafts, pipeline._shape.chunk_pairs) == (num_verified, pairs)
        assert pipeline._shape.num_new == 2 + num_verified

    @pytest.mark.parametrize(
        ("drafted", "num_verified", "said"),
        [([5, 0], 5, "more than planned"), ([-1, 3], 2, "more than"), ([4, 0], 5, "5 drafts")],
    )
    def test_drafts_that_were_not_planned_are_refused(
        self, drafted: list[int], num_verified: int, said: str
    ) -> None:
        pipeline = Pipeline()
        self.push_drafts(pipeline, [10, 1000], [4, 3])
        with pytest.raises(ProtocolError, match=said):
            pipeline.pop(self.drafted(drafted, num_verified), 0.02)

    def test_results_out_of_order_are_refused(self) -> None:
        pipeline = Pipeline()
        self.push(pipeline, 0.0, 0.0)
        with pytest.raises(ProtocolError, match="step 3"):
            pipeline.pop(self.result(3), 0.0)

    def test_stalled_time_and_idle_time(self) -> None:
        pipeline = Pipeline()
        assert pipeline.stalled_s(5.0) == 0.0
        self.push(pipeline, 1.0, 1.0)
        assert pipeline.stalled_s(5.0) == 4.0
        pipeline.pop(self.result(0, idle_s=9.0), 5.0)
        assert pipeline.idle_s == 0.0, "waiting without work is not idling"
        pipeline.note_work(True)
        self.push(pipeline, 5.0, 5.0)
        pipeline.pop(self.result(1, idle_s=0.5), 6.0)
        assert pipeline.idle_s == 0.5
