"""A router that answers by script, in the frontend's own process, and the service around it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

from lightserve.bundled import BUNDLED_MODEL_DIR
from lightserve.channels import Codec
from lightserve.config import ServeConfig
from lightserve.errors import ChannelFull
from lightserve.frontend.news import Delta, LiveRequest
from lightserve.frontend.process import create_app
from lightserve.frontend.request_options import OutputOptions, Prepared
from lightserve.frontend.router_client import RouterClient
from lightserve.frontend.service import Service, load_service
from lightserve.messages.common import (
    TokenLogprob,
    TokenSegment,
    pack_int32,
    pack_int64,
    unpack_int32,
)
from lightserve.messages.frontend_router import (
    Abort,
    ClassLoad,
    ClassSlots,
    DescribeKV,
    FrontendMessage,
    KVMap,
    KVPool,
    MaySubmit,
    PackedKinds,
    RequestDelta,
    RouterMessage,
    RouterStatus,
    RouterWelcome,
    Submit,
    TokenDelta,
    Verdict,
)
from lightserve.types import FinishReason, RequestClass, RequestId, SamplingParams

BOOT_ID = "boot"
CODEC: Codec[Any, Any] = Codec(send_type=FrontendMessage, recv_type=RouterMessage)
VECTOR = np.eye(1, 256, dtype=np.float32).tobytes()
"""Of the bundled model's size."""
Answer = Callable[[Submit], list[RequestDelta]]


def router_status(**changes: Any) -> RouterStatus:
    values: dict[str, Any] = {
        "workers_ready": True,
        "load": dict.fromkeys(RequestClass, ClassLoad(0, 0, 0)),
        "num_used_slots": 0,
        "num_kv_slots": 0,
        "num_steps": 0,
        "stalled_s": 0.0,
        "worker_busy_s": 0.0,
        "worker_idle_s": 0.0,
    }
    return RouterStatus(**(values | changes))


def kv_pool(**changes: Any) -> KVPool:
    """A pool of two blocks of 4: two requests, one of them paused, and a cached token."""
    values: dict[str, Any] = {
        "num_slots": 8,
        "block_size": 4,
        "num_slots_of_kind": [1, 3, 2, 1, 1],
        "classes": {RequestClass.RT: ClassSlots(1, 3, 0), RequestClass.BE: ClassSlots(1, 3, 1)},
        "num_free_blocks": 0,
        "num_shared_blocks": 1,
        "mean_run_length": 2.0,
        "num_host_slots": 10,
        "num_used_host_slots": 7,
        "num_prefix_host_slots": 30,
        "num_used_prefix_host_slots": 20,
        "slots": PackedKinds(bytes([1, 1, 3, 0, 1, 4, 2, 2]), b""),
    }
    return KVPool(**(values | changes))


def made_logprobs(num_logprobs: int | None, number: int) -> list[TokenLogprob]:
    """What a token that is the n-th is given, if anything is asked for: -n / 8."""
    if num_logprobs is None:
        return []
    top = list(range(num_logprobs))
    return [TokenLogprob(-number / 8, top, [-token / 4 for token in top])]


