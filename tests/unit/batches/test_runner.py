"""When lines of a batch are due, and how an upload reaches a real socket."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from support.batch_store import NOW_S
from support.fake_router import says
from support.running_frontend import running_frontend

from lightserve.batches.database import prepare
from lightserve.batches.records import CHUNK_BYTES, LeasedLine
from lightserve.batches.runner import due_in


def leased(*, window_s: float, num_left: int) -> LeasedLine:
    return LeasedLine(
        batch=1,
        number=0,
        batch_id="batch_1",
        custom_id="a",
        endpoint="/v1/completions",
        key_name="",
        attempt=0,
        losses=0,
        line=b"",
        expires_s=int(NOW_S + window_s),
        num_left=num_left,
    )


def test_lines_share_what_is_left_of_their_window() -> None:
    # 1000 lines in 10,000 s are one in 10 s: of 50 in flight, each may take 500 s.
    line = leased(window_s=10_000, num_left=1000)
    assert due_in(line, num_in_flight=50, now_s=NOW_S) == 500.0
    assert due_in(line, num_in_flight=50, now_s=NOW_S + 9_000) == 50.0
    # The last ones have all that is left.
    assert due_in(leased(window_s=60, num_left=50), num_in_flight=50, now_s=NOW_S) == 60.0
    assert due_in(leased(window_s=60, num_left=1), num_in_flight=50, now_s=NOW_S) == 60.0
    # There is always some.
    assert due_in(leased(window_s=-5, num_left=1), num_in_flight=50, now_s=NOW_S) == 1.0


def test_a_file_may_be_larger_than_all_bodies_that_arrive(tmp_path: Path) -> None:
    lock = prepare(tmp_path / "store")
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
