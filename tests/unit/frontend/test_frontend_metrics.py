"""What a frontend counts of its requests; /metrics, /load and /version; bounded label sets."""

from __future__ import annotations

import asyncio
import json
import platform
import random
from typing import Any

import pytest
from support.fake_router import Setup, frontend, router_status, says
from support.processes import PATIENCE_S

import lightserve
from lightserve.bundled import BUNDLED_MODEL_NAME
from lightserve.config import ServeConfig
from lightserve.errors import ChannelFull
from lightserve.frontend import observation
from lightserve.frontend.json_body import Backlog
from lightserve.frontend.observation import Scrapes
from lightserve.frontend.request_options import server_slo
from lightserve.messages.common import PROTOCOL_VERSION
from lightserve.messages.frontend_router import ClassLoad, ErrorCode, RequestDelta, TokenDelta
from lightserve.messages.supervision import MetricsRequest, MetricsText
from lightserve.types import SLO, FinishReason, RequestClass

COMPLETION: dict[str, Any] = {"model": BUNDLED_MODEL_NAME, "prompt": [5, 6, 7], "max_tokens": 9}
EOS = 2
NUM_STRANGERS = 3000


def counts(setup: Setup) -> dict[tuple[str, ...], float]:
    """Return (family, *labels) -> value, for histograms the number of observations."""
    snapshot = setup.service.observation.snapshot(num_in_flight=0, num_rejected_frames=0)
    return {
        (sample.family.removeprefix("lightserve_"), *sample.labels): (
            sample.values[0] if len(sample.values) == 1 else sum(sample.values[1:])
        )
        for sample in snapshot.samples
    }


def test_requests_are_counted_by_their_ends() -> None:
    async def scenario() -> None:
        async with frontend(says([50, 51, EOS])) as setup:
            for stream in (False, True):
                await setup.post("/v1/completions", {**COMPLETION, "stream": stream})
            await setup.post("/v1/completions", {**COMPLETION, "max_tokens": 2})
            setup.router.answer = lambda submit: [
                RequestDelta(submit.request_id, [], FinishReason.ERROR, ErrorCode.QUEUE_FULL)
            ]
            assert (await setup.post("/v1/completions", COMPLETION)).status_code == 429
            setup.router.is_full = True
            assert (await setup.post("/v1/completions", COMPLETION)).status_code == 429
            setup.service.encoder._backlog = Backlog(max_items=0)
            long = {**COMPLETION, "prompt": "x" * 3000, "service_tier": "flex"}
            assert (await setup.post("/v1/completions", long)).status_code == 429
            found = counts(setup)
            assert found["request_failure_total", "be", "overloaded"] == 1
            assert found["request_success_total", "rt", "stop"] == 2
            assert found["request_success_total", "rt", "length"] == 1
            assert found["request_success_total", "rt", "abort"] == 0
            assert found["request_failure_total", "rt", "overloaded"] == 2
            assert found["prompt_tokens_total", "rt"] == 9
            assert found["generation_tokens_total", "rt"] == 8
            assert found["time_to_first_token_seconds", "rt"] == 3
            assert found["e2e_request_latency_seconds", "rt"] == 3
            assert found["http_responses_total", "POST", "/v1/completions", "200"] == 3
            assert found["http_responses_total", "POST", "/v1/completions", "429"] == 3

    asyncio.run(scenario())


def test_a_client_that_leaves_is_an_abort() -> None:
    async def scenario() -> None:
        async with frontend() as setup:
            task = asyncio.create_task(setup.post("/v1/completions", COMPLETION))
            await setup.router.submitted()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            found = counts(setup)
            assert found["request_success_total", "rt", "abort"] == 1
            assert found["http_responses_total", "POST", "/v1/completions", "0"] == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, SLO()),
        ({"ttft_slo_ms": 250.0}, SLO(ttft_ms=250)),
        ({"tpot_slo_ms": 50.0}, SLO(tpot_ms=50, mtpot_ms=200)),
        ({"tpot_slo_ms": 50.0, "mtpot_slo_ms": 75.0}, SLO(tpot_ms=50, mtpot_ms=75)),
    ],
)
def test_targets_of_the_server(flags: dict[str, float], expected: SLO) -> None:
    assert server_slo(ServeConfig(**flags)) == expected


def test_the_servers_targets_are_judged() -> None:
    async def scenario() -> None:
        async with frontend(says([50, EOS]), ttft_slo_ms=1e-6, mtpot_slo_ms=1e6) as setup:
            await setup.post("/v1/completions", COMPLETION)
            found = counts(setup)
            assert found["slo_requests_total", "rt", "ttft", "missed"] == 1
            assert found["slo_requests_total", "rt", "mtpot", "met"] == 1
            assert found["slo_requests_total", "rt", "all", "missed"] == 1
            assert ("slo_requests_total", "rt", "tpot", "met") not in found

    asyncio.run(scenario())


