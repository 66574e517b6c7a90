"""Targets, priority and timeout of requests: what is taken, what is refused, what it does."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import msgspec
import pytest
from support.fake_router import Answer, Setup, eventually, frontend, made_logprobs, says, sse_data

from lightserve.bundled import BUNDLED_MODEL_NAME
from lightserve.frontend.completion import Choices
from lightserve.frontend.errors import timed_out
from lightserve.frontend.request_options import MAX_PRIORITY, MAX_SECONDS, MAX_TARGET_MS
from lightserve.frontend.response import CompletionResponse
from lightserve.messages.frontend_router import RequestDelta, Submit, TokenDelta
from lightserve.types import SLO, FinishReason

COMPLETION: dict[str, Any] = {"model": BUNDLED_MODEL_NAME, "prompt": [5, 6, 7], "max_tokens": 9}
EOS = 2
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": {
        "model": BUNDLED_MODEL_NAME,
        "messages": [{"role": "user", "content": "hi"}],
    },
    "/v1/responses": {"model": BUNDLED_MODEL_NAME, "input": "hi"},
    "/v1/messages": {
        "model": BUNDLED_MODEL_NAME,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 9,
    },
    "/generate": {"inputs": "hi"},
    "/generate_stream": {"inputs": "hi"},
}


async def post(
    setup: Setup, path: str, fields: dict[str, Any], headers: dict[str, str] | None = None
) -> httpx.Response:
    """Send a request with these fields, where the route has them."""
    body = ROUTES[path]
    body = body | (fields if path.startswith("/v1") else {"parameters": fields})
    return await setup.http.post(path, content=json.dumps(body).encode(), headers=headers)


def counts(setup: Setup) -> dict[tuple[str, ...], float]:
    snapshot = setup.service.observation.snapshot(num_in_flight=0, num_rejected_frames=0)
    return {
        (sample.family.removeprefix("lightserve_"), *sample.labels): sample.values[0]
        for sample in snapshot.samples
    }


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_takes_them(path: str) -> None:
    async def scenario() -> None:
        async with frontend(says([5, EOS])) as setup:
            fields = {"slo": {"ttft_ms": 400, "mtpot_ms": 99.5}, "priority": -3, "timeout": 60}
            headers = {"X-SLO-TPOT-ms": "50", "x-slo-ttft-ms": "4e2"}
            assert (await post(setup, path, fields, headers)).status_code == 200
            (submit,) = setup.router.submits
            assert submit.slo == SLO(400.0, 50.0, 99.5)
            assert submit.priority == -3

    asyncio.run(scenario())


SERVER = {"ttft_slo_ms": 500.0, "tpot_slo_ms": 80.0, "mtpot_slo_ms": 100.0}


@pytest.mark.parametrize(
    ("flags", "fields", "expected"),
    [
        ({}, {}, SLO()),
        ({}, {"slo": None, "priority": None, "timeout": None}, SLO()),
        ({}, {"slo": {"tpot_ms": 50}}, SLO(None, 50.0, 200.0)),
        ({}, {"slo": {"completion_s": 9}}, SLO(completion_s=9.0)),
        (SERVER, {}, SLO(500.0, 80.0, 100.0)),
        (SERVER, {"slo": {"ttft_ms": 90}}, SLO(90.0, 80.0, 100.0)),
        (SERVER, {"slo": {"tpot_ms": 120}}, SLO(500.0, 120.0, 480.0)),
        (SERVER, {"slo": {"mtpot_ms": 80}}, SLO(500.0, 80.0, 80.0)),
        (SERVER, {"slo": {"completion_s": 9}}, SLO(completion_s=9.0)),
        (SERVER, {"service_tier": "flex"}, SLO()),
        (SERVER, {"service_tier": "flex", "slo": {"completion_s": 9}}, SLO(completion_s=9.0)),
        (SERVER, {"service_tier": "priority"}, SLO(500.0, 80.0, 100.0)),
    ],
)
def test_the_servers_targets_hold_where_a_request_has_none(
    flags: dict[str, Any], fields: dict[str, Any], expected: SLO
) -> None:
    async def scenario() -> None:
        async with frontend(says([5, EOS]), **flags) as setup:
            answer = await post(setup, "/v1/completions", {"n": 2, **fields})
            assert answer.status_code == 200, answer.text
            assert [submit.slo for submit in setup.router.submits] == [expected] * 2

    asyncio.run(scenario())


LEAST = {"min_ttft_slo_ms": 100.0, "min_tpot_slo_ms": 20.0}
REFUSED: list[tuple[dict[str, Any], dict[str, str], str, str]] = [
    # fields, headers, the parameter named, a word of the message
    ({"slo": {"ttft_ms": 0}}, {}, "slo.ttft_ms", "greater than 0"),
    ({"slo": {"tpot_ms": -1}}, {}, "slo.tpot_ms", "greater than 0"),
    ({"slo": {"tpot_ms": MAX_TARGET_MS * 2}}, {}, "slo.tpot_ms", "at most"),
    ({"slo": {"completion_s": MAX_SECONDS + 1}}, {}, "slo.completion_s", "at most"),
    ({"slo": {"mtpot_ms": "9"}}, {}, "slo.mtpot_ms", "a number"),
    ({"slo": {"ttft_ms": True}}, {}, "slo.ttft_ms", "a number"),
    ({"slo": {"e2el_ms": 9}}, {}, "slo.e2el_ms", "not supported"),
    ({"slo": 9}, {}, "slo", "an object"),
    ({"slo": {"tpot_ms": 90, "mtpot_ms": 89}}, {}, "slo.mtpot_ms", "at least"),
    ({"slo": {"mtpot_ms": 79}}, {}, "slo.mtpot_ms", "80"),
    ({"slo": {"completion_s": 9, "ttft_ms": 900}}, {}, "slo.completion_s", "slo.ttft_ms"),
    ({"slo": {"completion_s": 9}}, {"x-slo-tpot-ms": "90"}, "slo.completion_s", "x-slo-tpot-ms"),
    ({"slo": {"ttft_ms": 900}}, {"x-slo-ttft-ms": "901"}, "slo.ttft_ms", "x-slo-ttft-ms"),
    ({"slo": {"ttft_ms": 99}}, {}, "slo.ttft_ms", "--min-ttft-slo-ms"),
    ({}, {"x-slo-tpot-ms": "19"}, "x-slo-tpot-ms", "--min-tpot-slo-ms"),
    ({"slo": {"mtpot_ms": 19}}, {}, "slo.mtpot_ms", "--min-tpot-slo-ms"),
    ({"service_tier": "flex", "slo": {"ttft_ms": 900}}, {}, "slo.ttft_ms", "real-time"),
    ({"service_tier": "flex"}, {"x-slo-mtpot-ms": "900"}, "x-slo-mtpot-ms", "real-time"),
    *(
        ({}, {"x-slo-ttft-ms": text}, "x-slo-ttft-ms", "milliseconds")
        for text in ("", "0", "-1", "nan", "inf", "1e999", "1_0", "٣", "0x10", "1,5", "9" * 40)
    ),
    ({}, {"x-slo-e2el-ms": "9"}, "x-slo-e2el-ms", "not supported"),
    ({}, {"x-slo-completion-s": "0"}, "x-slo-completion-s", "a number of seconds"),
    ({}, {"x-slo-completion-s": "86401"}, "x-slo-completion-s", "at most 86400, got"),
    ({"slo": {"completion_s": 9}}, {"x-slo-completion-s": "8"}, "slo.completion_s", "equal"),
    ({}, {"x-slo-completion-s": "9", "x-slo-ttft-ms": "9e3"}, "x-slo-completion-s", "combined"),
    ({"priority": MAX_PRIORITY + 1}, {}, "priority", "at most"),
    ({"priority": -MAX_PRIORITY - 1}, {}, "priority", "at least"),
    ({"priority": 0.5}, {}, "priority", "an integer"),
    ({"priority": False}, {}, "priority", "an integer"),
    ({"timeout": 0}, {}, "timeout", "greater than 0"),
    ({"timeout": MAX_SECONDS + 1}, {}, "timeout", "at most"),
    ({"timeout": "5"}, {}, "timeout", "a number"),
]


@pytest.mark.parametrize("path", ROUTES)
def test_a_time_to_the_end_may_be_a_header(path: str) -> None:
    async def scenario() -> None:
        async with frontend(says([5, EOS]), **SERVER) as setup:
            headers = {"X-SLO-Completion-S": "7.5"}
            assert (await post(setup, path, {}, headers)).status_code == 200
            same = {"slo": {"completion_s": 7.5}}
            assert (await post(setup, path, same, headers)).status_code == 200
            assert [submit.slo for submit in setup.router.submits] == [SLO(completion_s=7.5)] * 2

    asyncio.run(scenario())


def test_refusals_name_the_value_on_every_route() -> None:
    """Field, limit and value, whatever the route calls them."""

    async def scenario() -> None:
        async with frontend(says([5, EOS]), **SERVER, **LEAST) as setup:
            for path in ROUTES:
                prefix = "" if path.startswith("/v1") else "parameters."
                for fields, param, words in (
                    ({"slo": {"completion_s": 86401}}, "slo.completion_s", ("86400", "86401")),
                    ({"slo": {"tpot_ms": 19}}, "slo.tpot_ms", ("20", "19")),
                    ({"priority": 1001}, "priority", ("1000", "1001")),
                    ({"timeout": 0}, "timeout", ("greater than 0", "got 0")),
                ):
                    error = (await post(setup, path, fields)).json()["error"]
                    assert error.get("details", error)["param"] == prefix + param
                    assert all(word in error["message"] for word in words), error
            assert not setup.router.submits

    asyncio.run(scenario())


def test_bad_values_are_named() -> None:
    async def scenario() -> None:
        async with frontend(says([5, EOS]), **SERVER, **LEAST) as setup:
            for fields, headers, param, word in REFUSED:
                raw = {name: text.encode() for name, text in headers.items()}
                answer = await post(setup, "/v1/completions", fields, raw)  # type: ignore[arg-type]
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, param), (fields, headers)
                assert word in error["message"], error
            twice = await setup.http.post(
                "/v1/completions",
                content=json.dumps(COMPLETION).encode(),
                headers=[("x-slo-ttft-ms", "900")] * 2,
            )
            assert twice.status_code == 400
            assert twice.json()["error"]["param"] == "x-slo-ttft-ms"
            answer = await post(setup, "/generate", {"slo": {"tpot_ms": 19}})
            assert answer.json()["error"]["param"] == "parameters.slo.tpot_ms"
            assert not setup.router.submits

    asyncio.run(scenario())


def test_a_requests_own_targets_are_judged() -> None:
    async def scenario() -> None:
        async with frontend(says([5, EOS]), ttft_slo_ms=1e6) as setup:
            for slo in ({"ttft_ms": 1e-3}, {}, {"completion_s": 600}):
                await post(setup, "/v1/completions", {"slo": slo})
            found = counts(setup)
            assert found["slo_requests_total", "rt", "ttft", "missed"] == 1
            assert found["slo_requests_total", "rt", "ttft", "met"] == 1
            assert found["slo_requests_total", "rt", "completion", "met"] == 1
            assert found["goodput_requests_total", "rt"] == 2
            assert found["goodput_tokens_total", "rt"] == 4

    asyncio.run(scenario())


# ---------------------------------------------------------------------- timeouts

TIMEOUT_S = 0.6


def first_token(submit: Submit) -> list[RequestDelta]:
    """Say one token, and nothing more."""
    return [
        RequestDelta(
            submit.request_id, [300], logprobs=made_logprobs(submit.sampling.num_logprobs, 0)
        )
    ]


def check_timeout(setup: Setup, error: dict[str, Any], num_requests: int) -> None:
    """The client is told, the router freed, everything counted."""
    assert error["code"] == "timeout"
    assert f"{TIMEOUT_S:g} seconds" in error["message"]
    assert sorted(setup.router.aborted_ids) == list(range(num_requests))
    assert setup.service.router.num_live == 0
    found = counts(setup)
    assert found["request_failure_total", "rt", "timeout"] == num_requests
    assert found["request_success_total", "rt", "abort"] == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
@pytest.mark.parametrize("says_something", [False, True])
def test_a_whole_answer_times_out(path: str, says_something: bool) -> None:
    async def scenario() -> None:
        async with frontend(first_token if says_something else None) as setup:
            begun_s = time.monotonic()
            answer = await post(setup, path, {"timeout": TIMEOUT_S})
            assert time.monotonic() - begun_s >= TIMEOUT_S
            assert answer.status_code == 408
            assert answer.headers["x-should-retry"] == "false"
            check_timeout(setup, answer.json()["error"], 1)

    asyncio.run(scenario())


def test_a_stream_that_has_not_begun_times_out_with_a_status() -> None:
    async def scenario() -> None:
        async with frontend() as setup:
            fields = {"timeout": TIMEOUT_S, "stream": True}
            answer = await post(setup, "/v1/completions", fields)
            assert answer.status_code == 408
            check_timeout(setup, answer.json()["error"], 1)

    asyncio.run(scenario())


def test_a_prompt_that_takes_too_long_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def encode(*_args: object, **_named: object) -> list[int]:
        await asyncio.sleep(60)
        return []

    async def scenario() -> None:
        async with frontend() as setup:
            monkeypatch.setattr(setup.service.encoder, "encode_chat", encode)
            answer = await post(setup, "/v1/chat/completions", {"timeout": TIMEOUT_S, "n": 2})
            assert answer.status_code == 408
            assert answer.json()["error"]["code"] == "timeout"
            assert not setup.router.submits
            assert counts(setup)["request_failure_total", "rt", "timeout"] == 1

    asyncio.run(scenario())


class Timers:
    """Timers that go off when a test says so, for what must have happened before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._choices: list[Choices] = []

        def start(_: CompletionResponse, choices: Choices) -> None:
            self._choices.append(choices)

        monkeypatch.setattr(CompletionResponse, "_start_timer", start)

    def go_off(self) -> None:
        for choices in self._choices:
            choices.end(timed_out(TIMEOUT_S))


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    return Timers(monkeypatch)


