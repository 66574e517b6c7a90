"""When lines of a batch are due, what is counted, and how an upload reaches a real socket."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.batch_store import ENDPOINT, NOW_S, client_of, jsonl, line, serving, working
from support.fake_router import Setup, eventually, made_logprobs, router_status, says
from support.running_frontend import running_frontend

from lightserve.batches.access import prepare
from lightserve.batches.forecast import Forecasts
from lightserve.batches.process import _note_counts
from lightserve.batches.records import CHUNK_BYTES
from lightserve.batches.runner import Room
from lightserve.errors import StoreError
from lightserve.messages.frontend_router import RequestDelta, Submit
from lightserve.metrics.catalogue import (
    BATCH_FORECAST_RATIO,
    BATCH_LEASES_LOST,
    BATCH_OLDEST,
    BATCH_STORE_TIME,
)
from lightserve.metrics.recording import Family
from lightserve.types import FinishReason


def test_a_file_may_be_larger_than_all_bodies_that_arrive(tmp_path: Path) -> None:
    lock = prepare(str(tmp_path / "store"))
    data = b"x" * (2 * CHUNK_BYTES + 5)
    part = "--b\r\ncontent-disposition: form-data; name="
    form = f'{part}"purpose"\r\n\r\nbatch\r\n{part}"file"; filename="f"\r\n\r\n'.encode()
    form += data + b"\r\n--b--\r\n"

    async def scenario() -> None:
        flags = {"max_body_bytes": 1024, "max_pending_body_bytes": 1024}
        store = str(tmp_path / "store")
        async with running_frontend(tmp_path, batch_store=store, **flags) as running:
            await running.router_up(says([2]))
            head = (
                "POST /v1/files HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
                "content-type: multipart/form-data; boundary=b\r\n"
                f"content-length: {len(form)}\r\n\r\n"
            )
            client = await running.send(head)
            client.writer.write(form)
            status, body = await client.rest()
            assert status == 200, body
            file = json.loads(body)
            assert file["bytes"] == len(data)
            _, content = await running.get(f"/v1/files/{file['id']}/content")
            assert content == data
            client = await running.post("/v1/batches", "x" * 1025, close=True)
            assert (await client.rest())[0] == 413

    asyncio.run(scenario())
    lock.close()


def test_what_is_counted_of_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest one's age, the worst forecast, and how long the store takes."""
    monkeypatch.setattr("lightserve.batches.runner.COUNT_S", 0.01)

    async def scenario() -> None:
        async with serving(tmp_path, answer=lambda submit: []) as setup:
            status = router_status(workers_ready=True, num_kv_slots=100, prompt_token_s=1.0)
            status = msgspec.structs.replace(status, output_token_s=1.0)
            setup.router.client.on_message(status)
            client = client_of(setup)
            data = jsonl([line("a", body={"max_tokens": 100})])
            file = await client.files.create(file=("x", data), purpose="batch")
            async with working(setup) as runner:
                _note_counts(setup.service, runner)
                assert figure(setup, BATCH_OLDEST) == figure(setup, BATCH_FORECAST_RATIO) == 0.0
                await client.batches.create(
                    input_file_id=file.id,
                    endpoint=ENDPOINT,
                    completion_window="100s",
                    extra_body={"x_accept_late": True},
                )
                await eventually(lambda: runner.counts.forecast_ratio > 1.0)
                _note_counts(setup.service, runner)
            # 100 tokens at half of the engine, and the prompt's, in 100 s.
            assert 2.0 < figure(setup, BATCH_FORECAST_RATIO) < 4.0
            assert 0.0 <= figure(setup, BATCH_OLDEST) < 60.0
            assert figure(setup, BATCH_LEASES_LOST) == 0.0
            _, *counts = setup.service.observation.recorder.histogram(BATCH_STORE_TIME).values()
            assert sum(counts) >= 4

    asyncio.run(scenario())


