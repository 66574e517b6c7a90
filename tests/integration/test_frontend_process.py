"""The frontend process on a real socket: disconnects, slow readers, restarts, drain."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.fake_router import (
    copy_bundled_model,
    eventually,
    router_status,
    says,
    sse_data,
    token_delta,
)
from support.patient_loop import run_patiently
from support.running_frontend import NUM_KV_SLOTS, Running, running_frontend

from lightserve.bundled import BUNDLED_MODEL_DIR, BUNDLED_MODEL_NAME
from lightserve.channels import ZmqAsyncLink
from lightserve.errors import ChannelFull
from lightserve.frontend.http_server import HttpProtocol
from lightserve.frontend.news import MAX_TOKENS_PER_TURN
from lightserve.frontend.prompts import PromptEncoder
from lightserve.frontend.structured_output import GrammarProcess
from lightserve.messages.common import TokenLogprob
from lightserve.messages.frontend_router import (
    Abort,
    DescribeKV,
    FrontendHello,
    RequestDelta,
    SentSoFar,
    Submit,
    TokenDelta,
)
from lightserve.messages.supervision import Heartbeat, MetricsSnapshot, RouterUp
from lightserve.metrics.catalogue import IPC_REJECTED
from lightserve.tokenization.tokenizer import Tokenizer
from lightserve.types import FinishReason, RequestId

CHAT = {"model": BUNDLED_MODEL_NAME, "messages": [{"role": "user", "content": "hi"}]}
HEAD = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
COMPLETION = {"model": BUNDLED_MODEL_NAME, "prompt": "hi", "max_tokens": 4000}
PATHS = {
    "completion": ("/v1/completions", COMPLETION),
    "completion-stream": ("/v1/completions", COMPLETION | {"stream": True}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat-stream": ("/v1/chat/completions", CHAT | {"stream": True}),
    "generate": ("/generate", {"inputs": "hi"}),
    "generate-stream": ("/generate_stream", {"inputs": "hi"}),
}


def said(
    request_id: RequestId, token_ids: list[int], reason: FinishReason | None = None
) -> RequestDelta:
    """News as the router sends them, with log-probabilities, which /generate asks for."""
    logprobs = [TokenLogprob(0.0, [], [])] * len(token_ids)
    return RequestDelta(request_id, token_ids, reason, logprobs=logprobs)


def _serve(tmp_path: Path, scenario: Callable[[Running], Awaitable[None]], **flags: Any) -> None:
    async def run() -> None:
        async with running_frontend(tmp_path, **flags) as running:
            await scenario(running)

    run_patiently(run())


@pytest.mark.parametrize(("path", "body"), PATHS.values(), ids=PATHS.keys())
def test_a_client_that_leaves_is_aborted_in_every_state(
    tmp_path: Path, path: str, body: dict[str, object]
) -> None:
    async def scenario(running: Running) -> None:
        hub = await running.router_up()  # never answers: the request stays queued
        client = await running.post(path, json.dumps(body))
        await eventually(lambda: len(hub.of(Submit)) == 1)
        assert not hub.of(Abort)
        client.hang_up()
        await eventually(lambda: len(hub.of(Abort)) == 1)
        assert hub.of(Abort)[0].request_id == hub.of(Submit)[0].request_id

        client = await running.post(path, json.dumps(body))  # now with some tokens
        await eventually(lambda: len(hub.of(Submit)) == 2)
        request_id = hub.of(Submit)[1].request_id
        hub.say(TokenDelta(requests=[said(request_id, [50, 51])]))
        if "stream" in path or body.get("stream"):
            await client.until(b"data: ")
        client.hang_up()
        await eventually(lambda: len(hub.of(Abort)) == 2)

    _serve(tmp_path, scenario)


def test_a_client_that_leaves_ends_the_work_on_its_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing is generated, and where other prompts of its body were to follow."""
    ends: list[str] = []

    async def in_thread(*_: Any) -> None:
        ends.append("begun")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async def scenario(running: Running) -> None:
        await running.router_up()
        monkeypatch.setattr(PromptEncoder, "_in_thread", in_thread)
        prompt = "hi " * 1000  # a short one is encoded at once
        chat = {**CHAT, "messages": [{"role": "user", "content": prompt}]}
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/chat/completions/render", chat),
            ("/v1/completions/render", {**COMPLETION, "prompt": [prompt, prompt]}),
            ("/v1/messages/count_tokens", chat),
        ):
            client = await running.post(path, json.dumps(body))
            await eventually(lambda: ends == ["begun"])
            client.hang_up()
            await eventually(lambda: ends == ["begun", "cancelled"])
            ends.clear()

    _serve(tmp_path, scenario)


