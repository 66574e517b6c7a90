"""Responses that are kept, by OpenAI's client: retrieved, gone on from, deleted, expired."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import openai
import pytest
from support.batch_store import (
    NOW_S,
    client_of,
    open_store,
    serving,
    working,
)
from support.fake_router import eventually

from lightserve.batches.access import location_of, prepare
from lightserve.batches.database import RESPONSE_BYTES
from lightserve.batches.records import NewResponse
from lightserve.config import ServeConfig
from lightserve.errors import InvalidRequest, StoreError
from lightserve.frontend.middleware import KeyRing
from lightserve.frontend.process import create_app
from lightserve.frontend.service import InFlight
from lightserve.http_access import ApiKey, digest_of
from lightserve.messages.supervision import StoreUsed
from lightserve.types import RequestClass

pytestmark = pytest.mark.usefixtures("both_stores")
ASKED: dict[str, Any] = {"model": "m", "input": "hi"}


async def code_of(call: Any, status: int) -> Any:
    """The error of a call that is refused with this status."""
    with pytest.raises(openai.APIStatusError) as refused:
        await call
    assert refused.value.status_code == status, refused.value.body
    return refused.value.body


def test_a_response_is_kept_unless_it_is_asked_not_to_be(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as setup:
            client = client_of(setup)
            answered = await client.responses.create(**ASKED, instructions="Be.")
            assert answered.store is True and answered.output_text
            found = await client.responses.retrieve(answered.id)
            assert found == answered
            last = None
            async for event in await client.responses.create(**ASKED, stream=True):
                last = event
            assert last.type == "response.completed" and last.response.store is True
            assert await client.responses.retrieve(last.response.id) == last.response
            unkept = await client.responses.create(**ASKED, store=False)
            assert unkept.store is False
            error = await code_of(client.responses.retrieve(unkept.id), 404)
            assert error["code"] == "response_not_found" and unkept.id in error["message"]
            await client.responses.delete(answered.id)
            for call in (client.responses.retrieve, client.responses.delete):
                await code_of(call(answered.id), 404)
            await code_of(client.responses.input_items.list(answered.id), 404)

    asyncio.run(scenario())


def test_what_was_asked_is_listed_in_pages(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as setup:
            client = client_of(setup)
            given = [{"role": "user", "content": str(number)} for number in range(5)]
            answered = await client.responses.create(model="m", input=given)  # type: ignore[arg-type]
            items = client.responses.input_items
            page = await items.list(answered.id, limit=2)
            assert [item.content[0].text for item in page.data] == ["4", "3"]
            assert page.has_more and len({item.id for item in page.data}) == 2
            texts = [item.content[0].text async for item in items.list(answered.id, limit=2)]
            assert texts == ["4", "3", "2", "1", "0"]
            first = (await items.list(answered.id, order="asc", limit=1)).data[0]
            assert first.content[0].text == "0"
            error = await code_of(items.list(answered.id, after="msg_x"), 400)
            assert error["param"] == "after"
            await code_of(items.list(answered.id, limit=101), 400)

    asyncio.run(scenario())


def test_a_conversation_that_is_gone_on_from_counts_by_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small parts take many times their bytes, and the request keeps them until it is answered."""
    kept: list[int] = []
    admitted = InFlight.admitted

    def noting(in_flight: InFlight, owner: str, num_bytes: int) -> AbstractContextManager[None]:
        kept.append(num_bytes)
        return admitted(in_flight, owner, num_bytes)

    monkeypatch.setattr(InFlight, "admitted", noting)
    parts = [{"type": "input_text", "text": ""}] * 500

    async def scenario() -> None:
        async with serving(tmp_path) as setup:
            client = client_of(setup)
            many: Any = [{"role": "user", "content": parts}, {"role": "user", "content": "hi"}]
            first = await client.responses.create(model="m", input=many)
            second = await client.responses.create(**ASKED, previous_response_id=first.id)
            assert second.output_text
            assert kept[1] >= 0.9 * kept[0] > 3 * len(json.dumps(many))

    asyncio.run(scenario())


