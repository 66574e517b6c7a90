"""Lines of batches: whatever owners do and whenever they die, each has one result."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from support.batch_store import (
    DAY_S,
    ENDPOINT,
    KEY,
    NOW_S,
    check_lines,
    content,
    create,
    jsonl,
    line,
    make_batch,
    new_batch,
    next_version,
    open_store,
    pieces_of,
    place,
    upload,
)

from lightserve.batches.access import store_at
from lightserve.batches.contents import Store
from lightserve.batches.database import (
    BATCH_BYTES,
    FILE_BYTES,
    LINE_BYTES,
)
from lightserve.batches.files import LONG_PAGE_BYTES, START, Cursor, Files, check_quota
from lightserve.batches.jobs import PREPARING_S
from lightserve.batches.leasing import LOSS_DELAY_S, MAX_CRASHES, SUSPECT_CRASHES
from lightserve.batches.lines import result_line
from lightserve.batches.records import (
    CHUNK_BYTES,
    MAX_ACTIVE_BATCHES,
    MAX_TTL_S,
    BatchRecord,
    LeasedLine,
    LeaseLost,
    LineSums,
    Outcome,
)
from lightserve.errors import InvalidRequest

pytestmark = pytest.mark.usefixtures("both_stores")
LEASE_S = 30.0
OWNERS = ("north", "south")


def lease(
    store: Store, owner: str, epoch: int, now_s: float = NOW_S, n: int = 9
) -> list[LeasedLine]:
    return store.jobs.lease(owner, epoch, now_s, lease_s=LEASE_S, max_lines=n, max_bytes=1_000_000)


def done(leased: LeasedLine, text: str = "ok", *, is_error: bool = False) -> Outcome:
    result = result_line(leased, status=200, request_id="x", body=json.dumps(text).encode())
    return Outcome(batch=leased.batch, number=leased.number, result=result, is_error=is_error)


def queued(leased: LeasedLine, *, has_failed: bool = False) -> Outcome:
    values = {"batch": leased.batch, "number": leased.number}
    return Outcome(**values, result=None, has_failed=has_failed)


class Owners(RuleBasedStateMachine):
    """Two owners that lease, answer, die, come back, and speak after their time."""

    NUM_LINES = 7

    def __init__(self) -> None:
        super().__init__()
        self._stack = ExitStack()
        directory = Path(tempfile.mkdtemp())
        self._stack.callback(shutil.rmtree, directory)
        self.store = self._stack.enter_context(open_store(directory / "store"))
        self.now_s = NOW_S
        self.epochs = dict.fromkeys(OWNERS, 0)
        self.held: list[tuple[str, int, LeasedLine]] = []
        """Everything that was ever leased: an owner may answer it again at any time."""
        self.accepted: dict[int, str] = {}
        self.is_over = False

    @initialize()
    def begin(self) -> None:
        make_batch(self.store, self.NUM_LINES)
        for owner in OWNERS:
            self.begin_anew(owner)

    @rule(owner=st.sampled_from(OWNERS))
    def begin_anew(self, owner: str) -> None:
        self.epochs[owner] = self.store.jobs.begin(owner, NOW_S)

    @rule(owner=st.sampled_from(OWNERS), n=st.integers(1, 4))
    def take(self, owner: str, n: int) -> None:
        epoch = self.epochs[owner]
        for leased in lease(self.store, owner, epoch, self.now_s, n):
            assert leased.number not in self.accepted
            self.held.append((owner, epoch, leased))

    @rule(seconds=st.sampled_from([1.0, 20.0, 40.0, 7200.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(owner=st.sampled_from(OWNERS))
    def renew(self, owner: str) -> None:
        self.store.jobs.renew(owner, self.epochs[owner], self.now_s, lease_s=LEASE_S)

    @rule(pick=st.integers(0, 10**6), kind=st.sampled_from(["done", "error", "queued"]))
    def answer(self, pick: int, kind: str) -> None:
        if not self.held:
            return
        owner, epoch, leased = self.held[pick % len(self.held)]
        outcome = (
            queued(leased)
            if kind == "queued"
            else done(leased, f"{owner} {epoch} {pick}", is_error=kind == "error")
        )
        try:
            num_late = self.store.jobs.settle(owner, epoch, [outcome], self.now_s)
        except LeaseLost:
            assert epoch != self.epochs[owner]
            return
        if num_late == 0:
            assert leased.number not in self.accepted
            if kind != "queued":
                self.accepted[leased.number] = f"{owner} {epoch} {pick}"

    @rule()
    def finish(self) -> None:
        """Let one owner work it off alone, an hour later."""
        self.now_s += 3600
        if self.now_s > NOW_S + DAY_S / 2:
            return
        self.begin_anew("south")
        for leased in lease(self.store, "south", self.epochs["south"], self.now_s, 99):
            self.store.jobs.settle(
                "south", self.epochs["south"], [done(leased, "last")], self.now_s
            )
            self.accepted[leased.number] = "last"
        assert len(self.accepted) == self.NUM_LINES

    @invariant()
    def results_are_what_was_accepted(self) -> None:
        if not self.epochs["north"]:
            return
        (batch,), _ = self.store.jobs.page(KEY, NOW_S, limit=9)
        assert batch.num_done + batch.num_failed == len(self.accepted)
        assert (batch.status == "completed") == (len(self.accepted) == self.NUM_LINES)
        found = content(self.store, batch.output_file_id) + content(self.store, batch.error_file_id)
        if batch.status == "completed":
            assert {
                int(result["custom_id"][1:]): result["response"]["body"] for result in found
            } == self.accepted
            assert len(found) == self.NUM_LINES

    def teardown(self) -> None:
        self._stack.close()


def test_two_owners_in_any_order() -> None:
    run_state_machine_as_test(
        Owners, settings=settings(max_examples=15, stateful_step_count=25, deadline=None)
    )


def test_lines_are_leased_once_within_their_bounds_and_by_the_ends_of_their_batches(
    tmp_path: Path,
) -> None:
    with open_store(tmp_path) as store:
        make_batch(store, 3, window_s=2 * DAY_S)
        soon = make_batch(store, 2)
        epoch = store.jobs.begin("north", NOW_S)
        first = lease(store, "north", epoch, n=3)
        assert [(each.batch_id, each.custom_id) for each in first[:2]] == [
            (soon.id, "r0"),
            (soon.id, "r1"),
        ]
        assert json.loads(first[0].line) == line("r0")
        small = store.jobs.lease(*("north", epoch, NOW_S), lease_s=1.0, max_lines=9, max_bytes=1)
        assert [each.custom_id for each in small] == ["r1"]  # one, however large
        assert [each.custom_id for each in lease(store, "north", epoch)] == ["r2"]
        assert lease(store, "north", epoch) == []
        assert lease(store, "north", epoch, NOW_S + 3600) == []  # its own are in its hands


def test_what_an_owner_leased_is_free_when_it_begins_anew_or_its_time_is_over(
    tmp_path: Path,
) -> None:
    with open_store(tmp_path) as store:
        make_batch(store, 2)
        north, south = store.jobs.begin("north", NOW_S), store.jobs.begin("south", NOW_S)
        held = lease(store, "north", north)
        assert lease(store, "south", south) == []
        store.jobs.renew("north", north, NOW_S + 20, lease_s=LEASE_S)
        assert lease(store, "south", south, NOW_S + 40) == []
        assert len(lease(store, "south", south, NOW_S + 51, n=1)) == 1
        assert store.jobs.settle("north", north, [done(each) for each in held], NOW_S) == 2
        with pytest.raises(LeaseLost):
            again = store.jobs.begin("north", NOW_S)
            lease(store, "north", again - 1)


def test_an_attempt_counts_only_where_the_line_has_failed_by_itself(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        make_batch(store, 1)
        epoch = store.jobs.begin("north", NOW_S)
        for has_failed, attempts in ((False, 0), (True, 1)):
            (held,) = lease(store, "north", epoch)
            store.jobs.settle("north", epoch, [queued(held, has_failed=has_failed)], NOW_S)
            (held,) = lease(store, "north", epoch)
            assert held.attempt == attempts
            store.jobs.settle("north", epoch, [queued(held)], NOW_S)


def test_a_line_that_is_lost_again_waits_longer_each_time(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        make_batch(store, 1)
        epoch, now_s = store.jobs.begin("north", NOW_S), NOW_S
        for losses, delay_s in enumerate([0.0, LOSS_DELAY_S, 2 * LOSS_DELAY_S, 4 * LOSS_DELAY_S]):
            (held,) = lease(store, "north", epoch, now_s)
            assert held.losses == losses
            lost = Outcome(batch=held.batch, number=held.number, result=None, is_lost=True)
            store.jobs.settle("north", epoch, [lost], now_s)
            if delay_s:
                assert lease(store, "north", epoch, now_s + delay_s - 1) == []
            now_s += delay_s


def test_a_batch_that_is_cancelled_keeps_what_it_has(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        batch = make_batch(store, 3)
        epoch = store.jobs.begin("north", NOW_S)
        held = lease(store, "north", epoch, n=2)
        store.jobs.settle("north", epoch, [done(held[0])], NOW_S)
        over = store.jobs.cancel(KEY, batch.id, NOW_S + 5)
        assert (over.status, over.ended_s) == ("cancelled", NOW_S + 5)
        assert store.jobs.cancel(KEY, batch.id, NOW_S + 9) == over
        assert store.jobs.settle("north", epoch, [done(held[1])], NOW_S) == 1
        assert lease(store, "north", epoch) == [] and store.jobs.held("north", epoch) == (
            frozenset(),
            frozenset(),
        )
        assert [each["custom_id"] for each in content(store, over.output_file_id)] == ["r0"]
        assert over.error_file_id is None


def test_a_batch_whose_window_is_over_says_so_of_each_line_that_is_left(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        batch = make_batch(store, 3, window_s=60)
        epoch = store.jobs.begin("north", NOW_S)
        held = lease(store, "north", epoch, n=2)
        store.jobs.settle("north", epoch, [done(held[0])], NOW_S)
        assert store.jobs.expire(NOW_S + 59) == 0
        assert store.jobs.expire(NOW_S + 60) == 1
        over = store.jobs.get(KEY, batch.id, NOW_S)
        assert (over.status, over.num_done, over.num_failed) == ("expired", 1, 2)
        assert [each["custom_id"] for each in content(store, over.output_file_id)] == ["r0"]
        errors = content(store, over.error_file_id)
        assert [each["custom_id"] for each in errors] == ["r1", "r2"]
        assert {each["error"]["code"] for each in errors} == {"batch_expired"}
        with pytest.raises(InvalidRequest, match="expired"):
            store.jobs.cancel(KEY, batch.id, NOW_S)


def test_a_request_that_is_sent_again_makes_one_batch(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        batch = make_batch(store, 1, idempotency_key="k")
        file = store.files.get(KEY, batch.input_file_id, NOW_S)
        again = create(store, new_batch(file, idempotency_key="k"), [], NOW_S)
        assert again == batch
        with pytest.raises(InvalidRequest) as error:
            create(store, new_batch(file, idempotency_key="k", request_digest="y"), [], NOW_S)
        assert error.value.status == 409
        assert len(store.jobs.page(KEY, NOW_S, limit=9)[0]) == 1


def test_a_batch_is_forgotten_once_no_file_of_it_can_be_left(tmp_path: Path) -> None:
    """And what is in progress is not, however old."""
    with open_store(tmp_path) as store:
        over, goes_on = (make_batch(store, 1, window_s=90 * DAY_S) for _ in range(2))
        store.jobs.cancel(KEY, over.id, NOW_S + 5)
        assert store.jobs.purge(NOW_S + 4 + MAX_TTL_S) == 0
        assert store.jobs.purge(NOW_S + 5 + MAX_TTL_S) == 1
        left, _ = store.jobs.page(KEY, NOW_S, limit=9)
        assert [batch.id for batch in left] == [goes_on.id]


def test_what_is_over_is_found_by_indices(
    tmp_path: Path, both_stores: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a minute, while nothing else may write: not by reading every row."""
    with open_store(tmp_path) as store:
        database, asked = store.database, []
        with monkeypatch.context() as patch:
            for name in ("rows", "write"):
                plain = getattr(database, name)
                patch.setattr(database, name, lambda *sql, do=plain: asked.append(sql) or do(*sql))
            for part in (store.jobs, store.files, store.responses):
                part.purge(NOW_S)
        explain = "EXPLAIN QUERY PLAN "
        if both_stores == "postgresql":
            database.write("SET enable_seqscan = off")  # else it is used on tables of no rows
            explain = "EXPLAIN "
        plan = [str(row[-1]) for sql, *v in asked for row in database.rows(explain + sql, *v)]
        bounds = re.findall(r"(?:INDEX \w+|Index Cond:) \((\w+) ?<", "\n".join(plan))
        assert sorted(bounds) == ["ended_s", "expires_s", "expires_s", "touched_s"], plan