@pytest.mark.parametrize("stream", [False, True])
def test_all_choices_time_out(timers: Timers, stream: bool) -> None:
    """One of them has ended by itself, and counts as that; there is no answer all the same."""

    def answer(submit: Submit) -> list[RequestDelta]:
        return first_token(submit) if submit.request_id else says([300, EOS])(submit)

    async def scenario() -> None:
        async with frontend(answer) as setup:
            fields = {"timeout": 60, "n": 3, "stream": stream}
            task = asyncio.create_task(post(setup, "/v1/completions", fields))
            await eventually(lambda: counts(setup).get(("generation_tokens_total", "rt")) == 4)
            timers.go_off()
            got = await task
            assert got.status_code == (200 if stream else 408)
            error = sse_data(got.text)[-1]["error"] if stream else got.json()["error"]
            assert error["code"] == "timeout"
            assert sorted(setup.router.aborted_ids) == [1, 2]
            found = counts(setup)
            assert found["request_failure_total", "rt", "timeout"] == 2
            assert found["request_success_total", "rt", "stop"] == 1
            assert found["request_success_total", "rt", "abort"] == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_stream_times_out_with_an_event(timers: Timers, num_tokens: int) -> None:
    """Begun by tokens, or by a comment alone; there is no [DONE]."""

    def answer(submit: Submit) -> list[RequestDelta]:
        return [RequestDelta(submit.request_id, [300]) for _ in range(num_tokens)]

    async def scenario() -> None:
        async with frontend(answer, sse_keepalive_s=0.05) as setup:
            fields = {"timeout": 60, "stream": True}
            task = asyncio.create_task(post(setup, "/v1/completions", fields))
            await setup.router.submitted()
            count = ("generation_tokens_total", "rt")
            await eventually(lambda: counts(setup).get(count) == num_tokens)
            await asyncio.sleep(0.1)  # the loop wakes the writer of comments before
            timers.go_off()
            got = await task
            assert got.status_code == 200
            *chunks, last = sse_data(got.text.replace(": keep-alive\n\n", ""))
            assert len(chunks) == num_tokens
            check_timeout(setup, last["error"], 1)
            await eventually(lambda: setup.service.in_flight.count == 0)

    asyncio.run(scenario())


