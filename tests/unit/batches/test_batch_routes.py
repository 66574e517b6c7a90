"""/v1/files and /v1/batches as OpenAI's client uses them, and what is refused."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.types import Message
from support.batch_store import ENDPOINT, client_of, jsonl, line, serving, working
from support.fake_router import eventually, frontend, router_status, says

from lightserve.batches.contents import Store
from lightserve.batches.jobs import Jobs
from lightserve.batches.records import CHUNK_BYTES
from lightserve.batches.sqlite import DATABASE
from lightserve.errors import StoreError
from lightserve.frontend.middleware import KeyRing
from lightserve.frontend.openai.stored import StoredAnswer
from lightserve.frontend.process import create_app
from lightserve.frontend.response import CONNECTION_KEY
from lightserve.http_access import ApiKey, Quota, digest_of
from lightserve.messages.frontend_router import ErrorCode, RequestDelta, RouterWelcome, Submit
from lightserve.types import FinishReason, RequestClass

pytestmark = pytest.mark.usefixtures("both_stores")
EOS = 2
PATIENCE_S = 60.0
FORM = {"content-type": "multipart/form-data; boundary=b"}


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    async with asyncio.timeout(60):
        while (batch := await client.batches.retrieve(batch_id)).status == "in_progress":
            await asyncio.sleep(0.02)
    return batch


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    text = (await client.files.content(file_id)).text
    return [json.loads(each) for each in text.splitlines()]


def test_a_batch_of_responses(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as setup:
            client, url = client_of(setup), "/v1/responses"
            bodies: list[dict[str, Any]] = [{"max_output_tokens": 2}, {"previous_response_id": "x"}]
            lines = [line(f"r{n}", url=url) for n in range(2)]
            for each, body in zip(lines, bodies, strict=True):
                each["body"] = {"model": "m", "input": "hi", **body}
            file = await client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint=url, completion_window="24h"
            )
            async with working(setup):
                batch = await ended(client, batch.id)
            (result,) = await results(client, batch.output_file_id)
            body = result["response"]["body"]
            assert (body["object"], body["status"]) == ("response", "incomplete")
            assert body["service_tier"] == "flex" and body["usage"]["output_tokens"] == 2
            (error,) = await results(client, batch.error_file_id)
            assert error["response"]["body"]["error"]["param"] == "previous_response_id"
            assert setup.router.submits[0].request_class is RequestClass.BE

    asyncio.run(scenario())


def test_a_window_is_promised_or_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, answer=lambda submit: []) as setup:
            client = client_of(setup)
            data = jsonl([line(f"r{n}", body={"max_tokens": 100}) for n in range(40)])
            file = await client.files.create(file=("in.jsonl", data), purpose="batch")
            asked: dict[str, Any] = {"input_file_id": file.id, "endpoint": ENDPOINT}
            unknown: Any = await client.batches.create(**asked, completion_window="60s")
            assert unknown.x_forecast is None
            await client.batches.cancel(unknown.id)
            status = router_status(workers_ready=False, prompt_token_s=0.001, output_token_s=0.1)
            setup.router.client.on_message(status)
            async with working(setup) as runner:
                await eventually(lambda: runner._has_noted_costs)
                # 40 lines of 100 tokens of 0.1 s are 400 s of an engine of which half is theirs.
                with pytest.raises(openai.ConflictError) as refused:
                    await client.batches.create(**asked, completion_window="60s")
                error: Any = refused.value.body
                assert error["code"] == "window_too_short" and "got 60s" in error["message"]
                window = error["message"].split("at least ")[1].split(" ")[0]
                assert 1000 <= int(window[:-1]) < 1100
                batch: Any = await client.batches.create(**asked, completion_window=window)
                forecast = batch.x_forecast
                assert forecast["in_time"] and forecast["basis"] == "cost_model"
                assert 800 <= forecast["ends_at"] - batch.created_at < 850
                late: Any = await client.batches.create(
                    **asked, completion_window="90s", extra_body={"x_accept_late": True}
                )
                assert not late.x_forecast["in_time"]
                # The one that was promised nothing waits for the one that was.
                await eventually(lambda: len(runner.counts.late_batches) == 1)
            over: Any = await client.batches.cancel(batch.id)
            assert over.x_forecast is None

    asyncio.run(scenario())


def test_what_is_left_over_does_not_grow_with_batches_that_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However fast one client is, and though no process deletes it: no quota counts these rows."""
    monkeypatch.setattr("lightserve.batches.files.SLICE_ROWS", 10)
    monkeypatch.setattr("lightserve.frontend.openai.batches.LINES_PER_WRITE", 20)

    async def scenario() -> None:
        async with serving(tmp_path) as setup:
            client, store = client_of(setup), setup.service.store
            assert store is not None

            async def count(table: str) -> int:
                sql = f"SELECT count(*) FROM {table}"
                found: int = await store.run(lambda each: each.database.value(sql))
                return found

            lines = [line(f"r{n}") for n in range(60)]
            good = await client.files.create(file=("good", jsonl(lines)), purpose="batch")
            bad = await client.files.create(
                file=("bad", jsonl([*lines, line("r0")])), purpose="batch"
            )
            asked: dict[str, Any] = {"endpoint": ENDPOINT, "completion_window": "24h"}
            for _ in range(8):
                batch = await client.batches.create(**asked, input_file_id=good.id)
                await client.batches.cancel(batch.id)
                with pytest.raises(openai.BadRequestError, match="custom_id must be unique"):
                    await client.batches.create(**asked, input_file_id=bad.id)
                assert await count("lines") <= 2 * 60
            for number in range(8):
                assert await count("leftovers") <= 2
                data = b"x" * (12 * CHUNK_BYTES)
                file = await client.files.create(file=(f"f{number}", data), purpose="batch")
                await client.files.delete(file.id)
                assert await count("chunks") <= 2 + 12

    asyncio.run(scenario())


