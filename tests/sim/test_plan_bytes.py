"""Plans stay small on the wire, and what they take is known before they are made."""

from __future__ import annotations

import copy
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.core_scenes import make_core, pack_results
from support.grids import choose, more_when_long
from support.random_plans import PlanMaker, row_by_row
from support.storms import Storm, WatchedPolicy, play

from lightserve.channels import Codec
from lightserve.errors import FrameTooLarge
from lightserve.messages.common import JsonSchemaConstraint, TokenSegment, pack_int32
from lightserve.messages.frontend_router import ErrorCode, Submit
from lightserve.messages.router_worker import (
    MAX_PLAN_BYTES,
    AddSequence,
    KVCopies,
    OutputKind,
    PlanRow,
    RouterToWorker,
    RowResult,
    SlotRange,
    StepPlan,
    WorkerToRouter,
    pack_decodes,
    plan_rows,
    row_results,
    unpack_decodes,
)
from lightserve.router import from_submit, memory_plan
from lightserve.router.admission.classwise import ClasswiseAdmission
from lightserve.router.events import FromFrontend, WorkersReady
from lightserve.router.from_submit import COPY_BYTES, ROW_BYTES, SLOT_BYTES, newcomer_bytes
from lightserve.router.kv.prefix_node import least_recently_used
from lightserve.router.request import WAITING
from lightserve.router.request_table import RequestTable
from lightserve.router.scheduler import Scheduler
from lightserve.router.step import PlannedStep
from lightserve.router.step_cost import StepCost
from lightserve.sim.worker import LengthWorker, PlanError, SimulatedWorker
from lightserve.types import FrontendId, RequestClass, RequestId, RowId, SamplingParams, StepId

FRONTEND = FrontendId(0)
SHARED_LEN = 24_000
PROMPT = pack_int32(range(SHARED_LEN))


def _encoded(plan: StepPlan) -> int:
    codec: Codec[Any, Any] = Codec(send_type=RouterToWorker, recv_type=WorkerToRouter)
    return len(codec.encode(plan))


def _submit(number: int, **changes: Any) -> FromFrontend:
    values: dict[str, Any] = {
        "request_id": RequestId(number),
        "prompt": [TokenSegment(token_ids=PROMPT)],
        "max_tokens": 8,
        "eos_token_ids": [2],
        "sampling": SamplingParams(),
        "request_class": RequestClass.RT,
        "age_s": 0.0,
    }
    return FromFrontend(FRONTEND, Submit(**values | changes))


def _finish(core: Scheduler, plan: StepPlan, now_s: float) -> None:
    rows = [RowResult(row.row, [7]) for row in plan_rows(plan) if row.output]
    result = pack_results(plan, rows, exec_s=0.01)
    core.on_result(result, now_s)


def _large_core() -> Scheduler:
    core = make_core(
        "unified",
        8192,
        cache_order=least_recently_used,
        max_model_len=65_536,
        max_num_seqs=256,
    )
    core.on_message(WorkersReady(2_000_000), 0.0)
    return core


def _next_plan(core: Scheduler, now_s: float) -> tuple[PlannedStep, StepPlan]:
    step = core.plan(now_s)
    assert isinstance(step, PlannedStep)
    return step, core.commit(step, now_s)


def test_many_newcomers_on_one_cached_prefix_join_in_several_steps() -> None:
    """128 of them carry 24 MB; each computes one token, so that no token budget bounds them."""
    core = _large_core()
    core.on_message(_submit(0, max_tokens=1), 0.0)
    now_s = 0.0
    while core.running or core.status(now_s).load[RequestClass.RT].num_waiting:
        now_s += 1.0
        _finish(core, _next_plan(core, now_s)[1], now_s)
    for number in range(1, 129):
        core.on_message(_submit(number), now_s)
    nums_joined = []
    while core.status(now_s).load[RequestClass.RT].num_waiting:
        now_s += 1.0
        _, plan = _next_plan(core, now_s)
        nums_joined.append(len(plan.sequences))
        assert _encoded(plan) <= from_submit.MAX_NEWCOMER_BYTES + 300 * 64
        _finish(core, plan, now_s)
        now_s += 1.0
    assert sum(nums_joined) == 128
    assert 6 <= len(nums_joined) <= 7, "as many join as the plan holds"
    core.check_integrity()


def test_a_newcomer_above_the_budget_begins_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "MAX_NEWCOMER_BYTES", 20_000)
    monkeypatch.setattr(memory_plan, "FEW_NEWCOMER_BYTES", 0)
    core = _large_core()
    for number in range(2):  # 32 kB each; the token budget has room for both
        prompt = [TokenSegment(token_ids=pack_int32([number] * 4000))]
        core.on_message(_submit(number, prompt=prompt), 0.0)
    for now_s in (1.0, 5.0):
        _, plan = _next_plan(core, now_s)
        assert len(plan.sequences) == 1
        _finish(core, plan, now_s)


