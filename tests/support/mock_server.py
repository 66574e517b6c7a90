"""A server of the OpenAI shape whose every delay is known, and that writes down what it did when.

Used by tests of the load client and by the benchmark that checks it, as a process of its own:
`python tests/support/mock_server.py --ttft-s 0.05 --gap-s 0.05` prints its address. GET /log
returns, per X-Request-Id, the moments on the machine's monotonic clock: arrival, then every event
written.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import click
import msgspec
from aiohttp import web

MODEL = "mock"
OVERHEAD_TOKENS = 7
"""What its chat template costs."""


@dataclass(frozen=True)
class Behaviour:
    """How a request is answered."""

    ttft_s: float = 0.0
    gap_s: float = 0.0
    tokens_per_event: int = 1
    num_slots: int | None = None
    """Requests answered at once; others wait, after they have been accepted."""
    status: int = 200
    retry_after: str = ""
    """With a status that is an error."""
    num_refused: int | None = None
    """Requests that have this status, the first ones; None: all."""
    ending: str = "whole"
    """whole, torn (no end), reset (connection dropped), error (event), malformed (event)."""
    has_usage: bool = True
    closes_silently: bool = False
    """Whether a connection is closed after each answer, which announces that it is kept."""


@dataclass
class Received:
    """A request and what was done about it, in seconds of time.monotonic()."""

    body: dict[str, Any]
    headers: dict[str, str]
    """By lower-case name."""
    arrived_s: float
    peer: tuple[str, int]
    """Address of the client's end of the connection."""
    event_times_s: list[float] = field(default_factory=list)


def word_tokens(word: str) -> int:
    """Tokens that the mock's tokenizer makes of a word."""
    return 2 if word in ("with", "this", "from") else 1


def count_tokens(text: str, *, is_chat: bool) -> int:
    """Return what the mock reports as prompt tokens."""
    return sum(map(word_tokens, text.split())) + (OVERHEAD_TOKENS if is_chat else 0)


class MockServer:
    """The server, in the running event loop, as an async context manager."""

    def __init__(self, behaviour: Behaviour, *, port: int = 0) -> None:
        self.behaviour = behaviour
        self.received: list[Received] = []
        self.gate = asyncio.Event()
        """Until it is set no request is answered; set from the start."""
        self.gate.set()
        self._port = port
        self._slots = asyncio.Semaphore(behaviour.num_slots or 1 << 30)
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/log", self._log)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def _models(self, _: web.Request) -> web.Response:
        if self.behaviour.status == 401:
            return web.json_response({"error": {"message": "a valid key is needed"}}, status=401)
        return web.json_response({"object": "list", "data": [{"id": MODEL}]})

    async def _log(self, _: web.Request) -> web.Response:
        log = {
            r.headers.get("x-request-id", ""): [r.arrived_s, *r.event_times_s]
            for r in self.received
        }
        return web.json_response(log)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        arrived_s = time.monotonic()
        headers = {name.lower(): value for name, value in request.headers.items()}
        assert request.transport is not None
        peer = request.transport.get_extra_info("peername")
        received = Received(msgspec.json.decode(await request.read()), headers, arrived_s, peer)
        self.received.append(received)
        of = self.behaviour
        if of.status != 200 and len(self.received) <= (of.num_refused or 1 << 30):
            told = {"Retry-After": of.retry_after} if of.retry_after else {}
            no = {"error": {"message": "no"}}
            return web.json_response(no, status=of.status, headers=told)
        await self.gate.wait()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async with self._slots:
            started_s = arrived_s if self.behaviour.num_slots is None else time.monotonic()
            with contextlib.suppress(ConnectionError):  # the client has left
                await self._stream(request, response, received, started_s)
        if self.behaviour.closes_silently and (transport := request.transport) is not None:
            await response.write_eof()
            transport.close()
        return response

    async def _stream(
        self,
        request: web.Request,
        response: web.StreamResponse,
        received: Received,
        started_s: float,
    ) -> None:
        behaviour = self.behaviour
        is_chat = request.path.endswith("/chat/completions")
        num_tokens = int(received.body["max_tokens"])
        if is_chat:
            await response.write(_chunk(is_chat, [{"delta": {"role": "assistant"}}]))
        num_events = -(-num_tokens // behaviour.tokens_per_event)
        pieces = [_piece(is_chat, behaviour.tokens_per_event)] * num_events
        for number, piece in enumerate(pieces):
            due_s = started_s + behaviour.ttft_s + number * behaviour.gap_s
            await asyncio.sleep(due_s - time.monotonic())
            received.event_times_s.append(time.monotonic())
            await response.write(piece)
        match behaviour.ending:
            case "torn":
                return
            case "reset":
                assert request.transport is not None
                request.transport.abort()
                return
            case "error":
                await response.write(_event({"error": {"message": "the worker died"}}))
                return
            case "malformed":
                await response.write(b'data: {"choices": [\n\n')
                return
        await self._end(response, received, num_tokens, is_chat=is_chat)

    async def _end(
        self, response: web.StreamResponse, received: Received, num_tokens: int, *, is_chat: bool
    ) -> None:
        end = _chunk(is_chat, [{"delta": {}, "finish_reason": "length"}])
        if self.behaviour.has_usage and "stream_options" in received.body:
            body = received.body
            text = body["messages"][0]["content"] if is_chat else body["prompt"]
            if isinstance(text, list):  # images before it
                text = text[-1]["text"]
            usage = {
                "prompt_tokens": count_tokens(text, is_chat=is_chat),
                "completion_tokens": num_tokens,
            }
            end += _chunk(is_chat, [], usage=usage)
        await response.write(end + b"data: [DONE]\n\n")


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _piece(is_chat: bool, num_tokens: int) -> bytes:
    text = " word" * num_tokens
    return _chunk(is_chat, [{"delta": {"content": text}} if is_chat else {"text": text}])


def _chunk(is_chat: bool, choices: list[dict[str, Any]], **fields: Any) -> bytes:
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    numbered = [{"index": number} | choice for number, choice in enumerate(choices)]
    return _event(
        {"id": "mock", "object": kind, "created": 0, "model": MODEL, "choices": numbered} | fields
    )


@click.command()
@click.option("--ttft-s", default=0.05)
@click.option("--gap-s", default=0.05)
def main(ttft_s: float, gap_s: float) -> None:
    """Serve until it is ended; the first line printed is the address."""

    async def serve() -> None:
        async with MockServer(Behaviour(ttft_s=ttft_s, gap_s=gap_s)) as server:
            click.echo(server.url)
            await asyncio.Event().wait()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())


if __name__ == "__main__":
    main()
