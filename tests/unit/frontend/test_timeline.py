"""GET /v1/requests/ID/timeline: for its own key, and what it says of the router's answer."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from support.fake_router import BOOT_ID, Setup, eventually, frontend

from lightserve.frontend import router_client
from lightserve.frontend.middleware import KeyRing
from lightserve.frontend.process import create_app
from lightserve.http_access import ApiKey, digest_of
from lightserve.messages.frontend_router import (
    DescribeRequest,
    RequestLife,
    RequestTimeline,
    Stretch,
)
from lightserve.types import SLO, RequestClass

KEYS = [ApiKey("alice", digest_of(b"alices-key")), ApiKey("ops", digest_of(b"ops-key"), True)]
PATH = "/v1/requests/chatcmpl-1/timeline"


def life(**changes: Any) -> RequestLife:
    values: dict[str, Any] = {
        "request_class": RequestClass.RT,
        "slo": SLO(ttft_ms=300.0, tpot_ms=30.0),
        "age_s": 1.5,
        "end": "stop",
        "first_token_s": 0.5,
        "max_gap_s": 0.2,
        "token_span_s": 1.0,
        "num_output_tokens": 11,
        "before_first_token": {"time": 0.3, "computes": 0.15, "kv_now": 0.05},
        "after_first_token": {"computes": 0.8, "order": 0.2},
        "stretches": [
            Stretch(
                what="time",
                at_s=0.0,
                seconds=0.3,
                num_steps=9,
                num_tokens=0,
                tokens_of_others={RequestClass.BE: 40},
                predicted_s=0.25,
                observed_s=0.27,
            )
        ],
    }
    return RequestLife(**(values | changes))


async def asked(setup: Setup, lives: list[RequestLife], path: str = PATH, **more: Any) -> Any:
    """Ask, and let the router answer this."""
    num_before = len(questions(setup))
    asking = asyncio.create_task(setup.http.get(path, **more))
    await eventually(lambda: len(questions(setup)) > num_before or asking.done())
    if not asking.done():
        number = questions(setup)[-1].query_id
        setup.service.router.on_message(RequestTimeline(query_id=number, lives=lives))
    return await asking


def questions(setup: Setup) -> list[DescribeRequest]:
    return [message for message in setup.router.sent if isinstance(message, DescribeRequest)]


def test_the_answer() -> None:
    async def scenario() -> None:
        async with frontend(request_timelines=5) as setup:
            answer = await asked(setup, [life(), life(end=None, num_output_tokens=1)])
            assert answer.status_code == 200
            body = answer.json()
            assert (body["id"], body["object"]) == ("chatcmpl-1", "request.timeline")
            first, second = body["completions"]
            assert first["missed"] == ["ttft", "tpot"] and first["held_up_by"] == "time"
            assert (first["state"], first["end"]) == ("ended", "stop")
            assert first["mean_gap_s"] == pytest.approx(0.1) and first["max_gap_s"] == 0.2
            assert first["targets"]["ttft_ms"] == 300.0
            assert first["stretches"][0]["tokens_of_others"] == {"be": 40}
            assert (second["state"], second["mean_gap_s"]) == ("alive", None)
            assert questions(setup)[0].name == "chatcmpl-1"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("changes", "missed", "held_up_by"),
    [
        ({"first_token_s": 0.2}, ["tpot"], "order"),
        ({"first_token_s": 0.2, "token_span_s": 0.1}, [], "time"),
        ({"first_token_s": None, "num_output_tokens": 0, "token_span_s": 0.0}, ["ttft"], "time"),
        ({"slo": SLO(completion_s=1.0)}, ["completion"], "order"),
        ({"slo": SLO(mtpot_ms=100.0)}, ["mtpot"], "order"),
        ({"before_first_token": {"computes": 1.0}}, ["ttft", "tpot"], None),
    ],
)
def test_what_was_missed_and_what_held_it_up(
    changes: dict[str, Any], missed: list[str], held_up_by: str | None
) -> None:
    async def scenario() -> None:
        async with frontend(request_timelines=5) as setup:
            (one,) = (await asked(setup, [life(**changes)])).json()["completions"]
            assert (one["missed"], one["held_up_by"]) == (missed, held_up_by)

    asyncio.run(scenario())


def test_each_key_asks_for_its_own() -> None:
    async def scenario() -> None:
        async with frontend(request_timelines=5, api_key_file="keys") as setup:
            app = create_app(setup.service, KeyRing(KEYS))
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://any.host") as http:
                setup.http = http
                assert (await http.get(PATH)).status_code == 401
                for key, is_any in (("alices-key", False), ("ops-key", True)):
                    headers = {"authorization": f"Bearer {key}"}
                    answer = await asked(setup, [life()], headers=headers)
                    assert answer.status_code == 200
                    assert (questions(setup)[-1].client_key is None) == is_any
                unknown = await asked(setup, [], headers={"authorization": "Bearer alices-key"})
                assert unknown.status_code == 404
                assert unknown.json()["error"]["code"] == "request_not_found"

    asyncio.run(scenario())


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    def error(answer: httpx.Response) -> tuple[int, str]:
        return answer.status_code, answer.json()["error"]["code"]

    async def scenario() -> None:
        async with frontend() as setup:
            assert error(await setup.http.get(PATH)) == (404, "timelines_off")
        async with frontend(request_timelines=5) as setup:
            odd = await setup.http.get("/v1/requests/a%20b/timeline")
            assert error(odd) == (404, "request_not_found")
            assert questions(setup) == []
            monkeypatch.setattr(router_client, "MAX_QUESTIONS", 1)
            waiting = asyncio.create_task(setup.http.get(PATH))
            await eventually(lambda: len(questions(setup)) == 1)
            assert error(await setup.http.get(PATH)) == (429, "overloaded")
            setup.service.router.detach()
            assert error(await waiting) == (503, "router_lost")
            assert error(await setup.http.get(PATH)) == (503, "not_ready")
            setup.service.router.attach(setup.router, BOOT_ID)

    asyncio.run(scenario())


def test_a_router_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_client, "ANSWER_TIMEOUT_S", 0.02)

    async def scenario() -> None:
        async with frontend(request_timelines=5) as setup:
            answer = await setup.http.get(PATH)
            assert answer.status_code == 504
            late = RequestTimeline(query_id=questions(setup)[0].query_id, lives=[life()])
            setup.service.router.on_message(late)  # no longer waited for

    asyncio.run(scenario())