def test_a_large_newcomer_begins_though_small_ones_come_with_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Real-time ones go first: it would never have a step for itself."""
    monkeypatch.setattr(memory_plan, "MAX_NEWCOMER_BYTES", 20_000)
    monkeypatch.setattr(memory_plan, "FEW_NEWCOMER_BYTES", 2_000)
    core = _large_core()
    prompt = [TokenSegment(token_ids=pack_int32([1] * 4000))]
    core.on_message(_submit(0, prompt=prompt, request_class=RequestClass.BE), 0.0)
    for number in range(1, 4):
        small = [TokenSegment(token_ids=pack_int32([number] * 100))]
        core.on_message(_submit(number, prompt=small, max_tokens=1), float(number))
        step, plan = _next_plan(core, float(number))
        assert RequestClass.RT in {request.request_class for request, _ in step.chunks}
        _finish(core, plan, float(number))
    assert core.status(4.0).load[RequestClass.BE].num_waiting == 0


def test_what_no_plan_can_hold_is_refused_by_name() -> None:
    core = make_core("unified", max_model_len=1 << 23)
    (news,) = core.on_message(_submit(1, max_tokens=(1 << 23) - SHARED_LEN), 0.0)
    (delta,) = news.message.each()
    assert delta.error is ErrorCode.TOO_LARGE
    assert (1 << 20) < delta.max_tokens < 1 << 23
    assert core.on_message(_submit(2, max_tokens=1 << 20), 0.0) == []


def test_the_largest_plan_passes_and_a_larger_one_does_not() -> None:
    plan = StepPlan(step_id=0, sequences=[], slot_ranges=[], rows=[])  # type: ignore[arg-type]
    room = MAX_PLAN_BYTES - _encoded(plan) - 3  # its length takes five bytes, not two
    largest = msgspec.structs.replace(plan, saves=KVCopies(bytes(room), b""))
    assert _encoded(largest) == MAX_PLAN_BYTES
    codec: Codec[Any, Any] = Codec(send_type=WorkerToRouter, recv_type=RouterToWorker)
    sender: Codec[Any, Any] = Codec(send_type=RouterToWorker, recv_type=WorkerToRouter)
    assert codec.decode(sender.encode(largest)) == largest
    with pytest.raises(FrameTooLarge):
        _encoded(msgspec.structs.replace(plan, saves=KVCopies(bytes(room + 1), b"")))


IDS = st.integers(0, 2**31 - 1)
PARAMETERS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_k=IDS,
    seed=st.integers(-(2**63), 2**63 - 1),
    choice=st.integers(0, 15),
    logit_bias=st.lists(st.tuples(IDS, st.floats(-100, 100)), max_size=20).map(tuple),
    allowed_token_ids=st.lists(IDS, max_size=300).map(tuple),
    bad_words=st.lists(st.lists(IDS, min_size=1, max_size=9).map(tuple), max_size=20).map(tuple),
    min_tokens=IDS,
    num_logprobs=st.none() | st.integers(0, 20),
)


@more_when_long
@settings(max_examples=choose(15, 40), deadline=None)
@given(
    sampling=PARAMETERS,
    eos=st.lists(IDS, max_size=80),
    schema=st.none() | st.text(max_size=300),
    num_prompt=st.integers(1, 60),
)
def test_a_newcomer_takes_no_more_than_was_said(
    sampling: SamplingParams, eos: list[int], schema: str | None, num_prompt: int
) -> None:
    core = make_core("fcfs", 64)
    core.on_message(WorkersReady(120), 0.0)
    constraint = None if schema is None else JsonSchemaConstraint(schema=schema)
    prompt = [TokenSegment(token_ids=pack_int32([2**31 - 1] * num_prompt))]
    changes = {"sampling": sampling, "eos_token_ids": eos, "constraint": constraint}
    core.on_message(_submit(2**62, prompt=prompt, max_tokens=1, **changes), 0.0)
    step = core.plan(0.0)
    assert isinstance(step, PlannedStep)
    request = step.scheduled[0].request
    said = newcomer_bytes(request, step.found[request].num_loaded)
    plan = core.commit(step, 0.0)
    assert said - 256 <= len(msgspec.msgpack.encode(plan.sequences + plan.slot_ranges)) <= said


class _Weighed(Storm):
    """A storm in which every plan is weighed."""

    num_refused = 0

    def _check(self, step: PlannedStep) -> None:
        super()._check(step)
        newcomers = [request for request, _ in step.scheduled if request.state is WAITING]
        starting = [*newcomers, *[r for r, _ in step.loaded]]
        sizes = [newcomer_bytes(r, step.found[r].num_loaded) for r in starting]
        assert len(sizes) <= 1 or sum(sizes) <= memory_plan.MAX_NEWCOMER_BYTES
        self.num_refused += any(reason == "bytes" for _, reason in step.left_out.each())
        self._said = sum(sizes) + sum(ROW_BYTES + SLOT_BYTES * count for _, count in step.scheduled)
        commit = self.core.commit

        def weigh(step: PlannedStep, now_s: float) -> StepPlan:
            plan = commit(step, now_s)
            most = self._said + len(plan.saves.slots) // SLOT_BYTES * COPY_BYTES
            assert len(msgspec.msgpack.encode(plan)) <= most + 160
            return plan

        self.core.commit = weigh  # type: ignore[method-assign]


@pytest.mark.parametrize("max_bytes", [1, 900])
def test_a_budget_of_bytes_leaves_every_request_its_tokens(
    max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "MAX_NEWCOMER_BYTES", max_bytes)
    monkeypatch.setattr(memory_plan, "FEW_NEWCOMER_BYTES", 0)
    assert sum(play(_Weighed(seed)).num_refused for seed in range(4)) > 0


# Workers without a model: plain decodes as columns are what they are row by row.

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


# `plan` writes nothing: what the scheduler knows is the same after it, and so is the next plan.

MEMOS = {
    RequestTable: {"_rows"},
    StepCost: {"_guard"},
    WatchedPolicy: {"num_loads", "num_timed"},
}
"""What follows from the rest, kept until that changes; counters of the test's own."""
KEPT = (ClasswiseAdmission, count)
"""Samples of futures, which no answer depends on; numbers given out."""
PLAIN = (int, float, str, bytes, bool, type(None), Enum, frozenset)


