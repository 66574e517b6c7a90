"""What goes wrong with batches elsewhere: thirteen scenarios, each with the work that it cost.

The names are those of the consistency harness of llm-d's batch gateway.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support.batch_store import (
    DAY_S,
    ENDPOINT,
    KEY,
    NOW_S,
    QUOTA,
    check_lines,
    content,
    create,
    jsonl,
    line,
    make_batch,
    new_batch,
    open_store,
    place,
    upload,
)
from support.dying_process import STEPS, CountingEngine, Process

from lightserve.batches import runner
from lightserve.batches.access import store_at
from lightserve.batches.contents import Store
from lightserve.batches.endings import Endings
from lightserve.batches.leasing import MAX_CRASHES
from lightserve.batches.lines import result_line
from lightserve.batches.records import BatchRecord, LeasedLine, NewResponse, Outcome
from lightserve.errors import InvalidRequest

pytestmark = pytest.mark.usefixtures("both_stores")
NUM_LINES = 4
IDS = {f"r{number}" for number in range(NUM_LINES)}


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_S", "GATHER_S", "STORE_RETRY_S"):
        monkeypatch.setattr(runner, name, 0.002)


def clock() -> float:
    return NOW_S


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def now(store: Store, batch: BatchRecord) -> BatchRecord:
    return store.jobs.get(KEY, batch.id, NOW_S)


async def finish(directory: Path, engine: CountingEngine, store: Store) -> None:
    """Let a process that dies of nothing work off what there is."""
    process = Process(directory, engine, clock=clock)
    await until(lambda: store.jobs.counts()[1]["in_progress"] == 0)
    await process.stop()


def check_whole(store: Store, batch: BatchRecord) -> None:
    """Each line has one result."""
    over = now(store, batch)
    assert (over.status, over.num_done, over.num_failed) == ("completed", NUM_LINES, 0)
    found = content(store, over.output_file_id)
    assert [each["custom_id"] for each in found] == sorted(IDS)
    assert [each["response"]["body"]["text"] for each in found] == sorted(IDS)


def done(leased: LeasedLine) -> Outcome:
    result = result_line(leased, status=200, request_id="x", body=b'"late"')
    return Outcome(batch=leased.batch, number=leased.number, result=result)


def lease(store: Store, owner: str, epoch: int, n: int) -> list[LeasedLine]:
    return store.jobs.lease(owner, epoch, NOW_S, lease_s=30.0, max_lines=n, max_bytes=10**6)


def test_terminal_overwrite(tmp_path: Path) -> None:
    """A result that comes when a batch has ended changes neither its status nor its files."""
    with open_store(tmp_path) as store:
        for end in ("cancelled", "expired"):
            batch = make_batch(store, NUM_LINES)
            epoch = store.jobs.begin("north", NOW_S)
            held = lease(store, "north", epoch, NUM_LINES)
            store.jobs.settle("north", epoch, [done(held[0])], NOW_S)
            if end == "cancelled":
                store.jobs.cancel(KEY, batch.id, NOW_S)
            else:
                store.jobs.expire(NOW_S + 2 * DAY_S)
            before = now(store, batch), content(store, now(store, batch).output_file_id)
            assert before[0].status == end
            late = store.jobs.settle("north", epoch, [done(each) for each in held], NOW_S)
            assert late == NUM_LINES
            assert (now(store, batch), content(store, now(store, batch).output_file_id)) == before


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_worker_crash_strands_job(tmp_path: Path, step: str, when: str) -> None:
    """Wherever the process dies, the next one ends the batch; what had a result is not computed
    again."""

    async def scenario() -> None:
        with open_store(tmp_path) as store:
            batch, engine = make_batch(store, NUM_LINES), CountingEngine()
            await Process(tmp_path, engine, dies=f"{when} {step}", clock=clock).death()
            had_results = store.jobs.counts()[0]["done"]
            before = Counter(engine.answered)
            await finish(tmp_path, engine, store)
            check_whole(store, batch)
            again = engine.answered - before
            assert again.total() == NUM_LINES - had_results
            assert max(engine.answered.values()) <= 2

    run(scenario)


def test_cancel_reverted(tmp_path: Path) -> None:
    """A batch that was cancelled stays so though the process that ran it died: nothing is computed
    after it has begun anew."""

    async def scenario() -> None:
        with open_store(tmp_path) as store:
            batch, engine = make_batch(store, NUM_LINES), CountingEngine()
            engine.gate.clear()
            process = Process(tmp_path, engine, clock=clock)
            await until(lambda: engine.tokens.total() == 2)
            await process.kill()
            store.jobs.cancel(KEY, batch.id, NOW_S)
            engine.gate.set()
            before = engine.tokens.total()
            await finish(tmp_path, engine, store)
            assert now(store, batch).status == "cancelled" and engine.tokens.total() == before

    run(scenario)


def test_duplicate_execution(tmp_path: Path) -> None:
    """A result that was written is neither computed again nor replaced, if it is sent twice."""

    async def scenario() -> None:
        with open_store(tmp_path) as store:
            batch, engine = make_batch(store, NUM_LINES), CountingEngine()
            await finish(tmp_path, engine, store)
            assert engine.answered == Counter(IDS)
            epoch = store.jobs.begin("north", NOW_S)
            assert lease(store, "north", epoch, NUM_LINES) == []
            check_whole(store, batch)

            twice = make_batch(store, NUM_LINES)
            held = lease(store, "north", epoch, NUM_LINES)
            outcomes = [done(each) for each in held]
            assert store.jobs.settle("north", epoch, outcomes * 2, NOW_S) == NUM_LINES
            assert now(store, twice).num_done == NUM_LINES
            assert len(content(store, now(store, twice).output_file_id)) == NUM_LINES

    run(scenario)


def test_cancel_racing_completion(tmp_path: Path) -> None:
    """A cancellation and the last results, at once from two connections: one of both wins."""
    with open_store(tmp_path) as store:
        other = store_at(place(tmp_path))
        statuses = set()
        for attempt in range(12):
            batch = make_batch(store, NUM_LINES)
            epoch = store.jobs.begin("north", NOW_S)
            outcomes = [done(each) for each in lease(store, "north", epoch, NUM_LINES)]
            start = threading.Barrier(2)
            late: list[int] = []

            def settle() -> None:
                start.wait()  # noqa: B023
                late.append(other.jobs.settle("north", epoch, outcomes, NOW_S))  # noqa: B023

            thread = threading.Thread(target=settle)
            thread.start()
            if attempt % 2:
                start.wait()
                refused = _cancel(store, batch)
                thread.join()
            else:
                start.wait()
                thread.join()
                refused = _cancel(store, batch)
            over = now(store, batch)
            statuses.add(over.status)
            assert refused == (over.status == "completed") == (late == [0])
            found = content(store, over.output_file_id)
            assert len(found) == over.num_done == (NUM_LINES if refused else 0)
        other.database.close()
        assert "completed" in statuses


def _cancel(store: Store, batch: BatchRecord) -> bool:
    """Return whether it was refused."""
    try:
        store.jobs.cancel(KEY, batch.id, NOW_S)
    except InvalidRequest as error:
        assert error.status == 409
        return True
    return False


def test_recovery_crash_loop(tmp_path: Path) -> None:
    """A line with which the process dies each time ends as an error; others are answered."""

    async def scenario() -> None:
        with open_store(tmp_path) as store:
            batch, engine = make_batch(store, NUM_LINES), CountingEngine()
            num_deaths = 0
            while store.jobs.counts()[1]["in_progress"]:
                process = Process(tmp_path, engine, clock=clock)
                seen = engine.tokens["r2"]
                await until(
                    lambda: (
                        engine.tokens["r2"] > seen  # noqa: B023
                        or not store.jobs.counts()[1]["in_progress"]
                    )
                )
                if engine.tokens["r2"] > seen:
                    num_deaths += 1
                    await process.kill()
                else:
                    await process.stop()
            over = now(store, batch)
            assert (over.status, over.num_done, over.num_failed) == ("completed", 3, 1)
            (error,) = content(store, over.error_file_id)
            assert (error["custom_id"], error["error"]["code"]) == ("r2", "process_lost")
            assert num_deaths == MAX_CRASHES
            assert all(engine.tokens[each] <= 3 * MAX_CRASHES for each in IDS)

    run(scenario)


def test_replicas_execute_once(tmp_path: Path) -> None:
    """Two processes with names of their own share the lines: each is computed once."""

    async def scenario() -> None:
        with open_store(tmp_path) as store:
            batch, engine = make_batch(store, NUM_LINES), CountingEngine()
            processes = [
                Process(tmp_path, engine, owner=owner, clock=clock) for owner in ("north", "south")
            ]
            await until(lambda: store.jobs.counts()[1]["in_progress"] == 0)
            for process in processes:
                await process.stop()
            check_whole(store, batch)
            assert engine.answered == Counter(IDS)
            assert set(engine.tokens.values()) == {3}

    run(scenario)


def test_create_crash_after_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is made whole or not at all; asked for again by its key it is one batch."""

    async def scenario() -> None:
        with open_store(tmp_path) as store:
            file = upload(store, jsonl([line(each) for each in sorted(IDS)]))
            lines = check_lines(store.files, file, ENDPOINT, lambda name: None)
            new = new_batch(file, idempotency_key="k")

            def dies(*args: object) -> None:
                raise MemoryError

            with monkeypatch.context() as patched:  # the process dies before it has committed
                patched.setattr(type(store.database), "write_many", dies)
                with pytest.raises(MemoryError):
                    create(store, new, lines, NOW_S)
            assert store.jobs.page(KEY, NOW_S, limit=9) == ([], False)
            assert store.database.value("SELECT count(*) FROM lines") == 0
            made = create(store, new, lines, NOW_S)  # the answer is lost
            assert create(store, new, lines, NOW_S + 60) == made
            assert len(store.jobs.page(KEY, NOW_S, limit=9)[0]) == 1
            engine = CountingEngine()
            await finish(tmp_path, engine, store)
            check_whole(store, made)
            assert engine.answered == Counter(IDS)

    run(scenario)


