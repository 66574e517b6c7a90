"""The dashboard on the HTTP port: what opens without a key, what does not, and what is told."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batch_store import DAY_S, KEY, NOW_S, make_batch, serving
from support.fake_router import Setup, frontend, kv_pool

from lightserve import dashboard
from lightserve.config import ServeConfig
from lightserve.dashboard import FAMILIES, MAX_VIEWERS, Feed, encode_tick, greeting, load_page
from lightserve.frontend.dashboard import MAX_CELLS, picture_of, pool_cells
from lightserve.frontend.middleware import KeyRing
from lightserve.frontend.process import create_app
from lightserve.http_access import ApiKey, digest_of
from lightserve.messages.frontend_router import DescribeKV, KVMap, StepNote, pack_kinds
from lightserve.messages.supervision import MetricsRequest, MetricsText
from lightserve.types import RequestClass, SlotKind, StepId

KEYS = [ApiKey("alice", digest_of(b"alices-key")), ApiKey("ops", digest_of(b"ops-key"), True)]
STEP = StepNote(
    step_id=StepId(7),
    age_s=0.5,
    predicted_s=0.02,
    limit_s=None,
    exec_s=None,
    num_requests={RequestClass.RT: 1},
    num_tokens={RequestClass.RT: 1},
    num_paused=0,
    num_preempted=0,
    left_out={RequestClass.BE: {"kv_future": 2}},
    unseen={},
)


@asynccontextmanager
async def guarded() -> AsyncIterator[tuple[Setup, Any]]:
    """A frontend that wants keys, and its application."""
    async with frontend(api_key_file="keys") as setup:
        app = create_app(setup.service, KeyRing(KEYS))
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://any.host") as http:
            setup.http = http
            yield setup, app


class Watcher:
    """A client that reads the events of an application until it leaves."""

    def __init__(self, app: Any, key: str = "") -> None:
        headers = [(b"host", b"localhost")]
        headers += [(b"authorization", f"Bearer {key}".encode())] if key else []
        self._left = asyncio.Event()
        self._has_asked = False
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.text = ""
        scope = {
            **{"type": "http", "method": "GET", "path": "/dashboard/events", "query_string": b""},
            **{"headers": headers, "raw_path": b"/dashboard/events", "http_version": "1.1"},
            **{"scheme": "http", "client": ("127.0.0.1", 1), "server": ("localhost", 80)},
            **{"root_path": "", "asgi": {"version": "3.0", "spec_version": "2.3"}},
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._has_asked:
            self._has_asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.text += message["body"].decode()

    @property
    def events(self) -> list[tuple[str, Any]]:
        parts = self.text.split("\n\n")[:-1]
        pairs = [re.fullmatch(r"event: (\w+)\ndata: (.*)", part, re.DOTALL) for part in parts]
        assert all(pairs), parts
        return [(pair[1], json.loads(pair[2])) for pair in pairs if pair]

    async def until(self, num_events: int) -> None:
        async with asyncio.timeout(60):
            while self.text.count("\n\n") < num_events:
                await asyncio.sleep(0.005)

    async def leave(self) -> None:
        self._left.set()
        await self.task


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "INTERVAL_S", 0.01)


def _supervised(setup: Setup) -> None:
    """Let a supervisor answer."""
    observation = setup.service.observation

    def send(request: MetricsRequest) -> None:
        assert request.is_dashboard
        text = b'{"time_s":1,"families":{}}'
        answer = MetricsText(
            number=request.number, text=text, content_type="application/json", is_dashboard=True
        )
        asyncio.get_running_loop().call_soon(observation.on_text, answer)

    observation.attach(send)


def test_the_page_opens_without_a_key_and_holds_no_data() -> None:
    async def scenario() -> None:
        async with guarded() as (setup, _):
            answer = await setup.http.get("/dashboard")
            assert answer.status_code == 200
            assert answer.content == load_page().body
            assert (await setup.http.head("/dashboard")).status_code == 200
            assert setup.service.model.names[0] not in answer.text
            assert (await setup.http.post("/dashboard")).status_code == 401

    asyncio.run(scenario())


def test_nothing_runs_in_the_page_but_what_is_in_it() -> None:
    page = load_page()
    text, policy = page.body.decode(), page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy and "http" not in policy
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert len(found) == 2
        digests = [hashlib.sha256(each.encode()).digest() for each in found]
        wanted = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
        parts = dict(part.strip().split(" ", 1) for part in policy.split(";"))
        assert parts[directive].split() == wanted
    assert not re.search(r"""(src|href)=["'](?!data:,)""", text.split("<script>")[0])
    assert "localStorage" not in text and "sessionStorage" not in text
    assert "innerHTML" not in (Path(dashboard.__file__).parent / "static/page.js").read_text()