def test_a_key_has_so_many_batches_at_once_and_no_more(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        first = make_batch(store, 1)
        file = store.files.get(KEY, first.input_file_id, NOW_S)
        for _ in range(MAX_ACTIVE_BATCHES - 1):
            create(store, new_batch(file), [], NOW_S)
        with pytest.raises(InvalidRequest) as error:
            create(store, new_batch(file), [], NOW_S)
        assert error.value.status == 429 and "100" in error.value.message
        store.jobs.cancel(KEY, first.id, NOW_S)
        create(store, new_batch(file), [], NOW_S)


def test_batches_that_are_being_prepared_count_and_so_do_their_lines(tmp_path: Path) -> None:
    """Else a hundred of them at once, each with all lines of the quota, are made."""
    with open_store(tmp_path) as store:
        file = upload(store, jsonl([line(f"r{number}") for number in range(6)]))
        lines = check_lines(store.files, file, ENDPOINT, lambda name: None)
        new = new_batch(file, max_lines=10)
        first, second = (store.jobs.prepare(new, NOW_S) for _ in range(2))
        store.jobs.add_lines(new, first, lines[:3], 0)
        store.jobs.add_lines(new, first, lines[3:], 3)
        with pytest.raises(InvalidRequest, match="got 6 beside 6") as error:
            store.jobs.add_lines(new, second, lines, 0)
        assert error.value.code == "batch_lines_exceeded"
        for _ in range(MAX_ACTIVE_BATCHES - 2):
            store.jobs.prepare(new, NOW_S)
        with pytest.raises(InvalidRequest, match="one more than 100"):
            store.jobs.prepare(new, NOW_S)
        sums = LineSums()
        sums.add(lines)
        assert store.jobs.create(new, first, sums, NOW_S).num_lines == 6  # it does not count twice
        store.jobs.drop(second)
        store.jobs.prepare(new, NOW_S)


def used(store: Store) -> int:
    """What a key's quota says that it has stored."""
    with pytest.raises(InvalidRequest) as error:
        check_quota(store.database, KEY, -1, param=None)
    return int(error.value.message.rpartition(" ")[2])


def test_names_metadata_rows_and_results_in_progress_count(tmp_path: Path) -> None:
    """As they come and as they go; a batch that is over counts with its files."""
    with open_store(tmp_path) as store:
        file = upload(store, data := jsonl([line("é" * 9), line("b")]))
        before = len(data) + len("in.jsonl") + FILE_BYTES
        assert used(store) == before
        lines = check_lines(store.files, file, ENDPOINT, lambda name: None)
        batch = create(store, new_batch(file, metadata='{"a":"b"}'), lines, NOW_S)
        before += BATCH_BYTES + 9
        assert used(store) == before + 2 * LINE_BYTES + 19
        epoch = store.jobs.begin("north", NOW_S)
        first, second = lease(store, "north", epoch)
        results = [done(first, "x" * 1000), done(second, "y", is_error=True)]
        sizes = [len(each.result or b"") + 1 for each in results]
        store.jobs.settle("north", epoch, results[:1], NOW_S)
        assert used(store) == before + 2 * LINE_BYTES + 19 + sizes[0]
        store.jobs.settle("north", epoch, results[1:], NOW_S)
        names = sum(len(f"{batch.id}_{each}.jsonl") for each in ("output", "error"))
        assert used(store) == before + sum(sizes) + names + 2 * FILE_BYTES
        over = store.jobs.get(KEY, batch.id, NOW_S)
        for file_id in (file.id, over.output_file_id, over.error_file_id):
            store.files.delete(KEY, str(file_id), NOW_S)
        assert used(store) == BATCH_BYTES + 9
        assert store.jobs.purge(NOW_S + MAX_TTL_S) == 1
        assert used(store) == 0


def test_a_batch_whose_rows_have_no_room_is_not_made(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        file = upload(store, jsonl([line(f"r{number}") for number in range(9)]))
        lines = check_lines(store.files, file, ENDPOINT, lambda name: None)
        most = used(store) + BATCH_BYTES + 9 * (LINE_BYTES + 2)
        for quota, metadata in ((most - 1, None), (most, "{}"), (most - 9 * LINE_BYTES, "x" * 40)):
            with pytest.raises(InvalidRequest) as error:
                create(store, new_batch(file, max_bytes=quota, metadata=metadata), lines, NOW_S)
            assert (error.value.status, error.value.code) == (413, "storage_quota_exceeded")
            store.database.write("DELETE FROM batches")
        assert create(store, new_batch(file, max_bytes=most), lines, NOW_S).num_lines == 9


def test_a_batch_whose_results_take_all_room_ends_with_what_it_has(tmp_path: Path) -> None:
    """Its further lines are not run; another key's batch goes on."""
    with open_store(tmp_path) as store:
        batch = make_batch(store, 5)
        quota = used(store) + 1000
        epoch = store.jobs.begin("north", NOW_S)
        held = lease(store, "north", epoch, n=3)
        assert store.jobs.expire(NOW_S, quota=quota) == 0
        store.jobs.settle("north", epoch, [done(held[0], "x" * 2000)], NOW_S)
        theirs = upload(store, jsonl([line("theirs")]), key="bob")
        lines = check_lines(store.files, theirs, ENDPOINT, lambda name: None)
        create(store, new_batch(theirs, key_name="bob"), lines, NOW_S)
        assert store.jobs.expire(NOW_S, quota=quota) == 1
        assert store.jobs.expire(NOW_S, quota=quota) == 0
        assert store.jobs.settle("north", epoch, [done(each) for each in held[1:]], NOW_S) == 2
        assert [each.custom_id for each in lease(store, "north", epoch)] == ["theirs"]
        over = store.jobs.get(KEY, batch.id, NOW_S)
        assert (over.status, over.num_done, over.num_failed) == ("completed", 1, 4)
        assert [each["custom_id"] for each in content(store, over.output_file_id)] == ["r0"]
        errors = content(store, over.error_file_id)
        assert [each["custom_id"] for each in errors] == ["r1", "r2", "r3", "r4"]
        assert {each["error"]["code"] for each in errors} == {"storage_quota_exceeded"}


class Transactions:
    """Counts the rows that each transaction of a store writes."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        database = store.database
        begin, write, write_many = database.transaction, database.write, database.write_many

        @contextmanager
        def transaction(*, is_shared: bool = False) -> Iterator[None]:
            self.sizes.append(0)
            with begin(is_shared=is_shared):
                yield

        def counted(sql: str, *values: object) -> int:
            self.sizes[-1] += (num_rows := write(sql, *values))
            return num_rows

        def counted_many(sql: str, rows: Iterator[tuple[object, ...]]) -> None:
            all_rows = list(rows)
            self.sizes[-1] += len(all_rows)
            write_many(sql, iter(all_rows))

        monkeypatch.setattr(database, "transaction", transaction)
        monkeypatch.setattr(database, "write", counted)
        monkeypatch.setattr(database, "write_many", counted_many)


def _fill(store: Store, num_lines: int, *, num_done: int = 0) -> BatchRecord:
    """A batch of which the first lines have results, in no time."""
    batch = make_batch(store, num_lines)
    epoch = store.jobs.begin("north", NOW_S)
    outcomes = [
        done(each)
        for each in store.jobs.lease(
            *("north", epoch, NOW_S), lease_s=30.0, max_lines=max(1, num_done), max_bytes=10**9
        )
    ]
    store.jobs.settle("north", epoch, outcomes[:num_done], NOW_S)
    return batch


@pytest.mark.parametrize("how", ["drop", "cancel", "expire", "results", "input"])
def test_no_end_of_many_rows_is_one_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Others write in between; clients see the end at once, and after a crash it goes on."""
    monkeypatch.setattr("lightserve.batches.files.SLICE_ROWS", 100)
    monkeypatch.setattr("lightserve.batches.endings.SLICE_ROWS", 100)
    num_lines = 950
    with open_store(tmp_path) as store:
        if how == "drop":
            file = upload(store, jsonl([line(f"r{number}") for number in range(num_lines)]))
            lines = check_lines(store.files, file, ENDPOINT, lambda name: None)
            number = store.jobs.prepare(new := new_batch(file), NOW_S)
            store.jobs.add_lines(new, number, lines, 0)
        elif how == "input":
            monkeypatch.setattr("lightserve.batches.files.SLICE_BYTES", 2 * CHUNK_BYTES)
            file = upload(store, b"x" * 9 * CHUNK_BYTES)
        else:
            num_done = {"cancel": 1, "expire": 1, "results": num_lines}[how]
            batch = _fill(store, num_lines, num_done=num_done)
        seen = Transactions(store, monkeypatch)
        if how == "drop":
            store.jobs.drop(number)
        elif how == "cancel":
            assert store.jobs.cancel(KEY, batch.id, NOW_S).status == "cancelled"
        elif how == "expire":
            assert store.jobs.expire(NOW_S + DAY_S) == 1
            assert store.jobs.held("north", 1).batches == frozenset()
            assert lease(store, "north", 1) == []
        else:
            results_id = None if how == "input" else store.jobs.get(KEY, batch.id, NOW_S)
            file_id = file.id if results_id is None else str(results_id.output_file_id)
            record = store.files.get(KEY, file_id, NOW_S)
            store.files.delete(KEY, file_id, NOW_S)
            for cursor in (START, Cursor(500, 10**4)):  # nothing that is half gone is read
                with pytest.raises(InvalidRequest, match="there is no file"):
                    store.files.read(record, cursor)
        assert len(seen.sizes) == (2 if how == "expire" else 1)  # a lease, beside the end
        other = store_at(place(tmp_path))  # the process died
        others = Transactions(other, monkeypatch)
        while other.jobs.expire(NOW_S + DAY_S) + other.files.sweep():
            pass
        assert max(seen.sizes + others.sizes) <= 110
        assert len(others.sizes) >= (9 if how != "input" else 4)
        left = dict(other.database.rows("SELECT state, count(*) FROM lines GROUP BY state"))
        assert left == {"cancel": {"done": 1}, "expire": {"done": 1, "error": 949}}.get(how, {})
        for table in ("leftovers",) + ("chunks",) * (how == "input"):
            assert other.database.value(f"SELECT count(*) FROM {table}") == 0
        if how == "expire":
            over = other.jobs.get(KEY, batch.id, NOW_S)
            assert (over.status, over.num_done, over.num_failed) == ("expired", 1, 949)
            assert len(content(other, over.error_file_id)) == 949
        other.database.close()


def test_a_store_of_the_version_before_is_brought_up_to_date(
    tmp_path: Path, both_stores: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del both_stores
    with open_store(tmp_path) as store:
        batch = make_batch(store, 3, metadata='{"a":"b"}')
        found = used(store)
    next_version(monkeypatch)
    for _ in range(2):
        with open_store(tmp_path) as store:
            assert store.database.value("SELECT more FROM files") == 7
            assert store.jobs.get(KEY, batch.id, NOW_S) == batch and used(store) == found
    with open_store(tmp_path) as store:
        store.jobs.cancel(KEY, batch.id, NOW_S)
        store.files.delete(KEY, batch.input_file_id, NOW_S)
        assert used(store) < found


def test_files_belong_to_their_key_and_end_with_their_time(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        file = upload(store, jsonl([line("a")]))
        for key, now_s in (("bob", NOW_S), (KEY, NOW_S + 31 * DAY_S)):
            with pytest.raises(InvalidRequest) as error:
                store.files.get(key, file.id, now_s)
            assert error.value.status == 404
            assert store.files.page(key, now_s, limit=9) == ([], False)
        batch = make_batch(store, 1)
        with pytest.raises(InvalidRequest) as error:
            store.files.delete(KEY, batch.input_file_id, NOW_S)
        assert error.value.status == 409
        assert store.files.purge(NOW_S + 31 * DAY_S) == (1, [])  # not what a batch still reads
        store.jobs.cancel(KEY, batch.id, NOW_S)
        assert store.files.purge(NOW_S + 31 * DAY_S) == (1, [])
        assert store.database.value("SELECT count(*) FROM chunks") == 0


@pytest.mark.parametrize("size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_a_file_is_read_to_its_end_and_no_further(tmp_path: Path, size: int) -> None:
    with open_store(tmp_path) as store:
        pieces = list(pieces_of(store.files, upload(store, b"x" * size)))
        assert [len(piece) for piece in pieces] == [
            *[CHUNK_BYTES] * (size // CHUNK_BYTES),
            *([size % CHUNK_BYTES] if size % CHUNK_BYTES else []),
        ]


def test_an_upload_that_does_not_end_leaves_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        number, quota = store.files.begin(KEY, NOW_S), FILE_BYTES + 100
        store.files.append(number, 0, b"x" * 10, NOW_S, quota=quota)
        assert store.files.page(KEY, NOW_S, limit=9) == ([], False)
        with pytest.raises(InvalidRequest) as error:
            store.files.append(number, 1, b"x" * 91, NOW_S, quota=quota)
        assert error.value.status == 413 and f"got {quota + 1}" in error.value.message
        assert store.files.purge(NOW_S + 3599) == (0, [])
        assert store.files.purge(NOW_S + 3600) == (1, [])
        assert store.database.value("SELECT count(*) FROM files") == 0


def test_a_line_with_which_the_process_dies_is_found_and_no_other(tmp_path: Path) -> None:
    """Whatever runs beside it: the process dies whenever line 3 is in flight."""
    with open_store(tmp_path) as store:
        batch = make_batch(store, 12)
        num_deaths = 0
        epoch = store.jobs.begin("north", NOW_S, has_crashed=True)
        while store.jobs.counts()[1]["in_progress"]:
            held = lease(store, "north", epoch, n=5)
            suspects = [each for each in held if each.crashes >= SUSPECT_CRASHES]
            assert held and len(suspects) <= 1
            if any(each.custom_id == "r3" for each in held):
                num_deaths += 1
                epoch = store.jobs.begin("north", NOW_S, has_crashed=True)
                continue
            store.jobs.settle("north", epoch, [done(each) for each in held], NOW_S)
        over = store.jobs.get(KEY, batch.id, NOW_S)
        assert (over.status, over.num_done, over.num_failed) == ("completed", 11, 1)
        (error,) = content(store, over.error_file_id)
        assert (error["custom_id"], error["error"]["code"]) == ("r3", "process_lost")
        assert num_deaths == MAX_CRASHES


def test_what_is_given_up_counts_against_no_line(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        make_batch(store, 1)
        for _ in range(MAX_CRASHES + 1):
            (held,) = lease(store, "north", store.jobs.begin("north", NOW_S))
            assert held.crashes == 0


def test_a_line_that_is_deleted_as_it_is_leased_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path) as store:
        batch = make_batch(store, 2)
        epoch, read = store.jobs.begin("north", NOW_S), Files.read_span

        def deleting(files: Files, *place: int) -> bytes:
            if store.jobs.get(KEY, batch.id, NOW_S).status == "in_progress":
                store.jobs.cancel(KEY, batch.id, NOW_S)
                store.files.delete(KEY, batch.input_file_id, NOW_S)
            return read(files, *place)

        monkeypatch.setattr(Files, "read_span", deleting)
        assert lease(store, "north", epoch) == []
        assert store.jobs.held("north", epoch).lines == frozenset()


@pytest.mark.parametrize("position", [0, CHUNK_BYTES - 3, CHUNK_BYTES, 2 * CHUNK_BYTES - 1])
@pytest.mark.parametrize("num_bytes", [1, 4, CHUNK_BYTES + 2])
def test_a_stretch_of_a_file_is_read(tmp_path: Path, position: int, num_bytes: int) -> None:
    data = b"".join(b"%07d\n" % number for number in range(3 * CHUNK_BYTES // 8 + 1))
    with open_store(tmp_path) as store:
        file = upload(store, data)
        found = store.files.read_span(file.number, position, num_bytes)
        assert found == data[position : position + num_bytes]


def test_a_batch_is_not_there_before_it_is_whole(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        file = upload(store, jsonl([line("a"), line("b")]))
        new = new_batch(file)
        number, sums = store.jobs.prepare(new, NOW_S), LineSums()
        lines = check_lines(store.files, file, ENDPOINT, lambda name: None)
        store.jobs.add_lines(new, number, lines, 0)
        sums.add(lines)
        epoch = store.jobs.begin("north", NOW_S)
        limits = {"lease_s": 30.0, "max_lines": 9, "max_bytes": 10**6}
        assert store.jobs.page(KEY, NOW_S, limit=9) == ([], False)
        assert store.jobs.lease("north", epoch, NOW_S, **limits) == []
        assert not store.jobs.held("north", epoch).batches
        made = store.jobs.create(new, number, sums, NOW_S)
        assert store.jobs.get(KEY, made.id, NOW_S).num_lines == 2
        assert len(store.jobs.lease("north", epoch, NOW_S, **limits)) == 2


def test_a_batch_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        file = upload(store, jsonl([line("a")]))
        new = new_batch(file)
        lines = check_lines(store.files, file, ENDPOINT, lambda name: None)
        for end in (store.jobs.drop, lambda _: store.jobs.purge(NOW_S + PREPARING_S)):
            number, sums = store.jobs.prepare(new, NOW_S), LineSums()
            store.jobs.add_lines(new, number, lines, 0)
            assert store.jobs.purge(NOW_S + PREPARING_S - 1) == 0
            end(number)
            for table in ("lines", "batches"):
                assert store.database.value(f"SELECT count(*) FROM {table}") == 0
            for late in (
                lambda: store.jobs.add_lines(new, number, lines, 0),  # noqa: B023
                lambda: store.jobs.create(new, number, sums, NOW_S),  # noqa: B023
            ):
                with pytest.raises(InvalidRequest) as raised:
                    late()
                assert raised.value.status == 408


@pytest.mark.parametrize(
    "sizes", [[10] * 600, [100_000] * 7, [9_000_000], [9, 2**22 - 1, 2**22, 9]]
)
def test_results_are_read_in_pages_of_bytes(tmp_path: Path, sizes: list[int]) -> None:
    with open_store(tmp_path) as store:
        batch = make_batch(store, len(sizes))
        epoch = store.jobs.begin("north", NOW_S)
        store.jobs.lease("north", epoch, NOW_S, lease_s=30.0, max_lines=len(sizes), max_bytes=10**9)
        results = [b"%d" % (n % 10) * size for n, size in enumerate(sizes)]
        outcomes = [
            Outcome(batch=batch.number, number=n, result=result) for n, result in enumerate(results)
        ]
        store.jobs.settle("north", epoch, outcomes, NOW_S)
        output_id = store.jobs.get(KEY, batch.id, NOW_S).output_file_id
        pages = list(pieces_of(store.files, store.files.get(KEY, str(output_id), NOW_S)))
        assert b"".join(pages) == b"".join(result + b"\n" for result in results)
        assert max(map(len, pages)) <= LONG_PAGE_BYTES + 1
        assert len(pages) <= 3 + sum(sizes) // 100_000
