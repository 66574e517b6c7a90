"""Readiness, liveness, draining, and what happens when a part is missing or full."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.fake_router import (
    BOOT_ID,
    Setup,
    eventually,
    frontend,
    kv_pool,
    router_status,
    says,
    sse_data,
)
from support.patient_loop import PatientLoop, run_patiently
from support.processes import PATIENCE_S

from lightserve.bundled import BUNDLED_MODEL_DIR, BUNDLED_MODEL_NAME
from lightserve.frontend import json_body, router_client
from lightserve.frontend.admin import MAX_SILENCE_S, RUNS_PER_PIECE
from lightserve.frontend.json_body import Backlog
from lightserve.frontend.response import KEEP_ALIVE
from lightserve.frontend.router_client import RouterClient
from lightserve.messages.frontend_router import (
    DescribeKV,
    ErrorCode,
    KVMap,
    RequestDelta,
    RouterWelcome,
    TokenDelta,
    pack_kinds,
)
from lightserve.types import FinishReason

COMPLETION: dict[str, Any] = {"model": BUNDLED_MODEL_NAME, "prompt": "hi", "max_tokens": 500}
CHAT: dict[str, Any] = {
    "model": BUNDLED_MODEL_NAME,
    "messages": [{"role": "user", "content": "hi"}],
}
EOS = 2
ROUTES = [
    ("/v1/completions", COMPLETION),
    ("/v1/completions", {**COMPLETION, "stream": True}),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/generate_stream", {"inputs": "hi"}),
]


def test_draining_refuses_the_new_and_finishes_the_old() -> None:
    async def scenario() -> None:
        async with frontend() as setup:
            task = asyncio.create_task(setup.post("/v1/completions", COMPLETION))
            await setup.router.submitted()
            setup.service.in_flight.is_draining = True
            for path, body in ROUTES:
                refused = await setup.post(path, body)
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "shutting_down"
            assert (await setup.http.get("/readyz")).status_code == 503
            assert (await setup.http.get("/livez")).status_code == 200
            for delta in says([50, 51, EOS])(setup.router.submits[0]):
                setup.service.router.on_message(TokenDelta(requests=[delta]))
            assert (await task).json()["choices"][0]["finish_reason"] == "stop"
            await asyncio.wait_for(setup.service.in_flight.wait_idle(), 10)

    asyncio.run(scenario())


def test_probes_tell_what_is_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]

    async def probes(setup: Setup) -> list[int]:
        paths = ("/livez", "/readyz", "/health")
        return [(await setup.http.get(path)).status_code for path in paths]

    async def scenario() -> None:
        async with frontend(welcome=False, step_timeout_s=5.0, start_timeout_s=60.0) as setup:
            client = setup.service.router
            assert await probes(setup) == [200, 503, 503]  # workers load: live, not ready
            client.on_message(router_status(workers_ready=False))
            assert await probes(setup) == [200, 503, 503]
            client.on_message(RouterWelcome(boot_id="boot", num_kv_slots=10))
            client.on_message(router_status(num_steps=7, worker_busy_s=1.5))
            assert await probes(setup) == [200, 200, 200]
            health = (await setup.http.get("/health")).json()
            assert (health["num_steps"], health["worker_busy_s"]) == (7, 1.5)
            client.on_message(router_status(stalled_s=4.9))
            assert await probes(setup) == [200, 200, 200]
            client.on_message(router_status(stalled_s=5.1))
            assert await probes(setup) == [503, 503, 503]
            client.on_message(router_status())
            now_s[0] += MAX_SILENCE_S - 0.1
            assert await probes(setup) == [200, 200, 200]
            now_s[0] += 0.2
            assert await probes(setup) == [503, 503, 503]
            client.detach()
            assert await probes(setup) == [200, 503, 503]
            now_s[0] += 61.0
            assert await probes(setup) == [503, 503, 503]

    original = RouterClient.__init__
    monkeypatch.setattr(
        RouterClient, "__init__", lambda self, **_: original(self, clock=lambda: now_s[0])
    )
    asyncio.run(scenario())


def test_the_encoding_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with frontend(says([5, EOS])) as setup:
            monkeypatch.setattr(setup.service.encoder, "_backlog", Backlog(max_items=0))
            response = await setup.post("/v1/chat/completions", CHAT)
            assert (response.status_code, response.json()["error"]["code"]) == (429, "overloaded")
            assert (await setup.post("/v1/completions", COMPLETION)).status_code == 200

    asyncio.run(scenario())


def test_a_model_without_a_chat_template_still_completes(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        shutil.copy(BUNDLED_MODEL_DIR / name, tmp_path / name)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|bos|>"}))

    async def scenario() -> None:
        async with frontend(
            says([5, EOS]), model=str(tmp_path), served_model_name=BUNDLED_MODEL_NAME
        ) as setup:
            response = await setup.post("/v1/chat/completions", CHAT)
            assert response.json()["error"]["code"] == "no_chat_template"
            assert (await setup.post("/v1/completions", COMPLETION)).status_code == 200

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("num_kv_slots", "welcome", "longest"),
    [(1_000_000, True, 512), (320, True, 320), (320, False, 512)],
)
def test_models_say_what_a_request_may_be(num_kv_slots: int, welcome: bool, longest: int) -> None:
    """The pool may hold less than the context; without workers its size is not known."""

    async def scenario() -> None:
        async with frontend(max_model_len=512, num_kv_slots=num_kv_slots, welcome=welcome) as setup:
            models = (await setup.http.get("/v1/models")).json()["data"]
            assert [model["max_model_len"] for model in models] == [longest]

    asyncio.run(scenario())


def test_a_request_may_not_be_what_its_state_takes() -> None:
    async def scenario() -> None:
        async with frontend(max_model_len=512) as setup:
            status = router_status(num_kv_slots=320, num_state_slots=20)
            setup.service.router.on_message(status)
            models = (await setup.http.get("/v1/models")).json()["data"]
            assert [model["max_model_len"] for model in models] == [300]

    asyncio.run(scenario())


def test_the_age_counts_from_the_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with frontend(says([5, EOS])) as setup:
            for path, body in ROUTES:
                assert (await setup.post(path, body)).status_code == 200
            assert all(0.0 <= submit.age_s < 30.0 for submit in setup.router.submits)
            encode = setup.service.encoder.encode_text

            async def slow(*args: Any, **options: Any) -> list[int]:
                await asyncio.sleep(0.05)
                return await encode(*args, **options)

            monkeypatch.setattr(setup.service.encoder, "encode_text", slow)
            await setup.post("/v1/completions", COMPLETION)
            assert setup.router.submits[-1].age_s >= 0.05

    asyncio.run(scenario())


def test_nothing_is_spent_on_a_prompt_while_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with frontend(welcome=False) as setup:

            def must_not_run(*_: Any, **__: Any) -> list[int]:
                raise AssertionError("tokenised")

            monkeypatch.setattr(setup.service.model.tokenizer, "encode", must_not_run)
            for path, body in ROUTES:
                response = await setup.post(path, body)
                assert (response.status_code, response.headers["retry-after"]) == (503, "1")

    asyncio.run(scenario())


# GET /debug/kv: its shape, what waits for what, and what happens without an answer.


def _questions(setup: Setup) -> list[DescribeKV]:
    return [message for message in setup.router.sent if isinstance(message, DescribeKV)]


def _error(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def _answer_of(setup: Setup) -> Any:
    response = await setup.http.get("/debug/kv")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    return response.json()


def test_the_answer_in_full() -> None:
    async def scenario() -> None:
        async with frontend() as setup:
            assert await _answer_of(setup) == {
                "num_slots": 8,
                "block_size": 4,
                "counts": {"free": 1, "rt": 3, "be": 2, "cached": 1, "checkpointed": 1},
                "classes": {
                    "rt": {"num_requests": 1, "num_slots": 3, "num_checkpointed_slots": 0},
                    "be": {"num_requests": 1, "num_slots": 3, "num_checkpointed_slots": 1},
                },
                "num_free_blocks": 0,
                "num_shared_blocks": 1,
                "mean_run_length": 2.0,
                "num_host_slots": 10,
                "num_used_host_slots": 7,
                "num_prefix_host_slots": 30,
                "num_used_prefix_host_slots": 20,
                "kinds": ["free", "rt", "be", "cached", "checkpointed"],
                "slots": [[1, 1], [1, 1], [3, 1], [0, 1], [1, 1], [4, 1], [2, 1], [2, 1]],
            }
            setup.router.kv_answer = kv_pool(slots=None)
            assert (await _answer_of(setup))["slots"] is None

    asyncio.run(scenario())


@pytest.mark.parametrize("num_runs", [1, RUNS_PER_PIECE, RUNS_PER_PIECE + 1, 3 * RUNS_PER_PIECE])
@pytest.mark.parametrize("length", [1, 9])
def test_any_number_of_runs(num_runs: int, length: int) -> None:
    kinds = np.repeat(np.arange(num_runs, dtype=np.uint8) % 5, length)

    async def scenario() -> None:
        async with frontend() as setup:
            setup.router.kv_answer = kv_pool(num_slots=len(kinds), slots=pack_kinds(kinds))
            runs = np.array((await _answer_of(setup))["slots"])
            assert np.repeat(runs[:, 0], runs[:, 1]).tolist() == kinds.tolist()

    asyncio.run(scenario())


def test_parameters_are_refused() -> None:
    async def scenario() -> None:
        async with frontend() as setup:
            for query in ("a=1", "a", "block=3&slots=4"):
                response = await setup.http.get(f"/debug/kv?{query}")
                assert _error(response) == (400, "unknown_parameter")
            assert '"block"' in response.json()["error"]["message"]
            assert _questions(setup) == []

    asyncio.run(scenario())


def test_askers_at_the_same_time_cost_one_map() -> None:
    async def scenario() -> None:
        async with frontend() as setup:
            answers = await asyncio.gather(*(_answer_of(setup) for _ in range(5)))
            assert all(answer == answers[0] for answer in answers)
            assert len(_questions(setup)) == 1
            setup.router.kv_answer = kv_pool(num_free_blocks=1)
            assert (await _answer_of(setup))["num_free_blocks"] == 1
            assert len(_questions(setup)) == 2

    asyncio.run(scenario())


def test_without_workers_or_router() -> None:
    async def scenario() -> None:
        async with frontend(welcome=False) as setup:
            assert _error(await setup.http.get("/debug/kv")) == (503, "not_ready")
            assert _questions(setup) == []
            client = setup.service.router
            client.on_message(RouterWelcome(boot_id=BOOT_ID, num_kv_slots=8))
            client.on_message(router_status())
            setup.router.kv_answer = None  # they were lost just now
            assert _error(await setup.http.get("/debug/kv")) == (503, "not_ready")
            setup.router.is_full = True
            assert _error(await setup.http.get("/debug/kv")) == (429, "overloaded")

    asyncio.run(scenario())


def test_a_router_that_is_lost_or_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(setup: Setup, number: int, num_free_blocks: int) -> None:
        """Answer the question of this number."""
        pool = kv_pool(num_free_blocks=num_free_blocks)
        query_id = _questions(setup)[number].query_id
        setup.service.router.on_message(KVMap(query_id=query_id, pool=pool))

    async def scenario() -> None:
        async with frontend() as setup:
            client, router = setup.service.router, setup.router
            router.ignores_kv = True
            waiting = asyncio.create_task(setup.http.get("/debug/kv"))
            await eventually(lambda: len(_questions(setup)) == 1)
            client.detach()
            assert _error(await waiting) == (503, "router_lost")

            client.attach(router, BOOT_ID)
            client.on_message(RouterWelcome(boot_id=BOOT_ID, num_kv_slots=8))
            monkeypatch.setattr(router_client, "ANSWER_TIMEOUT_S", 0.02)
            assert _error(await setup.http.get("/debug/kv")) == (504, "router_timeout")
            answer(setup, 1, 7)  # no longer waited for

            monkeypatch.setattr(router_client, "ANSWER_TIMEOUT_S", 30.0)
            waiting = asyncio.create_task(setup.http.get("/debug/kv"))
            await eventually(lambda: len(_questions(setup)) == 3)
            answer(setup, 1, 7)  # nor for it a second time
            await asyncio.sleep(0)
            assert not waiting.done()
            answer(setup, 2, 1)
            assert (await waiting).json()["num_free_blocks"] == 1

    asyncio.run(scenario())


# Comments that keep streams alive while nothing comes, and what they do to the status.

LATE_COMPLETION: dict[str, Any] = {"model": BUNDLED_MODEL_NAME, "prompt": [5], "stream": True}
COMMENT = KEEP_ALIVE.decode()


def _late(
    body: dict[str, Any], *, keepalive_s: float, error: ErrorCode | None = None
) -> httpx.Response:
    """Ask, and answer after ten keep-alives' time; then again as late, with the end."""

    async def scenario() -> httpx.Response:
        async with frontend(sse_keepalive_s=keepalive_s) as setup:
            asking = asyncio.create_task(setup.post("/v1/completions", body))
            await setup.router.submitted()
            request_id = setup.router.submits[0].request_id
            end = FinishReason.LENGTH if error is None else FinishReason.ERROR
            last = [70] if error is None else []
            for delta in (
                RequestDelta(request_id, [70]),
                RequestDelta(request_id, last, end, error),
            ):
                if delta.finish_reason is None or error is None:
                    await asyncio.sleep(1.0)
                setup.service.router.on_message(TokenDelta(requests=[delta]))
                await asyncio.sleep(0.01)
            return await asking

    with asyncio.Runner(loop_factory=PatientLoop) as runner:
        return runner.run(scenario())


