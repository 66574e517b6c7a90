"""CPU threads: the choice as a function of measured facts, and the load that it is made from."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightserve.config import ServeConfig
from lightserve.worker.threads import (
    NUM_QUIET_WINDOWS,
    WEIGHTS_PER_THREAD,
    Cores,
    CpuTimes,
    LoadWatch,
    Threads,
    adapted_threads,
    cores_had,
    cores_left,
    next_threads,
    read_cpu_times,
    set_threads,
    threads_for,
)

TWO = Cores(num_allowed=2, num_usable=2, num_ranks=1)


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
    ("now", "had", "left", "most", "expected"),
    [
        (2, 2.0, [2.0], 2, 2),
        (2, 1.45, [1.45], 2, 2),  # what the router, frontends and a client do
        (2, 1.9, [0.0], 2, 2),  # others had cores while it slept
        (2, 1.33, [1.33], 2, 1),  # one busy process
        (2, 0.1, [0.0], 2, 1),  # there is always one
        (1, 0.5, [0.0] * 3, 2, 1),
        (1, 1.0, [2.0], 2, 1),  # not at once
        (1, 1.0, [2.0] * 2, 2, 2),
        (1, 1.0, [1.0, 2.0], 2, 1),
        (1, 1.0, [1.5] * 2, 2, 2),
        (1, 1.0, [1.45] * 2, 2, 1),  # enough to stay, not to begin
        (1, 0.3, [2.0] * 2, 2, 1),  # it has not even one
        (16, 9.5, [9.5], 16, 9),
        (4, 4.0, [9.5] * 2, 16, 10),
        (4, 4.0, [64.0] * 2, 16, 16),
    ],
)
def test_the_next_number(
    now: int, had: float, left: Sequence[float], most: int, expected: int
) -> None:
    assert next_threads(now, had, left, most) == expected


@given(now=st.integers(1, 64), others=st.floats(0.0, 64.0), most=st.integers(1, 64))
def test_a_steady_load_is_answered_for_good(now: int, others: float, most: int) -> None:
    seen = [min(now, most)]
    for _ in range(64):
        had = seen[-1] * min(1.0, most / max(1e-9, seen[-1] + others))
        left = max(0.0, most - others)
        seen.append(next_threads(seen[-1], had, [left] * NUM_QUIET_WINDOWS, most))
    assert all(1 <= number <= most for number in seen)
    assert seen[-1] == seen[-2]


class _Machine:
    """Two cores of which others keep some busy; a worker that keeps its threads busy."""

    def __init__(self) -> None:
        self.others = 0.0
        self.used: list[int] = []
        self.num_reads = 0
        self._busy_s = self._own_s = self._kept_s = self._at_s = 0.0
        self._num_threads = 2

    def use(self, number: int) -> None:
        self._num_threads = number
        self.used.append(number)

    def advance(self, seconds: float) -> float:
        self._at_s += seconds
        wanted = self._num_threads + self.others
        share = min(1.0, 2.0 / wanted)
        self._busy_s += wanted * share * seconds
        self._own_s += self._num_threads * share * seconds
        self._kept_s += self._num_threads * (1.0 - share) * seconds
        return self._at_s

    def sleep(self, seconds: float) -> float:
        self._at_s += seconds
        self._busy_s += min(2.0, self.others) * seconds
        return self._at_s

    def read(self) -> CpuTimes:
        self.num_reads += 1
        return _times(self._at_s, busy_s=self._busy_s, own_s=self._own_s, kept_s=self._kept_s)


def _run(threads: Threads, machine: _Machine, seconds: float) -> None:
    for _ in range(round(seconds * 100)):
        threads.adapt(machine.advance(0.01), 0.0)


@pytest.mark.parametrize("others", [1.0, 3.0, 10.0])
def test_threads_go_with_the_load_and_come_back(
    others: float, caplog: pytest.LogCaptureFixture
) -> None:
    machine = _Machine()
    threads = Threads(2, TWO, is_logged=True, read=machine.read, use=machine.use)
    with caplog.at_level(logging.INFO):
        _run(threads, machine, 5.0)
        assert machine.used == []
        machine.others = others
        _run(threads, machine, 30.0)
        assert machine.used == [1]
        machine.others = 0.1
        _run(threads, machine, 30.0)
    assert machine.used == [1, 2]
    assert machine.num_reads == pytest.approx(255, abs=8)  # four a second, not at every step
    (line,) = caplog.messages  # the second change came within a minute
    assert "of 2 cores to each worker: 1 CPU threads instead of 2" in line


def test_they_are_back_half_a_second_after_the_machine_is_free() -> None:
    machine = _Machine()
    threads = Threads(2, TWO, is_logged=False, read=machine.read, use=machine.use)
    machine.others = 2.0
    _run(threads, machine, 3.0)
    assert machine.used == [1]
    machine.others = 0.0
    _run(threads, machine, 0.8)
    assert machine.used == [1, 2]


def test_a_time_without_plans_says_nothing_about_now() -> None:
    machine = _Machine()
    threads = Threads(2, TWO, is_logged=False, read=machine.read, use=machine.use)
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
    assert machine.used == [1, 2], "it begins anew"


@pytest.mark.parametrize("readings", [[], [CpuTimes(0, 0, 0, 0, 0), CpuTimes(1, 0, 0, 1, 0)]])
def test_a_system_that_does_not_tell_its_load(
    readings: list[CpuTimes], caplog: pytest.LogCaptureFixture
) -> None:
    left: Iterator[CpuTimes] = iter(readings)

    def read() -> CpuTimes:
        for reading in left:
            return reading
        raise OSError("no such file")

    threads = Threads(2, TWO, is_logged=True, read=read, use=lambda number: pytest.fail("used"))
    for number in range(5):
        threads.adapt(2.0 * number, 0.0)
    threads.adapt(20.0, 9.0)
    assert caplog.messages == ["the machine's load cannot be read: CPU threads stay at 2"]


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
    assert _lines(config, caplog) == [f"{start}4; fewer while other processes need the cores"]


@pytest.mark.parametrize(
    "config", [ServeConfig(num_threads=2), ServeConfig(batch_invariant=True)], ids=str
)
def test_a_number_that_is_promised_stays(config: ServeConfig) -> None:
    assert adapted_threads(config, torch.device("cpu"), is_first_rank=False) is None