def _texts(events: list[Any]) -> dict[int, str]:
    """Return the text of each choice; the fields that all events share must be the same."""
    texts: dict[int, str] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        texts[choice["index"]] = texts.get(choice["index"], "") + text
        assert choice["logprobs"] is None
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    return texts


@pytest.mark.parametrize("name", ["completion-stream", "chat-stream"])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_tokens_that_go_round_the_application_are_framed_as_http_wants_it(
    tmp_path: Path, name: str, version: str
) -> None:
    path, body = PATHS[name]
    tokens = [300, 301, 90, 1500, 301]
    body = body | {"n": 2, "stop": "§"}

    async def scenario(running: Running) -> None:
        hub = await running.router_up()
        data = json.dumps(body)
        client = await running.send(
            f"POST {path} HTTP/{version}\r\nhost: localhost\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n{data}"
        )
        await eventually(lambda: len(hub.of(Submit)) == 2)
        ids = [submit.request_id for submit in hub.of(Submit)]
        for number, token in enumerate(tokens, 1):
            hub.say(token_delta([RequestDelta(request_id, [token]) for request_id in ids]))
            await client.until(b'"index":1', number)  # each on its own
        for request_id in ids:
            hub.say(TokenDelta(requests=[RequestDelta(request_id, [2], FinishReason.STOP)]))
        status, rest = await client.rest()
        assert status == 200
        if version == "1.1":
            rest, chunked = b"", rest
            while chunked:
                size, _, chunked = chunked.partition(b"\r\n")
                rest += chunked[: int(size, 16)]
                assert chunked[int(size, 16) :][:2] == b"\r\n"
                chunked = chunked[int(size, 16) + 2 :]
        *events, done = sse_data(rest.decode())
        assert done == "[DONE]"
        text = Tokenizer(BUNDLED_MODEL_DIR).decode(tokens)
        assert _texts(events) == {0: text, 1: text}

    _serve(tmp_path, scenario)


def test_half_a_body_and_pipelined_requests_do_no_harm(tmp_path: Path) -> None:
    async def scenario(running: Running) -> None:
        hub = await running.router_up(says([50, 2]))
        client = await running.send(f"{HEAD}content-length: 100\r\n\r\n{{")
        client.hang_up()
        body = json.dumps(COMPLETION)
        request = f"{HEAD}content-length: {len(body)}\r\n\r\n{body}"
        client = await running.send(request + request)
        await client.until(b'"usage"', 2)
        client.hang_up()
        await asyncio.sleep(0.05)
        assert len(hub.of(Submit)) == 2
        assert not hub.of(Abort)

    _serve(tmp_path, scenario)


