"""What clients are told of targets that the router had to raise, on every route."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest
from support.fake_router import Answer, frontend, says, sse_data

from lightserve.bundled import BUNDLED_MODEL_NAME
from lightserve.messages.frontend_router import RequestDelta, Submit
from lightserve.types import SLO

EOS = 2
ASKED = {"ttft_ms": 10.0, "tpot_ms": 50.0, "mtpot_ms": 200.0}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": BUNDLED_MODEL_NAME, "prompt": [5, 6, 7]},
    "/v1/chat/completions": {
        "model": BUNDLED_MODEL_NAME,
        "messages": [{"role": "user", "content": "hi"}],
    },
    "/generate": {"inputs": "hi"},
    "/generate_stream": {"inputs": "hi"},
}


def raises(*ttft_ms: float | None) -> Answer:
    """Answer each choice in turn, its target of the first token raised to so much."""
    numbers = iter(ttft_ms)

    def answer(submit: Submit) -> list[RequestDelta]:
        first, *rest = says([300, 301, EOS])(submit)
        raised = next(numbers)
        if raised is not None:
            slo = msgspec.structs.replace(submit.slo, ttft_ms=raised)
            first = msgspec.structs.replace(first, scheduled_slo=slo)
        return [first, *rest]

    return answer


def ask(path: str, answer: Answer, **fields: Any) -> httpx.Response:
    """Ask for ASKED on a route."""
    fields = {"slo": {"ttft_ms": 10, "tpot_ms": 50}, **fields}
    body = BODIES[path] | (fields if path.startswith("/v1") else {"parameters": fields})

    async def scenario() -> httpx.Response:
        async with frontend(answer) as setup:
            return await setup.http.post(path, content=json.dumps(body).encode())

    found = asyncio.run(scenario())
    assert found.status_code == 200, found.text
    return found


def scheduled(ttft_ms: float) -> dict[str, Any]:
    return {"asked": ASKED, "scheduled": ASKED | {"ttft_ms": ttft_ms}}


WHOLE = ["/v1/completions", "/v1/chat/completions", "/generate"]


@pytest.mark.parametrize("path", WHOLE)
def test_whole_answers_say_what_was_raised(path: str) -> None:
    assert ask(path, raises(612.34567)).json()["slo"] == scheduled(612.346)


@pytest.mark.parametrize("path", WHOLE)
def test_whole_answers_are_silent_where_nothing_was(path: str) -> None:
    assert "slo" not in ask(path, raises(None)).json()


def test_of_several_choices_the_loosest_is_told() -> None:
    found = ask("/v1/completions", raises(20.0, None, 30.0), n=3).json()
    assert found["slo"] == scheduled(30.0)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_first_chunk_of_each_choice_says_it(path: str) -> None:
    found = ask(path, raises(20.0, None, 30.0), n=3, stream=True)
    *chunks, end = sse_data(found.text)
    assert end == "[DONE]"
    said: dict[int, list[Any]] = {}
    for chunk in chunks:
        said.setdefault(chunk["choices"][0]["index"], []).append(chunk.get("slo"))
    assert all(slo is None for of_choice in said.values() for slo in of_choice[1:])
    assert {index: of_choice[0] for index, of_choice in said.items()} == {
        0: scheduled(20.0),
        1: None,
        2: scheduled(30.0),
    }


def test_the_first_event_of_a_native_stream_says_it() -> None:
    events = sse_data(ask("/generate_stream", raises(20.0)).text)
    assert [event.get("slo") for event in events] == [scheduled(20.0), None, None]


def test_what_was_asked_is_judged() -> None:
    """A target of a nanosecond is missed, though it was raised to an hour."""

    async def scenario() -> None:
        def answer(submit: Submit) -> list[RequestDelta]:
            return [
                msgspec.structs.replace(delta, scheduled_slo=SLO(ttft_ms=3.6e6))
                for delta in says([300, EOS])(submit)
            ]

        async with frontend(answer) as setup:
            body = BODIES["/v1/completions"] | {"slo": {"ttft_ms": 1e-6}}
            await setup.http.post("/v1/completions", content=json.dumps(body).encode())
            snapshot = setup.service.observation.snapshot(num_in_flight=0, num_rejected_frames=0)
            judged = {
                tuple(sample.labels): sample.values
                for sample in snapshot.samples
                if sample.family.endswith("slo_requests_total")
            }
            assert judged["rt", "ttft", "missed"] == [1]

    asyncio.run(scenario())