def test_cancel_event_lost(tmp_path: Path) -> None:
    """No event says that a batch is cancelled: its process finds out, and computes nothing more."""

    async def scenario() -> None:
        with open_store(tmp_path) as store:
            batch, engine = make_batch(store, NUM_LINES), CountingEngine()
            engine.gate.clear()
            process = Process(tmp_path, engine, clock=clock)
            await until(lambda: engine.tokens.total() == 2)
            store.jobs.cancel(KEY, batch.id, NOW_S)
            await until(lambda: not process.runner._tasks)
            engine.gate.set()
            await asyncio.sleep(0.02)
            assert engine.tokens.total() == 2 and not engine.answered
            await process.stop()
            assert now(store, batch).status == "cancelled"

    run(scenario)


def test_orphaned_blob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents without a file are not left by an upload that dies, nor by a deletion that does."""
    with open_store(tmp_path) as store:
        number = store.files.begin(KEY, NOW_S)
        store.files.append(number, 0, b"x", NOW_S, quota=QUOTA)  # the frontend dies
        file = upload(store, b"y")

        def dies(*args: object) -> None:
            raise MemoryError

        with monkeypatch.context() as patched:
            write = type(store.database).write
            patched.setattr(
                type(store.database),
                "write",
                lambda self, sql, *values: (dies if "DELETE FROM files" in sql else write)(
                    *(self, sql, *values)
                ),
            )
            with pytest.raises(MemoryError):
                store.files.delete(KEY, file.id, NOW_S)
        assert store.files.read(file) == (b"y", None)
        store.files.delete(KEY, file.id, NOW_S)
        assert store.files.purge(NOW_S + DAY_S) == (1, [])
        for table in ("chunks", "files"):
            assert store.database.value(f"SELECT count(*) FROM {table}") == 0
        batch = make_batch(store, NUM_LINES)
        epoch = store.jobs.begin("north", NOW_S)
        held = lease(store, "north", epoch, NUM_LINES)
        store.jobs.settle("north", epoch, [done(each) for each in held], NOW_S)
        store.files.delete(KEY, str(now(store, batch).output_file_id), NOW_S)
        assert store.database.value("SELECT count(*) FROM lines") == 0


def test_finalization_strand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last result and the end of its batch are one: there is no state between both."""
    with open_store(tmp_path) as store:
        batch = make_batch(store, NUM_LINES)
        epoch = store.jobs.begin("north", NOW_S)
        outcomes = [done(each) for each in lease(store, "north", epoch, NUM_LINES)]

        def dies(*args: object) -> None:
            raise MemoryError

        with monkeypatch.context() as patched:
            patched.setattr(Endings, "end", dies)
            with pytest.raises(MemoryError):
                store.jobs.settle("north", epoch, outcomes, NOW_S)
        assert (now(store, batch).status, now(store, batch).num_done) == ("in_progress", 0)
        epoch = store.jobs.begin("north", NOW_S)
        outcomes = [done(each) for each in lease(store, "north", epoch, NUM_LINES)]
        store.jobs.settle("north", epoch, outcomes, NOW_S)
        over = now(store, batch)
        assert over.status == "completed"
        assert len(content(store, over.output_file_id)) == NUM_LINES


