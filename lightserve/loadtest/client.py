"""Sends one request and writes down when every event of its answer arrived.

aiohttp, since of the HTTP libraries compared it costs least per event. Nothing is retried: an
arrival is sent once, and what became of it is its result. All times are seconds after the start of
the run, on the client's monotonic clock.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from lightserve.loadtest import result
from lightserve.loadtest.options import BE, ServerOptions, Targets
from lightserve.loadtest.result import Record

DONE = b"[DONE]"
_DATA = b"data:"


class PromptDetails(msgspec.Struct, frozen=True):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """`usage`."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class Event(msgspec.Struct, frozen=True):
    """The fields of a chunk that are read, on either endpoint."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None

    @property
    def num_chars(self) -> int:
        """How much a reader sees of it: text, reasoning, tool calls."""
        count = 0
        for choice in self.choices:
            count += len(choice.text or "")
            if (delta := choice.delta) is not None:
                count += len(delta.content or "")
                count += len(delta.reasoning_content or delta.reasoning or "")
                count += sum(len(bytes(call)) for call in delta.tool_calls or ())
        return count

    @property
    def is_finish(self) -> bool:
        """Whether it ends an answer."""
        return any(choice.finish_reason for choice in self.choices)


class EventLines:
    """Cuts a byte stream into the payloads of its `data:` lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the payloads that `piece` completes; comments and other fields are dropped."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [line[len(_DATA) :].strip() for line in lines if line.startswith(_DATA)]


decode_event = msgspec.json.Decoder(Event).decode


_KEEP_ALIVE_S = 2.0
"""Below what servers usually have (5 s), so that no request meets a connection that is closing."""
_LINE_BYTES = 1 << 20
_TARGET_HEADERS = {
    "ttft_ms": "x-slo-ttft-ms",
    "tpot_ms": "x-slo-tpot-ms",
    "mtpot_ms": "x-slo-mtpot-ms",
}
Now = Callable[[], float]


@dataclass(frozen=True)
class Outgoing:
    """A request, ready to be sent."""

    body: bytes
    headers: dict[str, str]


def api_base(url: str) -> str:
    """Return `url` up to and including /v1."""
    base = url.rstrip("/")
    return base if base.endswith("/v1") else base + "/v1"


