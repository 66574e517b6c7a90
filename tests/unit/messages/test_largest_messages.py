"""On every link the largest legal message passes; what is larger fails its request alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from support.fake_router import frontend, kv_pool, says

from lightserve.bundled import BUNDLED_MODEL_NAME
from lightserve.channels import Codec
from lightserve.errors import FrameTooLarge
from lightserve.http_access import MAX_KEYS, ApiKey
from lightserve.messages.common import (
    MAX_FRAME_BYTES,
    Message,
    TokenLogprob,
    TokenSegment,
    pack_int32,
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
    RouterToWorker,
    RowResult,
    StepResult,
    WorkerToRouter,
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
    FinishReason,
    FrontendId,
    RequestClass,
    RequestId,
    RequestKey,
    RowId,
    SamplingParams,
    StepId,
)

MAX_ROWS = 65536
"""The most that --max-num-seqs allows."""
BIG = 2**31 - 1
LOGPROB = TokenLogprob(-1.5, [BIG] * 20, [-1.5] * 20)
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
    prompt_logprobs = [LOGPROB] * num_prompt_logprobs
    return RequestDelta(
        RequestId(BIG + number), [BIG], logprobs=[LOGPROB], prompt_logprobs=prompt_logprobs
    )


def _row(number: int, num_prompt_logprobs: int = 0) -> RowResult:
    return RowResult(
        RowId(number), [BIG], logprobs=[LOGPROB], prompt_logprobs=[LOGPROB] * num_prompt_logprobs
    )


LARGEST: Mapping[str, tuple[Any, Any, Callable[[], Message]]] = {
    "submit": (
        FrontendMessage,
        RouterMessage,
        lambda: _submit(MAX_FRAME_BYTES - _submit_overhead()),
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
            generation=BIG,
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
        codec.encode(_submit(MAX_FRAME_BYTES - _submit_overhead() + 1))


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
