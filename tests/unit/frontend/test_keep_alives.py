"""Comments that keep streams alive while nothing comes, and what they do to the status."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from support.fake_router import frontend, sse_data
from support.patient_loop import PatientLoop, run_patiently

from lightserve.bundled import BUNDLED_MODEL_NAME
from lightserve.frontend.response import KEEP_ALIVE
from lightserve.messages.frontend_router import ErrorCode, RequestDelta, TokenDelta
from lightserve.types import FinishReason

COMPLETION: dict[str, Any] = {"model": BUNDLED_MODEL_NAME, "prompt": [5], "stream": True}
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
    text = _late(COMPLETION, keepalive_s=0.1).text
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
    assert COMMENT not in _late({**COMPLETION, "stream": stream}, keepalive_s=keepalive_s).text


def test_an_error_after_a_comment_is_an_event() -> None:
    async def scenario() -> None:
        async with frontend(sse_keepalive_s=0.1) as setup:
            asking = asyncio.create_task(setup.post("/v1/completions", COMPLETION))
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
