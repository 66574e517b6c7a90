"""Files whose bytes are in objects: in S3 (what speaks its protocol), and in a directory."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from support.batch_store import (
    DAY_S,
    ENDPOINT,
    KEY,
    QUOTA,
    client_of,
    jsonl,
    line,
    open_store,
    serving,
    working,
)
from support.fake_router import Setup, eventually
from support.object_store import BUCKET, FakeS3, fake_s3

from lightserve.batches import objects as objects_module
from lightserve.batches import runner
from lightserve.batches.access import StoreThread, prepare
from lightserve.batches.contents import Contents
from lightserve.batches.database import BATCH_BYTES
from lightserve.batches.objects import Objects
from lightserve.batches.records import OBJECT_BYTES
from lightserve.config import ServeConfig
from lightserve.errors import ConfigError, StartupError, StoreError

pytest.importorskip("obstore")


class Place:
    """A file store, and what is in it."""

    def __init__(self, url: str, directory: Path | None, s3: FakeS3 | None) -> None:
        self.url, self.s3 = url, s3
        self._directory = directory

    def objects(self) -> dict[str, bytes]:
        """By name."""
        if self.s3 is not None:
            start = f"/{BUCKET}/files/"
            return {name.removeprefix(start): data for name, data in self.s3.objects.items()}
        assert self._directory is not None
        found = (path for path in self._directory.rglob("*") if path.is_file())
        return {str(path.relative_to(self._directory)): path.read_bytes() for path in found}


@pytest.fixture(params=["s3", "file"])
def place_of_files(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    for name in ("POLL_S", "GATHER_S", "OBJECT_RETRY_S"):
        monkeypatch.setattr(runner, name, 0.002)
    if request.param == "file":
        yield Place(f"file://{tmp_path}/files", tmp_path / "files", None)
        return
    monkeypatch.setattr(objects_module, "TRIES_S", 0)
    with fake_s3() as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        yield Place(f"s3://{BUCKET}/files", None, s3)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(bounded())


def contents_of(setup: Setup) -> Contents:
    assert setup.service.store is not None
    return setup.service.store.contents


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    while (batch := await client.batches.retrieve(batch_id)).status == "in_progress":
        await asyncio.sleep(0.01)
    return batch


async def count(setup: Setup, table: str) -> int:
    assert setup.service.store is not None
    return await setup.service.store.run(
        lambda store: store.database.value(f"SELECT count(*) FROM {table}")
    )


@pytest.mark.usefixtures("both_stores")
def test_a_batch_from_its_file_to_its_results(tmp_path: Path, place_of_files: Place) -> None:
    """Uploads and results are objects, and nothing of them is left in rows nor after their end."""

    async def scenario() -> None:
        async with serving(tmp_path, file_store=place_of_files.url) as setup:
            client = client_of(setup)
            lines = [line(f"r{n}") for n in range(5)]
            lines[3]["body"]["temperature"] = -1
            data = jsonl([json.dumps(each).encode() + b" " * 600_000 for each in lines])
            file = await client.files.create(file=("in", data), purpose="batch")
            names = [f"{file.id}/{n}" for n in range(3)]
            found = place_of_files.objects()
            assert b"".join(found[name] for name in names) == data and len(found) == 3
            assert {len(found[name]) for name in names[:-1]} == {OBJECT_BYTES}
            assert (await client.files.content(file.id)).read() == data
            batch = await client.batches.create(
                input_file_id=file.id, endpoint=ENDPOINT, completion_window="1h"
            )
            with pytest.raises(openai.ConflictError):
                await client.files.delete(file.id)
            async with working(setup):
                batch = await ended(client, batch.id)
            counts = batch.request_counts
            assert (counts.completed, counts.failed) == (4, 1)
            ids = [str(each) for each in (batch.output_file_id, batch.error_file_id)]
            before = [(await client.files.content(each)).read() for each in ids]
            assert [json.loads(each)["custom_id"] for each in before[0].splitlines()] == [
                *("r0", "r1", "r2", "r4")
            ]
            while await contents_of(setup).move():
                pass
            assert await count(setup, "lines") == await count(setup, "chunks") == 0
            assert set(place_of_files.objects()) == {*names, *(f"{each}/0" for each in ids)}
            assert [(await client.files.content(each)).read() for each in ids] == before
            for each in (*ids, file.id):
                assert (await client.files.delete(each)).deleted
            assert place_of_files.objects() == {}
            assert await count(setup, "files") == 0
            stored = "SELECT num_bytes FROM stored"
            assert setup.service.store is not None
            kept = await setup.service.store.run(lambda s: s.database.value(stored))
            assert kept == BATCH_BYTES  # what says that there was one

    run(scenario)


def test_a_file_is_downloaded_while_it_moves(
    tmp_path: Path, place_of_files: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightserve.batches.files.PAGE_LINES", 2)

    async def scenario() -> None:
        async with serving(tmp_path, file_store=place_of_files.url) as setup:
            client, contents = client_of(setup), contents_of(setup)
            data = jsonl([line(f"r{n}") for n in range(7)])
            file = await client.files.create(file=("in", data), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint=ENDPOINT, completion_window="1h"
            )
            async with working(setup):
                batch = await ended(client, batch.id)
            whole = (await client.files.content(batch.output_file_id)).read()
            assert setup.service.store is not None
            record = await setup.service.store.run(
                lambda s: s.files.get("", batch.output_file_id, 0.0)
            )
            first, cursor = await contents.read(record)
            assert cursor is not None and await contents.move()
            rest, after = await contents.read(record, cursor)
            assert first + rest == whole and after is None

    run(scenario)


def test_orphaned_blob(
    tmp_path: Path, place_of_files: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a process dies between an object and its row, no object stays without one."""
    location = str(tmp_path / "store")

    async def scenario() -> None:
        thread = StoreThread(location, file_store=place_of_files.url)
        contents = thread.contents

        async def uploaded(data: bytes) -> str:
            number = await contents.begin(KEY)
            await contents.append(number, 0, data, quota=10**9)
            file = await thread.run(
                lambda s: s.files.finish(number, "batch", "f", time.time(), ttl_s=2 * DAY_S)
            )
            return file.id

        def dies(*args: object) -> Any:
            raise MemoryError

        late_s = 10.0 * DAY_S
        # 1. An upload that is put and never whole: its frontend has died.
        number = await contents.begin(KEY)
        await contents.append(number, 0, b"x", quota=10**9)
        # 2. One that dies between the row's bytes and the object.
        with monkeypatch.context() as patched:
            patched.setattr(Objects, "put", dies)
            with pytest.raises(MemoryError):
                await contents.append(await contents.begin(KEY), 0, b"y", quota=10**9)
        # 3. A deletion that dies before its object is gone, and 4. one before its row is.
        for place in ((Objects, "delete"), (type((await thread.run(lambda s: s)).files), "forget")):
            file_id = await uploaded(b"z")
            with monkeypatch.context() as patched:
                patched.setattr(*place, dies)
                with pytest.raises(MemoryError):
                    await contents.delete(KEY, file_id)
            with pytest.raises(Exception, match="there is no file"):
                await thread.run(lambda s, i=file_id: s.files.get(KEY, i, 0.0))
        kept = await uploaded(b"kept")
        assert len(place_of_files.objects()) == 3
        # An hour later what was given up is gone, and what is whole is there.
        while await contents.purge(time.time() + 3601):
            pass
        assert place_of_files.objects() == {f"{kept}/0": b"kept"}
        assert await thread.run(lambda s: s.database.rows("SELECT id FROM files")) == [(kept,)]
        # Its own end is the same.
        while await contents.purge(time.time() + late_s):
            pass
        assert place_of_files.objects() == {}
        assert await thread.run(lambda s: s.database.value("SELECT count(*) FROM files")) == 0
        thread.close()

    with prepare(location, place_of_files.url):
        run(scenario)


