"""What is promised when a batch is made, and that it is kept: in virtual time."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batch_store import (
    ENDPOINT,
    KEY,
    NOW_S,
    check_lines,
    create,
    jsonl,
    line,
    new_batch,
    open_store,
    upload,
)

from lightserve.batches.contents import Store
from lightserve.batches.forecast import (
    ASSUMED_SHARE,
    MARGIN,
    Costs,
    Left,
    Pace,
    Tokens,
    Work,
    dues,
    earliest_window,
    ends,
    work_of,
)
from lightserve.batches.records import BatchRecord, LeasedLine, Outcome
from lightserve.errors import InvalidRequest


def kept(works: list[Work], share: float) -> set[int]:
    """The batches that are done in their windows though all takes longer by the margin."""
    found = ends(works, PACE._replace(share=share / MARGIN, low_share=share), 0.0)
    return {work.number for work in works if found[work.number] <= work.expires_s + 1e-6}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), max_size=5),
    st.integers(1, 30),
    st.integers(1, 60),
    st.sampled_from([0.5, 1.0]),
)
def test_the_earliest_window_is_the_first_that_keeps_all_promises(
    others: list[tuple[int, int]], seconds: int, least_s: int, share: float
) -> None:
    works = [Work(number, float(s), float(w)) for number, (s, w) in enumerate(others)]
    before = kept(works, share)

    def is_kept(window_s: int) -> bool:
        new = Work(99, float(window_s), float(seconds))
        return kept([*works, new], share) >= before | {99}

    found = earliest_window(float(seconds), works, share, 0.0, least_s=float(least_s))
    assert found == next(window_s for window_s in itertools.count(least_s) if is_kept(window_s))


PACE = Pace(0.001, 0.01, 0.5, 0.5, False, 0.25, 100.0, 0.5)


def left(**changes: int | None) -> Left:
    sums: dict[str, int | None] = {
        "num_lines": 100,
        "num_done": 0,
        "num_bytes": 40_000,
        "done_bytes": 0,
        "prompt_tokens": 0,
        "output_tokens": 0,
        "limit_tokens": None,
    }
    return Left(number=1, expires_s=0.0, **(sums | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("window_s", "ends_s"),
    [
        # Half of the engine is theirs. When a has had its first 5 s, so have b and c, and so on.
        (1000.0, {0: 2 * 15, 1: 2 * 45, 2: 2 * 40, 3: 2 * 30}),
        # That is too late with its margin: what was promised goes first.
        (30.0, {0: 2 * 5, 1: 2 * 30, 2: 2 * 45, 3: 2 * 15}),
    ],
)
def test_batches_of_several_keys_end_as_these_share(
    window_s: float, ends_s: dict[int, float]
) -> None:
    works = [
        Work(0, window_s, 5.0, key_name="a"),
        Work(1, 2000.0, 15.0, is_promised=False, key_name="a"),
        Work(2, 3000.0, 15.0, is_promised=False, key_name="b"),
        Work(3, 2500.0, 10.0, key_name="c"),
    ]
    assert ends(works, PACE, 0.0) == ends_s


def test_lines_are_judged_by_those_of_their_batch_that_are_over() -> None:
    assert work_of(left(), PACE).seconds == pytest.approx(10.0 + 100.0)
    # A limit bounds what is known of others.
    assert work_of(left(limit_tokens=2000), PACE).seconds == pytest.approx(10.0 + 20.0)
    # A few of its own say little, many say all.
    done = {"num_done": 50, "done_bytes": 10_000, "prompt_tokens": 5000, "output_tokens": 1000}
    assert work_of(left(**done), PACE).seconds == pytest.approx(15.0 + 10.0)
    few = {"num_done": 15, "done_bytes": 0, "prompt_tokens": 5000, "output_tokens": 100}
    assert work_of(left(**few), PACE).seconds == pytest.approx(10.0 + 85.0)


def due(works: list[Work], now_s: float = 0.0, **num_leased: int) -> list[float]:
    """When lines in flight of batches 0, 1 … are due; half of the engine can be counted on."""
    leased = {int(name[1:]): count for name, count in num_leased.items()}
    return list(dues(works, PACE, now_s, num_leased=leased).values())


def test_lines_in_flight_are_due_before_what_waits_behind_them() -> None:
    work = Work(0, 100.0, 40.0, 10)
    assert due([work]) == [20.0], "80 s of work at half of the engine"
    assert due([work], b0=4) == [52.0] and due([work], b0=10) == [100.0]
    # Nothing gets on: they come nearer to it. What gets on puts it off.
    assert due([work], 15.0, b0=4) == [52.0]
    assert due([work._replace(seconds=32.0, num_lines=8)], 15.0, b0=4) == [68.0]
    # What waits of the batch before comes before a batch's own, and is due for it as well.
    after = Work(1, 130.0, 20.0, 10)
    assert due([work, after], b0=5) == [50.0, 50.0]
    assert due([work, after._replace(expires_s=300.0)], b0=5) == [60.0, 220.0]


def test_what_cannot_be_kept_with_all_of_the_engine_puts_nothing_off() -> None:
    lost, kept_ = Work(0, 10.0, 15.0, 10), Work(1, 100.0, 20.0, 10)
    assert due([lost, kept_]) == [math.inf, 30.0]
    assert due([lost._replace(seconds=9.0), kept_]) == [-8.0, 42.0]


def test_a_batch_that_was_not_promised_is_not_due_and_keeps_no_other_waiting() -> None:
    given_ = Work(0, 50.0, 15.0, 10, is_promised=False), Work(1, 100.0, 20.0, 10)
    assert due(list(given_)) == [math.inf, 60.0]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(1, 20), st.integers(0, 9)), min_size=1),
    st.integers(0, 60),
)
def test_a_batch_that_is_done_by_its_due_time_leaves_time_for_all_behind_it(
    given_: list[tuple[int, int, int]], now_s: int
) -> None:
    works = [Work(n, float(s), float(w), 10) for n, (s, w, _) in enumerate(given_)]
    leased = {number: count for number, (_, _, count) in enumerate(given_)}
    found = dues(works, PACE, float(now_s), num_leased=leased)
    waiting_s = 0.0
    for number in found:
        waiting_s += works[number].seconds * (1 - leased[number] / 10)
        if found[number] < math.inf:
            assert found[number] + waiting_s / PACE.sure_share <= works[number].expires_s + 1e-6
    in_time = [due_s for due_s in found.values() if due_s < math.inf]
    assert in_time == sorted(in_time), "those before are due for those behind them"


COSTS = Costs(0.0005, 0.005)
LIMIT = 400


class World:
    """An engine of which real-time requests leave a share that changes, and a store."""

    TICK_S = 5.0
    IN_FLIGHT = 16

    def __init__(self, store: Store, seed: int) -> None:
        store.database.write("PRAGMA synchronous=OFF")
        self.store, self.random, self.now_s = store, random.Random(seed), NOW_S
        self.phase_s = 400.0 * self.random.random()
        self.epoch = store.jobs.begin("north", NOW_S)
        self.held: dict[tuple[int, int], tuple[LeasedLine, Tokens, float]] = {}

    def lines(self, num_lines: int, mean_output: float) -> bytes:
        made = []
        for number in range(num_lines):
            output = min(LIMIT, max(1, int(self.random.expovariate(1 / mean_output))))
            body = {"prompt": "x" * self.random.randint(100, 2000), "max_tokens": LIMIT}
            made.append(line(f"{output}-{number}", body=body))
        return jsonl(made)

    def make(self, data: bytes, window_s: int, *, accepts_late: bool = False) -> BatchRecord:
        file = upload(self.store, data, now_s=self.now_s)
        lines = check_lines(self.store.files, file, ENDPOINT, lambda name: None)
        new = new_batch(file, window=f"{window_s}s", window_s=window_s, accepts_late=accepts_late)
        return create(self.store, new, lines, self.now_s)

    def promised(self, data: bytes, window_s: int) -> BatchRecord:
        """Make a batch with this window, or with the one that is named in its place."""
        try:
            return self.make(data, window_s)
        except InvalidRequest as refusal:
            assert refusal.status == 409 and refusal.param == "completion_window"
            least_s = int(refusal.message.split("at least ")[1].split("s ")[0])
            assert least_s > window_s
            with pytest.raises(InvalidRequest):
                self.make(data, least_s - 1)
            return self.make(data, least_s)

    def tick(self) -> None:
        """Let a while pass: work is shared evenly among the lines in flight."""
        jobs = self.store.jobs
        # What real-time requests leave rises and falls, in a range that has been seen before.
        turn = 2 * math.pi * (self.now_s - NOW_S + self.phase_s) / 400.0
        self.share = 0.5 + 0.12 * math.sin(turn) + self.random.uniform(-0.05, 0.05)
        room = self.IN_FLIGHT - len(self.held)
        for leased in jobs.lease(
            *("north", self.epoch, self.now_s), lease_s=1e6, max_lines=room, max_bytes=10**9
        ):
            tokens = Tokens(len(leased.line) // 5, int(leased.custom_id.split("-")[0]))
            work_s = tokens.prompt * COSTS.prompt_token_s + tokens.output * COSTS.output_token_s
            self.held[leased.batch, leased.number] = leased, tokens, work_s
        self.now_s += self.TICK_S
        is_full = jobs.counts()[0]["queued"] > 0
        budget_s, done = self.TICK_S * self.share, []
        while self.held and budget_s > 1e-9:
            place = min(self.held, key=lambda place: self.held[place][2])
            leased, tokens, work_s = self.held[place]
            step_s = min(work_s, budget_s / len(self.held))
            budget_s -= step_s * len(self.held)
            self.held = {p: (n, t, w - step_s) for p, (n, t, w) in self.held.items()}
            if self.held[place][2] <= 1e-9:
                del self.held[place]
                done.append((leased, tokens))
        outcomes = [
            Outcome(
                batch=leased.batch,
                number=leased.number,
                result=b"{}",
                num_bytes=len(leased.line),
                prompt_tokens=tokens.prompt,
                output_tokens=tokens.output,
            )
            for leased, tokens in done
        ]
        jobs.settle("north", self.epoch, outcomes, self.now_s)
        if is_full:
            sizes = [(len(leased.line), tokens) for leased, tokens in done]
            self.store.forecasts.note(self.now_s, self.TICK_S, sizes, COSTS)
        jobs.expire(self.now_s)

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.tick()

    def over(self) -> list[BatchRecord]:
        while self.store.jobs.counts()[1]["in_progress"]:
            self.tick()
        return self.store.jobs.page(KEY, self.now_s, limit=99)[0]


def errors_of(made: list[tuple[BatchRecord, float]], world: World) -> list[float]:
    """By how much of its time each forecast was off, of batches that no later one overtook."""
    ended = {batch.id: batch for batch in world.over()}
    assert {batch.status for batch in ended.values()} == {"completed"}
    errors = []
    for batch, made_s in made:
        end_s = ended[batch.id].ended_s
        assert end_s is not None and end_s <= batch.expires_s and batch.forecast is not None
        if not any(
            made_s < later_s < end_s and other.expires_s < batch.expires_s
            for other, later_s in made
        ):
            errors.append(abs(batch.forecast.ends_s - end_s) / (end_s - made_s))
    return errors


def test_windows_that_were_promised_are_kept(tmp_path: Path) -> None:
    errors: list[float] = []
    for seed in range(5):
        with open_store(tmp_path / str(seed)) as store:
            world = World(store, seed)
            store.forecasts.note(NOW_S, 0.0, [], COSTS)
            first = world.promised(world.lines(600, 60.0), 3600)
            assert first.forecast is not None and not first.forecast.is_observed
            world.run(450)
            made = []
            for _ in range(4):
                data = world.lines(world.random.randint(100, 300), 60.0)
                batch = world.promised(data, world.random.choice([60, 200, 1800]))
                assert batch.forecast is not None and batch.forecast.is_in_time
                made.append((batch, world.now_s))
                world.run(world.random.uniform(20, 90))
            errors += errors_of(made, world)
    assert len(errors) >= 12 and statistics.median(errors) <= 0.1
    assert statistics.quantiles(errors, n=10, method="inclusive")[-1] <= 0.2


def test_a_promise_that_cannot_be_kept_any_more_is_said_before_its_end(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        world = World(store, 0)
        store.forecasts.note(NOW_S, 0.0, [], COSTS)
        world.promised(world.lines(60, 60.0), 3600)
        world.run(90)
        batch = world.promised(world.lines(100, 60.0), 60)
        late = world.make(world.lines(300, 60.0), 60, accepts_late=True)
        assert late.forecast is not None and not late.forecast.is_in_time
        world.TICK_S = 1.0
        said_s = None
        while (found := store.jobs.get(KEY, batch.id, world.now_s)).status == "in_progress":
            assert found.forecast is not None
            if not found.forecast.is_in_time and said_s is None:
                said_s = world.now_s
            world.tick()
        assert found.status == "expired" and said_s is not None
        assert said_s < batch.expires_s - 10


def test_nothing_is_promised_while_nothing_is_known(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        world = World(store, 0)
        assert world.make(world.lines(10, 60.0), 60).forecast is None
        store.forecasts.note(NOW_S, 0.0, [], Costs(0.0, 0.0))
        assert world.make(world.lines(10, 60.0), 60).forecast is None
        store.forecasts.note(NOW_S, 0.0, [], COSTS)
        pace = store.forecasts.pace(NOW_S)
        assert pace is not None and pace.share == ASSUMED_SHARE and not pace.is_observed


def test_lines_are_due_by_what_little_is_known_where_it_is_worse(tmp_path: Path) -> None:
    """So a batch that gets on slowly is behind before there is enough to make forecasts of."""
    with open_store(tmp_path) as store:
        line = [(400, Tokens(100, 50))]
        for busy_s, sure_share in ((14.0, ASSUMED_SHARE), (2.0, 0.3 / 16)):
            store.forecasts.note(NOW_S, busy_s, line if busy_s > 10 else [], COSTS)
            pace = store.forecasts.pace(NOW_S)
            assert pace is not None and pace.share == pace.low_share == ASSUMED_SHARE
            assert pace.sure_share == pytest.approx(sure_share)


def test_servers_that_share_a_store_are_counted(tmp_path: Path) -> None:
    """Those whose leases are not over: with two of them the same lines take half as long."""
    with open_store(tmp_path) as store:
        store.forecasts.note(NOW_S, 0.0, [], COSTS)
        shares = []
        for owner in ("north", "south"):
            epoch = store.jobs.begin(owner, NOW_S)
            store.jobs.renew(owner, epoch, NOW_S, lease_s=30.0)
            pace = store.forecasts.pace(NOW_S)
            assert pace is not None and pace.low_share == pace.share
            shares.append(pace.share)
        assert shares == [ASSUMED_SHARE, 2 * ASSUMED_SHARE]
        later = store.forecasts.pace(NOW_S + 31)
        assert later is not None and later.share == ASSUMED_SHARE
