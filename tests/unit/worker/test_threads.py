"""CPU threads: the choice as a function of measured facts, and the load that it is made from."""

from __future__ import annotations

import logging
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightserve.config import ServeConfig
from lightserve.worker.threads import (
    WEIGHTS_PER_THREAD,
    Cores,
    CpuTimes,
    LoadWatch,
    Threads,
    adapted_threads,
    cores_had,
    cores_left,
    fastest_threads,
    other_threads,
    read_cpu_times,
    set_threads,
    threads_for,
)

TWO = Cores(num_allowed=2, num_usable=2, num_ranks=1)
EIGHT = Cores(num_allowed=8, num_usable=8, num_ranks=1)


@pytest.mark.parametrize(
    ("num_weights", "cores", "expected"),
    [
        (3_737_856, TWO, 1),  # the bundled model
        (15_000_000, Cores(64, 64, 1), 1),
        (153_000_000, TWO, 2),
        (153_000_000, Cores(64, 64, 1), 19),
        (500_000_000, Cores(64, 64, 1), 62),
        (7_000_000_000, Cores(64, 64, 1), 64),
        (7_000_000_000, Cores(64, 64, 4), 16),
        (7_000_000_000, Cores(64, 6, 4), 1),  # a container's limit
        (7_000_000_000, Cores(2, 2, 4), 1),
    ],
)
def test_threads_on_a_quiet_machine(num_weights: int, cores: Cores, expected: int) -> None:
    assert threads_for(num_weights, cores) == expected


def _times(
    at_s: float, *, busy_s: float, own_s: float, num_cores: int = 2, kept_s: float = 0.0
) -> CpuTimes:
    return CpuTimes(at_s, busy_s, num_cores * at_s - busy_s, own_s, kept_s)


@pytest.mark.parametrize(
    ("cores", "busy_s", "own_s", "expected"),
    [
        (TWO, 0.0, 0.0, 2.0),
        (TWO, 2.0, 2.0, 2.0),  # its own work is no other load
        (TWO, 2.0, 0.8, 0.8),  # three busy processes beside two threads
        (TWO, 2.0, 0.0, 0.0),
        (TWO, 1.0, 1.1, 2.0),  # ticks are coarse
        (Cores(64, 64, 1), 10.0, 2.0, 56.0),
        (Cores(64, 4, 1), 10.0, 2.0, 4.0),  # a container's limit, with room around it
        (Cores(64, 4, 1), 64.0, 1.0, 1.0),
        (Cores(8, 8, 2), 7.0, 2.0, 2.5),  # the other rank uses as much
    ],
)
def test_what_others_leave(cores: Cores, busy_s: float, own_s: float, expected: float) -> None:
    before = _times(10.0, busy_s=1.0, own_s=5.0, num_cores=cores.num_allowed)
    after = _times(11.0, busy_s=1.0 + busy_s, own_s=5.0 + own_s, num_cores=cores.num_allowed)
    assert cores_left(before, after, cores) == pytest.approx(expected)


def test_clocks_that_stand_still_say_nothing() -> None:
    still = CpuTimes(1.0, 0.0, 0.0, 0.5, 0.0)
    assert cores_left(still, still._replace(at_s=2.0, own_s=1.0), TWO) is None
    assert cores_had(still, still._replace(at_s=2.0, kept_s=1.0), 2) is None