@pytest.mark.parametrize("how", ["lease is over", "process began anew"])
def test_zombie_owner_burns_inference(tmp_path: Path, how: str) -> None:
    """One that was stopped while others took its lines over gives them up as soon as it goes on."""

    async def scenario() -> None:
        with open_store(tmp_path) as store:
            batch, engine = make_batch(store, 2), CountingEngine()
            engine.gate.clear()
            process = Process(tmp_path, engine, clock=clock)
            await until(lambda: engine.tokens.total() == 2)
            if how == "lease is over":
                store.jobs.begin("other", NOW_S)
                late_s = NOW_S + runner.LEASE_S + 1
                held = store.jobs.lease(
                    *("other", 1, late_s), lease_s=30.0, max_lines=2, max_bytes=10**6
                )
                assert len(held) == 2
                store.jobs.settle("other", 1, [done(each) for each in held[:1]], NOW_S)
            else:
                store.jobs.begin(runner.OWNER, NOW_S)
            engine.is_ready = False  # it leases nothing more
            await until(lambda: not process.runner._tasks)
            engine.gate.set()
            await asyncio.sleep(0.02)
            assert engine.tokens.total() == 2 and not engine.answered
            assert process.runner.counts.num_leases_lost == 2
            await process.stop()
            assert now(store, batch).num_done == (how == "lease is over")

    run(scenario)