def test_what_is_given_up_cannot_become_whole(tmp_path: Path, place_of_files: Place) -> None:
    """Nor be added to: its objects may be gone already."""
    with open_store(tmp_path) as store:
        number = store.files.begin(KEY, 0.0, in_objects=True)
        file_id = store.files.append(number, 0, b"x", 0.0, quota=QUOTA)
        (_, [doomed]) = store.files.purge(3600.0)
        assert (doomed.id, doomed.num_bytes) == (file_id, 1)
        for call in (
            lambda: store.files.append(number, 1, b"x", 3600.0, quota=QUOTA),
            lambda: store.files.finish(number, "batch", "f", 3600.0, ttl_s=None),
        ):
            with pytest.raises(Exception, match="did not arrive in time"):
                call()
        assert store.files.purge(7199.0) == (0, [])
        assert store.files.purge(7200.0) == (1, [doomed])  # it could not be deleted before


def test_objects_that_are_away_pause_what_needs_them_and_no_more(
    tmp_path: Path, place_of_files: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503 on these routes, lines wait uncounted; all goes on once the objects are back."""
    is_away = False

    async def scenario() -> None:
        nonlocal is_away
        async with serving(tmp_path, file_store=place_of_files.url) as setup:
            client = client_of(setup)
            data = jsonl([line(f"r{n}") for n in range(5)])
            file = await client.files.create(file=("in", data), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint=ENDPOINT, completion_window="1h"
            )
            for name in ("put_async", "get_range_async", "delete_async"):
                call = getattr(objects_module.obstore, name)

                async def failing(*args: Any, call: Any = call, **kwargs: Any) -> Any:
                    if is_away:
                        raise OSError("connection refused by 10.1.2.3")
                    return await call(*args, **kwargs)

                if place_of_files.s3 is None:
                    monkeypatch.setattr(objects_module.obstore, name, failing)
            is_away = True
            if place_of_files.s3 is not None:
                place_of_files.s3.is_away = True
            for call in (
                lambda: client.files.create(file=("in", data), purpose="batch"),
                lambda: client.batches.create(
                    input_file_id=file.id, endpoint=ENDPOINT, completion_window="1h"
                ),
            ):
                with pytest.raises(openai.InternalServerError) as error:
                    await call()
                assert error.value.status_code == 503
                assert error.value.code == "batch_store_unavailable"
                assert "10.1.2.3" not in str(error.value) and "S3" not in str(error.value)
            asked = {"model": "m", "prompt": "hi"}
            assert (await setup.http.post("/v1/completions", json=asked)).status_code == 200
            assert (await client.files.retrieve(file.id)).bytes == len(data)
            response = await client.responses.create(model="m", input="hi", store=True)
            assert (await client.responses.retrieve(response.id)).status == "completed"
            num_before = len(setup.router.submits)
            async with working(setup) as work:
                await eventually(lambda: work._pause_until_s > 0)
                assert len(setup.router.submits) == num_before
                is_away = False
                if place_of_files.s3 is not None:
                    place_of_files.s3.is_away = False
                batch = await ended(client, batch.id)
            assert batch.request_counts.completed == 5

    run(scenario)


def test_a_line_that_is_lost_ends_as_an_error_and_others_go_on(
    tmp_path: Path, place_of_files: Place
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, file_store=place_of_files.url) as setup:
            client, batches = client_of(setup), []
            for name in ("lost", "there"):
                data = jsonl([line(f"{name}{n}") for n in range(2)])
                file = await client.files.create(file=("in", data), purpose="batch")
                batches.append(
                    await client.batches.create(
                        input_file_id=file.id, endpoint=ENDPOINT, completion_window="1h"
                    )
                )
            await Objects(place_of_files.url).delete(batches[0].input_file_id, 10**6)
            async with working(setup):
                lost, there = [await ended(client, batch.id) for batch in batches]
            assert (lost.request_counts.failed, there.request_counts.completed) == (2, 2)
            text = (await client.files.content(lost.error_file_id)).text
            for each in text.splitlines():
                assert json.loads(each)["response"]["body"]["error"]["code"] == "input_lost"

    run(scenario)


@pytest.mark.parametrize("place_of_files", ["s3"], indirect=True)
def test_lines_that_follow_one_another_are_read_at_once(
    tmp_path: Path, place_of_files: Place
) -> None:
    s3 = place_of_files.s3
    assert s3 is not None

    async def scenario() -> None:
        async with serving(tmp_path, file_store=place_of_files.url) as setup:
            client = client_of(setup)
            data = jsonl([line(f"r{n}") for n in range(40)])
            file = await client.files.create(file=("in", data), purpose="batch")
            await client.batches.create(
                input_file_id=file.id, endpoint=ENDPOINT, completion_window="1h"
            )
            s3.requests.clear()
            assert setup.service.store is not None
            lines = await setup.service.store.run(
                lambda s: s.jobs.lease(
                    *("north", s.jobs.begin("north", 0.0), 0.0),
                    lease_s=9.0,
                    max_lines=40,
                    max_bytes=10**6,
                )
            )
            texts = await contents_of(setup).texts(lines)
            assert [json.loads(texts[each.batch, each.number])["custom_id"] for each in lines] == [
                f"r{n}" for n in range(40)
            ]
            assert len(s3.requests) == 1

    run(scenario)


def test_what_cannot_be_used_is_said_in_one_line_at_the_start(
    tmp_path: Path, place_of_files: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = str(tmp_path / "store")
    (tmp_path / "file").write_text("")
    urls = [f"file://{tmp_path}/file/below", f"file://{tmp_path}/file"]
    if place_of_files.s3 is not None:
        urls = ["s3://absent/files"]
        urls.append(place_of_files.url)
    for url in urls:
        if url == place_of_files.url:
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
        with pytest.raises(StartupError) as error:
            prepare(location, url)
        assert str(error.value).startswith(f"--file-store {url}: ")
        assert "\n" not in str(error.value) and len(str(error.value)) < 400
    prepare(location).close()  # the store is not held by one that could not start


@pytest.mark.parametrize("place_of_files", ["s3"], indirect=True)
def test_an_environment_that_is_no_address_is_named(
    tmp_path: Path, place_of_files: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = ["…", "http://a b", "http://[x", "http://[:::]", "http://a:99999", "http://:9", "a"]
    cases = [("AWS_ENDPOINT_URL", text) for text in wrong] + [("AWS_REGION", "…")]
    for name, text in cases:
        with monkeypatch.context() as patch:
            patch.setenv(name, text)
            with pytest.raises(StartupError, match=f"{name} is no ") as error:
                prepare(str(tmp_path / "store"), place_of_files.url)
        assert text in str(error.value) and "\n" not in str(error.value)


def test_a_store_is_not_started_without_its_objects(tmp_path: Path, place_of_files: Place) -> None:
    async def upload() -> None:
        async with serving(tmp_path, file_store=place_of_files.url) as setup:
            await client_of(setup).files.create(file=("in", b"x" * 9), purpose="batch")

    run(upload)
    location = str(tmp_path / "store")
    with pytest.raises(StartupError, match="--file-store is missing"):
        prepare(location)
    with pytest.raises(StartupError, match="are not there"):
        prepare(location, place_of_files.url + "2")
    prepare(location, place_of_files.url).close()


def test_without_its_package_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "lightserve.batches.objects")
    with pytest.raises(
        StartupError, match=r"--file-store: obstore is missing: .* -m pip install 'obstore"
    ):
        prepare(str(tmp_path / "store"), "s3://bucket")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("bucket", "must be s3://BUCKET/PREFIX or file:///DIRECTORY, got 'bucket'"),
        ("s3://", "must be s3://BUCKET"),
        ("file://there/x", "must be s3://BUCKET"),
        ("https://bucket.s3.amazonaws.com/x", "must be s3://BUCKET"),
        ("s3://key:secret@bucket/x", "belong in the environment"),
        ("s3://bucket/x?secret=y", "belong in the environment"),
    ],
)
def test_flags_that_do_not_fit(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match="--file-store") as error:
        ServeConfig(batch_store="x", file_store=url)
    assert said in str(error.value)
    with pytest.raises(ConfigError, match="--file-store needs --batch-store"):
        ServeConfig(file_store="s3://bucket")


def test_a_full_disk_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError("Generic LocalFileSystem error: No space left on device (os error 28)\nmore")

    monkeypatch.setattr(objects_module.obstore, "put_async", full)
    with pytest.raises(StoreError) as error:
        asyncio.run(Objects(f"file://{tmp_path}/files").put("file-1", 0, b"x"))
    assert error.value.is_full and "\n" not in str(error.value)