def test_a_key_does_not_wait_for_all_that_others_ask_of_the_store(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    secrets = {name: f"{name}-{'x' * 16}" for name in ("many", "one")}
    path.write_text("".join(f"{name} {secret}\n" for name, secret in secrets.items()))
    ring = KeyRing([ApiKey(name, digest_of(key.encode())) for name, key in secrets.items()])

    async def scenario() -> None:
        async with serving(tmp_path, api_key_file=str(path)) as setup:
            setup.app = create_app(setup.service, ring)
            many, one = (client_of(setup, secret) for secret in secrets.values())
            store, go_on, order = setup.service.store, threading.Event(), list[str]()
            assert store is not None
            running = asyncio.create_task(store.run(lambda _: go_on.wait(PATIENCE_S)))

            async def asks(client: openai.AsyncOpenAI, name: str) -> None:
                await client.files.list()
                order.append(name)

            asked = [asyncio.create_task(asks(many, "many")) for _ in range(20)]
            await eventually(lambda: sum(map(len, store._threads._lines.values())) >= 20)
            asked.append(asyncio.create_task(asks(one, "one")))
            await eventually(lambda: len(store._threads._lines) >= 2)
            go_on.set()
            await asyncio.gather(running, *asked)
            assert order.index("one") <= 1

    asyncio.run(scenario())


def test_a_large_file_is_checked_while_others_use_the_store(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as setup:
            client = client_of(setup)
            data = jsonl([line(f"r{n}", body={"prompt": "x" * 60_000}) for n in range(40)])
            file = await client.files.create(file=("in.jsonl", data), purpose="batch")
            store = setup.service.store
            assert store is not None
            run, order = store.run, []

            async def noting(work: Any) -> Any:
                order.append(asyncio.current_task())
                return await run(work)

            store.run = noting  # type: ignore[method-assign]
            asked: dict[str, Any] = {"input_file_id": file.id, "endpoint": ENDPOINT}
            making = asyncio.create_task(client.batches.create(**asked, completion_window="24h"))
            await eventually(lambda: len(order) > 1)
            other = asyncio.create_task(client.files.retrieve(file.id))
            await asyncio.gather(making, other)
            assert order.count(making) > len(data) // CHUNK_BYTES
            assert order.index(other) < len(order) - 3, "it waits for its turn, not for the end"

    asyncio.run(scenario())


def test_a_batch_from_its_file_to_its_results(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as setup:
            client = client_of(setup)
            lines = [line(f"r{n}", body={"max_tokens": 1 + n % 3}) for n in range(9)]
            lines[4]["body"]["temperature"] = -1
            data = jsonl(lines)
            file = await client.files.create(
                file=("in.jsonl", data),
                purpose="batch",
                expires_after={"anchor": "created_at", "seconds": 3600},
            )
            assert (file.bytes, file.filename) == (len(data), "in.jsonl")
            assert file.expires_at == file.created_at + 3600
            assert (await client.files.content(file.id)).read() == data
            batch = await client.batches.create(
                input_file_id=file.id,
                endpoint=ENDPOINT,
                completion_window="24h",
                metadata={"a": "b"},
                extra_body={"output_expires_after": {"anchor": "created_at", "seconds": 7200}},
            )
            assert batch.status == "in_progress" and batch.metadata == {"a": "b"}
            assert batch.expires_at == batch.created_at + 86_400
            async with working(setup):
                batch = await ended(client, batch.id)
            counts = batch.request_counts
            assert batch.status == "completed" and batch.completed_at
            assert (counts.total, counts.completed, counts.failed) == (9, 8, 1)
            found = await results(client, batch.output_file_id)
            assert [each["custom_id"] for each in found] == [f"r{n}" for n in range(9) if n != 4]
            for each in found:
                body = each["response"]["body"]
                assert each["response"]["status_code"] == 200 and each["error"] is None
                assert (body["object"], body["service_tier"]) == ("text_completion", "flex")
            (error,) = await results(client, batch.error_file_id)
            assert error["custom_id"] == "r4" and error["response"]["status_code"] == 400
            assert error["response"]["body"]["error"]["param"] == "temperature"
            output = await client.files.retrieve(str(batch.output_file_id))
            assert output.purpose == "batch_output"
            assert output.expires_at == output.created_at + 7200
            assert {each.id async for each in client.files.list(purpose="batch")} == {file.id}
            assert [each.id async for each in client.files.list(limit=1)] == [
                batch.error_file_id,
                batch.output_file_id,
                file.id,
            ]
            assert [each.id async for each in client.batches.list()] == [batch.id]
            for file_id in (batch.error_file_id, batch.output_file_id, file.id):
                assert (await client.files.delete(str(file_id))).deleted
            assert [each async for each in client.files.list()] == []
            with pytest.raises(openai.NotFoundError):
                await client.files.content(str(batch.output_file_id))
            submits = setup.router.submits
            assert {submit.request_class for submit in submits} == {RequestClass.BE}
            assert all(submit.slo.completion_s for submit in submits)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi", "store": False}),
    ],
)
def test_other_endpoints_answer_as_they_do_over_http(
    tmp_path: Path, endpoint: str, body: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as setup:
            client = client_of(setup)
            asked = {"custom_id": "a", "method": "POST", "url": endpoint}
            data = jsonl([{**asked, "body": {"model": "m", **body}}])
            file = await client.files.create(file=("x", data), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint=endpoint, completion_window="1h"
            )
            async with working(setup):
                batch = await ended(client, batch.id)
            (found,) = await results(client, batch.output_file_id)
            body_of_http = {"model": "m", "service_tier": "flex", **body}
            whole = (await setup.http.post(endpoint, json=body_of_http)).json()
            mine = found["response"]["body"]
            assert set(mine) == set(whole)
            same = {"object", "model", "service_tier", "usage"}
            assert {name: mine[name] for name in same} == {name: whole[name] for name in same}

    asyncio.run(scenario())


def test_what_is_cancelled_ends_at_once_with_what_it_has(tmp_path: Path) -> None:
    def answer(submit: Submit) -> list[RequestDelta]:
        is_first = submit.request_id == 0
        return [RequestDelta(submit.request_id, [EOS], FinishReason.STOP)] if is_first else []

    async def scenario() -> None:
        async with serving(tmp_path, answer) as setup, working(setup):
            client = client_of(setup)
            file = await client.files.create(
                file=("x", jsonl([line(f"r{n}") for n in range(6)])), purpose="batch"
            )
            asked = {"input_file_id": file.id, "endpoint": ENDPOINT, "completion_window": "1h"}
            headers = {"Idempotency-Key": "once"}
            batch = await client.batches.create(**asked, extra_headers=headers)
            assert (await client.batches.create(**asked, extra_headers=headers)).id == batch.id
            await setup.router.submitted(5)
            with pytest.raises(openai.ConflictError):
                await client.files.delete(file.id)
            batch = await client.batches.cancel(batch.id)
            assert batch.status == "cancelled"
            await eventually(lambda: len(setup.router.aborted_ids) == 4)
            if batch.output_file_id is not None:
                assert len(await results(client, batch.output_file_id)) == 1
            assert (await client.batches.cancel(batch.id)).status == "cancelled"
            assert len(setup.router.submits) == 5

    asyncio.run(scenario())


def test_an_end_of_the_server_does_not_wait_for_lines(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, lambda submit: []) as setup:
            client = client_of(setup)
            file = await client.files.create(file=("x", jsonl([line("a")])), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint=ENDPOINT, completion_window="1h"
            )
            async with working(setup):
                await setup.router.submitted(1)
                setup.service.in_flight.is_draining = True
                await setup.service.in_flight.wait_idle()
            setup.service.in_flight.is_draining = False
            setup.router.answer = says([EOS])
            async with working(setup):
                assert (await ended(client, batch.id)).request_counts.completed == 1

    asyncio.run(scenario())


def test_what_the_engine_loses_counts_against_no_line(tmp_path: Path) -> None:
    fates = [ErrorCode.WORKER_LOST, *[ErrorCode.QUEUE_FULL] * 2, None]
    fates += [ErrorCode.NON_FINITE_LOGITS, None, *[ErrorCode.NON_FINITE_LOGITS] * 2]

    def answer(submit: Submit) -> list[RequestDelta]:
        fate = fates[submit.request_id]
        reason = FinishReason.STOP if fate is None else FinishReason.ERROR
        tokens = [EOS] if fate is None else []
        return [RequestDelta(submit.request_id, tokens, reason, fate)]

    async def scenario() -> None:
        async with serving(tmp_path, answer) as setup:
            client = client_of(setup)
            file = await client.files.create(
                file=("x", jsonl([line(f"r{n}") for n in range(3)])), purpose="batch"
            )
            batch = await client.batches.create(
                input_file_id=file.id, endpoint=ENDPOINT, completion_window="1h"
            )
            async with working(setup, max_in_flight=1):
                batch = await ended(client, batch.id)
            found = await results(client, batch.output_file_id)
            assert [each["custom_id"] for each in found] == ["r0", "r1"]
            (error,) = await results(client, batch.error_file_id)
            assert (error["custom_id"], error["response"]["status_code"]) == ("r2", 500)

    asyncio.run(scenario())


def test_a_line_with_which_workers_die_again_and_again_ends_as_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightserve.batches.runner.MAX_LOSSES", 3)

    def answer(submit: Submit) -> list[RequestDelta]:
        lost = RequestDelta(submit.request_id, [], FinishReason.ERROR, ErrorCode.WORKER_LOST)
        whole = RequestDelta(submit.request_id, [EOS], FinishReason.STOP)
        return [lost if submit.max_tokens == 5 else whole]

    async def scenario() -> None:
        async with serving(tmp_path, answer) as setup:
            client = client_of(setup)
            lines = [line(f"r{n}", body={"max_tokens": 5 + n}) for n in range(3)]
            file = await client.files.create(file=("x", jsonl(lines)), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint=ENDPOINT, completion_window="30d"
            )
            start_s = time.time()
            hours = itertools.count()
            async with working(setup, clock=lambda: start_s + 3600 * next(hours)):
                batch = await ended(client, batch.id)
            assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
            (error,) = await results(client, batch.error_file_id)
            assert error["custom_id"] == "r0"
            assert error["response"]["body"]["error"]["code"] == "worker_lost"
            assert len(setup.router.submits) == 2 + 3

    asyncio.run(scenario())


@pytest.mark.parametrize("method", ["lease", "settle", "begin", "renew"])
def test_a_store_that_fails_makes_batches_wait_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    work = getattr(Jobs, method)
    num_calls = itertools.count()

    def failing(*values: Any, **options: Any) -> Any:
        if next(num_calls) == 0:
            raise StoreError("the disk is gone")
        return work(*values, **options)

    monkeypatch.setattr(Jobs, method, failing)
    monkeypatch.setattr("lightserve.batches.runner.STORE_RETRY_S", 0.01)

    async def scenario() -> None:
        async with serving(tmp_path) as setup:
            client = client_of(setup)
            data = jsonl([line(f"r{n}") for n in range(5)])
            file = await client.files.create(file=("x", data), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint=ENDPOINT, completion_window="1h"
            )
            async with working(setup):
                batch = await ended(client, batch.id)
            assert len(await results(client, batch.output_file_id)) == 5
            assert next(num_calls) >= 1

    asyncio.run(scenario())


@pytest.mark.parametrize("both_stores", ["sqlite"], indirect=True)
def test_a_full_disk_is_a_507_and_leaves_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as setup:
            store = setup.service.store
            assert store is not None
            pages = await store.run(lambda s: s.database.value("PRAGMA page_count"))
            await store.run(lambda s: s.database.rows(f"PRAGMA max_page_count={pages + 4}"))
            big = form(('name="file"; filename="x"', b"x" * CHUNK_BYTES), PURPOSE)
            response = await setup.http.post("/v1/files", content=big, headers=FORM)
            assert response.status_code == 507, response.text
            assert response.json()["error"]["code"] == "batch_store_full"
            assert (await setup.http.get("/v1/files")).json()["data"] == []
            for table in ("files", "chunks"):
                count = f"SELECT count(*) FROM {table}"  # the connection is a new one, with room
                assert await store.run(lambda s, c=count: s.database.value(c)) == 0

    asyncio.run(scenario())


def test_nothing_is_taken_while_the_engine_is_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as setup:
            client = client_of(setup)
            file = await client.files.create(file=("x", jsonl([line("a")])), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint=ENDPOINT, completion_window="1h"
            )
            setup.router.client.detach()
            async with working(setup) as runner:
                await eventually(lambda: runner.counts.lines.get("queued") == 1)
                setup.router.client.attach(setup.router, "boot")
                welcome = RouterWelcome(boot_id="boot", num_kv_slots=1000)
                setup.router.client.on_message(welcome)
                assert (await ended(client, batch.id)).status == "completed"
            assert len(setup.router.submits) == 1

    asyncio.run(scenario())


def form(*parts: tuple[str, bytes]) -> bytes:
    """A form whose first part, if it is a file, has a name."""
    data = b""
    for disposition, value in parts:
        head = f"--b\r\ncontent-disposition: form-data; {disposition}\r\n\r\n"
        data += head.encode() + value + b"\r\n"
    return data + b"--b--\r\n"


FILE = ('name="file"; filename="x"', b"{}")
PURPOSE = ('name="purpose"', b"batch")


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (form(FILE), 400, "purpose is required"),
        (form(PURPOSE), 400, "file is required"),
        (form(('name="file"; filename="x"', b""), PURPOSE), 400, "at least 1 byte, got 0"),
        (form(FILE, ('name="purpose"', b"assistants")), 400, 'must be batch, got "assistants"'),
        (form(FILE, PURPOSE, PURPOSE), 400, "purpose must be given once"),
        (form(FILE, PURPOSE, ('name="x"', b"")), 400, "x is not supported"),
        (form(FILE, PURPOSE)[:-6], 400, "ends before its last boundary"),
        (b"nonsense", 400, "not a valid form"),
        (b"", 400, "ends before its last boundary"),
        (form((f'name="file"; filename="{"x" * 256}"', b"{}"), PURPOSE), 400, "got 256"),
        (form(('name="file"; filename="x\x9b"', b"{}"), PURPOSE), 400, 'got "x\\u009b"'),
        (form(FILE, ('name="purpose"', b"x" * 2000)), 400, "at most 1024 bytes"),
        (
            form(FILE, PURPOSE, ('name="expires_after[seconds]"', b"5")),
            400,
            "expires_after.anchor must be created_at, got null",
        ),
        (
            form(
                *(FILE, PURPOSE, ('name="expires_after[anchor]"', b"created_at")),
                ('name="expires_after[seconds]"', b"5"),
            ),
            400,
            "expires_after.seconds must be from 3600 to 2592000, got 5",
        ),
    ],
)
def test_an_upload_that_is_wrong_leaves_nothing(
    tmp_path: Path, body: bytes, status: int, said: str
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as setup:
            response = await setup.http.post("/v1/files", content=body, headers=FORM)
            assert response.status_code == status, response.text
            assert said in response.json()["error"]["message"]
            assert setup.service.store is not None
            count = "SELECT count(*) FROM files"
            assert await setup.service.store.run(lambda s: s.database.value(count)) == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("both_stores", ["sqlite"], indirect=True)
def test_uploads_are_bounded_by_the_quota_of_their_key(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, batch_max_stored_bytes=2 * CHUNK_BYTES + 2000) as setup:
            for size, status in ((CHUNK_BYTES, 200), (CHUNK_BYTES + 2000, 413), (CHUNK_BYTES, 200)):
                big = form(('name="file"; filename="../../x"', b"x" * size), PURPOSE)
                response = await setup.http.post("/v1/files", content=big, headers=FORM)
                assert response.status_code == status, response.text
                if status == 200:  # as many bytes as a chunk has, and no more
                    path = f"/v1/files/{response.json()['id']}/content"
                    assert (await setup.http.get(path)).content == b"x" * size
            (newest, *_) = (await setup.http.get("/v1/files")).json()["data"]
            assert newest["filename"] == "../../x"
            assert {path.name for path in (tmp_path / "store").iterdir()} > {DATABASE}
            assert len(list(tmp_path.rglob("*"))) == 5

    asyncio.run(scenario())


def test_a_body_that_is_no_form_is_refused_as_such(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as setup:
            for kind in ("application/json", "multipart/form-data", "multipart/mixed; boundary=b"):
                headers = {"content-type": kind}
                response = await setup.http.post("/v1/files", content=b"{}", headers=headers)
                assert response.status_code == 415

    asyncio.run(scenario())


BATCH = {"endpoint": ENDPOINT, "completion_window": "24h"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"completion_window": "0h"}, 'of at least 60 seconds and at most 30 days, got "0h"'),
        ({"completion_window": "59s"}, 'got "59s"'),
        ({"completion_window": "31d"}, 'got "31d"'),
        ({"completion_window": 5}, "completion_window must be a string, got 5"),
        ({"endpoint": "/v1/audio"}, "endpoint must be"),
        ({"metadata": {"a": "x" * 513}}, "at most 512 characters, got 513"),
        ({"more": 1}, "more is not supported"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "at least 3600"),
        ({"input_file_id": "file-none"}, "there is no file 'file-none'"),
        ({"input_file_id": "a\0"}, 'must not have control characters, got "a\\u0000"'),
    ],
)
def test_a_batch_that_is_wrong_is_not_made(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as setup:
            body = form(('name="file"; filename="x"', jsonl([line("a"), line("a")])), PURPOSE)
            file = (await setup.http.post("/v1/files", content=body, headers=FORM)).json()
            asked = {"input_file_id": file["id"], **BATCH, **changes}
            response = await setup.http.post("/v1/batches", json=asked)
            assert response.status_code in (400, 404), response.text
            assert said in response.json()["error"]["message"]
            good = {"input_file_id": file["id"], **BATCH}
            response = await setup.http.post("/v1/batches", json=good)
            assert "line 2 of the input file: custom_id must be unique" in response.text
            assert (await setup.http.get("/v1/batches")).json()["data"] == []

    asyncio.run(scenario())


def test_what_is_another_keys_is_not_there(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice {'a' * 32}\nbob {'b' * 32}\n")
    ring = KeyRing([ApiKey(n, digest_of(n[0].encode() * 32)) for n in ("alice", "bob")])

    async def scenario() -> None:
        async with serving(tmp_path, api_key_file=str(keys)) as setup:
            setup.app = create_app(setup.service, ring)
            alice, bob = client_of(setup, "a" * 32), client_of(setup, "b" * 32)
            file = await alice.files.create(file=("x", jsonl([line("a")])), purpose="batch")
            batch = await alice.batches.create(
                input_file_id=file.id, endpoint=ENDPOINT, completion_window="1h"
            )
            for call in (
                lambda: bob.files.retrieve(file.id),
                lambda: bob.files.content(file.id),
                lambda: bob.files.delete(file.id),
                lambda: bob.batches.retrieve(batch.id),
                lambda: bob.batches.cancel(batch.id),
                lambda: bob.files.list(after=file.id),
                lambda: bob.batches.list(after=batch.id),
                lambda: bob.batches.create(
                    input_file_id=file.id, endpoint=ENDPOINT, completion_window="1h"
                ),
            ):
                with pytest.raises(openai.NotFoundError):
                    await call()
            assert [each async for each in bob.files.list()] == []
            assert [each async for each in bob.batches.list()] == []
            async with working(setup):
                await ended(alice, batch.id)
            salts = {submit.prefix_salt for submit in setup.router.submits}
            assert len(salts) == 1 and salts != {""}

    asyncio.run(scenario())


def test_a_key_may_have_so_many_lines_to_be_done(tmp_path: Path) -> None:
    key = ApiKey("alice", digest_of(b"a" * 32), quota=Quota(batch_lines=3))

    async def scenario() -> None:
        async with serving(tmp_path, api_key_file="keys") as setup:
            setup.app = create_app(setup.service, KeyRing([key]))
            alice = client_of(setup, "a" * 32)
            data = jsonl([line(name) for name in "ab"])
            file = await alice.files.create(file=("x", data), purpose="batch")
            asked: dict[str, Any] = {"input_file_id": file.id, "endpoint": ENDPOINT}
            batch = await alice.batches.create(**asked, completion_window="1h")
            with pytest.raises(openai.RateLimitError) as error:
                await alice.batches.create(**asked, completion_window="1h")
            assert error.value.code == "batch_lines_exceeded"
            assert "may have 3 lines" in str(error.value) and "got 2 beside 2" in str(error.value)
            assert error.value.response.headers["retry-after"] == "60"
            background: dict[str, Any] = {"model": "m", "input": "hi", "background": True}
            await alice.responses.create(**background)
            with pytest.raises(openai.RateLimitError) as error:
                await alice.responses.create(**background)
            assert "got 1 beside 3" in str(error.value)
            await alice.batches.cancel(batch.id)
            await alice.batches.create(**asked, completion_window="1h")

    asyncio.run(scenario())


def test_a_server_without_a_store_says_so() -> None:
    async def scenario() -> None:
        async with frontend(says([EOS])) as setup:
            response = await setup.http.get("/v1/files")
            assert response.status_code == 404
            assert "--batch-store" in response.json()["error"]["message"]

    asyncio.run(scenario())


def test_a_server_whose_own_store_cannot_be_used_says_why() -> None:
    async def scenario() -> None:
        problem = "another server uses it"
        async with frontend(says([EOS]), batch_store="auto", store_problem=problem) as setup:
            asked = {"model": "lightserve-tiny", "input": "hi"}
            for response in (
                await setup.http.get("/v1/files"),
                await setup.http.get("/v1/batches"),
                await setup.http.get("/v1/responses/resp_x"),
                await setup.http.post("/v1/responses", json={**asked, "store": True}),
            ):
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "batch_store_unavailable"
                assert problem in response.json()["error"]["message"]
            response = await setup.http.post("/v1/responses", json=asked)
            assert response.status_code == 200 and response.json()["store"] is False

    asyncio.run(scenario())


@pytest.mark.parametrize("both_stores", ["sqlite"], indirect=True)
def test_a_store_that_is_gone_is_a_503_on_its_routes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightserve.batches.access.REST_S", 0.0)

    async def scenario() -> None:
        async with serving(tmp_path) as setup:
            path = tmp_path / "store" / DATABASE
            path.rename(tmp_path / "away")
            response = await setup.http.get("/v1/files")
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "batch_store_unavailable"
            assert "unable" not in response.text
            asked = {"model": "m", "prompt": "hi"}
            assert (await setup.http.post("/v1/completions", json=asked)).status_code == 200
            (tmp_path / "away").rename(path)
            assert (await setup.http.get("/v1/files")).status_code == 200

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/files?limit=0", "limit must be an integer from 1 to 10000"),
        ("/v1/files?order=up", 'order must be asc or desc, got "up"'),
        ("/v1/files?purpose=vision", "purpose must be batch or batch_output"),
        ("/v1/batches?limit=101", "from 1 to 100"),
        ("/v1/batches?x=1", "is not supported"),
        ("/v1/batches?after=%00", 'after must not have control characters, got "\\u0000"'),
    ],
)
def test_queries_are_read_strictly(tmp_path: Path, path: str, said: str) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as setup:
            response = await setup.http.get(path)
            assert response.status_code == 400 and said in response.json()["error"]["message"]

    asyncio.run(scenario())