def test_a_line_that_is_leased_again_before_it_was_given_up_is_computed_once(
    tmp_path: Path,
) -> None:
    """Its lease was over by another's clock, and it is this process's again before it looks."""

    async def scenario() -> None:
        with open_store(tmp_path) as store:
            batch, engine = make_batch(store, 1), CountingEngine()
            engine.gate.clear()
            process = Process(tmp_path, engine, clock=clock)
            await until(lambda: engine.tokens.total() == 1)
            free = "UPDATE lines SET state = 'queued', owner = NULL"
            await process.thread.run(lambda store: store.database.write(free))
            await process.runner._lease()
            await until(lambda: engine.tokens.total() == 2)
            engine.gate.set()
            await until(lambda: now(store, batch).status == "completed")
            assert engine.answered.total() == 1
            assert not process.runner._tasks and process.runner._num_bytes == 0
            await process.stop()

    run(scenario)


def test_async_result_destruction(tmp_path: Path) -> None:
    """The result of a response in the background stays: it is read as often as it is asked for,
    though processes die and it is cancelled late."""

    async def scenario() -> None:
        with open_store(tmp_path) as store:
            text = jsonl([line("resp_1", url="/v1/responses")])
            queued = b'{"id":"resp_1","status":"queued","output":[],"background":true}'
            new = NewResponse(
                id="resp_1",
                key_name=KEY,
                previous_id=None,
                input=b"[]",
                response=queued,
                request=text,
            )
            store.jobs.respond(new, NOW_S, ttl_s=DAY_S, quota=QUOTA)
            engine = CountingEngine()
            await Process(tmp_path, engine, dies="after settle", clock=clock).death()
            await finish(tmp_path, engine, store)
            first = store.responses.get(KEY, "resp_1", NOW_S)
            assert b'"text"' in first and engine.answered.total() == 1
            assert store.jobs.cancel_response(KEY, "resp_1", NOW_S) == first
            assert store.responses.purge(NOW_S + DAY_S - 1) == 0
            assert store.responses.get(KEY, "resp_1", NOW_S + DAY_S - 1) == first

    run(scenario)


def test_a_clock_that_is_put_forward_and_back(tmp_path: Path) -> None:
    """By an hour each time that it is read: nothing ends early, waits, or is doubled."""

    async def scenario() -> None:
        offsets = itertools.cycle([0.0, 3600.0, -3600.0])
        with open_store(tmp_path) as store:
            batch, engine = make_batch(store, NUM_LINES), CountingEngine()
            process = Process(tmp_path, engine, clock=lambda: NOW_S + next(offsets))
            await until(lambda: store.jobs.counts()[1]["in_progress"] == 0)
            await process.stop()
            check_whole(store, batch)
            assert engine.answered == Counter(IDS)

    run(scenario)


def test_what_was_lost_does_not_wait_for_a_clock_that_was_put_back(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        make_batch(store, 1)
        epoch = store.jobs.begin("north", NOW_S)
        for _ in range(2):
            (held,) = lease(store, "north", epoch, 1)
            lost = Outcome(batch=held.batch, number=held.number, result=None, is_lost=True)
            store.jobs.settle("north", epoch, [lost], NOW_S)
        assert lease(store, "north", epoch, 1) == []  # it waits a minute
        back = store.jobs.lease(
            "north", epoch, NOW_S - 3600, lease_s=30.0, max_lines=1, max_bytes=10**6
        )
        assert len(back) == 1
