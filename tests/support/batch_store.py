"""A batch store of its own, files to put into it, and a frontend that has it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from lightserve.batches import database, postgres, sqlite
from lightserve.batches.access import StoreThread, prepare, store_at
from lightserve.batches.contents import Store
from lightserve.batches.files import START, Cursor, Files
from lightserve.batches.lines import LineCheck
from lightserve.batches.process import InnerRoutes
from lightserve.batches.records import (
    CHUNK_BYTES,
    BatchRecord,
    FileRecord,
    LineSums,
    NewBatch,
    NewLine,
)
from lightserve.batches.runner import Room, Runner
from lightserve.errors import InvalidRequest
from support.fake_router import Setup, frontend, says
from support.postgres import PostgresServer

KEY = "alice"
ENDPOINT = "/v1/completions"
QUOTA = 10**9
NOW_S = 1_000_000.0
DAY_S = 86_400


class Places:
    """Where the stores of a test are: `both_stores` in `conftest.py` puts them elsewhere."""

    postgres: PostgresServer | None = None
    """Directories stand for databases of this server."""


def place(directory: Path) -> str:
    """The store that stands for a directory, as --batch-store names it."""
    if Places.postgres is None:
        return str(directory)
    return Places.postgres.database(hashlib.sha256(str(directory).encode()).hexdigest()[:32])


@contextmanager
def open_store(directory: Path, **options: Any) -> Iterator[Store]:
    """Make a store, and open it as a process does."""
    with prepare(place(directory)):
        store = store_at(place(directory), **options)
        try:
            yield store
        finally:
            store.database.close()


def line(custom_id: str, **changes: Any) -> dict[str, Any]:
    """A line of an input file."""
    body = {"model": "m", "prompt": "hi", **changes.pop("body", {})}
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body, **changes}


def jsonl(lines: Sequence[Any]) -> bytes:
    """The lines of a file; texts as they are."""
    return b"\n".join(
        text if isinstance(text, bytes) else json.dumps(text).encode() for text in lines
    )


def upload(store: Store, data: bytes, *, key: str = KEY, now_s: float = NOW_S) -> FileRecord:
    """Put a file into the store."""
    number = store.files.begin(key, now_s)
    for chunk in range((len(data) + CHUNK_BYTES - 1) // CHUNK_BYTES):
        piece = data[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
        store.files.append(number, chunk, piece, now_s, quota=QUOTA)
    return store.files.finish(number, "batch", "in.jsonl", now_s, ttl_s=None)


def new_batch(file: FileRecord, **changes: Any) -> NewBatch:
    """What is asked for."""
    values: dict[str, Any] = {
        "key_name": KEY,
        "endpoint": ENDPOINT,
        "input_file_id": file.id,
        "window": "24h",
        "window_s": DAY_S,
        "metadata": None,
        "output_ttl_s": DAY_S,
        "idempotency_key": None,
        "request_digest": "x",
    }
    return NewBatch(**(values | changes))


def check_lines(
    files: Files, file: FileRecord, endpoint: str, check_model: Callable[[str], None]
) -> list[NewLine]:
    """The lines of a file that is checked at once."""
    check = LineCheck(endpoint, check_model)
    lines = [line for piece in pieces_of(files, file) for line in check.add(piece)]
    return lines + check.finish()


def create(store: Store, new: NewBatch, lines: Sequence[NewLine], now_s: float) -> BatchRecord:
    """Make a batch of lines that have been checked."""
    if (known := store.jobs.find_repeated(new, now_s)) is not None:
        return known
    number, sums = store.jobs.prepare(new, now_s), LineSums()
    try:
        store.jobs.add_lines(new, number, lines, 0)
        sums.add(lines)
        return store.jobs.create(new, number, sums, now_s)
    except InvalidRequest:
        store.jobs.drop(number)
        raise


def pieces_of(files: Files, file: FileRecord) -> Iterator[bytes]:
    """What is in a file, in rows."""
    cursor: Cursor | None = START
    while cursor is not None:
        found = files.read(file, cursor)
        assert found is not None
        piece, cursor = found
        yield piece


def make_batch(store: Store, num_lines: int, **changes: Any) -> BatchRecord:
    """Upload so many lines, and make a batch of them."""
    file = upload(store, jsonl([line(f"r{number}") for number in range(num_lines)]))
    lines = check_lines(store.files, file, ENDPOINT, lambda name: None)
    return create(store, new_batch(file, **changes), lines, NOW_S)


def content(store: Store, file_id: str | None, *, key: str = KEY) -> list[dict[str, Any]]:
    """The objects in a file of results; none if there is no file."""
    if file_id is None:
        return []
    file = store.files.get(key, file_id, NOW_S)
    data = b"".join(pieces_of(store.files, file))
    assert len(data) == file.num_bytes
    return [json.loads(text) for text in data.splitlines()]


@asynccontextmanager
async def serving(tmp_path: Path, answer: Any = None, **flags: Any) -> AsyncIterator[Setup]:
    """A frontend with a store, to which nothing puts lines to work yet."""
    store = place(tmp_path / "store")
    flags = {"batch_store": store, "served_model_name": "m", **flags}
    with prepare(store, flags.get("file_store", "")):
        async with frontend(answer or says([300, 301, 2]), **flags) as setup:
            del setup.http.headers["content-type"]
            yield setup


@asynccontextmanager
async def working(setup: Setup, **options: Any) -> AsyncIterator[Runner]:
    """The batches process's own part, in this one, with the frontend's router."""
    config = setup.service.config
    store = StoreThread(config.batch_store, file_store=config.file_store)
    options = {"max_in_flight": 4, "room": Room(), **options}
    runner = Runner(store, InnerRoutes(setup.service, options["room"]), **options)
    task = asyncio.create_task(runner.serve())
    try:
        yield runner
    finally:
        runner.should_exit = True
        await task
        store.close()


def client_of(setup: Setup, key: str = "none") -> openai.AsyncOpenAI:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app=setup.app))
    return openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key=key, http_client=http, max_retries=0
    )


def next_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this lightserve know one version of the schema more, with another column of files."""
    more = "ALTER TABLE files ADD COLUMN more INTEGER NOT NULL DEFAULT 7;"
    monkeypatch.setattr(database, "UPGRADES", (*database.UPGRADES, more))
    version = database.SCHEMA_VERSION + 1
    for module in (database, sqlite, postgres):
        monkeypatch.setattr(module, "SCHEMA_VERSION", version)
