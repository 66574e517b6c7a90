"""What is PostgreSQL's own of a batch store: several servers, and a database that goes away."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path

import psycopg
import pytest
from support.batch_store import (
    KEY,
    NOW_S,
    Places,
    content,
    make_batch,
    open_store,
    place,
    serving,
    upload,
)
from support.dying_process import CountingEngine, Process
from support.postgres import PostgresServer

from lightserve.batches import postgres as postgres_store
from lightserve.batches import runner
from lightserve.batches.access import listen, prepare, store_at
from lightserve.batches.contents import Store
from lightserve.batches.database import FILE_BYTES, SCHEMA_VERSION
from lightserve.batches.lines import result_line
from lightserve.batches.records import LeasedLine, Outcome
from lightserve.config import ServeConfig
from lightserve.errors import ConfigError, InvalidRequest, StartupError, StoreError


@pytest.fixture(autouse=True)
def places(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Places, "postgres", postgres)
    for name in ("POLL_S", "GATHER_S", "STORE_RETRY_S"):
        monkeypatch.setattr(runner, name, 0.002)
    monkeypatch.setattr("lightserve.batches.access.REST_S", 0.0)


def clock() -> float:
    return NOW_S


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def done(leased: LeasedLine) -> Outcome:
    result = result_line(leased, status=200, request_id="x", body=b'"ok"')
    return Outcome(batch=leased.batch, number=leased.number, result=result)


def lease(store: Store, owner: str, n: int, epoch: int = 1) -> list[LeasedLine]:
    return store.jobs.lease(owner, epoch, NOW_S, lease_s=30.0, max_lines=n, max_bytes=10**6)


def test_a_schema_is_made_once_and_a_newer_one_refused(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        file = upload(store, b"x")
        prepare(place(tmp_path)).close()
        assert store.files.read(file) == (b"x", None)
        store.database.write("UPDATE store SET version = ?", SCHEMA_VERSION + 1)
        with pytest.raises(StartupError, match="written by a newer one"):
            prepare(place(tmp_path))
        with pytest.raises(StoreError, match=f"version {SCHEMA_VERSION + 1}"):
            store_at(place(tmp_path))


def test_servers_that_start_at_once_make_one_schema(tmp_path: Path) -> None:
    location, errors = place(tmp_path), []

    def start() -> None:
        try:
            prepare(location).close()
        except StartupError as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    store_at(location).database.close()


@pytest.mark.parametrize(
    "location",
    ["postgresql://store@127.0.0.1:1/x", "postgresql://store@127.0.0.1:99999/x", "none"],
)
def test_a_database_that_cannot_be_used_says_so_in_one_line(
    location: str, postgres: PostgresServer
) -> None:
    if location == "none":
        location = postgres.database("there").replace("/there", "/absent")
    with pytest.raises(StartupError) as error:
        prepare(location)
    assert str(error.value).startswith(f"--batch-store {location}: ")
    assert "\n" not in str(error.value)


def test_without_its_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.delitem(sys.modules, "lightserve.batches.postgres")
    with pytest.raises(
        StartupError, match=r"postgresql://…: psycopg is missing: .* -m pip install 'psycopg"
    ):
        prepare("postgresql://h/x")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"batch_store": "postgresql://u:p@h/x"}, "must have no password"),
        ({"batch_store": "postgresql://u@h/x?password=p"}, "must have no password"),
        ({"batch_store": "postgresql://u@h/x?sslpassword=p"}, "must have no password"),
        ({"batch_store": "POSTGRESQL://u:p@h/x"}, "got POSTGRESQL://…$"),
        ({"batch_store": "postgres+psycopg://u:p@h/x"}, "got postgres.psycopg://…$"),
        (
            {"batch_store": "postgresql://u@h/x", "batch_min_free_bytes": 1},
            "--batch-min-free-bytes needs --batch-store DIRECTORY",
        ),
    ],
)
def test_flags_that_do_not_fit(flags: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ServeConfig(**flags)  # type: ignore[arg-type]
    ServeConfig(batch_store="postgresql://u@h:5432/x")


def test_leases_at_once_share_the_lines_and_results_at_once_count_all(tmp_path: Path) -> None:
    """Four servers take and answer lines of one batch, all at the same time."""
    owners, num_lines = ("a", "b", "c", "d"), 200
    with open_store(tmp_path) as store:
        batch = make_batch(store, num_lines)
        taken: list[int] = []
        errors: list[Exception] = []

        def serve(owner: str) -> None:
            try:
                own = store_at(place(tmp_path))
                epoch = own.jobs.begin(owner, NOW_S)
                while lines := lease(own, owner, 7, epoch):
                    taken.extend(each.number for each in lines)
                    assert own.jobs.settle(owner, epoch, [done(each) for each in lines], NOW_S) == 0
                own.database.close()
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=serve, args=(owner,)) for owner in owners]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert sorted(taken) == list(range(num_lines))
        over = store.jobs.get(KEY, batch.id, NOW_S)
        assert (over.status, over.num_done) == ("completed", num_lines)
        assert len(content(store, over.output_file_id)) == num_lines


def test_what_a_transaction_holds_is_passed_over_and_not_waited_for(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        make_batch(store, 5)
        other = store_at(place(tmp_path))
        store.jobs.begin("a", NOW_S), other.jobs.begin("b", NOW_S)
        with store.database.transaction(is_shared=True):
            held = store.database.rows(
                f"SELECT number FROM lines ORDER BY number LIMIT 2{store.database.skip_locked}"
            )
            assert held == [(0,), (1,)]
            assert [each.number for each in lease(other, "b", 9)] == [2, 3, 4]
        assert [each.number for each in lease(other, "b", 9)] == [0, 1]
        other.database.close()


def test_one_that_stops_inside_a_transaction_holds_no_other_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = postgres_store._SETTINGS.replace("'5s'", "'50ms'")
    with open_store(tmp_path) as store:
        make_batch(store, 1)
        with monkeypatch.context() as patched:
            patched.setattr(postgres_store, "_SETTINGS", settings)
            stopped = store_at(place(tmp_path))
        with pytest.raises(StoreError), stopped.database.transaction():
            stopped.database.write("UPDATE lines SET state = 'done'")
            store.jobs.begin("a", NOW_S)  # it waits until the other has lost its transaction
            assert len(lease(store, "a", 9)) == 1
            stopped.database.write("UPDATE lines SET state = 'done'")
        assert store.jobs.counts()[0]["leased"] == 1
        with pytest.raises(StoreError):
            stopped.database.close()
            stopped.database.rows("SELECT 1")


def test_two_servers_share_a_batch_and_one_that_is_killed_leaves_nothing_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = NOW_S

    async def scenario() -> None:
        nonlocal now_s
        with open_store(tmp_path) as store:
            batch, engine = make_batch(store, 8), CountingEngine()
            engine.gate.clear()
            north, south = (
                Process(tmp_path, engine, owner=owner, clock=lambda: now_s)
                for owner in ("north", "south")
            )
            await until(lambda: store.jobs.counts()[0]["leased"] == 4)
            await until(lambda: engine.tokens.total() == 4)
            await north.kill()
            engine.gate.set()
            await until(lambda: store.jobs.counts()[0]["done"] == 6)
            assert store.jobs.counts()[0]["leased"] == 2  # those of the dead one
            monkeypatch.setattr(runner, "RENEW_S", 0.002)
            now_s += runner.LEASE_S + 1
            await until(lambda: store.jobs.counts()[1]["in_progress"] == 0)
            await south.stop()
            over = store.jobs.get(KEY, batch.id, NOW_S)
            assert (over.status, over.num_done, over.num_failed) == ("completed", 8, 0)
            found = Counter(each["custom_id"] for each in content(store, over.output_file_id))
            assert found == Counter(f"r{number}" for number in range(8))
            assert engine.answered == found  # what the dead one had begun was computed once

    run(scenario)


def test_one_that_cannot_reach_the_store_stops_when_its_lease_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even while it waits for an answer of the store; then it begins anew."""
    monkeypatch.setattr(runner, "LEASE_S", 0.3)
    monkeypatch.setattr(runner, "RENEW_S", 0.05)

    async def scenario() -> None:
        with open_store(tmp_path) as store:
            batch, engine = make_batch(store, 2), CountingEngine()
            engine.gate.clear()
            process = Process(tmp_path, engine, owner="north", clock=clock)
            await until(lambda: engine.tokens.total() == 2)
            with store.database.transaction():  # all other writes wait
                await until(lambda: process.runner._is_lease_over)
                await until(lambda: not process.runner._tasks)
                assert process.runner.counts.num_leases_lost == 2
            assert not engine.answered and engine.tokens.total() == 2
            engine.gate.set()
            await until(lambda: store.jobs.counts()[1]["in_progress"] == 0)
            await process.stop()
            assert len(content(store, store.jobs.get(KEY, batch.id, NOW_S).output_file_id)) == 2

    run(scenario)