def test_a_response_goes_on_from_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, max_body_bytes=4096) as setup:
            client = client_of(setup)
            first = await client.responses.create(**ASKED, instructions="Be.")
            second = await client.responses.create(
                model="m", input="so?", previous_response_id=first.id
            )
            assert second.previous_response_id == first.id
            third = await client.responses.create(
                model="m", input="and?", previous_response_id=second.id, store=False
            )
            said: Any = [{"role": "assistant", "content": first.output_text}]
            asked: Any = [{"role": "user", "content": text} for text in ("hi", "so?", "and?")]
            whole = [asked[0], *said, asked[1], *said, asked[2]]
            await client.responses.create(model="m", input=whole, store=False)
            assert setup.router.prompt_of(2) == setup.router.prompt_of(3)
            page = await client.responses.input_items.list(second.id)
            assert [item.content[0].text for item in page.data] == ["so?"]
            # One that was not kept, one that does not exist: named, and nothing computed.
            for other in (third.id, "resp_x"):
                call = client.responses.create(**ASKED, previous_response_id=other)
                error = await code_of(call, 404)
                assert error["param"] == "previous_response_id" and other in error["message"]
            previous_id = second.id
            for text in ("x" * 3000, "y" * 1000):
                longer = await client.responses.create(
                    model="m", input=text, previous_response_id=previous_id
                )
                previous_id = longer.id
            call = client.responses.create(**ASKED, previous_response_id=previous_id)
            error = await code_of(call, 400)
            assert "4096" in error["message"] and error["code"] == "context_length_exceeded"
            num_submitted = len(setup.router.submits)
            await client.responses.delete(first.id)
            call = client.responses.create(**ASKED, previous_response_id=second.id)
            error = await code_of(call, 404)
            assert first.id in error["message"]
            assert len(setup.router.submits) == num_submitted

    asyncio.run(scenario())


