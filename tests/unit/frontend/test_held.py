"""Memory held for clients: what makes room where it is too much."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_router import eventually, frontend, made_logprobs, says

from lightserve.bundled import BUNDLED_MODEL_NAME
from lightserve.frontend.connections import ConnectionLimits, ConnectionTable, Held
from lightserve.messages.frontend_router import RequestDelta, Submit, TokenDelta
from lightserve.types import FinishReason, RequestId

MAX_BYTES = 1000


@dataclass(eq=False)
class Upload:
    is_refused: bool = False

    def evict(self) -> None:
        raise AssertionError("bodies are no idle connections")

    def refuse_body(self) -> None:
        self.is_refused = True


def _table() -> ConnectionTable:
    limits = ConnectionLimits(
        max_headers=100,
        max_header_bytes=1,
        header_timeout_s=1.0,
        body_timeout_s=1.0,
        min_body_bytes_per_s=1,
        max_pending_body_bytes=MAX_BYTES,
    )
    rejects: Counter[str] = Counter()
    return ConnectionTable(limits, max_connections=9, max_connections_per_ip=9, rejects=rejects)


@pytest.mark.parametrize("attacker", ["key mallory", "key alice"])
@pytest.mark.parametrize("num_bytes", [10, 100, 900])
def test_new_bodies_do_not_push_out_a_slow_upload(attacker: str, num_bytes: int) -> None:
    """Of another client, or of the same one, as long as it comes on and they do not."""
    table = _table()
    slow, others = Upload(), []
    for step in range(1, 91):
        table.hold_body(slow, "key alice", step)
        for _ in range(1 + 200 // num_bytes):
            others.append(Upload())
            table.hold_body(others[-1], attacker, num_bytes)
    assert not slow.is_refused
    assert table.num_pending_body_bytes <= MAX_BYTES
    assert sum(upload.is_refused for upload in others) > len(others) // 3
    assert table.rejects["pending_body_evicted"] == sum(other.is_refused for other in others)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abc"), st.integers(0, 600)), max_size=60)
)
def test_the_sums_are_right_and_bounded(steps: list[tuple[int, str, int]]) -> None:
    held: Held[int] = Held(MAX_BYTES)
    expected: dict[int, tuple[str, int]] = {}
    for holder, owner, num_bytes in steps:
        if num_bytes == 0:
            held.release(holder)
            expected.pop(holder, None)
            continue
        expected[holder] = owner, num_bytes
        for gone in held.hold(holder, owner, num_bytes):
            shares: Counter[str] = Counter()
            for name, size in expected.values():
                shares[name] += size
            assert shares[expected.pop(gone)[0]] == max(shares.values())
        assert held.num_bytes == sum(size for _, size in expected.values()) <= MAX_BYTES
    for holder in range(6):
        held.release(holder)
    assert held.num_bytes == 0


BODY: dict[str, Any] = {"model": BUNDLED_MODEL_NAME, "prompt": [5, 6, 7], "max_tokens": 2000}


def test_kept_answers_are_bounded_in_sum() -> None:
    """Each has 2,000 tokens with 21 log-probabilities: half a megabyte."""

    def say(submit: Submit) -> list[RequestDelta]:
        return says([50] * 2000)(submit)[:-1]

    async def scenario() -> None:
        async with frontend(say, max_kept_answer_bytes=1_200_000) as setup:
            setup.router.turns_between = 0
            kept = setup.service.kept
            answers = []
            for number in range(3):
                answer = setup.post("/v1/completions", BODY | {"logprobs": 20})
                answers.append(asyncio.create_task(answer))
                await setup.router.submitted(number + 1)
                wanted = min(number + 1, 2) * 500_000
                await eventually(lambda wanted=wanted: kept.num_bytes > wanted)
            first = await answers[0]
            assert (first.status_code, first.json()["error"]["code"]) == (429, "overloaded")
            assert setup.service.observation.rejects["kept_answer_evicted"] == 1
            assert setup.router.aborted_ids == [0]
            await eventually(lambda: kept.num_bytes > 1_000_000)
            assert kept.num_bytes <= 1_200_000
            for number in (1, 2):
                logprobs = made_logprobs(20, 1999)
                end = RequestDelta(RequestId(number), [2], FinishReason.STOP, logprobs=logprobs)
                setup.service.router.on_message(TokenDelta(requests=[end]))
                answer = await answers[number]
                assert len(answer.json()["choices"][0]["logprobs"]["tokens"]) == 2000
            assert kept.num_bytes == 0

    asyncio.run(scenario())
