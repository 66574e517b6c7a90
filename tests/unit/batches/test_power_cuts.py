"""What a store has after a loss of power, and after errors of its disk."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from support.batch_store import (
    DAY_S,
    ENDPOINT,
    KEY,
    NOW_S,
    QUOTA,
    check_lines,
    jsonl,
    line,
    new_batch,
    open_store,
    upload,
)
from support.power_cuts import Disk, Image

from lightserve.batches.access import prepare, store_at
from lightserve.batches.contents import Store
from lightserve.batches.lines import result_line
from lightserve.batches.records import LeasedLine, LineSums, NewResponse, Outcome
from lightserve.batches.sqlite import SqliteDatabase
from lightserve.errors import StoreError

TABLES = ("files", "chunks", "batches", "lines", "responses", "stored", "owners", "leftovers")
State = dict[str, list[Any]]


def state(store: Store) -> State:
    """All that is in a store, but for ids that chance has made."""
    return {table: store.database.rows(f"SELECT * FROM {table} ORDER BY 1, 2") for table in TABLES}


class Life:
    """What a store goes through: each step is one transaction, which is acknowledged at its end."""

    NUM_LINES = 3

    def __init__(self, store: Store) -> None:
        self._store = store
        self._held: list[LeasedLine] = []
        self._epoch = 0
        self._batch = self._file = ""

    def steps(self) -> Iterator[Callable[[], object]]:
        """Yield what is to be called, one after the other."""
        jobs, files, data = self._store.jobs, self._store.files, self._data()
        yield lambda: files.begin(KEY, NOW_S)
        yield lambda: files.append(1, 0, data, NOW_S, quota=QUOTA)
        yield lambda: files.finish(1, "batch", "f", NOW_S, ttl_s=None)
        yield self._prepare
        yield lambda: jobs.add_lines(self._new, self._number, self._lines, 0)
        yield self._create
        yield self._begin
        for _ in range(self.NUM_LINES - 1):
            yield self._lease
            yield self._settle
        yield self._begin
        yield self._respond
        yield self._lease
        yield self._settle
        yield lambda: files.delete(KEY, jobs.get(KEY, self._batch, NOW_S).input_file_id, NOW_S)
        yield lambda: files.delete(KEY, str(jobs.get(KEY, self._batch, NOW_S).output_file_id), 0)

    def _data(self) -> bytes:
        body = {"prompt": "x" * 3000}
        return jsonl([line(f"r{number}", body=body) for number in range(self.NUM_LINES)])

    def _prepare(self) -> None:
        (file,), _ = self._store.files.page(KEY, NOW_S, limit=1)
        self._lines = check_lines(self._store.files, file, ENDPOINT, lambda name: None)
        self._new = new_batch(file)
        self._number = self._store.jobs.prepare(self._new, NOW_S)

    def _create(self) -> None:
        sums = LineSums()
        sums.add(self._lines)
        self._batch = self._store.jobs.create(self._new, self._number, sums, NOW_S).id

    def _begin(self) -> None:
        self._epoch = self._store.jobs.begin("north", NOW_S)

    def _lease(self) -> None:
        self._held = self._store.jobs.lease(
            *("north", self._epoch, NOW_S), lease_s=30.0, max_lines=1, max_bytes=10**6
        )

    def _settle(self) -> None:
        (held,) = self._held
        body = b'"%s"' % (b"y" * 5000)
        result = result_line(held, status=200, request_id="x", body=body)
        outcome = Outcome(batch=held.batch, number=held.number, result=result)
        assert self._store.jobs.settle("north", self._epoch, [outcome], NOW_S) == 0

    def _respond(self) -> None:
        new = NewResponse(
            id="resp_1", key_name=KEY, previous_id=None, input=b"[]", response=b'{"id":"resp_1"}'
        )
        self._store.responses.add(new, NOW_S, ttl_s=DAY_S, quota=QUOTA)


def recovered(image: Image, directory: Path) -> State:
    """What a server finds that starts after the power came back."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
    for name, data in image.items():
        (directory / Path(name).name).write_bytes(data)
    with open_store(directory) as store:
        return state(store)


def live(directory: Path, disk: Disk) -> tuple[list[State], list[tuple[int, Image]]]:
    """Return what the store held after each step, and every image with the steps before it."""
    images: list[tuple[int, Image]] = []
    with disk.mounted(), open_store(directory) as store:
        disk.images.clear()
        states = [state(store)]
        for number, step in enumerate(Life(store).steps()):
            step()
            states.append(state(store))
            images += [(number, image) for image in disk.images]
            disk.images.clear()
            images.append((number + 1, disk.image()))  # it was acknowledged
            images.append((number + 1, disk.image(keeps_some=True)))
    return states, images


def lost(directory: Path, disk: Disk) -> list[int]:
    """Numbers of the images in which something acknowledged is missing, or half there."""
    states, images = live(directory / "store", disk)
    return [
        index
        for index, (number, image) in enumerate(images)
        if recovered(image, directory / "found") not in states[number : number + 2]
    ]


def test_whenever_power_is_lost_what_was_acknowledged_is_there(tmp_path: Path) -> None:
    disk = Disk()
    assert lost(tmp_path, disk) == []
    assert disk.num_calls > 60


def test_a_store_that_does_not_sync_would_be_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = SqliteDatabase.__init__

    def unsafe(self: SqliteDatabase, *args: Any, **kwargs: Any) -> None:
        opened(self, *args, **kwargs)
        self.rows("PRAGMA synchronous=NORMAL")

    monkeypatch.setattr(SqliteDatabase, "__init__", unsafe)
    assert lost(tmp_path, Disk())


@pytest.mark.parametrize("failure", [apsw.IOError, apsw.FullError])
def test_an_error_of_the_disk_loses_and_halves_nothing(
    tmp_path: Path, failure: type[apsw.Error]
) -> None:
    """At many writes and syncs, until none is left to fail; then it goes on."""
    states, _ = live(tmp_path / "store", Disk())
    num_failed = 0
    for number in itertools.count(1, 17):
        directory, disk = tmp_path / str(number), Disk()
        num_done, has_failed = 0, False
        with disk.mounted():
            lock = prepare(str(directory))
            store = store_at(str(directory))
            disk.fails_at, disk.failure = disk.num_calls + number, failure
            try:
                for step in Life(store).steps():
                    step()
                    num_done += 1
            except StoreError as error:
                has_failed = True
                assert error.is_full == (failure is apsw.FullError)
            disk.fails_at = None
            store.database._connection.close(True)
        lock.close()
        with open_store(directory) as store:
            found = _shape(state(store))
            assert found in [_shape(each) for each in states[num_done : num_done + 2]]
            upload(store, b"more")
        if not has_failed:
            break
        num_failed += 1
    assert num_failed > 10


def _shape(held: State) -> State:
    """A state without ids, which chance makes."""
    ids = ("file-", "batch_")

    def known(value: Any) -> Any:
        if isinstance(value, bytes):
            return len(value)
        return "id" if isinstance(value, str) and value.startswith(ids) else value

    return {table: [tuple(map(known, row)) for row in rows] for table, rows in held.items()}