def test_a_database_that_goes_away_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503 on its routes alone; a batch goes on when it is back."""
    server = PostgresServer()
    monkeypatch.setattr(Places, "postgres", server)

    async def scenario() -> None:
        with open_store(tmp_path / "store") as store:
            batch = make_batch(store, 6)
        async with serving(tmp_path) as setup:
            engine = CountingEngine()
            engine.gate.clear()
            process = Process(tmp_path / "store", engine, owner="north", clock=clock)
            await until(lambda: engine.tokens.total() == 2)
            server.stop("immediate")
            response = await setup.http.get("/v1/batches")
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "batch_store_unavailable"
            assert "127.0.0.1" not in response.text and "postgres" not in response.text
            asked = {"model": "m", "prompt": "hi"}
            assert (await setup.http.post("/v1/completions", json=asked)).status_code == 200
            server.start()
            engine.gate.set()
            store = store_at(place(tmp_path / "store"))
            await until(lambda: store.jobs.counts()[1]["in_progress"] == 0)
            await process.stop()
            assert (await setup.http.get("/v1/batches")).status_code == 200
            monkeypatch.setattr("lightserve.batches.access.IDLE_S", 0.0)
            store.database.close()
            server.stop("immediate")  # started again before it is asked for anything
            server.start()
            assert (await setup.http.get("/v1/batches")).status_code == 200
            store = store_at(place(tmp_path / "store"))
            over = store.jobs.get(KEY, batch.id, NOW_S)
            assert (over.status, over.num_done) == ("completed", 6)
            assert len(content(store, over.output_file_id)) == 6
            store.database.close()

    try:
        run(scenario)
    finally:
        server.close()


def test_a_hint_wakes_every_server_and_a_lost_one_costs_no_more_than_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two servers that look for work once a year, the one that listens has it at once."""

    async def scenario() -> None:
        with open_store(tmp_path) as store:
            engine = CountingEngine()
            monkeypatch.setattr(runner, "POLL_S", 3e7)
            process = Process(tmp_path, engine, owner="north", clock=clock)
            await until(lambda: process.runner._due_s.get(process.runner._look) is not None)
            loop, hints = asyncio.get_running_loop(), []

            def on_hint() -> None:
                hints.append(1)
                loop.call_soon_threadsafe(process.runner.wake)

            with listen(place(tmp_path), on_hint):
                listening = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%%'"
                await until(lambda: store.database.value(listening) > 0)
                batch = make_batch(store, 1)
                await until(lambda: store.jobs.counts()[1]["in_progress"] == 0)
                made = len(hints)
                assert made > 0
                make_batch(store, 1, idempotency_key="k")
                await until(lambda: len(hints) > made)
            unheard = make_batch(store, 1)  # no more is heard of
            monkeypatch.setattr(runner, "POLL_S", 0.002)
            process.runner._due_s.clear()
            process.runner._wake.set()
            await until(lambda: store.jobs.get(KEY, unheard.id, NOW_S).status == "completed")
            await process.stop()
            assert store.jobs.get(KEY, batch.id, NOW_S).status == "completed"

    run(scenario)