@pytest.mark.parametrize(("key", "status"), [("", 401), ("alices-key", 403), ("wrong", 401)])
def test_the_events_want_an_operators_key(key: str, status: int) -> None:
    async def scenario() -> None:
        async with guarded() as (_, app):
            watcher = Watcher(app, key)
            await watcher.task
            assert watcher.status == status
            assert "event:" not in watcher.text

    asyncio.run(scenario())


def test_what_is_told() -> None:
    async def scenario() -> None:
        async with guarded() as (setup, app):
            _supervised(setup)
            watcher = Watcher(app, "ops-key")
            await watcher.until(3)
            assert watcher.headers[b"content-type"].startswith(b"text/event-stream")
            (name, hello), *ticks = watcher.events
            assert (name, hello["model"]) == ("hello", setup.service.config.model_name)
            assert [name for name, _ in ticks] == ["tick"] * len(ticks)
            tick = ticks[0][1]
            assert tick["figures"] == {"time_s": 1, "families": {}}
            assert tick["picture"]["pool"]["num_slots"] == 8
            assert (tick["picture"]["steps"], tick["picture"]["batches"]) == ([], None)
            await watcher.leave()

    asyncio.run(scenario())


def test_without_supervisor_or_router() -> None:
    async def scenario() -> None:
        async with frontend() as setup:
            app = create_app(setup.service)
            setup.service.router.detach()
            watcher = Watcher(app)
            await watcher.until(2)
            assert watcher.events[1] == ("tick", {"figures": None, "picture": None})
            await watcher.leave()

    asyncio.run(scenario())


def test_no_more_viewers_than_may_be_and_one_question_for_all() -> None:
    async def scenario() -> None:
        async with frontend() as setup:
            _supervised(setup)
            app = create_app(setup.service)
            watchers = [Watcher(app) for _ in range(MAX_VIEWERS)]
            for watcher in watchers:
                await watcher.until(2)
            late = Watcher(app)
            await late.task
            assert (late.status, json.loads(late.text)["error"]["code"]) == (
                503,
                "too_many_viewers",
            )
            assert watchers[0].events[1] in watchers[-1].events
            await watchers[0].leave()
            again = Watcher(app)
            await again.until(2)
            for watcher in [*watchers[1:], again]:
                await watcher.leave()
            num_asked = len(setup.router.sent)
            await asyncio.sleep(0.1)
            assert len(setup.router.sent) <= num_asked + 1, "there is no viewer"

    asyncio.run(scenario())


def test_views_end_when_the_server_drains_and_after_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with frontend() as setup:
            _supervised(setup)
            app = create_app(setup.service)
            watcher = Watcher(app)
            await watcher.until(2)
            setup.service.in_flight.is_draining = True
            await asyncio.wait_for(watcher.task, 60)
            setup.service.in_flight.is_draining = False
            monkeypatch.setattr(dashboard, "MAX_VIEW_S", 0.05)
            watcher = Watcher(app)
            await asyncio.wait_for(watcher.task, 60)
            assert watcher.status == 200 and len(watcher.events) > 1

    asyncio.run(scenario())


def test_the_targets_and_buckets_are_those_of_the_server() -> None:
    hello = greeting(ServeConfig(ttft_slo_ms=500.0, tpot_slo_ms=50.0))
    assert hello["targets"] == {"ttft_s": 0.5, "mtpot_s": 0.2}
    assert greeting(ServeConfig())["targets"] == {"ttft_s": None, "mtpot_s": None}
    assert hello["buckets"]["lightserve_step_time_seconds"][0] == 0.0005