def test_costs_that_could_not_be_noted_are_noted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them nothing is promised, and all are told of an unknown end."""
    monkeypatch.setattr("lightserve.batches.runner.STORE_RETRY_S", 0.01)
    note, has_failed = Forecasts.note, False

    def failing_note(forecasts: Forecasts, *values: Any) -> None:
        nonlocal has_failed
        if not has_failed:
            has_failed = True
            raise StoreError("the disk is gone")
        note(forecasts, *values)

    monkeypatch.setattr(Forecasts, "note", failing_note)
    monkeypatch.setattr("lightserve.batches.runner.COUNT_S", 0.01)

    async def scenario() -> None:
        async with serving(tmp_path, answer=lambda submit: []) as setup:
            status = router_status(workers_ready=False, prompt_token_s=1.0, output_token_s=1.0)
            setup.router.client.on_message(status)
            async with working(setup) as runner:
                await eventually(lambda: runner._has_noted_costs)
                store = setup.service.store
                assert store is not None and has_failed
                assert await store.run(lambda each: each.forecasts.pace(NOW_S)) is not None

    asyncio.run(scenario())


def figure(setup: Setup, family: Family) -> float:
    samples = setup.service.observation.recorder.snapshot()
    (sample,) = [sample for sample in samples if sample.family == family.name]
    return sample.values[0]


def test_a_line_that_is_refused_for_what_it_says_ends_and_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer is larger than all that are kept may be: crowded out, a 429, each time."""
    for name, value in {"LEAST_REFUSAL_S": 0.01, "MAX_REFUSAL_S": 0.02, "MAX_REFUSALS": 3}.items():
        monkeypatch.setattr(f"lightserve.batches.runner.{name}", value)
    flags = {"max_kept_answer_bytes": 2**20}

    def answer(submit: Submit) -> list[RequestDelta]:
        is_large = submit.max_tokens == 900
        tokens = [300] * submit.max_tokens
        logprobs = made_logprobs(20, 1) * len(tokens) if is_large else []
        return [RequestDelta(submit.request_id, tokens, FinishReason.LENGTH, logprobs=logprobs)]

    async def scenario() -> None:
        async with serving(tmp_path, answer=answer, **flags) as setup:
            client = client_of(setup)
            large = {"max_tokens": 900, "logprobs": 20, "ignore_eos": True, "n": 8}
            lines = [line("large", body=large)]
            lines += [line(f"r{n}", body={"max_tokens": 2}) for n in range(20)]
            file = await client.files.create(file=("x", jsonl(lines)), purpose="batch")
            async with working(setup, max_in_flight=1) as runner:
                batch = await client.batches.create(
                    input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h"
                )
                runner.wake()
                for _ in range(1000):
                    batch = await client.batches.retrieve(batch.id)
                    if batch.status == "completed":
                        break
                    await asyncio.sleep(0.02)
            counts = batch.request_counts
            assert (batch.status, counts.completed, counts.failed) == ("completed", 20, 1)
            text = (await client.files.content(batch.error_file_id)).text
            result = json.loads(text)
            assert result["custom_id"] == "large"
            assert result["response"]["status_code"] == 429

    asyncio.run(scenario())


@pytest.mark.parametrize("is_bounded", [False, True])
def test_answers_that_come_at_once_are_held_within_a_bound(
    tmp_path: Path, *, is_bounded: bool
) -> None:
    """However many lines are in flight, and whatever an answer has; all of them come."""
    num_lines, most = 16, 2**19

    def answer(submit: Submit) -> list[RequestDelta]:
        tokens = [300] * submit.max_tokens
        logprobs = made_logprobs(20, 1) * len(tokens)
        return [RequestDelta(submit.request_id, tokens, FinishReason.LENGTH, logprobs=logprobs)]

    async def scenario() -> None:
        async with serving(tmp_path, answer=answer) as setup:
            client = client_of(setup)
            body = {"max_tokens": 900, "logprobs": 20, "ignore_eos": True}
            lines = [line(f"r{n}", body=body) for n in range(num_lines)]
            file = await client.files.create(file=("x", jsonl(lines)), purpose="batch")
            room = Room(most if is_bounded else 2**40)
            async with working(setup, max_in_flight=num_lines, room=room) as runner:
                batch = await client.batches.create(
                    input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h"
                )
                runner.wake()
                for _ in range(1000):
                    batch = await client.batches.retrieve(batch.id)
                    if batch.status == "completed":
                        break
                    await asyncio.sleep(0.02)
                assert batch.request_counts.completed == num_lines
                await eventually(lambda: room.num_bytes == 0)
            size = len((await client.files.content(batch.output_file_id)).read()) // num_lines
            if is_bounded:  # and one that would not have fitted comes to its end
                assert room.most_bytes <= most + size
            else:
                assert room.most_bytes > 2 * (most + size)

    asyncio.run(scenario())


def test_what_is_held_of_answers_that_are_given_up_is_free_again() -> None:
    async def scenario() -> None:
        room = Room(10)
        await room.take((1, 0), 9)
        await room.take((1, 0), 9)  # the first goes on
        waiting = asyncio.create_task(room.take((1, 1), 1))
        await asyncio.sleep(0)
        assert not waiting.done() and room.num_bytes == 18
        room.end((1, 0))
        await asyncio.sleep(0)
        assert not waiting.done()  # the first of those to come now, but one is to be written
        room.release((1, 0))
        await waiting
        assert room.num_bytes == 1
        late = asyncio.create_task(room.take((1, 2), 10))
        await asyncio.sleep(0)
        assert not late.done()
        room.release((1, 1))
        await late
        assert (room.num_bytes, room.most_bytes) == (10, 18)

    asyncio.run(scenario())