def test_hints_come_again_after_the_database_was_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_store, "HINT_WAIT_S", 0.02)
    with open_store(tmp_path) as store:
        hints: list[int] = []
        with listen(place(tmp_path), lambda: hints.append(1)):
            for _ in range(2):
                num_before, end_s = len(hints), time.monotonic() + 60
                while len(hints) == num_before and time.monotonic() < end_s:
                    with store.database.transaction():
                        store.database.notify()
                    time.sleep(0.01)
                assert len(hints) > num_before
                store.database.rows(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE pid != pg_backend_pid() AND query LIKE 'LISTEN%%'"
                )


def test_an_owner_that_is_gone_for_long_is_forgotten(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        make_batch(store, 1)
        store.jobs.begin("old", NOW_S), store.jobs.begin("holds", NOW_S)
        assert len(lease(store, "holds", 1)) == 1
        store.jobs.begin("new", NOW_S + 2 * 86_400)
        names = {name for (name,) in store.database.rows("SELECT name FROM owners")}
        assert names == {"holds", "new"}


def test_a_batch_is_the_same_whichever_server_is_asked(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        batch = make_batch(store, 2)
        other = store_at(place(tmp_path))
        assert other.jobs.get(KEY, batch.id, NOW_S) == batch
        assert other.jobs.cancel(KEY, batch.id, NOW_S).status == "cancelled"
        with pytest.raises(InvalidRequest):
            other.jobs.get("bob", batch.id, NOW_S)
        assert store.jobs.get(KEY, batch.id, NOW_S).status == "cancelled"
        other.database.close()


def test_values_are_what_was_written(tmp_path: Path) -> None:
    """Sums are whole numbers, and bytes stay what they are."""
    with open_store(tmp_path) as store:
        data = bytes(range(256)) * 3
        file = upload(store, data)
        assert store.files.read(file) == (data, None)
        total = store.database.value("SELECT sum(num_bytes) FROM files")
        assert total == len(data) and isinstance(total, int)
        with psycopg.connect(place(tmp_path)) as connection:
            (found,) = connection.execute("SELECT num_bytes FROM lightserve.stored").fetchall()
        assert found == (len(data) + len("in.jsonl") + FILE_BYTES,)


def test_a_database_without_space_is_full(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        raise_full = "DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '53100'; END $$"
        with pytest.raises(StoreError) as error:
            store.database.write(raise_full)
        assert error.value.is_full


def test_what_clients_write_is_alone_and_what_servers_do_is_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path) as store:
        settings = postgres_store._SETTINGS.replace("'10000ms'", "'50ms'")
        monkeypatch.setattr(postgres_store, "_SETTINGS", settings)
        other = store_at(place(tmp_path))
        for first, second, is_refused in (
            (False, False, True),
            (False, True, True),
            (True, False, True),
            (True, True, False),
        ):
            with store.database.transaction(is_shared=first):
                expected = pytest.raises(StoreError) if is_refused else nullcontext()
                with expected, other.database.transaction(is_shared=second):
                    pass
        other.database.close()