def test_responses_belong_to_their_key_and_count_against_its_quota(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    names = {"alice": b"alice-" + b"x" * 16, "bob": b"bob-" + b"x" * 16}
    path.write_text("".join(f"{name} {key.decode()}\n" for name, key in names.items()))
    ring = KeyRing([ApiKey(name, digest_of(key)) for name, key in names.items()])
    most = 3000

    async def scenario() -> None:
        flags = {"api_key_file": str(path), "batch_max_stored_bytes": most}
        async with serving(tmp_path, **flags) as setup:
            setup.app = create_app(setup.service, ring)
            alice, bob = (client_of(setup, key.decode()) for key in names.values())
            hers = await alice.responses.create(**ASKED)
            for call in (
                bob.responses.retrieve(hers.id),
                bob.responses.delete(hers.id),
                bob.responses.input_items.list(hers.id),
                bob.responses.create(**ASKED, previous_response_id=hers.id),
            ):
                await code_of(call, 404)
            error = await code_of(
                alice.responses.create(model="m", input="x" * most, store=True), 413
            )
            assert error["code"] == "storage_quota_exceeded" and str(most) in error["message"]
            # Where it is not asked for, an answer matters more than its place in the store.
            assert (await alice.responses.create(model="m", input="x" * most)).store is False
            assert (await bob.responses.create(**ASKED)).store is True
            kept = [hers]
            while (again := await alice.responses.create(**ASKED)).store:
                kept.append(again)
            assert 1 <= len(kept) < 9
            await alice.responses.delete(hers.id)
            assert (await alice.responses.create(**ASKED)).store is True

    asyncio.run(scenario())


def test_a_store_that_fails_keeps_no_answer_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as setup:
            client = client_of(setup)

            async def full(_work: Any) -> Any:
                raise StoreError("no space is left", is_full=True)

            setup.service.store.run = full  # type: ignore[union-attr, method-assign]
            assert (await client.responses.create(**ASKED)).store is False
            await code_of(client.responses.create(**ASKED, store=True), 507)
            events = [
                event
                async for event in await client.responses.create(**ASKED, store=True, stream=True)
            ]
            assert events[-1].type == "response.failed"
            assert events[-1].response.error.code == "server_error"

    asyncio.run(scenario())


async def over(client: openai.AsyncOpenAI, response_id: str) -> Any:
    async with asyncio.timeout(60):
        while True:
            found = await client.responses.retrieve(response_id)
            if found.status not in ("queued", "in_progress"):
                return found
            await asyncio.sleep(0.02)


def test_a_response_comes_in_the_background(tmp_path: Path) -> None:
    """Durable from the answer on, of best effort, and like any other once it is over."""

    async def scenario() -> None:
        async with serving(tmp_path) as setup:
            client = client_of(setup)
            first = await client.responses.create(**ASKED)
            asked = await client.responses.create(
                **{**ASKED, "instructions": "Be.", "temperature": 0.5},
                background=True,
                previous_response_id=first.id,
            )
            assert (asked.status, asked.background, asked.output) == ("queued", True, [])
            assert asked.service_tier == "flex" and asked.usage is None
            await code_of(client.responses.create(**ASKED, previous_response_id=asked.id), 409)
            assert await client.responses.retrieve(asked.id) == asked
            assert (await client.batches.list()).data == []
            await code_of(client.batches.retrieve(asked.id), 404)
            refused = await client.responses.create(
                model="m", input="x" * 40_000, max_output_tokens=8000, background=True
            )
            async with working(setup) as runner:
                done, failed = [await over(client, each.id) for each in (asked, refused)]
                while sum(runner.counts.lines.values()) or not runner.counts.batches:
                    await asyncio.sleep(0.02)
                assert not sum(runner.counts.batches.values())
            submit = setup.router.submits[1]
            assert submit.request_class is RequestClass.BE
            assert submit.sampling.temperature == 0.5
            assert 0 < (submit.slo.completion_s or 0) <= 86_400
            assert len(setup.router.prompt_of(1)) > len(setup.router.prompt_of(0))
            assert done.status == "completed" and done.output_text == first.output_text
            own = {"id", "created_at", "background", "store", "previous_response_id"}
            assert done.model_dump(include=own) == asked.model_dump(include=own)
            assert done.usage and done.completed_at
            assert (await client.responses.cancel(asked.id)) == done
            after = await client.responses.create(**ASKED, previous_response_id=asked.id)
            assert after.status == "completed"
            assert failed.status == "failed" and failed.error.code == "invalid_prompt"
            assert "context length" in failed.error.message and failed.output == []
            await code_of(client.responses.create(**ASKED, previous_response_id=failed.id), 409)
            await code_of(client.responses.cancel(first.id), 400)

    asyncio.run(scenario())


def test_a_response_in_the_background_is_cancelled_and_deleted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, answer=lambda submit: []) as setup:
            client = client_of(setup)
            asked = [await client.responses.create(**ASKED, background=True) for _ in range(4)]
            early = await client.responses.cancel(asked[0].id)
            assert early.status == "cancelled" == (await client.responses.cancel(early.id)).status
            await client.responses.delete(asked[1].id)
            async with working(setup):
                await setup.router.submitted(2)
                assert (await client.responses.retrieve(asked[2].id)).status == "in_progress"
                assert (await client.responses.cancel(asked[2].id)).status == "cancelled"
                await client.responses.delete(asked[3].id)
                await eventually(lambda: len(setup.router.aborted_ids) == 2)
            assert (await client.responses.retrieve(asked[2].id)).status == "cancelled"
            await code_of(client.responses.retrieve(asked[3].id), 404)
            assert len(setup.router.submits) == 2

    asyncio.run(scenario())


def test_what_cannot_come_in_the_background_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as setup:
            for fields, param in (
                ({"store": False}, "store"),
                ({"stream": True}, "stream"),
                ({"slo": {"completion_s": 5}, "service_tier": "flex"}, "slo"),
                ({"service_tier": "priority"}, "service_tier"),
                ({"tool_choice": "required"}, "tool_choice"),
                ({"previous_response_id": "resp_x"}, "previous_response_id"),
            ):
                asked = {**ASKED, "background": True, **fields}
                answer = await setup.http.post("/v1/responses", json=asked)
                assert answer.status_code in (400, 404), (fields, answer.text)
                error = answer.json()["error"]
                assert error["param"] == param and param in error["message"], error

    asyncio.run(scenario())