def test_comments_come_while_nothing_else_does() -> None:
    text = _late(LATE_COMPLETION, keepalive_s=0.1).text
    before, between = text.index("data: "), text.rindex('"finish_reason":"length"')
    assert text[:before] == COMMENT * (before // len(COMMENT))
    assert text[:before]
    assert COMMENT in text[before:between]
    assert text.endswith("data: [DONE]\n\n")
    *chunks, done = sse_data(text.replace(COMMENT, ""))
    assert done == "[DONE]"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("stream", "keepalive_s"), [(False, 0.1), (True, 60.0)])
def test_none_in_whole_answers_and_none_before_their_time(stream: bool, keepalive_s: float) -> None:
    assert COMMENT not in _late({**LATE_COMPLETION, "stream": stream}, keepalive_s=keepalive_s).text


def test_an_error_after_a_comment_is_an_event() -> None:
    async def scenario() -> None:
        async with frontend(sse_keepalive_s=0.1) as setup:
            asking = asyncio.create_task(setup.post("/v1/completions", LATE_COMPLETION))
            await setup.router.submitted()
            await asyncio.sleep(0.5)
            failed = RequestDelta(0, [], FinishReason.ERROR, ErrorCode.QUEUE_FULL)  # type: ignore[arg-type]
            setup.service.router.on_message(TokenDelta(requests=[failed]))
            response = await asking
            assert response.status_code == 200
            assert response.text.startswith(COMMENT)
            (event,) = sse_data(response.text.replace(COMMENT, ""))
            assert event["error"]["code"] == "overloaded"

    run_patiently(scenario())