def differences(one: Any, other: Any, at: str, seen: dict[int, Any]) -> list[str]:
    """Return where two graphs of objects differ."""
    if id(one) in seen or isinstance(one, KEPT) or callable(one):
        return []
    if type(one) is not type(other):
        return [f"{at}: {type(one)} is now {type(other)}"]
    if isinstance(one, PLAIN):
        return [] if one == other else [f"{at}: {one!r} is now {other!r}"]
    seen[id(one)] = one
    if isinstance(one, np.ndarray | array):
        return (
            [] if np.array_equal(one, other, equal_nan=np.asarray(one).dtype.kind == "f") else [at]
        )
    if isinstance(one, Mapping):
        pairs = zip(one.items(), other.items(), strict=False)
        found = [] if len(one) == len(other) else [f"{at}: {len(one)} items, now {len(other)}"]
        for (key, value), (other_key, other_value) in pairs:
            found += differences(key, other_key, f"{at} key", seen)
            found += differences(value, other_value, f"{at}[{key!r:.30}]", seen)
        return found
    if isinstance(one, list | tuple | deque | set):
        if len(one) != len(other):
            return [f"{at}: {len(one)} items, now {len(other)}"]
        pairs = zip(one, other, strict=True) if not isinstance(one, set) else ()
        return [
            found
            for number, (item, other_item) in enumerate(pairs)
            for found in differences(item, other_item, f"{at}[{number}]", seen)
        ]
    skipped = MEMOS.get(type(one), set())
    return [
        found
        for name in fields_of(one)
        if name not in skipped and hasattr(one, name)
        for found in differences(getattr(one, name), getattr(other, name), f"{at}.{name}", seen)
    ]


def fields_of(thing: Any) -> list[str]:
    slots = [name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())]
    return [*getattr(thing, "__dict__", {}), *(name for name in slots if name != "__weakref__")]


class ComparingCore(Scheduler):
    """Compares itself with a copy that was made before each plan."""

    num_plans = 0
    num_steps = 0

    def plan(self, now_s: float) -> Any:
        before = copy.deepcopy(self)
        step = super().plan(now_s)
        assert differences(before, self, "core", {}) == []
        again = super().plan(now_s)
        self.num_plans += 1
        if isinstance(step, PlannedStep):
            self.num_steps += 1
            assert isinstance(again, PlannedStep)
            assert again.scheduled == step.scheduled
            assert again.left_out.each() == step.left_out.each()
            assert (again.paused, again.checkpointed, again.preempted, again.loaded) == (
                (step.paused, step.checkpointed, step.preempted, step.loaded)
            )
        else:
            assert again == step
        return step


@pytest.mark.parametrize("seed", range(2))
def test_a_plan_changes_nothing(seed: int) -> None:
    storm = Storm(seed)
    storm.core.__class__ = ComparingCore
    play(storm, num_events=12)
    assert isinstance(storm.core, ComparingCore) and storm.core.num_steps > 10


def test_a_change_would_be_found() -> None:
    core = Storm(0).core
    before = copy.deepcopy(core)
    assert differences(before, core, "core", {}) == []
    core._rows.cells["num_output"][0] += 1
    core._waiting.num_since_oldest += 1
    found = differences(before, core, "core", {})
    assert any("num_output" in where for where in found)
    assert any("num_since_oldest" in where for where in found)
