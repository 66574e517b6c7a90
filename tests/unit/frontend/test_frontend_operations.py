"""Readiness, liveness, draining, and what happens when a part is missing or full."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.fake_router import Setup, frontend, router_status, says

from lightserve.bundled import BUNDLED_MODEL_DIR, BUNDLED_MODEL_NAME
from lightserve.frontend.admin import MAX_SILENCE_S
from lightserve.frontend.json_body import Backlog
from lightserve.frontend.router_client import RouterClient
from lightserve.messages.frontend_router import RouterWelcome, TokenDelta

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
        RouterClient, "__init__", lambda self: original(self, clock=lambda: now_s[0])
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