def test_tokens_that_were_there_are_sent_before_the_error(timers: Timers) -> None:
    """The reader had no turn when time was up: what came until then is still its own."""

    async def scenario() -> None:
        async with frontend() as setup:
            fields = {"timeout": 60, "stream": True}
            task = asyncio.create_task(post(setup, "/v1/completions", fields))
            await setup.router.submitted()
            await asyncio.sleep(0)
            delta = RequestDelta(setup.router.submits[0].request_id, [300, 301])
            setup.service.router.on_message(TokenDelta(requests=[delta]))
            timers.go_off()
            *chunks, last = sse_data((await task).text)
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks)
            check_timeout(setup, last["error"], 1)

    asyncio.run(scenario())


def test_what_has_ended_does_not_time_out(timers: Timers) -> None:
    """The end has come from the router, though it has not been read yet."""

    async def scenario() -> None:
        async with frontend() as setup:
            task = asyncio.create_task(post(setup, "/v1/completions", {"timeout": 60}))
            await setup.router.submitted()
            await asyncio.sleep(0)
            request_id = setup.router.submits[0].request_id
            delta = RequestDelta(request_id, [300, EOS], FinishReason.STOP)
            setup.service.router.on_message(TokenDelta(requests=[delta]))
            timers.go_off()
            answer = await task
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == 2
            assert not setup.router.aborted_ids
            assert ("request_failure_total", "rt", "timeout") not in counts(setup)

    asyncio.run(scenario())


# What clients are told of targets that the router had to raise, on every route.

ASKED = {"ttft_ms": 10.0, "tpot_ms": 50.0, "mtpot_ms": 200.0}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": BUNDLED_MODEL_NAME, "prompt": [5, 6, 7]},
    "/v1/chat/completions": {
        "model": BUNDLED_MODEL_NAME,
        "messages": [{"role": "user", "content": "hi"}],
    },
    "/v1/responses": {"model": BUNDLED_MODEL_NAME, "input": "hi"},
    "/v1/messages": {
        "model": BUNDLED_MODEL_NAME,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 9,
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