@pytest.mark.parametrize(
    ("own_s", "kept_s", "expected"), [(2.0, 0.0, 2.0), (1.5, 0.5, 1.5), (0.3, 0.3, 1.0)]
)
def test_cores_that_threads_had(own_s: float, kept_s: float, expected: float) -> None:
    before = _times(10.0, busy_s=1.0, own_s=5.0, kept_s=2.0)
    after = _times(11.0, busy_s=3.0, own_s=5.0 + own_s, kept_s=2.0 + kept_s)
    assert cores_had(before, after, 2) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("now", "had", "left", "cores", "expected"),
    [
        (2, 2.0, 2.0, TWO, 0),
        (2, 1.33, 0.0, TWO, 1),  # two of three threads' turns on two cores
        (2, 1.0, 0.0, TWO, 2),
        (2, 1.16, 0.0, TWO, 1.45),  # as it was beside one process that never rests
        (2, 0.95, 0.0, TWO, 2.21),  # beside two
        (2, 0.8, 0.0, TWO, 3),  # beside three
        (2, 1.9, 0.0, TWO, 0),  # others had cores while it slept
        (8, 64 / 9, 0.0, EIGHT, 1),
        (8, 7.6, 7.9, EIGHT, 0.0),  # what the router, frontends and a client do
        (7, 7.0, 7.0, EIGHT, 1),
        (7, 7.0, 7.7, EIGHT, 0.3),
        (4, 4.0, 5.0, EIGHT, 3),
        (4, 3.0, 5.0, EIGHT, 6.67),
        (2, 16 / 9, 0.0, Cores(8, 8, 2), 5),  # the other rank has two threads as well
        (2, 2.0, 1.5, Cores(8, 8, 2), 4),  # not more than leave all their cores
        (4, 4.0, 4.0, Cores(64, 4, 1), 60),  # a container's limit
    ],
)
def test_threads_of_others_are_known_from_its_own(
    now: int, had: float, left: float, cores: Cores, expected: float
) -> None:
    assert other_threads(now, had, left, cores) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(
    ("cores", "most", "expected"),
    [
        # beside 0, 1, 2, … threads of others
        (EIGHT, 8, [8, 7, 6, 5, 8, 8, 8, 8, 8, 7]),
        (EIGHT, 3, [3] * 6 + [2, 3, 3, 3]),
        (Cores(4, 4, 1), 4, [4, 3, 4, 4, 4, 3, 4]),
        (Cores(8, 8, 2), 4, [4, 3, 3, 4, 4, 4, 4]),
        (Cores(64, 4, 1), 4, [4] * 61 + [3, 4]),
    ],
)
def test_the_fastest_number(cores: Cores, most: int, expected: list[int]) -> None:
    assert [fastest_threads(most, others, cores) for others in range(len(expected))] == expected


@given(others=st.floats(0.0, 500.0), each=st.integers(2, 64), num_ranks=st.integers(1, 8))
def test_two_threads_never_become_one(others: int, each: int, num_ranks: int) -> None:
    cores = Cores(each * num_ranks, each * num_ranks, num_ranks)
    assert fastest_threads(2, others, cores) == 2


@given(others=st.integers(0, 64), most=st.integers(1, 64))
def test_a_steady_load_is_answered_for_good(others: int, most: int) -> None:
    cores, seen = Cores(most, most, 1), [most]
    for _ in range(4):
        had = seen[-1] * min(1.0, most / (seen[-1] + others))
        left = max(0.0, most - others)
        seen.append(fastest_threads(most, other_threads(seen[-1], had, left, cores), cores))
    assert all(1 <= number <= most for number in seen)
    assert len(set(seen[1:])) == 1


class _Machine:
    """Eight cores of which others keep some busy; a worker that keeps its threads busy."""

    def __init__(self) -> None:
        self.others = 0.0
        self.used: list[int] = []
        self.num_reads = 0
        self._busy_s = self._own_s = self._kept_s = self._at_s = 0.0
        self._num_threads = 8

    def use(self, number: int) -> None:
        self._num_threads = number
        self.used.append(number)

    def advance(self, seconds: float) -> float:
        self._at_s += seconds
        wanted = self._num_threads + self.others
        share = min(1.0, 8.0 / wanted)
        self._busy_s += wanted * share * seconds
        self._own_s += self._num_threads * share * seconds
        self._kept_s += self._num_threads * (1.0 - share) * seconds
        return self._at_s

    def sleep(self, seconds: float) -> float:
        self._at_s += seconds
        self._busy_s += min(8.0, self.others) * seconds
        return self._at_s

    def read(self) -> CpuTimes:
        self.num_reads += 1
        return _times(
            self._at_s,
            busy_s=self._busy_s,
            own_s=self._own_s,
            num_cores=8,
            kept_s=self._kept_s,
        )