# Refusals: when to try again, and bounds of the work before the router.

SHORT: dict[str, Any] = {"model": BUNDLED_MODEL_NAME, "prompt": [5], "max_tokens": 2}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("retry_after_s", "header"), [(7.2, "8"), (0.0, "1"), (0.2, "1"), (3.0, "3")]
)
def test_a_full_queue_says_when_to_try_again(
    stream: bool, retry_after_s: float, header: str
) -> None:
    def full(submit: Any) -> list[RequestDelta]:
        error, end = ErrorCode.QUEUE_FULL, FinishReason.ERROR
        return [RequestDelta(submit.request_id, [], end, error, retry_after_s)]

    async def scenario() -> None:
        async with frontend(full) as setup:
            response = await setup.post("/v1/completions", {**SHORT, "stream": stream})
            assert response.status_code == 429
            assert response.headers["retry-after"] == header
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")

    asyncio.run(scenario())


def test_long_bodies_wait_in_a_bounded_queue_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json_body, "Backlog", lambda: Backlog(max_items=2))
    may_go_on, threads, waiting = threading.Event(), [], []
    parse, enter = json_body.parse_model, json_body.BodyReader._parse

    def slow(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        assert may_go_on.wait(PATIENCE_S)
        return parse(*args, **options)

    async def noted(reader: json_body.BodyReader, body: bytes, *others: Any) -> Any:
        waiting.append(body)
        return await enter(reader, body, *others)

    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            long = {**SHORT, "user": "u", "metadata": None, "prompt": [5] * 6000}
            monkeypatch.setattr(json_body, "parse_model", slow)
            monkeypatch.setattr(json_body.BodyReader, "_parse", noted)
            tasks = [asyncio.create_task(setup.post("/v1/completions", long)) for _ in range(2)]
            await eventually(lambda: len(threads) == 1)
            await eventually(lambda: len(waiting) == 2)
            refused = await setup.post("/v1/completions", long)
            assert refused.status_code == 429
            assert (await setup.http.get("/livez")).status_code == 200  # the loop turns
            may_go_on.set()
            for response in await asyncio.gather(*tasks):
                assert response.status_code in (200, 400)
            assert threading.main_thread() not in threads

    asyncio.run(scenario())