def test_every_figure_that_the_page_reads_is_told() -> None:
    script = (Path(dashboard.__file__).parent / "static/page.js").read_text()
    told = {family.name.removeprefix("lightserve_") for family in FAMILIES}
    calls = r"(?:value|sum|rate|grown|quantile|mean|perMinute)\((?:\w+, )?\"(\w+)\""
    assert set(re.findall(calls, script)) <= told
    assert {"kv_slots", "slo_requests_total", "step_time_seconds"} <= set(re.findall(calls, script))


def test_a_closed_feed_ends_its_views() -> None:
    async def scenario() -> None:
        async def make() -> bytes:
            return encode_tick(None, None)

        feed = Feed(ServeConfig(), make)
        events = feed.events()
        assert (await anext(events)).startswith(b"event: hello")
        await anext(events)
        waiting = asyncio.ensure_future(anext(events, None))
        await asyncio.sleep(0)
        feed.close()
        assert await asyncio.wait_for(waiting, 60) is None

    asyncio.run(scenario())


def test_steps_and_batches_in_the_picture(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as setup:
            service = setup.service
            assert service.store is not None
            made = await service.store.run(
                lambda store: make_batch(store, 3, metadata='{"private": "words"}')
            )
            setup.router.ignores_kv = True
            asking = asyncio.create_task(picture_of(service))
            while not (asked := [m for m in setup.router.sent if isinstance(m, DescribeKV)]):
                await asyncio.sleep(0)
            answer = KVMap(query_id=asked[0].query_id, pool=kv_pool(), steps=[STEP])
            service.router.on_message(answer)
            text = await asking
            assert text is not None
            picture = json.loads(text)
            assert picture["steps"][0]["left_out"] == {"be": {"kv_future": 2}}
            (batch,) = picture["batches"]
            assert batch["id"] == made.id
            assert (batch["num_lines"], batch["promised_s"]) == (3, NOW_S + DAY_S)
            assert KEY.encode() not in text and b"private" not in text

    asyncio.run(scenario())


@given(
    kinds=st.lists(st.sampled_from(list(SlotKind)), min_size=1, max_size=200),
    block_size=st.sampled_from([1, 4, 16]),
)
@settings(deadline=None)
def test_a_cell_is_a_block_and_has_its_shares(kinds: list[SlotKind], block_size: int) -> None:
    slots = np.array(kinds, dtype=np.uint8)
    counts = [int((slots == kind).sum()) for kind in SlotKind]
    pool = kv_pool(
        num_slots=len(slots),
        block_size=block_size,
        num_slots_of_kind=counts,
        slots=pack_kinds(slots),
    )
    told = pool_cells(pool)
    assert told["blocks_per_cell"] == 1
    assert told["num_slots_of"] == {
        k.name.lower(): n for k, n in zip(SlotKind, counts, strict=True)
    }
    blocks = [slots[i : i + block_size] for i in range(0, len(slots), block_size)]
    for kind in (SlotKind.RT, SlotKind.BE, SlotKind.CACHED, SlotKind.CHECKPOINTED):
        digits = told["cells"][kind.name.lower()]
        assert len(digits) == len(blocks)
        for digit, block in zip(digits, blocks, strict=True):
            share = float((block == kind).mean())
            assert abs(int(digit) - 9 * share) <= 0.5 or (digit == "1" and 0 < share < 1 / 9)
            assert (digit == "0") == (share == 0.0)


def test_a_large_pool_has_cells_of_several_blocks() -> None:
    num_slots = 16 * (3 * MAX_CELLS - 5) - 3
    slots = np.full(num_slots, SlotKind.RT, dtype=np.uint8)
    told = pool_cells(kv_pool(num_slots=num_slots, block_size=16, slots=pack_kinds(slots)))
    assert told["blocks_per_cell"] == 3
    assert told["cells"]["rt"] == "9" * len(told["cells"]["rt"])
    assert len(told["cells"]["rt"]) == -(-num_slots // 48) <= MAX_CELLS
    assert pool_cells(kv_pool(slots=None))["cells"] is None