def test_a_response_whose_window_is_over_has_failed(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        queued = b'{"id":"r","status":"queued","output":[],"background":true,"error":null}'
        new = new_response("r", response=queued, request=b'{"custom_id":"r"}')
        store.jobs.respond(new, NOW_S, ttl_s=10**6, quota=10**6)
        (leased,) = store.jobs.lease(
            *("north", store.jobs.begin("north", NOW_S), NOW_S),
            lease_s=9,
            max_lines=9,
            max_bytes=99,
        )
        assert leased.line == new.request
        assert store.jobs.expire(NOW_S + 86_399) == 0
        assert store.jobs.expire(NOW_S + 86_400) == 1
        found = json.loads(store.responses.get("alice", "r", NOW_S + 86_400))
        assert found["status"] == "failed" and "expired" in found["error"]["message"]
        assert store.database.value("SELECT count(*) FROM lines") == 0
        used = store.database.value("SELECT num_bytes FROM stored")
        said = json.dumps(found, separators=(",", ":"))
        assert used == len(new.input) + len(said) + RESPONSE_BYTES


def new_response(name: str, **changes: Any) -> NewResponse:
    values: dict[str, Any] = {
        "id": name,
        "key_name": "alice",
        "previous_id": None,
        "input": b"[]",
        "response": b'{"status":"completed","output":[]}',
    }
    return NewResponse(**(values | changes))


def test_responses_end_with_their_time(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for number in range(70):
            store.responses.add(new_response(f"r{number}"), NOW_S, ttl_s=100, quota=10**6)
        late = new_response("late", previous_id="r0")
        store.responses.add(late, NOW_S + 50, ttl_s=100, quota=10**6)
        assert store.responses.get("alice", "r0", NOW_S + 99) == late.response
        with pytest.raises(InvalidRequest, match="r0"):
            store.responses.conversation("alice", "late", NOW_S + 100, max_bytes=99)
        assert store.responses.purge(NOW_S + 99) == 0
        assert [store.responses.purge(NOW_S + 100) for _ in range(3)] == [64, 6, 0]
        num_bytes = len(late.input) + len(late.response) + RESPONSE_BYTES
        assert store.database.rows("SELECT * FROM stored") == [("alice", num_bytes)]


def test_a_conversation_has_so_many_responses(tmp_path: Path) -> None:
    """One that goes on from itself would never end: no client can make it, and it is bounded."""
    with open_store(tmp_path) as store:
        for number in range(3):
            before = f"r{number - 1}" if number else None
            new = new_response(f"r{number}", previous_id=before)
            store.responses.add(new, NOW_S, ttl_s=100, quota=10**6)
        found = store.responses.conversation("alice", "r2", NOW_S, max_bytes=99)
        assert found == [b"[]"] * 6
        store.database.write("UPDATE responses SET previous_id = 'r2' WHERE id = 'r0'")
        with pytest.raises(InvalidRequest, match="at most 1024 responses") as error:
            store.responses.conversation("alice", "r2", NOW_S, max_bytes=10**6)
        assert error.value.code == "context_length_exceeded"


def test_in_a_servers_own_store_a_response_is_kept_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    async def scenario() -> None:
        with prepare(location_of(ServeConfig())):
            async with serving(tmp_path, batch_store="auto") as setup:
                client = client_of(setup)
                told: list[StoreUsed] = []
                setup.service.observation.attach(told.append)  # type: ignore[arg-type]
                unkept = await client.responses.create(**ASKED)
                assert unkept.store is False and not told
                kept = await client.responses.create(**ASKED, store=True)
                assert kept.store is True and told == [StoreUsed()]
                assert (await client.responses.retrieve(kept.id)).id == kept.id
                await code_of(client.responses.retrieve(unkept.id), 404)
                assert len(told) == 1

    asyncio.run(scenario())


def test_without_a_store_nothing_is_promised(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, batch_store="none") as setup:
            client = client_of(setup)
            assert (await client.responses.create(**ASKED)).store is False
            error = await code_of(client.responses.create(**ASKED, store=True), 400)
            assert "keeps no responses" in error["message"]
            error = await code_of(client.responses.retrieve("resp_x"), 404)
            assert error["code"] == "batch_store_off"

    asyncio.run(scenario())
