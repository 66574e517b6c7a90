"""Keys share what lines are leased, as far as the windows that were promised allow it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.batch_store import (
    DAY_S,
    ENDPOINT,
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
from lightserve.batches.forecast import MARGIN, Costs, Pace, Work, keys_share
from lightserve.batches.leasing import Turns, line_costs
from lightserve.batches.lines import result_line
from lightserve.batches.records import BatchRecord, Outcome

PACE = Pace(
    1.0, 1.0, share=0.5, low_share=0.5, is_observed=True, tokens_per_byte=1, output_tokens=1
)


def test_a_key_has_as_much_as_another_and_saves_nothing_up() -> None:
    turns, costs = Turns(), {"a": 3.0, "b": 1.0}
    had = Counter[str]()
    for _ in range(10):
        for key, num_lines in turns.split(costs, 4).items():
            had[key] += num_lines
    assert had == {"a": 10, "b": 30}
    for _ in range(5):
        assert turns.split({"a": 3.0}, 4) == {"a": 4}  # the other one has nothing to do
    assert turns.split(costs, 4) == {"a": 1, "b": 3}
    turns.give_back("b", 1.0, 3)
    assert turns.split(costs, 3) == {"b": 3}
    assert turns.split({}, 3) == {} and turns.split(costs, 0) == {}


def test_with_little_room_each_key_has_its_turn() -> None:
    turns, costs = Turns(), dict.fromkeys("abc", 1.0)
    had = Counter(key for _ in range(9) for key in turns.split(costs, 1))
    assert set(had.values()) == {3}


def test_a_line_costs_what_the_key_s_lines_take_at_the_mean() -> None:
    works = [
        Work(0, 0, 6.0, 2, key_name="a"),
        Work(1, 0, 2.0, 2, key_name="a"),
        Work(2, 0, 5.0, 1, key_name="b"),
    ]
    assert line_costs(works) == {"a": 2.0, "b": 5.0}


@pytest.mark.parametrize(
    ("spare_s", "is_promised", "shares"),
    [
        (1.0, True, True),
        (-1.0, True, False),
        (-1.0, False, True),
    ],
)
def test_keys_share_while_every_promise_is_kept(
    spare_s: float, is_promised: bool, shares: bool
) -> None:
    # Beside 1,000 s of b's, 100 s of a's are done after 200 s of work, at half of the engine.
    until_s = 200.0 * MARGIN / PACE.low_share
    works = [
        Work(0, NOW_S + until_s + spare_s, 100.0, 1, is_promised, "a"),
        Work(1, NOW_S + DAY_S, 1000.0, 9, key_name="b"),
    ]
    assert keys_share(works, PACE, NOW_S) is shares


def test_what_is_before_it_of_the_same_key_counts() -> None:
    works = [
        Work(0, NOW_S + 500, 150.0, is_promised=False, key_name="a"),
        Work(1, NOW_S + 600, 100.0, key_name="a"),
        Work(2, NOW_S + DAY_S, 20.0, is_promised=False, key_name="b"),
    ]
    # 150 + 100 of its own and the 20 of the other: 270 s, at half of the engine.
    assert not keys_share(works, PACE, NOW_S)
    works[1] = works[1]._replace(expires_s=NOW_S + 676)
    assert keys_share(works, PACE, NOW_S)


def make(
    store: Store, key: str, num_lines: int, window_s: int, *, accepts_late: bool = False
) -> BatchRecord:
    data = jsonl([line(f"{key}{number}", body={"max_tokens": 100}) for number in range(num_lines)])
    file = upload(store, data, key=key)
    lines = check_lines(store.files, file, ENDPOINT, lambda name: None)
    new = new_batch(file, key_name=key, window_s=window_s, accepts_late=accepts_late)
    return create(store, new, lines, NOW_S)


def work(store: Store, num_rounds: int, room: int = 4) -> Counter[str]:
    """Lease and answer so many portions; return how many lines of each key were among them."""
    epoch = store.jobs.begin("north", NOW_S)
    had = Counter[str]()
    for _ in range(num_rounds):
        held = store.jobs.lease(
            "north", epoch, NOW_S, lease_s=30.0, max_lines=room, max_bytes=10**6
        )
        assert len({(each.batch, each.number) for each in held}) == len(held) <= room
        had.update(each.key_name for each in held)
        outcomes = [
            Outcome(
                batch=each.batch,
                number=each.number,
                result=result_line(each, status=200, request_id="x", body=b"{}"),
            )
            for each in held
        ]
        assert store.jobs.settle("north", epoch, outcomes, NOW_S) == 0
    return had


@pytest.mark.usefixtures("both_stores")
def test_a_huge_batch_does_not_keep_another_key_s_waiting(tmp_path: Path) -> None:
    """Though its window ends first; what the other key does not want is its."""
    with open_store(tmp_path) as store:
        store.forecasts.note(NOW_S, 0.0, [], Costs(1e-9, 0.01))
        make(store, "huge", 200, DAY_S)
        small = make(store, "small", 10, 7 * DAY_S)
        # 10 lines of each of 1 s, at half of the engine: not 210.
        assert small.forecast is not None and small.forecast.ends_s == NOW_S + 41
        assert work(store, 5) == {"huge": 10, "small": 10}
        assert store.jobs.get("small", small.id, NOW_S).status == "completed"
        assert work(store, 5) == {"huge": 20}


def test_a_promise_stands_above_shares_and_what_was_not_promised_does_not(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.forecasts.note(NOW_S, 0.0, [], Costs(0.001, 0.01))
        # 40 lines of 100 tokens of 0.01 s are 40 s of an engine of which half is theirs.
        promised = make(store, "promised", 40, 110)
        late = make(store, "late", 400, 100, accepts_late=True)
        found = store.jobs.get("promised", promised.id, NOW_S)
        assert found.status == "in_progress"
        assert found.forecast is not None and found.forecast.ends_s == NOW_S + 83  # as if alone
        assert not (late.forecast and late.forecast.is_in_time)
        assert work(store, 5) == {"promised": 20}  # though the other one's window ends first
        assert work(store, 5)["late"] > 0  # now there is time to spare


@pytest.mark.usefixtures("both_stores")
def test_room_goes_to_keys_that_have_lines(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for number in range(6):
            make(store, f"few{number}", 1, DAY_S)
        make(store, "many", 50, DAY_S)
        had = work(store, 1, room=16)
        assert had.pop("many") == 10 and set(had.values()) == {1}