def made_prompt_logprobs(submit: Submit) -> list[TokenLogprob]:
    """The same for each prompt token but the first."""
    num_tokens = sum(len(segment.token_ids) // 4 for segment in submit.prompt)
    wanted = submit.sampling.num_prompt_logprobs
    return [logprob for n in range(1, num_tokens) for logprob in made_logprobs(wanted, n)]


def token_delta(deltas: list[RequestDelta]) -> TokenDelta:
    """Return the message with these news, as a router sends it: what can be is in columns."""
    plain = [d for d in deltas if d == RequestDelta(d.request_id, d.token_ids[:1]) and d.token_ids]
    ids = [delta.request_id for delta in plain]
    return TokenDelta(
        request_ids=pack_int64(ids),
        token_ids=pack_int32([token_id for delta in plain for token_id in delta.token_ids]),
        requests=[delta for delta in deltas if delta not in plain],
    )


def says(token_ids: list[int], finish: FinishReason = FinishReason.STOP) -> Answer:
    """Answer every request with these tokens, one per step, cut at its max_tokens."""

    def answer(submit: Submit) -> list[RequestDelta]:
        tokens = token_ids[: submit.max_tokens]
        end = finish if len(tokens) == len(token_ids) else FinishReason.LENGTH
        return [
            RequestDelta(
                submit.request_id,
                [token],
                end if number == len(tokens) - 1 else None,
                logprobs=made_logprobs(submit.sampling.num_logprobs, number),
                prompt_logprobs=[] if number else made_prompt_logprobs(submit),
                vector=VECTOR if submit.output else b"",
            )
            for number, token in enumerate(tokens)
        ]

    return answer


@dataclass
class FakeRouter:
    """The router's end of an `AsyncLink`: notes what is sent and answers on later turns."""

    client: RouterClient
    answer: Answer | None = None
    is_full: bool = False
    sent: list[FrontendMessage] = field(default_factory=list)
    num_rejected: int = 0
    kv_answer: KVPool | None = field(default_factory=kv_pool)
    """What it says of the KV pool; None: it has no workers."""
    verdict: Verdict = field(default_factory=lambda: Verdict(query_id=0))
    """What it says of requests that may come or not."""
    ignores_kv: bool = False
    """Whether it does not answer when asked for that."""
    turns_between: int = 10
    """Turns of the event loop between two deltas; 0 delivers all at once."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def send(self, message: FrontendMessage) -> None:
        if self.is_full:
            raise ChannelFull("full")
        CODEC.encode(message)  # as a link does, and perhaps refuses
        self.sent.append(message)
        if isinstance(message, Submit) and self.answer is not None:
            task = asyncio.get_running_loop().create_task(self._play(self.answer(message)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if isinstance(message, MaySubmit):
            verdict = msgspec.structs.replace(self.verdict, query_id=message.query_id)
            asyncio.get_running_loop().call_soon(self.client.on_message, verdict)
        if isinstance(message, DescribeKV) and not self.ignores_kv:
            answer = KVMap(query_id=message.query_id, pool=self.kv_answer)
            asyncio.get_running_loop().call_soon(self.client.on_message, answer)

    async def _play(self, deltas: list[RequestDelta]) -> None:
        """Deliver the deltas one by one, leaving the reader time to take each."""
        for delta in deltas:
            self.client.on_message(token_delta([delta]))
            for _ in range(self.turns_between):
                await asyncio.sleep(0)

    async def receive(self) -> RouterMessage:
        raise NotImplementedError("messages are handed to the client directly")

    def close(self) -> None:
        pass

    @property
    def submits(self) -> list[Submit]:
        return [message for message in self.sent if isinstance(message, Submit)]

    @property
    def aborted_ids(self) -> list[int]:
        return [message.request_id for message in self.sent if isinstance(message, Abort)]

    def prompt_of(self, number: int) -> list[int]:
        segments = self.submits[number].prompt
        return [token for s in segments for token in unpack_int32(s.token_ids).tolist()]

    async def submitted(self, number: int = 1) -> None:
        """Wait until so many requests have arrived."""
        await eventually(lambda: len(self.submits) >= number)


def prepared(
    prompt_token_ids: Sequence[int] = (5,),
    *,
    max_tokens: int = 9,
    arrival_s: float = 0.0,
    stop_strings: tuple[str, ...] = (),
    **fields: Any,
) -> Prepared:
    """A request as a route has prepared it."""
    values: dict[str, Any] = {
        "max_tokens": max_tokens,
        "eos_token_ids": [2],
        "sampling": SamplingParams(),
        "request_class": RequestClass.RT,
        "needs_acknowledgement": bool(stop_strings),
    }
    segment = TokenSegment(token_ids=pack_int32(prompt_token_ids))
    options = OutputOptions(
        prompt_token_ids=prompt_token_ids, arrival_s=arrival_s, stop_strings=stop_strings
    )
    values = {"request_id": RequestId(0), "age_s": 0.0, **values, **fields}
    return Submit(prompt=[segment], **values), options


async def next_delta(live: LiveRequest) -> Delta:
    """Wait for news of a request that has no reader, and take them."""
    while not live.has_news:
        await asyncio.sleep(0)
    return live.take()


async def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until a condition holds; TimeoutError otherwise."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)


@dataclass
class Setup:
    """A service with its fake router and its application."""

    service: Service
    router: FakeRouter
    app: Any
    http: httpx.AsyncClient

    async def post(self, path: str, body: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.post(path, content=content)


@asynccontextmanager
async def frontend(
    answer: Answer | None = None,
    *,
    num_kv_slots: int = 1_000_000,
    welcome: bool = True,
    store_problem: str = "",
    **flags: Any,
) -> AsyncIterator[Setup]:
    """A frontend's application on the bundled model, connected to a fake router."""
    config = ServeConfig(**{"be_stream_interval_ms": 0.0, "batch_store": "none", **flags})
    client = RouterClient(be_interval_s=config.be_stream_interval_ms / 1e3)
    service = load_service(config, client, store_problem=store_problem)
    router = FakeRouter(client, answer)
    client.attach(router, BOOT_ID)
    if welcome:
        client.on_message(RouterWelcome(boot_id=BOOT_ID, num_kv_slots=num_kv_slots))
        client.on_message(router_status())
    app = create_app(service)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    headers = {"content-type": "application/json"}  # bodies are often made by hand
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localhost", headers=headers
    ) as http:
        try:
            yield Setup(service, router, app, http)
        finally:
            service.close()


def copy_bundled_model(model_dir: Path, **config: Any) -> str:
    """Copy what a frontend reads of the bundled model, with other values in its config.json."""
    for path in BUNDLED_MODEL_DIR.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, model_dir / path.name)
    values = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(values | config))
    return str(model_dir)


def sse_data(text: str) -> list[Any]:
    """Return the parsed data of server-sent events, `[DONE]` as it is."""
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    return [event if event == "[DONE]" else json.loads(event) for event in events]