class StoppedReader:
    """The connection of a client that takes nothing, until it is told to."""

    def __init__(self) -> None:
        self.is_cut_off = False
        self.has_taken = asyncio.Event()
        self.sent: list[bytes] = []

    def cut_off(self) -> None:
        self.is_cut_off = True
        self.has_taken.set()

    async def drained(self) -> None:
        await self.has_taken.wait()

    async def send(self, message: Message) -> None:
        self.sent.append(message.get("body", b""))

    async def receive(self) -> Message:
        if self.is_cut_off:
            return {"type": "http.disconnect"}
        await asyncio.sleep(0.001)
        return {"type": "http.request"}


def test_what_a_reader_has_not_taken_is_bounded_in_sum(tmp_path: Path) -> None:
    """One page for each, of the client with the most the oldest goes, and others read on."""

    async def scenario() -> None:
        async with serving(tmp_path, max_kept_answer_bytes=2**20) as setup:
            pages_made: Counter[str] = Counter()

            async def pages(owner: str) -> AsyncIterator[bytes]:
                for _ in range(3):
                    pages_made[owner] += 1
                    yield b"x" * (300_000 if owner == "10.0.0.1" else 1000)

            readers = [StoppedReader() for _ in range(5)]
            owners = ["10.0.0.1"] * 4 + ["10.0.0.2"]
            tasks = []
            for reader, owner in zip(readers, owners, strict=True):
                answer = StoredAnswer(setup.service, pages(owner))
                scope = {"client": (owner, 1), CONNECTION_KEY: reader}
                tasks.append(asyncio.create_task(answer(scope, reader.receive, reader.send)))
                await eventually(lambda: len(readers[len(tasks) - 1].sent) == 2)
            assert [reader.is_cut_off for reader in readers] == [True] + [False] * 4
            assert pages_made == {"10.0.0.1": 4, "10.0.0.2": 1}
            assert setup.service.kept.num_bytes == 901_000
            for reader in readers[1:]:
                reader.has_taken.set()
            await asyncio.gather(*tasks)
            assert setup.service.kept.num_bytes == 0
            assert [sum(map(len, reader.sent)) for reader in readers[1:]] == [900_000] * 3 + [3000]

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_long_lists_of_files_come_in_portions(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as setup:

            def add(store: Store) -> None:
                with store.database.transaction():
                    store.database.write_many(
                        "INSERT INTO files (id, key_name, purpose, filename, num_bytes, created_s,"
                        " expires_s, touched_s, is_whole) VALUES (?, '', 'batch', 'f', 1, 0, NULL,"
                        " 0, TRUE)",
                        ((f"file-{number}",) for number in range(600)),
                    )

            assert setup.service.store is not None
            await setup.service.store.run(add)
            for query, ids in (
                ("", range(599, -1, -1)),
                ("?order=asc&limit=300", range(300)),
                ("?limit=512&after=file-590", range(589, 77, -1)),
                ("?limit=90&after=file-90", range(89, -1, -1)),
            ):
                page = (await setup.http.get(f"/v1/files{query}")).json()
                assert [file["id"] for file in page["data"]] == [f"file-{n}" for n in ids]
                assert (page["first_id"], page["last_id"]) == (f"file-{ids[0]}", f"file-{ids[-1]}")
                assert page["has_more"] is (len(ids) in (300, 512))
            empty = (await setup.http.get("/v1/files?after=file-0")).json()
            assert empty == {
                "object": "list",
                "data": [],
                "first_id": None,
                "last_id": None,
                "has_more": False,
            }

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_a_file_with_a_wrong_line_leaves_nothing_behind(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as setup, client_of(setup) as client:
            lines = jsonl([*(line(f"r{n}") for n in range(3000)), b"{}"])
            file = await client.files.create(file=("f", lines), purpose="batch")
            with pytest.raises(openai.BadRequestError, match="line 3001"):
                await client.batches.create(
                    input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h"
                )

            def left(store: Store) -> tuple[int, int]:
                count = store.database.value
                return count("SELECT count(*) FROM batches"), count("SELECT count(*) FROM lines")

            assert setup.service.store is not None
            while await setup.service.store.run(lambda store: store.files.sweep()):
                pass
            assert await setup.service.store.run(left) == (0, 0)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
