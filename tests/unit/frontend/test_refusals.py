"""Refusals: when to try again, and bounds of the work before the router."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from support.fake_router import eventually, frontend, says
from support.processes import PATIENCE_S

from lightserve.bundled import BUNDLED_MODEL_NAME
from lightserve.frontend import json_body
from lightserve.frontend.json_body import Backlog
from lightserve.messages.frontend_router import ErrorCode, RequestDelta
from lightserve.types import FinishReason

COMPLETION: dict[str, Any] = {"model": BUNDLED_MODEL_NAME, "prompt": [5], "max_tokens": 2}


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
            response = await setup.post("/v1/completions", {**COMPLETION, "stream": stream})
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
    parse, enter = json_body.parse_model, json_body.BodyReader.parse

    def slow(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        assert may_go_on.wait(PATIENCE_S)
        return parse(*args, **options)

    async def noted(reader: json_body.BodyReader, body: bytes, model: Any) -> Any:
        waiting.append(body)
        return await enter(reader, body, model)

    async def scenario() -> None:
        async with frontend(says([5, 2])) as setup:
            long = {**COMPLETION, "user": "u", "metadata": None, "prompt": [5] * 6000}
            monkeypatch.setattr(json_body, "parse_model", slow)
            monkeypatch.setattr(json_body.BodyReader, "parse", noted)
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