def test_news_for_a_slow_reader_merge(tmp_path: Path) -> None:
    num_tokens = 60_000

    async def scenario(running: Running) -> None:
        hub = await running.router_up()
        body = COMPLETION | {"stream": True, "max_tokens": num_tokens}
        client = await running.post("/v1/completions", json.dumps(body), close=True)
        await eventually(lambda: len(hub.of(Submit)) == 1)
        request_id = hub.of(Submit)[0].request_id
        token = 50
        for _ in range(num_tokens // 20):
            hub.say(TokenDelta(requests=[said(request_id, [token] * 20)]))
        hub.say(TokenDelta(requests=[said(request_id, [2], FinishReason.STOP)]))
        # Others are served meanwhile, although this client reads nothing.
        hub.answer = says([token, 2])
        other = await running.post("/v1/completions", json.dumps(COMPLETION), close=True)
        assert (await other.rest())[0] == 200
        status, data = await client.rest()
        assert status == 200
        assert data.rstrip().rstrip(b"0\r\n").endswith(b"data: [DONE]")
        events = data.count(b"data: {")
        assert events < num_tokens // 20  # less than one per step: some were merged

    model = copy_bundled_model(tmp_path, max_position_embeddings=100_000)
    _serve(tmp_path, scenario, model=model, served_model_name=BUNDLED_MODEL_NAME)


@pytest.mark.parametrize(
    ("name", "ends"),
    [*((name, True) for name in PATHS), *((name, False) for name in PATHS if "stream" in name)],
)
def test_a_client_that_stops_reading_is_cut_off(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    ends: bool,
) -> None:
    path, body = PATHS[name]
    monkeypatch.setattr(HttpProtocol, "write_deadline_s", 0.2)

    async def scenario(running: Running) -> None:
        hub = await running.router_up()
        client = await running.post(path, json.dumps(body), receive_buffer_bytes=4096)
        client.writer.transport.pause_reading()
        await eventually(lambda: len(hub.of(Submit)) == 1)
        request_id = hub.of(Submit)[0].request_id
        # So many at once that writing them down in quadratic time would not end in time either.
        hub.say(TokenDelta(requests=[said(request_id, [50] * 40_000)]))
        if ends:
            end = said(request_id, [2], FinishReason.STOP)
            hub.say(TokenDelta(requests=[end]))
        await eventually(lambda: "outcome=" in caplog.text)
        assert "outcome=slow_reader" in caplog.text
        if not ends:
            await eventually(lambda: len(hub.of(Abort)) == 1)
        client.writer.transport.resume_reading()
        with pytest.raises(ConnectionResetError):  # not an end that looks like a whole answer
            while await client.reader.read(4096):
                pass
        assert b'"num_in_flight":0' in (await running.get("/health"))[1]

    caplog.set_level("INFO")
    _serve(tmp_path, scenario, send_buffer_bytes=4096)
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


@pytest.mark.parametrize("stream", [False, True])
def test_answers_that_are_not_read_make_room_for_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """Three of half a megabyte, where two may be kept: long before the time to read is over."""
    body = json.dumps(COMPLETION | {"logprobs": 5, "max_tokens": 6000, "stream": stream})

    def answer(submit: Submit) -> list[RequestDelta]:
        logprobs = [TokenLogprob(0.0, [50] * 5, [0.0] * 5)] * 6000
        return [
            RequestDelta(
                submit.request_id, [50] * 6000, FinishReason.LENGTH, None, 0.0, 0, logprobs
            )
        ]

    async def scenario(running: Running) -> None:
        hub = await running.router_up(answer)
        unread = []
        for number in range(2):
            client = await running.post("/v1/completions", body, receive_buffer_bytes=4096)
            unread.append(client)
            await eventually(lambda number=number: len(hub.of(Submit)) == number + 1)
            await client.until(b" 200 ")
            client.writer.transport.pause_reading()
        reader = await running.post("/v1/completions", body, close=True)
        status, data = await reader.rest()
        assert status == 200
        assert data.rstrip().endswith(b"0")  # the last chunk
        unread[0].writer.transport.resume_reading()
        with pytest.raises(ConnectionResetError):
            while await unread[0].reader.read(4096):
                pass
        assert caplog.text.count("outcome=slow_reader") == 1
        unread[1].hang_up()

    caplog.set_level("INFO")
    _serve(tmp_path, scenario, send_buffer_bytes=4096, max_kept_answer_bytes=1_250_000)


def test_a_slow_client_that_keeps_reading_gets_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is that of one write, not of the answer, and ends with the write."""
    monkeypatch.setattr(HttpProtocol, "write_deadline_s", 0.4)

    async def scenario(running: Running) -> None:
        hub = await running.router_up()
        body = json.dumps(COMPLETION | {"stream": True})
        client = await running.post("/v1/completions", body, receive_buffer_bytes=4096)
        await eventually(lambda: len(hub.of(Submit)) == 1)
        request_id = hub.of(Submit)[0].request_id
        for num_seen in range(1, 4):
            hub.say(TokenDelta(requests=[said(request_id, [50] * 40_000)]))
            await asyncio.sleep(0.05)
            num_events = num_seen * math.ceil(40_000 / MAX_TOKENS_PER_TURN)
            await client.until(b"\n\n", num_events)  # the whole of it
        await asyncio.sleep(0.8)
        hub.say(TokenDelta(requests=[said(request_id, [2], FinishReason.STOP)]))
        await client.until(b"[DONE]")
        client.hang_up()

    _serve(tmp_path, scenario, send_buffer_bytes=4096)


def test_what_is_not_http_is_answered_in_the_shape_of_errors(tmp_path: Path) -> None:
    async def scenario(running: Running) -> None:
        for request in (
            "nonsense\r\n\r\n",
            "GET /livez HTTP/1.1\r\nhost: localhost\r\nbad header\r\n\r\n",
            "POST /x HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        ):
            status, body = await (await running.send(request)).rest()
            assert status == 400
            error = json.loads(body)["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")
        assert (await running.get("/livez"))[0] == 200

    _serve(tmp_path, scenario)


def test_empty_lines_before_a_request_are_passed_over(tmp_path: Path) -> None:
    """RFC 9112 section 2.2: also those that some clients send behind a body, and in pieces."""
    get = "GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"

    async def scenario(running: Running) -> None:
        client = await running.send(f"\r\n{get}")
        await client.until(b"}")
        for piece in ("\r", "\n\r", f"\n\n{get}\r\n\r\n{get}\r"):
            client.writer.write(piece.encode())
            await asyncio.sleep(0.05)
        await client.until(b"}", 3)
        assert client.data.count(b" 200 ") == client.data.count(b"HTTP/1.1") == 3
        client.writer.write(b"\rGET / HTTP/1.1\r\nhost: localhost\r\n\r\n")  # no empty line
        assert (await client.rest())[0] == 200
        assert client.data.count(b"invalid_http") == 1

    _serve(tmp_path, scenario)


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost/livez", "localhost", 200),
        ("HTTP://localhost:80/livez?x=1", "another.example", 200),  # the target's counts
        ("https://localhost/livez", "localhost", 200),
        ("http://localhost", "localhost", 200),
        ("http://localhost?x", "localhost", 200),
        ("http://another.example/livez", "localhost", 421),
        ("http://localhost@another.example/livez", "localhost", 404),
        ("ftp://localhost/livez", "localhost", 404),
        ("/http://localhost/livez", "localhost", 404),
        ("http:///livez", "localhost", 404),
    ],
)
def test_targets_with_a_host(tmp_path: Path, target: str, host: str, status: int) -> None:
    """RFC 9112 section 3.2.2."""
    request = f"GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"

    async def scenario(running: Running) -> None:
        assert (await (await running.send(request)).rest())[0] == status

    _serve(tmp_path, scenario)


def test_a_router_that_dies_and_comes_back(tmp_path: Path) -> None:
    async def scenario(running: Running) -> None:
        assert (await running.get("/readyz"))[0] == 503
        assert (await running.get("/livez"))[0] == 200
        refused = await running.post("/v1/completions", json.dumps(COMPLETION), close=True)
        assert (await refused.rest())[0] == 503

        hub = await running.router_up(lambda submit: [said(submit.request_id, [50])])
        hello = hub.of(FrontendHello)[0]
        assert (hello.boot_id, hello.frontend_id, hello.incarnation) == ("boot-0", 0, 0)
        streaming = [
            await running.post(path, json.dumps(body), close=True)
            for path, body in PATHS.values()
            if "stream" in path or body.get("stream")
        ]
        for client in streaming:
            await client.until(b"data: ")
        whole = await running.post("/v1/completions", json.dumps(COMPLETION), close=True)
        await eventually(lambda: len(hub.of(Submit)) == 4)
        await running.router_down()
        for client in streaming:
            assert b"router_lost" in (await client.rest())[1]
        status, body = await whole.rest()
        assert status == 503
        assert b"router_lost" in body
        assert (await running.get("/readyz"))[0] == 503

        await running.router_up(says([50, 2]))
        again = await running.post("/v1/completions", json.dumps(COMPLETION), close=True)
        assert (await again.rest())[0] == 200

    _serve(tmp_path, scenario)


def test_drain_waits_for_what_is_in_flight_and_then_ends(tmp_path: Path) -> None:
    async def scenario(running: Running) -> None:
        hub = await running.router_up()
        body = COMPLETION | {"stream": True}
        client = await running.post("/v1/completions", json.dumps(body))
        await eventually(lambda: len(hub.of(Submit)) == 1)
        idle, idle_writer = await asyncio.open_connection("127.0.0.1", running.port)
        await running.drain(60.0)
        await running.until_status("/readyz", 503)
        assert (await running.get("/livez"))[0] == 200
        refused = await running.post("/v1/completions", json.dumps(COMPLETION), close=True)
        assert (await refused.rest())[0] == 503
        assert not running.task.done()
        request_id = hub.of(Submit)[0].request_id
        hub.say(TokenDelta(requests=[said(request_id, [50, 2], FinishReason.STOP)]))
        await client.until(b"[DONE]")
        client.hang_up()
        assert await asyncio.wait_for(running.task, 60) == 0
        assert await idle.read(-1) == b""
        idle_writer.close()

    _serve(tmp_path, scenario)


def test_drain_ends_late_requests_with_an_error(tmp_path: Path) -> None:
    async def scenario(running: Running) -> None:
        hub = await running.router_up(lambda submit: [said(submit.request_id, [50])])
        stream = await running.post("/v1/completions", json.dumps(COMPLETION | {"stream": True}))
        await stream.until(b"data: ")
        whole = await running.post("/v1/completions", json.dumps(COMPLETION))
        await eventually(lambda: len(hub.of(Submit)) == 2)
        await running.drain(0.1)
        assert b"shutting_down" in (await stream.rest())[1]
        assert (await whole.rest())[0] == 503
        assert await asyncio.wait_for(running.task, 60) == 0

    _serve(tmp_path, scenario)


def test_what_was_not_submitted_when_the_drain_is_over_is_told_so_and_logs_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One whose schema is still being checked, half a body, and a question to the router."""
    asked: list[object] = []

    async def judge(self: GrammarProcess, constraint: object) -> None:
        asked.append(constraint)
        await asyncio.Event().wait()

    monkeypatch.setattr(GrammarProcess, "judge", judge)

    async def scenario(running: Running) -> None:
        hub = await running.router_up()
        body = COMPLETION | {"structured_outputs": {"regex": "a+"}}
        checked = await running.post("/v1/completions", json.dumps(body))
        half = await running.send(f"{HEAD}content-length: 100\r\n\r\n{{")
        question = await running.send("GET /debug/kv HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        await eventually(lambda: bool(asked) and len(hub.of(DescribeKV)) == 1)
        await running.drain(0.1)
        for client in (checked, half, question):
            status, answer = await client.rest()
            assert status == 503 and b"shutting_down" in answer
        assert await asyncio.wait_for(running.task, 60) == 0
        assert not hub.of(Submit)

    _serve(tmp_path, scenario)
    gc.collect()  # what was never looked at is told of when it is collected
    told = [each.getMessage() for each in caplog.records if each.levelname in ("WARNING", "ERROR")]
    assert told == ["1 requests did not end in time"]


@pytest.mark.parametrize("leaves", [False, True], ids=["ends", "leaves"])
@pytest.mark.parametrize(("path", "body"), PATHS.values(), ids=PATHS.keys())
def test_what_is_over_is_gone_at_once(
    tmp_path: Path, path: str, body: dict[str, object], leaves: bool
) -> None:
    """Nothing waits for Python to look for garbage: that stops all streams meanwhile."""

    async def scenario(running: Running) -> None:
        hub = await running.router_up(None if leaves else says([300, 301, 302]))

        async def ask(number: int) -> None:
            client = await running.post(path, json.dumps(body), close=True)
            if leaves:
                await eventually(lambda: len(hub.of(Submit)) == number)
                client.hang_up()
                await eventually(lambda: len(hub.of(Abort)) == number)
            else:
                assert (await client.rest())[0] == 200

        await ask(1)  # what is made once and stays
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for number in range(2, 5):
                await ask(number)
            await running.get("/livez")  # the connection before it is closed by then
            gc.collect()
            found = {f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert not {name for name in found if name.startswith(("lightserve", "uvicorn"))}

    _serve(tmp_path, scenario)


def test_a_router_that_forgot_this_frontend_gets_a_new_hello(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightserve.frontend.process.LATE_TIMEOUT_S", 0.2)

    async def scenario(running: Running) -> None:
        hub = await running.router_up()
        client = await running.post("/v1/completions", json.dumps(COMPLETION), close=True)
        assert (await client.rest())[0] == 503
        await eventually(lambda: len(hub.of(FrontendHello)) >= 2)

    _serve(tmp_path, scenario)


def test_a_full_queue_to_a_router_that_is_stopped_ends_no_frontend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hello of a new session finds no room in it; a later one does."""
    monkeypatch.setattr("lightserve.frontend.process.LATE_TIMEOUT_S", 0.2)
    send, num_hellos = ZmqAsyncLink.send, 0

    def crowded_send(link: ZmqAsyncLink[Any, Any], message: Any) -> None:
        nonlocal num_hellos
        num_hellos += isinstance(message, FrontendHello)
        if isinstance(message, FrontendHello) and num_hellos in (2, 3):
            raise ChannelFull("full")
        send(link, message)

    monkeypatch.setattr(ZmqAsyncLink, "send", crowded_send)

    async def scenario(running: Running) -> None:
        hub = await running.router_up()
        await eventually(lambda: len(hub.of(FrontendHello)) >= 2)
        assert num_hellos >= 4
        assert not running.task.done()

    _serve(tmp_path, scenario)


def test_the_supervisor_hears_a_heartbeat_in_every_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightserve.frontend.process.HEARTBEAT_INTERVAL_S", 0.01)

    async def scenario(running: Running) -> None:
        async def next_beats() -> None:
            running.control.sent.clear()
            await eventually(lambda: running.control.sent.count(Heartbeat()) >= 3)

        await next_beats()
        await running.router_up()
        await next_beats()
        await running.router_down()
        await running.until_status("/readyz", 503)
        await next_beats()
        running.control.is_full = True  # a supervisor that is stopped
        await eventually(lambda: running.control.num_refused >= 3)
        running.control.is_full = False
        await next_beats()

    _serve(tmp_path, scenario)


def test_a_silent_router_stays_dead_until_it_speaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new hello is no sign of life: /livez must not flap."""
    monkeypatch.setattr("lightserve.frontend.admin.MAX_SILENCE_S", 0.2)
    monkeypatch.setattr("lightserve.frontend.process.LATE_TIMEOUT_S", 0.4)

    async def scenario(running: Running) -> None:
        hub = await running.router_up()
        hub.is_silent = True
        await running.until_status("/livez", 503)
        num_hellos = len(hub.of(FrontendHello))
        while len(hub.of(FrontendHello)) < num_hellos + 3:
            assert (await running.get("/livez"))[0] == 503
        hub.is_silent = False
        await running.until_status("/livez", 200)

    _serve(tmp_path, scenario)


def test_long_texts_do_not_stop_the_event_loop(tmp_path: Path) -> None:
    """Two megabytes take a second or two, in which the loop turns hundreds of times."""

    async def scenario(running: Running) -> None:
        await running.router_up(says([50, 2]))
        body = COMPLETION | {"prompt": "The quick brown fox. " * 100_000, "max_tokens": 1}
        client = await running.post("/v1/completions", json.dumps(body), close=True)
        num_turns = 0
        answer = asyncio.create_task(client.rest())
        while not answer.done():
            await asyncio.sleep(0.001)
            num_turns += 1
        assert (await answer)[0] == 200
        assert num_turns > 50

    model = copy_bundled_model(tmp_path, max_position_embeddings=2_000_000)
    _serve(tmp_path, scenario, model=model, served_model_name=BUNDLED_MODEL_NAME)


def test_unread_headers_are_limited(tmp_path: Path) -> None:
    async def scenario(running: Running) -> None:
        client = await running.send("GET /livez HTTP/1.1\r\nx: " + "y" * 70_000)
        assert (await client.rest())[0] == 400

    _serve(tmp_path, scenario)


def test_broken_frames_from_the_router_are_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightserve.frontend.process.HEARTBEAT_INTERVAL_S", 0.01)

    async def scenario(running: Running) -> None:
        hub = await running.router_up(says([50, 2]))
        for frame in (b"", b"\x7f", b"\1nonsense", b"\1\x80"):
            hub.say(frame)
        hub.say(router_status(num_kv_slots=NUM_KV_SLOTS, num_steps=3))
        while b'"num_steps":3' not in (await running.get("/health"))[1]:
            await asyncio.sleep(0.005)
        client = await running.post("/v1/completions", json.dumps(COMPLETION), close=True)
        assert (await client.rest())[0] == 200

        def num_rejected() -> float:
            snapshots = [m for m in running.control.sent if isinstance(m, MetricsSnapshot)]
            (sample,) = (s for s in snapshots[-1].samples if s.family == IPC_REJECTED.name)
            return sample.values[0]

        await eventually(lambda: num_rejected() == 4)

    _serve(tmp_path, scenario)


def test_the_process_is_light() -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "import lightserve.frontend.process\n"
        "from lightserve.config import ServeConfig\n"
        "from lightserve.frontend.router_client import RouterClient\n"
        "from lightserve.frontend.service import load_service\n"
        "from lightserve.frontend.process import create_app\n"
        "import asyncio\n"
        "async def main():\n"
        "    create_app(load_service(ServeConfig(), RouterClient()))\n"
        "asyncio.run(main())\n"
        "heavy = {'torch', 'transformers', 'safetensors', 'huggingface_hub'} & set(sys.modules)\n"
        "status = Path('/proc/self/status').read_text()\n"
        "print(sorted(heavy), int(status.split('VmHWM:')[1].split()[0]) // 1024)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=True
    )
    heavy, rss_mb = done.stdout.rsplit(maxsplit=1)
    assert heavy == "[]"
    assert int(rss_mb) <= 150


def test_lost_tokens_end_their_requests_and_no_others_follow(tmp_path: Path) -> None:
    async def scenario(running: Running) -> None:
        hub = await running.router_up()
        body = json.dumps(COMPLETION | {"stream": True})
        client = await running.post("/v1/completions", body, close=True)
        await eventually(lambda: len(hub.of(Submit)) == 1)
        request_id = hub.of(Submit)[0].request_id
        hub.say(router_status(num_kv_slots=NUM_KV_SLOTS))
        hub.say(TokenDelta(requests=[said(request_id, [50])]))
        await client.until(b"data: ")
        hub.num_to_lose = 1
        hub.say(TokenDelta(requests=[said(request_id, [51])]))
        hub.say(router_status(num_kv_slots=NUM_KV_SLOTS))
        _, answer = await client.rest()
        assert b"router_lost" in answer, "its answer would have a hole"
        await eventually(lambda: len(hub.of(FrontendHello)) == 2)
        await running.until_status("/readyz", 200)
        hub.say(router_status(num_kv_slots=NUM_KV_SLOTS))
        hub.answer = says([50, 2])
        client = await running.post("/v1/completions", json.dumps(COMPLETION), close=True)
        assert (await client.rest())[0] == 200
        assert len(hub.of(FrontendHello)) == 2
        sessions = {hello.session for hello in hub.of(FrontendHello)}
        assert len(sessions) == 2

    _serve(tmp_path, scenario)


def test_requests_that_do_not_reach_the_router_end_and_no_others_follow(tmp_path: Path) -> None:
    async def scenario(running: Running) -> None:
        hub = await running.router_up()
        client = await running.post("/v1/completions", json.dumps(COMPLETION), close=True)
        await eventually(lambda: len(hub.of(Submit)) == 1)
        hub.say(router_status(num_kv_slots=NUM_KV_SLOTS))
        await eventually(lambda: hub.of(SentSoFar)[-1].num_messages == 1)
        hub.say(router_status(num_kv_slots=NUM_KV_SLOTS, num_lost=1))
        assert (await client.rest())[0] == 503
        await eventually(lambda: len(hub.of(FrontendHello)) == 2)
        hub.say(router_status(num_kv_slots=NUM_KV_SLOTS))
        await eventually(lambda: hub.of(SentSoFar)[-1].num_messages == 0)  # since the hello

    _serve(tmp_path, scenario)


def test_a_welcome_that_is_lost_leaves_no_frontend_unready(tmp_path: Path) -> None:
    """Another process had this frontend's name when the router said welcome."""

    async def scenario(running: Running) -> None:
        hub = await running.router_up(says([50, 2]))
        await running.router_down()
        await running.until_status("/readyz", 503)
        hub.loses_welcomes = True
        up = RouterUp(address=hub.address, boot_id=hub.boot_id)
        await running.control.orders.put(up)
        await eventually(lambda: len(hub.of(FrontendHello)) == 2)
        hub.say(router_status(num_kv_slots=NUM_KV_SLOTS))
        await running.until_status("/readyz", 200)
        client = await running.post("/v1/completions", json.dumps(COMPLETION | {"max_tokens": 2}))
        await client.until(b'"usage"')
        client.hang_up()

    _serve(tmp_path, scenario)


def test_a_name_that_was_taken_over_is_claimed_again(tmp_path: Path) -> None:
    """The router heard the hello of another process with this frontend's name."""

    async def scenario(running: Running) -> None:
        hub = await running.router_up()
        client = await running.post("/v1/completions", json.dumps(COMPLETION), close=True)
        await eventually(lambda: len(hub.of(Submit)) == 1)
        foreign, own = router_status(session=77), router_status(num_kv_slots=NUM_KV_SLOTS)
        for status in (foreign, foreign, own):  # may have left before a hello came
            hub.say(status)
        assert (await running.get("/readyz"))[0] == 200
        for _ in range(3):
            hub.say(foreign)
        code, _ = await client.rest()  # the router has forgotten it
        assert code == 503
        await eventually(lambda: len(hub.of(FrontendHello)) == 2)
        hub.say(own)
        await running.until_status("/readyz", 200)

    _serve(tmp_path, scenario)