class StreamClient:
    """An open HTTP client; use it as an async context manager."""

    def __init__(
        self,
        server: ServerOptions,
        *,
        api_key: str | None,
        ca_file: str | None,
        reuses_connections: bool = True,
    ) -> None:
        self.num_connections = 0
        """Opened so far."""
        self._reuses_connections = reuses_connections
        self._server = server
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        base = api_base(server.url)
        is_chat = server.endpoint == "chat"
        self._url = f"{base}/chat/completions" if is_chat else f"{base}/completions"
        self._models_url = f"{base}/models"
        self._ca_file = ca_file
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        reuses = self._reuses_connections
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_end.append(self._count_connection)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,  # as many as there are requests in flight: an open loop never waits
                force_close=not reuses,
                keepalive_timeout=_KEEP_ALIVE_S if reuses else None,
                ssl=_ssl_context(self._ca_file),
            ),
            trace_configs=[trace],
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=_LINE_BYTES,
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._open_session.close()

    async def _count_connection(self, *_: object) -> None:
        self.num_connections += 1

    @property
    def _open_session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "used outside its context"
        return self._session

    async def first_model(self) -> str:
        """Return the first model of GET /v1/models. Raises aiohttp.ClientError or ValueError."""
        async with self._open_session.get(self._models_url) as response:
            body = await response.read()
            if response.status != 200:
                text = f"status {response.status}: {body[:200].decode(errors='replace')}"
                if response.status == 401:
                    text += " (--api-key-file or --api-key-env names where yours is)"
                raise ValueError(text)
            try:
                return str(msgspec.json.decode(body)["data"][0]["id"])
            except (msgspec.DecodeError, LookupError, TypeError) as error:
                raise ValueError(f"not a list of models: {body[:200]!r}") from error

    def outgoing(
        self, record: Record, text: str, targets: Targets, image_urls: Sequence[str] = ()
    ) -> Outgoing:
        """Build the request of a record; images stand before the text."""
        server = self._server
        body: dict[str, Any] = {"model": server.model, "stream": True}
        if server.endpoint == "chat":
            parts = [{"type": "image_url", "image_url": {"url": url}} for url in image_urls]
            content = [*parts, {"type": "text", "text": text}] if parts else text
            body["messages"] = [{"role": "user", "content": content}]
        else:
            body["prompt"] = text
        body["max_tokens"] = record.wanted_output_tokens
        if server.includes_usage:
            body["stream_options"] = {"include_usage": True}
        if server.force_lengths:
            body |= {"ignore_eos": True, "min_tokens": record.wanted_output_tokens}
        body |= server.body
        if record.priority is not None:
            body["priority"] = record.priority
        headers = {"X-Request-Id": record.request_id} if record.request_id else {}
        if record.request_class == BE:
            body |= server.be_body
        if server.sends_targets:
            own = {} if record.request_class == BE else _target_headers(targets)
            headers |= own
            if not own and targets.e2el_ms is not None:
                body["slo"] = {"completion_s": targets.e2el_ms / 1e3}
        return Outgoing(msgspec.json.encode(body), headers)

    async def send(self, record: Record, outgoing: Outgoing, now: Now) -> None:
        """Send it and read the answer into `record`; only being cancelled is raised."""
        record.sent_s = now()
        budget_s = record.intended_s + self._server.timeout_s - record.sent_s
        try:
            async with asyncio.timeout(budget_s):
                await self._exchange(record, outgoing, now)
        except TimeoutError:
            record.fail(result.TIMEOUT, f"after {self._server.timeout_s:g} s", now())
        except aiohttp.ClientConnectorError as error:
            is_ours = error.os_error.errno in (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)
            record.fail(result.CLIENT if is_ours else result.CONNECT, str(error), now())
        except (aiohttp.ClientError, OSError) as error:
            record.fail(result.DISCONNECTED, repr(error), now())
        except asyncio.CancelledError:
            record.fail(result.UNFINISHED, "the run ended", now())
            raise

    async def _exchange(self, record: Record, outgoing: Outgoing, now: Now) -> None:
        async with self._open_session.post(
            self._url, data=outgoing.body, headers=outgoing.headers, allow_redirects=False
        ) as response:
            if response.status != 200:
                detail = (await response.read())[:300].decode(errors="replace")
                record.fail(f"http_{response.status}", detail, now())
                wait = response.headers.get("Retry-After", "")  # a date is for people
                record.retry_after_s = (
                    min(float(wait), self._server.timeout_s) if wait.isdecimal() else 0.0
                )
                return
            lines = EventLines()
            is_done = False
            async for piece in response.content.iter_any():
                piece_s = now()
                for payload in lines.feed(piece):
                    if payload == DONE:
                        is_done = True
                    else:
                        _take(record, payload, piece_s)
        if record.error is None and record.end_s is None and not is_done:
            record.fail(result.TORN, "the stream ended without an end", now())
        elif record.end_s is None:
            record.end_s = record.event_times_s[-1] if record.event_times_s else now()


def _target_headers(targets: Targets) -> dict[str, str]:
    """Return the targets of tokens, which best-effort requests cannot have."""
    return {
        _TARGET_HEADERS[name]: repr(limit)
        for name, limit in targets.items()
        if name in _TARGET_HEADERS
    }


def _take(record: Record, payload: bytes, event_s: float) -> None:
    try:
        event: Event = decode_event(payload)
    except msgspec.MsgspecError as error:
        record.fail(result.MALFORMED, f"{error}: {payload[:200]!r}", event_s)
        return
    if event.error is not None:
        record.fail(result.ERROR_EVENT, str(event.error), event_s)
        return
    if record.error is not None:
        return
    if num_chars := event.num_chars:
        record.event_times_s.append(event_s)
        record.event_chars.append(num_chars)
    if event.is_finish:
        record.end_s = event_s
    if (usage := event.usage) is not None:
        record.prompt_tokens = usage.prompt_tokens
        record.output_tokens = usage.completion_tokens
        if (details := usage.prompt_tokens_details) is not None:
            record.cached_tokens = details.cached_tokens


def _ssl_context(ca_file: str | None) -> Any:
    if ca_file is None:
        return True
    import ssl  # noqa: PLC0415 - 20 ms that most runs do not need

    return ssl.create_default_context(cafile=ca_file)


def clock() -> Now:
    """Return a function of the seconds since now."""
    start_s = time.monotonic()
    return lambda: time.monotonic() - start_s
