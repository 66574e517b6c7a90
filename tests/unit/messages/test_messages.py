"""Plans and results as columns: what is packed is read again, and what does not fit is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core_scenes import pack_results
from support.fake_router import frontend, kv_pool, says

from lightserve.bundled import BUNDLED_MODEL_NAME
from lightserve.channels import VERSION_BYTE, Codec
from lightserve.errors import FrameTooLarge, ProtocolError
from lightserve.http_access import MAX_KEYS, ApiKey
from lightserve.messages.common import (
    Message,
    TokenLogprob,
    TokenSegment,
    pack_int32,
    unpack_int32,
)
from lightserve.messages.frontend_router import (
    MAX_SLOTS_BYTES,
    Acknowledge,
    ErrorCode,
    FrontendMessage,
    KVMap,
    PackedKinds,
    Progress,
    RequestDelta,
    RouterMessage,
    Submit,
    TokenDelta,
)
from lightserve.messages.router_worker import (
    MAX_PROMPT_LOGPROB_POSITIONS,
    NO_TOKEN,
    AddSequence,
    DecodeRows,
    OutputKind,
    PlanRow,
    RouterToWorker,
    RowError,
    RowResult,
    SlotRange,
    StateCopies,
    StepPlan,
    StepResult,
    WorkerToRouter,
    check_states,
    pack_decodes,
    plan_columns,
    plan_rows,
    read_result,
    row_results,
    sampling_rows,
    unpack_decodes,
)
from lightserve.messages.supervision import (
    ChildFailed,
    ChildMessage,
    NewApiKeys,
    SupervisorMessage,
)
from lightserve.router.events import MAX_DELTAS, DeltaBatch
from lightserve.router.request import Request
from lightserve.types import (
    MAX_DRAFTS,
    FinishReason,
    FrontendId,
    RequestClass,
    RequestId,
    RequestKey,
    RowId,
    SamplingParams,
    StepId,
)

TOKENS = st.integers(0, 2**31 - 1)
LOGPROB = TokenLogprob(-0.5, [3], [-0.25])
PROMPT = OutputKind.PROMPT_LOGPROBS
OUTPUTS = (OutputKind.NONE, OutputKind.SAMPLE, PROMPT, OutputKind.SAMPLE | PROMPT)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    rows = draw(st.lists(st.integers(0, 500), unique=True, max_size=8))
    num_decodes = draw(st.integers(0, len(rows)))
    places = st.lists(TOKENS, min_size=num_decodes, max_size=num_decodes)
    return StepPlan(
        step_id=StepId(draw(st.integers(0, 9))),
        sequences=[],
        slot_ranges=[],
        rows=[
            PlanRow(
                RowId(row),
                draw(st.integers(0, 99)),
                draw(st.integers(1, 9)),
                draw(st.sampled_from(OUTPUTS)),
            )
            for row in rows[num_decodes:]
        ],
        decodes=pack_decodes(rows[:num_decodes], draw(places), draw(places)),
    )


@st.composite
def answered(draw: st.DrawFn) -> tuple[StepPlan, list[RowResult]]:
    """Return a plan, and what its rows may have given."""
    plan, results = draw(plans()), []
    for row in plan_rows(plan):
        if not row.output:
            continue
        samples, wants_prompt = row.output & OutputKind.SAMPLE, row.output & PROMPT
        token_ids = draw(st.lists(TOKENS, max_size=3)) if samples else []
        results.append(
            RowResult(
                row.row,
                token_ids,
                error=draw(st.sampled_from([None, *RowError])) if not token_ids else None,
                logprobs=[LOGPROB] * len(token_ids) if draw(st.booleans()) else [],
                prompt_logprobs=[LOGPROB] * draw(st.integers(0, 2)) if wants_prompt else [],
            )
        )
    return plan, results


def passed_on(plan: StepPlan) -> StepPlan:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)


@given(plans())
def test_a_plan_says_the_same_as_columns_and_row_by_row(plan: StepPlan) -> None:
    plan = passed_on(plan)
    rows = plan_rows(plan)
    columns = plan_columns(plan)
    assert [tuple(row) for row in np.array(columns).T.tolist()] == [
        (row.row, row.start_position, row.num_tokens, int(row.output)) for row in rows
    ]
    assert all(column.dtype == np.int32 for column in columns)
    wants = [bool(row.output & OutputKind.SAMPLE) for row in rows]
    assert columns.samples.tolist() == wants
    assert sampling_rows(plan).tolist() == columns.rows[columns.samples].tolist()


@given(st.lists(st.tuples(TOKENS, TOKENS, TOKENS), max_size=9), st.integers(0, MAX_DRAFTS))
def test_decodes_are_read_as_they_were_packed(
    decodes: list[tuple[int, int, int]], num_drafts: int
) -> None:
    rows, starts, slots = ([decode[index] for decode in decodes] for index in range(3))
    drafts = [num_drafts] * len(rows) if num_drafts else []
    slots *= 1 + num_drafts
    unpacked = unpack_decodes(pack_decodes(rows, starts, slots, drafts))
    assert [column.tolist() for column in unpacked] == [rows, starts, slots, drafts]
    assert unpacked.num_tokens.tolist() == [1 + num_drafts] * len(rows)
    columns = (np.array(column, dtype=np.int64) for column in (rows, starts, slots, drafts))
    assert pack_decodes(*columns) == pack_decodes(rows, starts, slots, drafts)


@pytest.mark.parametrize(
    ("decodes", "said"),
    [
        (DecodeRows(bytes(8), bytes(4), bytes(8)), "8 bytes of rows, 4 of start_positions, 8 of"),
        (DecodeRows(bytes(4), bytes(4), b""), "4 bytes of rows, 4 of start_positions, 0 of slots"),
        (DecodeRows(bytes(6), bytes(6), bytes(6)), "6 bytes of rows, 6 of start_positions, 6 of"),
        (pack_decodes([1], [5], [8, 9, 7], [1]), "12 of slots, 4 of num_drafts"),
        (pack_decodes([1, 2], [5, 6], [8, 9, 7], [1]), "12 of slots, 4 of num_drafts"),
        (pack_decodes([1], [5], range(10), [9]), "a row has more than 8 drafts"),
        (pack_decodes([1, 2], [5, 6], [8, 9], [1, -1]), "a row has more than 8 drafts"),
    ],
)
def test_decodes_of_different_lengths_are_refused(decodes: DecodeRows, said: str) -> None:
    plan = StepPlan(StepId(0), [], [], [], decodes)
    for read in (plan_columns, plan_rows, sampling_rows):
        with pytest.raises(ProtocolError, match=said):
            read(plan)


SLOTS = pack_int32([1, 2, 3])
ADDED = AddSequence(RowId(4), [], SamplingParams(), 0, [])


@pytest.mark.parametrize(
    ("parts", "num_state_slots", "said"),
    [
        ({"slot_ranges": [SlotRange(RowId(0), -3, SLOTS)]}, 3, ""),
        ({"slot_ranges": [SlotRange(RowId(0), -3, SLOTS)]}, 2, "position -3, where a state has 2"),
        ({"slot_ranges": [SlotRange(RowId(0), -1, SLOTS)]}, 0, "position -1, where a state has 0"),
        ({"slot_ranges": [SlotRange(RowId(0), -2, SLOTS)]}, 3, "3 slots from position -2, where"),
        ({"sequences": [ADDED], "slot_ranges": [SlotRange(RowId(4), -3, SLOTS)]}, 3, ""),
        ({"sequences": [ADDED], "slot_ranges": [SlotRange(RowId(4), 0, SLOTS)]}, 0, ""),
        (
            {"sequences": [ADDED], "slot_ranges": [SlotRange(RowId(4), 0, SLOTS)]},
            3,
            "rows .4. have",
        ),
        ({"state_loads": StateCopies(SLOTS, SLOTS)}, 3, ""),
        ({"state_loads": StateCopies(SLOTS, SLOTS)}, 0, "state_loads: 12 bytes of slots to 12"),
        ({"state_saves": StateCopies(SLOTS, SLOTS)}, 2, "state_saves: 12 bytes of slots to 12"),
        ({"state_saves": StateCopies(SLOTS, b"")}, 3, "state_saves: 12 bytes of slots to 0"),
    ],
)
def test_states_that_a_model_has_not_are_refused(
    parts: dict[str, Any], num_state_slots: int, said: str
) -> None:
    plan = msgspec.structs.replace(StepPlan(StepId(0), [], [], []), **parts)
    assert passed_on(plan) == plan
    if not said:
        check_states(plan, num_state_slots)
        return
    with pytest.raises(ProtocolError, match=said):
        check_states(plan, num_state_slots)


@given(answered())
def test_a_result_is_read_as_it_was_packed(scene: tuple[StepPlan, list[RowResult]]) -> None:
    plan, results = scene
    message = pack_results(plan, results, exec_s=0.5, incarnation=3)
    message = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=StepResult)
    assert (message.step_id, message.incarnation, message.exec_s) == (plan.step_id, 3, 0.5)
    assert row_results(plan, message) == results
    _, token_ids, others = read_result(plan, message)
    by_row = {result.row: result for result in results}
    assert token_ids.shape == (len(sampling_rows(plan)), message.tokens_per_row)
    for row, own in zip(sampling_rows(plan).tolist(), token_ids.tolist(), strict=True):
        wanted = [] if row in others else by_row[row].token_ids
        assert own == wanted + [NO_TOKEN] * (message.tokens_per_row - len(wanted))
    for row in others:
        result = by_row[row]
        assert not result.token_ids or result.logprobs or result.prompt_logprobs


PLAN = StepPlan(
    StepId(0),
    [],
    [],
    [
        PlanRow(RowId(7), 0, 9, OutputKind.NONE),
        PlanRow(RowId(5), 0, 4, OutputKind.SAMPLE),
        PlanRow(RowId(6), 0, 4, PROMPT),
    ],
    pack_decodes([2, 1], [8, 9], [3, 4]),
)
"""Rows 2, 1 and 5 sample, row 6 wants log-probabilities alone, row 7 wants nothing."""
OF_PROMPT = RowResult(RowId(6), [], prompt_logprobs=[LOGPROB])


@pytest.mark.parametrize(
    ("tokens", "width", "rows", "said"),
    [
        ([1, 2], 1, [OF_PROMPT], "8 bytes of tokens for 3 rows of 1"),
        ([1, 2, 3, 4], 1, [OF_PROMPT], "16 bytes of tokens for 3 rows of 1"),
        ([1, 2, 3], 2, [OF_PROMPT], "12 bytes of tokens for 3 rows of 2"),
        ([], 0, [OF_PROMPT], "0 bytes of tokens for 3 rows of 0"),
        ([1, -2, 3], 1, [OF_PROMPT], "a token that is none"),
        ([1, 1, -1, 2, 3, 3], 2, [OF_PROMPT], "a token that is none"),
        ([1, -1, 3], 1, [OF_PROMPT], "row 1 has no result"),
        ([1, 2, 3], 1, [], "row 6 has no result"),
        ([1, 2, 3], 1, [OF_PROMPT, RowResult(RowId(1), [2])], "row 1 has a result though it has"),
        ([1, 2, 3], 1, [OF_PROMPT, RowResult(RowId(7), [])], "row 7 .* or wants none"),
        ([1, 2, 3], 1, [OF_PROMPT, RowResult(RowId(9), [])], "row 9 .* or wants none"),
        ([1, 2, 3], 1, [OF_PROMPT] * 2, "a row has two results"),
    ],
)
def test_results_that_do_not_fit_are_refused(
    tokens: list[int], width: int, rows: list[RowResult], said: str
) -> None:
    result = StepResult(
        StepId(0), 0, pack_int32(tokens), exec_s=0.0, idle_s=0.0, tokens_per_row=width, rows=rows
    )
    with pytest.raises(ProtocolError, match=said):
        read_result(PLAN, result)


def test_the_tokens_of_plain_decodes_are_those_of_the_message() -> None:
    """Read in place: nothing is copied, nothing is done row by row."""
    plan = StepPlan(StepId(0), [], [], [], pack_decodes([4, 2], [1, 1], [0, 9]))
    result = StepResult(StepId(0), 0, pack_int32([11, 22]), exec_s=0.0, idle_s=0.0)
    _, token_ids, others = read_result(plan, result)
    assert token_ids.tolist() == [[11], [22]] and not others
    assert np.shares_memory(token_ids, unpack_int32(result.token_ids))


# On every link the largest legal message passes; what is larger fails its request alone.

MAX_ROWS = 65536
"""The most that --max-num-seqs allows."""
BIG = 2**31 - 1
LONGEST_LOGPROB = TokenLogprob(-1.5, [BIG] * 20, [-1.5] * 20)
EOS = 2


def _submit(num_bytes: int) -> Submit:
    return Submit(
        request_id=RequestId(BIG),
        prompt=[TokenSegment(token_ids=bytes(num_bytes))],
        max_tokens=1,
        eos_token_ids=[EOS],
        sampling=SamplingParams(),
        request_class=RequestClass.RT,
        age_s=0.0,
    )


def _submit_overhead() -> int:
    codec: Codec[Any, Any] = Codec(send_type=FrontendMessage, recv_type=RouterMessage)
    return len(codec.encode(_submit(1 << 20))) - (1 << 20)


def _delta(number: int, num_prompt_logprobs: int = 0) -> RequestDelta:
    prompt_logprobs = [LONGEST_LOGPROB] * num_prompt_logprobs
    return RequestDelta(
        RequestId(BIG + number), [BIG], logprobs=[LONGEST_LOGPROB], prompt_logprobs=prompt_logprobs
    )


def _row(number: int, num_prompt_logprobs: int = 0) -> RowResult:
    return RowResult(
        RowId(number),
        [BIG],
        logprobs=[LONGEST_LOGPROB],
        prompt_logprobs=[LONGEST_LOGPROB] * num_prompt_logprobs,
    )


LARGEST: Mapping[str, tuple[Any, Any, Callable[[], Message]]] = {
    "submit": (
        FrontendMessage,
        RouterMessage,
        lambda: _submit(Submit.MAX_BYTES - _submit_overhead()),
    ),
    "acknowledge": (
        FrontendMessage,
        RouterMessage,
        lambda: Acknowledge(progress=[Progress(RequestId(BIG), BIG)] * (1 << 20)),
    ),
    "tokens": (
        RouterMessage,
        FrontendMessage,
        lambda: TokenDelta(
            requests=[
                _delta(0, MAX_PROMPT_LOGPROB_POSITIONS),
                *[_delta(number) for number in range(1, MAX_DELTAS)],
            ]
        ),
    ),
    "kv map": (
        RouterMessage,
        FrontendMessage,
        lambda: KVMap(query_id=1, pool=kv_pool(slots=PackedKinds(bytes(MAX_SLOTS_BYTES), b""))),
    ),
    "result": (
        WorkerToRouter,
        RouterToWorker,
        lambda: StepResult(
            step_id=StepId(BIG),
            incarnation=BIG,
            token_ids=pack_int32([-1] * MAX_ROWS),
            rows=[
                _row(0, MAX_PROMPT_LOGPROB_POSITIONS),
                *[_row(number) for number in range(1, MAX_ROWS)],
            ],
            exec_s=0.1,
            idle_s=0.1,
        ),
    ),
    "keys": (
        SupervisorMessage,
        ChildMessage,
        lambda: NewApiKeys(keys=[ApiKey("n" * 64, bytes(32), is_admin=True)] * MAX_KEYS),
    ),
    "failure": (ChildMessage, SupervisorMessage, lambda: ChildFailed(reason="\U0001f600" * 4096)),
}


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_legal_message_passes(name: str) -> None:
    up, down, make = LARGEST[name]
    message = make()
    sender: Codec[Any, Any] = Codec(send_type=up, recv_type=down)
    receiver: Codec[Any, Any] = Codec(send_type=down, recv_type=up)
    frame = sender.encode(message)
    assert len(frame) <= receiver.max_recv_bytes
    assert type(receiver.decode(frame)) is type(message)


def test_one_byte_more_is_refused_at_the_sender() -> None:
    codec: Codec[Any, Any] = Codec(send_type=FrontendMessage, recv_type=RouterMessage)
    with pytest.raises(FrameTooLarge):
        codec.encode(_submit(Submit.MAX_BYTES - _submit_overhead() + 1))


def test_one_byte_more_is_refused_at_the_receiver() -> None:
    """Before anything is made of it."""
    codec: Codec[Any, Any] = Codec(send_type=FrontendMessage, recv_type=RouterMessage)
    with pytest.raises(FrameTooLarge):
        codec.decode(VERSION_BYTE + bytes(codec.max_recv_bytes))


def test_very_many_failures_are_several_messages() -> None:
    """A pool that came back smaller fails all that waits."""
    batch = DeltaBatch()
    for number in range(MAX_DELTAS + 1):
        message = _submit(4)
        request = Request(
            key=RequestKey(FrontendId(0), RequestId(number)),
            prompt_token_ids=[1],  # type: ignore[arg-type]
            max_tokens=1,
            eos_token_ids=frozenset(),
            sampling=message.sampling,
            request_class=RequestClass.BE,
            arrival_s=0.0,
        )
        batch.fail(request, ErrorCode.TOO_LARGE)
    messages = [outgoing.message.requests for outgoing in batch.outgoing()]
    assert [len(deltas) for deltas in messages] == [MAX_DELTAS, 1]
    ids = [delta.request_id for deltas in messages for delta in deltas]
    assert ids == list(range(MAX_DELTAS + 1))


def test_a_request_that_is_too_large_for_the_router_is_refused_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Submit, "MAX_BYTES", 2000)
    body = {"model": BUNDLED_MODEL_NAME, "prompt": [5, 6], "max_tokens": 2}
    pattern = "a" * 3000

    async def scenario() -> None:
        async with frontend(says([7, EOS], FinishReason.STOP)) as setup:
            for extra in (
                {"prompt": [5] * 500},
                {"n": 2, "allowed_token_ids": list(range(1000))},
                {"structured_outputs": {"regex": pattern}},
            ):
                answer = await setup.post("/v1/completions", body | extra)
                assert answer.status_code == 413, answer.text
                error = answer.json()["error"]
                assert error["code"] == "request_too_large"
                assert "must be at most 2000 bytes" in error["message"]
            assert not setup.router.submits
            answer = await setup.post("/v1/completions", body)
            assert answer.status_code == 200
            assert setup.service.router.num_live == 0

    asyncio.run(scenario())
