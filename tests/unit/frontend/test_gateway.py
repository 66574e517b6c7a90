"""What inference gateways say to a replica, and ask of it: objectives, targets, load reports."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from support.fake_router import Setup, frontend, router_status, says

from lightserve.bundled import BUNDLED_MODEL_NAME
from lightserve.config import ServeConfig
from lightserve.errors import ConfigError
from lightserve.frontend.admin import load_report
from lightserve.frontend.middleware import KeyRing
from lightserve.frontend.process import create_app
from lightserve.http_access import ApiKey, digest_of
from lightserve.messages.frontend_router import ClassLoad
from lightserve.types import RequestClass

EOS = 2
OBJECTIVE = "x-gateway-inference-objective"
FORMAT, REPORT = "endpoint-load-metrics-format", "endpoint-load-metrics"
OBJECTIVES = "chat=10, nightly=-1, team.a-b=0"
TURN = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5], "max_tokens": 2},
    "/v1/chat/completions": {"messages": TURN},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": TURN, "max_tokens": 9},
}
"""And the tier that each states of best-effort requests."""
BE_TIER = dict.fromkeys(BODIES, "flex") | {"/v1/messages": "batch"}


async def post(
    setup: Setup, path: str, headers: list[tuple[str, str]], **fields: Any
) -> httpx.Response:
    body = {"model": BUNDLED_MODEL_NAME, **BODIES[path], **fields}
    content = json.dumps(body).encode()
    return await setup.http.post(path, content=content, headers=httpx.Headers(headers))


@pytest.mark.parametrize("path", BODIES)
def test_an_objective_has_a_priority_and_perhaps_a_class(path: str) -> None:
    async def scenario() -> None:
        async with frontend(says([5, EOS]), inference_objectives=OBJECTIVES) as setup:
            chat = await post(setup, path, [(OBJECTIVE, "chat")])
            assert chat.status_code == 200, chat.text
            nightly = await post(setup, path, [(OBJECTIVE, "nightly")])
            body = nightly.json()
            tier = body.get("service_tier") or body["usage"]["service_tier"]
            assert tier == BE_TIER[path]
            equal = await post(setup, path, [(OBJECTIVE, "chat")], priority=10)
            assert equal.status_code == 200
            flex = await post(setup, path, [(OBJECTIVE, "team.a-b")], service_tier="flex")
            assert flex.status_code == 200
            got = [(s.request_class, s.priority) for s in setup.router.submits]
            real_time, best_effort = RequestClass.RT, RequestClass.BE
            expected = [(real_time, 10), (best_effort, -1), (real_time, 10), (best_effort, 0)]
            assert got == expected

    asyncio.run(scenario())


def test_tgis_routes_take_the_priority() -> None:
    async def scenario() -> None:
        async with frontend(says([5, EOS]), inference_objectives=OBJECTIVES) as setup:
            for fields in ({}, {"parameters": {"max_new_tokens": 3}}):
                content = json.dumps({"inputs": "hi", **fields}).encode()
                headers = {OBJECTIVE: "nightly"}
                answer = await setup.http.post("/generate", content=content, headers=headers)
                assert answer.status_code == 200, answer.text
            got = [(s.request_class, s.priority) for s in setup.router.submits]
            assert got == [(RequestClass.RT, -1)] * 2

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("headers", "fields", "param", "word"),
    [
        ([(OBJECTIVE, "weekly")], {}, OBJECTIVE, "chat, nightly, team.a-b, got"),
        ([(OBJECTIVE, "")], {}, OBJECTIVE, "must name one of"),
        ([(OBJECTIVE, "chat"), (OBJECTIVE, "chat")], {}, OBJECTIVE, "must name one of"),
        ([(OBJECTIVE, "chat")], {"priority": 9}, "priority", "priority (9)"),
    ],
)
def test_an_objective_that_cannot_hold_is_refused(
    headers: list[tuple[str, str]], fields: dict[str, Any], param: str, word: str
) -> None:
    async def scenario() -> None:
        async with frontend(inference_objectives=OBJECTIVES) as setup:
            answer = await post(setup, "/v1/completions", headers, **fields)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["param"] == param and word in error["message"]
            assert not setup.router.submits

    asyncio.run(scenario())


def test_a_tier_stands_over_an_objectives_class_and_no_objectives_over_none() -> None:
    async def scenario() -> None:
        async with frontend(says([5, EOS]), inference_objectives=OBJECTIVES) as setup:
            headers = [(OBJECTIVE, "nightly")]
            await post(setup, "/v1/completions", headers, service_tier="default")
            assert setup.router.submits[0].request_class is RequestClass.RT
            assert setup.router.submits[0].priority == -1
        async with frontend(says([5, EOS])) as setup:
            assert (await post(setup, "/v1/completions", headers)).status_code == 200
            assert setup.router.submits[0].priority == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("chat", "'chat'"),
        ("chat=high", "'chat=high'"),
        ("chat=1001", "'chat=1001'"),
        ("-chat=1", "'-chat=1'"),
        ("chat=1,chat=2", "'chat' once"),
        (",", "at least one name"),
    ],
)
def test_objectives_that_are_none_end_the_start(text: str, word: str) -> None:
    with pytest.raises(ConfigError, match="--inference-objectives") as caught:
        ServeConfig(inference_objectives=text)
    assert word in str(caught.value)


def test_targets_as_an_endpoint_picker_has_them() -> None:
    async def scenario() -> None:
        async with frontend(says([5, EOS])) as setup:
            path = "/v1/completions"
            headers = [("x-llm-d-slo-ttft-ms", "400"), ("X-LLM-D-SLO-TPOT-MS", "50")]
            assert (await post(setup, path, headers)).status_code == 200
            both = [("x-slo-ttft-ms", "400"), *headers]
            assert (await post(setup, path, both)).status_code == 200
            assert [submit.slo.ttft_ms for submit in setup.router.submits] == [400.0] * 2
            assert setup.router.submits[0].slo.tpot_ms == 50.0
            for wrong, word in (
                ([("x-slo-ttft-ms", "401"), *headers], "must be equal"),
                ([*headers, headers[0]], "given once"),
                ([("x-llm-d-slo-mtpot-ms", "9")], "not supported"),
                ([("x-llm-d-slo-ttft-ms", "soon")], "milliseconds"),
            ):
                answer = await post(setup, path, wrong)
                assert answer.status_code == 400 and word in answer.text

    asyncio.run(scenario())


def test_load_in_the_head_of_an_answer() -> None:
    loads = {
        RequestClass.RT: ClassLoad(num_waiting=2, num_waiting_tokens=9, num_running=3),
        RequestClass.BE: ClassLoad(num_waiting=5, num_waiting_tokens=9, num_running=4),
    }
    status = router_status(load=loads, num_used_slots=250, num_kv_slots=1000)
    named = {
        "kv_cache_usage_perc": 0.25,
        "num_requests_waiting": 7.0,
        "num_requests_running": 7.0,
    }
    pairs = ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())

    async def scenario() -> None:
        async with frontend(says([5, EOS])) as setup:
            setup.service.router.on_message(status)
            path = "/v1/completions"
            for text in ("JSON", "json"):
                answer = await post(setup, path, [(FORMAT, text)])
                style, _, report = answer.headers[REPORT].partition(" ")
                assert style == "JSON" and json.loads(report) == {"named_metrics": named}
            answer = await post(setup, path, [(FORMAT, "TEXT")], stream=True)
            assert answer.headers[REPORT] == f"TEXT {pairs}"
            refused = await post(setup, path, [(FORMAT, "TEXT")], max_tokens=0)
            assert refused.status_code == 400 and refused.headers[REPORT] == f"TEXT {pairs}"
            assert REPORT not in (await post(setup, path, [])).headers
            answer = await post(setup, path, [(FORMAT, "BIN")])
            assert answer.status_code == 400 and answer.json()["error"]["param"] == FORMAT

    asyncio.run(scenario())
    assert load_report(router_status(num_kv_slots=0), "TEXT").startswith(
        "TEXT named_metrics.kv_cache_usage_perc=0.0, "
    )


def test_load_is_for_operators_and_gateways() -> None:
    keys = [
        ApiKey("alice", digest_of(b"alice-key")),
        ApiKey("ops", digest_of(b"ops-key"), is_admin=True),
        ApiKey("gate", digest_of(b"gate-key"), is_gateway=True),
    ]

    async def scenario() -> None:
        async with frontend(says([5, EOS]), api_key_file="keys") as setup:
            transport = httpx.ASGITransport(app=create_app(setup.service, KeyRing(keys)))
            async with httpx.AsyncClient(transport=transport, base_url="http://any") as http:
                setup.http = http
                got = {}
                for key in ("alice", "ops", "gate", "no"):
                    headers = [
                        ("authorization", f"Bearer {key}-key"),
                        ("content-type", "application/json"),
                        (FORMAT, "TEXT"),
                    ]
                    answer = await post(setup, "/v1/completions", headers)
                    got[key] = (answer.status_code, REPORT in answer.headers)
                assert got == {
                    "alice": (403, False),
                    "ops": (200, True),
                    "gate": (200, True),
                    "no": (401, False),
                }

    asyncio.run(scenario())