def test_strangers_make_no_series() -> None:
    """3,000 requests with random models, users, keys, paths, methods and ids."""
    chance = random.Random(7)

    async def stranger(setup: Setup) -> None:
        word = f"{chance.getrandbits(64):x}"
        path, method = chance.choice(
            [("/v1/completions", "POST"), (f"/{word}", "GET"), (f"/v1/models/{word}", "GET")]
        )
        if chance.random() < 0.1:
            method = word.upper()
        body = json.dumps({"model": word, "prompt": word, "user": word, "max_tokens": 1}).encode()
        headers = [(b"host", b"localhost"), (b"x-request-id", word.encode())]
        headers.append((b"authorization", f"Bearer {word}".encode()))
        headers.append((b"content-type", b"application/json"))
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": word.encode(),
            "headers": headers,
            "http_version": "1.1",
            "scheme": "http",
            "root_path": "",
        }
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(_message: dict[str, Any]) -> None:
            pass

        await setup.app(scope, receive, send)

    async def scenario() -> None:
        async with frontend() as setup:
            for _ in range(100):
                await stranger(setup)
            num_series = len(counts(setup))
            for _ in range(NUM_STRANGERS - 100):
                await stranger(setup)
            found = counts(setup)
            assert len(found) == num_series
            responses = [value for key, value in found.items() if key[0] == "http_responses_total"]
            assert sum(responses) == NUM_STRANGERS
            assert found["http_responses_total", "POST", "/v1/completions", "404"] > 300
            assert found["http_responses_total", "GET", "other", "404"] > 300

    asyncio.run(scenario())


def test_load_and_version() -> None:
    async def scenario() -> None:
        async with frontend(welcome=False) as setup:
            refused = await setup.http.get("/load")
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "not_ready"
            load = {RequestClass.RT: ClassLoad(1, 20, 3), RequestClass.BE: ClassLoad(4, 50, 6)}
            setup.service.router.on_message(
                router_status(load=load, num_used_slots=7, num_kv_slots=80)
            )
            assert (await setup.http.get("/load")).json() == {
                "engine_id": "0",
                "model": BUNDLED_MODEL_NAME,
                "workers_ready": True,
                "num_in_flight": 0,
                "num_used_slots": 7,
                "num_kv_slots": 80,
                "pace": {"pace_ms": 33.0, "be_stretch": 1.5},
                "classes": {
                    "rt": {"num_waiting": 1, "num_waiting_tokens": 20, "num_running": 3},
                    "be": {"num_waiting": 4, "num_waiting_tokens": 50, "num_running": 6},
                },
            }
            version = (await setup.http.get("/version")).json()
            assert version == {
                "version": lightserve.__version__,
                "protocol": PROTOCOL_VERSION,
                "model": BUNDLED_MODEL_NAME,
                "engine_id": "0",
                "python": platform.python_version(),
                "device": None,  # no worker has told it
            }

    asyncio.run(scenario())


def test_metrics_are_the_supervisors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observation, "SCRAPE_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        async with frontend() as setup:
            scrapes = setup.service.observation.scrapes
            await _assert_unavailable(setup)  # no link
            asked: list[MetricsRequest] = []
            scrapes.attach(asked.append)
            await _assert_unavailable(setup)  # no answer
            scrapes.on_text(_text(asked[-1].number, "late"))  # no longer waited for
            monkeypatch.setattr(observation, "SCRAPE_TIMEOUT_S", PATIENCE_S)

            asking = [asyncio.create_task(setup.http.get("/metrics")) for _ in range(3)]
            while len(asked) < 2:
                await asyncio.sleep(0)
            scrapes.on_text(_text(asked[0].number, "another question's"))
            scrapes.on_text(_text(asked[1].number, "a 1\n"))
            for answer in await asyncio.gather(*asking):
                assert (answer.status_code, answer.text) == (200, "a 1\n")
                assert answer.headers["content-type"] == "text/plain; version=1.0.0"
            assert len(asked) == 2

    asyncio.run(scenario())


def _text(number: int, text: str) -> MetricsText:
    content_type = "text/plain; version=1.0.0"
    return MetricsText(number=number, text=text.encode(), content_type=content_type)


async def _assert_unavailable(setup: Setup) -> None:
    answer = await setup.http.get("/metrics")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "metrics_unavailable"


def test_a_full_link_is_no_answer() -> None:
    async def scenario() -> None:
        async with frontend() as setup:

            def refuse(_request: MetricsRequest) -> None:
                raise ChannelFull("full")

            setup.service.observation.scrapes.attach(refuse)
            await _assert_unavailable(setup)
            assert (await setup.http.get("/livez")).status_code == 200

    asyncio.run(scenario())


def test_an_asker_that_leaves_takes_the_answer_from_no_other() -> None:
    async def scenario() -> None:
        scrapes = Scrapes()
        asked: list[MetricsRequest] = []
        scrapes.attach(asked.append)
        leaving, staying = (asyncio.create_task(scrapes.ask()) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        scrapes.on_text(_text(1, "x"))
        assert (await staying).text == b"x"
        assert len(asked) == 1

    asyncio.run(scenario())


def test_news_of_requests_that_are_over_change_nothing() -> None:
    async def scenario() -> None:
        async with frontend(says([50, EOS])) as setup:
            await setup.post("/v1/completions", COMPLETION)
            before = counts(setup)
            late = RequestDelta(setup.router.submits[0].request_id, [50], None)
            setup.service.router.on_message(TokenDelta(requests=[late]))
            assert counts(setup) == before

    asyncio.run(scenario())