def _run(threads: Threads, machine: _Machine, seconds: float) -> None:
    for _ in range(round(seconds * 100)):
        threads.adapt(machine.advance(0.01), 0.0)


@pytest.mark.parametrize(("others", "number"), [(1.0, 7), (2.9, 5), (10.0, 6)])
def test_threads_go_with_the_load_and_come_back(
    others: float, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    machine = _Machine()
    threads = Threads(8, EIGHT, is_logged=True, read=machine.read, use=machine.use)
    with caplog.at_level(logging.INFO):
        _run(threads, machine, 5.0)
        assert machine.used == []
        machine.others = others
        _run(threads, machine, 30.0)
        assert machine.used[-1] == number
        assert len(machine.used) <= 2, "the load began within a window"
        machine.others = 0.1
        _run(threads, machine, 30.0)
    assert machine.used[-1] == 8
    assert len(machine.used) <= 4
    assert machine.num_reads == pytest.approx(255, abs=8)  # four a second, not at every step
    (line,) = caplog.messages  # the second change came within a minute
    assert "that want one of the 8 cores: " in line and line.endswith("instead of 8")


def test_all_threads_stay_where_fewer_would_have_no_more() -> None:
    machine = _Machine()
    threads = Threads(8, EIGHT, is_logged=False, read=machine.read, use=machine.use)
    for machine.others in (4.0, 6.0, 8.0, 16.0):
        _run(threads, machine, 5.0)
    assert machine.used == []


def test_one_window_is_no_load() -> None:
    machine = _Machine()
    threads = Threads(8, EIGHT, is_logged=False, read=machine.read, use=machine.use)
    for number in range(40):
        machine.others = 3.0 if number % 4 == 1 else 0.0
        while machine.num_reads < number:
            _run(threads, machine, 0.01)
    assert machine.used == []


@pytest.mark.parametrize("num_processes", [1, 2, 4])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("piece_s", [0.01, 0.05])
def test_beside_bursts_it_computes_as_much_as_with_the_best_number(
    num_processes: int, share: float, piece_s: float
) -> None:
    """Others compute in pieces, as clients and readers of pictures do; a minute of them."""
    draws = random.Random(0)
    bursts: list[int] = [0] * 6000
    for _ in range(num_processes):
        at_s = 0.0
        while at_s < 60.0:
            end_s = at_s + draws.uniform(0.5, 1.5) * piece_s
            for tick in range(round(100 * at_s), min(6000, round(100 * end_s))):
                bursts[tick] += 1
            at_s = end_s + draws.uniform(0.5, 1.5) * piece_s * (1 - share) / share

    def work(number: int, others: int) -> float:
        return number / math.ceil((number + others) / 8)

    machine, done = _Machine(), 0.0
    threads = Threads(8, EIGHT, is_logged=False, read=machine.read, use=machine.use)
    for machine.others in bursts:
        done += work(machine.used[-1] if machine.used else 8, round(machine.others))
        threads.adapt(machine.advance(0.01), 0.0)
    best = max(sum(work(number, others) for others in bursts) for number in range(1, 9))
    assert done > 0.9 * best
    assert len(machine.used) < 60, "not once a second"


def test_they_are_back_half_a_second_after_the_machine_is_free() -> None:
    machine = _Machine()
    threads = Threads(8, EIGHT, is_logged=False, read=machine.read, use=machine.use)
    machine.others = 2.0
    _run(threads, machine, 3.0)
    assert machine.used == [6]
    machine.others = 0.0
    _run(threads, machine, 0.8)
    assert machine.used == [6, 8]


def test_two_threads_stay_two_and_the_load_is_not_read() -> None:
    threads = Threads(
        2,
        TWO,
        is_logged=False,
        read=lambda: pytest.fail("read"),
        use=lambda number: pytest.fail("used"),
    )
    for number in range(100):
        threads.adapt(0.1 * number, 9.0 * (number % 7 == 0))


def test_a_time_without_plans_says_nothing_about_now() -> None:
    machine = _Machine()
    threads = Threads(8, EIGHT, is_logged=False, read=machine.read, use=machine.use)
    _run(threads, machine, 2.0)
    machine.others = 3.0
    threads.adapt(machine.sleep(0.4), 0.4)
    _run(threads, machine, 0.1)
    threads.adapt(machine.sleep(3600.0), 3600.0)
    machine.others = 0.0
    _run(threads, machine, 3.0)
    assert machine.used == []
    machine.others = 3.0
    _run(threads, machine, 1.0)
    threads.adapt(machine.sleep(1.0), 1.0)
    assert machine.used == [5, 8], "it begins anew"


@pytest.mark.parametrize("readings", [[], [CpuTimes(0, 0, 0, 0, 0), CpuTimes(1, 0, 0, 1, 0)]])
def test_a_system_that_does_not_tell_its_load(
    readings: list[CpuTimes], caplog: pytest.LogCaptureFixture
) -> None:
    left: Iterator[CpuTimes] = iter(readings)

    def read() -> CpuTimes:
        for reading in left:
            return reading
        raise OSError("no such file")

    threads = Threads(8, EIGHT, is_logged=True, read=read, use=lambda number: pytest.fail("used"))
    for number in range(5):
        threads.adapt(2.0 * number, 0.0)
    threads.adapt(20.0, 9.0)
    assert caplog.messages == ["the machine's load cannot be read: CPU threads stay at 8"]


def test_the_clocks_of_the_allowed_cores_are_read(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    for task, line in ((7, "50 1000000000 3"), (8, "60 500000000 4")):
        (tmp_path / f"proc/self/task/{task}").mkdir(parents=True)
        (tmp_path / f"proc/self/task/{task}/schedstat").write_text(line)
    (tmp_path / "proc/self/task/9").mkdir()  # one that has just ended
    (tmp_path / "proc/stat").write_text(
        "cpu  900 0 0 900 0 0 0 0 0 0\n"
        f"cpu{core} 100 20 30 400 50 6 7 8 5 1\n"
        "cpu9999 900 0 0 900 0 0 0 0 0 0\n"
        "intr 1 2 3\n"
    )
    times = read_cpu_times(tmp_path)
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    assert (times.busy_s, times.idle_s) == pytest.approx((171 * tick_s, 450 * tick_s))
    assert times.kept_s == pytest.approx(1.5)


def test_this_machine_tells_its_load() -> None:
    assert read_cpu_times().at_s <= read_cpu_times().at_s


@pytest.mark.parametrize(("num_threads", "expected"), [(1, 0.6), (2, 0.8)])
def test_what_a_measurement_was_short_of(
    num_threads: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightserve.worker.threads._cores", lambda config: TWO)
    readings = [_times(0.0, busy_s=0.0, own_s=0.0), _times(10.0, busy_s=20.0, own_s=4.0)]
    watch = LoadWatch(ServeConfig(), lambda: readings.pop(0))
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert watch.crowding() == pytest.approx(expected)
    finally:
        torch.set_num_threads(before)


def _lines(config: ServeConfig, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    before = torch.get_num_threads()
    try:
        with caplog.at_level(logging.INFO):
            set_threads(config)
            adapted_threads(config, torch.device("cpu"), is_first_rank=True)
    finally:
        torch.set_num_threads(before)
    return caplog.messages


def test_the_log_says_what_it_begins_with(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightserve.worker.threads.usable_cores", lambda: 4)
    start = "CPU threads of each worker: "
    config = ServeConfig()
    assert _lines(config, caplog) == [f"{start}1: the model is too small for more of the 4 cores"]
    assert _lines(ServeConfig(num_threads=3), caplog) == [f"{start}3, by --num-threads"]
    monkeypatch.setattr("lightserve.worker.threads.WEIGHTS_PER_THREAD", WEIGHTS_PER_THREAD // 16)
    assert _lines(config, caplog) == [
        f"{start}4; fewer where that is faster beside other processes"
    ]


@pytest.mark.parametrize(
    "config", [ServeConfig(num_threads=2), ServeConfig(batch_invariant=True)], ids=str
)
def test_a_number_that_is_promised_stays(config: ServeConfig) -> None:
    assert adapted_threads(config, torch.device("cpu"), is_first_rank=False) is None
